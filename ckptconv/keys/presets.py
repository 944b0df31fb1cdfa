"""The rules of frameworks, by name.

What a framework puts around keys is told by rules for keys alone. The layout of the tensors in
another program takes tensor rules, and often numbers of the model: `Preset.with_config` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.keys.config_numbers import part_of
from ckptconv.keys.rules import DropSegment, Rule, Select, Step, StripPrefix
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.records import dataclass

PRESETS: Mapping[str, tuple[Rule, ...]] = {
    "ddp": (StripPrefix("module."),),
    "compile": (DropSegment("_orig_mod"),),
    "fsdp": (DropSegment("_fsdp_wrapped_module"), DropSegment("_fpw_module")),
    "checkpoint-wrapper": (DropSegment("_checkpoint_wrapped_module"),),
    "lightning": (StripPrefix("model."),),
    "peft": (StripPrefix("base_model.model."),),
    "swa": (Select(exclude=("n_averaged",)), StripPrefix("module.")),
    "timm-ema": (StripPrefix("ema."), StripPrefix("module.")),
    "mmengine": (Select(exclude=("steps",)), StripPrefix("module.")),
    "ema-pytorch": (Select(include=("ema_model.*",)), StripPrefix("ema_model.")),
}
"""What frameworks put around a model's keys, by the name of the preset.

Sources: torch's `torch/nn/parallel`, `_dynamo/eval_frame.py`, `distributed/fsdp/_common_utils.py`
(``_fpw_module`` before torch 1.13), `distributed/algorithms/_checkpoint/checkpoint_wrapper.py` and
`optim/swa_utils.py` (``n_averaged``); Lightning's way of keeping the network under ``self.model``;
peft's `PeftModel`; timm's `ModelEma`; mmengine's `BaseAveragedModel` (``steps``); ema_pytorch's
`EMA`.
"""

# The starts of keys that only what writes them has, all of them, by the preset that helps
_SIGNS = {"swa": ("n_averaged",), "ema-pytorch": ("initted", "step", "ema_model.")}


def told_preset(keys: Sequence[str]) -> str | None:
    """The preset whose framework adds keys of its own to a state dict, as these tell."""
    for name, signs in _SIGNS.items():
        if all(any(key.startswith(sign) for key in keys) for sign in signs):
            return name
    return None


ADAPTERS = ("lora-peft", "lora-kohya", "lora-diffusers", "lora-comfyui")
"""The conventions of LoRA adapters: edits, which know their base (`tree.renaming_lora`)."""

_TO_TRANSFORMERS = ("transformers-v5", "transformers-original")
_BACK = "to-"


def preset_names() -> list[str]:
    """The names of all presets, without what may stand behind a colon."""
    from ckptconv.keys.framework_layouts import LAYOUTS

    back = [_BACK + name for name, layout in LAYOUTS.items() if not layout.one_way]
    return [*PRESETS, *_TO_TRANSFORMERS, *LAYOUTS, *back, *ADAPTERS]


@dataclass(frozen=True, slots=True)
class Preset(Rule):
    """The rules of `PRESETS[name]`, of which one must meet a key; or those of a layout.

    A layout is ``transformers-v5`` or ``transformers-original``, of the model type or class that
    may stand behind a colon, or one of `framework_layouts.LAYOUTS`, ``to-`` before it for the way
    back, the numbers of heads behind a colon. What does not stand there comes from the model's
    config: `with_config` settles the rules. Raises `KeyConflict` when there is no such preset.

    >>> Preset("megatron-qkv:32,8").needs_config
    True
    """

    name: str
    settled: tuple[Rule, ...] | None = None

    def __post_init__(self) -> None:
        # the tables of layouts are not read for what only goes around keys
        if self.name not in PRESETS:
            self._layout()

    @property
    def words(self) -> str:
        return f"--preset {printable(self.name)}"

    @property
    def leaves_out(self) -> bool:
        return any(part.leaves_out for part in self.parts)

    @property
    def parts(self) -> Sequence[Rule]:
        if self.settled is None:
            return PRESETS.get(self.name, ())
        return self.settled

    @property
    def of_adapters(self) -> str:
        return self.name if self.name in ADAPTERS else ""

    @property
    def needs_config(self) -> bool:
        return self.settled is None and self.name not in PRESETS

    def with_config(self, config: Mapping[str, Any]) -> Preset:
        head, argument = self._layout()
        if self.of_adapters:
            what = f"{self.words} names the parts of a LoRA adapter, and here a model is read"
            raise KeyConflict(what, hint=f"{_CONVERT} {self.words} --like BASE")
        if head in _TO_TRANSFORMERS:
            from ckptconv.keys.transformers_layouts import layout_rules as of_transformers

            is_back = head == "transformers-original"
            rules = of_transformers(argument or None, config, back=is_back)
        else:
            from ckptconv.keys.framework_layouts import layout_rules, refuse_other_model

            name = head.removeprefix(_BACK)
            refuse_other_model(self.words, name, config)
            rules = layout_rules(name, self._heads(argument, config), back=head != name)
        return replace(self, settled=rules)

    def _layout(self) -> tuple[str, str]:
        """The name of the layout and what stands behind the colon."""
        from ckptconv.keys.framework_layouts import LAYOUTS

        head, _, argument = self.name.partition(":")
        if head in _TO_TRANSFORMERS or self.of_adapters:
            return head, argument
        if head.removeprefix(_BACK) not in LAYOUTS:
            what = f"there is no preset '{printable(self.name)}'"
            listed = ", ".join((*PRESETS, *_TO_TRANSFORMERS, *LAYOUTS, *ADAPTERS))
            raise KeyConflict(what, hint=f"there are {listed}, and to-NAME of a layout")
        one_way = LAYOUTS[head.removeprefix(_BACK)].one_way
        if one_way and head.startswith(_BACK):
            raise KeyConflict(f"there is no preset '{head}': {one_way}")
        if argument and not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})?", argument):
            what = f"'{printable(argument)}' are not numbers of heads"
            raise KeyConflict(what, where=self.words, hint=f"write {head}:HEADS,KV_HEADS")
        return head, argument

    def _heads(self, argument: str, config: Mapping[str, Any]) -> Any:
        """The numbers of heads, which stand in the name or in the config of the model; None where
        the layout needs none.
        """
        from ckptconv.keys.framework_layouts import LAYOUTS, Heads

        head = self.name.partition(":")[0]
        layout = LAYOUTS[head.removeprefix(_BACK)]
        if not layout.needs_heads:
            return None
        asked = f"write it as --preset {head}:HEADS,KV_HEADS"
        if argument:
            given = [int(text) for text in argument.split(",")]
            # GPT-NeoX has as many heads of keys and values as of queries
            if len(given) == 1 and head.removeprefix(_BACK) != "gpt-neox":
                what = f"{self.words} needs the heads of keys and values too"
                raise KeyConflict(what, hint=asked)
            return Heads(given[0], given[-1])
        queries = _number(config, (*_QUERIES, *layout.heads_named))
        if queries is None:
            what = f"{self.words} needs the numbers of heads, and no config.json says them"
            raise KeyConflict(what, hint=f"put config.json beside the checkpoint, or {asked}")
        # without a number of their own keys and values have as many: transformers and Meta alike
        return Heads(queries, _number(config, _KEYS) or queries)

    def step(self, keys: Sequence[str]) -> Step:
        if self.needs_config:
            what = f"{self.words} lays tensors out anew, and here only keys can change"
            raise KeyConflict(what, hint="convert the checkpoint with it: ckptconv convert")
        steps = []
        for part in self.parts:
            steps.append(part.step(keys))
            keys = [after for key in keys if (after := steps[-1](key)) is not None]

        def through(key: str) -> str | None:
            after: str | None = key
            for step in steps:
                if after is not None:
                    after = step(after)
            return after

        return through

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._idle_unless(not all(part.idle(keys) for part in self.parts))

    def is_done_by(self, wrappers: Sequence[str]) -> bool:
        return any(part.is_done_by(wrappers) for part in self.parts)


_CONVERT = "convert the adapter: ckptconv convert ADAPTER OUT"

_QUERIES = ("num_attention_heads", "n_heads")
# The names of numbers of heads in ``config.json``, and in Meta's ``params.json``
_KEYS = ("num_key_value_heads", "n_kv_heads")


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for part in (config, part_of(config, "text_config")):
        for name in names:
            found = part.get(name)
            if type(found) is int and found > 0:
                return found
            if found is not None:
                what = f"the config says {found!r:.50} for {name}, which is not a number of heads"
                raise KeyConflict(what, hint="write the numbers behind the name of the preset")
    return None
