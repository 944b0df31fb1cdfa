"""The values of a small tensor, one by one: for a few of them Python is quicker than numpy."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from ckptconv.support.records import dataclass

MOST = 64
"""The most values that are taken one by one."""


@dataclass(frozen=True, slots=True)
class FewValues:
    """Finite values in rising order, each by itself; tells what a `Distribution` tells, exactly."""

    values: array[float]

    @property
    def is_exact(self) -> bool:
        return True

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """For each fraction q, the first value that has at least q of all before it or at its
        place.
        """
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
