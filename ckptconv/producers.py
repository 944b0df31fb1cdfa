"""Who wrote a checkpoint, as far as its content tells, and which key prefix its owner may want to take off.

Told by the labels that a framework always leaves, never by file names. Sources: the saving code of Lightning, Ultralytics,
MMEngine, timm, fvcore, nanoGPT, Megatron-LM, DeepSpeed and peft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckptconv.checkpoint import Checkpoint, StateDict, label_text
from ckptconv.nodes import Call, Node, mapping_pairs

Labels = Mapping[str, Node]


class Producer(NamedTuple):
    """A framework: its name, the labels at the root that only it leaves, and where its version stands."""

    name: str
    matches: Callable[[Labels], bool]
    version: Callable[[Labels], Node] = lambda _: None


def _has(*names: str) -> Callable[[Labels], bool]:
    return lambda labels: labels.keys() >= set(names)


def _inside(name: str, key: str) -> Callable[[Labels], Node]:
    return lambda labels: dict(_pairs(labels.get(name))).get(key)


def _is_ultralytics(labels: Labels) -> bool:
    return {"model", "ema", "updates", "train_args"} <= labels.keys() or any(
        type(value) is Call and value.name.startswith("ultralytics.") for value in labels.values()
    )


def _is_mm(labels: Labels) -> bool:
    return "state_dict" in labels and bool(dict(_pairs(labels.get("meta"))).keys() & {"mmengine_version", "mmcv_version"})


PRODUCERS = (
    Producer("PyTorch Lightning", _has("pytorch-lightning_version"), lambda labels: labels["pytorch-lightning_version"]),
    Producer("DeepSpeed", _has("ds_version"), lambda labels: labels["ds_version"]),
    Producer("Ultralytics", _is_ultralytics, lambda labels: labels.get("version")),
    Producer("MMEngine", _is_mm, _inside("meta", "mmengine_version")),
    Producer("nanoGPT", _has("model", "model_args", "iter_num")),
    Producer("Megatron-LM", _has("model", "checkpoint_version", "args"), lambda labels: labels["checkpoint_version"]),
    Producer("fvcore (detectron2)", _has("model", "optimizer", "iteration")),
    Producer("timm", _has("state_dict", "arch", "version", "epoch")),
)
"""The frameworks that are told, the most particular first."""


def producer_of(checkpoint: Checkpoint) -> str | None:
    """The framework that wrote a checkpoint, with its version where that is known; None when nothing tells."""
    labels = {label_text(label): value for label, value in _pairs(checkpoint.root)}
    for producer in PRODUCERS:
        if producer.matches(labels):
            version = producer.version(labels)
            return f"{producer.name} {version}" if isinstance(version, (str, int, float)) else producer.name
    keys = list(labels)
    if _all_start(keys, _PEFT) and any(".lora_" in key for key in keys):
        return "peft (LoRA adapter)"
    return None


def offered_prefix(checkpoint: Checkpoint, found: StateDict) -> str | None:
    """A prefix on every key that names what the framework wrapped around the model: offered, never taken off unasked.

    Lightning saves the module that holds the user's model under an attribute (``model.``), peft its own two wrappers.
    """
    if _all_start(found.keys, _PEFT):
        return _PEFT
    first = found.keys[0].partition(".")[0] + "." if found.keys else ""
    lightning = any(label == "pytorch-lightning_version" for label, _ in _pairs(checkpoint.root))
    return first if lightning and _all_start(found.keys, first) else None


_PEFT = "base_model.model."


def _all_start(keys: Sequence[str], prefix: str) -> bool:
    return bool(keys) and all(key.startswith(prefix) and len(key) > len(prefix) for key in keys)


def _pairs(node: Node) -> Sequence[tuple[Node, Node]]:
    return [(label, value) for label, value in mapping_pairs(node) or () if type(label) is str]
