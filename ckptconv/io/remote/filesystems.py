"""Any other place that fsspec knows: ``sftp://``, ``hdfs://``, ``smb://``, ``memory://`` and more.

One request at a time, for many of its file systems are not made for threads. No request names a
version, so a change is found when a file is looked at again. Outputs are written under a hidden
name beside their own, and renamed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ckptconv.io.remote.network import needed
from ckptconv.io.remote.store import (
    NOTHING,
    TRIES,
    FolderListing,
    ObjectBytes,
    Seen,
    Store,
    StoreError,
    Unfinished,
)
from ckptconv.io.remote.uploads import HidingStore, is_left
from ckptconv.support.addresses import shown
from ckptconv.support.errors import UnsupportedCheckpoint

# what fsspec knows that lies in another place, or on this machine
_NOT_PLACES = frozenset((
    "local", "asynclocal", "async_wrapper", "asyncwrapper", "blockcache", "cached", "filecache",
    "simplecache", "data", "dir", "generic", "libarchive", "reference", "tar", "zip",
))  # fmt: skip


def filesystem_store(address: str) -> tuple[Store, str]:
    """The file system of an address, and the path in it."""
    scheme, _, rest = address.partition("://")
    scheme = scheme.lower()
    if scheme in _NOT_PLACES or "::" in address:
        raise UnsupportedCheckpoint(
            "is not the address of a file in one place", path=shown(address), hint="name the file"
        )
    fsspec = needed("fsspec", shown(address))
    if scheme == "memory":  # which has no hosts
        return FileSystemStore(fsspec, "memory://", "memory://"), rest.lstrip("/")
    host, _, key = rest.partition("/")
    whole = f"{scheme}://{host}/"
    root = shown(whole)
    if whole != root:
        _WHOLE[root] = whole
    return FileSystemStore(fsspec, _WHOLE.get(root, whole), root), key


# addresses with a password, by what is shown of them: plans and results only have that, and name
# the place by it again in this process
_WHOLE: dict[str, str] = {}


class FileSystemStore(HidingStore):
    """The files of a file system of fsspec; `whole` is its root with a password, if it has one."""

    def __init__(self, fsspec: Any, whole: str, root: str) -> None:
        self.root, self._whole = root, whole
        self._lock = threading.RLock()
        scheme = whole.partition("://")[0]
        try:
            kind = fsspec.get_filesystem_class(scheme)
            if scheme in ("sftp", "ssh"):
                kind = _known_only(kind)
            self.system = kind(**kind._get_kwargs_from_urls(whole), skip_instance_cache=True)
        except ImportError as error:
            what = f"is not on this machine, and {scheme}:// needs another library"
            # what fsspec says of a library that it misses has no secret in it
            hint = f"pip install {error.name}" if error.name else str(error)[:200]
            raise UnsupportedCheckpoint(what, path=root, hint=hint) from None
        except ValueError:  # so fsspec says that it knows no such protocol
            what = f"is an address of a kind that is not known ({scheme}://)"
            raise UnsupportedCheckpoint(what, path=root, hint="see: ckptconv help remote") from None
        except Exception as error:  # its text may have the password
            what, hint = _unreached(error)
            raise UnsupportedCheckpoint(what, path=root, hint=hint) from None

    def path(self, key: str) -> str:
        """How the file system calls what has a key."""
        return str(self.system._strip_protocol(f"{self._whole}{key}"))

    def address(self, key: str) -> str:
        return self._whole + key

    @property
    def identity(self) -> str:
        return self._whole

    @contextlib.contextmanager
    def asking(self) -> Iterator[Any]:
        """Its block has the file system for itself."""
        with self._lock:
            try:
                self.system.invalidate_cache()  # of listings, which others may have changed
                yield self.system
            except StoreError:
                raise
            except Exception as error:
                raise _told(error) from None

    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        path = self.path(key)
        with self.asking() as system:
            about = system.info(path)
            if about.get("type") == "directory":
                raise StoreError("missing")
            seen = _seen(about)
            if pinned is not None and seen != pinned:
                raise StoreError("changed")
            last = min(first + nbytes, seen.size)
            if first >= last:
                return ObjectBytes(b"", seen)
            return ObjectBytes(bytes(system.cat_file(path, start=first, end=last)), seen)

    def list(self, prefix: str) -> FolderListing:
        files: dict[str, Seen] = {}
        folders = set()
        with self.asking() as system:
            try:
                found = system.ls(self.path(prefix), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return NOTHING
        home = self.path(prefix).rstrip("/")
        for about in found:
            name = str(about["name"]).rstrip("/").rpartition("/")[2]
            if str(about["name"]).rstrip("/") == home:
                continue  # a file is listed as itself
            if about.get("type") == "directory":
                folders.add(name)
            else:
                files[name] = _seen(about)
        return FolderListing(files, frozenset(folders))

    def opened(self, key: str, mark: str, part: int) -> Any:
        path = self.path(key)
        with contextlib.suppress(NotImplementedError, FileExistsError):
            self.system.makedirs(self.system._parent(path), exist_ok=True)
        return self.system.open(path, "wb")

    def drop(self, key: str, writer: Any) -> None:
        if writer is not None:
            with contextlib.suppress(StoreError), self.asking():  # it is removed anyway
                writer.close()
        self.remove(key)

    def move(self, old: str, new: str, *, create: bool) -> None:
        try:
            with self.asking() as system:
                self._move(system, self.path(old), self.path(new), create=create)
        except StoreError as error:
            # where the answer was lost, another try would take the new file for the old one
            error.tries = 1
            raise

    def _move(self, system: Any, source: str, target: str, *, create: bool) -> None:
        is_there = system.exists(target)
        if create and is_there:
            raise StoreError("exists")
        try:
            _rename(system, source, target)
        except (OSError, NotImplementedError) as error:  # it may be one that does not replace
            if not is_there or isinstance(error, (ConnectionError, TimeoutError)):
                raise
            system.rm_file(target)
            _rename(system, source, target)

    def remove(self, key: str) -> None:
        with self.asking() as system, contextlib.suppress(FileNotFoundError):  # gone already
            system.rm_file(self.path(key))

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self.asking() as system:
            home = self.path(folder).rstrip("/")
            found = system.find(home, detail=True)
        keys = {folder + path[len(home) :].lstrip("/"): about for path, about in found.items()}
        return [
            Unfinished(key, "", _begun(about), about.get("size"))
            for key, about in sorted(keys.items())
            if is_left(key, prefix)
        ]


def _known_only(kind: Any) -> Any:
    """The kind of file system of SSH that only talks to hosts which the user's ssh knows: that of
    fsspec would hand the password to any.
    """
    import paramiko  # type: ignore[import-untyped]

    class KnownOnly(kind):  # type: ignore[misc]
        def _connect(self) -> None:
            self.client = paramiko.SSHClient()
            self.client.load_system_host_keys()
            self.client.set_missing_host_key_policy(paramiko.RejectPolicy())
            self.client.connect(self.host, timeout=10, **self.ssh_kwargs)
            self.ftp = self.client.open_sftp()
            self.ftp.get_channel().settimeout(120)

    return KnownOnly


def _unreached(error: Exception) -> tuple[str, str]:
    name = type(error).__name__
    if name == "BadHostKeyException":
        return "is another host than before, as its key says", "see: man ssh (known_hosts)"
    if "not found in known_hosts" in str(error):
        return "is a host that ssh does not know yet", "connect to it by ssh once"
    if "Auth" in name or isinstance(error, PermissionError):
        return "does not accept this user", "check user, password and key"
    return f"cannot be reached ({name})", "check the address and the network"


def _rename(system: Any, source: str, target: str) -> None:
    from fsspec import AbstractFileSystem

    if type(system).mv is AbstractFileSystem.mv:  # which takes brackets and stars for a pattern
        system.cp_file(source, target)
        system.rm_file(source)
    else:
        system.mv(source, target)


# What tells versions of a file apart, as the file systems of fsspec call it
_TAGS = ("ETag", "etag", "e_tag", "checksum", "md5", "mtime", "LastModified", "last_modified",
         "modified", "updated", "created", "ino", "modify", "modificationTime", "sha",
         "hex")  # fmt: skip
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def _seen(about: Mapping[str, Any]) -> Seen:
    """What a file system tells of a file: of versions by names of its own."""
    if about.get("size") is None:
        raise StoreError("final", "is a file of unknown size", hint="download it first")
    told = [f"{name}={_plain(about[name])}" for name in _TAGS if about.get(name) is not None]
    return Seen(int(about["size"]), " ".join(told))


def _plain(value: object) -> str:
    """A time is the same as an object and as a number of seconds."""
    return str(value.timestamp() if isinstance(value, datetime) else value)


def _begun(about: Mapping[str, Any]) -> str:
    for name in _TIMES:
        value = about.get(name)
        if isinstance(value, datetime):
            return value.isoformat()
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value).astimezone().isoformat()
    return ""


def _told(error: Exception) -> StoreError:
    """What an error of a file system means; its text may have a password."""
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return StoreError("missing", hint="check the address")
    if isinstance(error, PermissionError):
        return StoreError("denied", "this user may not do that")
    if isinstance(error, FileExistsError):
        return StoreError("exists")
    what = f"the file system reports an error ({type(error).__name__})"
    if isinstance(error, (OSError, EOFError, TimeoutError)):
        return StoreError("passing", what, tries=TRIES)
    return StoreError("final", what)
