"""Casts that choose tensors by their keys; torch casts what they are held against."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckptconv import CheckpointError, KeyConflict, OptionRefused, convert_checkpoint
from helpers.program import run


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(1)
    shared = torch.randn(5, 3)
    state_dict = {
        "module.embed.weight": shared,
        "module.0.norm.weight": torch.randn(4),
        "module.0.linear.weight": torch.randn(6, 4),
        "module.head.weight": shared,
        "module.steps": torch.tensor(3),
    }
    torch.save({"state_dict": state_dict, "epoch": 2}, tmp_path / "m.pt")
    return tmp_path, state_dict


@pytest.mark.parametrize("name", ["o.pt", "o.safetensors"])
def test_each_tensor_gets_its_own_type(model, name):
    folder, state_dict = model
    convert_checkpoint(
        folder / "m.pt", folder / name, dtype="bf16", keep_dtype="*norm*",
        cast=["0.linear.*=f16"], verify=True,
    )  # fmt: skip
    found = torch.load(folder / name)["state_dict"] if name == "o.pt" else load_file(folder / name)
    wanted = {
        "embed.weight": torch.bfloat16, "0.norm.weight": torch.float32,
        "0.linear.weight": torch.float16, "head.weight": torch.bfloat16, "steps": torch.int64,
    }  # fmt: skip
    for key, dtype in wanted.items():
        if key in found:
            assert torch.equal(found[key], state_dict[f"module.{key}"].to(dtype)), key
            assert found[key].dtype is dtype
    assert set(wanted) - found.keys() <= {"head.weight"}  # the alias of a safetensors file


def test_only_the_named_ones_are_cast_without_a_dtype(model):
    folder, _ = model
    convert_checkpoint(folder / "m.pt", folder / "o.pt", cast="0.*=f64")
    found = torch.load(folder / "o.pt")["state_dict"]
    assert {key for key, value in found.items() if value.dtype is torch.float64} == {
        "0.norm.weight", "0.linear.weight",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["o.pt", "o.safetensors"])
def test_one_tensor_of_two_names_has_one_type(model, name):
    folder, _ = model
    with pytest.raises(KeyConflict, match=r"is one tensor with embed\.weight"):
        convert_checkpoint(folder / "m.pt", folder / name, cast="head.*=f16")
    convert_checkpoint(folder / "m.pt", folder / name, cast=["head.*=f16", "embed.*=f16"])
    assert not (folder / "o.pt.tmp").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_dtype": "nothing*", "dtype": "f16"}, "--keep-dtype nothing* matches no floating"),
        ({"cast": "steps=f16"}, "matches no floating tensor"),
        ({"cast": "0.*=f16", "keep_dtype": "*norm*"}, "ask for different dtypes"),
        ({"cast": ["0.*=f16", "*norm*=bf16"]}, "ask for different dtypes"),
    ],
)
@pytest.mark.parametrize("name", ["o.pt", "o.safetensors"])
def test_what_is_unclear_is_an_error(model, options, message, name):
    folder, _ = model
    with pytest.raises(KeyConflict) as raised:
        convert_checkpoint(folder / "m.pt", folder / name, **options)
    assert message in str(raised.value)
    assert not (folder / name).exists()


@pytest.mark.parametrize("word", ["0.weight", "=f16", "a=int8", "a=nonsense"])
def test_what_is_not_a_cast_is_a_wrong_option(model, word):
    folder, _ = model
    with pytest.raises(OptionRefused):
        convert_checkpoint(folder / "m.pt", folder / "o.pt", cast=word)
    assert run("convert", "m.pt", "o.pt", "--cast", word, cwd=folder).exit == 2


def test_metadata_is_what_the_library_reads(model):
    folder, _ = model
    (folder / "info.json").write_text(json.dumps({"author": "A", "license": "gpl"}))
    convert_checkpoint(
        folder / "m.pt", folder / "o.safetensors", metadata=["license=mit", "note=a=b"],
        metadata_from=folder / "info.json",
    )  # fmt: skip
    with safe_open(folder / "o.safetensors", "pt") as opened:
        found = opened.metadata()
    assert found["author"] == "A" and found["license"] == "mit" and found["note"] == "a=b"
    assert found["format"] == "pt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": "nothing"}, "is not NAME=VALUE"),
        ({"metadata": ["a=1", "a=2"]}, "given twice"),
        ({"metadata": "format=np"}, "cannot be set"),
        ({"metadata": "a=0.norm.weight"}, "alias"),
    ],
)
def test_metadata_that_cannot_be_is_refused(model, options, message):
    folder, _ = model
    with pytest.raises(OptionRefused, match=message):
        convert_checkpoint(folder / "m.pt", folder / "o.safetensors", **options)


def test_a_torch_output_has_no_metadata(model):
    folder, _ = model
    with pytest.raises(OptionRefused, match="cannot hold metadata"):
        convert_checkpoint(folder / "m.pt", folder / "o.pt", metadata="a=b")


def trained_adam() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(257):  # bfloat16 has no such number
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_an_optimizers_state_is_never_cast(tmp_path):
    model, optimizer = trained_adam()
    torch.save(optimizer.state_dict(), tmp_path / "alone.pt")
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(both, tmp_path / "both.pt")
    beside = {"optimizer": optimizer.state_dict(), "mean": torch.ones(2)}
    torch.save(beside, tmp_path / "beside.pt")
    for name, options in (("alone.pt", {}), ("both.pt", {"only": "optimizer"})):
        for words in ({"dtype": "bf16"}, {"cast": "*exp_avg=bf16"}):
            with pytest.raises(CheckpointError, match="only weights are cast"):
                convert_checkpoint(tmp_path / name, tmp_path / "out.pt", **options, **words)
    for name, kind in (("both.pt", "model"), ("beside.pt", "mean")):
        convert_checkpoint(tmp_path / name, tmp_path / "out.pt", dtype="bf16", force=True)
        made = torch.load(tmp_path / "out.pt")
        cast = made["model"]["weight"] if kind == "model" else made["mean"]
        assert cast.dtype is torch.bfloat16
        assert made["optimizer"]["state"][0]["step"].item() == 257
        assert made["optimizer"]["state"][0]["exp_avg_sq"].dtype is torch.float32
