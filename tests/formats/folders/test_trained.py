"""Training states in files beside the weights, as transformers' Trainer leaves them: taken where
that is asked for, and told of where they are not.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckptconv import Options, convert_checkpoint, load_portable, open_checkpoint, plan_conversion
from ckptconv.support.errors import CheckpointError, OptionRefused, UnsupportedCheckpoint
from helpers.program import assert_one_error, run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The two groups that the Trainer makes: biases and norms do not decay."""
    named = dict(model.named_parameters())
    decays = [name for name in named if not name.endswith("bias") and "norm" not in name]
    return [
        {"params": [named[name] for name in decays], "weight_decay": 0.1},
        {"params": [named[name] for name in named if name not in decays], "weight_decay": 0.0},
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
    loss = model(torch.arange(12.0).reshape(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def training(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the files of the Trainer after three steps, and the loss of the fourth."""
    made = tmp_path / "checkpoint-3"
    made.mkdir()
    torch.manual_seed(0)
    model = Net()
    optimizer, scheduler = training(model)
    for _ in range(3):
        step(model, optimizer, scheduler)
    save_file(model.state_dict(), made / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), made / "optimizer.pt")
    torch.save(scheduler.state_dict(), made / "scheduler.pt")
    states = {"numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(states, made / "rng_state.pth")
    torch.save(Options, made / "training_args.bin")  # an object of a class
    said = {"epoch": 0.75, "global_step": 3, "log_history": [{"loss": 0.5}], "best_metric": None}
    (made / "trainer_state.json").write_text(json.dumps(said))
    (made / "config.json").write_text("{}")
    (tmp_path / "next").write_text(repr(step(model, optimizer, scheduler)))
    return made


def test_a_training_goes_on_from_one_file(folder, tmp_path):
    done = convert_checkpoint(folder, tmp_path / "all.pt", with_training=True, verify=True)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert list(found) == ["model", "optimizer", "rng_state", "scheduler", "trainer_state"]
    assert found["trainer_state"] == json.loads((folder / "trainer_state.json").read_text())
    assert torch.equal(
        found["rng_state"]["cpu"],
        torch.load(folder / "rng_state.pth", weights_only=False)["cpu"],
    )
    model = Net()
    optimizer, scheduler = training(model)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    assert repr(step(model, optimizer, scheduler)) == (tmp_path / "next").read_text()
    assert [note.partition(":")[0] for note in done.plan.notes] == ["training_args.bin is left out"]


def test_the_file_of_the_weights_and_the_step_of_a_folder_will_do(folder, tmp_path):
    convert_checkpoint(folder, tmp_path / "all.pt", with_training=True)
    for name, source, tag in (
        ("file", folder / "model.safetensors", None),
        ("step", tmp_path, "checkpoint-3"),
    ):
        convert_checkpoint(source, tmp_path / f"{name}.pt", with_training=True, tag=tag)
        assert (tmp_path / f"{name}.pt").read_bytes() == (tmp_path / "all.pt").read_bytes()


def test_without_the_option_they_are_told_of_where_the_output_could_hold_them(folder, tmp_path):
    done = run("convert", folder, "out.pt", cwd=tmp_path)
    assert done.exit == 0, done.err
    [note] = [line for line in done.err.splitlines() if "not taken" in line]
    assert note.split(None, 1)[1] == (
        "optimizer.pt, rng_state.pth, scheduler.pt of checkpoint-3 not taken; --with-training "
        "takes such files"
    )
    assert torch.load(tmp_path / "out.pt").keys() == Net().state_dict().keys()
    done = run("convert", folder, "out.safetensors", cwd=tmp_path)
    assert done.exit == 0 and "not taken" not in done.err
    assert load_portable(folder).keys() == Net().state_dict().keys()
    for source in (folder, folder / "model.safetensors"):
        error = assert_one_error(
            run("convert", source, "o.pt", "--only", "optimizer", cwd=tmp_path)
        )
        assert "; --with-training takes what training left beside the weights" in error
    error = assert_one_error(run("convert", folder, "o.pt", "--only", "optimiser", cwd=tmp_path))
    assert "--with-training" not in error


@pytest.mark.parametrize("more", [["--max-shard-size", "1GB", "--to", "torch"], []])
def test_outputs_that_hold_weights_only_refuse(more, folder, tmp_path):
    output = "out" if more else "out.safetensors"
    before = sorted(tmp_path.iterdir())
    error = assert_one_error(run("convert", folder, output, "--with-training", *more, cwd=tmp_path))
    kind = "sharded" if more else "safetensors"
    assert f"a {kind} output holds weights only" in error and "--with-training" in error
    assert sorted(tmp_path.iterdir()) == before


def test_weights_alone_have_none(folder, tmp_path):
    (folder / "optimizer.pt").unlink()
    with pytest.raises(UnsupportedCheckpoint, match="has no training states beside its weights"):
        convert_checkpoint(folder, tmp_path / "out.pt", with_training=True)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_an_open_file_is_in_no_folder(kind, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)  # what lies in the working folder is none of its business
    raw = (folder / "model.safetensors").read_bytes()
    with contextlib.ExitStack() as leaving:
        opened = io.BytesIO(raw)
        if kind == "file":
            opened = leaving.enter_context(open("model.safetensors", "rb"))
        with pytest.raises(UnsupportedCheckpoint, match="in no folder that can be listed"):
            convert_checkpoint(opened, tmp_path / "out.pt", with_training=True)


def test_a_checkpoint_that_holds_them_itself_stays_as_it_is(folder, tmp_path):
    model = Net()
    tree = {"model": model.state_dict(), "optimizer": training(model)[0].state_dict()}
    torch.save(tree, tmp_path / "train.pt")
    for option in (False, True):
        convert_checkpoint(
            tmp_path / "train.pt", tmp_path / f"{option}.pt", with_training=option, fsync=False
        )
    assert (tmp_path / "True.pt").read_bytes() == (tmp_path / "False.pt").read_bytes()


def test_what_was_opened_without_them_is_not_planned_with_them(folder, tmp_path):
    with open_checkpoint(folder) as opened, pytest.raises(OptionRefused, match="--with-training"):
        plan_conversion(opened, tmp_path / "out.pt", Options(with_training=True))
    done = run("average", folder, folder, "out.pt", "--with-training", cwd=tmp_path)
    assert "--with-training" in assert_one_error(done)


@pytest.mark.parametrize("tag", [None, "checkpoint-1"])
def test_the_step_of_deepspeed_in_a_folder_of_the_trainer(tag, produced, tmp_path):
    """Its weights of 16 bits stand beside it."""
    folder = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(produced / "ds_z2", folder)
    (folder / "config.json").write_text("{}")
    expected = load_file(produced / "ds_z2_out" / "model.safetensors")
    halves = {key: value.bfloat16() for key, value in expected.items()}
    save_file(halves, folder / "model.safetensors")
    source = folder if tag is None else tmp_path / "run"
    convert_checkpoint(source, tmp_path / "all.pt", with_training=True, tag=tag)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {key: value.dtype for key, value in found["module"].items()} == dict.fromkeys(
        expected, torch.float32
    )
    assert found["optimizer"]["state"].keys() == expected.keys()
    done = convert_checkpoint(source, tmp_path / "weights.pt", tag=tag)
    told = "the step of a training in checkpoint-1 not taken; --with-training takes it"
    assert tag is not None or told in done.plan.notes
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(found[key], value) for key, value in halves.items())


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("1",)


def broken(kind: str, folder: Path) -> None:
    place = folder / "optimizer.pt"
    if kind == "runs":
        place.write_bytes(pickle.dumps({"state": {}, "param_groups": [Evil()]}))
    elif kind == "cut":
        place.write_bytes(place.read_bytes()[:500])
    elif kind == "empty":
        place.write_bytes(b"")
    elif kind == "twice":
        torch.save({}, folder / "optimizer.bin")
    elif kind == "link":
        place.rename(folder.parent / "elsewhere.pt")
        place.symlink_to(folder.parent / "elsewhere.pt")
    elif kind == "json":
        (folder / "trainer_state.json").write_text('{"epoch": 1, "epoch": 2}')


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("runs", "builtins.eval"),
        ("cut", "optimizer.pt: the archive has no end record"),
        ("empty", "optimizer.pt: is empty"),
        ("twice", "holds optimizer twice: optimizer.bin, optimizer.pt"),
        ("link", "optimizer.pt: is a link that leads out of the folder"),
        ("json", "trainer_state.json: trainer_state.json: is not valid JSON"),
    ],
)
def test_broken_and_hostile_files_are_one_error(kind, said, folder, tmp_path):
    broken(kind, folder)
    error = assert_one_error(
        run("convert", folder, "out.pt", "--with-training", "--unknown", "keep", cwd=tmp_path)
        if kind != "runs"
        else run("convert", folder, "out.pt", "--with-training", cwd=tmp_path)
    )
    assert said in error
    assert not (tmp_path / "out.pt").exists()
    with pytest.raises(CheckpointError):
        convert_checkpoint(folder, tmp_path / "out.pt", with_training=True)
