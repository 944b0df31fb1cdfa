"""What bytes are read from: the protocol, bytes in memory, and a range of another source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ckptconv.support.errors import MalformedCheckpoint

CHUNK = 1 << 20
"""The size in bytes of every copy buffer, and so of the views that the readers yield."""


SMALL = 1 << 12
"""Up to this many bytes, a read fetches what follows too."""


class Source(Protocol):
    """Bytes that can be read at any offset: a file, or a record that must be inflated first."""

    path: Path
    size: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill all of `view` with the bytes from `offset` on; `MalformedCheckpoint` when they are
        not there.
        """

    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes from `offset` on."""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each range, given as offset and size; nothing around them is read."""

    def close(self) -> None:
        """Give the file descriptor back; a second call does nothing."""


class RangeSource:
    """The `size` bytes of another source from `start` on: a file within a file. Closing it leaves
    the other open.
    """

    def __init__(self, parent: Source, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > parent.size:
            raise MalformedCheckpoint(
                f"{size} bytes at {start} lie beyond its end ({parent.size})", path=parent.path
            )
        self.path, self.size = parent.path, size
        self._parent, self._start = parent, start

    def read_into(self, offset: int, view: memoryview) -> None:
        if offset + len(view) > self.size:
            raise MalformedCheckpoint(
                f"ends at byte {self.size}, more was expected", path=self.path
            )
        self._parent.read_into(self._start + offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes > self.size - offset:
            raise MalformedCheckpoint(
                f"{nbytes} bytes at {offset} lie beyond its end ({self.size})", path=self.path
            )
        return self._parent.read(self._start + offset, nbytes)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for offset, nbytes in ranges:
            if offset < 0 or nbytes > self.size - offset:
                self.read(offset, nbytes)  # says why not
        return self._parent.read_many([(self._start + at, nbytes) for at, nbytes in ranges])

    def close(self) -> None:
        """Nothing to give back: the other source is its opener's."""


class MemorySource:
    """Bytes that are in memory already, such as an array that a pickle holds."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path, self.size = path, len(data)
        self._data = data

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self.read(offset, len(view))

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes > self.size - offset:
            raise MalformedCheckpoint(
                f"{nbytes} bytes at {offset} lie beyond its end ({self.size})", path=self.path
            )
        return self._data[offset : offset + nbytes]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(offset, nbytes) for offset, nbytes in ranges]

    def close(self) -> None:
        """Nothing to give back."""
