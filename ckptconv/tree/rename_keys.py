"""Key rules as an edit."""

from __future__ import annotations

from dataclasses import replace

from ckptconv.keys.key_map import KeyRules
from ckptconv.keys.naming_metadata import followed
from ckptconv.pickles.nodes import Node, containers, substituted
from ckptconv.support.records import dataclass
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.optimizer_names import follow_names
from ckptconv.tree.renaming import rename_state_dicts
from ckptconv.tree.reshaping import with_config


@dataclass(frozen=True, slots=True)
class RenameKeys:
    """An edit: gives the keys of all state dicts (`Checkpoint.state_dicts`) their names by `rules`;
    the names in optimizer states follow.

    A dict of dicts of tensors has a state dict in each of them; rules over the keys of a part that
    `only` names belong to the call itself.
    It is the last edit where there are others: they know the names of the file.
    """

    rules: KeyRules

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        overlay: dict[int, Node] = {}
        rules = with_config(self.rules, checkpoint)
        found = checkpoint.state_dicts()
        applied, renamed, skipped = rename_state_dicts(found, overlay, rules, checkpoint)
        follow_names(checkpoint.root, overlay, found, list(zip(found, renamed, strict=True)))
        names: dict[str, str | None] = {}
        for done in applied:
            prefix = done.item.prefix
            for key, new in done.names().items():
                names[prefix + key] = None if new is None else prefix + new
        return replace(
            checkpoint,
            root=substituted(checkpoint.root, containers(checkpoint.root), overlay),
            metadata=followed(checkpoint.metadata, names),
            dropped=(*checkpoint.dropped, *(item.node for item in skipped)),
        )
