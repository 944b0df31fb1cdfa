"""The state dict of a module, walked out of its symbolic state: names and order as
`torch.nn.Module.state_dict` gives them.

Knows how names are joined; which attributes of a module are parameters, buffers and children
differs between pickled modules and TorchScript, and is told by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptconv.pickles.nodes import ORDERED_DICT, Call, Node
from ckptconv.support.errors import LimitExceeded
from ckptconv.support.limits import Limits, in_force
from ckptconv.tensors.refs import TensorObject, TensorRef


class Parts(NamedTuple):
    """What a module itself holds: named parameters, saved buffers, in order, and its children."""

    tensors: list[tuple[str, Node]]
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
    limit = "names"
    if depth > most.depth:
        limit = "depth"
    elif count > most.modules:
        limit = "modules"
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
    if type(value) is Call and value.name in _PARAMETERS and value.args:
        return value.args[0]
    return value


_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
