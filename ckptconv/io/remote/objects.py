"""S3, Google Cloud Storage and Azure, read by obstore."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptconv.io.remote.credentials import options_of
from ckptconv.io.remote.missing import needed
from ckptconv.io.remote.store import TRIES, Listing, Part, Seen, Store, StoreError
from ckptconv.support.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SERVICES = {
    "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
_NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}


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


class ObjectStoreOf(Store):
    """The objects of one bucket of S3 or GCS, or of one container of Azure."""

    def __init__(self, service: str, scheme: str, bucket: str) -> None:
        self.root = f"{scheme}://{bucket}/"
        self.service, self.bucket = service, bucket
        self._obstore = needed("obstore", self.root)
        self._store: ObjectStore = _opened(self._obstore, service, bucket)

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> Part:
        options: dict[str, Any] = {"range": (first, first + nbytes)}
        if pinned is not None and pinned.is_pinned:
            options["if_match"] = pinned.tag
        try:
            got = self._obstore.get(self._store, key, options=options)
            seen = _seen(got.meta)
            return Part(memoryview(got.bytes()), seen)
        except Exception as error:
            if first == 0 and (found := self._empty(key)) is not None:
                return found
            raise store_error(error, self.service) from None

    def _empty(self, key: str) -> Part | None:
        """An object without bytes, of which no range can be asked for."""
        try:
            seen = _seen(self._obstore.head(self._store, key))
        except Exception:
            return None
        return Part(b"", seen) if seen.size == 0 else None

    def list(self, prefix: str) -> Listing:
        try:
            found = self._obstore.list_with_delimiter(self._store, prefix or None)
        except Exception as error:
            raise store_error(error, self.service) from None
        begin = len(prefix)
        files = {
            meta["path"][begin:]: _seen(meta) for meta in found["objects"] if meta["path"] != prefix
        }
        folders = frozenset(path[begin:].strip("/") for path in found["common_prefixes"])
        return Listing(files, folders)


def _opened(obstore: Any, service: str, bucket: str) -> Any:
    kinds = {
        "s3": obstore.store.S3Store,
        "gs": obstore.store.GCSStore,
        "az": obstore.store.AzureStore,
    }
    return kinds[service](bucket, **options_of(service))


def _seen(meta: Any) -> Seen:
    tag = meta.get("e_tag") or ""
    is_pinned = bool(tag) and not tag.startswith("W/")
    return Seen(meta["size"], tag or str(meta.get("last_modified", "")), is_pinned)


_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})|(\d{3}) [A-Z][a-z]+").search


def store_error(error: BaseException, service: str) -> StoreError:
    """What an error of obstore means, in words without an address (which may hold a signature)."""
    name, text = type(error).__name__, str(error)
    who = _NAMES[service]
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        what = "there is no such bucket" if "NoSuchBucket" in text else "no such file"
        return StoreError("missing", what, hint="check the address")
    if name == "PreconditionError":
        return StoreError("changed", "was changed while it was read")
    if name == "AlreadyExistsError":
        return StoreError("exists", "exists")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreError(
            "denied", f"{who} does not allow it", hint="see: ckptconv help remote (credentials)"
        )
    found = _STATUS(text)
    status = int(next(filter(None, found.groups()))) if found else 0
    if status and status not in (408, 409, 425, 429) and status < 500:
        return StoreError("final", f"{who} answers with status {status}")
    if status:
        return StoreError("passing", f"{who} fails (status {status})")
    is_unreached = any(words in text for words in _UNREACHED)
    hint = "check the address and the network" if is_unreached else None
    return StoreError(
        "passing", f"{who} does not answer", hint=hint, tries=TRIES if is_unreached else None
    )


_UNREACHED = ("dns error", "tcp connect error", "Connection refused", "ConnectError")
