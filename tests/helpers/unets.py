"""The UNets of diffusers that adapters are tried with, in small."""

from __future__ import annotations

from typing import Any

import torch

UNETS = {
    "Stable Diffusion 1.5": (
        (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
        {"cross_attention_dim": 16, "attention_head_dim": 8},
    ),
    "SDXL": (
        ("DownBlock2D", *("CrossAttnDownBlock2D",) * 2),
        (*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"),
        {
            "cross_attention_dim": 16, "attention_head_dim": 8, "use_linear_projection": True,
            "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 40, "transformer_layers_per_block": 2,
        },
    ),
}  # fmt: skip


def unet(name: str) -> Any:
    """A small model of that name, of diffusers."""
    import diffusers

    down, up, settings = UNETS[name]
    torch.manual_seed(1)
    return diffusers.UNet2DConditionModel(
        block_out_channels=tuple(32 for _ in down), down_block_types=down, up_block_types=up,
        **settings,
    ).to(torch.bfloat16)  # fmt: skip
