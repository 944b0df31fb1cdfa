"""One pass over the values of a tensor for several counters.

A counter takes the values chunk by chunk and keeps what it has learnt of them: how many are NaN,
the checksum of their bytes, a statistic. Several counters share a pass, so a tensor is read once,
whatever is to be known of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, Protocol, TypeVar

from ckptconv.io.crc import crc32
from ckptconv.support.arrays import Array, np
from ckptconv.support.progress import Counting, Meter
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.computed import noting
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage, TensorRef, origins
from ckptconv.tensors.stream import iter_chunks, verbatim_runs


class ValueCounter(Protocol):
    """What is given all values of a tensor, in C order.

    A chunk holds whole elements as bytes, little-endian, conj and neg bits resolved, about 1 MiB of
    them; `numpy.frombuffer(chunk, "<u4")` and the like view it. It is valid during the call only.
    A counter that must know the dtype is made for it. What it has found it offers by names of its
    own.
    """

    def update(self, chunk: memoryview, /) -> None:
        """Take the next values."""


F = TypeVar("F", bound=ValueCounter)


class RunningCrc:
    """The CRC-32 of the bytes so far, as `value`."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, chunk: memoryview) -> None:
        self.value = crc32(chunk, self.value)


class OddBools:
    """How many bytes are neither 0 nor 1, as `count`: what such a bool means, its reader says."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, chunk: memoryview) -> None:
        self.count += len(bytes(chunk).translate(None, b"\0\1"))


# -------------------------------------------------------------------- values that are not finite

# Which bits these are follows from each format: IEEE 754 for 16, 32 and 64 bits,
# torch/headeronly/util/Float8_*.h for 8.


class NonFinite(NamedTuple):
    """Elements that are NaN, and that are infinite (a complex one counts by its worse part)."""

    nan: int
    infinite: int


class _Bits(NamedTuple):
    """Without its sign (`magnitude` masks it), a code above `infinity` is NaN. The code `infinity`
    itself is infinite, or the largest finite value.
    """

    magnitude: int
    infinity: int
    has_infinity: bool = True


_IEEE = {
    2: _Bits(0x7FFF, 0x7C00),
    4: _Bits(0x7FFF_FFFF, 0x7F80_0000),
    8: _Bits((1 << 63) - 1, 0x7FF << 52),
}
_OTHERS = {
    "bfloat16": _Bits(0x7FFF, 0x7F80),
    "float8_e5m2": _Bits(0x7F, 0x7C),
    "float8_e4m3fn": _Bits(0x7F, 0x7E, has_infinity=False),
    "float8_e8m0fnu": _Bits(0xFF, 0xFE, has_infinity=False),
}
# Without infinities; the NaN is what -0 would be
_ONE_NAN = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80}


class NonFiniteCounter:
    """A counter that counts the values of `dtype` that are not finite, as `nonfinite`."""

    def __init__(self, dtype: DType) -> None:
        self.nonfinite = NonFinite(0, 0)
        self._dtype = dtype

    def update(self, chunk: memoryview) -> None:
        words = np.frombuffer(chunk, dtype=f"<u{self._dtype.word}")
        is_nan, is_infinite = _not_finite(words, self._dtype.name)
        if self._dtype.kind == "complex":
            is_nan = is_nan.reshape(-1, 2).any(axis=1)
            is_infinite = is_infinite.reshape(-1, 2).any(axis=1)
        nan, infinite = self.nonfinite
        nan += int(np.count_nonzero(is_nan))
        infinite += int(np.count_nonzero(is_infinite & ~is_nan))
        self.nonfinite = NonFinite(nan, infinite)


def nonfinite_counters(ref: TensorRef) -> tuple[NonFiniteCounter, ...]:
    """The counter for a tensor's values; none if its type has only finite values."""
    if ref.dtype.kind not in ("float", "complex"):
        return ()
    return (NonFiniteCounter(ref.dtype),)


def _not_finite(words: Array, name: str) -> tuple[Any, Any]:
    """Which words are NaN, and which are infinite."""
    if name in _ONE_NAN:
        return words == _ONE_NAN[name], words != words
    bits = _OTHERS.get(name) or _IEEE[words.dtype.itemsize]
    magnitude = words & words.dtype.type(bits.magnitude)
    infinity = words.dtype.type(bits.infinity)
    return magnitude > infinity, (magnitude == infinity) & bits.has_infinity


# -------------------------------------------------------------------------------------- the pass


def fold(
    ref: TensorRef,
    *counters: ValueCounter,
    checksums: Checksums | None = None,
    meter: Counting | None = None,
) -> None:
    """Give the values of `ref` to all `counters`, in one pass.

    `checksums` is told of the runs of bytes that were read, or reads the storages itself if the
    values do not lie in order. `meter` counts the bytes of the values.
    """
    _feed(noted(ref, checksums), counters, meter)


def noted(ref: TensorRef, checksums: Checksums | None) -> Iterator[memoryview]:
    """The values of `ref` as `iter_chunks` gives them; `checksums` is told as by `fold`."""
    runs = verbatim_runs(ref)
    if runs is None:
        if checksums is not None:
            for piece in ref.pieces:
                checksums.read(piece.storage)
        yield from iter_chunks(ref)
        return
    for storage, first, nbytes in runs:
        chunks = noting(storage.source, checksums).stream([(storage.offset + first, nbytes)])
        if checksums is None or not storage.has_crc:
            yield from chunks
            continue
        crc = RunningCrc()
        for chunk in chunks:
            crc.update(chunk)
            yield chunk
        checksums.copied(storage, first, nbytes, crc.value)


def _feed(
    chunks: Iterable[memoryview], counters: Sequence[ValueCounter], meter: Counting | None
) -> None:
    for chunk in chunks:
        for counter in counters:
            counter.update(chunk)
        if meter is not None:
            meter.add(len(chunk))


def fold_all(
    refs: Iterable[TensorRef],
    counters_of: Callable[[TensorRef], Sequence[F]],
    tell: Callable[[int], Meter],
    *,
    threads: int = 1,
    is_checked: bool = True,
) -> list[Sequence[F]]:
    """The counters of each of `refs` after a pass over its values; all storages are checked too.

    `counters_of` makes those of one; without any, its values are not read. Equal views of one
    storage share a pass and its counters. What lies in order is read once for its values and its
    checksum; without `is_checked` no checksum is looked at. `tell` gets the number of bytes that
    will be read and gives what counts them. Tensors that do not share a storage are read in so many
    threads, where their sources can be; then the places in their sources must have been checked.
    Raises `MalformedCheckpoint` if a storage does not have the CRC-32 that its record declares.
    """
    refs = list(refs)
    made: dict[object, tuple[TensorRef, Sequence[F]]] = {}
    for ref in refs:
        view = _view(ref)
        if view not in made:
            made[view] = ref, counters_of(ref)
    folded = [(ref, counters) for ref, counters in made.values() if counters]
    wholes = {id(one.whole): one.whole for one in origins(refs)}
    checked = [whole for whole in wholes.values() if is_checked and whole.crc32 is not None]
    meter = tell(_bytes_read([ref for ref, _ in folded], checked))
    checksums = Checksums(meter) if is_checked else None
    together: list[tuple[TensorRef, Sequence[F]]] = folded
    with read_soon([ref for ref, _ in folded]):
        if threads > 1:
            apart, together = _by_storage(folded)
            checked = _folded_apart(apart, checked, meter, threads, is_checked=is_checked)
        for ref, counters in together:
            fold(ref, *counters, checksums=checksums, meter=meter)
    if checksums is not None:
        with read_soon(checked):
            checksums.finish(checked)
    meter.finish()
    return [made[_view(ref)][1] for ref in refs]


Folded = tuple[TensorRef, Sequence[F]]


class _SharedMeter:
    """A meter for several threads, which it can stop."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lock = Lock()
        self._is_stopped = False

    def add(self, nbytes: int) -> None:
        if self._is_stopped:
            raise _Cancelled
        with self._lock:
            self._meter.add(nbytes)

    def stop(self) -> None:
        """Nobody waits for what the threads still do."""
        self._is_stopped = True


_SMALL = 1 << 12  # bytes of a tensor that takes less time to fold than to hand to a thread
_BATCH = 1 << 20  # bytes that are handed to a thread together


class _Cancelled(Exception):
    """Another thread failed, or the user stopped the run."""


def _by_storage(folded: Sequence[Folded[F]]) -> tuple[list[Folded[F]], list[Folded[F]]]:
    """The tensors that no other shares a storage with and that a thread may read, the largest
    first, and the others, the small ones among them.
    """
    counts = Counter(
        key for ref, _ in folded for key in {id(storage.whole) for storage in origins([ref])}
    )
    apart: list[Folded[F]] = []
    together: list[Folded[F]] = []
    for item in folded:
        ref = item[0]
        alone = (
            ref.nbytes > _SMALL
            and verbatim_runs(ref) is not None
            and all(
                counts[id(storage.whole)] == 1 and storage.source.is_for_threads()
                for storage in origins([ref])
            )
        )
        (apart if alone else together).append(item)
    apart.sort(key=lambda item: item[0].nbytes, reverse=True)
    return apart, together


def _batches(items: Sequence[Folded[F]]) -> Iterator[Sequence[Folded[F]]]:
    """The items in their order, as many together as are worth a task of their own."""
    first = nbytes = 0
    for at, (ref, _) in enumerate(items):
        nbytes += ref.nbytes
        if nbytes >= _BATCH:
            yield items[first : at + 1]
            first, nbytes = at + 1, 0
    if first < len(items):
        yield items[first:]


def _folded_apart(
    apart: Sequence[Folded[F]],
    checked: Sequence[Storage],
    meter: Meter,
    threads: int,
    *,
    is_checked: bool,
) -> list[Storage]:
    """Fold tensors in threads, each with its storages' checksums; those of `checked` left."""
    from concurrent.futures import ThreadPoolExecutor

    shared = _SharedMeter(meter)

    def work(items: Sequence[Folded[F]]) -> None:
        for ref, counters in items:
            # of its own: the tensors of a thread share no storage with others
            checksums = Checksums(shared) if is_checked else None
            fold(ref, *counters, checksums=checksums, meter=shared)
            if checksums is not None:
                checksums.finish(origins([ref]))

    with ThreadPoolExecutor(threads, "ckptconv-fold") as pool:
        try:
            for _ in pool.map(work, _batches(apart)):
                pass
        finally:
            shared.stop()
    done = {id(storage.whole) for storage in origins([ref for ref, _ in apart])}
    return [storage for storage in checked if id(storage) not in done]


def _view(ref: TensorRef) -> object:
    """What two tensors have in common if their values are the same bytes in the same order."""
    pieces = tuple((id(piece.storage), *piece[1:]) for piece in ref.pieces)
    return ref.dtype.name, ref.shape, pieces, ref.conj, ref.neg


def _bytes_read(refs: Iterable[TensorRef], checked: Iterable[Storage]) -> int:
    """The bytes of `refs`, and those of the storages that are `checked` and not read for them."""
    total = 0
    covered: dict[int, list[tuple[int, int]]] = {}
    for ref in refs:
        total += ref.nbytes
        for storage, first, nbytes in verbatim_runs(ref) or ():
            whole = storage.whole
            start = storage.offset + first - whole.offset
            covered.setdefault(id(whole), []).append((start, nbytes))
    for whole in checked:
        at = 0
        total += whole.nbytes
        # as `Checksums` joins them: a run that overlaps an earlier one does not count
        for start, nbytes in sorted(covered.get(id(whole), ())):
            if start >= at:
                total -= nbytes
                at = start + nbytes
    return total
