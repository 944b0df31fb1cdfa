"""Asking other machines: by few threads, shared by all, and again where that may help.

Nobody waits for the threads at the end of the process.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptconv.io.remote.store import StoreError
from ckptconv.io.remote.traffic import count
from ckptconv.support import platforms
from ckptconv.support.limits import in_force

T = TypeVar("T")

FIRST, LONGEST = 0.2, 15.0
"""Seconds before the second try, and at most before others: drawn from half to all of it."""


def patiently(request: Callable[[], T], seconds: float) -> T:
    """What `request` gives, tried again for `seconds` while its errors are passing ones.

    A server that asks for a longer wait than is left is answered by its error at once. No error has
    what was caught before it as its context: answers of servers hold secrets.
    """
    begin, delay, tries = time.monotonic(), FIRST, 0
    while True:
        tries += 1
        count(requests=1)
        try:
            return request()
        except StoreError as error:
            error.__context__ = None
            if error.kind != "passing" or (error.tries is not None and tries >= error.tries):
                raise
            # by chance: what failed at once is not to come back at once
            wait = delay * random.uniform(0.5, 1.0)
            if error.wait is not None:
                wait = max(error.wait, 0.0) + random.uniform(0.0, FIRST)
            spent = time.monotonic() - begin
            if spent + wait > seconds:
                error.what = f"{error.what} (tried for {spent:.0f} s)"
                raise
        time.sleep(wait)
        count(retries=1)
        delay = min(2 * delay, LONGEST)


def asked(request: Callable[[], T]) -> T:
    """The same, by a thread that does not hold up Ctrl-C, for as long as the limits allow."""
    return fetched(partial(patiently, request, in_force().remote_seconds)).result()


class Budget:
    """Bytes that may still be kept, by any number of sources or uploads."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes, which is gone then."""
        with self._lock:
            if nbytes > self.left:
                return False
            self.left -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """There is room for so many bytes more."""
        with self._lock:
            self.left += nbytes


# ------------------------------------------------------------------------------------- the threads

IN_FLIGHT = 16
"""Requests at a time."""

_tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
_LOCK = threading.Lock()
_threads = 0
_idle = 0


def fetched(task: Callable[[], T]) -> Future[T]:
    """What a task gives, done by another thread. Tasks never wait for other tasks."""
    global _threads
    future: Future[T] = Future()
    _tasks.put((future, task))
    with _LOCK:
        if _threads < IN_FLIGHT and _tasks.qsize() > _idle:
            # daemons: who stops the program does not wait for a server
            threading.Thread(target=_work, name="ckptconv-fetcher", daemon=True).start()
            _threads += 1
    return future


def _work() -> None:
    global _idle
    while True:
        with _LOCK:
            _idle += 1
        future, task = _tasks.get()
        with _LOCK:
            _idle -= 1
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(task())
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)
        del future, task  # an idle thread holds no bytes


def _forget() -> None:
    """A forked process has none of the threads, and does none of their tasks."""
    global _tasks, _LOCK, _threads, _idle
    _tasks, _LOCK, _threads, _idle = SimpleQueue(), threading.Lock(), 0, 0


platforms.after_fork_in_child(_forget)
