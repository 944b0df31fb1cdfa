"""Make one input of bench.py, with torch alone.

    python bench/make_inputs.py big|many|huge OUT SIZE

`big`: SIZE bytes in 300 float32 tensors. `many`: SIZE float32 tensors of shape [16]. `huge`: SIZE bytes in 300 float32
tensors whose payloads are holes, so that it takes no disk. All are state dicts of DistributedDataParallel: every key
starts with `module.` and every storage is tagged cuda:3.
"""

from __future__ import annotations

import contextlib
import sys
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


@contextlib.contextmanager
def tagged(location: str) -> Iterator[None]:
    """Within this block torch.save tags CPU storages with `location`; 0 comes before torch's own tagger of the CPU."""
    entry = (0, lambda storage: location, lambda storage, location: None)
    torch.serialization.register_package(*entry)
    try:
        yield
    finally:
        torch.serialization._package_registry.remove(entry)  # torch has no public way to undo it


def make(kind: str, path: Path, size: int) -> None:
    payload: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if kind == "big":
        state_dict = state_dict_of(split(size), torch.rand)
    elif kind == "many":
        state_dict = state_dict_of((16 for _ in range(size)), torch.rand)
    else:
        state_dict, payload = state_dict_of(split(size), torch.empty), torch.serialization.skip_data()
    with tagged(LOCATION), payload:
        torch.save(state_dict, path)


def main() -> None:
    kind, out, size = sys.argv[1:]
    torch.manual_seed(0)
    partial = Path(f"{out}.partial")
    make(kind, partial, int(size))
    partial.rename(out)


if __name__ == "__main__":
    main()
