"""Optimizer states taken apart, whichever of torch's three forms they have, and made in another.

`torch.optim.Optimizer.state_dict()` numbers its parameters (torch/optim/optimizer.py);
`get_optimizer_state_dict` names them; with ``flatten_optimizer_state_dict=True`` it has the names
in the keys, ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``
(torch/distributed/checkpoint/state_dict.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ckptconv.pickles.nodes import Dict, Node, mapping_pairs
from ckptconv.support.errors import RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.tree.candidates import is_training_state
from ckptconv.tree.optimizer_states import OptimizerState, ParamGroup, flat_keys, named_optimizer
from ckptconv.tree.walk import PLAIN

_PARTS = ("state", "param_groups")


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """An optimizer state: what it keeps of each parameter, by number or by name, the groups of
    parameters in their order, and the `others`: the items beside these.

    `has_order`: the parameters of each group stand in the order in which the optimizer has them.
    """

    states: Mapping[Node, Mapping[str, Node]]
    groups: Sequence[ParamGroup]
    others: Sequence[tuple[Node, Node]] = ()
    has_order: bool = True

    @property
    def parameters(self) -> list[Node]:
        """All parameters: those of the groups in their order, and those that only have a state."""
        grouped = chain.from_iterable(group.params for group in self.groups)
        return list(dict.fromkeys([*grouped, *self.states]))

    @property
    def is_numbered(self) -> bool:
        """Whether any parameter is known by a number."""
        return any(type(name) is int for name in self.parameters)

    def called(self, names: Mapping[Node, Node]) -> OptimizerParts:
        """The same, each parameter called as `names` say."""
        states = {names[name]: state for name, state in self.states.items()}
        groups = [
            ParamGroup(group.settings, [names[name] for name in group.params])
            for group in self.groups
        ]
        return OptimizerParts(states, groups, self.others, self.has_order)


def parts_of(state: OptimizerState, node: Node) -> OptimizerParts:
    """The parts of an optimizer state, which stands in `node`.

    Raises `RefusedObject` where it has a form that is none of torch's.
    """
    pairs = list(mapping_pairs(node) or ())
    if not is_training_state(node):
        return _flat_parts(pairs)
    parts = {key: value for key, value in pairs if key in _PARTS}
    groups = [_group(group, state.path) for group in parts["param_groups"]]
    _refuse_twice([name for group in groups for name in group.params], state.path)
    return OptimizerParts(
        dict(_states(parts["state"], state.path)),
        groups,
        [pair for pair in pairs if pair[0] not in _PARTS],
    )


def _states(node: Node, path: str) -> Iterator[tuple[Node, dict[str, Node]]]:
    for name, state in mapping_pairs(node) or ():
        pairs = mapping_pairs(state)
        is_plain = type(name) in (int, str) and pairs is not None
        if not is_plain or any(type(key) is not str for key, _ in pairs or ()):
            what = "is not a dict of what an optimizer keeps of a parameter"
            raise RefusedObject(what, where=f"{path}.state.{name!s:.100}", hint=_LEAVE)
        yield name, dict(pairs or ())


_LEAVE = "leave it as it is: without --optimizer"


def _refuse_twice(names: Sequence[Node], path: str) -> None:
    """Refuse parameters that are not told apart: the state of one would be that of another."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        what = f"its groups have {printable(str(twice[0]))} more than once"
        raise RefusedObject(what, where=f"{path}.param_groups".strip("."), hint=_LEAVE)


def _group(node: Node, path: str) -> ParamGroup:
    settings = dict(mapping_pairs(node) or ())
    params = settings.pop("params", None)
    if type(params) is not list or any(type(name) not in (int, str) for name in params):
        what = "has a group without a list of parameters"
        raise RefusedObject(what, where=f"{path}.param_groups", hint=_LEAVE)
    names = settings.get("param_names")
    if type(names) is list and len(names) == len(params) and all(type(it) is int for it in params):
        del settings["param_names"]
        return _NamedGroup(settings, params, tuple(names))
    return ParamGroup(settings, params)


@dataclass(frozen=True, slots=True)
class _NamedGroup(ParamGroup):
    """A group of numbers whose names are said beside them (torch 2.6, `named_parameters()`)."""

    names: tuple[Node, ...] = ()


def names_beside(parts: OptimizerParts, path: str) -> dict[Node, Node] | None:
    """The names that the groups of numbers say themselves; None where one does not.

    Raises `RefusedObject` where two numbers have one name.
    """
    found: dict[Node, Node] = {}
    for group in parts.groups:
        if not isinstance(group, _NamedGroup):
            return None
        found |= zip(group.params, group.names, strict=True)
    _refuse_twice(list(found.values()), path)
    return found if found.keys() >= set(parts.parameters) else None


def _flat_parts(pairs: Sequence[tuple[Node, Node]]) -> OptimizerParts:
    """Of a flattened state, in which each parameter says its settings: those with the same settings
    are one group, in the order in which they are met.
    """
    states: dict[Node, dict[str, Node]] = {}
    settings: dict[str, dict[str, Node]] = {}
    for key, (_, value) in zip(flat_keys([key for key, _ in pairs]), pairs, strict=True):
        if key.is_name_last:
            what = "is in Megatron's form, which does not say the groups of parameters"
            raise RefusedObject(what, hint=_LEAVE)
        of = states if key.part == "state" else settings
        of.setdefault(key.name, {})[key.field] = value
    groups: list[tuple[dict[str, Node], list[str]]] = []
    known: dict[object, int] = {}
    for name, given in settings.items():
        same = frozenset((key, _comparable(value)) for key, value in given.items())
        at = known.setdefault(same, len(groups))
        if at == len(groups):
            groups.append((given, []))
        groups[at][1].append(name)
    made = [ParamGroup(given, names) for given, names in groups]
    return OptimizerParts(states, made, has_order=False)


def _comparable(value: Node) -> object:
    """What is equal for equal settings; a tensor is equal only to itself."""
    if type(value) in (tuple, list):
        return tuple(map(_comparable, value))
    # not the value itself: 1 and True are equal to Python, and NaN is not equal to NaN
    return repr(value) if type(value) in PLAIN else id(value)


def named(parts: OptimizerParts) -> Dict:
    """The form that goes by names."""
    made = named_optimizer(parts.states, parts.groups)
    return Dict([*made.pairs, *parts.others])


def numbered(parts: OptimizerParts) -> Dict:
    """The form that goes by numbers: those of the parameters in the order of the groups.

    Raises `RefusedObject` for a state of a parameter of no group, which torch would not take.
    """
    grouped = set(chain.from_iterable(group.params for group in parts.groups))
    lost = [name for name in parts.states if name not in grouped]
    if lost:
        what = f"the state of {printable(str(lost[0]))} belongs to none of the optimizer's groups"
        raise RefusedObject(what, hint="write it by names: --optimizer names")
    numbers = {name: at for at, name in enumerate(parts.parameters)}
    again = parts.called(numbers)
    states = dict(sorted(again.states.items()))  # as torch.optim has them
    return named(OptimizerParts(states, again.groups, parts.others))


def flattened(parts: OptimizerParts) -> Dict:
    """The form that has the names in its keys."""
    pairs: list[tuple[Node, Node]] = []
    for name, state in parts.states.items():
        pairs += [(f"state.{name}.{key}", value) for key, value in state.items()]
    for group in parts.groups:
        for name in group.params:
            settings = group.settings.items()
            pairs += [(f"param_groups.{name}.{key}", value) for key, value in settings]
    return Dict([*pairs, *parts.others])
