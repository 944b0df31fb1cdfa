"""DeepSpeed's universal checkpoint as an output: the files and tensors of deepspeed's own
`ds_to_universal` (the samples), and what its loading code looks for.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ckptconv import CheckpointError, convert_checkpoint
from helpers.examples import some
from helpers.paths import DATA, NUMBERS
from helpers.program import run

STATES = ("exp_avg", "exp_avg_sq", "step")
SETTINGS = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01}

samples = pytest.mark.skipif(not NUMBERS.is_dir(), reason="the samples are not here")


def tree_of(expected: dict[str, dict[str, torch.Tensor]], **others: Any) -> dict[str, Any]:
    """The training run that a sample is of, as a tree of named states."""
    states = {name: {key: of[key] for key in STATES} for name, of in expected.items()}
    groups = [{**SETTINGS, "params": list(expected)}]
    weights = {name: of["fp32"] for name, of in expected.items()}
    return {"module": weights, "optimizer": {"state": states, "param_groups": groups}, **others}


def small(**others: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"0.weight": (6, 8), "0.bias": (6,), "1.weight": (4, 6)}
    of = {
        name: {
            "fp32": torch.randn(shape),
            "exp_avg": torch.randn(shape),
            "exp_avg_sq": torch.rand(shape),
            "step": torch.tensor(3.0),
        }
        for name, shape in shapes.items()
    }
    return tree_of(of, **others)


def written(folder: Path, tree: dict[str, Any], **options: Any) -> Path:
    """The folder of the step that is made of a tree."""
    torch.save(tree, folder / "in.pt")
    out = folder / "out"
    convert_checkpoint(folder / "in.pt", out, to="universal", verify=True, **options)
    return out / (out / "latest_universal").read_text()


def files_below(folder: Path) -> set[str]:
    return {str(item.relative_to(folder)) for item in folder.rglob("*") if item.is_file()}


@samples
@pytest.mark.parametrize("source", ["named states", "ranks", "universal"])
@pytest.mark.parametrize("name", ["ds_uni_z2", "ds_uni_z3"])
def test_the_tensors_are_those_of_ds_to_universal(name, source, tmp_path):
    """Also from the folder of all ranks, which has no ``universal_checkpoint_info``, and once more
    from what was written.
    """
    expected = torch.load(NUMBERS / name / "expected.pt")
    if source == "named states":
        step = written(tmp_path, tree_of(expected, global_steps=1))
    else:
        out = tmp_path / "out"
        convert_checkpoint(NUMBERS / name / "in", out, to="universal", verify=True)
        if source == "universal":
            convert_checkpoint(out, tmp_path / "again", to="universal", verify=True)
            out = tmp_path / "again"
        step = out / (out / "latest_universal").read_text()
    assert step.name == "global_step1_universal"
    own = files_below(NUMBERS / name / "zero")
    steps = {f"{key}/step.pt" for key in expected}  # ZeRO-3 leaves them out
    assert files_below(step / "zero") == own | steps
    for key, of in expected.items():
        for part, value in of.items():
            made = torch.load(step / "zero" / key / f"{part}.pt")
            is_number = part == "step"
            assert is_number or made["cat_dim"] == 0
            assert torch.equal(made if is_number else made["param"], value), (key, part)
            assert (made if is_number else made["param"]).dtype == value.dtype


def test_what_deepspeed_looks_for_beside_the_tensors(tmp_path):
    """Names from deepspeed 0.19.8: engine.py `_load_checkpoint`, base_optimizer.py, stage3.py."""
    tree = small(lr_scheduler={"last_epoch": 3}, epoch=2, global_steps=7)
    step = written(tmp_path, tree)
    assert step.name == "global_step7_universal"
    for name, weights in (
        ("mp_rank_00_model_states.pt", tree["module"]),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", {}),
    ):
        states = torch.load(step / name)
        assert states["module"].keys() == weights.keys()
        assert states["universal_checkpoint_info"]["universal_checkpoint_version"] > 0
        assert states["dp_world_size"] == states["mp_world_size"] == 1
        assert states["global_steps"] == 7
        assert states["skipped_steps"] == 0
        assert states["lr_scheduler"] == {"last_epoch": 3}
        assert states["epoch"] == 2
        assert states["ds_version"]
    optimizer = torch.load(step / "zero" / "optimizer_state.pt")
    assert optimizer["ds_version"]
    for groups in (optimizer["param_groups"], optimizer["optimizer_state_dict"]["param_groups"]):
        assert [{**group, "params": None} for group in groups] == [{**SETTINGS, "params": None}]
    assert optimizer["optimizer_state_dict"]["state"][0]["step"] == 3


def test_weights_are_float32_once_and_keep_their_type_in_the_model_states(tmp_path):
    tree = small()
    tree["module"] = {name: value.bfloat16() for name, value in tree["module"].items()}
    step = written(tmp_path, tree)
    for name, value in tree["module"].items():
        made = torch.load(step / "zero" / name / "fp32.pt")["param"]
        assert made.dtype == torch.float32
        assert torch.equal(made, value.float())
    kept = torch.load(step / "mp_rank_00_model_states.pt")["module"]
    assert all(torch.equal(kept[name], value) for name, value in tree["module"].items())
    assert {value.dtype for value in kept.values()} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"cast": ["*.weight=f16"]}], ids=str)
def test_a_cast_is_of_the_weights_in_the_model_states_alone(options, tmp_path):
    """Training goes on from `fp32.pt`, which would have lost what rounding takes."""
    tree = small()
    step = written(tmp_path, tree, **options)
    kept = torch.load(step / "mp_rank_00_model_states.pt")["module"]
    for name, value in tree["module"].items():
        made = torch.load(step / "zero" / name / "fp32.pt")["param"]
        assert made.dtype == torch.float32 and torch.equal(made, value)
        is_cast = "dtype" in options or name.endswith("weight")
        to = torch.bfloat16 if "dtype" in options else torch.float16
        assert torch.equal(kept[name], value.to(to) if is_cast else value)
        assert kept[name].dtype is (to if is_cast else torch.float32)


def test_numbered_flat_and_wrapped_states_get_the_names_of_the_weights(tmp_path):
    tree = small()
    names = list(tree["module"])
    numbered = {
        "state": {at: tree["optimizer"]["state"][name] for at, name in enumerate(names)},
        "param_groups": [{**SETTINGS, "params": [0, 1, 2]}],
    }
    flat = {
        f"state.{name}.{key}": value
        for name, of in tree["optimizer"]["state"].items()
        for key, value in of.items()
    } | {f"param_groups.{name}.lr": 0.001 for name in names}
    wrapped = {f"module.{name}": value for name, value in tree["module"].items()}
    for at, (weights, optimizer) in enumerate(
        [(tree["module"], numbered), (tree["module"], flat), (wrapped, numbered)]
    ):
        folder = tmp_path / str(at)
        folder.mkdir()
        step = written(folder, {"model": weights, "optimizer": optimizer})
        for name, of in tree["optimizer"]["state"].items():
            made = torch.load(step / "zero" / name / "exp_avg.pt")["param"]
            assert torch.equal(made, of["exp_avg"])


def test_weights_that_deepspeed_does_not_load_are_told(tmp_path):
    tree = small()
    tree["module"]["running_mean"] = torch.zeros(6)
    torch.save(tree, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out", "--to", "universal", cwd=tmp_path)
    assert done.exit == 0
    assert "running_mean has no state of the optimizer" in done.err
    assert "DeepSpeed does not load" in done.err


def test_it_is_told_of_what_is_written_under_the_keys_there(tmp_path):
    tree = small()
    weights = {f"net.{key}": value.half() for key, value in tree["module"].items()}
    torch.save({"module": weights, "optimizer": tree["optimizer"]}, tmp_path / "in.pt")
    done = run(
        *("convert", "in.pt", "out", "--to", "universal", "--strip-prefix", "net."), cwd=tmp_path
    )
    assert done.exit == 0
    assert "fp32.pt of 0.weight, 0.bias, 1.weight is made of the weight" in done.err
    rule = {"from": "1.weight", "to": ["1.weight", "last.weight"], "operations": ["tie"]}
    torch.save(tree, tmp_path / "in.pt")
    made = convert_checkpoint(tmp_path / "in.pt", tmp_path / "tied", to="universal", rules=[rule])
    assert not any("has no state" in note for note in made.plan.notes)


# ------------------------------------------------------------------------- the scale of the loss

SCALERS = "deepspeed.runtime.fp16.loss_scaler"
DYNAMIC: dict[str, Any] = {
    "cur_scale": 8192.0, "dynamic": True, "cur_iter": 10, "last_overflow_iter": 6,
    "scale_factor": 2.0, "scale_window": 3, "min_scale": 1, "delayed_shift": 2,
    "cur_hysteresis": 1, "consecutive_hysteresis": False, "raise_error_at_min_scale": True,
    "dtype": torch.float16,
}  # fmt: skip
STATIC = {"cur_scale": 128.0, "dynamic": False}


class Scaler:
    """Stands in for the classes of deepspeed that a file names."""

    def __init__(self, *_: Any) -> None:
        pass


class Named(pickle.Unpickler):
    """Gives a `Scaler` for what is of deepspeed, and keeps the names."""

    names: ClassVar[set[str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("deepspeed"):
            return super().find_class(module, name)
        self.names.add(f"{module}.{name}")
        return Scaler


def with_scalers(file: Path) -> tuple[dict[str, Any], set[str]]:
    """What is in a file, and the classes of deepspeed that it names."""
    Named.names.clear()
    reader = SimpleNamespace(__name__="reader", Unpickler=Named)
    root: dict[str, Any] = torch.load(file, weights_only=False, pickle_module=reader)
    return root, set(Named.names)


@pytest.mark.parametrize(
    ("scaler", "name"), [(DYNAMIC, "DynamicLossScaler"), (STATIC, "LossScaler")]
)
def test_the_loss_scaler_is_an_object_of_the_class_that_deepspeed_looks_for(scaler, name, tmp_path):
    is_dynamic = bool(scaler["dynamic"])
    tree = small(loss_scaler=scaler, dynamic_loss_scale=is_dynamic, overflow=True)
    torch.save(tree, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out", "--to", "universal", "--verify", cwd=tmp_path)
    assert done.exit == 0
    assert f"the loss scaler as an object of {SCALERS}.{name}" in done.err
    convert_checkpoint(tmp_path / "out", tmp_path / "again", to="universal", verify=True)
    for folder in (tmp_path / "out", tmp_path / "again"):
        step = folder / (folder / "latest_universal").read_text()
        found, names = with_scalers(step / "zero" / "optimizer_state.pt")
        assert names == {f"{SCALERS}.{name}"}
        assert vars(found["loss_scaler"]) == scaler
        assert (found["dynamic_loss_scale"], found["overflow"]) == (is_dynamic, True)
        for file in step.glob("*_model_states.pt"):
            assert torch.load(file).keys().isdisjoint({"loss_scaler", "overflow"})
    convert_checkpoint(tmp_path / "again", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["loss_scaler"] == scaler


def test_the_loss_scaler_of_a_run_in_fp16_goes_from_its_ranks_to_a_universal_checkpoint(tmp_path):
    """The scale has doubled after the second step, as its window is 1."""
    source = DATA / "deepspeed" / "stage2_fp16"
    (file, *_) = sorted(source.glob("global_step2/*optim_states.pt"))
    own, _ = with_scalers(file)
    expected = vars(own["optimizer_state_dict"]["loss_scaler"])
    assert (expected["cur_scale"], expected["cur_iter"]) == (32, 2)
    assert expected.keys() == DYNAMIC.keys()
    convert_checkpoint(source, tmp_path / "out", to="universal", verify=True)
    convert_checkpoint(source, tmp_path / "dcp", to="dcp")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "again", to="universal", verify=True)
    for out in (tmp_path / "out", tmp_path / "again"):
        (file,) = out.glob("*/zero/optimizer_state.pt")
        found, names = with_scalers(file)
        assert names == {f"{SCALERS}.DynamicLossScaler"}
        assert vars(found["loss_scaler"]) == expected


def test_experts_are_told_of_that_each_rank_would_take_for_its_own(tmp_path):
    source = DATA / "deepspeed_parallel" / "experts_fp16"
    done = run("convert", source, "out", "--to", "universal", cwd=tmp_path)
    assert done.exit == 0
    assert "DeepSpeed looks for experts by their numbers on a rank" in done.err
    expected = torch.load(source / "states.pt")
    (zero,) = (tmp_path / "out").glob("*/zero")
    for name, state in expected.items():
        assert torch.equal(torch.load(zero / name / "fp32.pt")["param"], state["fp32"])


@samples
def test_gradients_are_clipped_as_ds_to_universal_says(tmp_path):
    convert_checkpoint(NUMBERS / "ds_uni_z2" / "in", tmp_path / "out", to="universal")
    step = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    own, _ = with_scalers(NUMBERS / "ds_uni_z2" / "zero" / "optimizer_state.pt")
    found, _ = with_scalers(step / "zero" / "optimizer_state.pt")
    assert found["clip_grad"] == own["clip_grad"] == 1.0
    assert "clip_grad" not in torch.load(step / "mp_rank_00_model_states.pt")
    convert_checkpoint(step, tmp_path / "again.pt")
    assert torch.load(tmp_path / "again.pt")["clip_grad"] == 1.0


def test_a_scaler_that_scales_nothing_is_left_to_deepspeed(tmp_path):
    """Of a run in bfloat16, say: what goes on in fp16 has the scale of its config."""
    idle = {"cur_scale": 1.0, "dynamic": False}
    step = written(tmp_path, small(loss_scaler=idle, dynamic_loss_scale=False, overflow=False))
    assert "loss_scaler" not in torch.load(step / "zero" / "optimizer_state.pt")
    kept = torch.load(step / "mp_rank_00_model_states.pt")
    assert kept["loss_scaler"] == idle


@pytest.mark.parametrize(
    "said",
    [
        {"loss_scaler": {key: value for key, value in DYNAMIC.items() if key != "cur_hysteresis"}},
        {"loss_scaler": {**DYNAMIC, "another": 1}},
        {"loss_scaler": {**DYNAMIC, "dynamic": False}},
        {"loss_scaler": {**DYNAMIC, "cur_scale": "8192"}},
        {"loss_scaler": {**DYNAMIC, "cur_scale": {"a": 1}}},
        {"loss_scaler": {**DYNAMIC, "dtype": 16}},
        {"loss_scaler": {"scale": 65536.0, "growth_factor": 2.0}},
        {"cur_scale": 16.0, "cur_iter": 2},
    ],
)
def test_numbers_that_are_no_scaler_of_deepspeed_make_no_object(said, tmp_path):
    tree = small(**said)
    step = written(tmp_path, tree)
    assert "loss_scaler" not in torch.load(step / "zero" / "optimizer_state.pt")
    kept = torch.load(step / "mp_rank_00_model_states.pt")
    assert {key: kept[key] for key in said} == said
    done = run("convert", "in.pt", "again", "--to", "universal", cwd=tmp_path)
    assert "the scale starts anew" in done.err


def refused(folder: Path, tree: dict[str, Any], **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        written(folder, tree, **options)
    assert [item.name for item in folder.iterdir()] == ["in.pt"]
    return str(error.value)


EVIL = ["../../evil", "/evil", "a\\b", "..", "", "nul", "a:b", "x" * 300, "sub/evil", "a\nb"]


@pytest.mark.parametrize("evil", some(4, EVIL))
def test_a_parameter_whose_name_is_no_folder_is_refused(evil, tmp_path):
    tree = small()
    for of in (tree["module"], tree["optimizer"]["state"]):
        of[evil] = of.pop("0.bias")
    tree["optimizer"]["param_groups"][0]["params"] = list(tree["module"])
    assert "is not a name that a folder can have" in refused(tmp_path, tree)


@pytest.mark.parametrize("evil", ["../evil", "fp32", "STEP/..", "exp.\0"])
def test_an_entry_of_a_state_whose_name_is_no_file_is_refused(evil, tmp_path):
    tree = small()
    tree["optimizer"]["state"]["0.bias"][evil] = torch.zeros(6)
    assert "universal checkpoint holds nothing else" in refused(tmp_path, tree)


def test_what_a_universal_checkpoint_cannot_be_is_refused(tmp_path):
    tree = small()
    told = refused(tmp_path, {"module": tree["module"]})
    assert "holds 1 state dict and 0 optimizer states" in told
    told = refused(tmp_path, tree, only="optimizer")
    assert "leave --only out" in told
    told = refused(tmp_path, {**tree, "ema": dict(tree["module"])})
    assert "holds 2 state dicts and 1 optimizer state" in told
    assert "--drop" in told
    told = refused(tmp_path, tree, exclude=["0.bias"])
    assert "0.bias: is in the optimizer's state, and not among the weights" in told
    tree["optimizer"]["state"]["0.bias"]["row"] = torch.zeros(5)
    assert "is not of the shape of its parameter" in refused(tmp_path, tree)
    tree["optimizer"]["state"]["0.bias"]["exp_avg"] = torch.zeros(5)
    assert "has exp_avg of shape [5] for 0.bias, which is [6]" in refused(tmp_path, tree)
    assert "by names, not flat" in refused(tmp_path, small(), optimizer="flat")
    told = refused(tmp_path, small(note=SimpleNamespace()), unknown="keep")
    assert "cannot be kept in a universal checkpoint" in told
    tree = small()
    for of in (tree["module"], tree["optimizer"]["state"]):
        of["module.0.bias"] = of["0.bias"]
    tree["optimizer"]["param_groups"][0]["params"] = [*tree["module"]]
    del tree["module"]["module.0.bias"]
    assert "names a parameter twice" in refused(tmp_path, tree)
    tree = small()
    tree["module"]["0.bias"] = [1.0]
    assert "0.bias: has an optimizer state, and is not a tensor" in refused(tmp_path, tree)


def test_it_takes_the_place_of_one_of_its_kind_alone(tmp_path):
    first = written(tmp_path, small(global_steps=1))
    with pytest.raises(CheckpointError, match="exists"):
        written(tmp_path, small(global_steps=2))
    assert first.is_dir()
    second = written(tmp_path, small(global_steps=2), force=True)
    assert second.is_dir()
    assert not first.exists()
    (tmp_path / "out" / "latest_universal").unlink()
    with pytest.raises(CheckpointError, match="holds something other"):
        written(tmp_path, small(), force=True)


def test_a_dry_run_and_json_tell_its_size(tmp_path):
    torch.save(small(), tmp_path / "in.pt")
    words = ["convert", "in.pt", "out", "--to", "universal"]
    planned = json.loads(run(*words, "--dry-run", "--json", cwd=tmp_path).out)
    done = json.loads(run(*words, "--json", cwd=tmp_path).out)
    there = sum(item.stat().st_size for item in (tmp_path / "out").rglob("*") if item.is_file())
    assert planned["output"]["bytes"] == done["output"]["bytes"] == there
