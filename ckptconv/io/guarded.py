"""A source whose payloads are given out only after what stands before each of them was checked.

The index of a file (the directory of a zip archive, the pickle of a legacy file) says where
payloads lie. Before each of them stands a *lead* that says it again: a local header, an element
count. To hold all leads against the index when a file is opened would take a read for each tensor.
So that is done when a payload is first needed, for the few that follow too, or for all at once
(`check_all`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptconv.io.source import Pending, Range, Source, WrappedSource, merged_runs

Check = Callable[[int, int], Mapping[int, int]]
"""Holds the leads from one number up to another against the index, and raises where they differ.

Gives the places of the payloads that begin elsewhere than the index lets expect, by number.
"""
_MOST_AHEAD = 1024  # leads that are checked together
_FEW = 8  # leads that are all checked at once: the items of a DCP folder have six records
_CLOSE = 1 << 14  # bytes of payloads of which the leads are all checked at once


class GuardedSource(WrappedSource):
    """The payloads of `inner`, each checked before it is first read.

    `starts` are the places where they are expected to begin, ascending; whoever reads uses these,
    wherever the payload turns out to begin. Closing it closes `inner`.
    """

    def __init__(self, inner: Source, starts: Sequence[int], check: Check) -> None:
        super().__init__(inner)
        self._starts = starts
        self._check = check
        self._elsewhere: dict[int, int] = {}
        self._checked = bytearray(len(starts))
        # the payload behind those that were checked last, and how many are checked from there
        self._following, self._ahead = 0, 1
        # once every payload is where it was expected, there is nothing left to look up
        self._is_settled = not starts

    def read_into(self, offset: int, view: memoryview) -> None:
        self.inner.read_into(offset if self._is_settled else self.place(offset), view)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.inner.read(offset if self._is_settled else self.place(offset), nbytes)

    def begin_into(self, offset: int, view: memoryview) -> Pending:
        return self.inner.begin_into(self.place(offset), view)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        return self.inner.read_many([(self.place(offset), nbytes) for offset, nbytes in ranges])

    def stream(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        return self.inner.stream((self.place(offset), nbytes) for offset, nbytes in ranges)

    def is_for_threads(self) -> bool:
        return self.inner.is_for_threads()

    def mappable_path(self) -> str | None:
        """None if a payload is elsewhere: who maps bytes reads them unseen, so all are checked."""
        path = self.inner.mappable_path()
        if path is None:
            return None
        self.check_all()
        return path if self._is_settled else None

    def fetched_from(self, offset: int) -> tuple[Source, int] | None:
        if self.inner.fetched_from(0) is None:
            return None
        return self.inner.fetched_from(self.place(offset))

    def comes_from(self, offset: int) -> tuple[Source, int]:
        return self.inner.comes_from(self.place(offset))

    def data_from(self, offset: int) -> int:
        """`offset`: where a payload is expected tells nothing of the holes of `inner`."""
        return offset

    def check_mapped(self) -> None:
        self.inner.check_mapped()

    def place(self, offset: int) -> int:
        """Where in `inner` the byte lies that is expected at `offset`; its payload is checked."""
        if self._is_settled:
            return offset
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            return offset
        if not self._checked[number]:
            self._check_from(number)
        return offset + self._elsewhere.get(number, self._starts[number]) - self._starts[number]

    def check_all(self) -> None:
        """Check the payloads that nobody has read yet."""
        number = self._checked.find(0)
        while number >= 0:
            self._check_run(number, self._unchecked_until(number, len(self._starts)))
            number = self._checked.find(0)

    def _check_from(self, number: int) -> None:
        """Check one payload; for somebody who reads on and on, more of those behind it too."""
        if len(self._starts) <= _FEW or self._starts[-1] - self._starts[0] <= _CLOSE:
            self.check_all()
            return
        self._ahead = min(2 * self._ahead, _MOST_AHEAD) if number == self._following else 1
        self._following = self._unchecked_until(number, number + self._ahead)
        self._check_run(number, self._following)

    def _unchecked_until(self, number: int, most: int) -> int:
        """The end of the payloads from `number` on that are not checked yet, at most `most`."""
        end = self._checked.find(1, number, most)
        return min(most, len(self._starts)) if end < 0 else end

    def _check_run(self, first: int, stop: int) -> None:
        self._elsewhere.update(self._check(first, stop))
        self._checked[first:stop] = b"\1" * (stop - first)
        self._is_settled = not self._elsewhere and self._checked.find(0) < 0


def unguarded(source: Source) -> Source:
    """The source that a guard stands before; any other one itself."""
    return source.inner if isinstance(source, GuardedSource) else source


def check_places(sources: Iterable[Source]) -> None:
    """Check the payloads of all guarded sources: whoever judges a file wants no surprises later."""
    for source in sources:
        if isinstance(source, GuardedSource):
            source.check_all()


def read_leads(source: Source, ranges: Sequence[Range]) -> list[tuple[int, bytes]]:
    """Bytes that hold all of `ranges` (place and size, ascending), each with its own place. What
    lies close together is read together: leads before small payloads cost no read each.
    """
    merged = [(first, last - first) for first, last, _ in merged_runs(ranges)]
    source.foresee(merged)
    return list(zip((at for at, _ in merged), source.read_many(merged), strict=True))
