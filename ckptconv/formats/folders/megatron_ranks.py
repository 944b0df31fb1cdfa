"""The ranks of a model that Megatron-LM split, each a file, joined into the model that they are.

Tensor-parallel ranks hold rows (of heads, of hidden units, of the vocabulary) or columns of a
matrix, and the same norms and the same biases of what is cut into columns. Where a layer is gated,
each rank has its part of the gate above its part of the rest. The stages of a pipeline hold layers,
each counted from 0; with virtual stages the first chunks of all ranks come before their second
ones. Source: Megatron-LM d98e8a64 (BSD-3) core/tensor_parallel/layers.py, core/transformer/mlp.py,
core/transformer/transformer_layer.py, tools/checkpoint/loader_base.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ckptconv.formats.folders.ranks import Copies, are_equal
from ckptconv.pickles.nodes import Node, mapping_pairs
from ckptconv.support.errors import (
    IncompleteCheckpoint,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.assembly import assembled
from ckptconv.tensors.refs import TensorRef, box_of
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import tensor_of

Tensors = Mapping[str, TensorRef]
Arguments = Mapping[str, Node]
"""The arguments of the training, by name."""

_AT = r"(?:.*\.)?"
_CUT_IN_ROWS = re.compile(
    rf"{_AT}(?:(?:linear_qkv|query_key_value)\.(?:weight|bias)"
    r"|(?:word_embeddings|word_embeddings_for_head|output_layer)\.weight)"
).fullmatch
_FIRST_OF_MLP = re.compile(rf"{_AT}(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*").fullmatch
_CUT_IN_COLUMNS = re.compile(
    rf"{_AT}(?:linear_proj|linear_fc2|dense_4h_to_h|(?:self_)?attention\.dense)\.weight\d*"
).fullmatch
_WHOLE = re.compile(
    rf"{_AT}(?:\w*layernorm\.(?:weight|bias)|(?:linear_qkv|linear_fc1)\.layer_norm_(?:weight|bias)"
    r"|(?:linear_proj|linear_fc2|dense_4h_to_h|(?:self_)?attention\.dense)\.bias\d*"
    r"|(?:position|tokentype)_embeddings\.weight|rotary_pos_emb\.inv_freq"
    r"|router\.(?:weight|bias|expert_bias)|shared_experts\.gate_weight)"
).fullmatch
_SECOND_OF_MLP = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(\..+)").fullmatch
_EXTRA_STATE = "_extra_state"  # of Transformer Engine: how a rank scales fp8
_OTHER_ORDERS = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
HINT = (
    "save it with --ckpt-format torch_dist, which is read, or convert it to one rank with "
    "Megatron's own tools"
)


class Model(NamedTuple):
    """A model by its keys, and what is told of it."""

    tensors: Tensors
    notes: Sequence[str]


def joined_model(ranks: Sequence[Sequence[Checkpoint]], args: Arguments) -> Model:
    """The model of all ranks, those of one stage together.

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
    return Model(model, notes)


def _chunks(root: Node, extra: list[str]) -> Iterator[Tensors]:
    """The models in the file of a rank: one, or one for each of its virtual stages; the names of
    what Transformer Engine keeps beside the weights become `extra`.
    """
    found = {key: value for key, value in mapping_pairs(root) or () if type(key) is str}
    names = ["model"] if "model" in found else [f"model{at}" for at in range(len(found))]
    for name in names:
        if name in found:
            yield dict(_flat(found[name], "", set(), extra))


def _flat(
    node: Node, before: str, seen: set[int], extra: list[str]
) -> Iterator[tuple[str, TensorRef]]:
    """The tensors of a model, whose parts may be dicts of their own, each at one place."""
    pairs = mapping_pairs(node)
    if pairs is None or id(node) in seen:
        what = "is neither a tensor nor a dict of tensors of its own"
        raise UnsupportedCheckpoint(what, where=before or "model", hint=HINT)
    seen.add(id(node))
    for key, value in pairs:
        name = f"{before}.{key}" if before else f"{key}"
        ref = tensor_of(value)
        if name.endswith(_EXTRA_STATE):
            extra += [name] if value is not None else []
        elif ref is None:
            yield from _flat(value, name, seen, extra)
        else:
            yield name, ref


# ------------------------------------------------------------------------- tensor-parallel ranks


def _joined_stage(parts: Sequence[Tensors], args: Arguments) -> Tensors:
    """The tensors of one stage, of which each rank has its part."""
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
            made[key] = _joined(key, refs, first, args)
    return made


def _joined(key: str, refs: Sequence[TensorRef], beside: Tensors, args: Arguments) -> TensorRef:
    if _WHOLE(key):
        if not all(are_equal(refs[0], ref) for ref in refs[1:]):
            raise MalformedCheckpoint("differs between the ranks, and is whole in each of them")
        return refs[0]
    if any(ref.shape != refs[0].shape for ref in refs):
        raise MalformedCheckpoint("has another shape in another rank")
    if _CUT_IN_COLUMNS(key) and len(refs[0].shape) == 2:
        return _end_to_end(refs, 1)
    if _FIRST_OF_MLP(key) and refs[0].shape:
        return _halves(refs) if _is_gated(key, refs[0], beside, args) else _end_to_end(refs, 0)
    if _CUT_IN_ROWS(key) and refs[0].shape:
        return _end_to_end(refs, 0)
    what = "is in all tensor-parallel ranks, and it is not known how Megatron-LM splits it"
    raise UnsupportedCheckpoint(what, hint=HINT)


def _end_to_end(refs: Sequence[TensorRef], axis: int) -> TensorRef:
    step, shape = refs[0].shape[axis], list(refs[0].shape)
    starts = [[0] * len(shape) for _ in refs]
    for at, start in enumerate(starts):
        start[axis] = step * at
    shape[axis] = step * len(refs)
    parts = [(tuple(start), ref) for start, ref in zip(starts, refs, strict=True)]
    return assembled(refs[0].dtype, tuple(shape), parts)


def _halves(refs: Sequence[TensorRef]) -> TensorRef:
    """The gates of all ranks, then the rest of all: a rank has the rows of both."""
    rows, *others = refs[0].shape
    half, shape = rows // 2, (rows // 2, *others)
    starts = [(at, *(0 for _ in others)) for at in (0, half)]
    return _end_to_end([box_of(ref, start, shape) for start in starts for ref in refs], 0)


def _is_gated(key: str, ref: TensorRef, beside: Tensors, args: Arguments) -> bool:
    """Whether the first matrix of an MLP makes a gate too: it has twice the rows then that the
    second one has columns.
    """
    path, _, name = key.rpartition(".")
    above, _, module = path.rpartition(".")
    second = f"{above}.{_SECOND_OF_MLP[module]}.{name.replace('bias', 'weight')}"
    other = beside.get(second.removeprefix("."))
    units = None if other is None or len(other.shape) != 2 else other.shape[1]
    swiglu = args.get("swiglu")
    if units is None or ref.shape[0] not in (units, 2 * units):
        what = f"has {ref.shape[0]} rows, and {printable(second)} does not have as many columns"
        raise MalformedCheckpoint(f"{what}, nor half of them")
    is_gated = ref.shape[0] == 2 * units
    if swiglu is True and not is_gated:
        raise MalformedCheckpoint("has no gate, and the arguments of the training say swiglu")
    if is_gated and any(args.get(name) for name in _OTHER_ORDERS):
        what = "has its gate between the rest (glu_interleave_size), which is not read"
        raise UnsupportedCheckpoint(what, hint=HINT)
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
                _put(made, key, ref)
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


def _put(made: dict[str, TensorRef], key: str, ref: TensorRef) -> None:
    if key in made and not are_equal(made[key], ref):
        raise MalformedCheckpoint("is in two stages of the pipeline, and differs", where=key)
    made.setdefault(key, ref)


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
        copies += [f"{outer}output_layer.weight"] * is_tied
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
    for name, ref in model.items():
        is_one = name.endswith("word_embeddings.weight") and type(told) is int
        if is_one and isinstance(told, int) and ref.shape[0] > told:
            yield f"{name} has {ref.shape[0]:,} rows, those that pad the vocabulary of {told:,} too"
