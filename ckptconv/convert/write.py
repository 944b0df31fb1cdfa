"""The payloads of one file, written and checksummed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field

from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.target_format import Layout, WriteItem
from ckptconv.io.crc import CrcOf, combined_crc, crc32, no_crc
from ckptconv.io.source import CHUNK, SMALL
from ckptconv.io.stream import OutputStream
from ckptconv.support.records import dataclass
from ckptconv.tensors.ahead import read_soon
from ckptconv.tensors.checksums import Checksums, refuse_crc
from ckptconv.tensors.compute_ahead import THREADS, Cut, ToCompute, compute_ahead, may_be_threaded
from ckptconv.tensors.computed import ReadRun, iter_cast_chunks, read_cast, step_in
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tensors.stream import verbatim_range, verbatim_runs

_WORTH_THREADS = 8 << 20
"""Bytes of values to be computed from which threads are started for them."""


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
    """Write all bytes of a file; `tally` and `checksums` note what is found on the way. Where there
    is much to cast or to compute, it is done by so many threads.
    """
    crcs: list[int] = []
    crc_of = crc32 if layout.has_crcs else no_crc
    between = b""
    write, trail = stream.write, layout.trail
    items = tuple(layout.items)
    refs = [item.values for item in items if isinstance(item.values, TensorRef)]
    wanted = {}
    if threads > 1 and stream.is_for_threads():
        wanted = dict(_for_threads(items))
    if sum(items[index].nbytes for index in wanted) < _WORTH_THREADS:
        wanted = {}
    ahead: AbstractContextManager[Iterator[Iterator[Cut]]] = nullcontext(iter(()))
    if wanted:
        ahead = compute_ahead(list(wanted.values()), stream.write_at, crc_of, threads)
    with read_soon(refs), ahead as computed:
        for index, item in enumerate(items):
            lead = between + item.lead
            if lead:
                write(lead)
            if index in wanted:
                crc = _write_cuts(item, _left_out(next(computed), stream), checksums, tally)
            else:
                crc = _write_values(item, stream, crc_of, checksums, tally)
            crcs.append(crc)
            between = trail(index, crc)
    write(between)
    write(layout.ending(crcs))


def _for_threads(items: Sequence[WriteItem]) -> Iterator[tuple[int, ToCompute]]:
    """The items that several threads may compute."""
    for index, item in enumerate(items):
        values = item.values
        # a copy gains nothing by threads, and a small value costs less than to hand it to one
        if not isinstance(values, TensorRef) or item.nbytes <= SMALL or not _is_computed(item):
            continue
        runs = verbatim_runs(values)
        if runs is not None and may_be_threaded(runs):
            yield index, ToCompute(runs, values.dtype, item.dtype, item.offset)


def _is_computed(item: WriteItem) -> bool:
    """Whether its bytes are made by a cast or by another operation."""
    values = item.values
    assert isinstance(values, TensorRef)
    if item.dtype is not values.dtype:
        return True
    return any(piece.storage.source.is_derived for piece in values.pieces)


def _left_out(cuts: Iterable[Cut], stream: OutputStream) -> Iterator[Cut]:
    """Cuts that threads have written."""
    for cut in cuts:
        stream.leave_out(cut.nbytes)
        yield cut


def _write_values(
    item: WriteItem, stream: OutputStream, crc_of: CrcOf, checksums: Checksums, tally: Tally
) -> int:
    """Write one payload and return its CRC-32, if `crc_of` gives that; the source's own CRCs are
    checked on the way.
    """
    values = item.values
    if isinstance(values, bytes):
        stream.write(values)
        return crc_of(values, 0)
    # not copied unseen: what a byte that is neither 0 nor 1 means depends on who reads it
    if item.dtype.kind == "bool":
        return _write_bools(values, stream, crc_of, checksums, tally)
    whole = _whole(item, values)
    if whole is not None:
        return _copy_whole(whole, stream, crc_of)
    runs = verbatim_runs(values)
    if runs is None:
        return _write_gathered(item, values, stream, crc_of, checksums, tally)
    if _is_computed(item):
        return _write_cuts(item, _computed_here(item, runs, stream, crc_of), checksums, tally)
    return _write_runs(runs, stream, crc_of, checksums)


def _whole(item: WriteItem, values: TensorRef) -> Storage | None:
    """The storage of which an item is all bytes, as they are. Nearly all are of that kind."""
    pieces = values.pieces
    if item.dtype is not values.dtype or len(pieces) != 1:
        return None
    storage = pieces[0].storage
    if item.nbytes != storage.nbytes or storage.part_of is not None:
        return None
    return None if storage.source.is_derived or verbatim_range(values) is None else storage


def _write_bools(
    values: TensorRef, stream: OutputStream, crc_of: CrcOf, checksums: Checksums, tally: Tally
) -> int:
    from ckptconv.tensors.fold import OddBools, fold  # few models have bools

    written, odd = _Written(stream, crc_of), OddBools()
    fold(values, written, odd, checksums=checksums)
    if odd.count:
        tally.odd_bools.append(values)
    return written.crc


class _Written:
    """A counter that writes what it is given, and has what `crc_of` gives for it as `crc`."""

    def __init__(self, stream: OutputStream, crc_of: CrcOf) -> None:
        self.crc = 0
        self._stream, self._crc_of = stream, crc_of

    def update(self, chunk: memoryview) -> None:
        self._stream.write(chunk)
        self.crc = self._crc_of(chunk, self.crc)


def _write_runs(
    runs: Sequence[tuple[Storage, int, int]],
    stream: OutputStream,
    crc_of: CrcOf,
    checksums: Checksums,
) -> int:
    """Copy runs of bytes one after the other."""
    crc = 0
    for storage, first, nbytes in runs:
        wanted = crc32 if storage.has_crc else crc_of
        found = stream.copy(storage.source, storage.offset + first, nbytes, wanted)
        checksums.copied(storage, first, nbytes, found)
        crc = combined_crc(crc, found, nbytes) if len(runs) > 1 else found
    return crc


def _write_gathered(
    item: WriteItem,
    values: TensorRef,
    stream: OutputStream,
    crc_of: CrcOf,
    checksums: Checksums,
    tally: Tally,
) -> int:
    """Write values that do not lie in order, or that are cast."""
    for piece in values.pieces:
        checksums.read(piece.storage)
    crc, lost = 0, [0]
    for chunk in iter_cast_chunks(values, item.dtype, lost):
        stream.write(chunk)
        crc = crc_of(chunk, crc)
    if lost[0]:
        tally.overflowed.append(values)
    return crc


def _copy_whole(storage: Storage, stream: OutputStream, crc_of: CrcOf) -> int:
    """Copy a whole storage, checking its CRC-32 in the same pass."""
    source, offset, nbytes, known = storage.source, storage.offset, storage.nbytes, storage.crc32
    # what the source says of its bytes is held against them, also where the output says nothing
    wanted = crc_of if known is None else crc32
    if nbytes <= SMALL:
        data = source.read(offset, nbytes)
        stream.write(data)
        crc = wanted(data, 0)
    else:
        crc = stream.copy(source, offset, nbytes, wanted)
    if crc != known:
        refuse_crc(storage, crc)
    return crc


def _computed_here(
    item: WriteItem,
    runs: Sequence[tuple[Storage, int, int]],
    stream: OutputStream,
    crc_of: CrcOf,
) -> Iterator[Cut]:
    """Compute and write runs of bytes one after the other."""
    assert isinstance(item.values, TensorRef)
    for storage, first, nbytes in runs:
        buffer = memoryview(bytearray(min(CHUNK, nbytes)))
        step = step_in(storage, CHUNK)
        for start in range(0, nbytes, step):
            view = buffer[: min(step, nbytes - start)]
            read: list[ReadRun] = []
            place, types = first + start, (item.values.dtype, item.dtype)
            result = read_cast(storage, place, view, *types, read.append)
            stream.write(result.data)
            yield Cut(read, len(result.data), crc_of(result.data, 0), result.overflowed)


def _write_cuts(item: WriteItem, cuts: Iterator[Cut], checksums: Checksums, tally: Tally) -> int:
    """Tell of values while they are computed, cut by cut, and return the CRC-32 of the results; the
    source's own CRCs are checked.
    """
    assert isinstance(item.values, TensorRef)
    crc = overflowed = nbytes = 0
    while nbytes < item.nbytes:
        cut = next(cuts)
        for run in cut.read:
            checksums.copied(*run)
        crc = combined_crc(crc, cut.crc, cut.nbytes)
        overflowed += cut.overflowed
        nbytes += cut.nbytes
    if overflowed:
        tally.overflowed.append(item.values)
    return crc


def by_tensor(
    plan: ConversionPlan, written: Sequence[TensorRef], count: Callable[[TensorRef], int]
) -> dict[str, int]:
    """Counts by the path of each tensor over storages `written`, which tensors may share."""
    touched = {id(piece.storage) for ref in written for piece in ref.pieces}
    found = {}
    # nearly always nothing is odd: then a million tensors need not be walked
    for path, ref in plan.made_of.tensors() if touched else ():
        is_touched = any(id(piece.storage) in touched for piece in ref.pieces)
        number = count(ref) if is_touched else 0
        if number:
            found[path] = number
    return found


def count_overflow(plan: ConversionPlan, ref: TensorRef) -> int:
    """How many values of a tensor are beyond the range of the type that its cast makes of them."""
    lost = [0]
    for _ in iter_cast_chunks(ref, plan.made_of.cast(ref), lost):
        pass
    return lost[0]


def count_odd_bools(ref: TensorRef) -> int:
    """Bytes of a bool tensor that are neither 0 nor 1: what they mean depends on who reads them."""
    from ckptconv.tensors.fold import OddBools, fold

    odd = OddBools()
    if ref.dtype.kind == "bool":
        fold(ref, odd)
    return odd.count
