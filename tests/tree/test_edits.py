"""Edits of an open checkpoint, for every reader; torch and numpy say what should be there."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import (
    Checkpoint,
    Drop,
    KeyConflict,
    KeyRules,
    OptionRefused,
    RefusedObject,
    RenameKeys,
    average,
    diff_checkpoints,
    execute_plan,
    load_into,
    load_portable,
    merge,
    open_checkpoint,
    plan_conversion,
    stats,
)
from ckptconv.pickles.nodes import Dict, mapping_pairs

NO_OPTIMIZER = [Drop("optimizer")]
BARE = [Drop("optimizer"), RenameKeys(KeyRules())]


@pytest.fixture
def trained(tmp_path):
    """A training under DDP, and its model as torch has it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    wrapped = OrderedDict({f"module.{key}": value for key, value in model.state_dict().items()})
    path = tmp_path / "train.pt"
    torch.save({"state_dict": wrapped, "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path, model


def test_what_is_opened_has_the_edits_and_the_file_stays(trained):
    path, model = trained
    before = path.read_bytes()
    with open_checkpoint(path, edits=BARE) as checkpoint:
        held = dict(checkpoint.tensors())
        assert held.keys() == {f"state_dict.{key}" for key in model.state_dict()}
        assert any(note.startswith("optimizer is dropped") for note in checkpoint.notes)
    with open_checkpoint(path) as whole:
        assert any(name.startswith("optimizer.") for name, _ in whole.tensors())
    assert path.read_bytes() == before


def test_an_edited_checkpoint_is_converted(trained, tmp_path):
    path, model = trained
    with open_checkpoint(path, edits=BARE) as checkpoint:
        execute_plan(plan_conversion(checkpoint, tmp_path / "out.pt"), verify=True)
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made.keys() == {"state_dict", "epoch"} and made["epoch"] == 3
    for key, value in model.state_dict().items():
        assert torch.equal(made["state_dict"][key], value)


def test_load_portable_and_load_into(trained):
    path, model = trained
    whole = load_portable(path, whole=True, edits=NO_OPTIMIZER)
    assert whole.keys() == {"state_dict", "epoch"}
    for key, value in model.state_dict().items():
        assert torch.equal(whole["state_dict"][key], value)
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    without = [Drop("state_dict.module.1.bias")]
    result = load_into(other, path, strict=False, edits=without)
    assert result.missing_keys == ("1.bias",)
    assert torch.equal(other[0].weight, model[0].weight)


def test_stats(trained):
    path, model = trained
    found = stats(path, edits=BARE)
    named = {item.name: item.statistics.mean for item in found.tensors}
    assert named.keys() == {f"state_dict.{key}" for key in model.state_dict()}
    expected = model.state_dict()["0.weight"].double().mean().item()
    assert named["state_dict.0.weight"] == pytest.approx(expected)


def test_diff_has_edits_of_both_or_of_each(trained, tmp_path):
    path, model = trained
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    torch.save({**torch.load(path), "optimizer": {"t": torch.ones(1)}}, tmp_path / "other.pt")
    assert diff_checkpoints(path, tmp_path / "other.pt", whole=True, edits=NO_OPTIMIZER).same
    assert not diff_checkpoints(path, tmp_path / "other.pt", whole=True).same
    assert diff_checkpoints(path, tmp_path / "model.pt", whole=True, edits=BARE, edits_b=()).same
    with pytest.raises(KeyConflict, match="matches nothing"):
        diff_checkpoints(path, tmp_path / "model.pt", whole=True, edits=NO_OPTIMIZER)


def test_merge_and_average_edit_each_source_first(trained, tmp_path):
    path, model = trained
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pt")
    both, bias = [path, tmp_path / "model.pt"], [Drop("*.bias")]
    merge(both, tmp_path / "merged.safetensors", prefix={str(both[1]): "b."}, edits=bias)
    expected = {"0.weight", "1.weight", "b.0.weight", "b.1.weight"}
    assert load_file(tmp_path / "merged.safetensors").keys() == expected
    average(both, tmp_path / "mean.safetensors", edits=bias)
    made = load_file(tmp_path / "mean.safetensors")
    assert made.keys() == {"0.weight", "1.weight"}
    assert torch.equal(made["0.weight"], model.state_dict()["0.weight"])


CODES = {
    "l.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
    "l.weight_scale_inv": torch.ones(1, 1),
    "n.weight": torch.ones(4),
}


def without_scales(checkpoint: Checkpoint) -> Checkpoint:
    """An edit as anybody may write it: it says nothing of what it leaves out."""
    pairs = mapping_pairs(checkpoint.root) or ()
    kept = [(key, value) for key, value in pairs if not str(key).endswith("_scale_inv")]
    return replace(checkpoint, root=Dict(kept))


APART = {
    "by a function": [without_scales],
    "dropped": [Drop("l.weight_scale_inv")],
    "renamed": [RenameKeys(KeyRules(renames=[("l.weight_scale_inv", "other.scale")]))],
    "left out": [RenameKeys(KeyRules(exclude=["*_scale_inv"]))],
}


@pytest.mark.parametrize("way", APART)
@pytest.mark.parametrize("reader", [open_checkpoint, load_portable, stats])
def test_no_edit_parts_codes_from_their_scale(way, reader, tmp_path):
    save_file(CODES, tmp_path / "codes.safetensors")
    with pytest.raises(RefusedObject, match=r"l\.weight"):
        reader(tmp_path / "codes.safetensors", edits=APART[way])


def test_codes_and_scale_may_go_together(tmp_path):
    save_file(CODES, tmp_path / "codes.safetensors")
    with open_checkpoint(tmp_path / "codes.safetensors", edits=[Drop("l")]) as checkpoint:
        assert [name for name, _ in checkpoint.tensors()] == ["n.weight"]


def test_an_index_that_tells_enough_has_the_edits_and_so_has_what_is_read_again(tmp_path):
    from torch.distributed import checkpoint as dcp

    state = {"a": {"w": torch.arange(6.0)}, "b": {"w": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with open_checkpoint(tmp_path / "dcp", edits=[Drop("b")]) as checkpoint:
        assert [name for name, _ in checkpoint.tensors()] == ["a.w"]
        with checkpoint.certain() as certain:
            assert [name for name, _ in certain.tensors()] == ["a.w"]
    loaded = load_portable(tmp_path / "dcp", edits=[Drop("b")])
    assert loaded.keys() == {"w"} and np.array_equal(loaded["w"], np.arange(6.0))


@pytest.mark.parametrize("edits", [Drop("a"), "optimizer", ["optimizer"], None, [None]])
def test_what_is_no_list_of_edits_is_refused(edits, trained):
    path, _ = trained
    for reader in (open_checkpoint, load_portable, stats):
        with pytest.raises(OptionRefused, match=r"edits=.* is not a list of edits"):
            reader(path, edits=edits)
    with pytest.raises(OptionRefused, match="edits="):
        merge([path, path], path.with_name("out.pt"), edits=edits)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are not listed here")
def test_a_file_is_closed_where_an_edit_fails(trained):
    path, _ = trained
    with pytest.raises(KeyConflict, match=r"train\.pt: .*matches nothing"):
        open_checkpoint(path, edits=[Drop("nothing")])
    gc.collect()
    assert str(path) not in {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}


def test_an_edit_that_gives_no_checkpoint_is_named(trained):
    with pytest.raises(OptionRefused, match="gave None, and no checkpoint"):
        load_portable(trained[0], edits=[lambda checkpoint: None])
