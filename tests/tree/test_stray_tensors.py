"""Whole modules that hold more than parameters and buffers: what their own state dict may hold is
given exactly, or refused.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune

from ckptconv import convert_checkpoint, load_into, load_portable, open_checkpoint
from ckptconv.support.errors import RefusedObject
from helpers import oracle
from helpers.paths import DATA
from helpers.program import run

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)


class Quantized(nn.Module):
    """Saves its scales itself, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        self.scales = torch.rand(2)
        self.groups = {"zero": [torch.zeros(1), (torch.ones(3),)]}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scales"] = self.scales


class Annotated(nn.Module):
    """Keeps its scales with the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.scales = torch.rand(2)


def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    state_dict[prefix + "extra"] = torch.ones(1)


def hooked() -> nn.Module:
    made = nn.Sequential(nn.Linear(1, 1))
    made[0]._register_state_dict_hook(hook)
    return made


def owner_of_a_linear() -> nn.Module:
    """A class of its own above, which may save what hangs in a layer of torch below it."""
    made = Annotated()
    del made.weight
    made.inner = nn.Linear(1, 1)
    made.inner.scales = torch.ones(3)
    return made


def packed() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3), nn.Embedding(2, 4))
    return torch.ao.quantization.quantize_dynamic(made, {nn.Linear})


REFUSED = {
    "an attribute": (Quantized, "scales"),
    "deep inside": (lambda: nn.Sequential(nn.ReLU(), Quantized()), r"1\.scales"),
    "of a parameter": (Annotated, r"weight\.scales"),
    "a hook": (hooked, "0: a module .* with a hook that changes what it saves .*hook"),
    "below a class of its own": (owner_of_a_linear, r"inner\.scales"),
    "packed weights of torch": (packed, "0: a quantized module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_class_may_save_itself_is_refused_by_its_name(name, tmp_path):
    make, expected = REFUSED[name]
    torch.save({"net": make(), "epoch": 1}, tmp_path / "model.pt")
    for output in ("out.pt", "out.safetensors"):
        with pytest.raises(RefusedObject, match=rf"net\.{expected}.*--unknown drop"):
            convert_checkpoint(tmp_path / "model.pt", tmp_path / output, fsync=False)
    with pytest.raises(RefusedObject, match=rf"net\.{expected}"):
        load_portable(tmp_path / "model.pt")
    with pytest.raises(RefusedObject, match=rf"net\.{expected}"):
        load_portable(tmp_path / "model.pt", whole=True)
    assert not (tmp_path / "out.pt").exists()


def test_all_that_would_be_lost_is_counted_and_named(tmp_path):
    torch.save(Quantized(), tmp_path / "model.pt")
    with pytest.raises(RefusedObject, match=r"and 2 more: groups\.zero\.0, groups\.zero\.1\.0"):
        load_portable(tmp_path / "model.pt")
    with open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert any("may lack" in note and "groups.zero.0" in note for note in checkpoint.notes)


def test_unknown_drop_says_that_they_are_not_wanted_and_keep_keeps_the_module(tmp_path):
    model = Quantized()
    torch.save({"net": model, "epoch": 1}, tmp_path / "model.pt")
    for output in ("out.pt", "out.safetensors"):
        plan = convert_checkpoint(
            tmp_path / "model.pt", tmp_path / output, unknown="drop", fsync=False
        ).plan
        assert [item.path for item in plan.skipped][:3] == [
            "net.scales",
            "net.groups.zero.0",
            "net.groups.zero.1.0",
        ]
    assert (
        list(oracle.load(tmp_path / "out.pt")["net"])
        == list(load_file(tmp_path / "out.safetensors"))
        == ["weight"]
    )
    assert list(load_portable(tmp_path / "model.pt", unknown="drop")) == ["weight"]
    with pytest.raises(RefusedObject):
        convert_checkpoint(
            tmp_path / "model.pt", tmp_path / "kept.safetensors", unknown="keep", fsync=False
        )
    convert_checkpoint(
        tmp_path / "model.pt", tmp_path / "kept.pt", unknown="keep", fsync=False, verify=True
    )
    kept = oracle.load(tmp_path / "kept.pt", weights_only=False)["net"].state_dict()
    assert torch.equal(kept["scales"], model.scales)


def test_only_another_part_does_not_ask_for_what_the_module_holds(tmp_path):
    torch.save({"net": Quantized(), "ema": nn.Linear(2, 2), "epoch": 1}, tmp_path / "model.pt")
    convert_checkpoint(tmp_path / "model.pt", tmp_path / "out.safetensors", only="ema", fsync=False)
    assert list(load_portable(tmp_path / "model.pt", only="ema")) == ["weight", "bias"]


def test_a_model_that_has_the_key_can_still_be_loaded_by_saying_so(tmp_path):
    torch.save(Annotated(), tmp_path / "model.pt")
    model = Annotated()
    with pytest.raises(RefusedObject):
        load_into(model, tmp_path / "model.pt")
    assert load_into(model, tmp_path / "model.pt", unknown="drop").fits


KNOWN = {
    "computed by weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 3))),
    "computed by spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 3))),
    "computed by pruning": lambda: prune.random_unstructured(nn.Linear(2, 3), "weight", 0.5),
    "set on a layer of torch": lambda: noted(nn.Linear(2, 3)),
}


def noted(layer: nn.Module) -> nn.Module:
    layer.importance = torch.rand(3)
    return layer


@pytest.mark.parametrize("name", KNOWN)
def test_attributes_that_torch_itself_does_not_save_are_listed(name, tmp_path):
    model = KNOWN[name]()
    with torch.no_grad():
        model(torch.ones(1, 2))
    for parameter in model.modules():
        if isinstance(parameter.__dict__.get("weight"), torch.Tensor):  # torch pickles leaves only
            parameter.weight = parameter.weight.detach()
    torch.save(model, tmp_path / "model.pt")
    plan = convert_checkpoint(tmp_path / "model.pt", tmp_path / "out.pt", fsync=False).plan
    expected = model.state_dict()
    found = oracle.load(tmp_path / "out.pt")
    assert list(found) == list(expected) and all(
        torch.equal(found[key], value) for key, value in expected.items()
    )
    assert len(plan.skipped) == 1 and plan.skipped[0].path.endswith(("weight", "importance"))


class Cached(nn.Module):
    """A buffer that is not saved, and other names of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.same = self.mask
        self.rows = [self.weight.data[0], self.weight.data[1]]


def test_a_buffer_that_is_not_saved_is_listed_and_other_names_of_what_is_saved_are_not(tmp_path):
    torch.save(Cached(), tmp_path / "model.pt")
    plan = convert_checkpoint(tmp_path / "model.pt", tmp_path / "out.safetensors", fsync=False).plan
    assert [(item.path, "persistent" in item.reason) for item in plan.skipped] == [("mask", True)]


def test_layers_of_bitsandbytes_are_the_state_dict_that_it_gives_itself(tmp_path):
    whole = DATA / "bitsandbytes.pt"
    expected = oracle.load(DATA / "bitsandbytes.state.pt")
    convert_checkpoint(whole, tmp_path / "out.pt", fsync=False, verify=True)
    convert_checkpoint(whole, tmp_path / "out.safetensors", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")
    assert list(found) == list(expected) and set(load_file(tmp_path / "out.safetensors")) == set(
        expected
    )
    for given in (found, load_file(tmp_path / "out.safetensors"), load_portable(whole)):
        assert all(
            given[key].dtype == value.dtype and torch.equal(given[key], value)
            for key, value in expected.items()
        )


def test_layers_of_bitsandbytes_whose_state_is_not_known_are_refused(monkeypatch, tmp_path):
    made = Annotated()
    made.weight.quant_state = torch.ones(2)
    module = types.ModuleType("bitsandbytes.nn.modules")
    module.Linear4bit = type("Linear4bit", (Annotated,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    for name in ("bitsandbytes", "bitsandbytes.nn", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    made.__class__ = module.Linear4bit
    torch.save(made, tmp_path / "model.pt")
    with pytest.raises(RefusedObject, match=r"weight\.scales|weight\.quant_state"):
        load_portable(tmp_path / "model.pt")


def test_what_the_real_file_of_bitsandbytes_holds_is_all_there(produced, tmp_path):
    found = load_portable(produced / "bnb_whole.pt")
    assert {
        "0.weight.absmax",
        "0.weight.quant_map",
        "1.SCB",
        "0.weight.quant_state.bitsandbytes__fp4",
    } <= set(found)
    assert (
        run(
            "convert", str(produced / "bnb_whole.pt"), "out.safetensors", "--no-fsync", cwd=tmp_path
        ).exit
        == 0
    )


def test_inspect_and_doctor_offer_no_command_that_takes_the_scales_from_the_codes(tmp_path):
    torch.save(Quantized(), tmp_path / "model.pt")
    for command in ("inspect", "doctor"):
        shown = run(command, "model.pt", cwd=tmp_path).out
        assert "--unknown drop" not in shown and "save its state_dict()" in shown


@pytest.mark.parametrize(
    "key", [torch.device("cpu"), torch.Size((2, 3)), torch.float16, (1, ("a", 2.5)), None]
)
def test_keys_of_plain_values_are_kept_with_what_stands_under_them(key, tmp_path):
    torch.save({"w": torch.ones(2), "by": {key: 7}}, tmp_path / "in.pt")
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["by"] == {key: 7}
