"""DeepSpeed's checkpoints: the folder of a step is what the ranks saved; the fp32 weights are
joined from them.

In it lie the model states, ``mp_rank_00_model_states.pt`` or, in stage 3,
``zero_pp_rank_R_mp_rank_00_model_states.pt``, and the optimizer states of each rank,
``[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt``. All are torch files. The weights are those
that deepspeed's own ``zero_to_fp32`` gives: buffers, frozen parameters, parameters, shared ones;
all that is floating as float32, but frozen parameters in the type that they have. Source:
``get_fp32_state_dict_from_zero_checkpoint`` in deepspeed/utils/zero_to_fp32.py, and
deepspeed/runtime/engine.py (0.19.8). (The script of 0.19.8 then casts what it writes to float32;
earlier ones do not.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ckptconv.formats import containers
from ckptconv.formats.folders.alone import (
    EXPERTS,
    MODEL_STATES,
    NOT_READ,
    OPTIMIZER_STATES,
    PIPELINE,
    part_of_step,
)
from ckptconv.formats.folders.deepspeed_experts import (
    expert_groups,
    expert_values,
    experts_optimizer,
)
from ckptconv.formats.folders.deepspeed_files import (
    FETCH,
    StepFiles,
    names_in,
    not_universal,
    require_ranks,
    step_files,
)
from ckptconv.formats.folders.deepspeed_numbers import flat_states, shapes_by_values
from ckptconv.formats.folders.deepspeed_pipeline import (
    Layers,
    Stage,
    has_ties,
    named_by_values,
    of_all_stages,
    parameters_of,
    pipeline_weights,
    read_layers,
    require_stages,
    shape_in,
)
from ckptconv.formats.folders.deepspeed_universal import Universal, read_universal, zero_folder
from ckptconv.formats.folders.ranks import Copies, refuse_other_name
from ckptconv.formats.folders.zero import (
    FlatGroup,
    JoinedWeights,
    RankStates,
    Shapes,
    buffer_names,
    flat_groups,
    read_rank,
    read_shapes,
    shape_of,
    shapes_in_slices,
    spread_over_ranks,
)
from ckptconv.formats.folders.zero_optimizer import kept_beside, optimizer_of, other_steps
from ckptconv.io.files import FilePool, kept_open
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Dict, Node, entries, mapping_pairs, ordered_dict
from ckptconv.support.errors import (
    MalformedCheckpoint,
    RefusedObject,
    UnsupportedCheckpoint,
    errors_at,
)
from ckptconv.support.limits import in_force
from ckptconv.support.text import count_text
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.checkpoint import Checkpoint, Container, whole_of
from ckptconv.tree.walk import tensors_of

CONTAINER = Container(
    "DeepSpeed",
    "deepspeed",
    why_not=("only DeepSpeed opens it, with as many ranks as wrote it, or its zero_to_fp32.py"),
)
_LAYOUTS = (MODEL_STATES, OPTIMIZER_STATES, PIPELINE, EXPERTS)

# Entries of the model states that describe the partitions; of no use once they are joined
_BOOKKEEPING = """
    param_shapes frozen_param_shapes frozen_param_fragments shared_params buffer_names optimizer
    num_experts
"""

OpenFile = Callable[[Location], Checkpoint]


def is_deepspeed(path: Location) -> bool:
    """Whether a folder is that of a step."""
    has_files = any(matches(name) for name in names_in(path) for matches in _LAYOUTS)
    return has_files or zero_folder(path) is not None


def open_deepspeed(path: Location, home: Location, *_: object) -> Checkpoint:
    """Open the step whose folder `path` is; links in it may lead within `home`, which the user
    named.

    The tree is that of the model states, the joined weights under ``module``; nothing of the
    payload is read. Raises `UnsupportedCheckpoint` for layouts that are not read, and
    `MalformedCheckpoint` when files are missing or do not fit.
    """
    with errors_at(path=path), ExitStack() as opened:
        zero = zero_folder(path)
        files = step_files(path, is_universal=zero is not None)
        if zero is not None and (files.optim or zero.name == path.name):
            raise not_universal(files)
        many = files.count > kept_open(in_force().open_files)
        # a universal checkpoint has a file for each state of each parameter
        pool = FilePool() if many or zero is not None else None

        def open_file(file: Location) -> Checkpoint:
            checkpoint = opened.enter_context(containers.open_file(within(file, home), pool))
            refuse_other_name(checkpoint, lambda name: file.beside(name).is_file())
            return checkpoint

        if zero is not None:
            checkpoint = _open_universal(zero, files, open_file)
        elif files.layers:
            checkpoint = _open_pipeline(files, open_file)
        elif files.experts:
            checkpoint = _open_experts(files, open_file)
        elif files.of_tensor_ranks:
            checkpoint = _open_tensor_ranks(files.of_tensor_ranks, open_file)
        else:
            checkpoint = _open_step(files, open_file)
        opened.pop_all()
    return replace(checkpoint, path=path.path)


# --------------------------------------------------------------------------------------------- tree


def _open_step(files: StepFiles, open_file: OpenFile) -> Checkpoint:
    """The checkpoint that the files of a step are, its path still that of one of them."""
    if not files.optim:
        return _without_partitions(files, open_file)
    ranks, opened = _read_ranks(files.optim, open_file, Copies())
    stage = ranks[0].stage
    models = _open_models(files, stage, ranks[0].ranks, open_file)
    states = [_model_states(model, files) for model in models]
    everything, first = [*models, *opened], models[0]
    named = states[0].get("param_shapes")
    if named is not None:
        shapes = read_shapes(named, "param_shapes")
    else:  # the bf16 optimizer without ZeRO, of older releases: the model states are whole
        shapes = shapes_in_slices(ranks, partial(shape_of, entries(states[0]["module"])))
    if named is None and not shapes:
        told = (
            "the weights are those of the model states, in the dtype of the training; the fp32 "
            "weights and the optimizer's states are left out: no param_shapes name their parameters"
        )
        sources = tuple(source for checkpoint in everything for source in checkpoint.sources)
        return replace(first, container=CONTAINER, notes=(told, *first.notes), sources=sources)
    if len(set(ranks[0].counts)) > 1:
        raise spread_over_ranks("optimizer_state_dict.partition_count")
    groups = flat_groups(ranks, shapes)
    kept = _OF_TENSOR_RANKS if files.is_tensor_rank else ()
    whole = _of_partitions(everything, states, ranks, groups, kept=kept)
    return replace(whole, container=CONTAINER.called(f"{CONTAINER.name} ZeRO-{stage}"))


def _of_partitions(
    opened: Sequence[Checkpoint],
    states: Sequence[Mapping[str, Node]],
    ranks: Sequence[RankStates],
    groups: Sequence[FlatGroup],
    *,
    kept: Sequence[str] = (),
    beside: str = "",
) -> Checkpoint:
    """The checkpoint whose fp32 weights lie in the partitions of ranks, with what is `kept` of the
    model states, the first that are `opened`; `beside` tells what else was joined.
    """
    weights = JoinedWeights(states, ranks[0].stage)
    module = weights.join(_parameters(ranks, groups))
    optimizer, told, more = _optimizer(partial(optimizer_of, ranks, groups))
    others = _others(opened[0].root, ranks[0].rest, kept)
    root = Dict([("module", module), *optimizer, *others])
    told = f"{told} joined from {count_text(len(ranks), 'rank')}{beside}{more}"
    notes = (told, *weights.notes, *other_steps(optimizer, states[0]))
    return whole_of(opened, CONTAINER, root, opened[0].path, notes)


# What of the model states of one tensor-parallel rank is needed to join it with the others
_OF_TENSOR_RANKS = ("buffer_names", "mp_world_size")


def _others(
    root: Node, rank: Mapping[str, Node], kept: Sequence[str] = (), left: Iterable[str] = ()
) -> list[tuple[Node, Node]]:
    """What the model states have beside the weights, and what the first rank's optimizer has beside
    its states; without what is `left` out.
    """
    gone = {"module", *left, *_BOOKKEEPING.split()} - {*kept}
    others = [
        (key, value)
        for key, value in mapping_pairs(root) or ()
        if (type(key) is not str or key not in gone)
        # which says of a file that it is one of several parts of a model
        and (key != "mp_world_size" or key in kept or value == 1)
    ]
    named = {key for key, _ in others if type(key) is str}
    return [*others, *((key, value) for key, value in kept_beside(rank) if key not in named)]


def _open_tensor_ranks(ranks: Sequence[StepFiles], open_file: OpenFile) -> Checkpoint:
    from ckptconv.formats.folders.deepspeed_tensors import joined_trees  # seldom needed

    opened = [(_open_pipeline if rank.layers else _open_step)(rank, open_file) for rank in ranks]
    pairs, notes = joined_trees([one.root for one in opened])
    root = Dict([pair for pair in pairs if pair[0] not in (*_OF_TENSOR_RANKS, "param_shapes")])
    container = opened[0].container
    container = container.called(f"{container.name}, {len(ranks)} tensor-parallel ranks")
    return whole_of(opened, container, root, opened[0].path, notes)


def _open_pipeline(files: StepFiles, open_file: OpenFile) -> Checkpoint:
    """The checkpoint of a pipeline: the values of each layer are in a file of its own, the fp32
    weights and the optimizer's states, with ZeRO or in bf16, in those of the ranks of each stage.
    """
    opened_layers = {number: open_file(file) for number, file in files.layers.items()}
    layers = read_layers({number: layer.root for number, layer in opened_layers.items()})
    models = [open_file(file) for file in files.stages]
    states = [entries(model.root) for model in models]
    first = next(iter(files.layers.values())).name
    require_stages(states, files.tensor_ranks, is_named=first.count("-") > 1)
    opened = [*models, *opened_layers.values()]
    stages: list[Stage] = []
    rest: Mapping[str, Node] = {}
    copies = Copies()
    for said, of_stage in zip(states, files.ranks_of_stages, strict=True):
        of_ties = Copies() if has_ties(said) else copies  # what is tied fills partitions alike
        ranks: Sequence[RankStates] = ()
        if of_stage:
            ranks, more = _read_ranks(of_stage, open_file, of_ties)
            opened += more
        elif (alone := flat_states(said)) is not None:
            ranks = [alone]
        if ranks:
            rest = rest or ranks[0].rest
        stages.append(_stage(said, ranks, layers))
    if not any(files.ranks_of_stages):
        stages = named_by_values(layers, stages)
    module, notes = pipeline_weights(layers, stages)
    optimizer, told = of_all_stages(layers, stages)
    pairs = [("module", module), *optimizer, *_others(models[0].root, rest)]
    if files.is_tensor_rank:
        pairs.append(("buffer_names", [name for said in states for name in buffer_names(said)]))
        if not any(stage.weights for stage in stages):
            pairs.append(("param_shapes", None))  # as of other ranks whose optimizers number theirs
    root = Dict(pairs)
    container = CONTAINER.called(f"{CONTAINER.name} pipeline")
    notes = (*notes, *other_steps(optimizer, states[0]))
    return whole_of(opened, container, root, models[0].path, (told, *notes))


def _stage(said: Mapping[str, Node], ranks: Sequence[RankStates], layers: Layers) -> Stage:
    """A stage of a pipeline, of what its model states say and the ranks that it has partitions
    of.
    """
    if not ranks:
        return Stage(said, {})
    if said.get("param_shapes") is not None:
        shapes = read_shapes(said["param_shapes"], "param_shapes")
    else:
        shapes = shapes_in_slices(ranks, partial(shape_in, layers))
        shapes = shapes or shapes_by_values(ranks, parameters_of(layers, [said]))
        if not shapes:
            return Stage(said, {})
    if len(set(ranks[0].counts)) > 1:
        raise spread_over_ranks("optimizer_state_dict.partition_count")
    groups = flat_groups(ranks, shapes)
    return Stage(said, dict(_parameters(ranks, groups)), optimizer_of(ranks, groups))


def _open_experts(files: StepFiles, open_file: OpenFile) -> Checkpoint:
    if files.whole is None and files.model:
        what = "is ZeRO 3 with experts of DeepSpeed, which is not read"
        raise UnsupportedCheckpoint(what, hint=NOT_READ)
    if files.whole is None:
        raise MalformedCheckpoint("the model states are missing", hint=FETCH)
    model = open_file(files.whole)
    states = entries(model.root)
    experts = [open_file(file) for file in files.experts.values()]
    values = {key: one.root for key, one in zip(files.experts, experts, strict=True)}
    module = expert_values(states, values)
    container = CONTAINER.called(f"{CONTAINER.name} experts")
    if not files.optim or states.get("param_shapes") is None:
        require_ranks(files.sets, max(files.sets, default=-1) + 1, "optimizer")
        sets = [open_file(file) for file in files.sets.values()]
        read = partial(experts_optimizer, sets, states, values)
        optimizer, told, more = _optimizer(read, "the weights")
        rest = entries(entries(sets[0].root).get("optimizer")) if optimizer else {}
        root = Dict([("module", module), *optimizer, *_others(model.root, rest)])
        told = f"{told} joined from the files of {len(experts)} experts{more}"
        opened = [model, *experts, *(replace(one, root=None) for one in sets)]
        return whole_of(opened, container, root, model.path, (told,))
    ranks, opened = _read_ranks(files.optim, open_file, Copies())
    shapes = read_shapes(states["param_shapes"], "param_shapes")
    groups = list(expert_groups(ranks, flat_groups(ranks, shapes), states))
    parts, beside = [model, *experts, *opened], f", with {len(experts)} experts"
    whole = _of_partitions(parts, [{**states, "module": module}], ranks, groups, beside=beside)
    return replace(whole, container=container)


def _open_universal(zero: Location, files: StepFiles, open_file: OpenFile) -> Checkpoint:
    """The checkpoint that the parameters' folders are, with what only the model states beside hold:
    buffers, frozen parameters, and the training.
    """
    first = files.whole or files.model.get(0)
    models = [open_file(file) for file in (first,) if file is not None]
    states = [_model_states(model, files) for model in models]
    said: Mapping[str, Node] = states[0] if states else {}
    named: Node = said.get("param_shapes")
    shapes = [] if named is None else read_shapes(named, "param_shapes")
    own = entries(said.get("module")) if files.tensor_ranks == 1 else {}
    found = read_universal(zero, shapes, own, open_file)
    if files.whole is None and mapping_pairs(said.get("frozen_param_shapes")):
        ranks: Node = said.get("dp_world_size")
        require_ranks(files.model, ranks if type(ranks) is int else len(files.model), "model")
        models += [open_file(file) for rank, file in files.model.items() if rank]
        states = [_model_states(model, files) for model in models]
    module, notes = _universal_weights(found, states, shapes, files)
    pairs: list[tuple[Node, Node]] = [("module", module)]
    told = (
        "the optimizer's states are left out: no file says which parameters are in its groups, "
        "and in which order"
    )
    if found.groups and (optimizer := found.optimizer(shapes)) is not None:
        pairs.append(("optimizer", optimizer))
        count = count_text(len(found.states), "parameter")
        told = f"the weights and the optimizer's states of {count} are joined"
    if models:
        pairs += _others(models[0].root, {}, left=found.beside)
    root = Dict([*pairs, *found.beside.items()])
    named = CONTAINER.called(f"{CONTAINER.name} universal")
    container = replace(named, why_not="only DeepSpeed opens it")  # at any number of ranks
    opened = [*models, *found.opened]
    return whole_of(opened, container, root, zero.path, (told, *notes))


def _universal_weights(
    found: Universal,
    states: Sequence[Mapping[str, Node]],
    shapes: Sequence[Shapes],
    files: StepFiles,
) -> tuple[Node, tuple[str, ...]]:
    """The state dict of a universal checkpoint: of what has no state of the optimizer the model
    states have the values, in the type of the training.
    """
    if not states or files.tensor_ranks > 1:
        missing = "there are no model states beside"
        if states:
            missing = f"model states of {files.tensor_ranks} tensor-parallel ranks are not joined"
        told = f"buffers and frozen parameters may be missing: {missing}"
        return ordered_dict(list(found.weights.items())), (told,)
    if "buffer_names" not in states[0]:
        return _written_elsewhere(found, states[0]["module"]), ()
    names = {name for group in shapes for name in group} | found.states.keys()
    names |= found.weights.keys() - entries(states[0]["module"]).keys()
    weights = JoinedWeights(states, 2 if files.whole is not None else 3)
    module = weights.join((name, ref) for name, ref in found.weights.items() if name in names)
    return module, weights.notes


def _written_elsewhere(found: Universal, module: Node) -> Node:
    """The state dict of a universal checkpoint whose model states are not DeepSpeed's own: the
    values there have the types that they are to have.
    """
    there = {name: found.weights.get(name, value) for name, value in entries(module).items()}
    return ordered_dict(list({**there, **found.weights}.items()), like=module)


def _parameters(
    ranks: Sequence[RankStates], groups: Sequence[FlatGroup]
) -> Iterator[tuple[str, TensorRef]]:
    """The fp32 weights that the ranks hold in their partitions."""
    for group in groups:
        yield from group.joined([ranks[rank].groups[group.number] for rank in group.ranks])


def _optimizer(
    read: Callable[[], Node], weights: str = "the fp32 weights"
) -> tuple[list[tuple[Node, Node]], str, str]:
    """The entry of the tree that has the optimizer's states, which `read` gives, if there are any,
    and what is told of them.
    """
    try:
        made = read()
    except (UnsupportedCheckpoint, RefusedObject) as error:
        more = f"; the optimizer's states are left out: {error.where} {error.what}"
        return [], f"{weights} are", more
    if made is None:
        return [], f"{weights} are", "; no optimizer's states are saved with them"
    return [("optimizer", made)], f"{weights} and the optimizer's states are", ""


def _open_models(files: StepFiles, stage: int, ranks: int, open_file: OpenFile) -> list[Checkpoint]:
    """The model states that are needed: the first ones, and in stage 3 those of all ranks where
    parameters are frozen.
    """
    first = files.model.get(0) if stage == 3 else files.whole
    if first is None:
        what = f"the model states of ZeRO stage {stage} are missing"
        raise MalformedCheckpoint(what, hint=FETCH)
    model = open_file(first)
    states = _model_states(model, files)
    if stage == 3 and states.get("param_shapes") is None:
        what, where = "names no parameters of its partitions", "param_shapes"
        raise MalformedCheckpoint(what, path=first, where=where, hint=FETCH)
    if stage != 3 or not mapping_pairs(states.get("frozen_param_shapes")):
        return [model]
    require_ranks(files.model, ranks, "model")
    models = [model, *(open_file(file) for rank, file in files.model.items() if rank)]
    copies = Copies()
    for each in models:
        fragments = entries(entries(each.root).get("frozen_param_fragments"))
        copies.refuse(each.path, tensors_of(Dict([*fragments.items()])))
    return models


def _read_ranks(
    files: Mapping[int, Location], open_file: OpenFile, copies: Copies
) -> tuple[list[RankStates], list[Checkpoint]]:
    """What each file of optimizer states says, and the files, opened, without their trees.

    Raises `MalformedCheckpoint` unless there is one of each rank.
    """
    ranks, opened = [], []
    for file in files.values():
        checkpoint = open_file(file)
        with errors_at(path=file):
            ranks.append(read_rank(checkpoint.root))
        opened.append(replace(checkpoint, root=None))
    require_ranks(files, ranks[0].ranks, "optimizer")
    for rank, checkpoint in zip(ranks, opened, strict=True):
        copies.refuse(checkpoint.path, tensors_of(Dict([*rank.rest.items()])))
    return ranks, opened


def _without_partitions(files: StepFiles, open_file: OpenFile) -> Checkpoint:
    """A checkpoint of stage 0, whose model states hold the weights."""
    if files.whole is None:
        what = "the optimizer states, which hold the weights in ZeRO stage 3, are missing"
        raise MalformedCheckpoint(what, hint=FETCH)
    model = open_file(files.whole)
    if _model_states(model, files).get("param_shapes") is not None:
        what = "the optimizer states, which hold the fp32 weights, are missing"
        hint = f"name {files.whole.name} for the weights in the dtype of the training"
        raise MalformedCheckpoint(what, hint=f"fetch them, or {hint}")
    return replace(model, container=CONTAINER)


def _model_states(model: Checkpoint, files: StepFiles) -> dict[str, Node]:
    states = entries(model.root)
    if not mapping_pairs(states.get("module")):
        what = "holds no model states of DeepSpeed (a dict with 'module')"
        raise MalformedCheckpoint(what, path=model.path)
    said = states if not files.is_tensor_rank else {**states, "mp_world_size": 1}
    replace(model, part=part_of_step("", Dict([*said.items()]))).refuse_part()
    return states
