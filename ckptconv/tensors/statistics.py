"""What is known of the values of a tensor: figures, and how the values are distributed.

Values of few kinds are counted one by one. Wider numbers are counted in buckets of the leading
bits: sign, exponent, and seven bits of the mantissa. So a bucket reaches from x to x * (1 + 2**-7)
at most, and a quantile, which is the middle of one, is off by at most `QUANTILE_ERROR` of itself.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from ckptconv.support.arrays import Array, np
from ckptconv.support.records import dataclass

QUANTILE_ERROR = 2.0**-8
"""The largest relative error of a quantile of numbers wider than 16 bits."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often values occur: `counts[i]` times one from `low[i]` to `high[i]`, in rising order.
    `low` and `high` are the same where each value is counted by itself.
    """

    low: Array
    high: Array
    counts: Array

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """For each fraction q, the value of the first element, of all in rising order, that has at
        least q of them before it or at its place; the middle of its bucket.
        """
        upto = np.cumsum(self.counts, dtype=np.int64)
        if not len(upto):
            return [math.nan] * len(fractions)
        ranks = [min(max(math.ceil(q * int(upto[-1])), 1), int(upto[-1])) for q in fractions]
        places = np.searchsorted(upto, ranks)
        low, high = self.low[places].astype(np.float64), self.high[places].astype(np.float64)
        return [float(value) for value in low / 2 + high / 2]

    def histogram(self, bins: int, low: float, high: float) -> list[int]:
        """How many values lie in each of so many bins of one width, from `low` to `high`. What a
        bucket holds is shared out over the bins that it reaches into.
        """
        if not len(self.counts):
            return [0] * bins
        if not low < high:
            return [int(self.counts.sum()), *[0] * (bins - 1)]
        edges = np.linspace(low / 2, high / 2, bins + 1) * 2  # their distance may be infinite
        # the cumulated counts as a line through the edges of the buckets; so nothing is lost by
        # rounding: the differences of whole numbers add up to all
        first = np.clip(self.low.astype(np.float64), low, high)
        last = np.clip(self.high.astype(np.float64), low, high)
        below = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        at = np.searchsorted(last, edges[1:-1], side="left")
        inside = np.zeros(bins - 1)
        partly = at < len(first)
        here = at[partly]
        width = last[here] - first[here]
        share = np.where(
            width > 0, (edges[1:-1][partly] - first[here]) / np.where(width > 0, width, 1), 0
        )
        inside[partly] = np.clip(share, 0, 1) * self.counts[here]
        upto = below[np.minimum(at, len(first))] + np.rint(inside).astype(np.int64)
        return [int(count) for count in np.diff(np.concatenate([[0], upto, [below[-1]]]))]


@dataclass(frozen=True, slots=True, repr=False)
class Statistics:
    """What is known of the values of a tensor.

    `numel` values; `nan` and `infinite` ones of them are in nothing that follows. `zeros` count
    -0.0 too. `minimum`, `maximum` and `abs_max` are exact (None: there are no values, or no
    numbers). `mean` and `std` are computed in float64; `std` divides by n - 1, as `torch.std` does
    (None for fewer than two values). `distinct` is the number of different values; where
    `distinct_is_exact` is False, the number of buckets that hold some: there are at least as many.
    `of_magnitudes`: the numbers are complex, and everything is of their absolute values.
    """

    numel: int
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    minimum: float | int | None = None
    maximum: float | int | None = None
    mean: float | None = None
    std: float | None = None
    distinct: int | None = None
    distinct_is_exact: bool = True
    of_magnitudes: bool = False
    distribution: Distribution | FewValues | None = None

    def __repr__(self) -> str:
        figures = ("nan", "infinite", "zeros", "minimum", "maximum", "mean", "std")
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in figures)
        return f"Statistics(numel={self.numel}, {told})"

    @property
    def abs_max(self) -> float | int | None:
        """The largest magnitude."""
        if self.minimum is None or self.maximum is None:
            return None
        return max(abs(self.minimum), abs(self.maximum))

    @property
    def finite(self) -> int:
        """How many values are neither NaN nor infinite."""
        return self.numel - self.nan - self.infinite

    def quantiles(self, fractions: Sequence[float]) -> list[float] | None:
        """The quantiles of the finite values; None where there are none.

        By nearest rank, exact for types of at most 16 bits; else off by at most `QUANTILE_ERROR`
        of themselves. Raises `ValueError` for a fraction that is not from 0 to 1.
        """
        if not all(0 <= fraction <= 1 for fraction in fractions):
            raise ValueError(f"{[*fractions]!r:.100} are not all from 0 to 1")
        if self.distribution is None or self.minimum is None or self.maximum is None:
            return None
        low, high = float(self.minimum), float(self.maximum)
        return [min(max(value, low), high) for value in self.distribution.quantiles(fractions)]

    def histogram(self, bins: int = 64) -> list[int] | None:
        """How many finite values lie in each of `bins` bins of one width between `minimum` and
        `maximum`; None where there are none.
        """
        if self.distribution is None or self.minimum is None or self.maximum is None:
            return None
        return self.distribution.histogram(bins, float(self.minimum), float(self.maximum))


# ------------------------------------------------------------------------------------- a few values


FEW = 64
"""The most values that are taken one by one."""


@dataclass(frozen=True, slots=True)
class FewValues:
    """Finite values in rising order, each by itself; tells what a `Distribution` tells, exactly."""

    values: array[float]

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """For each fraction q, the first value that has at least q of all up to its place."""
        count = len(self.values)
        ranks = (min(max(math.ceil(q * count), 1), count) for q in fractions)
        return [self.values[rank - 1] for rank in ranks]

    def histogram(self, bins: int, low: float, high: float) -> list[int]:
        """How many values lie in each of so many bins of one width, from `low` to `high`."""
        if not low < high:
            return [len(self.values), *[0] * (bins - 1)]
        step = high / bins - low / bins
        edges = (low + step * at for at in range(1, bins))
        upto = [0, *(bisect_left(self.values, edge) for edge in edges), len(self.values)]
        return [after - before for before, after in pairwise(upto)]


def mean_and_std(numbers: Sequence[float]) -> tuple[float, float | None] | None:
    """The mean and the standard deviation of finite numbers in rising order; None where they are so
    large or so small that their squares are not exact.
    """
    largest = max(abs(numbers[0]), abs(numbers[-1]))
    if largest and not 1e-140 < largest < 1e140:
        return None
    count = len(numbers)
    mean = math.fsum(numbers) / count
    if count < 2:
        return mean, None
    return mean, math.sqrt(
        math.fsum([(one - mean) * (one - mean) for one in numbers]) / (count - 1)
    )
