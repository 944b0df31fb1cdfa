"""Training under DeepSpeed's ZeRO on gloo that goes on from a universal checkpoint.

    DS_ACCELERATOR=cpu python -m helpers.resumed_deepspeed JOBS.json

The jobs are those of `helpers.resumed`; their ways are ``zero2`` and ``zero3``, also with
``-fp16``, where each loss stands in a list with the state of the loss scaler after the step. They
load universal checkpoints and save DeepSpeed's own. Nothing of ckptconv.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before deepspeed looks for one

import deepspeed
import torch
import torch.distributed as dist

from helpers.resumed import SAMPLES, Job, batch, main, model, optimizer_of

# torch computes it on any CPU, and deepspeed asks for one that has instructions of its own for it
deepspeed.get_accelerator().is_fp16_supported = lambda: True
# Else each rank compiles it, and waits for ever where a run that was ended left its lock.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


SCALING = ("cur_scale", "cur_hysteresis", "cur_iter", "last_overflow_iter")


def trained(job: Job, rank: int) -> None:
    """One rank of a job."""
    torch.set_num_threads(1)
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world}
    os.environ.update({name: str(value) for name, value in said.items()})
    at = f"file://{job.losses}.meet"
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=at, rank=rank, world_size=job.world
    )
    net = model()
    optimizer = optimizer_of(net)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(job))
    if job.load:
        path, _ = engine.load_checkpoint(job.load)
        assert path is not None, job.load
    losses: list[Any] = []
    for step in range(job.first, job.first + job.steps):
        inputs, targets = batch(step, rank, job.world)
        dtype = next(net.parameters()).dtype
        loss = (engine(inputs.to(dtype)) - targets.to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((total / job.world).item())
        if job.way.endswith("fp16"):
            scaler = vars(engine.optimizer.loss_scaler)
            losses[-1] = [losses[-1], *(scaler[name] for name in SCALING)]
    if job.save:
        engine.save_checkpoint(job.save)
    if rank == 0:
        Path(job.losses).write_text(json.dumps(losses))
    dist.destroy_process_group()


def config_of(job: Job) -> dict[str, Any]:
    """In fp16 the first scale is so large that steps overflow before the checkpoint."""
    stage, _, fp16 = job.way.removeprefix("zero").partition("-")
    return {
        "fp16": {
            "enabled": bool(fp16),
            "initial_scale_power": 20,
            "loss_scale_window": 3,
            "hysteresis": 3,
        },
        "train_micro_batch_size_per_gpu": SAMPLES // job.world,
        "gradient_clipping": 0.0,  # it clips at 1 by default, which FSDP2 does not
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(stage)},
        "checkpoint": {"load_universal": bool(job.load)},
    }


if __name__ == "__main__":
    main(trained)
