"""Whole modules in a tree (`torch.save(model)`): each becomes the state dict that
`model.state_dict()` would give.

The class of a module is never needed: its pickled state names its parameters, buffers and children.
Source of the names and their order: `torch.nn.Module.state_dict` (torch/nn/modules/module.py). What
only the class's code knows (`get_extra_state`, hooks that rename) cannot be had; what a module
holds besides is kept in mind as a `Stray`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptconv.objects.pickled_modules import (
    Parts,
    child_modules,
    is_module,
    saved_tensors,
    state_dict_of,
)
from ckptconv.pickles.nodes import Call, Node, substituted
from ckptconv.support.text import first_few_in_short
from ckptconv.tree.checkpoint import Checkpoint, Stray
from ckptconv.tree.walk import place_text, walk

_LISTED = 3


def holds_modules(calls: Iterable[Call]) -> bool:
    """Whether some of the calls of a tree are whole modules."""
    return any(map(is_module, calls))


def flatten_modules(checkpoint: Checkpoint, calls: Iterable[Call] | None = None) -> Checkpoint:
    """The checkpoint with a state dict in the place of every module that holds tensors, and a note
    that says so; the tree of the given one stays as it is.

    `calls` are those of its tree, where they are known and nobody has looked for modules yet.
    """
    if not (checkpoint.has_whole_modules if calls is None else holds_modules(calls)):
        return checkpoint
    from ckptconv.tree.stray_tensors import strays_of  # few checkpoints have modules

    stand_ins: dict[int, Node] = {}
    classes: list[str] = []
    names: list[str] = []
    holders: list[Node] = []
    strays: list[Stray] = []
    parts: list[Node] = []
    for place, node in walk(checkpoint.root, stand_ins):
        if type(node) is Call and is_module(node):
            made = state_dict_of(node, lambda one: Parts(saved_tensors(one), child_modules(one)))
            if made.pairs:
                stand_ins[id(node)] = made
                classes.append(node.name)
                path = place_text(place)
                names.append(f"{node.name} at {path or 'the root'}")
                found, used = strays_of(node, made)
                strays += [
                    replace(stray, path=f"{path}.{stray.path}".strip(".")) for stray in found
                ]
                parts += used
                continue
        holders.append(node)
    if not names:
        return checkpoint
    root = substituted(checkpoint.root, holders, stand_ins)
    return replace(
        checkpoint,
        root=root,
        notes=(*checkpoint.notes, *_notes(names, strays)),
        modules=len(names),
        has_whole_modules=False,
        module_classes=tuple(classes),
        module_strays=tuple(strays),
        module_parts=tuple(parts),
    )


def _notes(names: Sequence[str], strays: Sequence[Stray]) -> Iterator[str]:
    count = "1 whole module is read as its state dict"
    if len(names) > 1:
        count = f"{len(names)} whole modules are read as their state dicts"
    yield f"{count}: {first_few_in_short(names, _LISTED)}"
    paths = [stray.path or "the root" for stray in strays if stray.is_refused]
    if paths:
        listed = first_few_in_short(paths, _LISTED)
        yield f"its state dict may lack tensors outside parameters and buffers: {listed}"
