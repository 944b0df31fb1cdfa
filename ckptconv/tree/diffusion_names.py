"""The two namings of the UNets of Stable Diffusion 1, 2 and XL, and of Flux: that of the original
files (``input_blocks.4.1``) and that of diffusers (``down_blocks.1.attentions.0``).

All of these UNets have two blocks at each level, so three numbers of the original are one of
diffusers. The names of Flux are another such pair, in which one weight of the original files is
several of diffusers, one below the other; so are those of OpenCLIP, the text encoder of SDXL's and
Stable Diffusion 2's original files, and of transformers. Facts: diffusers 0.42,
loaders/single_file_utils.py and loaders/lora_conversion_utils.py (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

# The parts of a ResBlock
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_SINGLE = {
    "input_blocks.0.0": "conv_in",
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
# The middle block is a list of three there
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_KINDS = {"0": "resnets"}  # by the number in an original block; behind it stands attention
_BACK_RESNET = {new: old for old, new in _RESNET.items()}
_BACK_SINGLE = {new: old for old, new in _SINGLE.items()}
_BACK_MIDDLE = {new: old for old, new in _MIDDLE.items()}

_ORIGINAL = re.compile(r"(input_blocks|output_blocks)\.(\d{1,3})\.(\d)\.(.+)")
_DIFFUSERS = re.compile(
    r"(down|up)_blocks\.(\d)\.(resnets|attentions|downsamplers|upsamplers)\.(\d)\.(.+)"
)


def as_in_diffusers(module: str) -> str | None:
    """The name in diffusers of a module of an original UNet; None for any other name.

    >>> as_in_diffusers("input_blocks.4.1.transformer_blocks.0.attn1.to_q")
    'down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q'
    """
    if module in _SINGLE:
        return _SINGLE[module]
    if module.startswith("middle_block."):
        number, _, rest = module.removeprefix("middle_block.").partition(".")
        if number not in _MIDDLE or not rest:
            return None
        return _within(f"mid_block.{_MIDDLE[number]}", rest, _RESNET)
    found = _ORIGINAL.fullmatch(module)
    if not found:
        return None
    side, number, part, rest = found.groups()
    kind = _KINDS.get(part, "attentions")
    if side == "input_blocks":
        block, at = divmod(int(number) - 1, 3)  # the first one is conv_in
        if at < 2:
            return _within(f"down_blocks.{block}.{kind}.{at}", rest, _RESNET)
        return f"down_blocks.{block}.downsamplers.0.conv" if rest == "op" else None
    block, at = divmod(int(number), 3)
    if rest == "conv" and part != "0":
        return f"up_blocks.{block}.upsamplers.0.conv"
    return _within(f"up_blocks.{block}.{kind}.{at}", rest, _RESNET)


def as_in_original(module: str, modules: Collection[str]) -> str | None:
    """The original name of a module of a UNet in diffusers, whose `modules` tell which of its
    blocks have attention; None for any other name.

    >>> as_in_original("up_blocks.0.upsamplers.0.conv", ())
    'output_blocks.2.1.conv'
    """
    if module in _BACK_SINGLE:
        return _BACK_SINGLE[module]
    if module.startswith("mid_block."):
        for new, old in _BACK_MIDDLE.items():
            if module.startswith(f"mid_block.{new}."):
                rest = module.removeprefix(f"mid_block.{new}.")
                return _within(f"middle_block.{old}", rest, _BACK_RESNET)
        return None
    found = _DIFFUSERS.fullmatch(module)
    if not found:
        return None
    side, number, kind, at, rest = found.groups()
    block = int(number)
    if kind == "downsamplers":
        return f"input_blocks.{3 * block + 3}.0.op"
    if kind == "upsamplers":
        start = f"up_blocks.{block}.attentions."
        part = 1 + any(name.startswith(start) for name in modules)
        return f"output_blocks.{3 * block + 2}.{part}.conv"
    part = int(kind == "attentions")
    if side == "down":
        return _within(f"input_blocks.{3 * block + int(at) + 1}.{part}", rest, _BACK_RESNET)
    return _within(f"output_blocks.{3 * block + int(at)}.{part}", rest, _BACK_RESNET)


def _within(start: str, rest: str, parts: dict[str, str]) -> str:
    return f"{start}.{parts.get(rest, rest)}"


# ------------------------------------------------------------------------------------------ Flux

# DoubleStreamBlock: what is one matrix there may be several here, in the order of its rows
_DOUBLE = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
}
# SingleStreamBlock
_ONE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
# What stands outside the blocks, but for `final_layer.adaLN_modulation.1`: its halves are the other
# way round in diffusers
_AROUND = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
_BLOCKS = {"double": ("transformer_blocks", _DOUBLE), "single": ("single_transformer_blocks", _ONE)}
_FLUX = re.compile(r"(double|single)_blocks\.(\d{1,3})\.(.+)")


def flux_in_diffusers(module: str) -> tuple[str, ...]:
    """The modules of diffusers that are one of the original Flux, in the order of its rows; empty
    for any other name.

    >>> flux_in_diffusers("single_blocks.3.linear1")[3]
    'single_transformer_blocks.3.proj_mlp'
    """
    if module in _AROUND:
        return (_AROUND[module],)
    found = _FLUX.fullmatch(module)
    if not found:
        return ()
    kind, number, rest = found.groups()
    start, table = _BLOCKS[kind]
    return tuple(f"{start}.{number}.{name}" for name in table.get(rest, ()))


def _flux_parts() -> Iterator[tuple[str, tuple[str, int, int]]]:
    for kind, (start, table) in _BLOCKS.items():
        for original, names in table.items():
            for at, name in enumerate(names):
                yield f"{start}.*.{name}", (f"{kind}_blocks.*.{original}", at, len(names))
    for original, name in _AROUND.items():
        yield name, (original, 0, 1)


_BACK_FLUX = dict(_flux_parts())
_FLUX_IN_DIFFUSERS = re.compile(r"((?:single_)?transformer_blocks)\.(\d{1,3})\.(.+)")


def flux_in_original(module: str) -> tuple[str, int, int] | None:
    """The module of the original Flux that has the rows of one of diffusers, which of its parts
    they are, and how many these are; None for any other name.

    >>> flux_in_original("transformer_blocks.7.attn.to_v")
    ('double_blocks.7.img_attn.qkv', 2, 3)
    """
    number = ""
    found = _FLUX_IN_DIFFUSERS.fullmatch(module)
    if found:
        start, number, rest = found.groups()
        module = f"{start}.*.{rest}"
    if module not in _BACK_FLUX:
        return None
    original, at, count = _BACK_FLUX[module]
    return original.replace("*", number), at, count


# -------------------------------------------------------------------------------------- OpenCLIP

_OPEN_CLIP = {
    "attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out_proj": ("self_attn.out_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
    "ln_1": ("layer_norm1",),
    "ln_2": ("layer_norm2",),
}
_RESBLOCK = re.compile(r"transformer\.resblocks\.(\d{1,3})\.(.+)")


def open_clip_in_transformers(module: str) -> tuple[str, ...]:
    """The modules of transformers that are one of OpenCLIP's text encoder, in the order of its
    rows; those of ``attn`` are q, k and v of its ``in_proj_weight``. Empty for any other name.

    >>> open_clip_in_transformers("transformer.resblocks.3.mlp.c_fc")
    ('text_model.encoder.layers.3.mlp.fc1',)
    """
    found = _RESBLOCK.fullmatch(module)
    if not found:
        return ()
    number, rest = found.groups()
    return tuple(f"text_model.encoder.layers.{number}.{name}" for name in _OPEN_CLIP.get(rest, ()))
