"""Models and their optimizers after a few steps of two gloo processes: DCP folders and the files of
each rank, beside all of it gathered by torch. They lie in FOLDER/trained, what worlds.py writes in
FOLDER: one process imports for both what torch needs.

    python -m helpers.trained_worlds FOLDER

Plain torch, nothing of ckptconv.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from helpers.worlds import write_worlds

SIZE = 2


class Odd(nn.Module):
    """A model whose parameters have odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.mid = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
        self.out = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.mid(self.up(x).relu()))
        return result


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases, which decay otherwise."""
    named = dict(model.named_parameters())
    biases = [name for name in named if name.endswith("bias")]
    return [
        {"params": [named[name] for name in named if name not in biases], "weight_decay": 0.1},
        {"params": [named[name] for name in biases], "weight_decay": 0.0, "lr": 0.02},
    ]


def trained(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """The optimizer of a model after three steps."""
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    torch.manual_seed(seed)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def gathered(node: Any) -> Any:
    """The tree with whole tensors, gathered by torch from all ranks."""
    if isinstance(node, DTensor):
        return node.full_tensor().detach().clone()
    if isinstance(node, ShardedTensor):
        made = torch.empty(node.size()) if dist.get_rank() == 0 else None
        node.gather(0, made)
        return made
    if isinstance(node, dict):
        return {key: gathered(value) for key, value in node.items()}
    return [gathered(value) for value in node] if type(node) is list else node


def write(folder: Path, name: str, tree: dict[str, Any]) -> None:
    """`name`: a DCP folder; `name.N.pt`: what each rank saves; `name.whole.pt`: the oracle."""
    rank = dist.get_rank()
    torch.save(tree, folder / f"{name}.{rank}.pt")
    everything = gathered(tree)
    if rank == 0:
        torch.save(everything, folder / f"{name}.whole.pt")
    dcp.save(tree, checkpoint_id=folder / name)


def fsdp2(folder: Path, mesh: DeviceMesh) -> None:
    """What `get_state_dict` gives, nested and flattened; the latter also as torchtitan saves it."""
    torch.manual_seed(0)
    model = Odd()
    for part in (model.up, model.mid, model.out, model):
        fully_shard(part, mesh=mesh)
    optimizer = trained(model, dist.get_rank())
    for name, is_flat in (("nested", False), ("flat", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        weights, state = get_state_dict(model, optimizer, options=options)
        write(folder, name, {"model": weights, "optimizer": state, "step": 3})
    write(folder, "titan", {**weights, "optimizer": state})


def fsdp1(folder: Path, name: str, mesh: DeviceMesh | None) -> None:
    """What `FSDP.optim_state_dict` gives: ShardedTensors, or DTensors where there is a mesh; then
    by numbers; and flat parameters, which DTensors cannot hold.
    """
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Odd(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
    )
    optimizer = trained(model, dist.get_rank())
    kinds: dict[str, tuple[StateDictType, Any, Any]] = {
        "sharded": (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ),
        "local": (
            StateDictType.LOCAL_STATE_DICT,
            LocalStateDictConfig(),
            LocalOptimStateDictConfig(),
        ),
    }
    with FullyShardedDataParallel.state_dict_type(model, *kinds["sharded"]):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        weights = model.state_dict()
        write(folder, name, {"model": weights, "optimizer": state})
    if mesh is not None:
        return
    numbered = FullyShardedDataParallel.rekey_optim_state_dict(
        state, OptimStateKeyType.PARAM_ID, model, optim=optimizer
    )
    write(folder, f"{name}_rekeyed", {"model": weights, "optimizer": numbered})
    with FullyShardedDataParallel.state_dict_type(model, *kinds["local"]):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        torch.save(
            {"model": model.state_dict(), "optimizer": state},
            folder / f"{name}_local.{dist.get_rank()}.pt",
        )


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=SIZE
    )
    mesh = init_device_mesh("cpu", (SIZE,))
    fsdp2(Path(folder), mesh)
    fsdp1(Path(folder), "fsdp1", None)
    fsdp1(Path(folder), "fsdp1_mesh", mesh)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    write_worlds(folder)
    (folder / "trained").mkdir()
    given = (str(folder / "trained"),)
    torch.multiprocessing.start_processes(work, given, nprocs=SIZE, start_method="fork")


if __name__ == "__main__":
    main()
