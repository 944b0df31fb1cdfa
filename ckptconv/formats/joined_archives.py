"""Archives that follow one another in one file, as the items of a DCP folder do: where each begins.

Each ends with its own end record, whose offsets count from the first byte of that archive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ckptconv.io.source import CHUNK, Source

# signature, disks and counts, size and start of the directory, size of the comment
_END = struct.Struct("<4s4HIIH")
# signature, disk, place of the zip64 end record, number of disks
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")  # signature, …, size and start of the directory
_MOST_IN_VAIN = 10_000
"""Signatures of end records in payloads that are passed over before the search ends."""


def joined_archives(source: Source) -> list[tuple[int, int]]:
    """Where archives in a source begin and how long each is; empty where they do not fill it."""
    found: list[tuple[int, int]] = []
    start = vain = 0
    for at in _signatures(source):
        if at >= start and _is_end(source, start, at):
            found.append((start, at + _END.size - start))
            start = at + _END.size
        elif (vain := vain + 1) > _MOST_IN_VAIN:
            return []
    return found if start == source.size else []


def _signatures(source: Source) -> Iterator[int]:
    """The places at which an end record may begin."""
    start = source.data_from(0)
    while start < source.size:
        window = source.read(start, min(CHUNK + 3, source.size - start))
        at = window.find(b"PK\5\6")
        while 0 <= at < CHUNK:
            yield start + at
            at = window.find(b"PK\5\6", at + 1)
        start = source.data_from(start + CHUNK)


def _is_end(source: Source, start: int, at: int) -> bool:
    """Whether the archive that begins at `start` has its end record, without a comment, at `at`."""
    if at + _END.size > source.size:
        return False
    _, _, _, _, _, size, directory, comment = _END.unpack(source.read(at, _END.size))
    end = at
    locator_at = at - _LOCATOR.size
    if locator_at >= start and (raw := source.read(locator_at, _LOCATOR.size))[:4] == b"PK\6\7":
        end = start + _LOCATOR.unpack(raw)[2]
        if end + _END64.size != locator_at:
            return False
        signature, *_, size, directory = _END64.unpack(source.read(end, _END64.size))
        if signature != b"PK\6\6":
            return False
    return not comment and start + directory + size == end and source.read(start, 4) == b"PK\3\4"
