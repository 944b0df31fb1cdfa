"""The place that a user names: a path of this host, or an address; or a file that is open.

Paths of this host are a kind of place of their own here; `remote` has those of addresses.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path, PurePath

from ckptconv.io.files import FilePool, FileSource, PooledSource, stamp
from ckptconv.io.journals import refuse_torn
from ckptconv.io.location import Kind, Location
from ckptconv.io.open_files import OpenFile, OpenPath, Readable, Writable, is_open_file
from ckptconv.io.source import Fingerprint, Source
from ckptconv.support.addresses import address_in, holds_credentials, shown
from ckptconv.support.errors import OptionRefused, UnsupportedCheckpoint
from ckptconv.support.records import dataclass

# what the system says of a name that nothing has, or can have
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG}


@dataclass(frozen=True, slots=True)
class LocalPlace(Location):
    """A path of this host."""

    at: Path
    ends_in_slash: bool = field(default=False, compare=False)

    @property
    def says_folder(self) -> bool:
        return self.ends_in_slash

    @property
    def path(self) -> Path:
        return self.at

    @property
    def name(self) -> str:
        return self.at.name

    @property
    def stem(self) -> str:
        return self.at.stem

    @property
    def suffix(self) -> str:
        return self.at.suffix

    @property
    def parent(self) -> LocalPlace:
        return LocalPlace(self.at.parent)

    @property
    def absolute(self) -> LocalPlace:
        return LocalPlace(self.at.absolute())

    @property
    def absolute_name(self) -> str:
        # as `Path.absolute` has it, which parses the working folder and the path once more
        if self.at.anchor or not self.at.parts:
            return str(self.at.absolute())
        return os.path.join(os.getcwd(), self.at)  # noqa: PTH109, PTH118

    def child(self, name: str) -> LocalPlace:
        return LocalPlace(self.at / name)

    def kind(self) -> Kind:
        return self.look()[0]

    def look(self) -> tuple[Kind, Fingerprint | None]:
        try:
            found = os.stat(self.at)  # noqa: PTH116 (of each of 10,000 files, several times)
        except ValueError:  # a character that no name has
            return "nothing", None
        except OSError as error:
            if error.errno in _ABSENT:
                return "nothing", None
            raise
        kind: Kind = "other"
        if stat.S_ISREG(found.st_mode):
            kind = "file"
        elif stat.S_ISDIR(found.st_mode):
            kind = "folder"
        return kind, stamp(found)

    def local(self) -> Path | None:
        return self.at

    def names(self) -> Sequence[str]:
        return sorted(os.listdir(self.at))  # noqa: PTH208 (of 10,000 files, several times)

    def open(self, pool: FilePool | None = None) -> Source:
        refuse_torn(self.at)
        return FileSource(self.at) if pool is None else PooledSource(self.at, pool)

    def fingerprint(self) -> Fingerprint | None:
        try:
            return stamp(self.at.stat())
        except OSError:
            return None

    def alias_of(self) -> str | None:
        if not self.at.is_symlink():
            return None
        folder, name = os.path.split(os.path.realpath(self.at))
        return name if folder == os.path.realpath(self.at.parent) else None

    def stays_within(self, home: Location) -> bool:
        """The ``blobs`` of a repository in the Hugging Face cache are not out of its snapshots,
        which consist of links to them.
        """
        real, folder = Path(os.path.realpath(self.at)), Path(os.path.realpath(home.path))
        snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
        return real.is_relative_to(folder) or (
            snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")
        )


# -------------------------------------------------------------------------------- what a user names

_SLASHES = tuple(filter(None, (os.sep, os.altsep)))


Place = str | os.PathLike[str]
"""A path of this machine, or an address."""


def place_of(named: Place | Readable | Writable | Location) -> Location:
    """The place that the user named, or the file that the user has opened. `UnsupportedCheckpoint`
    for an address of a kind that is not read.
    """
    if isinstance(named, LocalPlace):  # by far the most
        return named
    text = str(named) if type(named) in _PLAIN else ":/"
    if ":/" not in text:  # as in no address
        if isinstance(named, Path):
            return LocalPlace(named, text.endswith(_SLASHES))
        return _on_this_host(text)
    if not isinstance(named, (str, Path)) and isinstance(named, Location):
        return named
    if isinstance(named, OpenPath) and named.place is not None:
        return named.place
    if not isinstance(named, (str, os.PathLike)):
        if not is_open_file(named):
            raise OptionRefused(f"{named!r:.100} is not a path", hint="name a file or a folder")
        return OpenFile(named)
    address = address_in(named)
    if address is None:
        return LocalPlace(Path(named), os.fspath(named).endswith(_SLASHES))
    scheme = address.partition("://")[0]
    if scheme.lower() == "file":
        hint = f"leave out {scheme}://"
        raise UnsupportedCheckpoint("is an address of this machine", path=address, hint=hint)
    if holds_credentials(address):
        raise UnsupportedCheckpoint(
            "holds a name or a key, and addresses of this kind take none",
            path=shown(address),
            hint="leave out what stands before the @: ckptconv help remote (credentials) says "
            "where keys are looked for",
        )
    from ckptconv.io.remote.place import remote_place

    return remote_place(address)


_PLAIN = (str, type(Path()))


@lru_cache(maxsize=64)  # a batch asks for each of its names several times, one job after the other
def _on_this_host(text: str) -> LocalPlace:
    return LocalPlace(Path(text), text.endswith(_SLASHES))


Output = Place | Writable
"""Where an output goes: a path or an address, or a file that is open for writing."""

Named = Place | Readable | Sequence[Place | Readable]
"""A checkpoint: its path, or an open file; or those of all its ranks."""


def places_of(named: Named | Location) -> tuple[Location, ...]:
    """The places that the user named: of one name one, else those of all ranks' files."""
    if isinstance(named, (str, LocalPlace)) or not isinstance(named, Sequence):
        return (place_of(named),)
    return tuple(map(place_of, named))


def path_of(named: Place | Readable | Writable) -> PurePath:
    """How what the user named is called: in errors, in results, in commands to copy."""
    return place_of(named).path


def resolved(path: PurePath) -> PurePath:
    """The path without links, to be compared; what is elsewhere has none."""
    return path.resolve() if isinstance(path, Path) else path


def is_same_place(one: PurePath, other: PurePath) -> bool:
    """Whether two paths are of one and the same; of names that differ only in their case, the
    system knows.
    """
    if resolved(one) == resolved(other):
        return True
    try:
        return isinstance(one, Path) and isinstance(other, Path) and one.samefile(other)
    except OSError:  # one is not there
        return False


def files_below(
    home: Location, enters: Callable[[Location], bool]
) -> Iterator[tuple[str, Location]]:
    """The files in a folder, and those in its folders that are to be entered (`enters`), by their
    paths in it. A link to a folder that it lies in is not followed: its files are there already.
    """
    work: list[tuple[str, Location, frozenset[PurePath]]] = [("", home, frozenset())]
    while work:
        prefix, folder, above = work.pop()
        inside = above | {resolved(folder.path)}
        for place in folder.list():
            kind = place.kind()
            if kind == "file":
                yield prefix + place.name, place
            elif kind == "folder" and enters(place) and resolved(place.path) not in inside:
                work.append((f"{prefix}{place.name}/", place, inside))


def local_path(place: Location, what: str) -> Path:
    """The path of a place of this host; for another, `UnsupportedCheckpoint` says that `what` (a
    sentence without its subject) needs one.
    """
    path = place.local()
    if path is not None:
        return path
    raise UnsupportedCheckpoint(what, path=place.path, hint="copy it to this machine first")
