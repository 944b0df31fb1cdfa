"""DeepSpeed's universal checkpoint as an output format: a folder that ZeRO training resumes from at
any world size.

``latest_universal`` names the folder of the step, in which there are

- ``zero/NAME/fp32.pt`` with the weight of each parameter that the optimizer has a state of, in
  float32: the master weight (Megatron's ``fp32_param``) where the optimizer has one, else the
  weight itself; and ``exp_avg.pt``, ``exp_avg_sq.pt``, …: each ``{"param": tensor, "cat_dim": 0}``;
  ``step.pt`` is the number alone;
- ``zero/optimizer_state.pt`` with the groups of parameters, for ZeRO 1 and 2 in ``param_groups``,
  for ZeRO 3 in ``optimizer_state_dict``, which has one step for all; the norm that gradients are
  clipped at; and the loss scaler of fp16, which has to be an object of deepspeed's own class;
- ``mp_rank_00_model_states.pt`` with the weights, the names and shapes of the parameters of each
  group (``param_shapes``) and all else; ZeRO 3 looks for the same under the
  name ``zero_pp_rank_0_mp_rank_00_model_states.pt``, and reads no weights there.

Source: deepspeed 0.19.8 (Apache-2.0), what it reads: deepspeed/checkpoint/universal_checkpoint.py,
runtime/base_optimizer.py, runtime/zero/stage3.py and runtime/engine.py; and what its
``ds_to_universal`` writes. ZeRO 3 takes the dict of ZeRO 1 and 2 for a tensor since 0.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptconv.formats.target_format import Layout, NamedTensor, Retag, TargetFormat, Tree, one_item
from ckptconv.formats.torch_output import TORCH
from ckptconv.io.location import is_plain_name
from ckptconv.objects.plain import loss_scaler
from ckptconv.pickles.nodes import (
    Call,
    Dict,
    Global,
    Node,
    mapping_pairs,
    ordered_dict,
    seen_through,
)
from ckptconv.support.errors import KeyConflict, RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import count_text, some_text
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.computed import Widener
from ckptconv.tensors.dtypes import FLOAT32
from ckptconv.tensors.refs import TensorRef, view_identity
from ckptconv.tree.optimizer_parts import OptimizerParts, parts_of
from ckptconv.tree.optimizer_states import bare_name, optimizer_states
from ckptconv.tree.state_dicts import StateDict, find_state_dicts
from ckptconv.tree.walk import tensor_of, tensors_of

LATEST = "latest_universal"
_MODEL_STATES = "mp_rank_00_model_states.pt"
_MODEL_STATES_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_VERSION = "0.19.8"
# Without it deepspeed's own tools refuse the folder. The numbers from 0.3 on promise more about
# how tensor-parallel weights were cut; here none were.
_INFO = Dict([("universal_checkpoint_version", 0.2)])
_STEPS = ("global_steps", "global_step", "iteration", "step")
_MASTER = "fp32_param"
_SIZE = Global("torch", "Size")
_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
_SCALER = "loss_scaler"
_SCALES_NOTHING = {"cur_scale": 1.0, "dynamic": False}
_CLIPPING = "clip_grad"
_WITH_SCALER = ("dynamic_loss_scale", "overflow")


class _Model(NamedTuple):
    """The state dict of weights, and the optimizer's state of some of them by the keys there."""

    weights: StateDict
    optimizer: OptimizerParts
    others: Mapping[str, Node]


class UniversalFolder(TargetFormat):
    """A folder that DeepSpeed resumes from with ``load_universal_checkpoint``."""

    name = "universal"
    noun = "a universal checkpoint of DeepSpeed"
    suffix = ""
    is_folder = True
    holds_trees = True
    keeps_order = True
    is_counted = True
    names_parameters = True

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        TORCH.refuse(named)

    def refuse_part(self, root: Node, *, keeps_objects: bool, only: str | None) -> None:
        if keeps_objects:
            what = "objects of unknown classes cannot be kept in a universal checkpoint"
            raise RefusedObject(what, hint="use --unknown drop")
        counts = {
            "state dict": len(find_state_dicts(root)),
            "optimizer state": len(list(optimizer_states(root, {}))),
        }
        if set(counts.values()) == {1}:
            return
        there = " and ".join(count_text(count, noun) for noun, count in counts.items())
        what = f"holds {there}, and a universal checkpoint takes one of each"
        is_short = 0 in counts.values()
        raise RefusedObject(what, where=only, hint=_ALL_OF_IT if is_short else _ONE_OF_EACH)

    def part_notes(self, tree: Tree) -> Iterator[str]:
        """Tell of weights that DeepSpeed does not take from such a folder: it loads those under
        ``zero`` alone (`DeepSpeedEngine._load_checkpoint`). And of master weights that are not
        there.
        """
        model = _model(tree)
        made = _without_master(model)
        if made:
            yield (
                f"fp32.pt of {some_text(made)} is made of the weight, which is not float32: "
                "the optimizer has no master weights"
            )
        yield from _scaler_notes(model)
        if any(_EXPERTS in name for name in model.optimizer.states):
            yield (
                "DeepSpeed looks for experts by their numbers on a rank: go on with all experts on "
                "each rank (ep_size 1), else every rank takes the first ones"
            )
        left = _left(model)
        if left:
            verb = "has" if len(left) == 1 else "have"
            yield (
                f"{some_text(left)} {verb} no state of the optimizer (buffers, frozen parameters): "
                "DeepSpeed does not load that from a universal checkpoint; load the weights too"
            )

    def lay_out_files(
        self, tree: Tree, cast: CastRule, retag: Retag
    ) -> Iterator[tuple[str, Tree | None, Layout]]:
        model = _model(tree)
        tag = f"global_step{_global_step(model)}_universal"
        for name, root in _files(model):
            refs = [ref for _, ref in tensors_of(root)]
            part = Tree(root, {}, refs, [])
            yield f"{tag}/{name}", part, TORCH.lay_out_tree(part, cast, retag)
        yield LATEST, None, one_item(LATEST, tag.encode())


_ALL_OF_IT = (
    "name the folder or file that has both, and leave --only out; --with-training takes an "
    "optimizer that lies beside the weights"
)
_ONE_OF_EACH = "leave the others out: --drop PATH"

UNIVERSAL = UniversalFolder()


def _model(tree: Tree) -> _Model:
    """The weights of a tree and the optimizer's state, which goes by the keys of the weights."""
    root = seen_through(tree.root, tree.overlay)
    (weights,), (state,) = find_state_dicts(root), list(optimizer_states(root, {}))
    parts = parts_of(state, state.node)
    if parts.is_numbered:
        what = "numbers its parameters, and a universal checkpoint names them"
        raise RefusedObject(what, where=state.path or None, hint="--optimizer names")
    mine = {id(weights.node), id(state.node)}
    others = {
        key: value
        for key, value in mapping_pairs(root) or ()
        if type(key) is str and id(value) not in mine and weights.node is not root
    }
    keys = set(weights.keys)
    bare = {bare_name(key): key for key in weights.keys}
    names = {}
    for name in parts.parameters:
        key = name if name in keys else bare.get(bare_name(str(name)))
        if key is None:
            what = "is in the optimizer's state, and not among the weights"
            raise KeyConflict(what, where=str(name), hint="keep its weight: without --exclude")
        names[name] = key
    if len(set(names.values())) < len(names):
        raise KeyConflict("names a parameter twice", where=state.path or None)
    return _Model(weights, parts.called(names), others)


# --------------------------------------------------------------------------------------- its files


def _files(model: _Model) -> Iterator[tuple[str, Node]]:
    """What each torch file holds, by its path in the folder of the step."""
    weights = dict(zip(model.weights.keys, model.weights.values, strict=True))
    widened = Widener(FLOAT32)
    for name, state in model.optimizer.states.items():
        if not _is_one_name(name):
            what = "is not a name that a folder can have, and a parameter has one of its name"
            raise RefusedObject(what, where=name, hint="give it another name: --rename OLD=NEW")
        weight = tensor_of(weights[name])
        if weight is None:
            raise RefusedObject("has an optimizer state, and is not a tensor", where=name)
        master = _in_shape(name, _MASTER, state.get(_MASTER, weight), weight)
        if not master.dtype.is_floating:  # Megatron may keep the low bits of bfloat16 as int16
            what = f"is {master.dtype.name}, and not the whole of a weight in floating point"
            raise RefusedObject(what, where=f"{name}.{_MASTER}")
        # another object than the weight, by which casts know what they are for: rounding would
        # spoil what training goes on from
        yield f"zero/{name}/fp32.pt", _fragment(widened(master)._replace())
        for key, value in state.items():
            if key == "step":
                yield f"zero/{name}/step.pt", value
            elif key != _MASTER:
                yield f"zero/{name}/{key}.pt", _fragment(_in_shape(name, key, value, weight))
    yield "zero/optimizer_state.pt", _optimizer_state(model)
    yield _MODEL_STATES, _model_states(model, model.weights.node)
    yield _MODEL_STATES_3, _model_states(model, Dict())


def _is_one_name(name: str) -> bool:
    return is_plain_name(name) and "/" not in name


def _fragment(ref: TensorRef) -> Dict:
    return Dict([("param", ref), ("cat_dim", 0)])


def _in_shape(name: str, key: str, value: Node, weight: TensorRef) -> TensorRef:
    """The tensor of one entry of a parameter's state, which has the parameter's shape."""
    ref = tensor_of(value)
    if key == "fp32" or not _is_one_name(key) or ref is None or ref.shape != weight.shape:
        what = "is not of the shape of its parameter, and a universal checkpoint holds nothing else"
        raise RefusedObject(what, where=f"{name}.{key}", hint="use --to dcp")
    return ref


def _optimizer_state(model: _Model) -> Dict:
    parts = model.optimizer
    groups = [
        Dict([*group.settings.items(), ("params", [number])])
        for number, group in enumerate(parts.groups)
    ]
    steps = [state["step"] for state in parts.states.values() if "step" in state]
    first = Dict([(0, Dict([("step", step) for step in steps[:1]]))])
    of_stage_3 = Dict([("state", first), ("param_groups", groups)])
    own = {
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": of_stage_3,
        **_beside(model),
    }
    return Dict([*((key, value) for key, value in parts.others if key not in own), *own.items()])


def _beside(model: _Model) -> dict[str, Node]:
    """What ZeRO keeps of the training besides the optimizer's states."""
    clipping = model.others.get(_CLIPPING)
    kept = {_CLIPPING: clipping} if type(clipping) in (int, float) else {}
    return {**kept, **_scaling(model)}


def _scaling(model: _Model) -> dict[str, Node]:
    """The loss scaler as DeepSpeed's own object, and what goes with it. None that scales nothing:
    DeepSpeed makes one as its config says, which may be fp16's.
    """
    scaler = loss_scaler(model.others.get(_SCALER))
    if scaler is None or dict(scaler.state.pairs) == _SCALES_NOTHING:
        return {}
    beside = {key: model.others[key] for key in _WITH_SCALER if key in model.others}
    return {_SCALER: scaler, **beside}


def _model_states(model: _Model, weights: Node) -> Dict:
    gone = _beside(model)
    states: dict[str, Node] = {
        "lr_scheduler": model.others.get("scheduler"),
        "skipped_steps": 0,
        "dp_world_size": 1,
        "ds_version": _VERSION,
        "universal_checkpoint_info": _INFO,
        **{key: value for key, value in model.others.items() if key not in gone},
        "module": weights,
        "param_shapes": _param_shapes(model),
        "optimizer": None,
        "global_steps": _global_step(model),
        "mp_world_size": 1,
    }
    return Dict(list(states.items()))


def _param_shapes(model: _Model) -> list[Node]:
    """The parameters of each group with their shapes: nothing else tells which these are."""
    weights = dict(model.weights.tensors())
    return [
        ordered_dict([(name, Call(_SIZE, (weights[str(name)].shape,))) for name in group.params])
        for group in model.optimizer.groups
    ]


def _global_step(model: _Model) -> int:
    """The number of steps that were done, where the checkpoint says it plainly; else 0."""
    told = (model.others.get(name) for name in _STEPS)
    return next((step for step in told if type(step) is int and 0 <= step < 1 << 53), 0)


def _left(model: _Model) -> list[str]:
    """The keys of weights that the optimizer has no state of: buffers and frozen parameters, and
    no second names of what it has one of.
    """
    weights = dict(model.weights.tensors())
    loaded = {view_identity(weights[str(name)]) for name in model.optimizer.states}
    return [key for key, ref in weights.items() if view_identity(ref) not in loaded]


def _without_master(model: _Model) -> list[str]:
    """The keys of parameters of which there is no weight in float32."""
    return [
        key
        for key, ref in model.weights.tensors()
        if key in model.optimizer.states
        and ref.dtype is not FLOAT32
        and _MASTER not in model.optimizer.states[key]
    ]


def _scaler_notes(model: _Model) -> Iterator[str]:
    """Tell of the loss scaler: whether it is an object, or is not carried over."""
    scaling = _scaling(model)
    if scaling:
        name = scaling[_SCALER].name
        yield (
            f"optimizer_state.pt has the loss scaler as an object of {name}, which DeepSpeed asks "
            "for: torch.load(weights_only=True) refuses that file"
        )
    elif {_SCALER, "cur_scale"} & model.others.keys() and not loss_scaler(
        model.others.get(_SCALER)
    ):
        yield (
            "the loss scaler is not what DeepSpeed's classes have in 0.19.8: the scale starts anew"
        )
