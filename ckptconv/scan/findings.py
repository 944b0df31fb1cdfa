"""One thing that a pickle of a file names or does."""

from __future__ import annotations

from dataclasses import dataclass

from ckptconv.objects.threats import Level


@dataclass(frozen=True, slots=True)
class Sighting:
    """One thing that a pickle of a file names or does.

    `where` is the record, and the stream within it, in which it stands; `name` the global as the
    pickle has it (empty where there is none), `at` the byte of the stream.
    """

    where: str
    name: str
    level: Level
    reason: str
    at: int
