"""Who wrote a checkpoint, as far as its content tells; what that framework loads, and which key
prefix may be taken off.

Told by the labels that a framework always leaves, never by file names. Sources: the saving code of
Lightning, Ultralytics, MMEngine, timm, fvcore, nanoGPT, Megatron-LM, DeepSpeed, torchtitan,
accelerate and peft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ckptconv.keys.wrappers import all_start
from ckptconv.pickles.nodes import Call, Node, mapping_pairs

Labels = Mapping[str, Node]


class Producer(NamedTuple):
    """A framework: its name, the labels at the root that only it leaves, where its version stands,
    and what it loads.

    `loads` are the paths of the state dict that it takes for the model in inference, ``.`` for what
    stands at the root; the first that is there. Empty: that depends. `beside` are the labels at the
    root under which it keeps further tensors of its own.
    """

    name: str
    matches: Callable[[Labels], bool]
    version: Callable[[Labels], Node] = lambda _: None
    loads: tuple[str, ...] = ()
    beside: frozenset[str] = frozenset()


def _has(*names: str) -> Callable[[Labels], bool]:
    return lambda labels: labels.keys() >= set(names)


def _inside(name: str, key: str) -> Callable[[Labels], Node]:
    return lambda labels: dict(_pairs(labels.get(name))).get(key)


def _is_ultralytics(labels: Labels) -> bool:
    return {"model", "ema", "updates", "train_args"} <= labels.keys() or any(
        type(value) is Call and value.name.startswith("ultralytics.") for value in labels.values()
    )


def _is_mm(labels: Labels) -> bool:
    if not {"state_dict", "meta"} <= labels.keys():
        return False
    versions = {"mmengine_version", "mmcv_version"}
    return "message_hub" in labels or not versions.isdisjoint(dict(_pairs(labels["meta"])))


def _is_accelerate(labels: Labels) -> bool:
    """accelerate names its random states so, by rank; a second model is called ``model_1``."""
    return "model" in labels and "model_1" not in labels and any(map(_RANDOM_STATES, labels))


_RANDOM_STATES = re.compile(r"random_states_\d+").fullmatch


_VERSION = "pytorch-lightning_version"

_LIGHTNINGS = frozenset(
    (
        *("callbacks", "loops", "current_model_state", "averaging_state"),
        *("hyper_parameters", "datamodule_hyper_parameters"),
    )
)

PRODUCERS = (
    Producer(
        "PyTorch Lightning",
        _has(_VERSION),
        lambda labels: labels[_VERSION],
        ("state_dict",),
        _LIGHTNINGS,
    ),
    Producer(
        "DeepSpeed",
        _has("ds_version"),
        lambda labels: labels["ds_version"],
        ("module",),
        frozenset(("frozen_param_fragments", "frozen_param_shapes", "param_shapes")),
    ),
    Producer("Ultralytics", _is_ultralytics, lambda labels: labels.get("version")),
    Producer(
        "MMEngine",
        _is_mm,
        _inside("meta", "mmengine_version"),
        ("state_dict",),
        frozenset(("ema_state_dict", "message_hub", "meta")),
    ),
    Producer("nanoGPT", _has("model", "model_args", "iter_num")),
    Producer(
        "Megatron-LM",
        _has("model", "checkpoint_version", "args"),
        lambda labels: labels["checkpoint_version"],
    ),
    Producer("fvcore (detectron2)", _has("model", "optimizer", "iteration")),
    # load_state_dict(use_ema=True) of timm/models/_helpers.py, the default of load_checkpoint
    Producer(
        "timm",
        _has("state_dict", "arch", "version", "epoch"),
        loads=("state_dict_ema", "state_dict"),
        beside=frozenset(("state_dict",)),
    ),
    Producer(
        "torchtitan", _has("optimizer", "lr_scheduler", "train_state", "dataloader"), loads=(".",)
    ),
    Producer("accelerate", _is_accelerate, loads=("model",)),
)
"""The frameworks that are told, the most particular first."""


def producer_in(root: Node) -> Producer | None:
    """The framework whose labels stand at the root of a tree."""
    labels = _labels(root)
    return next((producer for producer in PRODUCERS if producer.matches(labels)), None)


def producer_of(root: Node) -> str | None:
    """The framework that wrote a checkpoint, with its version if known; None when nothing tells."""
    labels = _labels(root)
    if (producer := producer_in(root)) is not None:
        version = producer.version(labels)
        return (
            f"{producer.name} {version}"
            if isinstance(version, (str, int, float))
            else producer.name
        )
    keys = list(labels)
    if all_start(keys, _PEFT) and any(".lora_" in key for key in keys):
        return "peft (LoRA adapter)"
    return None


def averages_weights(root: Node) -> bool:
    """Whether ``state_dict`` is the average, and the model's own weights stand beside it.

    So do Lightning's `WeightAveraging` (current_model_state) and MMEngine's `EMAHook`
    (ema_state_dict, against its name). Sources: lightning/pytorch/callbacks/weight_averaging.py,
    mmengine/hooks/ema_hook.py.
    """
    labels = _labels(root)
    return _has("state_dict", "current_model_state", "averaging_state")(labels) or (
        _is_mm(labels) and "ema_state_dict" in labels
    )


def is_bare(root: Node, path: str) -> bool:
    """Whether the state dict at a path of a tree is one of which its framework has taken DDP's
    wrapper off: Lightning saves that of its own module.
    """
    return path == "state_dict" and any(label == _VERSION for label, _ in _pairs(root))


def offered_prefix(root: Node, keys: Sequence[str]) -> str | None:
    """A prefix on every key that names what the framework wrapped around the model: offered, never
    taken off unasked.

    Lightning saves the module that holds the user's model under an attribute (``model.``), peft its
    own two wrappers.
    """
    if all_start(keys, _PEFT):
        return _PEFT
    first = keys[0].partition(".")[0] + "." if keys else ""
    lightning = any(label == _VERSION for label, _ in _pairs(root))
    is_attribute = not first.removesuffix(".").isdecimal()  # a number is a layer of Sequential
    return first if lightning and is_attribute and all_start(keys, first) else None


_PEFT = "base_model.model."


def _labels(root: Node) -> Labels:
    return {label: value for label, value in mapping_pairs(root) or () if type(label) is str}


def _pairs(node: Node) -> Sequence[tuple[Node, Node]]:
    return [(label, value) for label, value in mapping_pairs(node) or () if type(label) is str]
