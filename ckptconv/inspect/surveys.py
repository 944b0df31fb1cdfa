"""What `inspect` says of several paths: the facts about each checkpoint among them, and which
conversion would help.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptconv.formats.registry import checkpoints_of, open_to_look
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.inspection import Inspection
from ckptconv.io.location import Location
from ckptconv.support.errors import CheckpointError
from ckptconv.tree.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ckptconv.convert.prescriptions import Prescription


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A checkpoint that was looked at: the facts, and what conversion makes it portable (None: it
    is).
    """

    paths: tuple[Location, ...]
    found: Inspection
    fix: Prescription | CheckpointError | None


@dataclass(frozen=True, slots=True)
class Unread:
    """What could not be opened, and why."""

    paths: tuple[Location, ...]
    error: CheckpointError


def survey(
    paths: Sequence[str | os.PathLike[str]], depth: int, tag: str | None
) -> Iterator[Surveyed | Unread]:
    """Look at the checkpoints that paths name; the files of all ranks of one are one."""
    for group in checkpoints_of(paths):
        try:
            yield _surveyed(group, depth, tag)
        except CheckpointError as error:
            yield Unread(group, error)


def _surveyed(paths: tuple[Location, ...], depth: int, tag: str | None) -> Surveyed:
    with open_to_look(paths, tag=tag) as checkpoint:
        found = inspect_checkpoint(checkpoint, depth)
        fix = None if found.portable else _fix(checkpoint)
    return Surveyed(
        paths, replace(found, named=tuple(map(str, paths))) if len(paths) > 1 else found, fix
    )


def _fix(checkpoint: Checkpoint) -> Prescription | CheckpointError:
    from ckptconv.convert.prescriptions import Fix, workable  # planning takes a while to import

    return workable(Fix(), checkpoint)
