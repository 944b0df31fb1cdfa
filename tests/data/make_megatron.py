"""Make `megatron/`, a checkpoint of Megatron core in two processes, and `megatron.whole.pt`, the
tensors that it must become.

    pip install torch megatron-core==0.16.1 psutil
    cd tests/data && torchrun --nproc-per-node 2 make_megatron.py

It runs without a GPU: the few calls that ask for one are answered here.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None


def main() -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, columns, layers = (
        torch.arange(48.0).reshape(8, 6),
        torch.arange(12.0, 60.0).reshape(8, 6),
        torch.arange(8.0),
    )
    layers = layers.reshape(2, 2, 2)
    moments = torch.arange(100.0, 148.0).reshape(8, 6)

    def shard(key: str, values: torch.Tensor, dim: int) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(
            key, values.chunk(size, dim)[rank].contiguous(), (dim, rank, size)
        )

    state = {
        "model": {
            "up": shard("decoder.up.weight", rows, 0),
            "down": shard("decoder.down.weight", columns, 1),
            "layer": ShardedTensor.from_rank_offsets(
                "decoder.layers.w", layers[rank], (0, rank, size), prepend_axis_num=1
            ),
            "extra": ShardedObject(
                "decoder._extra_state", {"scale": torch.ones(2) * rank}, (size,), (rank,)
            ),
        },
        "optimizer": {
            "exp_avg": shard("optimizer.state.exp_avg.decoder.up.weight", moments, 0),
            "groups": [{"lr": 0.1}],
        },
        "rng_state": ShardedObject(
            "rng_state", [{"torch": torch.arange(4) + rank}], (size,), (rank,)
        ),
        "args": {"hidden_size": 6},
        "iteration": 5,
        "checkpoint_version": 3.0,
    }
    folder = Path("megatron")
    if rank == 0:
        folder.mkdir()
        whole = {
            "decoder.up.weight": rows,
            "decoder.down.weight": columns,
            "decoder.layers.w": layers,
        }
        torch.save({"model": whole, "exp_avg": moments}, "megatron.whole.pt")
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
