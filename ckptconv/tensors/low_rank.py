"""Adapters merged into weights: the operation ``low-rank``, which adds scaled products of small
matrices to a weight, and ``matmul``, ``multiply`` and ``kron``, of which LoHa, LoKr and Tucker
factors are made.

    weight + scale x (up @ down)

in float32, rounded once to the type of the output. The order of the sums is part of the value: each
element of ``up @ down`` is a chain of fused multiply-adds in the order of the rank, which is what
torch's `matmul` on a CPU gives (MKL 2024.2 with AVX2: every bit, for ranks up to 192 and more than
a few rows and columns; beyond 192 it sums in blocks). A library for matrices on another machine
takes another order, so its result is used only where it cannot decide a bit of the output; what is
near a border of rounding is worked out by the chain. So values are the same on every machine, for
every box of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from itertools import islice
from math import prod

from ckptconv.support.arrays import Array, np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.casting import Cast, Raw, as_floats, cast, octets
from ckptconv.tensors.dtypes import BY_NAME, FLOAT32, FLOAT64, DType
from ckptconv.tensors.plain_numbers import Number, quotient, real, rounded, single
from ckptconv.tensors.refs import Box, Shape, blocks_of, number_at


class Term(NamedTuple):
    """What is added: `scale` times the product of two inputs, ``up`` (rows, `rank`) and ``down``
    (`rank`, columns), or, of rank 0, times one input in the shape of the weight.
    """

    rank: int
    scale: float


class LowRank(NamedTuple):
    """Parameters of ``low-rank``. Its inputs are the weight, those of each of the `terms` in their
    order, and the magnitude of each row, if any.

    The first `outer` dimensions count matrices (experts); then come rows; all others are columns.
    A delta is rounded to the type `delta_as` before it is added, if one is named; ``float64`` says
    that sums are of that type. `row` is the
    shape of a whole row where there is a magnitude: rows of the sum are then divided by their norm
    plus `epsilon` and multiplied by it (DoRA, arXiv:2402.09353).
    """

    terms: tuple[Term, ...]
    outer: int = 0
    delta_as: str = ""
    row: Shape = ()
    epsilon: float = 0.0


def without_rounding(how: LowRank) -> LowRank:
    """The same where the output is of another type than the weight: no delta is rounded to that."""
    if how.delta_as == "float64":
        return how
    return how._replace(delta_as="")


class Product(NamedTuple):
    """Parameters of ``matmul``: as of a `Term` and of `LowRank`."""

    rank: int
    outer: int = 0


class Kron(NamedTuple):
    """Parameters of ``kron``: rows and columns of the second input, whose dimensions are behind."""

    rows: int
    columns: int


# ------------------------------------------------------------------------------- what is read


def low_rank_needs(how: LowRank, box: Box, count: int) -> Sequence[Box]:
    """The boxes of the inputs for a box of the output."""
    start, shape = box
    if how.row:  # the norm is that of whole rows
        start = (*start[: how.outer + 1], *(0,) * len(how.row))
        shape = (*shape[: how.outer + 1], *how.row)
    found = [(start, shape)]
    for term in how.terms:
        if term.rank:
            found += product_needs(Product(term.rank, how.outer), (start, shape), 2)
        else:
            found.append((start, shape))
    if how.row:
        found.append(((start[how.outer],), (shape[how.outer],)))
    return found


def product_needs(how: Product, box: Box, count: int) -> Sequence[Box]:
    """The rows of the first matrix and the columns of the second that a box of a product needs."""
    start, shape = box
    at = how.outer
    up = (*start[: at + 1], 0), (*shape[: at + 1], how.rank)
    down = (*start[:at], 0, *start[at + 1 :]), (*shape[:at], how.rank, *shape[at + 1 :])
    return [up, down]


def kron_needs(how: Kron, box: Box, count: int) -> Sequence[Box]:
    """The boxes of both inputs of a Kronecker product."""
    (row, column, *rest), (rows, columns, *sizes) = box
    high, first_row, some_rows = _blocks(row, rows, how.rows)
    wide, first_column, some_columns = _blocks(column, columns, how.columns)
    return [
        ((high[0], wide[0]), (high[1], wide[1])),
        ((first_row, first_column, *rest), (some_rows, some_columns, *sizes)),
    ]


def _blocks(start: int, count: int, size: int) -> tuple[tuple[int, int], int, int]:
    """Of a run of rows the first of the blocks that they are in, and how many these are; then the
    first row within a block, and how many: all rows of a block where there are several blocks.
    """
    first, blocks = blocks_of(start, count, size)
    if blocks == 1:
        return (first, 1), start - first * size, count
    return (first, blocks), 0, size


# ------------------------------------------------------------------------------------- values


def low_rank_values(how: LowRank, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """The bytes of a box of the output, from those of the boxes that it needs."""
    shapes = [_flat(shape, how.outer) for _, shape in low_rank_needs(how, box, len(inputs))]
    wide = FLOAT64 if how.delta_as == "float64" else FLOAT32
    base = as_floats(*inputs[0], wide).reshape(shapes[0])
    given = [as_floats(*one, FLOAT32) for one in inputs[1:]]
    shaped = (one.reshape(shape) for one, shape in zip(given, shapes[1:], strict=True))
    deltas = [
        _Delta(term, [*islice(shaped, 2 if term.rank else 1)], how.delta_as) for term in how.terms
    ]
    with np.errstate(all="ignore"):
        if how.row:
            whole = _of_magnitude(how, _sum(base, deltas), given[-1], box)
            return cast(octets(whole), wide, target)
        return _by_rows(base, deltas, wide, target)


# About the elements of a sum that are worked out at a time: their arrays stay within the cache.
_ROWS = 1 << 16


def _by_rows(base: Array, deltas: Sequence[_Delta], wide: DType, target: DType) -> Cast:
    """The sum in the type `target`, some rows at a time: by a quick product where that decides all
    bits, by the chain where it does not.
    """
    count, rows, columns = base.shape
    step = max(1, _ROWS // max(1, columns))
    made = np.empty(base.shape, f"<u{target.itemsize}")
    may_be_quick = target.itemsize == 2 and wide is FLOAT32
    overflowed = 0
    for one in range(count):
        unsure: list[Array] = []
        for first in range(0, rows, step):
            part = base[one, first : first + step]
            own = [delta.rows(one, first, first + step) for delta in deltas]
            quick = _quick_sum(part, own, target) if may_be_quick else None
            if quick is None:
                result = cast(octets(_sum(part, own)), wide, target)
            else:
                result, places = quick
                unsure.append(places + first * columns)
            made[one, first : first + step] = np.frombuffer(result.data, made.dtype).reshape(
                part.shape
            )
            overflowed += result.overflowed
        if unsure:
            places = np.concatenate(unsure)
            total = base[one].reshape(-1)[places]
            for delta in deltas:
                total = total + delta.rows(one, 0, rows).at(places)
            result = cast(octets(total), FLOAT32, target)
            made[one].reshape(-1)[places] = np.frombuffer(result.data, made.dtype)
            overflowed += result.overflowed
    return Cast(octets(made), overflowed)


def _sum(base: Array, deltas: Sequence[_Delta]) -> Array:
    whole = base.copy()
    for delta in deltas:
        whole += delta.exact()
    return whole


def _flat(shape: Shape, outer: int) -> Shape:
    """A box as matrices: how many, rows, columns."""
    if not shape:
        return 1, 1, 1
    return prod(shape[:outer]), shape[outer], prod(shape[outer + 1 :])


class _Delta:
    """A term for a box, or some rows: `exact` values, and quick ones with how far they are off."""

    def __init__(self, term: Term, factors: Sequence[Array], rounded_as: str) -> None:
        self._rank, self._factors = term.rank, factors
        self._scale = np.float32(term.scale)
        # peft rounds the delta of embeddings and of `target_parameters` before it adds it, that of
        # Linear and Conv never
        self._as = BY_NAME[rounded_as or "float32"]
        self._off: Array | None = None

    def rows(self, matrix: int, first: int, stop: int) -> _Delta:
        """The same for some rows of one matrix, as arrays of two dimensions."""
        if self._rank and self._off is None:
            # any order of n products is off by at most n/2**24 of the sum of their sizes (Higham,
            # Accuracy and Stability, 3.1), and that is at most the product of the norms
            up, down = self._factors
            squares = np.einsum("orn,orn->on", down, down, dtype=np.float64)
            most = np.sqrt(squares.max(axis=1, initial=0))
            share = (2 * self._rank + 12) * 1.02 / 2**24 * abs(float(self._scale))
            norms = np.sqrt(np.einsum("omr,omr->om", up, up, dtype=np.float64))
            self._off = norms * most[:, None] * share
        part = copy(self)
        first_one, *others = self._factors
        part._factors = [first_one[matrix, first:stop], *(one[matrix] for one in others)]
        if self._off is not None:
            part._off = self._off[matrix, first:stop, None]
        return part

    def exact(self) -> Array:
        """The delta, each element as it is defined."""
        product = chained(*self._factors) if self._rank else self._factors[0]
        return self._rounded(self._scale * product)

    def bounds(self) -> tuple[Array, Array] | None:
        """Values that are not above and not below those of `exact`, which are the same but for the
        order of sums; None where none can be told.
        """
        if not self._rank:
            known = self._rounded(self._scale * self._factors[0])
            return known, known.copy()
        assert self._off is not None
        off = self._off
        if not (off < 2.0**100).all() or ((off > 0) & (off < 2.0**-100)).any():
            return None  # NaN is not less than anything, and what is denormal has no such bound
        made = np.matmul(*self._factors)
        made *= self._scale
        off = off.astype(np.float32)
        high = made + off
        np.subtract(made, off, out=made)
        return self._rounded(made), self._rounded(high)

    def at(self, places: Array) -> Array:
        """As `exact`, for the elements of these numbers."""
        if not self._rank:
            return self._rounded(self._scale * self._factors[0].reshape(-1)[places])
        up, down = self._factors
        rows, columns = np.divmod(places, down.shape[1])
        left = up.T[:, rows].astype(np.float64)
        right = down[:, columns]
        total = np.zeros(len(places), np.float32)
        for k in range(self._rank):
            total = (left[k] * right[k] + total).astype(np.float32)
        return self._rounded(self._scale * total)

    def _rounded(self, values: Array) -> Array:
        if self._as is FLOAT32:
            return values
        raw = cast(octets(values), FLOAT32, self._as)
        return as_floats(raw.data, self._as, FLOAT32).reshape(values.shape)


# Elements of a product that are worked out at a time, so that they stay within the cache.
_ROOM = 1 << 14


def chained(up: Array, down: Array) -> Array:
    """The product of matrices of float32, or of as many pairs of them, each element by fused
    multiply-adds in the order of the rank.

    The product of two numbers is exact in float64; a sum that is rounded there and again to float32
    is another one than the fused one in about one of 2**29 cases, and then everywhere the same.
    """
    if up.ndim == 3:
        return np.stack([chained(*pair) for pair in zip(up, down, strict=True)])
    made = np.zeros((len(up), down.shape[1]), np.float32)
    step = max(1, _ROOM // max(1, down.shape[1]))
    left, right = up.astype(np.float64), down.astype(np.float64)
    for first in range(0, len(up), step):
        part = made[first : first + step]
        product = np.empty(part.shape, np.float64)
        for k in range(up.shape[1]):
            np.multiply(left[first : first + step, k, None], right[k], out=product)
            np.add(product, part, out=product)
            np.copyto(part, product, casting="same_kind")
    return made


# Where more than one of so many elements are near a border, all are worked out by the chain.
_MANY = 16


def _quick_sum(base: Array, deltas: Sequence[_Delta], target: DType) -> tuple[Cast, Array] | None:
    """The sum in a type of 16 bits, and the numbers of the elements in which the quick product does
    not decide all bits, which are not counted as beyond the type; None where these are too many.
    """
    low, high = base, base
    for delta in deltas:
        both = delta.bounds()
        if both is None:
            return None
        # rounding is monotone: so are sums, step by step; memory that was just used is warm
        low = np.add(low, both[0], out=both[0])
        high = np.add(high, both[1], out=both[1])
    made = cast(octets(low), FLOAT32, target)
    if target.name == "bfloat16":
        places = _other_halves(low.reshape(-1).view(np.uint32), high.reshape(-1).view(np.uint32))
    else:
        other = cast(octets(high), FLOAT32, target)
        places = np.flatnonzero(np.frombuffer(made.data, "<u2") != np.frombuffer(other.data, "<u2"))
    if len(places) * _MANY > base.size:
        return None
    lost = 0
    if made.overflowed and len(places):
        lost = cast(octets(low.reshape(-1)[places]), FLOAT32, target).overflowed
    return Cast(made.data, made.overflowed - lost), places


def _other_halves(one: Array, other: Array) -> Array:
    """Where the bits of two numbers may have other leading halves after they are rounded to them:
    also where one of both is a tie. The first array is overwritten.
    """
    upper = np.maximum(one, other)
    upper += np.uint32(0x8000)
    lower = np.minimum(one, other, out=one)
    lower += np.uint32(0x7FFF)
    lower ^= upper
    return np.flatnonzero(lower > np.uint32(0xFFFF))


def _of_magnitude(how: LowRank, whole: Array, magnitude: Array, box: Box) -> Array:
    """Whole rows, divided by their norms and multiplied by their magnitudes; the box of them."""
    norms = _norms(whole) + np.float32(how.epsilon)
    factors = (magnitude / norms)[..., None]
    start, shape = box
    inner = tuple(
        slice(at, at + size)
        for at, size in zip(start[how.outer + 1 :], shape[how.outer + 1 :], strict=True)
    )
    made = (whole * factors).reshape(*whole.shape[:2], *how.row)
    part: Array = made[(slice(None), slice(None), *inner)]
    return part


# Sums of squares that torch keeps side by side: the floats of a register of AVX2
# (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp). Its norms are some units off the exact ones.
_LANES = 8


def _norms(rows: Array) -> Array:
    """The norms of rows as `torch.linalg.norm` has them: each lane sums every eighth square, then
    the lanes are added up, then the squares that are left.
    """
    squares = np.square(rows)
    *outer, size = rows.shape
    whole = size - size % _LANES
    lanes = np.add.reduce(squares[..., :whole].reshape(*outer, -1, _LANES), axis=-2)
    total: Array = lanes[..., 0].copy()
    for lane in range(1, _LANES):
        total += lanes[..., lane]
    for at in range(whole, size):
        total += squares[..., at]
    return np.sqrt(total)


def product_values(how: Product, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """A box of the product of two matrices."""
    factors = [
        as_floats(*one, FLOAT32).reshape(_flat(shape, how.outer))
        for one, (_, shape) in zip(inputs, product_needs(how, box, 2), strict=True)
    ]
    with np.errstate(all="ignore"):
        made = chained(*factors)
    return cast(octets(made), FLOAT32, target)


def multiply_values(how: object, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """The products of the elements of two inputs at one place."""
    one, other = (as_floats(*given, FLOAT32) for given in inputs)
    with np.errstate(all="ignore"):
        return cast(octets(one * other), FLOAT32, target)


def kron_values(how: Kron, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """A box of the Kronecker product of two inputs."""
    (row, column, *_), (rows, columns, *_) = box
    needed = kron_needs(how, box, 2)
    one, other = (
        as_floats(*given, FLOAT32).reshape(shape)
        for given, (_, shape) in zip(inputs, needed, strict=True)
    )
    down, along = np.arange(row, row + rows), np.arange(column, column + columns)
    ((high, wide), _), ((first, begin, *_), _) = needed
    outer = one[np.ix_(down // how.rows - high, along // how.columns - wide)]
    inner = other[np.ix_(down % how.rows - first, along % how.columns - begin)]
    with np.errstate(all="ignore"):
        made = outer.reshape(*outer.shape, *(1,) * (inner.ndim - 2)) * inner
    return cast(octets(made), FLOAT32, target)


# ------------------------------------------------------------------------------- one element


def low_rank_plain(how: LowRank, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    """One element, from the numbers that it needs, once more in nothing but Python."""
    width = prod(how.row)
    row = [_plain_sum(how, numbers, column, width) for column in range(width)]
    if not how.row:
        return row[0]
    norm = single(_plain_norm(row) + single(how.epsilon))
    magnitude = single(real(numbers[-1][0]))
    index = number_at(box[0][how.outer + 1 :], how.row)
    return single(single(quotient(magnitude, norm)) * row[index])


def _plain_norm(row: Sequence[float]) -> float:
    squares = [single(value * value) for value in row]
    whole = len(row) - len(row) % _LANES
    lanes = [0.0] * _LANES
    for at, square in enumerate(squares[:whole]):
        lanes[at % _LANES] = single(lanes[at % _LANES] + square)
    total = 0.0
    for square in (*lanes, *squares[whole:]):
        total = single(total + square)
    return single(math.sqrt(total)) if total >= 0 else math.nan


def _plain_sum(how: LowRank, numbers: Sequence[Sequence[Number]], column: int, width: int) -> float:
    total = real(numbers[0][column])
    is_double = how.delta_as == "float64"
    others = iter(numbers[1:])
    for term in how.terms:
        one = next(others)
        if term.rank:
            product = _plain_product(one, next(others)[column::width])
        else:
            product = single(real(one[column]))
        delta = single(single(term.scale) * product)
        if how.delta_as:
            delta = real(rounded(delta, BY_NAME[how.delta_as]))
        total = total + delta if is_double else single(total + delta)
    return total


def product_plain(how: Product, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    """One element of a product of matrices."""
    return _plain_product(*numbers)


def _plain_product(row: Sequence[Number], column: Sequence[Number]) -> float:
    total = 0.0
    for one, other in zip(row, column, strict=True):
        total = single(total + single(real(one)) * single(real(other)))
    return total


def multiply_plain(how: object, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    """One element of two multiplied at its place."""
    return single(single(real(numbers[0][0])) * single(real(numbers[1][0])))
