"""The values of a tensor as a stream of bytes in C order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

from ckptconv.io.source import CHUNK, Source
from ckptconv.support.arrays import Array, np
from ckptconv.tensors.refs import (
    Piece,
    Shape,
    Storage,
    TensorRef,
    box_of,
    contiguous_stride,
    is_contiguous,
    permuted,
)

# --------------------------------------------------------------------------------- streaming values


def verbatim_range(ref: TensorRef) -> tuple[Storage, int] | None:
    """The storage, and the byte in it from which its bytes are just the values in order.

    That means C order, little-endian, `ref.nbytes` bytes.

    None where the values must be gathered, swapped, conjugated, negated or put together.
    """
    dtype, _, _, pieces, _, conj, neg = ref
    if len(pieces) != 1 or conj or neg:
        return None
    storage, offset, shape, stride, _ = pieces[0]
    # a byte has no order
    if storage.big_endian and dtype.word > 1:
        return None
    if stride != (1,) and not is_contiguous(shape, stride):
        return None
    return storage, offset * dtype.itemsize


def verbatim_runs(ref: TensorRef) -> list[tuple[Storage, int, int]] | None:
    """The runs (storage, first byte, bytes) that make up the values in C order, little-endian.

    As `verbatim_range`, but also for a tensor put together from pieces that follow each other, such
    as shards of rows.
    """
    if len(ref.pieces) == 1:
        whole = verbatim_range(ref)
        return None if whole is None else [(*whole, ref.nbytes)]
    if ref.conj or ref.neg:
        return None
    steps = contiguous_stride(ref.shape)
    runs = []
    at = 0
    for piece in sorted(ref.pieces, key=lambda piece: piece.start):
        count = prod(piece.shape)
        if not count:
            continue
        first = sum(start * step for start, step in zip(piece.start, steps, strict=True))
        in_order = is_contiguous(piece.shape, piece.stride) and is_run(piece.shape, ref.shape)
        if first != at or not in_order or (piece.storage.big_endian and ref.dtype.word > 1):
            return None
        at += count
        runs.append((piece.storage, piece.offset * ref.dtype.itemsize, count * ref.dtype.itemsize))
    return runs if at == ref.numel else None


def is_run(box: Shape, shape: Shape) -> bool:
    """Whether a box's elements follow each other in the C order of `shape`.

    Then it is of ones, then of any size, then of whole dimensions.
    """
    axis = next((axis for axis, size in enumerate(box) if size != 1), len(box))
    return box[axis + 1 :] == shape[axis + 1 :]


def iter_chunks(ref: TensorRef) -> Iterator[memoryview]:
    """The values of `ref` in C order, little-endian, in views of about `CHUNK` bytes.

    Conj and neg bits are resolved.

    A view is valid until the next one is asked for. Memory is bounded by a few chunks, whatever the
    strides.
    """
    if (runs := verbatim_runs(ref)) is not None:
        if len(runs) == 1:
            [(storage, first, nbytes)] = runs
            yield from storage.source.stream(((storage.offset + first, nbytes),))
        else:
            yield from _streamed(runs)
    elif ref.numel:
        ref = _without_ones(ref) if len(ref.shape) > _ANY_NUMPY else ref
        for start, shape in _blocks(ref.shape, max(1, CHUNK // ref.dtype.itemsize)):
            yield _resolved(ref, _gather(ref, start, shape)).reshape(-1).data.cast("B")


def _streamed(runs: Sequence[tuple[Storage, int, int]]) -> Iterator[memoryview]:
    """The bytes of runs, those of one source in one go."""
    at = 0
    while at < len(runs):
        # a far source fetches ahead within one call, not beyond it
        source = runs[at][0].source
        end = next((i for i in range(at, len(runs)) if runs[i][0].source is not source), len(runs))
        yield from source.stream(
            [(storage.offset + first, nbytes) for storage, first, nbytes in runs[at:end]]
        )
        at = end


_ANY_NUMPY = 32  # dimensions that an array has in every numpy; 64 since numpy 2


def _without_ones(ref: TensorRef) -> TensorRef:
    """The same values without the dimensions of size 1.

    What is left of more than 32 would be 2**32 values and more.
    """
    return permuted(ref, [axis for axis, size in enumerate(ref.shape) if size != 1])


def read_box(ref: TensorRef, start: Shape, shape: Shape) -> Array:
    """The values of the box of `ref` at `start`, in C order, little-endian, as words."""
    return _resolved(ref, _gather(ref, start, shape)).reshape(-1)


def read_box_into(ref: TensorRef, start: Shape, shape: Shape, out: Array) -> None:
    """Fill `out`, an array of `words` of that shape in C order, as `read_box` gives them."""
    values = _resolved(ref, _gather(ref, start, shape, out))
    if values is not out:
        out[...] = values.reshape(-1).view(out.dtype).reshape(shape)


def _blocks(shape: Shape, limit: int) -> Iterator[tuple[Shape, Shape]]:
    """Boxes (start, shape) that cover `shape` in C order, each of at most `limit` elements."""
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield (0,) * len(shape), shape
        return
    rows = max(1, limit // inner)
    outer = shape[: axis - 1]
    for index in product(*map(range, outer)):
        for row in range(0, shape[axis - 1], rows):
            start = (*index, row, *[0] * (len(shape) - axis))
            yield start, (*[1] * len(outer), min(rows, shape[axis - 1] - row), *shape[axis:])


def words(itemsize: int) -> str:
    """The type of arrays of values of so many bytes that are moved as they are: numbers where there
    are such, which numpy moves in half the time of bytes of no type.
    """
    return f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"


def _gather(ref: TensorRef, start: Shape, shape: Shape, out: Array | None = None) -> Array:
    """The box of `ref` at `start` as words of its itemsize, in C order; in `out` if that is given.

    Boxes without a piece are never asked for.
    """
    if out is None:
        out = np.empty(shape, words(ref.dtype.itemsize))
    for piece in box_of(ref, start, shape).pieces:
        places = zip(piece.start, piece.shape, strict=True)
        inside: Any = (*(slice(at, at + size) for at, size in places), ...)
        _fill(out[inside], piece, ref.dtype.itemsize)
    return out


def _fill(out: Array, piece: Piece, itemsize: int) -> None:
    """Copy `piece` into `out`: at once where it lies as it does there, else by spans.

    A span is read with what nobody asked for where that is less than another read costs, but not
    too long. Else the box is cut along the dimension of the largest step.
    """
    work = [(out, piece.offset)]
    source, begin = piece.storage.source, piece.storage.offset
    steps = [step * itemsize for step in piece.stride]
    while work:
        box, first = work.pop()
        at = begin + first * itemsize
        if box.flags.c_contiguous and is_contiguous(box.shape, piece.stride):
            source.read_into(at, box.reshape(-1).view("u1").data)
            continue
        reach = [(size - 1) * step for size, step in zip(box.shape, steps, strict=True)]
        axis = max(range(box.ndim), key=lambda axis: steps[axis] if reach[axis] else -1)
        span = sum(reach) + itemsize
        inner = span - reach[axis]
        most = _SPAN if steps[axis] - inner <= A_READ else _SMALL
        if span <= most or not reach[axis]:
            _copy_span(box, source, at, span, steps)
            continue
        count = max(1, (most - inner) // steps[axis] + 1)
        cut: list[Any] = [slice(None)] * box.ndim
        for place in reversed(range(0, box.shape[axis], count)):
            cut[axis] = slice(place, place + count)
            work.append((box[tuple(cut)], first + place * piece.stride[axis]))


# The bytes that are read for a few of them, rather than to ask more often.
_SMALL = 1 << 16

# The bytes that are copied in the time that another read takes.
A_READ = 1 << 15

# The bytes of a span that are read at a time: they are still in a cache when they are copied. By
# spans of 1 MiB and half the tiles, to transpose took 1.2 times as long.
_SPAN = 2 << 20


def _copy_span(out: Array, source: Source, at: int, span: int, steps: Sequence[int]) -> None:
    """Copy values with these steps in so many bytes of a source into `out`."""
    if span <= _SMALL:  # a file knows what lies around small things
        copy_values(out, np.ndarray(out.shape, out.dtype, source.read(at, span), 0, steps))
        return
    with _room(span, _own_span) as raw:
        source.read_into(at, raw)
        copy_values(out, np.ndarray(out.shape, out.dtype, raw, 0, steps))


class _Own(threading.local):
    """Memory of a thread that it uses again: fresh memory takes the system as long as a copy."""

    room = memoryview(b"")


_own_span, _own_tiles = _Own(), _Own()


@contextmanager
def _room(nbytes: int, own: _Own) -> Iterator[memoryview]:
    """So many bytes within the block, for this thread alone."""
    # taken away meanwhile: what is read into it may be gathered itself
    room, own.room = own.room, memoryview(b"")
    if len(room) < nbytes:
        room = memoryview(bytearray(nbytes))
    try:
        yield room[:nbytes]
    finally:
        own.room = room


# Rows and columns, as they lie in the file, that are turned at a time. Column by column, each value
# fetches a line of the cache, which is gone again before the next value of that line is asked for
# where rows are a power of two apart: 2,048 x 2,048 bytes took 9 ns each, in tiles 0.8.
_TILE = 128

# The bytes of the tiles that are turned by one call, in the second cache: between calls, threads
# wait for each other, and by tiles of 32 kB two took longer than one.
_TILES = 1 << 19

# The bytes of a row that are still in the first cache when the next row needs them too.
_IN_CACHE = 1 << 14


def copy_values(out: Array, values: Array) -> None:
    """Copy `values` into `out`, which is in C order; tile by tile where they lie transposed."""
    sized = zip(values.strides, values.shape, strict=True)
    steps = [step if size > 1 else 0 for step, size in sized]
    found = [axis for axis, step in enumerate(steps[:-1]) if 0 < step < steps[-1]]
    if not found or steps[-1] * values.shape[-1] <= _IN_CACHE:
        out[...] = values
        return
    axis = min(found, key=lambda axis: steps[axis])
    out, values = np.moveaxis(out, axis, -2), np.moveaxis(values, axis, -2)
    *outer, rows, columns = values.shape
    is_large = rows * columns > _TILE * _TILE
    for place in np.ndindex(*outer) if is_large else [(...,)]:
        _copy_turned(out[place], values[place])


def _copy_turned(out: Array, values: Array) -> None:
    """Copy matrices whose columns lie closer than their rows."""
    *outer, rows, columns = values.shape
    size = max(1, _TILES // (_TILE * _TILE * values.itemsize)) * _TILE
    for at in range(0, columns, _TILE):
        for first in range(0, rows, size):
            stop = min(rows, first + size)
            whole = stop - (stop - first) % _TILE
            for begin, end in ((first, whole), (whole, stop)):
                if begin < end:
                    part = (..., slice(begin, end), slice(at, at + _TILE))
                    tiles = (*outer, -1, min(_TILE, end - begin), min(_TILE, columns - at))
                    # dimensions that are cut in two are views: what is set is set in `out`
                    _turn(out[part].reshape(tiles), values[part].reshape(tiles))


def _turn(out: Array, values: Array) -> None:
    """Copy tiles, as they lie first: lines of a tile that is read in place evict each other."""
    lying = values.swapaxes(-1, -2)
    with _room(lying.nbytes, _own_tiles) as raw:
        tiles = np.ndarray(lying.shape, lying.dtype, raw)
        tiles[...] = lying
        out[...] = tiles.swapaxes(-1, -2)


def _resolved(ref: TensorRef, values: Array) -> Array:
    """`values` (raw words as stored) with byte order, conj bit and neg bit taken into account."""

    word = ref.dtype.word
    if word > 1 and ref.pieces[0].storage.big_endian:
        values = values.reshape(-1).view(f"u{word}").byteswap()
    if not (ref.conj or ref.neg):
        return values
    # Negating a float is flipping its sign bit; for integers it is two's complement.
    words = values.reshape(-1).view(f"u{word}")
    if ref.dtype.kind == "int":
        return -words
    sign = words.dtype.type(1 << (8 * word - 1))
    flipped = words.copy()
    if ref.neg:
        flipped ^= sign
    if ref.conj:
        flipped[1::2] ^= sign
    return flipped
