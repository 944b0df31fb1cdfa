"""Make the folders of tests/data/deepspeed with deepspeed itself, and beside each what its own
`zero_to_fp32` makes of it, and its `ds_to_universal`.

    DS_ACCELERATOR=cpu python tests/data/make_deepspeed.py [CASE ...]

Needs torch 2.13 and deepspeed 0.19.8 (DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed),
no GPU: each rank is a process. A case is CASE/latest, CASE/global_stepN/*.pt, CASE/fp32.pt
(fp32_TAG.pt for other steps) and CASE/states.pt, {parameter: {name: what the optimizer keeps}}.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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


def of_momentum(name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Of SGD in `two_groups`, after deepspeed has clipped all gradients together."""
    assert parameter.grad is not None
    decay = 0.1 if parameter.ndim > 1 else 0.0
    return {"momentum_buffer": parameter.grad + decay * parameter.detach()}


def of_muon(name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Muon, with a momentum of 0.95, has the convolution alone, before any clipping."""
    assert parameter.grad is not None
    return {"momentum_buffer": parameter.grad * 0.05} if name == "conv.weight" else {}


ADAMW = partial(torch.optim.AdamW, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


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
    optimizer: Callable[..., Any] | None = ADAMW
    # zero_to_fp32 does not know it; deepspeed is asked for each parameter instead
    asked: bool = False
    # what ds_to_universal does not know of the optimizer: what it must keep of the first gradient
    kept: Callable[[str, nn.Parameter], dict[str, Tensor]] | None = None


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 3}
}
CASES = {
    "stage0": Case(0, 1, config=BF16),
    "stage1": Case(1, 3, config={"fp16": {"enabled": False}}, frozen=("conv.weight",)),
    "stage1_bf16": Case(
        1, 2, config={**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, asked=True
    ),
    "stage2": Case(2, 2, steps=2, config=BF16, groups=two_groups, client_state={"epoch": 3}),
    "stage2_frozen": Case(2, 4, config=BF16, frozen=("embed.weight", "scale")),
    "stage2_fp16": Case(2, 2, steps=2, config=FP16),
    "stage2_robin": Case(
        2, 3, config=BF16, groups=two_groups, zero={"round_robin_gradients": True}
    ),
    "stage2_aligned": Case(2, 3, config=BF16, zero={"parameter_alignment": True}),
    "stage3": Case(3, 2, steps=2, config=BF16, groups=two_groups, client_state={"epoch": 3}),
    "stage3_frozen": Case(3, 3, config=BF16, frozen=("embed.weight", "conv.bias")),
    "stage3_many": Case(3, 4, config=BF16, zero={"sub_group_size": 20}),
    "stage1_momentum": Case(
        1, 2, groups=two_groups, optimizer=MOMENTUM, asked=True, kept=of_momentum
    ),
    "stage2_muon": Case(2, 2, config={**BF16, **MUON}, optimizer=None, asked=True, kept=of_muon),
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

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else each rank compiles it
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch computes it on a CPU
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
    optimizer = None if case.optimizer is None else case.optimizer(case.groups(model))
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


def plainly(folder: Path, case: Case) -> None:
    """Save what the optimizer must keep of the first step, by the gradients that torch computes."""
    if case.kept is None:
        return
    torch.manual_seed(0)
    model = Small().bfloat16() if "bf16" in case.config else Small()
    for rank in range(case.ranks):
        (model(torch.tensor([[rank % 7, 1, 2, 3, 4]])) / case.ranks).backward()
    if case.kept is of_momentum:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found = {name: case.kept(name, parameter) for name, parameter in model.named_parameters()}
    torch.save(found, folder / "states.pt")


def universal(folder: Path, case: Case) -> None:
    """Write what ds_to_universal makes of the optimizer of the last step."""
    from deepspeed.checkpoint import ds_to_universal

    if not case.stage or case.kept:
        return
    step, made = folder / (folder / "latest").read_text(), folder / "universal"
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(step),
            output_folder=str(made),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    first = torch.load(min(step.glob("*rank_0_mp*optim_states.pt")), weights_only=False)
    shapes = {name: value.shape for name, value in torch.load(folder / "fp32.pt").items()}
    found = {
        item.parent.name: states_in(item.parent, shapes[item.parent.name], case, first)
        for item in sorted(made.glob("zero/*/exp_avg.pt"))
    }
    torch.save(found, folder / "states.pt")
    shutil.rmtree(made)


def states_in(item: Path, shape: torch.Size, case: Case, rank: Any) -> dict[str, Tensor]:
    """What a universal checkpoint has of a parameter; of stage 3 it is flat, and has no step."""
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):
        value = torch.load(item / f"{key}.pt")
        found[key] = (value["param"] if isinstance(value, dict) else value).reshape(shape).clone()
    if case.stage < 3:
        return {**found, "step": torch.load(item / "step.pt")}
    inner = rank["optimizer_state_dict"]["optimizer_state_dict"]
    return {**found, "step": inner["state"][0]["step"]}


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
    universal(folder, case)
    plainly(folder, case)
    for script in folder.glob("*.py"):  # deepspeed leaves its own converters beside the steps
        script.unlink()


def main() -> None:
    for name in sys.argv[1:] or CASES:
        make(name)


if __name__ == "__main__":
    main()
