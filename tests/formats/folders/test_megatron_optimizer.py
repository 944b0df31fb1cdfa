"""Optimizers in Megatron's folders: what Megatron itself wrote from torch's optimizers becomes what
torch gathered of them, by the names of the parameters.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from ckptconv import convert_checkpoint, load_portable
from helpers import oracle
from helpers.paths import DATA
from helpers.program import assert_one_error, run

FOLDERS = DATA / "megatron_optimizer"
WHOLE = DATA / "megatron_optimizer.whole.pt"
KINDS = ["plain", "mixed", "chained"]


def converted(source: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    made = convert_checkpoint(source, folder / "out.pt", fsync=False, force=True, **options)
    return torch.load(folder / "out.pt", weights_only=True), list(made.plan.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_states_are_what_was_gathered(kind, tmp_path):
    found, _ = converted(FOLDERS / kind, tmp_path)
    whole = torch.load(WHOLE, weights_only=True)[kind]
    assert found["model"].keys() == whole["model"].keys()
    for key, value in whole["model"].items():
        assert torch.equal(found["model"][key], value)
    states = found["optimizer"]["state"]
    assert states.keys() == whole["optimizer"].keys()
    for key, kept in whole["optimizer"].items():
        assert states[key].keys() == kept.keys()
        for name, value in kept.items():
            assert torch.equal(torch.as_tensor(states[key][name]), value), (key, name)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "plain",
            [
                {
                    "decoder.layers.linear.weight",
                    "decoder.layers.linear.bias",
                    "embedding.weight",
                    "norm.weight",
                }
            ],
        ),
        (
            "chained",
            [
                {
                    "decoder.layers.linear.weight",
                    "decoder.layers.linear.bias",
                    "embedding.weight",
                },
                {"norm.weight"},
            ],
        ),
        ("mixed", [None, None]),
    ],
)
def test_groups_name_their_parameters_where_that_is_told(kind, expected, tmp_path):
    found, notes = converted(FOLDERS / kind, tmp_path)
    groups = found["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.25] * len(expected)
    listed = [group.get("params") for group in groups]
    assert [names and {*names} for names in listed] == expected
    told = "the 2 groups of the optimizer do not say which parameters are theirs"
    assert notes == ([told] if kind == "mixed" else [])
    assert found["optimizer"].get("grad_scaler") == ({"scale": 8.0} if kind == "mixed" else None)


class Model(nn.Module):
    """The model whose parameters were saved."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.Module()
        self.decoder.layers.linear = nn.Linear(6, 8)
        self.embedding = nn.Embedding(6, 6)
        self.norm = nn.LayerNorm(3, bias=False)


def test_torch_goes_on_with_them(tmp_path):
    found, _ = converted(FOLDERS / "plain", tmp_path)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = torch.load(WHOLE, weights_only=True)["plain"]["optimizer"]
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state["step"].item() == 3  # one step is not counted in all of them
        assert torch.equal(state["exp_avg"], whole[name]["exp_avg"].lerp(torch.tensor(1.0), 0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_names_follow_the_keys(kind, tmp_path):
    found, _ = converted(FOLDERS / kind, tmp_path, rename=["decoder.layers.=blocks."])
    assert found["optimizer"]["state"].keys() == found["model"].keys()
    assert "blocks.linear.weight" in found["model"]


def written(folder: Path, items: dict[str, Any], common: dict[str, Any]) -> Path:
    """A folder in the form of Megatron's, written by torch."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(items, checkpoint_id=folder, planner=planner, no_dist=True)
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


WEIGHT, MOMENT = torch.ones(2, 3), torch.zeros(2, 3)
GROUPS = {"optimizer": {"param_groups": [{"lr": 0.1}], "state": {"common_step": 4}}}


@pytest.mark.parametrize(
    ("key", "common", "said"),
    [
        (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg",
            GROUPS,
            "some of them belong to no parameter by their names",
        ),
        ("optimizer.state.exp_avg.w2", GROUPS, "some of them belong to no parameter"),
        ("optimizer.state.exp_avg.w", {"iteration": 3}, "nothing says its groups"),
        ("optimizer.state.exp_avg.w", {"optimizer": {"param_groups": [3]}}, "nothing says its"),
        ("optimizer.state.exp_avg.w", {"optimizer": {"param_groups": []}}, "nothing says its"),
    ],
)
def test_what_is_not_told_stays_as_megatron_names_it(key, common, said, tmp_path):
    items = {"w": WEIGHT, "optimizer.state.exp_avg_sq.w": MOMENT, key: MOMENT}
    source = written(tmp_path / "iter", items, common)
    found, notes = converted(source, tmp_path)
    assert torch.equal(found["optimizer"][key], MOMENT)
    assert len(notes) == 1 and said in notes[0]
    assert notes[0].startswith("the states of the optimizer stay as Megatron names them: ")


def test_a_universal_checkpoint_has_the_master_weights(tmp_path):
    """DeepSpeed opens each file beside `fp32.pt` as a state of the optimizer: no master again."""
    master = WEIGHT + 2**-20
    items = {
        "w": WEIGHT.bfloat16(),
        "optimizer.state.exp_avg.w": MOMENT,
        "optimizer.state.fp32_param.w": master,
    }
    convert_checkpoint(written(tmp_path / "iter", items, GROUPS), tmp_path / "out", to="universal")
    (folder,) = (tmp_path / "out").glob("*/zero/w")
    assert {item.name for item in folder.iterdir()} == {"fp32.pt", "exp_avg.pt", "step.pt"}
    assert torch.equal(torch.load(folder / "fp32.pt")["param"], master)
    kept = torch.load(folder.parents[1] / "mp_rank_00_model_states.pt")["module"]["w"]
    assert kept.dtype is torch.bfloat16


def test_a_universal_checkpoint_says_where_it_has_no_master_weights(tmp_path):
    items = {"w": WEIGHT.bfloat16(), "v": WEIGHT}
    items |= {f"optimizer.state.exp_avg.{key}": MOMENT for key in items}
    source = written(tmp_path / "iter", items, GROUPS)
    notes = convert_checkpoint(source, tmp_path / "out", to="universal").plan.notes
    told = "fp32.pt of w is made of the weight, which is not float32"
    assert [note for note in notes if told in note]
    (made,) = (tmp_path / "out").glob("*/zero/w/fp32.pt")
    assert torch.equal(torch.load(made)["param"], WEIGHT)


def test_the_low_bits_of_master_weights_are_not_taken_for_them(tmp_path):
    """Of Megatron's precision-aware optimizer with `store_param_remainders`."""
    items = {
        "w": WEIGHT.bfloat16(),
        "optimizer.state.exp_avg.w": MOMENT,
        "optimizer.state.fp32_param.w": torch.ones(2, 3, dtype=torch.int16),
    }
    written(tmp_path / "iter", items, GROUPS)
    done = run("convert", "iter", "out", "--to", "universal", cwd=tmp_path)
    assert "w.fp32_param: is int16" in assert_one_error(done)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_megatron_becomes_one_again(kind, tmp_path):
    """Torch finds each item under the key and with the values that it had; megatron core itself
    loads them in `tests/families/test_megatron.py`.
    """
    source, out = FOLDERS / kind, tmp_path / "out"
    convert_checkpoint(source, out, to="dcp", optimizer="megatron", fsync=False, verify=True)
    kept = items_of(source)
    assert items_of(out).keys() == kept.keys()
    assert all(torch.equal(value, kept[key]) for key, value in items_of(out).items())
    for name in ("common.pt", "metadata.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def items_of(folder: Path) -> dict[str, torch.Tensor]:
    """What torch reads from a folder, by the keys in its metadata."""
    told = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in told.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(found, checkpoint_id=folder, planner=planner, no_dist=True)
    return found


def test_rules_change_names_in_states_and_types_of_weights_alone(tmp_path):
    source, out = FOLDERS / "chained", tmp_path / "out"
    rules = {"rename": ["decoder.layers.=blocks."], "dtype": "bf16", "add_prefix": "x."}
    convert_checkpoint(source, out, to="dcp", optimizer="megatron", fsync=False, **rules)
    expected = {}
    for key, value in items_of(source).items():
        mark, name = re.fullmatch(r"(.*exp_avg(?:_sq)?\.)?(.*)", key).groups("")
        named = f"{mark}x.{name.replace('decoder.layers.', 'blocks.')}"
        expected[named] = value if mark else value.bfloat16()
    found = items_of(out)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype and torch.equal(found[key], value)


def test_only_what_came_from_megatron_goes_back(tmp_path):
    convert_checkpoint(FOLDERS / "plain", tmp_path / "in.pt", fsync=False)
    (tmp_path / "bare").mkdir()
    for item in (FOLDERS / "plain").iterdir():
        if item.name != "common.pt":
            (tmp_path / "bare" / item.name).write_bytes(item.read_bytes())
    for source, more, said in (
        ("in.pt", ("--to", "dcp"), "it is not a torch_dist folder of Megatron with its common.pt"),
        ("bare", ("--to", "dcp"), "it is not a torch_dist folder of Megatron with its common.pt"),
        (FOLDERS / "plain", ("--to", "torch"), "is for a whole DCP folder"),
        (FOLDERS / "plain", ("--to", "dcp", "--only", "model"), "is for a whole DCP folder"),
    ):
        words = ["convert", source, "out", "--optimizer", "megatron", *more]
        done = run(*words, cwd=tmp_path)
        assert done.exit != 0 and said in done.err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("inner", "step"),
    [
        ({"state": {"common_step": torch.tensor(4)}}, 4),
        ({"state": {"common_step": torch.tensor(4.0, dtype=torch.bfloat16)}}, 4.0),
        ({"param_groups": [{"lr": 0.1, "step": 4}]}, 4),
        ({"state": {"common_step": torch.ones(2)}}, None),
        ({"state": {"common_step": "4"}}, None),
        ({}, None),
    ],
)
def test_the_step_is_one_number(inner, step, tmp_path):
    items = {"w": WEIGHT, "optimizer.state.exp_avg.w": MOMENT}
    common = {"optimizer": {"param_groups": [{"lr": 0.1}], **inner}}
    found, _ = converted(written(tmp_path / "iter", items, common), tmp_path)
    assert found["optimizer"]["state"]["w"].get("step") == step
    assert found["optimizer"]["param_groups"][0]["params"] == ["w"]


@pytest.mark.parametrize(
    ("common", "said"),
    [
        ({"optimizer": {("a", 1): 2}}, "is not a dict of names"),
        ({"optimizer": {"optimizer.state.exp_avg.w": 1}}, "is in .metadata too"),
        ({"optimizer": [1]}, "is in .metadata too"),
    ],
)
def test_what_contradicts_itself_is_one_error(common, said, tmp_path):
    items = {"w": WEIGHT, "optimizer.state.exp_avg.w": MOMENT}
    written(tmp_path / "iter", items, common)
    error = assert_one_error(run("convert", "iter", "out.pt", cwd=tmp_path))
    assert "common.pt" in error and said in error
    assert not (tmp_path / "out.pt").exists()


def test_flat_buckets_are_refused_by_name(tmp_path):
    torch.save({0: {(torch.float32, torch.bfloat16): {}}}, tmp_path / "distrib_optim.pt")
    error = assert_one_error(run("convert", "distrib_optim.pt", "out.pt", cwd=tmp_path))
    assert "distrib_optim.pt: holds the flat buckets of a distributed optimizer" in error
    assert "--ckpt-format torch_dist" in error


@pytest.mark.parametrize("packed", ["w", "w:gz"])
@pytest.mark.parametrize("name", ["plain", "torch"])
def test_a_folder_in_an_archive_is_read_where_it_lies(name, packed, tmp_path):
    """As NeMo packs it; torch and ckptconv read the folder beside."""
    folder = FOLDERS / "plain"
    if name == "torch":
        folder = tmp_path / "saved"
        tree = {"model": {"w": torch.rand(5, 3), "b": torch.rand(5)}, "step": 7, "s": "text"}
        dcp.save(tree, checkpoint_id=folder)
    (tmp_path / "model_config.yaml").write_text("name: small")
    with tarfile.open(tmp_path / "model.nemo", packed) as archive:
        archive.add(tmp_path / "model_config.yaml", "./model_config.yaml")
        archive.add(folder, "./model_weights")
    found, _ = converted(tmp_path / "model.nemo", tmp_path)
    if name == "torch":
        expected: Any = {"model": {"w": torch.zeros(5, 3), "b": torch.zeros(5)}, "step": 0, "s": ""}
        dcp.load(expected, checkpoint_id=folder)
        assert oracle.value_rows(found) == oracle.value_rows(expected)
        assert torch.equal(load_portable(tmp_path / "model.nemo")["w"], expected["model"]["w"])
    else:
        expected, _ = converted(folder, tmp_path)
        assert oracle.value_rows(found) == oracle.value_rows(expected)
        for path in (folder, tmp_path / "model.nemo"):
            options = {"to": "dcp", "optimizer": "megatron"}
            convert_checkpoint(path, tmp_path / f"{path.stem}.out", fsync=False, **options)
        ours, beside = (items_of(tmp_path / f"{stem}.out") for stem in ("model", "plain"))
        assert ours.keys() == beside.keys()
        assert all(torch.equal(ours[key], value) for key, value in beside.items())
    done = run("inspect", "model.nemo", cwd=tmp_path)
    assert "1 member left out: model_config.yaml beside model_weights" in done.out


def test_what_is_wrong_with_a_folder_in_an_archive_is_named(tmp_path):
    def packed(*names: str, twice: bool = False) -> str:
        with tarfile.open(tmp_path / "model.nemo", "w") as archive:
            for name in names:
                archive.add(FOLDERS / "plain" / name, f"./model_weights/{name}")
            if twice:
                archive.add(FOLDERS / "plain", "other")
        return assert_one_error(run("convert", "model.nemo", "out.pt", cwd=tmp_path))

    names = [item.name for item in (FOLDERS / "plain").iterdir()]
    without = [name for name in names if name != "__1_1.distcp"]
    assert "model.nemo/model_weights: " in packed(*without)
    assert "needs the file '__1_1.distcp', which is not there" in packed(*without)
    assert "holds several DCP folders" in packed(*names, twice=True)
    assert "no .metadata" in packed("common.pt", "metadata.json")
    for name in ("common.pt", "metadata.json"):  # the folder of weights that zarr has, as well
        shutil.copy(FOLDERS / "plain" / name, tmp_path)
    (tmp_path / "model.nemo").unlink()
    assert "no .metadata" in assert_one_error(run("convert", ".", "out.pt", cwd=tmp_path))


def test_an_archive_of_nemo_has_its_optimizer(tmp_path):
    convert_checkpoint(FOLDERS / "plain", tmp_path / "model_weights.ckpt", to="torch", fsync=False)
    (tmp_path / "model_config.yaml").write_text("name: small")
    with tarfile.open(tmp_path / "model.nemo", "w:gz") as archive:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            archive.add(tmp_path / name, f"./{name}")
    found, _ = converted(tmp_path / "model.nemo", tmp_path, rename=["decoder.=blocks."])
    assert found["optimizer"]["state"].keys() == found["model"].keys()
