"""Folders that contain checkpoints but are not one themselves: which checkpoint to read.

A file of the folder may name it (``latest`` of DeepSpeed, ``latest_checkpointed_iteration.txt`` of
Megatron-LM, ``last_checkpoint`` of mmengine), or the user does, or there is only one. The folder
itself is looked into, and no deeper. Whether something in it is a checkpoint, the caller says.
Source: deepspeed/runtime/engine.py, megatron/training/checkpointing.py,
mmengine/hooks/checkpoint_hook.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath

from ckptconv.formats.containers import SUFFIXES
from ckptconv.io.location import Location, is_plain_name, read_start, within
from ckptconv.support.errors import (
    AmbiguousStateDict,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import first_few, natural_key

Test = Callable[[Location], bool]


class Chosen(NamedTuple):
    """What is meant in a folder, and what to tell the user about the choice."""

    path: Location
    notes: tuple[str, ...]


def _iteration(text: str) -> str:
    """Megatron-LM writes the number of the iteration, or ``release``."""
    return f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else text


def _last_part(text: str) -> str:
    """mmengine writes the path that the file had where it was saved, fvcore its name."""
    return re.split(r"[\\/]", text)[-1]


POINTERS: dict[str, Callable[[str], str]] = {
    "latest": str,
    "latest_universal": str,
    "latest_checkpointed_iteration.txt": _iteration,
    "last_checkpoint": _last_part,
}
"""Text files that say which folder beside them is meant, and how the text becomes its name."""

# Names under which training leaves beside the weights what it needs to go on
_BESIDE = partial(
    re.fullmatch,
    r"(?:(?:lr_)?scheduler|optim(?:izer)?|sampler|scaler|rng_states?|random_states?"
    r"|training_args|dl_state_dict|custom_checkpoint|recipe_state)"
    r"(?:_[0-9]+)*\.[a-z]+",
)


def names_training_file(name: str) -> bool:
    """Whether a file is called as what training leaves beside the weights: ``optimizer.pt``."""
    return _BESIDE(name) is not None


def training_files(folder: Location) -> list[str]:
    """The files in a folder that training needs to go on; none where no optimizer is there."""
    names = [
        name
        for name in folder.names()
        if name.endswith(_ENDS) and name != ARGUMENTS and names_training_file(name)
    ]
    return names if any(name.startswith("optim") for name in names) else []


ARGUMENTS = "training_args.bin"
_ENDS = (".pt", ".pth", ".bin", ".pkl")


def weight_files(folder: Location) -> list[str]:
    """What is in a folder under names that files of weights have."""
    names = [name for name in folder.names() if PurePath(name).suffix in SUFFIXES]
    return [name for name in names if not (name.startswith(".") or names_training_file(name))]


def points(folder: Location) -> bool:
    """Whether a file of `folder` says which of the folders in it is meant."""
    return any(folder.child(name).is_file() for name in POINTERS)


def chosen(folder: Location, tag: str | None, is_checkpoint: Test, is_empty: Test) -> Chosen | None:
    """What is meant in `folder`: what `tag` names, else what a file of it names, else the only
    checkpoint in it. Files that are `is_empty` do not count.

    None where there is nothing to choose from. Raises `MalformedCheckpoint` for a name that leads
    elsewhere or nowhere, `AmbiguousStateDict` where there is a choice; both say what there is.
    """
    inside = _inside(folder, is_checkpoint, is_empty)
    if tag is not None:
        return _named(folder, _by_number(tag, inside.folders), "--tag", inside, is_checkpoint)
    for pointer, name_of in POINTERS.items():
        file = folder.child(pointer)
        if file.is_file():
            # its start alone: any file may be called `latest`, a checkpoint too
            text = read_start(file, "small_record_bytes").decode("utf-8", "replace").strip()
            return _named(folder, name_of(text), pointer, inside, is_checkpoint)
    return _only(folder, inside)


# ------------------------------------------------------------------------------------ what there is


class _Inside(NamedTuple):
    """The names in a folder: checkpoints, folders around such, files that may be such."""

    folders: tuple[str, ...]
    around: tuple[str, ...]
    files: tuple[str, ...]


def _inside(folder: Location, is_checkpoint: Test, is_empty: Test) -> _Inside:
    items = _distinct(folder)
    names = [item.name for item in items if item.is_folder()]
    folders = dict.fromkeys(name for name in names if is_checkpoint(folder.child(name)))
    around = [name for name in names if name not in folders and points(folder.child(name))]
    files = [item for item in items if item.suffix in SUFFIXES and item.is_file()]
    full = [item.name for item in files if not is_empty(item)]
    return _Inside(tuple(folders), tuple(around), tuple(full))


def _distinct(folder: Location) -> list[Location]:
    """What is in a folder, by number; no hidden things, no links like ``last.ckpt``, ``latest``."""
    items = {item.name: item for item in folder.list() if not item.name.startswith(".")}
    aliases = {name: target for name, item in items.items() if (target := item.alias_of())}
    for name, target in aliases.items():
        # what a link to a link or to elsewhere leads to is not listed here: it stays
        if target in items and target not in aliases:
            del items[name]
    return [items[name] for name in sorted(items, key=natural_key)]


# ------------------------------------------------------------------------------------ what is meant


NOT_PLAIN = (
    "it means something else on Windows, or lies elsewhere; rename it, also where it is named"
)


def _by_number(tag: str, names: Sequence[str]) -> str:
    """The one name that ends in the number `tag` where none is called so: 1000 is step-1000 or
    iter_0001000; else `tag`.
    """
    if tag in names or not re.fullmatch("[0-9]{1,18}", tag):
        return tag
    ends = re.compile(rf".*[-_]0{{0,17}}{int(tag)}", re.DOTALL)
    found = list(filter(ends.fullmatch, names))
    return found[0] if len(found) == 1 else tag


def _named(
    folder: Location, name: str, named_by: str, inside: _Inside, is_checkpoint: Test
) -> Chosen:
    if not is_plain_name(name):
        what = f"'{printable(name)}' is not a plain folder name"
        raise MalformedCheckpoint(what, path=folder, where=named_by, hint=NOT_PLAIN)
    place = within(folder.child(name), folder)
    if name not in inside.files and not (place.is_folder() and is_checkpoint(place)):
        what = f"names the step '{printable(name)}', which is not here"
        if named_by == "--tag":
            what = f"there is no step '{printable(name)}' here"
        hint = _choice((*inside.folders, *inside.files))
        raise MalformedCheckpoint(what, path=folder, where=named_by, hint=hint)
    others = [other for other in inside.folders if other != name]
    notes: tuple[str, ...] = (f"its step {printable(name)} is read",)
    if name in inside.files:
        notes = (f"of its files, {printable(name)} is read",)
    elif others:
        more = f"the folder holds other steps too; {_choice(others)}"
        notes = (f"of its steps, {printable(name)} is read", more)
    return Chosen(folder.child(name), notes)


def _only(folder: Location, inside: _Inside) -> Chosen | None:
    files = [name for name in inside.files if not _BESIDE(name)]
    if not files and not inside.folders:
        files = list(inside.files)
    found = [*inside.folders, *files]
    if len(found) == 1 and not inside.around:
        note = f"the only checkpoint in the folder is read: {printable(found[0])}"
        return Chosen(within(folder.child(found[0]), folder), (note,))
    if inside.folders:
        count = len(found) + len(inside.around)
        what = f"holds {count} checkpoints but no file says which one to read"
        raise AmbiguousStateDict(what, path=folder, hint=_choice(found, inside.around))
    if inside.around:
        what = "is not a checkpoint, but folders in it are"
        hint = f"name the one that you mean: {first_few((*inside.around, *files), _LISTED)}"
        raise UnsupportedCheckpoint(what, path=folder, hint=hint)
    if files:
        what = f"is a folder of {len(files)} files without an index"
        hint = f"name the file that you mean, or all its parts: {first_few(files, _LISTED)}"
        raise UnsupportedCheckpoint(what, path=folder, hint=hint)
    return None


_LISTED = 6


def _choice(names: Sequence[str], around: Sequence[str] = ()) -> str | None:
    ways = []
    if names:
        ways.append(f"choose one with --tag: {printable(', '.join(names), 500)}")
    if around:
        ways.append(f"or name the folder: {first_few(around, _LISTED)}")
    return "; ".join(ways) or None
