"""Values of one tensor, held against what numpy prints of what torch loads."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptconv import OptionRefused, open_checkpoint
from ckptconv.io.files import FileSource
from ckptconv.values.named import named_values
from ckptconv.values.picking import box_of, picked, shown_text, values_of
from helpers.program import run

SHAPES = [(), (1,), (5,), (3, 4), (40, 60), (7, 3, 9), (2, 9, 8, 10), (0, 3), (2000,)]
INDICES = [
    "", "[...]", "[0]", "[-1]", "[1:]", "[::-1]", "[::2]", "[..., 0]", "[0:3, :5]", "[-3:-1, ...]",
    "[5:2:-1]", "[:, -1]", "[2:2]", "[0, 0]", "[:, ::-3]", "[0,]", " 1 : 3 ",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    generator = torch.Generator().manual_seed(5)
    tensors = {f"t{at}.weight": torch.randn(shape, generator=generator) for at, shape in
               enumerate(SHAPES)}  # fmt: skip
    tensors["strided"] = torch.randn(50, 40, generator=generator).t()[3:30:2]
    tensors["ints"] = torch.arange(3000).reshape(30, 100)
    tensors["flags"] = torch.tensor([True, False])
    torch.save(tensors, folder / "m.pt")
    return folder, tensors


@pytest.mark.parametrize("text", INDICES)
def test_parts_are_those_of_numpy(model, text):
    folder, tensors = model
    shown = 0
    with open_checkpoint(folder / "m.pt") as checkpoint:
        for item in named_values(checkpoint).values:
            whole = tensors[item.name].numpy()
            index = eval(f"np.s_[{text.strip().strip('[]') or '...'}]", {"np": np})
            try:
                expected = whole[index]
            except IndexError:
                with pytest.raises(OptionRefused):
                    box_of(text, item.ref.shape)
                continue
            box = box_of(text, item.ref.shape)
            assert box.shape == expected.shape, (item.name, text)
            assert np.array_equal(values_of(item, box), expected), (item.name, text)
            with np.printoptions(linewidth=100):
                assert shown_text(item, box) == np.array2string(np.asarray(expected)), item.name
            shown += 1
    assert shown >= 5


@pytest.mark.parametrize(
    "text", ["[x]", "[1.5]", "[0:1:0]", "[[0]]", "[..., ...]", "[0, 0, 0]", "[,]", "[99]", "[-9]",
             "[:::]", "[1" + "0" * 30 + "]", "[None]", "[0;1]", "[1-2]", "[0:3-1]",
             "[0:2,1-3]", "[1", "1]", "]", "[1 2]", "[- 1]"]
)  # fmt: skip
def test_what_is_not_an_index_is_refused(text):
    with pytest.raises(OptionRefused):
        box_of(text, (4, 5))


def test_quantized_values_are_decoded_where_they_stand(tmp_path):
    plain = torch.randn(6, 10, 7)
    tensors = {
        "a": torch.quantize_per_tensor(plain, 0.1, 7, torch.quint8),
        "b": torch.quantize_per_channel(plain, torch.rand(10) + 0.1, torch.arange(10), 1,
                                        torch.qint8),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "q.pt")
    with open_checkpoint(tmp_path / "q.pt") as checkpoint:
        for item in named_values(checkpoint).values:
            whole = tensors[item.name].dequantize().double().numpy()
            for text in (
                "",
                "[2]",
                "[1:4:2, ::-3, 2:5]",
                "[..., 0]",
                "[0, 9, 6]",
                "[2:2]",
                "[:, :, 3:3]",
            ):
                found = values_of(item, box_of(text, (6, 10, 7)))
                index = eval(f"np.s_[{text.strip('[]') or '...'}]", {"np": np})
                assert np.array_equal(found, whole[index]), (item.name, text)


def test_values_of_less_than_a_byte_are_taken_apart_where_they_stand(tmp_path):
    plain = torch.rand(5, 3, 7) * 4
    tensors = {
        "a": torch.quantize_per_tensor(plain, 0.3, 2, torch.quint4x2),
        "b": torch.quantize_per_channel(
            plain, torch.rand(3) + 0.2, torch.rand(3), 1, torch.quint4x2
        ),
        "c": torch.quantize_per_tensor(plain, 1.0, 1, torch.quint2x4),
        "d": torch.quantize_per_tensor(plain[0, 0, 0], 1.0, 1, torch.quint4x2),
    }
    codes = torch.randint(0, 256, (5, 3, 4), dtype=torch.uint8)
    pairs = codes.view(torch.float4_e2m1fn_x2)
    torch.save(
        {**tensors, "e": pairs, "f": codes[:, 1].view(torch.float4_e2m1fn_x2)}, tmp_path / "q.pt"
    )
    wholes = {name: tensor.dequantize().double().numpy() for name, tensor in tensors.items()}
    raw = codes.numpy()
    nibbles = np.stack([raw & 15, raw >> 4], -1).reshape(5, 3, 8)
    wholes["e"] = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    wholes["f"] = wholes["e"][:, 1]
    with open_checkpoint(tmp_path / "q.pt") as checkpoint:
        for item in named_values(checkpoint).values:
            whole = wholes.pop(item.name)
            assert item.shape == whole.shape
            texts = {3: ["", "[2]", "[1:4:2, ::-2, 2:5]", "[..., 0]", "[0, 2, 6]", "[:, :, 3:3]"]}
            for text in texts.get(whole.ndim, ["", "[...]"]):
                found = values_of(item, box_of(text, item.shape))
                index = eval(f"np.s_[{text.strip('[]') or '...'}]", {"np": np})
                assert np.array_equal(found, whole[index]), (item.name, text)
    assert wholes == {}
    told = run("show", tmp_path / "q.pt", "e", "[4, 2]", cwd=tmp_path).out
    assert "float4_e2m1fn_x2  [5, 3, 8], [8] of it" in told


def test_of_a_large_tensor_only_what_is_shown_is_read(tmp_path, monkeypatch):
    torch.save({"w": torch.zeros(4096, 4096)}, tmp_path / "m.pt")
    read = 0
    whole, into = FileSource.read, FileSource.read_into

    def counted(self, offset, nbytes):
        nonlocal read
        read += nbytes
        return whole(self, offset, nbytes)

    def counted_into(self, offset, view):
        nonlocal read
        read += len(view)
        into(self, offset, view)

    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        (item,) = named_values(checkpoint).values
        monkeypatch.setattr(FileSource, "read", counted)
        monkeypatch.setattr(FileSource, "read_into", counted_into)
        assert "..." in shown_text(item, box_of("", item.ref.shape))
        assert 0 < read < 1 << 18
        read = 0
        assert not values_of(item, box_of("[7]", item.ref.shape)).any()
        assert read == 4096 * 4


def test_a_name_may_be_its_end_by_whole_words(tmp_path):
    tensors = {"a.weight": torch.ones(1), "b.weight": torch.ones(1), "b.bias": torch.ones(1)}
    torch.save({"model": tensors}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        found = named_values(checkpoint)
        assert picked(found, "b.weight", checkpoint.path).name == "model.b.weight"
        for name, message in [
            ("weight", "2 tensors have names that end in it"), ("eight", "no tensor has this name"),
            ("b.weigt", "did you mean model.b.weight"),
        ]:  # fmt: skip
            with pytest.raises(Exception, match=message):
                picked(found, name, checkpoint.path)


def test_small_floats_are_shown_as_the_numbers_they_are(tmp_path):
    numbers = torch.tensor([0.5, -3.0])
    tensors = {"w": numbers.bfloat16(), "v": numbers.to(torch.float8_e4m3fn)}
    torch.save(tensors, tmp_path / "m.pt")
    for name in "wv":
        assert run("show", "m.pt", name, cwd=tmp_path).out.splitlines()[1] == "[ 0.5 -3. ]"


@pytest.mark.parametrize("text", ["", "[0:3, ::2]"])
def test_npy_is_what_numpy_loads(model, text):
    folder, tensors = model
    done = run("show", "m.pt", "ints", text, "--npy", "o.npy", "--force", cwd=folder)
    assert done.exit == 0
    index = eval(f"np.s_[{text.strip('[]') or '...'}]", {"np": np})
    found = np.load(folder / "o.npy", allow_pickle=False)
    assert np.array_equal(found, tensors["ints"].numpy()[index]) and found.dtype == np.int64
    assert run("show", "m.pt", "ints", "--npy", "o.npy", cwd=folder).exit == 1


def test_wrong_indices_are_wrong_usage_and_nothing_is_left(model):
    folder, _ = model
    done = run("show", "m.pt", "ints", "[a]", "--npy", "never.npy", cwd=folder)
    assert done.exit == 2 and "as numpy does" in done.err and not (folder / "never.npy").exists()


# ---------------------------------------------------------------------------------- several at once


def test_npz_is_what_numpy_loads(model):
    folder, tensors = model
    names = [
        "t3.weight",
        "strided",
        "[1:9:2, ::-3]",
        "ints",
        "[-1]",
        "flags",
        "t7.weight",
        "t0.weight",
    ]
    done = run("show", "m.pt", *names, "--npz", "o.npz", cwd=folder)
    assert done.exit == 0 and done.out == "" and "6 tensors → o.npz" in done.err
    expected = {name: tensors[name].numpy() for name in names if name[0] != "["}
    expected["strided"] = expected["strided"][1:9:2, ::-3]
    expected["ints"] = expected["ints"][-1]
    with np.load(folder / "o.npz", allow_pickle=False) as found:
        assert [*found] == [*expected]
        for name, array in expected.items():
            assert np.array_equal(found[name], array), name
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
    before = (folder / "o.npz").read_bytes()
    again = run("show", "m.pt", "flags", "--npz", "o.npz", cwd=folder)
    assert again.exit == 1 and "exists" in again.err and (folder / "o.npz").read_bytes() == before
    assert run("show", "m.pt", "flags", "--npz", "o.npz", "--force", cwd=folder).exit == 0
    with np.load(folder / "o.npz") as found:
        assert [*found] == ["flags"]


def test_a_large_tensor_in_an_archive_is_written_in_pieces(tmp_path):
    tensors = {"a": torch.randn(1000, 700), "b": torch.randn(700, 900).t()}
    torch.save(tensors, tmp_path / "m.pt")
    assert run("show", "m.pt", "a", "b", "--npz", "o.npz", cwd=tmp_path).exit == 0
    with np.load(tmp_path / "o.npz") as found:
        assert all(np.array_equal(found[name], tensors[name].numpy()) for name in "ab")


def test_quantized_and_complex_tensors_are_numbers_in_an_archive(tmp_path):
    tensors = {
        "q": torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 7, torch.quint8),
        "c": torch.randn(5, dtype=torch.complex64),
        "h": torch.randn(5, dtype=torch.complex64).to(torch.complex32),
    }
    torch.save(tensors, tmp_path / "m.pt")
    assert run("show", "m.pt", *tensors, "--npz", "o.npz", cwd=tmp_path).exit == 0
    assert run("show", "m.pt", "h", "--npy", "h.npy", cwd=tmp_path).exit == 0
    [told] = run("show", "m.pt", "c", "--json", cwd=tmp_path).json()["tensors"]
    assert told["values"] == torch.view_as_real(tensors["c"]).tolist()
    with np.load(tmp_path / "o.npz") as found:
        assert np.array_equal(found["q"], tensors["q"].dequantize().double().numpy())
        assert np.array_equal(found["c"], tensors["c"].numpy())
        assert np.array_equal(found["h"], tensors["h"].to(torch.complex64).numpy())
    assert np.array_equal(np.load(tmp_path / "h.npy"), tensors["h"].to(torch.complex64).numpy())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("w", "h", "--npz", "o.npz"), 1, "numpy has no dtype bfloat16 by itself"),
        (("w", "--npy", "o.npz"), 1, "numpy has no dtype bfloat16 by itself"),
        (("a", "a", "--npz", "o.npz"), 1, "a is named twice"),
        (("a", "A", "--npz", "o.npz"), 1, "differs only in case"),
        (("a", "no", "--npz", "o.npz"), 1, "no tensor has this name"),
        (("a", "[9]", "--npz", "o.npz"), 2, "has the index 9"),
        (("a", "[0]", "[0]", "--npz", "o.npz"), 1, "no tensor has this name"),
        (("a", "[0]", "h"), 2, "--npz FILE writes several"),
        (("a", "--npy", "o.npz", "--npz", "o.npz"), 2, "both given"),
        (("a", "--npz", "-"), 2, "does not name a file"),
        (("a", "--npy", "-"), 2, "does not name a file"),
        ((), 2, "TENSOR is missing"),
    ],
)
def test_what_an_archive_cannot_hold_is_refused_and_nothing_is_left(tmp_path, words, code, says):
    tensors = {name: torch.ones(3) for name in ("a", "A", "h")} | {"w": torch.ones(1).bfloat16()}
    torch.save(tensors, tmp_path / "m.pt")
    done = run("show", "m.pt", *words, cwd=tmp_path)
    assert done.exit == code and says in done.err, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_elements_that_lie_far_apart_are_read_one_by_one(tmp_path):
    numbers = torch.arange(300_000.0).reshape(3, 1000, 100)
    torch.save({"w": numbers}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        [item] = named_values(checkpoint).values
        for index in ("[::2, ::300, 5]", "[1, ::-250]", "[:, 5, ::70]", "[::2, 7::333, ::99]"):
            found = values_of(item, box_of(index, item.shape))
            expected = eval(f"numbers.numpy(){index}")
            assert found.shape == expected.shape and (found == expected).all()
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**10], "data_offsets": [0, 4 * 10**10]}})
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 4 * 10**10)
    done = run("show", "huge.safetensors", "w", "[::5000000000]", cwd=tmp_path, alone=True)
    assert done.out.splitlines()[1] == "[0. 0.]" and done.rss < 200_000_000


def test_the_checkpoint_itself_is_not_replaced(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    before = (tmp_path / "m.pt").read_bytes()
    for option in ("--npy", "--npz"):
        done = run("show", "m.pt", "w", option, "m.pt", "--force", cwd=tmp_path)
        assert done.exit == 1 and "is read by this run" in done.err
    assert (tmp_path / "m.pt").read_bytes() == before


def test_damaged_values_are_not_written(tmp_path):
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "m.pt")
    raw = bytearray((tmp_path / "m.pt").read_bytes())
    at = raw.index(np.arange(500, 510, dtype="<f4").tobytes())
    raw[at] ^= 1
    (tmp_path / "m.pt").write_bytes(raw)
    done = run("show", "m.pt", "w", "--npy", "w.npy", cwd=tmp_path)
    assert done.exit == 1 and "CRC-32" in done.err and not (tmp_path / "w.npy").exists()
    assert run("show", "m.pt", "w", "[:5]", cwd=tmp_path).exit == 0


def test_two_tensors_of_one_name_are_a_choice(tmp_path):
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "m.pt")
    done = run("show", "m.pt", "a.b", cwd=tmp_path)
    assert done.exit == 1 and "2 tensors have this name" in done.err


def test_one_element_has_no_dimensions_in_a_file(tmp_path):
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(5.0)}, tmp_path / "m.pt")
    for words, expected in ((("w", "[1, 2]"), 5.0), (("s",), 5.0)):
        assert run("show", "m.pt", *words, "--npy", "o.npy", "-f", cwd=tmp_path).exit == 0
        assert np.load(tmp_path / "o.npy").shape == () and np.load(tmp_path / "o.npy") == expected
