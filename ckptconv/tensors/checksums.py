"""The checksums of storages that are copied in parts, joined from those of the parts.

A zip archive declares the CRC-32 of a whole record. A conversion may copy it in many runs, in any
order, to several files; nothing is read a second time for the checksum.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.io.crc import combined_crc, crc32
from ckptconv.support.errors import MalformedCheckpoint, or_recover
from ckptconv.support.progress import Counting
from ckptconv.tensors.refs import Storage, origins


class Checksums:
    """What is known of the checksums of storages while their bytes are read for something else.

    `finish` it before what was read is relied on. `meter` counts the bytes that are read only for
    checksums. Each method raises `MalformedCheckpoint` when a storage does not have the CRC-32 that
    its record declares.
    """

    def __init__(self, meter: Counting | None = None) -> None:
        self._meter = meter
        self._settled: set[int] = set()
        self._copied: dict[int, tuple[Storage, list[tuple[int, int, int]]]] = {}

    def read(self, storage: Storage) -> None:
        """Check a storage, or the one that it is part of, by reading all of it, once; of one that
        is computed, those of its inputs.
        """
        for origin in origins([storage]):
            whole = origin.whole
            if id(whole) not in self._settled:
                check_storage(whole, self._meter)
                self._settled.add(id(whole))  # not before: who asks again is refused again

    def copied(self, storage: Storage, first: int, nbytes: int, crc: int) -> None:
        """Note that `nbytes` bytes of a storage, from its byte `first` on, have this CRC-32; none,
        that it is to be checked by `finish`.
        """
        whole = storage.whole
        if whole.crc32 is None or id(whole) in self._settled:
            return
        if nbytes and nbytes == whole.nbytes:
            self._settled.add(id(whole))
            refuse_crc(whole, crc)
            return
        _, runs = self._copied.setdefault(id(whole), (whole, []))
        start = storage.offset + first - whole.offset
        if runs and sum(runs[-1][:2]) == start:  # one run of what is read from end to end
            before, count, known = runs.pop()
            runs.append((before, count + nbytes, combined_crc(known, crc, nbytes)))
        elif nbytes:
            runs.append((start, nbytes, crc))

    def join(self, later: Checksums) -> None:
        """Take over what another one knows, which is not to be used any more."""
        self._settled |= later._settled
        for key, (whole, runs) in later._copied.items():
            self._copied.setdefault(key, (whole, []))[1].extend(runs)

    def finish(self, others: Iterable[Storage] = ()) -> None:
        """Check the storages of which parts were copied; of these, what was not copied is read. Of
        `others`, those that are not checked yet are read.
        """
        for whole, runs in self._copied.values():
            if id(whole) not in self._settled:
                self._settled.add(id(whole))
                refuse_crc(whole, self._joined(whole, sorted(runs)))
        for storage in others:
            self.read(storage)

    def _joined(self, whole: Storage, runs: list[tuple[int, int, int]]) -> int:
        """The CRC-32 of a storage from those of runs of it, in order.

        The CRC-32 of two runs one after the other follows from that of each and the length of the
        second. Gaps are read, and so are runs that overlap others.
        """
        crc = at = 0
        for first, nbytes, run_crc in runs:
            if first >= at and nbytes:
                crc = combined_crc(self._read_on(whole, at, first, crc), run_crc, nbytes)
                at = first + nbytes
        return self._read_on(whole, at, whole.nbytes, crc)

    def _read_on(self, whole: Storage, start: int, stop: int, crc: int) -> int:
        for view in whole.source.stream([(whole.offset + start, stop - start)]):
            crc = crc32(view, crc)
            if self._meter is not None:
                self._meter.add(len(view))
        return crc


def check_storage(storage: Storage, meter: Counting | None = None) -> None:
    """Read all of a storage; `MalformedCheckpoint` if it does not have its declared CRC-32. `meter`
    counts the bytes that are read.
    """
    if storage.crc32 is None:
        return
    crc = 0
    for view in storage.source.stream([(storage.offset, storage.nbytes)]):
        crc = crc32(view, crc)
        if meter is not None:
            meter.add(len(view))
    refuse_crc(storage, crc)


def refuse_crc(storage: Storage, crc: int) -> None:
    """Raise `MalformedCheckpoint` unless `crc` is the CRC-32 that the record declares."""
    if storage.crc32 is not None and storage.crc32 != crc:
        raise MalformedCheckpoint(
            f"its bytes have the CRC-32 {crc:08x}, the archive says {storage.crc32:08x}",
            code="checksum",
            path=storage.source.path,
            where=storage.name,
            hint=or_recover("the file is damaged; fetch it again", storage.source.path),
        )
