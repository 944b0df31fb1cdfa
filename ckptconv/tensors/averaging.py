"""Tensors whose values are the weighted means of others, computed when they are read.

The sum is kept in float64 (complex128 for complex types), in the order of the sources, divided by
that of the weights, and cast to their type at the end, as torch's `to` casts. What is averaged is
checked against its checksums before its first value is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckptconv.io.source import CHUNK, Fingerprint, Source
from ckptconv.tensors.casting import cast
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Piece, Shape, Storage, TensorRef, contiguous_stride
from ckptconv.tensors.stream import read_box, verbatim_range

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_FLOAT64 = BY_NAME["float64"]
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def can_average(dtype: DType) -> bool:
    """Whether a type has means: floating and complex ones do."""
    return dtype.is_floating or dtype.kind == "complex"


def averaged(
    refs: Sequence[TensorRef], weights: Sequence[float], checksums: Checksums
) -> TensorRef:
    """The mean of tensors of one type and shape, each with its weight."""
    first = refs[0]
    source = _AveragedSource(refs, weights, checksums)
    nbytes = first.numel * first.dtype.itemsize
    storage = Storage(source, 0, nbytes, first.location, f"the mean of {first.storage.name}")
    stride = contiguous_stride(first.shape)
    piece = Piece(storage, 0, first.shape, stride, (0,) * len(first.shape))
    return TensorRef(first.dtype, first.shape, stride, (piece,), first.requires_grad)


class _AveragedSource(Source):
    """The bytes of a mean; they are computed each time they are read."""

    def __init__(
        self, refs: Sequence[TensorRef], weights: Sequence[float], checksums: Checksums
    ) -> None:
        first = refs[0]
        self.path = first.storage.source.path
        self.size = first.numel * first.dtype.itemsize
        self._refs, self._weights = refs, weights
        self._dtype = first.dtype
        self._real = BY_NAME[_PARTS.get(first.dtype.name, first.dtype.name)]
        self._checksums: Checksums | None = checksums

    def read_into(self, offset: int, view: memoryview) -> None:
        size = self._dtype.itemsize
        first, stop = offset // size, -(-(offset + len(view)) // size)
        at, step = 0, CHUNK // size
        for start in range(first, stop, step):
            raw = self._mean(start, min(step, stop - start))
            low = max(0, offset - start * size)
            part = raw[low : low + len(view) - at]
            view[at : at + len(part)] = part
            at += len(part)

    def read(self, offset: int, nbytes: int) -> bytes:
        made = bytearray(nbytes)
        self.read_into(offset, memoryview(made))
        return bytes(made)

    def fingerprint(self) -> Fingerprint:
        places = tuple(
            (piece.storage.source.fingerprint(), piece.storage.offset, *piece[1:])
            for ref in self._refs
            for piece in ref.pieces
        )
        return ("mean", self._dtype.name, tuple(self._weights), places)

    def close(self) -> None:
        """What it reads is closed by whoever opened it."""

    def check_unchanged(self) -> None:
        for ref in self._refs:
            for piece in ref.pieces:
                piece.storage.source.check_unchanged()

    def _mean(self, first: int, count: int) -> memoryview:
        """The bytes of so many elements of the mean."""
        import numpy as np

        if self._checksums is not None:
            for ref in self._refs:
                for piece in ref.pieces:
                    self._checksums.read(piece.storage)
            self._checksums = None
        whole = sum(self._weights)
        with np.errstate(all="ignore"):
            mean = self._sum(first, count, self._weights) / whole
            if not np.isfinite(mean).all():  # the sum may be beyond all numbers, but not the mean
                shares = [weight / whole for weight in self._weights]
                mean = np.where(np.isfinite(mean), mean, self._sum(first, count, shares))
        return cast(mean.view(np.uint8).data, _FLOAT64, self._real).data

    def _sum(self, first: int, count: int, weights: Sequence[float]) -> Array:
        """The weighted sum of so many elements."""
        import numpy as np

        total: Array | None = None
        for ref, weight in zip(self._refs, weights, strict=True):
            raw = memoryview(elements(ref, first, count))
            numbers = np.frombuffer(cast(raw, self._real, _FLOAT64).data, "<f8") * weight
            total = numbers if total is None else np.add(total, numbers, out=total)
        assert total is not None
        return total


def elements(ref: TensorRef, first: int, count: int) -> bytes:
    """The bytes of `count` elements of a tensor from the one with this number on, in C order."""
    size = ref.dtype.itemsize
    if (verbatim := verbatim_range(ref)) is not None:
        storage, start = verbatim
        return storage.source.read(storage.offset + start + first * size, count * size)
    return b"".join(read_box(ref, *box).tobytes() for box in _boxes(ref.shape, first, count))


def _boxes(shape: Shape, first: int, count: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes (start, shape) that hold just these elements, one after another in C order.

    >>> list(_boxes((3, 4), 2, 7))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if len(shape) <= 1:
        if count:
            yield ((first,), (count,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    row, within = divmod(first, inner)
    if within or count < inner:
        part = min(count, inner - within)
        for start, box in _boxes(shape[1:], within, part):
            yield (row, *start), (1, *box)
        row, count = row + 1, count - part
    if rows := count // inner:
        yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
        row, count = row + rows, count - rows * inner
    for start, box in _boxes(shape[1:], 0, count):
        yield (row, *start), (1, *box)
