"""Metadata that name tensors: torchao's and ComfyUI's readers, as published, find every tensor."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptconv import (
    CheckpointWarning,
    Drop,
    KeyConflict,
    KeyRules,
    RefusedObject,
    RenameKeys,
    convert_checkpoint,
    edit,
    execute_plan,
    load_portable,
    merge,
    open_checkpoint,
    plan_conversion,
)
from helpers.program import run

CODES = torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4)
SCALE = torch.tensor([[0.5], [1.0], [2.0], [4.0]])
TORCHAO = {
    "0._weight_qdata": CODES,
    "0._weight_scale": SCALE,
    "0.bias": torch.ones(4),
    "attn._in_proj_weight_qdata": CODES + 1,
    "attn._in_proj_weight_scale": SCALE.clone(),
}
INT8 = json.dumps({"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]})
OF_TORCHAO = {
    "0.weight": INT8,
    "0.bias": '{"_type": "Tensor"}',
    "attn.in_proj_weight": INT8,
    "tensor_names": '["0.weight", "0.bias", "attn.in_proj_weight"]',
}
COMFYUI = {
    "b.0.weight": CODES,
    "b.0.weight_scale": torch.tensor(2.0),
    "b.0.bias": torch.ones(4),
    "b.1.weight": torch.ones(2, 2),
}


def of_comfyui(*layers: str) -> dict[str, str]:
    listed = {layer: {"format": "int8_tensorwise"} for layer in layers}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": listed})}


@pytest.fixture
def torchao(tmp_path) -> Path:
    save_file(TORCHAO, tmp_path / "torchao.safetensors", OF_TORCHAO)
    return tmp_path / "torchao.safetensors"


@pytest.fixture
def comfyui(tmp_path) -> Path:
    save_file(COMFYUI, tmp_path / "comfyui.safetensors", of_comfyui("b.0"))
    return tmp_path / "comfyui.safetensors"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return opened.metadata() or {}


def by_torchao(path: Path) -> dict[str, torch.Tensor]:
    """The values by the rule of torchao's `unflatten_tensor_state_dict`; nothing is left over."""
    tensors, strings = load_file(path), metadata(path)
    found = {}
    for name in json.loads(strings["tensor_names"]):
        module, own = name.rsplit(".", 1)
        entry = json.loads(strings[name])
        if entry["_type"] == "Tensor":
            found[name] = tensors.pop(name)
        else:
            qdata, scale = (
                tensors.pop(f"{module}._{own}_{part}") for part in entry["_tensor_data_names"]
            )
            found[name] = qdata * scale
    assert not tensors
    return found


def layers_found(path: Path) -> set[str]:
    """The layers whose weight has the codes, as ComfyUI names them (`{layer}.comfy_quant`)."""
    tensors = load_file(path)
    layers = json.loads(metadata(path)["_quantization_metadata"])["layers"]
    assert all(tensors[f"{layer}.weight"].dtype == torch.int8 for layer in layers)
    assert all(f"{layer}.weight_scale" in tensors for layer in layers)
    return set(layers)


def renamed(path: Path, way: str, **asked: str) -> Path:
    """`path` under other names: edited in its place, or converted, as a set too."""
    out = path.with_name("out.safetensors")
    if way == "edit":
        edit(path, **asked)
        return path
    convert_checkpoint(path, out, **asked)
    return out


@pytest.mark.parametrize("way", ["convert", "edit"])
@pytest.mark.parametrize(
    ("asked", "new"),
    [
        ({"add_prefix": "net."}, ("net.0.", "net.attn.")),
        ({"rename": ["0.=a.b.", "attn.=x."]}, ("a.b.", "x.")),
        ({"regex": r"^(\w+)\.=>m.\1.q."}, ("m.0.q.", "m.attn.q.")),
    ],
)
def test_torchao_finds_its_tensors_under_their_new_names(torchao, way, asked, new):
    before = by_torchao(torchao)
    after = by_torchao(renamed(torchao, way, **asked))
    first, second = new
    wanted = {f"{first}weight": "0.weight", f"{first}bias": "0.bias"}
    wanted[f"{second}in_proj_weight"] = "attn.in_proj_weight"
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], before[old]) for name, old in wanted.items())


@pytest.mark.parametrize("way", ["convert", "edit"])
def test_comfyui_s_layers_follow(comfyui, way):
    assert layers_found(renamed(comfyui, way, add_prefix="net.")) == {"net.b.0"}


def test_layers_without_the_prefix_of_their_tensors_follow(tmp_path):
    source = tmp_path / "in.safetensors"
    whole = {f"model.diffusion_model.{name}": value for name, value in COMFYUI.items()}
    save_file(whole, source, of_comfyui("b.0"))
    out = renamed(source, "convert", strip_prefix="model.diffusion_model.")
    assert layers_found(out) == {"b.0"}
    convert_checkpoint(
        source, out, rename="model.diffusion_model.b=model.diffusion_model.c", force=True
    )
    assert "c.0" in json.loads(metadata(out)["_quantization_metadata"])["layers"]


def test_a_tensor_that_is_left_out_is_not_named(torchao, tmp_path):
    out = tmp_path / "out.safetensors"
    convert_checkpoint(torchao, out, exclude="attn.*")
    assert by_torchao(out).keys() == {"0.weight", "0.bias"}
    convert_checkpoint(torchao, tmp_path / "bias.pt", include="*.bias")  # no codes, no metadata
    assert torch.load(tmp_path / "bias.pt").keys() == {"0.bias"}


def test_they_follow_edits(torchao, tmp_path):
    edits = [Drop("attn"), RenameKeys(KeyRules(add_prefix="net."))]
    with open_checkpoint(torchao, edits=edits) as checkpoint:
        execute_plan(plan_conversion(checkpoint, tmp_path / "out.safetensors"), verify=True)
    before, after = by_torchao(torchao), by_torchao(tmp_path / "out.safetensors")
    assert after.keys() == {"net.0.weight", "net.0.bias"}
    assert all(torch.equal(value, before[key.removeprefix("net.")]) for key, value in after.items())


@pytest.mark.parametrize(
    "asked",
    [
        {"rename": "0._weight_scale=s"},
        {"rename": "0._weight_scale=1._weight_scale"},
        {"strip_prefix": "0."},
        {"rename": "0._weight_=0.weight."},
    ],
)
def test_names_of_another_form_are_refused(torchao, asked, tmp_path):
    before = torchao.read_bytes()
    for way in ("convert", "edit"):
        with pytest.raises(RefusedObject, match=r"0\.weight.*not of their form"):
            renamed(torchao, way, **asked)
    assert torchao.read_bytes() == before
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("way", ["convert", "edit"])
def test_layers_that_are_no_modules_any_more_are_refused(comfyui, way, tmp_path):
    with pytest.raises(RefusedObject, match=r"b\.0: .* b0_weight are not of their form"):
        renamed(comfyui, way, rename="b.0.=b0_")
    assert layers_found(comfyui) == {"b.0"} and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("way", ["convert", "edit"])
def test_a_text_is_not_replaced_by_what_is_said_of_a_tensor(way, tmp_path):
    path = tmp_path / "torchao.safetensors"
    save_file(TORCHAO, path, {**OF_TORCHAO, "net.0.weight": "a text"})
    with pytest.raises(
        KeyConflict, match=r"net\.0\.weight: a metadata entry has this name already"
    ):
        renamed(path, way, add_prefix="net.")
    assert metadata(path)["net.0.weight"] == "a text"


@pytest.mark.parametrize("output", ["out.pt", "out.npz", "dcp", "out-bin"])
def test_what_cannot_hold_the_metadata_is_refused(torchao, comfyui, output, tmp_path):
    more = {"dcp": {"to": "dcp"}, "out-bin": {"to": "torch", "max_shard_size": "1GB"}}
    for path, name in ((torchao, "tensor_names"), (comfyui, "_quantization_metadata")):
        with pytest.raises(RefusedObject, match=f"{name}: .*--to safetensors"):
            convert_checkpoint(path, tmp_path / output, **more.get(output, {}))
        assert not (tmp_path / output).exists()


def test_a_batch_refuses_them_too(torchao, tmp_path):
    done = run("batch", torchao, "--out-dir", tmp_path / "o", "--to", "torch", cwd=tmp_path)
    assert done.exit == 1 and "tensor_names" in done.err + done.out


def test_live_tensors_come_with_a_warning_and_under_their_own_names(torchao):
    with pytest.warns(CheckpointWarning, match="tensor_names"):
        assert load_portable(torchao).keys() == TORCHAO.keys()
    with pytest.raises(RefusedObject, match="keys='keep'"):
        load_portable(torchao, keys=KeyRules(add_prefix="net."))


def test_a_merge_keeps_them(torchao, comfyui, tmp_path):
    save_file({"vae": torch.ones(2)}, tmp_path / "vae.safetensors", {"author": "me"})
    out = tmp_path / "out.safetensors"
    merge([comfyui, tmp_path / "vae.safetensors"], out, prefix={str(comfyui): "net."})
    assert layers_found(out) == {"net.b.0"} and "author" not in metadata(out)
    with pytest.raises(KeyConflict, match="in two of the sources"):
        (tmp_path / "other.safetensors").write_bytes(torchao.read_bytes())
        merge(
            [torchao, tmp_path / "other.safetensors"], out, prefix={str(torchao): "a."}, force=True
        )


@pytest.mark.parametrize(("before", "after"), [("mlx", "mlx"), ("np", "pt"), ("pt", "pt")])
def test_the_format_of_another_framework_stays(before, after, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "in.safetensors", {"format": before})
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert metadata(tmp_path / "out.safetensors")["format"] == after


# ----------------------------------------------------------------------------------- second names

W = torch.arange(3.0)


@pytest.mark.parametrize(
    ("strings", "second"),
    [
        ({"author": "name"}, None),
        ({"base_model": "name"}, None),
        ({"head": "name", "license": "mit"}, None),
        ({"head": "name"}, "head"),
        ({"lm_head.weight": "embed.weight", "license": "mit"}, "lm_head.weight"),
        ({"lm_head.proj": "embed.weight"}, "lm_head.proj"),
        ({"weight": "embed.weight", "author": "name"}, "weight"),
        ({"name": "embed.weight"}, None),
    ],
)
def test_a_text_that_equals_the_name_of_a_tensor_is_none_of_its_names(strings, second, tmp_path):
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"name": W, "embed.weight": W + 1}, source, strings)
    tensors = {"name", "embed.weight"}
    assert load_portable(source).keys() == tensors | ({second} if second else set())
    convert_checkpoint(source, out)
    assert load_file(out).keys() == tensors or second == "head"
    assert load_portable(out).keys() == load_portable(source).keys()
    texts = {name: value for name, value in strings.items() if name != second}
    assert metadata(out).items() >= texts.items()


def test_a_second_name_that_would_be_read_as_a_text_is_written(tmp_path):
    source, out = tmp_path / "in.pt", tmp_path / "out.safetensors"
    torch.save({"b": W, "a": W}, source)
    convert_checkpoint(source, out)
    assert load_file(out).keys() == {"a"} and load_portable(out).keys() == {"a", "b"}
    convert_checkpoint(source, out, metadata="license=mit", force=True)
    assert load_file(out).keys() == {"a", "b"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        assert load_portable(out).keys() == {"a", "b"}


def test_metadata_do_not_name_what_was_dropped(torchao, tmp_path):
    out = tmp_path / "out.safetensors"
    convert_checkpoint(torchao, out, drop="attn", fsync=False)
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["tensor_names"]) == ["0.weight", "0.bias"]
    assert "attn.in_proj_weight" not in metadata and metadata["0.weight"] == INT8
    save_file(COMFYUI, tmp_path / "comfy.safetensors", of_comfyui("b.0"))
    convert_checkpoint(tmp_path / "comfy.safetensors", out, drop="b.0", force=True, fsync=False)
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["_quantization_metadata"])["layers"] == {}
