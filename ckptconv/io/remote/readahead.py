"""Bytes fetched before they are asked for, in the order in which they will be, and not too many."""

from __future__ import annotations

import contextlib
import sys
import threading
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from itertools import islice
from operator import attrgetter, itemgetter

from ckptconv.io.remote.patience import fetched
from ckptconv.io.source import Source
from ckptconv.support.arrays import np
from ckptconv.support.records import dataclass

BLOCK = 8 << 20
"""The most that one request fetches ahead, in bytes."""

WINDOW = 64 << 20
"""The most that is fetched and not yet used, in bytes, but for what is asked for out of order."""

_GAP = 64 << 10  # bytes that nobody asked for, fetched where another request would cost more
_BEHIND = 64  # blocks that may stay unused behind the one that is read
_MOST = 3  # windows that are held when some of it is let go: each of many threads reads a block


class FarSource(Source):
    """A source over a network, which may be read ahead."""

    ahead: Readahead | None = None

    @abstractmethod
    def fetch(self, first: int, nbytes: int) -> memoryview:
        """The bytes from `first` on, in one request; any thread may ask."""

    def fetched_from(self, offset: int) -> tuple[Source, int]:
        return self, offset


Run = tuple[FarSource, int, int]
"""Bytes of a source: where they begin, and how many they are."""


@dataclass(slots=True, eq=False)
class _Block:
    """A stretch of a source: where it begins and ends, and how many bytes of it will be used."""

    source: FarSource
    first: int
    last: int
    left: int = 0
    data: Future[memoryview] | None = None
    is_over: bool = False


def copied(data: memoryview, view: memoryview) -> None:
    """Copy bytes without holding up the threads that fetch, where numpy is here to do it: memory
    that is touched for the first time is slow to write to.
    """
    if "numpy" not in sys.modules or len(view) < _LARGE:
        view[:] = data
        return
    np.copyto(np.frombuffer(view, "u1"), np.frombuffer(data, "u1"))


_LARGE = 256 << 10


class Readahead:
    """A plan of what will be read: runs of bytes of any sources, in their order.

    `fill` may be called by several threads, in about that order. What is read twice is fetched
    twice, unless the plan has it twice.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._blocks = _blocks(runs)
        self._at: dict[int, list[_Block]] = {}  # those of each source, ascending
        self._number = {id(block): number for number, block in enumerate(self._blocks)}
        for block in sorted(self._blocks, key=_first):
            self._at.setdefault(id(block.source), []).append(block)
        self._next = self._oldest = self._held = 0
        self._lock = threading.Lock()

    def fill(self, source: FarSource, offset: int, view: memoryview) -> bool:
        """Fill `view`, if all of it is part of the plan and not used up."""
        found = self._covering(source, offset, len(view))
        if found is None:
            return False
        for block, data in found:
            first, last = max(offset, block.first), min(offset + len(view), block.last)
            try:
                got = data.result()
            except CancelledError:  # another thread reads so far ahead that this was let go
                return False
            copied(
                got[first - block.first : last - block.first], view[first - offset : last - offset]
            )
            self._used(block, last - first)
        return True

    def held(self, source: FarSource, offset: int, nbytes: int) -> memoryview | None:
        """Bytes that are here, on their way or the next to be fetched, whether they are planned or
        not: for small reads, which do not use up what is planned.
        """
        blocks = self._at.get(id(source), [])
        number = bisect_right(blocks, offset, key=_first) - 1
        if number < 0 or offset + nbytes > blocks[number].last:
            return None
        block = blocks[number]
        with self._lock:
            if block.data is None and not block.is_over and self._number[id(block)] == self._next:
                self._started(block)
            data = block.data
        if data is None:
            return None
        try:
            return data.result()[offset - block.first : offset - block.first + nbytes]
        except CancelledError:
            return None

    def close(self) -> None:
        """Nothing more will be read by this plan."""
        with self._lock:
            for block in self._blocks[self._oldest :]:
                self._end(block)
            self._next = len(self._blocks)

    def _covering(
        self, source: FarSource, offset: int, nbytes: int
    ) -> list[tuple[_Block, Future[memoryview]]] | None:
        """The blocks that hold the bytes, all of them on their way; None where some do not."""
        blocks = self._at.get(id(source), [])
        number = bisect_right(blocks, offset, key=_first) - 1
        found: list[_Block] = []
        at = offset
        while at < offset + nbytes:
            if not 0 <= number < len(blocks):
                return None
            block = blocks[number]
            if block.is_over or not block.first <= at < block.last:
                return None
            found.append(block)
            at, number = block.last, number + 1
        with self._lock:
            if not found or any(block.is_over for block in found):
                return None
            started = [(block, self._started(block)) for block in found]
            self._drop_before(min(self._number[id(block)] for block in found))
            self._go_on()
            return started

    def _started(self, block: _Block) -> Future[memoryview]:
        if block.data is None:
            self._held += block.last - block.first
            source, first, last = block.source, block.first, block.last
            block.data = fetched(lambda: source.fetch(first, last - first))
        return block.data

    def _go_on(self) -> None:
        while self._next < len(self._blocks):
            block = self._blocks[self._next]
            if not block.is_over and block.data is None:
                if self._held and self._held + block.last - block.first > WINDOW:
                    return
                self._started(block)
            self._next += 1

    def _drop_before(self, number: int) -> None:
        """Let go of blocks that were planned long before block `number`, which is read now: nobody
        wants them. Of those that are planned once more, much later, few are held until then; the
        others are fetched again.
        """
        while self._oldest < number - _BEHIND:
            self._end(self._blocks[self._oldest])
            self._oldest += 1
        if self._held > _MOST * WINDOW:
            for block in self._blocks[self._oldest : number]:
                if self._held > WINDOW:
                    self._let_go(block)

    def _used(self, block: _Block, nbytes: int) -> None:
        with self._lock:
            block.left -= nbytes
            if block.left <= 0:
                self._end(block)
                self._go_on()

    def _end(self, block: _Block) -> None:
        if block.is_over:
            return
        self._let_go(block)
        block.is_over = True

    def _let_go(self, block: _Block) -> None:
        if block.data is not None:
            block.data.cancel()
            self._held -= block.last - block.first
            block.data = None


def _blocks(runs: Sequence[Run]) -> list[_Block]:
    """Blocks of at most `BLOCK` bytes that cover the runs, in the order in which they are needed
    first: near runs are put together, and what is planned twice is fetched once.
    """
    by_source: dict[int, list[Run]] = {}
    for run in runs:
        if run[2] > 0:
            by_source.setdefault(id(run[0]), []).append(run)
    cut = {key: _cut(sorted(of, key=_place)) for key, of in by_source.items()}
    ordered: dict[int, _Block] = {}
    for source, first, nbytes in runs:
        if nbytes <= 0:
            continue
        blocks = cut[id(source)]
        for block in islice(blocks, bisect_right(blocks, first, key=_first) - 1, None):
            if block.first >= first + nbytes:
                break
            block.left += min(first + nbytes, block.last) - max(first, block.first)
            ordered.setdefault(id(block), block)
    return [*ordered.values()]


_first: Callable[[_Block], int] = attrgetter("first")
_place: Callable[[Run], int] = itemgetter(1)


def _cut(runs: Sequence[Run]) -> list[_Block]:
    """Blocks of one source, ascending."""
    blocks: list[_Block] = []
    for source, first, nbytes in runs:
        start, end = first, first + nbytes
        if blocks:
            last = blocks[-1]
            if start - last.last <= _GAP and start - last.first < BLOCK:
                last.last = max(last.last, min(end, last.first + BLOCK))
            start = max(start, last.last)
        while start < end:
            stop = min(end, start + BLOCK)
            blocks.append(_Block(source, start, stop))
            start = stop
    return blocks


@contextlib.contextmanager
def reading_ahead(runs: Iterable[Run]) -> Iterator[None]:
    """Within the block, the sources of `runs` have these fetched before they are asked for, in
    their order; sources that are read ahead already stay as they are.
    """
    wanted = [run for run in runs if run[0].ahead is None]
    plan = Readahead(wanted)
    sources = {id(run[0]): run[0] for run in wanted}
    for source in sources.values():
        source.ahead = plan
    try:
        yield
    finally:
        for source in sources.values():
            source.ahead = None
        plan.close()
