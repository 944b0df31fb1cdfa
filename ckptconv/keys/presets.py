"""The rules of frameworks, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptconv.keys.rules import DropSegment, Rule, Select, Step, StripPrefix
from ckptconv.support.errors import KeyConflict, printable

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

_SIGNS = {"swa": ("n_averaged",), "ema-pytorch": ("initted", "step", "ema_model.")}
"""The starts of keys that only what writes them has, all of them, by the preset that helps."""


def told_preset(keys: Sequence[str]) -> str | None:
    """The preset whose framework adds keys of its own to a state dict, as these tell."""
    for name, signs in _SIGNS.items():
        if all(any(key.startswith(sign) for key in keys) for sign in signs):
            return name
    return None


@dataclass(frozen=True, slots=True)
class Preset(Rule):
    """The rules of `PRESETS[name]`, of which one must meet a key; `KeyConflict` when there is no
    such preset.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in PRESETS:
            what = f"there is no preset '{printable(self.name)}'"
            raise KeyConflict(what, hint=f"there are {', '.join(PRESETS)}")

    @property
    def words(self) -> str:
        return f"--preset {self.name}"

    @property
    def leaves_out(self) -> bool:
        return any(part.leaves_out for part in PRESETS[self.name])

    @property
    def parts(self) -> Sequence[Rule]:
        return PRESETS[self.name]

    def step(self, keys: Sequence[str]) -> Step:
        steps = []
        for part in PRESETS[self.name]:
            steps.append(part.step(keys))
            keys = [after for key in keys if (after := steps[-1](key)) is not None]

        def through(key: str) -> str | None:
            after: str | None = key
            for step in steps:
                after = None if after is None else step(after)
            return after

        return through

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return (self.words,) if all(part.idle(keys) for part in PRESETS[self.name]) else ()

    def is_done_by(self, wrappers: Sequence[str]) -> bool:
        return any(part.is_done_by(wrappers) for part in PRESETS[self.name])
