"""Who runs jobs: the interface of engines, and the two that need nothing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass

from ckptconv.batch.receipts import Receipt
from ckptconv.batch.work import Task, run_task


@dataclass(frozen=True, slots=True)
class Ended:
    """A task that came to an end: its number, and the receipt, or why the worker was lost that had
    it.
    """

    number: int
    receipt: Receipt | None
    lost: str = ""


class Engine(ABC):
    """Runs tasks, at most `slots` at a time; each ends once, with a receipt or lost.

    It is used within a ``with`` block by one thread. Whoever leaves the block before all tasks have
    ended has the others cancelled: they leave nothing behind.
    """

    name: str
    slots: int

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, descriptor: int) -> None:  # noqa: B027 (nothing is promised)
        """An open file that is locked: workers of this host keep it open too, so that the lock
        lasts until the last of them is gone.
        """

    @abstractmethod
    def start(self, task: Task) -> None:
        """Begin a task; at most `slots` may have begun and not ended."""

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
        self._tasks: list[Task] = []

    def start(self, task: Task) -> None:
        self._tasks.append(task)

    def ended(self, seconds: float | None) -> Sequence[Ended]:
        task = self._tasks.pop(0)
        return [Ended(task.number, run_task(task))]

    def close(self) -> None:
        self._tasks.clear()


class OnExecutor(Engine):
    """Runs tasks by any `concurrent.futures.Executor`, which stays its owner's.

    What an executor began cannot be cancelled: closing waits for it.
    """

    name = "executor"

    def __init__(self, executor: Executor, slots: int) -> None:
        self.slots = slots
        self._executor = executor
        self._running: dict[Future[Receipt], int] = {}

    def start(self, task: Task) -> None:
        try:
            future = self._executor.submit(run_task, task)
        except BrokenExecutor as error:  # it was lost with an earlier task
            future = Future()
            future.set_exception(error)
        self._running[future] = task.number

    def ended(self, seconds: float | None) -> Sequence[Ended]:
        done, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        return [self._end(future) for future in done]

    def _end(self, future: Future[Receipt]) -> Ended:
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


def wait_for(seconds: float) -> None:
    """Wait where nothing runs that could end."""
    time.sleep(seconds)
