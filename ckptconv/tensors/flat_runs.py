"""Tensors that lie flat in partitions: runs of elements, end to end over several storages, seen as
one tensor.

A run is contiguous where it lies and in the C order of the tensor, but seldom a box of it: a
partition ends anywhere. `shaped` cuts each run into the few boxes that it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.records import NamedTuple, made
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Piece, Shape, Storage, TensorRef, contiguous_stride
from ckptconv.tensors.stream import verbatim_range


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
        storage = _cut(merged[0], dtype)
        return TensorRef(
            dtype, shape, contiguous_stride(shape), (_box(storage, 0, shape, (0,) * len(shape)),)
        )
    boxes = _boxes(shape, tuple([run.numel for run in merged]))
    pieces = tuple(
        [
            made(Piece, (run.storage, run.first + skipped, box, stride, start))
            for run, its in zip(merged, boxes, strict=True)
            for start, box, stride, skipped in its
        ]
    )
    return TensorRef(dtype, shape, contiguous_stride(shape), pieces)


_Box = tuple[Shape, Shape, Shape, int]
"""A box of a tensor: start, shape, stride, and how many elements of its run lie before it."""


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
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and not (last.numel and run.numel):
            merged[-1] = last if last.numel else run
        elif (
            last is not None
            and last.storage is run.storage
            and last.first + last.numel == run.first
        ):
            merged[-1] = last._replace(numel=last.numel + run.numel)
        else:
            merged.append(run)
    return merged


def _cut(run: Run, dtype: DType) -> Storage:
    """A run as a storage of its own; its checksum is that of the storage it is part of."""
    whole, first, count = run
    size = dtype.itemsize
    return whole._replace(
        offset=whole.offset + first * size,
        nbytes=count * size,
        dtype=dtype,
        crc32=None,
        part_of=whole.part_of or whole,
    )


def _box(storage: Storage, offset: int, box: Shape, start: Shape) -> Piece:
    return Piece(storage, offset, box, contiguous_stride(box), start)


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
