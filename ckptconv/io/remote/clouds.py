"""Google Cloud Storage and Azure, read and written by obstore.

Neither lets obstore complete a large upload on a condition. What is large is therefore made under a
hidden key beside its own, and copied by the store, on the condition, when it is finished.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

from ckptconv.io.remote.fetchers import fetched
from ckptconv.io.remote.objects import ObjectStoreOf, parts_of, store_error
from ckptconv.io.remote.patience import patiently
from ckptconv.io.remote.store import Store, StoreError, Unfinished, Upload
from ckptconv.io.remote.traffic import count
from ckptconv.io.remote.uploads import PART, Cancelled, hidden_key, key_of_hidden
from ckptconv.support.limits import in_force

T = TypeVar("T")

_IN_FLIGHT = 4
_SECONDS = 60.0  # of patience with what comes after a copy
_MOST_PARTS = 9_000  # of Google's 10,000 and of Azure's 50,000

_SERVICES = {
    "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip


def cloud_store(address: str) -> tuple[Store, str]:
    """The bucket or container of an address, and the key in it."""
    scheme, bucket, key = parts_of(address)
    return CloudStore(_SERVICES[scheme], scheme, bucket), key


class CloudStore(ObjectStoreOf):
    """The objects of one bucket of Google Cloud Storage, or of one container of Azure."""

    can_write = True

    @cached_property
    def _writer(self) -> Any:
        """The store for uploads of many requests, each of which is tried again by itself."""
        patience = {
            "max_retries": 20,
            "retry_timeout": timedelta(seconds=in_force().remote_seconds),
        }
        return self._opened(retry_config=patience)

    def begin(self, key: str, size: int) -> Upload:
        return _CloudUpload(self, key, size)

    def send(self, key: str, parts: Iterator[bytes], part: int) -> None:
        """An object of several parts, each of `part` bytes but the last."""
        self._asked(
            self._obstore.put, self._writer, key, parts,
            use_multipart=True, chunk_size=part, max_concurrency=_IN_FLIGHT,
        )  # fmt: skip

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """A whole object at once; with `create` only where there is none."""
        mode = "create" if create else "overwrite"
        self._asked(self._obstore.put, self._store, key, data, mode=mode, use_multipart=False)

    def move(self, old: str, new: str, *, create: bool) -> None:
        size = self._size(old)
        self._asked(self._obstore.copy, self._store, old, new, overwrite=not create)
        try:
            self._await_copy(new, size)
        except StoreError as error:  # who moves it again would find the copy in the way
            raise StoreError("final", error.what, hint=error.hint) from None
        with contextlib.suppress(StoreError):  # it is found by its name, as what others left
            patiently(partial(self.remove, old), _SECONDS)

    def _size(self, key: str) -> int:
        return int(self._asked(self._obstore.head, self._store, key)["size"])

    def _await_copy(self, key: str, size: int) -> None:
        """Azure may copy after its answer; until then the copy is an object without bytes."""
        begin = time.monotonic()
        while patiently(partial(self._size, key), _SECONDS) != size:
            if time.monotonic() - begin > max(_SECONDS, in_force().remote_seconds):
                raise StoreError("final", "the copy of it by the store does not come to an end")
            time.sleep(0.5)

    def remove(self, key: str) -> None:
        try:
            self._asked(self._obstore.delete, self._store, key)
        except StoreError as error:
            if error.kind != "missing":
                raise

    def drop(self, key: str) -> None:
        """Leave nothing of an upload that was not completed.

        obstore aborts it on Google's side. Azure forgets blocks only with the blob that they were
        sent for.
        """
        if self.service == "az":
            self.put(key, b"", create=False)
        self.remove(key)

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        folder = prefix.rpartition("/")[0]
        pages = self._asked(lambda: list(self._obstore.list(self._store, folder or None)))
        return [
            Unfinished(meta["path"], "", meta["last_modified"].isoformat(), meta["size"])
            for page in pages
            for meta in page
            if meta["path"].startswith(prefix) and key_of_hidden(meta["path"]) is not None
        ]

    def abort(self, left: Unfinished) -> None:
        self.remove(left.key)

    def _asked(self, operation: Callable[..., T], *given: Any, **options: Any) -> T:
        try:
            return operation(*given, **options)
        except Exception as error:
            raise store_error(error, self.service) from None


class _Stopped(Exception):
    """What ends an upload that is not wanted any more."""


class _CloudUpload(Upload):
    """Small objects are sent at the end; large ones by a thread of their own, as they come."""

    def __init__(self, store: CloudStore, key: str, size: int) -> None:
        self._store, self._key = store, key
        # an object that is moved later needs no hidden key besides
        self._made = key if key_of_hidden(key) is not None else hidden_key(key)
        self._part = max(PART, -(-size // _MOST_PARTS >> 20) + 1 << 20 if size > PART else PART)
        self._seconds = in_force().remote_seconds
        self._buffer = bytearray()
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=2)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_cancelled = threading.Event()
        self._is_sent = False

    def write(self, view: memoryview) -> None:
        while view:
            room = self._part - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == self._part and view:
                self._hand_over()

    def _hand_over(self) -> None:
        if self._thread is None:
            # a daemon: who stops the program does not wait for a server
            self._thread = threading.Thread(target=self._run, name="ckptconv-upload", daemon=True)
            self._thread.start()
        data, self._buffer = bytes(self._buffer), bytearray()
        self._give(data)

    def _give(self, data: bytes | None) -> None:
        """Hand a part to the thread, unless the upload failed or is cancelled meanwhile."""
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                return self._queue.put(data, timeout=0.2)

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise Cancelled
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._store.send(self._made, self._parts(), self._part)
        except BaseException as error:  # it is raised by `write` and `end`
            self._error = error

    def _parts(self) -> Iterator[bytes]:
        """The parts as they come; obstore asks for them, and must not be called from here."""
        while True:
            try:
                data = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self._is_cancelled.is_set():
                    raise _Stopped from None
                continue
            if self._is_cancelled.is_set():
                raise _Stopped
            if data is None:
                return
            count(requests=1, bytes_written=len(data))
            yield data

    def end(self) -> None:
        if self._thread is None or self._is_sent:
            return
        if self._buffer:
            self._hand_over()
        self._give(None)
        while self._thread.is_alive():
            self._thread.join(0.2)
            self._check()
        self._check()
        self._is_sent = True

    def finish(self, *, create: bool) -> None:
        if self._thread is None:
            data = bytes(self._buffer)
            self._asked(partial(self._store.put, self._key, data, create=create))
            count(bytes_written=len(data))
        elif self._made != self._key:
            self._asked(partial(self._store.move, self._made, self._key, create=create))
        self._thread, self._buffer, self._is_sent = None, bytearray(), False

    def _asked(self, request: Callable[[], T]) -> T:
        future = fetched(partial(patiently, request, self._seconds))
        while not future.done():
            if self._is_cancelled.is_set():
                raise Cancelled
            with contextlib.suppress(FutureTimeout):
                future.exception(timeout=0.2)
        return future.result()

    def cancel(self) -> None:
        self._is_cancelled.set()

    def abort(self) -> None:
        self.cancel()
        self._buffer = bytearray()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(30)  # what arrives later would be kept by the store
        with contextlib.suppress(Exception):
            fetched(partial(self._store.drop, self._made)).result(timeout=30)
