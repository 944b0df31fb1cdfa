"""A store of objects in memory, whose requests are numbered and can be made to fail."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ckptconv.io.remote.place import RemotePlace, Site
from ckptconv.io.remote.store import (
    FolderListing,
    ObjectBytes,
    Seen,
    Store,
    StoreError,
    Unfinished,
    Upload,
)
from ckptconv.io.remote.uploads import PartsUpload, key_of_hidden


class MemoryStore(Store):
    """`objects` by their keys, and the `uploads` that are not finished: their parts by number.

    Before each request `before` is called with its name and its number, and may raise; `after` is
    called when it was done, and may lose the answer.
    """

    can_write = True

    def __init__(self, name: str = "memory") -> None:
        self.root = f"test://{name}/"
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.keys: dict[str, str] = {}
        self.marks: dict[str, str] = {}
        self.asked: list[str] = []
        self.before: Callable[[str, int], None] = lambda name, number: None
        self.after: Callable[[str, int], None] = lambda name, number: None
        self._lock = threading.Lock()

    def request(self, name: str, done: Callable[[], Any]) -> Any:
        """One request: counted, perhaps failing."""
        with self._lock:
            self.asked.append(name)
            number = len(self.asked) - 1
        self.before(name, number)
        with self._lock:
            answer = done()
        self.after(name, number)
        return answer

    def seen(self, key: str) -> Seen:
        content = self.objects[key]
        return Seen(len(content), hashlib.sha256(content).hexdigest(), is_pinned=True)

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        return self.request("get", partial(self._got, key, first, nbytes, pinned))

    def _got(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        if key not in self.objects:
            raise StoreError("missing", "no such file")
        if pinned is not None and pinned != self.seen(key):
            raise StoreError("changed", "was changed while it was read")
        return ObjectBytes(self.objects[key][first : first + nbytes], self.seen(key))

    def list(self, prefix: str) -> FolderListing:
        return self.request("list", partial(self._listed, prefix))

    def _listed(self, prefix: str) -> FolderListing:
        inside = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        files = {name: self.seen(prefix + name) for name in inside if name and "/" not in name}
        return FolderListing(
            files, frozenset(name.partition("/")[0] for name in inside if "/" in name)
        )

    def begin(self, key: str, size: int) -> Upload:
        return _MemoryUpload(self, key, size)

    def put(self, key: str, content: bytes, *, create: bool) -> None:
        """Put an object as a whole."""
        if create and key in self.objects:
            raise StoreError("exists", "exists")
        self.objects[key] = content

    def move(self, old: str, new: str, *, create: bool) -> None:
        def move() -> None:
            self.put(new, self.objects[old], create=create)
            del self.objects[old]

        self.request("move", move)

    def remove(self, key: str) -> None:
        self.request("remove", lambda: self.objects.pop(key, None))

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        found = [Unfinished(self.keys[id], id) for id in self.uploads]
        found += [Unfinished(key, "") for key in self.objects if key_of_hidden(key)]
        return [item for item in found if item.key.startswith(prefix)]

    def abort(self, left: Unfinished) -> None:
        self.uploads.pop(left.id, None)
        if not left.id:
            self.objects.pop(left.key, None)


class _MemoryUpload(PartsUpload):
    def __init__(self, store: MemoryStore, key: str, size: int) -> None:
        super().__init__(size)
        self._store, self._key = store, key
        self._id = ""

    def _begin(self) -> None:
        def begin() -> None:
            self._id = f"upload-{len(self._store.asked)}"
            self._store.uploads[self._id], self._store.keys[self._id] = {}, self._key

        self._store.request("begin", begin)

    def _send(self, number: int, data: bytearray) -> int:
        def send() -> None:
            if self._id in self._store.uploads:
                self._store.uploads[self._id][number] = bytes(data)

        self._store.request("part", send)
        return number

    def _complete(self, parts: list[Any], *, create: bool) -> None:
        def complete() -> None:
            sent = self._store.uploads[self._id]
            assert sorted(sent) == sorted(parts)
            self._store.put(self._key, b"".join(sent[part] for part in parts), create=create)
            del self._store.uploads[self._id]

        self._store.request("complete", complete)

    def _put(self, data: bytearray, *, create: bool) -> None:
        content = bytes(data)
        self._store.request("put", lambda: self._store.put(self._key, content, create=create))

    def _drop(self) -> None:
        self._store.request("drop", lambda: self._store.uploads.pop(self._id, None))


def memory_place(store: Store, key: str) -> RemotePlace:
    """What has a key in a store."""
    return RemotePlace(Site(store), key)
