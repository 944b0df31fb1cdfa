"""S3, Google Cloud Storage and Azure, read by obstore."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptconv.io.remote.credentials import HELP, options_of
from ckptconv.io.remote.missing import needed
from ckptconv.io.remote.store import TRIES, Listing, Part, Seen, Store, StoreError
from ckptconv.support.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}
_BUCKETS = {"s3": "bucket", "gs": "bucket", "az": "container"}


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
        self.service = service
        self.bucket, host = _named(self.root, bucket) if service == "az" else (bucket, None)
        self._obstore = needed("obstore", self.root)
        self._options = options_of(service, host)
        self._store: ObjectStore = self._opened()

    def _opened(self, **others: Any) -> Any:
        """The store of obstore, with `others` among its options."""
        kinds = self._obstore.store
        kind = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[self.service]
        try:
            return kind(self.bucket, **{**self._options, **others})
        except Exception as error:  # its text may hold what it was given
            raise _unopened(error, self.service, self.root) from None

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> Part:
        options: dict[str, Any] = {"range": (first, first + nbytes)}
        if pinned is not None and pinned.is_pinned:
            options["if_match"] = pinned.tag
        try:
            got = self._obstore.get(self._store, key, options=options)
            seen = _seen(got.meta)
            return Part(memoryview(got.bytes()), seen)
        except Exception as error:
            if _is_beyond(error) and (found := self._ended(key, first)) is not None:
                return found
            raise store_error(error, self.service) from None

    def _ended(self, key: str, first: int) -> Part | None:
        """No bytes, of an object that ends before `first`: of an empty one no range can be asked
        for.
        """
        try:
            seen = _seen(self._obstore.head(self._store, key))
        except Exception:
            return None
        return Part(b"", seen) if seen.size <= first else None

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


_ACCOUNTS = re.compile(
    r"([a-z0-9]{3,24})\.(?:dfs|blob)\."
    r"(core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net)"
).fullmatch


def _named(address: str, text: str) -> tuple[str, str | None]:
    """The container, and the host of the account where the address names one:
    ``container@account.dfs.…``.
    """
    container, at, host = text.rpartition("@")
    if not at:
        return text, None
    found = _ACCOUNTS(host.lower())
    if found is None or not container:
        raise UnsupportedCheckpoint(
            "names no storage account of Azure",
            path=address,
            hint="write it as abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY",
        )
    return container, f"{found[1]}.blob.{found[2]}"


def _unopened(error: BaseException, service: str, address: str) -> UnsupportedCheckpoint:
    """Options that obstore does not take."""
    who = _NAMES[service]
    if service == "az" and "ccount" in str(error) and "pecified" in str(error):
        return UnsupportedCheckpoint(
            "needs the name of a storage account",
            path=address,
            hint="set AZURE_STORAGE_ACCOUNT_NAME, or write abfss://CONTAINER@ACCOUNT.dfs."
            "core.windows.net/KEY",
        )
    what = f"needs credentials for {who}, and those that were found are not understood"
    if "unknown variant" in str(error):
        what = f"needs credentials for {who} of a service account or of a user, not of this kind"
    return UnsupportedCheckpoint(what, path=address, hint=HELP)


def _is_beyond(error: BaseException) -> bool:
    """Whether a server refuses a range because the object ends before it."""
    text = str(error)
    return any(words in text for words in ("code: 416", "only 0 bytes", "InvalidRange", "partial"))


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
        is_bucket = "NoSuchBucket" in text or "ContainerNotFound" in text
        what = f"there is no such {_BUCKETS[service]}" if is_bucket else "no such file"
        return StoreError("missing", what, hint="check the address")
    if isinstance(error, ValueError):
        return StoreError("missing", "no object can have this name", hint="check the address")
    if name == "PreconditionError":
        return StoreError("changed", "was changed while it was read")
    if name == "AlreadyExistsError":
        return StoreError("exists", "exists")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreError("denied", f"{who} does not allow it", hint=HELP)
    if any(words in text for words in _TOKENS):
        return StoreError("denied", f"no credentials for {who} were found that it takes", hint=HELP)
    found = _STATUS(text)
    status = int(next(filter(None, found.groups()))) if found else 0
    if status == 404:
        what = f"there is no such {_BUCKETS[service]}"
        return StoreError("missing", what, hint="check the address")
    if status and status not in (408, 409, 425, 429) and status < 500:
        return StoreError("final", f"{who} answers with status {status}")
    if status:
        return StoreError("passing", f"{who} fails (status {status})")
    is_unreached = any(words in text for words in _UNREACHED)
    hint = "check the address and the network" if is_unreached else None
    return StoreError(
        "passing", f"{who} does not answer", hint=hint, tries=TRIES if is_unreached else None
    )


_TOKENS = ("token request", "TokenRequest", "managed identity", "Azure CLI")
_UNREACHED = ("dns error", "tcp connect error", "Connection refused", "ConnectError")
