"""The layers of DeepSpeed's pipelines, which lie in files of their own.

The values of layer N, in ``layer_0N-model_states.pt``, have the keys of the layer; the module, and
what the optimizer names, have ``N.`` before them. Source: `PipelineModule.save_state_dict` in
deepspeed/runtime/pipe/module.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ckptconv.formats.folders.deepspeed_files import UNIVERSAL
from ckptconv.formats.folders.zero import WHOLE, entries
from ckptconv.formats.folders.zero_weights import Weights
from ckptconv.pickles.nodes import Dict, Node, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.tensors.refs import TensorRef

_TIED = "tied_modules."


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
