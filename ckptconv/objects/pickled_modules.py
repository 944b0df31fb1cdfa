"""Modules as the state dict that `torch.nn.Module.state_dict` gives: names, order, and what of a
pickled module is saved.

Which attributes are parameters, buffers and children differs between pickled modules, whose state
is read here, and TorchScript, which tells them by `Parts`. Source of the names: `torch.nn.Module`
(torch/nn/modules/module.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckptconv.objects.bitsandbytes import Saved, fields, saved_beside
from ckptconv.objects.encodings import PARAMETERS, holds_tensors
from ckptconv.pickles.nodes import ORDERED_DICT, Call, Dict, Node, mapping_pairs
from ckptconv.support.errors import LimitExceeded
from ckptconv.support.limits import Limits, in_force
from ckptconv.tensors.refs import TensorObject, TensorRef

NamedNodes = list[tuple[str, Node]]


class Parts(NamedTuple):
    """What a module itself holds: named parameters, saved buffers, in order, and its children."""

    tensors: NamedNodes
    children: list[tuple[str, Call]]


def state_dict_of(module: Call, parts_of: Callable[[Call], Parts]) -> Call:
    """The OrderedDict that `module.state_dict()` would give: a module's own tensors, then those of
    each of its children.

    Tensors are detached, as they are there. Raises `LimitExceeded` when modules nest too deeply,
    hold themselves, or are shared so often that their names would not end.
    """
    pairs: list[tuple[Node, Node]] = []
    work: list[tuple[str, Call, int]] = [("", module, 0)]
    known: dict[int, Parts] = {}
    count = written = 0
    most = in_force()
    while work:
        prefix, current, depth = work.pop()
        if (parts := known.get(id(current))) is None:
            parts = known[id(current)] = parts_of(current)
        count += 1
        written += len(prefix) * (len(parts.tensors) + len(parts.children))
        if depth > most.depth or count > most.modules or written > most.names:
            raise _too_many(prefix, depth, count, most)
        pairs += [(prefix + name, detached(value)) for name, value in parts.tensors]
        work += [(f"{prefix}{name}.", child, depth + 1) for name, child in reversed(parts.children)]
    made = Call(ORDERED_DICT, ())
    made.pairs = pairs
    return made


def _too_many(prefix: str, depth: int, count: int, most: Limits) -> LimitExceeded:
    limit = "modules" if count > most.modules else "names"
    limit = "depth" if depth > most.depth else limit
    what = "a module contains itself, or too many modules"
    return LimitExceeded(what, limit=limit, allowed=getattr(most, limit), where=prefix[:60] + "…")


def detached(value: Node) -> Node:
    """The tensor of a state dict for a parameter or buffer: no gradient, no Parameter around it.

    Other objects stay.
    """
    if type(value) is TensorObject and value.cls is None:
        value = value.tensor
    if type(value) is TensorRef and value.requires_grad:
        return value._replace(requires_grad=False)
    if type(value) is Call and value.name in PARAMETERS and value.args:
        return value.args[0]
    return value


# ---------------------------------------------------------------------------------- pickled modules

_PARTS = ("_parameters", "_buffers", "_modules")
_NOT_SAVED = "_non_persistent_buffers_set"
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


def is_module(node: Node) -> bool:
    """Whether a node is a module: an object of any class with parameters, buffers and children.

    One whose parts are not plain dicts is an object like any other.
    """
    if type(node) is not Call or type(node.state) is not Dict:
        return False
    parts = {key: value for key, value in node.state.pairs if type(key) is str and key in _PARTS}
    are_plain = all(part is None or mapping_pairs(part) is not None for part in parts.values())
    return are_plain and len(parts) == len(_PARTS)


def saved_tensors(module: Call) -> NamedNodes:
    """What `state_dict()` gives of a module itself: parameters, persistent buffers, and what is
    known of its class.

    A child that is not a module by its pickled form, but holds tensors, is given too, with a dot
    behind its name: whoever writes the state dict has to say that it does not fit in.
    """
    beside = saved_by_class(module)
    own = [(name, value) for _, name, value, is_saved in own_tensors(module) if is_saved]
    others = [(name, child) for name, child in _children(module) if not is_module(child)]
    odd = [(f"{name}.", child) for name, child in others if holds_tensors(child)]
    return own + odd if beside is None else own + beside.tensors + odd


def own_tensors(module: Call) -> Iterator[tuple[str, str, Node, bool]]:
    """The parameters and buffers of a module: their kind, name and value, and whether they are in
    its state dict.
    """
    state = fields(module)
    skipped = _names_in(state.get(_NOT_SAVED))
    for kind in _PARTS[:2]:
        for name, value in mapping_pairs(state[kind]) or ():
            if type(name) is str and value is not None:
                yield kind, name, value, not (kind == "_buffers" and name in skipped)


def child_modules(module: Call) -> list[tuple[str, Call]]:
    """The children of a module, by name."""
    return [(name, child) for name, child in _children(module) if is_module(child)]


def _children(module: Call) -> NamedNodes:
    pairs = mapping_pairs(fields(module)["_modules"]) or ()
    return [(name, child) for name, child in pairs if type(name) is str]


def other_attributes(module: Call) -> NamedNodes:
    """What a module holds besides parameters, buffers and children."""
    return [(name, value) for name, value in fields(module).items() if name not in _PARTS]


def saving_hooks(module: Call) -> Iterator[Node]:
    """The functions that change what the module saves."""
    state = fields(module)
    for name in _HOOKS:
        for _, hook in mapping_pairs(state.get(name)) or ():
            yield hook


def saved_by_class(module: Call) -> Saved | None:
    """What the class of a module is known to save beside parameters and buffers; None where nothing
    is known.
    """
    own = own_tensors(module)
    parameters = {name: value for kind, name, value, _ in own if kind == "_parameters"}
    return saved_beside(module.name, fields(module), parameters) if parameters else None


def _names_in(node: Node) -> set[str]:
    match node:
        case Call(name="builtins.set", args=(given, *_)) if type(given) in (list, tuple):
            return {name for name in given if type(name) is str}
    return set()
