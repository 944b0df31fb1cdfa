"""How the values of two tensors differ, in one pass over both; norms are summed in float64 without
overflow.
"""

from __future__ import annotations

import math
from typing import Any

from ckptconv.support.arrays import Array, np
from ckptconv.support.progress import Meter
from ckptconv.support.records import dataclass
from ckptconv.tensors.element_pairs import PairRun, Tolerance, aligned, words_of
from ckptconv.tensors.refs import TensorRef, index_of


class Norms:
    """The lengths of both tensors, of their difference, and their inner product, run by run. Each
    sum is kept beside a power of two, so that no square of a float64 becomes infinite or nothing.
    """

    def __init__(self) -> None:
        self.nonfinite = 0
        self._has_numbers = False
        self._apart, self._ours, self._theirs, self._inner = _Sum(), _Sum(), _Sum(), _Sum()

    def add(self, run: PairRun) -> None:
        if run.apart is None and not run.is_same:
            return
        self._has_numbers = True
        with np.errstate(all="ignore"):
            if not (self._add_same(run.ours) if run.is_same else self._add_plainly(run)):
                self._add_carefully(run)

    def _add_same(self, numbers: Array) -> bool:
        """As `_add_plainly`, of a run that both have."""
        numbers = _reals(numbers)
        if not _NOTHING < (square := _inner(numbers, numbers)) < math.inf:
            return False
        for total in (self._ours, self._theirs, self._inner):
            total.add(square, 0)
        return True

    def _add_plainly(self, run: PairRun) -> bool:
        """Add sums that need no care; False if a value or a square may not be finite."""
        assert run.apart is not None
        ours, theirs, apart = _reals(run.ours), _reals(run.theirs), _reals(run.apart)
        squares = _inner(ours, ours), _inner(theirs, theirs), _inner(apart, apart)
        if not all(_NOTHING < square < math.inf for square in squares[:2]):
            return False
        if not (_NOTHING < squares[2] < math.inf or not apart.any()):
            return False
        for total, square in zip((self._ours, self._theirs, self._apart), squares, strict=True):
            total.add(square, 0)
        self._inner.add(_inner(ours, theirs), 0)
        return True

    def _add_carefully(self, run: PairRun) -> None:
        if run.is_same:
            run = PairRun(run.ours, run.ours, run.differ, np.zeros(len(run.ours)))
        finite = np.isfinite(run.ours) & np.isfinite(run.theirs)
        self.nonfinite += int(len(finite) - np.count_nonzero(finite))
        run = run.only(finite)
        (ours, first), (theirs, second) = _scaled(_reals(run.ours)), _scaled(_reals(run.theirs))
        self._ours.add(_inner(ours, ours), 2 * first)
        self._theirs.add(_inner(theirs, theirs), 2 * second)
        self._inner.add(_inner(ours, theirs), first + second)
        apart, third = _scaled_difference(run)
        self._apart.add(_inner(apart, apart), 2 * third)

    def rel_l2(self) -> float | None:
        if not self._has_numbers:
            return None
        if not self._theirs.value:
            return math.inf if self._apart.value else 0.0
        return self._apart.over(self._theirs)

    def cosine(self) -> float | None:
        if not self._has_numbers or not self._ours.value or not self._theirs.value:
            return None
        top, first, second = self._inner, self._ours, self._theirs
        ratio = top.value / math.sqrt(first.value) / math.sqrt(second.value)
        ratio = _power(ratio, top.exponent - (first.exponent + second.exponent) / 2)
        # rounding may leave it a few units in the last place beyond
        return max(-1.0, min(1.0, ratio))


class _Sum:
    """A sum: a number and the exponent of a power of two (an even one, if its root is taken)."""

    def __init__(self) -> None:
        self.value, self.exponent = 0.0, 0

    def add(self, value: float, exponent: int) -> None:
        if not value:
            return
        if not self.value:
            self.value, self.exponent = value, exponent
            return
        top = max(self.exponent, exponent)
        self.value = math.ldexp(self.value, self.exponent - top) + math.ldexp(value, exponent - top)
        self.exponent = top

    def over(self, other: _Sum) -> float:
        """The root of this sum divided by that of another."""
        return _power(
            math.sqrt(self.value) / math.sqrt(other.value), (self.exponent - other.exponent) / 2
        )


def _power(value: float, exponent: float) -> float:
    """`value` times a power of two; exponents here are whole."""
    try:
        return math.ldexp(value, int(exponent))
    except OverflowError:
        return math.inf


_NOTHING = 1e-200  # sums of squares below may lack some that became nothing


def _reals(values: Array) -> Array:
    """Values as float64, a complex one as two."""
    return values.astype(np.result_type(values, np.float64), copy=False).view(np.float64)


def _scaled_difference(run: PairRun) -> tuple[Array, int]:
    """a - b, scaled; integers subtracted as such; what would become infinite halved before."""
    if run.ours.dtype.kind in "iu":
        assert run.apart is not None
        return _scaled(_reals(run.apart))
    ours, theirs = _reals(run.ours), _reals(run.theirs)
    if np.isfinite(apart := ours - theirs).all():
        return _scaled(apart)
    apart, exponent = _scaled(ours / 2 - theirs / 2)
    return apart, exponent + 1


def _scaled(numbers: Array) -> tuple[Array, int]:
    """Finite numbers divided by a power of two, so that none is above 1, and its exponent."""
    exponent = math.frexp(float(np.abs(numbers).max(initial=0.0)))[1]
    return np.ldexp(numbers, -exponent), exponent


def _inner(first: Array, second: Array) -> float:
    # not np.dot: its threads wait for each other where cores are few
    return float((first * second).sum())


@dataclass(frozen=True, slots=True)
class Deviation:
    """How the values of two tensors differ.

    `count` of `numel` elements differ, `nans` of them with a NaN on either side. `max_abs` and
    `max_rel` are the largest |a - b| and |a - b| / |b| among the others; None if there are none, or
    if the dtype has no numbers. 0.0 means that only bits differ: the sign of a zero. `where` is the
    index of the largest |a - b| (of the first difference if there is none), `a` and `b` the values
    there.

    `rel_l2` is ||a - b|| / ||b|| over the whole tensor, and `cosine` the cosine of the angle
    between a and b, both in float64 (a complex value counts as two numbers). Elements that are NaN
    or infinite in either are in neither measure; `nonfinite` counts them. `rel_l2` is infinite
    where b is all zeros and a is not; `cosine` is None where either is all zeros. Both are None
    where the dtype has no numbers.
    """

    count: int
    numel: int
    nans: int
    max_abs: float | None
    max_rel: float | None
    where: tuple[int, ...]
    a: str
    b: str
    rel_l2: float | None = None
    cosine: float | None = None
    nonfinite: int = 0

    @property
    def badness(self) -> tuple[bool, float, float]:
        """What tells the worse of two.

        NaN and infinite differences count first, then the relative L2, then the largest |a - b|.
        """
        largest = self.max_abs or 0.0
        broken = bool(self.nans) or largest == math.inf
        return broken, -1.0 if self.rel_l2 is None else self.rel_l2, largest


def deviation(
    first: TensorRef, second: TensorRef, tolerance: Tolerance | None, meter: Meter | None = None
) -> Deviation | None:
    """How the values of two tensors of one shape differ; None where they do not.

    Without a tolerance, elements differ when their bits do, or, where the dtypes differ, when their
    numbers do. Types that hold no numbers (quantized, bits) are compared by their bits in any case.
    Memory: some 50 MB, whatever the size.
    """
    if tolerance is None and first.dtype is not second.dtype:
        tolerance = Tolerance(equal_nan=True)
    tally, norms = _Tally(), Norms()
    at = 0
    for ours, theirs in aligned(words_of(first), words_of(second)):
        run = PairRun.of(ours, first.dtype, theirs, second.dtype, tolerance)
        tally.add(at, run)
        norms.add(run)
        at += len(ours)
        if meter is not None:
            meter.add(ours.nbytes)
    return tally.deviation(first.shape, norms)


class _Tally:
    """What was found so far, run by run."""

    def __init__(self) -> None:
        self.numel = self.count = self.nans = 0
        self.max_abs: float | None = None
        self.max_rel: float | None = None
        self.at = 0
        self.values = ("", "")

    def add(self, start: int, run: PairRun) -> None:
        self.numel += len(run.ours)
        places = np.flatnonzero(run.differ)
        if not len(places):
            return
        if not self.count:
            self._note(start, int(places[0]), run)
        self.count += len(places)
        if run.apart is None or run.relative is None:
            return
        is_nan = np.isnan(run.apart[places])
        self.nans += int(is_nan.sum())
        places = places[~is_nan]
        if not len(places):
            return
        largest = int(places[np.argmax(run.apart[places])])
        if self.max_abs is None or run.apart[largest].item() > self.max_abs:
            self.max_abs = run.apart[largest].item()
            self._note(start, largest, run)
        self.max_rel = max(self.max_rel or 0.0, float(run.relative[places].max()))

    def _note(self, start: int, place: int, run: PairRun) -> None:
        self.at = start + place
        self.values = _text(run.ours[place]), _text(run.theirs[place])

    def deviation(self, shape: tuple[int, ...], norms: Norms) -> Deviation | None:
        if not self.count:
            return None
        return Deviation(
            self.count,
            self.numel,
            self.nans,
            self.max_abs,
            self.max_rel,
            index_of(self.at, shape),
            *self.values,
            rel_l2=norms.rel_l2(),
            cosine=norms.cosine(),
            nonfinite=norms.nonfinite,
        )


def _text(value: Any) -> str:
    item = value.item()
    if isinstance(item, bytes):
        return f"0x{item.hex()}"
    return repr(item)
