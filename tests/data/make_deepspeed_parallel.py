"""Make the folders of tests/data/deepspeed_parallel with deepspeed itself: a pipeline of two stages
under ZeRO 1, and experts on two ranks each under ZeRO 2, four processes both.

    DS_ACCELERATOR=cpu python tests/data/make_deepspeed_parallel.py [pipeline|experts ...]

Needs what make_deepspeed.py needs. pipeline/states.pt is what deepspeed gives of each parameter.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.multiprocessing
from make_deepspeed import free_port
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent / "deepspeed_parallel"
RANKS = 4
CONFIG = {"zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
KEPT = ("exp_avg", "exp_avg_sq")


def begin(rank: int, port: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)


def pipeline(rank: int, folder: Path, port: int) -> None:
    """Layers of which one has no parameters."""
    begin(rank, port)
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    layers = [
        LayerSpec(nn.Linear, 6, 8),
        nn.functional.relu,
        LayerSpec(nn.LayerNorm, 8),
        LayerSpec(nn.Linear, 8, 4),
    ]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.train_batch(batches())
    engine.save_checkpoint(str(folder))
    found = {}
    for name, parameter in engine.module.named_parameters():
        states = {key: safe_get_full_optimizer_state(parameter, key) for key in KEPT}
        found[name] = {"fp32": safe_get_full_fp32_param(parameter), **states}
    every: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(RANKS)]
    torch.distributed.all_gather_object(every, found)
    if rank == 0:
        torch.save(
            {name: state for one in every for name, state in one.items()}, folder / "states.pt"
        )
    torch.distributed.destroy_process_group()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.randn(2, 6).bfloat16(), torch.randn(2, 4).bfloat16()


class Mixture(nn.Module):
    """Four experts, two on each rank."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.a = nn.Linear(6, 6)
        expert = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        self.m = MoE(6, expert, num_experts=4, ep_size=2, k=1, capacity_factor=4.0)
        self.b = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, loss, _ = self.m(self.a(x))
        return self.b(mixed).float().pow(2).sum() + loss.float()


def experts(rank: int, folder: Path, port: int) -> None:
    begin(rank, port)
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Mixture()
    torch.manual_seed(100 + rank)
    with torch.no_grad():  # deepspeed makes copies of one expert
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.copy_(torch.randn_like(parameter))
    everything = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(everything)
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        engine.backward(engine(torch.randn(8, 6).bfloat16()))
        engine.step()
    engine.save_checkpoint(str(folder))
    torch.distributed.destroy_process_group()


def main() -> None:
    for name in sys.argv[1:] or ("pipeline", "experts"):
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = {"pipeline": pipeline, "experts": experts}[name]
        torch.multiprocessing.spawn(made, (folder, free_port()), nprocs=RANKS)
        for script in folder.glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main()
