"""The central directory of a zip archive: found by its end records, and read entry by entry.

Records may not carry a name that is not a plain relative path, and nothing of the directory may
contradict itself. What lies in the records, local headers too, is for `zip_archive`.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator

from ckptconv.io.source import CHUNK, Source
from ckptconv.support.errors import (
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    malformed,
    or_recover,
    printable,
)

MAX32 = 0xFFFFFFFF  # a number of 32 bits that is in the zip64 fields (APPNOTE 4.4.1.4)
# The numbers are those of sections of APPNOTE.TXT, which describes the records
END = struct.Struct("<4s4H2IH")  # 4.3.16
_END_SIGNATURE = b"PK\5\6"
MOST_BEHIND = END.size + 0xFFFF
"""The most bytes that there are from the end record on: a comment may follow it."""
END64 = struct.Struct("<4sQ2H2I4Q")  # 4.3.14
LOCATOR = struct.Struct("<4sIQI")  # 4.3.15: where the record of 4.3.14 is
CENTRAL = struct.Struct("<4s6H3I5H2I")  # 4.3.12
# the fields of it that are not always 0: signature, flags, method, CRC, two sizes, the lengths of
# name, extra field and comment, external attributes, place of the local header
CENTRAL_USED = struct.Struct("<4s4x2H4x3I3H4x2I")
DESCRIPTOR = struct.Struct("<4s3I")  # 4.3.9, with its signature
DESCRIPTOR64 = struct.Struct("<4sI2Q")  # 4.3.9.2: of zip64
ENCRYPTED = 0x2041  # bits 0 (encrypted), 6 (strongly so) and 13 (headers too) of the flags
# of the external attributes, as in MS-DOS; miniz, which torch reads with, goes by it
_FOLDER = 0x10
LOCAL = struct.Struct("<4s5H3I2H")  # 4.3.7
STORED, DEFLATED = 0, 8
_DESCRIBED = 8  # the flag of a record with a data descriptor
# nearly every name: of bytes, \w is ASCII, so there is nothing in it to be refused
_ORDINARY = re.compile(rb"\w[\w.-]*/(?:data/)?\w+").fullmatch


@functools.lru_cache(maxsize=4096)
def local_header(filled: bool, name_length: int, extra_length: int) -> bytes:
    """A local header but for its name and extra field; a torch file has few different ones."""
    return LOCAL.pack(b"PK\3\4", 0, local_flags(filled), *[0] * 6, name_length, extra_length)


def local_flags(size: int) -> int:
    """Bit 11: the name is UTF-8; bit 3: CRC and sizes follow the payload (not an empty one)."""
    return 0x0808 if size else 0x0800


def archive_error(
    source: Source, what: str, where: object = "zip directory"
) -> MalformedCheckpoint:
    """The error about an archive that is damaged, cut off or forged."""
    return malformed(what, path=source.path, where=where)


def find_directory(source: Source) -> tuple[int, int, int, bytes]:
    """Offset, count, size and bytes of the directory, which ends where the end records begin."""
    tail_at, tail = _tail(source)
    at = tail_at + _end_record(source, tail)
    _, disk, start_disk, here, count, size, start, _ = END.unpack_from(tail, at - tail_at)

    def read(start: int, nbytes: int) -> bytes:
        if start < tail_at:
            return source.read(start, nbytes)
        return tail[start - tail_at : start - tail_at + nbytes]

    end = at
    locator_at = at - LOCATOR.size
    locator = read(locator_at, LOCATOR.size) if locator_at >= 0 else b""
    if locator[:4] == b"PK\6\7":
        end = LOCATOR.unpack(locator)[2]
        if end + END64.size != locator_at:
            raise archive_error(source, "its zip64 end record is not where its locator says")
        short = count, size, start
        signature, _, _, _, disk, start_disk, here, *long = END64.unpack(read(end, END64.size))
        count, size, start = long
        agree = all(a == b or a in (0xFFFF, MAX32) for a, b in zip(short, long, strict=True))
        if signature != b"PK\6\6" or not agree:
            raise archive_error(source, "its two end records contradict each other")
    if disk or start_disk or here != count:
        raise archive_error(source, "is one volume of a split archive")
    if start + size != end:
        raise archive_error(source, "its directory does not end where its end record starts")
    return start, count, size, read(start, size)


def check_end(source: Source) -> None:
    """Raise `MalformedCheckpoint` unless an archive has one end record, which ends it."""
    _end_record(source, _tail(source)[1])


def has_one_end(raw: bytes) -> bool:
    """Whether a short archive has one end record, and nothing else that may be one."""
    return raw.count(_END_SIGNATURE) == 1


def central_places(source: Source) -> dict[str, int]:
    """Where in an archive the entry of each record in its directory stands."""
    start, count, _, raw = find_directory(source)
    places, at = {}, 0
    for _ in range(count):
        name_size, extra_size, comment_size = CENTRAL_USED.unpack_from(raw, at)[6:9]
        name_at = at + CENTRAL.size
        places[raw[name_at : name_at + name_size].decode()] = start + at
        at = name_at + name_size + extra_size + comment_size
    return places


def _tail(source: Source) -> tuple[int, bytes]:
    """The bytes in which the end record must be, and where they begin."""
    tail_at = max(0, source.size - MOST_BEHIND)
    return tail_at, source.read(tail_at, source.size - tail_at)


def _end_record(source: Source, tail: bytes) -> int:
    """The place in `tail` of the one end record whose comment ends with the file."""
    found: list[int] = []
    at = tail.rfind(_END_SIGNATURE)
    while at >= 0:
        if at + END.size <= len(tail) and at + END.size + END.unpack_from(tail, at)[7] == len(tail):
            found.append(at)
        at = tail.rfind(_END_SIGNATURE, 0, at)
    if not found:
        what = "the archive has no end record at its end"
        hint = or_recover(
            "the file is cut off, or something was appended, which its library may accept and "
            "ckptconv does not; fetch or save it again",
            source.path,
        )
        raise MalformedCheckpoint(what, code="cut-off", path=source.path, hint=hint)
    if len(found) > 1:
        raise archive_error(source, "holds two end records, each of which could be the real one")
    return found[0]


Entry = tuple[str, int, int, int, bool, "int | None", int]
"""One entry of the directory: name, place of the local header, size, stored bytes, whether they are
deflated, CRC-32, and the bytes that torch's writer puts behind the payload.
"""


def read_entries(source: Source, raw: bytes, count: int, start: int) -> list[Entry]:
    """The entries of the directory `raw`, which begins at byte `start`."""
    entries: list[Entry] = []
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > len(raw):
            raise archive_error(source, "is too short for its number of records")
        (signature, flags, method, crc, stored, plain, name_size, extra_size, comment_size,
            attributes, header) = CENTRAL_USED.unpack_from(raw, at)  # fmt: skip
        name_at = at + CENTRAL.size
        extra_at = name_at + name_size
        at = extra_at + extra_size + comment_size
        if signature != b"PK\1\2" or at > len(raw):
            raise archive_error(source, "holds something other than records")
        raw_name = raw[name_at:extra_at]
        name = raw_name.decode() if _ORDINARY(raw_name) else _name(source, raw_name)
        if method or attributes or flags & ENCRYPTED:
            _refuse_odd(source, name, flags, method, plain if attributes & _FOLDER else 0)
        trail = DESCRIPTOR.size
        if stored == MAX32 or plain == MAX32 or header == MAX32:
            extra = raw[extra_at : extra_at + extra_size]
            stored, plain, header = _zip64_sizes(source, name, extra, stored, plain, header)
            trail = DESCRIPTOR64.size
        if method == STORED and stored != plain:
            raise archive_error(source, f"is stored but declares {stored} and {plain} bytes", name)
        if header + LOCAL.size + name_size > start:
            raise archive_error(source, "its header lies beyond the records", name)
        # torch writes 0 where it is told to write no checksums
        checksum = crc if crc or not plain else None
        if not flags & _DESCRIBED:
            trail = 0
        entries.append((name, header, plain, stored, method == DEFLATED, checksum, trail))
    if at != len(raw):
        raise archive_error(source, "is too long for its number of records")
    return entries


def _refuse_odd(source: Source, name: str, flags: int, method: int, in_folder: int) -> None:
    if flags & ENCRYPTED:
        raise archive_error(source, "is marked as encrypted", name)
    if in_folder and not name.endswith("/"):
        what = "is marked as a folder but holds bytes; torch does not read it correctly"
        raise archive_error(source, what, name)
    if method not in (STORED, DEFLATED):
        what = f"is compressed by method {method}"
        raise UnsupportedCheckpoint(what, path=source.path, where=name)


def _name(source: Source, raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise archive_error(source, f"has a record whose name is not UTF-8: {raw!r}") from None
    if not name.isprintable():
        what = "has a control character in its name, and such names are not read"
        hint = "torch names records after the file: save it again under a plain name"
    elif "\\" in name or name.startswith("/") or ".." in name.split("/"):
        what = "has a name that is not a plain relative path"
        hint = "it may be meant to lead out of a folder: save the file again under plain names"
    else:
        return name
    raise MalformedCheckpoint(what, path=source.path, where=printable(name), hint=hint)


def _zip64_sizes(
    source: Source, name: str, extra: bytes, stored: int, size: int, header: int
) -> tuple[int, int, int]:
    """The 64-bit numbers of what overflowed, in the order size, stored, header."""
    told = [size, stored, header]
    wide = [index for index, number in enumerate(told) if number == MAX32]
    numbers = zip64_numbers(extra)
    if numbers is None or len(numbers) < len(wide):
        raise archive_error(source, "says that it has zip64 sizes, but has none", name)
    for index, number in zip(wide, numbers, strict=False):
        told[index] = number
    return told[1], told[0], told[2]


def zip64_numbers(extra: bytes) -> tuple[int, ...] | None:
    """The numbers of the zip64 field, which is of kind 1; None where there is none."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and at + 4 + length <= len(extra):
            return struct.unpack_from(f"<{length // 8}Q", extra, at + 4)
        at += 4 + length
    return None


# ---------------------------------------------------------------------------------- several in one

# Signatures of end records in payloads that are passed over before the search ends
_MOST_IN_VAIN = 10_000


def joined_archives(source: Source) -> list[tuple[int, int]]:
    """Where archives that follow one another, as the items of a DCP folder do, begin in a source,
    and how long each is; empty where they do not fill it. Offsets count from each one's first byte.
    """
    found: list[tuple[int, int]] = []
    start = vain = 0
    for at in _signatures(source):
        if at >= start and _is_end(source, start, at):
            found.append((start, at + END.size - start))
            start = at + END.size
        elif (vain := vain + 1) > _MOST_IN_VAIN:
            return []
    return found if start == source.size else []


def _signatures(source: Source) -> Iterator[int]:
    """The places at which an end record may begin."""
    start = source.data_from(0)
    while start < source.size:
        window = source.read(start, min(CHUNK + 3, source.size - start))
        at = window.find(_END_SIGNATURE)
        while 0 <= at < CHUNK:
            yield start + at
            at = window.find(_END_SIGNATURE, at + 1)
        start = source.data_from(start + CHUNK)


def _is_end(source: Source, start: int, at: int) -> bool:
    """Whether the archive that begins at `start` has its end record, without a comment, at `at`."""
    if at + END.size > source.size:
        return False
    _, _, _, _, _, size, directory, comment = END.unpack(source.read(at, END.size))
    end = at
    locator_at = at - LOCATOR.size
    locator = source.read(locator_at, LOCATOR.size) if locator_at >= start else b""
    if locator[:4] == b"PK\6\7":
        end = start + LOCATOR.unpack(locator)[2]
        if end + END64.size != locator_at:
            return False
        signature, *_, size, directory = END64.unpack(source.read(end, END64.size))
        if signature != b"PK\6\6":
            return False
    return not comment and start + directory + size == end and source.read(start, 4) == b"PK\3\4"
