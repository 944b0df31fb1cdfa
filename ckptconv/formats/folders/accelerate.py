"""Folders of `accelerate`'s `save_state`: the weights of each model, and beside them what its
training needs to go on.

``model.safetensors`` or ``pytorch_model.bin`` (further ones with ``_1``, ``_2``),
``optimizer.bin``, ``scheduler.bin``, ``sampler.bin``, ``random_states_R.pkl`` of each process.
Under FSDP the weights of model I are ``pytorch_model_fsdp_I``, a DCP folder, or
``pytorch_model_fsdp[_I].bin``, or a file of each rank, ``pytorch_model_fsdp[_I]_rankR.bin``; so are
the states of its optimizer. Source: accelerate's checkpointing.py and utils/fsdp_utils.py (1.15).

SpeechBrain's folders (``CKPT+2026-01-01+00-00-00+00``) are alike: a file for each object,
``model.ckpt``, ``optimizer.ckpt``, some of them texts. Source: speechbrain/utils/checkpoints.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

from ckptconv.formats.containers import all_open, open_file
from ckptconv.formats.folders.alone import has_shards, refuse_flat
from ckptconv.formats.folders.dcp import open_dcp
from ckptconv.formats.folders.ranks import join_ranks
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Dict, Node, calls_of, mapping_pairs
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.records import NamedTuple
from ckptconv.tree.checkpoint import Checkpoint, Container, whole_of

CONTAINER = Container(
    "accelerate folder",
    "accelerate",
    why_not=(
        "only accelerate's load_state opens it, in a program that has prepared the same objects"
    ),
    is_folder=True,
)
_OF_SPEECHBRAIN = Container(
    "SpeechBrain folder",
    "speechbrain",
    why_not="only SpeechBrain's Checkpointer opens it, with the same objects",
    is_folder=True,
)
# model.safetensors, pytorch_model.bin; model_1.safetensors of a second model
_MODEL = re.compile(r"(?:model|pytorch_model)(?:_(?P<index>\d+))?\.(?:safetensors|bin)$").match
# pytorch_model_fsdp.bin of a whole state dict, …_rank0.bin of a local one; a folder, …_0, of a
# sharded one
_FSDP = re.compile(
    r"pytorch_model_fsdp(?:_(?:0+|0*(?P<index>[1-9]\d*)))?(?:(?:_rank(?P<rank>\d+))?\.bin)?"
).fullmatch
_OPTIMIZER = re.compile(r"(?P<label>optimizer_\d+)(?:_rank(?P<rank>\d+)\.bin)?").fullmatch
_OTHERS = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin$|random_states_\d+\.pkl$"
    r"|scaler\.pt$|custom_checkpoint_\d+\.pkl$"
    r"|scheduler\.pt$|rng_state(?:_\d+)?\.pth$"  # as transformers' Trainer calls them
).match


class _Labelled(NamedTuple):
    """What is under one label of the tree: a file or folder, or the files of all ranks in order."""

    label: str
    paths: list[Location]
    is_ranks: bool


def is_accelerate(path: Location) -> bool:
    """Whether a folder is one with weights and random states, or a step of SpeechBrain."""
    names = path.names()
    has_states = any(re.match(r"random_states_\d+\.pkl$", name) for name in names)
    return (has_states and any(map(_MODEL, names))) or _SPEECHBRAIN in names


_SPEECHBRAIN = "CKPT.yaml"


def is_fsdp(path: Location) -> bool:
    """Whether a folder is one with weights under the names that they have under FSDP."""
    return any(map(_FSDP, path.names()))


def open_accelerate(path: Location, *_: object) -> Checkpoint:
    """Open every part; the tree is a dict of their trees by name, the model's under ``model``."""
    checkpoints: list[Checkpoint] = []
    pairs: list[tuple[Node, Node]] = []
    container = _OF_SPEECHBRAIN if _SPEECHBRAIN in path.names() else CONTAINER
    pool = FilePool()  # of many parts, few are open at a time
    with ExitStack() as opened:
        parts, notes = _parts(path)
        for part in parts:
            try:
                checkpoint = opened.enter_context(_open_part(part, pool))
            except UnsupportedCheckpoint as error:
                if error.code != "text" or container is CONTAINER:
                    raise
                notes.append(f"{printable(part.paths[0].name)} is left out: it is a text file")
                continue
            checkpoints.append(checkpoint)
            pairs.append((part.label, _unwrapped(checkpoint.root, part)))
        opened.pop_all()
    return whole_of(checkpoints, container, Dict(pairs), path.path, notes)


def _parts(folder: Location) -> tuple[list[_Labelled], list[str]]:
    """The parts in the order of the tree, models first, and notes on what is left out."""

    def alone(names: Iterable[str]) -> list[_Labelled]:
        files = [within(folder.child(name), folder) for name in names]
        return [_Labelled(file.stem, [file], False) for file in files]

    names = folder.names()
    if _SPEECHBRAIN in names:
        return alone(name for name in names if name.endswith(".ckpt")), []
    plain, left = _preferred(names)
    models = _gathered(folder, names, _FSDP)
    if plain:
        models = _gathered(folder, plain, _MODEL)
        for name in filter(_FSDP, names):
            left.append(f"{printable(name)} is left out: {plain[0]} holds the weights")
    others = alone(name for name in names if _OTHERS(name) and not _MODEL(name))
    return [*models, *_gathered(folder, names, _OPTIMIZER), *others], left


def _preferred(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Each model's safetensors file where there is one, as accelerate loads it; notes on others."""
    found: dict[str | None, str] = {}
    left = []
    matches = [match for name in names if (match := _MODEL(name))]
    for match in sorted(matches, key=lambda match: not match.string.endswith(".safetensors")):
        name = match.string
        first = found.setdefault(match["index"], name)
        if first != name:
            left.append(f"{name} is left out: {first} holds the weights")
    return sorted(found.values()), left


def _label(found: re.Match[str]) -> str:
    told = found.groupdict()
    return told.get("label") or "_".join(filter(None, ("model", told["index"])))


def _gathered(
    folder: Location, names: Sequence[str], matches: Callable[[str], re.Match[str] | None]
) -> Iterator[_Labelled]:
    """The parts that those names are which match. `UnsupportedCheckpoint` where one is there in two
    forms, of which one must be older.
    """
    forms: dict[str, dict[str, list[str]]] = {}
    for name in names:
        found = matches(name)
        if found:
            rank = found.groupdict().get("rank")  # None where no rank wrote it by itself
            form = name if rank is None else name[: name.rindex(rank)]
            forms.setdefault(_label(found), {}).setdefault(form, []).append(name)
    for label, of_label in forms.items():
        if len(of_label) > 1:
            named = ", ".join(printable(form_names[0]) for form_names in of_label.values())
            what = f"holds {label} in {len(of_label)} forms: {named}"
            hint = "move away the files of another run"
            raise UnsupportedCheckpoint(what, path=folder, hint=hint)
        [(form, members)] = of_label.items()
        paths = [within(folder.child(name), folder) for name in members]
        yield _Labelled(label, paths, is_ranks=[form] != members)


def _open_part(part: _Labelled, pool: FilePool) -> Checkpoint:
    if part.paths[0].is_folder():
        return open_dcp(part.paths[0])
    if not part.is_ranks:
        return open_file(part.paths[0], pool)
    with all_open(part.paths[0].parent, part.paths, pool) as files:
        checkpoint = files[0]
        if len(files) > 1 or has_shards(calls_of(checkpoint.root)):
            checkpoint = join_ranks(files)
        keys = [key for key, _ in mapping_pairs(checkpoint.root) or () if type(key) is str]
        refuse_flat(keys, part.paths[0].parent.path)
    return checkpoint


def _unwrapped(root: Node, part: _Labelled) -> Node:
    """The tree of a DCP folder without accelerate's one label, ``model`` or ``optimizer``."""
    pairs = mapping_pairs(root) or ()
    if not part.paths[0].is_folder() or len(pairs) != 1:
        return root
    if mapping_pairs(pairs[0][1]) is None:
        raise MalformedCheckpoint("holds no state dict", path=part.paths[0], where=str(pairs[0][0]))
    return pairs[0][1]
