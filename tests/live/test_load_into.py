"""What `load_into` says of values that change, of keys that go elsewhere, and of what is left."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckptconv import CheckpointWarning, KeyRules, load_into, load_portable
from ckptconv.support.errors import KeyMismatch, OptionRefused, RefusedObject
from helpers.program import run


def net(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.Linear(3, 2, bias=bias))


def saved(path: Path, tree: object) -> Path:
    torch.save(tree, path)
    return path


@pytest.mark.parametrize(
    ("before", "values", "after", "beyond"),
    [
        (torch.float32, [1e6, 1.0, float("inf")], torch.float16, 1),
        (torch.float32, [65519.0, -65520.0, 2.0], torch.float16, 1),
        (torch.float32, [3.4e38, 1.0, 2.0], torch.bfloat16, 1),
        (torch.float64, [1e300, -1e300, 0.0], torch.float32, 2),
        (torch.complex128, [1e300, 1j, 0.0], torch.complex64, 1),
        (torch.int64, [70000, 1, 2], torch.float16, 1),
        (torch.int64, [2**40, -1, 2], torch.int32, 1),
        (torch.float32, [300.0, 1.0, 2.0], torch.uint8, 1),
        (torch.float32, [1.0, 2.0, 3.0], torch.float16, 0),
        (torch.float16, [1.0, 2.0, float("nan")], torch.float32, 0),
    ],
)
def test_values_that_take_the_dtype_of_the_model_are_told(before, values, after, beyond, tmp_path):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.zeros(3, dtype=after))

    path = saved(tmp_path / "a.pt", {"w": torch.tensor(values, dtype=before)})
    model = Holder()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = load_into(model, path)
    assert result.fits
    assert result.casts == (("w", before, after, beyond),)
    assert [item.category for item in told] == [CheckpointWarning] * bool(beyond)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = load_into(Holder(), path, assign=True)
    assert taken.casts == ()


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(tmp_path):
    model = nn.Linear(2, 1, bias=False).half()
    before = model.weight.clone()
    path = saved(tmp_path / "a.pt", {"weight": torch.full((1, 2), 1e6)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        with pytest.raises(CheckpointWarning, match=r"weight: 2 values of torch\.float32"):
            load_into(model, path)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view])
def test_tied_tensors_with_a_bit_that_turns_them_are_loaded(turn, tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    values = torch.tensor([1 + 2j, -3j, 0])
    path, model = saved(tmp_path / "a.pt", {"a": turn(values), "b": turn(values.clone())}), Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        assert load_into(model, path).fits
    assert torch.equal(model.a, turn(values))


def test_values_that_differ_where_the_model_has_one_tensor_are_told(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    weight = torch.tensor([[1.0, float("nan")]] * 3)
    same = {"module.embed.weight": weight, "module.head.weight": weight.clone()}
    other = {**same, "module.head.weight": weight + 1}
    what = "embed.weight and head.weight differ, and are one tensor of the model"
    for tree, told in ((same, False), (other, True)):
        path, model, by_torch = saved(tmp_path / "a.pt", tree), Tied(), Tied()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert load_into(model, path).fits
        assert [what in str(item.message) for item in found] == [True] * told
        by_torch.load_state_dict({key.removeprefix("module."): tree[key] for key in tree})
        assert torch.equal(model.embed.weight.nan_to_num(7), by_torch.embed.weight.nan_to_num(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        assert load_into(Tied(), saved(tmp_path / "a.pt", other), assign=True).fits


def test_an_imaginary_part_is_not_lost(tmp_path):
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.clone()
    path = saved(tmp_path / "a.pt", {"weight": torch.full((1, 2), 1j)})
    with pytest.raises(RefusedObject, match=r"weight: is of torch\.complex64.*imaginary"):
        load_into(model, path)
    assert torch.equal(model.weight, before)


def test_keys_that_went_to_others_are_told(tmp_path):
    model = net(bias=False)
    plain = saved(tmp_path / "plain.pt", model.state_dict())
    assert load_into(nn.DataParallel(net(bias=False)), plain).assigned == {}
    found = load_into(model, saved(tmp_path / "b.pt", {
        "net.0.weight": torch.ones(3, 4), "head.1.weight": torch.ones(2, 3),
    }))  # fmt: skip
    assert found.fits
    assert found.assigned == {"net.0.weight": "0.weight", "head.1.weight": "1.weight"}
    assert "2 assigned" in repr(found)


def test_an_averaged_model_is_refused_with_the_preset_that_helps(tmp_path):
    model = net()
    average = AveragedModel(model)
    average.update_parameters(model)
    path = saved(tmp_path / "swa.pt", average.state_dict())
    with pytest.raises(KeyMismatch, match=r"KeyRules.of\(\[\('preset', 'swa'\)\]\)") as caught:
        load_into(net(), path)
    assert caught.value.fit.preset == "swa"
    found = load_portable(path, keys=KeyRules.of([("preset", "swa")]))
    again = net()
    again.load_state_dict(found, strict=True)
    assert torch.equal(again[0].weight, model[0].weight)


def ema_pytorch(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of its `EMA`: both models, and two counters."""
    own = model.state_dict()
    return {
        **{f"online_model.{key}": value + 1 for key, value in own.items()},
        **{f"ema_model.{key}": value for key, value in own.items()},
        "initted": torch.tensor(True),
        "step": torch.tensor(3),
    }


@pytest.mark.parametrize("preset", ["swa", "ema-pytorch"])
def test_doctor_and_like_name_the_preset(preset, tmp_path):
    model = net()
    tree = AveragedModel(model).state_dict() if preset == "swa" else ema_pytorch(model)
    saved(tmp_path / "average.pt", tree)
    saved(tmp_path / "bare.pt", net().state_dict())
    refused = run("convert", "average.pt", "out.pt", "--like", "bare.pt", cwd=tmp_path)
    assert refused.exit == 1 and f"--preset {preset} leaves out" in refused.err
    done = run("doctor", "average.pt", "--like", "bare.pt", "--json", cwd=tmp_path)
    told = next(item for item in json.loads(done.out)["findings"] if item["code"] == "keys")
    assert f"--preset {preset}" in told["command"]
    words = told["command"].split()[1:]
    assert run(*words, cwd=tmp_path).exit == 0
    again = net()
    again.load_state_dict(torch.load(tmp_path / words[2], weights_only=True), strict=True)
    assert torch.equal(again[1].weight, model[1].weight)


class Positions(nn.Module):
    """A module with a buffer that its state dict does not have, and that TorchScript saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.positions)


def test_a_buffer_that_only_torchscript_saves_is_no_hindrance(tmp_path):
    model = Positions()
    torch.jit.trace(model, torch.zeros(1, 2)).save(str(tmp_path / "script.pt"))
    assert "positions" in load_portable(tmp_path / "script.pt")
    other = Positions()
    assert load_into(nn.DataParallel(other), tmp_path / "script.pt").fits
    assert torch.equal(other.linear.weight, model.linear.weight)
    other.positions += 1  # another value is another model's
    with pytest.raises(KeyMismatch, match="positions"):
        load_into(other, tmp_path / "script.pt")


def test_keys_that_a_library_renames_are_for_its_own_loader(tmp_path):
    class Pretrained(nn.Linear):
        @classmethod
        def from_pretrained(cls, folder: str) -> None: ...

    path = saved(tmp_path / "a.pt", {"experts.0.w1": torch.ones(1), "experts.0.w2": torch.ones(1)})
    with pytest.raises(KeyMismatch, match=r"Pretrained.from_pretrained\(folder\)"):
        load_into(Pretrained(2, 2), path)


def test_a_module_whose_load_state_dict_does_not_know_assign_is_loaded(tmp_path):
    class Older(nn.Linear):
        def load_state_dict(self, state_dict, strict=True):
            return super().load_state_dict(state_dict, strict)

    values = nn.Linear(2, 2).state_dict()
    model = Older(2, 2)
    assert load_into(model, saved(tmp_path / "a.pt", values)).fits
    assert torch.equal(model.weight, values["weight"])


class Head(nn.Module):
    """A model with buffers and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed = nn.BatchNorm1d(2), nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def recomputed(model: nn.Module) -> nn.Module:
    """A model whose modules are wrapped for activation checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, child in model.named_children():
        setattr(model, name, checkpoint_wrapper(child))
    return model


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel])
def test_a_model_with_activation_checkpointing_is_loaded(wrap, tmp_path):
    values = Head().state_dict()
    del values["head.weight"]
    model = wrap(recomputed(Head()))
    assert load_into(model, saved(tmp_path / "a.pt", values)).fits
    found = [*model.state_dict().values()]
    assert all(map(torch.equal, found, [*values.values(), values["embed.weight"]]))
    untaken = {
        **values,
        "embed.weight": values["embed.weight"].to_sparse(),
        "norm.weight": found[0] + 5,
    }
    with pytest.raises(RefusedObject, match=r"embed\.weight: is torch\.sparse_coo"):
        load_into(model, saved(tmp_path / "a.pt", untaken))
    assert all(map(torch.equal, model.state_dict().values(), found))


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_versions_of_modules_pass_activation_checkpointing(before, after, tmp_path):
    def quantized(is_recomputed: bool) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.ao is to move
            made = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear})
        return recomputed(made) if is_recomputed else made

    source, model = quantized(before), quantized(after)
    assert load_into(model, saved(tmp_path / "a.pt", source.state_dict())).fits
    x = torch.ones(1, 4)
    assert torch.equal(model(x), source(x))


def test_a_model_whose_keys_differ_in_a_wrapper_alone_is_loaded(tmp_path):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2))
            self._orig_mod = nn.Linear(2, 1, bias=False)

    source, model = nn.Sequential(Both()), nn.Sequential(Both())
    assert load_into(model, saved(tmp_path / "a.pt", source.state_dict())).fits
    assert all(map(torch.equal, model.parameters(), source.parameters()))


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel, recomputed])
def test_shapes_that_a_module_takes_are_no_hindrance(wrap, tmp_path):
    def observed() -> nn.Module:
        return nn.Sequential(torch.ao.quantization.PerChannelMinMaxObserver())

    source, model, by_torch = observed(), observed(), observed()
    source(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    values = source.state_dict()
    by_torch.load_state_dict(values)
    assert load_into(wrap(model), saved(tmp_path / "a.pt", values)).fits
    assert all(map(torch.equal, model.state_dict().values(), by_torch.state_dict().values()))
    assert not torch.equal(values["0.min_val"], observed().state_dict()["0.min_val"])


@pytest.mark.parametrize("count", [1, 2])
def test_a_number_is_not_the_first_of_several_values(count, tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = (
                nn.Parameter(torch.tensor(0.0)),
                nn.Parameter(torch.tensor(0.0)),
            )

    values = {"scale": torch.arange(3.0, 3.0 + count), "shift": torch.tensor(2.0)}
    path, model = saved(tmp_path / "a.pt", values), Scaled()
    if count == 1:  # as torch 0.3 saved a number
        Scaled().load_state_dict(values)
        assert load_into(model, path).fits
        assert [model.scale.item(), model.shift.item()] == [3, 2]
    else:
        with pytest.raises(KeyMismatch, match=r"scale is \[2\], the model has \[\]"):
            load_into(model, path)
        assert [model.scale.item(), model.shift.item()] == [0, 0]


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel])
def test_keys_of_older_days_are_known_to_a_module_that_is_wrapped(wrap, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.Sequential(nn.Linear(2, 3), nn.utils.weight_norm(nn.Linear(3, 2)))
    model = nn.Sequential(nn.Linear(2, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    assert load_into(wrap(model), saved(tmp_path / "a.pt", old.state_dict())).fits
    assert torch.equal(model(torch.ones(1, 2)), old(torch.ones(1, 2)))
    other = {**old.state_dict(), "1.more": torch.ones(1)}
    with pytest.raises(KeyMismatch, match=r"1 unexpected \(1\.more\)"):
        load_into(wrap(model), saved(tmp_path / "a.pt", other))


@pytest.fixture
def mesh():
    """The mesh of a process that is alone in its world."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_of_dtensors_gets_its_parts(assign, mesh, tmp_path):
    from torch.distributed.tensor import Shard, distribute_tensor

    def parallel() -> nn.Module:  # as FSDP2 and tensor parallelism leave it
        made = nn.Linear(2, 3)
        made.weight = nn.Parameter(distribute_tensor(made.weight.data, mesh, [Shard(0)]))
        return made

    values, model = nn.Linear(2, 3).state_dict(), parallel()
    path = saved(tmp_path / "a.pt", values)
    assert load_into(model, path, assign=assign).fits
    assert torch.equal(model.weight.full_tensor(), values["weight"])
    assert model.weight.placements == (Shard(0),)
    assert torch.equal(model.bias, values["bias"])
    with mock.patch("torch.distributed.tensor.distribute_tensor", side_effect=AssertionError):
        other = parallel()
        with pytest.raises(RefusedObject, match=r"weight: cannot be cut.*set_model_state_dict"):
            load_into(other, path, assign=assign)
    assert not torch.equal(other.bias, values["bias"])


def test_flat_parameters_are_not_said_to_be_loaded(mesh, tmp_path):
    from torch.distributed.fsdp import FullyShardedDataParallel

    values = nn.Linear(2, 3).state_dict()
    path, cpu = saved(tmp_path / "a.pt", values), torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(2, 3), device_id=cpu)
        with pytest.raises(OptionRefused, match="flat parameters"):
            load_into(model, path, assign=True)
        assert load_into(model, path).fits
        assert torch.equal(model.state_dict()["weight"], values["weight"])


def test_a_model_without_memory_is_not_said_to_be_loaded(tmp_path):
    values = nn.Linear(2, 3).state_dict()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, device="meta"))
    path = saved(tmp_path / "a.pt", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).state_dict())
    before = model[0].weight.clone()
    with pytest.raises(RefusedObject, match=r"1\.weight: .*on the meta device; assign=True"):
        load_into(model, path)
    assert torch.equal(model[0].weight, before)
    bare = nn.Linear(2, 3, device="meta")
    assert load_into(bare, saved(tmp_path / "a.pt", values), assign=True).fits
    assert torch.equal(bare.weight, values["weight"])
