"""What is wrong with a checkpoint, found without reading a tensor, and which conversion fixes it:
first with its file as such, then with its state dicts.

Facts come from `inspect`, the words of torch from `torch_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.convert.fixes import Fix, command, workable
from ckptconv.devices.host import require_device
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.cases import Case, Symptom, error, info, is_average, some, warning
from ckptconv.doctor.report import Finding
from ckptconv.doctor.runtimes import precision, scaled_weights
from ckptconv.formats.hf_names import indexes_naming
from ckptconv.formats.registry import open_certain
from ckptconv.inspect.facts import is_bloated, newer_protocol, training_states
from ckptconv.inspect.inspection import TORCH_SUFFIXES
from ckptconv.keys.fits import Fit
from ckptconv.keys.presets import told_preset
from ckptconv.keys.rules import LEAD, find_wrapped_parts
from ckptconv.objects.known_names import VALUELESS
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    DeviceUnavailable,
    printable,
)
from ckptconv.support.report import danger_in
from ckptconv.support.text import look_hint, of_part, part_text
from ckptconv.tree.checkpoint import SAFETENSORS_LIBRARY
from ckptconv.tree.fitted_keys import refusal
from ckptconv.tree.labels import LORA_OF_PEFT, averages_weights
from ckptconv.tree.state_dicts import StateDict

# --------------------------------------------------------------------------------------- the file


def _container(case: Case) -> Iterator[Symptom]:
    container = case.facts.opening
    name = container.name
    if container.is_delta:
        return  # `_lone_part` says what it is
    if case.facts.untyped:
        held = some(case.facts.untyped)
        cause = f"is a file from before torch 1.6 that holds {held}, which its format cannot hold"
        yield error("legacy-container", cause, words.quoted(words.UNTYPED), Fix())
    elif container.is_legacy:
        cause = "is a file from before torch 1.6, not a zip archive"
        effect = words.quoted(words.MMAP, by="torch.load(mmap=True)")
        yield info("legacy-container", cause, effect, Fix())
    if container.is_index and container.anywhere:
        cause = f"is a set of shards ({name}), not one file"
        alone = "torch.load and load_file open one shard at a time"
        effect = f"{container.by} opens it as one model; {alone}"
        yield info("sharded", cause, effect, Fix(), chosen=True)
    elif not container.is_usual:
        effect = "torch.load(weights_only=True) does not read it as one checkpoint"
        if case.places[0].is_folder():
            effect = words.quoted(words.FOLDER)
        elif container.torch_says:
            effect = words.quoted(container.torch_says)
        if container.anywhere:
            cause = f"is a file that {container.by} opens ({name}), not a file for torch"
            if container.is_folder:
                cause = f"is a folder that {container.by} opens ({name}), not a file"
            yield info("container", cause, effect, Fix(), chosen=True)
        else:
            yield error("container", f"{container.why_not} ({name})", effect, Fix())


def _protocol(case: Case) -> Iterator[Symptom]:
    if len(case.paths) > 1:  # each rank has its own
        return
    number = newer_protocol(case.whole)
    if number is not None:
        cause = f"its pickle has the protocol {number}, where torch writes 2"
        yield error("pickle-protocol", cause, words.quoted(words.REFUSED, words.OPCODE), Fix())


def _strays(case: Case) -> Iterator[Symptom]:
    """Records of an archive outside its one folder, which torch's reader does not bear."""
    if case.facts.strays:
        names = some(case.facts.strays)
        cause = f"its archive has records outside the folder of its pickle: {names}"
        yield error("stray-records", cause, words.quoted(words.STRAY), Fix())


def _name(case: Case) -> Iterator[Symptom]:
    """A file under a name of the other kind: libraries go by it, torch.load since 2.13 too."""
    if len(case.paths) > 1 or case.places[0].is_folder():
        return
    ending = case.paths[0].suffix.lower()
    if ending == ".safetensors" and case.facts.opening.is_torch:
        cause = f"is a {case.facts.format} with the name of a safetensors file"
        yield error("wrong-name", cause, words.quoted(words.HEADER, by="load_file"), Fix())
    elif case.facts.opening.by == SAFETENSORS_LIBRARY and ending in TORCH_SUFFIXES:
        cause = "is a safetensors file with the name of a torch file"
        effect = words.quoted(words.REFUSED) + "; safetensors.torch.load_file opens it"
        yield error("wrong-name", cause, effect, Fix(suffix=".safetensors"))


def _refused(case: Case) -> Iterator[Symptom]:
    """What the file's own library refuses besides; the name of one file has a check of its own."""
    for one in case.facts.refused:
        if one.code != "name" or case.checkpoint.files:
            effect = f"{one.by} may not come back for hours"
            if one.said:
                effect = words.quoted(one.said, by=one.by)
            yield error(f"refused-{one.code}", one.what, effect, Fix())


def _tags(case: Case) -> Iterator[Symptom]:
    """Storages on devices that are not here: the first of the two classic errors."""
    for tag, count in case.facts.locations.items():
        # meta has no values, and is restored anywhere
        if tag in ("cpu", "meta") or _is_served(tag, case):
            continue
        cause = f"was saved on {printable(tag)} (storages: {count}), which this host does not have"
        yield error("device", cause, words.quoted(words.on_tag(tag, case.host)), Fix())
    if case.asked.device not in (None, "cpu", "auto"):
        try:
            require_device(case.asked.device)
        except DeviceUnavailable as unavailable:
            cause = f"the device {case.asked.device} that was asked for is not here"
            advice = "see what is here with: ckptconv devices"
            yield error("no-such-device", cause, str(unavailable), advice=advice)


def _is_served(tag: str, case: Case) -> bool:
    """Whether torch.load would restore a tag here; without torch, as a CPU-only one would."""
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
    classes = some(list(dict.fromkeys(names)))
    cause = f"holds whole modules ({classes}), not their state dicts"
    if len(names) == 1:
        cause = f"holds a whole module ({classes}), not its state dict"
    yield error("whole-module", cause, effect, Fix())


def _dangers(case: Case) -> Iterator[Symptom]:
    """Names that run code where they are loaded without weights_only=True."""
    danger = danger_in(case.checkpoint.notes)
    if danger:
        effect = "code that its author chose runs when it is loaded with weights_only=False"
        yield error("dangerous", danger, effect, Fix())


def _objects(case: Case) -> Iterator[Symptom]:
    """Objects that weights_only=True refuses."""
    bare = [item.path for item in case.facts.odd_objects if item.name in VALUELESS]
    if bare:
        cause, effect = f"has no values: {some(bare)}", "the model cannot compute with it"
        advice = "save it again on a host that has the values"
        yield warning("no-values", cause, effect, advice=advice)
    odd = [item for item in case.facts.odd_objects if item.name not in VALUELESS]
    if odd and not case.facts.opening.is_script:
        names = list(dict.fromkeys(item.name for item in odd))
        places = some([item.path or "the root" for item in odd])
        cause = f"holds objects that are not plain ({some(names)}) at {places}"
        effect = words.quoted(words.REFUSED, words.on_global(names[0]))
        yield error("refused-objects", cause, effect, Fix())


def _lone_part(case: Case) -> Iterator[Symptom]:
    """One part of a checkpoint, opened by itself; its index, where it is here, gives the whole."""
    part = case.whole.part
    if part is None:
        return
    effect = words.quoted(words.NO_KEYS, by="load_state_dict")
    try:
        index = next(iter(indexes_naming(case.places[0])))
        with open_certain(index) as joined:
            found = workable(
                Fix(suffix=case.facts.opening.suffix, device=case.asked.device), joined
            )
        if isinstance(found, CheckpointError):
            raise found
        fix = command(found.fix, [index.path])
        yield Symptom(Finding("error", "lone-shard", part.what, effect, fix))
    except StopIteration:
        yield error("lone-shard", part.what, effect, advice=part.hint)
    except CheckpointError as unworkable:
        yield error("lone-shard", part.what, effect, advice=str(unworkable))


# --------------------------------------------------------------------------------- the state dicts


def _keys(case: Case) -> Iterator[Symptom]:
    """Keys and shapes that are not those of the model: the second of the two classic errors."""
    if case.asked.target is None:
        return
    name = printable(case.asked.target.name)
    if case.fit is None:
        effect = "there is nothing to load into the model"
        yield error("keys", "holds no state dict", effect, advice=look_hint(case.paths[0]))
    elif case.fit.error is not None:
        fit = case.fit.fit
        where = of_part(case.fit.found.path)
        effect = words.quoted(case.fit.error, by="load_state_dict")
        if fit.fits or fit.preset:
            cause = f"the keys{where} are not those of {_remedy(fit, name)}"
            yield error("keys", cause, effect, Fix())
        elif case.fit.fixes:
            surplus = some(fit.unexpected)
            cause = f"the keys{where} include some that {name} does not have: {surplus}"
            yield error("keys", cause, effect, Fix())
        else:
            refused = refusal(fit, case.asked.target.name, len(case.asked.target.shapes))
            yield error("keys", refused.what, effect, advice=refused.hint)


def _remedy(fit: Fit, name: str) -> str:
    """The target, and what makes the keys fit it."""
    if fit.preset:
        return f"{name}, but fit by the rules of the preset '{fit.preset}'"
    ways = []
    if any(old != new for old, new in fit.renames.items()):
        ways.append(f"renamed ({fit.how})")
    if fit.filled:
        ways.append(f"filled from other names of the same tensors ({some(list(fit.filled))})")
    return f"{name}, but fit when {' and '.join(ways)}"


def _wrappers(case: Case) -> Iterator[Symptom]:
    """Keys with a wrapper (DDP, compile, FSDP, ...), where no model says what is wanted."""
    if case.asked.target is not None:
        return
    for found in case.state_dicts:
        preset = told_preset(found.keys)
        if preset == "ema-pytorch":
            cause = "holds a model and its average, as ema_pytorch saves them"
            effect = words.quoted(words.NO_KEYS, by="load_state_dict of the model")
            yield info("prefixed-keys", cause, effect, Fix(preset=preset), chosen=True)
        wrappers = case.facts.state_dicts.get(found.path)
        if wrappers:
            wrapper = printable(".".join(wrappers)) + "."
            unexpected = words.on_unexpected(found.telling_keys[0])
            effect = words.quoted(words.NO_KEYS, unexpected, by="load_state_dict of a bare model")
            cause = f"the keys{of_part(found.path)} carry the wrapper '{wrapper}'"
            yield warning("wrapped-keys", cause, effect, Fix(preset=preset))
        elif preset is None and found.path not in case.facts.offered:
            yield from _wrapped_part(found)
    for path, prefix in case.facts.offered.items():
        whose = f"the attribute or wrapper of {case.facts.producer or 'a framework'}"
        cause = f"the keys{of_part(path)} start with {prefix}, {whose}"
        effect = words.quoted(words.NO_KEYS, by="load_state_dict of the inner model")
        if case.facts.producer == LORA_OF_PEFT:
            yield info("prefixed-keys", cause, effect, advice=_MERGE)
            continue
        yield info("prefixed-keys", cause, effect, Fix(strip_prefix=prefix), chosen=True)


def _wrapped_part(found: StateDict) -> Iterator[Symptom]:
    """Keys of which some have `module.`: they may be of a part that was in DataParallel, as the
    features of a VGG are by torch's own example of ImageNet.
    """
    starts = find_wrapped_parts(found.keys)
    if not starts:
        return
    wrapped = [key for key in found.keys if key.startswith(starts)]
    effect = words.quoted(
        words.NO_KEYS, words.on_unexpected(wrapped[0]), by="load_state_dict of a bare model"
    )
    count = f"{len(wrapped)} of {len(found.keys)} keys{of_part(found.path)}"
    cause = f"{count} have {some(starts)}: DataParallel around a part, or a module of that name"
    fix = Fix(regex=r"(^|\.)module\.=>\1")
    if starts == (LEAD,):
        fix = Fix(strip_prefix=LEAD)
    yield info("prefixed-keys", cause, effect, fix, chosen=True)


_MERGE = "peft loads it as it is; ckptconv merge-lora BASE ADAPTER OUT adds it to its base"


def _choice(case: Case) -> Iterator[Symptom]:
    """Several parts that could be the model; a named model that fits one would decide it."""
    if case.fit is not None and case.fit.fixes:
        return
    try:
        case.checkpoint.state_dict()
    except AmbiguousStateDict as ambiguous:
        if case.state_dicts:
            effect = "load_portable, and an output that holds one state dict, refuse to guess"
            # an average has as many keys as the model, and is not what most want first
            largest = max(
                case.state_dicts, key=lambda item: (not is_average(item.path), len(item.keys))
            )
            fix = Fix(only=largest.path)
            yield warning("several-models", ambiguous.what, effect, fix, chosen=True)
    except CheckpointError:  # limits; told by whoever meets them
        return


def _bloat(case: Case) -> Iterator[Symptom]:
    if not is_bloated(case.facts):
        return
    facts = case.facts
    causes = []
    if facts.stored > facts.used:
        used = f"tensors use {facts.used:,} bytes of storages of {facts.stored:,}"
        causes.append(f"{used}: slices were saved with their whole storages")
    if facts.dead:
        unused = f"its pickle does not use {facts.dead:,} bytes of the file"
        causes.append(f"{unused}: added or left-over records")
    wasted = facts.stored - facts.used + facts.dead
    effect = f"{wasted:,} bytes are stored and moved for nothing"
    yield warning("bloat", "; ".join(causes), effect, Fix())


def _shares(case: Case) -> Iterator[Symptom]:
    """Parts that only training needs: the optimizer, averaged weights beside the plain ones."""
    total = case.facts.root.nbytes
    states = sum(part.nbytes for part in training_states(case.facts.root))
    one = next((item.path for item in case.state_dicts), "")
    if one and states * 10 > total:  # less is not worth a conversion
        cause = f"{states * 100 // total} % of its tensors' bytes are an optimizer's state"
        effect = "programs that only use the model read and store it too"
        yield info("optimizer-share", cause, effect, Fix(only=one), chosen=True)
    if averages_weights(case.checkpoint.root):
        return
    averages = [item.path for item in case.state_dicts if is_average(item.path)]
    if averages and len(case.state_dicts) > 1:
        cause = f"holds averaged weights ({some(averages)}) beside {part_text(one)}"
        effect = (
            "which of them is loaded depends on the script; evaluation usually wants the "
            "averaged ones"
        )
        yield info("ema-share", cause, effect, Fix(only=averages[0]), chosen=True)


def _no_weights(case: Case) -> Iterator[Symptom]:
    """A file of an optimizer, or a tensor, saved by itself, or one without tensors."""
    nothing = "there is nothing in it that a model could load"
    whose = case.facts.training_state
    if whose is not None:
        advice = "the weights are in another file; load this one into the optimizer"
        yield info("no-weights", f"holds only {whose} state: no weights", nothing, advice=advice)
    elif case.facts.root.sort == "tensor":
        effect = "torch.load returns the tensor; it has no keys for load_state_dict"
        yield info("bare-tensor", "holds a bare tensor, not a state dict", effect)
    elif not case.facts.tensors:
        cause, advice = "holds no tensors: no weights", look_hint(case.paths[0])
        yield warning("no-weights", cause, nothing, advice=advice)


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
            fix = Fix(suffix=".safetensors", only=only, tied="duplicate")
            yield info("tied-weights", cause, effect, fix, chosen=True)
            return


def _aliases(case: Case) -> Iterator[Symptom]:
    """Names of tied tensors that only the metadata of safetensors have."""
    metadata = case.checkpoint.metadata
    views = (pair for found in case.state_dicts for pair in found.tensors() if pair[1].is_view)
    names = [key for key, ref in views if key in metadata and ref.storage.name == metadata[key]]
    if not names:
        return
    by = "load_state_dict(safetensors.torch.load_file(...))"
    target = case.asked.target
    wanted = target is not None and not target.shapes.keys().isdisjoint(names)
    yield (error if wanted else warning)(
        "aliases",
        f"names of tied tensors stand in the metadata alone: {some(names)}",
        words.quoted(words.on_missing(names[0]), by=by),
        Fix(suffix=".safetensors", tied="duplicate"),
        advice="or load it with safetensors.torch.load_model, transformers or load_portable",
    )


CHECKS: tuple[Callable[[Case], Iterator[Symptom]], ...] = (
    _dangers, _container, _strays, _protocol, _name, _refused, _lone_part, _tags, _modules,
    _objects,
    _keys, _choice, _wrappers, _bloat, _shares, _no_weights, _tied, _aliases,
    scaled_weights, precision,
)  # fmt: skip
"""What is looked at; findings of one severity come in this order."""
