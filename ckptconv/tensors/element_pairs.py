"""Elements of two tensors side by side: which differ, and which by more than a tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ckptconv.support.arrays import Array, np
from ckptconv.support.choices import refuse_no_flag
from ckptconv.support.errors import OptionRefused
from ckptconv.support.records import dataclass
from ckptconv.tensors.casting import as_floats, octets
from ckptconv.tensors.dtypes import FLOAT64, DType
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.stream import iter_chunks


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two numbers count as equal: |a - b| <= atol + rtol * |b|, as in `torch.isclose`; NaN
    only with `equal_nan`.

    Raises `OptionRefused` (a `ValueError` too) for a bound that is negative or not a number.
    """

    atol: float = 0.0
    rtol: float = 0.0
    equal_nan: bool = False

    def __post_init__(self) -> None:
        for name, bound in (("atol", self.atol), ("rtol", self.rtol)):
            if type(bound) is bool or not isinstance(bound, (int, float)) or not bound >= 0:
                raise OptionRefused(f"{name}: a tolerance is 0 or more, not {bound!r:.100}")
        refuse_no_flag(equal_nan=self.equal_nan)


def words_of(ref: TensorRef) -> Iterator[Array]:
    """The elements of a tensor in C order, each as so many raw bytes."""
    if ref.dtype.is_packed:
        return _unpacked(ref)
    word = f"<u{ref.dtype.itemsize}" if ref.dtype.itemsize <= 8 else "V16"
    return (np.frombuffer(chunk, word) for chunk in iter_chunks(ref))


def _unpacked(ref: TensorRef) -> Iterator[Array]:
    """The elements of a packed tensor, as the bits of a byte each; or its blocks, as bytes."""
    bits, rest = ref.dtype.bits, b""
    for chunk in chain(iter_chunks(ref), [memoryview(b"")]):
        raw = rest + bytes(chunk)
        # so many bytes are whole elements; all of a tensor are
        count = len(raw) // bits * bits if chunk else len(raw)
        rest = raw[count:]
        if ref.dtype.is_block:
            yield np.frombuffer(raw[:count], f"V{ref.dtype.itemsize}")
            continue
        ones = np.unpackbits(np.frombuffer(raw[:count], np.uint8), bitorder="little").reshape(
            -1, bits
        )
        yield np.packbits(ones, axis=1, bitorder="little").reshape(-1)


def aligned(
    first: Iterator[Array], second: Iterator[Array], step: int | None = None
) -> Iterator[tuple[Array, Array]]:
    """The runs of both, cut to the same number of elements, at most `step`."""
    step = step or _STEP
    ours: Array | None = None
    theirs: Array | None = None
    while True:
        ours = ours if ours is not None and len(ours) else next(first, None)
        theirs = theirs if theirs is not None and len(theirs) else next(second, None)
        if ours is None or theirs is None:
            return
        count = min(len(ours), len(theirs), step)
        yield ours[:count], theirs[:count]
        ours, theirs = ours[count:], theirs[count:]


_STEP = 1 << 17  # elements whose numbers are in memory at a time


def numbers_of(words: Array, dtype: DType) -> Array | None:
    """Elements as float64, complex128 or integers; None for a type that holds no numbers."""
    if dtype.kind == "float":
        return as_floats(octets(words), dtype, FLOAT64)
    if dtype.name == "complex32":
        return words.view("<f2").astype(np.float64).view(np.complex128)
    if dtype.kind in ("complex", "int", "bool"):
        values = words.view(dtype.array_type)
        return values.astype(np.complex128) if dtype.kind == "complex" else values
    return None


@dataclass(frozen=True, slots=True, eq=False)
class PairRun:
    """A run of both tensors: which elements differ, by how much, and the numbers (or bits). Where
    it `is_same` in both, `ours` are the numbers of both.
    """

    ours: Array
    theirs: Array
    differ: Array
    apart: Array | None = None
    relative: Array | None = None
    is_same: bool = False

    @classmethod
    def of(
        cls, ours: Array, dtype: DType, theirs: Array, other: DType, tolerance: Tolerance | None
    ) -> PairRun:
        differ = ours != theirs if dtype is other else np.ones(len(ours), bool)
        first = numbers_of(ours, dtype)
        if tolerance is None and not differ.any():
            return cls(ours if first is None else first, theirs, differ, is_same=first is not None)
        second = numbers_of(theirs, other)
        if first is None or second is None:
            return cls(ours, theirs, differ)
        with np.errstate(all="ignore"):
            first, second = of_one_kind(first, second)
            apart = _apart(first, second)
            if tolerance is not None:
                differ = ~_close(first, second, apart, tolerance)
            size = np.abs(second.astype(np.result_type(second, np.float64)))
            distance = apart.astype(np.float64)
            relative = np.where(
                apart == 0, 0.0, np.where(np.isinf(distance), distance, distance / size)
            )
        return cls(first, second, differ, apart, relative)

    def only(self, chosen: Array) -> PairRun:
        """The run of the chosen elements alone."""
        assert self.apart is not None
        return PairRun(
            self.ours[chosen], self.theirs[chosen], self.differ[chosen], self.apart[chosen]
        )


def of_one_kind(first: Array, second: Array) -> tuple[Array, Array]:
    """Both as they are where their types are the same, else both in float64 or complex128."""
    if first.dtype == second.dtype:
        return first, second
    wide = np.result_type(first, second, np.float64)
    return first.astype(wide), second.astype(wide)


def _apart(first: Array, second: Array) -> Array:
    """|a - b|; exact for integers, as unsigned ones; 0 for equal infinities."""
    if first.dtype.kind in "iu":
        wide = f"{first.dtype.kind}8"
        low, high = np.minimum(first, second).astype(wide), np.maximum(first, second).astype(wide)
        return high.view(np.uint64) - low.view(np.uint64)
    return np.where(first == second, 0.0, np.abs(first - second))


def _close(first: Array, second: Array, apart: Array, tolerance: Tolerance) -> Array:
    # as a float: a whole number times small integers has their type, and overflows
    allowed = tolerance.atol + np.abs(float(tolerance.rtol) * second)
    close = (first == second) | (np.isfinite(apart) & (apart <= allowed))
    if tolerance.equal_nan and first.dtype.kind in "fc":
        close |= np.isnan(first) & np.isnan(second)
    return np.asarray(close)
