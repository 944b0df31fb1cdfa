"""Whole modules: `torch.save(model)` is read as `model.state_dict()`, whether its class can be
imported here or not.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptconv import convert_checkpoint, limits, load_portable, open_checkpoint
from ckptconv.objects.pickled_modules import is_module
from ckptconv.support.errors import LimitExceeded, RefusedObject
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.modules import flatten_modules
from helpers import oracle
from helpers.program import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moving", torch.randn(2), persistent=False)
        self.register_buffer("kept", torch.arange(6).reshape(2, 3).t())
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.alias = self.weight
        self.row = self.frozen.data[1:]
        self.none = None


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        block = nn.Linear(3, 3)
        self.blocks = nn.Sequential(block, nn.ReLU(), block)
        self.view = nn.Parameter(self.blocks[0].weight.data[1])


def containers() -> nn.Module:
    made = nn.Module()
    made.list = nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(1))])
    made.dict = nn.ParameterDict(
        {"a": nn.Parameter(torch.randn(2)), "größe": nn.Parameter(torch.randn(1))}
    )
    made.modules_by_name = nn.ModuleDict({"z": nn.Linear(1, 1), "a": nn.Bilinear(1, 2, 3)})
    made.tower = nn.ModuleList([nn.ModuleList([nn.PReLU()]), nn.Identity()])
    return made


def sparse() -> nn.Module:
    made = nn.Linear(2, 2)
    made.register_buffer("edges", torch.eye(3).to_sparse())
    made.adjacency = nn.Parameter(torch.eye(2).to_sparse())
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten()),
    "buffers": Buffers,
    "shared": Shared,
    "containers": containers,
    "data parallel": lambda: nn.DataParallel(nn.Sequential(nn.Linear(2, 2), Buffers())),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
    "recurrent": lambda: nn.Sequential(nn.LSTM(2, 3, 2, bidirectional=True), nn.GRU(3, 2)),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(2, 3)),
    "half": lambda: nn.Linear(2, 2).to(torch.bfloat16),
    "loss": lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
}


def assert_is_the_state_dict(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert (
            type(found[key]) is torch.Tensor
            and found[key].dtype == tensor.dtype
            and not found[key].requires_grad
        )
        assert torch.equal(found[key], tensor)
    groups = [
        [tensor.untyped_storage()._cdata for tensor in each.values()] for each in (found, expected)
    ]
    assert [groups[0].index(group) for group in groups[0]] == [
        groups[1].index(group) for group in groups[1]
    ]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_its_state_dict(name, protocol, tmp_path):
    model = MODELS[name]()
    expected = model.state_dict()
    torch.save(
        {"model": model} if name == "shared" else model,
        tmp_path / "model.pt",
        pickle_protocol=protocol,
    )
    assert_is_the_state_dict(load_portable(tmp_path / "model.pt", keys="keep"), expected)
    convert_checkpoint(
        tmp_path / "model.pt", tmp_path / "out.pt", keys="keep", fsync=False, verify=True
    )
    written = oracle.load(tmp_path / "out.pt")
    assert_is_the_state_dict(written["model"] if name == "shared" else written, expected)
    convert_checkpoint(
        tmp_path / "model.pt",
        tmp_path / "out.safetensors",
        keys="keep",
        tied="duplicate",
        fsync=False,
    )
    flat = load_file(tmp_path / "out.safetensors")
    assert set(flat) == set(expected) and all(
        torch.equal(flat[key], tensor) for key, tensor in expected.items()
    )


def test_wrappers_are_stripped_as_from_any_state_dict(tmp_path):
    inner = nn.Linear(2, 2)
    torch.save(nn.DataParallel(inner), tmp_path / "model.pt")
    assert_is_the_state_dict(load_portable(tmp_path / "model.pt"), inner.state_dict())


def test_modules_deep_inside_are_state_dicts_where_they_stand(tmp_path):
    first, second = nn.Linear(1, 2), nn.BatchNorm1d(3)
    tree = {
        "epoch": 3,
        "nets": [first, (second, [first])],
        "best": OrderedDict(model=second),
        "lr": torch.tensor(0.5),
    }
    torch.save(tree, tmp_path / "tree.pt")
    convert_checkpoint(tmp_path / "tree.pt", tmp_path / "out.pt", fsync=False, verify=True)
    found = oracle.load(tmp_path / "out.pt")
    assert (
        list(found) == list(tree) and found["epoch"] == 3 and torch.equal(found["lr"], tree["lr"])
    )
    assert (
        type(found["nets"]) is list
        and type(found["nets"][1]) is tuple
        and type(found["nets"][1][1]) is list
    )
    assert_is_the_state_dict(found["nets"][0], first.state_dict())
    assert_is_the_state_dict(found["nets"][1][0], second.state_dict())
    assert (
        found["nets"][1][1][0] is found["nets"][0] and found["best"]["model"] is found["nets"][1][0]
    )


@pytest.fixture
def missing(monkeypatch) -> type[nn.Module]:
    """A class of a module that is there while it is saved, and not while it is read."""
    module = types.ModuleType("gone.models")
    code = """
from torch import nn
class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(inner.weight.detach() * 2)
"""
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "gone", types.ModuleType("gone"))
    monkeypatch.setitem(sys.modules, "gone.models", module)
    made: type[nn.Module] = module.__dict__["Net"]
    return made


def forgotten(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "gone.models")
    monkeypatch.delitem(sys.modules, "gone")


def test_the_class_need_not_be_importable(missing, monkeypatch, tmp_path):
    model = missing(nn.Linear(2, 3))
    expected = model.state_dict()
    torch.save({"net": model, "epoch": 1}, tmp_path / "model.pt")
    forgotten(monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        torch.load(tmp_path / "model.pt", weights_only=False)
    assert_is_the_state_dict(load_portable(tmp_path / "model.pt"), expected)
    with open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert any("gone.models.Net at net" in note for note in checkpoint.notes)


def test_unknown_keep_keeps_the_module_itself(missing, tmp_path):
    model = missing(nn.Linear(2, 3))
    torch.save({"net": model, "epoch": 1}, tmp_path / "model.pt")
    result = convert_checkpoint(
        tmp_path / "model.pt", tmp_path / "out.pt", unknown="keep", fsync=False, verify=True
    )
    assert result.verified == 3
    found = oracle.load(tmp_path / "out.pt", weights_only=False)
    assert type(found["net"]) is missing and found["epoch"] == 1
    assert_is_the_state_dict(found["net"].state_dict(), model.state_dict())
    assert all(parameter.requires_grad for parameter in found["net"].parameters())
    convert_checkpoint(
        tmp_path / "model.pt", tmp_path / "out.safetensors", unknown="keep", fsync=False
    )
    assert set(load_file(tmp_path / "out.safetensors")) == set(model.state_dict())


def test_the_program_keeps_a_module_where_it_is_asked_to(tmp_path):
    model = nn.Linear(2, 3)
    torch.save({"net": model}, tmp_path / "model.pt")
    plain = run("convert", "model.pt", "plain.pt", "--no-fsync", cwd=tmp_path)
    kept = run("convert", "model.pt", "kept.pt", "--no-fsync", "--unknown", "keep", cwd=tmp_path)
    assert plain.exit == kept.exit == 0
    assert "whole module" in plain.err and "whole module" not in kept.err
    assert_is_the_state_dict(oracle.load(tmp_path / "plain.pt")["net"], model.state_dict())
    assert type(oracle.load(tmp_path / "kept.pt", weights_only=False)["net"]) is nn.Linear


def test_sparse_parameters_and_buffers_are_kept(tmp_path):
    model = sparse()
    torch.save(model, tmp_path / "model.pt")
    convert_checkpoint(tmp_path / "model.pt", tmp_path / "out.pt", fsync=False)
    found = oracle.load(tmp_path / "out.pt")
    assert list(found) == list(model.state_dict())
    assert found["edges"].layout is found["adjacency"].layout is torch.sparse_coo
    assert torch.equal(found["adjacency"].to_dense(), model.adjacency.detach().to_dense())


def test_a_parameter_without_values_is_not_lost_silently(tmp_path):
    torch.save(nn.Sequential(nn.LazyLinear(3), nn.Linear(1, 1)), tmp_path / "model.pt")
    with pytest.raises(
        RefusedObject, match=r"0\.weight: torch\.nn\.parameter\.UninitializedParameter"
    ):
        convert_checkpoint(tmp_path / "model.pt", tmp_path / "out.pt")


@pytest.mark.trust
def test_modules_that_double_at_each_level_end_in_a_limit(tmp_path):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    for _ in range(40):
        outer = nn.Module()
        outer.a = outer.b = model
        model = outer
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(LimitExceeded, match="too many modules"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_module_that_holds_itself_ends_in_a_limit(tmp_path):
    model = nn.Linear(1, 1)
    model._modules["again"] = model
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(LimitExceeded, match="contains itself"):
        open_checkpoint(tmp_path / "model.pt")


def test_as_many_modules_and_characters_of_names_as_the_limits_say_are_read(tmp_path):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    torch.save(model, tmp_path / "model.pt")
    # three modules, and the prefixes "0." and "1." before two names each
    with limits(modules=3, names=8):
        assert load_portable(tmp_path / "model.pt").keys() == model.state_dict().keys()
    for most in ({"modules": 2}, {"names": 7}):
        with limits(**most), pytest.raises(LimitExceeded, match=r"too many modules|names"):
            load_portable(tmp_path / "model.pt")


def test_a_module_without_tensors_stays_an_object(tmp_path):
    torch.save({"loss": nn.ReLU(), "w": torch.ones(1)}, tmp_path / "tree.pt")
    with open_checkpoint(tmp_path / "tree.pt") as checkpoint:
        assert checkpoint.notes == () and any(
            type(ref) is TensorRef for _, ref in checkpoint.tensors()
        )
    with pytest.raises(RefusedObject, match=r"loss: torch\.nn\.modules\.activation\.ReLU"):
        convert_checkpoint(tmp_path / "tree.pt", tmp_path / "out.pt")
    convert_checkpoint(tmp_path / "tree.pt", tmp_path / "out.pt", unknown="drop", fsync=False)
    assert oracle.load(Path(tmp_path / "out.pt"))["loss"] is None


def test_an_object_that_a_tensor_is_made_with_is_not_dropped(tmp_path):
    tensor = torch.eye(2).to_sparse()
    tensor.after = nn.ReLU()
    torch.save({"t": tensor, "w": torch.ones(1)}, tmp_path / "tree.pt")
    for unknown, said in (
        ("refuse", "ReLU is an object"),
        ("drop", r"t: a tensor of which .*ReLU"),
    ):
        with pytest.raises(RefusedObject, match=said):
            convert_checkpoint(tmp_path / "tree.pt", tmp_path / "out.pt", unknown=unknown)
    convert_checkpoint(tmp_path / "tree.pt", tmp_path / "out.pt", unknown="drop", exclude="t")
    assert list(oracle.load(tmp_path / "out.pt")) == ["w"]


def test_inspect_says_that_a_whole_module_does_not_open_everywhere(tmp_path):
    torch.save({"model": nn.Linear(2, 2), "epoch": 1}, tmp_path / "model.pt")
    document = run("inspect", "model.pt", "--json", cwd=tmp_path).json()
    assert document["portable"] is False
    assert "holds a whole module, which needs its class to load" in document["verdict"]
    assert run("convert", "model.pt", "OUT.pt", cwd=tmp_path).exit == 0  # the remedy that it names
    assert run("inspect", "OUT.pt", "--json", cwd=tmp_path).json()["portable"] is True


def test_the_tree_with_the_module_in_it_stays_as_it_was(tmp_path):
    torch.save({"nets": [nn.Linear(2, 2)], "epoch": 3}, tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt", whole_modules=True) as whole:
        before = dict(whole.root.pairs)["nets"][0]
        flat = flatten_modules(whole)
        assert is_module(before) and dict(whole.root.pairs)["nets"][0] is before
        assert flat.modules == 1 and [item.path for item in flat.state_dicts()] == ["nets.0"]
