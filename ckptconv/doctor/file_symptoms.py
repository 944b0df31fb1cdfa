"""What is wrong with a file as such, found without reading a tensor, and which conversion fixes it.

Facts come from `inspect`, the words of torch from `torch_words`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckptconv.convert.prescriptions import Fix, command, workable
from ckptconv.devices.host import require_device
from ckptconv.doctor import torch_words as words
from ckptconv.doctor.cases import Case, Symptom, some, suffix, symptom
from ckptconv.doctor.findings import Finding
from ckptconv.formats.registry import open_certain
from ckptconv.inspect.facts import newer_protocol
from ckptconv.objects.torch_names import VALUELESS
from ckptconv.support.errors import CheckpointError, DeviceUnavailable, printable
from ckptconv.tree.containers import SAFETENSORS_LIBRARY


def _container(case: Case) -> Iterator[Symptom]:
    container = case.facts.opening
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
        said = words.FOLDER if case.places[0].is_folder() else container.torch_says
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
    if len(case.paths) > 1 or case.places[0].is_folder():
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


def _lone_shard(case: Case) -> Iterator[Symptom]:
    """One of several shards, opened by itself."""
    place = case.places[0]
    told = _SHARD(place.name)
    if len(case.paths) > 1 or told is None or int(told["count"]) < 2 or place.is_folder():
        return
    index = place.beside(f"{told['stem']}.{told['suffix']}.index.json")
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
        yield Symptom(
            Finding("error", "lone-shard", cause, effect, command(found.fix, [index.path]))
        )
    except CheckpointError as error:
        yield symptom("error", "lone-shard", cause, effect, advice=str(error))


_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<suffix>safetensors|bin|pt|pth)"
).fullmatch


FILE_CHECKS: tuple[Callable[[Case], Iterator[Symptom]], ...] = (
    _container, _strays, _protocol, _name, _refused, _lone_shard, _tags, _modules, _objects,
)  # fmt: skip
"""What is looked at in the file; findings of one severity come in this order."""
