"""What is written beside the matrices of LoRA for peft and diffusers: ranks, and how products are
scaled.

peft's ``adapter_config.json`` has one rank and one alpha, and patterns for modules with others.
diffusers keeps the same fields in the metadata of its file, with the component
before each. Facts: peft 0.21 (utils/other.py, `get_pattern_key`), diffusers 0.42
(loaders/lora_base.py, `_pack_dict_with_prefix`; loaders/peft.py), both Apache-2.0.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.support.errors import RefusedObject
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import TensorRef, whole_view
from ckptconv.tree.lora_blocks import in_memory


class Scaled(NamedTuple):
    """A module with its rank and alpha, and whether it has a magnitude (DoRA) and a bias.

    `start` is what stands before its `name` in keys; `key` is one of them, for messages.
    """

    start: str
    name: str
    rank: int
    alpha: float
    has_magnitude: bool
    has_bias: bool
    key: str


def of_peft(given: Mapping[str, Any], modules: Sequence[Scaled], others: Collection[str]) -> bytes:
    """The text of ``adapter_config.json``: that of the adapter, where it had one, with what is said
    of `modules`. `others` are the modules of the base to which nothing is added, those included
    that have no weights of their own: peft takes a name for any of them.
    """
    targets = _targets([each.name for each in modules], others)
    told = {**_DEFAULTS, **given, **_fields(modules), "target_modules": targets}
    return (json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


_DEFAULTS: Mapping[str, Any] = {
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "task_type": None,
}


def of_diffusers(modules: Sequence[Scaled]) -> str:
    """The text of ``lora_adapter_metadata``: the fields of each component, its name before them."""
    told: dict[str, Any] = {}
    for start in dict.fromkeys(each.start for each in modules):
        own = [each for each in modules if each.start == start]
        # transformers 5 has no text_model in the paths of CLIP, and the ends of paths fit both
        names = [each.name.removeprefix(_TEXT_MODEL) for each in own]
        fields = {**_fields(own), "target_modules": names}
        told |= {f"{start}{name}": value for name, value in fields.items()}
    return json.dumps(told, indent=2, sort_keys=True)


def _fields(modules: Sequence[Scaled]) -> dict[str, Any]:
    rank = _most(each.rank for each in modules)
    alpha = _most(_plain(each.alpha) for each in modules)
    without = next((each for each in modules if not each.has_magnitude), None)
    if without is not None and any(each.has_magnitude for each in modules):
        what = "has no magnitude (DoRA), which others have, and the config has it for all or none"
        raise RefusedObject(what, where=without.key)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_only(each.name): each.rank for each in modules if each.rank != rank},
        "alpha_pattern": {
            _only(each.name): _plain(each.alpha) for each in modules if each.alpha != alpha
        },
        "use_rslora": False,
        "use_dora": without is None,
        "lora_bias": any(each.has_bias for each in modules),
    }


def _most(values: Any) -> Any:
    return Counter(values).most_common(1)[0][0]


def _plain(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha


_TEXT_MODEL = "text_model."


def _only(name: str) -> str:
    """The pattern of one module, which peft takes for the end of a path if it may be one."""
    if name.startswith(_TEXT_MODEL):
        return re.escape(name.removeprefix(_TEXT_MODEL))
    return f"^{re.escape(name)}"


def _targets(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Names by which peft finds just these modules: their last words, where no other module of the
    base ends in one of them.
    """
    ends = {name.rpartition(".")[2] for name in names}
    if ends & {other.rpartition(".")[2] for other in others}:
        return sorted(names)
    return sorted(ends)


def with_those_around(modules: Iterable[str]) -> set[str]:
    """Modules, and those that they are in."""
    found = set()
    for module in modules:
        path = module
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def alpha_for(scale: float, rank: int, key: str) -> float:
    """The alpha that gives just this scale at a rank."""
    near = scale * rank
    for alpha in (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)):
        if alpha / rank == scale:
            return alpha
    raise RefusedObject(f"is scaled by {scale!r}, which no alpha gives at rank {rank}", where=key)


def alpha_tensor(alpha: float, like: TensorRef) -> TensorRef:
    """A tensor of one number: of the type of another tensor, if that has it, or of a finer one."""
    for dtype in (like.dtype, BY_NAME["float32"], BY_NAME["float64"]):
        raw = _exact(alpha, dtype)
        if raw is not None:
            return whole_view(in_memory(raw, dtype, like.location), dtype, ())
    raise AssertionError("a double has all doubles")


_FORMATS = {"float16": "<e", "bfloat16": "<f", "float32": "<f", "float64": "<d"}


def _exact(number: float, dtype: DType) -> bytes | None:
    """The bytes of a number in a type; None where it is not one of its numbers."""
    form = _FORMATS.get(dtype.name)
    if form is None:
        return None
    try:
        raw = struct.pack(form, number)
    except OverflowError:
        return None
    if struct.unpack(form, raw)[0] != number:
        return None
    if dtype.name == "bfloat16":
        return raw[2:] if raw[:2] == b"\0\0" else None
    return raw
