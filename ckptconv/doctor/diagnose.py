"""Why a checkpoint will not load here, or causes trouble later, and the command that fixes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

from ckptconv.convert.key_targets import key_target
from ckptconv.convert.prescriptions import Fix, command, output_beside
from ckptconv.devices.mapping import tag_map
from ckptconv.doctor.cases import Case, Symptom, some, symptom
from ckptconv.doctor.file_symptoms import FILE_CHECKS
from ckptconv.doctor.findings import LEFT_OUT, SEVERITIES, Diagnosis, Finding
from ckptconv.doctor.model_symptoms import MODEL_CHECKS
from ckptconv.doctor.unopened import unopened
from ckptconv.formats.registry import Named, checkpoints_of, open_certain, open_to_look
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.io.location import Location, require
from ckptconv.io.places import place_of
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_path,
    refuse_no_paths,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import (
    CheckpointError,
    DeviceUnavailable,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.gc_pause import collector_paused
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.tensors.fold import fold_all
from ckptconv.tensors.nonfinite import nonfinite_counters
from ckptconv.tree.fitted_keys import KeyTarget
from ckptconv.tree.labels import may_be_infinite
from ckptconv.tree.modules import flatten_modules


@spelling_checked
def diagnose(
    path: Named,
    *,
    like: str | os.PathLike[str] | None = None,
    model: str | None = None,
    device: str | None = None,
    values: bool = False,
    size: bool = False,
    tag: str | None = None,
    on_progress: OnProgress | None = None,
) -> Diagnosis:
    """Say why the checkpoint `path` would not load on this host, or would cause trouble later, and
    how to fix it.

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
    refuse_no_paths("path", path)
    paths = tuple(map(place_of, [path] if isinstance(path, (str, os.PathLike)) else path))
    if not paths:
        raise UnsupportedCheckpoint("no file was given")
    asked = _asked(like, model, device, values, size, tag, on_progress)
    return _diagnose(paths, asked)


def diagnose_all(
    paths: Sequence[str | os.PathLike[str]], **options: Any
) -> list[Diagnosis | CheckpointError]:
    """As `diagnose`, for several checkpoints, or the files of all ranks of one: what is said of
    each, or why nothing can be.

    Raises `CheckpointError` when there is no such model or device tag.
    """
    refuse_no_paths("paths", paths)
    asked = _asked(**options)
    return [_diagnosed(group, asked) for group in checkpoints_of(paths)]


def _diagnosed(paths: tuple[Location, ...], asked: _Asked) -> Diagnosis | CheckpointError:
    try:
        return _diagnose(paths, asked)
    except DeviceUnavailable:
        raise
    except CheckpointError as error:
        return error


class _Asked(NamedTuple):
    """What the user asked for, checked; `target` is what `like` or `model` name."""

    like: str | None
    model: str | None
    target: KeyTarget | None
    device: str | None
    values: bool
    size: bool
    tag: str | None
    on_progress: OnProgress | None


def _asked(
    like: str | os.PathLike[str] | None = None,
    model: str | None = None,
    device: str | None = None,
    values: bool = False,
    size: bool = False,
    tag: str | None = None,
    on_progress: OnProgress | None = None,
) -> _Asked:
    refuse_no_path(**({} if like is None else {"like": like}))
    refuse_no_text(device=device, model=model, tag=tag)
    refuse_no_flag(values=values, size=size)
    tag_map(device)
    target = key_target(like, model)
    return _Asked(
        None if like is None else os.fspath(like),
        model,
        target,
        device,
        values,
        size,
        tag,
        on_progress,
    )


def _diagnose(paths: tuple[Location, ...], asked: _Asked) -> Diagnosis:
    for one in paths:
        require(one)
    try:
        opened = open_certain if asked.values else open_to_look
        with collector_paused(), opened(paths, tag=asked.tag, whole_modules=True) as whole:
            checkpoint = flatten_modules(whole)
            facts = inspect_checkpoint(checkpoint)
            case = Case(
                places=paths,
                whole=whole,
                checkpoint=checkpoint,
                facts=facts,
                device=asked.device,
                like=asked.like,
                model=asked.model,
                target=asked.target,
                tag=asked.tag,
                size=asked.size,
            )
            symptoms = [one for check in (*FILE_CHECKS, *MODEL_CHECKS) for one in check(case)]
            if asked.values:
                symptoms = _with_values(symptoms, _read_values(case, asked.on_progress))
            return Diagnosis(
                str(paths[0]),
                whole.format,
                _findings(case, symptoms),
                tuple(map(str, paths)),
                facts.opening.by,
            )
    except DeviceUnavailable:
        raise
    except CheckpointError as error:
        return Diagnosis(str(paths[0]), None, (unopened(error, paths),), tuple(map(str, paths)))


def _findings(case: Case, symptoms: Sequence[Symptom]) -> tuple[Finding, ...]:
    """The findings with their commands: one conversion fixes all that must be fixed, so it is the
    command of each.

    Each other command writes to a name of its own, so that all of them can be run.
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
    if isinstance(found, CheckpointError):
        return replace(one.finding, advice=str(found))
    suffix = found.fix.suffix or ".pt"
    if found.fix not in outputs:
        outputs[found.fix] = output_beside(case.paths[0], suffix, outputs.values())
    lost = f"{LEFT_OUT}{some(found.lost)}" if found.lost else one.finding.advice
    return replace(
        one.finding, command=command(found.fix, case.paths, outputs[found.fix]), advice=lost
    )


def _with_values(symptoms: list[Symptom], read: list[Symptom]) -> list[Symptom]:
    """All that was found; no conversion helps a damaged file, so none is offered for it."""
    if not any(one.finding.code == "damaged" for one in read):
        return symptoms + read
    return [replace(one, fix=None) for one in symptoms if not one.chosen] + read


def _read_values(case: Case, tell: OnProgress | None) -> list[Symptom]:
    """Read every byte: damage is an error, NaN a warning, infinity too unless it is meant, as in a
    mask.
    """
    refs = dict(case.checkpoint.tensors())
    try:
        counters = fold_all(
            refs.values(), nonfinite_counters, lambda nbytes: Meter("read", nbytes, tell)
        )
    except CheckpointError as error:
        return [_damaged(error)]
    counted = {
        path: counter.nonfinite
        for path, counted_by in zip(refs, counters, strict=True)
        for counter in counted_by
    }
    nan = {path: count.nan for path, count in counted.items() if count.nan}
    infinite = {path: count.infinite for path, count in counted.items() if count.infinite}
    weights = {
        id(ref)
        for item in case.state_dicts
        for key, ref in item.tensors()
        if not may_be_infinite(key)
    }
    wrong = {path: count for path, count in infinite.items() if id(refs[path]) in weights}
    found = []
    if nan:
        cause = f"has values that are NaN ({sum(nan.values())}), in {some(list(nan))}"
        advice = "the training has diverged, or a cast overflowed: use an earlier checkpoint"
        found.append(
            symptom(
                "warning", "non-finite", cause, "the model computes NaN with them", advice=advice
            )
        )
    if wrong:
        cause = f"has values that are infinite ({sum(wrong.values())}), in {some(list(wrong))}"
        advice = (
            "a cast to a smaller type overflowed, or the training has diverged: use the file "
            "before the cast"
        )
        effect = "what the model computes with them is infinite or NaN"
        found.append(symptom("warning", "infinite", cause, effect, advice=advice))
    if meant := {path: count for path, count in infinite.items() if path not in wrong}:
        cause = f"has values that are infinite ({sum(meant.values())}), in {some(list(meant))}"
        found.append(
            symptom(
                "info", "infinite", cause, "this is intended, as in a mask, a bound or a best loss"
            )
        )
    return found


def _damaged(error: CheckpointError) -> Symptom:
    silent = error.code == "checksum"
    effect = (
        "torch.load does not check this; it returns damaged values silently"
        if silent
        else "it cannot be read"
    )
    cause = f"{printable(error.where)}: {error.what}" if error.where else error.what
    return symptom(
        "error",
        "damaged",
        cause,
        effect,
        advice=error.hint or "the file is damaged; fetch it again",
    )
