"""Which module of a model an adapter means, and what conventions of LoRA adapters call it: the
names of all conventions are made from those of the model, and looked up. What was written with
underscores is never taken apart.

Facts: peft 0.21 (utils/save_and_load.py), diffusers 0.42 (loaders/lora_pipeline.py,
loaders/lora_conversion_utils.py), kohya's sd-scripts 0087a46 (networks/lora.py, lora_flux.py:
prefixes, and whose names of a model they have; library/sd3_utils.py: ``text_encoders.clip_g.``),
lycoris-lora 4.1 (``lycoris_``); each Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from ckptconv.support.errors import KeyMismatch, printable
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import first_few, some_text
from ckptconv.tensors.refs import Shape
from ckptconv.tree.diffusion_names import (
    as_in_diffusers,
    as_in_original,
    flux_in_diffusers,
    flux_in_original,
    open_clip_in_transformers,
)
from ckptconv.tree.lora_adapters import LIKE_KOHYA, PEFT_PREFIX

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
# What stands before the modules of one component in a file of several: the original files of
# Stable Diffusion and Flux, and what ComfyUI writes.
_COMPONENTS = {
    **_OF_BOTH,
    "model.diffusion_model.": "unet",
    "cond_stage_model.transformer.": "te1",
    "cond_stage_model.model.": "te1",
    "conditioner.embedders.0.transformer.": "te1",
    "conditioner.embedders.1.model.": "te2",
}

# What adapters put before the dotted path of a module, and the component that it says
_DOTTED = {**_OF_BOTH, "lycoris.": "", "model.": "", "": ""}

# in this order: `lora_` is what others begin with
# What they put before a path whose dots are underscores
_JOINED = {
    "lora_unet__": "unet",  # VideoX-Fun
    "lora_unet_": "unet",
    "lora_prior_unet_": "unet",
    "lora_transformer_": "unet",
    "lora_te_": "te1",
    "lora_te1_": "te1",
    "lora_te2_": "te2",
    "lora_te3_": "te2",  # T5, whose names CLIP does not have: the third one of Stable Diffusion 3
    "lycoris_": "",
    "lora_": "",
}

_T5 = "encoder.block."


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
            rest = name.removeprefix(start)
            found = known.get(rest, {})
            if not found and wanted.startswith("te"):
                found = known.get(_with_or_without_text_model(rest), {})
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


def _with_or_without_text_model(path: str) -> str:
    """The path of a module of CLIP with ``text_model``, or without it: transformers 5.6 has none in
    `CLIPTextModel`, and neither have older files of Stable Diffusion 1 (sd-scripts, model_util.py).
    """
    wrapper = "text_model." if "." in path else "text_model_"
    if path.startswith(wrapper):
        return path.removeprefix(wrapper)
    return wrapper + path


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
        if rest.startswith(("text_model.", _T5)):
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
        raise KeyMismatch(what, where=key_of[name], hint=_hint(known, missing[name]))
    return {name: (Place(moved[plain]),) for name, plain in missing.items()}, [
        f"the modules of the adapter have another start in the base: {start}"
    ]


def _hint(known: Names, module: str) -> str:
    """What to do where a base has no module of this name."""
    from ckptconv.keys.framework_layouts import layouts_between

    weights = [f"{name}.weight" for name in known.modules]
    layouts = layouts_between(weights, f"{module}.weight")
    if layouts:
        presets = " or ".join(layouts)
        return (
            "the base has the names of another program: convert it first, "
            f"ckptconv convert BASE OTHER --preset {presets}"
        )
    return _LEAVE_OUT


_LEAVE_OUT = (
    "is this the base of the adapter? what is for another component can be left out: "
    "ckptconv convert ADAPTER PART --exclude GLOB"
)


# --------------------------------------------------------------------------- in other conventions


Convention = Literal["lora-peft", "lora-kohya", "lora-diffusers", "lora-comfyui"]
Family = Literal["sd", "sdxl", "flux", ""]


class Model(NamedTuple):
    """What model a base has beside text encoders (empty: none that is known here), whose names it
    has there, and what stands before them.
    """

    family: Family
    naming: Naming
    start: str


_LIKE_PEFT = {
    "down": ".lora_A.weight",
    "up": ".lora_B.weight",
    "bias": ".lora_B.bias",
    "magnitude": ".lora_magnitude_vector",
}
ENDS: Mapping[Convention, Mapping[str, str]] = {
    "lora-peft": _LIKE_PEFT
    | {"embedding_down": ".lora_embedding_A", "embedding_up": ".lora_embedding_B"},
    "lora-diffusers": _LIKE_PEFT,
    "lora-kohya": LIKE_KOHYA,
    "lora-comfyui": LIKE_KOHYA,
}
"""How the keys of each convention end, by what the tensor is. Other parts have no place there."""

# Whose names of the modules of a UNet, or of Flux, are those of the convention. Text encoders have
# those of transformers in all of them
_NAMINGS: Mapping[Convention, Mapping[str, str]] = {
    "lora-kohya": {"sd": "diffusers", "sdxl": "original", "flux": "original"},
    "lora-diffusers": {"sd": "diffusers", "sdxl": "diffusers", "flux": "diffusers"},
    "lora-comfyui": {"sd": "original", "sdxl": "original", "flux": "original"},
}


# The modules by which a model is known, the first that has all of a row
_SIGNS: Sequence[tuple[tuple[str, ...], Family, Naming]] = (
    (("double_blocks.0.img_attn.qkv", "double_stream_modulation_img.lin"), "", "own"),  # Flux 2
    (("double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"), "flux", "original"),
    (
        (
            "transformer_blocks.0.attn.add_q_proj",
            "single_transformer_blocks.0.proj_mlp",
            "x_embedder",
        ),
        "flux",
        "diffusers",
    ),
    (("input_blocks.0.0", "time_embed.0", "label_emb.0.0"), "sdxl", "original"),
    (("input_blocks.0.0", "time_embed.0"), "sd", "original"),
    (("conv_in", "time_embedding.linear_1", "add_embedding.linear_1"), "sdxl", "diffusers"),
    (("conv_in", "time_embedding.linear_1"), "sd", "diffusers"),
)


def model_of(names: Names) -> Model:
    """What model the base has, by the modules in it."""
    for modules, family, naming in _SIGNS:
        start = names.start_of(modules)
        if start is not None:
            return Model(family, naming, start)
    return Model("", "own", "")


def spelled_in(convention: Convention, names: Names, model: Model) -> dict[Place, Spelling]:
    """The module that has each place of a model in a convention, its places as fine as they are in
    any program. Places of which the convention does not know the name are left out.
    """
    found: dict[Place, Spelling] = {}
    for spelling in _spelled(convention, names, model):
        atoms = names.atoms(spelling.places)
        found |= dict.fromkeys(atoms, spelling._replace(places=atoms))
    return found


def _spelled(convention: Convention, names: Names, model: Model) -> Iterator[Spelling]:
    if convention == "lora-peft":
        yield from (Spelling(name, "", (Place(name),), "own") for name in names.modules)
        return
    of_model = _NAMINGS[convention].get(model.family)
    wanted = {"unet": of_model, "te1": "diffusers", "te2": "diffusers"}
    is_plain = convention == "lora-kohya" and not model.family  # a language model, as of LyCORIS
    for each in names.spellings:
        is_of_model = each.places[0].module == model.start + each.name
        if each.naming == wanted.get(each.component, "diffusers"):
            yield each
        elif each.naming == "own" and is_of_model and of_model == model.naming:
            yield each._replace(component="unet")
        elif each.naming == "own" and not each.component and is_plain:
            yield each


class NamingContext(NamedTuple):
    """What the name of a module depends on beside itself: the convention and the family of the
    model, the `starts` of names in the adapter that say a component, the base's shapes.
    """

    convention: Convention
    family: Family
    starts: frozenset[str]
    shapes: Mapping[str, Shape | None]


def named_in(asked: NamingContext, spelling: Spelling, component: str) -> tuple[str, str]:
    """What stands before a module in the keys of a convention, and its name behind that.

    `component` is the one that the base or the adapter says. Raises `KeyMismatch` where neither
    does, or the convention has no name for it.
    """
    if asked.convention == "lora-peft":
        if any(place.parameter != "weight" for place in spelling.places):
            raise KeyMismatch("is one weight for q, k and v, for which peft has no name by itself")
        return PEFT_PREFIX, spelling.name
    if asked.convention == "lora-kohya":
        return _start_of_kohya(asked, spelling, component), spelling.name.replace(".", "_")
    if not component:
        what = "is a module of which neither the base nor the adapter says the component"
        raise KeyMismatch(what, hint="name a base that holds the whole pipeline, in one file")
    if asked.convention == "lora-comfyui":
        return _start_of_comfyui(asked, spelling, component), spelling.name
    if component == "unet" and asked.family == "flux":
        return "transformer.", spelling.name
    return _IN_DIFFUSERS[component], spelling.name


# What diffusers' save_lora_weights puts before names
_IN_DIFFUSERS = {"unet": "unet.", "te1": "text_encoder.", "te2": "text_encoder_2."}


def _start_of_kohya(asked: NamingContext, spelling: Spelling, component: str) -> str:
    if component == "te2" and spelling.name.startswith(_T5):
        return "lora_te3_"
    if component in ("unet", "te2"):
        return f"lora_{component}_"
    if not component and spelling.naming == "own":
        return "lycoris_"
    if not component:
        what = "is of a text encoder, of which neither the base nor the adapter says which"
        raise KeyMismatch(what, hint="name a base that holds the whole pipeline, in one file")
    # sd-scripts: a model with one text encoder has no number in its name
    told = asked.starts & {"lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "text_encoder_2."}
    if asked.family == "sd" or (not asked.family and "lora_te_" in told):
        return "lora_te_"
    if not asked.family and not told:
        what = "is lora_te_ in Stable Diffusion 1 and 2, and lora_te1_ in SDXL and Flux"
        raise KeyMismatch(what, hint="name a base that holds the UNet too")
    return "lora_te1_"


def _start_of_comfyui(asked: NamingContext, spelling: Spelling, component: str) -> str:
    if component == "unet":
        return "diffusion_model."
    if spelling.name.startswith(_T5):
        return "text_encoders.t5xxl.transformer."
    if component == "te2":
        return "text_encoders.clip_g.transformer."
    # the text encoder of Stable Diffusion 2 is 1024 wide, and another one to ComfyUI
    shapes = (asked.shapes.get(place.key) for place in spelling.places)
    if any(1024 in (shape or ()) for shape in shapes):
        raise KeyMismatch("is of the text encoder of Stable Diffusion 2, whose name is not known")
    return "text_encoders.clip_l.transformer."
