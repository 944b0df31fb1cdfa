"""The tensors of a checkpoint, a line each, and where their bytes lie. No value is read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ckptconv.formats.registry import Named, open_certain, open_to_look
from ckptconv.io.guarded import check_places
from ckptconv.support.errors import printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, Row
from ckptconv.support.table import Table, wrapped
from ckptconv.support.text import count_text, natural_key, size_text
from ckptconv.tensors.refs import DerivedSource, Shape, TensorRef, is_contiguous, view_identity
from ckptconv.values.named import NamedValue, named_values

Sort = Literal["name", "order", "size"]
"""How a listing is sorted: by name, numbers as numbers; in the order of the file; largest first."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the values of a tensor lie: the `offset` of the first one in the bytes of a `file`, how
    they are strided (None: they lie in C order).
    """

    file: str
    offset: int
    stride: Shape | None


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A tensor under one of its names, as `stats` and `show` name it.

    Of one that ckptconv has no numbers of, dtype and shape are None. `same_as` is the name before
    it of the very same view. `extent` is where it lies, if that was asked for and it does in one
    run of a file: it is not inflated, computed, or put together from pieces.
    """

    name: str
    dtype: str | None = None
    shape: Shape | None = None
    numel: int = 0
    nbytes: int = 0
    device: str | None = None
    same_as: str | None = None
    extent: Extent | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Some of the tensors of a checkpoint, how many it has, and what is to be said of it: of a
    folder, which of its files are not read.
    """

    path: str
    format: str
    tensors: tuple[ListedTensor, ...]
    of: int
    is_long: bool = False
    notes: tuple[str, ...] = ()


def list_tensors(
    source: Named,
    globs: Sequence[str] = (),
    *,
    sort: Sort = "name",
    is_long: bool = False,
    tag: str | None = None,
) -> Listing:
    """The tensors of the checkpoint `source` whose names match one of `globs` (none: all).

    With `is_long` it is told where they lie, for which the files of a folder are opened, also over
    a network. Raises `OptionRefused` for a glob that meets no name, else `CheckpointError`.
    """
    opened = open_certain(source, tag=tag) if is_long else open_to_look(source, tag=tag)
    with opened as checkpoint:
        # of a far file it would be a request for each tensor
        if is_long or not checkpoint.is_far:
            check_places(checkpoint.sources)
        every = named_values(checkpoint)
        found = every.matching(globs)
        firsts: dict[Hashable, str] = {}
        for item in every.values:
            firsts.setdefault(view_identity(item.ref), item.name)
        tensors = [_listed(item, firsts, is_long) for item in found.values]
        tensors += map(ListedTensor, found.unread)
    if sort == "name":
        tensors.sort(key=lambda item: natural_key(item.name))
    elif sort == "size":
        tensors.sort(key=lambda item: -item.nbytes)
    count = len(every.values) + len(every.unread)
    told = (str(checkpoint.path), checkpoint.format)
    return Listing(*told, (*tensors,), count, is_long, checkpoint.notes)


def _listed(item: NamedValue, firsts: Mapping[Hashable, str], is_long: bool) -> ListedTensor:
    ref, first = item.ref, firsts[view_identity(item.ref)]
    return ListedTensor(
        item.name,
        item.dtype.name,
        item.shape,
        item.numel,
        ref.nbytes,
        ref.location,
        None if first == item.name else first,
        _extent(ref) if is_long else None,
    )


def _extent(ref: TensorRef) -> Extent | None:
    storage = ref.storage
    if not ref.is_view or storage.source.is_inflated or isinstance(storage.source, DerivedSource):
        return None
    source, offset = storage.source.comes_from(storage.offset + ref.byte_span()[0])
    if source.is_inflated or source.is_in_memory():
        return None
    if is_contiguous(ref.shape, ref.stride):
        return Extent(str(source.path), offset, None)
    return Extent(str(source.path), offset, ref.stride)


# ------------------------------------------------------------------------------------------- text


def listing_lines(found: Listing, width: int, *, is_bare: bool = False) -> Iterator[Row]:
    """A table in lines of at most `width` columns where names leave room, as rows without labels;
    a bare one has no head, and no sum below.

    What all tensors have in common is left out of a long one: one file, strides in C order.
    """
    rows = [_row(item, found.is_long) for item in found.tensors]
    files = {item.extent.file for item in found.tensors if item.extent}
    shown = [
        at
        for at, name in enumerate(_HEAD)
        if at < _SHORT or (any(row[at] for row in rows) and (name != "file" or len(files) > 1))
    ]
    kept = [tuple(row[at] for at in shown) for row in rows]
    table = Table(tuple(_HEAD[at] for at in shown), kept, _TEXTS)
    yield from table.lines(width, has_head=not is_bare, has_cuts=False)
    if not is_bare:
        yield from (Row("", line, "good") for line in wrapped(_sum_text(found), width))


_HEAD = ("name", "dtype", "shape", "size", "device", "offset", "file", "stride", "same as")
_TEXTS = ("name", "dtype", "shape", "device", "file", "stride", "same as")
_SHORT = 4  # columns of a listing that is not long


def _row(item: ListedTensor, is_long: bool) -> tuple[str, ...]:
    name = printable(item.name, 500) or "the root"
    if item.dtype is None or item.shape is None:
        return (name, "-", "-", "-", *[""] * (len(_HEAD) - _SHORT))
    facts = (name, item.dtype, str(list(item.shape)), size_text(item.nbytes))
    if not is_long:
        return (*facts, *[""] * (len(_HEAD) - _SHORT))
    lies, stride = ("", ""), ""
    if item.extent is not None:
        lies = (str(item.extent.offset), printable(item.extent.file))
        stride = "" if item.extent.stride is None else str(list(item.extent.stride))
    return (*facts, printable(item.device), *lies, stride, printable(item.same_as or "", 500))


def _sum_text(found: Listing) -> str:
    # the first name of a tied tensor may not be among those that are listed
    once = {item.same_as or item.name: item for item in found.tensors}.values()
    count = count_text(len(found.tensors), "tensor")
    if len(found.tensors) < found.of:
        count = f"{len(found.tensors):,} of {count_text(found.of, 'tensor')}"
    values = count_text(sum(item.numel for item in once), "value")
    return f"{count}, {values}, {size_text(sum(item.nbytes for item in once))}"


# ------------------------------------------------------------------------------------------- JSON

_TENSOR = "name dtype shape values=numel bytes=nbytes device same_as"
_LISTING = Fields("path format tensors of notes", tensors=Fields(_TENSOR))
_LONG_LISTING = Fields(
    "path format tensors of notes",
    tensors=Fields(f"{_TENSOR} extent", extent=Fields("file offset stride")),
)


def listing_document(found: Listing) -> dict[str, Any]:
    """The tensors as a JSON object."""
    return (_LONG_LISTING if found.is_long else _LISTING).of(found)
