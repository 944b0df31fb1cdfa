"""Makes `bitsandbytes.pt`, a whole model with quantized layers, and `bitsandbytes.state.pt`, the
state dict that it gives.

Run with bitsandbytes 0.50 and torch 2.13 installed: python make_bitsandbytes.py
"""

from pathlib import Path

import torch
from bitsandbytes import nn as quantized
from torch import nn


def main() -> None:
    """Write both files beside this one."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "nested": quantized.Linear4bit(16, 8, compress_statistics=True, quant_type="nf4"),
            "plain": quantized.LinearFP4(16, 4, bias=False, compress_statistics=False),
            "twin": quantized.LinearNF4(16, 8, compress_statistics=True),
            "eight": quantized.Linear8bitLt(8, 4, has_fp16_weights=False),
            "wide": quantized.Linear8bitLt(4, 2, has_fp16_weights=True),
            "norm": nn.LayerNorm(4),
        }
    ).to("cpu")
    folder = Path(__file__).parent
    torch.save(model, folder / "bitsandbytes.pt")
    torch.save(
        torch.load(folder / "bitsandbytes.pt", weights_only=False).state_dict(),
        folder / "bitsandbytes.state.pt",
    )


if __name__ == "__main__":
    main()
