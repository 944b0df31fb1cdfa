"""How the values of two tensors differ, in one pass over both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckptconv.support.progress import Meter
from ckptconv.support.records import dataclass
from ckptconv.tensors.element_pairs import Run, Tolerance, aligned, words_of
from ckptconv.tensors.norms import Norms
from ckptconv.tensors.refs import TensorRef

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


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
        largest = 0.0 if self.max_abs is None else self.max_abs
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
        run = Run.of(ours, first.dtype, theirs, second.dtype, tolerance)
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

    def add(self, start: int, run: Run) -> None:
        import numpy as np

        self.numel += len(run.ours)
        places = np.flatnonzero(run.differ)
        if not len(places):
            return
        if not self.count:
            self._note(start, int(places[0]), run)
        self.count += len(places)
        if run.apart is None or run.relative is None:
            return
        is_nan = (
            np.isnan(run.apart[places])
            if run.apart.dtype.kind == "f"
            else np.zeros(len(places), bool)
        )
        self.nans += int(is_nan.sum())
        places = places[~is_nan]
        if not len(places):
            return
        largest = int(places[np.argmax(run.apart[places])])
        if self.max_abs is None or run.apart[largest].item() > self.max_abs:
            self.max_abs = run.apart[largest].item()
            self._note(start, largest, run)
        self.max_rel = max(self.max_rel or 0.0, float(run.relative[places].max()))

    def _note(self, start: int, place: int, run: Run) -> None:
        self.at = start + place
        self.values = _text(run.ours[place]), _text(run.theirs[place])

    def deviation(self, shape: tuple[int, ...], norms: Norms) -> Deviation | None:
        if not self.count:
            return None
        where: list[int] = []
        rest = self.at
        for size in reversed(shape):
            rest, index = divmod(rest, size)
            where.insert(0, index)
        return Deviation(
            self.count,
            self.numel,
            self.nans,
            self.max_abs,
            self.max_rel,
            tuple(where),
            *self.values,
            rel_l2=norms.rel_l2(),
            cosine=norms.cosine(),
            nonfinite=norms.nonfinite,
        )


def _text(value: Any) -> str:
    item = value.item() if hasattr(value, "item") else value
    return f"0x{item.hex()}" if isinstance(item, bytes) else repr(item)
