"""Make the folders of tests/data/deepspeed with deepspeed itself, and beside each what its own
`zero_to_fp32` makes of it.

    DS_ACCELERATOR=cpu python tests/data/make_deepspeed.py [CASE ...]

Needs torch 2.13 and deepspeed 0.19.8 (DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed),
no GPU: each rank is a process. A case is CASE/latest, CASE/global_stepN/*.pt and CASE/fp32.pt
(fp32_TAG.pt for other steps).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent / "deepspeed"


class Small(nn.Module):
    """Odd sizes, a convolution, buffers of several types (one of them not persistent), and two tied
    weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.conv = nn.Conv1d(5, 3, 3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running_mean", torch.tensor([0.1, -0.2, 0.3]))
        self.register_buffer("count", torch.tensor(1 << 40))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).transpose(1, 2)
        narrow = (self.conv(hidden) * self.scale).transpose(1, 2) + self.running_mean * self.mask
        return self.head(hidden.transpose(1, 2)).float().sum() + narrow.float().pow(2).sum()


def one_group(model: nn.Module) -> Any:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest apart, as for a weight decay."""
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    decayed = [parameter for name, parameter in named if parameter.ndim > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {
            "params": [parameter for name, parameter in named if parameter.ndim <= 1],
            "weight_decay": 0.0,
        },
    ]


@dataclass(frozen=True)
class Case:
    """One folder: the stage, how many ranks, the steps that are saved, and what is special."""

    stage: int
    ranks: int
    steps: int = 1
    groups: Callable[[nn.Module], Any] = one_group
    frozen: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    # zero_to_fp32 does not know it; deepspeed is asked for each parameter instead
    asked: bool = False


BF16 = {"bf16": {"enabled": True}}
CASES = {
    "stage0": Case(0, 1, config=BF16),
    "stage1": Case(1, 3, config={"fp16": {"enabled": False}}, frozen=("conv.weight",)),
    "stage1_bf16": Case(
        1, 2, config={**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, asked=True
    ),
    "stage2": Case(2, 2, steps=2, config=BF16, groups=two_groups, client_state={"epoch": 3}),
    "stage2_frozen": Case(2, 4, config=BF16, frozen=("embed.weight", "scale")),
    "stage2_robin": Case(
        2, 3, config=BF16, groups=two_groups, zero={"round_robin_gradients": True}
    ),
    "stage2_aligned": Case(2, 3, config=BF16, zero={"parameter_alignment": True}),
    "stage3": Case(3, 2, steps=2, config=BF16, groups=two_groups, client_state={"epoch": 3}),
    "stage3_frozen": Case(3, 3, config=BF16, frozen=("embed.weight", "conv.bias")),
    "stage3_many": Case(3, 4, config=BF16, zero={"sub_group_size": 20}),
}


def train(rank: int, case: Case, folder: Path, port: int) -> None:
    """One rank: train some steps and save each."""
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": case.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in ranks.items()})
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage, **case.zero},
        **case.config,
    }
    optimizer = torch.optim.AdamW(case.groups(model), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(case.steps):
        engine.backward(engine(torch.tensor([[(rank + step) % 7, 1, 2, 3, 4]])))
        engine.step()
        engine.save_checkpoint(str(folder), client_state=dict(case.client_state))
    if case.asked:
        ask(engine.module, folder, rank)
    torch.distributed.destroy_process_group()


def ask(model: nn.Module, folder: Path, rank: int) -> None:
    """Save what deepspeed gives for each parameter, in the order of zero_to_fp32: buffers,
    parameters, the tied one.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    found = {
        name: value.float() if value.is_floating_point() else value
        for name, value in model.named_buffers()
    }
    del found["scratch"]
    found.update(
        (name, safe_get_full_fp32_param(parameter)) for name, parameter in model.named_parameters()
    )
    if rank == 0:
        torch.save({**found, "head.weight": found["embed.weight"]}, folder / "fp32.pt")


def consolidate(folder: Path, case: Case) -> None:
    """Write the state dict that zero_to_fp32 makes of each step."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if not case.stage or case.asked:
        return
    for tag in steps(folder):
        name = "fp32.pt" if tag == (folder / "latest").read_text() else f"fp32_{tag}.pt"
        torch.save(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag), folder / name)


def steps(folder: Path) -> Iterator[str]:
    return (item.name for item in sorted(folder.iterdir()) if item.is_dir())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def make(name: str) -> None:
    case, folder = CASES[name], HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.multiprocessing.spawn(train, (case, folder, free_port()), nprocs=case.ranks)
    consolidate(folder, case)
    for script in folder.glob("*.py"):  # deepspeed leaves its own converters beside the steps
        script.unlink()


def main() -> None:
    for name in sys.argv[1:] or CASES:
        make(name)


if __name__ == "__main__":
    main()
