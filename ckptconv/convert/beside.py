"""What lies beside a model: the files that are copied with it, and those that are not."""

from __future__ import annotations

from pathlib import PurePath

from ckptconv.io.location import Location
from ckptconv.io.source import Fingerprint, MemorySource, Source
from ckptconv.support.records import dataclass


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that is copied: where it lies (None: it is made), its path in the folder, its size and
    what tells it from others; `raw` is what the copy says where that is something else.
    """

    place: Location | None
    name: str
    nbytes: int
    stamp: Fingerprint | None
    raw: bytes | None = None

    def open(self) -> Source:
        """The file that is copied, opened."""
        return made_source(self.name, self.raw or b"") if self.place is None else self.place.open()


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file of the folder that is not copied, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class FilesBeside:
    """What lies beside a model: what is copied, and what is not."""

    copied: tuple[Companion, ...] = ()
    left: tuple[LeftFile, ...] = ()


def made_file(name: str, raw: bytes) -> Companion:
    """A file that an edit made, which lies nowhere yet."""
    return Companion(None, name, len(raw), made_source(name, raw).fingerprint(), raw)


def made_source(name: str, raw: bytes) -> Source:
    """The bytes of a file that was made."""
    return MemorySource(raw, PurePath(name))
