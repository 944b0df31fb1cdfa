"""The names that conventions of LoRA adapters give to the modules of a model, and how their keys
end.

Facts: peft 0.21 (utils/save_and_load.py), diffusers 0.42 (loaders/lora_pipeline.py,
loaders/lora_conversion_utils.py), kohya's sd-scripts 0087a46 (networks/lora.py, lora_flux.py:
prefixes, and whose names of a model they have; library/sd3_utils.py: ``text_encoders.clip_g.``),
lycoris-lora 4.1 (``lycoris_``); each Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ckptconv.support.errors import KeyMismatch
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.refs import Shape
from ckptconv.tree.lora_adapters import LIKE_KOHYA, PEFT_PREFIX
from ckptconv.tree.lora_names import Names, Naming, Place, Spelling

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

_NAMINGS: Mapping[Convention, Mapping[str, str]] = {
    "lora-kohya": {"sd": "diffusers", "sdxl": "original", "flux": "original"},
    "lora-diffusers": {"sd": "diffusers", "sdxl": "diffusers", "flux": "diffusers"},
    "lora-comfyui": {"sd": "original", "sdxl": "original", "flux": "original"},
}
"""Whose names of the modules of a UNet, or of Flux, are those of the convention. Text encoders have
those of transformers in all of them.
"""


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
"""The modules by which a model is known, the first that has all of a row."""


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
    for spelling in _spellings(convention, names, model):
        atoms = names.atoms(spelling.places)
        found |= dict.fromkeys(atoms, spelling._replace(places=atoms))
    return found


def _spellings(convention: Convention, names: Names, model: Model) -> Iterator[Spelling]:
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


class Asked(NamedTuple):
    """What the name of a module depends on beside itself: the convention and the family of the
    model, the `starts` of names in the adapter that say a component, the base's shapes.
    """

    convention: Convention
    family: Family
    starts: frozenset[str]
    shapes: Mapping[str, Shape | None]


def named_in(asked: Asked, spelling: Spelling, component: str) -> tuple[str, str]:
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


_IN_DIFFUSERS = {"unet": "unet.", "te1": "text_encoder.", "te2": "text_encoder_2."}


def _start_of_kohya(asked: Asked, spelling: Spelling, component: str) -> str:
    if component in ("unet", "te2"):
        return f"lora_{component}_"
    if not component and spelling.naming == "own":
        return "lycoris_"
    if not component:
        what = "is of a text encoder, of which neither the base nor the adapter says which"
        raise KeyMismatch(what, hint="name a base that holds the whole pipeline, in one file")
    # sd-scripts: a model with one text encoder has no number in its name
    told = asked.starts & {"lora_te_", "lora_te1_", "lora_te2_", "text_encoder_2."}
    if asked.family == "sd" or (not asked.family and "lora_te_" in told):
        return "lora_te_"
    if not asked.family and not told:
        what = "is lora_te_ in Stable Diffusion 1 and 2, and lora_te1_ in SDXL and Flux"
        raise KeyMismatch(what, hint="name a base that holds the UNet too")
    return "lora_te1_"


def _start_of_comfyui(asked: Asked, spelling: Spelling, component: str) -> str:
    if component == "unet":
        return "diffusion_model."
    if spelling.name.startswith("encoder."):
        return "text_encoders.t5xxl.transformer."
    if component == "te2":
        return "text_encoders.clip_g.transformer."
    # the text encoder of Stable Diffusion 2 is 1024 wide, and another one to ComfyUI
    shapes = (asked.shapes.get(place.key) for place in spelling.places)
    if any(1024 in (shape or ()) for shape in shapes):
        raise KeyMismatch("is of the text encoder of Stable Diffusion 2, whose name is not known")
    return "text_encoders.clip_l.transformer."
