"""Places in stores: what the user names by an address; and one store as a command uses it, which
tries requests again.

What was seen of an object or a folder is kept for as long as the place that the user named is in
use, so that asking for it several times costs one request. Nothing is kept from one command, or one
call of the library, to the next.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import partial
from pathlib import PurePath
from typing import TypeVar

from ckptconv.io.files import FilePool
from ckptconv.io.location import Kind, Location, Needs
from ckptconv.io.remote.patience import fetched, patiently
from ckptconv.io.remote.source import HEAD, RemoteSource
from ckptconv.io.remote.store import (
    NOTHING,
    FolderListing,
    ObjectBytes,
    Seen,
    Store,
    StoreError,
    split,
)
from ckptconv.io.remote.traffic import count
from ckptconv.io.source import Fingerprint, Source
from ckptconv.support.addresses import UrlPath, shown
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    MissingFile,
    RemoteFailure,
    UnreadableFile,
    UnsupportedCheckpoint,
    not_opened,
)
from ckptconv.support.limits import in_force
from ckptconv.support.records import dataclass

T = TypeVar("T")

_MOST_HEADS = 256  # objects whose first bytes are kept: 32 MB


@dataclass(frozen=True, slots=True)
class _Head:
    """An object as it was seen first, and bytes of it by where they begin: the first ones, and
    others that opening it needs.
    """

    seen: Seen
    windows: Sequence[tuple[int, bytes]]


class Site:
    """A store, and what was seen in it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._seconds, self._unpinned = in_force().remote_seconds, in_force().unpinned
        self._lock = threading.Lock()
        self._heads: OrderedDict[str, _Head | None] = OrderedDict()
        self._listings: dict[str, FolderListing] = {}

    def anew(self) -> Site:
        """The same store, of which nothing is known yet."""
        return Site(self.store)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and other.store.identity == self.store.identity

    def __hash__(self) -> int:
        return hash(self.store.identity)

    # ------------------------------------------------------------------------- what is there

    def head(self, key: str, needs: Needs | None = None) -> _Head | None:
        """The first bytes of an object, and what opening it `needs`; None where there is none."""
        with self._lock:
            if key in self._heads:
                return self._heads[key]
        found = self._first(key, needs)
        with self._lock:
            self._heads[key] = found
            while len(self._heads) > _MOST_HEADS:
                self._heads.popitem(last=False)
        return found

    def _first(self, key: str, needs: Needs | None) -> _Head | None:
        if not key or key.endswith("/") or self.known(key) in ("nothing", "folder"):
            return None
        try:
            part = self._asked(key, lambda: self._received(key, 0, HEAD, None))
        except MissingFile:
            return None
        windows = [(0, bytes(part.data))]
        if needs is not None:
            for first, nbytes in needs(windows[0][1], part.seen.size):
                windows.append((first, bytes(self.get(key, first, nbytes, part.seen).data)))
        return _Head(part.seen, windows)

    def known(self, key: str) -> Kind | None:
        """What is there, as far as a listing of the folder around it tells."""
        folder, name = split(key)
        around = self._heads.get(folder.removesuffix("/"))
        if around is not None and around.seen.size:
            return "nothing"  # what lies around it is a file
        listing = self._listings.get(folder)
        if listing is None or not name or key in self._heads:
            return None
        is_file = name in listing.files and not key.endswith("/")
        if name in listing.folders:
            return None if is_file else "folder"
        return "file" if is_file else "nothing"

    def listing(self, folder: str) -> FolderListing:
        """What lies in a folder (empty, or ending in a slash); nothing where there is none."""
        if not self.store.can_list:
            return NOTHING  # which says of no file that it is not there
        with self._lock:
            if folder in self._listings:
                return self._listings[folder]
            parent, name = split(folder)
            around = self._listings.get(parent)
        found = NOTHING
        if around is None or not name or name in around.folders:
            found = self._asked(folder, lambda: self.store.list(folder))
        with self._lock:
            self._listings[folder] = found
        return found

    def foresee(self, keys: Iterable[str], needs: Needs | None = None) -> None:
        """The objects are going to be opened one after the other: ask for all of them now. Errors
        are raised when they are opened.
        """
        wanted = [key for key in keys if key not in self._heads]
        asked = [fetched(partial(self.head, key, needs)) for key in wanted[:_MOST_HEADS]]
        for future in asked:
            with contextlib.suppress(CheckpointError):
                future.result()

    # ------------------------------------------------------------------------------- reading

    def open(self, key: str) -> RemoteSource:
        """An object, to be read."""
        path = UrlPath(self.store.locate(key))
        found = fetched(lambda: self.head(key)).result()
        if found is None:
            raise not_opened(errno.ENOENT, path)
        get = partial(self.get, key, pinned=found.seen)
        return RemoteSource(get, path, found.seen, found.windows)

    def get(self, key: str, first: int, nbytes: int, pinned: Seen) -> ObjectBytes:
        """A range of an object, of one version; any thread may ask."""
        if not pinned.tag and not self._unpinned:
            raise UnsupportedCheckpoint(
                "the server sends neither an ETag nor a date for it, so two answers may be of two "
                "versions",
                path=UrlPath(self.store.locate(key)),
                hint="download it first; --unpinned takes the risk",
            )
        return self._asked(key, lambda: self._received(key, first, nbytes, pinned))

    def _received(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        part = self.store.get(key, first, nbytes, pinned)
        count(bytes_read=len(part.data))
        return part

    def _asked(self, key: str, request: Callable[[], T]) -> T:
        path = UrlPath(self.store.locate(key))
        try:
            return patiently(request, self._seconds)
        except StoreError as error:
            failed = told(error, path)
        except CheckpointError as error:  # of the settings by which it is asked
            failed = error.at(path=path)
        raise failed  # here, so that no answer of a server is its context


def told(error: StoreError, path: PurePath) -> CheckpointError:
    """The error that a user is told, for that of a store."""
    if error.kind == "missing":
        return not_opened(errno.ENOENT, path, error.what, error.hint)
    if error.kind == "denied":
        return UnreadableFile(error.what, path=path, hint=error.hint)
    if error.kind == "changed":
        return MalformedCheckpoint("was changed while it was read", path=path, hint="start again")
    return RemoteFailure(error.what, path=path, hint=error.hint, passing=error.kind == "passing")


# ------------------------------------------------------------------------------------------- places


@dataclass(frozen=True, slots=True)
class RemotePlace(Location):
    """What has the key `key` in a store: an object, or the folder of what begins with it."""

    site: Site = field(repr=False)
    key: str

    def __reduce__(self) -> tuple[Callable[[str], RemotePlace], tuple[str]]:
        return remote_place, (self.site.store.address(self.key),)

    def __fspath__(self) -> str:
        """Its whole address, with what is secret in it."""
        return self.site.store.address(self.key)

    @property
    def path(self) -> PurePath:
        return UrlPath(self.site.store.locate(self.key))

    @property
    def name(self) -> str:
        return self.site.store.spoken(split(self.key)[1]) or self.path.name

    @property
    def says_folder(self) -> bool:
        return not self.key or self.key.endswith("/")

    @property
    def parent(self) -> RemotePlace:
        folder = split(self.key)[0]
        # a slash that ends the folder's own name stays: ``a//b`` lies in ``a/``, which is not ``a``
        is_plain = not folder.endswith("//") and folder != "/"
        return RemotePlace(self.site, folder.removesuffix("/") if is_plain else folder)

    @property
    def absolute(self) -> RemotePlace:
        return self

    def child(self, name: str) -> RemotePlace:
        added = self.site.store.written(name)
        return RemotePlace(self.site, f"{self._folder}{added}")

    @property
    def _folder(self) -> str:
        """The key of a folder: nothing, or one that ends in a slash."""
        return self.key if self.says_folder else f"{self.key}/"

    def kind(self) -> Kind:
        known = self.site.known(self.key)
        if known is not None:
            return known
        if not self.site.store.can_list and self._folder == self.key:
            what = "is a folder, and its server cannot list it"
            raise UnsupportedCheckpoint(what, path=self.path, hint="name a file, or an index")
        found = None if self.key.endswith("/") else self.site.head(self.key)
        if found is not None and found.seen.size:
            return "file"
        # which an empty object may stand for; a bucket is listed too, to name it where it fails
        if self.site.listing(self._folder) or not self.key:
            return "folder"
        return "nothing" if found is None else "file"

    def names(self) -> Sequence[str]:
        found = self.site.listing(self._folder)
        if not found and self.key:
            raise NotADirectoryError(errno.ENOTDIR, "no folder", str(self.path))
        return sorted({*found.files, *found.folders})

    def open(self, pool: FilePool | None = None) -> Source:
        if self.site.head(self.key) is None:
            if self.kind() == "folder":
                raise not_opened(errno.EISDIR, self.path)
            raise not_opened(errno.ENOENT, self.path)
        return self.site.open(self.key)

    def fingerprint(self) -> Fingerprint | None:
        found = self.site.head(self.key)
        if found is None:
            return None
        return (str(self.path), found.seen.size, found.seen.tag)

    def is_far(self) -> bool:
        return True

    def foresee(self, places: Iterable[Location], needs: Needs | None = None) -> None:
        keys = [place.key for place in places if isinstance(place, RemotePlace)]
        self.site.foresee(keys, needs)


def remote_place(address: str) -> RemotePlace:
    """The place that an address names."""
    try:
        store, key = store_of(address)
    except CheckpointError as error:
        named = shown(address)
        if f"{named}/".startswith(error.path or ""):  # of a bucket, which nobody named
            error.path = named
        raise
    return RemotePlace(Site(store), key)


def store_of(address: str) -> tuple[Store, str]:
    """The store of an address, and the key in it; `UnsupportedCheckpoint` where it has none."""
    scheme = address.partition("://")[0].lower()
    if scheme in ("s3", "s3a"):
        from ckptconv.io.remote.s3 import s3_store

        return s3_store(_nameable(address))
    if scheme in ("gs", "gcs", "az", "azure", "abfs", "abfss"):
        from ckptconv.io.remote.objects import object_store

        return object_store(_nameable(address))
    if scheme in ("http", "https", "hf"):
        from ckptconv.io.remote.hub import hub_address, hub_store
        from ckptconv.io.remote.web import web_store

        named = address if scheme == "hf" else hub_address(address)
        return web_store(address) if named is None else hub_store(named)
    from ckptconv.io.remote.filesystems import filesystem_store

    return filesystem_store(address)


def _nameable(address: str) -> str:
    """The address; `UnsupportedCheckpoint` for a key that is legal and that obstore cannot name, as
    ``object_store::path::Path`` says: an empty part would be lost, and another object meant.
    """
    _, _, key = address.partition("://")[2].partition("/")
    if "//" in f"/{key}":
        odd = "an empty part (//)"
    elif _CONTROL(key):
        odd = "a control character"
    elif {".", ".."} & {*key.split("/")}:
        odd = "a part that is . or .."
    else:
        return address
    what = f"has {odd} in its key, which the client of this service cannot ask for"
    hint = "open it by a signed https address (aws s3 presign, gcloud storage sign-url)"
    raise UnsupportedCheckpoint(what, path=address, hint=hint)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]").search
