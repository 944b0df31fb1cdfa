"""Folders as frameworks leave them: which checkpoint is meant, and that it becomes what the
framework itself would load.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptconv import CheckpointError, convert_checkpoint, diagnose, load_portable, open_checkpoint
from ckptconv.batch.finding import find_checkpoints
from ckptconv.io.places import place_of
from ckptconv.support.errors import AmbiguousStateDict, MalformedCheckpoint, UnsupportedCheckpoint
from helpers import oracle
from helpers.paths import DATA
from helpers.program import run

QUICK: dict[str, Any] = {"fsync": False, "verify": True}
WEIGHTS = {"up.weight": torch.arange(12.0).reshape(3, 4), "up.bias": torch.ones(3)}
OTHER = {"up.weight": torch.zeros(3, 4), "up.bias": torch.zeros(3)}
MEGATRON = DATA / "megatron"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def rows(tree: Any) -> Any:
    """A tree's values, in the order of its names."""
    return oracle.value_rows(dict(sorted(tree.items())))


def consolidated(folder: Path, scratch: Path) -> Any:
    """What torch makes of a DCP folder; accelerate and Lightning do it in the same way."""
    dcp_to_torch_save(folder, scratch / "torch.pt")
    return torch.load(scratch / "torch.pt", weights_only=False)


def saved_dcp(folder: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, checkpoint_id=folder)
    return folder


def saved(path: Path, tree: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, path)
    return path


def saved_st(path: Path, tree: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tree, path)
    return path


def notes(path: Path, **options: Any) -> str:
    with open_checkpoint(path, **options) as checkpoint:
        return "\n".join(checkpoint.notes)


# --------------------------------------------------------------------------------------- accelerate


def test_the_fsdp_folder_of_accelerate_is_its_model(produced, tmp_path):
    folder = produced / "accelerate_fsdp"
    expected = consolidated(folder / "pytorch_model_fsdp_0", tmp_path)["model"]
    convert_checkpoint(folder, tmp_path / "out.safetensors", **QUICK)
    assert rows(load_file(tmp_path / "out.safetensors")) == rows(expected)
    assert rows(load_portable(folder)) == rows(expected)


def test_the_fsdp_folder_of_accelerate_keeps_its_training_in_a_torch_output(produced, tmp_path):
    folder = produced / "accelerate_fsdp"
    optimizer = consolidated(folder / "optimizer_0", tmp_path)["optimizer"]
    convert_checkpoint(folder, tmp_path / "out.pt", keys="keep", **QUICK)
    found = oracle.load(tmp_path / "out.pt")
    assert found.keys() == {"model", "optimizer_0", "scheduler", "random_states_0"}
    assert rows(found["optimizer_0"]) == rows(optimizer)
    assert found["scheduler"] == torch.load(folder / "scheduler.bin")


def test_the_fsdp_folder_of_the_trainer_is_its_model(tmp_path):
    """Without accelerate's random states, with the Trainer's own, and a scheduler and an optimizer
    under its names.
    """
    folder = tmp_path / "checkpoint-2"
    saved_dcp(folder / "pytorch_model_fsdp_0", {"model": WEIGHTS})
    saved_dcp(
        folder / "optimizer_0", {"optimizer": {"state": {"up.bias": {"exp_avg": torch.ones(3)}}}}
    )
    saved(folder / "scheduler.pt", {"last_epoch": 3})
    saved(folder / "rng_state_0.pth", {"cpu": torch.zeros(4)})
    assert rows(load_portable(folder)) == rows(WEIGHTS)
    whole = load_portable(folder, whole=True)
    assert whole.keys() == {"model", "optimizer_0", "scheduler", "rng_state_0"}
    assert whole["optimizer_0"].keys() == {"state"}


def test_full_state_dicts_of_fsdp_are_the_models(tmp_path):
    saved(tmp_path / "pytorch_model_fsdp.bin", WEIGHTS)
    saved(tmp_path / "optimizer.bin", {"state": {}, "param_groups": []})
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    saved(tmp_path / "pytorch_model_fsdp_1.bin", OTHER)
    whole = load_portable(tmp_path, whole=True)
    assert whole.keys() == {"model", "model_1", "optimizer"}
    assert rows(whole["model_1"]) == rows(OTHER)


@pytest.mark.parametrize(
    "name", ["pytorch_model_fsdp_rank{}.bin", "pytorch_model_fsdp_0_rank{}.bin"]
)
def test_rank_files_of_fsdp_are_joined(name, produced, tmp_path):
    for rank in (0, 1):
        shutil.copy(produced / f"rank{rank}_dtensor.pt", tmp_path / name.format(rank))
    expected = oracle.load(produced / "full_from_fsdp.pt")
    convert_checkpoint(tmp_path, tmp_path / "out.safetensors", keys="keep", **QUICK)
    assert rows(load_file(tmp_path / "out.safetensors")) == rows(expected)
    (tmp_path / name.format(1)).unlink()
    with pytest.raises(CheckpointError, match="missing: rank 1"):
        open_checkpoint(tmp_path)


def test_flat_parameters_of_fsdp_are_refused_by_name(tmp_path):
    """They are one long tensor, which does not say what parameters are in it."""
    saved(
        tmp_path / "pytorch_model_fsdp_rank0.bin",
        {"_fsdp_wrapped_module._flat_param": torch.ones(15)},
    )
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"_flat_param: is a flat parameter of FSDP .* with SHARDED_STATE_DICT",
    ):
        open_checkpoint(tmp_path)


def test_a_model_of_fsdp_in_two_forms_is_a_choice_of_the_user(tmp_path):
    saved_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": WEIGHTS})
    saved(tmp_path / "pytorch_model_fsdp.bin", OTHER)
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"holds model in 2 forms: pytorch_model_fsdp.bin, pytorch_model_fsdp_0;",
    ):
        open_checkpoint(tmp_path)


def test_of_two_files_for_one_model_accelerate_loads_the_safetensors(tmp_path):
    saved_st(tmp_path / "model.safetensors", WEIGHTS)
    saved(tmp_path / "pytorch_model.bin", OTHER)
    saved(tmp_path / "random_states_0.pkl", {"step": 1})
    saved(tmp_path / "pytorch_model_fsdp.bin", OTHER)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    for left in ("pytorch_model.bin", "pytorch_model_fsdp.bin"):
        assert f"{left} is left out: model.safetensors holds the weights" in notes(tmp_path)


def test_weights_under_a_usual_name_go_before_those_of_fsdp(tmp_path):
    """As the Trainer leaves both of them, of one step."""
    saved_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": OTHER})
    saved_st(tmp_path / "adapter_model.safetensors", WEIGHTS)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)


def test_a_part_of_an_fsdp_folder_that_is_a_link_out_of_it_is_refused(tmp_path):
    saved_dcp(tmp_path / "elsewhere", {"model": WEIGHTS})
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "pytorch_model_fsdp_0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MalformedCheckpoint, match="is a link that leads out of the folder"):
        open_checkpoint(folder)


# ---------------------------------------------------------------------------------------- Lightning

META = {
    "epoch": 1,
    "global_step": 2,
    "pytorch-lightning_version": "2.6.6",
    "hyper_parameters": {"lr": 0.1},
}


def lightning_consolidated(folder: Path, scratch: Path) -> dict[str, Any]:
    """What `python -m lightning.pytorch.utilities.consolidate_checkpoint` gives, in its three
    steps.
    """
    tree: dict[str, Any] = consolidated(folder, scratch)
    tree.update(torch.load(folder / "meta.pt", weights_only=False))
    tree["state_dict"] = tree.pop("model")
    optimizers = sorted(name for name in tree if name.startswith("optimizer_"))
    tree["optimizer_states"] = [tree.pop(name) for name in optimizers]
    return tree


def assert_as_lightning_consolidates(folder: Path, scratch: Path) -> None:
    expected = lightning_consolidated(folder, scratch)
    convert_checkpoint(folder, scratch / "out.pt", keys="keep", **QUICK)
    assert rows(oracle.load(scratch / "out.pt")) == rows(expected)
    convert_checkpoint(folder, scratch / "out.safetensors", keys="keep", **QUICK)
    assert rows(load_file(scratch / "out.safetensors")) == rows(expected["state_dict"])


def test_a_sharded_checkpoint_of_lightning_is_what_lightning_consolidates(produced, tmp_path):
    assert_as_lightning_consolidates(produced / "lightning_fsdp.ckpt", tmp_path)


def test_the_optimizers_of_lightning_are_a_list(tmp_path):
    states = {
        f"optimizer_{number}": {"state": {"up.bias": {"step": torch.tensor(number)}}}
        for number in range(2)
    }
    folder = saved_dcp(tmp_path / "epoch=1.ckpt", {"model": WEIGHTS, **states})
    saved(folder / "meta.pt", META)
    assert_as_lightning_consolidates(folder, tmp_path)


def test_a_checkpoint_of_lightnings_model_parallel_strategy_has_its_names_already(tmp_path):
    folder = saved_dcp(tmp_path / "epoch=1.ckpt", {"state_dict": WEIGHTS})
    saved(folder / "meta.pt", META)
    whole = load_portable(folder, whole=True)
    assert whole.keys() == {*META, "state_dict"} and whole["hyper_parameters"] == {"lr": 0.1}
    assert rows(load_portable(folder)) == rows(WEIGHTS)


def test_a_sharded_checkpoint_of_fabric_keeps_the_users_names(tmp_path):
    folder = saved_dcp(tmp_path / "state", {"model": WEIGHTS, "optimizer_0": {"x": torch.ones(1)}})
    saved(folder / "meta.pt", {"iteration": 3})
    whole = load_portable(folder, whole=True)
    assert whole.keys() == {"model", "optimizer_0", "iteration"} and whole["iteration"] == 3


@pytest.mark.parametrize(
    ("meta", "why"),
    [([1, 2], "no dict of names"), ({"model": 1}, "'model' is in the checkpoint too")],
)
def test_a_meta_pt_of_somebody_else_is_left_out_with_a_note(meta, why, tmp_path):
    folder = saved_dcp(tmp_path / "state", {"model": WEIGHTS})
    saved(folder / "meta.pt", meta)
    assert load_portable(folder, whole=True).keys() == {"model"}
    assert why in notes(folder)


# --------------------------------------------------------------------------------------- torchtitan


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_checkpoint_of_torchtitan_is_the_tree_that_torch_makes_of_it(name, produced, tmp_path):
    """The model's keys at the root, with their dots, beside the parts of the training."""
    folder = produced / "torchtitan" / name
    convert_checkpoint(folder, tmp_path / "out.pt", keys="keep", **QUICK)
    found, expected = oracle.load(tmp_path / "out.pt"), consolidated(folder, tmp_path)
    assert rows(found) == rows(expected)
    assert found.keys() >= {"optimizer", "lr_scheduler", "dataloader", "train_state"}
    assert any(type(value) is torch.Tensor for value in found.values())


def step_folders(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        saved_dcp(folder / name, {key: value + number for key, value in WEIGHTS.items()})
    return folder


def test_the_only_step_of_a_run_is_read(tmp_path):
    run_folder = step_folders(tmp_path / "checkpoint", "step-1000")
    assert rows(load_portable(run_folder)) == rows(WEIGHTS)
    assert "the only checkpoint in the folder is read: step-1000" in notes(run_folder)


def test_of_several_steps_a_tag_or_its_number_picks_one(tmp_path):
    run_folder = step_folders(tmp_path / "checkpoint", "step-500", "step-1000", "step-10000")
    with pytest.raises(
        AmbiguousStateDict, match=r"holds 3 checkpoints .* --tag: step-500, step-1000, step-10000$"
    ):
        open_checkpoint(run_folder)
    for tag in ("step-1000", "1000", "01000"):
        assert rows(load_portable(run_folder, tag=tag)) == rows(
            {key: value + 1 for key, value in WEIGHTS.items()}
        )
    assert "--tag: step-500, step-10000" in notes(run_folder, tag="step-1000")
    for tag in ("10", "step-", "0"):
        with pytest.raises(
            MalformedCheckpoint, match=f"--tag: there is no step '{tag}' here; .*step-500"
        ):
            open_checkpoint(run_folder, tag=tag)


def test_a_number_that_two_steps_end_in_picks_none(tmp_path):
    run_folder = step_folders(tmp_path / "checkpoint", "step-5", "other_5")
    with pytest.raises(MalformedCheckpoint, match="there is no step '5' here"):
        open_checkpoint(run_folder, tag="5")


def test_the_program_reads_inspects_and_diagnoses_a_step(tmp_path):
    run_folder = step_folders(tmp_path / "checkpoint", "step-5", "step-10")
    done = run("convert", run_folder, "out.safetensors", "--tag", "10", "--no-fsync", cwd=tmp_path)
    assert done.exit == 0 and "of its steps, step-10 is read" in done.out + done.err
    assert rows(load_file(tmp_path / "out.safetensors")) == rows(
        {key: value + 1 for key, value in WEIGHTS.items()}
    )
    assert run("inspect", run_folder, "--tag", "step-5", cwd=tmp_path).exit == 0
    failed = run("inspect", run_folder, cwd=tmp_path)
    assert failed.exit == 1 and "choose one with --tag: step-5, step-10" in failed.err
    (finding,) = diagnose(run_folder).findings
    assert finding.advice == "choose one with --tag: step-5, step-10"


# ---------------------------------------------------------------------------------- one in a folder


def test_the_only_file_in_a_folder_is_read_with_a_note(tmp_path):
    saved(tmp_path / "epoch=1-step=2.ckpt", {"state_dict": WEIGHTS})
    (tmp_path / "hparams.yaml").write_text("lr: 1")
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    assert "the only checkpoint in the folder is read: epoch=1-step=2.ckpt" in notes(tmp_path)


def test_the_state_of_a_loss_counts_where_it_has_tensors(tmp_path):
    saved(tmp_path / "params.pt", WEIGHTS)
    saved(tmp_path / "criterion.pt", torch.nn.CrossEntropyLoss().state_dict())
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    weighted = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    saved(tmp_path / "criterion.pt", weighted.state_dict())
    with pytest.raises(UnsupportedCheckpoint, match=r"all its parts: criterion\.pt, params\.pt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("link", ["last.ckpt", "latest.pth"])
def test_a_link_to_the_only_file_is_not_another_one(link, tmp_path):
    saved(tmp_path / "step=2.ckpt", WEIGHTS)
    (tmp_path / link).symlink_to("step=2.ckpt")
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)


@pytest.mark.parametrize("text", ["/runs/a/epoch_1.pth", "epoch_1.pth\n", "C:\\a\\epoch_1.pth"])
def test_mmengine_says_which_file_is_meant(text, tmp_path):
    saved(tmp_path / "epoch_1.pth", WEIGHTS)
    saved(tmp_path / "epoch_2.pth", {"x": torch.ones(1)})
    (tmp_path / "last_checkpoint").write_text(text)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    (tmp_path / "epoch_1.pth").unlink()
    with pytest.raises(MalformedCheckpoint, match=r"names the step 'epoch_1\.pth', which is not"):
        open_checkpoint(tmp_path)


def test_the_folder_around_the_steps_of_a_project_is_named(tmp_path):
    saved_st(tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors", WEIGHTS)
    with pytest.raises(CheckpointError, match=r"without a checkpoint in it; name .*checkpoints$"):
        open_checkpoint(tmp_path)


def test_files_of_dcp_without_their_index_are_called_so(tmp_path):
    file = saved(tmp_path / "step" / "__0_0.distcp", WEIGHTS)
    with pytest.raises(UnsupportedCheckpoint, match=r"one file of a DCP .* name the folder of all"):
        open_checkpoint(file)
    found = find_checkpoints(place_of(tmp_path)).checkpoints
    assert [place.path for place, _ in found] == [file.parent]
    with pytest.raises(UnsupportedCheckpoint, match=r"but not the \.metadata that says"):
        open_checkpoint(file.parent)


def test_a_step_of_speechbrain_is_one_checkpoint_without_its_texts(tmp_path):
    step = tmp_path / "save" / "CKPT+2026-01-01+00-00-00+00"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    saved(step / "model.ckpt", WEIGHTS)
    saved(step / "optimizer.ckpt", optimizer.state_dict())
    for name in ("counter.ckpt", "brain.ckpt", "CKPT.yaml"):
        (step / name).write_text("step: 4\n")
    assert rows(load_portable(tmp_path / "save")) == rows(WEIGHTS)
    assert load_portable(step, whole=True).keys() == {"model", "optimizer"}
    assert "counter.ckpt is left out: it is a text file" in notes(step)
    (step / "model.ckpt").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match="is empty"):
        open_checkpoint(step)


def test_two_files_are_a_choice(tmp_path):
    for name in ("a.ckpt", "b.pth"):
        saved(tmp_path / name, WEIGHTS)
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"is a folder of 2 files without an index; name .*: a.ckpt, b.pth$",
    ):
        open_checkpoint(tmp_path)


def test_what_training_keeps_beside_the_weights_is_not_another_checkpoint(tmp_path):
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "rng_state_1.pth",
        "training_args.bin",
        "scaler.pt",
    ):
        saved(tmp_path / name, {"step": 1})
    saved(tmp_path / "net.pth", WEIGHTS)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    saved(tmp_path / "optimizer_net.pth", WEIGHTS)  # a name that only begins so
    with pytest.raises(UnsupportedCheckpoint, match="is a folder of 2 files"):
        open_checkpoint(tmp_path)


def test_a_folder_with_an_optimizer_alone_is_that_file_and_no_model(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved(tmp_path / "in" / "optimizer.pt", optimizer.state_dict())
    with pytest.raises(AmbiguousStateDict, match="only an optimizer's state: no weights"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out.safetensors")
    assert load_portable(tmp_path / "in", whole=True).keys() == {"state", "param_groups"}


def test_the_only_shard_of_a_set_is_not_the_weights(tmp_path):
    saved_st(tmp_path / "part-00001-of-00002.safetensors", WEIGHTS)
    with pytest.raises(UnsupportedCheckpoint, match="lacks part-00002-of-00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["a/b/net.pt", ".hidden/model.safetensors", ".net.pt"])
def test_nothing_is_searched_for_deeper_or_in_hidden_places(name, tmp_path):
    saved(tmp_path / name, WEIGHTS)
    with pytest.raises(UnsupportedCheckpoint, match="is a folder without a checkpoint in it"):
        open_checkpoint(tmp_path)


def test_the_only_folder_of_weights_is_read_beside_the_arguments_of_the_training(tmp_path):
    saved_st(tmp_path / "checkpoint-500" / "model.safetensors", WEIGHTS)
    saved(tmp_path / "training_args.bin", {"lr": 1})
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    assert "checkpoint-500" in notes(tmp_path)
    saved(tmp_path / "final.pt", OTHER)
    with pytest.raises(
        AmbiguousStateDict, match=r"holds 2 checkpoints .* --tag: checkpoint-500, final.pt"
    ):
        open_checkpoint(tmp_path)
    assert rows(load_portable(tmp_path, tag="checkpoint-500")) == rows(WEIGHTS)
    assert rows(load_portable(tmp_path, tag="final.pt")) == rows(OTHER)


@pytest.mark.parametrize("name", ["net.pt", "checkpoint-500"])
def test_the_only_checkpoint_that_is_a_link_out_of_the_folder_is_refused(name, tmp_path):
    saved_st(tmp_path / "elsewhere" / "checkpoint-500" / "model.safetensors", WEIGHTS)
    saved(tmp_path / "elsewhere" / "net.pt", WEIGHTS)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(MalformedCheckpoint, match="is a link that leads out of the folder"):
        open_checkpoint(folder)


def test_a_step_named_by_itself_takes_its_own_tag_only(tmp_path):
    run_folder = step_folders(tmp_path, "step-5", "step-10")
    assert rows(load_portable(run_folder / "step-5", tag="step-5")) == rows(WEIGHTS)
    with pytest.raises(
        UnsupportedCheckpoint, match="is the folder of one step or model, not of 'step-10'"
    ):
        open_checkpoint(run_folder / "step-5", tag="step-10")


# ----------------------------------------------------------------------------- a file that names it

TRACKER = "latest_checkpointed_iteration.txt"


def megatron_run(folder: Path, text: str, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / TRACKER).write_text(text)
    shutil.copytree(MEGATRON, folder / name)
    return folder


@pytest.mark.parametrize(
    ("text", "name"),
    [("5", "iter_0000005"), ("12345678\n", "iter_12345678"), ("release\n", "release")],
)
def test_the_iteration_that_megatron_names_is_read(text, name, tmp_path):
    folder = megatron_run(tmp_path / "run", text, name)
    step_folders(folder, "iter_0000004")
    whole = oracle.load(MEGATRON.with_name("megatron.whole.pt"))["model"]
    assert rows(
        {key: value for key, value in load_portable(folder).items() if key in whole}
    ) == rows(whole)
    assert f"of its steps, {name} is read" in notes(folder) and "iter_0000004" in notes(folder)
    assert rows(load_portable(folder, tag="4")) == rows(WEIGHTS)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "6",
            "names the step 'iter_0000006', which is not here; choose one with --tag: "
            ".*iter_0000005",
        ),
        ("../other", r"'\.\./other' is not a plain folder name"),
        ("/etc", "'/etc' is not a plain folder name"),
        ("", "'' is not a plain folder name"),
        ("-5", "names the step '-5', which is not here"),
        ("9" * 5000, "is not a plain folder name"),
        ("iter_0000005\nx", "is not a plain folder name"),
        ("x\x1b[2J", r"'x\\x1b\[2J' is not a plain folder name"),
        ("away", "away: is a link that leads out of the folder"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(text, what, tmp_path):
    folder = megatron_run(tmp_path / "run", text, "iter_0000005")
    shutil.copytree(MEGATRON, tmp_path / "other")
    (folder / "away").symlink_to(tmp_path / "other")
    with pytest.raises(MalformedCheckpoint, match=what):
        open_checkpoint(folder)


@pytest.mark.parametrize("loop", ["here", "twice"])
def test_a_name_that_leads_to_its_own_folder_is_refused(loop, tmp_path):
    """As the step of a step of a step, for ever."""
    (tmp_path / "here").symlink_to(".")
    (tmp_path / "latest").write_text({"here": "here", "twice": "here/here"}[loop])
    with pytest.raises(MalformedCheckpoint, match="which is not here"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are needed")
def test_a_pipe_that_would_name_it_is_not_read(tmp_path):
    os.mkfifo(tmp_path / TRACKER)
    saved(tmp_path / "net.pt", WEIGHTS)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)


def test_latest_names_a_folder_of_any_framework(tmp_path):
    step_folders(tmp_path, "step-5", "step-10")
    (tmp_path / "latest").write_text("step-5\n")
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)


def legacy_megatron(folder: Path, *ranks: str, **args: Any) -> Path:
    for rank in ranks:
        saved(
            folder / rank / "model_optim_rng.pt",
            {"args": Namespace(**args), "model": WEIGHTS, "iteration": 5},
        )
    return folder


def test_a_megatron_checkpoint_of_one_rank_is_its_file(tmp_path):
    legacy_megatron(
        tmp_path / "iter_0000005", "mp_rank_00", tensor_model_parallel_size=1, hidden_size=8
    )
    saved(tmp_path / "iter_0000005" / "mp_rank_00" / "distrib_optim.pt", {})
    (tmp_path / TRACKER).write_text("5")
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    assert rows(load_portable(tmp_path / "iter_0000005")) == rows(WEIGHTS)
    assert "distrib_optim.pt beside it, which holds the optimizer's state, is left out" in notes(
        tmp_path
    )


@pytest.mark.parametrize(
    ("ranks", "args", "what"),
    [
        (
            ("mp_rank_00",),
            {"tensor_model_parallel_size": 4},
            "holds one rank of a model that was split over 4",
        ),
        (
            ("mp_rank_00_000",),
            {"pipeline_model_parallel_size": 2},
            "holds one rank of a model that was split over 2",
        ),
    ],
)
def test_one_rank_of_several_of_megatron_is_refused_by_what_it_says(ranks, args, what, tmp_path):
    legacy_megatron(tmp_path / "iter_0000005", *ranks, **args)
    (tmp_path / TRACKER).write_text("5")
    with pytest.raises(UnsupportedCheckpoint, match=what):
        open_checkpoint(tmp_path)


def test_the_file_of_one_rank_of_several_is_refused_by_itself_too(tmp_path):
    legacy_megatron(tmp_path, "mp_rank_01", tensor_model_parallel_size=2)
    with pytest.raises(
        UnsupportedCheckpoint, match="holds one rank of a model that was split over 2"
    ):
        open_checkpoint(tmp_path / "mp_rank_01" / "model_optim_rng.pt")


# ----------------------------------------------------------------------------------------- variants


def variant(folder: Path, name: str, tree: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """The weights as transformers' ``save_pretrained(variant=name)`` leaves them, in one file or
    with an index.
    """
    if shards == 1:
        saved_st(folder / f"model.{name}.safetensors", tree)
        return folder
    weight_map = {}
    for number, (key, value) in enumerate(tree.items(), start=1):
        shard = f"model.{name}-{number:05}-of-{len(tree):05}.safetensors"
        saved_st(folder / shard, {key: value})
        weight_map[key] = shard
    (folder / f"model.safetensors.index.{name}.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


@pytest.mark.parametrize("shards", [1, 2])
def test_the_only_variant_is_read(shards, tmp_path):
    variant(tmp_path, "fp16", WEIGHTS, shards)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    assert rows(load_portable(tmp_path, tag="fp16")) == rows(WEIGHTS)
    assert "the variant fp16 is read" in notes(tmp_path)


def test_the_index_of_a_variant_can_be_named(tmp_path):
    variant(tmp_path, "fp16", WEIGHTS, 2)
    assert rows(load_portable(tmp_path / "model.safetensors.index.fp16.json")) == rows(WEIGHTS)


@pytest.mark.parametrize(
    "plain", ["model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin"]
)
@pytest.mark.parametrize("shards", [1, 2])
def test_beside_variants_the_plain_weights_are_read_and_a_tag_picks_a_variant(
    shards, plain, tmp_path
):
    variant(tmp_path, "fp16", OTHER, shards)
    variant(tmp_path, "non_ema", OTHER)
    (saved if plain.endswith(".bin") else saved_st)(tmp_path / plain, WEIGHTS)
    assert rows(load_portable(tmp_path)) == rows(WEIGHTS)
    assert rows(load_portable(tmp_path, tag="fp16")) == rows(OTHER)
    assert "--tag: fp16, non_ema" in notes(tmp_path) and "--tag: non_ema" in notes(
        tmp_path, tag="fp16"
    )
    with pytest.raises(
        CheckpointError, match="holds no 'bf16'; choose one with --tag: fp16, non_ema"
    ):
        open_checkpoint(tmp_path, tag="bf16")


def test_several_variants_without_the_plain_weights_are_a_choice(tmp_path):
    variant(variant(tmp_path, "fp16", WEIGHTS, 2), "bf16", OTHER)
    with pytest.raises(
        AmbiguousStateDict,
        match=r"holds 2 variants .* not the plain weights; choose one with --tag: fp16, bf16$",
    ):
        open_checkpoint(tmp_path)
    assert rows(load_portable(tmp_path, tag="bf16")) == rows(OTHER)


def test_the_shards_of_a_variant_without_its_index_are_not_the_weights(tmp_path):
    variant(tmp_path, "fp16", WEIGHTS, 2)
    (tmp_path / "model.safetensors.index.fp16.json").unlink()
    (tmp_path / "model.fp16-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"lacks model\.fp16-00002-of-00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "model.safetensors"])
def test_weights_under_a_usual_name_that_are_a_link_out_of_the_folder_are_refused(name, tmp_path):
    saved_st(tmp_path / "elsewhere.safetensors", WEIGHTS)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(MalformedCheckpoint, match="is a link that leads out of the folder"):
        open_checkpoint(folder)


def test_a_folder_of_weights_among_other_checkpoints_says_which_file_is_read(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in (
        "optimizer.bin",
        "training_args.bin",
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(b"of the same model")
    with open_checkpoint(tmp_path) as alone:
        assert not [note for note in alone.notes if "beside it" in note]
    for name in ("yolo.pt", "other.ckpt"):
        torch.save({"v": torch.ones(1)}, tmp_path / name)
    with open_checkpoint(tmp_path) as found:
        assert (
            "model.safetensors is read; 2 other files are beside it and not read: other.ckpt, "
            "yolo.pt" in found.notes
        )
