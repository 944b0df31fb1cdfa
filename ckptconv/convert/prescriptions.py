"""The conversion that fixes a checkpoint: would it work, and what is lost."""

from __future__ import annotations

from dataclasses import replace

from ckptconv.convert.fixes import Fix, Prescription
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_trial
from ckptconv.objects.threats import DO_NOT_LOAD
from ckptconv.pickles.nodes import Call
from ckptconv.support.errors import AmbiguousStateDict, CheckpointError, RefusedObject
from ckptconv.support.text import count_text
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.fitted_keys import KeyTarget
from ckptconv.tree.walk import tensors_of


def workable(
    fix: Fix, checkpoint: Checkpoint, target: KeyTarget | None = None
) -> Prescription | CheckpointError:
    """The fix, without objects that have no plain form if need be; or why it would not work."""
    try:
        plan = plan_trial(checkpoint, f"OUT{fix.ending}", _request(fix, target))
    except RefusedObject as error:
        if fix.unknown != "drop":
            return _dropping(fix, checkpoint, target, error)
        return error
    except CheckpointError as error:
        return error
    if fix.unknown != "drop":
        return Prescription(fix)
    lost = _lost(plan, checkpoint)
    if sum(count for _, count in lost) >= max(1, sum(1 for _ in plan.made_of.tensors())):
        return AmbiguousStateDict("most of its tensors would be lost", path=checkpoint.path)
    return Prescription(fix, tuple(text for text, _ in lost))


def _request(fix: Fix, target: KeyTarget | None) -> Request:
    """The conversion as the library has it; `target` is what `like` or `model` name."""
    words = fix.given()
    fit_to = None
    if target and (fix.like or fix.model):
        fit_to = replace(target, drop_unexpected=bool(fix.drop_unexpected))
    for name in ("suffix", "tag"):  # those of the output's name, and of the opened source
        words.pop(name, None)
    return Options(**words).request(fit_to)


def _dropping(
    fix: Fix, checkpoint: Checkpoint, target: KeyTarget | None, refused: RefusedObject
) -> Prescription | CheckpointError:
    """The fix that drops what was refused; where that takes tensors along, the refusal."""
    found = workable(replace(fix, unknown="drop"), checkpoint, target)
    if not isinstance(found, AmbiguousStateDict):
        return found
    hint = (
        "load it where its classes are and save its state_dict(), or keep it as it is with "
        "--unknown keep"
    )
    if refused.code == "dangerous":
        hint = DO_NOT_LOAD
    what = f"{refused.what}, and its tensors are lost without it"
    return RefusedObject(what, path=refused.path, where=refused.where, hint=hint)


def _lost(plan: ConversionPlan, checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """What was dropped, in words, and how many tensors: objects, and what is beside state dicts."""
    unsaved = {id(stray.node) for stray in checkpoint.module_strays if stray.is_refused}
    found = []
    for item in plan.skipped:
        if item.is_dropped or id(item.node) in unsaved:
            count = sum(1 for _ in tensors_of(item.node))
            what = [item.node.name] if type(item.node) is Call else []
            if count:
                what.append(count_text(count, "tensor"))
            about = f" ({', '.join(what)})" if what else ""
            found.append((f"{item.path or 'the root'}{about}", count))
    return found
