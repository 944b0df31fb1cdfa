"""Edits of an open checkpoint: each makes another checkpoint of it, and shares what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from ckptconv.tree.checkpoint import Checkpoint

Edit: TypeAlias = Callable[[Checkpoint], Checkpoint]
"""From a checkpoint to what is to be made of it. The tree that it is given stays as it is."""


def edited(checkpoint: Checkpoint, edits: Iterable[Edit]) -> Checkpoint:
    """The checkpoint after all edits, one after another."""
    for edit in edits:
        checkpoint = edit(checkpoint)
    return checkpoint
