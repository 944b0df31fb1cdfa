"""Who wrote a checkpoint, as far as its content tells; what that framework loads, and which key
prefix may be taken off.

Told by the labels that a framework always leaves, never by file names. Sources: the saving code of
Lightning, Ultralytics, MMEngine, timm, fvcore, nanoGPT, Megatron-LM, DeepSpeed, torchtitan,
accelerate and peft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ckptconv.keys.rules import all_start
from ckptconv.pickles.nodes import Call, Node, mapping_pairs
from ckptconv.support.records import NamedTuple
from ckptconv.tree.walk import kinds_in

Labels = Mapping[str, Node]


class Producer(NamedTuple):
    """A framework: its name, and the labels at the root that only it leaves.

    `version` is the path of its version. `loads` are the paths of the state dict that it takes for
    the model in inference, ``.`` for what stands at the root; the first that is there. Empty: that
    depends. `beside` are the labels at the root under which it keeps further tensors of its own.
    """

    name: str
    matches: Callable[[Labels], bool]
    version: str = ""
    loads: tuple[str, ...] = ()
    beside: frozenset[str] = frozenset()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _has(names: str) -> Callable[[Labels], bool]:
    wanted = _names(names)
    return lambda labels: labels.keys() >= wanted


def _is_ultralytics(labels: Labels) -> bool:
    classes = [value.name for value in labels.values() if type(value) is Call]
    is_theirs = any(name.startswith("ultralytics.") for name in classes)
    return is_theirs or _names("model ema updates train_args") <= labels.keys()


def _is_mm(labels: Labels) -> bool:
    if not {"state_dict", "meta"} <= labels.keys():
        return False
    versions = {"mmengine_version", "mmcv_version"}
    return "message_hub" in labels or not versions.isdisjoint(_labels(labels["meta"]))


def _is_accelerate(labels: Labels) -> bool:
    """accelerate names its random states so, by rank; a second model is called ``model_1``."""
    return "model" in labels and "model_1" not in labels and any(map(_RANDOM_STATES, labels))


_RANDOM_STATES = re.compile(r"random_states_\d+").fullmatch


_VERSION = "pytorch-lightning_version"

_LIGHTNINGS = """
    callbacks loops current_model_state averaging_state hyper_parameters datamodule_hyper_parameters
"""
_FROZEN = "frozen_param_fragments frozen_param_shapes param_shapes"

PRODUCERS = (
    Producer("PyTorch Lightning", _has(_VERSION), _VERSION, ("state_dict",), _names(_LIGHTNINGS)),
    Producer("DeepSpeed", _has("ds_version"), "ds_version", ("module",), _names(_FROZEN)),
    Producer("Ultralytics", _is_ultralytics, "version"),
    Producer(
        "MMEngine",
        _is_mm,
        "meta.mmengine_version",
        ("state_dict",),
        _names("ema_state_dict message_hub meta"),
    ),
    Producer("nanoGPT", _has("model model_args iter_num")),
    Producer("Megatron-LM", _has("model checkpoint_version args"), "checkpoint_version"),
    Producer("fvcore (detectron2)", _has("model optimizer iteration")),
    # load_state_dict(use_ema=True) of timm/models/_helpers.py, the default of load_checkpoint
    Producer(
        "timm",
        _has("state_dict arch version epoch"),
        loads=("state_dict_ema", "state_dict"),
        beside=_names("state_dict"),
    ),
    Producer("torchtitan", _has("optimizer lr_scheduler train_state dataloader"), loads=(".",)),
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
    producer = producer_in(root)
    if producer is not None:
        *around, last = producer.version.split(".")
        for label in around:
            labels = _labels(labels.get(label))
        version = labels.get(last)
        if last and isinstance(version, (str, int, float)):
            return f"{producer.name} {version}"
        return producer.name
    keys = list(labels)
    if all_start(keys, _PEFT) and any(".lora_" in key for key in keys):
        return LORA_OF_PEFT
    return None


def averages_weights(root: Node) -> bool:
    """Whether ``state_dict`` is the average, and the model's own weights stand beside it.

    So do Lightning's `WeightAveraging` (current_model_state) and MMEngine's `EMAHook`
    (ema_state_dict, against its name). Sources: lightning/pytorch/callbacks/weight_averaging.py,
    mmengine/hooks/ema_hook.py.
    """
    labels = _labels(root)
    is_lightnings = _has("state_dict current_model_state averaging_state")(labels)
    return is_lightnings or (_is_mm(labels) and "ema_state_dict" in labels)


def is_bare(root: Node, path: str) -> bool:
    """Whether the state dict at a path of a tree is one of which its framework has taken DDP's
    wrapper off: Lightning saves that of its own module.
    """
    return path == "state_dict" and _VERSION in _labels(root)


def offered_prefix(root: Node, keys: Sequence[str]) -> str | None:
    """A prefix on every key that names what the framework wrapped around the model: offered, never
    taken off unasked.

    Lightning saves the module that holds the user's model under an attribute (``model.``), which
    may be in DDP (``model.module.``), peft its own two wrappers.
    """
    if all_start(keys, _PEFT):
        return _PEFT
    if not keys or _VERSION not in _labels(root):
        return None
    name = keys[0].partition(".")[0]
    for prefix in (f"{name}.{_DDP}", f"{name}."):
        if not name.isdecimal() and all_start(keys, prefix):  # a number: a layer of Sequential
            return prefix
    return None


LORA_OF_PEFT = "peft (LoRA adapter)"
"""The producer of an adapter, which has no weights of the model itself."""

_PEFT = "base_model.model."
_DDP = "module."


def _labels(root: Node) -> Labels:
    pairs = mapping_pairs(root) or ()
    if kinds_in(pairs, 0) == {str}:
        return dict(pairs)
    return {label: value for label, value in pairs if type(label) is str}
