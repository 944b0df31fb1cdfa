"""Elements that are not whole bytes (F6, odd F4) and every other type of safetensors: the library
itself is the oracle.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import safetensors
from safetensors import safe_open

from ckptconv import KeyRules, convert_checkpoint, diff_checkpoints, load_portable, open_checkpoint
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, RefusedObject
from helpers.program import run

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
    "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""The types of safetensors 0.8 (`Dtype` in safetensors/src/tensor.rs): bits of an element."""
PACKED = ("F6_E2M3", "F6_E3M2")
Parts = dict[str, tuple[str, list[int], bytes]]
WHOLE = {"fsync": False, "verify": True}


def write(path: Path, tensors: Parts) -> Path:
    """A safetensors file of (dtype, shape, bytes), without the library, which makes none of these
    from torch.
    """
    header, at = {}, 0
    for key, (dtype, shape, raw) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(raw for *_, raw in tensors.values())
    )
    return path


def read(path: Path) -> Parts:
    """What the library finds in a file."""
    found = safetensors.deserialize(path.read_bytes())
    return {key: (entry["dtype"], entry["shape"], bytes(entry["data"])) for key, entry in found}


def filled(dtype: str, shape: list[int], seed: int = 1) -> tuple[str, list[int], bytes]:
    nbytes = prod(shape) * BITS[dtype] // 8
    raw = bytes((at * 37 + seed) % (2 if dtype == "BOOL" else 251) for at in range(nbytes))
    return dtype, shape, raw


@pytest.fixture
def packed(tmp_path) -> tuple[Path, Parts]:
    tensors = {
        "a.weight": filled("F6_E2M3", [8, 32]),
        # four elements in three bytes: no row is whole bytes
        "b.weight": filled("F6_E3M2", [2, 2], 5),
        "c.weight": filled("F4", [2, 3]),
        "d.weight": filled("F32", [3]),
        "e.weight": filled("F6_E2M3", [0, 5]),
    }
    return write(tmp_path / "in.safetensors", tensors), tensors


@pytest.mark.parametrize("dtype", BITS)
def test_every_element_type_of_the_library_is_opened_and_copied_to_the_byte(dtype, tmp_path):
    tensors = {"w": filled(dtype, [4, 8]), "x": filled(dtype, [16], 3)}
    source = write(tmp_path / "in.safetensors", tensors)
    assert read(source) == tensors
    convert_checkpoint(source, tmp_path / "out.safetensors", **WHOLE)
    assert read(tmp_path / "out.safetensors") == tensors


def test_packed_elements_are_copied_and_split_to_the_byte(packed, tmp_path):
    source, tensors = packed
    convert_checkpoint(source, tmp_path / "out.safetensors", **WHOLE)
    assert read(tmp_path / "out.safetensors") == tensors
    convert_checkpoint(source, tmp_path / "shards", to="safetensors", max_shard_size=200, **WHOLE)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(raw) for *_, raw in tensors.values())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    assert {
        key: entry for name in names for key, entry in read(tmp_path / "shards" / name).items()
    } == tensors
    convert_checkpoint(tmp_path / "shards", tmp_path / "joined.safetensors", **WHOLE)
    assert read(tmp_path / "joined.safetensors") == tensors
    assert diff_checkpoints(source, tmp_path / "shards").same


def test_the_shape_is_shown_as_the_file_has_it(packed):
    pytest.importorskip("torch")
    source, _ = packed
    with open_checkpoint(source) as checkpoint, safe_open(source, framework="pt") as opened:
        found = {
            key: (ref.dtype.safetensors, list(ref.shape), ref.nbytes)
            for key, ref in checkpoint.tensors()
        }
        assert found == {
            key: (opened.get_slice(key).get_dtype(), opened.get_slice(key).get_shape(), len(raw))
            for key, (_, _, raw) in packed[1].items()
        }
    assert "float6_e2m3fn [8, 32]" in run("inspect", source, "--depth", "3", cwd=source.parent).out


def test_diff_sees_one_bit_and_tells_which_element_it_is_in(packed, tmp_path):
    source, tensors = packed
    dtype, shape, raw = tensors["a.weight"]
    raw = bytearray(raw)
    raw[100] ^= 0x10  # bit 804: element 134, which is [4, 6]
    other = write(
        tmp_path / "other.safetensors", {**tensors, "a.weight": (dtype, shape, bytes(raw))}
    )
    found = diff_checkpoints(source, other)
    assert [
        (change.key, change.deviation.count, change.deviation.where) for change in found.values
    ] == [("a.weight", 1, (4, 6))]
    assert found.values[0].deviation.max_abs is None and found.values[0].deviation.numel == 256


def test_packed_elements_are_never_the_same_as_numbers_of_another_type(packed, tmp_path):
    source, tensors = packed
    other = write(tmp_path / "other.safetensors", {**tensors, "a.weight": filled("F32", [8, 32])})
    assert not diff_checkpoints(source, other, ignore_dtype=True).same


def test_a_large_packed_tensor_is_compared_across_chunks(tmp_path):
    shape = [1 << 20, 4]  # 3 MiB, whose chunks of 1 MiB end within elements
    first = write(tmp_path / "a.safetensors", {"w": filled("F6_E3M2", shape)})
    raw = bytearray(filled("F6_E3M2", shape)[2])
    raw[-1] ^= 0x80
    second = write(tmp_path / "b.safetensors", {"w": ("F6_E3M2", shape, bytes(raw))})
    (change,) = diff_checkpoints(first, second).values
    assert (change.deviation.count, change.deviation.where) == (1, ((1 << 20) - 1, 3))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 100}, {"to": "dcp"}])
def test_a_torch_output_of_them_is_refused_with_the_key(packed, tmp_path, options):
    with pytest.raises(
        RefusedObject,
        match=r"a\.weight: torch has no dtype float6_e2m3fn; .*--to safetensors.*--exclude",
    ):
        convert_checkpoint(packed[0], tmp_path / "out.pt", fsync=False, **options)
    assert {item.name for item in tmp_path.iterdir()} == {"in.safetensors"}
    left = KeyRules(exclude=("a.*", "b.*", "c.*", "e.*"))
    convert_checkpoint(packed[0], tmp_path / "out.pt", keys=left, fsync=False)


def test_loading_them_is_refused_with_the_key(packed):
    pytest.importorskip("torch")
    with pytest.raises(RefusedObject, match=r"a\.weight: torch has no dtype float6_e2m3fn"):
        load_portable(packed[0])
    assert list(load_portable(packed[0], keys=KeyRules(include=("d.*",)))) == ["d.weight"]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (("F6_E2M3", [3], b"abc"), "3 elements of 6 bits do not fill whole bytes"),
        (("F6_E2M3", [], b"a"), "1 elements of 6 bits"),
        (("F6_E2M3", [4], b"ab"), "needs 3 bytes"),
        (("F6_E2M3", [8], b"abcdefgh"), "needs 6 bytes"),
        (("F4", [3], b"ab"), "3 elements of 4 bits"),
        (("F4", [], b"a"), "1 elements of 4 bits"),
        (("F6_E2M3", [1 << 62, 1 << 62], b"a"), "overflows"),
        (("F6_E4M1", [4], b"abc"), "unknown dtype"),
    ],
)
def test_what_the_library_refuses_of_them_is_refused(entry, told, tmp_path):
    path = write(tmp_path / "bad.safetensors", {"w": entry})
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(path.read_bytes())
    with pytest.raises(CheckpointError, match=told) as caught:
        open_checkpoint(path)
    assert type(caught.value) is MalformedCheckpoint and caught.value.where == "w"
