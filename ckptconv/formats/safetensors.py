"""The safetensors container: read it, and lay it out for writing.

Eight bytes of header length (little-endian, at most 100 MB), a JSON object from key to ``{dtype,
shape, data_offsets}`` with an optional ``__metadata__`` of strings, then the values in C order,
little-endian, without gaps, to the very end of the file. Source: the format's README and
`Metadata::validate` of the safetensors library 0.8.
"""

from __future__ import annotations

import contextlib
import json
import re
from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from math import prod
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any

from ckptconv.formats.target_format import Layout, NamedTensor, Retag, TargetFormat, WriteItem
from ckptconv.io.source import Source
from ckptconv.objects.encodings import ENCODINGS, restore, written_form
from ckptconv.pickles.nodes import ordered_dict
from ckptconv.support.errors import (
    CheckpointError,
    DeviceUnavailable,
    MalformedCheckpoint,
    VerificationFailed,
    errors_at,
    malformed,
    or_recover,
    printable,
    warn,
)
from ckptconv.support.json_text import read_object, refuse_crowded, value_at
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import made
from ckptconv.tensors.dtypes import BY_SAFETENSORS, FLOAT4, FLOAT4_PAIRS, DType
from ckptconv.tensors.refs import (
    Storage,
    TensorRef,
    refuse_dimensions,
    view_identity,
    whole_view,
)
from ckptconv.tree.checkpoint import SAFETENSORS_LIBRARY, Checkpoint, Container
from ckptconv.tree.flattening import refuse_unholdable

CONTAINER = Container(
    "safetensors", SAFETENSORS_LIBRARY, suffix=".safetensors", shares=False, names_storages=True
)
RESERVED = "__metadata__"
"""The name in a header that is not a tensor's: an object of strings."""

_OWN = frozenset(("format", "device", ENCODINGS))
# The types whose tensors can all be written, of any shape
_ORDINARY = frozenset(BY_SAFETENSORS.values()) - {FLOAT4, FLOAT4_PAIRS}
_FIELDS = {"dtype", "shape", "data_offsets"}


def open_safetensors(source: Source) -> Checkpoint:
    """Open a safetensors file; reads its header, no payload.

    The tree is an OrderedDict in header order. A metadata entry that names a missing tensor as the
    alias of one that is there (as the library's `save_model` records tied tensors) becomes a second
    key of that tensor. The metadata's ``device`` becomes the location tag, unless it is an alias.
    """
    raw, start = _raw_header(source)
    metadata, tensors = _read_plain(source, raw, start) or _read_any(source, raw, start)
    del raw
    _refuse_gaps(source, tensors.values(), start)
    aliases = aliases_in(metadata, tensors)
    notes = tuple(
        f"the metadata entry {printable(name)} = {printable(value)} is taken for a text, not for a "
        "second name of that tensor"
        for name, value in metadata.items()
        if value in tensors and not (name in tensors or name in aliases)
    )
    warn(notes)  # who loads it is shown no notes
    is_named = "device" in tensors or "device" in aliases
    # then it may be an alias or, in a delta, the checksum of the tensor of that name
    if is_named and not _is_tag(metadata.get("device", "cpu")):
        tensors = {key: _on_cpu(ref) for key, ref in tensors.items()}
    tensors |= {alias: tensors[kept] for alias, kept in aliases.items()}
    text = metadata.get(ENCODINGS, "{")
    # in a delta it is the checksum of the tensor of that name
    is_checksum = ENCODINGS in tensors and not text.startswith("{")
    with errors_at(path=source.path):
        recipes = None if is_checksum else metadata.pop(ENCODINGS, None)
        restored = tensors if recipes is None else restore(tensors, recipes)
    root = ordered_dict(list(restored.items()))
    return Checkpoint(source.path, CONTAINER, root, source.size, metadata, notes, (source,))


def _on_cpu(ref: TensorRef) -> TensorRef:
    return whole_view(ref.storage._replace(location="cpu"), ref.dtype, ref.shape)


# The metadata and the tensors of a file
_Read = tuple[dict[str, str], dict[str, TensorRef]]


def _read_any(source: Source, raw: bytes, start: int) -> _Read:
    """Read a header that is JSON of any form, or say what is wrong with it."""
    header = read_object(raw, source.path, "header")
    metadata = _metadata(source, header.pop(RESERVED, None))
    location = metadata.get("device", "cpu")
    tensors = {}
    for key in list(header):
        # of a million entries, those that are read already would take 500 MB
        dtype, shape, begin, end = _entry(source, key, header.pop(key))
        fields = (source, start + begin, end - begin, location, key, dtype, None, False, None)
        tensors[key] = whole_view(made(Storage, fields), dtype, shape)
    return metadata, tensors


def _read_plain(source: Source, raw: bytes, start: int) -> _Read | None:
    """Read a header as its libraries write it, without spaces and escapes, and with the metadata
    first: entry by entry, in a third of the time, and without the objects of JSON, which take 500
    bytes of memory for each tensor. None where it is of another form, or anything is wrong.
    """
    refuse_crowded(raw, source.path, "header")
    try:
        text = raw.decode()
        metadata, at = _plain_metadata(source, text)
        location = metadata.get("device", "cpu")
        tensors: dict[str, TensorRef] = {}
        forms: dict[tuple[str, str], tuple[DType, tuple[int, ...], int]] = {}
        count, behind = 0, ","
        while behind == ",":
            entry = _PLAIN_ENTRY(text, at)
            if entry is None:
                return None
            key, code, sizes, first, stop, behind = entry.groups()
            form = forms.get((code, sizes))
            if form is None:
                shape = list(map(int, sizes.split(","))) if sizes else []
                form = forms[code, sizes] = _form(source, key, BY_SAFETENSORS[code], shape)
            dtype, dims, nbytes = form
            begin = int(first)
            if int(stop) - begin != nbytes:
                return None
            fields = (source, start + begin, nbytes, location, key, dtype, None, False, None)
            tensors[key] = whole_view(made(Storage, fields), dtype, dims)
            count, at = count + 1, entry.end()
    except (ValueError, KeyError, RecursionError, CheckpointError):
        return None
    # a name that stands there twice has left one tensor for two entries
    return None if len(tensors) != count or RESERVED in tensors else (metadata, tensors)


def _plain_metadata(source: Source, text: str) -> tuple[dict[str, str], int]:
    """The metadata that a header begins with, if it has some, and where its first entry begins."""
    if not text.startswith(_BEFORE_METADATA):
        return {}, 1
    found, behind = value_at(text, len(_BEFORE_METADATA))
    if not text.startswith(",", behind):
        raise ValueError
    return _metadata(source, found), behind + 1


_BEFORE_METADATA = f'{{"{RESERVED}":'
_SIZE = "(?:0|[1-9][0-9]{0,17})"  # 18 digits are below 2**63, so no number has to be looked at
_PLAIN_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"(\w+)",'
    rf'"shape":\[((?:{_SIZE}(?:,{_SIZE})*)?)\],"data_offsets":\[({_SIZE}),({_SIZE})\]\}}'
    r"(,|\} *\Z)"
).match


def read_header(source: Source) -> tuple[dict[str, Any], int]:
    """The header of a file, whose entries are not checked yet, and where its data begin."""
    raw, start = _raw_header(source)
    return read_object(raw, source.path, "header"), start


def _raw_header(source: Source) -> tuple[bytes, int]:
    """The text of a header, and where the data begin."""
    if source.size < 8:
        raise MalformedCheckpoint("is too short for a header", path=source.path)
    size = int.from_bytes(source.read(0, 8), "little")
    what, where = f"declares {size} bytes", "header length"
    if 8 + size > source.size:
        raise malformed(f"{what} where {source.size - 8} are left", source.path, where)
    refuse_beyond("safetensors_header_bytes", size, what, path=source.path, where=where)
    raw = source.read(8, size)
    if not raw.startswith(b"{"):
        raise malformed("does not begin with '{'", source.path, "header")
    return raw, 8 + size


def aliases_in(metadata: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The entries that call a tensor by a second name: each with the one of `names` that it is.

    A text may happen to be a tensor's name (``author`` = ``name``). So an entry counts if both look
    like names of tensors: with one last segment, or both of several. Any other counts only beside
    nothing but such entries, and if its words do not describe a file. ``format`` and ``device``
    count where they name a tensor, and no framework or device.
    """
    found: dict[str, str] = {}
    others = [
        name
        for name, value in metadata.items()
        if name not in names and (name not in _OWN or (value in names and not _is_own(name, value)))
    ]
    for alias in others:
        kept = metadata[alias]
        if kept in names or kept in found:
            found[alias] = found.get(kept, kept)
    has_texts = len(found) < len(others)

    def is_alias(alias: str, kept: str) -> bool:
        ends_alike = alias.rpartition(".")[2] == kept.rpartition(".")[2]
        if alias in _OWN or ends_alike or ("." in alias and "." in kept):
            return True
        return not has_texts and _DESCRIBING.isdisjoint(re.split(r"[\W_]+", alias.lower()))

    return {alias: kept for alias, kept in found.items() if is_alias(alias, kept)}


def _is_own(name: str, value: str) -> bool:
    """Whether an entry is one of the format itself, by its value too."""
    if name == "device":
        return _is_tag(value)
    return name == ENCODINGS or (name == "format" and value in ("pt", "np", *_OTHER_FRAMEWORKS))


def _is_tag(value: str) -> bool:
    from ckptconv.devices.tags import canonical_tag  # seldom needed

    return canonical_tag(value) is not None


def _may_alias(metadata: Mapping[str, str]) -> bool:
    """Whether an entry may be an alias; else a million names need not be looked up."""
    return not all(_is_own(name, value) for name, value in metadata.items())


_DESCRIBING_WORDS = """
    architecture author authors base comment created creator dataset date description default
    format framework hash input key kind label language layer library license main mode model name
    note notes output owner source summary tag tags target task tensor title tool trigger type
    url version writer
"""
# Words of metadata that describe a file
_DESCRIBING = frozenset(_DESCRIBING_WORDS.split())


_NOT_ACCOUNTED = "the library may accept it, but ckptconv does not read what it cannot account for"


def _metadata(source: Source, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise malformed("holds something other than strings", source.path, RESERVED)
    try:
        "".join((*metadata, *metadata.values())).encode()
    except UnicodeEncodeError:
        what = "holds half a character (a lone surrogate)"
        raise malformed(what, source.path, RESERVED) from None
    return metadata


def _entry(source: Source, key: str, entry: Any) -> tuple[DType, tuple[int, ...], int, int]:
    if type(entry) is not dict or entry.keys() != _FIELDS:
        what = "its entry does not have exactly dtype, shape and data_offsets"
        raise MalformedCheckpoint(what, path=source.path, where=key, hint=_NOT_ACCOUNTED)
    dtype = BY_SAFETENSORS.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    shape, offsets = entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise malformed(f"has the unknown dtype {entry['dtype']!r}", source.path, key)
    are_lists = type(shape) is list and type(offsets) is list and len(offsets) == 2
    if not are_lists or not _are_sizes([*shape, *offsets]):
        what = "its shape or data_offsets hold something other than sizes"
        raise malformed(what, source.path, key)
    begin, end = offsets
    dtype, dims, nbytes = _form(source, key, dtype, shape)
    if nbytes != end - begin:
        what = f"its shape needs {nbytes} bytes, its data_offsets span {end - begin}"
        raise malformed(what, source.path, key)
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            what = "its name holds half a character (a lone surrogate)"
            raise malformed(what, source.path, key) from None
    return dtype, dims, begin, end


def _form(
    source: Source, key: str, dtype: DType, shape: list[int]
) -> tuple[DType, tuple[int, ...], int]:
    """The type and the shape of the tensor of an entry, and how many bytes it takes."""
    refuse_dimensions(len(shape), key)  # before sizes are multiplied
    if dtype is FLOAT4_PAIRS:
        if not shape or shape[-1] % 2:
            dtype = FLOAT4
        else:
            shape = [*shape[:-1], shape[-1] // 2]
    numel = prod(shape)
    if (not numel or numel >> 63) and prod(size for size in shape if size) >> 63:
        what = f"its shape {shape} overflows"
        raise MalformedCheckpoint(what, path=source.path, where=key, hint=_NOT_ACCOUNTED)
    nbits = numel * dtype.bits
    if nbits % 8:
        what = f"its {numel} elements of {dtype.bits} bits do not fill whole bytes"
        raise malformed(what, source.path, key)
    return dtype, tuple(shape), nbits // 8


def _are_sizes(values: Sequence[Any]) -> bool:
    return {*map(type, values)} == {int} and min(values) >= 0 and not max(values) >> 63


def _refuse_gaps(source: Source, tensors: Iterable[TensorRef], start: int) -> None:
    storages = [ref.pieces[0][0] for ref in tensors]
    storages.sort(key=itemgetter(1, 2))  # by offset and nbytes
    at = start
    for _, offset, nbytes, *_ in storages:
        if offset != at:
            what = f"leave a gap or overlap at byte {min(at, offset) - start} of the data"
            raise malformed(what, source.path, "data_offsets")
        at += nbytes
    if at != source.size:
        what = f"has {source.size - start} bytes where the header needs {at - start}"
        error = malformed(what, source.path, "data")
        if at > source.size:
            error.hint = or_recover("the file is cut off; fetch it again", source.path)
        raise error


# ------------------------------------------------------------------------------------------ writing


def header_text(header: Mapping[str, Any]) -> bytes:
    """A header as JSON, in its shortest form."""
    return _SHORTEST.encode(header).encode()


_SHORTEST = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


_quoted = json.encoder.encode_basestring


def header_bytes(text: bytes | bytearray, nbytes: int | None = None) -> bytes:
    """What a file begins with: the length, the text, and spaces up to `nbytes` bytes in all (None:
    to a multiple of 8, as the library does).

    Raises `LimitExceeded` for a header that is too long for the library.
    """
    size = len(text) + -len(text) % 8 if nbytes is None else nbytes - 8
    what = f"its header would take {size} bytes"
    advice = (
        "the safetensors library opens headers of at most 100,000,000 bytes: write a torch file, "
        "or shards"
    )
    refuse_beyond("safetensors_header_bytes", size, what, advice=advice)
    return b"".join((size.to_bytes(8, "little"), text, b" " * (size - len(text))))


class SafetensorsFile(TargetFormat):
    """What the safetensors library writes: the tensors of one state dict, and strings beside them.

    Tensors of one and the same view are written once; the metadata names the others as aliases of
    the one that is kept, as the library's `save_model` does.
    """

    name = "safetensors"
    noun = "safetensors"
    suffix = ".safetensors"
    shards_named = "model.safetensors"
    holds_metadata = True
    encodes = True

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        named = list(named)
        if _ORDINARY.issuperset(
            chain.from_iterable({(ref.dtype, dtype) for _, ref, dtype in named})
        ):
            return
        for key, ref, dtype in named:
            if not _ORDINARY.issuperset((dtype, ref.dtype)):
                refuse_unholdable(key, ref, dtype)

    def aliases(
        self,
        named: Sequence[NamedTensor],
        metadata: Mapping[str, str],
        stays: str = "",
        *,
        are_shared: bool,
    ) -> dict[str, str]:
        """The first name of a view in sorted order is kept, as the library does, or the first that
        matches `stays`.

        A name is not dropped that the file's metadata needs for something else, or that a reader
        would take for a text.
        """
        if not are_shared and not _may_alias(metadata):
            return {}
        views: dict[Hashable, list[str]] = {}
        for key, ref, dtype in named:
            if ref.numel:  # a component of a sparse tensor stays what it is where its twin is cast
                views.setdefault((view_identity(ref), dtype), []).append(key)
        taken = {"format", "device", *metadata}
        aliases: dict[str, str] = {}
        for names in views.values():
            if len(names) > 1:
                first, *others = sorted(names, key=lambda one: (not fnmatchcase(one, stays), one))
                aliases |= {name: first for name in others if name not in taken}
        kept = {key for key, _, _ in named if key not in aliases}
        return aliases_in({**metadata, **aliases}, kept)

    def metadata(
        self,
        keys: Sequence[str],
        refs: Sequence[TensorRef],
        checkpoint: Checkpoint,
        retag: Retag,
    ) -> dict[str, str]:
        aliases = _aliases_of(checkpoint)
        metadata = {
            name: value
            for name, value in checkpoint.metadata.items()
            if name not in aliases and name != "device"
        }
        if _may_alias(metadata):
            for name in aliases_in(metadata, {*keys}):
                del metadata[name]  # what a reader would take for one of ours
        if metadata.get("format") not in _OTHER_FRAMEWORKS:
            metadata["format"] = "pt"
        tags = set(map(retag, {ref.pieces[0].storage.location for ref in refs}))
        for tag in tags:
            # one that is none of torch, which a reader would take for an alias or a checksum
            is_odd = not (_is_tag(tag) or {"device", tag}.isdisjoint(keys))
            if is_odd or not tag.isascii():
                what = f"the location tag '{printable(tag)}' is not a device"
                raise DeviceUnavailable(what, hint="name one with --device")
        if len(tags) == 1:
            metadata["device"] = tags.pop()
        return metadata

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        """Tensors lie in the order of falling element size, and of the given order within a size,
        so that each is aligned in the file.
        """
        sizes = sorted({dtype.itemsize for _, _, dtype in tensors}, reverse=True)
        ordered = [item for size in sizes for item in tensors if item[2].itemsize == size]
        # as json writes it, which would take a dict and two lists of each tensor
        text = bytearray(b"{")
        if metadata:
            text += b'"%s":%s,' % (RESERVED.encode(), header_text(metadata))
        at, ends = 0, array("Q")
        for key, ref, dtype in ordered:
            if key == RESERVED:
                what = "a tensor cannot be named __metadata__ in safetensors"
                raise CheckpointError(what, where=key, hint="use --rename")
            fields, nbytes = _entry_fields(dtype, ref.dtype, ref.shape)
            text += f"{_quoted(key)}:{{{fields}[{at},{at + nbytes}]}},".encode()
            at += nbytes
            ends.append(at)
        del text[max(1, len(text) - 1) :]  # the last comma
        text += b"}"
        lead = header_bytes(text)
        items = _Items(ordered, lead, ends)
        ending = b"" if ordered else lead
        return Layout(items, len(lead) + at, ending=lambda _crcs: ending, has_crcs=False)

    def load_checker(self, nbytes: int) -> None:
        import safetensors  # noqa: F401

        if nbytes > _SHORT:
            import numpy  # noqa: F401 - by which the library opens a file

    def check_written(self, written: Path, name: PurePath, count: int) -> None:
        """Let the safetensors library read the header that was written."""
        if written.stat().st_size <= _SHORT:
            from safetensors import deserialize

            from ckptconv.io.staging import drafted  # who only reads makes nothing

            with _seen_by_library(name):
                read: Any = deserialize  # it has no types
                seen = len(read(drafted(written)))
        else:
            with _opened(written, name) as opened:
                seen = len(opened.offset_keys())  # unsorted, in half the time
        if seen != count:
            what = f"the safetensors library sees {seen} tensors in it"
            raise VerificationFailed(what, path=name)


class _Items(Sequence[WriteItem]):
    """The payloads of a file, behind its header `lead`: each ends so many bytes behind that. They
    are made when they are asked for, for a million would take 130 MB.
    """

    def __init__(self, tensors: Sequence[NamedTensor], lead: bytes, ends: Sequence[int]) -> None:
        self._tensors, self._lead, self._ends = tensors, lead, ends

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, at: Any) -> Any:
        key, ref, dtype = self._tensors[at]
        begin, lead = 0, self._lead
        if at:
            begin, lead = self._ends[at - 1], b""
        place = len(self._lead) + begin
        return made(WriteItem, (key, lead, place, self._ends[at] - begin, ref, dtype))


@lru_cache(maxsize=1 << 12)  # few forms, of very many tensors
def _entry_fields(dtype: DType, own: DType, shape: tuple[int, ...]) -> tuple[str, int]:
    """What the entry of a tensor says up to its place, and how many bytes it has there: one of the
    type `own` that is written as `dtype`.
    """
    nbytes = prod(shape) * dtype.bits >> 3
    code, shape = written_form(own, shape) or (dtype.safetensors, shape)
    if dtype is FLOAT4_PAIRS and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    sizes = ",".join(map(str, shape))
    return f'"dtype":"{code}","shape":[{sizes}],"data_offsets":', nbytes


# Bytes of a file that the library is given whole: it opens a longer one by numpy, whose import
# takes 0.14 s and 14 MB; to take 4 MB apart takes 0.01 s and 6 MB. Of very many small tensors it
# takes as long.
_SHORT = 4 << 20


def entries_seen(
    written: Path, name: PurePath
) -> tuple[dict[str, str] | None, dict[str, tuple[str, tuple[int, ...]]]]:
    """What the safetensors library sees in a file that will be `name`: its metadata, and the dtype
    and the shape of each tensor. Raises `VerificationFailed` when it does not open it.
    """
    with _opened(written, name) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return opened.metadata(), {
            key: (item.get_dtype(), tuple(item.get_shape())) for key, item in slices.items()
        }


@contextlib.contextmanager
def _opened(written: Path, name: PurePath) -> Iterator[Any]:
    """A file as the safetensors library has it; `VerificationFailed` where it does not open it."""
    from safetensors import safe_open

    with _seen_by_library(name), safe_open(written, framework="np") as opened:
        yield opened


@contextlib.contextmanager
def _seen_by_library(name: PurePath) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        what = f"the safetensors library does not open it: {error}"
        raise VerificationFailed(what, path=name) from error


# What transformers reads in another way than torch's files
_OTHER_FRAMEWORKS = ("mlx", "flax", "tf")


def _aliases_of(checkpoint: Checkpoint) -> Collection[str]:
    """The metadata entries of a safetensors source that became keys."""
    if not _may_alias(checkpoint.metadata):
        return ()
    tensors = (ref for found in checkpoint.state_dicts() for _, ref in found.tensors())
    own = {ref.storage.name for ref in tensors if ref.is_view}
    return aliases_in(checkpoint.metadata, own)


SAFETENSORS = SafetensorsFile()
