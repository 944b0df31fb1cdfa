"""Whole modules in a tree (`torch.save(model)`): each becomes the state dict that `model.state_dict()` would give.

The class of a module is never needed: its pickled state names its parameters, buffers and children. Source of the names and
their order: `torch.nn.Module.state_dict` (torch/nn/modules/module.py). What only the class's code knows (`get_extra_state`,
hooks that rename) cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptconv.checkpoint import Checkpoint, place_text, walk
from ckptconv.errors import printable
from ckptconv.module_walk import Parts, state_dict_of
from ckptconv.nodes import ABSENT, Call, Dict, Node, mapping_pairs
from ckptconv.tensors import TensorObject, TensorRef

_TENSORS = ("_parameters", "_buffers")
_PARTS = (*_TENSORS, "_modules")
_NOT_SAVED = "_non_persistent_buffers_set"


def flatten_modules(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a state dict in the place of every module that holds tensors, and a note that says so."""
    if not any(_is_module(node) for node in _calls(checkpoint.root)):
        return checkpoint
    stand_ins: dict[int, Node] = {}
    names: list[str] = []
    holders: list[Node] = []
    for place, node in walk(checkpoint.root, stand_ins):
        if type(node) is Call and _is_module(node):
            made = state_dict_of(node, _parts)
            if made.pairs:
                stand_ins[id(node)] = made
                names.append(f"{node.name} at {place_text(place) or 'the root'}")
                continue
        holders.append(node)
    if not names:
        return checkpoint
    root = _substituted(checkpoint.root, holders, stand_ins)
    first = printable(", ".join(names[:3])) + ", …" * (len(names) > 3)
    note = f"{len(names)} whole modules are taken as their state dicts: {first}"
    return replace(checkpoint, root=root, notes=(*checkpoint.notes, note))


_LEAVES = frozenset((TensorRef, TensorObject, str, int, float, bool, bytes, type(None)))


def _calls(root: Node) -> Iterator[Call]:
    """Every call of a tree, quickly: leaves are not looked at."""
    seen: set[int] = set()
    work: list[Node] = [root]
    while work:
        node = work.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kind = type(node)
        if kind is Call:
            yield node
            inner = [*node.args, *node.items, *(value for _, value in node.pairs)]
            if node.state is not ABSENT:
                inner.append(node.state)
        elif kind is Dict:
            inner = [value for _, value in node.pairs]
        elif kind is list or kind is tuple:
            inner = node
        else:
            continue
        work.extend([value for value in inner if type(value) not in _LEAVES])


def _is_module(call: Call) -> bool:
    return type(call.state) is Dict and set(_PARTS) <= {key for key, _ in call.state.pairs if type(key) is str}


def _parts(module: Call) -> Parts:
    """The parameters, persistent buffers and children of a module, by the names in its pickled state."""
    state = {key: value for key, value in module.state.pairs if type(key) is str}
    skipped = _names_in(state.get(_NOT_SAVED))
    tensors = [
        (name, value)
        for part in _TENSORS
        for name, value in mapping_pairs(state[part]) or ()
        if type(name) is str and value is not None and not (part == "_buffers" and name in skipped)
    ]
    children = [
        (name, child)
        for name, child in mapping_pairs(state["_modules"]) or ()
        if type(name) is str and type(child) is Call and _is_module(child)
    ]
    return Parts(tensors, children)


def _names_in(node: Node) -> set[str]:
    given = node.args[0] if _is_set(node) else ()
    return {name for name in given if type(name) is str}


def _is_set(node: Node) -> bool:
    return type(node) is Call and node.name == "builtins.set" and bool(node.args) and type(node.args[0]) in (list, tuple)


def _substituted(root: Node, holders: list[Node], stand_ins: dict[int, Node]) -> Node:
    """`root` with every node replaced by what stands in for it; containers are changed in place, tuples are made anew."""
    tuples = [node for node in holders if type(node) is tuple]
    changed = True
    while changed:
        changed = False
        for node in tuples:
            new = _mapped(node, stand_ins)
            known = stand_ins.get(id(node), node)
            if any(a is not b for a, b in zip(new, known, strict=True)):
                stand_ins[id(node)] = new
                changed = True
    for node in holders:
        if type(node) is list:
            node[:] = _mapped(node, stand_ins)
        elif type(node) is Dict:
            node.pairs = _mapped_pairs(node.pairs, stand_ins)
        elif type(node) is Call:
            node.args = _mapped(node.args, stand_ins)
            node.items = list(_mapped(node.items, stand_ins))
            node.pairs = _mapped_pairs(node.pairs, stand_ins)
            node.state = stand_ins.get(id(node.state), node.state)
    return stand_ins.get(id(root), root)


def _mapped(nodes: Node, stand_ins: dict[int, Node]) -> tuple[Node, ...]:
    return tuple(stand_ins.get(id(node), node) for node in nodes)


def _mapped_pairs(pairs: Node, stand_ins: dict[int, Node]) -> list[tuple[Node, Node]]:
    return [(stand_ins.get(id(key), key), stand_ins.get(id(value), value)) for key, value in pairs]
