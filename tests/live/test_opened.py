"""An open checkpoint as a mapping: its tensors beside those that torch, safetensors and numpy read,
parts of them beside numpy's own.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import save as save_dcp

from ckptconv import (
    CheckpointError,
    DeviceUnavailable,
    Drop,
    MalformedCheckpoint,
    MissingTensor,
    OptionRefused,
    convert_checkpoint,
    open_checkpoint,
    stats,
)
from ckptconv.tensors.dtypes import BY_NAME
from helpers.http_server import HttpServer
from helpers.reads import counted_reads

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.complex32, torch.int64, torch.int8, torch.uint8,
    torch.uint16, torch.bool,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "layer.weight": torch.randn(6, 5),
        "layer.bias": torch.randn(6).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "ints": torch.arange(24).reshape(2, 3, 4),
    }


def saved(kind: str, folder, found: dict[str, torch.Tensor]):
    """A file or folder of a kind, by the library that makes it."""
    path = folder / f"m.{kind}"
    if kind == "safetensors":
        save_file(found, path)
    elif kind == "shards":
        save_file({key: found[key] for key in [*found][:2]}, folder / "a.safetensors")
        save_file({key: found[key] for key in [*found][2:]}, folder / "b.safetensors")
        path = folder / "model.safetensors.index.json"
        names = {key: "a" if at < 2 else "b" for at, key in enumerate(found)}
        entries = ", ".join(f'"{key}": "{name}.safetensors"' for key, name in names.items())
        path.write_text(f'{{"weight_map": {{{entries}}}}}')
    elif kind == "npz":
        np.savez(path, **{key: value.float().numpy() for key, value in found.items()})
    elif kind == "torchscript":
        holder = torch.nn.Module()
        for key, value in found.items():
            holder.register_buffer(key.replace(".", "_"), value)
        torch.jit.script(holder).save(path)
    elif kind == "dcp":
        save_dcp(found, checkpoint_id=path, no_dist=True)
    else:
        torch.save(found, path, _use_new_zipfile_serialization=kind != "legacy")
        if kind == "pt.gz":
            import gzip

            path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def names_in(path, kind: str, found: dict[str, torch.Tensor]) -> list[str]:
    """The names in the order of the file: that of the header, or in which they were saved."""
    if kind != "safetensors":
        return [*found]
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return [name for name in header if name != "__metadata__"]


KINDS = ["pt", "legacy", "pt.gz", "safetensors", "shards", "npz", "dcp", "torchscript"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_container_is_a_mapping_to_what_was_saved(kind, tmp_path):
    found = tensors()
    if kind == "torchscript":  # no attribute has a dot
        found = {key.replace(".", "_"): value for key, value in found.items()}
    path = saved(kind, tmp_path, found)
    with open_checkpoint(path) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert {*checkpoint} == found.keys() and len(checkpoint) == len(found)
        if kind not in ("dcp", "shards"):  # which list the names in an order of their own
            assert [*checkpoint] == names_in(path, kind, found)
        for key, value in found.items():
            value = value.float() if kind == "npz" else value
            item = checkpoint[key]
            assert key in checkpoint and item.shape == tuple(value.shape)
            assert repr(item.dtype) == f"DType('{str(value.dtype).removeprefix('torch.')}')"
            assert item.dtype == value.dtype and item.nbytes == value.nbytes
            made = item.torch()
            assert made.dtype is value.dtype and torch.equal(made, value)
            assert np.array_equal(np.asarray(item, "f8"), value.double().numpy())
            assert (
                np.asarray(item).dtype == item.numpy().dtype
                and np.asarray(item, "f4").dtype == "f4"
            )
            with pytest.raises(ValueError, match="always a copy"):
                item.__array__(copy=False)
    assert dict(checkpoint.items()).keys() == found.keys()  # names are known after it is closed


def test_it_is_what_safe_open_is(tmp_path):
    found = tensors()
    save_file(found, tmp_path / "m.safetensors")
    with (
        safe_open(tmp_path / "m.safetensors", "pt") as theirs,
        open_checkpoint(tmp_path / "m.safetensors") as ours,
    ):
        assert {*ours} == {*theirs.keys()}
        for key in theirs.keys():  # noqa: SIM118 (a safe_open is no mapping)
            assert torch.equal(ours[key].torch(), theirs.get_tensor(key))
            if len(ours[key].shape) == 2:
                part = theirs.get_slice(key)[0:2, 1:]
                assert torch.equal(ours[key][0:2, 1:].torch(), part)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_as_itself(dtype, tmp_path):
    value = torch.arange(24).reshape(4, 6).to(torch.float32).to(dtype)
    torch.save({"w": value}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        item = checkpoint["w"]
        assert item.dtype == dtype and item.dtype == str(dtype).removeprefix("torch.")
        for index in (..., 1, (slice(None, None, -2), 3)):
            picked = np.arange(24).reshape(4, 6)[index]
            expected = torch.from_numpy(np.array(picked)).to(torch.float32).to(dtype)
            made = item[index].torch()
            assert made.dtype is dtype and made.shape == expected.shape
            assert torch.equal(made.to(torch.complex64), expected.to(torch.complex64))


def test_types_equal_their_names_and_those_of_numpy_and_torch():
    bf16, f4 = BY_NAME["bfloat16"], BY_NAME["float32"]
    assert bf16 == "bfloat16" and bf16 == torch.bfloat16 and bf16 == ml_dtypes.bfloat16
    assert f4 == np.float32 and f4 == np.dtype("f4") and f4 == "torch.float32"
    for other in (torch.float64, np.float64, np.dtype("f8"), "float64", None, 4, bf16):
        assert f4 != other
    assert len({f4, bf16, BY_NAME["float32"]}) == 2


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    path = tmp_path_factory.mktemp("numbers") / "m.pt"
    whole = torch.arange(5 * 4 * 7.0).reshape(5, 4, 7)
    torch.save({"w": whole.permute(1, 0, 2)}, path)
    with open_checkpoint(path) as checkpoint:
        yield checkpoint["w"], whole.permute(1, 0, 2).numpy()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_parts_and_parts_of_parts_are_numpys(numbers, data):
    tensor, whole = numbers
    first = data.draw(basic_indices(whole.shape))
    part, expected = tensor[first], whole[first]
    assert part.shape == expected.shape
    second = data.draw(basic_indices(expected.shape))
    again = part[second]
    assert np.array_equal(again.numpy(), expected[second]) and again.shape == expected[second].shape


NO_INDICES = [
    "a", 9, -5, None, True, 1.0, [1], slice(None, None, 0), (0, 0, 0, 0), (..., ...), slice("a"),
    np.array([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("index", NO_INDICES, ids=repr)
def test_what_is_not_an_index_is_refused(index, numbers):
    with pytest.raises(OptionRefused, match="the index of w"):
        numbers[0][index]


def test_rows_and_their_number(numbers):
    tensor, whole = numbers
    assert len(tensor) == len(whole) == len([*tensor]) and bool(tensor)
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(tensor, whole, strict=True))
    with pytest.raises(TypeError, match="no dimensions"):
        len(tensor[0, 0, 0])


def test_a_name_that_is_not_there(tmp_path):
    torch.save(tensors(), tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert "bias" not in checkpoint and checkpoint.get("bias") is None
        with pytest.raises(MissingTensor, match=r"m\.pt: layer\.wieght: .* did you mean layer\.w"):
            checkpoint["layer.wieght"]
        with pytest.raises(KeyError):
            checkpoint["weight"]  # the end of a name is enough for `show`, not here
        assert 3 not in checkpoint and checkpoint.get(3) is None
        with pytest.raises(KeyError, match="3 is not the name of a tensor"):
            checkpoint[3]


def test_only_what_a_part_needs_is_read(tmp_path):
    save_file({"w": torch.arange(4_000_000.0).reshape(1000, 4000)}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint, counted_reads() as reads:
        item = checkpoint["w"]
        assert reads.nbytes == 0
        assert item[7, 5:8].numpy().tolist() == [28005.0, 28006.0, 28007.0]
        assert reads.nbytes < 100_000


def test_only_what_a_part_needs_is_fetched(tmp_path):
    save_file({"w": torch.arange(4_000_000.0).reshape(1000, 4000)}, tmp_path / "m.safetensors")
    with HttpServer({"/m.safetensors": (tmp_path / "m.safetensors").read_bytes()}) as server:
        with open_checkpoint(f"http://127.0.0.1:{server.port}/m.safetensors") as checkpoint:
            assert checkpoint["w"][999, -1].torch() == 3_999_999
        assert server.sent < 3_000_000


def test_a_flipped_byte_is_seen_in_the_whole(tmp_path):
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    raw[raw.index(np.arange(500, 510, dtype="<f4").tobytes())] ^= 1
    (tmp_path / "m.pt").write_bytes(raw)
    assert zipfile.ZipFile(tmp_path / "m.pt").testzip() is not None
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert checkpoint["b"].torch().tolist() == [1, 1, 1]
        for way in ("numpy", "torch", "stats"):
            with pytest.raises(MalformedCheckpoint, match=r"m\.pt: .*CRC-32"):
                getattr(checkpoint["a"], way)()
        assert checkpoint["a"][:3].numpy().tolist() == [0, 1, 2]


def test_a_file_that_is_closed_or_has_changed_is_told(tmp_path):
    torch.save({"a": torch.arange(10.0)}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        item = checkpoint["a"]
    with pytest.raises(CheckpointError, match=r"m\.pt"):
        item.numpy()
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        with (tmp_path / "m.pt").open("r+b") as file:
            file.write(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match="changed"):
            checkpoint["a"].numpy()


@pytest.mark.filterwarnings("ignore")
def test_quantized_values_are_decoded_as_torch_decodes_them(tmp_path):
    whole = torch.randn(6, 10)
    found = {
        "q": torch.quantize_per_tensor(whole, 0.1, 7, torch.quint8),
        "wide": torch.quantize_per_tensor(whole, 0.001, 0, torch.qint32),
        "c": torch.quantize_per_channel(
            whole, torch.rand(10) + 0.1, torch.arange(10), 1, torch.qint8
        ),
    }
    torch.save(found, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        for key, value in found.items():
            item = checkpoint[key]
            assert item.dtype == value.dtype and item.nbytes == value.int_repr().nbytes
            assert item[0].nbytes * 6 == item.nbytes
            assert torch.equal(item.torch(), value.dequantize())
            assert np.array_equal(item[1:3, ::2].numpy(), value.dequantize()[1:3, ::2].numpy())


def test_tensors_of_tensors_are_their_parts(tmp_path):
    value = torch.tensor([[0, 1.5], [2.5, 0]]).to_sparse()
    torch.save({"s": value, "w": torch.ones(2)}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert [*checkpoint] == ["s.indices", "s.values", "w"]
        assert torch.equal(checkpoint["s.indices"].torch(), value.indices())
        assert torch.equal(checkpoint["s.values"].torch(), value.values())


def test_a_name_that_two_tensors_have_is_not_chosen(tmp_path):
    torch.save([torch.ones(1), {0: torch.ones(2), "0": torch.ones(3)}], tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert [*checkpoint] == ["0", "1.0"] and checkpoint["0"].shape == (1,)
        with pytest.raises(MissingTensor, match="2 tensors have this name"):
            checkpoint["1.0"]


def test_statistics_are_those_of_stats(tmp_path):
    torch.save(tensors(), tmp_path / "m.pt")
    known = {item.name: item for item in stats(tmp_path / "m.pt").tensors}
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        for name, item in checkpoint.items():
            assert item.stats() == known[name]
        with pytest.raises(OptionRefused, match="only a part"):
            checkpoint["layer.weight"][0].stats()


def test_edits_and_what_is_read_again_have_it_too(tmp_path):
    torch.save({"model": tensors(), "optimizer": {"m": torch.ones(2)}}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt", edits=[Drop("optimizer")]) as checkpoint:
        assert {*checkpoint} == {f"model.{key}" for key in tensors()}
        assert checkpoint.certain()["model.scalar"].torch() == 3.5
        assert checkpoint.tree is checkpoint.root


def test_a_device_that_is_not_here(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        assert checkpoint["w"].torch(torch.device("cpu")).device.type == "cpu"
        with pytest.raises(DeviceUnavailable):
            checkpoint["w"].torch("nonsense:3")


def test_tied_and_transposed_tensors_have_their_own_values(tmp_path):
    embed = torch.randn(4, 3)
    torch.save({"a": embed, "b": embed, "t": embed.t(), "row": embed[1]}, tmp_path / "m.pt")
    convert_checkpoint(tmp_path / "m.pt", tmp_path / "o.pt")
    for name in ("m.pt", "o.pt"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert torch.equal(checkpoint["b"].torch(), embed)
            assert torch.equal(checkpoint["t"].torch(), embed.t())
            assert torch.equal(checkpoint["row"].torch(), embed[1])
            first = checkpoint["a"].torch()
            first += 1  # what was read belongs to who reads it
            assert torch.equal(checkpoint["a"].torch(), embed)
