"""Which module of a model an adapter means: the names of all conventions are made from those of the
model, and looked up. What was written with underscores is never taken apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from ckptconv.support.errors import KeyMismatch, printable
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import first_few, some_text
from ckptconv.tree.diffusion_names import (
    as_in_diffusers,
    as_in_original,
    flux_in_diffusers,
    flux_in_original,
    open_clip_in_transformers,
)
from ckptconv.tree.lora_adapters import PEFT_PREFIX

_OF_BOTH = {
    "diffusion_model.": "unet",
    "unet.": "unet",
    "transformer.": "unet",
    "text_encoder.": "te1",
    "text_encoder_2.": "te2",
    "text_encoders.clip_l.transformer.": "te1",
    "text_encoders.clip_g.transformer.": "te2",
    "text_encoders.t5xxl.transformer.": "te2",
}
_COMPONENTS = {
    **_OF_BOTH,
    "model.diffusion_model.": "unet",
    "cond_stage_model.transformer.": "te1",
    "cond_stage_model.model.": "te1",
    "conditioner.embedders.0.transformer.": "te1",
    "conditioner.embedders.1.model.": "te2",
}
"""What stands before the modules of one component in a file of several: the original files of
Stable Diffusion and Flux, and what ComfyUI writes.
"""

_DOTTED = {**_OF_BOTH, "lycoris.": "", "model.": "", "": ""}
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
    """A parameter of a model that an adapter changes: a module, which of the parts of its rows that
    other programs have as modules of their own (None: all of it), and the name of the parameter.
    """

    module: str
    part: int | None = None
    parameter: str = "weight"

    @property
    def key(self) -> str:
        """The key of the parameter."""
        return f"{self.module}.{self.parameter}"

    def __str__(self) -> str:
        return self.module if self.part is None else f"{self.module} (part {self.part + 1})"


Places: TypeAlias = "tuple[Place, ...]"
"""Where a name leads: one place, or several, one below the other in what is one module."""

Naming = Literal["own", "original", "diffusers"]


class Spelling(NamedTuple):
    """A name that a module has within its component (empty: nothing says which), in the model's own
    naming, in that of the original files, or in that of diffusers and transformers.
    """

    name: str
    component: str
    places: Places
    naming: Naming


class Names:
    """The `modules` of a model by all names that adapters give them; `spellings` are these."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys` are those of the model's tensors; each is a parameter of a module."""
        self.modules = dict.fromkeys(key.rpartition(".")[0] for key in keys)
        self._rests: dict[str, dict[str, str]] = {}
        for module in self.modules:
            start = next((each for each in _COMPONENTS if module.startswith(each)), "")
            self._rests.setdefault(start, {})[module.removeprefix(start)] = module
        self.spellings = [*self._all_spellings()]
        self._parts: dict[Place, list[Place]] = {}
        self._dotted: dict[str, dict[Places, str]] = {}
        self._joined: dict[str, dict[Places, str]] = {}
        for module in self.modules:
            self._know(module, "", (Place(module),))
        for spelling in self.spellings:
            self._know(*spelling[:3])
            if len(spelling.places) == 1 and spelling.places[0].part is not None:
                [place] = spelling.places
                self._parts.setdefault(Place(place.module), []).append(place)

    def _know(self, name: str, component: str, places: Places) -> None:
        self._dotted.setdefault(name, {})[places] = component
        self._joined.setdefault(name.replace(".", "_"), {})[places] = component

    def _all_spellings(self) -> Iterator[Spelling]:
        for start, rests in self._rests.items():
            component = _COMPONENTS.get(start, "")
            for rest, module in rests.items():
                yield from _spellings(rest, module, component, rests)
            if component in ("", "unet"):
                yield from _put_together(rests)

    def atoms(self, places: Places) -> Places:
        """The same places, as fine as any program has them: parts in the place of their whole."""
        return tuple(atom for place in places for atom in self._parts.get(place, [place]))

    def start_of(self, modules: Iterable[str]) -> str | None:
        """What stands before the modules of the component that has all of these; None for none."""
        wanted = {*modules}
        return next((start for start, rests in self._rests.items() if rests.keys() >= wanted), None)

    def of(self, name: str) -> list[Places]:
        """The places that a name of an adapter may mean."""
        if name in self.modules:
            return [(Place(name),)]
        known, starts = self._joined, _JOINED
        if "." in name:
            known, starts = self._dotted, _DOTTED
        for start, wanted in starts.items():
            if not name.startswith(start):
                continue
            found = known.get(name.removeprefix(start), {})
            fitting = [places for places, own in found.items() if not (own and wanted != own)]
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
        ends = (module.removesuffix(first) for module in self.modules if module.endswith(first))
        starts = [("", start) for start in ends if start.endswith(".")]
        dots = [at + 1 for at, char in enumerate(first) if char == "."]
        starts += [(first[:at], "") for at in dots if first[at:] in self.modules]
        fitting = []
        for removed, added in starts:
            if all(name.startswith(removed) for name in names):
                moved = {name: added + name.removeprefix(removed) for name in names}
                if self.modules.keys() >= set(moved.values()):
                    fitting.append((moved, f"{added} added" if added else f"{removed} taken off"))
        return fitting[0] if len(fitting) == 1 else ({}, "")


def _spellings(
    rest: str, module: str, component: str, rests: Collection[str]
) -> Iterator[Spelling]:
    """The names of one module within its component, and of the parts of its rows."""
    whole = (Place(module),)
    found: list[Spelling] = []
    if component in ("", "unet"):
        found += _spellings_of_unet(rest, whole, rests)
    if component != "unet" and not found:
        found += _spellings_of_encoder(rest, component, whole)
    yield from found or [Spelling(rest, component, whole, "own")]


def _spellings_of_unet(rest: str, whole: Places, rests: Collection[str]) -> Iterator[Spelling]:
    new: tuple[str, ...] = flux_in_diffusers(rest)
    if not new and (name := as_in_diffusers(rest)) is not None:
        new = (name,)
    if new:
        yield Spelling(rest, "unet", whole, "original")
        places = whole
        if len(new) > 1:
            places = tuple(whole[0]._replace(part=at) for at in range(len(new)))
        for name, place in zip(new, places, strict=True):
            yield Spelling(name, "unet", (place,), "diffusers")
        return
    old = as_in_original(rest, rests)
    if old is not None or flux_in_original(rest) is not None:
        yield Spelling(rest, "unet", whole, "diffusers")
    if old is not None:
        yield Spelling(old, "unet", whole, "original")


def _spellings_of_encoder(rest: str, component: str, whole: Places) -> Iterator[Spelling]:
    names = open_clip_in_transformers(rest)
    if not names:
        if rest.startswith(("text_model.", "encoder.block.")):
            yield Spelling(rest, component, whole, "diffusers")
        return
    places = whole
    if len(names) > 1:
        places = tuple(Place(whole[0].module, at, "in_proj_weight") for at in range(len(names)))
    yield Spelling(rest, component, places, "original")
    for name, place in zip(names, places, strict=True):
        yield Spelling(name, component, (place,), "diffusers")


def _put_together(rests: Mapping[str, str]) -> Iterator[Spelling]:
    """The modules of the original Flux whose rows are those of some modules of diffusers."""
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for rest, module in rests.items():
        part = flux_in_original(rest)
        if part is not None:
            original, at, counts[original] = part
            found.setdefault(original, {})[at] = module
    for original, modules in found.items():
        if len(modules) == counts[original]:
            places = tuple(Place(modules[at]) for at in sorted(modules))
            yield Spelling(original, "unet", places, "original")


def start_of(name: str) -> tuple[str, str]:
    """What an adapter puts before a path, and the component that it says; empty where it says none.

    >>> start_of("lora_te1_text_model_encoder")
    ('lora_te1_', 'te1')
    """
    starts = _DOTTED if "." in name else _JOINED
    return next((pair for pair in starts.items() if name.startswith(pair[0])), ("", ""))


def found_modules(key_of: Mapping[str, str], known: Names) -> tuple[dict[str, Places], list[str]]:
    """The places in a model that each name means, and notes of how they were found.

    `key_of` has the names, each with a key of the adapter. Raises `KeyMismatch` for a name that
    means no module of the model, or may mean several.
    """
    found: dict[str, Places] = {}
    missing: dict[str, str] = {}
    for name in key_of:
        plain = name.removeprefix(PEFT_PREFIX)
        places = known.of(plain)
        if len(places) > 1:
            what = f"may mean {first_few([' and '.join(map(str, each)) for each in places], 4)}"
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
        name, *others = missing
        what = f"goes to {printable(missing[name])}, which the base does not have"
        if others:
            what = f"{what}; nor {some_text([missing[each] for each in others])}"
        raise KeyMismatch(what, where=key_of[name], hint=_LEAVE_OUT)
    return {name: (Place(moved[plain]),) for name, plain in missing.items()}, [
        f"the modules of the adapter have another start in the base: {start}"
    ]


_LEAVE_OUT = (
    "is this the base of the adapter? what is for another component can be left out: "
    "ckptconv convert ADAPTER PART --exclude GLOB"
)
