"""New objects in the making: parts that are sent by several threads, few at a time."""

from __future__ import annotations

import contextlib
import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

from ckptconv.io.remote.fetchers import fetched
from ckptconv.io.remote.patience import patiently
from ckptconv.io.remote.store import StoreError, Upload
from ckptconv.io.remote.traffic import count
from ckptconv.support.limits import in_force

T = TypeVar("T")

PART = 8 << 20
"""The bytes of one part, at least; an object of S3 has at most 10,000."""

_MOST_PARTS = 9_000
_IN_FLIGHT = 4
_HIDDEN = ".ckptconv-part"


def hidden_key(key: str) -> str:
    """The key beside `key` under which an object is made that is read before it is finished."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.{name}.{secrets.token_hex(4)}{_HIDDEN}"


def key_of_hidden(key: str) -> str | None:
    """The key that a hidden one was to become; None for any other key.

    >>> key_of_hidden("run/.model.pt.0badcafe.ckptconv-part")
    'run/model.pt'
    """
    folder, slash, name = key.rpartition("/")
    stem, dot, token = name.removesuffix(_HIDDEN).rpartition(".")
    is_ours = name.startswith(".") and name.endswith(_HIDDEN) and dot and len(token) == 8
    return f"{folder}{slash}{stem[1:]}" if is_ours else None


class Cancelled(StoreError):
    """Nobody wants the object any more."""

    def __init__(self) -> None:
        super().__init__("final", "was stopped")


class PartsUpload(Upload):
    """An object that is sent in parts. What fits into one is sent as a whole when it is finished.

    A kind of store has to begin, send a part, complete and drop.
    """

    def __init__(self, size: int) -> None:
        self.size = 0
        self._seconds = in_force().remote_seconds
        self._part = max(PART, -(-size // _MOST_PARTS >> 20) + 1 << 20 if size > PART else PART)
        self._buffer = bytearray()
        self._sending: deque[Future[Any]] = deque()
        self._parts: list[Any] = []
        self._is_begun = False
        self._is_cancelled = threading.Event()

    # ------------------------------------------------------------------- what a store has to do

    @abstractmethod
    def _begin(self) -> None:
        """Announce an object of several parts."""

    @abstractmethod
    def _send(self, number: int, data: bytearray) -> Any:
        """Send part `number`, the first of which is 1; what is needed to complete the object."""

    @abstractmethod
    def _complete(self, parts: list[Any], *, create: bool) -> None:
        """Make one object of the parts."""

    @abstractmethod
    def _put(self, data: bytearray, *, create: bool) -> None:
        """Send a whole object at once."""

    @abstractmethod
    def _drop(self) -> None:
        """Leave nothing of the parts."""

    # ---------------------------------------------------------------------------- one for all

    def write(self, view: memoryview) -> None:
        self.size += len(view)
        while view:
            room = self._part - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._part and view:
                self._hand_over()

    def _hand_over(self) -> None:
        if not self._is_begun:
            self._waited(fetched(partial(self._patiently, self._begin)))
            self._is_begun = True
        while len(self._sending) >= _IN_FLIGHT:
            self._parts.append(self._waited(self._sending.popleft()))
        number = len(self._parts) + len(self._sending) + 1
        data, self._buffer = self._buffer, bytearray()
        self._sending.append(fetched(partial(self._sent, number, data)))

    def _sent(self, number: int, data: bytearray) -> Any:
        if self._is_cancelled.is_set():
            raise Cancelled
        done = self._patiently(partial(self._send, number, data))
        count(bytes_written=len(data))
        return done

    def _patiently(self, request: Callable[[], T]) -> T:
        return patiently(request, self._seconds)

    def _waited(self, future: Future[T]) -> T:
        """The result, unless the upload is cancelled meanwhile."""
        while not future.done():
            if self._is_cancelled.is_set():
                raise Cancelled
            with contextlib.suppress(FutureTimeout):
                future.exception(timeout=0.2)
        return future.result()

    def end(self) -> None:
        if self._is_begun:
            self._hand_over()
            while self._sending:
                self._parts.append(self._waited(self._sending.popleft()))

    def finish(self, *, create: bool) -> None:
        if self._is_begun:
            self._asked(partial(self._complete, self._parts, create=create))
            self._is_begun = False
        else:
            self._asked(partial(self._put, self._buffer, create=create))
            count(bytes_written=len(self._buffer))
        self._buffer = bytearray()

    def _asked(self, request: Callable[[], T]) -> T:
        return self._waited(fetched(partial(self._patiently, request)))

    def cancel(self) -> None:
        self._is_cancelled.set()

    def abort(self) -> None:
        self.cancel()
        self._buffer = bytearray()
        for future in self._sending:
            future.cancel()
        for future in self._sending:  # a part that arrives later would be kept by the store
            with contextlib.suppress(Exception):
                future.exception(timeout=30)
        self._sending.clear()
        if self._is_begun:
            self._is_begun = False
            with contextlib.suppress(Exception):
                fetched(self._drop).result(timeout=30)
