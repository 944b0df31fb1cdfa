"""DeepSpeed's folders, written by torch alone: the layout of stages 1 to 3 without the training,
for the tests of any sizes.

Written after what deepspeed 0.19.8 leaves behind (tests/data/deepspeed); values of other kinds than
tensors are left out.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TAG = "global_step1"


def write(
    folder: Path,
    stage: int,
    ranks: int,
    groups: Sequence[Mapping[str, Tensor]],
    *,
    frozen: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    lean: bool = True,
    one_dict: bool = False,
    kept: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> Path:
    """A folder with one step whose parameters are `groups`; returns it.

    `lean`: the padding at the end of stages 1 and 2 is not saved. `one_dict`: the shapes of all
    groups are in one dict. `kept`: what the optimizer keeps of each parameter, by name and as a
    function of its value; it counts 3 steps, and group G has a learning rate of G + 1.
    """
    step = folder / TAG
    shutil.rmtree(folder, ignore_errors=True)
    step.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    shapes = [OrderedDict((name, value.shape) for name, value in group.items()) for group in groups]
    states: dict[str, Any] = {
        "module": OrderedDict(_module(stage, groups, frozen or {}, buffers or {})),
        "buffer_names": list(buffers or {}),
        "param_shapes": OrderedDict(
            (name, shape) for group in shapes for name, shape in group.items()
        )
        if one_dict
        else shapes,
        "frozen_param_shapes": OrderedDict(
            (name, value.shape) for name, value in (frozen or {}).items()
        ),
        "shared_params": {},
        "global_steps": 1 if kept is None else 3,
    }
    partitions = shares(groups, ranks) if stage == 3 else cuts(groups, ranks, lean)
    for rank in range(ranks):
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {"zero_stage": stage, "partition_count": ranks, key: partitions[rank]}
        if kept is not None:
            base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
            optimizer[base] = optimizer_state(stage, ranks, rank, groups, kept)
            full = cuts(groups, ranks, lean=False)[rank]
            ends = [
                each.numel() - there.numel()
                for each, there in zip(full, partitions[rank], strict=True)
            ]
            optimizer |= {} if stage == 3 else {"group_paddings": ends}
        torch.save(
            {"optimizer_state_dict": optimizer},
            step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        if stage == 3 or rank == 0:
            fragments = {
                name: share(value, rank, ranks) if stage == 3 else value
                for name, value in (frozen or {}).items()
            }
            name = (
                f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                if stage == 3
                else "mp_rank_00_model_states.pt"
            )
            torch.save({**states, "frozen_param_fragments": fragments}, step / name)
    return folder


def nameless(source: Path, target: Path) -> None:
    """Copy a file without its name, which torch has written before that of each record."""
    name = f"{source.stem}/".encode()
    held = source.read_bytes()
    assert name in held
    target.write_bytes(held.replace(name, b"x" * (len(name) - 1) + b"/"))


def optimizer_state(
    stage: int,
    ranks: int,
    rank: int,
    groups: Sequence[Mapping[str, Tensor]],
    kept: Mapping[str, Callable[[Tensor], Tensor]],
) -> dict[str, Any]:
    """What torch's optimizer of a rank keeps of its partitions, which are filled up there."""
    state: dict[int, dict[str, Any]] = {
        number: {"step": torch.tensor(3.0)} for number in range(len(groups))
    }
    for key, function in kept.items():
        made = [{name: function(value) for name, value in group.items()} for group in groups]
        each = shares(made, ranks) if stage == 3 else cuts(made, ranks, lean=False)
        for number, partition in enumerate(each[rank]):
            state[number][key] = partition
    param_groups = [{"lr": number + 1.0, "params": [number]} for number in state]
    return {"state": state, "param_groups": param_groups}


def _module(
    stage: int,
    groups: Sequence[Mapping[str, Tensor]],
    frozen: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The module's own state dict: what it trained with; in stage 3 there is nothing in the
    parameters.
    """
    parameters = {name: value for group in groups for name, value in group.items()} | dict(frozen)
    empty = torch.empty(0, dtype=torch.bfloat16)
    return {
        name: empty if stage == 3 else value.bfloat16() for name, value in parameters.items()
    } | dict(buffers)


def cuts(groups: Sequence[Mapping[str, Tensor]], ranks: int, lean: bool) -> list[list[Tensor]]:
    """Stages 1 and 2: each group end to end, filled up to a multiple of 2 x ranks, cut into equal
    partitions.
    """
    partitions: list[list[Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        flat = torch.cat([torch.empty(0), *(value.reshape(-1) for value in group.values())])
        size = -(-flat.numel() // (2 * ranks)) * 2
        filled = torch.cat([flat, torch.full((size * ranks - flat.numel(),), -1.0)])
        for rank in range(ranks):
            stop = min((rank + 1) * size, flat.numel()) if lean else (rank + 1) * size
            partitions[rank].append(filled[rank * size : max(stop, rank * size)])
    return partitions


def shares(groups: Sequence[Mapping[str, Tensor]], ranks: int) -> list[list[Tensor]]:
    """Stage 3: of each parameter an equal share to every rank, the last ones filled up; the shares
    of a group end to end.
    """
    return [
        [
            torch.cat([torch.empty(0), *(share(value, rank, ranks) for value in group.values())])
            for group in groups
        ]
        for rank in range(ranks)
    ]


def share(value: Tensor, rank: int, ranks: int) -> Tensor:
    size = -(-value.numel() // ranks)
    filled = torch.cat(
        [value.reshape(-1), torch.ones(size * ranks - value.numel()).to(value.dtype)]
    )
    return filled[rank * size : (rank + 1) * size].clone()
