"""Whole modules in a tree (`torch.save(model)`): each becomes the state dict that `model.state_dict()` would give.

The class of a module is never needed: its pickled state names its parameters, buffers and children. Source of the names and
their order: `torch.nn.Module.state_dict` (torch/nn/modules/module.py). What only the class's code knows (`get_extra_state`,
hooks that rename) cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptconv.checkpoint import Checkpoint, is_tensor, place_text, tensor_of, walk
from ckptconv.errors import printable
from ckptconv.module_walk import Parts, detached, state_dict_of
from ckptconv.nodes import Call, Dict, Node, attributes, mapping_pairs
from ckptconv.substitution import calls_of, substituted
from ckptconv.tensors import Storage, TensorObject, TensorRef

_LISTED = 3
_TENSORS = ("_parameters", "_buffers")
_PARTS = (*_TENSORS, "_modules")
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
            made = state_dict_of(node, _parts)
            if made.pairs:
                stand_ins[id(node)] = made
                names.append(f"{node.name} at {place_text(place) or 'the root'}")
                continue
        holders.append(node)
    if not names:
        return checkpoint
    left_out = list(_left_out(checkpoint.root, stand_ins.values()))
    root = substituted(checkpoint.root, holders, stand_ins)
    listed = printable(", ".join(names[:_LISTED])) + ", …" * (len(names) > _LISTED)
    count = "1 whole module is taken as its state dict"
    if len(names) > 1:
        count = f"{len(names)} whole modules are taken as their state dicts"
    note = f"{count}: {listed}"
    return replace(checkpoint, root=root, notes=(*checkpoint.notes, note, *left_out), modules=len(names))


def _left_out(root: Node, state_dicts: Iterable[Call]) -> Iterator[str]:
    """Tell of tensors that modules hold and no state dict has."""
    saved = {id(storage) for found in state_dicts for _, value in found.pairs for storage in _storages(value)}
    names = [
        name
        for name, value in unsaved(root)
        if type(value) in _HOLDERS and any(id(storage) not in saved for _, node in walk(value) for storage in _storages(node))
    ]
    if names:
        listed = printable(", ".join(names[:_LISTED])) + ", …" * (len(names) > _LISTED)
        yield f"tensors that are no part of a module's state dict are left out: {listed}"


_HOLDERS = frozenset((TensorRef, TensorObject, Dict, list, tuple, Call))


def _storages(node: Node) -> list[Storage]:
    tensor = tensor_of(node)
    return [node] if type(node) is Storage else [] if tensor is None else [piece.storage for piece in tensor.pieces]


def _is_module(call: Call) -> bool:
    """Whether a call is a module, by what its state holds; one whose parts are no plain dicts is an object like any other."""
    parts = {key: value for key, value in attributes(call) if type(key) is str and key in _PARTS}
    return len(parts) == len(_PARTS) and all(part is None or mapping_pairs(part) is not None for part in parts.values())


def _parts(module: Call) -> Parts:
    """The parameters, persistent buffers and children of a module, by the names in its pickled state.

    A child that is no module, but holds tensors, is given as a value: whoever writes the state dict has to say that it does not
    fit in.
    """
    state = {key: value for key, value in module.state.pairs if type(key) is str}
    skipped = _names_in(state.get(_NOT_SAVED))
    tensors = [
        (name, value)
        for part in _TENSORS
        for name, value in mapping_pairs(state[part]) or ()
        if type(name) is str and value is not None and not (part == "_buffers" and name in skipped)
    ]
    children: list[tuple[str, Call]] = []
    for name, child in mapping_pairs(state["_modules"]) or ():
        if type(name) is str and type(child) is Call and _is_module(child):
            children.append((name, child))
        elif type(name) is str and any(is_tensor(node) or type(node) is Storage for _, node in walk(child)):
            tensors.append((name, child))
    return Parts(tensors, children)


def unsaved(root: Node) -> Iterator[tuple[str, Node]]:
    """What modules hold beside what their state dicts do: buffers that are not saved, attributes of theirs and of tensors.

    Each with the class of the module and the name in it.
    """
    for call in calls_of(root):
        if not _is_module(call):
            continue
        state = {key: value for key, value in attributes(call) if type(key) is str}
        skipped = _names_in(state.get(_NOT_SAVED))
        for part in _TENSORS:
            for name, value in mapping_pairs(state[part]) or ():
                if part == "_buffers" and name in skipped:
                    yield f"{call.name}.{name}", value
                elif (kept := detached(value)) is not value:
                    yield f"{call.name}.{name}.<state>", _beside(value, kept)
        for name, value in state.items():
            if name not in _PARTS:
                yield f"{call.name}.{name}", value


def _beside(value: Node, kept: Node) -> Node:
    """What a parameter holds beside the tensor of it that is kept."""
    return value.state if type(value) is TensorObject else [part for part in getattr(value, "args", ()) if part is not kept]


def _names_in(node: Node) -> set[str]:
    given = node.args[0] if _is_set(node) else ()
    return {name for name in given if type(name) is str}


def _is_set(node: Node) -> bool:
    return type(node) is Call and node.name == "builtins.set" and bool(node.args) and type(node.args[0]) in (list, tuple)
