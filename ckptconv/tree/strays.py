"""What whole modules hold besides their state dicts: refused, or listed as left out."""

from __future__ import annotations

from collections.abc import Sequence

from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import RefusedObject
from ckptconv.support.text import first_few
from ckptconv.tree.checkpoint import Checkpoint, Stray
from ckptconv.tree.settling import Skipped, Unknown
from ckptconv.tree.walk import walk

_LISTED = 4


def settle_strays(checkpoint: Checkpoint, part: Node, unknown: Unknown) -> tuple[Skipped, ...]:
    """What is left out of the state dicts of whole modules in `part` of a checkpoint.

    Raises `RefusedObject` where something would be lost of which only a module's own code knows
    whether it is saved, unless `unknown` is ``drop``.
    """
    if not checkpoint.module_strays:
        return ()
    there = {id(node) for _, node in walk(part)}
    strays = [stray for stray in checkpoint.module_strays if id(stray.state_dict) in there]
    refused = [stray for stray in strays if stray.is_refused]
    if refused and unknown != "drop":
        raise _refusal(refused, script=checkpoint.container.is_script)
    return tuple(Skipped(stray.path, f"left out: {stray.reason}", stray.node) for stray in strays)


def _refusal(refused: Sequence[Stray], *, script: bool) -> RefusedObject:
    first, others = refused[0], [stray.path or "the root" for stray in refused[1:]]
    more = first_few(others, _LISTED)
    return RefusedObject(
        f"{first.reason}; the state dict would lack it"
        + f" (and {len(others)} more: {more})" * bool(others),
        where=first.path or "the whole file",
        hint="--unknown drop leaves it out; torch.jit.load reads the archive itself"
        if script
        else _HINT,
    )


_HINT = (
    "save model.state_dict() where the class is installed; --unknown drop leaves it out, "
    "--unknown keep keeps the whole module in a torch file"
)
