"""Real models, wrapped as training wraps them, saved, converted with `--like` or `--model`, and
loaded strictly: they compute the same, bit for bit. `load_into` does so without a conversion.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open

from ckptconv import convert_checkpoint, load_into
from ckptconv.convert.named_models import model_shapes
from ckptconv.support.errors import KeyMismatch
from helpers import families
from helpers.examples import crossed

pytestmark = pytest.mark.filterwarnings("ignore")


def needs(*packages: str) -> pytest.MarkDecorator:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if kind.startswith("torch.nn.") else needs("transformers"))
        for name, (kind, _) in families.FAMILIES.items()
    ],
)


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) for name in packages)


each_wrapped_family = pytest.mark.parametrize(
    ("family", "wrapping"),
    crossed(
        [
            name
            for name, (kind, _) in families.FAMILIES.items()
            if kind.startswith("torch.nn.") or installed("transformers")
        ],
        [
            name
            for name in families.wrappings()
            if "Lightning" not in name or installed("lightning")
        ],
    ),
)


@pytest.fixture(scope="module", autouse=True)
def processes():
    with families.one_process():
        yield


def wrapped(family: str, wrapping: str, seed: int = 0) -> torch.nn.Module:
    return families.wrappings()[wrapping](families.build(family, seed))


def computes_the_same(family: str, state_dict: dict[str, torch.Tensor], seed: int = 0) -> bool:
    """Whether a model with these values computes what the one of `seed` does; they are loaded
    strictly.
    """
    model = families.build(family, seed + 1)
    expected = families.forward(family, families.build(family, seed))
    assert not torch.equal(families.forward(family, model), expected)
    model.load_state_dict(state_dict, strict=True)
    return torch.equal(families.forward(family, model), expected)


@each_wrapped_family
def test_a_wrapped_model_is_converted_like_a_bare_one(family, wrapping, tmp_path):
    torch.save(wrapped(family, wrapping).state_dict(), tmp_path / "wrapped.pt")
    torch.save(families.build(family, 5).state_dict(), tmp_path / "bare.pt")
    convert_checkpoint(
        tmp_path / "wrapped.pt", tmp_path / "out.pt", like=tmp_path / "bare.pt", keys="keep"
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert computes_the_same(family, found)
    expected = families.build(family).state_dict()
    assert set(found._metadata) >= {
        path for path in expected._metadata if any(key.startswith(f"{path}.") for key in expected)
    }


@each_wrapped_family
def test_a_bare_model_is_loaded_into_a_wrapped_one(family, wrapping, tmp_path):
    torch.save(families.build(family).state_dict(), tmp_path / "bare.pt")
    model = wrapped(family, wrapping, 1)
    assert load_into(model, tmp_path / "bare.pt").fits
    plain = OrderedDict(
        zip(families.build(family).state_dict(), model.state_dict().values(), strict=True)
    )
    assert computes_the_same(family, plain)


@each_family
def test_a_training_checkpoint_is_fitted_to_a_wrapped_one(family, tmp_path):
    tree = {"model": wrapped(family, "compile").state_dict(), "epoch": 3}
    torch.save(tree, tmp_path / "train.pt")
    torch.save(wrapped(family, "compile(DDP)", 5).state_dict(), tmp_path / "other.pt")
    convert_checkpoint(tmp_path / "train.pt", tmp_path / "out.pt", like=tmp_path / "other.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    model = wrapped(family, "compile(DDP)", 2)
    model.load_state_dict(found["model"], strict=True)
    assert found["epoch"] == 3
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), tree["model"].values(), strict=True)
    )


@needs("transformers", "peft")
@pytest.mark.parametrize(
    "wrapping",
    ["DataParallel", "DDP(compile)", pytest.param("Lightning(compile)", marks=needs("lightning"))],
)
@pytest.mark.parametrize("family", families.ADAPTED)
def test_a_model_with_adapters_is_fitted_to_its_like_and_to_its_base(family, wrapping, tmp_path):
    adapted = families.lora(families.build(family))
    torch.save(families.wrappings()[wrapping](adapted).state_dict(), tmp_path / "wrapped.pt")
    torch.save(families.lora(families.build(family, 3)).state_dict(), tmp_path / "adapted.pt")
    convert_checkpoint(tmp_path / "wrapped.pt", tmp_path / "out.pt", like=tmp_path / "adapted.pt")
    again = families.lora(families.build(family, 1))
    again.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True), strict=True)
    assert torch.equal(families.forward(family, again), families.forward(family, adapted))

    torch.save(families.build(family, 3).state_dict(), tmp_path / "base.pt")
    with pytest.raises(KeyMismatch, match=r"unexpected \(.*lora_A.*--drop-unexpected"):
        convert_checkpoint(
            tmp_path / "wrapped.pt", tmp_path / "base_out.pt", like=tmp_path / "base.pt"
        )
    convert_checkpoint(
        tmp_path / "wrapped.pt",
        tmp_path / "base_out.pt",
        like=tmp_path / "base.pt",
        drop_unexpected=True,
    )
    assert computes_the_same(family, torch.load(tmp_path / "base_out.pt", weights_only=True))


@each_family
@pytest.mark.parametrize("wrapping", ["DDP(compile)", "FSDP"])
def test_a_removed_and_a_reshaped_tensor_are_refused_by_name(family, wrapping, tmp_path):
    source = wrapped(family, wrapping).state_dict()
    bare = list(families.build(family).state_dict())
    at = len(source) // 2
    old, key = list(source)[at], bare[at]
    torch.save(families.build(family).state_dict(), tmp_path / "bare.pt")
    value = source.pop(old)
    torch.save(source, tmp_path / "removed.pt")
    with pytest.raises(KeyMismatch) as caught:
        convert_checkpoint(tmp_path / "removed.pt", tmp_path / "out.pt", like=tmp_path / "bare.pt")
    assert caught.value.fit.missing == (key,) and caught.value.fit.unexpected == ()
    source[old] = value[None]
    torch.save(source, tmp_path / "reshaped.pt")
    with pytest.raises(KeyMismatch) as caught:
        convert_checkpoint(tmp_path / "reshaped.pt", tmp_path / "out.pt", like=tmp_path / "bare.pt")
    assert [(item.key, item.source, item.target) for item in caught.value.fit.mismatched] == [
        (key, (1, *value.shape), tuple(value.shape))
    ]
    assert not (tmp_path / "out.pt").exists()


@each_family
def test_a_model_that_is_named_is_built_without_memory(family, tmp_path, monkeypatch):
    (tmp_path / f"named_{family}.py").write_text(
        f"from helpers import families\ndef build():\n    return families.build({family!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = {
        key: tuple(value.shape) for key, value in families.build(family).state_dict().items()
    }
    assert model_shapes(f"named_{family}:build")[0] == expected
    torch.save(wrapped(family, "DDP(compile)").state_dict(), tmp_path / "wrapped.pt")
    convert_checkpoint(tmp_path / "wrapped.pt", tmp_path / "out.pt", model=f"named_{family}:build")
    assert computes_the_same(family, torch.load(tmp_path / "out.pt", weights_only=True))
    sys.modules.pop(f"named_{family}")


@needs("transformers")
@pytest.mark.parametrize("family", families.TIED)
def test_what_save_pretrained_leaves_out_is_filled(family, tmp_path, monkeypatch):
    model = families.build(family)
    model.save_pretrained(tmp_path / "hub")
    with safe_open(tmp_path / "hub" / "model.safetensors", "pt") as file:
        assert len(file.keys()) < len(model.state_dict()), "a tied name is left out"
    (tmp_path / f"tied_{family}.py").write_text(
        f"from helpers import families\ndef build():\n    return families.build({family!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(families.build(family, 3).state_dict(), tmp_path / "like.pt")
    for target in ({"model": f"tied_{family}:build"}, {"like": tmp_path / "like.pt"}):
        convert_checkpoint(tmp_path / "hub", tmp_path / "out.pt", force=True, **target)
        assert computes_the_same(family, torch.load(tmp_path / "out.pt", weights_only=True))
    again = families.build(family, 2)
    assert load_into(again, tmp_path / "hub").fits
    assert torch.equal(families.forward(family, again), families.forward(family, model))
    sys.modules.pop(f"tied_{family}")
