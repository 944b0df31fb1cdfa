"""Why a checkpoint will not load here, or causes trouble later, and the command that fixes it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from ckptconv.convert.fixes import Fix, command, output_beside, workable
from ckptconv.doctor import cases
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.cases import Case, DoctorOptions, Symptom, some
from ckptconv.doctor.report import LEFT_OUT, SEVERITIES, Diagnosis, Finding
from ckptconv.doctor.symptoms import CHECKS
from ckptconv.formats.registry import Named, checkpoints_of, open_certain, open_to_look
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.io.location import Location, require
from ckptconv.io.places import places_of
from ckptconv.support.choices import DeviceName, plain_name, refuse_no_paths, spelling_checked
from ckptconv.support.errors import (
    CheckpointError,
    DeviceUnavailable,
    IncompleteCheckpoint,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    or_recover,
    printable,
)
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.report import danger_in
from ckptconv.support.settings import collector_paused
from ckptconv.tensors.fold import fold_all, nonfinite_counters
from ckptconv.tree.labels import may_be_infinite
from ckptconv.tree.modules import flatten_modules


@spelling_checked
def diagnose_checkpoint(
    source: Named,
    *,
    like: str | os.PathLike[str] | None = None,
    model: str | None = None,
    device: DeviceName | None = None,
    values: bool = False,
    size: bool = False,
    tag: str | None = None,
    on_progress: OnProgress | None = None,
) -> Diagnosis:
    """Say why the checkpoint `source` would not load on this host, or would cause trouble later,
    and how to fix it.

    `like` (another checkpoint, an index, a list of keys) or `model` (``PACKAGE.MODULE:CALLABLE``,
    which is imported and called) has the keys and shapes that it should load into. `device` is
    where the tensors are wanted (a tag, ``auto``; by default the CPU). `values` reads all of it,
    for damage and for values that are not numbers; otherwise no tensor is read. `size` also says
    what a smaller type would save. `tag` picks a step of a folder of several. A sequence of paths
    are the files of all ranks of one checkpoint; `diagnose_all` takes several checkpoints.
    `on_progress` is called with a `Progress` about once a MiB that `values` reads. A file that
    cannot be opened is a finding; `CheckpointError` is raised only when there is no such file,
    model or device tag. Without torch a CPU-only torch is assumed.
    """
    refuse_no_paths("source", source)
    paths = places_of(source)
    if not paths:
        raise UnsupportedCheckpoint("no file was given")
    return _diagnose(
        paths, DoctorOptions(like, model, plain_name(device), values, size, tag, on_progress)
    )


diagnose = diagnose_checkpoint  # the name that it had first


def diagnose_all(
    paths: Sequence[str | os.PathLike[str]], **options: Any
) -> list[Diagnosis | CheckpointError]:
    """As `diagnose`, for several checkpoints, or the files of all ranks of one: what is said of
    each, or why nothing can be. Raises `CheckpointError` when there is no such model or device tag.
    """
    refuse_no_paths("paths", paths)
    asked = DoctorOptions(**options)
    return [_diagnosed(group, asked) for group in checkpoints_of(paths)]


def _diagnosed(paths: tuple[Location, ...], asked: DoctorOptions) -> Diagnosis | CheckpointError:
    try:
        return _diagnose(paths, asked)
    except DeviceUnavailable:  # it was asked for all of them, and is told once
        raise
    except CheckpointError as error:
        return error


def _diagnose(paths: tuple[Location, ...], asked: DoctorOptions) -> Diagnosis:
    named = tuple(map(str, paths))
    for one in paths:
        require(one)
    try:
        opened = open_certain if asked.values else open_to_look
        with (
            collector_paused(),
            opened(paths, tag=asked.tag, whole_modules=True, is_delta=None) as whole,
        ):
            checkpoint = flatten_modules(whole)
            facts = inspect_checkpoint(checkpoint)
            case = Case(paths, whole, checkpoint, facts, asked)
            symptoms = [one for check in CHECKS for one in check(case)]
            if asked.values:
                read = _read_values(case, asked.on_progress)
                if any(one.finding.code == "damaged" for one in read):  # no conversion helps it
                    symptoms = [replace(one, fix=None) for one in symptoms if not one.chosen]
                symptoms += read
            findings = _findings(case, symptoms)
            notes = [note for note in whole.notes if not danger_in([note])]  # that is a finding
            told = (named[0], whole.format, findings, named, facts.opening.by)
            return Diagnosis(*told, tuple(notes))
    except DeviceUnavailable:
        raise
    except CheckpointError as error:
        return Diagnosis(named[0], None, (_unopened(error, paths),), named)


def _findings(case: Case, symptoms: Sequence[Symptom]) -> tuple[Finding, ...]:
    """The findings with their commands: one conversion fixes all that must be fixed, so it is the
    command of each. Each other command writes to a name of its own, so that all of them can be run.
    """
    fix = case.must
    for one in symptoms:
        if one.fix is not None and not one.chosen:
            fix = fix.with_(one.fix)
    outputs: dict[Fix, PurePath] = {}
    ordered = sorted(symptoms, key=lambda one: SEVERITIES.index(one.finding.severity))
    return tuple([_prescribed(case, fix, one, outputs) for one in ordered])


def _prescribed(case: Case, fix: Fix, one: Symptom, outputs: dict[Fix, PurePath]) -> Finding:
    if one.fix is None:
        return one.finding
    found = case.workable(fix.with_(one.fix))
    if isinstance(found, CheckpointError) and case.values_of_codes:
        # blocks of GGUF and objects of torchao can be written as values alone
        as_values = case.workable(fix.with_(one.fix).with_(case.values_of_codes))
        if not isinstance(as_values, CheckpointError):
            found = as_values
    if isinstance(found, CheckpointError):
        return replace(one.finding, advice=str(found))
    if found.fix not in outputs:
        outputs[found.fix] = output_beside(case.paths[0], found.fix.ending, outputs.values())
    lost = f"{LEFT_OUT}{some(found.lost)}" if found.lost else one.finding.advice
    return replace(
        one.finding, command=command(found.fix, case.paths, outputs[found.fix]), advice=lost
    )


def _read_values(case: Case, tell: OnProgress | None) -> list[Symptom]:
    """Read all: damage is an error, NaN a warning, infinity too unless meant, as in a mask."""
    refs = dict(case.checkpoint.tensors())
    try:
        counters = fold_all(
            refs.values(), nonfinite_counters, lambda nbytes: Meter("read", nbytes, tell)
        )
    except CheckpointError as error:
        return [_damaged(error)]
    named = (pair for item in case.state_dicts for pair in item.tensors())
    weights = {id(ref) for key, ref in named if not may_be_infinite(key)}
    nan: dict[str, int] = {}
    wrong: dict[str, int] = {}
    meant: dict[str, int] = {}
    for (path, ref), counted_by in zip(refs.items(), counters, strict=True):
        infinite = wrong if id(ref) in weights else meant
        for counter in counted_by:
            if counter.nonfinite.nan:
                nan[path] = counter.nonfinite.nan
            if counter.nonfinite.infinite:
                infinite[path] = counter.nonfinite.infinite
    return [
        symptom(code, f"has values that are {what} ({sum(counts.values())}), in {some([*counts])}",
                effect, advice=advice)
        for symptom, code, what, counts, effect, advice in (
            (cases.warning, "non-finite", "NaN", nan, "the model computes NaN with them",
             "the training has diverged, or a cast overflowed: use an earlier checkpoint"),
            (cases.warning, "infinite", "infinite", wrong,
             "what the model computes with them is infinite or NaN",
             "a cast to a smaller type overflowed, or the training has diverged: use the file "
             "before the cast"),
            (cases.info, "infinite", "infinite", meant,
             "this is intended, as in a mask, a bound or a best loss", None),
        )
        if counts
    ]  # fmt: skip


def _damaged(error: CheckpointError) -> Symptom:
    effect = "it cannot be read"
    if error.code == "checksum":
        effect = "torch.load does not check this; it returns damaged values silently"
    cause = error.what
    if error.where:
        cause = f"{printable(error.where)}: {cause}"
    advice = error.hint or "the file is damaged; fetch it again"
    return cases.error("damaged", cause, effect, advice=advice)


# -------------------------------------------------------------------- what cannot be opened at all


def _unopened(error: CheckpointError, paths: Sequence[Location]) -> Finding:
    """The finding for what cannot be opened; its cause and advice are the error's own."""
    cause = printable(error.what, 2000)
    if error.where:
        cause = f"{printable(error.where)}: {cause}"
    code, advice = _code(error), error.hint
    if code == "damaged" and len(paths) == 1 and not paths[0].is_folder():
        advice = advice or "the file is damaged; fetch it again"
        if "ckptconv recover" not in advice:
            advice = or_recover(advice, paths[0])
    finding = Finding("error", code, cause, _effect(error, paths[0]), advice=advice)
    fixed = None
    if isinstance(error, IncompleteCheckpoint) and len(paths) == 1:
        fixed = _with_siblings(paths[0])
    return replace(finding, command=fixed, advice=None) if fixed else finding  # it says no more


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
    with closing(source):
        head = source.read(0, min(4, source.size))
    if place.suffix == ".safetensors" and not isinstance(error, MalformedCheckpoint):
        return words.quoted(words.HEADER, by="load_file")
    if head.startswith(b"PK\3\4") and error.code == "cut-off":
        return words.quoted(words.CUT_OFF)
    said = words.on_start(head)
    if said is not None:
        return words.quoted(said)
    is_npz = f"{error.where or place}".endswith((".npy", ".npz"))
    if isinstance(error, MalformedCheckpoint):
        library = "numpy" if is_npz else "torch"
        return (
            f"ckptconv does not open it; {library}.load may refuse it too, or load something else "
            "than was saved"
        )
    told = "neither torch.load nor the safetensors library loads it"
    return f"{told}; numpy.load may load it" if is_npz else told


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
