"""The safetensors container: read it, and lay it out for writing.

Eight bytes of header length (little-endian, at most 100 MB), a JSON object from key to ``{dtype,
shape, data_offsets}`` with an optional ``__metadata__`` of strings, then the values in C order,
little-endian, without gaps, to the very end of the file. Source: the format's README and
`Metadata::validate` of the safetensors library 0.8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

from ckptconv.formats.layout import Layout, WriteItem
from ckptconv.formats.safetensors_header import (
    RESERVED,
    header_bytes,
    header_text,
    malformed,
    read_header,
)
from ckptconv.io.source import Source
from ckptconv.objects.encodings import ENCODINGS, restore, written_form
from ckptconv.pickles.nodes import ORDERED_DICT, Call
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from ckptconv.support.records import made
from ckptconv.tensors.dtypes import BY_SAFETENSORS, FLOAT4, FLOAT4_PAIRS, DType
from ckptconv.tensors.refs import Storage, TensorRef, refuse_dimensions, whole_view
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import SAFETENSORS_LIBRARY, Container

CONTAINER = Container(
    "safetensors", SAFETENSORS_LIBRARY, suffix=".safetensors", shares=False, names_storages=True
)
_NOT_ALIASES = ("format", "device", ENCODINGS)
_FIELDS = {"dtype", "shape", "data_offsets"}


def is_safetensors(head: bytes) -> bool:
    """Whether a file that starts with `head` (some hundred bytes) is meant to be safetensors: JSON
    behind 8 bytes.

    A header length is never eight bytes of text, as the beginning of a JSON file would be.
    """
    return head[8:].lstrip().startswith(b"{") and not all(
        32 <= byte < 127 or byte in b"\t\r\n" for byte in head[:8]
    )


def open_safetensors(source: Source, _: Callable[[Source], Checkpoint]) -> Checkpoint:
    """Open a safetensors file; reads its header, no payload.

    The tree is an OrderedDict in header order. A metadata entry that names a missing tensor as the
    alias of one that is there (as the library's `save_model` records tied tensors) becomes a second
    key of that tensor. The metadata's ``device`` becomes the location tag.
    """
    header, start = read_header(source)
    metadata = _metadata(source, header.pop(RESERVED, None))
    location = metadata.get("device", "cpu")
    tensors = {}
    spans = []
    for key, entry in header.items():
        dtype, shape, begin, end = _entry(source, key, entry)
        spans.append((begin, end))
        fields = (source, start + begin, end - begin, location, key, dtype, None, False, None)
        tensors[key] = whole_view(made(Storage, fields), dtype, shape)
    _refuse_gaps(source, spans, source.size - start)
    tensors |= {alias: tensors[kept] for alias, kept in aliases_in(metadata, tensors).items()}
    root = Call(ORDERED_DICT, ())
    root.pairs = list(_restored(source, tensors, metadata).items())
    return Checkpoint(source.path, CONTAINER, root, source.size, metadata, sources=(source,))


def aliases_in(metadata: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The entries that call a tensor by a second name: each with the one of `names` that it is."""
    found: dict[str, str] = {}
    for alias, kept in metadata.items():
        if (kept in names or kept in found) and alias not in names and alias not in _NOT_ALIASES:
            found[alias] = found.get(kept, kept)
    return found


def _restored(
    source: Source, tensors: dict[str, TensorRef], metadata: dict[str, str]
) -> dict[str, Any]:
    """The tensors that were encoded put together again; their recipes leave the metadata."""
    recipes = metadata.pop(ENCODINGS, None)
    if recipes is None:
        return tensors
    try:
        return restore(tensors, recipes)
    except CheckpointError as error:
        raise error.at(path=source.path) from error.__cause__


_NOT_ACCOUNTED = "the library may accept it, but ckptconv does not read what it cannot account for"


def _metadata(source: Source, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise malformed(source, RESERVED, "holds something other than strings")
    try:
        "".join((*metadata, *metadata.values())).encode()
    except UnicodeEncodeError:
        raise malformed(source, RESERVED, "holds half a character (a lone surrogate)") from None
    return metadata


def _entry(source: Source, key: str, entry: Any) -> tuple[DType, tuple[int, ...], int, int]:
    if type(entry) is not dict or entry.keys() != _FIELDS:
        what = "its entry does not have exactly dtype, shape and data_offsets"
        raise MalformedCheckpoint(what, path=source.path, where=key, hint=_NOT_ACCOUNTED)
    dtype = BY_SAFETENSORS.get(entry["dtype"]) if type(entry["dtype"]) is str else None
    shape, offsets = entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise malformed(source, key, f"has the unknown dtype {entry['dtype']!r}")
    if (
        type(shape) is not list
        or type(offsets) is not list
        or len(offsets) != 2
        or not _are_sizes([*shape, *offsets])
    ):
        raise malformed(source, key, "its shape or data_offsets hold something other than sizes")
    refuse_dimensions(len(shape), key)  # before sizes are multiplied
    begin, end = offsets
    if dtype is FLOAT4_PAIRS:
        dtype, shape = (
            (FLOAT4, shape)
            if not shape or shape[-1] % 2
            else (dtype, [*shape[:-1], shape[-1] // 2])
        )
    numel = prod(shape)
    if (not numel or numel >> 63) and prod(size for size in shape if size) >> 63:
        what = f"its shape {shape} overflows"
        raise MalformedCheckpoint(what, path=source.path, where=key, hint=_NOT_ACCOUNTED)
    nbits = numel * dtype.bits
    if nbits % 8:
        raise malformed(
            source, key, f"its {numel} elements of {dtype.bits} bits do not fill whole bytes"
        )
    if nbits // 8 != end - begin:
        raise malformed(
            source, key, f"its shape needs {nbits // 8} bytes, its data_offsets span {end - begin}"
        )
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            what = "its name holds half a character (a lone surrogate)"
            raise malformed(source, key, what) from None
    return dtype, tuple(shape), begin, end


def _are_sizes(values: Sequence[Any]) -> bool:
    return {*map(type, values)} == {int} and min(values) >= 0 and not max(values) >> 63


def _refuse_gaps(source: Source, spans: list[tuple[int, int]], available: int) -> None:
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise malformed(
                source,
                "data_offsets",
                f"leave a gap or overlap at byte {min(at, begin)} of the data",
            )
        at = end
    if at != available:
        raise malformed(source, "data", f"has {available} bytes where the header needs {at}")


# ------------------------------------------------------------------------------------------ writing


def lay_out_safetensors(
    tensors: Sequence[tuple[str, TensorRef, DType]], metadata: Mapping[str, str]
) -> Layout:
    """The output file for named tensors, each with the dtype to write it in, and metadata.

    Tensors lie in the order of falling element size, and of the given order within a size, so that
    each is aligned in the file; the header is padded with spaces to a multiple of 8, as the library
    does.
    """
    ordered = sorted(tensors, key=lambda item: -item[2].itemsize)
    header: dict[str, Any] = {RESERVED: dict(metadata)} if metadata else {}
    at = 0
    sizes = []
    for key, ref, dtype in ordered:
        if key == RESERVED:
            raise CheckpointError(
                "a tensor may not be called __metadata__ in safetensors",
                where=key,
                hint="use --rename",
            )
        nbytes = ref.numel * dtype.bits >> 3
        code, shape = written_form(ref) or (dtype.safetensors, ref.shape)
        if dtype is FLOAT4_PAIRS and shape:
            shape = (*shape[:-1], shape[-1] * 2)
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        sizes.append(nbytes)
        at += nbytes
    return _items(ordered, sizes, header_bytes(header_text(header)))


def _items(
    ordered: Sequence[tuple[str, TensorRef, DType]], sizes: Sequence[int], header: bytes
) -> Layout:
    items = []
    lead, at = header, len(header)
    for (key, ref, dtype), nbytes in zip(ordered, sizes, strict=True):
        items.append(WriteItem(key, lead, at, nbytes, ref, dtype))
        lead, at = b"", at + nbytes
    return Layout(
        tuple(items), at, lambda _index, _crc: b"", lambda _crcs: b"" if items else header
    )
