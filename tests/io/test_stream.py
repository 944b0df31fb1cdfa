"""A file that is filled by one stream and by threads at places of their own."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from ckptconv.io.crc import combined_crc, crc32
from ckptconv.io.destination import new_file
from ckptconv.io.digests import RunDigests
from ckptconv.io.files import FileSource
from ckptconv.io.source import CHUNK
from ckptconv.io.stream import FileSink, OutputStream, Sink
from ckptconv.support import platforms

pytestmark = pytest.mark.skipif(not platforms.CAN_WRITE_AT, reason="no positioned writes here")
FILES = Path("/dev/fd")  # that are open


def pattern(nbytes: int, seed: int) -> bytes:
    return bytes((at * 7 + seed) & 255 for at in range(256)) * (nbytes // 256 + 1)


@pytest.fixture
def made(tmp_path):
    """A stream into a file, and its path."""
    path = tmp_path / "made"
    stream = OutputStream(FileSink(platforms.create_file(path)))
    yield stream, path
    stream.abandon()
    stream.close()


@pytest.mark.skipif(not FILES.is_dir(), reason="open files cannot be counted here")
def test_a_new_file_whose_block_fails_is_closed(tmp_path):
    before = len([*FILES.iterdir()])
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "made", tmp_path / "out") as stream:
        stream.write(b"1")
        raise ZeroDivisionError
    assert len([*FILES.iterdir()]) == before


@pytest.mark.parametrize("large", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("first", ["left out", "written"])
def test_what_is_left_out_is_filled_in_any_order(made, large, first):
    stream, path = made
    parts = [
        pattern(nbytes, number)[:nbytes]
        for number, nbytes in enumerate((5, large, 3, 70_000, 0, 300, large, 1))
    ]
    out = [number for number in range(8) if number % 2 == (first == "written")]
    at = 0
    for number, part in enumerate(parts):
        if number in out:
            stream.leave_out(len(part))
        else:
            stream.write(part)
        at += len(part)
        assert stream.position == at

    def fill(number: int) -> None:
        stream.write_at(memoryview(parts[number]), sum(map(len, parts[:number])))

    threads = [threading.Thread(target=fill, args=(number,)) for number in reversed(out)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.settle(fsync=False)
    assert path.read_bytes() == b"".join(parts)


@pytest.mark.parametrize("said", [0, 5, 300, CHUNK])
@pytest.mark.parametrize("nbytes", [0, 5, 6, 300, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_a_file_may_be_longer_or_shorter_than_was_said(said, nbytes, tmp_path):
    raw = pattern(nbytes, said)[:nbytes]
    stream = OutputStream(FileSink(platforms.create_file(tmp_path / "made")), size=said)
    for start in range(0, nbytes, 70_000):
        stream.write(raw[start : start + 70_000])
    stream.settle(fsync=False)
    assert (tmp_path / "made").read_bytes() == raw


def test_progress_is_told_of_what_is_left_out(tmp_path):
    told = []
    stream = OutputStream(FileSink(platforms.create_file(tmp_path / "made")), told.append)
    stream.write(b"12345")
    stream.leave_out(10)
    stream.leave_out(CHUNK)
    stream.close()
    assert told == [15, 15 + CHUNK]


def test_a_file_is_written_in_pieces_that_small_pages_hold(tmp_path, monkeypatch):
    """Larger ones are cached in memory that a virtual machine may have given back."""
    sizes = []
    write = os.write

    def noted(fd: int, view: memoryview) -> int:
        sizes.append(len(view))
        return write(fd, view)

    monkeypatch.setattr(os, "write", noted)
    stream = OutputStream(FileSink(platforms.create_file(tmp_path / "made")))
    stream.write(bytes(3 * CHUNK + 1))
    stream.settle(fsync=False)
    assert sum(sizes) == 3 * CHUNK + 1 and max(sizes) == 256 << 10


def test_a_stream_that_is_left_out_to_a_closed_file_is_an_error(made):
    stream, _ = made
    stream.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        stream.write_at(memoryview(b"1"), 0)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 4097])
@pytest.mark.parametrize("first", [b"", b"\0", b"abc"])
def test_the_checksum_of_two_runs_follows_from_theirs(first, nbytes):
    second = os.urandom(nbytes)
    assert combined_crc(crc32(first), crc32(second), nbytes) == crc32(first + second)


def test_digests_of_short_views_wait_for_those_of_long_ones_before(monkeypatch):
    class Slow:
        def __init__(self) -> None:
            self._inner = hashlib.sha256()
            self.hexdigest = self._inner.hexdigest

        def update(self, view: memoryview) -> None:
            if len(view) == CHUNK:
                time.sleep(0.01)
            self._inner.update(view)

    monkeypatch.setattr("ckptconv.io.digests.sha256", Slow)
    views = [memoryview(os.urandom(nbytes)) for nbytes in (CHUNK, 3, 0, 5)]
    run = CHUNK + 1, 6
    digests = RunDigests([run])
    for view in views:
        digests.begin(view)
    digests.close()
    whole = b"".join(views)
    inner = hashlib.sha256(whole[CHUNK + 1 : CHUNK + 7]).hexdigest()
    assert digests.result() == (hashlib.sha256(whole).hexdigest(), {run: inner})


def test_what_is_copied_to_a_buffer_that_is_nearly_full_follows_it(made, tmp_path):
    """The buffer goes out as it is, and is used whole again."""
    stream, path = made
    raw = random.Random(0).randbytes(3 * CHUNK)
    (tmp_path / "in").write_bytes(raw)
    sizes = [CHUNK - 7, 40, CHUNK // 2, 70_000, 9, CHUNK, 1]
    with closing(FileSource(tmp_path / "in")) as source:
        for _ in range(3):
            for size in sizes:
                stream.copy(source, 11, size)
            stream.write(raw[:CHUNK])
    stream.settle(fsync=False)
    expected = b"".join(raw[11 : 11 + size] for size in sizes) + raw[:CHUNK]
    assert path.read_bytes() == 3 * expected


class Late(Sink):
    """Looks at what it was given only when it has to."""

    holds = 2

    def __init__(self) -> None:
        self.taken = b""
        self._late: list[memoryview] = []

    def write(self, view: memoryview) -> None:
        self._late.append(view)
        time.sleep(0.01)  # whoever fills the buffers is ahead, and takes all that are given back
        self._take(self.holds)

    def end(self, size: int, *, fsync: bool) -> None:
        self._take(0)

    def close(self) -> None:
        pass

    def _take(self, left: int) -> None:
        while len(self._late) > left:
            self.taken += self._late.pop(0)


@pytest.mark.parametrize("size", [10, CHUNK - 1, CHUNK, 9 * CHUNK + 5])
def test_what_a_sink_still_looks_at_stays_as_it_is(size):
    given = random.Random(size).randbytes(size)
    sink = Late()
    stream = OutputStream(sink, size=size)
    for start in range(0, size, 300_000):
        stream.write(given[start : start + 300_000])
    stream.settle(fsync=False)
    assert sink.taken == given
