"""New objects in the making: parts that are sent by several threads, few at a time."""

from __future__ import annotations

import contextlib
import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from ckptconv.io.remote.patience import Budget, fetched, patiently
from ckptconv.io.remote.store import Store, StoreError, Unfinished, Upload
from ckptconv.io.remote.traffic import count
from ckptconv.io.source import CHUNK
from ckptconv.support.limits import in_force

T = TypeVar("T")

PART = 8 << 20
"""The bytes of one part, at least; an object of S3 has at most 10,000."""

_MOST_PARTS = 9_000  # and not 10,000, for an object has only about the size that was said
IN_FLIGHT = 4
"""Parts at a time, at most."""

_SENT = 64 << 20  # bytes of parts that are on their way, unless one has more

_ABORTING = 5.0  # seconds for which leaving nothing is tried
_HIDDEN = ".ckptconv-part"


def part_size(size: int) -> int:
    """The bytes of one part of an object that will have about `size`.

    >>> part_size(0) >> 20, part_size(40 << 30) >> 20, part_size(1 << 40) >> 20
    (8, 8, 117)
    """
    mebibytes = -(-size // _MOST_PARTS >> 20)
    return max(PART, mebibytes << 20)


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


def is_left(key: str, prefix: str) -> bool:
    """Whether a hidden key was to become one that begins with `prefix`."""
    meant = key_of_hidden(key)
    return meant is not None and (meant.startswith(prefix) or key.startswith(prefix))


class Cancelled(StoreError):
    """Nobody wants the object any more."""

    def __init__(self) -> None:
        super().__init__("final", "was stopped")


HELD = Budget(64 << 20)
"""How much of whole objects waits in memory until they are finished, in all uploads."""


class PartsUpload(Upload):
    """An object that is sent in parts. What fits into one is sent as a whole when it is finished,
    as long as not too much waits for that.

    A kind of store has to begin, send a part, complete, put and drop. `_mark` tells an object of
    this upload from others under its key.
    """

    _is_held = True
    """Whether what fits into one part is sent as a whole."""

    def __init__(self, size: int) -> None:
        self._seconds = in_force().remote_seconds
        self._part = part_size(size)
        self._in_flight = max(1, min(IN_FLIGHT, _SENT // self._part))
        self._mark = secrets.token_hex(8)
        self._buffer = bytearray()
        self._beginning: Future[None] | None = None
        self._sending: deque[Future[Any]] = deque()
        self._parts: list[Any] = []
        self._nheld = 0
        self._is_cancelled = threading.Event()

    # ------------------------------------------------------------------- what a store has to do

    @abstractmethod
    def _begin(self) -> None:
        """Announce an object of parts."""

    @abstractmethod
    def _send(self, number: int, data: bytearray) -> Any:
        """Send part `number`, the first of which is 1; what is needed to complete the object."""

    def _close(self) -> None:
        """Wait until the store has all that was sent."""

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
        while view:
            room = self._part - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._part and view:
                self._hand_over()

    def _hand_over(self) -> None:
        """Have the part sent that is full, as soon as few others are on their way."""
        if self._beginning is None:
            self._beginning = fetched(partial(self._patiently, self._begin))
            self._waited(self._beginning)
        while len(self._sending) >= self._in_flight:
            self._wait_for_part()
        number = len(self._parts) + len(self._sending) + 1
        data, self._buffer = self._buffer, bytearray()
        self._sending.append(fetched(partial(self._sent, number, data)))

    def _wait_for_part(self) -> None:
        self._parts.append(self._waited(self._sending[0]))
        self._sending.popleft()

    def _sent(self, number: int, data: bytearray) -> Any:
        done = self._patiently(partial(self._send_wanted, number, data))
        count(bytes_written=len(data))
        if self._is_cancelled.is_set():  # it came after the others were dropped
            self._drop()
        return done

    def _send_wanted(self, number: int, data: bytearray) -> Any:
        if self._is_cancelled.is_set():
            raise Cancelled
        return self._send(number, data)

    def _patiently(self, request: Callable[[], T]) -> T:
        return patiently(request, self._seconds)

    def _waited(self, future: Future[T]) -> T:
        """The result, unless it is not wanted any more meanwhile."""
        while not future.done():
            if self._is_cancelled.is_set():
                raise Cancelled
            with contextlib.suppress(FutureTimeout):  # so that a cancel is seen soon
                future.exception(timeout=0.2)
        return future.result()

    def end(self, size: int, *, fsync: bool) -> None:
        if self._beginning is None and self._is_held and HELD.take(len(self._buffer)):
            self._nheld = len(self._buffer)
            return
        self._hand_over()
        while self._sending:
            self._wait_for_part()
        self._waited(fetched(self._close))

    def finish(self, *, create: bool) -> None:
        if self._beginning is not None:
            self._asked(partial(self._complete, self._parts, create=create))
            self._beginning = None
        else:
            self._asked(partial(self._put, self._buffer, create=create))
            count(bytes_written=len(self._buffer))
        self._let_go()

    def _asked(self, request: Callable[[], T]) -> T:
        return self._waited(fetched(partial(self._patiently, request)))

    def _let_go(self) -> None:
        self._buffer = bytearray()
        HELD.give_back(self._nheld)
        self._nheld = 0

    def cancel(self) -> None:
        self._is_cancelled.set()

    def abort(self) -> None:
        self.cancel()
        self._let_go()
        for future in self._sending:
            future.cancel()
        beginning, self._beginning = self._beginning, None
        with contextlib.suppress(Exception):
            if beginning is not None and not beginning.cancel():
                beginning.result(timeout=_ABORTING)
                for future in self._sending:  # those that are on their way, as far as it is quick
                    if not future.cancelled():
                        future.exception(timeout=1)
        self._sending.clear()
        if beginning is not None and not beginning.cancelled():
            with contextlib.suppress(Exception):
                fetched(lambda: patiently(self._drop, _ABORTING)).result(timeout=2 * _ABORTING)


class HidingStore(Store):
    """A store that does not let a large object appear on a condition: it is written to one file
    under a hidden key, and moved to its own when it is whole.
    """

    can_write = True
    puts_small = False
    """Whether a small one is put as a whole."""

    def begin(self, key: str, size: int) -> Upload:
        return HiddenUpload(self, key, size)

    @abstractmethod
    def asking(self) -> AbstractContextManager[object]:
        """Within the block, what goes wrong is a `StoreError`."""

    @abstractmethod
    def opened(self, key: str, mark: str, part: int) -> Any:
        """A file to write, which is sent in parts of `part` bytes."""

    @abstractmethod
    def drop(self, key: str, writer: Any) -> None:
        """Leave nothing of what was begun under a hidden key, with the `writer` if there is one."""

    def put(self, key: str, data: bytearray, *, mark: str, create: bool) -> None:
        """A whole object at once; `mark` goes with it."""
        raise NotImplementedError

    def abort(self, left: Unfinished) -> None:
        self.drop(left.key, None)


class HiddenUpload(PartsUpload):
    """What a `HidingStore` makes of an object; the parts are written in order."""

    def __init__(self, store: HidingStore, key: str, size: int) -> None:
        super().__init__(0)  # the file cuts what it is given into parts, however large they are
        self._store, self._key, self._part_sent = store, key, part_size(size)
        self._hidden = key if key_of_hidden(key) else hidden_key(key)
        self._in_flight, self._is_held = 1, store.puts_small
        self._dropping = threading.Lock()
        if not store.puts_small:  # what is being written when it is stopped is waited for
            self._part = CHUNK
        self._writer: Any = None

    def _begin(self) -> None:
        with self._store.asking():
            self._writer = self._store.opened(self._hidden, self._mark, self._part_sent)

    def _send(self, number: int, data: bytearray) -> None:
        with self._once():
            self._writer.write(bytes(data))  # libraries of fsspec take no other

    def _close(self) -> None:
        count(requests=1)
        with self._once():
            self._writer.close()
        self._writer = None

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """What is half written cannot be tried again."""
        try:
            with self._store.asking():
                yield
        except StoreError as error:
            error.tries = 1
            raise

    def _complete(self, parts: list[Any], *, create: bool) -> None:
        if self._hidden == self._key:
            return
        self._store.move(self._hidden, self._key, create=create)
        if self._store.keeps_moved:
            try:
                patiently(partial(self._store.remove, self._hidden), self._seconds)
            except StoreError:
                self.is_left = True

    def _put(self, data: bytearray, *, create: bool) -> None:
        self._store.put(self._key, data, mark=self._mark, create=create)

    def _drop(self) -> None:
        with self._dropping:  # who comes second waits for what the first one closes
            writer, self._writer = self._writer, None
            self._store.drop(self._hidden, writer)
