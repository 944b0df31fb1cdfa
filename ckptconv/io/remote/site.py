"""One store as a command uses it: requests tried again, and what was seen kept for a while.

What was seen of an object or a folder is kept for as long as the place that the user named is in
use, so that asking for it several times costs one request. Nothing is kept from one command, or one
call of the library, to the next.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePath
from typing import TypeVar

from ckptconv.io.remote.fetchers import fetched
from ckptconv.io.remote.patience import patiently
from ckptconv.io.remote.source import HEAD, RemoteSource
from ckptconv.io.remote.store import Listing, Part, Seen, Store, StoreError
from ckptconv.io.remote.traffic import count
from ckptconv.support.addresses import UrlPath
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    RemoteFailure,
    UnreadableFile,
    UnsupportedCheckpoint,
    not_opened,
)
from ckptconv.support.limits import in_force

T = TypeVar("T")

_MOST_HEADS = 512  # objects whose first bytes are kept: 32 MB


class Site:
    """A store, and what was seen in it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._seconds = in_force().remote_seconds
        self._lock = threading.Lock()
        self._heads: OrderedDict[str, Part | None] = OrderedDict()
        self._listings: dict[str, Listing] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and other.store.identity == self.store.identity

    def __hash__(self) -> int:
        return hash(self.store.identity)

    # ------------------------------------------------------------------------- what is there

    def head(self, key: str) -> Part | None:
        """The first bytes of an object; None where there is none."""
        with self._lock:
            if key in self._heads:
                return self._heads[key]
        found = self._first(key)
        with self._lock:
            self._heads[key] = found
            while len(self._heads) > _MOST_HEADS:
                self._heads.popitem(last=False)
        return found

    def _first(self, key: str) -> Part | None:
        if not key or key.endswith("/") or self._is_known_absent(key):
            return None
        try:
            return self._asked(key, lambda: self._received(key, 0, HEAD, None))
        except MissingObject:
            return None

    def _is_known_absent(self, key: str) -> bool:
        """Whether a listing of the folder around it lacks an object."""
        folder, _, name = key.rpartition("/")
        listing = self._listings.get(f"{folder}/" if folder else "")
        return listing is not None and name not in listing.files

    def listing(self, folder: str) -> Listing:
        """What lies in a folder (empty, or ending in a slash); nothing where there is none."""
        with self._lock:
            if folder in self._listings:
                return self._listings[folder]
            parent, _, name = folder.rstrip("/").rpartition("/")
            around = self._listings.get(f"{parent}/" if parent else "")
        is_absent = around is not None and folder != "" and name not in around.folders
        found = Listing({}, frozenset())
        if self.store.can_list and not is_absent:
            found = self._asked(folder, lambda: self.store.list(folder))
        with self._lock:
            self._listings[folder] = found
        return found

    def foresee(self, keys: Iterable[str]) -> None:
        """The objects are going to be opened one after the other: ask for all of them now."""
        wanted = [key for key in keys if key not in self._heads]
        for future in [fetched(partial(self.head, key)) for key in wanted[:_MOST_HEADS]]:
            future.result()

    # ------------------------------------------------------------------------------- reading

    def open(self, key: str) -> RemoteSource:
        """An object, to be read."""
        path = UrlPath(self.store.locate(key))
        part = fetched(lambda: self.head(key)).result()
        if part is None:
            raise not_opened(2, path)
        seen = part.seen

        def get(first: int, nbytes: int) -> Part:
            return self.get(key, first, nbytes, seen)

        return RemoteSource(get, path, seen, bytes(part.data))

    def get(self, key: str, first: int, nbytes: int, pinned: Seen) -> Part:
        """A range of an object, of one version; any thread may ask."""
        return self._asked(key, lambda: self._received(key, first, nbytes, pinned))

    def _received(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> Part:
        part = self.store.get(key, first, nbytes, pinned)
        count(bytes_read=len(part.data))
        return part

    def _asked(self, key: str, request: Callable[[], T]) -> T:
        try:
            return patiently(request, self._seconds)
        except StoreError as error:
            raise told(error, UrlPath(self.store.locate(key))) from None


class MissingObject(UnsupportedCheckpoint):
    """There is no such object."""


def told(error: StoreError, path: PurePath) -> CheckpointError:
    """The error that a user is told, for that of a store."""
    if error.kind == "missing":
        return MissingObject(error.what, path=path, hint=error.hint)
    if error.kind == "denied":
        return UnreadableFile(error.what, path=path, hint=error.hint)
    if error.kind == "changed":
        return MalformedCheckpoint("was changed while it was read", path=path, hint="start again")
    return RemoteFailure(error.what, path=path, hint=error.hint, passing=error.kind == "passing")
