"""What every store of objects can do: give ranges of bytes, list names, take new objects.

A store does one request at a time and says how it failed by a `StoreError`. When to try again, what
to keep and what to fetch ahead is the business of the layers above, the same for all stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from ckptconv.io.remote.traffic import count
from ckptconv.io.stream import Sink
from ckptconv.support.records import dataclass

Failing = Literal["missing", "denied", "changed", "exists", "passing", "final"]
"""How a request failed: there is no such object, this user may not, the object is not the one that
was opened, it is there already; passing: another try may succeed; final: it will not.
"""
_SAID: dict[Failing, str] = {
    "missing": "no such file",
    "changed": "was changed while it was read",
    "exists": "exists",
}

TRIES = 5
"""Of a request to a host that does not answer at all: its name is wrong, or it is down."""


class StoreError(Exception):
    """A request that failed. `what` says why, without any secret, where the kind does not tell;
    `wait` are the seconds that the server asks to wait before another try (None: it does not say);
    `tries` are the most that are worth it (None: as many as time allows).
    """

    def __init__(
        self,
        kind: Failing,
        what: str = "",
        *,
        hint: str | None = None,
        wait: float | None = None,
        tries: int | None = None,
    ) -> None:
        self.what = what or _SAID[kind]
        super().__init__(self.what)
        self.kind: Failing = kind
        self.hint, self.wait, self.tries = hint, wait, tries


@contextmanager
def unless_missing() -> Iterator[None]:
    """An object that is not there ends the block, without an error."""
    try:
        yield
    except StoreError as error:
        if error.kind != "missing":
            raise


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as a store tells of it: its size in bytes, and the tag of its version.

    `is_pinned`: a request that names the tag is only answered from that version. `sha256` is that
    of all its bytes, in hexadecimal digits, where the store says it.
    """

    size: int
    tag: str = ""
    is_pinned: bool = False
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes of an object, and what it was when they were read."""

    data: bytes | memoryview
    seen: Seen


@dataclass(frozen=True, slots=True)
class FolderListing:
    """What lies in a folder: files by name with what is known of them, and names of folders."""

    files: Mapping[str, Seen]
    folders: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.files or self.folders)


NOTHING = FolderListing({}, frozenset())


def split(key: str) -> tuple[str, str]:
    """The folder that a key lies in (empty, or ending in a slash), and its name in there; a slash
    at the end of a key says only that it is a folder.

    >>> split("a/b/c"), split("a/b/"), split("a//b"), split("")
    (('a/b/', 'c'), ('a/', 'b'), ('a//', 'b'), ('', ''))
    """
    begin = key.rfind("/", 0, max(0, len(key) - 1)) + 1
    return key[:begin], key[begin:].removesuffix("/")


class Upload(Sink):
    """A new object in the making, which nobody finds before `finish`. When it has come to its `end`
    the store has all of it, so that `finish` is short.

    `is_left`: it is finished, and what it was made of could not be removed.
    """

    is_left = False

    def close(self) -> None:
        """It goes on, until it is finished or aborted."""

    @abstractmethod
    def finish(self, *, create: bool) -> None:
        """Let the object appear as a whole; with `create` only where none ``exists``."""

    @abstractmethod
    def cancel(self) -> None:
        """Have a `write` or an `end` of another thread stop soon, by an error."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing of it; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a killed process left: the key that it was to become, an id, when it was begun (ISO
    8601), and its bytes as far as the store tells.
    """

    key: str
    id: str
    begun: str = ""
    nbytes: int | None = None


class Store(ABC):
    """Objects under keys; `root` is before a key in a shown address, without secrets."""

    root: str
    can_list: bool = True
    can_write: bool = False
    commits: bool = False
    """Whether it takes files of this host, several in one commit, instead of uploads."""
    keeps_moved: bool = False
    """Whether `move` only copies, and the old object is to be removed by who asked for it."""

    @abstractmethod
    def get(self, key: str, first: int, nbytes: int, pinned: Seen | None) -> ObjectBytes:
        """The bytes from `first` on, `nbytes` of them or as many as there are; of the version
        `pinned`, if one is given.

        The data are never more than was asked for, and fewer only at the end of the object. An
        empty object gives no bytes.
        """

    def list(self, prefix: str) -> FolderListing:
        """What lies in the folder `prefix` (empty, or with a slash at its end), if it is there."""
        raise StoreError("final", "cannot be listed", hint="name the file")

    def begin(self, key: str, size: int) -> Upload:
        """A new object of about `size` bytes."""
        raise StoreError("final", "cannot be written to", hint="write a file here, and upload it")

    def move(self, old: str, new: str, *, create: bool) -> None:
        """Give an object another key, without fetching it; with `create` only where there is none
        (`StoreError` of the kind ``exists``). What `keeps_moved` has both keys afterwards.
        """
        raise StoreError("final", "cannot be written to")

    def remove(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""
        raise StoreError("final", "cannot be written to")

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """What killed processes left of objects whose keys begin with `prefix`."""
        return ()

    def abort(self, left: Unfinished) -> None:
        """Leave nothing of what `unfinished` found."""
        raise NotImplementedError

    def locate(self, key: str) -> str:
        """The address of an object, as the user is told it: without what is secret in it."""
        return self.root + key

    def address(self, key: str) -> str:
        """The address by which another process finds it."""
        return self.locate(key)

    @property
    def identity(self) -> Hashable:
        """What is equal for stores of the same objects; it may be secret."""
        return self.root

    def written(self, name: str) -> str:
        """A name, or a path of names, as it stands in a key."""
        return name

    def spoken(self, name: str) -> str:
        """The name that a part of a key stands for."""
        return name


# answers that one range may come in; a long one in as many as have 64 KiB each: a server that sends
# a byte at a time would be asked millions of times
_PIECES = 32


def read_on(
    got: Callable[[int, int, Seen | None], ObjectBytes],
    first: int,
    nbytes: int,
    pinned: Seen | None,
) -> ObjectBytes:
    """A range by `got`, whose answers may be shorter than they were asked to be, since they broke
    off: the rest is asked for, of the same version.
    """
    part = got(first, nbytes, pinned)
    whole = min(nbytes, part.seen.size - first)
    if len(part.data) >= whole:
        return part
    pieces, most = [part.data], max(_PIECES, whole >> 16)
    while (had := sum(map(len, pieces))) < whole:
        if len(pieces) == most:
            what = f"the server sends {whole} bytes in more than {most} pieces"
            raise StoreError("final", what, hint="another server of the file may do better")
        count(requests=1)
        pieces.append(got(first + had, whole - had, part.seen).data)
    return ObjectBytes(b"".join(pieces), part.seen)
