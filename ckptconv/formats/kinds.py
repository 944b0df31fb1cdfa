"""The types of readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ckptconv.formats.zip_records import Records, ends_one
from ckptconv.io.location import Location
from ckptconv.io.source import Source
from ckptconv.tree.checkpoint import Checkpoint

Opener = Callable[[Source], Checkpoint]
Reread = Callable[[], Checkpoint]


class NotForetold(Exception):
    """An index does not tell enough, or something is wrong: what it tells of must be opened."""


class Format(NamedTuple):
    """A container in one file: whether a file's first bytes are its, and how it is opened.

    `open` is also given a way to open what lies inside: a record of the archive that is a
    checkpoint itself.
    """

    matches: Callable[[bytes], bool]
    open: Callable[[Source, Opener], Checkpoint]


class Archive(NamedTuple):
    """A kind of zip archive: whether these records are its, how it is opened; else as `Format`."""

    matches: Callable[[Records], bool]
    open: Callable[[Source, Records, Opener], Checkpoint]


class Gathering(NamedTuple):
    """Many files that are one checkpoint: whether a place (a folder, or a file that stands for
    one) is it, and how it is opened.

    `tags` are the names by which its user may choose among several that one folder holds, and
    `open` is given the one that was chosen. Links in it may lead within the folder that was named:
    it is the second argument of `open`. `foretell`, where there is one, opens it by its index
    alone, or raises `NotForetold`; its second argument opens all of it (`Checkpoint.certain`).
    """

    matches: Callable[[Location], bool]
    open: Callable[[Location, Location, str | None], Checkpoint]
    tags: Callable[[Location], Iterable[str]] = lambda _: ()
    foretell: Callable[[Location, Reread], Checkpoint] | None = None


class ArchiveStranger(NamedTuple):
    """A zip archive that has the records `names` (or such endings) and is not a checkpoint: what it
    is, what to do.
    """

    names: tuple[str, ...]
    what: str
    hint: str

    def matches(self, records: Records) -> bool:
        """Whether the archive holds them all, in whatever folder."""
        return all(ends_one(records, name) for name in self.names)
