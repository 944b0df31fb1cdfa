"""Places in stores: what the user names by an address."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from pathlib import PurePath

from ckptconv.io.files import FilePool
from ckptconv.io.location import Kind, Location, Needs
from ckptconv.io.remote.site import Site
from ckptconv.io.remote.store import Store, split
from ckptconv.io.source import Fingerprint, Source
from ckptconv.support.addresses import UrlPath, shown
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint, not_opened
from ckptconv.support.records import dataclass


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
        return self.key if not self.key or self.key.endswith("/") else f"{self.key}/"

    def kind(self) -> Kind:
        if (known := self.site.known(self.key)) is not None:
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
            is_folder = self.kind() == "folder"
            raise not_opened(errno.EISDIR if is_folder else errno.ENOENT, self.path)
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
        if (named := shown(address)).startswith(
            error.path or ""
        ):  # of a bucket, which nobody named
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
