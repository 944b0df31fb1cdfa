"""Whole modules in a tree (`torch.save(model)`): each becomes the state dict that `model.state_dict()` would give.

The class of a module is never needed: its pickled state names its parameters, buffers and children. Source of the names and
their order: `torch.nn.Module.state_dict` (torch/nn/modules/module.py). What only the class's code knows (`get_extra_state`,
hooks that rename) cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptconv.checkpoint import Checkpoint, place_text, tensor_of, walk
from ckptconv.errors import LimitExceeded, printable
from ckptconv.limits import LIMITS
from ckptconv.nodes import ORDERED_DICT, Call, Dict, Node, mapping_pairs
from ckptconv.substitution import calls_of, substituted
from ckptconv.torch_objects import is_tensor_call

_PARTS = ("_parameters", "_buffers", "_modules")
_LISTED = 3
_NOT_SAVED = "_non_persistent_buffers_set"


def flatten_modules(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a state dict in the place of every module that holds tensors, and a note that says so."""
    if not any(_is_module(node) for node in calls_of(checkpoint.root)):
        return checkpoint
    stand_ins: dict[int, Node] = {}
    names: list[str] = []
    holders: list[Node] = []
    for place, node in walk(checkpoint.root, stand_ins):
        if type(node) is Call and _is_module(node):
            pairs = list(_state_dict(node))
            if pairs:
                made = Call(ORDERED_DICT, ())
                made.pairs = pairs
                stand_ins[id(node)] = made
                names.append(f"{node.name} at {place_text(place) or 'the root'}")
                continue
        holders.append(node)
    if not names:
        return checkpoint
    root = substituted(checkpoint.root, holders, stand_ins)
    listed = printable(", ".join(names[:_LISTED])) + ", …" * (len(names) > _LISTED)
    note = f"{len(names)} whole modules are taken as their state dicts: {listed}"
    return replace(checkpoint, root=root, notes=(*checkpoint.notes, note))


def _is_module(call: Call) -> bool:
    return type(call.state) is Dict and set(_PARTS) <= {key for key, _ in call.state.pairs if type(key) is str}


def _state_dict(module: Call) -> Iterator[tuple[str, Node]]:
    """The names and tensors of a module's state dict: its parameters, its persistent buffers, then its children's."""
    work: list[tuple[str, Call, tuple[int, ...]]] = [("", module, ())]
    while work:
        prefix, current, above = work.pop()
        if len(above) > LIMITS.depth or id(current) in above:
            raise LimitExceeded("a module holds itself, or modules nest too deeply", where=prefix[:60])
        state = {key: value for key, value in current.state.pairs if type(key) is str}
        skipped = _names_in(state.get(_NOT_SAVED))
        for part in ("_parameters", "_buffers"):
            for name, value in mapping_pairs(state[part]) or ():
                is_saved = part == "_parameters" or name not in skipped
                if type(name) is str and is_saved and (tensor_of(value) is not None or is_tensor_call(value)):
                    yield prefix + name, value
        children = [
            (f"{prefix}{name}.", child, (*above, id(current)))
            for name, child in mapping_pairs(state["_modules"]) or ()
            if type(name) is str and type(child) is Call and _is_module(child)
        ]
        work.extend(reversed(children))


def _names_in(node: Node) -> set[str]:
    given = node.args[0] if _is_set(node) else ()
    return {name for name in given if type(name) is str}


def _is_set(node: Node) -> bool:
    return type(node) is Call and node.name == "builtins.set" and bool(node.args) and type(node.args[0]) in (list, tuple)
