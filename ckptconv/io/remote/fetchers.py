"""The threads that wait for the network: few, shared by all, and never waited for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from ckptconv.support import platforms

T = TypeVar("T")

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
