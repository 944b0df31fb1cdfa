"""What is read over the network is at most a tenth more than the checkpoint, in few requests: what
was fetched to look at it is used when its values are read, and small tensors are fetched together.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckptconv import convert_checkpoint, diff_checkpoints, load_portable
from ckptconv.io.remote import source as sources
from ckptconv.io.remote.patience import Budget
from ckptconv.io.remote.traffic import traffic
from helpers.examples import some
from helpers.folder_store import place_in


def _torch(count: int, nbytes: int, folder: Path) -> None:
    torch.save({f"k{at:04}": torch.randn(nbytes // 4) for at in range(count)}, folder / "in")


def _npz(count: int, nbytes: int, folder: Path) -> None:
    with (folder / "in").open("wb") as file:
        np.savez(
            file, **{f"k{at}": np.random.rand(nbytes // 4).astype("f4") for at in range(count)}
        )


def _safetensors(count: int, nbytes: int, folder: Path) -> None:
    tensors = {f"k{at}": np.random.rand(nbytes // 4).astype("f4") for at in range(count)}
    save_file(tensors, folder / "in")


def _dcp(count: int, nbytes: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    tensors = {f"w{at}": torch.randn(nbytes // 4) for at in range(count)}
    dcp.save({"model": tensors}, checkpoint_id=str(folder / "in"))


def _shards(count: int, nbytes: int, folder: Path) -> None:
    (folder / "in").mkdir()
    names = {f"k{at}": f"model-{at + 1:05}-of-{count:05}.safetensors" for at in range(count)}
    for key, name in names.items():
        save_file({key: np.random.rand(nbytes // 4).astype("f4")}, folder / "in" / name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "in" / "model.safetensors.index.json").write_text(json.dumps(index))


MADE = {
    "2,000 of 16 kB in a zip": (_torch, 2000, 16384),
    "100 of 200 kB in a zip": (_torch, 100, 200_000),
    "100 of 80 kB in an npz": (_npz, 100, 80_000),
    "100 of 80 kB in safetensors": (_safetensors, 100, 80_000),
    "30 of 384 kB in a DCP file": (_dcp, 30, 384_000),
    "100 shards of 165 kB": (_shards, 100, 165_000),
}
READERS = {
    "convert": lambda place, folder: convert_checkpoint(place, folder / "out.safetensors"),
    "load_portable": lambda place, folder: load_portable(place),
    "diff": lambda place, folder: diff_checkpoints(place, folder / "in"),
}


@pytest.fixture(scope="module", params=MADE.values(), ids=MADE)
def made(request, tmp_path_factory) -> tuple[Path, list[int]]:
    """A folder with a checkpoint in it, and the sizes of its files."""
    make, count, nbytes = request.param
    folder = tmp_path_factory.mktemp("read")
    make(count, nbytes, folder)
    files = [item for item in (folder / "in", *(folder / "in").rglob("*")) if item.is_file()]
    return folder, [item.stat().st_size for item in files]


@pytest.mark.parametrize("name", some(9, READERS))
def test_a_checkpoint_is_read_once(name, made):
    folder, sizes = made
    place, _ = place_in(folder, "in")
    before = traffic()
    READERS[name](place, folder)
    used = traffic().since(before)
    assert used.bytes_read <= 1.1 * sum(sizes)
    assert used.requests <= 30 + 3 * len(sizes)
    assert sources._BUDGET.left == sources._MERGED, "what was kept is let go of"


def test_without_room_to_keep_it_all_is_right_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BUDGET", Budget(1 << 20))
    _torch(400, 16384, tmp_path)
    place, _ = place_in(tmp_path, "in")
    assert diff_checkpoints(place, tmp_path / "in").same
