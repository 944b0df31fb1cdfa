"""What is wrong with the state dicts in a file, found by keys and types, and what would fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.convert.prescriptions import Fix
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.cases import Case, Symptom, is_average, some, symptom
from ckptconv.inspect.facts import is_bloated, training_states
from ckptconv.keys.fits import Fit
from ckptconv.support.errors import AmbiguousStateDict, CheckpointError, printable
from ckptconv.support.text import look_hint, part_text
from ckptconv.tensors.scaled_weights import quantization_scales
from ckptconv.tree.fitted_keys import refusal
from ckptconv.tree.producers import averages_weights


def _keys(case: Case) -> Iterator[Symptom]:
    """Keys and shapes that are not those of the model: the second of the two classic errors."""
    if case.target is None:
        return
    if case.fit is None:
        advice = look_hint(case.paths[0])
        yield symptom(
            "error",
            "keys",
            "holds no state dict",
            "there is nothing to load into the model",
            advice=advice,
        )
    elif case.fit.error is not None:
        fit, where = (
            case.fit.fit,
            f"of {part_text(case.fit.found.path)} " if case.fit.found.path else "",
        )
        effect = words.quoted(case.fit.error, by="load_state_dict")
        if fit.fits:
            yield symptom(
                "error",
                "keys",
                f"the keys {where}are not those of {_remedy(fit, case.target.name)}",
                effect,
                Fix(),
            )
        elif case.fit.fixes:
            cause = (
                f"the keys {where}include some that {printable(case.target.name)} does not have: "
                f"{some(fit.unexpected)}"
            )
            yield symptom("error", "keys", cause, effect, Fix())
        else:
            refused = refusal(fit, case.target.name, len(case.target.shapes))
            yield symptom("error", "keys", refused.what, effect, advice=refused.hint)


def _remedy(fit: Fit, name: str) -> str:
    """The target, and what makes the keys fit it."""
    renamed = any(old != new for old, new in fit.renames.items())
    ways = [f"renamed ({fit.how})"] * renamed
    ways += [f"filled from other names of the same tensors ({some(list(fit.filled))})"] * bool(
        fit.filled
    )
    return f"{printable(name)}, but fit when {' and '.join(ways)}"


def _wrappers(case: Case) -> Iterator[Symptom]:
    """Keys with the wrapper of DataParallel, DDP, compile, FSDP or checkpointing, where no model
    says what is wanted.
    """
    if case.target is not None:
        return
    for found in case.state_dicts:
        if wrappers := case.facts.state_dicts.get(found.path):
            wrapper = printable(".".join(wrappers)) + "."
            where = f" of {part_text(found.path)}" if found.path else ""
            unexpected = words.on_unexpected(found.telling_keys[0])
            effect = words.quoted(words.NO_KEYS, unexpected, by="load_state_dict, of a bare model,")
            yield symptom(
                "warning",
                "wrapped-keys",
                f"the keys{where} carry the wrapper '{wrapper}'",
                effect,
                Fix(),
            )
    for path, prefix in case.facts.offered.items():
        where = f" of {part_text(path)}" if path else ""
        cause = (
            f"the keys{where} start with {prefix}, the attribute or wrapper of "
            f"{case.facts.producer or 'a framework'}"
        )
        effect = words.quoted(words.NO_KEYS, by="load_state_dict, of the inner model,")
        yield symptom("info", "prefixed-keys", cause, effect, Fix(strip_prefix=prefix), chosen=True)


def _choice(case: Case) -> Iterator[Symptom]:
    """Several parts that could be the model; a named model that fits one would decide it."""
    if case.fit is not None and case.fit.fixes:
        return
    try:
        case.checkpoint.state_dict()
    except AmbiguousStateDict as error:
        if case.state_dicts:
            effect = "load_portable, and an output that holds one state dict, refuse to guess"
            largest = max(
                case.state_dicts, key=lambda item: (not is_average(item.path), len(item.keys))
            )
            fix = Fix(only=largest.path)
            yield symptom("warning", "several-models", error.what, effect, fix, chosen=True)
    except CheckpointError:  # limits; told by whoever meets them
        return


def _bloat(case: Case) -> Iterator[Symptom]:
    if not is_bloated(case.facts):
        return
    facts = case.facts
    causes = []
    if facts.stored > facts.used:
        causes.append(
            f"tensors use {facts.used:,} bytes of storages of {facts.stored:,}: slices were saved "
            "with their whole storages"
        )
    if facts.dead:
        causes.append(
            f"its pickle does not use {facts.dead:,} bytes of the file: added or left-over records"
        )
    wasted = facts.stored - facts.used + facts.dead
    yield symptom(
        "warning",
        "bloat",
        "; ".join(causes),
        f"{wasted:,} bytes are stored and moved for nothing",
        Fix(),
    )


def _shares(case: Case) -> Iterator[Symptom]:
    """Parts that only training needs: the optimizer, averaged weights beside the plain ones."""
    total = case.facts.root.nbytes
    states = sum(part.nbytes for part in training_states(case.facts.root))
    one = case.state_dicts[0].path if case.state_dicts else ""
    if one and states * 10 > total:
        cause = f"{states * 100 // total} % of its tensors' bytes are an optimizer's state"
        effect = "programs that only use the model read and store it too"
        yield symptom("info", "optimizer-share", cause, effect, Fix(only=one), chosen=True)
    if averages_weights(case.checkpoint.root):
        return
    if len(case.state_dicts) > 1 and (
        averages := [item.path for item in case.state_dicts if is_average(item.path)]
    ):
        cause = f"holds averaged weights ({some(averages)}) beside {part_text(one)}"
        effect = (
            "which of them is loaded depends on the script; evaluation usually wants the "
            "averaged ones"
        )
        yield symptom("info", "ema-share", cause, effect, Fix(only=averages[0]), chosen=True)


def _no_weights(case: Case) -> Iterator[Symptom]:
    """A file of an optimizer, or a tensor, saved by itself, or one without tensors."""
    if (whose := case.facts.training_state) is not None:
        effect = "there is nothing in it that a model could load"
        yield symptom(
            "info", "no-weights", f"holds only {whose} state: no weights", effect, advice=_OPTIMIZER
        )
    elif case.facts.root.sort == "tensor":
        effect = "torch.load gives the tensor; there are no keys that load_state_dict could use"
        yield symptom("info", "bare-tensor", "holds a bare tensor, not a state dict", effect)
    elif not case.facts.tensors:
        effect = "there is nothing in it that a model could load"
        yield symptom(
            "warning",
            "no-weights",
            "holds no tensors: no weights",
            effect,
            advice=look_hint(case.paths[0]),
        )


_OPTIMIZER = "the weights are in another file; load this one into the optimizer"


def _tied(case: Case) -> Iterator[Symptom]:
    if not case.facts.opening.shares:
        return
    for found in case.state_dicts:
        owners: dict[int, str] = {}
        shared = [
            key
            for key, ref in found.tensors()
            if ref.is_view and owners.setdefault(id(ref.storage), key) != key
        ]
        if shared:
            cause = f"share a storage with another tensor: {some(shared)}"
            effect = words.quoted(words.SHARED, by="safetensors.torch.save_file")
            only = found.path if len(case.state_dicts) > 1 else None
            yield symptom(
                "info",
                "tied-weights",
                cause,
                effect,
                Fix(suffix=".safetensors", only=only),
                chosen=True,
            )
            return


def _scaled(case: Case) -> Iterator[Symptom]:
    """Weights that are codes beside a scale, which a model without them takes for values."""
    for path, scaled in case.scaled.items():
        where = f" of {part_text(path)}" if path else ""
        names = some([f"{item.codes} with {item.scale}" for item in scaled])
        effect = (
            "a model that does not know of the scales uses the codes as values, and silently "
            "computes nonsense"
        )
        advice = (
            "load it with the library that wrote it; ckptconv copies codes and scales as they "
            "are, and refuses --dtype"
        )
        yield symptom(
            "info",
            "scaled-weights",
            f"weights{where} are codes beside scales: {names}",
            effect,
            advice=advice,
        )


def _precision(case: Case) -> Iterator[Symptom]:
    if (
        not case.size
        or case.scaled
        or any(quantization_scales(dict(item.tensors())) for item in case.state_dicts)
    ):
        return
    weights = {id(ref): ref.dtype for item in case.state_dicts for _, ref in item.tensors()}
    floats = [dtype.name for dtype in weights.values() if dtype.is_floating]
    if set(floats) == {"float32"}:
        cause = f"all floating tensors of its weights ({len(floats)}) are float32"
        yield symptom(
            "info",
            "all-fp32",
            cause,
            "bfloat16 would take half the bytes",
            Fix(dtype="bf16"),
            chosen=True,
        )


MODEL_CHECKS: tuple[Callable[[Case], Iterator[Symptom]], ...] = (
    _keys, _choice, _wrappers, _bloat, _shares, _no_weights, _tied, _scaled, _precision,
)  # fmt: skip
"""What is looked at in the state dicts; findings of one severity come in this order."""
