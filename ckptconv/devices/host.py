"""Which devices this host has, which one is the best, and why one cannot be used.

Only here is nvidia-smi or torch asked. Putting tensors on a device is the part of `live`. A
`logical` index is CUDA's in this process, a `physical` one nvidia-smi's.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptconv.devices.nvidia_smi import Gpu, ask_gpus
from ckptconv.support.errors import DeviceUnavailable, MissingDependency, printable
from ckptconv.support.records import dataclass
from ckptconv.support.signals import held_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
from ckptconv.devices.tags import COUNTED, RENAMED, canonical_tag

_PACKAGES = {
    "xla": "torch_xla",
    "hpu": "habana_frameworks",
    **{kind: f"torch_{kind}" for kind in RENAMED},
}
_ELSEWHERE = "ask for cpu, or auto"


@dataclass(frozen=True, slots=True)
class Host:
    """The devices of this host: `cuda`, `mps` and `xpu` are what torch can use (not asked: `cuda`
    counts visible GPUs).

    `visible` is CUDA_VISIBLE_DEVICES, `torch` a version (None: missing or not asked), `notes` tell
    what is odd.
    """

    gpus: tuple[Gpu, ...]
    visible: str | None
    torch: str | None
    cuda: int
    mps: bool
    xpu: int
    notes: tuple[str, ...]


def survey_host(ask_torch: bool) -> Host:
    """What this host has, by nvidia-smi and, if `ask_torch`, by torch; failures become notes."""
    notes: list[str] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = _list_gpus(notes)
    indices = visible_indices(visible, listed)
    logical: dict[int | None, int] = {physical: at for at, physical in enumerate(indices)}
    gpus = [replace(gpu, logical=logical.get(gpu.physical)) for gpu in listed]
    notes += _visibility_notes(visible, gpus, len(indices))
    torch = ask_torch and _import_torch(notes)
    host = Host(tuple(gpus), visible, None, len(indices), False, 0, tuple(notes))
    return _ask_torch(torch, host) if torch else host


def _list_gpus(notes: list[str]) -> list[Gpu]:
    """The physical GPUs, by nvidia-smi; none, without a note, where there is no nvidia-smi."""
    answer = ask_gpus()
    if answer.problem is None:
        notes += [f"nvidia-smi says: {_first_sentence(remark)}" for remark in answer.remarks]
        return [*answer.gpus]
    notes.append(_first_sentence(answer.problem))
    return []


def visible_indices(env: str | None, gpus: Iterable[Gpu]) -> list[int]:
    """Physical indices in the order of the logical ones, when CUDA_VISIBLE_DEVICES is `env` (None:
    not set).

    Not set shows all, empty none. Entries are integers or unique prefixes of UUIDs (``GPU-...``);
    the first that names no GPU, such as -1, ends the list (CUDA programming guide, "CUDA
    Environment Variables"). As in torch.cuda 2.13, letters after a number are ignored, integers and
    UUIDs do not mix, and a GPU named twice hides all. MIG names: none.
    """
    uuids = {gpu.physical: gpu.uuid or "" for gpu in gpus if gpu.physical is not None}
    if env is None:
        return list(uuids)
    visible: list[int] = []
    for entry in env.split(","):
        number = re.match(r"\+?0*([0-9]+)", entry.strip())
        named = [index for index in uuids if number and number[1] == str(index)]
        if env.startswith("GPU-"):
            is_one = entry.startswith("GPU-")
            named = [index for index, uuid in uuids.items() if is_one and uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in visible:
            return []
        visible += named
    return visible


def _visibility_notes(visible: str | None, gpus: Sequence[Gpu], shown: int) -> list[str]:
    """What may surprise in CUDA_VISIBLE_DEVICES (`shown` of `gpus`) and in the order of GPUs."""
    notes = []
    entries = (visible or "").split(",")
    if gpus and visible and shown < len(entries):
        what = f"{entries[shown]!r} is not a GPU of this host; it and everything after it is hidden"
        if visible.startswith("MIG-"):
            what = "a MIG instance; its GPU is not looked up"
        elif not shown and visible_indices(entries[0], gpus):
            what = "a GPU is named twice, which hides all of them"
        if not entries[shown].strip().startswith("-"):
            notes.append(f"CUDA_VISIBLE_DEVICES={visible}: {what}")
    order = os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if len({gpu.name for gpu in gpus}) > 1 and order != "PCI_BUS_ID":
        differ = "the GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
        notes.append(f"{differ}: CUDA and nvidia-smi may number them differently")
    return notes


def _ask_torch(torch: Any, host: Host) -> Host:
    import warnings

    notes = list(host.notes)
    # torch only warns of a driver that is too old
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        count, xpu = _count(torch, "cuda", notes), _count(torch, "xpu", notes)
        gpus = [_torch_gpu(torch, index, host.gpus, notes) for index in range(count)]
        mps = bool(_attempt(torch.backends.mps.is_available, notes))
    notes += [f"torch warns: {_first_sentence(warning.message)}" for warning in heard]
    if host.gpus and not count:
        notes.append(f"nvidia-smi lists {len(host.gpus)} GPUs but {_census(torch, 'cuda', 0)}")
    seen = {gpu.physical for gpu in gpus}
    for gpu in host.gpus:
        if gpu.physical not in seen:
            # where torch sees others it is hidden; where it sees none, nvidia-smi is all there is
            gpus.append(replace(gpu, logical=None) if count else gpu)
    return Host(tuple(gpus), host.visible, str(torch.__version__), count, mps, xpu, tuple(notes))


def _torch_gpu(torch: Any, index: int, listed: Iterable[Gpu], notes: list[str]) -> Gpu:
    """CUDA device `index`: nvidia-smi's entry with its UUID (torch 2.5 on) or else its place, or
    one of its own.

    Free memory is nvidia-smi's where known: asking torch opens a context on that GPU.
    """
    properties = _attempt(lambda: torch.cuda.get_device_properties(index), notes)
    name = getattr(properties, "name", f"cuda:{index}")
    total = getattr(properties, "total_memory", None)
    gpu = Gpu(index, None, name, None, total, None)
    if hasattr(properties, "uuid"):
        gpu = replace(gpu, uuid=f"GPU-{properties.uuid}")
        known = [one for one in listed if one.uuid == gpu.uuid]
    else:
        known = [one for one in listed if one.logical == index]
    gpu = next(iter(known), gpu)
    if gpu.free is None:
        gpu = replace(gpu, free=_attempt(lambda: torch.cuda.mem_get_info(index)[0], notes))
    return replace(gpu, logical=index)


def _import_torch(notes: list[str]) -> Any:
    """torch, or None; a note says when it is installed and broken (lacks a shared library, say)."""
    # a stop that comes within its C++ code, while it is imported, aborts the process; once it is
    # there, handlers that are the caller's are left alone
    importing = held_back() if "torch" not in sys.modules else nullcontext()
    try:
        with importing:
            import torch
    except Exception as error:  # what is half installed may raise anything
        if not isinstance(error, ImportError) or error.name != "torch":
            notes.append(f"torch is installed but cannot be imported: {_first_sentence(error)}")
        return None
    # an empty folder of its name, which is what an uninstall may leave
    if not hasattr(torch, "Tensor"):
        notes.append("torch is installed but cannot be imported: it is empty")
        return None
    return torch


def require_torch(purpose: str) -> Any:
    """torch; `MissingDependency` with the command that installs it where it cannot be imported.
    `purpose` is what needs it: "making live tensors".
    """
    notes: list[str] = []
    torch = _import_torch(notes)
    if torch is not None:
        return torch
    if notes:
        hint = "reinstall it: pip install --force-reinstall torch"
        raise MissingDependency(f"{purpose} needs torch, and {notes[0]}", hint=hint)
    raise MissingDependency(f"{purpose} needs torch, which is not installed", hint=INSTALL_TORCH)


INSTALL_TORCH = "pip install 'torch>=2.1'"


def _attempt(ask: Callable[[], Any], notes: list[str]) -> Any:
    """A driver's answer, or None and a note: a broken driver raises anything."""
    try:
        return ask()
    except Exception as error:
        notes.append(f"torch: {_first_sentence(error)}")
        return None


def _count(torch: Any, kind: str, notes: list[str]) -> int:
    backend = getattr(torch, kind, None)
    if backend is None:
        return 0
    return _attempt(lambda: backend.is_available() and backend.device_count(), notes) or 0


def _first_sentence(text: object) -> str:
    return printable((str(text).strip() or type(text).__name__).splitlines()[0].split(". ")[0])


def best_device() -> str:
    """The device tag that ``auto`` means on this host, now.

    Under torchrun (LOCAL_RANK is set) the CUDA device of that number, else the one with the most
    free memory (by nvidia-smi where torch is missing; a tie: the lowest index), else ``mps``, else
    the ``xpu:N`` with the most free memory, else ``cpu``. Raises `DeviceUnavailable` when
    LOCAL_RANK names a CUDA device that is not here.
    """
    torch = _import_torch([])
    ask: Callable[[int], int | None]
    if torch is None:
        gpus = survey_host(ask_torch=False).gpus
        free = {gpu.logical: gpu.free for gpu in gpus if gpu.logical is not None}
        count, ask = len(free), free.get
    else:
        count, ask = _count(torch, "cuda", []), lambda index: torch.cuda.mem_get_info(index)[0]
    if count:
        return _rank_device(torch, count) or _freest("cuda", count, ask)
    if torch is not None and _attempt(torch.backends.mps.is_available, []):
        return "mps"
    if torch is not None and (count := _count(torch, "xpu", [])):
        return _freest("xpu", count, lambda index: torch.xpu.mem_get_info(index)[0])
    return "cpu"


def _rank_device(torch: Any, count: int) -> str | None:
    rank = os.environ.get("LOCAL_RANK")
    if not rank:
        return None
    if rank in map(str, range(count)):
        return f"cuda:{rank}"
    what = f"LOCAL_RANK={rank} asks for cuda:{rank}, which is not here"
    hint = 'start one process per GPU, or name a device instead of "auto" (cuda:0)'
    raise DeviceUnavailable(f"{what}: {_census(torch, 'cuda', count)}", hint=hint)


def _freest(kind: str, count: int, free: Callable[[int], int | None]) -> str:
    """The device with the most free memory of those that can tell; an only one is not asked."""
    if count == 1:
        return f"{kind}:0"
    # one that does not tell comes behind one that is full
    asked = (_attempt(functools.partial(free, index), []) for index in range(count))
    sizes = [-1 if size is None else size for size in asked]
    return f"{kind}:{sizes.index(max(sizes))}"


def require_device(tag: str) -> torch.device:
    """The `torch.device` of `tag` on this host; ``cuda`` and ``xpu`` without an index are the
    current device.

    Raises `DeviceUnavailable`, which says what is here, if `tag` is not a tag, torch is missing or
    cannot use the device. A backend outside torch must have been imported before: tags come out of
    files, and a file imports nothing.
    """
    canonical, notes = canonical_tag(tag), list[str]()
    if canonical is None:
        raise DeviceUnavailable(f"{tag!r} is not a device to load to", hint=_ELSEWHERE)
    kind, _, index = canonical.partition(":")
    if _import_torch(notes) is None:
        what = next(iter(notes), "torch is not installed")
        raise DeviceUnavailable(what, hint=INSTALL_TORCH)
    import torch

    count = _count(torch, kind, notes) if kind in COUNTED else 0
    device: torch.device | None = None
    if kind not in COUNTED:
        # any backend can answer this
        device = _attempt(lambda: torch.empty(0, device=canonical).device, notes)
    elif int(index or 0) < count:
        current = getattr(torch, kind).current_device
        device = _attempt(lambda: torch.device(kind, int(index or current())), notes)
    if device is None:
        what = f"{tag} is not here: {_census(torch, kind, count, notes)}"
        raise DeviceUnavailable(what, hint=_ELSEWHERE)
    return device


def _census(torch: Any, kind: str, count: int, notes: Sequence[str] = ()) -> str:
    """What is here of `kind`, and in parentheses why there is not more."""
    reasons = [*notes]
    if kind == "cuda":
        reasons += _cuda_reasons(torch, count)
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
    if not entries:
        return [f"CUDA_VISIBLE_DEVICES={visible} leaves no GPU visible"]
    logical = _series([f"cuda:{index}" for index in range(len(entries))])
    return [
        f"CUDA_VISIBLE_DEVICES={visible} makes physical {_series(entries)} the logical {logical}"
    ]


def _series(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
