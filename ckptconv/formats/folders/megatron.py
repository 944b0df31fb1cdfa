"""Folders of Megatron-LM's own format (``--ckpt-format torch``): one iteration, a folder for each
rank of the model.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, TT the tensor-parallel rank, PPP and EEE those of the
pipeline and of the experts. What a distributed optimizer keeps lies beside it. The file of a model
that was not split is a whole checkpoint; the parts of one that was are not put together here.
Source: megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckptconv.formats.containers import all_open
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Call, Node, mapping_pairs
from ckptconv.support.errors import UnsupportedCheckpoint
from ckptconv.tree.checkpoint import Checkpoint

_RANK = re.compile(r"mp_rank_([0-9]{2,6})(?:_[0-9]{3,6}){0,2}").fullmatch
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_OPTIMIZER = ("distrib_optim.pt", "optim.pt")
_SIZE = re.compile("(?:tensor_|pipeline_|expert_)?model_parallel_size").fullmatch
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
        ranks = {found[1] for file in files if (found := _RANK(file.parent.name))}
        kind = "tensor-parallel" if len(ranks) > 1 else "pipeline- or expert-parallel"
        what = f"is a {kind} checkpoint of {len(files)} ranks (mp_rank_XX) of Megatron-LM"
        raise UnsupportedCheckpoint(f"{what}, which is not read", path=path, hint=_HINT)
    with all_open(path, [within(files[0], home)], None) as (checkpoint,):
        _refuse_split(checkpoint.root, path)
    left = [name for name in _OPTIMIZER if files[0].beside(name).is_file()]
    notes = [f"{name} beside it, which holds the optimizer's state, is left out" for name in left]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes))


def refuse_one_rank(checkpoint: Checkpoint, path: Location) -> None:
    """Raise for the file of one rank of several, which its folder says that it may be."""
    if _RANK(path.absolute.parent.name) is not None:
        _refuse_split(checkpoint.root, path)


def _refuse_split(root: Node, path: Location) -> None:
    """Raise where the arguments of the training say that the model had more than this one rank."""
    args = next((value for key, value in mapping_pairs(root) or () if key == "args"), None)
    known = mapping_pairs(args.state if type(args) is Call else args) or ()
    for key, size in known:
        if type(size) is int and size > 1 and type(key) is str and _SIZE(key):
            what = f"holds one rank of a model that was split over {size} ({key})"
            raise UnsupportedCheckpoint(what, path=path, hint=_HINT)
