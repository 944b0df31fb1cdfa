"""Checkpoints for the tests of pages: a small model, a hostile one, many tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

LONG = "long." + "x" * 1_000_000
HOSTILE = (
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror=window.hit=1>",
    "<!--<script>",
    "<!--<script x",
    "</script x",
    "</script/x",
    "\"'`><svg/onload=window.hit=1>",
    "&lt;b&gt;",
    "nul\x00and\x1b[31mred\r\n",
    "right\u202eto left\u200f",
    "line\u2028paragraph\u2029",
    "\ud800 half",
    "\U0001f600\U0001f600.weight",
    "\U0001f600\U0001f601.weight",
    "__proto__",
    "constructor.prototype",
    "hasOwnProperty",
    "",
    ".",
    "a..b",
    "a",
    "a.b",
    "javascript:window.hit=1",
    "]]>",
    "${window.hit=1}",
    LONG,
    LONG + "y",
)
"""Keys that a page must show, and not take for anything else."""


def model(layers: int = 4, wide: int = 16) -> dict[str, torch.Tensor]:
    """A small language model, its head tied."""
    torch.manual_seed(0)
    made = {"model.embed.weight": torch.randn(40, wide)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        made[f"{at}attn.q.weight"] = torch.randn(wide, wide) * 0.02 * (layer + 1)
        made[f"{at}attn.k.weight"] = torch.randn(wide, wide) * 0.02
        made[f"{at}mlp.up.weight"] = torch.randn(4 * wide, wide).half()
        made[f"{at}norm.weight"] = torch.ones(wide)
    made["model.layers.1.norm.weight"][3] = float("nan")
    made["lm_head.weight"] = made["model.embed.weight"]
    return made


def many(path: Path, count: int) -> None:
    """A safetensors file of about so many tensors, with names as a mixture of experts has them."""
    torch.manual_seed(0)
    layers = max(2, count // 1000)
    experts = -(-count // (3 * layers))
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight": torch.randn(2, 4)
        for layer in range(layers)
        for expert in range(experts)
        for kind in ("gate", "up", "down")
    }
    save_file(dict([*tensors.items()][:count]), path)
