"""Every kind of source, by the promises that hold for all, and what is of one kind alone."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from ckptconv.io.files import FilePool, FileSource, PooledSource, let_go
from ckptconv.io.inflate import InflatedSource, Spool
from ckptconv.io.open_files import OpenFile, SeekSource
from ckptconv.io.source import CHUNK, SMALL, MemorySource, RangeSource, WrappedSource, merged_runs
from ckptconv.support import platforms
from ckptconv.support.errors import CheckpointError, LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import limits
from helpers.conformance import BYTES, SlowSource, SourceConformance, pattern


def written(room: Path, content: bytes) -> Path:
    """A file of these bytes, which is not written again where it has them."""
    path = room / "file.bin"
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
    return path


def append(room: Path) -> None:
    with (room / "file.bin").open("ab") as file:
        file.write(b"more")


class TestFile(SourceConformance):
    def source(self, room, content):
        return FileSource(written(room, content))

    def change(self, room):
        append(room)


class TestPooled(TestFile):
    def source(self, room, content):
        return PooledSource(written(room, content), FilePool())


class TestPooledAmongMany(TestFile):
    """One that has to rest after each read."""

    CHANGES = False  # it is told when it wakes, see below

    def source(self, room, content):
        return _Resting(PooledSource(written(room, content), FilePool()))


class _Resting(WrappedSource):
    def read_into(self, offset, view):
        super().read_into(offset, view)
        self.inner.rest()

    def read(self, offset, nbytes):
        found = super().read(offset, nbytes)
        self.inner.rest()
        return found


class TestRange(SourceConformance):
    def source(self, room, content):
        whole = FileSource(written(room, b"before" + content + b"behind"))
        return _Owner(RangeSource(whole, 6, len(content)), whole)

    def change(self, room):
        append(room)


class _Owner(WrappedSource):
    """A source that closes another one with it."""

    def __init__(self, inner, owned):
        super().__init__(inner)
        self._owned = owned

    def read_many(self, ranges):
        return self.inner.read_many(ranges)

    def stream(self, ranges):
        return self.inner.stream(ranges)

    def close(self):
        self._owned.close()


class TestRangeOfARange(SourceConformance):
    CHANGES = False

    def source(self, room, content):
        outer = RangeSource(
            MemorySource(b"--" + content + b"---", Path("memory")), 1, len(content) + 3
        )
        return RangeSource(outer, 1, len(content))


class TestMemory(SourceConformance):
    CHANGES = False

    def source(self, room, content):
        return MemorySource(content, Path("memory"))


class TestOpenFile(SourceConformance):
    """A file that the caller has opened."""

    def source(self, room, content):
        self.file = written(room, content).open("rb")
        return self.again(room, content)

    def again(self, room, content):
        return OpenFile(self.file).open()

    def change(self, room):
        append(room)


class TestOpenFileFromWithin(TestOpenFile):
    """One that is read from a place within it on, by its own methods."""

    def source(self, room, content):
        self.file = written(room, b"before" + content).open("rb")
        return self.again(room, content)

    def again(self, room, content):
        return SeekSource(self.file, 6, Path("a file"))


class TestBytesIO(SourceConformance):
    CHANGES = False  # what is opened is a copy on write

    def source(self, room, content):
        return SeekSource(io.BytesIO(b"before" + content), 6, Path("BytesIO"))


class TestInflated(SourceConformance):
    CHANGES = False

    def source(self, room, content):
        deflating = zlib.compressobj(wbits=-15)
        deflated = deflating.compress(content) + deflating.flush()
        parent = MemorySource(b"PK" + deflated, Path("archive.zip"))
        crc = zlib.crc32(content)
        spool = Spool()
        return InflatedSource(parent, 2, len(deflated), len(content), crc, "record", spool)


class TestWrapped(TestFile):
    def source(self, room, content):
        return SlowSource(super().source(room, content))


# ------------------------------------------------------------------------------- of one kind alone


def counted(monkeypatch) -> list[tuple[int, int]]:
    """What is asked of the system: (offset, bytes) of each read."""
    reads: list[tuple[int, int]] = []
    read_at, read_into_at = platforms.read_at, platforms.read_into_at

    def one(fd, nbytes, offset):
        reads.append((offset, nbytes))
        return read_at(fd, nbytes, offset)

    def other(fd, view, offset):
        reads.append((offset, len(view)))
        return read_into_at(fd, view, offset)

    monkeypatch.setattr(platforms, "read_at", one)
    monkeypatch.setattr(platforms, "read_into_at", other)
    return reads


def test_runs_that_lie_near_each_other_are_read_in_one_go(tmp_path, monkeypatch):
    content = pattern(2 * CHUNK)
    with closing(FileSource(written(tmp_path, content))) as source:
        reads = counted(monkeypatch)
        near = [(start, 100) for start in range(0, 64_000, 2000)]
        assert source.read_many(near) == [content[at : at + 100] for at, _ in near]
        assert len(reads) == 1
        reads.clear()
        far = [(start, 100) for start in range(0, 2 * CHUNK, 300_000)]
        assert source.read_many(far) == [content[at : at + 100] for at, _ in far]
        assert len(reads) == len(far)


def test_many_runs_in_one_place_are_never_read_as_more_than_a_chunk():
    ranges = [(start, 3000) for start in range(0, 8 * CHUNK, 4000)]
    runs = list(merged_runs(ranges))
    assert max(last - first for first, last, _ in runs) <= CHUNK
    assert sorted(number for *_, members in runs for number in members) == list(range(len(ranges)))
    assert list(merged_runs([(0, 4 * CHUNK), (4 * CHUNK, 1)])) == [
        (0, 4 * CHUNK, [0]),
        (4 * CHUNK, 4 * CHUNK + 1, [1]),
    ]
    assert len(list(merged_runs([(0, 1), (SMALL + 2, 1)]))) == 2


def test_a_short_read_of_the_system_is_gone_on_with(tmp_path, monkeypatch):
    real = platforms.read_into_at
    monkeypatch.setattr(
        platforms, "read_into_at", lambda fd, view, offset: real(fd, view[:1000], offset)
    )
    with closing(FileSource(written(tmp_path, BYTES))) as source:
        assert source.read(0, len(BYTES)) == BYTES
        assert b"".join(map(bytes, source.stream([(3, 9000)]))) == BYTES[3:9003]


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = written(tmp_path, BYTES)
    with closing(FileSource(path)) as source:
        os.truncate(path, 5000)
        for read in (source.read, lambda *run: source.read_many([run, (0, 1)])):
            with pytest.raises(MalformedCheckpoint, match="ends at byte 5000, more was expected"):
                read(100, 9000)


def test_a_pool_keeps_a_few_files_open_and_tells_of_a_change(tmp_path):
    paths = [tmp_path / f"{number}.bin" for number in range(5)]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    with limits(open_files=2):
        pool = FilePool()
    sources = [PooledSource(path, pool) for path in paths]
    try:
        assert sum(source._fd >= 0 for source in sources) == 2
        for source in sources:
            assert source.read(0, 5) == source.path.name.encode()
        assert sum(source._fd >= 0 for source in sources) == 2
        pool.rest()
        assert sum(source._fd >= 0 for source in sources) == 0
        assert sources[1].read(0, 5) == paths[1].name.encode()
        paths[0].write_bytes(b"another")
        with pytest.raises(MalformedCheckpoint, match="was replaced or changed while it was read"):
            sources[0].read(0, 5)
    finally:
        for source in sources:
            source.close()


def test_a_hole_is_skipped_in_a_range_too(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"x" * 100)
        file.seek(8 << 20)
        file.write(b"y" * 100)
    with closing(FileSource(path)) as source:
        at = source.data_from(1 << 20)
        if at == 1 << 20:
            pytest.skip("this file system has no holes")
        assert at == 8 << 20
        inner = RangeSource(source, 1000, source.size - 1000)
        assert inner.data_from(1 << 20) == (8 << 20) - 1000
        assert RangeSource(source, 1000, 2 << 20).data_from(1 << 20) == 2 << 20


def test_only_what_is_to_be_replaced_is_let_go(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, BYTES)
    sources = [FileSource(tmp_path / name / "file.bin") for name in ("a", "b")]
    memory = MemorySource(b"", Path("memory"))
    let_go([*sources, memory], [tmp_path / "a"])
    assert [source._fd >= 0 for source in sources] == [False, True]
    sources[1].close()


def test_a_range_lies_within_its_source():
    whole = MemorySource(b"0123456789", Path("memory"))
    for start, size in ((-1, 2), (0, 11), (10, 1), (3, -1)):
        with pytest.raises(MalformedCheckpoint, match="lie beyond its end"):
            RangeSource(whole, start, size)
    assert RangeSource(whole, 10, 0).read(0, 0) == b""


@pytest.mark.parametrize(
    ("deflated_more", "size", "crc", "words"),
    [
        (0, 101, 0, "does not inflate to what the archive says"),
        (0, 50, 0, "inflates to more than it declares"),
        (0, 100, 1, "does not inflate to what the archive says"),
        (-3, 100, 0, "does not inflate to what the archive says"),
    ],
)
def test_a_record_that_inflates_to_something_else_is_refused(deflated_more, size, crc, words):
    content = os.urandom(100)
    deflating = zlib.compressobj(wbits=-15)
    deflated = deflating.compress(content) + deflating.flush()
    source = InflatedSource(
        MemorySource(deflated, Path("a.zip")),
        0,
        len(deflated) + deflated_more,
        size,
        zlib.crc32(content) ^ crc,
        "record",
        Spool(),
    )
    with closing(source), pytest.raises(MalformedCheckpoint, match=words):
        source.read(0, 1)


def test_a_bomb_is_refused_before_it_is_inflated():
    with limits(inflated_free=1000, inflated_ratio=10), pytest.raises(LimitExceeded, match="bomb"):
        InflatedSource(MemorySource(b"x" * 100, Path("a.zip")), 0, 100, 2000, 0, "record", Spool())


def test_a_small_read_is_right_whatever_another_thread_reads_meanwhile(tmp_path, monkeypatch):
    raw = b"".join(number.to_bytes(4, "little") for number in range(100_000))
    (tmp_path / "f").write_bytes(raw)
    plain, between = platforms.read_at, [300_000, 200_000]

    class Window(bytes):
        """Bytes at whose measuring the other thread comes in between."""

        def __len__(self) -> int:
            if between:
                source.read(between.pop(), 8)
            return super().__len__()

    monkeypatch.setattr(platforms, "read_at", lambda *given: Window(plain(*given)))
    with closing(FileSource(tmp_path / "f")) as source:
        for offset in (1000, 0, 4):
            assert source.read(offset, 8) == raw[offset : offset + 8]
    assert between == []


class Failing(io.BytesIO):
    """Reads what it holds up to `end`, or fails."""

    def __init__(self, raw: bytes, end: int, error: Exception | None = None) -> None:
        super().__init__(raw)
        self.stop, self.error = end, error

    def read(self, size: int | None = -1) -> bytes:
        if self.error is not None:
            raise self.error
        return super().read(min(size or 0, max(0, self.stop - self.tell())))


def test_an_open_file_that_gives_fewer_bytes_than_it_said_is_named():
    source = SeekSource(Failing(bytes(100), 60), 0, Path("a file"))
    assert (source.size, source.read(10, 50)) == (100, bytes(50))
    with pytest.raises(MalformedCheckpoint, match="ends at byte 60, more was expected"):
        source.read(10, 80)
    source.close()
    with pytest.raises(CheckpointError, match="was closed before it was read"):
        source.read(10, 50)


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("gone"), EOFError("gone")])
def test_an_open_file_that_fails_is_an_error_about_it(error):
    source = SeekSource(Failing(bytes(100), 100, error), 0, Path("a file"))
    with pytest.raises(CheckpointError, match="a file: cannot be read: gone"):
        source.read(0, 8)


def test_an_open_file_does_not_go_to_another_process():
    with pytest.raises(TypeError, match="cannot"):
        pickle.dumps(io.TextIOWrapper(io.BytesIO()))  # as python's own do not
    with pytest.raises(TypeError, match="an open file cannot be pickled"):
        pickle.dumps(OpenFile(io.BytesIO(b"abc")))
