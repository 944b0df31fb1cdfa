"""Quantized models: their packed weights are in the output, or the conversion is refused; never
their scales alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptconv import KeyRules, convert_checkpoint, load_portable
from ckptconv.support.errors import RefusedObject
from helpers import oracle

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def dynamic(dtype: torch.dtype = torch.qint8) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def static() -> nn.Module:
    quantization = torch.ao.quantization
    layers = (nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 2))
    model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub())
    model.qconfig = quantization.default_qconfig
    prepared = quantization.prepare(model)
    prepared(torch.randn(1, 1, 5, 5))
    return quantization.convert(prepared)


def saved(tree: Any, folder: Path) -> Path:
    torch.save(tree, folder / "source.pt")
    return folder / "source.pt"


@pytest.mark.parametrize("make", [dynamic, lambda: dynamic(torch.float16), static])
@pytest.mark.parametrize(
    "options", [{"to": "safetensors"}, {"to": "torch", "max_shard_size": 1000}]
)
def test_packed_weights_are_refused_where_only_scales_would_be_left(make, options, tmp_path):
    source = saved({"model": make().state_dict(), "epoch": 1}, tmp_path)
    match = r"(is a tuple with tensors in it|is a tensor that a sharded).*--to torch.*--exclude"
    with pytest.raises(RefusedObject, match=match):
        convert_checkpoint(source, tmp_path / "out", fsync=False, **options)
    assert not (tmp_path / "out").exists()


def test_who_leaves_them_out_by_name_gets_the_rest(tmp_path):
    source = saved(dynamic().state_dict(), tmp_path)
    rules = KeyRules(exclude=("*_packed_params*",))
    plan = convert_checkpoint(source, tmp_path / "out.safetensors", keys=rules, fsync=False).plan
    assert set(load_file(tmp_path / "out.safetensors")) == {
        "0.scale",
        "0.zero_point",
        "2.scale",
        "2.zero_point",
    }
    assert "0._packed_params._packed_params" in {item.path for item in plan.skipped}


@pytest.mark.parametrize("make", [dynamic, lambda: dynamic(torch.float16), static])
def test_a_torch_output_and_load_portable_give_them_as_torch_does(make, tmp_path):
    model, twin = make(), make()
    source = saved(model.state_dict(), tmp_path)
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False, verify=True)
    x = torch.randn(1, 1, 5, 5) if make is static else torch.randn(2, 4)
    for found in (
        oracle.load(tmp_path / "out.pt"),
        load_portable(source),
        load_portable(tmp_path / "out.pt"),
    ):
        assert list(found) == list(oracle.load(source))
        twin.load_state_dict(found)
        assert torch.equal(twin(x), model(x))


def test_an_extra_state_is_listed_with_what_it_holds_and_other_values_with_tensors_are_refused(
    tmp_path,
):
    state = {"w": torch.ones(2), "a._extra_state": {"amax": [torch.ones(1)]}, "b._extra_state": 3}
    plan = convert_checkpoint(
        saved(state, tmp_path), tmp_path / "out.safetensors", fsync=False
    ).plan
    assert {item.path: "holds tensors" in item.reason for item in plan.skipped} == {
        "a._extra_state": True,
        "b._extra_state": False,
    }
    state = {"w": torch.ones(2), "a._packed_params": {"weights": [torch.ones(1)]}}
    with pytest.raises(RefusedObject, match=r"a\._packed_params: is a dict with tensors in it"):
        convert_checkpoint(
            saved(state, tmp_path), tmp_path / "out.safetensors", force=True, fsync=False
        )


def test_a_parameter_with_scales_in_its_attributes_is_refused(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    weight.scales = torch.rand(2)
    source = saved({"w": weight}, tmp_path)
    with pytest.raises(RefusedObject, match="w: is a tensor with attributes that hold tensors"):
        convert_checkpoint(source, tmp_path / "out.safetensors", fsync=False)
    convert_checkpoint(source, tmp_path / "out.pt", fsync=False, verify=True)
    assert torch.equal(
        oracle.load(tmp_path / "out.pt", weights_only=False)["w"].scales, weight.scales
    )


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_packed_weights_of_torchscript_are_refused_by_their_place(suffix, tmp_path):
    torch.jit.save(torch.jit.script(static()), tmp_path / "model.pt")
    assert list(torch.jit.load(tmp_path / "model.pt").state_dict()) == ["0.scale", "0.zero_point"]
    with pytest.raises(
        RefusedObject, match=r"model\.pt: 1: an object with tensors of its own.*3\._packed_params"
    ):
        convert_checkpoint(tmp_path / "model.pt", tmp_path / f"out{suffix}", fsync=False)
    plan = convert_checkpoint(
        tmp_path / "model.pt", tmp_path / f"out{suffix}", unknown="drop", fsync=False
    ).plan
    assert [item.path for item in plan.skipped] == ["1", "3._packed_params._packed_params"]
