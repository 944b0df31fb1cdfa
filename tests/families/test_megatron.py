"""Megatron core loads the folders that ckptconv made of its own: `dist_checkpointing.load` of
0.16, at two ranks. The oracle is what it loads from its own folders.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv import convert_checkpoint
from helpers.paths import DATA

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("megatron.core")

SCRIPT = DATA.parent / "helpers" / "megatron_core.py"
WORLD = 2


def by_megatron(what: str, folder: Path, out: Path) -> list[dict[str, Any]]:
    """What each rank loads; nothing where they save."""
    store = out.with_suffix(".store")
    words = [str(WORLD), str(store), what, str(folder), str(out)]
    ranks = [subprocess.Popen([sys.executable, SCRIPT, str(at), *words]) for at in range(WORLD)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:  # one that failed leaves the other waiting
            rank.kill()
    store.unlink(missing_ok=True)
    found = [Path(f"{out}.{rank}") for rank in range(WORLD)]
    return [torch.load(file, weights_only=False) for file in found if file.exists()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("kind", ["plain", "mixed", "chained"])
def test_a_folder_comes_back(kind, tmp_path):
    source = DATA / "megatron_optimizer" / kind
    convert_checkpoint(source, tmp_path / "again", to="dcp", optimizer="megatron", verify=True)
    own = by_megatron("load", source, tmp_path / "own")
    ours = by_megatron("load", tmp_path / "again", tmp_path / "ours")
    assert same(ours[0], own[0]) and same(ours[1], own[1])
    assert len(ours) == WORLD and "iteration" in ours[0] and "param_groups" in str(ours[0])
    assert (tmp_path / "again" / "common.pt").read_bytes() == (source / "common.pt").read_bytes()


def test_names_and_types_are_those_of_the_rules(tmp_path):
    source = DATA / "megatron_optimizer" / "chained"
    options = {"rename": ["decoder.layers.=blocks."], "dtype": "bf16", "verify": True}
    convert_checkpoint(source, tmp_path / "again", to="dcp", optimizer="megatron", **options)
    own = by_megatron("load", source, tmp_path / "own")
    ours = by_megatron("load", tmp_path / "again", tmp_path / "ours")
    for was, now in zip(own, ours, strict=True):
        expected = {
            key.replace("decoder.layers.", "blocks."): value
            if "optimizer.state." in key
            else value.bfloat16()
            for key, value in was["asked"].items()
        }
        assert same(now["asked"], expected)


def test_objects_of_ranks_come_back(tmp_path):
    by_megatron("save", tmp_path / "own", tmp_path / "none")
    convert_checkpoint(
        tmp_path / "own", tmp_path / "again", to="dcp", optimizer="megatron", verify=True
    )
    own = by_megatron("load", tmp_path / "own", tmp_path / "one")
    ours = by_megatron("load", tmp_path / "again", tmp_path / "two")
    assert same(own[0], ours[0]) and same(own[1], ours[1])
    assert "seed" in str(ours[1]) and "_extra_state" in str(ours[1])
