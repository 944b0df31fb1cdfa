"""Objects that obstore writes: those of Google Cloud Storage and Azure."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from ckptconv.io.remote.causes import told_by_obstore
from ckptconv.io.remote.fetchers import fetched
from ckptconv.io.remote.patience import patiently
from ckptconv.io.remote.store import StoreError, Upload
from ckptconv.io.remote.traffic import count
from ckptconv.io.remote.uploads import (
    PART,
    hidden_key,
    key_of_hidden,
    part_size,
    waited,
)
from ckptconv.support.limits import in_force

T = TypeVar("T")

MARK = "ckptconv_upload"
"""The attribute that tells an object of one upload from others under its key."""


class Bucket(Protocol):
    """What such an object is written to."""

    service: str

    def opened(self, key: str, mark: str, part: int) -> Any:
        """A file of obstore under a key, sent in parts of `part` bytes."""

    def put(self, key: str, data: bytearray, *, mark: str, create: bool) -> None:
        """A whole object at once; `mark` goes with it."""

    def move(self, old: str, new: str, *, create: bool) -> None:
        """Give an object another key; the old one stays."""

    def remove(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""

    def drop(self, key: str, writer: Any) -> None:
        """Leave nothing of what was begun under a hidden key, with the `writer` if there is one."""


class WrittenObject(Upload):
    """An object that is held until it is finished; a larger one is written under a hidden key."""

    def __init__(self, store: Bucket, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self._seconds = in_force().remote_seconds
        self._mark = secrets.token_hex(8)
        self._held = bytearray()
        self._writer: Any = None
        self._last: Future[None] | None = None
        self._hidden: str | None = None
        self._is_cancelled = threading.Event()

    def write(self, view: memoryview) -> None:
        if self._hidden is None and len(self._held) + len(view) <= PART:
            self._held += view
            return
        if self._hidden is None:
            self._hidden = self._key if key_of_hidden(self._key) else hidden_key(self._key)
            self._asked(self._begin)
            self._written(self._held)
            self._held = bytearray()
        self._written(view)

    def _begin(self) -> None:
        assert self._hidden is not None
        with _told(self._store.service):
            self._writer = self._store.opened(self._hidden, self._mark, part_size(self._size))

    def _written(self, view: memoryview | bytearray) -> None:
        data, writer = bytes(view), self._writer

        def write() -> None:
            with _told(self._store.service):
                writer.write(data)

        self._last = fetched(write)
        self._waited(self._last)
        count(bytes_written=len(data))

    def _waited(self, future: Future[T]) -> T:
        return waited(future, self._is_cancelled)

    def end(self) -> None:
        if self._hidden is not None and self._writer is not None:
            writer = self._writer

            def close() -> None:
                with _told(self._store.service):
                    writer.close()

            count(requests=2 + self._size // part_size(self._size))
            self._waited(fetched(close))
            self._writer = None

    def finish(self, *, create: bool) -> None:
        if self._hidden is None:
            put = partial(self._store.put, self._key, self._held, mark=self._mark, create=create)
            self._asked(put)
            count(bytes_written=len(self._held))
        elif self._hidden != self._key:
            self._asked(partial(self._store.move, self._hidden, self._key, create=create))
            try:
                self._asked(partial(self._store.remove, self._hidden))
            except StoreError:
                self.is_left = True
        self._hidden, self._held = None, bytearray()

    def _asked(self, request: Callable[[], T]) -> T:
        return self._waited(fetched(partial(patiently, request, self._seconds)))

    def cancel(self) -> None:
        self._is_cancelled.set()

    def abort(self) -> None:
        self.cancel()
        self._held = bytearray()
        hidden, self._hidden = self._hidden, None
        writer, self._writer = self._writer, None
        if hidden is None:
            return

        last, self._last = self._last, None

        def drop() -> None:
            if last is not None:  # it may still be at work
                with contextlib.suppress(Exception):
                    last.result(timeout=ABORTING)
            patiently(partial(self._store.drop, hidden, writer), ABORTING)

        with contextlib.suppress(Exception):
            fetched(drop).result(timeout=2 * ABORTING)


ABORTING = 5.0  # seconds for which leaving nothing is tried


@contextlib.contextmanager
def _told(service: str) -> Any:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise told_by_obstore(error, service) from None
