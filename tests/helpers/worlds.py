"""Checkpoints that several gloo processes write together: DCP folders, rank files and HF shards,
beside the whole tensors. trained_worlds.py runs it.

Plain torch, nothing of ckptconv. Every process is one rank of SIZE, forked from this one.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct values of a shape, the same in every process."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1).reshape(shape).to(dtype)


def rows(mesh: DeviceMesh) -> dict[str, Any]:
    """Shards along the first dimension: even, uneven, and with ranks that get nothing."""
    return {
        "even": distribute_tensor(values(8, 3), mesh, [Shard(0)]),
        "uneven": distribute_tensor(values(10, 6), mesh, [Shard(0)]),
        "short": distribute_tensor(values(3, 5, dtype=torch.bfloat16), mesh, [Shard(0)]),
        "vector": distribute_tensor(values(7, dtype=torch.int64), mesh, [Shard(0)]),
        "whole": distribute_tensor(values(4, 4), mesh, [Replicate()]),
        "plain": values(2, 3),
        "scalar": torch.tensor(2.5),
    }


def columns(mesh: DeviceMesh) -> dict[str, Any]:
    """Shards along inner and last dimensions."""
    return {
        "last": distribute_tensor(values(6, 16), mesh, [Shard(1)]),
        "uneven": distribute_tensor(values(5, 9), mesh, [Shard(1)]),
        "middle": distribute_tensor(values(3, 10, 4), mesh, [Shard(1)]),
        "deep": distribute_tensor(values(2, 3, 2, 9), mesh, [Shard(3)]),
        "transposed": distribute_tensor(values(12, 5).T, mesh, [Shard(0)]),
    }


def grid(mesh: DeviceMesh) -> dict[str, Any]:
    """Shards over a mesh of two dimensions."""
    return {
        "both": distribute_tensor(values(6, 10), mesh, [Shard(0), Shard(1)]),
        "uneven": distribute_tensor(values(5, 7), mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(values(10, 3), mesh, [Shard(0), Shard(0)]),
        "twice_uneven": distribute_tensor(values(7, 3), mesh, [Shard(0), Shard(0)]),
        "replicated_rows": distribute_tensor(values(7, 3), mesh, [Replicate(), Shard(0)]),
        "replicated_columns": distribute_tensor(values(4, 6), mesh, [Shard(1), Replicate()]),
        "swapped": distribute_tensor(values(6, 10), mesh, [Shard(1), Shard(0)]),
    }


def strided(mesh: DeviceMesh) -> dict[str, Any]:
    """Shards that are cut in another order than that of the mesh, as FSDP over tensor parallelism
    cuts them.
    """
    placed: dict[str, tuple[torch.Tensor, list[Any]]] = {
        "even": (values(8, 3), [_StridedShard(0, split_factor=2), Shard(0)]),
        "uneven": (values(11, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        "alone": (values(13, 4), [_StridedShard(0, split_factor=3), Replicate()]),
        "last": (values(2, 12), [Shard(1), _StridedShard(1, split_factor=2)]),
        "apart": (values(9, 7), [_StridedShard(0, split_factor=2), Shard(1)]),
    }
    return {
        key: distribute_tensor(tensor, mesh, where, src_data_rank=None)
        for key, (tensor, where) in placed.items()
    }


class Small(nn.Module):
    """A model with a buffer, an odd number of rows, and a weight for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.norm(self.up(x)))
        return result


def sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(3)
    model = Small()
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


class Training(nn.Module):
    """Holds the model as a training script does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)
        return result


FSDP2: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "training": Training,
    "training_compiled": lambda model: Training(torch.compile(model)),
    "compiled_training": lambda model: torch.compile(Training(model)),
}
"""What stands around a model that `fully_shard` has sharded."""


def fsdp2(folder: Path, mesh: DeviceMesh) -> None:
    """Models of FSDP2 after a step: each rank's state dict, the full one, a DCP folder, and what
    the plain model computes.
    """
    for name, wrap in FSDP2.items():
        inner = sharded(mesh)
        outer = wrap(inner)
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        inner(values(4, 6) / 10).square().sum().backward()
        optimizer.step()
        torch.save(outer.state_dict(), folder / f"fsdp2_{name}.{dist.get_rank()}.pt")
        dcp.save({"model": outer.state_dict()}, checkpoint_id=folder / f"fsdp2_{name}")
        full = get_model_state_dict(
            outer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        gathered = whole(outer.state_dict())
        if dist.get_rank() == 0:
            torch.save(full, folder / f"fsdp2_{name}.full.pt")
            torch.save(gathered, folder / f"fsdp2_{name}.gathered.pt")
            plain = Small().eval()
            plain.load_state_dict(dict(zip(plain.state_dict(), gathered.values(), strict=True)))
            torch.save(
                {"input": values(3, 6), "output": plain(values(3, 6)).detach()},
                folder / f"fsdp2_{name}.forward.pt",
            )


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """FSDP over tensor parallelism: the rows of `up` are cut twice, from right to left."""
    torch.manual_seed(4)
    model = Small()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["dp"])
    return model


def training(mesh: DeviceMesh) -> dict[str, Any]:
    """A whole training checkpoint: model, optimizer after a step, counters, lists."""
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(values(4, 6)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "history": [values(3), values(2, 2)],
        "settings": {"name": "small", "betas": (0.9, 0.95), "layers": [1, 2, 3]},
        "when.it": {"was": None},
    }


def whole(node: Any) -> Any:
    """The tree with whole tensors, gathered by torch."""
    if isinstance(node, DTensor):
        return node.full_tensor().detach().clone()
    if isinstance(node, dict):
        made = type(node)((key, whole(value)) for key, value in node.items())
        if hasattr(node, "_metadata"):
            made._metadata = node._metadata
        return made
    if isinstance(node, list):
        return [whole(value) for value in node]
    return node


def write(folder: Path, name: str, tree: dict[str, Any]) -> None:
    """`name`: a DCP folder; `name.N.pt`: what each rank saves; `name.whole.pt`: the oracle."""
    rank = dist.get_rank()
    torch.save(tree, folder / f"{name}.{rank}.pt")
    gathered = whole(tree)
    if rank == 0:
        torch.save(gathered, folder / f"{name}.whole.pt")
    dcp.save(tree, checkpoint_id=folder / name)


def of_two(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    write(folder, "rows2", rows(mesh))
    write(folder, "columns2", columns(mesh))
    write(folder, "training2", training(mesh))
    write(folder, "large2", {"weight": distribute_tensor(values(4096, 4096), mesh, [Shard(1)])})
    dcp.save(
        {"model": rows(mesh), "step": 7}, checkpoint_id=folder / "apart2", use_collectives=False
    )
    hugging_face(folder, mesh)
    fsdp1(folder)
    fsdp2(folder, mesh)
    local = values(2, 2)
    torch.save(
        {"sum": DTensor.from_local(local, mesh, [Partial()])},
        folder / f"partial2.{dist.get_rank()}.pt",
    )
    own = {
        "weight": distribute_tensor(values(4), mesh, [Shard(0)]),
        "other": values(2) * dist.get_rank(),
    }
    torch.save(own, folder / f"own2.{dist.get_rank()}.pt")


def hugging_face(folder: Path, mesh: DeviceMesh) -> None:
    state_dict = get_model_state_dict(sharded(mesh))
    state_dict = {key: value for key, value in state_dict.items() if value.ndim}
    files = {key: 1 + index % 2 for index, key in enumerate(state_dict)}
    writer = dcp.HuggingFaceStorageWriter(
        path=str(folder / "hf2"),
        fqn_to_index_mapping=files,
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(state_dict, storage_writer=writer)
    gathered = whole(state_dict)
    if dist.get_rank() == 0:
        torch.save(gathered, folder / "hf2.whole.pt")


def fsdp1(folder: Path) -> None:
    """ShardedTensors, which FSDP1 puts into its sharded state dicts."""
    rank, tensor = dist.get_rank(), values(5, 4)
    part, start = (tensor[:3], 0) if rank == 0 else (tensor[3:], 3)
    shard = init_from_local_shards(
        [TensorShard.from_tensor_and_offsets(part.clone(), [start, 0], rank)], 5, 4
    )
    torch.save({"weight": shard, "plain": values(2)}, folder / f"fsdp1_2.{rank}.pt")
    if rank == 0:
        torch.save({"weight": tensor, "plain": values(2)}, folder / "fsdp1_2.whole.pt")


def of_four(folder: Path) -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, make, mesh in (
        ("rows4", rows, line),
        ("columns4", columns, line),
        ("grid4", grid, square),
    ):
        write(folder, name, make(mesh))
    tree = strided(square)
    torch.save(tree, folder / f"strided4.{dist.get_rank()}.pt")
    gathered = whole(tree)
    if dist.get_rank() == 0:
        torch.save(gathered, folder / "strided4.whole.pt")
    write(folder, "hybrid4", sharded(square).state_dict())
    write(folder, "parallel4", tensor_parallel(square).state_dict())


WORLDS: dict[int, Callable[[Path], None]] = {2: of_two, 4: of_four}


LATE = ("torch._dynamo", "torch._inductor.lowering", "torch.distributed.optim", "functorch.compile")
"""What torch imports when a model is sharded and an optimizer steps: each rank would by itself,
for two seconds of a processor.
"""


def work(rank: int, size: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/.store{size}", rank=rank, world_size=size
    )
    WORLDS[size](Path(folder))
    dist.barrier()
    dist.destroy_process_group()


def write_worlds(folder: Path) -> None:
    """Run the processes, of all sizes."""
    for name in LATE:
        importlib.import_module(name)
    for size in WORLDS:
        torch.multiprocessing.start_processes(
            work, (size, str(folder)), nprocs=size, start_method="fork"
        )
