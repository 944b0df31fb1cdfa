"""Zip archives as torch writes them: a directory of records by name, and the bytes around the
payloads when writing.

Reading trusts neither of the two descriptions that a zip file holds of itself: the central
directory is checked whole (`zip_directory`), and records may not overlap or have one name (to
torch, names that differ in case only are one).
Each local header is held against the directory before its payload is first read (`GuardedSource`);
opening touches neither. Deflated records are read through `InflatedSource`.

Layout written (that of torch's own writer, whose reader computes offsets instead of looking them
up): local header with flags 0x808 and no sizes, an extra field ``FB`` that pads the payload to 64
bytes, payload, data descriptor (none for an empty record), central directory, zip64 end record and
locator, end record. Source: PyTorch's inline_container.cc and the files that torch 2.13 writes.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from ckptconv.formats.zip_directory import (
    CENTRAL,
    CENTRAL_USED,
    DEFLATED,
    DESCRIPTOR,
    DESCRIPTOR64,
    ENCRYPTED,
    END,
    END64,
    LOCATOR,
    MAX32,
    STORED,
    Entry,
    find_directory,
    malformed,
    read_entries,
)
from ckptconv.io.crc import crc32
from ckptconv.io.guarded import GuardedSource, read_leads
from ckptconv.io.inflate import InflatedSource, Spool
from ckptconv.io.source import Source
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import in_force
from ckptconv.support.records import made

ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")


class Record(NamedTuple):
    """One record: `offset` of its payload, `size` when inflated, `stored` bytes in the file, its
    `crc32` (None: absent).
    """

    name: str
    header: int
    offset: int
    size: int
    stored: int
    deflated: bool
    crc32: int | None


def open_archive(source: Source) -> tuple[GuardedSource, dict[str, Record]]:
    """The records of an archive by name, in the order in which they lie in it, and the source of
    their bytes.

    Only the directory is read. The source holds the local header of a record against it before it
    gives out the record's bytes. Raises `MalformedCheckpoint` when the archive is cut off,
    ambiguous, or contradicts itself.
    """
    start, count, size, raw = find_directory(source)
    if count > size // CENTRAL.size:
        raise malformed(source, f"claims {count} records in {size} bytes")
    if count > (most := in_force().archive_records):
        what = f"has {count} records"
        raise LimitExceeded(
            what,
            limit="archive_records",
            allowed=most,
            needed=count,
            path=source.path,
            where="zip directory",
        )
    records = _placed(source, read_entries(source, raw, count, start), start)
    headers = _LocalHeaders(source, records, start)
    guarded = GuardedSource(source, [record.offset for record in records], headers.check)
    _refuse_overlaps(guarded, records, start)
    if len(set("\n".join([record.name for record in records]).lower().split("\n"))) != len(records):
        _refuse_twins(source, [record.name for record in records])
    return guarded, {record.name: record for record in records if record.name[-1:] != "/"}


def read_directory(source: Source) -> dict[str, Record]:
    """The records of an archive by name, all of them held against their local headers: their bytes
    can be read from `source` itself.
    """
    guarded, records = open_archive(source)
    guarded.check_all()
    return {
        name: record._replace(offset=guarded.place(record.offset))
        for name, record in records.items()
    }


def record_source(source: Source, record: Record, spool: Spool) -> tuple[Source, int]:
    """Where the plain bytes of `record` can be read: a source and the offset in it.

    Deflated ones pass through `spool`.
    """
    if not record.deflated:
        return source, record.offset
    return InflatedSource(
        source, record.offset, record.stored, record.size, record.crc32, record.name, spool
    ), 0


def read_record(source: Source, record: Record, limit: str) -> bytes:
    """All bytes of a record, its CRC-32 checked; `limit` is the name of the limit of its size."""
    if record.size > (most := getattr(in_force(), limit)):
        raise LimitExceeded(
            f"is {record.size} bytes long",
            limit=limit,
            allowed=most,
            needed=record.size,
            path=source.path,
            where=record.name,
        )
    spool = Spool()
    try:
        plain, offset = record_source(source, record, spool)
        found = plain.read(offset, record.size)
    finally:
        spool.close()
    if record.crc32 is not None and crc32(found) != record.crc32:
        raise MalformedCheckpoint(
            "does not have the CRC-32 that the archive says",
            code="checksum",
            path=source.path,
            where=record.name,
        )
    return found


# ------------------------------------------------------------------------------------------ reading


def _placed(source: Source, entries: list[Entry], start: int) -> list[Record]:
    """The entries as they lie in the file, each with the place where its payload is expected.

    Where a payload begins depends on the length of the extra field, which only the local header
    tells (torch pads with it). But torch leaves nothing between the records, so a payload ends
    where the next header begins, less its data descriptor. `_LocalHeaders` finds out the truth.
    """
    entries.sort(key=itemgetter(1))
    records = []
    ends = [entry[1] for entry in entries[1:]]
    ends.append(start)
    for (name, header, size, stored, deflated, crc, trail), end in zip(entries, ends, strict=True):
        offset = max(end - trail - stored, header + _LOCAL.size + len(name))
        records.append(made(Record, (name, header, offset, size, stored, deflated, crc)))
    return records


class _LocalHeaders:
    """The local headers of the records of one archive, which must agree with its directory (at byte
    `start`).
    """

    def __init__(self, source: Source, records: Sequence[Record], start: int) -> None:
        self._source = source
        self._records = records
        self._start = start

    def check(self, first: int, stop: int) -> dict[int, int]:
        """Check the headers of some records.

        Gives the places of the payloads that are not where they are expected.
        """
        records = self._records[first:stop]
        names = [record.name.encode() for record in records]
        ranges = [
            (record.header, _LOCAL.size + len(name))
            for record, name in zip(records, names, strict=True)
        ]
        leads = read_leads(self._source, ranges)
        ends = [at + len(lead) for at, lead in leads]
        elsewhere = {}
        which = 0
        for number, (record, name) in enumerate(zip(records, names, strict=True), first):
            if record.header >= ends[which]:
                which = bisect_right(ends, record.header, which)
            at, lead = leads[which]
            size = record.offset - record.header - _LOCAL.size - len(name)
            # what torch's writer puts there, compared in one piece
            usual = _local_header(record.stored > 0, len(name), size) + name
            if record.deflated or size > 0xFFFF or not lead.startswith(usual, record.header - at):
                offset = self._payload(record, name, lead, record.header - at)
                if offset != record.offset:
                    elsewhere[number] = offset
        self._refuse_overlaps(elsewhere)
        return elsewhere

    def _refuse_overlaps(self, elsewhere: Mapping[int, int]) -> None:
        for number, offset in elsewhere.items():
            record, following = self._records[number], self._records[number + 1 : number + 2]
            if offset + record.stored > self._start:
                what = "its payload reaches beyond the records"
                raise malformed(self._source, what, record.name)
            if following and offset + record.stored > following[0].header:
                raise _overlap(self._source, following[0])

    def _payload(self, record: Record, name: bytes, lead: bytes, at: int) -> int:
        """Where the payload of a record begins, by its local header at byte `at` of `lead`."""
        _, header, _, plain, stored, deflated, crc32 = record
        (signature, _, flags, method, _, _, local_crc, local_stored, local_plain, name_size,
            extra_size) = _LOCAL.unpack_from(lead, at)  # fmt: skip
        name_at = at + _LOCAL.size
        if (
            signature != b"PK\3\4"
            or name_size != len(name)
            or lead[name_at : name_at + name_size] != name
        ):
            what = "its local header has another name than the directory"
            raise malformed(self._source, what, record.name)
        # The local CRC and sizes are absent (0), in the zip64 field (all ones), or the directory's
        # own.
        if (
            flags & ENCRYPTED
            or method != (DEFLATED if deflated else STORED)
            or local_crc not in (0, MAX32, crc32 or 0)
            or local_stored not in (0, MAX32, stored)
            or local_plain not in (0, MAX32, plain)
        ):
            what = "its local header contradicts the directory"
            raise malformed(self._source, what, record.name)
        return int(header + _LOCAL.size + name_size + extra_size)


def _refuse_overlaps(guarded: GuardedSource, records: list[Record], start: int) -> None:
    """Refuse records that, by the directory alone, do not lie one behind the other."""
    end = 0
    for record in records:
        if record.header < end or (end == 0 and record.header):
            guarded.check_all()  # a header that is not there says more
            raise _overlap(guarded, record)
        end = record.offset + record.stored
    if end > start:
        guarded.check_all()
        raise malformed(guarded, "its payload reaches beyond the records", records[-1].name)


def _refuse_twins(source: Source, names: list[str]) -> None:
    """Refuse a name that occurs twice; of two that differ in case, torch finds the first alone.

    In an archive of arrays, which only numpy reads, they are two names.
    """
    if len(set(names)) != len(names):
        raise malformed(source, "has two records of the same name")
    if not all(name.endswith(".npy") for name in names):
        raise malformed(
            source, "has two records whose names differ only in case; torch takes them for the same"
        )


def _overlap(source: Source, record: Record) -> MalformedCheckpoint:
    return malformed(
        source, "overlaps the record before it, or hidden bytes are in front of it", record.name
    )


# ------------------------------------------------------------------------------------------ writing


class Slot(NamedTuple):
    """A record to be written: its local header stands at byte `header`, its payload has `size`
    bytes.
    """

    name: bytes
    header: int
    size: int


def lay_out(name: bytes, header: int, size: int) -> tuple[Slot, bytes, int, int]:
    """The record `name` of `size` bytes from byte `header` on, its payload at a multiple of 64.

    Returns the slot, the bytes before the payload (local header and padding), the payload's offset,
    and the end of it all.
    """
    slot = made(Slot, (name, header, size))
    wide = _wide(slot) if size >= MAX32 or header >= MAX32 else b""
    extra = len(wide) + 4
    unpadded = header + _LOCAL.size + len(name) + extra
    padding = -unpadded % ALIGNMENT
    lead = _local_header(size > 0, len(name), extra + padding) + name + wide + _PADDINGS[padding]
    offset = unpadded + padding
    trail = 0 if not size else DESCRIPTOR64.size if wide else DESCRIPTOR.size
    return slot, lead, offset, offset + size + trail


@functools.lru_cache(maxsize=4096)
def _local_header(filled: bool, name_length: int, extra_length: int) -> bytes:
    """A local header but for its name and extra field; a torch file has few different ones."""
    return _LOCAL.pack(b"PK\3\4", 0, _flags(filled), 0, 0, 0, 0, 0, 0, name_length, extra_length)


_PADDINGS = tuple(b"FB%c\0" % size + b"Z" * size for size in range(ALIGNMENT))


def _flags(size: int) -> int:
    """Bit 11: the name is UTF-8; bit 3: CRC and sizes follow the payload (not an empty one)."""
    return 0x0808 if size else 0x0800


def _wide(slot: Slot) -> bytes:
    """The zip64 extra field, empty while both fit 32 bits; torch's writer repeats the offset in
    local headers.
    """
    _, header, size = slot
    if size < MAX32 and header < MAX32:
        return b""
    numbers = [*([size, size] if size >= MAX32 else []), *([header] if header >= MAX32 else [])]
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def descriptor(slot: Slot, crc: int) -> bytes:
    """The data descriptor behind a payload; nothing for an empty one."""
    _, header, size = slot
    if not size:
        return b""
    kind = DESCRIPTOR if size < MAX32 and header < MAX32 else DESCRIPTOR64
    return kind.pack(b"PK\7\x08", crc, size, size)


def ending_size(slots: Sequence[Slot]) -> int:
    """The length of `ending`."""
    names = sum(len(name) for name, _, _ in slots)
    wide = sum(map(len, map(_wide, slots))) if sum(slots[-1][1:]) >= MAX32 else 0
    return len(slots) * CENTRAL.size + names + wide + END64.size + LOCATOR.size + END.size


def ending(slots: Sequence[Slot], crcs: Sequence[int], start: int) -> bytes:
    """Central directory, from byte `start` on, and end records, for records with these CRC-32s."""
    directory = b"".join(map(_central, slots, crcs))
    count, size = len(slots), len(directory)
    end64 = END64.pack(b"PK\6\6", END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start)
    locator = LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, MAX32), min(start, MAX32))
    return directory + end64 + locator + END.pack(b"PK\5\6", 0, 0, *short, 0)


def _central(slot: Slot, crc: int) -> bytes:
    name, header, size = slot
    wide = b""
    if size >= MAX32 or header >= MAX32:
        wide = _wide(slot)
        header, size = min(header, MAX32), min(size, MAX32)
    fields = (b"PK\1\2", _flags(size), 0, crc, size, size, len(name), len(wide), 0, 0, header)
    return CENTRAL_USED.pack(*fields) + name + wide
