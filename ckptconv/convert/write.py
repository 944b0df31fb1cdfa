"""The payloads of one file, written and checksummed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.layout import Layout, WriteItem
from ckptconv.io.crc import combined_crc, crc32
from ckptconv.io.source import SMALL
from ckptconv.io.stream import OutputStream
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.cast_ahead import THREADS, Cut, ToCast, cast_ahead, may_be_threaded
from ckptconv.tensors.casting import cast
from ckptconv.tensors.checksums import Checksums, refuse_crc
from ckptconv.tensors.fold import OddBools, fold
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tensors.stream import iter_cast_chunks, verbatim_range, verbatim_runs

_WORTH_THREADS = 8 << 20
"""Bytes of values to be cast from which threads are started for them."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The tensors with odd values: made infinite by the cast, or bools that are neither 0 nor 1."""

    overflowed: list[TensorRef] = field(default_factory=list)
    odd_bools: list[TensorRef] = field(default_factory=list)

    def join(self, later: Tally) -> None:
        """Add what was noted of a file behind."""
        self.overflowed.extend(later.overflowed)
        self.odd_bools.extend(later.odd_bools)


def write_layout(
    layout: Layout,
    stream: OutputStream,
    tally: Tally,
    checksums: Checksums,
    threads: int = THREADS,
) -> None:
    """Write all bytes of a file; `tally` and `checksums` note what is found on the way.

    Where there is much to cast, it is cast by so many threads.
    """
    crcs: list[int] = []
    between = b""
    write, trail = stream.write, layout.trail
    values = [item.values for item in layout.items]
    with (
        read_soon([item for item in values if isinstance(item, TensorRef)]),
        _cast_ahead(layout.items, stream, threads) as cuts_of,
    ):
        for index, item in enumerate(layout.items):
            write(between + item.lead)
            if (cuts := cuts_of(index)) is not None:
                crc = _write_cast(item, cuts, checksums, tally)
            else:
                crc = _write_values(item, stream, checksums, tally)
            crcs.append(crc)
            between = trail(index, crc)
    write(between)
    write(layout.ending(crcs))


@contextmanager
def _cast_ahead(
    items: Sequence[WriteItem], stream: OutputStream, threads: int
) -> Iterator[Callable[[int], Iterator[Cut] | None]]:
    """What gives the cuts of an item that threads cast and write, to be asked for each in turn;
    None for the others.
    """
    wanted = dict(_for_threads(items)) if threads > 1 and stream.is_for_threads() else {}
    if sum(items[index].nbytes for index in wanted) < _WORTH_THREADS:
        yield lambda _: None
        return
    with cast_ahead(list(wanted.values()), stream.write_at, threads) as cuts:
        yield lambda index: _left_out(next(cuts), stream) if index in wanted else None


def _for_threads(items: Sequence[WriteItem]) -> Iterator[tuple[int, ToCast]]:
    """The items that several threads may cast."""
    for index, item in enumerate(items):
        values = item.values
        if (
            isinstance(values, TensorRef)
            and item.nbytes > SMALL
            and item.dtype is not values.dtype
            and item.dtype.is_floating
            and (runs := verbatim_runs(values)) is not None
            and may_be_threaded(runs)
        ):
            yield index, ToCast(runs, values.dtype, item.dtype, item.offset)


def _left_out(cuts: Iterable[Cut], stream: OutputStream) -> Iterator[Cut]:
    """Cuts that threads have written."""
    for cut in cuts:
        stream.leave_out(cut.nbytes)
        yield cut


def _write_values(item: WriteItem, stream: OutputStream, checksums: Checksums, tally: Tally) -> int:
    """Write one payload and return its CRC-32; the source's own CRCs are checked on the way."""
    values = item.values
    if isinstance(values, bytes):
        stream.write(values)
        return crc32(values)
    if item.dtype.kind == "bool":
        return _write_bools(values, stream, checksums, tally)
    if item.dtype is not values.dtype:
        if (runs := verbatim_runs(values)) is not None:
            return _write_cast(item, _cast_here(item, runs, stream), checksums, tally)
        return _write_gathered(item, values, stream, checksums, tally)
    if len(values.pieces) == 1 and (verbatim := verbatim_range(values)) is not None:
        storage, _ = verbatim
        if item.nbytes == storage.nbytes and storage.part_of is None:
            return _copy_whole(storage, stream)
    if (runs := verbatim_runs(values)) is not None:
        return _write_runs(runs, stream, checksums)
    return _write_gathered(item, values, stream, checksums, tally)


def _write_bools(
    values: TensorRef, stream: OutputStream, checksums: Checksums, tally: Tally
) -> int:
    written, odd = _Written(stream), OddBools()
    fold(values, written, odd, checksums=checksums)
    if odd.count:
        tally.odd_bools.append(values)
    return written.crc


class _Written:
    """A folder that writes what it is given, and has its CRC-32 as `crc`."""

    def __init__(self, stream: OutputStream) -> None:
        self.crc = 0
        self._stream = stream

    def update(self, chunk: memoryview) -> None:
        self._stream.write(chunk)
        self.crc = crc32(chunk, self.crc)


def _write_runs(
    runs: Sequence[tuple[Storage, int, int]], stream: OutputStream, checksums: Checksums
) -> int:
    """Copy runs of bytes one after the other."""
    crc = 0
    for storage, first, nbytes in runs:
        found = stream.copy(storage.source, storage.offset + first, nbytes)
        checksums.copied(storage, first, nbytes, found)
        crc = combined_crc(crc, found, nbytes) if len(runs) > 1 else found
    return crc


def _write_gathered(
    item: WriteItem,
    values: TensorRef,
    stream: OutputStream,
    checksums: Checksums,
    tally: Tally,
) -> int:
    """Write values that do not lie in order, or that are cast."""
    for piece in values.pieces:
        checksums.read(piece.storage)
    crc, lost = 0, [0]
    for chunk in iter_cast_chunks(values, item.dtype, lost):
        stream.write(chunk)
        crc = crc32(chunk, crc)
    if lost[0]:
        tally.overflowed.append(values)
    return crc


def _copy_whole(storage: Storage, stream: OutputStream) -> int:
    """Copy a whole storage, checking its CRC-32 in the same pass."""
    source, offset, nbytes = storage.source, storage.offset, storage.nbytes
    if nbytes <= SMALL:
        data = source.read(offset, nbytes)
        stream.write(data)
        crc = crc32(data)
    else:
        crc = stream.copy(source, offset, nbytes)
    if crc != storage.crc32:
        refuse_crc(storage, crc)
    return crc


def _cast_here(
    item: WriteItem, runs: Sequence[tuple[Storage, int, int]], stream: OutputStream
) -> Iterator[Cut]:
    """Cast and write runs of bytes one after the other."""
    assert isinstance(item.values, TensorRef)
    for storage, first, nbytes in runs:
        for chunk in storage.source.stream([(storage.offset + first, nbytes)]):
            nread, read_crc = len(chunk), crc32(chunk)
            result = cast(chunk, item.values.dtype, item.dtype)
            stream.write(result.data)
            yield Cut(nread, read_crc, len(result.data), crc32(result.data), result.overflowed)


def _write_cast(item: WriteItem, cuts: Iterator[Cut], checksums: Checksums, tally: Tally) -> int:
    """Tell of values while they are cast, cut by cut, and return the CRC-32 of the results; the
    source's own CRCs are checked.
    """
    assert isinstance(item.values, TensorRef)
    crc = overflowed = 0
    for storage, first, nbytes in verbatim_runs(item.values) or ():
        read_crc = nread = 0
        while nread < nbytes:
            cut = next(cuts)
            nread += cut.nread
            read_crc = combined_crc(read_crc, cut.read_crc, cut.nread)
            crc = combined_crc(crc, cut.crc, cut.nbytes)
            overflowed += cut.overflowed
        checksums.copied(storage, first, nbytes, read_crc)
    if overflowed:
        tally.overflowed.append(item.values)
    return crc


def by_tensor(
    plan: ConversionPlan, written: Sequence[TensorRef], count: Callable[[TensorRef], int]
) -> dict[str, int]:
    """Counts by the path of each tensor over the storages of `written`.

    Tensors may share one, and not all are touched.
    """
    touched = {id(piece.storage) for ref in written for piece in ref.pieces}
    found = {}
    for path, ref in plan.tensors() if touched else ():
        if any(id(piece.storage) in touched for piece in ref.pieces) and (number := count(ref)):
            found[path] = number
    return found


def count_overflow(plan: ConversionPlan, ref: TensorRef) -> int:
    """How many finite values of a tensor its cast makes infinite or NaN."""
    lost = [0]
    for _ in iter_cast_chunks(ref, plan.cast(ref), lost):
        pass
    return lost[0]


def count_odd_bools(ref: TensorRef) -> int:
    """Bytes of a bool tensor that are neither 0 nor 1: what they mean depends on who reads them."""
    odd = OddBools()
    if ref.dtype.kind == "bool":
        fold(ref, odd)
    return odd.count
