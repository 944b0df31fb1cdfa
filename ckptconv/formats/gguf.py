"""The GGUF container of llama.cpp: read it.

``GGUF``, the version (2 or 3), how many tensors and entries of metadata there are; the entries (a
name, the type of the value, the value); the tensors (a name, how many dimensions, these with the
fastest first, a type, the offset in the data); the data, from the next multiple of
``general.alignment`` (32) on, each tensor at one. Counts, lengths, dimensions and offsets have 8
bytes, versions and types 4, as the number of dimensions has. A text is its length and UTF-8; an
array is the type of its elements, how many there are, and they. All of it is big-endian where the
version reads so. Tensors of a quantised type are whole blocks (`tensors.dtypes.BLOCKS`).

A set of several files says in ``split.no``, ``split.count`` and ``split.tensors.count`` which of
them each one is; the first has the metadata. Source: docs/gguf.md and src/gguf.cpp of ggml,
gguf-py 0.19, src/llama-model-loader.cpp.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptconv.io.source import Source
from ckptconv.objects.encodings import ENCODINGS
from ckptconv.pickles.nodes import mapping_pairs, ordered_dict
from ckptconv.support.errors import LimitExceeded, UnsupportedCheckpoint, malformed
from ckptconv.support.limits import in_force
from ckptconv.support.records import NamedTuple, made
from ckptconv.support.text import some_text
from ckptconv.tensors.dtypes import BFLOAT16, BLOCKS, BY_NAME, DType
from ckptconv.tensors.refs import Storage, TensorRef, whole_view
from ckptconv.tree.checkpoint import Checkpoint, Container, PartFile

CONTAINER = Container("gguf", "gguf", suffix=".safetensors", shares=False)

_NAMES = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64",
    30: "bfloat16",
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
TYPES: dict[int, DType] = {
    number: {dtype.name: dtype for dtype in BLOCKS}.get(name) or BY_NAME[name]
    for number, name in _NAMES.items()
}
"""The types of tensors, by their numbers (`ggml_type`). Those that are never in files are left out:
Q8_1 and Q8_K, and what older programs repacked for one processor.
"""

_VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip
_WORDS = {0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32",
          7: "bool", 8: "text", 10: "uint64", 11: "int64", 12: "float64"}  # fmt: skip
# The types of values in the metadata: those of `_VALUES` are numbers
_TEXT, _ARRAY, _UINT32 = 8, 9, 4

_ALIGNMENT = "general.alignment"
_SPLIT = ("split.no", "split.count", "split.tensors.count")
# Entries that another container would understand otherwise
_NOT_CARRIED = ("format", "device", ENCODINGS)

_SHORT = 4096  # bytes of an array that is read; those of a tokenizer have millions
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
# bytes of a tensor: the lengths of an empty name and of its shape, type, offset (8, 4, 4, 8); of an
# entry: those of an empty name, a type, a value of one byte (8, 4, 1)
_LEAST_OF_TENSOR, _LEAST_OF_ENTRY = 24, 13
_LITTLE = "take the little-endian file of the model"


def open_gguf(source: Source) -> Checkpoint:
    """Open a GGUF file; reads its header, no payload.

    The tree is an OrderedDict in the order of the header. Numbers, texts and short arrays of the
    metadata are texts then; long arrays are not read, and a note names them.
    """
    header = _Header(source)
    version = header.read_version()
    counts = header.number("Q"), header.number("Q")
    header.refuse_many(counts[0], _LEAST_OF_TENSOR, "tensors")
    header.refuse_many(counts[1], _LEAST_OF_ENTRY, "entries of metadata")
    metadata, long = _read_metadata(header, counts[1])
    alignment = _alignment(header, metadata)
    tensors = _read_tensors(header, counts[0])
    start = header.at + -header.at % alignment
    end = _refuse_gaps(source, tensors, start, alignment)
    pairs = [(name, _tensor_ref(header, start, name, one)) for name, one in tensors.items()]
    notes = [f"version {version} of GGUF, big-endian"] if header.is_big else []
    if long:
        notes.append(f"long arrays of its metadata are not read: {some_text(long)}")
    behind = source.size - end
    if tensors and behind >= alignment:
        notes.append(f"the last {behind:,} bytes of the file are those of no tensor")
    kept = {name: text for name, text in metadata.items() if name not in _NOT_CARRIED}
    return Checkpoint(
        source.path,
        CONTAINER,
        ordered_dict(pairs),
        source.size,
        kept,
        tuple(notes),
        (source,),
        part=_part(metadata, source.path),
    )


# ---------------------------------------------------------------------------------- the header


class _Header:
    """Reads a header from its beginning on; `at` is the next byte. A length is held against what is
    left of the file, and against the limit, before anything is read.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.at, self.is_big = source, 4, False
        self._order, self._held, self._first, self._window = "<", b"", 0, 1 << 15

    def read_version(self) -> int:
        """The version; tells the order of bytes too."""
        version: int = self.number("I")
        if not version & 0xFFFF:  # 2 or 3 in the other order stands in the upper half
            self.is_big, self._order = True, ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            what = f"is GGUF of the version {version}; 2 and 3 are read"
            hint = "convert the model with a llama.cpp of today"
            raise UnsupportedCheckpoint(what, path=self.source.path, hint=hint)
        return version

    def number(self, code: str) -> Any:
        """The next number, of a type of `struct`."""
        first = self._passed(struct.calcsize(code))
        return struct.unpack_from(self._order + code, self._held, first)[0]

    def text(self) -> bytes:
        """The bytes of the next text."""
        nbytes = self.number("Q")
        first = self._passed(nbytes)
        return self._held[first : first + nbytes]

    def skip(self, nbytes: int) -> None:
        """Go on behind the next bytes."""
        self._refuse_beyond(nbytes)
        self.at += nbytes

    def skip_texts(self, count: int) -> None:
        """Go on behind so many texts: those of a tokenizer, which can be a million."""
        unpack = struct.Struct(f"{self._order}Q").unpack_from
        while count:
            at = self._passed(8)
            held, last = self._held, len(self._held) - 8
            while count and at <= last:
                at += 8 + unpack(held, at)[0]
                count -= 1
            self.at = self._first + at
            self._refuse_beyond(0)

    def refuse_many(self, count: int, least: int, noun: str) -> None:
        """Raise `MalformedCheckpoint` for more things of at least so many bytes than can follow."""
        left = self.source.size - self.at
        if count * least > left:
            what = f"names {count} {noun} where {left} bytes are left"
            raise malformed(what, self.source.path, "header")

    def _passed(self, nbytes: int) -> int:
        """Where in the held bytes the next ones begin, which are read now."""
        self._refuse_beyond(nbytes)
        first, left = self.at - self._first, self.source.size - self.at
        if first < 0 or first + nbytes > len(self._held):
            self._window = min(2 * self._window, 1 << 22)
            self._held = self.source.read(self.at, min(max(nbytes, self._window), left))
            self._first, first = self.at, 0
        self.at += nbytes
        return first

    def _refuse_beyond(self, nbytes: int) -> None:
        end, size, path = self.at + nbytes, self.source.size, self.source.path
        if end > size:
            raise malformed(f"reaches byte {end} of a file of {size}", path, "header")
        most = in_force().gguf_header_bytes
        if end > most:
            what, limit = f"has {end} bytes or more", "gguf_header_bytes"
            raise LimitExceeded(what, limit=limit, allowed=most, path=path, where="header")


# -------------------------------------------------------------------------------- the metadata


def _read_metadata(header: _Header, count: int) -> tuple[dict[str, str], list[str]]:
    """The entries as texts, and the arrays that are too long for that."""
    found: dict[str, str] = {}
    long: dict[str, str] = {}
    for _ in range(count):
        name = header.text().decode("utf-8", "backslashreplace")
        if name in found or name in long:
            raise malformed("is in the metadata twice", header.source.path, name)
        kind = header.number("I")
        if name == _ALIGNMENT and kind != _UINT32:
            raise malformed("is not a uint32", header.source.path, name)
        if kind != _ARRAY:
            found[name] = _value(header, kind, name)
        elif (text := _array(header, name, long)) is not None:
            found[name] = text
    return found, [*long.values()]


def _value(header: _Header, kind: int, name: str) -> str:
    """The next value, which is not an array, as a text."""
    if kind == _TEXT:
        return header.text().decode("utf-8", "backslashreplace")
    code = _VALUES.get(kind)
    if code is None:
        raise malformed(f"has a value of the unknown type {kind}", header.source.path, name)
    value = header.number(code)
    if code == "f":
        return _float32_text(value)
    return str(value).lower()  # true and false as JSON has them


def _float32_text(value: float) -> str:
    """A short text that is this number in float32.

    >>> _float32_text(struct.unpack("<f", struct.pack("<f", 1e-6))[0])
    '1e-06'
    """
    # nine digits tell each number in float32 from all others
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    wanted = struct.pack("<f", value)
    return next((text for text in texts if struct.pack("<f", float(text)) == wanted), str(value))


def _array(header: _Header, name: str, long: dict[str, str]) -> str | None:
    """The next array as a text; None for one that is long, which is added to those."""
    kind, count = header.number("I"), header.number("Q")
    start = header.at
    if kind == _ARRAY:
        what = "is an array of arrays, which no program writes and ckptconv does not read"
        raise UnsupportedCheckpoint(what, path=header.source.path, where=name)
    if kind == _TEXT:
        header.refuse_many(count, 8, "texts")
        header.skip_texts(count)
    elif kind in _VALUES:
        header.skip(count * struct.calcsize(_VALUES[kind]))
    else:
        raise malformed(f"is an array of the unknown type {kind}", header.source.path, name)
    if header.at - start > _SHORT:
        long[name] = f"{name} ({_WORDS[kind]}, {count:,})"
        return None
    header.at = start
    values = [_value(header, kind, name) for _ in range(count)]
    if kind == _TEXT:
        return json.dumps(values, ensure_ascii=False)
    return f"[{', '.join(values)}]"


def _alignment(header: _Header, metadata: Mapping[str, str]) -> int:
    found = int(metadata.get(_ALIGNMENT, 32))
    if found < 1 or found & (found - 1):
        raise malformed(f"is {found}, not a power of two", header.source.path, _ALIGNMENT)
    return found


# ---------------------------------------------------------------------------------- the tensors


class _Tensor(NamedTuple):
    """What the header says of a tensor; `shape` counts blocks where its type is quantised."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _read_tensors(header: _Header, count: int) -> dict[str, _Tensor]:
    path = header.source.path
    found: dict[str, _Tensor] = {}
    for _ in range(count):
        raw = header.text()
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise malformed("its name is not UTF-8", path, raw.decode("latin-1")) from None
        if name in found:
            raise malformed("is in the header twice", path, name)
        dimensions = header.number("I")
        if dimensions > _MOST_DIMENSIONS:
            what = f"has {dimensions} dimensions; in GGUF there are at most {_MOST_DIMENSIONS}"
            raise malformed(what, path, name)
        sizes = [header.number("Q") for _ in range(dimensions)]
        kind, offset = header.number("I"), header.number("Q")
        dtype = TYPES.get(kind)
        if dtype is None:
            what = f"has the unknown type {kind}"
            hint = "convert the model with a llama.cpp of today"
            raise UnsupportedCheckpoint(what, path=path, where=name, hint=hint)
        found[name] = _checked(header, name, dtype, sizes, offset)
    return found


def _checked(
    header: _Header, name: str, dtype: DType, sizes: Sequence[int], offset: int
) -> _Tensor:
    path = header.source.path
    if prod(size for size in sizes if size) >> 63:  # a size of 0 would hide that
        raise malformed(f"its shape {[*reversed(sizes)]} overflows", path, name)
    row = sizes[0] if sizes else 1
    if row % dtype.elements:
        what = f"its rows of {row} elements are not whole blocks of {dtype.elements}"
        raise malformed(f"{what} ({dtype.name})", path, name)
    if header.is_big and (dtype.is_block or dtype is BFLOAT16):
        what = f"is {dtype.name} in a big-endian file, where programs wrote it in either order"
        raise UnsupportedCheckpoint(what, path=path, where=name, hint=_LITTLE)
    shape = (*reversed(sizes[1:]), row // dtype.elements) if sizes else ()
    return _Tensor(dtype, shape, offset, prod(shape) * dtype.itemsize)


def _refuse_gaps(source: Source, tensors: Mapping[str, _Tensor], start: int, alignment: int) -> int:
    """The byte behind the last tensor; `MalformedCheckpoint` for overlaps and large gaps."""
    end = 0
    for name, one in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if one.offset % alignment:
            what = f"its offset {one.offset} is not a multiple of {alignment}"
            raise malformed(what, source.path, name)
        if one.offset < end:
            what = f"begins at byte {one.offset} of the data, within another tensor"
            raise malformed(what, source.path, name)
        if one.offset - end >= alignment:
            what = f"leaves a gap before byte {one.offset} of the data"
            raise malformed(what, source.path, name)
        end = one.offset + one.nbytes
        if start + end > source.size:
            what = f"needs {one.nbytes} bytes at byte {start + one.offset} of a file of"
            raise malformed(f"{what} {source.size}", source.path, name)
    return start + end


def _tensor_ref(header: _Header, start: int, name: str, one: _Tensor) -> TensorRef:
    at = start + one.offset
    fields = (header.source, at, one.nbytes, "cpu", name, one.dtype, None, header.is_big, None)
    return whole_view(made(Storage, fields), one.dtype, one.shape)


# ------------------------------------------------------------------------------- several files


class _Place(NamedTuple):
    """Which file of a set one is, from 0 on, of how many, and how many tensors all of them have."""

    number: int
    files: int
    tensors: int


def _place(metadata: Mapping[str, str], path: object) -> _Place | None:
    """Where a file stands in a set of several; None where it is the only one."""
    told = [metadata.get(name, "") for name in _SPLIT]
    if told[1] in ("", "0", "1"):
        return None
    for name, text in zip(_SPLIT, told, strict=True):
        if re.fullmatch("[0-9]{1,10}", text) is None:
            raise malformed("is missing, or not a number", path, name)
    place = _Place(*map(int, told))
    if place.number >= place.files:
        raise malformed(f"is {place.number} in a set of {place.files}", path, _SPLIT[0])
    return place


def _part(metadata: Mapping[str, str], path: object) -> PartFile | None:
    """What a file is, if it is one of a set, whatever its name."""
    place = _place(metadata, path)
    if place is None:
        return None
    what = f"is file {place.number + 1} of a set of {place.files}, by its metadata"
    mark = f"{place.number + 1:05}-of-{place.files:05}"
    return PartFile(what, f"name all, or their folder; their names end in -{mark}.gguf", mark)


def whole_of_set(whole: Checkpoint, parts: Mapping[int, Checkpoint]) -> Checkpoint:
    """The checkpoint that the files of a set, by the numbers in their names, are together.

    Raises `MalformedCheckpoint` where a file says that it is another one of the set, or of another
    set, or where they do not have so many tensors as they say.
    """
    seen = len(mapping_pairs(whole.root) or ())
    for number, part in parts.items():
        place = _place(part.metadata, part.path) or _Place(0, 1, seen)
        if place[:2] != (number - 1, len(parts)):
            told = f"is file {place.number + 1} of {place.files} by its metadata"
            raise malformed(f"{told}, by its name {number} of {len(parts)}", part.path)
        if place.tensors != seen:
            what = f"says that its set has {place.tensors} tensors, where {seen} are"
            raise malformed(what, part.path)
    metadata = {name: text for name, text in whole.metadata.items() if name not in _SPLIT}
    return replace(whole, metadata=metadata)
