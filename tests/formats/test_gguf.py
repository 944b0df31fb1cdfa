"""GGUF: what gguf-py wrote is read as its reader reads it; what lies is refused in one line.

`tests/data/make_gguf.py` made the files.
"""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors import deserialize

from ckptconv import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    convert_checkpoint,
    diff_checkpoints,
    inspect_checkpoint,
    limits,
    load_portable,
    open_checkpoint,
    scan_checkpoint,
    stats,
)
from ckptconv.io.files import FileSource
from ckptconv.support.errors import LimitExceeded, RefusedObject
from helpers import gguf_files as made
from helpers.paths import DATA
from helpers.program import run

GGUF = DATA / "gguf"
LITTLE, BIG, SET = GGUF / "little.gguf", GGUF / "big.gguf", sorted(GGUF.glob("set-*.gguf"))
EXPECTED = GGUF / "expected.safetensors"


def written(tmp_path, content: bytes, name: str = "in.gguf"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def tensors_in(path) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a safetensors file: type, shape and bytes, as its library sees them."""
    found = deserialize(path.read_bytes())
    return {key: (one["dtype"], one["shape"], bytes(one["data"])) for key, one in found}


def refusal(tmp_path, content: bytes, kind: type[CheckpointError] = MalformedCheckpoint) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(written(tmp_path, content))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------- what is read


def test_every_tensor_is_the_one_that_gguf_py_reads(tmp_path):
    convert_checkpoint(LITTLE, tmp_path / "out.safetensors", verify=True)
    assert tensors_in(tmp_path / "out.safetensors") == tensors_in(EXPECTED)


def test_names_and_order_are_those_of_the_file():
    with open_checkpoint(LITTLE) as opened:
        keys = [key for key, _ in opened.tensors()]
        assert opened.format == "gguf"
    assert keys == [*(f"blk.{at}.weight" for at in range(7)), "output_norm.weight", "scale",
                    "output.weight"]  # fmt: skip


def test_version_2_differs_from_3_by_its_number_alone(tmp_path):
    raw = LITTLE.read_bytes()
    older = written(tmp_path, raw[:4] + struct.pack("<I", 2) + raw[8:])
    assert diff_checkpoints(older, LITTLE).same


def test_a_big_endian_file_has_the_same_values(tmp_path):
    convert_checkpoint(BIG, tmp_path / "out.safetensors", verify=True)
    expected = tensors_in(EXPECTED)
    del expected["output.weight"]
    assert tensors_in(tmp_path / "out.safetensors") == expected
    assert any("big-endian" in note for note in inspect_checkpoint(BIG).notes)


def test_bfloat16_in_a_big_endian_file_is_refused_for_gguf_py_swaps_no_bytes_of_it(tmp_path):
    raw = made.gguf(made.tensor(kind=made.BF16))
    swapped = bytearray(raw)
    for at, code in ((4, "I"), (8, "QQ"), (24, "Q"), (33, "IQIQ")):
        size = struct.calcsize(f"<{code}")
        values = struct.unpack_from(f"<{code}", raw, at)
        swapped[at : at + size] = struct.pack(f">{code}", *values)
    said = refusal(tmp_path, bytes(swapped), UnsupportedCheckpoint)
    assert "w: is bfloat16 in a big-endian file" in said and "little-endian" in said


def test_torch_and_live_tensors_have_the_values_too(tmp_path):
    torch = pytest.importorskip("torch")
    _, shape, raw = tensors_in(EXPECTED)["blk.2.weight"]
    convert_checkpoint(LITTLE, tmp_path / "out.pt", verify=True)
    for loaded in (torch.load(tmp_path / "out.pt"), load_portable(LITTLE)):
        assert list(loaded["blk.2.weight"].shape) == shape
        assert loaded["blk.2.weight"].numpy().tobytes() == raw
        assert loaded["scale"].shape == () and loaded["scale"] == 0.5


def test_the_metadata_are_texts_and_long_arrays_are_named_but_not_read():
    found = inspect_checkpoint(LITTLE)
    assert dict(found.metadata) == {
        "general.architecture": "llama",
        "general.name": "Tiny é",
        "llama.block_count": "7",
        "llama.attention.layer_norm_rms_epsilon": "1e-06",
        "tokenizer.ggml.add_bos_token": "true",
        "general.tags": '["text", "a \\"b\\""]',
        "llama.rope.dimension_sections": "[16, 24, -24]",
    }
    (note,) = [note for note in found.notes if "long arrays" in note]
    assert "tokenizer.ggml.tokens (text, 300), tokenizer.ggml.scores (float32, 1,500)" in note


def test_the_metadata_go_along_into_safetensors_but_for_what_it_understands_otherwise(tmp_path):
    odd = [made.entry(name, made.TEXT, made.text("mlx"))
           for name in ("format", "device", "ckptconv.encodings", "a.b")]  # fmt: skip
    source = written(tmp_path, made.gguf(made.tensor(), metadata=odd))
    convert_checkpoint(source, tmp_path / "out.safetensors")
    with open_checkpoint(tmp_path / "out.safetensors") as opened:
        assert dict(opened.metadata) == {"a.b": "mlx", "format": "pt", "device": "cpu"}


# the types of values as GGUF numbers them, by the letters that `struct` has for them
KINDS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")


@pytest.mark.parametrize("kind", [at for at, letter in enumerate(KINDS) if letter is not None])
def test_each_type_of_a_number_in_the_metadata_is_read(kind, tmp_path):
    value = True if KINDS[kind] == "?" else 7
    raw = struct.pack(f"<{KINDS[kind]}", value)
    several = [made.array(f"a.{count}", kind, count, raw * count) for count in (2, 9000)]
    source = written(tmp_path, made.gguf(metadata=[made.entry("a.one", kind, raw), *several]))
    with open_checkpoint(source) as opened:
        assert f"a.9000 ({np.dtype(KINDS[kind])}, 9,000)" in "".join(opened.notes)
        one = json.loads(opened.metadata["a.one"])
        assert (one, json.loads(opened.metadata["a.2"])) == (value, [value] * 2)
    assert type(one) is type(value) or KINDS[kind] in "fd"


@pytest.mark.parametrize("number", ["0.1", "3.4028235e+38", "inf", "nan", "16777216", "1e-45"])
def test_a_float32_of_the_metadata_is_a_short_text_that_is_it(number, tmp_path):
    raw = struct.pack("<f", float(number))
    source = written(tmp_path, made.gguf(metadata=[made.entry("a.b", made.FLOAT32, raw)]))
    with open_checkpoint(source) as opened:
        told = opened.metadata["a.b"]
    assert np.float32(told).tobytes() == raw and len(told) <= len(number) + 5


def test_opening_reads_the_header_and_no_values(tmp_path, monkeypatch):
    values = bytes(4 << 20)
    source = written(tmp_path, made.gguf(made.tensor(sizes=(1 << 20,)), data=values))
    read, original = [], FileSource.read
    monkeypatch.setattr(
        FileSource, "read", lambda self, at, n: read.append(n) or original(self, at, n)
    )
    open_checkpoint(source).close()
    assert sum(read) < 100_000


def test_the_words_of_a_tokenizer_are_passed_over_across_reads(tmp_path):
    words = b"".join(made.text(f"word {at}") for at in range(200_000))  # 3.7 MB
    metadata = [made.array("tokenizer.ggml.tokens", made.TEXT, 200_000, words),
                made.number("a.after", 7)]  # fmt: skip
    source = written(tmp_path, made.gguf(made.tensor(), metadata=metadata))
    with open_checkpoint(source) as opened:
        assert dict(opened.metadata) == {"a.after": "7"}
        assert [key for key, _ in opened.tensors()] == ["w"]


def test_general_alignment_says_where_the_data_begin(tmp_path):
    metadata = [made.number(made.ALIGNMENT, 512)]
    data = struct.pack("<4f", 1, 2, 3, 4)
    raw = made.gguf(made.tensor(), metadata=metadata, data=data, alignment=512)
    convert_checkpoint(written(tmp_path, raw), tmp_path / "out.safetensors")
    assert tensors_in(tmp_path / "out.safetensors") == {"w": ("F32", [4], data)}


def test_scan_finds_nothing_that_could_run():
    assert scan_checkpoint(LITTLE).level == "plain"


# ------------------------------------------------------------------------------ several files


def test_a_set_is_opened_as_one_by_its_folder_or_by_all_its_names(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for path in SET:
        shutil.copy(path, folder)
    assert len(SET) == 3
    for source in (folder, SET):
        assert diff_checkpoints(source, LITTLE).same
        with open_checkpoint(source) as opened, open_checkpoint(LITTLE) as one:
            assert dict(opened.metadata) == dict(one.metadata)


def test_one_file_of_a_set_is_not_taken_for_all_of_it_whatever_its_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"only one part of a checkpoint.*or their folder"):
        convert_checkpoint(SET[0], tmp_path / "out.safetensors")
    renamed = tmp_path / "model.gguf"
    shutil.copy(SET[1], renamed)
    with pytest.raises(CheckpointError, match="is file 2 of a set of 3, by its metadata"):
        convert_checkpoint(renamed, tmp_path / "out.safetensors")


def of_set(index: int, count: int = 2, tensors: int = 2, key: str | None = None) -> bytes:
    key = f"w{index}" if key is None else key
    return made.gguf(made.tensor(key), metadata=made.split(index, count, tensors))


@pytest.mark.parametrize(
    "first, second, said",
    [
        (of_set(0), of_set(0, key="v"), "is file 1 of 2 by its metadata, by its name 2 of 2"),
        (of_set(1), of_set(0), "is file 2 of 2 by its metadata, by its name 1 of 2"),
        (of_set(0), made.gguf(made.tensor("v")), "is file 1 of 1 by its metadata"),
        (of_set(0, 3), of_set(1, 3), "is file 1 of 3 by its metadata"),
        (of_set(0, tensors=5), of_set(1, tensors=5), "has 5 tensors, where 2 are"),
        (of_set(0), of_set(1, key="w0"), "w0: is in "),
        (of_set(2), of_set(1), "split.no: is 2 in a set of 2"),
        (of_set(0), made.gguf(metadata=made.split(1, 2, 2)[:2]), "split.tensors.count: is missing"),
    ],
)
def test_files_that_are_not_one_set_are_refused(first, second, said, tmp_path):
    paths = [written(tmp_path, raw, f"m-0000{at}-of-00002.gguf")
             for at, raw in enumerate((first, second), 1)]  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(paths)
    assert said in str(caught.value)


def test_the_first_file_of_a_set_may_have_the_metadata_alone(tmp_path):
    """As `llama-gguf-split --no-tensor-first-split` and gguf-py's `small_first_shard` write it."""
    told = [made.entry("general.name", made.TEXT, made.text("small")), *made.split(0, 3, 2)]
    written(tmp_path, made.gguf(metadata=told, data=b""), "m-00001-of-00003.gguf")
    for at in (1, 2):
        written(tmp_path, of_set(at, 3), f"m-0000{at + 1}-of-00003.gguf")
    with open_checkpoint(tmp_path) as opened:
        assert [*opened] == ["w1", "w2"]
        assert opened.metadata["general.name"] == "small"


# -------------------------------------------------------------------------------- what lies


@pytest.mark.parametrize("name", made.LYING)
def test_a_file_that_lies_is_refused_with_what_is_wrong(name, tmp_path):
    content, said = made.LYING[name]
    assert said in refusal(tmp_path, content, CheckpointError)


def test_every_prefix_of_a_file_is_refused_or_has_all_tensors(tmp_path):
    raw = made.gguf(made.tensor(), made.tensor("v", offset=32), metadata=[made.number("a.b", 1)],
                    data=bytes(48))  # fmt: skip
    for size in range(5, len(raw)):
        refusal(tmp_path, raw[:size], CheckpointError)
    open_checkpoint(written(tmp_path, raw)).close()


def test_a_header_beyond_the_limit_is_refused_before_it_is_read(tmp_path):
    metadata = [made.entry("a.b", made.TEXT, made.text(b"x" * 5000))]
    source = written(tmp_path, made.gguf(made.tensor(), metadata=metadata))
    with limits(gguf_header_bytes=1000), pytest.raises(LimitExceeded, match="gguf_header_bytes"):
        open_checkpoint(source)
    open_checkpoint(source).close()


def test_bytes_behind_the_last_tensor_are_told(tmp_path):
    source = written(tmp_path, made.gguf(made.tensor(), data=bytes(100)))
    with open_checkpoint(source) as opened:
        assert "the last 84 bytes of the file are those of no tensor" in opened.notes


# --------------------------------------------------------------------------- quantised types


def quantised(tmp_path, name: str = "in.gguf", first: int = 0):
    """Two rows of two blocks of Q4_0, and plain numbers."""
    tensors = made.tensor(sizes=(64, 2), kind=made.Q4_0), made.tensor("v", offset=96)
    return written(tmp_path, made.gguf(*tensors, data=blocks(first) + bytes(24 + 32)), name)


def blocks(first: int = 0) -> bytes:
    return bytes([first, *range(1, 72)])


def q4_0(raw: bytes) -> np.ndarray:
    """The values of two rows of two blocks: codes less 8, the low ones first, times the scale."""
    octets = np.frombuffer(raw, np.uint8).reshape(4, 18)
    codes = np.concatenate([octets[:, 2:] & 15, octets[:, 2:] >> 4], axis=1).astype(np.float32) - 8
    return (octets[:, :2].copy().view("<f2").astype(np.float32) * codes).reshape(2, 64)


def test_a_quantised_tensor_is_shown_with_its_type_and_its_shape_in_elements(tmp_path):
    source = quantised(tmp_path)
    assert "72 B  Q4_0 [2, 64] on cpu" in run("inspect", source, cwd=tmp_path).out
    told = run("inspect", source, "--json", cwd=tmp_path).json()
    assert told["dtypes"] == {"Q4_0": 1, "float32": 1}


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors", "out.npz"])
def test_it_is_never_written_as_its_bytes(output, tmp_path):
    source = quantised(tmp_path)
    with pytest.raises(RefusedObject, match=r"w: \w+ has no dtype Q4_0; .*dequantize"):
        convert_checkpoint(source, tmp_path / output)
    assert not (tmp_path / output).exists()


def test_it_is_not_loaded_as_its_bytes(tmp_path):
    pytest.importorskip("torch")
    with pytest.raises(RefusedObject, match="dequantize"):
        load_portable(quantised(tmp_path))


def test_its_values_are_read_whole_and_in_parts(tmp_path):
    expected = q4_0(blocks())
    with open_checkpoint(quantised(tmp_path)) as opened:
        lazy = opened["w"]
        assert (lazy.dtype, lazy.shape, lazy.nbytes) == ("Q4_0", (2, 64), 72)
        assert lazy.numpy().tobytes() == expected.tobytes()
        assert lazy[1, 30:35].numpy().tobytes() == expected[1, 30:35].tobytes()
        assert lazy[:, ::-9].numpy().tolist() == expected[:, ::-9].tolist()


def test_stats_and_show_have_its_values(tmp_path):
    source, expected = quantised(tmp_path), q4_0(blocks())
    (found, _) = stats(source).tensors
    assert (found.dtype, found.shape, found.nbytes) == ("Q4_0", (2, 64), 72)
    counted = found.statistics
    assert (counted.minimum, counted.maximum) == (expected.min(), expected.max())
    assert run("show", source, "w", "--npy", "w.npy", cwd=tmp_path).exit == 0
    assert np.load(tmp_path / "w.npy").tobytes() == expected.tobytes()


def test_types_that_need_tables_are_told_to_be_unread(tmp_path):
    source = written(tmp_path, made.gguf(made.tensor(sizes=(256,), kind=19), data=bytes(64)))
    assert stats(source).unread == ("w",)
    done = run("show", source, "w", cwd=tmp_path)
    assert done.exit == 1 and "numpy has no type for elements of IQ1_S" in done.err


def test_diff_compares_its_blocks_and_with_numbers_its_values(tmp_path):
    one, other = quantised(tmp_path), quantised(tmp_path, "other.gguf", first=9)
    assert diff_checkpoints(one, one).same
    (change,) = diff_checkpoints(one, other).values
    assert (change.key, change.deviation.count, change.deviation.where) == ("w", 1, (0, 0))
    plain, values = (made.tensor(sizes=(64, 2)), made.tensor("v", offset=512)), q4_0(blocks())
    raw = made.gguf(*plain, data=values.tobytes() + bytes(32))
    same = written(tmp_path, raw, "plain.gguf")
    values[1, 63] += 1
    near = written(tmp_path, made.gguf(*plain, data=values.tobytes() + bytes(32)), "near.gguf")
    for a, b in ((one, same), (same, one)):
        assert diff_checkpoints(a, b, ignore_dtype=True).same
        assert not diff_checkpoints(a, b).same
    (change,) = diff_checkpoints(one, near, ignore_dtype=True).values
    assert (change.deviation.count, change.deviation.where) == (1, (1, 63))
