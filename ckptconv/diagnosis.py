"""Why a checkpoint will not load on this host, or will disappoint, and the command that mends it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptconv.checkpoint import Checkpoint
from ckptconv.choices import refuse_no_flag, refuse_no_path, refuse_no_paths, refuse_no_text
from ckptconv.collector import collector_paused
from ckptconv.devices import tag_map
from ckptconv.errors import CheckpointError, DeviceUnavailable, printable
from ckptconv.findings import SEVERITIES, Diagnosis, Finding
from ckptconv.formats.detect import Named, open_checkpoint
from ckptconv.inspection import inspect_checkpoint
from ckptconv.key_targets import key_target
from ckptconv.modules import flatten_modules
from ckptconv.nonfinite import count_nonfinite
from ckptconv.prescriptions import Mend, command
from ckptconv.progress import Meter, OnProgress
from ckptconv.sources import FileSource
from ckptconv.symptoms import CHECKS, Case, Symptom, some, symptom
from ckptconv.tensors import check_storage
from ckptconv.unopened import unopened


def diagnose(
    path: Named,
    *,
    like: str | os.PathLike[str] | None = None,
    model: str | None = None,
    device: str | None = None,
    values: bool = False,
    tag: str | None = None,
    on_progress: OnProgress | None = None,
) -> Diagnosis:
    """Say why the checkpoint `path` would not load on this host, or would disappoint, and how to mend it.

    `like` (another checkpoint, an index, a list of keys) or `model` (``PACKAGE.MODULE:CALLABLE``, which is imported and
    called) has the keys and shapes that it should load into. `device` is where the tensors are wanted (a tag, ``auto``; by
    default the CPU). `values` reads all of it, for damage and for values that are no numbers; otherwise no tensor is read.
    `tag` picks a step of a folder of several. `on_progress` is called with a `Progress` about once a MiB that `values` reads.
    A file that cannot be opened is a finding; `CheckpointError` is raised only
    when there is no such file, model or device tag.
    Without torch a CPU-only torch is assumed.
    """
    refuse_no_paths("path", path)
    refuse_no_path(**({} if like is None else {"like": like}))
    refuse_no_text(device=device, model=model, tag=tag)
    refuse_no_flag(values=values)
    tag_map(device)
    target = key_target(like, model)
    paths = (Path(path),) if isinstance(path, (str, os.PathLike)) else tuple(map(Path, path))
    for one in paths:
        if not os.path.exists(one):  # noqa: PTH110 (False for no name at all)
            FileSource(one).close()  # says why
    try:
        with collector_paused(), open_checkpoint(paths, tag=tag, whole_modules=True) as whole:
            checkpoint, other = flatten_modules(whole), None if like is None else os.fspath(like)
            case = Case(paths, whole, checkpoint, inspect_checkpoint(checkpoint), device, other, model, target, tag)
            symptoms = [one for check in CHECKS for one in check(case)]
            if values:
                symptoms = _with_values(symptoms, _read_values(checkpoint, on_progress))
            return Diagnosis(str(paths[0]), whole.format, _findings(case, symptoms))
    except DeviceUnavailable:
        raise
    except CheckpointError as error:
        return Diagnosis(str(paths[0]), None, (unopened(error, paths),))


def _findings(case: Case, symptoms: Sequence[Symptom]) -> tuple[Finding, ...]:
    """The findings with their commands: one conversion mends all that must be mended, so it is the command of each."""
    mend = case.must
    for one in symptoms:
        if one.mend is not None and not one.chosen:
            mend = mend.with_(one.mend)
    made = [_prescribed(case, mend, one) for one in symptoms]
    return tuple(sorted(made, key=lambda finding: SEVERITIES.index(finding.severity)))


def _prescribed(case: Case, mend: Mend, one: Symptom) -> Finding:
    if one.mend is None:
        return one.finding
    wanted = case.workable(mend.with_(one.mend))
    if isinstance(wanted, CheckpointError):
        return replace(one.finding, advice=str(wanted))
    return replace(one.finding, command=command(wanted, case.paths))


def _with_values(symptoms: list[Symptom], read: list[Symptom]) -> list[Symptom]:
    """All that was found; where the file is damaged no conversion will do, and so no command is offered."""
    if not any(one.finding.code == "damaged" for one in read):
        return symptoms + read
    return [replace(one, mend=None) for one in symptoms if not one.chosen] + read


def _read_values(checkpoint: Checkpoint, tell: OnProgress | None) -> list[Symptom]:
    """Read every byte: damage is an error, NaN a warning, infinity (masks have it) an information."""
    refs = dict(checkpoint.tensors())
    storages = {id(piece.storage): piece.storage for ref in refs.values() for piece in ref.pieces}.values()
    checked = sum(storage.nbytes for storage in storages if storage.crc32 is not None)
    numbers = sum(ref.nbytes for ref in refs.values() if ref.dtype.kind in ("float", "complex"))
    meter = Meter("read", checked + numbers, tell)
    try:
        for storage in storages:
            check_storage(storage, meter)
        counted = {path: count_nonfinite(ref, meter) for path, ref in refs.items()}
        meter.finish()
    except CheckpointError as error:
        return [_damaged(error)]
    nan = {path: count.nan for path, count in counted.items() if count.nan}
    infinite = {path: count.infinite for path, count in counted.items() if count.infinite}
    found = []
    if nan:
        cause = f"has values that are NaN ({sum(nan.values())}), in {some(list(nan))}"
        advice = "the training has diverged, or a cast went too far: take an earlier checkpoint"
        found.append(symptom("warning", "non-finite", cause, "what the model computes with them is NaN", advice=advice))
    if infinite:
        cause = f"has values that are infinite ({sum(infinite.values())}), in {some(list(infinite))}"
        found.append(symptom("info", "infinite", cause, "as in a mask this is meant; in a weight it is not"))
    return found


def _damaged(error: CheckpointError) -> Symptom:
    silent = "CRC-32" in error.what
    effect = "torch.load does not check this and gives damaged values without a word" if silent else "it cannot be read"
    cause = f"{printable(error.where)}: {error.what}" if error.where else error.what
    return symptom("error", "damaged", cause, effect, advice=error.hint or "the file is damaged; fetch it again")
