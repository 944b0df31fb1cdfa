"""A folder of this host as a store of objects: what a command asks of a store, counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ckptconv.io.remote.place import RemotePlace, Site
from ckptconv.io.remote.store import FolderListing, ObjectBytes, Seen, Store, StoreError


class FolderStore(Store):
    """The files of a folder. `asked` are the requests: what, of which key, from where, how much."""

    def __init__(self, folder: Path, *, seconds: float = 0.0) -> None:
        self.root = f"test://{folder.name}/"
        self.asked: list[tuple[str, str, int, int]] = []
        self.in_flight = self.most_in_flight = 0
        self._folder, self._seconds = folder, seconds
        self._lock = threading.Lock()

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        with self._lock:
            self.asked.append(("get", key, first, nbytes))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            time.sleep(self._seconds)
            return self._got(key, first, nbytes, pinned)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _got(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        path = self._folder / key
        try:
            seen = self._seen(path)
            with path.open("rb") as file:
                file.seek(first)
                data = file.read(nbytes)
        except OSError:
            raise StoreError("missing", "no such file") from None
        if pinned is not None and pinned != seen:
            raise StoreError("changed", "was changed while it was read")
        return ObjectBytes(data, seen)

    def list(self, prefix: str) -> FolderListing:
        with self._lock:
            self.asked.append(("list", prefix, 0, 0))
        time.sleep(self._seconds)
        folder = self._folder / prefix
        if not folder.is_dir():
            return FolderListing({}, frozenset())
        inside = list(folder.iterdir())
        files = {item.name: self._seen(item) for item in inside if item.is_file()}
        return FolderListing(files, frozenset(item.name for item in inside if item.is_dir()))

    def _seen(self, path: Path) -> Seen:
        found = path.stat()
        return Seen(found.st_size, f'"{found.st_ino}-{found.st_mtime_ns}"', is_pinned=True)

    @property
    def nbytes(self) -> int:
        """The bytes that were asked for, at most."""
        return sum(nbytes for _, _, _, nbytes in self.asked)


def place_in(folder: Path, key: str, **options: float) -> tuple[RemotePlace, FolderStore]:
    """What is called `key` in a folder, as a place in a store, and that store."""
    store = FolderStore(folder, **options)
    return RemotePlace(Site(store), key), store
