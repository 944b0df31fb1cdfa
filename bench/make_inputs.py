"""Make one input of bench.py, with torch alone.

    python bench/make_inputs.py KIND OUT SIZE

`big`: SIZE bytes in 300 float32 tensors. `many`, `some`: SIZE float32 tensors of shape [16].
`huge`: SIZE bytes in 300 float32 tensors whose payloads are holes, so that it takes no disk. These
are state dicts of DistributedDataParallel: every key starts with `module.` and every storage is
tagged cuda:3; `legacy` is `big` as torch wrote it before 1.6. `shards`: the same tensors as a
Hugging Face folder of eight safetensors files and their index. `dcp_rows` and `dcp_columns`: SIZE
bytes in 300 float32 tensors of 1,024 columns, split by rows or by columns among four gloo processes
that save them with torch.distributed.checkpoint. `zero3`: a DeepSpeed folder of ZeRO stage 3 with
SIZE bytes of fp32 partitions in 4 ranks, laid out as deepspeed 0.19.8 does, without the optimizer's
moments, which nobody reads here. `twin`, `third`: copies of the `big` that lies beside OUT. `flat`:
the tensors of `big` in one safetensors file. `wide`: SIZE bytes in a safetensors file whose values
are a hole, so that it takes no disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

LOCATION = "cuda:3"
TENSORS = 300
LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.out_proj.weight",
    "fc1.weight",
    "fc2.weight",
)


def key_of(index: int) -> str:
    layer, place = divmod(index, len(LAYER))
    return f"module.encoder.layers.{layer}.{LAYER[place]}"


def state_dict_of(numels: Iterator[int], make: Callable[[int], Tensor]) -> OrderedDict[str, Tensor]:
    return OrderedDict((key_of(index), make(numel)) for index, numel in enumerate(numels))


def split(nbytes: int) -> Iterator[int]:
    """Element counts of float32 tensors that are `nbytes` together."""
    numel = nbytes // 4
    return ((index + 1) * numel // TENSORS - index * numel // TENSORS for index in range(TENSORS))


SHAPES = ((1, 1), (1, 1), (1, 1), (1, 1), (4, 1), (1, 4))
"""The sizes of the tensors of a layer, in widths of the model."""


def write_zero3(folder: Path, nbytes: int) -> None:
    """The folder of one step. The width is odd, so that shares are padded and end within rows."""
    width = int((nbytes / 4 * len(SHAPES) / TENSORS / 12) ** 0.5) | 1
    sizes = (SHAPES[index % len(SHAPES)] for index in range(TENSORS))
    shapes = OrderedDict(
        (key_of(index), torch.Size([width * a, width * b])) for index, (a, b) in enumerate(sizes)
    )
    step = folder / "global_step1"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    states = {
        "module": OrderedDict((key, torch.empty(0, dtype=torch.bfloat16)) for key in shapes),
        "buffer_names": [],
        "param_shapes": [shapes],
        "shared_params": {},
        "ds_version": "0.19.8",
    }
    share = sum(-(-shape.numel() // RANKS) for shape in shapes.values())
    for rank in range(RANKS):
        groups = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "fp32_flat_groups": [torch.rand(share)],
        }
        torch.save(states, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": groups},
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


@contextlib.contextmanager
def tagged(location: str) -> Iterator[None]:
    """Within this block torch.save tags CPU storages with `location`; 0 comes before torch's own
    tagger of the CPU.
    """
    entry = (0, lambda storage: location, lambda storage, location: None)
    torch.serialization.register_package(*entry)
    try:
        yield
    finally:
        torch.serialization._package_registry.remove(entry)  # torch has no public way to undo it


def make(kind: str, path: Path, size: int) -> None:
    if kind == "zero3":
        write_zero3(path, size)
        return
    if kind in ("twin", "third"):
        shutil.copyfile(path.with_name("big.pt"), path)
        return
    if kind == "shards":
        write_shards(path, size)
        return
    if kind == "wide":
        write_wide(path, size)
        return
    if kind == "flat":
        from safetensors.torch import save_file

        save_file(state_dict_of(split(size), torch.rand), path)
        return
    payload: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if kind in ("big", "legacy"):
        state_dict = state_dict_of(split(size), torch.rand)
    elif kind in ("many", "some"):
        state_dict = state_dict_of((16 for _ in range(size)), torch.rand)
    else:
        state_dict, payload = (
            state_dict_of(split(size), torch.empty),
            torch.serialization.skip_data(),
        )
    with tagged(LOCATION), payload:
        torch.save(state_dict, path, _use_new_zipfile_serialization=kind != "legacy")


def write_wide(path: Path, size: int) -> None:
    header, at = {"__metadata__": {"format": "pt", "note": " " * 30}}, 0
    for index, numel in enumerate(split(size)):
        span = [at, at := at + 4 * numel]
        header[key_of(index)] = {"dtype": "F32", "shape": [numel], "data_offsets": span}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)


SHARDS = 8


def write_shards(folder: Path, nbytes: int) -> None:
    """The tensors of `big` in eight files of about one size, in order, and the index."""
    from safetensors.torch import save_file

    folder.mkdir()
    state_dict = state_dict_of(split(nbytes), torch.rand)
    where = {
        key: f"model-{index * SHARDS // TENSORS + 1:05}-of-{SHARDS:05}.safetensors"
        for index, key in enumerate(state_dict)
    }
    for name in sorted(set(where.values())):
        save_file(
            {key: state_dict[key] for key in where if where[key] == name},
            folder / name,
            {"format": "pt"},
        )
    index = {"metadata": {"total_size": nbytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


RANKS = 4
COLUMNS = 1024


def make_dcp(kind: str, folder: Path, size: int) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.start_processes(
            save_shards, (kind, str(folder), size, meeting), nprocs=RANKS, start_method="spawn"
        )


def save_shards(rank: int, kind: str, folder: str, size: int, meeting: str) -> None:
    """What one of the processes does: make its shards and save them together with the others."""
    from torch import distributed
    from torch.distributed import checkpoint
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(rank)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=RANKS
    )
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    rows = size // TENSORS // (4 * COLUMNS) // RANKS * RANKS
    shape, dim = (
        ((rows // RANKS, COLUMNS), 0) if kind == "dcp_rows" else ((rows, COLUMNS // RANKS), 1)
    )
    state_dict = {
        key_of(index): DTensor.from_local(torch.rand(shape), mesh, [Shard(dim)])
        for index in range(TENSORS)
    }
    checkpoint.save({"model": state_dict}, checkpoint_id=folder)
    distributed.destroy_process_group()


def main() -> None:
    kind, out, size = sys.argv[1:]
    torch.manual_seed(0)
    partial = Path(f"{out}.partial")
    (make_dcp if kind.startswith("dcp_") else make)(kind, partial, int(size))
    partial.rename(out)


if __name__ == "__main__":
    main()
