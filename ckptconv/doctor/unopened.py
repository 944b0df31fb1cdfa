"""The finding for what cannot be opened as a checkpoint: what it is, and what can be done."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from ckptconv.convert.prescriptions import Fix, command, output_beside, workable
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.findings import Finding
from ckptconv.formats.registry import open_certain
from ckptconv.formats.strangers import stranger_of
from ckptconv.io.location import Location
from ckptconv.support.errors import (
    CheckpointError,
    IncompleteCheckpoint,
    LimitExceeded,
    MalformedCheckpoint,
    printable,
)
from ckptconv.support.text import as_argument


def unopened(error: CheckpointError, paths: Sequence[Location]) -> Finding:
    """The finding for what cannot be opened; its cause and advice are the error's own."""
    cause = (
        f"{printable(error.where)}: {printable(error.what, 2000)}"
        if error.where
        else printable(error.what, 2000)
    )
    finding = Finding("error", _code(error), cause, _effect(error, paths[0]), advice=error.hint)
    if (
        isinstance(error, IncompleteCheckpoint)
        and len(paths) == 1
        and (fixed := _with_siblings(paths[0]))
    ):
        return replace(finding, command=fixed, advice=None)  # which says no more
    if (unpack := _unpacking(error, paths[0])) is not None:
        return replace(finding, command=unpack, advice=None)
    return finding


def _code(error: CheckpointError) -> str:
    if isinstance(error, IncompleteCheckpoint):
        return "lone-rank"
    if isinstance(error, MalformedCheckpoint):
        return "damaged"
    return "beyond-limits" if isinstance(error, LimitExceeded) else "no-checkpoint"


def _effect(error: CheckpointError, place: Location) -> str:
    if place.is_folder():
        return words.quoted(words.FOLDER)
    if isinstance(error, IncompleteCheckpoint):
        return (
            "torch.load gives one rank's shards, and load_state_dict does not accept them as the "
            "whole tensors"
        )
    try:
        source = place.open()
    except CheckpointError as unreadable:
        return printable(unreadable.what)
    try:
        head = source.read(0, min(4, source.size))
    finally:
        source.close()
    if place.suffix == ".safetensors" and not isinstance(error, MalformedCheckpoint):
        return words.quoted(words.HEADER, by="load_file")
    if head.startswith(b"PK\3\4") and error.code == "cut-off":
        return words.quoted(words.CUT_OFF)
    said = words.on_start(head)
    is_npz = said is None and f"{error.where or place}".endswith((".npy", ".npz"))
    if said is None and isinstance(error, MalformedCheckpoint):
        return (
            f"ckptconv does not open it; {'numpy' if is_npz else 'torch'}.load may refuse it too, "
            "or load something else than was saved"
        )
    if said is None:
        others = "; numpy.load may load it" if is_npz else ""
        return f"neither torch.load nor the safetensors library loads it{others}"
    return words.quoted(said)


def _with_siblings(place: Location) -> str | None:
    """The command for the files of all ranks, if here under names that differ in their numbers."""
    pattern = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", place.name))))
    try:
        names = [name for name in place.parent.names() if pattern.fullmatch(name)]
        beside = [item for item in map(place.beside, names) if item.is_file()]
        with open_certain(beside) as joined:
            found = workable(Fix(), joined)
    except (CheckpointError, OSError):
        return None
    if isinstance(found, CheckpointError):
        return None
    return command(found.fix, [item.path for item in beside])


def _unpacking(error: CheckpointError, place: Location) -> str | None:
    """The command that unpacks a compressed file beside it."""
    if error.code != "compressed":
        return None
    source = place.open()
    try:
        known = stranger_of(source.read(0, min(source.size, _HEAD)))
    finally:
        source.close()
    names = (place.path, output_beside(place.path, ".pt"))
    packed, made = (quote(as_argument(name)) for name in names)
    return None if known is None else f"{known.unpacker} -c {packed} > {made}"


_HEAD = 64
