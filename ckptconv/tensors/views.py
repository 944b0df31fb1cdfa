"""Tensors seen otherwise: the same bytes under another shape or in another order."""

from __future__ import annotations

from math import prod

from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.tensors.refs import (
    Piece,
    Shape,
    TensorRef,
    box_of,
    contiguous_stride,
    is_contiguous,
    permuted,
)


def transposed(ref: TensorRef) -> TensorRef:
    """The last two dimensions in the other order."""
    *outer, one, other = range(len(ref.shape))
    return permuted(ref, (*outer, other, one))


def in_order(ref: TensorRef) -> TensorRef:
    """The same values end to end in C order: itself, or gathered when they are read."""
    if ref.is_view and is_contiguous(ref.shape, ref.stride):
        return ref
    from ckptconv.tensors.computed import elementwise

    return elementwise("cast", [ref], (), ref.dtype, ref.storage.name)


def reshaped(ref: TensorRef, shape: Shape, where: str) -> TensorRef:
    """The values in C order under another shape, of as many elements.

    Raises `MalformedCheckpoint` where they do not lie in order, or are not as many.
    """
    if ref.shape == shape:
        return ref
    if prod(shape) != ref.numel:
        raise MalformedCheckpoint(f"cannot have the shape {list(shape)}", where=where)
    if not ref.is_view or not is_contiguous(ref.shape, ref.stride):
        raise MalformedCheckpoint("does not lie in order", where=where)
    stride, piece = contiguous_stride(shape), ref.pieces[0]
    part = Piece(piece.storage, piece.offset, shape, stride, (0,) * len(shape))
    return ref._replace(shape=shape, stride=stride, pieces=(part,))


def cut(ref: TensorRef, shape: Shape) -> TensorRef:
    """The leading part of a tensor, of this shape."""
    return box_of(ref, (0,) * len(shape), shape)


def whole_tiles(rows: int, columns: int) -> Shape:
    """The size of scales in tiles of 128 x 4, of which the last ones may be filled in part."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def unswizzled(ref: TensorRef, where: str) -> TensorRef:
    """Scales in tiles of 128 x 4, as cuBLAS reads them, in the order of rows and columns.

    Both sizes are multiples of those of a tile. Within a tile the rows stand 32 apart: (32, 4, 4).
    Source: "1D Block Scaling Factors Layout" of the cuBLAS documentation.
    """
    rows, columns = ref.shape
    tiles = reshaped(ref, (rows // 128, columns // 4, 32, 4, 4), where)
    return reshaped(in_order(permuted(tiles, (0, 3, 2, 1, 4))), (rows, columns), where)


def repeated(ref: TensorRef, sizes: Shape) -> TensorRef:
    """The same values once more for each index of new leading dimensions; a view."""

    def before(numbers: Shape, each: Shape) -> Shape:
        return (*each, *numbers)

    none = (0,) * len(sizes)
    pieces = tuple(
        piece._replace(
            shape=before(piece.shape, sizes),
            stride=before(piece.stride, none),
            start=before(piece.start, none),
        )
        for piece in ref.pieces
    )
    return ref._replace(
        shape=before(ref.shape, sizes), stride=before(ref.stride, none), pieces=pieces
    )
