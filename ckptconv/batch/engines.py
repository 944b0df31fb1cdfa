"""Who runs jobs: the interface of engines, and the two that need nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any, Protocol

from ckptconv.io.hidden_folders import KeptFolder
from ckptconv.support.records import dataclass


class Work(Protocol):
    """What an engine runs: a value that can be pickled, with a number of its own."""

    @property
    def number(self) -> int:
        """What tells it from the others."""

    def run(self) -> Any:
        """Do it, wherever this is; errors are part of what it gives."""

    def memory(self) -> int:
        """The bytes of memory that it takes, about."""


def run_work(work: Work) -> Any:
    """Do it: what is called in a worker."""
    return work.run()


@dataclass(frozen=True, slots=True)
class Ended:
    """A piece of work that came to an end: its number, and what it gave, or why the worker was lost
    that had it.
    """

    number: int
    given: Any
    lost: str = ""


class Engine(ABC):
    """Runs work, at most `slots` pieces at a time; each ends once, with what it gives or lost.

    It is used within a ``with`` block by one thread. Whoever leaves the block before all tasks have
    ended has the others cancelled: they leave nothing behind.
    """

    name: str
    slots: int

    @property
    def workers(self) -> int:
        """How many pieces of work go on at the same time; the others wait in turn."""
        return self.slots

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, descriptor: int) -> None:  # noqa: B027 (nothing is promised)
        """An open file that is locked: workers of this host keep it open too, so that the lock
        lasts until the last of them is gone.
        """

    @abstractmethod
    def start(self, work: Work) -> None:
        """Begin a piece of work; at most `slots` may have begun and not ended."""

    @abstractmethod
    def ended(self, seconds: float | None) -> Sequence[Ended]:
        """The tasks that ended, waiting for the first of them for so many seconds (None: for as
        long as it takes); some must have begun.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel what still runs, and give back what is held; once or more often."""


class Serial(Engine):
    """Runs one task after the other, here."""

    name, slots = "serial", 1

    def __init__(self) -> None:
        self._tasks: list[Work] = []
        self._folder = KeptFolder()

    def start(self, work: Work) -> None:
        self._tasks.append(work)

    def ended(self, seconds: float | None) -> Sequence[Ended]:
        work = self._tasks.pop(0)
        with self._folder.used():
            return [Ended(work.number, run_work(work))]

    def close(self) -> None:
        self._tasks.clear()
        self._folder.close()


class OnExecutor(Engine):
    """Runs tasks by any `concurrent.futures.Executor`, which stays its owner's.

    What an executor began cannot be cancelled: closing waits for it.
    """

    name = "executor"

    def __init__(self, executor: Executor, slots: int) -> None:
        self.slots = slots
        self._executor = executor
        self._running: dict[Future[Any], int] = {}

    def start(self, work: Work) -> None:
        try:
            future = self._executor.submit(run_work, work)
        except BrokenExecutor as error:  # it was lost with an earlier task
            future = Future()
            future.set_exception(error)
        self._running[future] = work.number

    def ended(self, seconds: float | None) -> Sequence[Ended]:
        done, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        return [self._end(future) for future in done]

    def _end(self, future: Future[Any]) -> Ended:
        number = self._running.pop(future)
        error = future.exception()
        if error is None:
            return Ended(number, future.result())
        return Ended(number, None, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        for future in self._running:
            future.cancel()
        wait(self._running)
        self._running.clear()
