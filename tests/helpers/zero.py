"""DeepSpeed's folders, written by torch alone: the layout of stages 1 to 3 without the training,
for the tests of any sizes.

Written after what deepspeed 0.19.8 leaves behind (tests/data/deepspeed); values of other kinds than
tensors are left out.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
) -> Path:
    """A folder with one step whose parameters are `groups`; returns it.

    `lean`: the padding at the end of stages 1 and 2 is not saved. `one_dict`: the shapes of all
    groups are in one dict.
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
        "global_steps": 1,
    }
    partitions = shares(groups, ranks) if stage == 3 else cuts(groups, ranks, lean)
    for rank in range(ranks):
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {"zero_stage": stage, "partition_count": ranks, key: partitions[rank]}
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
