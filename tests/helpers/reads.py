"""What is read of files while something runs: each read with its place and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ckptconv.support import platforms


class Reads(list[tuple[int, int]]):
    """The reads of a time: where each began, and how many bytes it gave."""

    @property
    def nbytes(self) -> int:
        """The bytes that they gave."""
        return sum(nbytes for _, nbytes in self)


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Within the block, every read of every file that is opened to be read is counted."""
    read_at, read_into_at = platforms.read_at, platforms.read_into_at
    reads = Reads()

    def counted_at(fd: int, nbytes: int, offset: int) -> bytes:
        found = read_at(fd, nbytes, offset)
        reads.append((offset, len(found)))
        return found

    def counted_into(fd: int, view: memoryview, offset: int) -> int:
        count = read_into_at(fd, view, offset)
        reads.append((offset, count))
        return count

    with (
        patch.object(platforms, "read_at", counted_at),
        patch.object(platforms, "read_into_at", counted_into),
    ):
        yield reads
