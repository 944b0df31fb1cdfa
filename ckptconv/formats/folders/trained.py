"""What training left beside the weights in a folder, taken with them where that is asked for:
``optimizer.pt``, ``scheduler.pt``, ``scaler.pt``, ``rng_state[_R].pth``, ``trainer_state.json``.

transformers' Trainer saves so; its optimizer numbers the parameters, of which it makes two groups,
those that decay first. ``training_args.bin`` holds an object of a class, and is left out. Source:
transformers' trainer.py and trainer_callback.py (5.24).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from ckptconv.formats.containers import open_file
from ckptconv.formats.folders.steps import ARGUMENTS, training_files
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, read_small, within
from ckptconv.pickles.nodes import Dict, Node
from ckptconv.support.errors import UnsupportedCheckpoint, printable
from ckptconv.support.json_text import read_object
from ckptconv.tree.checkpoint import Checkpoint, Container, whole_of

_CONTAINER = Container(
    "weights and training states",
    "transformers",
    why_not="only the training that saved them opens all of its files",
    is_folder=True,
)
NUMBERS = "trainer_state.json"


def with_training(weights: Checkpoint, folder: Location) -> Checkpoint:
    """The checkpoint of weights, under ``model``, and of the training states beside them, each
    under the name of its file. One that holds an optimizer itself stays as it is.

    Raises `UnsupportedCheckpoint` where no optimizer is there.
    """
    from ckptconv.tree.optimizer_states import optimizer_states

    if next(optimizer_states(weights.root, {}), None) is not None:
        return weights
    names = training_files(folder)
    if not names:
        what = "has no training states beside its weights (optimizer.pt, scheduler.pt, ...)"
        raise UnsupportedCheckpoint(what, path=folder, hint="leave --with-training out")
    _refuse_twins(folder, names)
    pairs: list[tuple[Node, Node]] = [("model", weights.root)]
    opened: list[Checkpoint] = []
    with ExitStack() as leaving:
        pool = FilePool()
        for name in names:
            place = within(folder.child(name), folder)
            opened.append(leaving.enter_context(open_file(place, pool)))
            pairs.append((PurePath(name).stem, opened[-1].root))
        if folder.child(NUMBERS).is_file():
            raw = read_small(within(folder.child(NUMBERS), folder), "index_bytes")
            told = read_object(raw, folder.child(NUMBERS).path, NUMBERS, of_python=True)
            pairs.append((PurePath(NUMBERS).stem, _node(told)))
        leaving.pop_all()
    left = [f"{ARGUMENTS} is left out: it holds an object of transformers' own"]
    notes = left if folder.child(ARGUMENTS).is_file() else []
    whole = whole_of([weights, *opened], _CONTAINER, Dict(pairs), folder.path, notes)
    return replace(whole, metadata=weights.metadata, index_metadata=weights.index_metadata)


def _refuse_twins(folder: Location, names: Sequence[str]) -> None:
    """Refuse a state that is there under two names, of which one must be older."""
    stems: dict[str, str] = {}
    for name in names:
        first = stems.setdefault(PurePath(name).stem, name)
        if first != name:
            what = f"holds {printable(PurePath(name).stem)} twice: {first}, {printable(name)}"
            hint = "move away the file of another run"
            raise UnsupportedCheckpoint(what, path=folder, hint=hint)


def _node(value: Any) -> Node:
    if isinstance(value, dict):
        return Dict([(key, _node(item)) for key, item in value.items()])
    return [_node(item) for item in value] if isinstance(value, list) else value
