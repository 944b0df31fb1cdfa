"""Works that are done side by side, each in a thread, with the outcome of one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

from ckptconv.support.records import dataclass
from ckptconv.support.signals import held_back

A = TypeVar("A")
T = TypeVar("T")

Say: TypeAlias = "Callable[[Callable[[], object]], None]"
"""Has a call made by the thread that waits for all works; raises `Unwanted` where it may stop."""
Work: TypeAlias = Callable[[Say], T]


def said(say: Say, call: Callable[[A], object]) -> Callable[[A], None]:
    """What has `call` made with a value by the thread that waits."""
    return lambda value: say(partial(call, value))


class SaidCount:
    """Counts bytes in the thread that waits; by itself it only hears whether to stop."""

    def __init__(self, say: Say, add: Callable[[int], object] = int) -> None:
        self.add = said(say, add)


class Unwanted(Exception):
    """A work before this one failed, or the run was stopped: leave nothing behind."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """What became of the work of that number."""

    number: int
    results: Sequence[T]
    error: BaseException | None = None


def side_by_side(works: Sequence[Work[T]], lanes: int) -> list[T]:
    """What `works` give, in their order; so many of them run at a time.

    What they say is done here. Where some fail, the error of the first of them is raised, as if
    they were done in turn: those before it come to their end, those behind it are told to stop.
    None runs any more when this returns or raises.
    """
    return _Lanes(works).run(lanes)


class _Lanes(Generic[T]):
    """Threads that take the next work each, and what they said."""

    def __init__(self, works: Sequence[Work[T]]) -> None:
        self._works = works
        self._numbers = iter(range(len(works)))
        self._wanted = len(works)  # those from this number on are not
        self._said: SimpleQueue[Callable[[], object] | _Outcome[T]] = SimpleQueue()

    def run(self, lanes: int) -> list[T]:
        threads = [
            threading.Thread(target=copy_context().run, args=(self._lane,), name="ckptconv-lane")
            for _ in range(min(lanes, len(self._works)))
        ]
        try:
            for thread in threads:
                thread.start()
            return self._results()
        finally:
            with held_back():
                self._wanted = 0
                for thread in filter(threading.Thread.is_alive, threads):
                    thread.join()

    def _results(self) -> list[T]:
        met: dict[int, _Outcome[T]] = {}
        while any(number not in met for number in range(self._wanted)):
            while not isinstance(heard := self._said.get(), _Outcome):
                heard()
            met[heard.number] = heard
            if heard.error is not None:
                self._wanted = min(self._wanted, heard.number)
        error = met[self._wanted].error if self._wanted < len(self._works) else None
        if error is not None:
            raise error
        return [result for number in sorted(met) for result in met[number].results]

    def _lane(self) -> None:
        for number in self._numbers:
            if number >= self._wanted:
                return
            self._said.put(self._outcome(number))

    def _outcome(self, number: int) -> _Outcome[T]:
        def say(call: Callable[[], object]) -> None:
            if number >= self._wanted:
                raise Unwanted
            self._said.put(call)

        try:
            return _Outcome(number, [self._works[number](say)])
        except BaseException as error:  # raised again by the thread that waits
            return _Outcome(number, [], error)
