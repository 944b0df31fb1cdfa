"""Folders of Megatron-LM's own format (``--ckpt-format torch``): one iteration, a folder for each
rank of the model.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, TT the tensor-parallel rank, PPP and EEE those of the
pipeline and of the experts. What a distributed optimizer keeps lies beside it. The file of a model
that was not split is a whole checkpoint; the parts of one that was are not put together here.
Source: megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckptconv.formats.containers import open_file
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Call, Node, mapping_pairs
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint
from ckptconv.tree.checkpoint import Checkpoint

_RANK = re.compile(r"mp_rank_([0-9]{2,6})(?:_[0-9]{3,6}){0,2}").fullmatch
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_OPTIMIZER = ("distrib_optim.pt", "optim.pt")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "model_parallel_size",
)
_HINT = (
    "save it with --ckpt-format torch_dist, which is read, or convert it to one rank with "
    "Megatron's own tools"
)


def is_megatron(path: Location) -> bool:
    """Whether `path` is the folder of an iteration in this format."""
    return path.is_folder() and bool(_rank_files(path))


def _rank_files(folder: Location) -> list[Location]:
    ranks = [item for item in folder.list() if _RANK(item.name) and item.is_folder()]
    files = [item.child(name) for item in ranks for name in _FILES]
    return [file for file in files if file.is_file()]


def open_megatron(path: Location, home: Location, *_: object) -> Checkpoint:
    """Open the file of the one rank.

    `UnsupportedCheckpoint` where the model was split, by what there is or what it says.
    """
    files = _rank_files(path)
    if len(files) > 1:
        raise _parallel(_kind(files), len(files), path)
    checkpoint = open_file(within(files[0], home))
    try:
        _refuse_split(checkpoint.root, path)
    except CheckpointError:
        checkpoint.close()
        raise
    left = [name for name in _OPTIMIZER if files[0].beside(name).is_file()]
    notes = [f"{name} beside it, which holds the optimizer's state, is left out" for name in left]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes))


def _kind(files: Sequence[Location]) -> str:
    tensor = {found[1] for file in files if (found := _RANK(file.parent.name))}
    return "tensor-parallel" if len(tensor) > 1 else "pipeline- or expert-parallel"


def _parallel(kind: str, ranks: int, path: Location) -> UnsupportedCheckpoint:
    what = f"is a {kind} checkpoint of {ranks} ranks (mp_rank_XX) of Megatron-LM, which is not read"
    return UnsupportedCheckpoint(what, path=path, hint=_HINT)


def refuse_one_rank(checkpoint: Checkpoint, path: Location) -> None:
    """Raise for the file of one rank of several, which its folder says that it may be."""
    if _RANK(path.absolute.parent.name) is not None:
        _refuse_split(checkpoint.root, path)


def _refuse_split(root: Node, path: Location) -> None:
    """Raise where the arguments of the training say that the model had more than this one rank."""
    args = next((value for key, value in mapping_pairs(root) or () if key == "args"), None)
    known = mapping_pairs(args.state if type(args) is Call else args) or ()
    for key, size in known:
        if key in _SIZES and type(size) is int and size > 1:
            what = f"holds one rank of a model that was split over {size} ({key})"
            raise UnsupportedCheckpoint(what, path=path, hint=_HINT)
