"""The layers and stages of DeepSpeed's pipelines, joined.

The values of layer N, in ``layer_0N-model_states.pt``, have the keys of the layer; the module, and
what the optimizer names, have ``N.`` before them. What several layers share (`TiedLayerSpec`) is
``tied_modules.KEY.`` in the module, and for the optimizer of each stage that has one of these
layers. Their files have the values again, unless the layer has a function of its own; no file says
which layers these are, so that is told by the values. Source: `PipelineModule._build` and
`save_state_dict` in deepspeed/runtime/pipe/module.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from math import prod

from ckptconv.formats.folders.deepspeed_files import UNIVERSAL
from ckptconv.formats.folders.deepspeed_numbers import (
    count_elements,
    count_equal,
    count_numbers,
    holds_others,
    joined_numbers,
)
from ckptconv.formats.folders.deepspeed_tensors import INFO, stages_have_the_same
from ckptconv.formats.folders.ranks import are_equal, mark_of, varies
from ckptconv.formats.folders.zero import JoinedWeights, buffer_names, contradiction
from ckptconv.pickles.nodes import Node, entries, listed, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text
from ckptconv.tensors.computed import Widener
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.optimizer_states import ParamGroup, named_optimizer
from ckptconv.tree.walk import tensor_of

_TIED = "tied_modules."
_COPIED = "one was copied over the other: fetch both again"

Layers = Mapping[int, Mapping[str, Node]]
"""The values of each layer, by its number and their keys in its file."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline: its model states, and by the names of parameters the fp32 weights and
    the optimizer's states, as far as there are partitions of them.
    """

    states: Mapping[str, Node]
    weights: Mapping[str, TensorRef]
    optimizer: Node = None

    def kept(self, name: str) -> dict[str, Node]:
        """The weight of a parameter and what the optimizer keeps of it."""
        state = entries(entries(entries(self.optimizer).get("state")).get(name))
        return {"": self.weights[name], **state}


def read_layers(roots: Mapping[int, Node]) -> Layers:
    """The values of layers, of the trees of their files."""
    for number, root in roots.items():
        if mapping_pairs(root) is None:
            raise contradiction("is not a state dict", where=f"layer {number}")
    return {number: entries(root) for number, root in roots.items()}


def has_ties(states: Mapping[str, Node]) -> bool:
    """Whether the model states of a stage may have parameters of tied layers."""
    named: Node = states.get("param_shapes")
    groups = listed(named) or [named]
    return named is None or any(key.startswith(_TIED) for one in groups for key in entries(one))


def shape_in(layers: Layers, name: str, numel: int) -> Shape:
    """The shape of a parameter of so many elements, where only its layer's file tells it."""
    number, _, key = name.partition(".")
    if name.startswith(_TIED):
        key = name.removeprefix(_TIED).partition(".")[2]
        found = [values.get(key) for values in layers.values()]
    else:
        found = [values.get(key) for at, values in layers.items() if str(at) == number]
    shapes = {ref.shape for ref in map(tensor_of, found) if ref is not None}
    fitting = [shape for shape in shapes if prod(shape) == numel]
    if len(fitting) == 1:
        return fitting[0]
    if name.startswith(_TIED):
        what = "is of a tied layer, and the files of layers do not tell its shape"
        raise UnsupportedCheckpoint(what, where=name)
    raise contradiction(f"has {numel} elements, and no layer has it so", where=name)


# ----------------------------------------------------------------------------------------- weights


def pipeline_weights(layers: Layers, stages: Sequence[Stage]) -> tuple[Node, tuple[str, ...]]:
    """The state dict of a pipeline, in the order of its module: the fp32 weights, if there are
    some, and what only the layers have.

    Raises `MalformedCheckpoint` where stages and layers contradict each other, and
    `UnsupportedCheckpoint` where it is not told which stage's weights of a tied layer count.
    """
    parameters = _of_all_stages(stages)
    values = {f"{at}.{key}": value for at, found in layers.items() for key, value in found.items()}
    if not parameters:
        return ordered_dict(list(values.items())), ()
    tied: dict[str, dict[str, TensorRef]] = {}
    for name, ref in parameters.items():
        if name.startswith(_TIED):
            key, _, own = name.removeprefix(_TIED).partition(".")
            tied.setdefault(key, {})[own] = ref
            continue
        value = tensor_of(values.get(name))
        if value is None or value.shape != ref.shape:
            what = "is a parameter of a stage, and no layer has it in that shape"
            raise contradiction(what, where=name)
    ties = dict(_ties(layers, parameters, tied, stages))
    _refuse_copies(layers, parameters)
    module: dict[str, Node] = {}
    for key, refs in tied.items():
        module.update({f"{_TIED}{key}.{own}": ref for own, ref in refs.items()})
    for at, found in layers.items():
        for own, value in found.items():
            name = f"{_TIED}{ties[at]}.{own}" if at in ties else f"{at}.{own}"
            if name not in module:
                module[name] = value
            elif name not in parameters and not _is_same(module[name], value):
                module[f"{at}.{own}"] = value  # a buffer that each stage has for itself
    buffers = [name for stage in stages for name in buffer_names(stage.states)]
    made = ordered_dict(list(module.items()))
    weights = JoinedWeights([{"module": made, "buffer_names": buffers}], 1)
    joined = entries(weights.join(parameters.items()))
    told = [f"layer {at} is {_TIED}{key}, which has its values" for at, key in ties.items()]
    return ordered_dict([(name, joined[name]) for name in module]), (*told, *weights.notes)


def _refuse_copies(layers: Layers, parameters: Mapping[str, TensorRef]) -> None:
    """Raise where two layers have the same values, and one has other fp32 weights: its file is the
    other's. Layers without trained parameters do not tell.
    """
    there: dict[object, int] = {}
    for at, values in layers.items():
        refs = {own: ref for own, value in values.items() if (ref := tensor_of(value)) is not None}
        mark = tuple((own, mark_of(refs[own])) for own in sorted(refs))
        first = there.setdefault(mark, at)
        if first == at:
            continue
        for number, other in ((first, at), (at, first)):
            for own, ref in refs.items():
                weight = parameters.get(f"{number}.{own}")
                if weight is not None and not are_equal(Widener(ref.dtype)(weight), ref):
                    what = f"has the same values as layer {other}, and others than its fp32 weights"
                    raise MalformedCheckpoint(what, where=f"layer {number}", hint=_COPIED)


def _of_all_stages(stages: Sequence[Stage]) -> dict[str, TensorRef]:
    """The fp32 weights of all stages, those of tied layers once."""
    found: dict[str, Stage] = {}
    for number, stage in enumerate(stages):
        for name in stage.weights:
            first = found.setdefault(name, stage)
            if first is stage:
                continue
            if not name.startswith(_TIED):
                raise contradiction("is a parameter of two stages", where=name)
            if not _is_tied(name, first, stage, stages[0].states.get(INFO)):
                what = f"is of a tied layer, and differs in stage {number}; "
                what += f"{INFO} does not say that all stages are to have the same of it"
                raise UnsupportedCheckpoint(what, where=name)
    return {name: stage.weights[name] for name, stage in found.items()}


def _is_tied(name: str, first: Stage, other: Stage, info: Node) -> bool:
    """Whether the first stage has all that another one has of a parameter: it is the same there, or
    is said to be, and then DeepSpeed takes the first stage's (`extract_zero_shards` in
    deepspeed/checkpoint/ds_to_universal.py).
    """
    ours, its = first.kept(name), other.kept(name)
    if ours.keys() == its.keys() and all(_is_same(ours[key], its[key]) for key in ours):
        return True
    return ours[""].shape == its[""].shape and stages_have_the_same(info, name)


def _is_same(one: Node, other: Node) -> bool:
    ours, its = tensor_of(one), tensor_of(other)
    if ours is None or its is None:
        return ours is its and bool(one == other)
    return are_equal(ours, its)


def _ties(
    layers: Layers,
    parameters: Mapping[str, TensorRef],
    tied: Mapping[str, Mapping[str, TensorRef]],
    stages: Sequence[Stage],
) -> Iterator[tuple[int, str]]:
    """The layers that are tied, and by which keys: of a layer without parameters of its own the
    values are those of some stage, in the type of the training.
    """
    alike: dict[str, int] = {}
    found: set[str] = set()
    for at, values in layers.items():
        if any(f"{at}.{own}" in parameters for own in values):
            continue
        for key, refs in tied.items():
            there = {own: tensor_of(values.get(own)) for own in refs}
            if any(ref is None or ref.shape != refs[own].shape for own, ref in there.items()):
                continue
            if any(_are_trained(key, there, stage) for stage in stages):
                found.add(key)
                yield at, key
                break
            alike[key] = at
    odd = alike.keys() - found
    if odd:
        at = alike[min(odd)]
        what = f"has the keys and shapes of {_TIED}{min(odd)}, and other values"
        raise contradiction(what, where=f"layer {at}")


def _are_trained(key: str, values: Mapping[str, TensorRef | None], stage: Stage) -> bool:
    """Whether the values of a layer are what the fp32 weights of a stage are in their type."""
    for own, ref in values.items():
        weight = stage.weights.get(f"{_TIED}{key}.{own}")
        if weight is None or ref is None or not are_equal(Widener(ref.dtype)(weight), ref):
            return False
    return True


# ------------------------------------------------------------------------------------------ stages


def require_stages(
    states: Sequence[Mapping[str, Node]], tensor_ranks: int, *, is_named: bool
) -> None:
    """Raise where the model states say that layers are cut into more or fewer parts than there are
    files of, or that there are more stages. `is_named`: the names of files have a number of a part.
    """
    dimensions = entries(states[0].get("checkpoint_parallel_dimensions"))
    by_names = None if is_named and tensor_ranks == 1 else tensor_ranks
    width: Node = dimensions.get("tp_degree", by_names)
    count: Node = states[0].get("mp_world_size", len(states) * tensor_ranks)
    if width != tensor_ranks:
        what = "is a pipeline-parallel checkpoint whose layers are cut (tensor parallelism)"
        what += f" of DeepSpeed, with the files of {tensor_ranks} part of each"
        raise UnsupportedCheckpoint(what, hint=UNIVERSAL)
    if count != len(states) * tensor_ranks:
        there = f"{len(states)} stages" + (f" x {tensor_ranks}" if tensor_ranks > 1 else "")
        raise contradiction(f"has the model states of {there}, but {count} wrote it")
    steps = [stage.get("global_steps") for stage in states]
    for number, step in enumerate(steps):
        if step != steps[0]:
            what = f"is {steps[0]!s:.20} in stage 0, and {step!s:.20} in stage {number}"
            raise contradiction(what, where="global_steps")


def named_by_values(layers: Layers, stages: Sequence[Stage]) -> list[Stage]:
    """Stages without partitions, whose parameters the values of layers have told; none of them
    where the values do not tell all, or tell one twice, as they do of tied layers.

    Raises `MalformedCheckpoint` where optimizers have more than the layers.
    """
    names = [name for stage in stages for name in stage.weights]
    if len({*names}) < len(names):
        return [Stage(stage.states, {}) for stage in stages]
    if all(stage.weights for stage in stages):
        return list(stages)
    states = [stage.states for stage in stages]
    parameters = parameters_of(layers, states)
    pair = _of_one_value(layers)
    if pair is not None and any(holds_others(each, parameters) for each in states):
        what = f"has the same values as layer {pair[1]}, and the optimizer has others"
        raise MalformedCheckpoint(what, where=f"layer {pair[0]}", hint=_COPIED)
    elements = sum(map(count_elements, states))
    there = sum(ref.numel for ref in parameters.values())
    if elements > there:
        what = f"layers have {there} elements, and the optimizers of its stages {elements}"
        raise contradiction(what)
    return [Stage(each, {}) for each in states]


def of_all_stages(layers: Layers, stages: Sequence[Stage]) -> tuple[list[tuple[Node, Node]], str]:
    """The optimizers of all stages as one, and what is told of it. A group of one stage is a group
    with that of the others where all is the same but the parameters.
    """
    joined = f"the optimizer's states of {count_text(len(stages), 'stage')} are joined"
    if not any(stage.weights for stage in stages):
        reason, numbered = _of_numbers(layers, [stage.states for stage in stages])
        if numbered is not None:
            told = f"the layers and {joined}; it numbers its parameters from the first stage on"
            return [("optimizer", numbered)], told
    elif all(stage.optimizer is not None for stage in stages):
        return [("optimizer", _of_names(stages))], f"the fp32 weights and {joined}"
    else:
        reason = "some stages have none"
    told = f"the layers of {count_text(len(stages), 'stage')} are joined"
    return [], f"{told}; the optimizer's states are left out: {reason}"


def _of_names(stages: Iterable[Stage]) -> Node:
    states: dict[Node, Mapping[str, Node]] = {}
    groups: list[tuple[dict[str, Node], list[Node]]] = []
    there: set[Node] = set()
    for each in (entries(stage.optimizer) for stage in stages):
        for name, state in entries(each["state"]).items():
            states.setdefault(name, entries(state))  # of what is tied, that of the first stage
        for settings in map(entries, each["param_groups"]):
            params = [name for name in settings.pop("params") if name not in there]
            there.update(params)
            alike = [names for known, names in groups if known == settings]
            if alike:
                alike[0] += params
            else:
                groups.append((settings, params))
    return named_optimizer(states, starmap(ParamGroup, groups))


def _of_numbers(layers: Layers, states: Sequence[Mapping[str, Node]]) -> tuple[str, Node]:
    """The optimizers of stages that number their parameters as one; or why they are none.

    Raises `MalformedCheckpoint` where they have more parameters than there are.
    """
    names, count = len(parameters_of(layers, states)), count_numbers(states)
    if count > names + count_equal(states):
        what = f"layers have {names} parameters, and the optimizers of its stages {count}"
        raise contradiction(what)
    pair = _of_one_value(layers)
    if pair:
        what = "layers {} and {} have the same values, so they are tied, or one was copied over"
        return f"{what.format(*pair)} the other", None
    if count > names:
        return "layers are tied, and nothing says which numbers are theirs", None
    return "no file says which parameters they are of", joined_numbers(states)


def parameters_of(layers: Layers, states: Iterable[Mapping[str, Node]]) -> dict[str, TensorRef]:
    """What may be parameters of layers, in their order: all but buffers."""
    buffers = {name for stage in states for name in buffer_names(stage)}
    found: dict[str, TensorRef] = {}
    for at, values in layers.items():
        for own, value in values.items():
            ref = tensor_of(value)
            if ref is not None and f"{at}.{own}" not in buffers:
                found[f"{at}.{own}"] = ref
    return found


def _of_one_value(layers: Layers) -> tuple[int, int] | None:
    """Two layers that have a tensor of the same values, as tied ones have."""
    there: dict[object, int] = {}
    for at, values in layers.items():
        refs = [ref for ref in map(tensor_of, values.values()) if ref is not None]
        # two numbers alone may be equal by chance
        own = {mark_of(ref): ref for ref in refs if ref.numel > 1}
        for mark, ref in own.items():
            if mark in there and varies(ref):
                return there[mark], at
        there.update(dict.fromkeys(own, at))
    return None
