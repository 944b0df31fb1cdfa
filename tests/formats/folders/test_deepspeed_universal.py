"""DeepSpeed's universal checkpoints are read as what they were made of; deepspeed's own
ds_to_universal made the samples, and said what is in them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ckptconv import CheckpointError, convert_checkpoint, load_portable, open_checkpoint
from helpers import oracle
from helpers.paths import DATA
from helpers.program import assert_one_error, run

FOLDERS = DATA / "deepspeed"
NUMBERS = oracle.corpus_folder().parent / "numbers"
SAMPLES = ["ds_uni_z2", "ds_uni_z3"]


@pytest.fixture
def sample(request, tmp_path) -> Path:
    """A copy of a sample that a test may break."""
    source = NUMBERS / request.param
    if not source.is_dir():
        pytest.skip("the samples of numbers are not here")
    return shutil.copytree(source, tmp_path / request.param, ignore=shutil.ignore_patterns("in"))


both = pytest.mark.parametrize("sample", SAMPLES, indirect=True)
flat = pytest.mark.parametrize("sample", ["ds_uni_z3"], indirect=True)


def is_same(found: Any, expected: Any) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


@both
def test_it_is_what_ds_to_universal_says_that_it_is(sample, tmp_path):
    expected = oracle.load(sample / "expected.pt")
    convert_checkpoint(sample, tmp_path / "out.pt", fsync=False, verify=True)
    for found in (load_portable(sample, whole=True), oracle.load(tmp_path / "out.pt")):
        assert found["module"].keys() == found["optimizer"]["state"].keys() == expected.keys()
        for name, values in expected.items():
            assert is_same(found["module"][name], values.pop("fp32"))
            state = found["optimizer"]["state"][name]
            assert state.keys() == values.keys()
            assert all(is_same(state[key], value) for key, value in values.items())
            values["fp32"] = found["module"][name]
        steps = [state["step"] for state in found["optimizer"]["state"].values()]
        assert len({step.data_ptr() for step in steps}) == len(steps)


@both
def test_it_is_what_the_ranks_were(sample):
    ranks = load_portable(NUMBERS / sample.name / "in", whole=True)
    found = load_portable(sample, whole=True)
    assert found.keys() == ranks.keys()
    for key in found.keys() - {"module", "optimizer"}:
        assert found[key] == ranks[key]
    assert sorted(oracle.value_rows(found["optimizer"])) == sorted(
        oracle.value_rows(ranks["optimizer"])
    )
    assert list(found["module"]) == list(ranks["module"])


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage2_frozen", "stage3", "stage3_frozen"])
def test_what_is_written_is_read_again(name, tmp_path):
    convert_checkpoint(FOLDERS / name, tmp_path / "universal", to="universal", fsync=False)
    before = load_portable(FOLDERS / name, whole=True)
    found = load_portable(tmp_path / "universal", whole=True)
    names = before["optimizer"]["state"]
    assert found["optimizer"]["state"].keys() == names.keys()
    for parameter, state in names.items():
        assert all(
            is_same(found["optimizer"]["state"][parameter][key], value)
            for key, value in state.items()
        )
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == [
        group["params"] for group in before["optimizer"]["param_groups"]
    ]
    assert found["module"].keys() == before["module"].keys()
    assert all(is_same(found["module"][key], value) for key, value in before["module"].items())


def test_buffers_and_tied_weights_come_from_the_model_states(produced, tmp_path):
    folder = produced / "ds_universal"
    model = oracle.load(
        folder / "z3" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False
    )
    found = load_portable(folder, whole=True)
    assert found["module"].keys() == model["module"].keys()
    assert is_same(found["module"]["pos"], model["module"]["pos"])
    tied = found["module"]["head.weight"].data_ptr(), found["module"]["emb.weight"].data_ptr()
    assert tied[0] == tied[1]
    assert (found["epoch"], found["np"]) == (3, 1)
    flat = torch.load(folder / "z3" / "zero" / "emb.weight" / "fp32.pt")
    assert torch.equal(found["module"]["emb.weight"].flatten(), flat)
    convert_checkpoint(folder, tmp_path / "out.safetensors", tied="duplicate", fsync=False)
    written = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert written.keys() == model["module"].keys()


@pytest.mark.parametrize("sample", ["ds_uni_z2"], indirect=True)
def test_without_model_states_the_parameters_alone_are_there(sample):
    (sample / "mp_rank_00_model_states.pt").unlink()
    with open_checkpoint(sample) as checkpoint:
        assert any("no model states beside" in note for note in checkpoint.notes)
    assert load_portable(sample).keys() == oracle.load(sample / "expected.pt").keys()


# -------------------------------------------------------------------------- what cannot be believed


def refused(folder: Path, what: str) -> None:
    with pytest.raises(CheckpointError, match=what) as error:
        load_portable(folder)
    assert "\n" not in str(error.value)


@flat
def test_flat_values_without_a_shape_are_refused(sample):
    for file in sample.glob("*_model_states.pt"):
        file.unlink()
    refused(sample, r"fp32.pt: is flat, and no model states|is flat, and no model states")


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exp_avg.pt", torch.rand(7)),
        ("exp_avg.pt", {"param": torch.rand(3, 5)}),
        ("exp_avg_sq.pt", {"param": "text"}),
        ("exp_avg_sq.pt", {}),
        ("fp32.pt", torch.rand(2, 3)),
        ("fp32.pt", 7),
    ],
)
def test_values_of_another_shape_are_refused(sample, name, value):
    torch.save(value, sample / "zero" / "0.weight" / name)
    refused(sample, "0.weight")


@both
def test_a_parameter_without_its_weight_is_refused(sample):
    (sample / "zero" / "1.weight" / "fp32.pt").unlink()
    refused(sample, "1.weight: has no fp32.pt, which holds the weight")


@both
@pytest.mark.parametrize(
    ("params", "what"),
    [
        ([-1], "a group names parameters other than"),
        (["0.weight"], "a group names parameters other than"),
        ({}, "a group names parameters other than"),
    ],
)
def test_groups_of_something_else_are_refused(sample, params, what):
    file = sample / "zero" / "optimizer_state.pt"
    torch.save({"param_groups": [{"lr": 0.1, "params": params}]}, file)
    refused(sample, what)


@both
def test_groups_that_no_file_names_are_left_out_with_a_note(sample):
    groups = [{"lr": 0.1, "params": [number]} for number in range(3)]
    torch.save({"param_groups": groups}, sample / "zero" / "optimizer_state.pt")
    with open_checkpoint(sample) as checkpoint:
        assert any("no file says which parameters" in note for note in checkpoint.notes)
    assert load_portable(sample).keys() == oracle.load(sample / "expected.pt").keys()


def test_the_folder_of_the_parameters_alone_is_refused(produced, tmp_path):
    done = run("convert", produced / "ds_universal/z3/zero", "out.pt", cwd=tmp_path)
    assert "name the folder that it is in" in assert_one_error(done)


def test_a_step_that_is_universal_too_is_refused(tmp_path):
    folder = shutil.copytree(FOLDERS / "stage2", tmp_path / "both")
    made = folder / "global_step2" / "zero" / "embed.weight" / "fp32.pt"
    made.parent.mkdir(parents=True)
    torch.save({"param": torch.rand(7, 5)}, made)
    refused(folder, "holds a universal checkpoint .zero. and the states of 2 ranks")


@pytest.mark.parametrize("sample", ["ds_uni_z2"], indirect=True)
def test_names_of_folders_are_not_the_order_of_parameters(sample, tmp_path):
    (sample / "mp_rank_00_model_states.pt").unlink()
    result = convert_checkpoint(sample, tmp_path / "out.pt")
    assert "optimizer" not in torch.load(tmp_path / "out.pt")
    assert any("states are left out" in note for note in result.plan.notes)
