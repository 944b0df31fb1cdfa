"""Tensors put together of what lies in several places: of boxes, or of flat runs of elements.

Boxes must cover the tensor exactly, each value once. A run is contiguous where it lies and in the C
order of the tensor, but seldom a box of it: a partition ends anywhere. `shaped` cuts each run into
the few boxes that it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod

from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import NamedTuple, made
from ckptconv.support.text import agreeing, count_text
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import (
    Box,
    Piece,
    Shape,
    Storage,
    TensorRef,
    contiguous_stride,
    whole_view,
)
from ckptconv.tensors.stream import verbatim_range

# ------------------------------------------------------------------------------------------ boxes


def assembled(dtype: DType, shape: Shape, parts: Sequence[tuple[Shape, TensorRef]]) -> TensorRef:
    """The tensor of `shape` whose values are those of `parts`: (start in the tensor, the values
    there).

    A part that is the whole tensor is given back as it is. Raises `MalformedCheckpoint` when the
    parts are of another type, leave a gap or overlap.
    """
    if len(parts) == 1 and parts[0][1].shape == shape and not any(parts[0][0]):
        ref = parts[0][1]
        if ref.dtype is dtype and len(parts[0][0]) == len(shape):  # nearly all of many
            return ref._replace(requires_grad=False) if ref.requires_grad else ref
    check_cover(shape, [(start, ref.shape) for start, ref in parts])
    other = next((ref for _, ref in parts if ref.dtype is not dtype), None)
    if other is not None:
        raise MalformedCheckpoint(f"is {dtype.name}, but one of its chunks is {other.dtype.name}")
    filled = [part for part in parts if part[1].numel]
    _, first = (filled or parts)[0]
    if len(filled) < 2 and first.shape == shape:
        return first._replace(requires_grad=False)
    if dtype.is_packed:
        raise UnsupportedCheckpoint(
            f"is {dtype.name} in {len(filled)} chunks, whose elements do not fill whole bytes"
        )
    if any(
        (ref.conj, ref.neg, _big(ref)) != (first.conj, first.neg, _big(first)) for _, ref in filled
    ):
        raise UnsupportedCheckpoint("its chunks differ in byte order or in their conj and neg bits")
    pieces = tuple(_moved(piece, start) for start, ref in filled for piece in ref.pieces)
    return TensorRef(
        dtype,
        shape,
        contiguous_stride(shape),
        pieces or first.pieces[:1],
        conj=first.conj,
        neg=first.neg,
    )


def _big(ref: TensorRef) -> bool:
    return ref.storage.big_endian and ref.dtype.word > 1


def _moved(piece: Piece, start: Shape) -> Piece:
    return piece._replace(start=tuple(a + b for a, b in zip(piece.start, start, strict=True)))


def check_cover(shape: Shape, boxes: Sequence[Box]) -> None:
    """Raise `MalformedCheckpoint` unless the boxes fill `shape` without gap and overlap.

    The indicator function of a box is the sum, over its corners, of step functions of alternating
    sign. Steps at different points are linearly independent. So the boxes add up to the whole just
    when the signed corners do: linear in their number.
    """
    for start, size in boxes:
        if len(start) != len(shape) or len(size) != len(shape):
            raise MalformedCheckpoint(
                f"has {len(shape)} dimensions, but one of its chunks {len(size)}"
            )
        if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
            raise MalformedCheckpoint(
                f"has the shape {list(shape)}, but a chunk of {list(size)} at {list(start)}"
            )
    if not boxes:
        raise MalformedCheckpoint("has no chunks")
    filled = [box for box in boxes if 0 not in box[1]]
    axes = [
        axis for axis in range(len(shape)) if any(size[axis] != shape[axis] for _, size in filled)
    ]
    # a box has two to the power of so many corners
    refuse_beyond("sharded_dimensions", len(axes), f"is split along {len(axes)} dimensions")
    corners: dict[Shape, int] = {}
    weighted = [(*box, 1) for box in filled]
    if 0 not in shape:
        weighted.append(((0,) * len(shape), shape, -1))
    for start, size, weight in weighted:
        for corner, sign in _corners(start, size, axes):
            corners[corner] = corners.get(corner, 0) + sign * weight
    if any(corners.values()):
        raise _bad_cover(shape, filled)


def _corners(start: Shape, size: Shape, axes: Sequence[int]) -> Iterator[tuple[Shape, int]]:
    for high in product((0, 1), repeat=len(axes)):
        corner = tuple(start[axis] + up * size[axis] for axis, up in zip(axes, high, strict=True))
        yield corner, (-1) ** sum(high)


def _bad_cover(shape: Shape, boxes: Sequence[Box]) -> CheckpointError:
    there, needed = sum(prod(size) for _, size in boxes), prod(shape)
    what = "its chunks overlap"
    if there < needed:
        holding = f"{count_text(len(boxes), 'chunk')} {agreeing(len(boxes), 'hold')}"
        what = f"its {holding} {there} of {needed} values"
    return MalformedCheckpoint(
        f"{what}; its shape is {list(shape)}", hint="the checkpoint is incomplete or damaged"
    )


# -------------------------------------------------------------------------------------- flat runs


class Run(NamedTuple):
    """`numel` elements of `storage` from element `first` on."""

    storage: Storage
    first: int
    numel: int


class Flat:
    """Contiguous tensors of one dtype seen end to end, as `torch.cat` of them flattened."""

    def __init__(self, parts: Sequence[TensorRef], where: str) -> None:
        """Raises `MalformedCheckpoint`, naming `where`, when a part is not contiguous or of another
        dtype than the first.
        """
        if not parts:
            raise MalformedCheckpoint("has no partitions", where=where)
        self._runs = [_whole_run(part, parts[0].dtype, where) for part in parts]
        self._ends = list(accumulate(run.numel for run in self._runs))
        self.dtype = parts[0].dtype
        self.numel = self._ends[-1]

    def runs(self, first: int, count: int) -> Iterator[Run]:
        """The runs of the `count` elements from `first` on, all there; of none, an empty run."""
        index = bisect_right(self._ends, first)
        if not count:
            yield self._runs[0]._replace(numel=0)
        while count:
            run = self._runs[index]
            skipped = first - (self._ends[index] - run.numel)
            taken = min(count, run.numel - skipped)
            if taken:
                yield Run(run.storage, run.first + skipped, taken)
            first, count, index = first + taken, count - taken, index + 1


def _whole_run(part: TensorRef, dtype: DType, where: str) -> Run:
    if part.dtype is not dtype:
        raise MalformedCheckpoint(
            f"its partitions are {dtype.name} and {part.dtype.name}", where=where
        )
    found = verbatim_range(part)
    if found is None:
        raise MalformedCheckpoint(
            "a partition is not one contiguous little-endian run", where=where
        )
    storage, start = found
    return Run(storage, start // dtype.itemsize, part.numel)


def shaped(runs: Iterable[Run], dtype: DType, shape: Shape) -> TensorRef:
    """The tensor of `shape` whose values in C order are the `runs`, one after the other; they must
    be as many as it has.

    Where it is one run, that is made a storage of its own: neighbours in a partition share a file,
    not memory.
    """
    merged = _merged(runs)
    if len(merged) == 1:
        storage, first, count = merged[0]
        own = storage.cut(first * dtype.itemsize, count * dtype.itemsize, dtype)
        return whole_view(own, dtype, shape)
    boxes = _boxes(shape, tuple([run.numel for run in merged]))
    pieces = tuple(
        [
            made(Piece, (run.storage, run.first + skipped, box, stride, start))
            for run, its in zip(merged, boxes, strict=True)
            for start, box, stride, skipped in its
        ]
    )
    return TensorRef(dtype, shape, contiguous_stride(shape), pieces)


# A box of a tensor: start, shape, stride, and how many elements of its run lie before it
_Box = tuple[Shape, Shape, Shape, int]


@lru_cache(maxsize=256)  # most parameters of a model have a few shapes, and are cut alike
def _boxes(shape: Shape, counts: tuple[int, ...]) -> list[list[_Box]]:
    """The boxes that each of the runs is which together are a tensor of `shape`."""
    found: list[list[_Box]] = []
    at = 0
    for count in counts:
        skipped, its = 0, list[_Box]()
        for start, box in flat_boxes(shape, at, at + count):
            its.append((start, box, contiguous_stride(box), skipped))
            skipped += prod(box)
        found.append(its)
        at += count
    return found


def _merged(runs: Iterable[Run]) -> list[Run]:
    """The runs, joined where one follows another; an empty one if there are no others."""
    every = list(runs)
    merged: list[Run] = []
    for run in [one for one in every if one.numel] or every[-1:]:
        last = merged[-1] if merged else None
        if last and last.storage is run.storage and last.first + last.numel == run.first:
            merged[-1] = last._replace(numel=last.numel + run.numel)
        else:
            merged.append(run)
    return merged


def flat_boxes(shape: Shape, first: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """The boxes (start, shape), in C order, that the elements `first` to `stop` of a tensor of
    `shape` are.

    At most two for each dimension but the first, and one: rows that were begun, whole rows, rows
    that are not finished.

    >>> list(flat_boxes((3, 4), 2, 11))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if not shape and first < stop:
        yield (), ()
        return
    inner = contiguous_stride(shape)
    while first < stop:
        axis = next(
            axis for axis, step in enumerate(inner) if first % step == 0 and first + step <= stop
        )
        start = tuple(first // step % size for step, size in zip(inner, shape, strict=True))
        rows = min(shape[axis] - start[axis], (stop - first) // inner[axis])
        yield start, (*(1,) * axis, rows, *shape[axis + 1 :])
        first += rows * inner[axis]
