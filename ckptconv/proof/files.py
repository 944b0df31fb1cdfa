"""Which files a checkpoint consists of, and the digests of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from ckptconv.io.digests import digested, refuse_other
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.io.source import Source
from ckptconv.proof.manifest import Algorithm
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.progress import Counting
from ckptconv.tree.checkpoint import Checkpoint


class Listed(NamedTuple):
    """The files of a checkpoint by their paths in the folder `home`; `is_folder`: all that lie in
    it.
    """

    home: Location
    files: Mapping[str, Location]
    is_folder: bool


def files_in(home: Location) -> Listed:
    """All files in a folder. Folders whose names begin with a dot are passed over: what git and
    caches of downloads put beside a model is not part of it.
    """
    files = dict(_within(home, home, "", 0))
    refuse_beyond("shards", len(files), f"has {len(files)} files", path=home.path)
    return Listed(home, files, is_folder=True)


def _within(
    folder: Location, home: Location, prefix: str, depth: int
) -> Iterator[tuple[str, Location]]:
    for name in folder.names():
        place = folder.child(name)
        kind = place.kind()
        if kind == "file":
            yield f"{prefix}{name}", place
        elif kind == "folder" and not name.startswith(".") and place.stays_within(home):
            refuse_beyond("depth", depth, "nests folders in folders", path=home.path)
            yield from _within(place, home, f"{prefix}{name}/", depth + 1)


def files_of(named: Sequence[Location], checkpoint: Checkpoint, tag: str | None) -> Listed:
    """The files of an open checkpoint: where its folder was named, or a step of it chosen, all that
    are in there; else the files that were named, and those that are read.
    """
    first = named[0]
    if first.is_folder():
        own = place_of(checkpoint.path)
        if tag is None:
            return files_in(first)
        return files_in(own if own.is_folder() else own.parent)
    home = first.parent
    base = f"{home.path}/"
    files = {place.name: place for place in named}
    known = {str(place.path) for place in named}
    for source in checkpoint.sources:
        path = str(source.path)
        if path not in known and path.startswith(base):
            files[path[len(base) :]] = place_of(source.path)
    return Listed(home, files, is_folder=False)


def file_digest(place: Location, algorithm: Algorithm, meter: Counting) -> str:
    """The hexadecimal digest of a file, which is read once; where its server says its SHA-256, it
    is held against that.
    """
    with closing(place.open()) as source:
        if algorithm == "sha256":
            found = digested(source, (), meter).result().whole
            refuse_other(source, found)
        else:
            found = _git_name(source, meter)
        source.check_unchanged()
        return found


def _git_name(source: Source, meter: Counting) -> str:
    digest = hashlib.sha1(b"blob %d\0" % source.size, usedforsecurity=False)
    for view in source.stream([(0, source.size)]):
        digest.update(view)
        meter.add(len(view))
    return digest.hexdigest()
