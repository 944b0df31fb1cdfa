"""Folders of Megatron-LM's own format (``--ckpt-format torch``): one iteration, a folder for each
rank of the model.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, TT the tensor-parallel rank, PPP and EEE those of the
pipeline and of the experts. What a distributed optimizer keeps lies beside it. The file of a model
that was not split is a whole checkpoint; the tensor- and pipeline-parallel ranks of one that was
are joined (`megatron_ranks`). Source: megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptconv.formats.containers import all_open
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Node, mapping_pairs, ordered_dict
from ckptconv.support.errors import (
    IncompleteCheckpoint,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.text import first_few
from ckptconv.tree.checkpoint import Checkpoint, whole_of
from ckptconv.tree.model_config import training_arguments

_RANK = re.compile(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?(?:_([0-9]{3,6}))?").fullmatch
_FILES = ("model_optim_rng.pt", "model_rng.pt")
DISTRIBUTED = "distrib_optim.pt"
_OPTIMIZER = (DISTRIBUTED, "optim.pt")
_MODEL = re.compile("model[0-9]*").fullmatch
_SIZE = re.compile("(?:tensor_|pipeline_|expert_)?model_parallel_size").fullmatch
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_EXPERTS = "expert_model_parallel_size"
_OF_EXPERTS = "expert_tensor_parallel_size"
_KEPT = ("args", "checkpoint_version", "iteration", "opt_param_scheduler")
"""What each rank has, and the same as all others, beside the model."""
_OLDEST = 2.0  # before that version rows of q, k and v are in another order
_HINT = (
    "name the folder of the iteration with the folders of all ranks in it, or save it with "
    "--ckpt-format torch_dist"
)


def is_megatron(path: Location) -> bool:
    """Whether `path` is the folder of an iteration in this format."""
    return path.is_folder() and bool(_rank_files(path))


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
        if len(files) == 1:
            _refuse_split(opened[0].root, path)
            whole = opened[0]
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
        hint = "save it with --ckpt-format torch_dist, which is read"
        raise UnsupportedCheckpoint(what, path=path, hint=hint)
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
    from ckptconv.formats.folders.megatron_ranks import joined_model  # seldom needed

    first = next(iter(ranks.values()))
    args = training_arguments(first.root)
    _refuse_other_kinds(first, args, path)
    tensor, pipeline = _sizes(args, path)
    names = [[_name(at, stage, pipeline) for at in range(tensor)] for stage in range(pipeline)]
    _refuse_other_ranks([name for stage in names for name in stage], ranks, path)
    _refuse_other_runs(ranks)
    model = joined_model([[ranks[name] for name in stage] for stage in names], args)
    pairs = [pair for pair in mapping_pairs(first.root) or () if pair[0] in _KEPT]
    root = ordered_dict([("model", ordered_dict(list(model.tensors.items()))), *pairs])
    container = replace(
        first.container,
        name=f"{first.container.name}, {len(ranks)} ranks",
        by="",
        why_not="each file holds a part of the model",
        weights_only=False,
        names_storages=False,  # a tensor is made of several, so they cannot be counted
    )
    notes = [*model.notes, *_left_out(first)]
    return whole_of(list(ranks.values()), container, root, path.path, notes)


def _name(tensor: int, stage: int, pipeline: int) -> str:
    return f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")


def _refuse_other_kinds(first: Checkpoint, args: Mapping[str, Node], path: Location) -> None:
    """Refuse experts over ranks, and rows of q, k and v in the order of an old version."""
    experts, tensor = args.get(_EXPERTS), args.get(_SIZES[0])
    if type(experts) is int and experts > 1:
        what = f"its experts are split over {experts} ranks ({_EXPERTS}), which is not read"
        raise UnsupportedCheckpoint(what, path=path, hint=_TORCH_DIST)
    if args.get(_OF_EXPERTS) not in (None, tensor):
        what = f"its experts are split otherwise than the rest ({_OF_EXPERTS}), which is not read"
        raise UnsupportedCheckpoint(what, path=path, hint=_TORCH_DIST)
    version = _told(first.root).get("checkpoint_version")
    if not isinstance(version, (int, float)) or version < _OLDEST:
        what = f"is of a checkpoint_version before {_OLDEST}, whose ranks are not joined"
        raise UnsupportedCheckpoint(what, path=path, hint="load and save it with a newer Megatron")


_TORCH_DIST = "save it with --ckpt-format torch_dist, which is read"


def _sizes(args: Mapping[str, Node], path: Location) -> tuple[int, int]:
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
    if missing := [name for name in wanted if name not in ranks]:
        what = f"{told}, and {len(missing)} are missing: {first_few(missing, 3)}"
        raise IncompleteCheckpoint(what, path=path, hint="fetch the folders of all ranks")
    if others := [name for name in ranks if name not in wanted]:
        what = f"{told}, and there are others: {first_few(others, 3)}"
        raise UnsupportedCheckpoint(what, path=path, hint="remove those of another run")


def _refuse_other_runs(ranks: Mapping[str, Checkpoint]) -> None:
    told = {name: _told(rank.root).get("iteration") for name, rank in ranks.items()}
    name, first = next(iter(told.items()))
    for other, iteration in told.items():
        if iteration != first:
            what = f"is of the iteration {iteration}, and {name} of {first}"
            raise MalformedCheckpoint(printable(what), path=ranks[other].path)


def _told(root: Node) -> dict[str, Node]:
    """What the file of a rank holds, by name."""
    return {key: value for key, value in mapping_pairs(root) or () if type(key) is str}


def _left_out(first: Checkpoint) -> Iterator[str]:
    """Tell what each rank has for itself."""
    others = [name for name in _told(first.root) if name not in _KEPT and not _MODEL(name)]
    if others:
        yield f"what each rank has for itself is left out: {first_few(others, 4)}"
