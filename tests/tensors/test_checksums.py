"""Checksums of storages that are copied in parts: zlib's CRC-32 of the whole is the oracle, and
reads are counted.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.io.source import MemorySource
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.refs import Storage

RAW = bytes(range(200)) * 5


class Counting(MemorySource):
    """Counts the bytes that are read of it."""

    count = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        self.count += len(view)
        super().read_into(offset, view)


def storage(raw: bytes = RAW, *, crc: int | None = zlib.crc32(RAW)) -> Storage:
    return Storage(
        Counting(b"before" + raw + b"behind", Path("memory")),
        6,
        len(raw),
        "cpu",
        "a storage",
        crc32=crc,
    )


def note(checksums: Checksums, whole: Storage, first: int, nbytes: int, raw: bytes = RAW) -> None:
    checksums.copied(whole, first, nbytes, zlib.crc32(raw[first : first + nbytes]))


RUNS = st.lists(
    st.tuples(st.integers(0, len(RAW)), st.integers(0, len(RAW))).map(sorted), max_size=8
)


@given(RUNS)
def test_any_runs_in_any_order_are_put_together(runs):
    checksums, whole = Checksums(), storage()
    for start, stop in runs:
        note(checksums, whole, start, stop - start)
    checksums.finish()


@given(
    RUNS.filter(lambda runs: any(start < stop for start, stop in runs)),
    st.integers(0, len(RAW) - 1),
)
def test_a_byte_that_differs_is_noticed_wherever_it_is(runs, at):
    raw = bytearray(RAW)
    raw[at] ^= 4
    checksums, whole = Checksums(), storage(bytes(raw))
    with pytest.raises(MalformedCheckpoint, match="a storage: its bytes have the CRC-32"):
        for start, stop in runs:
            note(checksums, whole, start, stop - start, bytes(raw))
        checksums.finish()


def test_only_what_was_not_copied_is_read():
    checksums, whole = Checksums(), storage()
    for first in (500, 0, 100):
        note(checksums, whole, first, 100)
    checksums.finish()
    assert whole.source.count == len(RAW) - 300


def test_the_whole_is_checked_at_once_and_is_never_read():
    checksums, whole = Checksums(), storage()
    with pytest.raises(MalformedCheckpoint):
        checksums.copied(whole, 0, len(RAW), 7)
    checksums = Checksums()
    note(checksums, whole, 0, len(RAW))
    note(checksums, whole, 0, 10)
    checksums.finish()
    assert whole.source.count == 0


def test_parts_count_for_the_storage_that_they_are_part_of():
    checksums, whole = Checksums(), storage()
    half = whole._replace(offset=whole.offset + 500, nbytes=500, crc32=None, part_of=whole)
    checksums.copied(half, 100, 400, zlib.crc32(RAW[600:]))
    note(checksums, whole, 0, 600)
    checksums.finish()
    assert whole.source.count == 0
    with pytest.raises(MalformedCheckpoint):
        wrong = Checksums()
        wrong.copied(half, 0, 500, 7)
        wrong.finish()


def test_bytes_made_of_others_say_nothing_of_them_so_those_are_read_once():
    checksums, whole = Checksums(), storage()
    made = Storage(MemorySource(b"made", Path("memory")), 0, 4, "cpu", "made", part_of=whole)
    for _ in range(2):
        checksums.copied(made, 0, 4, 7)
        checksums.read(made)
    note(checksums, whole, 3, 4)
    checksums.finish()
    assert whole.source.count == len(RAW)


def test_where_no_checksum_is_declared_nothing_is_read():
    checksums, whole = Checksums(), storage(crc=None)
    checksums.copied(whole, 3, 5, 7)
    checksums.read(whole)
    checksums.finish()
    assert whole.source.count == 0
