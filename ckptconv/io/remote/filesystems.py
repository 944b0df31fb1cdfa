"""Any other place that fsspec knows: sftp, hdfs, ftp, memory and many more.

What is written lies under a hidden name beside its own until it is whole, and is renamed then. None
of these systems renames on the condition that there is nothing yet: that is looked up just before,
and of two writers at the very same moment the second may replace what the first one wrote.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from ckptconv.io.remote.missing import needed
from ckptconv.io.remote.store import (
    TRIES,
    Listing,
    Part,
    Seen,
    Store,
    StoreError,
    Unfinished,
    Upload,
)
from ckptconv.io.remote.traffic import count
from ckptconv.io.remote.uploads import Cancelled, hidden_key, key_of_hidden
from ckptconv.support.errors import UnsupportedCheckpoint

T = TypeVar("T")

_TAGS = ("ETag", "etag", "sha", "checksum", "mtime", "LastModified", "last_modified", "modified",
         "modify", "created", "ino")  # fmt: skip
"""What tells versions of a file apart, as the systems of fsspec call it."""


def filesystem_store(address: str) -> tuple[Store, str]:
    """The file system of an address, and the path in it."""
    scheme, _, rest = address.partition("://")
    host, _, path = rest.partition("/")
    return FilesystemStore(scheme.lower(), host), path


class FilesystemStore(Store):
    """The files of one file system of fsspec. Few of them are for threads: each does one thing at
    a time.
    """

    can_write = True

    def __init__(self, scheme: str, host: str) -> None:
        self.root = f"{scheme}://{host.rpartition('@')[2]}/"
        self._whole = f"{scheme}://{host}/"  # with the password that may be in it
        fsspec = needed("fsspec", self.root)
        try:
            self._kind: Any = fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise UnsupportedCheckpoint(
                f"needs another package: {_line(error)}", path=self.root, hint="install it with pip"
            ) from None
        except ValueError:
            raise UnsupportedCheckpoint(
                f"has the scheme {scheme}://, which neither ckptconv nor fsspec knows",
                path=self.root,
                hint="check the address",
            ) from None
        self._scheme = scheme
        self._lock = threading.RLock()
        self._made: Any = None

    @property
    def identity(self) -> Hashable:
        return self._whole

    def address(self, key: str) -> str:
        return self._whole + key

    def path(self, key: str) -> str:
        """A key as the file system names it."""
        base = str(self._kind._strip_protocol(self._whole))
        return f"{base}{'' if not base or base.endswith('/') else '/'}{key.rstrip('/')}"

    def asked(self, request: Callable[[Any], T]) -> T:
        """What the file system gives; its errors as those of a store, in words without secrets."""
        with self._lock:
            try:
                if self._made is None:
                    options = self._kind._get_kwargs_from_urls(self._whole)
                    self._made = self._kind(**options, skip_instance_cache=True)
                return request(self._made)
            except StoreError:
                raise
            except Exception as error:
                raise _failed(error, self._scheme) from None

    # ------------------------------------------------------------------------------- reading

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> Part:
        path = self.path(key)

        def read(system: Any) -> Part:
            known = pinned or _seen(system, path)
            last = min(first + nbytes, known.size)
            data = system.cat_file(path, start=first, end=last) if first < last else b""
            # looked at after what was read, so that it tells of every change
            return Part(data, known if pinned is None else _seen(system, path))

        return self.asked(read)

    def list(self, prefix: str) -> Listing:
        path = self.path(prefix)
        try:
            found = self.asked(lambda system: _listed(system, path))
        except StoreError as error:
            if error.kind != "missing":
                raise
            found = []
        files, folders = {}, set()
        for item in found:
            name = item["name"].rstrip("/").rpartition("/")[2]
            if item.get("type") == "directory":
                folders.add(name)
            elif item["name"].rstrip("/") != path:
                files[name] = Seen(int(item.get("size") or 0), _tag(item))
        return Listing(files, frozenset(folders))

    # ------------------------------------------------------------------------------- writing

    def begin(self, key: str, size: int) -> Upload:
        return _FileUpload(self, key)

    def move(self, old: str, new: str, *, create: bool) -> None:
        here, there = self.path(old), self.path(new)

        def rename(system: Any) -> None:
            _forget(system)
            if create and system.exists(there):
                raise StoreError("exists", "exists")
            try:
                _renamed(system, here, there)
            except FileExistsError:
                if create:
                    raise
                system.rm_file(there)
                _renamed(system, here, there)

        self.asked(rename)

    def remove(self, key: str) -> None:
        path = self.path(key)
        try:
            self.asked(lambda system: system.rm_file(path))
        except StoreError as error:
            if error.kind != "missing":
                raise

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        folder = prefix.rpartition("/")[0]
        base = len(self.path("x")) - 1
        try:
            found = self.asked(lambda system: system.find(self.path(folder), detail=True))
        except StoreError as error:
            if error.kind != "missing":
                raise
            return ()
        keys = {path[base:]: item for path, item in found.items()}
        return [
            Unfinished(key, "", _time(item), item.get("size"))
            for key, item in sorted(keys.items())
            if key.startswith(prefix) and key_of_hidden(key) is not None
        ]

    def abort(self, left: Unfinished) -> None:
        self.remove(left.key)


class _FileUpload(Upload):
    """A file under a hidden name, which is renamed at the end."""

    def __init__(self, store: FilesystemStore, key: str) -> None:
        self._store, self._key = store, key
        self._made = key if key_of_hidden(key) is not None else hidden_key(key)
        self._file: Any = None
        self._is_there = False
        self._is_cancelled = threading.Event()

    def write(self, view: memoryview) -> None:
        self._check()
        data = bytes(view)
        self._store.asked(lambda system: self._opened(system).write(data))
        count(bytes_written=len(data))

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise Cancelled

    def _opened(self, system: Any) -> Any:
        if self._file is None:
            path = self._store.path(self._made)
            with contextlib.suppress(NotImplementedError, FileExistsError):
                system.makedirs(system._parent(path), exist_ok=True)
            self._is_there = True
            self._file = system.open(path, "wb")
        return self._file

    def end(self) -> None:
        self._check()

        def close(system: Any) -> None:
            if self._file is not None or not self._is_there:
                file, self._file = self._opened(system), None
                file.close()

        self._store.asked(close)

    def finish(self, *, create: bool) -> None:
        self.end()
        if self._made != self._key:
            self._store.move(self._made, self._key, create=create)
        self._is_there = False

    def cancel(self) -> None:
        self._is_cancelled.set()

    def abort(self) -> None:
        self.cancel()
        file, self._file = self._file, None
        if not self._is_there:
            return
        self._is_there = False
        if file is not None:
            with contextlib.suppress(StoreError):
                self._store.asked(lambda system: file.close())
        with contextlib.suppress(StoreError):
            self._store.remove(self._made)


def _seen(system: Any, path: str) -> Seen:
    _forget(system)
    info = system.info(path)
    if info.get("type") == "directory":
        raise StoreError("missing", "no such file", hint="check the address")
    if (size := info.get("size")) is None:
        raise StoreError("final", "is of a size that nobody tells")
    return Seen(int(size), _tag(info))


def _forget(system: Any) -> None:
    """What is kept of listings is not asked."""
    with contextlib.suppress(NotImplementedError):
        system.invalidate_cache()


def _listed(system: Any, path: str) -> list[Any]:
    _forget(system)
    return list(system.ls(path, detail=True))


def _tag(info: Any) -> str:
    return " ".join(f"{name}={info[name]}" for name in _TAGS if info.get(name) is not None)


def _time(info: Any) -> str:
    """When a file was changed, as far as the system tells."""
    for name in ("mtime", "LastModified", "last_modified", "modified", "created"):
        found = info.get(name)
        if isinstance(found, datetime):
            return found.isoformat()
        if isinstance(found, (int, float)):
            return datetime.fromtimestamp(found, timezone.utc).isoformat()
    return ""


def _renamed(system: Any, old: str, new: str) -> None:
    """Rename a file; `mv` of fsspec itself would take brackets in a name for a pattern."""
    from fsspec import AbstractFileSystem

    if hasattr(system, "mv_file"):
        system.mv_file(old, new)
    elif type(system).mv is not AbstractFileSystem.mv:
        system.mv(old, new)
    else:
        system.cp_file(old, new)
        system.rm_file(old)


def _failed(error: Exception, scheme: str) -> StoreError:
    """What an error of a file system means. Only those of the operating system are told in their
    own words: others may hold an address with a password.
    """
    name = type(error).__name__
    if isinstance(error, ImportError):
        return StoreError("final", f"needs another package: {_line(error)}")
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or (
        isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    ):
        return StoreError("missing", "no such file", hint="check the address")
    if isinstance(error, FileExistsError):
        return StoreError("exists", "exists")
    if isinstance(error, PermissionError) or "Auth" in name:
        return StoreError("denied", f"{scheme} does not allow it")
    if isinstance(error, NotImplementedError):
        return StoreError("final", f"{scheme} does not offer this")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return StoreError("final", error.strerror or name)
    if isinstance(error, (OSError, EOFError)) or "SSH" in name:
        told = getattr(error, "strerror", None) or name
        return StoreError("passing", f"{scheme} fails ({told})", tries=TRIES)
    if isinstance(error, ValueError):
        return StoreError("missing", "no file can have this name", hint="check the address")
    return StoreError("final", f"{scheme} fails ({name})")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
