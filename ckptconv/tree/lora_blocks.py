"""The two matrices of LoRA for a weight whose rows are those of several modules: taken apart into
those of the modules, and put together. No value changes, and neither does a product.

Rows of a product need the rows of ``up`` and all of ``down``. Where each module has columns of its
own in ``up``, and zeros in all others, its rank is theirs: so are modules put together here, one
block each, as sd-scripts (networks/lora_flux.py, Apache-2.0) does with `split_qkv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.io.source import MemorySource
from ckptconv.support.errors import KeyMismatch, RefusedObject
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.layouts import Move
from ckptconv.tensors.refs import Piece, Shape, Storage, TensorRef, box_of, view_identity
from ckptconv.tensors.stream import read_box

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


_MOST_BYTES = 1 << 30
_NOWHERE = PurePath("made here")


class Factors(NamedTuple):
    """The matrices of a product: (rows, rank) and (rank, columns)."""

    up: TensorRef
    down: TensorRef


def taken_apart(factors: Factors, sizes: Sequence[int]) -> list[Factors | None]:
    """The matrices of modules that have so many rows each; None for a module of which nothing but
    zeros is there, where others have blocks of their own.
    """
    up, down = factors
    rank = down.shape[0]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    used = [_used_columns(up, start, size) for start, size in zip(starts, sizes, strict=True)]
    blocks = _equal_blocks(used, rank) or _blocks_one_after_another(used, rank)
    if blocks is None:
        blocks = [(0, rank)] * len(sizes)
    return [
        Factors(_box(up, (start, first), (size, count)), _box(down, (first,), (count,)))
        if count
        else None
        for (first, count), start, size in zip(blocks, starts, sizes, strict=True)
    ]


def _box(ref: TensorRef, start: Shape, shape: Shape) -> TensorRef:
    """A box that is all of the dimensions that are not named."""
    rest = ref.shape[len(start) :]
    if (*shape, *rest) == ref.shape:
        return ref
    return box_of(ref, (*start, *(0,) * len(rest)), (*shape, *rest))


def _used_columns(up: TensorRef, start: int, size: int) -> Array:
    """Which columns of some rows have a bit that is set."""
    raw = _bytes(_box(up, (start,), (size,)))
    found: Array = raw.reshape(size, up.shape[1], -1).max(axis=(0, 2))
    return found


def _bytes(ref: TensorRef) -> Array:
    """The bytes of a matrix, which are read at once: those of adapters are small.

    A file may call a few bytes a huge matrix, seen many times.
    """
    if ref.nbytes > _MOST_BYTES:
        what = f"is {list(ref.shape)}, which is more than a matrix of an adapter has"
        raise RefusedObject(what, where=ref.storage.name)
    for storage in dict.fromkeys(piece.storage for piece in ref.pieces):
        Checksums().read(storage)
    return read_box(ref, (0,) * len(ref.shape), ref.shape).view("u1")


def _equal_blocks(used: Sequence[Array], rank: int) -> list[tuple[int, int]] | None:
    """The columns of each module, where all have as many and no others are used."""
    if rank % len(used):
        return None
    count = rank // len(used)
    blocks = [(at * count, count) for at in range(len(used))]
    for (first, _), columns in zip(blocks, used, strict=True):
        if columns[:first].any() or columns[first + count :].any():
            return None
    return blocks


def _blocks_one_after_another(used: Sequence[Array], rank: int) -> list[tuple[int, int]] | None:
    """The columns of each module, where those that are used stand one after another and are all."""
    blocks, at = [], 0
    for columns in used:
        numbers = columns.nonzero()[0]
        count = 0 if not len(numbers) else int(numbers[-1]) + 1 - at
        if len(numbers) and int(numbers[0]) != at:
            return None
        blocks.append((at, count))
        at += count
    return blocks if at == rank else None


def put_together(parts: Sequence[Factors | None], sizes: Sequence[int], where: str) -> Factors:
    """The matrices of a weight whose rows are those of modules, with so many rows each; None for
    one to which nothing is added. `where` is a key, for messages.
    """
    there = [part for part in parts if part is not None]
    for part, size in zip(parts, sizes, strict=True):
        if part is not None and part.up.shape[0] != size:
            what = f"has {part.up.shape[0]} rows where the base has {size}"
            raise KeyMismatch(what, where=where)
    first = there[0]
    if len({(part.up.dtype, part.down.dtype, part.down.shape[1:]) for part in there}) > 1:
        what = "differs in type or columns from what it is put together with"
        raise KeyMismatch(what, where=where, hint="give all one --dtype in a conversion before")
    if len(there) == len(parts) and all(_is_same(first.down, part.down) for part in there):
        return Factors(_stacked([part.up for part in there]), first.down)
    rank = sum(part.down.shape[0] for part in there)
    rows = [*_rows_of_blocks(parts, sizes, rank)]
    return Factors(_stacked(rows), _stacked([part.down for part in there]))


def _is_same(one: TensorRef, other: TensorRef) -> bool:
    if one.shape != other.shape or view_identity(one) == view_identity(other):
        return one.shape == other.shape
    return bool((_bytes(one) == _bytes(other)).all())


def _rows_of_blocks(
    parts: Sequence[Factors | None], sizes: Sequence[int], rank: int
) -> Iterator[TensorRef]:
    """The rows of each module: its block, and zeros in the columns of all others."""
    first = next(part.up for part in parts if part is not None)
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        own = 0 if part is None else part.up.shape[1]
        columns = [zeros(first, (size, at)), zeros(first, (size, rank - at - own))]
        if part is not None:
            columns.insert(1, part.up)
        yield _stacked([ref for ref in columns if ref.shape[1]], dim=1)
        at += own


def zeros(like: TensorRef, shape: Shape) -> TensorRef:
    """A tensor of zeros of the type of another one: one zero, seen many times."""
    storage = in_memory(bytes(like.dtype.itemsize), like.dtype, like.location)
    shape = (*shape, *like.shape[len(shape) :])
    piece = Piece(storage, 0, shape, (0,) * len(shape), (0,) * len(shape))
    return like._replace(shape=shape, stride=piece.stride, pieces=(piece,))


def in_memory(raw: bytes, dtype: DType, location: str) -> Storage:
    """A storage of bytes that were made here."""
    return Storage(MemorySource(raw, _NOWHERE), 0, len(raw), location, "made here", dtype)


def _stacked(refs: Sequence[TensorRef], dim: int = 0) -> TensorRef:
    """Tensors one after another along a dimension."""
    [made] = Move("concat", ((dim,), tuple(ref.shape[dim] for ref in refs))).on(refs)
    return made
