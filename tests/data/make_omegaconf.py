"""Makes `omegaconf.*.pt`: configurations in protocols 2 and 4, what omegaconf says that they are,
and one with an enum.

pip install torch omegaconf==2.4.0 fastcore
python tests/data/make_omegaconf.py
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fastcore.foundation import L
from omegaconf import MISSING, DictConfig, OmegaConf

FOLDER = Path(__file__).parent


class Color(enum.Enum):
    RED = 1


@dataclass
class Model:
    width: int = 3
    rate: float = 0.5
    name: str = MISSING
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def main() -> None:
    cfg = OmegaConf.create(
        {"lr": 0.1, "again": "${lr}", "flags": [True, None, {"x": b"y"}], "none": None, 3: "int"}
    )
    cfg.model = OmegaConf.structured(Model)
    OmegaConf.set_readonly(cfg.model, True)
    empty = [OmegaConf.create({}), OmegaConf.create([]), DictConfig(None), DictConfig("${lr}")]
    tree: dict[str, Any] = {
        "w": torch.ones(2),
        "cfg": cfg,
        "shared": cfg.model.sizes,
        "empty": empty,
    }
    tree["l"] = L([1, "a", L(2, 3)])
    for protocol in (2, 4):
        torch.save(tree, FOLDER / f"omegaconf.{protocol}.pt", pickle_protocol=protocol)
    plain = OmegaConf.to_container(cfg, resolve=False)
    plain_empty: list[Any] = [{}, [], None, "${lr}"]
    plain_tree = {
        "w": tree["w"],
        "cfg": plain,
        "shared": plain["model"]["sizes"],
        "empty": plain_empty,
        "l": [1, "a", [2, 3]],
    }
    torch.save(plain_tree, FOLDER / "omegaconf.plain.pt")
    torch.save(
        {"w": torch.ones(2), "cfg": OmegaConf.create({"color": Color.RED})},
        FOLDER / "omegaconf.enum.pt",
    )


if __name__ == "__main__":
    main()
