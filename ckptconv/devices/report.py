"""What devices a host has, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptconv.devices.gpu_choice import ORDER, GpuChoice
from ckptconv.devices.host import Gpu, Host
from ckptconv.support.errors import printable
from ckptconv.support.rows import Row
from ckptconv.support.text import count_text, size_text


def host_lines(host: Host) -> Iterator[Row]:
    """What a host has, as rows."""
    for gpu in host.gpus:
        yield Row(_gpu_name(gpu), _gpu_text(gpu))
    if host.mps:
        yield Row("mps", "Apple GPU")
    for index in range(host.xpu):
        yield Row(f"xpu:{index}", "Intel GPU")
    yield Row("cpu", "always here")
    shown = "empty: every GPU is hidden"
    if host.visible is None:
        shown = "not set: every GPU is visible"
    elif host.visible:
        shown = repr(host.visible)
    yield Row("CUDA_VISIBLE_DEVICES", shown)
    yield Row(
        "torch",
        f"{host.torch}, sees {count_text(host.cuda, 'CUDA device')}"
        if host.torch
        else "not installed here",
    )
    for note in host.notes:
        yield Row("note", printable(note), "warning")


def _gpu_name(gpu: Gpu) -> str:
    return "hidden" if gpu.logical is None else f"cuda:{gpu.logical}"


def _gpu_text(gpu: Gpu) -> str:
    parts = [printable(gpu.name)]
    if gpu.physical is not None:
        parts.append(f"physical {gpu.physical}")
    if gpu.free is not None and gpu.total is not None:
        parts.append(f"{size_text(gpu.free)} free of {size_text(gpu.total)}")
    return ", ".join(parts)


def host_document(host: Host, best: str) -> dict[str, Any]:
    """What a host has as JSON values; `best` is what `--device auto` would choose."""
    return {
        "gpus": [
            {"device": None if gpu.logical is None else f"cuda:{gpu.logical}", **_gpu_document(gpu)}
            for gpu in host.gpus
        ],
        "cuda_visible_devices": host.visible,
        "torch": host.torch,
        "cuda_devices": host.cuda,
        "mps": host.mps,
        "xpu_devices": host.xpu,
        "auto": best,
        "notes": list(host.notes),
    }


def choice_document(choice: GpuChoice) -> dict[str, Any]:
    """The chosen GPUs as JSON values; where there is nothing to choose, the variables are null."""
    return {
        "cuda_visible_devices": choice.visible if choice.gpus else None,
        "cuda_device_order": ORDER if choice.gpus else None,
        "gpus": [_gpu_document(gpu) for gpu in choice.gpus],
        "notes": list(choice.notes),
    }


def _gpu_document(gpu: Gpu) -> dict[str, Any]:
    return {
        "physical": gpu.physical,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "total_bytes": gpu.total,
        "free_bytes": gpu.free,
    }
