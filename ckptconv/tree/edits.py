"""Edits of an open checkpoint: each makes another checkpoint of it, and shares what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from ckptconv.support.errors import OptionRefused
from ckptconv.tree.checkpoint import Checkpoint

Edit: TypeAlias = Callable[[Checkpoint], Checkpoint]
"""From a checkpoint to what is to be made of it. The tree that it is given stays as it is."""


def edited(checkpoint: Checkpoint, edits: Iterable[Edit]) -> Checkpoint:
    """The checkpoint after all edits, one after another.

    Metadata that name tensors follow what is left out. Raises `RefusedObject` where an edit parts
    codes from their scales.
    """
    before = checkpoint
    for edit in edits:
        checkpoint = edit(checkpoint)
    if checkpoint.dropped == before.dropped:
        return checkpoint
    from ckptconv.keys.naming_metadata import followed, naming_entries  # seldom needed
    from ckptconv.tensors.scaled_weights import refuse_apart

    left = dict(checkpoint.tensors())
    # whoever reads codes without their scale takes them for values: that holds for every reader
    for found in before.state_dicts():
        refuse_apart({found.prefix + key: ref for key, ref in found.tensors()}, left)
    if not naming_entries(checkpoint.metadata):
        return checkpoint
    names = {key: key if key in left else None for key, _ in before.tensors()}
    return replace(checkpoint, metadata=followed(checkpoint.metadata, names))


def refuse_no_edits(edits: object) -> None:
    """Raise `OptionRefused` unless `edits` are a list of edits."""
    if not isinstance(edits, (list, tuple)) or not all(map(callable, edits)):
        what = f"edits={edits!r:.100} is not a list of edits"
        raise OptionRefused(what, hint="write it as edits=[Drop('optimizer')]")
