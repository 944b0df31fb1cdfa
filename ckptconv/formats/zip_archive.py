"""Zip archives as torch writes them, read: a directory of records by name.

Reading trusts neither of the two descriptions that a zip file holds of itself: the central
directory is checked whole (`zip_directory`), and records may not overlap or have one name (to
torch, names that differ in case only are one).
Each local header is held against the directory before its payload is first read (`GuardedSource`);
opening touches neither. Deflated records are read through `InflatedSource`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from operator import itemgetter
from typing import Any, TypeAlias

from ckptconv.formats.zip_directory import (
    CENTRAL,
    DEFLATED,
    ENCRYPTED,
    LOCAL,
    MAX32,
    STORED,
    Entry,
    archive_error,
    find_directory,
    local_header,
    read_entries,
)
from ckptconv.io.crc import crc32
from ckptconv.io.guarded import GuardedSource, read_leads
from ckptconv.io.inflate import InflatedSource, Spool
from ckptconv.io.source import Source
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import NamedTuple, made


class Record(NamedTuple):
    """A record: `offset` and `size` of its payload, `stored` bytes in the file, `crc32` or None."""

    name: str
    header: int
    offset: int
    size: int
    stored: int
    deflated: bool
    crc32: int | None


Records: TypeAlias = Mapping[str, Record]
"""The records of an archive by name."""


def root_folder(records: Records, name: str) -> str | None:
    """The folder that holds the record `name`, with its slash; None if there is not just one."""
    found = root_folders(records, name)
    return found[0] if len(found) == 1 else None


def root_folders(records: Records, name: str) -> list[str]:
    """The folders that hold a record `name`, each with its slash."""
    if not ends_one(records, name):
        return []
    found = [record for record in records if record.endswith(f"/{name}")]
    return [record[: -len(name)] for record in found if record.count("/") == 1]


def ends_one(records: Records, name: str) -> bool:
    """Whether a record has this name, in whatever folder."""
    # no name has a line break in it, and one search in all of them is the quickest
    listed = "\n".join(["", *records, ""])
    return f"/{name}\n" in listed or f"\n{name}\n" in listed


def checksum_notes(records: Records) -> Iterator[str]:
    """Tell of an archive that was written without checksums."""
    if any(record.size and record.crc32 is None for record in records.values()):
        yield "the archive has no checksums (CRC-32 fields are 0), so damage cannot be detected"


def open_archive(source: Source) -> tuple[GuardedSource, dict[str, Record]]:
    """The records of an archive by name, in the order in which they lie in it, and the source of
    their bytes.

    Only the directory is read. The source holds the local header of a record against it before it
    gives out the record's bytes. Raises `MalformedCheckpoint` when the archive is cut off,
    ambiguous, or contradicts itself.
    """
    start, count, size, raw = find_directory(source)
    if count > size // CENTRAL.size:
        raise archive_error(source, f"claims {count} records in {size} bytes")
    told = {"path": source.path, "where": "zip directory"}
    refuse_beyond("archive_records", count, f"has {count} records", **told)
    records = _placed(read_entries(source, raw, count, start), start)
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
    placed = ((one, guarded.place(one.offset)) for one in records.values())
    return {record.name: record._replace(offset=offset) for record, offset in placed}


def record_source(source: Source, record: Record, spool: Spool) -> tuple[Source, int]:
    """Where the plain bytes of `record` are: a source and an offset; deflated ones in `spool`."""
    if not record.deflated:
        return source, record.offset
    return InflatedSource(
        source, record.offset, record.stored, record.size, record.crc32, record.name, spool
    ), 0


def read_record(source: Source, record: Record, limit: str) -> bytes:
    """All bytes of a record, its CRC-32 checked; `limit` is the name of the limit of its size."""
    told: dict[str, Any] = {"path": source.path, "where": record.name}
    refuse_beyond(limit, record.size, f"is {record.size} bytes long", **told)
    if record.deflated:
        with closing(Spool()) as spool:
            plain, offset = record_source(source, record, spool)
            found = plain.read(offset, record.size)
    else:
        found = source.read(record.offset, record.size)
    if record.crc32 is not None and crc32(found) != record.crc32:
        what = "does not have the CRC-32 that the archive says"
        raise MalformedCheckpoint(what, code="checksum", **told)
    return found


# ------------------------------------------------------------------------------------------ reading


def _placed(entries: list[Entry], start: int) -> list[Record]:
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
        offset = max(end - trail - stored, header + LOCAL.size + len(name))
        records.append(made(Record, (name, header, offset, size, stored, deflated, crc)))
    return records


class _LocalHeaders:
    """The local headers of the records of an archive, which must agree with its directory."""

    def __init__(self, source: Source, records: Sequence[Record], start: int) -> None:
        self._source = source
        self._records = records
        self._start = start

    def check(self, first: int, stop: int) -> dict[int, int]:
        """Check the headers of some records; gives the places of payloads that are elsewhere."""
        records = self._records[first:stop]
        names = [record.name.encode() for record in records]
        ranges = [
            (record.header, LOCAL.size + len(name))
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
            size = record.offset - record.header - LOCAL.size - len(name)
            # what torch's writer puts there, compared in one piece
            usual = local_header(record.stored > 0, len(name), size) + name
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
                raise archive_error(self._source, what, record.name)
            if following and offset + record.stored > following[0].header:
                raise _overlap(self._source, following[0])

    def _payload(self, record: Record, name: bytes, lead: bytes, at: int) -> int:
        """Where the payload of a record begins, by its local header at byte `at` of `lead`."""
        _, header, _, plain, stored, deflated, crc32 = record
        (signature, _, flags, method, _, _, local_crc, local_stored, local_plain, name_size,
            extra_size) = LOCAL.unpack_from(lead, at)  # fmt: skip
        name_at = at + LOCAL.size
        is_named = name_size == len(name) and lead[name_at : name_at + name_size] == name
        if signature != b"PK\3\4" or not is_named:
            what = "its local header has another name than the directory"
            raise archive_error(self._source, what, record.name)
        # The local CRC and sizes are absent (0), in the zip64 field (all ones), or the directory's
        # own.
        told = (local_crc, crc32 or 0), (local_stored, stored), (local_plain, plain)
        are_told = all(local in (0, MAX32, own) for local, own in told)
        if flags & ENCRYPTED or method != (DEFLATED if deflated else STORED) or not are_told:
            what = "its local header contradicts the directory"
            raise archive_error(self._source, what, record.name)
        return int(header + LOCAL.size + name_size + extra_size)


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
        raise archive_error(guarded, "its payload reaches beyond the records", records[-1].name)


def _refuse_twins(source: Source, names: list[str]) -> None:
    """Refuse a name that occurs twice; of two that differ in case, torch finds the first alone. In
    an archive of arrays, which only numpy reads, they are two names.
    """
    if len(set(names)) != len(names):
        raise archive_error(source, "has two records of the same name")
    if not all(name.endswith(".npy") for name in names):
        what = "has two records whose names differ only in case; torch takes them for the same"
        raise archive_error(source, what)


def _overlap(source: Source, record: Record) -> MalformedCheckpoint:
    what = "overlaps the record before it, or hidden bytes are in front of it"
    return archive_error(source, what, record.name)
