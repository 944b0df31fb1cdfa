"""Megatron core saves and loads a folder, as one rank of several on this host; a script.

    python megatron_core.py RANK WORLD STORE save|load FOLDER OUT

It runs without a GPU: the few calls that ask for one are answered here. `save` writes two tensors
and objects of both ranks into FOLDER; `load` puts into OUT what the loader gives for each tensor
and object of FOLDER, its halves along the first dimension where it has some.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None


def save(rank: int, world: int, folder: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def of_rank(key: str, values: torch.Tensor) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, values, (0, rank, world))

    values = torch.arange(6.0).reshape(2, 3) + 10 * rank
    model = {
        "layers.w": of_rank("layers.w", values),
        "layers.w._extra_state": ShardedObject(
            "layers._extra_state", {"of": rank}, (world,), (rank,)
        ),
    }
    others = {
        "optimizer": {"m": of_rank("optimizer.state.exp_avg.layers.w", values / 7)},
        "rng_state": ShardedObject("rng_state", [{"seed": rank}], (1, world), (0, rank)),
        "iteration": 3,
    }
    dist_checkpointing.save({"model": model, **others}, folder)


def load(rank: int, world: int, folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.core.dist_checkpointing.validation import StrictHandling

    asked: dict[str, Any] = {}
    for key, told in load_sharded_metadata(folder).items():
        asked[key] = told
        if isinstance(told, ShardedTensor):
            size, *rest = told.global_shape
            is_cut = size % world == 0
            part = torch.empty((size // world if is_cut else size, *rest), dtype=told.dtype)
            offsets = [(0, rank, world)] if is_cut else []
            replica = 0 if is_cut else rank
            asked[key] = ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=replica)
    found, missing, unexpected = dist_checkpointing.load(
        {"asked": asked}, folder, strict=StrictHandling.RETURN_ALL, validate_access_integrity=False
    )
    assert not missing and not unexpected, (missing, unexpected)
    return found


def main() -> None:
    rank, world, store, what, folder, out = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    if what == "save":
        Path(folder).mkdir(exist_ok=True)
        save(int(rank), int(world), folder)
    else:
        torch.save(load(int(rank), int(world), folder), f"{out}.{rank}")
    dist.barrier()  # who leaves early ends what the others still ask it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
