"""Parts of a checkpoint that a conversion leaves out by their paths; torch reads what is left."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from ckptconv import KeyConflict, convert_checkpoint, merge
from helpers.program import run


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    shared = {"x": torch.ones(2), "y": torch.zeros(2)}
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "callbacks": {"early": {"best": 1.0, "deep": shared}, "late": shared, "n": 3},
        "epoch": 7,
        "losses": [1.0, 2.0],
    }
    torch.save(tree, tmp_path / "train.pt")
    return tmp_path, tree


def dropped(folder, *globs, **options):
    convert_checkpoint(folder / "train.pt", folder / "out.pt", drop=globs, force=True, **options)
    return torch.load(folder / "out.pt", weights_only=True)


def test_a_part_is_left_out_and_the_rest_stays(trained):
    folder, tree = trained
    left = dropped(folder, "optimizer", verify=True)
    done = run("convert", "train.pt", "o.pt", "--drop", "optimizer", "--verify", cwd=folder)
    assert "nothing else that the source names is missing" in done.err
    assert left.keys() == tree.keys() - {"optimizer"}
    assert left["epoch"] == 7 and left["losses"] == [1.0, 2.0]
    for key, value in tree["model"].items():
        assert torch.equal(left["model"][key], value)
    assert type(left["model"]) is OrderedDict and left["model"]._metadata == tree["model"]._metadata


def test_the_words_before_a_dot_are_a_path_too(trained):
    folder, tree = trained
    left = dropped(folder, "model.0")
    assert left["model"].keys() == {"1.weight", "1.bias"}
    assert left["optimizer"].keys() == tree["optimizer"].keys()
    with pytest.raises(KeyConflict, match="matches nothing"):
        dropped(folder, "model.0.weigh")


def test_tied_tensors_count_once_in_what_is_said(tmp_path):
    embed = torch.zeros(1000, 10)
    torch.save({"model": {"e": embed, "h": embed}, "x": torch.ones(1)}, tmp_path / "t.pt")
    done = run("convert", "t.pt", "o.pt", "--drop", "model", cwd=tmp_path)
    assert "model is dropped (1 tensor, 40.0 kB)" in done.err


def test_what_a_part_shares_with_another_is_said(tmp_path):
    weights = {"x": torch.ones(2), "y": torch.zeros(2)}
    torch.save({"m": weights, "ema": weights, "other": {"x": torch.ones(1)}}, tmp_path / "t.pt")
    done = run("convert", "t.pt", "o.pt", "--drop", "m.x", "--drop", "other.*", cwd=tmp_path)
    notes = [line for line in done.err.splitlines() if "is dropped" in line]
    assert ["wherever else the same dict stands" in line for line in notes] == [True, False]


def test_globs_and_plain_values(trained):
    folder, _ = trained
    left = dropped(folder, "callbacks.*", "epoch")
    assert left["callbacks"] == {} and "epoch" not in left


def test_parts_inside_parts_that_are_made_anew_are_left_out_too(trained):
    folder, _ = trained
    left = dropped(folder, "callbacks.early.best", "callbacks.n", "callbacks.early.deep.y")
    assert left["callbacks"]["early"].keys() == {"deep"}
    assert left["callbacks"].keys() == {"early", "late"}
    # what stands twice is one thing, under its first path
    assert left["callbacks"]["late"].keys() == {"x"} == left["callbacks"]["early"]["deep"].keys()


def test_words_are_whole(trained):
    folder, _ = trained
    with pytest.raises(KeyConflict, match="--drop optim matches nothing"):
        dropped(folder, "optim")
    with pytest.raises(KeyConflict, match="--drop nothing matches nothing"):
        dropped(folder, "epoch", "nothing")


def test_a_glob_over_several_checkpoints_is_one_over_what_they_make(trained):
    folder, tree = trained
    torch.save({f"module.{key}": value for key, value in tree["model"].items()}, folder / "a.pt")
    torch.save({"head": torch.ones(2)}, folder / "b.pt")
    said = r"matches nothing in it; it has 5 parts: 0\.weight, 0\.bias, 1\.weight, 1\.bias, head"
    with pytest.raises(KeyConflict, match=said):
        merge([folder / "a.pt", folder / "b.pt"], folder / "o.pt", drop="module.0")
    merge([folder / "a.pt", folder / "b.pt"], folder / "o.pt", drop="0")
    assert torch.load(folder / "o.pt", weights_only=True).keys() == {"1.weight", "1.bias", "head"}


def test_where_nothing_matches_the_command_names_the_folder(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    torch.save({f"k{at}": torch.ones(9) for at in range(4)}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", folder / "m.pt", max_shard_size="50")
    with pytest.raises(KeyConflict, match=r"ckptconv inspect .*m\.pt\.index\.json"):
        convert_checkpoint(folder / "m.pt.index.json", tmp_path / "o.pt", drop="nothing")


def test_an_item_of_a_list_is_not_left_out(trained):
    folder, _ = trained
    with pytest.raises(KeyConflict, match="the others would get other numbers"):
        dropped(folder, "losses.0")
    assert "losses" not in dropped(folder, "losses")


def test_the_file_gets_smaller_and_the_report_says_what_went(trained):
    folder, _ = trained
    done = run("convert", "train.pt", "light.pt", "--drop", "optimizer", cwd=folder)
    assert "optimizer is dropped (" in done.err and done.exit == 0
    assert (folder / "light.pt").stat().st_size < 0.6 * (folder / "train.pt").stat().st_size


def test_a_dry_run_writes_nothing(trained):
    folder, _ = trained
    done = run("convert", "train.pt", "light.pt", "--drop", "optimizer", "-n", cwd=folder)
    assert "optimizer is dropped" in done.err and not (folder / "light.pt").exists()


def test_without_anything_left_it_is_an_error(trained):
    folder, tree = trained
    with pytest.raises(Exception, match="holds no tensors"):
        dropped(folder, *tree)
