"""What runs in the children of bench.py: the other side of a row as people write it, and loads that
time themselves.

    python bench/children.py FUNCTION IN... [OUT] [--fsync]

Each function is one row's side and prints nothing, but for the `time_` ones, which print the
seconds that one call took after the imports: start-up has its own row.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def bare(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix("module."): tensor for key, tensor in state_dict.items()}


def load_save(source: str, output: str) -> None:
    torch.save(bare(torch.load(source, map_location="cpu")), output)


def load_save_file(source: str, output: str) -> None:
    from safetensors.torch import save_file

    save_file(bare(torch.load(source, map_location="cpu")), output)


def mmap_save_file(source: str, output: str) -> None:
    from safetensors.torch import save_file

    save_file(bare(torch.load(source, map_location="cpu", mmap=True)), output)


def mmap_bf16_save_file(source: str, output: str) -> None:
    from safetensors.torch import save_file

    state_dict = bare(torch.load(source, map_location="cpu", mmap=True))
    save_file({key: tensor.to(torch.bfloat16) for key, tensor in state_dict.items()}, output)


def mmap_equal(first: str, second: str) -> None:
    ours, theirs = (torch.load(path, map_location="cpu", mmap=True) for path in (first, second))
    same = ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[key]) for key, tensor in ours.items()
    )
    sys.exit(0 if same else 1)


def zero_to_fp32(source: str, output: str) -> None:
    """deepspeed's own converter where it is installed; otherwise what it does, without its progress
    bars and checks.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.utils.zero_to_fp32 import (
            convert_zero_checkpoint_to_fp32_state_dict as convert,
        )
    except ImportError:
        join_shares(source, f"{output}.safetensors")
    else:
        convert(source, output, safe_serialization=True)


def join_shares(source: str, output: str) -> None:
    from safetensors.torch import save_file

    step = next(Path(source).glob("global_step*"))
    ranks = [
        torch.load(file, map_location="cpu", mmap=True)
        for file in sorted(step.glob("*_optim_states.pt"))
    ]
    # the input has one group
    flats = [rank["optimizer_state_dict"]["fp32_flat_groups"][0] for rank in ranks]
    shapes = torch.load(min(step.glob("*_model_states.pt")), map_location="cpu")["param_shapes"]
    joined, at = {}, 0
    for key, shape in ((key, shape) for group in shapes for key, shape in group.items()):
        share = -(-shape.numel() // len(flats))
        joined[key] = torch.cat([flat.narrow(0, at, share) for flat in flats])[
            : shape.numel()
        ].view(shape)
        at += share
    save_file(joined, output)


def dcp_save_file(source: str, output: str) -> None:
    """What torch offers for a DCP folder: a torch file in between."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, f"{output}.pt")
    save_file(torch.load(f"{output}.pt", mmap=True)["model"], output)


def load(source: str) -> None:
    torch.load(source, map_location="cpu")


def statistics(source: str) -> None:
    for tensor in torch.load(source, map_location="cpu").values():
        wide = tensor.double()
        wide.min(), wide.max(), wide.mean(), wide.std(), wide.isnan().sum(), (wide == 0).sum()


def average(*paths: str) -> None:
    *sources, output = paths
    found = [torch.load(path, map_location="cpu", mmap=True) for path in sources]
    means = {}
    for key, first in found[0].items():
        total = first.double()
        for other in found[1:]:
            total += other[key]
        means[key.removeprefix("module.")] = (total / len(found)).to(first.dtype)
    torch.save(means, output)


def time_load(source: str) -> None:
    time_call(lambda: torch.load(source, map_location="cpu"))


def time_load_mmap(source: str) -> None:
    time_call(lambda: torch.load(source, map_location="cpu", mmap=True))


def time_load_portable(source: str) -> None:
    from ckptconv import load_portable

    time_call(lambda: load_portable(source))


def time_edit(source: str) -> None:
    from ckptconv import edit

    time_call(lambda: edit(source, metadata={"note": str(time.time_ns())}))


def time_save_again(source: str, output: str) -> None:
    from safetensors.torch import load_file, save_file

    time_call(lambda: save_file(load_file(source), output, {"note": str(time.time_ns())}))


def time_call(load: Callable[[], object]) -> None:
    start = time.perf_counter()
    loaded = load()
    seconds = time.perf_counter() - start
    print(seconds)
    del loaded


def fsync(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


SIDES = (
    load_save,
    load_save_file,
    mmap_save_file,
    mmap_bf16_save_file,
    mmap_equal,
    zero_to_fp32,
    dcp_save_file,
    load,
    statistics,
    average,
    time_load,
    time_load_mmap,
    time_load_portable,
    time_edit,
    time_save_again,
)


def main() -> None:
    name, *arguments = sys.argv[1:]
    side = next(side for side in SIDES if side.__name__ == name)
    paths = [argument for argument in arguments if argument != "--fsync"]
    side(*paths)
    if "--fsync" in arguments:
        fsync(paths[-1])


if __name__ == "__main__":
    main()
