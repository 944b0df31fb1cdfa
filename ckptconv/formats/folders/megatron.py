"""Folders of Megatron-LM's own format (``--ckpt-format torch``): one iteration, a folder for each
rank of the model.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, TT the tensor-parallel rank, PPP and EEE those of the
pipeline and of the experts. What a distributed optimizer keeps lies beside it. The file of a model
that was not split is a whole checkpoint; the tensor- and pipeline-parallel ranks of one that was
are joined.

Tensor-parallel ranks hold rows (of heads, of hidden units, of the vocabulary) or columns of a
matrix, and the same norms and the same biases of what is cut into columns. Where a layer is gated,
each rank has its part of the gate above its part of the rest. The stages of a pipeline hold layers,
each counted from 0; with virtual stages the first chunks of all ranks come before their second
ones. Source: Megatron-LM d98e8a64 (BSD-3) training/checkpointing.py,
core/tensor_parallel/layers.py, core/transformer/mlp.py, core/transformer/transformer_layer.py,
tools/checkpoint/loader_base.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ckptconv.formats.containers import all_open
from ckptconv.formats.folders.ranks import Copies, are_equal, end_to_end
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Node, entries, mapping_pairs, ordered_dict
from ckptconv.support.errors import (
    IncompleteCheckpoint,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.text import first_few
from ckptconv.tensors.refs import TensorRef, box_of
from ckptconv.tree.checkpoint import Checkpoint, whole_of
from ckptconv.tree.model_config import training_arguments
from ckptconv.tree.walk import tensor_of

Tensors = Mapping[str, TensorRef]
Arguments = Mapping[str, Node]
"""The arguments of the training, by name."""

# mp_rank_TT, mp_rank_TT_PPP, mp_rank_TT_PPP_EEE: tensor, pipeline and expert rank
_RANK = re.compile(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?(?:_([0-9]{3,6}))?").fullmatch
_FILES = ("model_optim_rng.pt", "model_rng.pt")
DISTRIBUTED = "distrib_optim.pt"
_OPTIMIZER = (DISTRIBUTED, "optim.pt")
# model0, model1, … where a stage holds several chunks of layers
_MODEL = re.compile("model[0-9]*").fullmatch
_SIZE = re.compile("(?:tensor_|pipeline_|expert_)?model_parallel_size").fullmatch
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_EXPERTS = "expert_model_parallel_size"
_OF_EXPERTS = "expert_tensor_parallel_size"
# What each rank has, and the same as all others, beside the model
_KEPT = ("args", "checkpoint_version", "iteration", "opt_param_scheduler")
_OLDEST = 2.0  # before that version rows of q, k and v are in another order
_HINT = (
    "name the folder of the iteration with the folders of all ranks in it, or save it with "
    "--ckpt-format torch_dist"
)
_TORCH_DIST = "save it with --ckpt-format torch_dist, which is read"


def is_megatron(path: Location) -> bool:
    """Whether a folder is that of an iteration in this format."""
    return bool(_rank_files(path))


def _rank_files(folder: Location) -> list[Location]:
    ranks = [item for item in folder.list() if _RANK(item.name) and item.is_folder()]
    files = [item.child(name) for item in ranks for name in _FILES]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parent.name)


def open_megatron(path: Location, home: Location, *_: object) -> Checkpoint:
    """Open the files of all ranks.

    Raises `IncompleteCheckpoint` where some lack, `UnsupportedCheckpoint` where experts were split
    over ranks, or it is not known how a tensor was.
    """
    files = _rank_files(path)
    pool = FilePool() if len(files) > 1 else None
    with all_open(path, [within(file, home) for file in files], pool) as opened:
        whole = opened[0]
        if len(files) == 1:
            _refuse_split(whole.root, path)
        else:
            names = [file.parent.name for file in files]
            whole = _joined(path, dict(zip(names, opened, strict=True)))
    beside = dict.fromkeys(
        name for file in files for name in _OPTIMIZER if file.beside(name).is_file()
    )
    notes = [f"{name} beside it, which holds the optimizer's state, is left out" for name in beside]
    return replace(whole, notes=(*whole.notes, *notes))


def refuse_one_rank(checkpoint: Checkpoint, path: Location) -> None:
    """Raise for the file of one rank of several, which its folder says that it may be, and for the
    flat buckets of a distributed optimizer.
    """
    if path.name == DISTRIBUTED:
        what = "holds the flat buckets of a distributed optimizer, which only Megatron takes apart"
        raise UnsupportedCheckpoint(what, path=path, hint=_TORCH_DIST)
    if _RANK(path.absolute.parent.name) is not None:
        _refuse_split(checkpoint.root, path)


def _refuse_split(root: Node, path: Location) -> None:
    """Raise where the arguments of the training say that the model had more than this one rank."""
    for key, size in training_arguments(root).items():
        if type(size) is int and size > 1 and _SIZE(key):
            what = f"holds one rank of a model that was split over {size} ({key})"
            raise UnsupportedCheckpoint(what, path=path, hint=_HINT)


# -------------------------------------------------------------------------------- several ranks


def _joined(path: Location, ranks: Mapping[str, Checkpoint]) -> Checkpoint:
    """The checkpoint of several ranks, given by the names of their folders."""
    first = next(iter(ranks.values()))
    args = training_arguments(first.root)
    _refuse_other_kinds(first, args, path)
    tensor, pipeline = _sizes(args, path)
    ends = [f"_{stage:03d}" for stage in range(pipeline)] if pipeline > 1 else [""]
    names = [[f"mp_rank_{at:02d}{end}" for at in range(tensor)] for end in ends]
    in_order = [name for stage in names for name in stage]
    _refuse_other_ranks(in_order, ranks, path)
    _refuse_other_runs(ranks)
    _refuse_exchanged([ranks[name] for name in in_order])
    model, told = _joined_model([[ranks[name] for name in stage] for stage in names], args)
    pairs = [pair for pair in mapping_pairs(first.root) or () if pair[0] in _KEPT]
    root = ordered_dict([("model", ordered_dict(list(model.items()))), *pairs])
    container = replace(
        first.container,
        name=f"{first.container.name}, {len(ranks)} ranks",
        by="",
        why_not="each file holds a part of the model",
        weights_only=False,
        names_storages=False,  # a tensor is made of several, so they cannot be counted
    )
    notes = [*told, *_left_out(first)]
    return whole_of(list(ranks.values()), container, root, path.path, notes)


def _refuse_other_kinds(first: Checkpoint, args: Arguments, path: Location) -> None:
    """Refuse experts over ranks, and rows of q, k and v in the order of an old version."""
    experts, tensor = args.get(_EXPERTS), args.get(_SIZES[0])
    if type(experts) is int and experts > 1:
        what = f"its experts are split over {experts} ranks ({_EXPERTS}), which is not read"
        raise UnsupportedCheckpoint(what, path=path, hint=_TORCH_DIST)
    if args.get(_OF_EXPERTS) not in (None, tensor):
        what = f"its experts are split otherwise than the rest ({_OF_EXPERTS}), which is not read"
        raise UnsupportedCheckpoint(what, path=path, hint=_TORCH_DIST)
    version: Node = entries(first.root).get("checkpoint_version")
    if not isinstance(version, (int, float)) or version < _OLDEST:
        what = f"is of a checkpoint_version before {_OLDEST}, whose ranks are not joined"
        raise UnsupportedCheckpoint(what, path=path, hint="load and save it with a newer Megatron")


def _sizes(args: Arguments, path: Location) -> tuple[int, int]:
    """How many ranks there were: tensor- and pipeline-parallel."""
    found = []
    for name in _SIZES:
        size = args.get(name)
        if type(size) is not int or size < 1:
            what = f"its arguments do not say over how many ranks it was split ({name})"
            raise UnsupportedCheckpoint(what, path=path, hint=_TORCH_DIST)
        found.append(size)
    count = found[0] * found[1]
    refuse_beyond("mesh_ranks", count, f"is split over {count} ranks", path=path)
    return found[0], found[1]


def _refuse_other_ranks(
    wanted: Sequence[str], ranks: Mapping[str, Checkpoint], path: Location
) -> None:
    told = f"its arguments say that there were {len(wanted)} ranks"
    missing = [name for name in wanted if name not in ranks]
    if missing:
        what = f"{told}, and {len(missing)} are missing: {first_few(missing, 3)}"
        raise IncompleteCheckpoint(what, path=path, hint="fetch the folders of all ranks")
    others = [name for name in ranks if name not in wanted]
    if others:
        what = f"{told}, and there are others: {first_few(others, 3)}"
        raise UnsupportedCheckpoint(what, path=path, hint="remove those of another run")


def _refuse_other_runs(ranks: Mapping[str, Checkpoint]) -> None:
    told = {name: entries(rank.root).get("iteration") for name, rank in ranks.items()}
    name, first = next(iter(told.items()))
    for other, iteration in told.items():
        if iteration != first:
            what = f"is of the iteration {iteration}, and {name} of {first}"
            raise MalformedCheckpoint(printable(what), path=ranks[other].path)


def _refuse_exchanged(ranks: Sequence[Checkpoint]) -> None:
    """Raise where files of ranks were exchanged: the arguments in each say which rank saved it. In
    every order that Megatron knows these rise with the tensor-parallel rank, and then the stage.
    """
    told = [training_arguments(rank.root).get("rank") for rank in ranks]
    saved_by = [number for number in told if type(number) is int]
    if len({*saved_by}) < len(ranks):  # Megatron's own tools write all files in one process
        return
    for at, number in enumerate(saved_by[1:], 1):
        if number < saved_by[at - 1]:
            what = f"was saved by rank {number}, and {printable(ranks[at - 1].path)} by rank "
            what += f"{saved_by[at - 1]}: they were exchanged"
            raise MalformedCheckpoint(what, path=ranks[at].path, hint="fetch all of them again")


def _left_out(first: Checkpoint) -> Iterator[str]:
    others = [name for name in entries(first.root) if name not in _KEPT and not _MODEL(name)]
    if others:
        yield f"what each rank has for itself is left out: {first_few(others, 4)}"


# --------------------------------------------------------------------------- the model of all ranks

_AT = r"(?:.*\.)?"
# ColumnParallelLinear and VocabParallelEmbedding: torch has outputs, and words, in rows
_CUT_IN_ROWS = re.compile(
    rf"{_AT}(?:(?:linear_qkv|query_key_value)\.(?:weight|bias)"
    r"|(?:word_embeddings|word_embeddings_for_head|output_layer)\.weight)"
).fullmatch
_FIRST_OF_MLP = re.compile(rf"{_AT}(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*").fullmatch
# RowParallelLinear, whose bias is whole: it is added to the sum of all ranks
_CUT_IN_COLUMNS = re.compile(
    rf"{_AT}(?:linear_proj|linear_fc2|dense_4h_to_h|(?:self_)?attention\.dense)\.weight\d*"
).fullmatch
_WHOLE = re.compile(
    rf"{_AT}(?:\w*layernorm\.(?:weight|bias)|(?:linear_qkv|linear_fc1)\.layer_norm_(?:weight|bias)"
    r"|(?:linear_proj|linear_fc2|dense_4h_to_h|(?:self_)?attention\.dense)\.bias\d*"
    r"|(?:position|tokentype)_embeddings\.weight|rotary_pos_emb\.inv_freq"
    r"|router\.(?:weight|bias|expert_bias)|shared_experts\.gate_weight)"
).fullmatch
# In Megatron-Core, and in what was before it
_SECOND_OF_MLP = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(\..+)").fullmatch
_EXTRA_STATE = "_extra_state"  # of Transformer Engine: how a rank scales fp8
_OTHER_ORDERS = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
_HINT_OF_SPLITS = f"{_TORCH_DIST}, or convert it to one rank with Megatron's own tools"


def _joined_model(
    ranks: Sequence[Sequence[Checkpoint]], args: Arguments
) -> tuple[Tensors, list[str]]:
    """The model of all ranks, those of one stage together, by its keys, and what is told of it.

    Raises `UnsupportedCheckpoint` for a tensor of which it is not known how it is cut,
    `MalformedCheckpoint` where ranks contradict each other, `IncompleteCheckpoint` where layers
    lack.
    """
    extra: list[str] = []
    chunks = [[list(_chunks(rank.root, extra)) for rank in stage] for stage in ranks]
    copies = Copies()
    for rank, models in zip(chain(*ranks), chain(*chunks), strict=True):
        parts = (pair for each in models for pair in each.items() if not _WHOLE(pair[0]))
        copies.refuse(rank.path, parts)
    counts = {len(models) for stage in chunks for models in stage}
    if len(counts) > 1 or not counts.isdisjoint({0}):
        raise MalformedCheckpoint("its ranks hold different numbers of models, or none")
    stages = [
        _joined_stage([models[at] for models in stage], args)
        for at in range(*counts)
        for stage in chunks
    ]
    model = _numbered(stages, args)
    notes = [*_without_copies(model, args), *_padding(model, args)]
    if extra:
        notes.append(f"{_EXTRA_STATE} of modules, how each rank scales fp8, is left out")
    return model, notes


def _chunks(root: Node, extra: list[str]) -> Iterator[Tensors]:
    """The models in the file of a rank: one, or one for each of its virtual stages; the names of
    what Transformer Engine keeps beside the weights become `extra`.
    """
    found = entries(root)
    names = [f"model{at}" for at in range(len(found))]
    for name in ["model"] if "model" in found else names:
        if name in found:
            yield dict(_flat(found[name], "", set(), extra))


def _flat(
    node: Node, before: str, seen: set[int], extra: list[str]
) -> Iterator[tuple[str, TensorRef]]:
    """The tensors of a model, whose parts may be dicts of their own, each at one place."""
    pairs = mapping_pairs(node)
    if pairs is None or id(node) in seen:
        what = "is neither a tensor nor a dict of tensors of its own"
        raise UnsupportedCheckpoint(what, where=before or "model", hint=_HINT_OF_SPLITS)
    seen.add(id(node))
    for key, value in pairs:
        name = f"{before}.{key}" if before else f"{key}"
        ref = tensor_of(value)
        if name.endswith(_EXTRA_STATE):
            if value is not None:
                extra.append(name)
        elif ref is None:
            yield from _flat(value, name, seen, extra)
        else:
            yield name, ref


# ------------------------------------------------------------------------- tensor-parallel ranks


def _joined_stage(parts: Sequence[Tensors], args: Arguments) -> Tensors:
    first = parts[0]
    if len(parts) == 1:
        return first
    for at, part in enumerate(parts):
        if odd := first.keys() ^ part.keys():
            what = f"is in only one of the tensor-parallel ranks 0 and {at}"
            raise MalformedCheckpoint(what, where=min(odd))
    made = {}
    for key in first:
        refs = [part[key] for part in parts]
        with errors_at(where=key):
            made[key] = _joined_tensor(key, refs, first, args)
    return made


def _joined_tensor(
    key: str, refs: Sequence[TensorRef], beside: Tensors, args: Arguments
) -> TensorRef:
    if _WHOLE(key):
        if not all(are_equal(refs[0], ref) for ref in refs[1:]):
            raise MalformedCheckpoint("differs between the ranks, and is whole in each of them")
        return refs[0]
    if any(ref.shape != refs[0].shape for ref in refs):
        raise MalformedCheckpoint("has another shape in another rank")
    if _CUT_IN_COLUMNS(key) and len(refs[0].shape) == 2:
        return end_to_end(refs, 1)
    if refs[0].shape and (_FIRST_OF_MLP(key) or _CUT_IN_ROWS(key)):
        if _FIRST_OF_MLP(key) and _is_gated(key, refs[0], beside, args):
            return _halves(refs)
        return end_to_end(refs, 0)
    what = "is in all tensor-parallel ranks, and it is not known how Megatron-LM splits it"
    raise UnsupportedCheckpoint(what, hint=_HINT_OF_SPLITS)


def _halves(refs: Sequence[TensorRef]) -> TensorRef:
    """The gates of all ranks, then the rest of all: a rank has the rows of both."""
    rows, *others = refs[0].shape
    half, shape = rows // 2, (rows // 2, *others)
    starts = [(at, *(0 for _ in others)) for at in (0, half)]
    return end_to_end([box_of(ref, start, shape) for start in starts for ref in refs], 0)


def _is_gated(key: str, ref: TensorRef, beside: Tensors, args: Arguments) -> bool:
    """Whether the first matrix of an MLP makes a gate too: it has twice the rows then that the
    second one has columns.
    """
    path, _, name = key.rpartition(".")
    above, _, module = path.rpartition(".")
    second = f"{above}.{_SECOND_OF_MLP[module]}.{name.replace('bias', 'weight')}"
    other = beside.get(second.removeprefix("."))
    widths = () if other is None else other.shape[1:]
    rows = ref.shape[0]
    if len(widths) != 1 or rows not in (widths[0], 2 * widths[0]):
        what = f"has {rows} rows, and {printable(second)} does not have as many columns"
        raise MalformedCheckpoint(f"{what}, nor half of them")
    is_gated = rows == 2 * widths[0]
    if args.get("swiglu") is True and not is_gated:
        raise MalformedCheckpoint("has no gate, and the arguments of the training say swiglu")
    if is_gated and any(args.get(name) for name in _OTHER_ORDERS):
        what = "has its gate between the rest (glu_interleave_size), which is not read"
        raise UnsupportedCheckpoint(what, hint=_HINT_OF_SPLITS)
    return is_gated


# ---------------------------------------------------------------------------- stages of a pipeline


def _numbered(stages: Sequence[Tensors], args: Arguments) -> dict[str, TensorRef]:
    """The tensors of all stages, their layers counted through."""
    made: dict[str, TensorRef] = {}
    totals: dict[str, int] = {}
    for stage in stages:
        found: dict[str, set[int]] = {}
        for key, ref in stage.items():
            layer = _LAYER(key)
            if layer is None:
                if key in made and not are_equal(made[key], ref):
                    what = "is in two stages of the pipeline, and differs"
                    raise MalformedCheckpoint(what, where=key)
                made.setdefault(key, ref)
                continue
            block, number, rest = layer.groups()
            found.setdefault(block, set()).add(int(number))
            made[f"{block}{totals.get(block, 0) + int(number)}{rest}"] = ref
        for block, numbers in found.items():
            if numbers != set(range(len(numbers))):
                what = f"one stage of the pipeline lacks some of its {len(numbers)} layers and more"
                raise IncompleteCheckpoint(what, where=f"{block}{min(numbers)}")
            totals[block] = totals.get(block, 0) + len(numbers)
    _refuse_other_count(totals, args)
    return made


def _refuse_other_count(totals: Mapping[str, int], args: Arguments) -> None:
    """Raise where there are not as many layers as the arguments say; of several blocks (an encoder
    and a decoder) each has a number of its own.
    """
    blocks = {block: count for block, count in totals.items() if not block.startswith("mtp.")}
    told = args.get("num_layers")
    if len(blocks) == 1 and type(told) is int:
        [(block, count)] = blocks.items()
        if count != told:
            what = f"there are {count} layers, and the arguments of the training say {told}"
            raise IncompleteCheckpoint(what, where=block.rstrip("."))


def _without_copies(model: dict[str, TensorRef], args: Arguments) -> Iterator[str]:
    """Take out what the last stage has of the embedding, which is the head too; tell it."""
    is_tied = args.get("untie_embeddings_and_output_weights") is False
    for name, whole in list(model.items()):
        before, found, _ = name.rpartition("word_embeddings.weight")
        if not found:
            continue
        outer = before.removesuffix("embedding.")
        copies = [f"{outer}word_embeddings_for_head.weight"]
        if is_tied:
            copies.append(f"{outer}output_layer.weight")
        for copy in copies:
            if copy not in model:
                continue
            if not are_equal(whole, model[copy]):
                what = f"differs from {printable(name)}, of which it is to be the copy"
                raise MalformedCheckpoint(what, where=copy)
            del model[copy]
            yield f"{copy} of the last stage is a copy of {name}, and left out"


def _padding(model: Tensors, args: Arguments) -> Iterator[str]:
    """Tell that an embedding is longer than the vocabulary. It is not cut: the arguments have the
    size before what the tokenizer adds.
    """
    told = args.get("vocab_size")
    if type(told) is not int:
        return
    for name, ref in model.items():
        if name.endswith("word_embeddings.weight") and ref.shape[0] > told:
            yield f"{name} has {ref.shape[0]:,} rows, those that pad the vocabulary of {told:,} too"
