"""A place that the user named, wherever it lies: what is there, and how it is opened.

Formats know places by this interface alone. A file of this host is one kind (`local`), an object in
a store would be another.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal

from ckptconv.io.files import FilePool, read_whole
from ckptconv.io.source import Fingerprint, Range, RangeSource, Source
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.limits import in_force
from ckptconv.support.platforms import is_plain_path as is_plain_path

Needs = Callable[[bytes, int], Sequence[Range]]
"""The runs of bytes that opening a file will read, by its first bytes and its size."""

Kind = Literal["file", "folder", "other", "nothing"]
"""What is at a place: other are pipes, sockets and devices."""


class Location(ABC):
    """A place of a file or a folder, which need not be there. It can be compared, hashed and
    pickled.

    What cannot be asked for or opened is a `CheckpointError`, or the system's own `OSError`.
    """

    @property
    @abstractmethod
    def path(self) -> PurePath:
        """How the user knows it: what errors name, and results tell."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePath(self.name).stem

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on."""
        return PurePath(self.name).suffix

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        """What the user would write to name it."""
        return str(self.path)

    @property
    def says_folder(self) -> bool:
        """Whether its name ends in a slash, and so means a folder, which need not be there."""
        return False

    @property
    @abstractmethod
    def parent(self) -> Location:
        """The folder that it lies in."""

    @property
    @abstractmethod
    def absolute(self) -> Location:
        """The same place, whatever the working folder."""

    @property
    def absolute_name(self) -> str:
        """How that is written."""
        return str(self.absolute)

    @abstractmethod
    def child(self, name: str) -> Location:
        """What is called `name` in this folder; `name` may be several parts, between slashes."""

    def beside(self, name: str) -> Location:
        """What is called `name` in the folder that this lies in."""
        return self.parent.child(name)

    @abstractmethod
    def kind(self) -> Kind:
        """What is there now; links are followed."""

    def is_file(self) -> bool:
        """Whether a file is there."""
        return self.kind() == "file"

    def is_folder(self) -> bool:
        """Whether a folder is there."""
        return self.kind() == "folder"

    def exists(self) -> bool:
        """Whether anything is there."""
        return self.kind() != "nothing"

    def list(self) -> Sequence[Location]:
        """What is in this folder, by name."""
        return [self.child(name) for name in self.names()]

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of what is in this folder, sorted."""

    @abstractmethod
    def open(self, pool: FilePool | None = None) -> Source:
        """The file, to be read. In a `pool`, few of many are open at a time where that costs."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint | None:
        """What tells the file from others, as `Source.fingerprint`; None where there is none."""

    def look(self) -> tuple[Kind, Fingerprint | None]:
        """What is there now, and its fingerprint, in one look where the system has that."""
        return self.kind(), self.fingerprint()

    def local(self) -> Path | None:
        """Its path, where it is a file or folder of this host that any library can open."""
        return None

    def is_far(self) -> bool:
        """Whether each look at it costs a request over a network."""
        return False

    def foresee(  # noqa: B027 (nothing is promised)
        self, places: Iterable[Location], needs: Needs | None = None
    ) -> None:
        """Files like this one will be opened in turn: what can be asked for at once, is."""

    def alias_of(self) -> str | None:
        """The name in the same folder to which this is a link; None for anything else."""
        return None

    def stays_within(self, home: Location) -> bool:
        """Whether no link leads from here out of the folder `home`."""
        return True


class Alone(Location):
    """A place that lies in no folder and is none, of which only the name is known."""

    def __init__(self, path: PurePath) -> None:
        self._path = path

    @property
    def path(self) -> PurePath:
        return self._path

    @property
    def parent(self) -> Location:
        return self

    @property
    def absolute(self) -> Location:
        return self

    def child(self, name: str) -> Location:
        return Alone(self._path / name)

    def beside(self, name: str) -> Location:
        return Alone(self._path.parent / name)

    def kind(self) -> Kind:
        return "nothing"

    def names(self) -> Sequence[str]:
        raise NotADirectoryError(errno.ENOTDIR, "no folder", str(self.path))

    def open(self, pool: FilePool | None = None) -> Source:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def fingerprint(self) -> Fingerprint | None:
        return None


class Member(Alone):
    """A place in an archive whose files are the sources `members`, by their names."""

    def __init__(self, archive: Source, members: Mapping[str, Source], name: str = "") -> None:
        super().__init__(archive.path / name)
        self._archive, self._members, self._name = archive, members, name

    @property
    def parent(self) -> Location:
        return Member(self._archive, self._members, self._name.rpartition("/")[0])

    def child(self, name: str) -> Location:
        inner = str(PurePosixPath(self._name, name))
        return Member(self._archive, self._members, inner)

    def beside(self, name: str) -> Location:
        return self.parent.child(name)

    def kind(self) -> Kind:
        if self._name in self._members:
            return "file"
        return "folder" if self.names() else "nothing"

    def names(self) -> Sequence[str]:
        start = f"{self._name}/" if self._name else ""
        below = (name[len(start) :] for name in self._members if name.startswith(start))
        return sorted({name.partition("/")[0] for name in below})

    def open(self, pool: FilePool | None = None) -> Source:
        # a range of it: who closes that leaves the member open for others
        found = self._members.get(self._name)
        return super().open(pool) if found is None else RangeSource(found, 0, found.size)

    def is_far(self) -> bool:
        return self._archive.fetched_from(0) is not None


def within(location: Location, home: Location) -> Location:
    """`location`, a file of a checkpoint; `MalformedCheckpoint` if a link leads out of `home`."""
    if not location.stays_within(home):
        hint = "name the folder that it leads to, or copy the file"
        raise MalformedCheckpoint(
            "is a link that leads out of the folder", path=location.path, hint=hint
        )
    return location


def require(location: Location) -> None:
    """Raise what is raised when a place is opened at which nothing is."""
    try:
        is_there = location.exists()
    except OSError:
        is_there = False  # opening it says why
    if not is_there:
        location.open().close()


def is_plain_name(name: str) -> bool:
    """Whether a name that a file gives stays within its folder and may be a name, on every system.

    >>> is_plain_name("step-5"), is_plain_name("../step-5"), is_plain_name("5" * 256)
    (True, False, False)
    """
    return is_plain_path(name) and len(name.encode()) <= _LONGEST


_LONGEST = 255  # bytes, as in the names of most file systems


def read_small(location: Location, limit: str) -> bytes:
    """All of a file that is read as a whole; see `read_whole`."""
    return read_whole(location.open(), limit)


def read_start(location: Location, limit: str) -> bytes:
    """The first bytes of a file, as many as the limit of that name allows."""
    with closing(location.open()) as source:
        return source.read(0, min(source.size, getattr(in_force(), limit)))
