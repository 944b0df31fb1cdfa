"""What devices a host has, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptconv.devices.gpu_choice import ORDER
from ckptconv.devices.host import Host
from ckptconv.devices.nvidia_smi import Gpu
from ckptconv.support.errors import printable
from ckptconv.support.report import Fields, Row, note_rows
from ckptconv.support.text import count_text, size_text


def host_lines(host: Host) -> Iterator[Row]:
    """What a host has, as rows."""
    for gpu in host.gpus:
        yield Row(_device(gpu.logical) or "hidden", _gpu_text(gpu))
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
    torch = f"{host.torch}, sees {count_text(host.cuda, 'CUDA device')}"
    yield Row("torch", torch if host.torch else "not installed here")
    yield from note_rows(host.notes)


def _device(logical: int | None) -> str | None:
    return None if logical is None else f"cuda:{logical}"


def _gpu_text(gpu: Gpu) -> str:
    parts = [printable(gpu.name)]
    if gpu.physical is not None:
        parts.append(f"physical {gpu.physical}")
    if gpu.free is not None and gpu.total is not None:
        parts.append(f"{size_text(gpu.free)} free of {size_text(gpu.total)}")
    return ", ".join(parts)


_GPU = "physical name uuid total_bytes=total free_bytes=free"
HOST = Fields(
    "gpus cuda_visible_devices=visible torch cuda_devices=cuda mps xpu_devices=xpu",
    gpus=Fields(f"device=logical {_GPU}", device=_device),
)
"""The document of a host, but for what `--device auto` would choose, and the notes."""
CHOICE = Fields(
    "cuda_visible_devices=. cuda_device_order=. gpus notes",
    cuda_visible_devices=lambda choice: choice.visible if choice.gpus else None,
    cuda_device_order=lambda choice: ORDER if choice.gpus else None,
    gpus=Fields(_GPU),
)
"""The document of the chosen GPUs; where there is nothing to choose, the variables are null."""


def host_document(host: Host, best: str) -> dict[str, Any]:
    """What a host has as JSON values; `best` is what `--device auto` would choose."""
    return {**HOST.of(host), "auto": best, "notes": list(host.notes)}
