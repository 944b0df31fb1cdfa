"""The experts of DeepSpeed's mixtures, which lie in files of their own.

The keys of ``layer_L_expert_E_…`` are those of the module, with the number that the expert has
among all. Without ZeRO, ``expp_rank_R_…`` is the optimizer of the ranks that have the set R of
experts; it numbers its parameters. Source: `_save_moe_checkpoint` in deepspeed/runtime/engine.py,
`state_dict` of unfused_optimizer.py and fused_optimizer.py in deepspeed/runtime/fp16 (0.19.8).

ZeRO 3 has none of these: `DeepSpeedEngine._validate_zero3_moe_compatibility` raises there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckptconv.formats.folders.ranks import Copies
from ckptconv.formats.folders.zero import (
    FlatGroup,
    RankStates,
    buffer_names,
    contradiction,
    spread_over_ranks,
)
from ckptconv.formats.folders.zero_optimizer import own_number, require_equal
from ckptconv.pickles.nodes import Node, entries, listed, mapping_pairs, ordered_dict
from ckptconv.support.errors import UnsupportedCheckpoint, errors_at
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.candidates import is_training_state
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.optimizer_forms import Parameter, ParameterOrder, names_of_numbers
from ckptconv.tree.optimizer_parts import OptimizerParts, parts_of
from ckptconv.tree.optimizer_states import SHAPED, OptimizerState, ParamGroup, named_optimizer
from ckptconv.tree.walk import tensor_of

_OTHER_ORDER = "use_data_before_expert_parallelism"
_SIZE = re.compile(r"ep_size_([0-9]{1,6})").fullmatch
_OF_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)([0-9]{1,6})(\..*)").fullmatch


def expert_values(states: Mapping[str, Node], experts: Mapping[tuple[int, int], Node]) -> Node:
    """The state dict of a model with its experts, which go by layer and number.

    Raises `MalformedCheckpoint` where the experts are not those that the model states count.
    """
    module: Node = states.get("module")
    if mapping_pairs(module) is None or states.get("ds_autoep_layers") is not None:
        what = "has experts that are cut out of one tensor (AutoEP), which is not read"
        raise UnsupportedCheckpoint(what)
    _require_experts(_counted(states), experts)
    found = entries(module)
    for (layer, number), root in experts.items():
        values = entries(root)
        if not values or values.keys() & found.keys():
            what = "has no values, or some that another file has too"
            raise contradiction(what, where=f"layer {layer}, expert {number}")
        found.update(values)
    return ordered_dict(list(found.items()), like=module)


def expert_groups(
    ranks: Sequence[RankStates], groups: Iterable[FlatGroup], states: Mapping[str, Node]
) -> Iterator[FlatGroup]:
    """The groups of ZeRO 1 and 2 with the experts of all ranks, by their numbers among all.

    A group of experts lies in the partitions of the ranks that have the same experts: of E sets of
    experts, rank R has the set R mod E. The shapes have the numbers that experts have on a rank.
    Source: `_create_expert_and_data_parallel` in deepspeed/utils/groups.py (0.19.8).
    """
    config = entries(states.get("ds_config"))
    for group in groups:
        counts = ranks[0].counts
        count = counts[min(group.number, len(counts) - 1)]  # one number may be that of all
        if count == len(ranks):
            yield group
            continue
        if len(ranks) % count or config.get(_OTHER_ORDER):
            raise spread_over_ranks(group.where)
        sets = len(ranks) // count
        local = _local_experts(group)
        _require_local(local, sets, states)
        for at in range(sets):
            shapes = {_global(name, at, local): shape for name, shape in group.shapes.items()}
            yield replace(group, ranks=tuple(range(at, len(ranks), sets)), shapes=shapes)


def _local_experts(group: FlatGroup) -> dict[str, int]:
    """How many experts of each layer a rank has, by what stands before their numbers."""
    found: dict[str, set[int]] = {}
    for name in group.shapes:
        match = _OF_EXPERT(name)
        if match is None:
            raise spread_over_ranks(f"{group.where}.{name}")
        found.setdefault(match[1], set()).add(int(match[2]))
    for before, numbers in found.items():
        if numbers != set(range(len(numbers))):
            raise contradiction("does not have the experts of a rank from 0 on", where=before)
    return {before: len(numbers) for before, numbers in found.items()}


def _require_local(local: Mapping[str, int], sets: int, states: Mapping[str, Node]) -> None:
    """Raise where the experts of all ranks are not as many as the model states say."""
    counts = _counted(states)
    for before, count in local.items():
        if count * sets not in counts:
            what = f"has {count} experts on each of {sets} sets of ranks, and not {counts[:1]}"
            raise contradiction(what, where=before)


def _global(name: str, at: int, local: Mapping[str, int]) -> str:
    match = _OF_EXPERT(name)
    assert match is not None  # `_local_experts` has seen all names
    return f"{match[1]}{at * local[match[1]] + int(match[2])}{match[3]}"


def _counted(states: Mapping[str, Node]) -> list[Node]:
    """How many experts the model states count in each layer; one number is for all of them."""
    told: Node = states.get("num_experts")
    return told if type(told) is list else [told]


def _require_experts(told: list[Node], experts: Iterable[tuple[int, int]]) -> None:
    there: dict[int, set[int]] = {}
    for layer, number in experts:
        there.setdefault(layer, set()).add(number)
    if sorted(there) != list(range(len(there))):
        raise contradiction("experts of a layer are missing")
    if len(told) == 1:
        told = told * len(there)
    for layer, numbers in there.items():
        count = told[layer] if len(told) == len(there) else None
        # `count` is what a file claims, and may be huge: one more than there are tells as much
        if type(count) is not int or numbers != set(range(min(count, len(numbers) + 1))):
            what = f"has {len(numbers)} experts in files, and the model states say {count}"
            raise contradiction(what, where=f"layer {layer}")


# ------------------------------------------------------------------ the states of experts, no ZeRO


def experts_optimizer(
    sets: Sequence[Checkpoint], states: Mapping[str, Node], experts: Mapping[tuple[int, int], Node]
) -> Node:
    """The optimizer's states of a model that was trained without ZeRO: what all ranks have alike as
    the first of the `sets` has it, and the experts of each. None where no states are saved.

    Numbers get their names by the order of the keys, and by shapes. In 16 bits the optimizer keeps
    the weights in float32 too, which become ``fp32_param``. Raises `RefusedObject` or
    `UnsupportedCheckpoint` where names are not certain, `MalformedCheckpoint` where the files
    contradict each other.
    """
    nodes = [entries(one.root).get("optimizer") for one in sets]
    if not any(map(entries, nodes)):
        return None
    copies = Copies()
    read: list[_SetOptimizer] = []
    for one, node in zip(sets, nodes, strict=True):
        with errors_at(path=one.path):
            read.append(_SetOptimizer(node))
            read[-1].require_sets(len(sets))
            copies.refuse(one.path, read[-1].of_experts())
    _require_same_groups([each.parts for each in read])
    named = [
        each.named(*_orders(states, experts, number, len(sets))) for number, each in enumerate(read)
    ]
    groups = [
        ParamGroup(
            first.settings,
            list(dict.fromkeys(name for parts in named for name in parts.groups[at].params)),
        )
        for at, first in enumerate(named[0].groups)
    ]
    found: dict[Node, Mapping[str, Node]] = {}
    for parts in reversed(named):  # what all have alike is that of the first
        found.update(parts.states)
    order = [name for group in groups for name in group.params]
    return named_optimizer({name: found[name] for name in order if name in found}, groups)


def _require_same_groups(read: Sequence[OptimizerParts]) -> None:
    """Raise where the files are of different groups or steps."""
    ranks = range(len(read))
    if len({len(parts.groups) for parts in read}) > 1:
        raise contradiction("do not all have as many groups", where="param_groups")
    for at, groups in enumerate(zip(*(parts.groups for parts in read), strict=True)):
        if len({len(group.params) for group in groups}) > 1:
            what = "does not have as many parameters in all files"
            raise contradiction(what, where=f"param_groups.{at}")
        require_equal(
            [group.settings.get("lr") for group in groups], ranks, f"param_groups.{at}.lr"
        )
        firsts = [
            parts.states.get(next(iter(group.params), None), {})
            for parts, group in zip(read, groups, strict=True)
        ]
        require_equal([state.get("step") for state in firsts], ranks, f"param_groups.{at}.step")


def _orders(
    states: Mapping[str, Node], experts: Mapping[tuple[int, int], Node], number: int, sets: int
) -> tuple[ParameterOrder, ParameterOrder]:
    """The parameters that all ranks have, and the experts of set `number`, in their order."""
    buffers = set(map(_local, buffer_names(states)))
    counts = Counter(layer for layer, _ in experts)
    for layer, count in counts.items():
        if count % sets:
            what = f"has {count} experts for the optimizers of {sets} sets of ranks"
            raise UnsupportedCheckpoint(what, where=f"layer {layer}")
    own = [root for (layer, at), root in experts.items() if at // (counts[layer] // sets) == number]
    common = _parameters("the module", [states["module"]], buffers)
    return common, _parameters(f"the experts of set {number}", own, buffers)


def _parameters(source: str, roots: Sequence[Node], buffers: Collection[str]) -> ParameterOrder:
    found = [
        Parameter(name, ref.shape)
        for root in roots
        for name, value in entries(root).items()
        if (ref := tensor_of(value)) is not None and ref.dtype.is_floating
        if _local(name) not in buffers
    ]
    return ParameterOrder(source, found)


def _local(name: str) -> str:
    """A name without the number of an expert, which is another one on a rank."""
    match = _OF_EXPERT(name)
    return name if match is None else f"{match[1]}*{match[3]}"


class _SetOptimizer:
    """The optimizer of one file, as it is in it."""

    def __init__(self, node: Node) -> None:
        said = entries(node)
        inner: Node = said.get("optimizer_state_dict", node)
        if not is_training_state(inner):
            raise UnsupportedCheckpoint("holds no states of a torch optimizer", where="optimizer")
        self.parts = parts_of(OptimizerState("optimizer", (), (), inner), inner)
        self._masters: Node = said.get("fp32_groups")
        self._flat: Node = said.get("fp32_groups_flat")
        self._is_of_experts = [group.settings.get("moe") is True for group in self.parts.groups]

    def require_sets(self, count: int) -> None:
        """Raise where a group says that there are other than `count` sets of experts."""
        names = [group.settings.get("name") for group in self._groups(True)]
        told = [int(found[1]) for name in names if (found := _SIZE(str(name)))]
        if told and max(told) != count:
            what = f"says that there are {max(told)} sets of experts, and {count} have states"
            raise contradiction(what, where="optimizer.param_groups")

    def of_experts(self) -> Iterator[tuple[str, TensorRef]]:
        """The tensors that belong to experts, which no two files have alike."""
        for group in self._groups(True):
            for number in group.params:
                for key, value in self.parts.states.get(number, {}).items():
                    if (ref := tensor_of(value)) is not None:
                        yield f"{number}.{key}", ref

    def named(self, common: ParameterOrder, experts: ParameterOrder) -> OptimizerParts:
        """The states by names: those of the groups of experts by theirs."""
        if not any(self._is_of_experts):
            what = "no group says that its parameters are experts (moe)"
            raise UnsupportedCheckpoint(what, where="optimizer.param_groups")
        if self._flat is not None:
            return self._unflattened(common, experts)
        parts = self._with_masters()
        names: dict[Node, Node] = {}
        for kind, order in ((False, common), (True, experts)):
            groups = self._groups(kind)
            numbers = {number for group in groups for number in group.params}
            states = {at: state for at, state in parts.states.items() if at in numbers}
            of_kind = OptimizerParts(states, groups)
            names |= names_of_numbers(of_kind, order, "optimizer")
        lost = parts.states.keys() - names.keys()
        if lost:
            what = "is of a parameter in none of the groups"
            raise contradiction(what, where=f"optimizer.state.{min(map(str, lost))}")
        made = parts.called(names)
        _require_shapes(made, dict([*common.parameters, *experts.parameters]))
        return made

    def _groups(self, is_of_experts: bool) -> list[ParamGroup]:
        both = zip(self.parts.groups, self._is_of_experts, strict=True)
        return [group for group, is_one in both if is_one is is_of_experts]

    def _with_masters(self) -> OptimizerParts:
        """The states, each with the weight in float32 that the optimizer keeps beside it."""
        if self._masters is None:
            return self.parts
        groups = self.parts.groups
        masters = list(map(listed, listed(self._masters)))
        if list(map(len, masters)) != [len(group.params) for group in groups]:
            what = "does not have a weight for each parameter"
            raise contradiction(what, where="optimizer.fp32_groups")
        states = {name: dict(state) for name, state in self.parts.states.items()}
        for group, weights in zip(groups, masters, strict=True):
            for number, weight in zip(group.params, weights, strict=True):
                states.setdefault(number, {})["fp32_param"] = weight
        return replace(self.parts, states=states)

    def _unflattened(self, common: ParameterOrder, experts: ParameterOrder) -> OptimizerParts:
        """The states of flat groups, of which the parameters lie end to end."""
        groups, flat = self.parts.groups, self._flat
        is_one_each = all(len(group.params) == 1 for group in groups)
        if type(flat) is not list or len(flat) != len(groups) or not is_one_each:
            what = "does not have one tensor for each group"
            raise contradiction(what, where="optimizer.fp32_groups_flat")
        if sorted(self._is_of_experts) != [False, True]:
            what = "no file says which parameters are in each of its flat groups"
            raise UnsupportedCheckpoint(what, where="optimizer.fp32_groups_flat")
        states: dict[Node, dict[str, Node]] = {}
        made: list[ParamGroup] = []
        for at, (group, weights) in enumerate(zip(groups, flat, strict=True)):
            order = experts if self._is_of_experts[at] else common
            shapes = {name: shape for name, shape in order.parameters if shape is not None}
            held = FlatGroup(at, (0,), shapes, (0,) * len(shapes), is_cut=False)
            kept = {**self.parts.states.get(group.params[0], {}), "fp32_param": weights}
            for key, value in kept.items():
                for name, part in _cut(held, key, value):
                    states.setdefault(name, {})[key] = part
            made.append(ParamGroup(group.settings, list(shapes)))
        return replace(self.parts, states=states, groups=made)


def _require_shapes(parts: OptimizerParts, shapes: Mapping[str, Shape | None]) -> None:
    for name, state in parts.states.items():
        for key in state.keys() & {*SHAPED, "fp32_param"}:
            ref = tensor_of(state[key])
            if ref is None or ref.shape != shapes[str(name)]:
                what = "does not have the shape of its parameter"
                raise UnsupportedCheckpoint(what, where=f"optimizer.state.{name}.{key}")


def _cut(group: FlatGroup, key: str, value: Node) -> Iterable[tuple[str, Node]]:
    """What each parameter of a flat group has of one entry of its state."""
    ref = tensor_of(value)
    if ref is None or not ref.shape:
        return [(name, own_number(value, f"{group.where}.{key}")) for name in group.shapes]
    count = sum(map(prod, group.shapes.values()))
    if ref.shape != (count,):
        what = f"has {'x'.join(map(str, ref.shape))} elements, and its parameters have {count}"
        raise UnsupportedCheckpoint(what, where=f"{group.where}.{key}")
    return group.joined([ref])
