"""numpy archives: what numpy writes is read as numpy reads it, and nothing else is."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest
import torch

from ckptconv import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    inspect_checkpoint,
    limits,
    load_portable,
    open_checkpoint,
    scan_checkpoint,
)
from ckptconv.formats.npz import parse_header
from ckptconv.io.files import FileSource

CODES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1", "c8", "c16"]
SAVERS = (np.savez, np.savez_compressed)


def arrays() -> dict[str, np.ndarray]:
    """One array of each type in each byte order and order of dimensions, and odd ones."""
    numbers = np.random.default_rng(0).random((2, 3, 4)) * 100
    made = {}
    for code in CODES:
        for order in "<>":
            plain = numbers.astype(np.dtype(order + code))
            made[f"layer.{code}{ord(order)}"] = plain
            made[f"fortran/{code}{ord(order)}"] = np.asfortranarray(plain)
    odd = {"scalar": np.array(3.5), "none": np.zeros((0, 3), "f4"), "a.npy": np.ones(2, "f4")}
    return {**made, **odd, "κλειδί": np.arange(3)}


def header_of(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    """The bytes of an array as numpy writes them in that version of the format."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    return out.getvalue()


def archive(tmp_path, *members: tuple[str, bytes], deflated: bool = False):
    path = tmp_path / "in.npz"
    with zipfile.ZipFile(
        path, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    ) as out:
        for name, raw in members:
            out.writestr(name, raw)
    return path


def with_header(text: str, values: bytes = b"", version: bytes = b"\1\0") -> bytes:
    raw = text.encode("latin-1")
    size = struct.pack("<H" if version == b"\1\0" else "<I", len(raw))
    return b"\x93NUMPY" + version + size + raw + values


def refusal(path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize("save", SAVERS)
def test_every_array_is_the_tensor_that_numpy_reads(save, tmp_path):
    save(tmp_path / "in.npz", **arrays())
    convert_checkpoint(tmp_path / "in.npz", tmp_path / "out.pt", verify=True)
    loaded = torch.load(tmp_path / "out.pt")
    with np.load(tmp_path / "in.npz", allow_pickle=False) as read:
        assert list(loaded) == read.files
        for key in read.files:
            native = read[key].astype(read[key].dtype.newbyteorder("="))
            assert loaded[key].numpy().dtype == native.dtype, key
            assert loaded[key].shape == native.shape, key
            assert np.array_equal(loaded[key].numpy(), native), key


def test_it_loads_into_torch_mapped_or_read(tmp_path):
    np.savez(tmp_path / "in.npz", w=np.arange(6.0).reshape(2, 3), b=np.ones(3, ">f4"))
    for mmap in (True, False):
        loaded = load_portable(tmp_path / "in.npz", mmap=mmap)
        assert torch.equal(loaded["w"], torch.arange(6.0).double().reshape(2, 3))
        assert torch.equal(loaded["b"], torch.ones(3))


def test_all_versions_of_the_format_are_read(tmp_path):
    members = [(f"v{v}.npy", header_of(np.arange(4), (v, 0))) for v in (1, 2, 3)]
    with open_checkpoint(archive(tmp_path, *members)) as opened:
        assert opened.format == "npz"
        assert [key for key, _ in opened.tensors()] == ["v1", "v2", "v3"]


@pytest.mark.parametrize("save", SAVERS)
def test_opening_reads_headers_and_no_values(save, tmp_path, monkeypatch):
    numbers = np.random.default_rng(1).random((2, 1 << 18))
    save(tmp_path / "in.npz", a=numbers, b=numbers[0])
    read, original = [], FileSource.read
    monkeypatch.setattr(
        FileSource, "read", lambda self, at, n: read.append(n) or original(self, at, n)
    )
    open_checkpoint(tmp_path / "in.npz").close()
    assert sum(read) < 300_000  # the directory is looked for in 64 KiB


def test_a_header_of_two_reads_is_read_whole(tmp_path):
    long = GOOD.replace("\n", " " * 3000 + "\n")
    for deflated in (False, True):
        path = archive(tmp_path, ("a.npy", with_header(long, bytes(8))), deflated=deflated)
        with open_checkpoint(path) as opened:
            assert [ref.shape for _, ref in opened.tensors()] == [(2,)]


def test_inspect_says_that_numpy_opens_it_anywhere_and_doctor_offers_a_torch_file(tmp_path):
    np.savez(tmp_path / "in.npz", w=np.ones(3, "f4"))
    with open_checkpoint(tmp_path / "in.npz") as opened:
        facts = inspect_checkpoint(opened)
    assert facts.portable and facts.format == "npz" and facts.opening.by == "numpy.load"
    found = diagnose(tmp_path / "in.npz")
    assert found.loads and found.opened_by == "numpy.load"
    assert [(one.code, one.severity) for one in found.findings] == [("container", "info")]
    assert found.findings[0].command.endswith("in-portable.pt")


@pytest.mark.parametrize(
    ("bad", "said"),
    {
        "objects": (np.array([{}], dtype=object), "is an array of Python objects"),
        "texts": (np.array(["a"]), "is an array of texts"),
        "bytes": (np.array([b"a"]), "is an array of texts"),
        "dates": (np.array(["2020"], dtype="M8[s]"), "is an array of dates"),
        "durations": (np.array([1], dtype="m8[ns]"), "is an array of durations"),
        "records": (np.zeros(2, dtype=[("a", "f4")]), "is an array of records"),
        "raw bytes": (np.zeros(2, "V3"), "is an array of raw bytes"),
        "longdouble": (np.zeros(2, np.longdouble), "not the same on all hosts"),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_numbers_is_refused_with_its_place(bad, said, tmp_path):
    np.savez(tmp_path / "in.npz", ok=np.ones(2), **{"the.bad": bad})
    error = refusal(tmp_path / "in.npz")
    assert type(error) is UnsupportedCheckpoint and error.where == "the.bad.npy"
    assert said in error.what and "save the archive without it" in error.hint


class Payload:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("save", SAVERS)
def test_scan_judges_the_pickles_of_arrays_of_objects(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "in.npz", ok=np.ones(2), bad=np.array([Payload()], dtype=object))
    refusal(tmp_path / "in.npz")
    found = scan_checkpoint(tmp_path / "in.npz")
    assert {item.name for item in found.dangerous} == {"posix.system"}
    assert [item.where for item in found.dangerous] == ["bad.npy"]
    save(tmp_path / "good.npz", ok=np.ones(2), other=np.arange(100))
    assert scan_checkpoint(tmp_path / "good.npz").level == "plain"
    assert not (tmp_path / "ran").exists()


def test_numbers_that_read_as_a_pickle_by_chance_are_not_one(tmp_path):
    numbers = np.frombuffer(b"\x80\x02X\xff\xff\xff\x7f".ljust(16, b"a"), np.uint8)
    named = np.frombuffer(b"cos\nsystem\n.".ljust(16), np.uint8)
    np.savez(tmp_path / "in.npz", numbers=numbers)
    np.savez(tmp_path / "named.npz", named=named)
    assert scan_checkpoint(tmp_path / "in.npz").level == "plain"
    assert scan_checkpoint(tmp_path / "named.npz").level == "dangerous"


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"

HOSTILE = {
    "no dict": (with_header("[1, 2]\n", bytes(8)), "is not a dict"),
    "a call": (with_header("{'descr': exit(), 'shape': (2,)}\n", bytes(8)), "cannot be read"),
    "a key twice": (
        with_header("{'shape': (2,), 'shape': (2,), 'descr': '<f4'}\n", bytes(8)),
        "cannot be read",
    ),
    "no shape": (
        with_header("{'descr': '<f4', 'fortran_order': False}\n", bytes(8)),
        "other entries",
    ),
    "one more": (with_header(GOOD.replace("}", "'x': 'y'}"), bytes(8)), "other entries"),
    "a shape of text": (with_header(GOOD.replace("(2,)", "'2'"), bytes(8)), "wrong types"),
    "a negative size": (with_header(GOOD.replace("(2,)", "(-2,)"), bytes(8)), "cannot be read"),
    "a number for a shape": (with_header(GOOD.replace("(2,)", "(2)"), bytes(8)), "cannot be read"),
    "more than there is": (with_header(GOOD, bytes(4)), "has 4 bytes where its header needs 8"),
    "less than there is": (with_header(GOOD, bytes(12)), "has 12 bytes where its header needs 8"),
    "an overflow": (
        with_header(GOOD.replace("(2,)", "(4294967296, 4294967296, 0)")),
        "overflows",
    ),
    "deep": (with_header("{" + "(" * 5000 + "}\n"), "cannot be read"),
    "a long header": (with_header(GOOD + " " * 20_000, bytes(8)), "has a header of"),
    "cut in its header": (with_header(GOOD)[:20], "ends within its header"),
    "cut in its magic": (b"\x93NUM", "does not begin like a numpy array"),
    "another magic": (b"\x93NUMPX" + with_header(GOOD, bytes(8))[6:], "does not begin like"),
    "an escaped type": (
        with_header(GOOD.replace("<f4", "\\x3cf4"), bytes(8)),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("deflated", [False, True])
def test_a_header_that_lies_is_malformed(what, deflated, tmp_path):
    raw, said = HOSTILE[what]
    error = refusal(
        archive(tmp_path, ("ok.npy", header_of(np.ones(3))), ("bad.npy", raw), deflated=deflated)
    )
    assert type(error) is MalformedCheckpoint and error.where == "bad.npy"
    assert said in error.what and "\n" not in str(error)


def test_versions_and_byte_orders_that_nobody_knows_are_refused(tmp_path):
    unknown = with_header(GOOD, bytes(8), version=b"\x09\0")
    assert "unknown version 9.0" in refusal(archive(tmp_path, ("a.npy", unknown))).what
    native = with_header(GOOD.replace("<f4", "|f4"), bytes(8))
    assert "in which order" in refusal(archive(tmp_path, ("a.npy", native))).what
    equal = with_header(GOOD.replace("<f4", "=f4"), bytes(8))
    assert "unknown type '=f4'" in refusal(archive(tmp_path, ("a.npy", equal))).what


@pytest.mark.parametrize("deflated", [False, True])
def test_damage_is_found_before_anything_is_put_in_place(deflated, tmp_path):
    values = np.random.default_rng(2).random(1000)
    path = archive(tmp_path, ("w.npy", header_of(values)), deflated=deflated)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(MalformedCheckpoint) as caught:
        convert_checkpoint(path, tmp_path / "out.pt")
    assert caught.value.where == "w.npy" and not (tmp_path / "out.pt").exists()
    assert "damaged" in {item.code for item in diagnose(path, values=True).findings}


def test_a_cut_archive_and_names_that_occur_twice_are_malformed(tmp_path):
    path = archive(tmp_path, ("a.npy", header_of(np.ones(9))))
    path.write_bytes(path.read_bytes()[:-30])
    assert type(refusal(path)) is MalformedCheckpoint
    with pytest.warns(UserWarning):
        path = archive(tmp_path, *[("a.npy", header_of(np.ones(9)))] * 2)
    error = refusal(path)
    assert type(error) is MalformedCheckpoint and error.what == "has two records of the same name"


def test_names_that_differ_only_in_case_are_two(tmp_path):
    np.savez(tmp_path / "in.npz", A=np.ones(2), a=np.zeros(3), **{"b/C": np.ones(1)})
    loaded = load_portable(tmp_path / "in.npz", keys="keep")
    with np.load(tmp_path / "in.npz") as read:
        assert list(loaded) == read.files
        assert all(np.array_equal(loaded[key], read[key]) for key in read.files)
    assert scan_checkpoint(tmp_path / "in.npz").level == "plain"
    with pytest.raises(CheckpointError, match="differs only in case"):
        convert_checkpoint(tmp_path / "in.npz", tmp_path / "out.npz")


@pytest.mark.parametrize("key", ["../../x", "/x", "a/../../x"])
def test_a_name_that_leads_elsewhere_is_refused_for_that(key, tmp_path):
    error = refusal(archive(tmp_path, (f"{key}.npy", header_of(np.ones(9)))))
    assert error.what == "has a name that is not a plain relative path"
    assert "damaged" not in error.hint and "save the file again" in error.hint


def test_a_bomb_is_refused_before_it_is_inflated(tmp_path):
    np.savez_compressed(tmp_path / "in.npz", zeros=np.zeros(1 << 20))
    with limits(inflated_free=1 << 16, inflated_ratio=10):
        assert refusal(tmp_path / "in.npz").limit == "inflated_ratio"


def test_an_archive_of_arrays_and_other_things_is_not_one(tmp_path):
    path = archive(tmp_path, ("a.npy", header_of(np.ones(3))), ("b.json", json.dumps({}).encode()))
    assert "without a checkpoint in it" in refusal(path).what


def test_diff_compares_it_with_what_became_of_it(tmp_path):
    np.savez_compressed(tmp_path / "in.npz", w=np.arange(5.0), f=np.asfortranarray(np.eye(3)))
    convert_checkpoint(tmp_path / "in.npz", tmp_path / "out.safetensors")
    assert diff_checkpoints(tmp_path / "in.npz", tmp_path / "out.safetensors").same


@pytest.mark.parametrize("array", [np.zeros((2, 0, 3)), np.array(1), np.zeros((1,) * 32, ">i2")])
def test_numpys_headers_are_parsed_as_numpy_parses_them(array):
    raw = header_of(np.asfortranarray(array))
    text = raw[10 : 10 + struct.unpack("<H", raw[8:10])[0]].decode()
    found = parse_header(text)
    expected = np.lib.format.read_array_header_1_0(io.BytesIO(raw[8:]))
    assert (found.shape, found.is_fortran, np.dtype(found.descr)) == expected
