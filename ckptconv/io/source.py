"""What bytes are read from: what every source can do, bytes in memory, a range of another one."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from ckptconv.io.crc import crc32
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from ckptconv.support.records import NamedTuple

CHUNK = 1 << 20
"""The size in bytes of every copy buffer, and so of the views that the readers yield."""


SMALL = 1 << 12
"""Up to this many bytes, a read fetches what follows too."""

Range = tuple[int, int]
"""A run of bytes: where it begins, and how many they are."""


def merged_runs(
    ranges: Sequence[Range],
    *,
    longest: int = CHUNK,
    gap: Callable[[int], int] = lambda nbytes: SMALL,
) -> Iterator[tuple[int, int, list[int]]]:
    """Runs of bytes put together where one read of them costs less than several: where each begins
    and ends, and the numbers of the `ranges` that lie in it.

    Up to `gap` bytes that nobody asked for are read before one that has so many, and together they
    are at most `longest` bytes.

    >>> list(merged_runs([(5000, 10), (0, 100), (1 << 30, 4), (4000, 10)]))
    [(0, 5010, [1, 3, 0]), (1073741824, 1073741828, [2])]
    """
    first = last = 0
    members: list[int] = []
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, nbytes = ranges[number]
        end = offset + nbytes
        if end < last:
            end = last
        # a negative size out of a file stays alone, and is refused when it is read
        if members and end - first <= longest and nbytes >= 0 and offset - last <= gap(nbytes):
            last = end
            members.append(number)
            continue
        if members:
            yield first, last, members
        first, last, members = offset, offset + nbytes, [number]
    if members:
        yield first, last, members


class Pending:
    """Bytes that are on their way to where they are wanted."""

    def __init__(self, wait: Callable[[], None], cancel: Callable[[], None] = lambda: None) -> None:
        self.wait, self.cancel = wait, cancel


Fingerprint = tuple[Hashable, ...]
"""What differs when the bytes may differ: equal ones stand for equal bytes. It can be pickled."""


class Reopening(NamedTuple):
    """What another process needs to open a source: the name of its place, what marks its bytes."""

    name: str
    fingerprint: Fingerprint


class Source(ABC):
    """Bytes that can be read at any offset: a file, or a record that must be inflated first.

    `path` is how the user knows it, `size` its bytes. A kind has to read and to close; what else it
    can do, it says by the methods below, whose defaults promise nothing.
    """

    path: PurePath
    size: int
    is_inflated = False
    """Whether its bytes were inflated, from what may be far fewer."""
    is_derived = False
    """Whether it is a `DerivedSource`, which is asked of each of a million tensors."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @abstractmethod
    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill all of `view` with the bytes from `offset` on; `MalformedCheckpoint` when they are
        not there.
        """

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes from `offset` on; `MalformedCheckpoint` when they are not there."""

    @abstractmethod
    def close(self) -> None:
        """Give the file descriptor back; a second call does nothing."""

    def wrong(self, what: str, **told: Any) -> MalformedCheckpoint:
        """The error for its bytes, by its name."""
        return MalformedCheckpoint(what, path=self.path, **told)

    def closed(self) -> CheckpointError:
        """The error for who reads it too late."""
        hint = "open it again, or read before it is closed (within its with block)"
        return CheckpointError("was closed before it was read", path=self.path, hint=hint)

    def _require(self, offset: int, nbytes: int) -> None:
        """Raise `MalformedCheckpoint` for bytes that it does not have."""
        if offset < 0 or not 0 <= nbytes <= self.size - offset:
            raise self.wrong(f"{nbytes} bytes at {offset} lie beyond its end ({self.size})")

    def _required(self, ranges: Iterable[Range]) -> list[Range]:
        """The runs, all of which it has: whoever asks for many hears it before the first."""
        wanted = list(ranges)
        for offset, nbytes in wanted:
            self._require(offset, nbytes)
        return wanted

    def begin_into(self, offset: int, view: memoryview) -> Pending:
        """`read_into`, which is over when it was waited for: sources over a network are asked at
        once. Nothing is to look at `view` before that.
        """
        return Pending(lambda: self.read_into(offset, view))

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of several runs, in the order of `ranges`, in as few reads as pay."""
        return [self.read(offset, nbytes) for offset, nbytes in ranges]

    def foresee(self, ranges: Sequence[Range]) -> None:  # noqa: B027 (nothing is promised)
        """These few bytes each will be read in turn: far sources ask for all of them now."""

    def begin_many(self, ranges: Sequence[Range]) -> Callable[[], list[bytes]]:
        """What `read_many` gives, when the function that comes back is called: sources over a
        network are asked at once.
        """
        return lambda: self.read_many(ranges)

    def stream(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        """The bytes of the runs, one after the other, fetched ahead where that pays.

        Each view has `CHUNK` bytes, the last one of a run what is left of it. A view is valid until
        the next one is asked for.
        """
        held = 0
        for offset, nbytes in ranges:
            while nbytes:
                count = nbytes if nbytes < CHUNK else CHUNK
                if held < count:
                    buffer, held = memoryview(bytearray(count)), count
                view = buffer[:count]
                self.read_into(offset, view)
                yield view
                offset, nbytes = offset + count, nbytes - count

    # -------------------------------------------------------------------------------- what it is

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """What tells its bytes from others, and from those that it has after a change."""

    def is_file(self) -> bool:
        """Whether it is all of a file, not a range of one or what was made of its bytes."""
        return False

    def is_in_memory(self) -> bool:
        """Whether its bytes are held by the source itself."""
        return False

    def needs_closing(self) -> bool:
        """Whether `close` gives anything back."""
        return True

    def is_for_threads(self) -> bool:
        """Whether several threads may read at once."""
        return False

    def fetched_from(self, offset: int) -> tuple[Source, int] | None:
        """The source over a network that the byte at `offset` comes from, and its place there: what
        pays to be read ahead. None for one that is at hand.
        """
        return None

    def comes_from(self, offset: int) -> tuple[Source, int]:
        """The source that the byte at `offset` is read from in the end, and its place there: what
        stands between was asked, and has nothing against it.
        """
        return self, offset

    def reopening(self) -> Reopening | None:
        """How another process opens it again; None for one that cannot be."""
        return None

    def stated_sha256(self) -> str | None:
        """The SHA-256 of all its bytes, in hexadecimal, as its server says it; or None."""
        return None

    # ----------------------------------------------------------------------- what became of it

    def check_unchanged(self) -> None:  # noqa: B027 (nothing is promised)
        """Raise `MalformedCheckpoint` if it was written to since: old and new would be mixed."""

    def let_go(self, replaced: Sequence[str]) -> None:  # noqa: B027
        """Close it if it lies at or in a real path to be `replaced`, for it cannot be read then."""

    # -------------------------------------------------------------------------------- shortcuts

    def mappable_path(self) -> str | None:
        """A path under which another library can map these very bytes; None where there is none."""
        return None

    def check_mapped(self) -> None:  # noqa: B027
        """Raise `MalformedCheckpoint` when `mappable_path` may have led to other bytes by now."""

    def data_from(self, offset: int) -> int:
        """The first byte from `offset` on that is not known to lie in a hole of a sparse file. The
        size where there is none. Holes are zeros, which nobody has to read.
        """
        return offset


class WrappedSource(Source):
    """Another source, of which a subclass changes something. Several runs are read one by one, each
    by the `read` and `read_into` of the subclass.
    """

    def __init__(self, inner: Source) -> None:
        self.path, self.size = inner.path, inner.size
        self.inner = inner

    def read_into(self, offset: int, view: memoryview) -> None:
        self.inner.read_into(offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.inner.read(offset, nbytes)

    def fingerprint(self) -> Fingerprint:
        return self.inner.fingerprint()

    def is_file(self) -> bool:
        return self.inner.is_file()

    def is_in_memory(self) -> bool:
        return self.inner.is_in_memory()

    def needs_closing(self) -> bool:
        return self.inner.needs_closing()

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def foresee(self, ranges: Sequence[Range]) -> None:
        self.inner.foresee(ranges)

    def fetched_from(self, offset: int) -> tuple[Source, int] | None:
        return self.inner.fetched_from(offset)

    def comes_from(self, offset: int) -> tuple[Source, int]:
        return self.inner.comes_from(offset)

    def stated_sha256(self) -> str | None:
        return self.inner.stated_sha256()

    def let_go(self, replaced: Sequence[str]) -> None:
        self.inner.let_go(replaced)

    def data_from(self, offset: int) -> int:
        return self.inner.data_from(offset)

    def close(self) -> None:
        self.inner.close()


class RangeSource(Source):
    """The `size` bytes of another source from `start` on; closing it leaves the other open."""

    def __init__(self, parent: Source, start: int, size: int) -> None:
        parent._require(start, size)
        self.path, self.size = parent.path, size
        self._parent, self._start = parent, start

    def read_into(self, offset: int, view: memoryview) -> None:
        if offset < 0 or offset + len(view) > self.size:
            raise self.wrong(f"ends at byte {self.size}, more was expected")
        self._parent.read_into(self._start + offset, view)

    def begin_into(self, offset: int, view: memoryview) -> Pending:
        self._require(offset, len(view))
        return self._parent.begin_into(self._start + offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        return self._parent.read(self._start + offset, nbytes)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        wanted = self._required(ranges)
        return self._parent.read_many([(self._start + offset, count) for offset, count in wanted])

    def stream(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        wanted = self._required(ranges)
        return self._parent.stream((self._start + offset, nbytes) for offset, nbytes in wanted)

    def fingerprint(self) -> Fingerprint:
        return (self._parent.fingerprint(), self._start, self.size)

    def needs_closing(self) -> bool:
        return False

    def foresee(self, ranges: Sequence[Range]) -> None:
        self._parent.foresee([(self._start + offset, nbytes) for offset, nbytes in ranges])

    def fetched_from(self, offset: int) -> tuple[Source, int] | None:
        return self._parent.fetched_from(self._start + offset)

    def comes_from(self, offset: int) -> tuple[Source, int]:
        return self._parent.comes_from(self._start + offset)

    def check_unchanged(self) -> None:
        self._parent.check_unchanged()

    def data_from(self, offset: int) -> int:
        return min(self.size, self._parent.data_from(self._start + offset) - self._start)

    def close(self) -> None:
        """Nothing to give back: the other source is its opener's."""


class MemorySource(Source):
    """Bytes that are in memory already, such as an array that a pickle holds."""

    def __init__(self, data: bytes, path: PurePath) -> None:
        self.path, self.size = path, len(data)
        self._data = data

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self.read(offset, len(view))

    def read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        return self._data[offset : offset + nbytes]

    def fingerprint(self) -> Fingerprint:
        return (self.size, crc32(self._data))

    def is_in_memory(self) -> bool:
        return True

    def needs_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to give back."""


class SourceFile(io.RawIOBase):
    """A source as a file that is read from its beginning to its end."""

    def __init__(self, source: Source) -> None:
        self._views = source.stream([(0, source.size)])
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._views, self._left)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count
