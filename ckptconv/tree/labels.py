"""What the labels of a checkpoint's parts say, compared by whole words: training states, numbers of
the training, models; and who wrote the checkpoint, as far as they tell.

`upscaler`, `optimized_model` and `random_encoder` are names of networks. docs/state-dicts.md states
the rule. A framework is told by the labels that it always leaves, never by file names. Sources: the
saving code of Lightning, Ultralytics, MMEngine, timm, fvcore, nanoGPT, Megatron-LM, DeepSpeed,
torchtitan, accelerate and peft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ckptconv.keys.rules import all_start
from ckptconv.pickles.nodes import Call, Node, mapping_pairs
from ckptconv.support.records import NamedTuple

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+").findall
_LONGEST = 300  # characters of a label that is a name; a longer one names nothing


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STATES = _set("""
    optimizer optimizers optimiser optimisers optim optims scheduler schedulers rng rngs
""")
# What each of `_STATES`, and "random", holds. Hardly any label does, and to look for it takes a
# tenth of the time of splitting the label into words
_HAS_STATES = re.compile("optim|schedul|rng|random", re.IGNORECASE).search
_GENERATORS = _set("generator generators random rng seed cpu cuda gpu mps xpu torch")
_TRAILING = _set("""
    state states dict dicts all list cpu cuda gpu mps xpu npu hpu xla torch numpy np python
""")
_NUMBERS = _set("""
    loss losses nll elbo acc accuracy best metric metrics fitness score scores reward rewards err
    error errors mse rmse mae wer cer bleu dice iou miou map ap f1 auc prec precision recall top
    psnr ssim fid lpips perplexity ppl val epoch epochs step steps iter iters iteration iterations
    update updates n_averaged count decay lr time elapsed seed token tokens ntokens samples progress
    history hist grad amp
""")
_OF_RANKS = _set("loader loaders dataloader dataloaders sampler samplers")
_STATE = _set("state states")
_SCALERS = _set("scaler scalers")
_OF_MODULES = _set("weight bias running")
_HAS_MODULES = re.compile("weight|bias|running", re.IGNORECASE).search  # as `_HAS_STATES`

WHOLE = _set("""
    state_dict model_state_dict model model_state net network module weights params params_ema ema
    ema_state_dict model_ema ema_model state_dict_ema
""")
"""Labels under which training scripts keep the state dict of a whole model."""

USUAL = WHOLE | _set("""
    generator discriminator netG netD G D encoder decoder backbone head teacher student actor critic
    policy
""")
"""Labels under which training scripts keep a state dict."""


def words(label: str) -> tuple[str, ...]:
    """The words of a label, in small letters: ``EMAModel_2`` is ema, model, 2."""
    return tuple(word.lower() for word in _WORD(label)) if len(label) <= _LONGEST else ()


def names_training_state(label: str) -> bool:
    """Whether a label names an optimizer, scheduler or random state, by its last telling word."""
    return _HAS_STATES(label) is not None and _ends_in_state(label)


@lru_cache(maxsize=4096)
def _ends_in_state(label: str) -> bool:
    found = words(label)
    if "and" in found:  # model_and_optimizer
        return False
    last = _last(found)
    return last in _STATES or (
        last == "random" and (len(found) == 1 or not _STATE.isdisjoint(found))
    )


def names_generator(label: str) -> bool:
    """Whether a label is one under which a random state may be kept: ``generator_state``, ``cuda``.
    It is that of networks too: the value tells.
    """
    return not _GENERATORS.isdisjoint(words(label))


def names_rank_state(label: str) -> bool:
    """Whether a label names what each rank has for itself: a random state, a data loader's."""
    return names_training_state(label) or _last(words(label)) in _OF_RANKS


def _last(found: tuple[str, ...]) -> str | None:
    """The last word that says anything."""
    return next(
        (word for word in reversed(found) if word not in _TRAILING and not word.isdigit()), None
    )


@lru_cache(maxsize=4096)
def names_number(label: str) -> bool:
    """Whether a label names a number of the training: a loss, an accuracy, a count of steps."""
    return label.lower() in _NUMBERS or not _NUMBERS.isdisjoint(words(label))


@lru_cache(maxsize=4096)
def names_scaler(label: str) -> bool:
    """Whether a label names a scaler: of gradients, or of the data."""
    return not _SCALERS.isdisjoint(words(label))


@lru_cache(maxsize=4096)
def names_average(label: str) -> bool:
    """Whether a label names an exponential moving average: ``state_dict_ema``, ``EMACallback``."""
    return "ema" in words(label)


_BOUNDS = _set("""
    mask masks masked causal alibi min max minimum maximum bound bounds limit limits
""")


def may_be_infinite(key: str) -> bool:
    """Whether a key names a mask or a bound, in which infinity is meant: ``attn.mask``."""
    return not _BOUNDS.isdisjoint(words(key.rpartition(".")[2]))


def looks_like_a_module(key: str) -> bool:
    """Whether a key is of a module: with a dot (no path), or with weight, bias or running."""
    if "." in key and "/" not in key:
        return True
    return _HAS_MODULES(key) is not None and not _OF_MODULES.isdisjoint(words(key))


# ------------------------------------------------------------------------- who wrote a checkpoint


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


def _has(names: str) -> Callable[[Labels], bool]:
    wanted = _set(names)
    return lambda labels: labels.keys() >= wanted


def _is_ultralytics(labels: Labels) -> bool:
    classes = [value.name for value in labels.values() if type(value) is Call]
    is_theirs = any(name.startswith("ultralytics.") for name in classes)
    return is_theirs or _set("model ema updates train_args") <= labels.keys()


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
    Producer("PyTorch Lightning", _has(_VERSION), _VERSION, ("state_dict",), _set(_LIGHTNINGS)),
    Producer("DeepSpeed", _has("ds_version"), "ds_version", ("module",), _set(_FROZEN)),
    Producer("Ultralytics", _is_ultralytics, "version"),
    Producer(
        "MMEngine",
        _is_mm,
        "meta.mmengine_version",
        ("state_dict",),
        _set("ema_state_dict message_hub meta"),
    ),
    Producer("nanoGPT", _has("model model_args iter_num")),
    Producer("Megatron-LM", _has("model checkpoint_version args"), "checkpoint_version"),
    Producer("fvcore (detectron2)", _has("model optimizer iteration")),
    # load_state_dict(use_ema=True) of timm/models/_helpers.py, the default of load_checkpoint
    Producer(
        "timm",
        _has("state_dict arch version epoch"),
        loads=("state_dict_ema", "state_dict"),
        beside=_set("state_dict"),
    ),
    Producer("torchtitan", _has("optimizer lr_scheduler train_state dataloader"), loads=(".",)),
    Producer("accelerate", _is_accelerate, loads=("model",)),
)
"""The frameworks that are told, the most particular first."""


def producer_in(root: Node) -> Producer | None:
    """The framework whose labels stand at the root of a tree."""
    return _producer(_labels(root))


def _producer(labels: Labels) -> Producer | None:
    return next((producer for producer in PRODUCERS if producer.matches(labels)), None)


def producer_of(root: Node) -> str | None:
    """The framework that wrote a checkpoint, with its version if known; None when nothing tells."""
    labels = _labels(root)
    producer = _producer(labels)
    if producer is not None:
        *around, last = producer.version.split(".")
        for label in around:
            labels = _labels(labels.get(label))
        version = labels.get(last)
        if last and isinstance(version, (str, int, float)):
            return f"{producer.name} {version}"
        return producer.name
    keys = [label for label, _ in mapping_pairs(root) or () if type(label) is str]
    if all_start(keys, PEFT_PREFIX) and any(".lora_" in key for key in keys):
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
    if all_start(keys, PEFT_PREFIX):
        return PEFT_PREFIX
    if not keys or _VERSION not in _labels(root):
        return None
    name = keys[0].partition(".")[0]
    for prefix in (f"{name}.{_DDP}", f"{name}."):
        if not name.isdecimal() and all_start(keys, prefix):  # a number: a layer of Sequential
            return prefix
    return None


LORA_OF_PEFT = "peft (LoRA adapter)"
"""The producer of an adapter, which has no weights of the model itself."""

PEFT_PREFIX = "base_model.model."
_DDP = "module."


def _labels(root: Node) -> Labels:
    """What may tell of a framework: no label of theirs has a dot, and the keys of a model, of which
    there may be a million, nearly all do. Of whatever stands under these, a class may tell.
    """
    return {
        label: value
        for label, value in mapping_pairs(root) or ()
        if type(label) is str and ("." not in label or type(value) is Call)
    }
