"""Why a checkpoint will not load on this host, or will disappoint, and the command that mends it.

Facts come from `inspection`, the words of torch from `torch_words`; here they become findings, the worst first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from ckptconv import torch_words as words
from ckptconv.checkpoint import Checkpoint, StateDict
from ckptconv.devices import Host, require_device, survey_host
from ckptconv.errors import (
    CheckpointError,
    DeviceUnavailable,
    IncompleteCheckpoint,
    LimitExceeded,
    MalformedCheckpoint,
    printable,
)
from ckptconv.formats.detect import Named, open_checkpoint
from ckptconv.inspection import OPENED_BY_TORCH, Inspection, Part, inspect_checkpoint, is_bloated
from ckptconv.modules import flatten_modules
from ckptconv.nonfinite import count_nonfinite
from ckptconv.prescriptions import Mend, command, workable
from ckptconv.sources import FileSource
from ckptconv.tensors import check_storage

Severity = Literal["error", "warning", "info"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "info")
_NAMED = 3  # keys, places or tags that a text names before it counts


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: an ``error`` stops the load, a ``warning`` disappoints afterwards, an ``info`` is good to know.

    `cause` is what the file has, `effect` what comes of it, in torch's own words where it has any; `command` mends it
    (None: no command can), and `advice` says what to do where there is more to say.
    """

    severity: Severity
    code: str
    cause: str
    effect: str
    command: str | None = None
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` found, the worst first. `format` is None for what could not be opened."""

    path: str
    format: str | None
    findings: tuple[Finding, ...]

    @property
    def loads(self) -> bool:
        """Whether torch.load(weights_only=True) or the safetensors library loads it here."""
        return not any(finding.severity == "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class _Symptom:
    """A finding before its command: `mend` is the conversion that clears it; `chosen`: only if the user wants that."""

    finding: Finding
    mend: Mend | None = None
    chosen: bool = False


@dataclass(frozen=True)
class _Case:
    """What is examined: a checkpoint, its modules as state dicts, the facts, and what the user asked for."""

    paths: tuple[Path, ...]
    whole: Checkpoint
    checkpoint: Checkpoint
    facts: Inspection
    device: str | None

    @cached_property
    def host(self) -> Host:
        """The devices that are here; asked for only when a tag needs it, for that imports torch."""
        return survey_host(ask_torch=True)

    @cached_property
    def state_dicts(self) -> list[StateDict]:
        """The state dicts, the ones of averaged weights last."""
        return sorted(self.checkpoint.state_dicts(), key=lambda found: _is_average(found.path))


def diagnose(path: Named, *, device: str | None = None, values: bool = False, tag: str | None = None) -> Diagnosis:
    """Say why the checkpoint `path` would not load on this host, or would disappoint, and how to mend it.

    `device` is where the tensors are wanted (a tag, ``auto``; by default the CPU). `values` reads all of it, for damage
    and for values that are no numbers; otherwise no tensor is read. `tag` picks a step of a folder of several. A file that
    cannot be opened is a finding; `CheckpointError` is raised only when there is no such file, or no such device tag.
    Without torch a CPU-only torch is assumed.
    """
    paths = (Path(path),) if isinstance(path, (str, os.PathLike)) else tuple(map(Path, path))
    for one in paths:
        if not os.path.exists(one):  # noqa: PTH110 (False for no name at all)
            FileSource(one).close()  # says why
    try:
        with open_checkpoint(paths, tag=tag, whole_modules=True) as whole:
            checkpoint = flatten_modules(whole)
            case = _Case(paths, whole, checkpoint, inspect_checkpoint(checkpoint), device)
            symptoms = [symptom for check in CHECKS for symptom in check(case)]
            symptoms += _read_values(checkpoint) if values else []
            return Diagnosis(str(paths[0]), whole.format, _findings(case, symptoms))
    except DeviceUnavailable:
        raise
    except CheckpointError as error:
        return Diagnosis(str(paths[0]), None, (_unopened(error, paths),))


def _findings(case: _Case, symptoms: Sequence[_Symptom]) -> tuple[Finding, ...]:
    """The findings with their commands: one conversion mends all that must be mended, so it is the command of each."""
    mend = Mend(suffix=_suffix(case), device=case.device)
    for symptom in symptoms:
        if symptom.mend is not None and not symptom.chosen:
            mend = mend.with_(symptom.mend)
    made = [_prescribed(case, mend, symptom) for symptom in symptoms]
    return tuple(sorted(made, key=lambda finding: _ORDER.index(finding.severity)))


def _prescribed(case: _Case, mend: Mend, symptom: _Symptom) -> Finding:
    if symptom.mend is None:
        return symptom.finding
    wanted = workable(mend.with_(symptom.mend), case.checkpoint)
    if isinstance(wanted, CheckpointError):
        return replace(symptom.finding, advice=str(wanted))
    return replace(symptom.finding, command=command(wanted, case.paths))


def _suffix(case: _Case) -> str:
    """That of a mended file: of the same kind, as far as that is written."""
    return ".safetensors" if case.facts.format.endswith("safetensors") else ".pt"


# --------------------------------------------------------------------------------------------------------------- checks


def _container(case: _Case) -> Iterator[_Symptom]:
    name, path = case.facts.format, case.paths[0]
    if name == "torch legacy":
        effect = words.quoted(words.MMAP, by="torch.load(mmap=True)")
        yield _symptom("info", "legacy-container", "is a file of before torch 1.6, not a zip archive", effect, Mend())
    if name.startswith("sharded"):
        cause = f"is a folder of shards ({name}), not one file"
        yield _symptom("info", "sharded", cause, "torch.load and load_file open one shard at a time", Mend(), chosen=True)
    elif name not in OPENED_BY_TORCH:
        folder = path.is_dir()
        said = words.FOLDER if folder else words.on_format(name)
        effect = words.quoted(said) if said else "torch.load(weights_only=True) does not read it"
        yield _symptom("error", "container", f"its container is: {name}", effect, Mend())


def _name(case: _Case) -> Iterator[_Symptom]:
    """A file under a name of the other kind: the libraries go by the name, torch.load since 2.13 too."""
    if len(case.paths) > 1 or case.paths[0].is_dir():
        return
    named = case.paths[0].suffix.lower() == ".safetensors"
    if named and case.facts.format.startswith("torch"):
        effect = words.quoted(words.HEADER, by="load_file")
        yield _symptom("error", "wrong-name", f"is a {case.facts.format} under the name of a safetensors file", effect, Mend())
    elif case.facts.format == "safetensors" and case.paths[0].suffix.lower() in (".pt", ".pth", ".bin", ".ckpt"):
        effect = words.quoted(words.REFUSED) + "; safetensors.torch.load_file opens it"
        cause = "is a safetensors file under the name of a torch file"
        yield _symptom("warning", "wrong-name", cause, effect, Mend(suffix=".safetensors"))


def _tags(case: _Case) -> Iterator[_Symptom]:
    """Storages on devices that are not here: the first of the two classic errors."""
    for tag, count in case.facts.locations.items():
        if tag in ("cpu", "meta") or _is_served(tag, case):
            continue
        cause = f"was saved on {printable(tag)} (storages: {count}), which this host does not have"
        yield _symptom("error", "device", cause, words.quoted(words.on_tag(tag, case.host)), Mend())
    if case.device not in (None, "cpu", "keep", "auto"):
        try:
            require_device(case.device)
        except DeviceUnavailable as error:
            cause = f"the device {case.device} that was asked for is not here"
            yield _symptom("error", "no-such-device", cause, str(error), advice="see what is here with: ckptconv devices")


def _is_served(tag: str, case: _Case) -> bool:
    """Whether torch.load would restore a storage to its tag here; as torch, without torch a CPU-only one."""
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


def _modules(case: _Case) -> Iterator[_Symptom]:
    """A module pickled whole, whose class torch would have to import."""
    if case.whole is case.checkpoint:
        return
    left = {item.path for item in case.facts.odd_objects}
    odd = [item for item in inspect_checkpoint(case.whole, 0).odd_objects if item.path not in left]
    name = odd[0].name if odd else "a module"
    effect = words.quoted(words.REFUSED, words.on_global(name))
    yield _symptom("error", "whole-module", f"holds a whole module ({printable(name)}), not its state dict", effect, Mend())


def _objects(case: _Case) -> Iterator[_Symptom]:
    """Objects that weights_only=True refuses."""
    odd = case.facts.odd_objects
    if odd and case.facts.format not in ("TorchScript",):
        names = list(dict.fromkeys(item.name for item in odd))
        places = _some([item.path or "the root" for item in odd])
        cause = f"holds objects that are not plain ({_some(names)}) at {places}"
        yield _symptom("error", "refused-objects", cause, words.quoted(words.REFUSED, words.on_global(names[0])), Mend())


def _wrappers(case: _Case) -> Iterator[_Symptom]:
    """Keys with the wrapper of DataParallel, DDP, compile, FSDP or checkpointing: the second of the two classic errors."""
    for found in case.state_dicts:
        if wrappers := case.facts.state_dicts.get(found.path):
            wrapper = ".".join(wrappers) + "."
            where = f" of {printable(found.path)}" if found.path else ""
            effect = words.quoted(words.NO_KEYS, f"Unexpected key(s) in state_dict: {printable(found.keys[0])}",
                                  by="load_state_dict, of a bare model,")  # fmt: skip
            yield _symptom("warning", "wrapped-keys", f"the keys{where} carry the wrapper {wrapper}", effect, Mend())
    for path, prefix in case.facts.offered.items():
        where = f" of {printable(path)}" if path else ""
        cause = f"the keys{where} start with {prefix}, the attribute or wrapper of {case.facts.producer or 'a framework'}"
        effect = words.quoted(words.NO_KEYS, by="load_state_dict, of the inner model,")
        yield _symptom("info", "prefixed-keys", cause, effect, Mend(strip_prefix=prefix), chosen=True)


def _lone_shard(case: _Case) -> Iterator[_Symptom]:
    """One of several shards, opened by itself."""
    path = case.paths[0]
    told = _SHARD(path.name)
    if len(case.paths) > 1 or told is None or int(told["count"]) < 2 or path.is_dir():
        return
    index = path.with_name(f"{told['stem']}.{told['suffix']}.index.json")
    cause = f"is shard {int(told['number'])} of {int(told['count'])} by its name, and holds only some of the tensors"
    effect = words.quoted(words.NO_KEYS, by="load_state_dict")
    if not index.exists():
        advice = f"fetch the other shards and {printable(index.name)}, then name that"
        yield _symptom("error", "lone-shard", cause, effect, advice=advice)
        return
    try:
        with open_checkpoint(index) as joined:
            mend = workable(Mend(suffix=_suffix(case), device=case.device), joined)
        if isinstance(mend, CheckpointError):
            raise mend
        yield _Symptom(Finding("error", "lone-shard", cause, effect, command(mend, [index])))
    except CheckpointError as error:
        yield _symptom("error", "lone-shard", cause, effect, advice=str(error))


_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<suffix>safetensors|bin|pt|pth)").fullmatch


def _bloat(case: _Case) -> Iterator[_Symptom]:
    if is_bloated(case.facts):
        wasted = case.facts.stored - case.facts.used
        cause = (
            f"tensors use {case.facts.used:,} bytes of storages of {case.facts.stored:,}: slices were saved with their storages"
        )
        yield _symptom("warning", "bloat", cause, f"{wasted:,} bytes are read, and held in memory, for nothing", Mend())


def _shares(case: _Case) -> Iterator[_Symptom]:
    """Parts that only training needs: the optimizer, averaged weights beside the plain ones."""
    total = case.facts.root.nbytes
    states = sum(part.nbytes for part in _optimizers(case.facts.root))
    one = case.state_dicts[0].path if case.state_dicts else ""
    if one and states * 10 > total:
        cause = f"{states * 100 // total} % of its tensors' bytes are an optimizer's state"
        effect = "whoever only uses the model reads and stores them too"
        yield _symptom("info", "optimizer-share", cause, effect, Mend(only=one), chosen=True)
    if len(case.state_dicts) > 1 and (averages := [item.path for item in case.state_dicts if _is_average(item.path)]):
        cause = f"holds averaged weights ({_some(averages)}) beside {printable(one)}"
        effect = "which of them is loaded depends on the script; evaluation usually wants the averaged ones"
        yield _symptom("info", "ema-share", cause, effect, Mend(only=averages[0]), chosen=True)


def _optimizers(part: Part) -> Iterator[Part]:
    for inner in part.parts:
        if inner.kind == "optimizer" or "optim" in inner.name.lower():
            yield inner
        elif inner.kind != "state dict":
            yield from _optimizers(inner)


def _is_average(path: str) -> bool:
    return "ema" in re.split(r"[._]", path.lower())


def _tied(case: _Case) -> Iterator[_Symptom]:
    if case.facts.format.endswith("safetensors"):
        return
    for found in case.state_dicts:
        owners: dict[int, str] = {}
        shared = [key for key, ref in found.tensors() if ref.is_view and owners.setdefault(id(ref.storage), key) != key]
        if shared:
            cause = f"share a storage with another tensor: {_some(shared)}"
            effect = words.quoted(words.SHARED, by="safetensors.torch.save_file")
            only = found.path if len(case.state_dicts) > 1 else None
            yield _symptom("info", "tied-weights", cause, effect, Mend(suffix=".safetensors", only=only), chosen=True)
            return


def _precision(case: _Case) -> Iterator[_Symptom]:
    floats = {name: count for name, count in case.facts.dtypes.items() if "float" in name}
    if set(floats) == {"float32"}:
        cause = f"all its floating tensors ({floats['float32']}) are float32"
        yield _symptom("info", "all-fp32", cause, "bfloat16 would take half the bytes", Mend(dtype="bf16"), chosen=True)


CHECKS: tuple[Callable[[_Case], Iterator[_Symptom]], ...] = (
    _container, _name, _lone_shard, _tags, _modules, _objects, _wrappers, _bloat, _shares, _tied, _precision,
)  # fmt: skip
"""What is looked at without reading a tensor; findings of one severity come in this order."""


def _symptom(
    severity: Severity,
    code: str,
    cause: str,
    effect: str,
    mend: Mend | None = None,
    *,
    advice: str | None = None,
    chosen: bool = False,
) -> _Symptom:
    return _Symptom(Finding(severity, code, cause, effect, advice=advice), mend, chosen)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_NAMED]))
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


# --------------------------------------------------------------------------------------------------------------- values


def _read_values(checkpoint: Checkpoint) -> list[_Symptom]:
    """Read every byte: damage is an error, NaN a warning, infinity (masks have it) an information."""
    refs = dict(checkpoint.tensors())
    try:
        for storage in {id(piece.storage): piece.storage for ref in refs.values() for piece in ref.pieces}.values():
            check_storage(storage)
        counted = {path: count_nonfinite(ref) for path, ref in refs.items()}
    except CheckpointError as error:
        return [_damaged(error)]
    nan = {path: count.nan for path, count in counted.items() if count.nan}
    infinite = {path: count.infinite for path, count in counted.items() if count.infinite}
    found = []
    if nan:
        cause = f"has values that are NaN ({sum(nan.values())}), in {_some(list(nan))}"
        advice = "the training has diverged, or a cast went too far: take an earlier checkpoint"
        found.append(_symptom("warning", "non-finite", cause, "what the model computes with them is NaN", advice=advice))
    if infinite:
        cause = f"has values that are infinite ({sum(infinite.values())}), in {_some(list(infinite))}"
        found.append(_symptom("info", "infinite", cause, "as in a mask this is meant; in a weight it is not"))
    return found


def _damaged(error: CheckpointError) -> _Symptom:
    effect = "torch.load does not check this and gives damaged values without a word"
    cause = f"{printable(error.where)}: {error.what}" if error.where else error.what
    return _symptom("error", "damaged", cause, effect, advice=error.hint or "the file is damaged; fetch it again")


# ---------------------------------------------------------------------------------------------------- what does not open


def _unopened(error: CheckpointError, paths: tuple[Path, ...]) -> Finding:
    """The finding for what cannot be opened; its cause and advice are the error's own."""
    cause = f"{printable(error.where)}: {printable(error.what, 2000)}" if error.where else printable(error.what, 2000)
    finding = Finding("error", _code(error), cause, _effect(error, paths[0]), advice=error.hint)
    if isinstance(error, IncompleteCheckpoint) and len(paths) == 1 and (mended := _with_siblings(paths[0])):
        return replace(finding, command=mended)
    if (unpack := _unpacking(error, paths[0])) is not None:
        return replace(finding, command=unpack)
    return finding


def _code(error: CheckpointError) -> str:
    if isinstance(error, IncompleteCheckpoint):
        return "lone-rank"
    if isinstance(error, MalformedCheckpoint):
        return "damaged"
    return "beyond-limits" if isinstance(error, LimitExceeded) else "no-checkpoint"


def _effect(error: CheckpointError, path: Path) -> str:
    if path.is_dir():
        return words.quoted(words.FOLDER)
    if isinstance(error, IncompleteCheckpoint):
        return "torch.load gives one rank's shards, which load_state_dict does not take for the whole tensors"
    try:
        source = FileSource(path)
    except CheckpointError as unreadable:
        return printable(unreadable.what)
    try:
        head = source.read(0, min(4, source.size))
    finally:
        source.close()
    if path.suffix == ".safetensors" and not isinstance(error, MalformedCheckpoint):
        return words.quoted(words.HEADER, by="load_file")
    if head.startswith(b"PK\3\4") and isinstance(error, MalformedCheckpoint) and "cut off" in error.what:
        return words.quoted(words.CUT_OFF)
    said = words.on_start(head)
    return words.quoted(said) if said else "neither torch.load nor the safetensors library loads it"


def _with_siblings(path: Path) -> str | None:
    """The command for the files of all ranks, if they lie beside this one under names that differ in their numbers."""
    pattern = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", path.name))))
    beside = sorted(item for item in path.parent.iterdir() if pattern.fullmatch(item.name) and item.is_file())
    try:
        with open_checkpoint(beside) as joined:
            mend = workable(Mend(), joined)
    except CheckpointError:
        return None
    return None if isinstance(mend, CheckpointError) else command(mend, beside)


def _unpacking(error: CheckpointError, path: Path) -> str | None:
    """The command that unpacks a compressed file beside it."""
    from shlex import quote

    from ckptconv.prescriptions import output_beside

    tool = _UNPACKERS.get(error.what)
    return f"{tool} -c {quote(str(path))} > {quote(str(output_beside(path, '.pt')))}" if tool else None


_UNPACKERS = {
    "is gzip-compressed": "gunzip",
    "is bzip2-compressed": "bunzip2",
    "is xz-compressed": "unxz",
    "is zstd-compressed": "unzstd",
}
