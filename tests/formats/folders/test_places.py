"""What readers ask of places: they read wherever a checkpoint lies, links into a cache are
followed, small files are bounded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import LimitExceeded, convert_checkpoint, limits, open_checkpoint
from ckptconv.formats.registry import open_certain
from ckptconv.io.location import Location
from ckptconv.io.places import LocalPlace
from ckptconv.tensors.stream import iter_chunks
from helpers.memory_places import stored
from helpers.paths import SAMPLES


def test_a_dcp_folder_in_the_cache_of_the_hub_may_link_to_its_blobs(worlds, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "0f", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for item in (worlds / "columns2").iterdir():
        shutil.copy(item, blobs / f"b{item.name}")
        (snapshot / item.name).symlink_to(f"../../blobs/b{item.name}")
    with open_checkpoint(worlds / "columns2") as plain, open_checkpoint(snapshot) as linked:
        assert [path for path, _ in linked.tensors()] == [path for path, _ in plain.tensors()]


def test_the_index_beside_the_shards_of_dcp_is_bounded_as_every_index(tmp_path):
    shards = tmp_path / "sharded"
    shards.mkdir()
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}}), "DCP_VERSION": "1.0"}
    save_file({"w": torch.ones(4)}, shards / "shard-00000-model-00001-of-00001.safetensors", info)
    index = {"metadata": {"total_size": 16}, "weight_map": {"w": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(shards) as checkpoint:
        assert [path for path, _ in checkpoint.tensors()] == ["w"]
    with limits(index_bytes=20), pytest.raises(LimitExceeded, match="index_bytes=20"):
        open_checkpoint(shards)


def tensors_at(place: Location) -> dict[str, bytes]:
    """All tensors of the checkpoint at a place, read."""
    with open_certain(place) as checkpoint:
        return {path: b"".join(map(bytes, iter_chunks(ref))) for path, ref in checkpoint.tensors()}


def one_file(folder: Path) -> None:
    torch.save({"w": torch.arange(5.0)}, folder / "model.pt")


def a_set(folder: Path) -> None:
    convert_checkpoint(SAMPLES / "tied.pt", folder, max_shard_size=100, fsync=False)


@pytest.mark.parametrize(("make", "name"), [(one_file, "model.pt"), (a_set, ""), (None, "")])
def test_a_checkpoint_is_read_wherever_it_lies(make, name, worlds, tmp_path):
    folder = worlds / "columns2" if make is None else tmp_path
    if make is not None:
        make(folder)
    expected = tensors_at(LocalPlace(folder / name))
    assert expected and tensors_at(stored(folder, f"places-{make}").child(name)) == expected
