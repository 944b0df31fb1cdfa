"""Make `megatron_optimizer/`, checkpoints of Megatron core with optimizers, written by two
processes, and `megatron_optimizer.whole.pt`: of each the weights and what the optimizer keeps,
gathered.

    pip install torch megatron-core==0.16.1 psutil
    cd tests/data && torchrun --nproc-per-node 2 make_megatron_optimizer.py

`plain` has one group of parameters, as a float32 optimizer. `mixed` has two, and master weights, as
`Float16OptimizerWithFloat16Params` has. `chained` has two optimizers, as models with experts have.
It runs without a GPU: the few calls that ask for one are answered here.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None

SHARDED = {
    "decoder.layers.linear.weight": ((4, 6), 0),
    "decoder.layers.linear.bias": ((4,), 0),
    "embedding.weight": ((6, 3), 1),
    "norm.weight": ((3,), None),
}
"""The parameters of the model: the shape of a rank's part, and the dimension that is split."""


def parts(rank: int) -> dict[str, torch.nn.Parameter]:
    """A rank's part of each parameter, after it was given one gradient."""
    found = {}
    for number, (key, (shape, dim)) in enumerate(SHARDED.items()):
        start = 100.0 * number + (0 if dim is None else 50.0 * rank)
        values = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
        found[key] = torch.nn.Parameter(values)
        found[key].grad = values / 7 + 1
    return found


def main() -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
        optim_state_to_sharding_state,
    )
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    home = Path("megatron_optimizer")
    wholes: dict[str, Any] = {}

    def gathered(key: str, values: torch.Tensor) -> torch.Tensor:
        dim = SHARDED[key][1]
        held = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(held, values.contiguous())
        return held[0] if dim is None else torch.cat(held, dim)

    def sharded(key: str, values: torch.Tensor) -> ShardedTensor:
        dim = SHARDED[key][1]
        offsets = [] if dim is None else [(dim, rank, size)]
        replica = rank if dim is None else 0
        return ShardedTensor.from_rank_offsets(key, values, *offsets, replica_id=replica)

    def trained(params: dict[str, torch.nn.Parameter], groups: list[list[str]]) -> Any:
        optimizer = torch.optim.AdamW(
            [
                {"params": [params[key] for key in keys], "weight_decay": 0.1 * at, "wd_mult": at}
                for at, keys in enumerate(groups)
            ],
            lr=0.25,
        )
        optimizer.step()
        optimizer.step()
        return optimizer

    def as_megatron(
        model: dict[str, Any], params: dict[str, torch.nn.Parameter], groups: list[list[str]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Megatron's float32 optimizer makes of a state, and the state gathered by key."""
        optimizer = trained(params, groups)
        state = optimizer.state_dict()
        ordered = list(chain.from_iterable(groups))
        kept = {
            key: {
                name: gathered(key, value) if value.ndim else value
                for name, value in optimizer.state[params[key]].items()
            }
            for key in ordered
        }
        ids = get_param_id_to_sharded_param_map(model, (params[key] for key in ordered))
        step = state["state"][0]["step"]
        optim_state_to_sharding_state(state, ids, exclude_keys="step")
        state["state"]["common_step"] = step
        return state, kept

    def save(name: str, groups: list[list[str]], *, mixed: bool = False) -> None:
        params = parts(rank)
        model = {key: sharded(key, value) for key, value in params.items()}
        state, kept = as_megatron(model, params, groups)
        if mixed:
            for key, value in params.items():
                kept[key]["fp32_param"] = gathered(key, value.detach() + 0.5)
            ordered = [[params[key] for key in keys] for keys in groups]
            ids = get_param_id_to_sharded_param_map(model, chain.from_iterable(ordered))
            numbers = iter(range(len(params)))
            masters = [
                [
                    make_sharded_optimizer_tensor(
                        ids[next(numbers)], value.detach() + 0.5, "optimizer.state.fp32_param"
                    )
                    for value in values
                ]
                for values in ordered
            ]
            state = {
                "optimizer": state,
                "fp32_from_fp16_params": masters,
                "grad_scaler": {"scale": 8.0},
            }
        write(name, model, state, params, kept)

    def write(name: str, model: Any, state: Any, params: Any, kept: Any) -> None:
        weights = {key: gathered(key, value.detach()) for key, value in params.items()}
        for held in model.values():
            held.data = held.data.detach()  # the processes that write take no leaves
        wholes[name] = {"model": weights, "optimizer": kept}
        folder = home / name
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        common = {"args": {"hidden_size": 6}, "iteration": 2, "checkpoint_version": 3.0}
        dist_checkpointing.save({"model": model, "optimizer": state, **common}, str(folder))

    keys = list(SHARDED)
    save("plain", [keys])
    save("mixed", [[keys[1], keys[3]], [keys[0], keys[2]]], mixed=True)
    params = parts(rank)
    model = {key: sharded(key, value) for key, value in params.items()}
    states, kept = {}, {}
    for number, names in enumerate((keys[:3], keys[3:])):
        states[number], kept_now = as_megatron(model, params, [names])
        kept |= kept_now
        add_prefix_for_sharding(states[number], f"chained_{number}.")
    write("chained", model, states, params, kept)
    if rank == 0:
        torch.save(wholes, "megatron_optimizer.whole.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
