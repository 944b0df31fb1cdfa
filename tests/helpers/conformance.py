"""What every source, every place and every destination has to do, whatever its kind: a kind passes
by a subclass that makes one.

Wrappers put faults and latency into any source or destination.
"""

from __future__ import annotations

import errno
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptconv.io.destination import Destination, Draft
from ckptconv.io.location import Location, read_small, read_start, within
from ckptconv.io.remote.place import RemotePlace
from ckptconv.io.source import CHUNK, SMALL, Source, WrappedSource
from ckptconv.io.stream import Sink
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    OutputRefused,
)
from ckptconv.support.limits import limits

BYTES = bytes(range(251)) * 40  # no period that a read could have by chance
SIZES = (0, 1, SMALL - 1, SMALL, SMALL + 1, len(BYTES))


def pattern(size: int) -> bytes:
    """Bytes that differ wherever two places are taken for each other."""
    return (BYTES * (size // len(BYTES) + 1))[:size]


# --------------------------------------------------------------------------------------- sources


class FaultySource(WrappedSource):
    """A source of which one read fails: the one that comes when `left` others are done."""

    def __init__(self, inner: Source, error: BaseException, left: int = 0) -> None:
        super().__init__(inner)
        self._error, self.left = error, left

    def read_into(self, offset: int, view: memoryview) -> None:
        self._count()
        super().read_into(offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._count()
        return super().read(offset, nbytes)

    def _count(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise self._error


class SlowSource(WrappedSource):
    """A source of which each read takes a while, and is noted."""

    def __init__(self, inner: Source, seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.reads: list[tuple[int, int]] = []
        self._seconds = seconds

    def read_into(self, offset: int, view: memoryview) -> None:
        self._wait(offset, len(view))
        super().read_into(offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._wait(offset, nbytes)
        return super().read(offset, nbytes)

    def _wait(self, offset: int, nbytes: int) -> None:
        self.reads.append((offset, nbytes))
        time.sleep(self._seconds)


class SourceConformance(ABC):
    """The promises of `Source`. A kind says how one is made, and what it can do besides."""

    CHANGES = True
    """Whether the bytes that it reads can be changed by others."""

    @abstractmethod
    def source(self, room: Path, content: bytes) -> Source:
        """A source of these bytes."""

    def again(self, room: Path, content: bytes) -> Source:
        """What `source` made last, opened once more."""
        return self.source(room, content)

    def change(self, room: Path) -> None:
        """Have somebody else write to what `source` made last."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tmp_path):
        with closing(self.source(tmp_path, BYTES)) as source:
            yield source

    def test_it_knows_its_size_and_its_path(self, tmp_path):
        for size in SIZES:
            with closing(self.source(tmp_path, pattern(size))) as source:
                assert source.size == size
                assert source.name == source.path.name

    def test_reads_at_every_boundary(self, tmp_path):
        content = pattern(CHUNK + SMALL + 7)
        edges = (0, 1, SMALL - 1, SMALL, SMALL + 1, CHUNK - 1, CHUNK, CHUNK + 1, len(content))
        with closing(self.source(tmp_path, content)) as source:
            for start in edges:
                for end in edges:
                    if start > end:
                        continue
                    assert source.read(start, end - start) == content[start:end]
                    held = bytearray(end - start)
                    source.read_into(start, memoryview(held))
                    assert held == content[start:end]

    def test_an_empty_source_holds_no_byte(self, tmp_path):
        with closing(self.source(tmp_path, b"")) as source:
            assert source.read(0, 0) == b""
            assert source.read_many([(0, 0)]) == [b""]
            assert list(source.stream([(0, 0)])) == []
            with pytest.raises(MalformedCheckpoint):
                source.read(0, 1)

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(len(BYTES), 1), (len(BYTES) - 1, 2), (len(BYTES) + 1, 1), (0, len(BYTES) + 1), (-1, 1)],
        ids=str,
    )
    def test_what_is_not_there_is_an_error_that_names_it(self, offset, nbytes, made):
        for read in (
            lambda: made.read(offset, nbytes),
            lambda: made.read_into(offset, memoryview(bytearray(nbytes))),
            lambda: made.read_many([(0, 1), (offset, nbytes)]),
            lambda: list(made.stream([(offset, nbytes)])),
        ):
            with pytest.raises(MalformedCheckpoint) as raised:
                read()
            assert raised.value.path == str(made.path)
        assert made.read(0, 3) == BYTES[:3]

    @pytest.mark.parametrize(
        "ranges",
        [
            [],
            [(0, 10), (10, 10), (20, 0)],
            [(9000, 10), (0, 10), (9000, 10)],
            [(100, 50), (120, 5), (90, 4000)],
            [(0, SMALL), (SMALL + 1, SMALL), (len(BYTES) - 1, 1)],
        ],
        ids=["none", "side by side", "backwards, one twice", "within each other", "with a gap"],
    )
    def test_read_many_and_stream_give_what_read_gives(self, ranges, made):
        one_by_one = [made.read(offset, nbytes) for offset, nbytes in ranges]
        assert one_by_one == [BYTES[offset : offset + nbytes] for offset, nbytes in ranges]
        assert made.read_many(ranges) == one_by_one
        assert b"".join(map(bytes, made.stream(ranges))) == b"".join(one_by_one)

    def test_a_stream_comes_in_chunks_that_begin_anew_with_each_run(self, tmp_path):
        content = pattern(2 * CHUNK + 30)
        ranges = [(5, 2 * CHUNK + 1), (0, 3), (7, CHUNK)]
        with closing(self.source(tmp_path, content)) as source:
            views = [bytes(view) for view in source.stream(ranges)]
        assert [len(view) for view in views] == [CHUNK, CHUNK, 1, 3, CHUNK]
        assert views[2:4] == [content[2 * CHUNK + 5 : 2 * CHUNK + 6], content[:3]]

    def test_a_stream_that_is_left_early_leaves_the_source_usable(self, made):
        assert bytes(next(made.stream([(0, 100), (200, 100)]))) == BYTES[:100]
        assert made.read(50, 5) == BYTES[50:55]

    def test_its_fingerprint_stays_and_can_be_pickled(self, tmp_path):
        with closing(self.source(tmp_path, BYTES)) as source:
            before = source.fingerprint()
            source.read(0, 10)
            assert source.fingerprint() == before == pickle.loads(pickle.dumps(before))
            assert hash(before) == hash(source.fingerprint())

    def test_the_same_bytes_opened_again_have_the_same_fingerprint(self, tmp_path):
        with (
            closing(self.source(tmp_path, BYTES)) as source,
            closing(self.again(tmp_path, BYTES)) as again,
        ):
            assert again.fingerprint() == source.fingerprint()

    def test_other_bytes_have_another_fingerprint(self, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        with (
            closing(self.source(tmp_path / "one", BYTES)) as one,
            closing(self.source(tmp_path / "two", BYTES[::-1] + b"more")) as two,
        ):
            assert one.fingerprint() != two.fingerprint()

    def test_what_is_unchanged_is_not_refused(self, made):
        made.read(0, 10)
        made.check_unchanged()
        made.check_mapped()

    def test_a_change_while_it_is_read_is_told(self, tmp_path):
        if not self.CHANGES:
            pytest.skip("nobody else can write to it")
        with closing(self.source(tmp_path, BYTES)) as source:
            source.read(0, 10)
            self.change(tmp_path)
            with pytest.raises(MalformedCheckpoint, match="changed"):
                source.check_unchanged()

    def test_what_may_be_mapped_is_the_bytes(self, made):
        path = made.mappable_path()
        assert path is None or Path(path).read_bytes() == BYTES
        assert isinstance(made.is_file(), bool) and isinstance(made.is_for_threads(), bool)

    def test_no_byte_that_is_not_zero_lies_in_a_hole(self, tmp_path):
        content = bytes(3 * CHUNK) + b"x" + bytes(CHUNK)
        with closing(self.source(tmp_path, content)) as source:
            at = source.data_from(0)
            assert 0 <= at <= 3 * CHUNK
            assert source.data_from(3 * CHUNK) == 3 * CHUNK
            assert 3 * CHUNK < source.data_from(3 * CHUNK + 1) <= source.size
            assert source.data_from(source.size) == source.size

    def test_it_can_be_closed_twice(self, tmp_path):
        source = self.source(tmp_path, BYTES)
        source.close()
        source.close()

    def test_a_fault_below_is_raised_and_the_next_read_is_right(self, made):
        faulty = FaultySource(made, MalformedCheckpoint("cannot be read", path=made.path), left=1)
        views = faulty.stream([(0, 10), (10, 10), (20, 10)])
        assert bytes(next(views)) == BYTES[:10]
        with pytest.raises(MalformedCheckpoint, match="cannot be read"):
            next(views)
        assert faulty.read(10, 10) == BYTES[10:20]

    def test_latency_changes_nothing(self, made):
        slow = SlowSource(made)
        assert slow.read_many([(0, 10), (9000, 10)]) == [BYTES[:10], BYTES[9000:9010]]
        assert slow.reads == [(0, 10), (9000, 10)]


# ---------------------------------------------------------------------------------------- places


def named_with_slash(place: Location) -> Location:
    """The same place, as the user names it with a slash at its end."""
    if not isinstance(place, RemotePlace):
        return place.beside(f"{place.name}/")
    return replace(place, key=f"{place.key}/")


class LocationConformance(ABC):
    """The promises of `Location`."""

    @abstractmethod
    def home(self, room: Path) -> Location:
        """A new and empty folder."""

    @abstractmethod
    def write(self, place: Location, content: bytes) -> None:
        """Have a file at the place, and the folders around it, by other means."""

    @pytest.fixture
    def there(self, tmp_path):
        return self.home(tmp_path)

    def test_what_is_where(self, there):
        self.write(there.child("a.pt"), b"one")
        self.write(there.child("inner").child("b.safetensors"), b"two")
        kinds = [there.child(name).kind() for name in ("a.pt", "inner", "c")]
        assert kinds == ["file", "folder", "nothing"]
        assert there.child("a.pt").child("of a file").kind() == "nothing"
        assert there.child("a" * 300).kind() == "nothing"
        file = there.child("inner/b.safetensors")
        assert (file.is_file(), file.is_folder(), file.exists()) == (True, False, True)
        assert there.is_folder() and not there.child("c").exists()

    def test_a_folder_may_end_in_a_slash(self, there):
        self.write(there.child("inner/deep/a.pt"), b"one")
        for place in (named_with_slash(there.child("inner")), there.child("inner/")):
            assert [place.kind() for _ in range(3)] == ["folder"] * 3
            assert (place.name, place.parent) == ("inner", there)
            assert place.path == there.child("inner").path
            assert list(place.names()) == ["deep"]
            assert [place.kind() for place in (place, *place.list())] == ["folder"] * 2
            with closing(place.child("deep/").child("a.pt").open()) as source:
                assert source.read(0, source.size) == b"one"
            with pytest.raises(CheckpointError, match="folder"):
                place.open()
        assert [there.child("none/").kind() for _ in range(2)] == ["nothing", "nothing"]

    def test_its_names(self, there):
        place = there.child("inner/model.tar.gz")
        assert (place.name, place.stem, place.suffix) == ("model.tar.gz", "model.tar", ".gz")
        assert place.parent == there.child("inner") and place.parent.parent == there
        assert place.beside("x.json") == there.child("inner/x.json")
        assert str(place) == str(place.path) and place.path.name == "model.tar.gz"
        assert place.absolute.absolute == place.absolute

    def test_a_folder_is_listed_by_name(self, there):
        assert list(there.list()) == []
        for name in ("b", "a.pt", "c/d"):
            self.write(there.child(name), b"")
        assert list(there.names()) == ["a.pt", "b", "c"]
        assert list(there.list()) == [there.child(name) for name in ("a.pt", "b", "c")]
        with pytest.raises(OSError):
            there.child("nothing").list()

    def test_it_opens_a_file(self, there):
        self.write(there.child("a"), BYTES)
        with closing(there.child("a").open()) as source:
            assert source.read(0, source.size) == BYTES
            assert source.path == there.child("a").path
            assert source.fingerprint() == there.child("a").fingerprint()

    def test_what_is_no_file_is_not_opened(self, there):
        self.write(there.child("inner/a"), b"")
        for name in ("nothing", "inner"):
            with pytest.raises(CheckpointError) as raised:
                there.child(name).open()
            assert raised.value.path == str(there.child(name).path)
        assert there.child("nothing").fingerprint() is None

    def test_another_file_has_another_fingerprint(self, there):
        self.write(there.child("a"), b"one")
        before = there.child("a").fingerprint()
        assert before is not None and there.child("a").fingerprint() == before
        self.write(there.child("a"), b"other")
        assert there.child("a").fingerprint() != before

    def test_it_is_a_value(self, there):
        place = there.child("a")
        assert place == there.child("a") != there.child("b")
        assert pickle.loads(pickle.dumps(place)) == place
        assert len({place, there.child("a")}) == 1
        with pytest.raises((AttributeError, TypeError)):  # a frozen class with slots: TypeError
            place.at = None

    def test_a_small_file_is_read_as_a_whole_or_not_at_all(self, there):
        self.write(there.child("index"), b"12345")
        with limits(index_bytes=5):
            assert read_small(there.child("index"), "index_bytes") == b"12345"
        with limits(index_bytes=4), pytest.raises(LimitExceeded) as raised:
            read_small(there.child("index"), "index_bytes")
        assert raised.value.path == str(there.child("index").path)
        assert (raised.value.limit, raised.value.allowed, raised.value.needed) == (
            "index_bytes", 4, 5,
        )  # fmt: skip
        with limits(small_record_bytes=3):
            assert read_start(there.child("index"), "small_record_bytes") == b"123"

    def test_what_lies_in_a_folder_stays_within_it(self, there):
        self.write(there.child("inner/a"), b"")
        assert within(there.child("inner/a"), there) == there.child("inner/a")
        assert there.child("inner/a").alias_of() is None


# ---------------------------------------------------------------------------------- destinations


class FaultyDestination(Destination):
    """A destination whose drafts fail: the write that comes when `left` bytes are written."""

    def __init__(self, inner: Destination, error: OSError, left: int = 0) -> None:
        self.path, self.inner = inner.path, inner
        self.left, self._error = left, error

    def __enter__(self) -> FaultyDestination:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.inner.__exit__(*error)

    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> Draft:
        draft = self.inner.draft(name, size, on_progress)
        enter = draft.__enter__

        class Faulty(type(draft)):  # type: ignore[misc]
            def __enter__(self) -> Draft:
                made = enter()
                made.stream._sink = outer.sink(made.stream._sink)
                return made

        outer = self
        draft.__class__ = Faulty
        return draft

    def sink(self, inner: Sink) -> Sink:
        """The sink of a draft, with the fault in it."""
        return _FaultySink(inner, self)

    def count(self, nbytes: int) -> None:
        """Count what is written; raise the fault when its time has come."""
        self.left -= nbytes
        if self.left < 0:
            raise self._error

    def commit(self, inputs=()) -> None:
        self.inner.commit(inputs)

    def discard(self) -> None:
        self.inner.discard()


class _FaultySink(Sink):
    def __init__(self, inner: Sink, counted: FaultyDestination) -> None:
        self._inner, self._counted = inner, counted

    def write(self, view: memoryview) -> None:
        self._counted.count(len(view))
        self._inner.write(view)

    def end(self, size: int, *, fsync: bool) -> None:
        self._inner.end(size, fsync=fsync)

    def close(self) -> None:
        self._inner.close()


class DestinationConformance(ABC):
    """The promises of `Destination`, for one of which the files `NAMES` are the output."""

    NAMES: tuple[str, ...] = ("out.bin",)

    @abstractmethod
    def destination(self, room: Path, *, force: bool = False, size: int = 0) -> Destination:
        """A destination in the folder `room`."""

    @abstractmethod
    def found(self, room: Path) -> Mapping[str, bytes]:
        """The files of the output that are there, as a reader finds them."""

    @abstractmethod
    def everything(self, room: Path) -> Mapping[str, object]:
        """All that is there, hidden things too."""

    def write(self, output: Destination, content: Mapping[str, bytes]) -> None:
        """Draft all files, each whole."""
        for name in self.NAMES:
            with output.draft(name, len(content[name])) as draft:
                draft.stream.write(content[name])
                draft.commit()

    def put(self, room: Path, content: Mapping[str, bytes], *, force: bool = False) -> None:
        """Write and commit an output."""
        with self.destination(room, force=force) as output:
            self.write(output, content)
            output.commit()

    def content(self, seed: int, size: int = 1000) -> dict[str, bytes]:
        """Bytes for each file, others for each seed."""
        return {
            name: pattern(size + seed * 7 + number)[::-1] for number, name in enumerate(self.NAMES)
        }

    def test_nothing_is_found_before_the_commit_and_all_of_it_after(self, tmp_path):
        content = self.content(1)
        with self.destination(tmp_path) as output:
            self.write(output, content)
            assert self.found(tmp_path) == {}
            output.commit()
            assert self.found(tmp_path) == content
        assert self.found(tmp_path) == content
        assert set(self.everything(tmp_path)) == set(self.NAMES)

    @pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
    def test_every_size_is_written(self, size, tmp_path):
        content = self.content(1, size)
        self.put(tmp_path, content)
        assert self.found(tmp_path) == content

    @pytest.mark.parametrize("said", [0, 10, 10_000, 20 << 20])
    def test_a_draft_may_be_larger_or_smaller_than_said(self, said, tmp_path):
        content = self.content(1, 1234)
        with self.destination(tmp_path) as output:
            for name in self.NAMES:
                with output.draft(name, said) as draft:
                    draft.stream.write(content[name])
                    draft.commit()
            output.commit()
        assert self.found(tmp_path) == content

    def test_a_committed_draft_can_be_read_back(self, tmp_path):
        content = self.content(1)
        with self.destination(tmp_path) as output:
            for name in self.NAMES:
                with output.draft(name, 0) as draft:
                    draft.stream.write(content[name])
                    draft.commit()
                with closing(draft.place.open()) as source:
                    assert source.read(0, source.size) == content[name]
            output.commit()

    def test_what_is_copied_from_a_source_is_written_with_its_checksum(self, tmp_path):
        import zlib

        from ckptconv.io.source import MemorySource

        data = pattern(3 * CHUNK + 5)
        with self.destination(tmp_path) as output:
            for name in self.NAMES:
                with output.draft(name, len(data)) as draft:
                    source = MemorySource(data, Path("memory"))
                    copied = draft.stream.copy(source, 2, len(data) - 2, zlib.crc32)
                    assert copied == zlib.crc32(data[2:])
                    draft.commit()
            output.commit()
        assert set(self.found(tmp_path).values()) == {data[2:]}

    def test_a_block_that_is_left_early_leaves_nothing(self, tmp_path):
        with pytest.raises(KeyError), self.destination(tmp_path) as output:
            self.write(output, self.content(1))
            raise KeyError
        assert self.everything(tmp_path) == {}

    def test_a_block_without_commit_leaves_nothing(self, tmp_path):
        with self.destination(tmp_path) as output:
            self.write(output, self.content(1))
        assert self.everything(tmp_path) == {}

    def test_a_discarded_output_leaves_nothing_and_is_over(self, tmp_path):
        with self.destination(tmp_path) as output:
            self.write(output, self.content(1))
            output.discard()
            assert self.everything(tmp_path) == {}
            with pytest.raises(ValueError):
                output.commit()
            output.discard()
        assert self.everything(tmp_path) == {}

    def test_a_draft_that_is_not_whole_is_not_put_in_place(self, tmp_path):
        with self.destination(tmp_path) as output:
            self.write(output, self.content(1))
            with output.draft("another", 10) as draft:
                draft.stream.write(b"half")
            with pytest.raises(ValueError):
                output.commit()
        assert self.everything(tmp_path) == {}

    def test_what_is_there_is_replaced_with_force_only(self, tmp_path):
        old, new = self.content(1), self.content(2)
        self.put(tmp_path, old)
        with pytest.raises(OutputRefused, match="exists"), self.destination(tmp_path):
            raise AssertionError("it is refused before any work")
        assert self.found(tmp_path) == old
        self.put(tmp_path, new, force=True)
        assert self.found(tmp_path) == new
        assert set(self.everything(tmp_path)) == set(self.NAMES)

    def test_what_comes_in_between_is_not_replaced_without_force(self, tmp_path):
        old = self.content(1)
        with (
            pytest.raises(OutputRefused, match="exists"),
            self.destination(tmp_path) as output,
        ):
            self.write(output, self.content(2))
            self.put(tmp_path, old)
            output.commit()
        assert self.found(tmp_path) == old
        assert set(self.everything(tmp_path)) == set(self.NAMES)

    def test_what_was_there_stays_when_a_replacement_is_left(self, tmp_path):
        old = self.content(1)
        self.put(tmp_path, old)
        with pytest.raises(KeyError), self.destination(tmp_path, force=True) as output:
            self.write(output, self.content(2))
            raise KeyError
        assert self.found(tmp_path) == old
        assert set(self.everything(tmp_path)) == set(self.NAMES)

    @pytest.mark.parametrize("left", [0, 1000, 3 * CHUNK])
    def test_a_write_that_fails_is_refused_and_leaves_what_was_there(self, left, tmp_path):
        old = self.content(1)
        self.put(tmp_path, old)
        full = OSError(errno.ENOSPC, "No space left on device")
        faulty = FaultyDestination(self.destination(tmp_path, force=True), full, left)
        with pytest.raises(OutputRefused, match="the disk is full"), faulty as output:
            self.write(output, self.content(2, 6 * CHUNK))
            output.commit()
        assert self.found(tmp_path) == old
        assert set(self.everything(tmp_path)) == set(self.NAMES)

    def test_more_than_there_is_room_for_is_refused_before_any_work(self, tmp_path):
        with (
            pytest.raises(OutputRefused, match="needs"),
            self.destination(tmp_path, size=1 << 60),
        ):
            raise AssertionError
        assert self.everything(tmp_path) == {}

    def test_progress_is_told_in_bytes_of_the_draft(self, tmp_path):
        told: list[int] = []
        with (
            self.destination(tmp_path) as output,
            output.draft(self.NAMES[0], 3 * CHUNK, told.append) as draft,
        ):
            draft.stream.write(pattern(3 * CHUNK))
            draft.commit()
        assert told == [CHUNK, 2 * CHUNK, 3 * CHUNK]
