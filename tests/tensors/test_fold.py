"""One pass for several counters: what each sees, what is read for it, and what is checked."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import ckptconv.tensors.fold as fold_module
from ckptconv.io.source import MemorySource
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.progress import Meter, Progress
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.fold import (
    NonFiniteCounter,
    OddBools,
    RunningCrc,
    fold,
    fold_all,
    nonfinite_counters,
)
from ckptconv.tensors.refs import Piece, Storage, TensorRef

VALUES = np.arange(600, dtype="<f4")
VALUES[[3, 77]] = np.nan
VALUES[500] = np.inf
RAW = VALUES.tobytes()
FLOAT = BY_NAME["float32"]


class Counting(MemorySource):
    """Counts the bytes that are read of it."""

    count = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        self.count += len(view)
        super().read_into(offset, view)


def stored(raw: bytes = RAW, *, crc: int | None = zlib.crc32(RAW), big: bool = False) -> Storage:
    source = Counting(b"before" + raw, Path("memory"))
    return Storage(source, 6, len(raw), "cpu", "a storage", crc32=crc, big_endian=big)


def view(storage: Storage, offset: int = 0, shape=(600,), stride=(1,), name="float32") -> TensorRef:
    piece = Piece(storage, offset, shape, stride, (0,) * len(shape))
    return TensorRef(BY_NAME[name], shape, stride, (piece,))


class Seen:
    """All bytes that it was given."""

    def __init__(self) -> None:
        self.raw = b""

    def update(self, chunk: memoryview) -> None:
        self.raw += bytes(chunk)


def run(*refs: TensorRef) -> tuple[list, list[Progress]]:
    told: list[Progress] = []
    counters = fold_all(refs, nonfinite_counters, lambda total: Meter("read", total, told.append))
    return [one[0].nonfinite if one else None for one in counters], told


def test_each_counter_sees_all_values_and_they_are_read_once():
    storage = stored()
    seen, counter, crc = Seen(), NonFiniteCounter(FLOAT), RunningCrc()
    fold(view(storage), seen, counter, crc)
    assert seen.raw == RAW and counter.nonfinite == (2, 1) and crc.value == zlib.crc32(RAW)
    assert storage.source.count == len(RAW)


def test_values_that_do_not_lie_in_order_come_in_order():
    seen = Seen()
    fold(view(stored(), 0, (20, 30), (1, 20)), seen)
    assert seen.raw == VALUES.reshape(30, 20).T.tobytes()


def test_rows_that_are_longer_than_a_chunk_come_in_order():
    values = np.arange(2 * 3 * 300_000, dtype="<f4").reshape(300_000, 3, 2)
    seen = Seen()
    fold(view(stored(values.tobytes(), crc=None), 0, (2, 3, 300_000), (1, 2, 6)), seen)
    assert seen.raw == values.transpose(2, 1, 0).tobytes()


def test_bools_that_are_neither_0_nor_1_are_counted():
    odd = OddBools()
    fold(view(stored(b"\0\1\2\xff", crc=None), 0, (4,), name="bool"), odd)
    assert odd.count == 2


@pytest.mark.parametrize(
    ("refs", "read"),
    [
        ([(0, 600)], 600),
        ([(0, 600), (0, 600)], 600),
        ([(0, 300), (300, 300)], 600),
        ([(300, 300), (100, 100)], 600),
        ([(0, 300), (200, 400)], 1000),  # the overlap, and what follows it, for the checksum
    ],
)
def test_one_pass_gives_values_and_checksums(refs, read):
    storage = stored()
    counts, told = run(*(view(storage, start, (size,)) for start, size in refs))
    for (start, size), count in zip(refs, counts, strict=True):
        part = VALUES[start : start + size]
        assert count == (np.isnan(part).sum(), np.isinf(part).sum())
    assert storage.source.count == read * 4
    assert told[-1].done == told[-1].total == read * 4


def test_what_is_not_counted_is_read_for_its_checksum_only():
    storage, unchecked = stored(), stored(crc=None)
    counts, told = run(view(storage, name="int32"), view(unchecked, name="int32"))
    assert counts == [None, None] and told[-1].total == len(RAW)
    assert (storage.source.count, unchecked.source.count) == (len(RAW), 0)


def test_a_part_of_a_storage_is_checked_with_the_whole():
    whole = stored()
    part = whole._replace(offset=whole.offset + 400, nbytes=800, crc32=None, part_of=whole)
    counts, told = run(view(part, 0, (200,)))
    assert counts == [(0, 0)] and told[-1].total == whole.source.count == len(RAW)


def test_values_of_another_byte_order_are_checked_too():
    swapped = VALUES.astype(">f4").tobytes()
    counts, told = run(view(stored(swapped, crc=zlib.crc32(swapped), big=True)))
    assert counts == [(2, 1)] and told[-1].total == 2 * len(RAW)


@pytest.mark.parametrize("shape", [(600,), (300,), (30, 20)])
def test_damage_is_told_whichever_part_is_counted(shape):
    stride = (1,) if len(shape) == 1 else (1, 30)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        run(view(stored(crc=1), 0, shape, stride))


def test_without_checksums_nothing_is_checked():
    fold(view(stored(crc=1)), Seen())
    with pytest.raises(MalformedCheckpoint):
        fold(view(stored(crc=1)), Seen(), checksums=Checksums())


# ------------------------------------------------------------------------------------ in threads


class Threaded(Counting):
    """Bytes that several threads may read."""

    def is_for_threads(self) -> bool:
        return True


def scattered() -> list[TensorRef]:
    """Tensors alone, of one storage, in pieces, strided, and in a storage that is damaged if it is
    read in part.
    """
    refs = []
    for number in range(12):
        raw = (VALUES + number).tobytes()
        source = Threaded(b"before" + raw, Path(f"memory {number}"))
        storage = Storage(source, 6, len(raw), "cpu", f"storage {number}", crc32=zlib.crc32(raw))
        refs.append(view(storage))
        if number % 3 == 0:
            refs.append(view(storage, 100, (50,)))
        if number % 4 == 0:
            refs.append(view(storage, 0, (20, 30), (1, 20)))
        if number == 5:
            refs = [view(storage, 7, (10,)), *refs[:-1]]
    return refs


@pytest.fixture(params=[0, 1 << 12])
def small(request, monkeypatch):
    """The size up to which tensors are left to the caller: none of these here, or all."""
    monkeypatch.setattr(fold_module, "_SMALL", request.param)
    monkeypatch.setattr(fold_module, "_BATCH", 5000)  # three of them
    return request.param


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_find_what_one_does_and_read_as_much(threads, small):
    def seen(count: int) -> tuple[list[bytes], int, Progress]:
        refs, told = scattered(), []
        made = fold_all(
            refs, lambda _: [Seen()], lambda total: Meter("read", total, told.append), threads=count
        )
        sources = {id(ref.storage.source): ref.storage.source for ref in refs}
        return [one.raw for [one] in made], sum(s.count for s in sources.values()), told[-1]

    assert seen(threads) == seen(1)


def test_a_damaged_storage_stops_all_threads(small):
    refs = scattered()
    bad = refs[4].storage._replace(crc32=1)
    refs[4] = view(bad)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        fold_all(refs, lambda _: [Seen()], lambda total: Meter("read", total, None), threads=4)


def names_of_readers(*, for_threads: bool) -> set[str]:
    names = set()

    class Alone(MemorySource):
        def read_into(self, offset: int, into: memoryview) -> None:
            names.add(threading.current_thread().name)
            super().read_into(offset, into)

        def is_for_threads(self) -> bool:
            return for_threads

    refs = [
        view(Storage(Alone(RAW, Path("m")), 0, len(RAW), "cpu", "s", crc32=zlib.crc32(RAW)))
        for _ in range(6)
    ]
    fold_all(refs, lambda _: [Seen()], lambda total: Meter("read", total, None), threads=4)
    return names


def test_who_reads(small):
    caller = {threading.current_thread().name}
    assert names_of_readers(for_threads=False) == caller
    readers = names_of_readers(for_threads=True)
    assert readers == caller if small else readers.isdisjoint(caller)
