"""Computed and cast values, held against a second, plain statement of the operation.

An output that is compared with the computation that made it is equal however wrong that is. So a
sample of the elements, the first and the last ones and those around the borders of what is computed
at a time among them, is worked out once more in numbers of Python, from the bytes of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from random import Random

from ckptconv.io.source import CHUNK
from ckptconv.tensors.computed import ComputedSource
from ckptconv.tensors.dtypes import FLOAT32, DType
from ckptconv.tensors.operations import OPERATIONS
from ckptconv.tensors.plain_numbers import Number, number_of, rounded, stands_for
from ckptconv.tensors.refs import Box, DerivedSource, Shape, TensorRef, box_of, index_of, origins
from ckptconv.tensors.stream import read_box

# The most elements of one tensor that are worked out once more
_MOST = 64

# The elements of an output, about: each takes 20 microseconds, and over a network a request.
_OF_ALL, _OF_ALL_FAR = 20_000, 32


def sample_size(tensors: list[tuple[TensorRef, DType]]) -> int:
    """How many elements of each of the computed ones among these are worked out once more."""
    made = [ref for ref, dtype in tensors if is_made(ref, dtype)]
    if not made:
        return 0
    if any(storage.source.fetched_from(0) is not None for storage in origins(made)):
        return min(_MOST, max(1, _OF_ALL_FAR // len(made)))
    return min(_MOST, max(2, _OF_ALL // len(made)))


def is_made(ref: TensorRef, dtype: DType) -> bool:
    """Whether the values of a tensor that is written as `dtype` are computed or cast.

    What is made in order alone is held against a checksum of what it should be: no second statement
    says more, and to make it for some elements takes making all that lie before.
    """
    sources = [piece.storage.source for piece in ref.pieces]
    derived = [source for source in sources if isinstance(source, DerivedSource)]
    if any(source.is_in_order for source in derived):
        return False
    return ref.dtype is not dtype or bool(derived)


def other_element(ref: TensorRef, dtype: DType, written: TensorRef, most: int) -> Shape | None:
    """The place of an element of `written` that is not what `ref` becomes in `dtype`; None where
    `most` elements, the edges first, are all right.
    """
    for number in _sample(ref.numel, ref.dtype.itemsize, _affordable(ref, most)):
        place = index_of(number, ref.shape)
        if not stands_for(_number_at(ref, place, dtype), dtype, _raw_at(written, place)):
            return place
    return None


# Numbers of the inputs, on average, for which an element of the sample is worked out
_NUMBERS = 32


def _affordable(ref: TensorRef, most: int) -> int:
    """How many elements are worked out of one that needs many numbers for each: at least two."""
    source = ref.pieces[0].storage.source if ref.numel else None
    if not isinstance(source, ComputedSource):
        return most
    needed = sum(prod(shape) for _, (_, shape) in source.needs(0, 1))
    return max(min(most, 2), min(most, most * _NUMBERS // max(1, needed)))


def _sample(numel: int, itemsize: int, most: int) -> list[int]:
    """The numbers of some elements: the first and last ones, some around each border of the blocks
    that are computed at a time, and some by chance (the same each time).
    """
    if numel <= most:
        return list(range(numel))
    step = CHUNK // itemsize
    borders = [at for start in range(step, numel, step) for at in (start - 1, start)]
    chance = Random(numel)
    edges = [0, numel - 1, 1, numel - 2, 2, numel - 3]
    drawn = chance.sample(borders, min(len(borders), most // 2))
    drawn += [chance.randrange(numel) for _ in range(most)]
    return list(dict.fromkeys(edges + drawn))[:most]


def _raw_at(ref: TensorRef, place: Shape) -> bytes:
    """The bytes of one element where it lies, little-endian."""
    piece = box_of(ref, place, (1,) * len(place)).pieces[0]
    storage, size, word = piece.storage, ref.dtype.itemsize, ref.dtype.word
    raw = storage.source.read(storage.offset + piece.offset * size, size)
    if not storage.big_endian:
        return raw
    return b"".join(raw[at : at + word][::-1] for at in range(0, size, word))


def _number_at(ref: TensorRef, place: Shape, target: DType) -> Number:
    """The number of an element, by plain statements of all operations, before it is rounded."""
    piece = box_of(ref, place, (1,) * len(place)).pieces[0]
    source = piece.storage.source
    if isinstance(source, ComputedSource):
        index = piece.offset + piece.storage.offset // ref.dtype.itemsize
        number = _computed_at(source, index, target)
    else:
        number = number_of(_raw_at(ref, place), ref.dtype)
    if ref.neg:
        number = -number
    return number.conjugate() if ref.conj else number


def _computed_at(source: ComputedSource, number: int, target: DType) -> Number:
    value = source.value
    box = index_of(number, value.shape), (1,) * len(value.shape)
    operation = OPERATIONS[value.operation]
    needed = operation.needs(value.parameters, box, len(value.inputs))
    is_other = source.is_once_rounded and target is not value.dtype
    numbers = [
        _numbers_in(ref, one, is_unrounded=is_other)
        for ref, one in zip(value.inputs, needed, strict=True)
    ]
    parameters = value.parameters
    if is_other:
        parameters = operation.for_another_type(parameters)
    made = operation.plain(parameters, box, numbers)
    return rounded(made, target if source.is_once_rounded else value.dtype)


def _numbers_in(ref: TensorRef, box: Box, *, is_unrounded: bool) -> list[Number]:
    """The numbers of a box of an input, in C order; many that lie in a file are read at once.
    `is_unrounded`: what is computed is not rounded to the type that it has.
    """
    start, shape = box
    target = FLOAT32 if is_unrounded and ref.dtype.itemsize < 4 else ref.dtype
    if prod(shape) <= _AT_ONCE or any(
        isinstance(piece.storage.source, DerivedSource) for piece in ref.pieces
    ):
        return [_number_at(ref, place, target) for place in _places(start, shape)]
    raw, size = read_box(ref, start, shape).tobytes(), ref.dtype.itemsize
    return [number_of(raw[at : at + size], ref.dtype) for at in range(0, len(raw), size)]


# Numbers that are read one by one, each where it lies
_AT_ONCE = 4


def _places(start: Shape, shape: Shape) -> Iterator[Shape]:
    return product(*(range(at, at + size) for at, size in zip(start, shape, strict=True)))
