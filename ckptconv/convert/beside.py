"""What lies beside a model: the files that are copied with it, and those that are not."""

from __future__ import annotations

from dataclasses import dataclass

from ckptconv.io.location import Location
from ckptconv.io.source import Fingerprint


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that is copied: where it lies, its path in the folder, its size and what tells it from
    others; `raw` is what the copy says where that is something else.
    """

    place: Location
    name: str
    nbytes: int
    stamp: Fingerprint | None
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file of the folder that is not copied, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Beside:
    """What lies beside a model: what is copied, and what is not."""

    copied: tuple[Companion, ...] = ()
    left: tuple[LeftFile, ...] = ()
