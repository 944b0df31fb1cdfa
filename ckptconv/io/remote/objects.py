"""S3, Google Cloud Storage and Azure, read by obstore; the last two are written by it too.

What is larger than a part is written under a hidden key beside its own, and copied there by the
store when it is whole: neither service lets a large object appear on a condition.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ckptconv.io.remote.causes import CREDENTIALS, told_by_obstore
from ckptconv.io.remote.credentials import account_in, options_of
from ckptconv.io.remote.network import needed
from ckptconv.io.remote.store import (
    FolderListing,
    ObjectBytes,
    Seen,
    Store,
    StoreError,
    Unfinished,
    read_on,
    unless_missing,
)
from ckptconv.io.remote.traffic import count
from ckptconv.io.remote.uploads import IN_FLIGHT, Cancelled, HidingStore, is_left
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint, errors_at, printable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MARK = "ckptconv_upload"
"""The attribute that tells an object of one upload from others under its key."""

_SERVICES = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip


def object_store(address: str) -> tuple[Store, str]:
    """The bucket or container of an address, and the key in it."""
    scheme, bucket, key = parts_of(address)
    return ObjectStoreOf(_SERVICES[scheme], scheme, bucket), key


def parts_of(address: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of an address; `UnsupportedCheckpoint` where it names no bucket."""
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UnsupportedCheckpoint(
            "names no bucket", path=address, hint=f"write it as {scheme}://BUCKET/KEY"
        )
    return scheme.lower(), bucket, key


class ObjectStoreOf(HidingStore):
    """The objects of one bucket of S3 or GCS, or of one container of Azure. `bucket` is what stands
    for it in an address: of Azure ``CONTAINER@ACCOUNT.dfs.…`` too.
    """

    keeps_moved = True
    puts_small = True

    def __init__(self, service: str, scheme: str, bucket: str) -> None:
        self.root = f"{scheme}://{bucket}/"
        self.service = service
        # by which option a version is asked for, and how it is called in what is told of an object
        self._pinning, self._version = "if_match", "e_tag"
        if service == "gs":  # which knows it by its generation
            self._pinning = self._version = "version"
        self.bucket: str = bucket
        self._host: str | None = None
        if service == "az":
            with errors_at(path=self.root):
                self.bucket, self._host = account_in(bucket)
        self._obstore = needed("obstore", self.root)
        self._is_signed, self._has_answered = True, False
        self._store: ObjectStore = self._opened(tries=0)

    def _opened(self, tries: int) -> Any:
        """The store of obstore, by which a request is tried again `tries` times."""
        kinds = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
        kind = getattr(self._obstore.store, kinds[self.service])
        try:
            options = options_of(self.service, self.bucket, host=self._host, tries=tries)
            self._is_signed = not options.get("skip_signature")
            return kind(self.bucket, **options)
        except CheckpointError as error:
            raise error.at(path=self.root) from None
        except Exception as error:  # whose text may hold what is secret
            what = f"cannot be opened with these settings ({type(error).__name__})"
        hint = CREDENTIALS
        file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if self.service == "gs" and file:
            what = f"cannot be opened with the credentials in {printable(file)}"
            hint = "check that file, which GOOGLE_APPLICATION_CREDENTIALS names"
        raise UnsupportedCheckpoint(what, path=self.root, hint=hint)

    @cached_property
    def writing(self) -> Any:
        """The store by which large objects are written: what fails in the middle of one can only be
        sent again by obstore itself.
        """
        return self._opened(tries=10)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise self._told(error) from None

    def _told(self, error: BaseException) -> StoreError:
        told = told_by_obstore(error, self.service, is_signed=self._is_signed)
        if told.kind != "passing":
            self._has_answered = True
        if self._has_answered:
            told.tries = None  # who never answered is likely to be misspelled
        return told

    # --------------------------------------------------------------------------------- reading

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        return read_on(partial(self._got, key), first, nbytes, pinned)

    def _got(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        options: dict[str, Any] = {"range": (first, first + nbytes)}
        if pinned is not None and pinned.is_pinned:
            options[self._pinning] = pinned.tag
        try:
            got = self._obstore.get(self._store, key, options=options)
            self._has_answered = True
            return ObjectBytes(_arrived(got), self._seen(got.meta))
        except Exception as error:
            if first == 0 and _may_be_empty(error) and (empty := self._empty(key)):
                return empty
            told = self._told(error)
            if told.kind == "missing" and "version" in options:  # the version is gone
                told = StoreError("changed")
            raise told from None

    def _empty(self, key: str) -> ObjectBytes | None:
        """An object without bytes, of which no range can be asked for. A passing error is raised:
        the next try asks for all of it again.
        """
        try:
            seen = self._seen(self._obstore.head(self._store, key))
        except Exception as error:
            told = self._told(error)
            if told.kind == "passing":
                raise told from None
            return None
        return None if seen.size else ObjectBytes(b"", seen)

    def list(self, prefix: str) -> FolderListing:
        with self.asking():
            found = self._obstore.list_with_delimiter(self._store, prefix or None)
        begin = len(prefix)
        files = {
            meta["path"][begin:]: self._seen(meta)
            for meta in found["objects"]
            if meta["path"] != prefix.rstrip("/")
        }
        folders = frozenset(path[begin:].strip("/") for path in found["common_prefixes"])
        return FolderListing(files, folders)

    def _seen(self, meta: Any) -> Seen:
        tag = meta.get(self._version) or ""
        is_pinned = bool(tag) and not tag.startswith("W/")
        return Seen(meta["size"], tag or str(meta.get("last_modified", "")), is_pinned)

    # --------------------------------------------------------------------------------- writing

    def opened(self, key: str, mark: str, part: int) -> Any:
        if self.service == "az":  # parts of no object are listed nowhere: for `unfinished`
            count(requests=1)
            self.put(key, bytearray(), mark=mark, create=False)
        return self._obstore.open_writer(
            self.writing, key, attributes={MARK: mark}, buffer_size=part, max_concurrency=IN_FLIGHT
        )

    def put(self, key: str, data: bytearray, *, mark: str, create: bool) -> None:
        mode = "create" if create else "overwrite"
        self._asked(key, mark, "put", key, bytes(data), mode=mode, attributes={MARK: mark})

    def move(self, old: str, new: str, *, create: bool) -> None:
        mark = self.mark_of(old)
        if create and self.mark_of(new) not in (None, mark or ""):
            raise StoreError("exists")
        size = self._size(old)
        self._asked(new, mark, "copy", old, new, overwrite=not create)
        self._await_copy(new, size)

    def _size(self, key: str) -> int:
        with self.asking():
            return int(self._obstore.head(self._store, key)["size"])

    def _await_copy(self, key: str, size: int) -> None:
        """Azure may copy after its answer; until then the copy is an object without bytes."""
        begin = time.monotonic()
        while self._size(key) != size:
            if time.monotonic() - begin > COPYING:
                raise StoreError("final", "the copy of it by the store does not come to an end")
            time.sleep(0.5)

    def mark_of(self, key: str) -> str | None:
        """The mark of the object that is there, empty where it has none; None without an object."""
        with unless_missing(), self.asking():
            found = self._obstore.get(self._store, key, options={"head": True})
            return str(found.attributes.get(MARK, ""))
        return None

    def _asked(
        self, key: str, mark: str | None, operation: str, *given: Any, **options: Any
    ) -> None:
        """Have an object made; where the answer was lost, the next try finds it, with its mark."""
        try:
            getattr(self._obstore, operation)(self._store, *given, **options)
        except Exception as error:
            told = self._told(error)
            if told.kind == "changed":
                told = StoreError("exists")
            if told.kind != "exists" or not mark or self.mark_of(key) != mark:
                raise told from None

    def remove(self, key: str) -> None:
        with unless_missing(), self.asking():
            self._obstore.delete(self._store, key)

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        folder = prefix.rpartition("/")[0]
        with self.asking():
            pages = self._obstore.list(self._store, folder or None)
            found = [meta for page in pages for meta in page if is_left(meta["path"], prefix)]
        return [
            Unfinished(meta["path"], "", meta["last_modified"].isoformat(), meta["size"])
            for meta in found
        ]

    def drop(self, key: str, writer: Any) -> None:
        # Azure keeps parts of no object for a week, also one that arrives when the object is gone:
        # so what is on its way is waited for, and made an object that has no other parts
        with contextlib.suppress(Exception):
            if writer is not None and self.service == "az":
                writer.close()
            elif writer is not None:
                writer.__exit__(Cancelled, Cancelled(), None)
        if self.service == "az":
            with contextlib.suppress(Exception):
                self._obstore.put(self._store, key, b"", mode="overwrite")
        self.remove(key)


COPYING = 3600.0  # seconds for which a copy may go on


def _may_be_empty(error: BaseException) -> bool:
    text = str(error).lower()
    return any(words in text for words in ("416", "non-partial", "notpartial", "invalid range"))


def _arrived(got: Any) -> bytes:
    """The bytes of an answer, or those that came before it broke off."""
    pieces: list[Any] = []
    try:
        # as they come, which costs no more: of a larger piece that is not whole nothing is given
        pieces.extend(got.stream(min_chunk_size=1))
    except Exception:
        if not pieces:
            raise
    return b"".join(pieces)
