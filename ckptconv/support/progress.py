"""The progress of a long run: the value that `on_progress` callbacks get, and its counter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from ckptconv.support.records import dataclass

Phase = Literal["open", "read", "measure", "write", "verify", "sync", "deliver"]

_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one phase of a run has come: `done` of `total` bytes.

    The phases of a conversion are ``write`` (the source is read meanwhile), ``verify`` (the output
    is read back) and ``sync`` (the disk is waited for; nothing is known of how far it is until it
    is done). Whatever only reads has the phase ``read``; a comparison then reads what differs
    again, to ``measure`` by how much. ``deliver`` is the copy to standard output. A phase begins
    with `done` = 0 and ends with `done` = `total`; what fails stops in between. A conversion to
    many files has the phases of each of them in turn, so a phase may come again; its counts go on
    where they stood.
    """

    phase: Phase
    done: int
    total: int


OnProgress = Callable[[Progress], None]


class Counting(Protocol):
    """What is told of bytes that are done: a `Meter`, or what stands for one."""

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""


class Meter:
    """Counts the bytes of one phase and tells a callback of them, about once a MiB. Without a
    callback it does nothing.

    >>> meter = Meter("read", 3 << 20, lambda progress: print(progress.done >> 20))
    >>> for _ in range(6): meter.add(1 << 19)
    0
    1
    2
    3
    """

    __slots__ = ("_tell", "_told", "done", "phase", "total")

    def __init__(self, phase: Phase, total: int, tell: OnProgress | None) -> None:
        self.phase, self.total, self.done = phase, total, 0
        self._tell, self._told = tell, -_STEP

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self.at(self.done + nbytes)

    def at(self, done: int) -> None:
        """So many bytes are done by now; never more than there are."""
        if self._told < 0:
            self._say(0)
        self.done = min(done, self.total)
        if self.done - self._told >= _STEP or (self.done == self.total > self._told):
            self._say(self.done)

    def finish(self) -> None:
        """The phase is over."""
        self.at(self.total)

    def _say(self, done: int) -> None:
        self._told = done
        if self._tell is not None:
            self._tell(Progress(self.phase, done, self.total))


class Phases:
    """The phases of one run: the seconds that each took in all, and whom to tell of them."""

    def __init__(self, tell: OnProgress | None) -> None:
        self.tell = tell
        self.seconds: dict[Phase, float] = {}

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """The block is part of `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def share(self, seconds: float, others: Iterable[Phases]) -> None:
        """Add `seconds` in which `others` ran side by side: to each phase its share of them."""
        spent = [item for other in others for item in other.seconds.items()]
        total = sum(each for _, each in spent)
        for phase, each in spent:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds * each / total

    @contextmanager
    def waiting(self, nbytes: int, *, wanted: bool = True) -> Iterator[None]:
        """The block waits until the disk has so many bytes, if that is `wanted`."""
        if not wanted:
            yield
            return
        meter = Meter("sync", nbytes, self.tell)
        meter.at(0)
        with self.timed("sync"):
            yield
        meter.finish()
