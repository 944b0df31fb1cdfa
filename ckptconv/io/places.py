"""The place that a user names: a path of this host, or an address; or a file that is open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from ckptconv.io.local import LocalPlace
from ckptconv.io.location import Location
from ckptconv.io.open_files import OpenFile, OpenPath, Readable, Writable, is_open_file
from ckptconv.support.addresses import address_in, holds_credentials, shown
from ckptconv.support.errors import OptionRefused, UnsupportedCheckpoint

_SLASHES = tuple(filter(None, (os.sep, os.altsep)))


Place = str | os.PathLike[str]
"""A path of this machine, or an address."""


def place_of(named: Place | Readable | Writable | Location) -> Location:
    """The place that the user named, or the file that the user has opened. `UnsupportedCheckpoint`
    for an address of a kind that is not read.
    """
    if isinstance(named, LocalPlace):  # by far the most
        return named
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
        path = named if isinstance(named, Path) else Path(named)
        return LocalPlace(path, os.fspath(named).endswith(_SLASHES))
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


def local_path(place: Location, what: str) -> Path:
    """The path of a place of this host; for another, `UnsupportedCheckpoint` says that `what` (a
    sentence without its subject) needs one.
    """
    path = place.local()
    if path is not None:
        return path
    raise UnsupportedCheckpoint(what, path=place.path, hint="copy it to this machine first")
