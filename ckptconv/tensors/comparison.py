"""Two tensors compared: byte for byte where they lie, or number by number within a tolerance.

What lies in one order in both files is compared as it lies, through two buffers of 1 MiB; anything
else is gathered block by block. Of storages whose records declare a checksum it is worked out on
the way, or from another read of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.io.crc import crc32
from ckptconv.io.source import CHUNK, SMALL
from ckptconv.support.errors import MalformedCheckpoint, OptionRefused
from ckptconv.support.progress import Meter
from ckptconv.tensors.casting import cast
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tensors.stream import iter_chunks, verbatim_runs

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_BATCH = 16 << 20
"""Bytes of one tensor, or of several, that a thread compares before it takes the next."""
_THREADS = min(4, os.cpu_count() or 1)
_FLOAT64 = BY_NAME["float64"]

Pair = tuple[TensorRef, TensorRef]


class Span(NamedTuple):
    """The same bytes of one pair of tensors, in the one storage and in the other; `pair` is the
    pair's number.
    """

    pair: int
    first: Storage
    first_at: int
    second: Storage
    second_at: int
    nbytes: int

    @property
    def has_crc(self) -> bool:
        """Whether a checksum is declared that these bytes go into."""
        return any(
            (storage.part_of or storage).crc32 is not None for storage in (self.first, self.second)
        )


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
        for bound in (self.atol, self.rtol):
            if not bound >= 0:
                raise OptionRefused(f"a tolerance is 0 or more, not {bound!r}")


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
        """What tells the worse of two: NaN and infinite differences, then the relative L2, then the
        largest |a - b|.
        """
        largest = 0.0 if self.max_abs is None else self.max_abs
        broken = bool(self.nans) or largest == math.inf
        return broken, -1.0 if self.rel_l2 is None else self.rel_l2, largest


# -------------------------------------------------------------------------------------------- bytes


@dataclass(slots=True)
class Compared:
    """What comparing bytes gave: the numbers of the pairs that differ, and the checksums of spans
    that were found equal.

    `unread` are pairs that were compared otherwise, so that nothing is known of their checksums.
    """

    differing: set[int] = field(default_factory=set)
    equal: list[tuple[Span, int]] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)

    def add(self, other: Compared) -> None:
        """Take in what another part of the work gave."""
        self.differing |= other.differing
        self.equal += other.equal


def compare_bytes(pairs: Sequence[Pair], meter: Meter) -> Compared:
    """Which pairs are not the same bit for bit; both of a pair have one dtype and shape.

    `meter` counts the bytes of one of each pair, until a difference is found in it.
    """
    found = Compared()
    threaded: list[Span] = []
    for number, (first, second) in enumerate(pairs):
        spans = _spans(number, first, second)
        if spans is None:
            found.unread.add(number)
            if not _streams_equal(first, second, meter):
                found.differing.add(number)
        elif all(_may_be_threaded(span) for span in spans):
            threaded += spans
        else:
            found.add(_compared_alone(spans, meter))
    found.add(_compared_by_threads(threaded, meter))
    return found


def damaged_storages(found: Compared, read: Iterable[Pair], meter: Meter) -> list[str]:
    """What is to be said of storages whose bytes have not the CRC-32 that their records declare.

    Those of the pairs in `read` are read for it, which `meter` counts pair by pair; of the others
    the checksums that were `found` are put together.
    """
    checksums = Checksums()
    damage: list[str] = []
    for pair in read:
        for storage in (piece.storage for ref in pair for piece in ref.pieces):
            _noting(damage, partial(checksums.read, storage))
        meter.add(pair[0].nbytes)
    for span, crc in found.equal:
        for storage, at in ((span.first, span.first_at), (span.second, span.second_at)):
            _noting(damage, partial(checksums.copied, storage, at, span.nbytes, crc))
    while _noting(damage, checksums.finish):  # goes on behind the one that it found
        pass
    return list(dict.fromkeys(damage))


def _noting(damage: list[str], check: Callable[[], None]) -> bool:
    """Whether a check found damage, which is noted."""
    try:
        check()
    except MalformedCheckpoint as error:
        damage.append(str(error))
        return True
    return False


def _spans(number: int, first: TensorRef, second: TensorRef) -> list[Span] | None:
    """Where the bytes of both lie in one order; None where they must be gathered."""
    if _lie_alike(first, second):
        (begin, end), (other, _) = first.byte_span(), second.byte_span()
        one, two = first.storage, second.storage
        return [Span(number, one, begin, two, other, end - begin)]
    ours, theirs = verbatim_runs(first), verbatim_runs(second)
    if ours is None or theirs is None:
        return None
    return list(_common_runs(number, ours, theirs))


def _lie_alike(first: TensorRef, second: TensorRef) -> bool:
    """Whether both are views without holes, and their elements lie in the very same order."""
    if not (first.is_view and second.is_view) or (first.conj, first.neg) != (
        second.conj,
        second.neg,
    ):
        return False
    same_order = first.storage.big_endian == second.storage.big_endian
    return same_order and first.stride == second.stride and first.is_dense()


def _common_runs(number: int, ours: list[Any], theirs: list[Any]) -> Iterator[Span]:
    """The runs of both, cut wherever either of them ends."""
    left, right = list(reversed(ours)), list(reversed(theirs))
    while left and right:
        (storage, at, nbytes), (other, other_at, other_nbytes) = left.pop(), right.pop()
        count = min(nbytes, other_nbytes)
        if count:
            yield Span(number, storage, at, other, other_at, count)
        if nbytes > count:
            left.append((storage, at + count, nbytes - count))
        if other_nbytes > count:
            right.append((other, other_at + count, other_nbytes - count))


def _may_be_threaded(span: Span) -> bool:
    """Whether several threads may read both sources: files of a pool and inflated records are for
    one.
    """
    return (
        span.nbytes > SMALL
        and span.first.source.is_for_threads()
        and span.second.source.is_for_threads()
    )


def _compared_alone(spans: Sequence[Span], meter: Meter) -> Compared:
    found = Compared()
    for batch in _batches(spans):
        found.add(_compared(batch))
        meter.add(sum(span.nbytes for span in batch))
    return found


def _compared_by_threads(spans: Sequence[Span], meter: Meter) -> Compared:
    batches = list(_batches(spans))
    if len(batches) < 2:
        return _compared_alone(spans, meter)
    from concurrent.futures import ThreadPoolExecutor

    found = Compared()
    with ThreadPoolExecutor(_THREADS, "ckptconv-comparer") as pool:
        for batch, one in zip(batches, pool.map(_compared, batches), strict=True):
            found.add(one)
            meter.add(sum(span.nbytes for span in batch))
    return found


def _batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans in lists of about `_BATCH` bytes; longer ones are cut."""
    batch: list[Span] = []
    room = _BATCH
    for span in spans:
        for start in range(0, span.nbytes, _BATCH):
            nbytes = min(_BATCH, span.nbytes - start)
            batch.append(
                span._replace(
                    first_at=span.first_at + start, second_at=span.second_at + start, nbytes=nbytes
                )
            )
            room -= nbytes
            if room <= 0:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


def _compared(spans: Iterable[Span]) -> Compared:
    """The numbers of the pairs of which one of these spans differs, and the checksums of the spans
    that do not.
    """
    found = Compared()
    buffers = bytearray(CHUNK), bytearray(CHUNK)
    for span in spans:
        if span.pair in found.differing:
            continue
        if (crc := _equal_crc(span, buffers)) is None:
            found.differing.add(span.pair)
        elif span.has_crc:
            found.equal.append((span, crc))
    return found


def _equal_crc(span: Span, buffers: tuple[bytearray, bytearray]) -> int | None:
    """None where the bytes differ; else their CRC-32, as far as one is declared."""
    first, second = span.first.offset + span.first_at, span.second.offset + span.second_at
    if span.nbytes <= SMALL:
        content = span.first.source.read(first, span.nbytes)
        if content != span.second.source.read(second, span.nbytes):
            return None
        return crc32(content, 0) if span.has_crc else 0
    crc, has_crc = 0, span.has_crc
    for start in range(0, span.nbytes, CHUNK):
        nbytes = min(CHUNK, span.nbytes - start)
        # Whole bytearrays are compared by memcmp; memoryviews would be compared item by item.
        one, two = buffers if nbytes == CHUNK else (bytearray(nbytes), bytearray(nbytes))
        span.first.source.read_into(first + start, memoryview(one))
        span.second.source.read_into(second + start, memoryview(two))
        if one != two:
            return None
        if has_crc:
            crc = crc32(one, crc)
    return crc


def _streams_equal(first: TensorRef, second: TensorRef, meter: Meter) -> bool:
    for one, two in _aligned(_words(first), _words(second)):
        if not bool((one == two).all()):
            return False
        meter.add(one.nbytes)
    return True


# ------------------------------------------------------------------------------------------- values


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
    tally, norms = _Tally(), _Norms()
    at = 0
    for ours, theirs in _aligned(_words(first), _words(second)):
        run = _Run.of(ours, first.dtype, theirs, second.dtype, tolerance)
        tally.add(at, run)
        norms.add(run)
        at += len(ours)
        if meter is not None:
            meter.add(ours.nbytes)
    return tally.deviation(first.shape, norms)


def _words(ref: TensorRef) -> Iterator[Array]:
    """The elements of a tensor in C order, each as so many raw bytes."""
    import numpy as np

    if ref.dtype.is_packed:
        return _unpacked(ref)
    word = f"<u{ref.dtype.itemsize}" if ref.dtype.itemsize <= 8 else "V16"
    return (np.frombuffer(chunk, word) for chunk in iter_chunks(ref))


def _unpacked(ref: TensorRef) -> Iterator[Array]:
    """The elements of a packed tensor, each as the bits that are its own in a byte."""
    import numpy as np

    bits, rest = ref.dtype.bits, b""
    for chunk in chain(iter_chunks(ref), [memoryview(b"")]):
        raw = rest + bytes(chunk)
        # so many bytes are whole elements; all of a tensor are
        count = len(raw) // bits * bits if chunk else len(raw)
        rest = raw[count:]
        ones = np.unpackbits(np.frombuffer(raw[:count], np.uint8), bitorder="little").reshape(
            -1, bits
        )
        yield np.packbits(ones, axis=1, bitorder="little").reshape(-1)


def _aligned(first: Iterator[Array], second: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """The runs of both, cut to the same number of elements."""
    ours: Array | None = None
    theirs: Array | None = None
    while True:
        ours = ours if ours is not None and len(ours) else next(first, None)
        theirs = theirs if theirs is not None and len(theirs) else next(second, None)
        if ours is None or theirs is None:
            return
        count = min(len(ours), len(theirs), _STEP)
        yield ours[:count], theirs[:count]
        ours, theirs = ours[count:], theirs[count:]


_STEP = 1 << 17  # elements whose numbers are in memory at a time


def _numbers(words: Array, dtype: DType) -> Array | None:
    """Elements as float64, complex128 or integers; None for a type that holds no numbers."""
    import numpy as np

    if dtype.kind == "float":
        return np.frombuffer(cast(words.view(np.uint8).data, dtype, _FLOAT64).data, "<f8")
    if dtype.name == "complex32":
        parts = words.view("<f2").astype(np.float64)
        return parts.view(np.complex128)
    if dtype.kind in ("complex", "int", "bool"):
        code = {"complex": "c", "bool": "u"}.get(
            dtype.kind, "u" if dtype.name.startswith("u") else "i"
        )
        values = words.view(f"<{code}{dtype.itemsize}")
        return values.astype(np.complex128) if dtype.kind == "complex" else values
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of both tensors: which elements differ, by how much, and the numbers themselves (or
    bits).

    Where it `is_same` in both, `ours` are the numbers of both.
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
    ) -> _Run:
        import numpy as np

        differ = ours != theirs if dtype is other else np.ones(len(ours), bool)
        first = _numbers(ours, dtype)
        if tolerance is None and not differ.any():
            return cls(ours if first is None else first, theirs, differ, is_same=first is not None)
        second = _numbers(theirs, other)
        if first is None or second is None:
            return cls(ours, theirs, differ)
        with np.errstate(all="ignore"):
            first, second = _of_one_kind(first, second)
            apart = _apart(first, second)
            if tolerance is not None:
                differ = ~_close(first, second, apart, tolerance)
            size = np.abs(second.astype(np.complex128 if second.dtype.kind == "c" else np.float64))
            distance = apart.astype(np.float64)
            relative = np.where(
                apart == 0, 0.0, np.where(np.isinf(distance), distance, distance / size)
            )
        return cls(first, second, differ, apart, relative)

    def only(self, chosen: Array) -> _Run:
        """The run of the chosen elements alone."""
        assert self.apart is not None
        return _Run(self.ours[chosen], self.theirs[chosen], self.differ[chosen], self.apart[chosen])


def _of_one_kind(first: Array, second: Array) -> tuple[Array, Array]:
    import numpy as np

    if first.dtype == second.dtype:
        return first, second
    wide = np.complex128 if "c" in (first.dtype.kind, second.dtype.kind) else np.float64
    return first.astype(wide), second.astype(wide)


def _apart(first: Array, second: Array) -> Array:
    """|a - b|; exact for integers, as unsigned ones; 0 for equal infinities."""
    import numpy as np

    if first.dtype.kind in "iu":
        wide = np.uint64 if first.dtype.kind == "u" else np.int64
        low, high = np.minimum(first, second).astype(wide), np.maximum(first, second).astype(wide)
        return high.view(np.uint64) - low.view(np.uint64)
    return np.where(first == second, 0.0, np.abs(first - second))


def _close(first: Array, second: Array, apart: Array, tolerance: Tolerance) -> Array:
    import numpy as np

    allowed = tolerance.atol + np.abs(tolerance.rtol * second)
    close = (first == second) | (np.isfinite(apart) & (apart <= allowed))
    if tolerance.equal_nan and first.dtype.kind in "fc":
        close |= np.isnan(first) & np.isnan(second)
    return np.asarray(close)


class _Tally:
    """What was found so far, run by run."""

    def __init__(self) -> None:
        self.numel = self.count = self.nans = 0
        self.max_abs: float | None = None
        self.max_rel: float | None = None
        self.at = 0
        self.values = ("", "")

    def add(self, start: int, run: _Run) -> None:
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

    def _note(self, start: int, place: int, run: _Run) -> None:
        self.at = start + place
        self.values = _text(run.ours[place]), _text(run.theirs[place])

    def deviation(self, shape: tuple[int, ...], norms: _Norms) -> Deviation | None:
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


class _Norms:
    """The lengths of both tensors, of their difference, and their inner product, run by run.

    Each sum is kept beside a power of two, so that no square of a float64 becomes infinite or
    nothing.
    """

    def __init__(self) -> None:
        self.nonfinite = 0
        self._has_numbers = False
        self._apart, self._ours, self._theirs, self._inner = _Sum(), _Sum(), _Sum(), _Sum()

    def add(self, run: _Run) -> None:
        import numpy as np

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

    def _add_plainly(self, run: _Run) -> bool:
        """Add sums that need no care; False where there may be values that are not finite, or whose
        squares are not.
        """
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

    def _add_carefully(self, run: _Run) -> None:
        import numpy as np

        if run.is_same:
            run = _Run(run.ours, run.ours, run.differ, np.zeros(len(run.ours)))
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
        found = top.value / math.sqrt(first.value) / math.sqrt(second.value)
        found = _power(found, top.exponent - (first.exponent + second.exponent) / 2)
        return max(-1.0, min(1.0, found))


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
    import numpy as np

    return values.astype(
        np.complex128 if values.dtype.kind == "c" else np.float64, copy=False
    ).view(np.float64)


def _scaled_difference(run: _Run) -> tuple[Array, int]:
    """a - b, scaled; integers are subtracted as such, and what would become infinite is halved
    before.
    """
    import numpy as np

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
    import numpy as np

    exponent = math.frexp(float(np.abs(numbers).max(initial=0.0)))[1]
    return np.ldexp(numbers, -exponent), exponent


def _inner(first: Array, second: Array) -> float:
    # not np.dot: its threads wait for each other where cores are few
    return float((first * second).sum())


def _text(value: Any) -> str:
    item = value.item() if hasattr(value, "item") else value
    return f"0x{item.hex()}" if isinstance(item, bytes) else repr(item)
