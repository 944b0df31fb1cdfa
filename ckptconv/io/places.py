"""The place that a user names: a path of this host, or an address."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from ckptconv.io.local import LocalPlace
from ckptconv.io.location import Location
from ckptconv.support.addresses import address_in, holds_credentials, shown
from ckptconv.support.errors import UnsupportedCheckpoint

_SLASHES = tuple(filter(None, (os.sep, os.altsep)))


def place_of(named: str | os.PathLike[str] | Location) -> Location:
    """The place that the user named.

    `UnsupportedCheckpoint` for an address of a kind that is not read.
    """
    if not isinstance(named, (str, Path)) and isinstance(named, Location):
        return named
    if (address := address_in(named)) is None:
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


def places_of(
    named: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[Location, ...]:
    """The places that the user named: of one name one, else those of all ranks' files."""
    return tuple(map(place_of, [named] if isinstance(named, (str, os.PathLike)) else named))


def path_of(named: str | os.PathLike[str]) -> PurePath:
    """How what the user named is called: in errors, in results, in commands to copy."""
    return place_of(named).path


def resolved(path: PurePath) -> PurePath:
    """The path without links, to be compared; what is elsewhere has none."""
    return path.resolve() if isinstance(path, Path) else path


def local_path(place: Location, what: str) -> Path:
    """The path of a place of this host; for another, `UnsupportedCheckpoint` says that `what` (a
    sentence without its subject) needs one.
    """
    if (path := place.local()) is not None:
        return path
    raise UnsupportedCheckpoint(what, path=place.path, hint="copy it to this machine first")
