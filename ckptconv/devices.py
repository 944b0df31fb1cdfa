"""Location tags, what `map_location` makes of them, and which devices this host has.

A location tag is the short string that torch writes beside each storage (``cpu``, ``cuda:3``). Checking and mapping
tags is string work; only `survey_host`, `best_device` and what leads to a `torch.device` ask nvidia-smi or torch.
Putting tensors on a device is `loading`'s. A `logical` index is CUDA's in this process, a `physical` one nvidia-smi's.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptconv.errors import DeviceUnavailable, MissingDependency, printable
from ckptconv.nvidia_smi import Answer, ask_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

# What torch.device() parses (c10/core/Device.cpp, torch 2.13), without `meta` and the names that never hold a tensor
# (mkldnn, opengl, opencl, ideep); torch writes the single ones without an index, and loads `cpu` but not `cpu:0`.
_SINGLE = ("cpu", "mps")
_INDEXED = ("cuda", "xpu", "hpu", "xla", "mtia", "privateuseone", "ipu", "hip", "vulkan", "ve", "maia", "fpga", "lazy")
_RENAMED = ("npu", "mlu", "musa", "gcu", "sdaa")  # backends outside torch; torch.utils.rename_privateuse1_backend
_COUNTED = ("cuda", "xpu")
_PACKAGES = {"xla": "torch_xla", "hpu": "habana_frameworks", **{kind: f"torch_{kind}" for kind in _RENAMED}}
# c10::DeviceIndex is an int8: torch takes `cuda:128` for an index of 65408 and `cuda:255` for plain `cuda`.
_INDICES = frozenset(map(str, range(128)))
_FORMS = f"valid are cpu, mps, TYPE and TYPE:N (N from 0 to 127); TYPE is one of {', '.join(_INDEXED + _RENAMED)}"
_ELSEWHERE = 'use map_location="cpu" or map_location="auto" (--device cpu on the command line)'


def check_tag(tag: str) -> str:
    """The canonical form of `tag`, which this host need not have: ``cpu``, ``mps``, ``TYPE`` or ``TYPE:N``.

    >>> check_tag("cuda:1"), check_tag("npu"), check_tag("cpu:0")
    ('cuda:1', 'npu', 'cpu')

    TYPE is a device type of torch, or a name that a backend outside torch registers (one known here, or one loaded in
    this process). Raises `DeviceUnavailable` for anything else, also for ``meta``.
    """
    if canonical := _canonical(tag):
        return canonical
    meant = _canonical(tag.strip().lower())
    why = ": a meta tensor has no values" if tag.partition(":")[0] == "meta" else ""
    raise DeviceUnavailable(f"{tag!r} is not a device tag{why}", hint=f"write {meant}; {_FORMS}" if meant else _FORMS)


def _canonical(tag: str) -> str | None:
    kind, colon, index = tag.partition(":")
    if colon and index not in _INDICES:
        return None
    if kind in _SINGLE:
        return kind if index in ("", "0") else None
    torch_c = getattr(sys.modules.get("torch"), "_C", None)
    loaded = getattr(torch_c, "_get_privateuse1_backend_name", lambda: "privateuseone")()
    return tag if kind in (*_INDEXED, *_RENAMED, loaded) else None


@dataclass(frozen=True, slots=True)
class TagMap:
    """The tag that a storage gets: by the pair of its exact tag (a dict in `torch.load`), else `device`, else its own.

    >>> TagMap(None, (("cuda:3", "cuda:0"),))("cuda:3"), TagMap(None)("cuda:3"), TagMap("cpu")("cuda:3")
    ('cuda:0', 'cuda:3', 'cpu')
    """

    device: str | None
    pairs: tuple[tuple[str, str], ...] = ()

    def __call__(self, tag: str) -> str:
        for old, new in self.pairs:
            if old == tag:
                return new
        return tag if self.device is None else self.device


def tag_map(device: str | None, pairs: Sequence[str] = ()) -> TagMap:
    """The map that `--device` and `--map-location OLD=NEW` ask for.

    `device` is a tag, ``keep``, ``auto`` (`best_device`), or None: ``keep`` if there are pairs, else ``cpu``. NEW is a
    tag or ``auto``; OLD is any string, since a file may carry any. Raises `DeviceUnavailable` for what is not a tag or no
    pair, and for an OLD that is sent to two places.
    """
    if device is None:
        device = "keep" if pairs else "cpu"
    targets: dict[str, str] = {}
    for pair in pairs:
        old, _, new = pair.partition("=")
        if not (old and new):
            raise DeviceUnavailable(f"--map-location {pair!r} is not OLD=NEW", hint="write for example cuda:3=cuda:0")
        new = _asked_tag(new)
        if targets.setdefault(old, new) != new:
            raise DeviceUnavailable(f"--map-location sends {old} to both {targets[old]} and {new}", hint="keep one")
    return TagMap(None if device == "keep" else _asked_tag(device), tuple(targets.items()))


def _asked_tag(device: str) -> str:
    return best_device() if device == "auto" else check_tag(device)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, sizes in bytes, None where unknown; `logical` is None if hidden, `physical` if only torch sees it.

    `trouble` is what a broken one says instead of its memory; `partitioned` is MIG mode, where it was asked.
    """

    logical: int | None
    physical: int | None
    name: str
    uuid: str | None
    total: int | None
    free: int | None
    trouble: str | None = None
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """The devices of this host: `cuda`, `mps` and `xpu` are what torch can use (not asked: `cuda` counts visible GPUs).

    `visible` is CUDA_VISIBLE_DEVICES, `torch` a version (None: missing or not asked), `notes` tell what is odd.
    """

    gpus: tuple[Gpu, ...]
    visible: str | None
    torch: str | None
    cuda: int
    mps: bool
    xpu: int
    notes: tuple[str, ...]


def survey_host(ask_torch: bool) -> Host:
    """What this host has, by nvidia-smi and, if `ask_torch`, by torch; what fails or is missing becomes a note."""
    notes: list[str] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = _list_gpus(notes)
    indices = visible_indices(visible, listed)
    gpus = [replace(gpu, logical=indices.index(gpu.physical) if gpu.physical in indices else None) for gpu in listed]
    notes += _visibility_notes(visible, gpus, len(indices))
    torch = _import_torch(notes) if ask_torch else None
    host = Host(tuple(gpus), visible, None, len(indices), False, 0, tuple(notes))
    return _ask_torch(torch, host) if torch else host


def _list_gpus(notes: list[str]) -> list[Gpu]:
    """The physical GPUs, by nvidia-smi; none, without a note, where there is no nvidia-smi."""
    answer = ask_gpus()
    if answer.problem is None:
        notes += [f"nvidia-smi says: {_first_sentence(remark)}" for remark in answer.remarks]
        return listed_gpus(answer)
    notes.append(_first_sentence(answer.problem))
    return []


def listed_gpus(answer: Answer) -> list[Gpu]:
    """The GPUs that nvidia-smi lists, before it is known which of them are visible."""
    return [
        Gpu(None, row.index, row.name, row.uuid, row.total, row.free, row.trouble, row.index in answer.partitioned)
        for row in answer.rows
    ]


def visible_indices(env: str | None, gpus: Iterable[Gpu]) -> list[int]:
    """Physical indices in the order of the logical ones, when CUDA_VISIBLE_DEVICES is `env` (None: not set).

    Not set shows all, empty none. Entries are integers or unique prefixes of UUIDs (``GPU-...``); the first that names
    no GPU, such as -1, ends the list (CUDA programming guide, "CUDA Environment Variables"). As in torch.cuda 2.13,
    letters after a number are ignored, integers and UUIDs do not mix, and a GPU named twice hides all. MIG names: none.
    """
    uuids = {gpu.physical: gpu.uuid or "" for gpu in gpus if gpu.physical is not None}
    if env is None:
        return list(uuids)
    visible: list[int] = []
    for entry in env.split(","):
        number = re.match(r"\+?0*([0-9]+)", entry.strip())
        named = [index for index in uuids if number and number[1] == str(index)]
        if env.startswith("GPU-"):
            named = [index for index in uuids if entry.startswith("GPU-") and uuids[index].startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in visible:
            return []
        visible += named
    return visible


def _visibility_notes(visible: str | None, gpus: Sequence[Gpu], shown: int) -> list[str]:
    """What may surprise in CUDA_VISIBLE_DEVICES (`shown` of `gpus` are visible) and in the order of the GPUs."""
    notes = []
    entries = (visible or "").split(",")
    if gpus and visible and shown < len(entries):
        what = f"{entries[shown]!r} is not a GPU of this host; it and everything after it is hidden"
        if visible.startswith("MIG-"):
            what = "a MIG instance; its GPU is not looked up"
        elif not shown and visible_indices(entries[0], gpus):
            what = "a GPU is named twice, which hides all of them"
        notes += [] if entries[shown].strip().startswith("-") else [f"CUDA_VISIBLE_DEVICES={visible}: {what}"]
    if len({gpu.name for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") != "PCI_BUS_ID":
        notes.append("the GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA and nvidia-smi may number them differently")
    return notes


def _ask_torch(torch: Any, host: Host) -> Host:
    import warnings

    notes = list(host.notes)
    with warnings.catch_warnings(record=True) as heard:  # torch only warns of a driver that is too old
        warnings.simplefilter("always")
        count, xpu = _count(torch, "cuda", notes), _count(torch, "xpu", notes)
        gpus = [_torch_gpu(torch, index, host.gpus, notes) for index in range(count)]
        mps = bool(_attempt(torch.backends.mps.is_available, notes))
    notes += [f"torch warns: {_first_sentence(warning.message)}" for warning in heard]
    if host.gpus and not count:
        notes.append(f"nvidia-smi lists {len(host.gpus)} GPUs but {_census(torch, 'cuda', 0)}")
    seen = {gpu.physical for gpu in gpus}
    gpus += [replace(gpu, logical=None if count else gpu.logical) for gpu in host.gpus if gpu.physical not in seen]
    return Host(tuple(gpus), host.visible, str(torch.__version__), count, mps, xpu, tuple(notes))


def _torch_gpu(torch: Any, index: int, listed: Iterable[Gpu], notes: list[str]) -> Gpu:
    """CUDA device `index`: nvidia-smi's entry with its UUID (torch 2.5 on) or else its place, or one of its own.

    Free memory is nvidia-smi's where known: asking torch opens a context on that GPU.
    """
    properties = _attempt(lambda: torch.cuda.get_device_properties(index), notes)
    name, total = getattr(properties, "name", f"cuda:{index}"), getattr(properties, "total_memory", None)
    uuid = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None
    same = [gpu for gpu in listed if (gpu.uuid == uuid if uuid else gpu.logical == index)]
    gpu = same[0] if same else Gpu(index, None, name, uuid, total, None)
    free = _attempt(lambda: torch.cuda.mem_get_info(index)[0], notes) if gpu.free is None else gpu.free
    return replace(gpu, logical=index, free=free)


def _import_torch(notes: list[str]) -> Any:
    """torch, or None; a note says when it is installed and broken (a shared library is missing, say)."""
    try:
        import torch
    except Exception as error:  # what is half installed may raise anything
        if not isinstance(error, ImportError) or error.name != "torch":
            notes.append(f"torch is installed but cannot be imported: {_first_sentence(error)}")
        return None
    if not hasattr(torch, "Tensor"):  # an empty folder of its name, which is what an uninstall may leave
        notes.append("torch is installed but cannot be imported: it is empty")
        return None
    return torch


def require_torch(purpose: str) -> Any:
    """torch; `MissingDependency` with the command that installs it where it cannot be imported.

    `purpose` is what needs it: "making live tensors".
    """
    notes: list[str] = []
    if (torch := _import_torch(notes)) is not None:
        return torch
    if notes:
        hint = "reinstall it: pip install --force-reinstall torch"
        raise MissingDependency(f"{purpose} needs torch, and {notes[0]}", hint=hint)
    raise MissingDependency(f"{purpose} needs torch, which is not installed", hint=INSTALL_TORCH)


INSTALL_TORCH = "pip install 'ckptconv[torch]'"


def _attempt(ask: Callable[[], Any], notes: list[str]) -> Any:
    """A driver's answer, or None and a note: a broken driver raises anything."""
    try:
        return ask()
    except Exception as error:
        notes.append(f"torch: {_first_sentence(error)}")
        return None


def _count(torch: Any, kind: str, notes: list[str]) -> int:
    backend = getattr(torch, kind, None)
    return _attempt(lambda: backend.device_count() if backend and backend.is_available() else 0, notes) or 0


def _first_sentence(text: object) -> str:
    return printable((str(text).strip() or type(text).__name__).splitlines()[0].split(". ")[0])


def best_device() -> str:
    """The tag that ``auto`` stands for, here and now.

    Under torchrun (LOCAL_RANK is set) the CUDA device of that number, else the one with the most free memory (by
    nvidia-smi where torch is missing; a tie: the lowest index), else ``mps``, else the ``xpu:N`` with the most free
    memory, else ``cpu``. Raises `DeviceUnavailable` when LOCAL_RANK names a CUDA device that is not here.
    """
    torch = _import_torch([])
    if torch is None:
        free = {gpu.logical: gpu.free for gpu in survey_host(ask_torch=False).gpus if gpu.logical is not None}
        return _rank_device(None, len(free)) or _freest("cuda", len(free), free.get) if free else "cpu"
    if count := _count(torch, "cuda", []):
        return _rank_device(torch, count) or _freest("cuda", count, lambda index: torch.cuda.mem_get_info(index)[0])
    if _attempt(torch.backends.mps.is_available, []):
        return "mps"
    count = _count(torch, "xpu", [])
    return _freest("xpu", count, lambda index: torch.xpu.mem_get_info(index)[0]) if count else "cpu"


def _rank_device(torch: Any, count: int) -> str | None:
    rank = os.environ.get("LOCAL_RANK")
    if not rank or rank in map(str, range(count)):
        return f"cuda:{rank}" if rank else None
    what = f"LOCAL_RANK={rank} asks for cuda:{rank}, which is not here: {_census(torch, 'cuda', count)}"
    raise DeviceUnavailable(what, hint='start one process per GPU, or name a device instead of "auto" (cuda:0)')


def _freest(kind: str, count: int, free: Callable[[int], int | None]) -> str:
    """The device with the most free memory; one that cannot tell is passed over, an only one is not asked."""
    sizes = [_attempt(functools.partial(free, index), []) if count > 1 else 0 for index in range(count)]
    return f"{kind}:{max(range(count), key=lambda index: -1 if sizes[index] is None else sizes[index])}"


def require_device(tag: str) -> torch.device:
    """The `torch.device` of `tag` on this host; ``cuda`` and ``xpu`` without an index are the current device.

    Raises `DeviceUnavailable`, which says what is here, if `tag` is not a tag, torch is missing or cannot use the device.
    A backend outside torch must have been imported before: tags come out of files, and a file imports nothing.
    """
    canonical, notes = _canonical(tag), list[str]()
    if canonical is None:
        raise DeviceUnavailable(f"{tag!r} is not a device to load to", hint=_ELSEWHERE)
    kind, _, index = canonical.partition(":")
    if _import_torch(notes) is None:
        raise DeviceUnavailable(notes[0] if notes else "torch is not installed", hint=INSTALL_TORCH)
    import torch

    count = _count(torch, kind, notes) if kind in _COUNTED else 0
    device: torch.device | None = None
    if kind not in _COUNTED:
        device = _attempt(lambda: torch.empty(0, device=canonical).device, notes)  # any backend can answer this
    elif int(index or 0) < count:
        device = _attempt(lambda: torch.device(kind, int(index or getattr(torch, kind).current_device())), notes)
    if device is None:
        raise DeviceUnavailable(f"{tag} is not here: {_census(torch, kind, count, notes)}", hint=_ELSEWHERE)
    return device


def _census(torch: Any, kind: str, count: int, notes: Sequence[str] = ()) -> str:
    """What is here of `kind`, and in parentheses why it is no more."""
    reasons = [*notes, *(_cuda_reasons(torch, count) if kind == "cuda" else [])]
    if kind in _PACKAGES and _PACKAGES[kind] not in sys.modules:
        reasons = [f"import {_PACKAGES[kind]} first"]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    if count == 0:
        return f"torch {torch.__version__} sees no {kind.upper()} device{why}"
    devices = f"{count} {kind.upper()} device{'s' if count > 1 else ''}"
    return f"this host has {devices}, {_series([f'{kind}:{index}' for index in range(count)])}{why}"


def _cuda_reasons(torch: Any, count: int) -> list[str]:
    """Why torch sees no more than `count` CUDA devices: its build, or CUDA_VISIBLE_DEVICES."""
    if torch is not None and not (torch.version.cuda or getattr(torch.version, "hip", None)):
        return ["it is built without CUDA"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return []
    entries = [entry.strip() for entry in visible.split(",")][:count]
    logical = [f"cuda:{index}" for index in range(len(entries))]
    result = f"makes physical {_series(entries)} the logical {_series(logical)}" if entries else "leaves no GPU visible"
    return [f"CUDA_VISIBLE_DEVICES={visible} {result}"]


def _series(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def resolve_map_location(map_location: str | torch.device | dict[str, Any] | None) -> Callable[[str], torch.device]:
    """What gives each tag its device under `map_location`, worked out once per load and remembered by tag.

    As in `torch.load`: None follows the tag, a str or `torch.device` takes all, a dict maps exact tags and leaves the
    others. Beyond it, ``"auto"`` is `best_device`, asked once. Raises `DeviceUnavailable` for anything else (also an
    int, as `torch.load` does; a callable is the loader's), and later for a tag that leads to a device not here.
    """
    settled = functools.cache(_asked_tag)
    if map_location is None:
        chosen = TagMap(None)
    elif isinstance(map_location, dict):
        chosen = TagMap(None, tuple((old, settled(str(new))) for old, new in map_location.items()))
    elif isinstance(map_location, (str, getattr(sys.modules.get("torch"), "device", str))):
        chosen = TagMap(settled(str(map_location)))
    else:
        raise DeviceUnavailable(f"map_location={map_location!r} is not a location", hint="give a tag, or a dict of tags")
    return functools.cache(lambda tag: require_device(chosen(tag)))


def location_for(map_location: str | torch.device | dict[str, Any] | None, tag: str) -> torch.device:
    """The device of one storage tagged `tag`; `resolve_map_location` serves a whole load."""
    return resolve_map_location(map_location)(tag)
