"""Folds the values of a tensor into its statistics, in one pass, in float64.

Types of 8 and 16 bits, and smaller ones, have few different values: how often each occurs is
counted, and all that is told follows from that, exactly. Wider numbers are folded in blocks: the
smallest and the largest are exact, mean and standard deviation are those of each block, merged as
by Chan, Golub and LeVeque (1979). Their distribution is counted in buckets of the leading bits (see
`statistics`). Up to 65,536 numbers of one sign that are within 4 × of each other are counted in
4,096 buckets of one width instead. NaN and infinite values are counted, and are in nothing else.
The values of tensors with a few only are taken one by one, and all is exact.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ckptconv.support.arrays import Array, np
from ckptconv.tensors.casting import every_value
from ckptconv.tensors.dtypes import FLOAT64, DType
from ckptconv.tensors.packing import codes_in, packed_nbytes, unpacked
from ckptconv.tensors.statistics import FEW, Distribution, FewValues, Statistics, mean_and_std

_BLOCK = 1 << 18  # elements that are folded at once: threads wait for each other less often
_NEAR = 16  # times the variance: of a larger square of the mean, more than 4 bits cancel out
_FIRST = 1 << 15  # elements that most buckets of a tensor are known from
_KEPT = 1 << 16  # elements that are kept until the end: those of a norm, not of a matrix
_EVEN = 1 << 12  # buckets of one width: of numbers within 4 ×, more than those of leading bits
_FEW = 1 << 12  # elements that are sorted and counted in less time than all buckets are looked at


class RunningStatistics:
    """A counter that keeps the statistics of `numel` values of `dtype`, as `statistics()`.

    For values that are not what their type says: `numbers` are the float64 numbers that the codes
    of `bits` in its bytes stand for; or `decode` makes them of the codes of a chunk and the number
    of the elements before it. Without `is_counted` numbers of more than 16 bits get no
    distribution: how many buckets hold some is known in half the time.
    """

    def __init__(
        self,
        dtype: DType,
        numel: int,
        decode: Callable[[memoryview, int], Array] | None = None,
        *,
        bits: int = 8,
        numbers: Array | None = None,
        is_counted: bool = True,
    ) -> None:
        self._dtype = dtype
        self._numel = numel
        self._bits = bits
        self._nbytes = packed_nbytes(numel, bits) if bits < 8 else numel * dtype.itemsize
        self._seen = 0  # bytes, or numbers that were decoded
        self._found: Statistics | None = None
        self._counted: _Listed | _Counted | _Folded | None = None
        if numbers is not None:
            self._counted, decode = _Counted(dtype, numel, bits, numbers), None
        elif decode is not None:
            self._counted = _Folded(FLOAT64, numel, is_counted=is_counted)
        elif numel <= FEW and (dtype.kind in ("float", "int") or has_codes(dtype)):
            self._counted = _Listed(dtype, numel)
        elif has_codes(dtype):
            self._counted = _Counted(dtype, numel)
        elif dtype.kind in ("float", "int", "complex"):
            self._counted = _Folded(dtype, numel, is_counted=is_counted)
        self._decode = decode

    def update(self, chunk: memoryview) -> None:
        if self._counted is None:
            return
        if self._decode is None:
            self._seen += len(chunk)
            is_all = self._seen == self._nbytes
        else:
            if self._bits < 8:
                codes = unpacked(chunk, self._bits)[: self._numel - self._seen]
                chunk = codes.data.cast("B")
            chunk = self._decode(chunk, self._seen).data.cast("B")
            self._seen += len(chunk) // 8
            is_all = self._seen == self._numel
        self._counted.update(chunk)
        if is_all:  # there may be 10,000 counters, and what they count with is large
            self._found, self._counted = self._counted.statistics(), None

    def statistics(self) -> Statistics:
        """What the values so far come to."""
        if self._counted is not None:
            return self._counted.statistics()
        return self._found or Statistics(self._numel)


def has_codes(dtype: DType) -> bool:
    """Whether a type has so few values that each is counted."""
    return dtype.kind in ("float", "int", "bool") and dtype.itemsize <= 2 and not dtype.is_packed


class _Listed:
    """A few values, which are taken one by one."""

    def __init__(self, dtype: DType, numel: int) -> None:
        self._dtype = dtype
        self._numel = numel
        self._raw = b""

    def update(self, chunk: memoryview) -> None:
        self._raw += chunk

    def statistics(self) -> Statistics:
        listed = _list_of(self._raw, self._dtype)
        finite = sorted(filter(math.isfinite, listed))
        if len(finite) < len(listed) or not finite:
            return self._counted()
        moments = mean_and_std(finite)
        if moments is None:
            return self._counted()
        return Statistics(
            len(listed),
            zeros=listed.count(0),
            minimum=finite[0],
            maximum=finite[-1],
            mean=moments[0],
            std=moments[1],
            distinct=len(set(finite)),
            distribution=FewValues(array("d", finite)),
        )

    def _counted(self) -> Statistics:
        """The same by numpy, where there are NaN, infinities, or squares beyond all range."""
        kind = _Counted if has_codes(self._dtype) else _Folded
        counted = kind(self._dtype, self._numel)
        if self._raw:
            counted.update(memoryview(self._raw))
        return counted.statistics()


def _list_of(raw: bytes, dtype: DType) -> list[Any]:
    """The numbers in some bytes; of bools 0 and 1."""
    if dtype.kind == "bool":
        return [int(byte != 0) for byte in raw]
    if dtype.kind == "int" or dtype.itemsize > 2:
        numbers: list[Any] = np.frombuffer(raw, _type_of(dtype)).tolist()
    else:
        numbers = _numbers(dtype)[np.frombuffer(raw, f"<u{dtype.itemsize}")].tolist()
    return numbers


class _Counted:
    """How often each code of 8 or 16 bits occurs; or of `bits`, which stand for `numbers`."""

    def __init__(
        self, dtype: DType, numel: int, bits: int = 8, numbers: Array | None = None
    ) -> None:
        self._dtype, self._numel = dtype, numel
        self._bits, self._numbers = bits, numbers
        self._last = 0  # byte
        self._codes: Array = np.zeros(0, np.int64)
        self._few: list[Array] = []
        self._byte = b""

    def update(self, chunk: memoryview) -> None:
        if len(chunk):
            self._last = chunk[-1]
        if self._numel <= _FEW:
            self._few.append(np.frombuffer(bytes(chunk), f"<u{self._dtype.itemsize}"))
            return
        if not len(self._codes):
            self._codes = np.zeros(1 << 16, np.int64)
        # two bytes are counted at once, for it takes as long as counting one
        odd = len(chunk) % 2
        if odd:
            self._byte += bytes(chunk[-1:])
            chunk = chunk[:-1]
        if len(chunk):
            _count_into(self._codes, np.frombuffer(chunk, "<u2"))

    def statistics(self) -> Statistics:
        numbers = _numbers(self._dtype) if self._numbers is None else self._numbers
        is_float = self._dtype.kind == "float" or self._numbers is not None
        every = self._codes
        if self._numel <= _FEW:
            words = np.concatenate([*self._few, np.zeros(0, np.uint8)])
            if self._bits >= 8:
                codes, counts = np.unique(words, return_counts=True)
                return _of_values(numbers[codes], counts, is_float=is_float)
            every = np.bincount(words, minlength=256)
        elif self._dtype.itemsize == 1:
            pairs = every.reshape(256, 256) if len(every) else np.zeros((256, 256), np.int64)
            every = pairs.sum(0) + pairs.sum(1)
            every += np.bincount(np.frombuffer(self._byte, np.uint8), minlength=256)
        if self._bits < 8:  # how often each element occurs, of how often each byte does
            padding = -self._numel % (8 // self._bits)
            every = codes_in(every, self._bits, self._last, padding)
        codes = np.flatnonzero(every)
        return _of_values(numbers[codes], every[codes], is_float=is_float)


def _of_values(numbers: Array, counts: Array, *, is_float: bool) -> Statistics:
    """The statistics of numbers of which each occurs so many times; equal ones may stand twice."""
    nan, infinite = np.isnan(numbers), np.isinf(numbers)
    finite = ~(nan | infinite)
    known = Statistics(
        int(counts.sum()), int(counts[nan].sum()), int(counts[infinite].sum()), distinct=0
    )
    numbers, counts = numbers[finite], counts[finite]
    if not len(numbers):
        return known
    order = np.argsort(numbers, kind="stable")
    numbers, counts = numbers[order], counts[order]
    count = int(counts.sum())
    mean = float((numbers * counts).sum() / count)
    apart = numbers - mean
    squares = float((apart * apart * counts).sum())
    smallest, largest = numbers[0].item(), numbers[-1].item()
    if not is_float:
        smallest, largest = int(smallest), int(largest)
    return Statistics(
        known.numel,
        known.nan,
        known.infinite,
        int(counts[numbers == 0].sum()),
        smallest,
        largest,
        mean,
        math.sqrt(squares / (count - 1)) if count > 1 else None,
        len(np.unique(numbers)),
        distribution=_packed(numbers, numbers, counts),
    )


def _packed(low: Array, high: Array, counts: Array) -> Distribution:
    """A distribution in half the bytes, where nothing is lost by it."""
    if len(counts) and counts.max() < 1 << 32:
        counts = counts.astype(np.uint32)
    with np.errstate(over="ignore"):
        smaller = low.astype(np.float32), high.astype(np.float32)
    if np.array_equal(smaller[0], low) and np.array_equal(smaller[1], high):
        return Distribution(smaller[0], smaller[0] if high is low else smaller[1], counts)
    return Distribution(low, high, counts)


@cache
def _numbers(dtype: DType) -> Array:
    if dtype.kind == "float":
        with np.errstate(invalid="ignore"):
            numbers: Array = every_value(dtype).astype(np.float64)
            return numbers
    if dtype.kind == "bool":
        truths: Array = np.minimum(np.arange(256.0), 1)  # any byte but 0 is true
        return truths
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"<u{dtype.itemsize}")
    return codes.view(dtype.array_type).astype(np.float64)


class _Folded:
    """Numbers of more than 16 bits, folded block by block."""

    def __init__(self, dtype: DType, numel: int, *, is_counted: bool = True) -> None:
        self._dtype = dtype
        self._numel = numel
        self._is_counted = is_counted
        self._type = _type_of(dtype)
        self._is_single = dtype.name == "float32"
        self._moments = _Moments()
        self._nan = self._infinite = self._zeros = 0
        self._minimum: float | int | None = None
        self._maximum: float | int | None = None
        self._few: list[Array] = []
        self._all: list[Array] = []  # the numbers, of a tensor with up to `_KEPT`
        self._shift = 16 if self._is_single else _SHIFT
        self._buckets: Array = np.zeros(0, np.int64)
        self._waiting: list[Array] = []  # words to be counted
        self._seen = 0
        # where not all are counted: the magnitudes whose buckets all hold some, known after so many
        self._sure: tuple[Any, Any] = 0, 0
        self._sure_after = 0
        self._is_signed = False

    def update(self, chunk: memoryview) -> None:
        numbers = np.frombuffer(chunk, self._type)
        with np.errstate(all="ignore"):
            if self._dtype.kind == "complex":
                numbers = self._magnitudes(numbers)
            if self._numel <= _KEPT and self._is_counted:
                self._all.append(numbers.copy())
            for block in self._blocks(numbers):
                self._fold(block)
                words = np.ascontiguousarray(block, "<f4" if self._is_single else "<f8")
                words = words.view(f"<u{words.itemsize}")
                if self._is_counted:
                    self._count(words)
                else:
                    self._count_later(words)
                self._seen += len(block)

    def _blocks(self, numbers: Array) -> Iterator[Array]:
        """The numbers, so many at once; of a tensor the first ones by themselves: most others need
        not be counted where their buckets are known to hold some.
        """
        start = 0
        while start < len(numbers):
            stop = start + (_BLOCK if self._seen else _FIRST)
            yield numbers[start:stop]
            start = stop

    def _magnitudes(self, parts: Array) -> Array:
        """The absolute values of complex numbers; NaN where a part is, also beside an infinity."""
        pairs = parts.astype(np.float64).reshape(-1, 2)
        sizes: Array = np.hypot(pairs[:, 0], pairs[:, 1])
        sizes[np.isnan(pairs).any(axis=1)] = np.nan
        return sizes

    def _fold(self, block: Array) -> None:
        """Take the smallest, the largest and the moments of a block."""
        smallest, largest = block.min().item(), block.max().item()
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            finite = np.isfinite(block)
            nan = int(np.count_nonzero(np.isnan(block)))
            self._nan += nan
            self._infinite += len(block) - int(np.count_nonzero(finite)) - nan
            block = block[finite]
            if not len(block):
                return
            smallest, largest = block.min().item(), block.max().item()
        if self._minimum is None or smallest < self._minimum:
            self._minimum = smallest
        if self._maximum is None or largest > self._maximum:
            self._maximum = largest
        self._moments.add(block, max(abs(smallest), abs(largest)))

    def _count(self, words: Array) -> None:
        """Count the buckets of the words, and the zeros among them."""
        codes = np.empty(len(words), np.intp)  # what is counted with, in the same pass
        shift = words.dtype.type(self._shift)
        np.right_shift(words, shift, codes, dtype=words.dtype, casting="unsafe")
        if self._numel <= _FEW:
            self._few.append(codes)
            self._zeros += _zeros_among(words)
            return
        if not len(self._buckets):
            self._buckets = np.zeros(1 << 8 * words.itemsize - self._shift, np.int64)
        around_zero = [0, len(self._buckets) // 2]
        before = self._buckets[around_zero].sum()
        _count_into(self._buckets, codes)
        if self._buckets[around_zero].sum() > before:
            self._zeros += _zeros_among(words)

    def _count_later(self, words: Array) -> None:
        """Keep the words that may lie in buckets that are empty yet, zeros among them, until there
        are enough: another thread may take the interpreter's lock at each step, however small.
        """
        word = words.dtype.type
        is_signed = self._minimum is None or self._minimum < 0
        is_due = is_signed is not self._is_signed or self._seen >= 4 * self._sure_after
        if is_due and len(self._buckets):
            self._count_waiting()
            self._is_signed, self._sure_after = is_signed, self._seen
            by_sign = self._buckets.reshape(2, -1)
            start, stop = _run_of_some(np.minimum(*by_sign) if is_signed else by_sign[0])
            self._sure = word(start << self._shift + 1), word(stop - start << self._shift + 1)
        start, count = self._sure
        magnitudes = words << word(1)
        magnitudes -= start
        # by numbers, which takes a quarter of the time of a mask where many are taken
        self._waiting.append(words[np.flatnonzero(magnitudes >= count)])
        if sum(map(len, self._waiting)) >= _FIRST:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if self._waiting:
            self._count(np.concatenate(self._waiting))
            self._waiting.clear()

    def statistics(self) -> Statistics:
        self._count_waiting()
        if self._numel <= _FEW:
            few = np.concatenate([*self._few, np.zeros(0, np.intp)])
            codes, counts = np.unique(few, return_counts=True)
        else:
            codes = np.flatnonzero(self._buckets != 0)
            counts = self._buckets[codes]
        sign = 1 << (15 if self._is_single else 63 - _SHIFT)
        is_finite = codes % sign < sign - 128  # of the mantissa, seven bits are left
        codes, counts = codes[is_finite], counts[is_finite]
        distribution = None
        if self._is_counted and self._moments.count:
            distribution = self._narrow() or _buckets(codes, counts, is_single=self._is_single)
        moments = self._moments
        return Statistics(
            self._numel,
            self._nan,
            self._infinite,
            self._zeros,
            self._minimum,
            self._maximum,
            moments.mean if moments.count else None,
            moments.std(),
            len(codes),
            distinct_is_exact=not self._numel,
            of_magnitudes=self._dtype.kind == "complex",
            distribution=distribution,
        )

    def _narrow(self) -> Distribution | None:
        """The distribution of numbers that are all near one that is not zero, such as the weights
        of a norm around 1, in buckets of one width; None for others. Of the leading bits there
        would be too few buckets to draw.
        """
        low, high = self._minimum, self._maximum
        if not self._all or low is None or high is None or not low < high:
            return None
        ends = sorted((abs(low), abs(high)))
        if (low < 0) != (high < 0) or ends[1] > 4 * ends[0]:
            return None
        numbers = np.concatenate(self._all).astype(np.float64)
        counts, edges = np.histogram(numbers[np.isfinite(numbers)], _EVEN, (low, high))
        some = np.flatnonzero(counts)
        return _packed(edges[some], edges[some + 1], counts[some])


def _run_of_some(counts: Array) -> tuple[int, int]:
    """Where the counts beyond 0 around the largest begin and end, the first count left out."""
    is_empty = counts == 0
    is_empty[0] = True
    largest = int(np.argmax(counts[1:])) + 1
    if is_empty[largest]:
        return 0, 0
    before, after = is_empty[largest::-1], is_empty[largest:]
    return largest + 1 - int(np.argmax(before)), largest + int(np.argmax(after))


def _zeros_among(words: Array) -> int:
    return int(np.count_nonzero(words << words.dtype.type(1) == 0))


def _count_into(counts: Array, codes: Array) -> None:
    """Count each of some codes where it belongs: in half the time of `numpy.bincount`, which looks
    for the largest of them first, and makes counts anew.
    """
    for start in range(0, len(codes), _BLOCK):
        np.add.at(counts, codes[start : start + _BLOCK].astype(np.intp, copy=False), 1)


_SHIFT = 45  # of 64 bits: sign, exponent and seven bits of the mantissa are left


def _buckets(codes: Array, counts: Array, *, is_single: bool) -> Distribution:
    """The buckets with these codes of leading bits, all finite, in rising order."""
    nbytes, shift = 8, _SHIFT
    if is_single:
        nbytes, shift = 4, 16
    word = np.dtype(f"<u{nbytes}")

    def edge(codes: Array) -> Array:
        numbers: Array = (codes.astype(word) << word.type(shift)).view(f"<f{nbytes}")
        return numbers

    sign = 1 << (8 * nbytes - 1 - shift)
    codes = codes.astype(np.int64)
    with np.errstate(all="ignore"):
        near = edge(codes).astype(np.float64)
        far = edge(codes + 1).astype(np.float64)  # the next in magnitude
    top = np.finfo(f"<f{nbytes}").max
    # of the last bucket before infinity
    far = np.where(np.isfinite(far), far, np.copysign(float(top), near))
    low, high = np.minimum(near, far), np.maximum(near, far)
    is_zero = codes & (sign - 1) == 0
    # zeros are nearly all of what is in the buckets around zero
    low[is_zero], high[is_zero] = 0.0, 0.0
    order = np.lexsort((high, low))
    return _packed(low[order], high[order], counts[order])


class _Moments:
    """Count, mean and standard deviation of numbers, merged block by block.

    The standard deviation is kept, not its square, and each block is scaled by a power of two, so
    nothing overflows that need not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._spread = 0.0  # sqrt(sum of squares / count)

    def add(self, numbers: Array, largest: float) -> None:
        """Take a block of finite numbers, none of which is larger."""
        numbers = numbers.astype(np.float64, copy=False)
        scale = 1.0
        if not 1e-140 < largest < 1e140 and largest:
            scale = math.ldexp(1.0, -max(min(math.frexp(largest)[1], 1000), -1000))
            numbers = numbers * scale
        count = len(numbers)
        mean = float(numbers.sum()) / count
        square = mean * mean
        variance = float(np.dot(numbers, numbers)) / count - square
        if square > _NEAR * variance:
            numbers = numbers - mean
            variance = float(np.dot(numbers, numbers)) / count
        self._merge(count, mean / scale, math.sqrt(variance) / scale)

    def _merge(self, count: int, mean: float, spread: float) -> None:
        total = self.count + count
        ours, theirs = self.count / total, count / total
        # halves, for the distance of two numbers may be more than the largest
        apart = mean / 2 - self.mean / 2
        self._spread = math.hypot(
            self._spread * math.sqrt(ours),
            spread * math.sqrt(theirs),
            2 * math.sqrt(ours * theirs) * apart,
        )
        self.mean += 2 * (apart * theirs)
        self.count = total

    def std(self) -> float | None:
        if self.count < 2:
            return None
        return self._spread * math.sqrt(self.count / (self.count - 1))


def _type_of(dtype: DType) -> str:
    return f"<f{dtype.word}" if dtype.kind == "complex" else dtype.array_type
