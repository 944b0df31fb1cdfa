"""What is wrong with an open checkpoint, found without reading a tensor, and which conversion would
fix it.

Facts come from `inspect`, the words of torch from `torch_words`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ckptconv.convert.prescriptions import Fix, Prescription, command, workable
from ckptconv.devices.host import Host, require_device, survey_host
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.findings import Finding, Severity
from ckptconv.doctor.model_fits import ModelFit, best_fit
from ckptconv.formats.registry import open_certain
from ckptconv.inspect.facts import is_bloated, newer_protocol, training_states
from ckptconv.inspect.inspection import Inspection
from ckptconv.keys.fits import Fit
from ckptconv.objects.torch_names import VALUELESS
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    DeviceUnavailable,
    printable,
)
from ckptconv.support.text import look_hint, part_text
from ckptconv.tensors.scaled_weights import ScaledWeight, find_scaled, quantization_scales
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import SAFETENSORS_LIBRARY
from ckptconv.tree.fitted_keys import KeyTarget, refusal
from ckptconv.tree.labels import names_average
from ckptconv.tree.producers import averages_weights
from ckptconv.tree.state_dicts import StateDict

_NAMED = 3  # keys, places or tags that a text names before it counts


@dataclass(frozen=True, slots=True)
class Symptom:
    """A finding before its command: `fix` clears it; `chosen`: only if the user wants that."""

    finding: Finding
    fix: Fix | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Case:
    """What is examined: a checkpoint, its modules as state dicts, the facts, the user's options."""

    paths: tuple[Path, ...]
    whole: Checkpoint
    checkpoint: Checkpoint
    facts: Inspection
    device: str | None
    like: str | None = None
    model: str | None = None
    target: KeyTarget | None = None
    tag: str | None = None
    size: bool = False

    @cached_property
    def host(self) -> Host:
        """The devices that are here; asked for only when a tag needs it, for that imports torch."""
        return survey_host(ask_torch=True)

    @cached_property
    def _tried(self) -> dict[Fix, Prescription | CheckpointError]:
        return {}

    def workable(self, fix: Fix) -> Prescription | CheckpointError:
        """As `prescriptions.workable` on the checkpoint; each conversion is planned once."""
        if fix not in self._tried:
            self._tried[fix] = workable(fix, self.checkpoint, self.target)
        return self._tried[fix]

    @cached_property
    def fit(self) -> ModelFit | None:
        """The state dict for the model that was named."""
        return None if self.target is None else best_fit(self.state_dicts, self.target)

    @property
    def must(self) -> Fix:
        """What every conversion here must do: the kind of file, the device, the keys asked for."""
        fix = Fix(suffix=suffix(self), device=self.device, tag=self.tag)
        if self.fit is None or not self.fit.fixes:
            return fix
        only = self.fit.found.path if len(self.state_dicts) > 1 else None
        surplus = None if self.fit.fit.fits else True
        return replace(fix, only=only, like=self.like, model=self.model, drop_unexpected=surplus)

    @cached_property
    def state_dicts(self) -> list[StateDict]:
        """The state dicts, the one that is the model first, the ones of averaged weights last."""
        found = self.checkpoint.state_dicts()
        # then they are the model's, whatever the labels say
        if averages_weights(self.checkpoint.root):
            return sorted(found, key=lambda item: item.path != "state_dict")
        return sorted(found, key=lambda item: _is_average(item.path))

    @cached_property
    def scaled(self) -> dict[str, list[ScaledWeight]]:
        """The weights that are codes beside a scale, by the path of their state dict."""
        found = {item.path: find_scaled(dict(item.tensors())) for item in self.state_dicts}
        return {path: scaled for path, scaled in found.items() if scaled}


def suffix(case: Case) -> str:
    """That of a fixed file: of the same kind, as far as that is written."""
    return case.facts.opening.suffix


def _container(case: Case) -> Iterator[Symptom]:
    container, path = case.facts.opening, case.paths[0]
    name = container.name
    if case.facts.untyped:
        cause = (
            f"is a file from before torch 1.6 that holds {some(case.facts.untyped)}, which its "
            "format cannot hold"
        )
        yield symptom("error", "legacy-container", cause, words.quoted(words.UNTYPED), Fix())
    elif container.is_legacy:
        effect = words.quoted(words.MMAP, by="torch.load(mmap=True)")
        yield symptom(
            "info",
            "legacy-container",
            "is a file from before torch 1.6, not a zip archive",
            effect,
            Fix(),
        )
    if container.is_index and container.anywhere:
        cause = f"is a set of shards ({name}), not one file"
        effect = (
            f"{container.by} opens it as one model; torch.load and load_file open one shard at "
            "a time"
        )
        yield symptom("info", "sharded", cause, effect, Fix(), chosen=True)
    elif not container.is_usual:
        said = words.FOLDER if path.is_dir() else container.torch_says
        effect = (
            words.quoted(said)
            if said
            else "torch.load(weights_only=True) does not read it as one checkpoint"
        )
        if container.anywhere:
            kind = "folder" if container.is_folder else "file"
            instead = "file" if container.is_folder else "file for torch"
            cause = f"is a {kind} that {container.by} opens ({name}), not a {instead}"
            yield symptom("info", "container", cause, effect, Fix(), chosen=True)
        else:
            yield symptom("error", "container", f"{container.why_not} ({name})", effect, Fix())


def _protocol(case: Case) -> Iterator[Symptom]:
    if len(case.paths) == 1 and (number := newer_protocol(case.whole)) is not None:
        cause = f"its pickle has the protocol {number}, where torch writes 2"
        yield symptom(
            "error", "pickle-protocol", cause, words.quoted(words.REFUSED, words.OPCODE), Fix()
        )


def _strays(case: Case) -> Iterator[Symptom]:
    """Records of an archive outside its one folder, which torch's reader does not bear."""
    if case.facts.strays:
        cause = (
            f"its archive has records outside the folder of its pickle: {some(case.facts.strays)}"
        )
        yield symptom("error", "stray-records", cause, words.quoted(words.STRAY), Fix())


def _name(case: Case) -> Iterator[Symptom]:
    """A file under a name of the other kind: libraries go by it, torch.load since 2.13 too."""
    if len(case.paths) > 1 or case.paths[0].is_dir():
        return
    named = case.paths[0].suffix.lower() == ".safetensors"
    if named and case.facts.opening.is_torch:
        effect = words.quoted(words.HEADER, by="load_file")
        yield symptom(
            "error",
            "wrong-name",
            f"is a {case.facts.format} with the name of a safetensors file",
            effect,
            Fix(),
        )
    elif case.facts.opening.by == SAFETENSORS_LIBRARY and case.paths[0].suffix.lower() in (
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
    ):
        effect = words.quoted(words.REFUSED) + "; safetensors.torch.load_file opens it"
        cause = "is a safetensors file with the name of a torch file"
        yield symptom("error", "wrong-name", cause, effect, Fix(suffix=".safetensors"))


def _refused(case: Case) -> Iterator[Symptom]:
    """What the file's own library refuses besides; the name of one file has a check of its own."""
    for one in case.facts.refused:
        if one.code != "name" or case.checkpoint.files:
            effect = (
                words.quoted(one.said, by=one.by)
                if one.said
                else f"{one.by} may not come back for hours"
            )
            yield symptom("error", f"refused-{one.code}", one.what, effect, Fix())


def _tags(case: Case) -> Iterator[Symptom]:
    """Storages on devices that are not here: the first of the two classic errors."""
    for tag, count in case.facts.locations.items():
        if tag in ("cpu", "meta") or _is_served(tag, case):
            continue
        cause = f"was saved on {printable(tag)} (storages: {count}), which this host does not have"
        yield symptom("error", "device", cause, words.quoted(words.on_tag(tag, case.host)), Fix())
    if case.device not in (None, "cpu", "keep", "auto"):
        try:
            require_device(case.device)
        except DeviceUnavailable as error:
            cause = f"the device {case.device} that was asked for is not here"
            yield symptom(
                "error",
                "no-such-device",
                cause,
                str(error),
                advice="see what is here with: ckptconv devices",
            )


def _is_served(tag: str, case: Case) -> bool:
    """Whether torch.load would restore a storage to its tag here; as torch, without torch a
    CPU-only one.
    """
    kind, _, index = tag.partition(":")
    if case.host.torch is None:
        return False
    if kind in ("cuda", "xpu"):
        return (index or "0").isdecimal() and int(index or 0) < getattr(case.host, kind)
    if kind == "mps":
        return case.host.mps
    try:
        return kind != "cpu" and require_device(tag) is not None
    except DeviceUnavailable:
        return False


def _modules(case: Case) -> Iterator[Symptom]:
    """A module pickled whole, whose class torch would have to import."""
    if case.whole is case.checkpoint:
        return
    names = case.checkpoint.module_classes
    effect = words.quoted(words.REFUSED, words.on_global(names[0]))
    what = (
        "a whole module ({}), not its state dict"
        if len(names) == 1
        else "whole modules ({}), not their state dicts"
    )
    yield symptom(
        "error",
        "whole-module",
        "holds " + what.format(some(list(dict.fromkeys(names)))),
        effect,
        Fix(),
    )


def _objects(case: Case) -> Iterator[Symptom]:
    """Objects that weights_only=True refuses."""
    bare = [item.path for item in case.facts.odd_objects if item.name in VALUELESS]
    if bare:
        advice = "save it again on a host that has the values"
        yield symptom(
            "warning",
            "no-values",
            f"has no values: {some(bare)}",
            "the model cannot compute with it",
            advice=advice,
        )
    odd = [item for item in case.facts.odd_objects if item.name not in VALUELESS]
    if odd and not case.facts.opening.is_script:
        names = list(dict.fromkeys(item.name for item in odd))
        places = some([item.path or "the root" for item in odd])
        cause = f"holds objects that are not plain ({some(names)}) at {places}"
        yield symptom(
            "error",
            "refused-objects",
            cause,
            words.quoted(words.REFUSED, words.on_global(names[0])),
            Fix(),
        )


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
                case.state_dicts, key=lambda item: (not _is_average(item.path), len(item.keys))
            )
            fix = Fix(only=largest.path)
            yield symptom("warning", "several-models", error.what, effect, fix, chosen=True)
    except CheckpointError:  # limits; told by whoever meets them
        return


def _lone_shard(case: Case) -> Iterator[Symptom]:
    """One of several shards, opened by itself."""
    path = case.paths[0]
    told = _SHARD(path.name)
    if len(case.paths) > 1 or told is None or int(told["count"]) < 2 or path.is_dir():
        return
    index = path.with_name(f"{told['stem']}.{told['suffix']}.index.json")
    cause = (
        f"is shard {int(told['number'])} of {int(told['count'])} by its name, and holds only "
        "some of the tensors"
    )
    effect = words.quoted(words.NO_KEYS, by="load_state_dict")
    if not index.exists():
        advice = f"fetch the other shards and {printable(index.name)}, then name that"
        yield symptom("error", "lone-shard", cause, effect, advice=advice)
        return
    try:
        with open_certain(index) as joined:
            found = workable(Fix(suffix=suffix(case), device=case.device), joined)
        if isinstance(found, CheckpointError):
            raise found
        yield Symptom(Finding("error", "lone-shard", cause, effect, command(found.fix, [index])))
    except CheckpointError as error:
        yield symptom("error", "lone-shard", cause, effect, advice=str(error))


_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<suffix>safetensors|bin|pt|pth)"
).fullmatch


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
        averages := [item.path for item in case.state_dicts if _is_average(item.path)]
    ):
        cause = f"holds averaged weights ({some(averages)}) beside {part_text(one)}"
        effect = (
            "which of them is loaded depends on the script; evaluation usually wants the "
            "averaged ones"
        )
        yield symptom("info", "ema-share", cause, effect, Fix(only=averages[0]), chosen=True)


def _is_average(path: str) -> bool:
    return any(map(names_average, path.split(".")))


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


CHECKS: tuple[Callable[[Case], Iterator[Symptom]], ...] = (
    _container, _strays, _protocol, _name, _refused, _lone_shard, _tags, _modules, _objects, _keys,
    _choice, _wrappers, _bloat,
    _shares, _no_weights, _tied, _scaled, _precision,
)  # fmt: skip
"""What is looked at without reading a tensor; findings of one severity come in this order."""


def symptom(
    severity: Severity,
    code: str,
    cause: str,
    effect: str,
    fix: Fix | None = None,
    *,
    advice: str | None = None,
    chosen: bool = False,
) -> Symptom:
    """A symptom and its finding in one."""
    return Symptom(Finding(severity, code, cause, effect, advice=advice), fix, chosen)


def some(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    shown = ", ".join(map(printable, names[:_NAMED]))
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
