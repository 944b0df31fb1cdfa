"""Tensors put together from boxes that lie in several places: the boxes must cover the tensor
exactly, each value once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptconv.support.limits import refuse_beyond
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Piece, Shape, TensorRef, contiguous_stride

Box = tuple[Shape, Shape]
"""Where a box starts in its tensor, and its shape."""


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
    if (other := next((ref for _, ref in parts if ref.dtype is not dtype), None)) is not None:
        raise MalformedCheckpoint(f"is {dtype.name}, but one of its chunks is {other.dtype.name}")
    filled = [part for part in parts if part[1].numel]
    first = filled[0][1] if filled else next(ref for _, ref in parts)
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
    refuse_beyond("sharded_dimensions", len(axes), f"is split along {len(axes)} dimensions")
    corners: dict[Shape, int] = {}
    whole = [] if 0 in shape else [((0,) * len(shape), shape, -1)]
    for start, size, weight in [*((start, size, 1) for start, size in filled), *whole]:
        for corner, sign in _corners(start, size, axes):
            corners[corner] = corners.get(corner, 0) + sign * weight
    if any(corners.values()):
        raise _bad_cover(shape, filled)


def _corners(start: Shape, size: Shape, axes: Sequence[int]) -> Iterator[tuple[Shape, int]]:
    for high in product((0, 1), repeat=len(axes)):
        corner = tuple(start[axis] + up * size[axis] for axis, up in zip(axes, high, strict=True))
        yield corner, -1 if sum(high) % 2 else 1


def _bad_cover(shape: Shape, boxes: Sequence[Box]) -> CheckpointError:
    there, needed = sum(prod(size) for _, size in boxes), prod(shape)
    what = (
        f"its {len(boxes)} chunks hold {there} of {needed} values"
        if there < needed
        else "its chunks overlap"
    )
    return MalformedCheckpoint(
        f"{what}; its shape is {list(shape)}", hint="the checkpoint is incomplete or damaged"
    )
