"""What the readers of folders ask of places: links into a cache are followed, small files are
bounded.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import LimitExceeded, limits, open_checkpoint


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
