"""Casts and other operations by several threads, each of which reads a range of values, computes
what becomes of it, and writes that to its place.

What must be told in the order of the output (checksums, counts, errors) is told in that order.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

from ckptconv.io.crc import CrcOf
from ckptconv.io.guarded import check_places
from ckptconv.io.source import CHUNK, Source
from ckptconv.support.platforms import cores
from ckptconv.support.records import NamedTuple
from ckptconv.support.signals import held_back
from ckptconv.tensors.computed import ReadRun, fresh, read_cast, step_in
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import DerivedSource, Storage, origins

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

VARIABLE = "CKPTCONV_THREADS"
"""The variable of the environment that says how many threads a process may start to compute:
workers of a batch share the cores.
"""


def _threads() -> int:
    given = os.environ.get(VARIABLE, "")
    return min(4, (int(given) if given.isdecimal() else 0) or cores())


THREADS = _threads()
"""So many threads compute; each takes a few MB."""

_STEPS = 4  # that a thread is given at a time
_STEP = CHUNK  # bytes that it reads, computes and writes in each

# The bytes that it writes in one where less would have it read the same spans more often.
_ROOM = (32 << 20) // THREADS

WriteAt = Callable[[memoryview, int], None]


class ToCompute(NamedTuple):
    """Values whose bytes lie in `runs`, as `verbatim_runs` gives them, the types before and after
    their cast, and where in the output the first of them goes.
    """

    runs: Sequence[tuple[Storage, int, int]]
    source: DType
    target: DType
    position: int


class Cut(NamedTuple):
    """What was computed: what was read for it, and `nbytes` bytes that were made of that, with
    what `crc_of` gives for them; so many finite values became infinite or NaN.
    """

    read: Sequence[ReadRun]
    nbytes: int
    crc: int
    overflowed: int


def may_be_threaded(runs: Iterable[tuple[Storage, int, int]]) -> bool:
    """Whether several threads may read the runs, of files of this host."""
    return all(
        storage.source.is_for_threads() and storage.source.fetched_from(0) is None
        for storage in origins(storage for storage, _, _ in runs)
    )


@contextmanager
def compute_ahead(
    wanted: Sequence[ToCompute], write_at: WriteAt, crc_of: CrcOf, threads: int
) -> Iterator[Iterator[Iterator[Cut]]]:
    """Within the block, so many threads compute all of `wanted`, in about that order.

    What is yielded gives the cuts of each of `wanted` in turn, each when it is written; an error is
    raised in its place. No thread runs when the block is left.
    """
    from concurrent.futures import ThreadPoolExecutor

    check_places({id(one): one for each in wanted for one in _sources(each)}.values())
    work = _Work(write_at, crc_of)
    tasks = (task for each in wanted for task in _tasks(each))
    waiting: deque[Future[Cut]] = deque()
    with _stopped(ThreadPoolExecutor(threads, "ckptconv-computer"), work) as pool:

        def cuts(count: int) -> Iterator[Cut]:
            for _ in range(count):
                # one that is told, one in work and one to come for each thread: none waits
                room = 2 * threads + 1 - len(waiting)
                waiting.extend(pool.submit(work, *task) for task in islice(tasks, room))
                yield waiting.popleft().result()

        yield (cuts(sum(1 for _ in _tasks(each))) for each in wanted)


@contextmanager
def _stopped(pool: ThreadPoolExecutor, work: _Work) -> Iterator[ThreadPoolExecutor]:
    """The threads come to their end before anything else happens: then their file is closed."""
    try:
        yield pool
    finally:
        with held_back():
            work.is_wanted = False
            pool.shutdown(cancel_futures=True)


def _sources(each: ToCompute) -> Iterator[Source]:
    return (storage.source for storage in origins(storage for storage, _, _ in each.runs))


Task = tuple[Storage, int, int, DType, DType, int]
"""A part of a run, the types before and after, and the place of what is made of it."""


def _tasks(each: ToCompute) -> Iterator[Task]:
    """The runs, cut."""
    position = each.position
    for storage, first, nbytes in each.runs:
        source = storage.source
        is_in_order = isinstance(source, DerivedSource) and source.is_in_order
        step = step_in(storage, _STEP, _ROOM)
        size = max(1, nbytes) if is_in_order else max(step, _STEPS * _STEP // step * step)
        for start in range(0, nbytes, size):
            count = min(size, nbytes - start)
            yield storage, first + start, count, each.source, each.target, position
            position += count // each.source.itemsize * each.target.itemsize


class _Work:
    """What each thread does with a task, in a buffer of its own."""

    def __init__(self, write_at: WriteAt, crc_of: CrcOf) -> None:
        self.is_wanted = True  # a task may be a large tensor: nobody waits for the rest of it
        self._write_at, self._crc_of = write_at, crc_of
        self._own = threading.local()

    def __call__(
        self, storage: Storage, first: int, nbytes: int, source: DType, target: DType, position: int
    ) -> Cut:
        crc = overflowed = 0
        read: list[ReadRun] = []
        at = position
        step = step_in(storage, _STEP, _ROOM)
        buffer = self._buffer(min(step, nbytes))
        for start in range(0, nbytes, step):
            if not self.is_wanted:
                break
            view = buffer[: min(step, nbytes - start)]
            result = read_cast(storage, first + start, view, source, target, read.append)
            crc = self._crc_of(result.data, crc)
            overflowed += result.overflowed
            self._write_at(result.data, at)
            at += len(result.data)
        return Cut(read, at - position, crc, overflowed)

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread, for so many bytes or more."""
        buffer: memoryview = getattr(self._own, "buffer", memoryview(b""))
        if len(buffer) < nbytes:
            buffer = self._own.buffer = fresh(nbytes)
        return buffer
