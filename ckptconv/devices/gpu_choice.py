"""Which GPUs a program should see: those with the most free memory first, as CUDA_VISIBLE_DEVICES
names them.

nvidia-smi alone is asked, never torch. What is chosen lies within a CUDA_VISIBLE_DEVICES that is
already set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Literal

from ckptconv.devices.host import visible_indices
from ckptconv.devices.nvidia_smi import Gpu, ask_gpus
from ckptconv.support.errors import DeviceUnavailable, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text

Shell = Literal["sh", "fish", "powershell", "cmd"]

SECONDS = 15.0
"""Without its persistence daemon nvidia-smi wakes every GPU first: seconds on a host of eight."""

ORDER = "PCI_BUS_ID"
"""The order in which CUDA numbers GPUs as nvidia-smi does; its own is FASTEST_FIRST."""

_SETTERS: dict[Shell, Callable[[str, str], str]] = {
    "sh": lambda name, value: f"export {name}={value}",
    "fish": lambda name, value: f"set -gx {name} {value}",
    "powershell": lambda name, value: f"$env:{name} = '{value}'",
    "cmd": lambda name, value: f'set "{name}={value}"',
}
# What a shell may be given to evaluate: an index, or a UUID as nvidia-smi writes it
_SAFE = re.compile(r"[0-9]+|GPU-[0-9A-Fa-f]+(?:-[0-9A-Fa-f]+)+").fullmatch


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """`gpus`, best first (none: none is visible), as `visible` names them; `notes` say why."""

    gpus: tuple[Gpu, ...]
    visible: str
    notes: tuple[str, ...]


def choose_gpus(*, min_free: int | None = None, count: int | None = None) -> GpuChoice:
    """The visible GPUs by free memory, most first, equals by index; those that do not tell it come
    last.

    With `min_free` (bytes) only those that have it, with `count` only so many. GPUs in MIG mode and
    broken ones are passed over. Raises `DeviceUnavailable` when nvidia-smi fails, when
    CUDA_VISIBLE_DEVICES cannot be followed, when GPUs are visible and none will do, and when there
    are fewer than was asked for.
    """
    answer = ask_gpus(partitions=True, seconds=SECONDS)
    if answer.problem is not None:
        hint = "see what is wrong with: nvidia-smi"
        raise DeviceUnavailable(printable(answer.problem), hint=hint)
    listed = answer.gpus
    seen, notes = _visible(listed)
    notes += [f"nvidia-smi says: {printable(remark)}" for remark in answer.remarks]
    passed = {gpu.physical: why for gpu in seen if (why := _unfit(gpu, min_free))}
    # `seen` is in the order of the indices
    fit = [gpu for gpu in seen if gpu.physical not in passed]
    # 1 stands behind all, for free memory counts down from 0
    fit.sort(key=lambda gpu: 1 if gpu.free is None else -gpu.free)
    if (count or min_free or passed) and len(fit) < (count or 1):
        raise _too_few(len(fit), len(seen), min_free, count, [*passed.values(), *notes])
    chosen = tuple(fit[:count])
    return GpuChoice(chosen, _names(chosen, listed), (*passed.values(), *notes))


def settings(choice: GpuChoice, shell: Shell) -> list[str]:
    """The lines that a shell evaluates to have the choice; none if there is nothing to choose."""
    if not choice.gpus:
        return []
    setter = _SETTERS[shell]
    return [setter("CUDA_DEVICE_ORDER", ORDER), setter("CUDA_VISIBLE_DEVICES", choice.visible)]


def _visible(listed: Sequence[Gpu]) -> tuple[list[Gpu], list[str]]:
    """The GPUs that the environment leaves visible, by index, and a note where it leaves none."""
    if not listed:
        return [], ["this host has no NVIDIA GPU"]
    env = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = sorted(listed, key=lambda gpu: gpu.physical or 0)
    if env is None:
        return shown, []
    set_to = f"CUDA_VISIBLE_DEVICES={printable(env)}"
    if env.strip().startswith("MIG-"):
        what = f"{set_to} names a MIG instance, whose memory nvidia-smi does not list"
        raise DeviceUnavailable(what, hint="it stays as it is")
    indices = visible_indices(env, listed)
    _check_order(set_to, env, indices, listed)
    shown = [gpu for gpu in shown if gpu.physical in indices]
    if not shown:
        return [], [f"{set_to} leaves no GPU visible"]
    return shown, []


def _check_order(set_to: str, env: str, indices: Sequence[int], listed: Sequence[Gpu]) -> None:
    """Refuse indices that CUDA may count unlike nvidia-smi: the order decides which are meant."""
    are_alike = len({gpu.name for gpu in listed}) == 1
    if env.startswith("GPU-") or not 0 < len(indices) < len(listed) or are_alike:
        return
    if os.environ.get("CUDA_DEVICE_ORDER") != ORDER:
        counts = f"{set_to} counts the GPUs fastest first, nvidia-smi by PCI bus"
        hint = f"set CUDA_DEVICE_ORDER={ORDER} if it counts as nvidia-smi does, or name UUIDs"
        raise DeviceUnavailable(f"{counts}, and they are not all alike", hint=hint)


def _unfit(gpu: Gpu, min_free: int | None) -> str | None:
    if gpu.partitioned:
        return f"GPU {gpu.physical} is in MIG mode; name its instances yourself (nvidia-smi -L)"
    if gpu.trouble is not None:
        return f"GPU {gpu.physical} says {printable(gpu.trouble)} instead of its memory"
    if min_free and gpu.free is None:
        return f"GPU {gpu.physical} does not report its free memory"
    if min_free and gpu.free is not None and gpu.free < min_free:
        return f"GPU {gpu.physical} has {gpu.free >> 20} MiB free"
    return None


def _too_few(
    fit: int, seen: int, min_free: int | None, count: int | None, why: Sequence[str]
) -> DeviceUnavailable:
    wanted = count_text(count or 1, "GPU")
    room = f" with {-(-min_free >> 20)} MiB free" if min_free else ""
    what = f"{wanted}{room} wanted, but {fit or 'none'} of {seen} can be used: {'; '.join(why)}"
    if not why:
        what = f"{wanted}{room} wanted, but only {seen} can be seen"
    return DeviceUnavailable(what, hint="nothing was chosen")


def _names(chosen: Sequence[Gpu], listed: Sequence[Gpu]) -> str:
    """Indices; UUIDs where CUDA may count otherwise: beside a GPU in MIG mode, or where
    nvidia-smi's numbers have gaps.
    """
    has_gaps = [gpu.physical for gpu in listed] != list(range(len(listed)))
    odd = has_gaps or any(gpu.partitioned for gpu in listed)
    names = [str(gpu.uuid if odd else gpu.physical) for gpu in chosen]
    for name in names:
        if not _SAFE(name):
            what = f"nvidia-smi names a GPU {name!r}, which is not a UUID"
            raise DeviceUnavailable(what, hint="nothing was chosen")
    return ",".join(names)
