"""Training that goes on: FSDP2 on gloo and plain torch, from checkpoints of themselves and others.

    python -m helpers.resumed JOBS.json

A job is what `Job` says; each rank of it is forked from this process. Plain torch, nothing of
ckptconv. The losses of a job are those of all samples of a step, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SAMPLES = 8
STEPS = 10
"""Steps before a checkpoint."""


@dataclass(frozen=True)
class Job:
    """A training of `world` ranks from step `first` for `steps` steps, after loading `load` in one
    of the `ways`: a DCP folder by names, ``flat`` or as ``torchtitan``, a file of ``full`` states
    that FSDP2 spreads itself, or ``plain`` torch without FSDP. It saves to `save` the same way; its
    losses go to `losses`. `weights` is the key of the weights in a DCP folder by names.
    """

    losses: str
    world: int = 1
    way: str = "names"
    first: int = 0
    steps: int = STEPS
    load: str = ""
    save: str = ""
    weights: str = "model"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(9, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 7), nn.Linear(7, 5, bias=False)
    )


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups that decay otherwise, as trainers make them."""
    wide = [value for value in net.parameters() if value.ndim > 1]
    flat = [value for value in net.parameters() if value.ndim < 2]
    return torch.optim.AdamW([{"params": wide}, {"params": flat, "weight_decay": 0.0}], lr=0.01)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1000 + step)
    inputs, targets = (torch.randn(SAMPLES, size, generator=draws) for size in (9, 5))
    share = SAMPLES // world
    mine = slice(rank * share, (rank + 1) * share)
    return inputs[mine], targets[mine]


def trained(job: Job, rank: int) -> None:
    """One rank of a job."""
    torch.set_num_threads(1)
    at = f"file://{job.losses}.meet"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=job.world)
    net = model()
    if job.way != "plain":
        mesh = init_device_mesh("cpu", (job.world,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = optimizer_of(net)
    if job.load:
        load(job, net, optimizer)
    losses = []
    for step in range(job.first, job.first + job.steps):
        inputs, targets = batch(step, rank, job.world)
        loss = (net(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((total / job.world).item())
    if job.save:
        save(job, net, optimizer)
    if rank == 0:
        Path(job.losses).write_text(json.dumps(losses))
    dist.destroy_process_group()


def load(job: Job, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if job.way == "plain":
        whole = torch.load(job.load)
        net.load_state_dict(whole["model"])
        optimizer.load_state_dict(whole["optimizer"])
        return
    options = StateDictOptions(flatten_optimizer_state_dict=job.way in ("flat", "torchtitan"))
    state: dict[str, Any]
    if job.way == "full":
        state = torch.load(job.load)
        options = StateDictOptions(full_state_dict=True)
    else:
        weights, states = get_state_dict(net, optimizer, options=options)
        state = {job.weights: weights, "optimizer": states}
        if job.way == "torchtitan":
            state = {**weights, "optimizer": states}
        dcp.load(state, checkpoint_id=job.load)
        if job.way == "torchtitan":
            state[job.weights] = {key: state[key] for key in weights}
    set_state_dict(
        net,
        optimizer,
        model_state_dict=state[job.weights],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def save(job: Job, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if job.way == "plain":
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, job.save)
        return
    weights, states = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=job.save)


def run(job: Job, rank_of: Callable[[Job, int], None]) -> None:
    """All ranks of a job, each in a process of its own, which does `rank_of(job, rank)`."""
    ranks = []
    for rank in range(job.world):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                rank_of(job, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ranks.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert codes == [0] * job.world, (job, codes)


def main(rank_of: Callable[[Job, int], None]) -> None:
    for said in json.loads(Path(sys.argv[1]).read_text()):
        run(Job(**said), rank_of)


if __name__ == "__main__":
    main(trained)
