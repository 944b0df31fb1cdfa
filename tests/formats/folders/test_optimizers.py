"""Weights and optimizer of FSDP and DCP in one tree: what torch itself gathers from all ranks, and
what it loads into a plain model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from ckptconv import convert_checkpoint, scan_checkpoint
from ckptconv.support.errors import UnsupportedCheckpoint
from helpers.trained_worlds import Odd, groups


@pytest.fixture(scope="session")
def trained_worlds(worlds) -> Path:
    """A folder with what two processes trained; see trained_worlds.py."""
    return worlds / "trained"


def converted(source: Path | list[Path], folder: Path, **options: Any) -> tuple[Any, list[str]]:
    made = convert_checkpoint(source, folder / "out.pt", fsync=False, **options)
    return torch.load(folder / "out.pt", weights_only=True), list(made.plan.notes)


def ranks_of(folder: Path, name: str) -> list[Path]:
    return [folder / f"{name}.{rank}.pt" for rank in (0, 1)]


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two trees differ: in a type, a key, a value, a bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        lone = [f"{path}.{key} is in one only" for key in one.keys() ^ other.keys()]
        both = one.keys() & other.keys()
        inner = [differences(one[key], other[key], f"{path}.{key}") for key in both]
        return [*lone, *(what for found in inner for what in found)]
    if type(one) is not type(other):
        return [f"{path}: {type(one)} and {type(other)}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{path}: {one.shape} and {other.shape}"]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        found = [differences(*pair, f"{path}.{at}") for at, pair in pairs]
        return [what for each in found for what in each]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


NAMES = ["nested", "flat", "titan", "fsdp1", "fsdp1_mesh", "fsdp1_rekeyed"]


@pytest.mark.parametrize("kind", ["ranks", "dcp"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_optimizer_are_what_torch_gathers(name, kind, trained_worlds, tmp_path):
    source = ranks_of(trained_worlds, name) if kind == "ranks" else trained_worlds / name
    found, notes = converted(source, tmp_path)
    assert not notes
    assert differences(found, torch.load(trained_worlds / f"{name}.whole.pt")) == []
    assert found["optimizer"]


@pytest.mark.parametrize("kind", ["ranks", "dcp"])
@pytest.mark.parametrize("name", ["nested", "flat", "fsdp1", "fsdp1_mesh"])
def test_torch_loads_both_into_a_plain_model(name, kind, trained_worlds, tmp_path):
    source = ranks_of(trained_worlds, name) if kind == "ranks" else trained_worlds / name
    found, _ = converted(source, tmp_path)
    model = Odd()
    optimizer = torch.optim.AdamW(groups(model))
    options = StateDictOptions(flatten_optimizer_state_dict=name == "flat")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )
    whole = torch.load(trained_worlds / "nested.whole.pt")
    for key, parameter in model.named_parameters():
        # another sharding adds up gradients in another order
        torch.testing.assert_close(parameter, whole["model"][key])
        for part, value in whole["optimizer"]["state"][key].items():
            torch.testing.assert_close(optimizer.state[parameter][part], value)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("name", ["nested", "flat", "titan", "fsdp1", "fsdp1_mesh"])
def test_new_names_go_through_both(name, trained_worlds, tmp_path):
    found, _ = converted(trained_worlds / name, tmp_path, rename=["mid.0.=middle."])
    weights = found["model"] if name != "titan" else found
    named = found["optimizer"].get("state", {})
    flat = {key.partition(".")[2].rpartition(".")[0] for key in found["optimizer"]}
    assert "middle.weight" in weights
    assert {"middle.weight", "middle.bias"} <= {*named, *flat}
    assert {"mid.0.weight", "mid.0.bias"}.isdisjoint({*named, *flat})


@pytest.mark.parametrize("count", [1, 2])
def test_flat_parameters_are_refused_by_name(count, trained_worlds, tmp_path):
    source = ranks_of(trained_worlds, "fsdp1_local")[:count]
    with pytest.raises(UnsupportedCheckpoint) as caught:
        convert_checkpoint(source, tmp_path / "out.pt")
    assert "is a flat parameter of FSDP (LOCAL_STATE_DICT)" in str(caught.value)
    assert "dangerous" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nested", "fsdp1", "fsdp1_mesh"])
def test_the_files_of_ranks_are_ordinary_ones(name, trained_worlds):
    for path in ranks_of(trained_worlds, name):
        assert scan_checkpoint(path).level == "plain"


@pytest.mark.parametrize("form", ["names", "flat"])
def test_master_weights_in_a_dcp_folder_are_told_of_for_torch_does_not_use_them(form, tmp_path):
    """As Megatron and DeepSpeed's fp16 keep them beside weights of 16 bits."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    weights = {key: value.bfloat16() for key, value in model.state_dict().items()}
    states = {
        key: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn_like(value),
            "exp_avg_sq": torch.rand_like(value),
            "fp32_param": value + 0.001,
        }
        for key, value in model.state_dict().items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    (group,) = optimizer.state_dict()["param_groups"]
    named = {"state": states, "param_groups": [{**group, "params": list(weights)}]}
    torch.save({"model": weights, "optimizer": named}, tmp_path / "in.pt")
    made = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out", to="dcp", optimizer=form)
    told = (
        "FSDP2 does not use fp32_param, the weight in float32 that the optimizer keeps of weight, "
    )
    assert any(told in note for note in made.plan.notes)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model_states, optimizer_states = get_state_dict(model, optimizer, options=options)
    state: Any = {"model": model_states, "optimizer": optimizer_states}
    dcp.load(state, checkpoint_id=tmp_path / "out")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key].float())
        kept = optimizer.state[model.get_parameter(key)]
        assert "fp32_param" not in kept and torch.equal(kept["exp_avg"], states[key]["exp_avg"])
    for state_of in states.values():
        del state_of["fp32_param"]
    torch.save({"model": weights, "optimizer": named}, tmp_path / "in.pt")
    again = convert_checkpoint(tmp_path / "in.pt", tmp_path / "again", to="dcp", optimizer=form)
    assert not any("fp32_param" in note for note in again.plan.notes)
