"""The layers of DeepSpeed's pipelines and the experts of its mixtures, which lie in files of their
own.

The values of layer N, in ``layer_0N-model_states.pt``, have the keys of the layer; the module, and
what the optimizer names, have ``N.`` before them. The keys of ``layer_L_expert_E_…`` are those of
the module, with the number that the expert has among all. Source: `PipelineModule.save_state_dict`
in deepspeed/runtime/pipe/module.py, `_save_moe_checkpoint` in deepspeed/runtime/engine.py (0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptconv.formats.folders.deepspeed_files import UNIVERSAL
from ckptconv.formats.folders.zero import (
    WHOLE,
    FlatGroup,
    RankStates,
    entries,
    spread_over_ranks,
)
from ckptconv.formats.folders.zero_weights import Weights
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Node, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.tensors.refs import TensorRef

_TIED = "tied_modules."
_OTHER_ORDER = "use_data_before_expert_parallelism"
_OF_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)([0-9]{1,6})(\..*)").fullmatch


def layer_values(layers: Mapping[int, Node]) -> dict[str, Node]:
    """The values of all layers, by number, under the keys of the module."""
    found: dict[str, Node] = {}
    for number, root in layers.items():
        if mapping_pairs(root) is None:
            what = "is not a state dict"
            raise MalformedCheckpoint(what, where=f"layer {number}", hint=WHOLE)
        found.update((f"{number}.{key}", value) for key, value in entries(root).items())
    return found


def pipeline_weights(
    values: Mapping[str, Node],
    states: Sequence[Mapping[str, Node]],
    parameters: Sequence[tuple[str, TensorRef]],
) -> tuple[Node, tuple[str, ...]]:
    """The state dict of a pipeline, in the order of its layers: the fp32 `parameters`, if there are
    some, and what only the layers have. `states` are the model states of its stages.

    Raises `UnsupportedCheckpoint` where layers are tied: the files do not say which.
    """
    names = [name for name, _ in parameters]
    if any(name.startswith(_TIED) for name in names):
        what = "is a pipeline with tied layers, and no file says which layers these are"
        raise UnsupportedCheckpoint(what, where=_TIED.removesuffix("."))
    if len(set(names)) < len(names) or not values.keys() >= set(names):
        odd = next(name for name in names if name not in values or names.count(name) > 1)
        what = "is a parameter of two stages, or of no layer"
        raise MalformedCheckpoint(what, where=odd, hint=WHOLE)
    buffers: list[Node] = []
    for stage in states:
        listed: Node = stage.get("buffer_names")
        buffers += listed if type(listed) in (list, tuple) else ()
    if not parameters:
        _require_count(values.keys() - {name for name in buffers if type(name) is str}, states)
        return ordered_dict(list(values.items())), ()
    module = ordered_dict(list(values.items()))
    weights = Weights([{"module": module, "buffer_names": buffers}], 1)
    joined = entries(weights.join(parameters))
    return ordered_dict([(name, joined[name]) for name in values]), weights.notes


def _require_count(names: Collection[str], states: Iterable[Mapping[str, Node]]) -> None:
    """Without ZeRO no file lists the layers: raise where the optimizers have more parameters than
    there are.
    """
    groups = [entries(stage.get("optimizer")).get("param_groups") for stage in states]
    params = [entries(group).get("params") for each in groups for group in _listed(each)]
    count = sum(len(_listed(each)) for each in params)
    if count > len(names):
        what = f"layers have {len(names)} parameters, and the optimizers of its stages {count}"
        raise MalformedCheckpoint(what, hint=WHOLE)


def _listed(node: Node) -> list[Node]:
    return node if type(node) is list else []


def require_whole_layers(states: Sequence[Mapping[str, Node]], *, is_named: bool) -> None:
    """Raise where the model states say that layers are cut, or are of more stages than there are.
    `is_named`: the names of the layers have a number for their cut.
    """
    dimensions = entries(states[0].get("checkpoint_parallel_dimensions"))
    width: Node = dimensions.get("tp_degree", None if is_named else 1)
    count: Node = states[0].get("mp_world_size", len(states))
    if width != 1:
        what = "is a pipeline-parallel checkpoint whose layers are cut (tensor parallelism)"
        raise UnsupportedCheckpoint(f"{what} of DeepSpeed, which is not read", hint=UNIVERSAL)
    if count != len(states):
        what = f"has the model states of {len(states)} stages, but {count} wrote it"
        raise MalformedCheckpoint(what, hint=WHOLE)


def of_all_stages(optimizers: Sequence[Node], stages: int) -> tuple[list[tuple[Node, Node]], str]:
    """The optimizers of all stages as one, and what is told of it. A group of one stage is a group
    with that of the others where all is the same but the parameters.
    """
    if len(optimizers) != stages or None in optimizers:
        told = f"the layers of {stages} stages are joined; the optimizer's states are left out: "
        return [], told + "each stage numbers its own"
    states: list[tuple[Node, Node]] = []
    groups: list[dict[str, Node]] = []
    for each in map(entries, optimizers):
        states += mapping_pairs(each["state"]) or ()
        for group in map(entries, each["param_groups"]):
            _add_group(groups, group)
    made = Dict(
        [("state", Dict(states)), ("param_groups", [Dict(list(g.items())) for g in groups])]
    )
    told = f"the fp32 weights and the optimizer's states of {stages} stages are joined"
    return [("optimizer", made)], told


def _add_group(groups: list[dict[str, Node]], group: dict[str, Node]) -> None:
    settings = {key: value for key, value in group.items() if key != "params"}
    for other in groups:
        if {key: value for key, value in other.items() if key != "params"} == settings:
            other["params"] = [*other["params"], *group["params"]]
            return
    groups.append(group)


def expert_values(states: Mapping[str, Node], experts: Mapping[tuple[int, int], Node]) -> Node:
    """The state dict of a model with its experts, which go by layer and number.

    Raises `MalformedCheckpoint` where the experts are not those that the model states count.
    """
    module: Node = states.get("module")
    if mapping_pairs(module) is None or states.get("ds_autoep_layers") is not None:
        what = "has experts that are cut out of one tensor (AutoEP), which is not read"
        raise UnsupportedCheckpoint(what)
    _require_experts(states.get("num_experts"), experts)
    found = entries(module)
    for (layer, number), root in experts.items():
        values = entries(root)
        if not values or values.keys() & found.keys():
            what = "has no values, or some that another file has too"
            raise MalformedCheckpoint(what, where=f"layer {layer}, expert {number}", hint=WHOLE)
        found.update(values)
    made = ordered_dict(list(found.items()))
    made.state = module.state if type(module) is Call else ABSENT
    return made


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
        count = counts[group.number] if len(counts) > 1 else counts[0]
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
            what = "does not have the experts of a rank from 0 on"
            raise MalformedCheckpoint(what, where=before, hint=WHOLE)
    return {before: len(numbers) for before, numbers in found.items()}


def _require_local(local: Mapping[str, int], sets: int, states: Mapping[str, Node]) -> None:
    """Raise where the experts of all ranks are not as many as the model states say."""
    told: Node = states.get("num_experts")
    counts = told if type(told) is list else [told]
    for before, count in local.items():
        if count * sets not in counts:
            what = f"has {count} experts on each of {sets} sets of ranks, and not {counts[:1]}"
            raise MalformedCheckpoint(what, where=before, hint=WHOLE)


def _global(name: str, at: int, local: Mapping[str, int]) -> str:
    match = _OF_EXPERT(name)
    assert match is not None  # `_local_experts` has seen all names
    return f"{match[1]}{at * local[match[1]] + int(match[2])}{match[3]}"


def _require_experts(counts: Node, experts: Iterable[tuple[int, int]]) -> None:
    there: dict[int, set[int]] = {}
    for layer, number in experts:
        there.setdefault(layer, set()).add(number)
    told = counts if type(counts) is list else [counts]
    if sorted(there) != list(range(len(there))):
        raise MalformedCheckpoint("experts of a layer are missing", hint=WHOLE)
    if len(told) == 1:  # for all layers
        told = told * len(there)
    for layer, numbers in there.items():
        count = told[layer] if len(told) == len(there) else None
        if type(count) is not int or numbers != set(range(min(count, len(numbers) + 1))):
            what = f"has {len(numbers)} experts in files, and the model states say {count}"
            raise MalformedCheckpoint(what, where=f"layer {layer}", hint=WHOLE)
