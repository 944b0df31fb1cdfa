"""Folders of `accelerate`'s `save_state`: the weights of each model, and beside them what its training needs to go on.

``model.safetensors`` or ``pytorch_model.bin`` (further ones with ``_1``, ``_2``), ``optimizer.bin``, ``scheduler.bin``,
``sampler.bin``, ``random_states_R.pkl`` of each process. Source: accelerate's checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ckptconv.checkpoint import Checkpoint
from ckptconv.nodes import Dict, Node
from ckptconv.sources import within

NAME = "accelerate folder"
_MODEL = re.compile(r"(?:model|pytorch_model)(?:_(\d+))?\.(?:safetensors|bin)$").match
_OTHERS = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin$|random_states_\d+\.pkl$|scaler\.pt$|custom_checkpoint_\d+\.pkl$"
).match


def is_accelerate(path: Path) -> bool:
    """Whether `path` is a folder with weights and the random states that `save_state` leaves beside them."""
    if not path.is_dir():
        return False
    names = [item.name for item in path.iterdir()]
    return any(map(_MODEL, names)) and any(re.match(r"random_states_\d+\.pkl$", name) for name in names)


def open_accelerate(path: Path, open_file: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Open every file of the folder; the tree is a dict of their trees by name, the model's under ``model``."""
    opened: list[tuple[str, Checkpoint]] = []
    try:
        for item in sorted(path.iterdir(), key=lambda item: (_MODEL(item.name) is None, item.name)):
            if (match := _MODEL(item.name)) is not None:
                opened.append((f"model_{match[1]}" if match[1] else "model", open_file(within(item, path))))
            elif _OTHERS(item.name):
                opened.append((item.stem, open_file(within(item, path))))
    except BaseException:
        for _, checkpoint in opened:
            checkpoint.close()
        raise
    pairs: list[tuple[Node, Node]] = [(name, checkpoint.root) for name, checkpoint in opened]
    return Checkpoint(
        path=path,
        format=NAME,
        root=Dict(pairs),
        nbytes=sum(checkpoint.nbytes for _, checkpoint in opened),
        notes=tuple(dict.fromkeys(note for _, checkpoint in opened for note in checkpoint.notes)),
        sources=tuple(source for _, checkpoint in opened for source in checkpoint.sources),
    )
