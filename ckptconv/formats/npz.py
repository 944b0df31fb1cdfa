"""The numpy archive (`numpy.savez`, `numpy.savez_compressed`): arrays by name, read as a state
dict, and written from one.

A zip archive of members ``NAME.npy``. Each is the magic ``\\x93NUMPY``, a version of two bytes, the
length of the header (two bytes in version 1, four in 2 and 3, little-endian), a header that is the
text of a Python dict of ``descr``, ``fortran_order`` and ``shape``, and the values, in C or Fortran
order, to the end of the member. Source: numpy/lib/format.py. An array of objects is a pickle behind
its header, which is never looked at here.

What is written has no device tags, no aliases, no metadata, and only the element types that numpy
has; the archive around the members is laid out as torch's.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from math import prod
from pathlib import Path, PurePath

from ckptconv.formats.target_format import Layout, NamedTensor, Retag, TargetFormat
from ckptconv.formats.zip_archive import Record, Records, checksum_notes, record_source
from ckptconv.formats.zip_layout import NewRecord, lay_out_records
from ckptconv.io.crc import combined_crc, crc32
from ckptconv.io.inflate import Spool
from ckptconv.io.source import Source
from ckptconv.pickles.nodes import ordered_dict
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    RefusedObject,
    UnsupportedCheckpoint,
    VerificationFailed,
    printable,
)
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import (
    Shape,
    Storage,
    TensorRef,
    contiguous_stride,
    lacking,
    refuse_dimensions,
    view_of,
)
from ckptconv.tree.checkpoint import Checkpoint, Container

CONTAINER = Container("npz", "numpy.load", has_checksums=True)
SUFFIX = ".npy"
"""The end of every member's name, which is not part of the array's."""

MAGIC = b"\x93NUMPY"
TYPES: dict[str, DType] = {
    code: BY_NAME[name]
    for code, name in (
        ("f8", "float64"), ("f4", "float32"), ("f2", "float16"),
        ("i8", "int64"), ("i4", "int32"), ("i2", "int16"), ("i1", "int8"),
        ("u8", "uint64"), ("u4", "uint32"), ("u2", "uint16"), ("u1", "uint8"),
        ("b1", "bool"), ("c8", "complex64"), ("c16", "complex128"),
    )
}  # fmt: skip
"""The element types that numpy has in common with torch, by numpy's code without the byte order."""

_BEGINNING = 192  # bytes that hold nearly every header; numpy pads it to a multiple of 64
_LONGEST_HEADER = 10_000  # bytes; numpy reads no longer one either, where it does not trust a file
# The versions of a member, and the bytes that the length of its header takes
_VERSIONS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}

_SIZE = r"[0-9]{1,19}L?"  # Python 2 wrote 3L
# The header is a dict as Python writes it, which numpy gives to ast.literal_eval
_HEADER = re.compile(r"\s*\{(?P<entries>.*)\}\s*", re.DOTALL).fullmatch
_ENTRY = re.compile(
    rf"""\s*(['"])(?P<key>\w+)\1\s*:\s*(?:
        (?P<quote>['"])(?P<text>[^'"\\]*)(?P=quote)
        | (?P<flag>True|False)
        | (?P<sizes>\(\s*\)|\(\s*{_SIZE}\s*,\s*\)|\(\s*{_SIZE}(?:\s*,\s*{_SIZE})+\s*,?\s*\))
        | (?P<other>\[)
    )\s*(?:,|$)?\s*""",
    re.VERBOSE | re.ASCII,
)
_DESCR = re.compile(r"(?P<order>[<>|])(?P<code>[a-zA-Z][0-9]*)(?:\[[\w/]+\])?", re.ASCII).fullmatch
# What an array holds whose element type is not read, by the first letter of its code
_REFUSED = {
    "O": "Python objects, which only unpickling would read",
    "U": "texts",
    "S": "texts",
    "a": "texts",
    "M": "dates",
    "m": "durations",
    "V": "raw bytes or records",
    "f": "numbers that are not the same on all hosts (longdouble)",
    "c": "numbers that are not the same on all hosts (longdouble)",
}

_LEAVE_OUT = "save the archive without it, or write it as an array of numbers"
_DAMAGED = "the file is damaged, cut off or forged"


def open_npz(source: Source, records: Records) -> Checkpoint:
    """Open a numpy archive; reads the headers of its arrays, no payload.

    The tree is an OrderedDict in the archive's order. Raises `MalformedCheckpoint` when a header
    contradicts its member, `UnsupportedCheckpoint` for an array of anything but numbers.
    """
    spool, inflated = Spool(), list[Source]()
    tensors: list[tuple[str, TensorRef]] = []
    heads = source.read_many(
        [(record.offset, min(record.stored, _BEGINNING)) for record in records.values()]
    )
    try:
        for (name, record), head in zip(records.items(), heads, strict=True):
            found = _tensor(source, record, head, spool)
            if record.deflated:
                inflated.append(found.storage.source)
            tensors.append((name.removesuffix(SUFFIX), found))
    except CheckpointError as error:
        spool.close()
        raise error.at(path=source.path, where=name) from error.__cause__
    notes, sources = tuple(checksum_notes(records)), (source, *inflated)
    root = ordered_dict(tensors)
    return Checkpoint(source.path, CONTAINER, root, source.size, notes=notes, sources=sources)


def _tensor(source: Source, record: Record, head: bytes, spool: Spool) -> TensorRef:
    raw, header = _read_header(source, record, head)
    dtype, big_endian = _dtype(header.descr)
    refuse_dimensions(len(header.shape), record.name)  # before sizes are multiplied
    if prod(size for size in header.shape if size) >= 1 << 63:  # a size of 0 would hide that
        raise MalformedCheckpoint(f"its shape {header.shape} overflows", hint=_DAMAGED)
    nbytes = prod(header.shape) * dtype.itemsize
    if len(raw) + nbytes != record.size:
        what = f"has {record.size - len(raw)} bytes where its header needs {nbytes}"
        raise MalformedCheckpoint(what, hint=_DAMAGED)
    plain, start = record_source(source, record, spool)
    crc = None
    if not record.deflated and record.crc32 is not None:
        # That of the values follows from that of the member and of the header before them.
        crc = combined_crc(crc32(raw), 0, nbytes) ^ record.crc32
    storage = Storage(plain, start + len(raw), nbytes, "cpu", record.name, dtype, crc, big_endian)
    stride = contiguous_stride(header.shape)
    if header.is_fortran:
        stride = contiguous_stride(header.shape[::-1])[::-1]
    return view_of(storage, dtype, 0, header.shape, stride)


# ----------------------------------------------------------------------------------------- headers


class Header(NamedTuple):
    """What the header of an array says."""

    descr: str
    is_fortran: bool
    shape: Shape


def _read_header(source: Source, record: Record, head: bytes) -> tuple[bytes, Header]:
    """The bytes before the values of a member stored as `head` and more, and what they say."""
    raw = _plain(record, head, _BEGINNING)
    if not raw.startswith(MAGIC):
        raise MalformedCheckpoint("does not begin like a numpy array", hint=_DAMAGED)
    width = _VERSIONS.get((*raw[6:8],))
    if width is None:
        version = ".".join(map(str, raw[6:8]))
        raise UnsupportedCheckpoint(f"is a numpy array of unknown version {version}")
    end = 8 + width + int.from_bytes(raw[8 : 8 + width], "little")
    if end > _LONGEST_HEADER:
        raise MalformedCheckpoint(f"has a header of {end} bytes", hint=_DAMAGED)
    if end > len(raw):
        more = source.read(record.offset, min(record.stored, end + _BEGINNING))
        raw = _plain(record, more, end)
    if end > len(raw):
        raise MalformedCheckpoint("ends within its header", hint=_DAMAGED)
    text = raw[8 + width : end].decode("utf-8" if raw[6] == 3 else "latin-1", "replace")
    return raw[:end], parse_header(text)


def _plain(record: Record, head: bytes, nbytes: int) -> bytes:
    """The first bytes of a member, stored as `head` and more; of a deflated one, a few at most."""
    if not record.deflated:
        return head
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, nbytes)
    except zlib.error as error:
        raise MalformedCheckpoint(f"does not inflate ({error})", hint=_DAMAGED) from error


def holds_numbers(head: bytes) -> bool:
    """Whether a member that starts with `head` is an array of numbers, which nothing unpickles."""
    width = _VERSIONS.get((*head[6:8],), 0)
    end = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if not head.startswith(MAGIC) or not width or end > len(head):
        return False
    try:
        _dtype(parse_header(head[8 + width : end].decode("latin-1")).descr)
    except CheckpointError:
        return False
    return True


def parse_header(text: str) -> Header:
    """What the dict in a header says; nothing in it is evaluated.

    >>> parse_header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }")
    Header(descr='<f4', is_fortran=False, shape=(3,))
    """
    whole = _HEADER(text)
    if whole is None:
        raise MalformedCheckpoint("its header is not a dict", hint=_DAMAGED)
    entries = whole["entries"]
    found: dict[str, re.Match[str]] = {}
    at = 0
    while at < len(entries):
        entry = _ENTRY.match(entries, at)
        if entry is None or entry["key"] in found:
            what = f"its header cannot be read: {printable(entries[at : at + 40])}"
            raise MalformedCheckpoint(what, hint=_DAMAGED)
        if entry["other"] is not None:
            raise UnsupportedCheckpoint("is an array of records", hint=_LEAVE_OUT)
        found[entry["key"]] = entry
        at = entry.end()
    if found.keys() != {"descr", "fortran_order", "shape"}:
        raise MalformedCheckpoint("its header has other entries than an array's", hint=_DAMAGED)
    descr, order = found["descr"]["text"], found["fortran_order"]["flag"]
    sizes = found["shape"]["sizes"]
    if descr is None or order is None or sizes is None:
        raise MalformedCheckpoint("its header has values of the wrong types", hint=_DAMAGED)
    shape = tuple(int(size) for size in re.findall(r"[0-9]+", sizes))
    return Header(descr, order == "True", shape)


def _dtype(descr: str) -> tuple[DType, bool]:
    """The element type that a header names, and whether its bytes are in big-endian order."""
    named = _DESCR(descr)
    if named is None:
        what = f"is an array of unknown type {printable(descr, 40)!r}"
        raise UnsupportedCheckpoint(what, hint=_LEAVE_OUT)
    code = named["code"]
    dtype = TYPES.get(code)
    if dtype is None:
        held = _REFUSED.get(code[0], f"the unknown type {code}")
        raise UnsupportedCheckpoint(f"is an array of {held}", hint=_LEAVE_OUT)
    if named["order"] == "|" and dtype.word > 1:
        what = f"does not say in which order the bytes of its type {code} are"
        raise UnsupportedCheckpoint(what, hint=_LEAVE_OUT)
    return dtype, named["order"] == ">"


# ------------------------------------------------------------------------------------------ writing

_DESCRS = {dtype: f"{'|' if dtype.word == 1 else '<'}{code}" for code, dtype in TYPES.items()}
_ALIGNMENT = 64  # of the values in a member, as numpy has it
_MOST_DIMENSIONS = 64  # of numpy 2; numpy 1 has 32
_LARGEST = (1 << 63) - 1  # bytes of an array, sizes of 0 not counted
_LONGEST_NAME = 0xFFFF  # bytes of a member's name in a zip archive


class NpzFile(TargetFormat):
    """What `numpy.savez` writes."""

    name = "npz"
    noun = "a numpy archive"
    suffix = ".npz"
    holds_tags = False

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        """Refuse types and shapes that numpy lacks, and keys that are not names in an archive."""
        tensors = [*named]
        bad = bad_names([key for key, _, _ in tensors])
        for key, ref, dtype in tensors:
            _refuse_array(key, dtype, ref.shape)
            if key in bad:
                hint = "rename it (--rename), or write safetensors (--to safetensors)"
                raise RefusedObject(bad[key], where=key, hint=hint)

    def tensor_notes(self, named: Sequence[NamedTensor], retag: Retag) -> Iterator[str]:
        if any(retag(ref.location) != "cpu" for _, ref, _ in named):
            yield "a numpy archive has no device tags: its arrays are on no device"

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        return lay_out_arrays([(key, dtype, ref.shape, ref) for key, ref, dtype in tensors])

    def load_checker(self, nbytes: int) -> None:
        import numpy  # noqa: F401

    def check_written(self, written: Path, name: PurePath, count: int) -> None:
        """Let numpy read the directory that was written, without unpickling anything."""
        import numpy as np

        try:
            with np.load(written, allow_pickle=False) as archive:
                members = {*archive.zip.namelist()}
                # A key that is the name of a member is that member to numpy, else KEY.npy is.
                seen = {key if key in members else key + SUFFIX for key in archive.files}
        except (OSError, ValueError) as error:
            what = f"{CONTAINER.by} does not open it: {error}"
            raise VerificationFailed(what, path=name) from error
        if len(seen) != count:
            raise VerificationFailed(f"{CONTAINER.by} sees {len(seen)} arrays in it", path=name)


def lay_out_arrays(arrays: Sequence[tuple[str, DType, Shape, TensorRef | bytes]]) -> Layout:
    """The archive of arrays: the name, type, shape and values of each. The bytes of one may be left
    empty by who writes them himself.
    """
    records = []
    for key, dtype, shape, values in arrays:
        name, nbytes = f"{key}{SUFFIX}".encode(), prod(shape) * dtype.itemsize
        records.append(NewRecord(key, name, _header(dtype, shape), nbytes, values, dtype))
    return lay_out_records(records)


def holds(dtype: DType) -> bool:
    """Whether numpy has this type by itself."""
    return dtype in _DESCRS


def bad_names(keys: Sequence[str]) -> dict[str, str]:
    """The keys that cannot all be names in one archive, and why."""
    known, met = {*keys}, dict[str, str]()
    found = {key: _why_no_name(key, met.setdefault(key.lower(), key), known) for key in keys}
    return {key: what for key, what in found.items() if what is not None}


def _refuse_array(key: str, dtype: DType, shape: Shape) -> None:
    """Refuse an array that numpy cannot have."""
    hint = "write safetensors (--to safetensors), or leave it out (--exclude)"
    if dtype not in _DESCRS:
        hint = f"cast it (--dtype f32), {hint}" if dtype.is_floating else hint
        raise lacking("numpy", dtype, key, hint)
    if len(shape) > _MOST_DIMENSIONS:
        what = f"it has {len(shape)} dimensions; numpy has at most {_MOST_DIMENSIONS}"
    elif prod(size for size in shape if size) * dtype.itemsize > _LARGEST:
        what = f"numpy cannot have an array of the shape {shape}"
    else:
        return
    raise RefusedObject(what, where=key, hint=hint)


def _why_no_name(key: str, other: str, keys: Set[str]) -> str | None:
    """Why a key, one of `keys`, cannot be one of the archive's; `other` is the same in lower case.
    `NpzFile[key]` first looks for a member of that very name, and takes array a for a.npy.
    """
    if other != key:
        return f"its key differs only in case from {other}"
    if not _is_plain(key):
        return "its key cannot be the name of a member of an archive"
    if key.endswith(SUFFIX) and key.removesuffix(SUFFIX) in keys:
        return f"numpy would read {key.removesuffix(SUFFIX)} under its key"
    return None


def _header(dtype: DType, shape: Shape) -> bytes:
    """All that stands before the values of an array, in the first version that there was."""
    # 64 sizes of 19 digits take far less than the 65,535 bytes that the length can say
    text = f"{{'descr': '{_DESCRS[dtype]}', 'fortran_order': False, 'shape': {shape}, }}"
    unpadded = len(MAGIC) + 4 + len(text) + 1
    raw = f"{text}{' ' * (-unpadded % _ALIGNMENT)}\n".encode()
    return MAGIC + b"\1\0" + len(raw).to_bytes(2, "little") + raw


def _is_plain(key: str) -> bool:
    """Whether a key can be the name of a member that every reader takes for this one name."""
    if not key.isprintable() or "\\" in key or key.startswith("/") or ".." in key.split("/"):
        return False
    return len(f"{key}{SUFFIX}".encode(errors="replace")) <= _LONGEST_NAME


NPZ = NpzFile()
