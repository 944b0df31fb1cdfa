"""TorchScript archives: the state dict is the one that `torch.jit.load` gives, and no line of their
code is run.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptconv import convert_checkpoint, load_portable, open_checkpoint
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from helpers import oracle

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moving", torch.randn(2), persistent=False)
        self.register_buffer("kept", torch.arange(2))
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.plain = torch.zeros(2)
        self.register_parameter("absent", None)
        self.register_buffer("nothing", None)
        self.listed: list[torch.Tensor] = [torch.ones(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum() + self.plain.sum() + self.listed[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 4))
        self.inner = Inner()
        self.again = self.inner
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.body[0].weight
        self.items = nn.ModuleList([nn.Linear(2, 2), Inner()])
        self.named = nn.ModuleDict({"größe-x": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
        self.rnn = nn.LSTM(2, 3)
        self.register_parameter("odd-näme", nn.Parameter(torch.ones(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.tied(x))


def saved(folder: Path, model: nn.Module) -> Path:
    torch.jit.save(torch.jit.script(model.eval()), folder / "scripted.pt")
    return folder / "scripted.pt"


def assert_loads_as(path: Path, expected: dict[str, torch.Tensor], folder: Path) -> None:
    """The library, a torch file and a safetensors file all give the tensors of `expected` under its
    names, in its order.
    """
    loaded = load_portable(path, keys="keep")
    assert list(loaded) == list(expected)
    convert_checkpoint(path, folder / "out.pt", keys="keep", fsync=False, verify=True)
    convert_checkpoint(
        path, folder / "out.safetensors", keys="keep", tied="duplicate", fsync=False, verify=True
    )
    written, flat = oracle.load(folder / "out.pt"), load_file(folder / "out.safetensors")
    assert list(written) == list(expected) and set(flat) == set(expected)
    for key, tensor in expected.items():
        for found in (loaded[key], written[key], flat[key]):
            assert (
                found.dtype == tensor.dtype
                and torch.equal(found, tensor)
                and not found.requires_grad
            )


def test_the_state_dict_is_that_of_the_loaded_module(tmp_path):
    path = saved(tmp_path, Net())
    assert_loads_as(path, torch.jit.load(path).state_dict(), tmp_path)


def test_parameters_that_were_tied_stay_tied(tmp_path):
    path = saved(tmp_path, Net())
    convert_checkpoint(path, tmp_path / "out.pt", fsync=False)
    written = oracle.load(tmp_path / "out.pt")
    shared = written["body.0.weight"].untyped_storage()._cdata
    assert (
        shared
        == written["tied.weight"].untyped_storage()._cdata
        != written["tied.bias"].untyped_storage()._cdata
    )


def test_a_traced_module_is_read_too(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    torch.jit.trace(model.eval(), torch.zeros(1, 3, 8, 8)).save(tmp_path / "traced.pt")
    assert_loads_as(
        tmp_path / "traced.pt", torch.jit.load(tmp_path / "traced.pt").state_dict(), tmp_path
    )
    assert list(load_portable(tmp_path / "traced.pt")) == list(model.state_dict())


def test_the_devices_of_the_tensors_are_their_tags(tmp_path):
    path = saved(tmp_path, nn.Linear(2, 2))
    moved = oracle.rezipped(
        path,
        tmp_path / "cuda.pt",
        payload=lambda _, data: data.replace(b"\3\0\0\0cpu", b"\6\0\0\0cuda:1"),
    )
    with open_checkpoint(moved) as checkpoint:
        assert {ref.location for _, ref in checkpoint.tensors()} == {"cuda:1"}


def test_it_is_told_that_the_code_is_left_out(tmp_path):
    with open_checkpoint(saved(tmp_path, Net())) as checkpoint:
        assert checkpoint.format == "TorchScript"
        assert any(
            re.search(r"__torch__\..*Net; its code is left out", note) for note in checkpoint.notes
        )


def test_the_tensors_of_old_classes_are_buffers_where_no_list_says_so(tmp_path):
    """Before torch 1.6 a class listed its parameters only; today's torch would lose the running
    mean of such a file.
    """
    path = saved(tmp_path, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    expected = torch.jit.load(path).state_dict()

    def unlisted(name: str, data: bytes) -> bytes:
        return re.sub(rb"\n  __buffers__ = .*", b"", data) if name.endswith(".py") else data

    old = oracle.rezipped(path, tmp_path / "old.pt", payload=unlisted)
    assert "1.running_mean" in expected and "1.running_mean" not in torch.jit.load(old).state_dict()
    assert_loads_as(old, expected, tmp_path)
    with open_checkpoint(old) as checkpoint:
        assert any("do not list their buffers" in note for note in checkpoint.notes)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
        self.coo = nn.Parameter(dense.to_sparse())
        self.register_buffer(
            "quantized", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        )
        self.register_buffer("wide", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_sparse_and_quantized_tensors_are_in_it_too(tmp_path):
    path = saved(tmp_path, Odd())
    expected = torch.jit.load(path).state_dict()
    convert_checkpoint(path, tmp_path / "out.pt", fsync=False, verify=True)
    convert_checkpoint(path, tmp_path / "out.safetensors", fsync=False, verify=True)
    for found in (
        load_portable(path),
        oracle.load(tmp_path / "out.pt"),
        load_portable(tmp_path / "out.safetensors"),
    ):
        assert set(found) == set(expected)
        assert found["coo"].layout is expected["coo"].layout is torch.sparse_coo
        assert found["coo"].is_coalesced() == expected["coo"].is_coalesced()
        assert torch.equal(found["coo"].to_dense(), expected["coo"].to_dense())
        assert torch.equal(found["quantized"].int_repr(), expected["quantized"].int_repr())
        assert torch.equal(found["wide"], expected["wide"])


def test_packed_and_frozen_weights_are_told_of(tmp_path):
    packed = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), {nn.Linear}
    )
    path = saved(tmp_path, packed)
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.state_dict().keys) == list(torch.jit.load(path).state_dict())
        assert any(
            "left out: __torch__.torch.classes.quantized.LinearPackedParamsBase" in note
            for note in checkpoint.notes
        )
    torch.jit.save(
        torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval())), tmp_path / "frozen.pt"
    )
    with open_checkpoint(tmp_path / "frozen.pt") as checkpoint:
        assert (
            torch.jit.load(tmp_path / "frozen.pt").state_dict() == {}
            and list(checkpoint.tensors()) == []
        )
        assert any("constants in its code" in note for note in checkpoint.notes)


def test_two_roots_in_one_archive_are_no_torchscript(tmp_path):
    path = saved(tmp_path, nn.Linear(1, 1))
    moved = oracle.rezipped(
        path,
        tmp_path / "moved.pt",
        name=lambda name: name.replace("scripted/constants", "b/constants"),
    )
    with pytest.raises(CheckpointError):
        convert_checkpoint(moved, tmp_path / "out.pt")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.weight * 2, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.weight = state[0]
        self.training = state[1]


def test_a_module_with_a_state_of_its_own_is_told_of(tmp_path):
    path = saved(tmp_path, nn.Sequential(nn.Linear(1, 1), Own()))
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.state_dict().keys) == ["0.weight", "0.bias"]
        assert any("way of their own" in note and "Own" in note for note in checkpoint.notes)


# ---------------------------------------------------------------------------------- broken archives


def without(path: Path, output: Path, part: str) -> Path:
    return oracle.rezipped(path, output, name=lambda name: None if part in name else name)


@pytest.mark.parametrize("part", ["code/", "data/0"])
def test_an_archive_without_its_code_or_data_is_malformed(part, tmp_path):
    broken = without(saved(tmp_path, nn.Linear(2, 2)), tmp_path / "broken.pt", part)
    with pytest.raises(MalformedCheckpoint, match=r"code/|data/0"):
        open_checkpoint(broken)


def test_an_eager_checkpoint_with_constants_is_no_module(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.writestr("a/constants.pkl", b"\x80\x02).")
    with pytest.raises(MalformedCheckpoint, match="not a module"):
        open_checkpoint(tmp_path / "a.pt")


def pickled_modules(depth: int) -> bytes:
    """A chain of modules, each holding the next one twice."""
    made = b"c__torch__\nM\n)\x81}b"
    for _ in range(depth):
        made = b"c__torch__\nM\n)\x81}(X\1\0\0\0a" + made + b"q\1X\1\0\0\0bh\1ub"
    return b"\x80\x02" + made + b"."


@pytest.mark.trust
def test_modules_that_double_at_each_level_end_in_a_limit(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickled_modules(60))
        archive.writestr("a/constants.pkl", b"\x80\x02).")
        archive.writestr(
            "a/code/__torch__.py", "class M(Module):\n  __parameters__ = []\n  __buffers__ = []\n"
        )
    with pytest.raises(LimitExceeded, match="too many modules"):
        open_checkpoint(tmp_path / "bomb.pt")


# --------------------------------------------------------------------------------- before torch 1.4

TENSORS: list[dict[str, Any]] = [
    {"dims": ["2", "3"], "offset": "0", "strides": ["3", "1"], "requiresGrad": True,
        "dataType": "FLOAT",
     "data": {"key": "tensors/0"}, "device": "cpu"},
    {"dims": ["2"], "offset": "6", "strides": ["1"], "dataType": "FLOAT",
        "data": {"key": "tensors/0"}, "device": "cuda:0"},
    {"offset": "0", "dataType": "INT64", "data": {"key": "tensors/2"}, "device": "cpu"},
    {"dims": ["3"], "strides": ["1"], "dataType": "FLOAT16", "data": {"key": "tensors/3"},
        "device": "cpu"},
]  # fmt: skip
MAIN: dict[str, Any] = {
    "torchscriptArena": {"key": "code/old.py"}, "name": "Net", "optimize": True,
    "submodules": [
        {"name": "fc", "parameters": [{"isBuffer": False, "tensorId": "0", "name": "weight"},
                                      {"tensorId": "1", "name": "bias"}]},
        {"name": "0", "submodules": [{"name": "deep", "parameters": [{"tensorId": "3",
            "name": "w"}]}]},
    ],
    "parameters": [{"isBuffer": True, "tensorId": "2", "name": "steps"}, {"name": "tied"}],
    "attributes": [{"type": "Tensor", "name": "steps", "id": "0"}, {"type": "int", "name": "n",
        "id": "1"},
                   {"type": "Tensor", "name": "mean", "id": "0"}],
}  # fmt: skip
ATTRIBUTES = b"\x80\x02(ctorch.jit._pickle\nbuild_tensor_from_id\n(K\3tRK\7t."
"""A tuple of the tensor 3 and the int 7."""


def old(
    path: Path, main: Any = MAIN, tensors: Any = TENSORS, attributes: bytes = ATTRIBUTES
) -> Path:
    """An archive as torch 1.1 to 1.3 wrote them."""
    model = {
        "protoVersion": "5",
        "mainModule": main,
        "producerName": "pytorch",
        "producerVersion": "1.0",
        "tensors": tensors,
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("old/version", "1\n")
        archive.writestr("old/code/old.py", "op_version_set = 1\n")
        archive.writestr("old/attributes.pkl", attributes)
        archive.writestr("old/tensors/0", torch.arange(8.0).numpy().tobytes())
        archive.writestr("old/tensors/2", torch.tensor(7).numpy().tobytes())
        archive.writestr("old/tensors/3", torch.arange(3, dtype=torch.half).numpy().tobytes())
        archive.writestr("old/model.json", json.dumps(model))
    return path


def test_an_archive_of_before_torch_1_4_is_its_state_dict(tmp_path):
    expected = {
        "tied": torch.arange(6.0).reshape(2, 3),
        "steps": torch.tensor(7),
        "mean": torch.arange(3, dtype=torch.half),
        "fc.weight": torch.arange(6.0).reshape(2, 3),
        "fc.bias": torch.tensor([6.0, 7.0]),
        "0.deep.w": torch.arange(3, dtype=torch.half),
    }
    assert_loads_as(old(tmp_path / "old.pt"), expected, tmp_path)
    with open_checkpoint(tmp_path / "old.pt") as checkpoint:
        assert "before torch 1.4" in checkpoint.format
        storages = {key: ref.storage for key, ref in checkpoint.state_dict().tensors()}
    assert storages["tied"] is storages["fc.weight"] is storages["fc.bias"]


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"main": {"parameters": [{"name": "a", "tensorId": "4"}]}}, MalformedCheckpoint,
            "tensor 4 of 4"),
        ({"main": {"parameters": [{"name": "a", "tensorId": "-1"}]}}, MalformedCheckpoint,
            "tensor -1"),
        ({"main": {"parameters": [{"name": "a"}, {"name": "a"}]}}, MalformedCheckpoint,
            "a: is named twice"),
        ({"main": {"parameters": {"name": "a"}}}, MalformedCheckpoint, "dict where a list"),
        ({"main": []}, MalformedCheckpoint, "list where a dict"),
        ({"tensors": [{**TENSORS[0], "offset": "9"}]}, MalformedCheckpoint, "tensors/0"),
        ({"tensors": [{**TENSORS[0], "dims": ["-2", "3"]}]}, MalformedCheckpoint, "sizes"),
        ({"tensors": [{**TENSORS[0], "dims": ["1e9", "3"]}]}, MalformedCheckpoint,
            "str where a int"),
        ({"tensors": [{**TENSORS[0], "dataType": "STRING"}]}, UnsupportedCheckpoint, "STRING"),
        ({"tensors": [{**TENSORS[0], "isQuantized": True}]}, UnsupportedCheckpoint, "quantized"),
        ({"tensors": [{**TENSORS[0], "data": {"key": "tensors/9"}}]}, MalformedCheckpoint,
            "tensors/9"),
        ({"tensors": 3}, MalformedCheckpoint, "int where a list"),
        ({"attributes": b"\x80\x02."}, MalformedCheckpoint, "old"),
    ],
)  # fmt: skip
def test_a_broken_archive_of_before_torch_1_4_says_what_is_wrong(change, error, told, tmp_path):
    with pytest.raises(CheckpointError, match=told) as caught:
        open_checkpoint(old(tmp_path / "old.pt", **change))
    assert (
        type(caught.value) is error
        and caught.value.path == str(tmp_path / "old.pt")
        and caught.value.where
    )


def test_a_model_json_that_is_none_is_malformed(tmp_path):
    for text in (b"", b"[", b"[" * 100_000, b"\xff"):
        broken = oracle.rezipped(old(tmp_path / "old.pt"), tmp_path / "broken.pt",
                                 payload=lambda name, data,
                                 text=text: text if "json" in name else data)  # fmt: skip
        with pytest.raises(MalformedCheckpoint, match=r"model.json"):
            open_checkpoint(broken)
