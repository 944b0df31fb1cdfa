"""What a LoRA adapter says: which matrices go to which module, and by how much they are scaled.

The ends of the keys tell what a tensor is, in all conventions: peft, kohya and LyCORIS, diffusers
old and new, ComfyUI. `tree.lora_names` finds the weights that modules mean. Facts: peft 0.21
(utils/save_and_load.py, tuners/lora), lycoris-lora 4.1 (functional), diffusers 0.42 (loaders,
utils/peft_utils.py); each Apache-2.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, TypeVar

from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import MOST_WAYS, first_few, most_ways
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.schemes.base import json_object
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.labels import PEFT_PREFIX as PEFT_PREFIX
from ckptconv.tree.model_config import home_of, json_in
from ckptconv.tree.optimizer_states import read_number

CONFIG = "adapter_config.json"

LEAVE_OUT_FIRST = "leave it out first: ckptconv convert ADAPTER PART --exclude GLOB"

Parts = dict[str, TensorRef]
"""The tensors of one module, by what they are."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Config:
    """What ``adapter_config.json`` of peft says that changes the merged values. `rank` and `alpha`
    are those of modules that no pattern names; None: nothing says them. `is_rounded`: peft rounds
    the delta of linear layers too before it adds it (MiCA).
    """

    rank: int | None = None
    alpha: float | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilized: bool = False
    is_transposed: bool = False
    is_rounded: bool = False
    parameters: tuple[str, ...] = ()
    whole_modules: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def rank_of(self, module: str) -> int | None:
        """The rank that it names for a module."""
        return _by_pattern(self.ranks, module, self.rank)

    def alpha_of(self, module: str) -> float | None:
        """The alpha that it names for a module."""
        return _by_pattern(self.alphas, module, self.alpha)

    def rows_of(self, module: str) -> tuple[int, ...] | None:
        """The rows of an embedding that it has trained; None where it does not say one answer."""
        found = {rows for name, rows in self.tokens.items() if module.endswith(name)}
        return found.pop() if len(found) == 1 else None

    def scale_of(self, module: str, rank: int) -> float:
        """What the product for a module is multiplied by."""
        alpha = self.alpha_of(module)
        if alpha is None:
            return 1.0
        return float(alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: the parts of each module, tensors that replace those of the model, and `configs`
    by the starts of the names of the modules that they are for.

    `checkpoint` is where it was read; `keys` has a key for each part of each module, for messages.
    """

    checkpoint: Checkpoint
    modules: Mapping[str, Parts]
    whole: Mapping[str, TensorRef]
    configs: Mapping[str, Config]
    keys: Mapping[str, Mapping[str, str]]

    def first_key(self, module: str) -> str:
        """The key of the first part of a module."""
        return next(iter(self.keys[module].values()))

    def config_of(self, module: str) -> tuple[Config, str]:
        """The config for a module, and the module's name in it."""
        fitting = [start for start in self.configs if module.startswith(start)]
        if not fitting:
            return Config(), module
        start = max(fitting, key=len)
        return self.configs[start], module.removeprefix(start)


_PEFT = re.compile(
    r"(?P<module>.+)\.(?P<role>lora_(?:embedding_)?[AB]|lora_magnitude_vector)"
    r"(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_ROLES = {
    "lora_A": "down",
    "lora_B": "up",
    "lora_embedding_A": "embedding_down",
    "lora_embedding_B": "embedding_up",
    "lora_magnitude_vector": "magnitude",
}
LIKE_KOHYA = {
    "down": ".lora_down.weight",
    "up": ".lora_up.weight",
    "mid": ".lora_mid.weight",
    "alpha": ".alpha",
    "magnitude_of_any": ".dora_scale",
    "diff": ".diff",
    "bias_diff": ".diff_b",
    "weight": ".set_weight",
    **{f"hada_{name}": f".hada_{name}" for name in ["w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"]},
    **{
        f"lokr_{name}": f".lokr_{name}"
        for name in ["w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"]
    },
}
"""How the keys of kohya and LyCORIS end, by what the tensor is."""
_ENDS = {
    **{end: role for role, end in LIKE_KOHYA.items()},
    # diffusers, before it used peft
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    # rows that peft trains (trainable_token_indices)
    ".token_adapter.trainable_tokens_delta": "tokens",
    # LyCORIS has other words for the deltas of norms
    ".w_norm": "diff",
    ".b_norm": "bias_diff",
}


def role_of(key: str) -> tuple[str, str, str] | None:
    """The module, the role and the name of the adapter in a key; None for any other key.

    >>> role_of("base_model.model.lm_head.lora_A.default.weight")
    ('base_model.model.lm_head', 'down', 'default')
    >>> role_of("lora_unet_mid_block_attn.alpha")
    ('lora_unet_mid_block_attn', 'alpha', '')
    """
    found = _PEFT.fullmatch(key)
    if found:
        role = _ROLES[found["role"]]
        if found["leaf"] == "bias":
            if role != "up":  # peft's lora_bias is one of lora_B alone
                return None
            role = "bias"
        return found["module"], role, found["adapter"] or ""
    for end, role in _ENDS.items():
        if key.endswith(end) and len(key) > len(end):
            # the names that layers had within an attention processor of diffusers
            module = key.removesuffix(end)
            if module.endswith(".processor.to_out"):
                module = f"{module}.0"
            return module.replace(".processor.to_", ".to_"), role, ""
    return None


def read_adapter(checkpoint: Checkpoint) -> Adapter:
    """The adapter in a checkpoint, with what the config beside it says.

    Raises `RefusedObject` for a key that no adapter has and for a kind of adapter that is not
    known, `MalformedCheckpoint` for a config that contradicts itself.
    """
    checkpoint.refuse_part()
    found = checkpoint.state_dict()
    tensors = dict(found.tensors())
    others = [key for key in found.keys if key not in tensors]
    if others:
        raise RefusedObject("is not a tensor, as all in an adapter are", where=others[0])
    is_peft = any(key.startswith(PEFT_PREFIX) for key in tensors)
    if not any(map(role_of, found.keys)):
        _configs(checkpoint, is_peft=is_peft)  # says of which kind it is, where it is of peft
        listed = first_few(found.keys, 3)
        what = f"has no key of an adapter, such as lora_A.weight or lora_down.weight: {listed}"
        raise RefusedObject(what, path=checkpoint.path, hint="the base comes first, then adapters")
    modules: dict[str, Parts] = {}
    whole: dict[str, TensorRef] = {}
    keys: dict[str, dict[str, str]] = {}
    adapters: set[str] = set()
    for key, ref in tensors.items():
        told = role_of(key)
        if told is None and not key.startswith(PEFT_PREFIX):
            what = "is not a key of an adapter that is known here"
            raise RefusedObject(what, where=key, hint=LEAVE_OUT_FIRST)
        if told is None and _COPIES.sub(".", key) in tensors.keys() - {key}:
            continue
        if told is None:  # what peft's modules_to_save holds, under its name in the model
            name = _WITHIN.sub("", key.removeprefix(PEFT_PREFIX))
            if name in whole:
                what = f"is {printable(name)} of the model, as another key is"
                raise RefusedObject(what, where=key, hint=LEAVE_OUT_FIRST)
            whole[name] = ref
            continue
        module, role, adapter = told
        adapters.add(adapter)
        said = keys.setdefault(module, {})
        if role in said:
            what = f"says again what {said[role]} says"
            raise RefusedObject(what, where=key, hint="one file with several adapters: split it")
        modules.setdefault(module, {})[role] = ref
        said[role] = key
    named = sorted(adapters - {""})  # an alpha, and the keys of most programs, name none
    if len(named) > 1:
        raise RefusedObject(
            f"holds several adapters: {first_few(named, 4)}",
            path=checkpoint.path,
            hint="take one of them first: ckptconv convert ADAPTER ONE --include",
        )
    return Adapter(checkpoint, modules, whole, _configs(checkpoint, is_peft=is_peft), keys)


# With bias="all", peft writes the bias of a module to save three times, and reads the plain one
_COPIES = re.compile(r"\.(?:original_module|modules_to_save(?:\.default)?)\.(?=(?:.+\.)?bias$)")

# What peft puts into the names of what it wraps
_WITHIN = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")


def number_in(ref: TensorRef, key: str) -> float:
    """The number that a tensor of one element holds, such as an alpha. Raises `MalformedCheckpoint`
    where it is not one, or is not finite.
    """
    number = read_number(ref)
    if number is None:
        what = f"is {ref.dtype.name} {list(ref.shape)} where one number is expected"
        raise MalformedCheckpoint(what, where=key)
    if not math.isfinite(number):
        raise MalformedCheckpoint(f"is {number}, and not a finite number", where=key)
    return float(number)


# ------------------------------------------------------------------------------------- its config

_KINDS = ("LORA", "LOHA", "LOKR")
# Fields by which peft computes something else than a product, if they are set
_NOT_MERGED = (
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "layer_replication",
    "arrow_config",
    "monteclora_config",
    "kasa_config",
    "velora_config",
)

# Of `init_lora_weights`, what leaves the base as it is: with others, such as `pissa`, peft changes
# the weights of the base too when it loads such an adapter
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def config_of_peft(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ``adapter_config.json`` beside an adapter of peft, as it is; empty for any other one."""
    if any(key.startswith(PEFT_PREFIX) for key in checkpoint.state_dict().keys):
        home = home_of(checkpoint)
        if home is not None:
            return json_in(home, CONFIG)
    return {}


def _configs(checkpoint: Checkpoint, *, is_peft: bool) -> dict[str, Config]:
    """The configs by what stands before the names of the modules that they are for."""
    text = checkpoint.metadata.get(OF_DIFFUSERS)
    if text is not None and not is_peft:
        try:
            return _by_component(text)
        except CheckpointError as error:
            raise error.at(where=OF_DIFFUSERS) from None
    is_of_peft = is_peft or any(map(_PEFT.fullmatch, checkpoint.state_dict().keys))
    home = home_of(checkpoint)
    if is_of_peft and home is not None and (given := json_in(home, CONFIG)):
        try:
            return {PEFT_PREFIX if is_peft else "": _read(given)}
        except CheckpointError as error:
            raise error.at(path=home.child(CONFIG).path) from None
    if is_peft:
        what = f"needs {CONFIG} beside it, which says by how much its products are scaled"
        raise RefusedObject(what, path=checkpoint.path)
    return {}


OF_DIFFUSERS = "lora_adapter_metadata"
"""The entry of the metadata in which diffusers keeps the config of each component of a pipeline,
its name before each field: ``unet.r``.
"""


def _by_component(text: str) -> dict[str, Config]:
    given = json_object(text)
    if given is None:
        raise MalformedCheckpoint("is not a JSON object")
    fields: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        component, dot, rest = name.rpartition(".")
        fields.setdefault(component + dot, {})[rest] = value
    return {start: _read(each) for start, each in fields.items()}


def _read(given: Mapping[str, Any]) -> Config:
    kind = given.get("peft_type", "LORA")
    if kind not in _KINDS:
        what = f"says peft_type {printable(kind)}, and not one of {', '.join(_KINDS)}"
        raise RefusedObject(what, hint="merge it with peft")
    for name in _NOT_MERGED:
        if given.get(name):
            raise RefusedObject(f"says {name}, which is not merged here", hint="merge it with peft")
    start = given.get("init_lora_weights")
    if kind == "LORA" and start not in _PLAIN_STARTS:
        what = f"says init_lora_weights {printable(start)}, with which peft changes the base too"
        hint = "save it as plain LoRA: save_pretrained(path_initial_model_for_weight_conversion=…)"
        raise RefusedObject(what, hint=hint)
    alpha = "lora_alpha" if kind == "LORA" else "alpha"
    return Config(
        rank=_size(given, "r"),
        alpha=_real(given.get(alpha), alpha),
        ranks={
            _pattern(name): _size(given["rank_pattern"], name)
            for name in _patterns(given, "rank_pattern")
        },
        alphas={
            _pattern(name): _real(given["alpha_pattern"][name], "alpha_pattern")
            for name in _patterns(given, "alpha_pattern")
        },
        is_rank_stabilized=_flag(given, "use_rslora"),
        is_transposed=_flag(given, "fan_in_fan_out"),
        is_rounded=kind == "LORA" and start == "mica",
        parameters=_names(given, "target_parameters"),
        whole_modules=_names(given, "modules_to_save"),
        tokens=_tokens(given.get("trainable_token_indices")),
    )


def _tokens(given: Any) -> dict[str, tuple[int, ...]]:
    """The rows that are trained, by the ends of the names of embeddings: a list is for any."""
    by_name = given or {}
    if isinstance(by_name, list):
        by_name = {"": by_name}
    if not isinstance(by_name, dict) or not all(map(_are_rows, by_name.values())):
        what = f"says trainable_token_indices {printable(given)}, which are not numbers of rows"
        raise MalformedCheckpoint(what)
    return {name: tuple(rows) for name, rows in by_name.items()}


def _are_rows(given: Any) -> bool:
    return isinstance(given, list) and all(type(row) is int and row >= 0 for row in given)


def _size(given: Mapping[str, Any], name: str) -> int:
    size = given.get(name)
    if type(size) is not int or not 0 < size < 1 << 31:
        raise MalformedCheckpoint(f"says {printable(name)} {printable(size)}, which is not a rank")
    return size


def _real(number: Any, name: str) -> float:
    if type(number) not in (int, float) or not abs(number) < 1e30:
        what = f"says {name} {printable(number)}, which is not a finite number"
        raise MalformedCheckpoint(what)
    return float(number)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    flag = given.get(name) or False
    if type(flag) is not bool:
        raise MalformedCheckpoint(f"says {name} {printable(flag)}, which is not true or false")
    return flag


def _names(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = given.get(name) or ()
    if not isinstance(names, (list, tuple)) or not all(type(each) is str for each in names):
        raise MalformedCheckpoint(f"says {name} {printable(names)}, which is not a list of names")
    return tuple(names)


def _patterns(given: Mapping[str, Any], name: str) -> Iterator[str]:
    patterns = given.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > 1 << 16:
        raise MalformedCheckpoint(f"says {name} {printable(patterns)}, which is not an object")
    yield from patterns


def _pattern(pattern: str) -> str:
    """A pattern whose matching has an end: who made the file may have written another."""
    unbounded = len(re.findall(r"[*+]|\{\d*,\}", pattern))
    is_nested = re.search(r"\)(?:[*+?]|\{)|\(\?(?![:=!])|\\\d", pattern) is not None
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        is_nested = True
    is_long = len(pattern) > 500 or unbounded > 2
    # two repeats without a bound may stand beside alternatives
    if is_long or is_nested or most_ways(pattern) << 3 * unbounded > MOST_WAYS:
        what = f"has the pattern {printable(pattern, 60)}, which is not matched here"
        raise RefusedObject(what, hint="write the names of its modules instead")
    return pattern


def _by_pattern(patterns: Mapping[str, Value], module: str, default: Value | None) -> Value | None:
    """What the first pattern that matches a module's end gives, as peft's `get_pattern_key`."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
