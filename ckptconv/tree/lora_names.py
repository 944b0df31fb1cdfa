"""Which module of a model an adapter means: the names of all conventions are made from those of the
model, and looked up. What was written with underscores is never taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.support.errors import KeyMismatch, printable
from ckptconv.support.text import count_text, first_few
from ckptconv.tree.diffusion_names import as_in_diffusers, as_in_original, flux_in_diffusers
from ckptconv.tree.lora_adapters import PEFT_PREFIX

_COMPONENTS = {
    "model.diffusion_model.": "unet",
    "diffusion_model.": "unet",
    "unet.": "unet",
    "transformer.": "unet",
    "cond_stage_model.transformer.": "te1",
    "conditioner.embedders.0.transformer.": "te1",
    "text_encoders.clip_l.transformer.": "te1",
    "text_encoder.": "te1",
    "text_encoder_2.": "te2",
}
"""What stands before the modules of one component in a file of several: the original files of
Stable Diffusion and Flux, and what ComfyUI writes.
"""

_DOTTED = {
    "diffusion_model.": "unet",
    "transformer.": "unet",
    "unet.": "unet",
    "text_encoder.": "te1",
    "text_encoder_2.": "te2",
    "lycoris.": "",
    "model.": "",
    "": "",
}
"""What adapters put before the dotted path of a module, and the component that it says."""

_JOINED = {
    "lora_unet_": "unet",
    "lora_prior_unet_": "unet",
    "lora_transformer_": "unet",
    "lora_te_": "te1",
    "lora_te1_": "te1",
    "lora_te2_": "te2",
    "lora_te3_": "te3",
    "lycoris_": "",
    "lora_": "",
}
"""What they put before a path whose dots are underscores."""


class Place(NamedTuple):
    """Where a name leads: a module, and which of the parts of its rows that other programs have as
    modules of their own (None: all of it).
    """

    module: str
    part: int | None = None

    def __str__(self) -> str:
        return self.module if self.part is None else f"{self.module} (part {self.part + 1})"


class Names:
    """The modules of a model by all names that adapters give them."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys` are those of the model's tensors; each is a parameter of a module."""
        self._modules = dict.fromkeys(key.rpartition(".")[0] for key in keys)
        self._dotted: dict[str, dict[Place, str]] = {}
        self._joined: dict[str, dict[Place, str]] = {}
        for module in self._modules:
            for name, component, part in self._spellings(module):
                place = Place(module, part)
                self._dotted.setdefault(name, {})[place] = component
                self._joined.setdefault(name.replace(".", "_"), {})[place] = component

    def _spellings(self, module: str) -> Iterator[tuple[str, str, int | None]]:
        """The names of a module within its component, what that is (empty: nothing says it), and
        which part of the module has the name.
        """
        yield module, "", None
        rest, component = module, ""
        for start in _COMPONENTS:
            if module.startswith(start):
                rest, component = module.removeprefix(start), _COMPONENTS[start]
                yield rest, component, None
                break
        if component in ("", "unet"):
            others = (as_in_diffusers(rest), as_in_original(rest, self._modules))
            yield from ((name, component, None) for name in others if name is not None)
            parts = flux_in_diffusers(rest)
            for at, name in enumerate(parts):
                yield name, component, at if len(parts) > 1 else None

    def of(self, name: str) -> list[Place]:
        """The places that a name of an adapter may mean."""
        if name in self._modules:
            return [Place(name)]
        known, starts = (self._dotted, _DOTTED) if "." in name else (self._joined, _JOINED)
        for start, wanted in starts.items():
            if not name.startswith(start):
                continue
            found = known.get(name.removeprefix(start), {})
            fitting = [place for place, own in found.items() if not (own and wanted != own)]
            if not wanted:
                fitting = [*found]
            if fitting or known is self._joined:
                return fitting
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


def found_modules(
    names: Sequence[str], keys: Iterable[str], key_of: Mapping[str, str]
) -> tuple[dict[str, Place], list[str]]:
    """The module of the model that each name means, and notes of how they were found.

    `keys` are those of the model's tensors, `key_of` a key of the adapter for each name. Raises
    `KeyMismatch` for a name that means no module of the model, or may mean several.
    """
    known = Names(keys)
    found: dict[str, Place] = {}
    missing: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix(PEFT_PREFIX)
        places = known.of(plain)
        if len(places) > 1:
            what = f"may mean {first_few([*map(str, places)], 4)}"
            hint = "merge into one of them alone: --only, or convert it first"
            raise KeyMismatch(what, where=key_of[name], hint=hint)
        if places:
            found[name] = places[0]
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
    return {name: Place(moved[plain]) for name, plain in missing.items()}, [
        f"the modules of the adapter have another start in the base: {start}"
    ]


_LEAVE_OUT = (
    "is this the base of the adapter? what is for another component can be left out: "
    "ckptconv convert ADAPTER PART --exclude"
)
