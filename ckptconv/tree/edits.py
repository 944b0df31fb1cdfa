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

    Metadata that name tensors follow these, where an edit does not see to that itself. Raises
    `RefusedObject` where an edit, whoever wrote it, parts codes from their scales.
    """
    for edit in edits:
        made: object = edit(checkpoint)
        if not isinstance(made, Checkpoint):
            what = f"the edit {edit!r:.100} gave {made!r:.100}, and no checkpoint"
            raise OptionRefused(what, hint="it returns the checkpoint that it makes")
        checkpoint = _checked(checkpoint, made)
    return checkpoint


def _checked(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    if after.root is before.root:
        return after
    from ckptconv.keys.naming_metadata import followed, naming_entries  # seldom needed
    from ckptconv.tensors.refs import view_identity
    from ckptconv.tensors.scaled_weights import refuse_apart

    left = dict(after.tensors())
    # whoever reads codes without their scale takes them for values: that holds for every reader
    for found in before.state_dicts():
        refuse_apart({found.prefix + key: ref for key, ref in found.tensors()}, left)
    if after.metadata is not before.metadata or not naming_entries(before.metadata):
        return after
    now = {view_identity(ref): key for key, ref in left.items()}
    names = {
        key: key if key in left else now.get(view_identity(ref)) for key, ref in before.tensors()
    }
    return replace(after, metadata=followed(before.metadata, names))


def refuse_no_edits(edits: object, name: str = "edits") -> None:
    """Raise `OptionRefused` unless `edits` are a list of edits; `name` is that of the argument."""
    if not isinstance(edits, (list, tuple)) or not all(map(callable, edits)):
        what = f"{name}={edits!r:.100} is not a list of edits"
        raise OptionRefused(what, hint=f"write it as {name}=[Drop('optimizer')]")
