"""Which module of a model an adapter means: the names of all conventions are made from those of the
model, and looked up. What was written with underscores is never taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptconv.support.errors import KeyMismatch, printable
from ckptconv.support.text import count_text, first_few
from ckptconv.tree.lora_adapters import PEFT_PREFIX

_BASE_PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "cond_stage_model.transformer.",
    "conditioner.embedders.0.transformer.",
    "text_encoders.clip_l.transformer.",
    "unet.",
    "transformer.",
    "text_encoder.",
)
"""What stands before the modules of one component in a file of several: the original files of
Stable Diffusion and Flux, and what ComfyUI writes.
"""

_DOTTED = (
    "diffusion_model.",
    "transformer.",
    "unet.",
    "text_encoder.",
    "text_encoder_2.",
    "lycoris.",
    "model.",
)
"""What adapters put before the dotted path of a module within its component."""

_JOINED = (
    "lora_unet_",
    "lora_te_",
    "lora_te1_",
    "lora_te2_",
    "lora_te3_",
    "lora_transformer_",
    "lora_prior_unet_",
    "lycoris_",
    "lora_",
)
"""What they put before a path whose dots are underscores."""


class Names:
    """The modules of a model by all names that adapters give them."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys` are those of the model's tensors; each is a parameter of a module."""
        self._modules = dict.fromkeys(key.rpartition(".")[0] for key in keys)
        self._ends: dict[str, dict[str, None]] = {}
        self._joined: dict[str, dict[str, None]] = {}
        for module in self._modules:
            for name in _spellings(module):
                self._ends.setdefault(name, {})[module] = None
                self._joined.setdefault(name.replace(".", "_"), {})[module] = None

    def of(self, name: str) -> list[str]:
        """The modules that a name of an adapter may mean."""
        if name in self._modules:
            return [name]
        for start in _JOINED:
            if name.startswith(start) and "." not in name:
                return [*self._joined.get(name.removeprefix(start), ())]
        for start in (*_DOTTED, ""):
            if name.startswith(start) and (found := self._ends.get(name.removeprefix(start))):
                return [*found]
        return []

    def shifted(self, names: Sequence[str]) -> tuple[Mapping[str, str], str]:
        """The modules that names mean if all paths of the model have another start, and what start
        that is; empty where not just one start does it.

        transformers puts the name of the inner model before the paths, or takes it off, as the
        class is one with a head or not (`base_model_prefix`).
        """
        first = names[0]
        ends = (module.removesuffix(first) for module in self._modules if module.endswith(first))
        starts = [("", start) for start in ends if start.endswith(".")]
        dots = [at + 1 for at, char in enumerate(first) if char == "."]
        starts += [(first[:at], "") for at in dots if first[at:] in self._modules]
        fitting = []
        for removed, added in starts:
            if all(name.startswith(removed) for name in names):
                moved = {name: added + name.removeprefix(removed) for name in names}
                if self._modules.keys() >= set(moved.values()):
                    fitting.append((moved, f"{added} added" if added else f"{removed} taken off"))
        return fitting[0] if len(fitting) == 1 else ({}, "")


def _spellings(module: str) -> Iterator[str]:
    yield module
    for start in _BASE_PREFIXES:
        if module.startswith(start):
            yield module.removeprefix(start)


def found_modules(
    names: Sequence[str], keys: Iterable[str], key_of: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The module of the model that each name means, and notes of how they were found.

    `keys` are those of the model's tensors, `key_of` a key of the adapter for each name. Raises
    `KeyMismatch` for a name that means no module of the model, or may mean several.
    """
    known = Names(keys)
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix(PEFT_PREFIX)
        modules = known.of(plain)
        if len(modules) > 1:
            what = f"may mean {first_few(modules, 4)}"
            hint = "merge into one of them alone: --only, or convert it first"
            raise KeyMismatch(what, where=key_of[name], hint=hint)
        if modules:
            found[name] = modules[0]
        else:
            missing[name] = plain
    if not missing:
        return found, []
    moved: Mapping[str, str] = {}
    start = ""
    if not found:
        moved, start = known.shifted([*missing.values()])
    if not moved:
        name = next(iter(missing))
        what = f"goes to {printable(missing[name])}, which the base does not have"
        if len(missing) > 1:
            what = f"{what}; so do the parts for {count_text(len(missing) - 1, 'other module')}"
        raise KeyMismatch(what, where=key_of[name], hint=_LEAVE_OUT)
    return {name: moved[plain] for name, plain in missing.items()}, [
        f"the modules of the adapter have another start in the base: {start}"
    ]


_LEAVE_OUT = (
    "is this the base of the adapter? what is for another component can be left out: "
    "ckptconv convert ADAPTER PART --exclude"
)
