"""Adapters that ckptconv gave the names of a convention are those that diffusers and peft make of
the same files, and load: bit for bit, or as products where diffusers puts scales into matrices.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ckptconv import convert_checkpoint, merge_lora_checkpoint
from helpers.unets import UNETS, unet

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

Tensors = dict[str, torch.Tensor]


def flux() -> Any:
    torch.manual_seed(1)
    return diffusers.FluxTransformer2DModel(
        num_layers=2, num_single_layers=2, guidance_embeds=True, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=12, in_channels=8,
        axes_dims_rope=(4, 6, 6),
    ).to(torch.bfloat16)  # fmt: skip


def layers(model: nn.Module, left_out: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """The linear and convolutional layers of a model, with the shapes of their weights."""
    found = {
        name: tuple(layer.weight.shape)
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d))
    }
    return {name: shape for name, shape in found.items() if name not in left_out}


ODD = {"proj_out": 5, "x_embedder": 2}
"""Ranks of layers of Flux, of which one has the name of the end of others."""


def of_peft(folder: Path, shapes: dict[str, tuple[int, ...]], ranks: list[int]) -> Path:
    """An adapter of random values, as peft writes it; ranks and alphas differ by layer."""
    tensors: Tensors = {}
    patterns: dict[str, dict[str, float]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for at, (name, shape) in enumerate(shapes.items()):
        rank = ODD.get(name, ranks[at % len(ranks)])
        patterns["rank_pattern"][f"^{name}"] = rank
        patterns["alpha_pattern"][f"^{name}"] = rank * 0.75
        start = f"base_model.model.{name}"
        tensors[f"{start}.lora_A.weight"] = torch.randn(rank, *shape[1:]) * 0.2
        up = torch.randn(shape[0], rank, *(1,) * (len(shape) - 2)) * 0.2
        tensors[f"{start}.lora_B.weight"] = up
    folder.mkdir()
    save_file({key: value.half() for key, value in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 3, **patterns}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def named(given: Path, base: Path, preset: str, out: Path) -> Path:
    is_folder = preset == "lora-peft"
    convert_checkpoint(
        given, f"{out}/" if is_folder else out, preset=preset, like=base, verify=True
    )
    return out


def merged(base: Path, adapter: Path, out: Path) -> Tensors:
    merge_lora_checkpoint(base, adapter, out, force=True)
    return load_file(out)


def same(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype is other[key].dtype and torch.equal(value, other[key]), key


def saved(model: Any, path: Path) -> Path:
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("name", UNETS)
def test_diffusers_reads_the_names_of_kohya_as_we_do(tmp_path, name):
    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_lora_to_diffusers,
        _maybe_map_sgm_blocks_to_diffusers,
    )
    from diffusers.utils import convert_unet_state_dict_to_peft

    model = unet(name)
    shapes = layers(model)
    base = saved(model, tmp_path / "base.safetensors")
    given = of_peft(tmp_path / "given", shapes, [4, 4, 3])
    kohya = load_file(named(given, base, "lora-kohya", tmp_path / "kohya.safetensors"))
    ours = load_file(named(given, base, "lora-diffusers", tmp_path / "diffusers.safetensors"))
    mapped = _maybe_map_sgm_blocks_to_diffusers(dict(kohya), model.config)
    found, alphas = _convert_non_diffusers_lora_to_diffusers(mapped)
    inner = {key.removeprefix("unet."): value for key, value in found.items()}
    theirs = {f"unet.{key}": value for key, value in convert_unet_state_dict_to_peft(inner).items()}
    same(theirs, ours)
    assert sorted(alphas.values()) == sorted(
        0.75 * value.shape[0] for key, value in ours.items() if ".lora_A." in key
    )


@pytest.mark.parametrize("name", [*UNETS, "Flux"])
def test_diffusers_loads_the_file_and_scales_each_layer(tmp_path, name):
    # diffusers gives matrices the type of the model, which would round them
    model = (flux() if name == "Flux" else unet(name)).float()
    count = len(layers(model))
    base = saved(model, tmp_path / "base.safetensors")
    given = of_peft(tmp_path / "given", layers(model), [4, 4, 3])
    expected = merged(base, given, tmp_path / "expected.safetensors")
    made = named(given, base, "lora-diffusers", tmp_path / "pytorch_lora_weights.safetensors")
    prefix = "transformer" if name == "Flux" else "unet"
    model.load_lora_adapter(made, prefix=prefix, use_safetensors=True)
    merged_by_peft = {
        module.removesuffix(".base_layer"): layer
        for module, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    assert len(merged_by_peft) == count
    for module, layer in merged_by_peft.items():
        layer.merge()
        found, wanted = layer.get_base_layer().weight, expected[f"{module}.weight"]
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6), module


@pytest.mark.parametrize("name", [*UNETS, "Flux"])
def test_peft_loads_what_was_kohya_s(tmp_path, name):
    def made() -> Any:
        return flux() if name == "Flux" else unet(name)

    base = saved(made(), tmp_path / "base.safetensors")
    left_out = ("norm_out.linear",)  # its halves are the other way round in the original
    ranks = [4] if name == "Flux" else [4, 4, 3]  # those of one weight are one in kohya's names
    given = of_peft(tmp_path / "given", layers(made(), left_out), ranks)
    kohya = named(given, base, "lora-kohya", tmp_path / "kohya.safetensors")
    again = named(kohya, base, "lora-peft", tmp_path / "again")
    same(*(load_file(each / "adapter_model.safetensors") for each in (given, again)))
    for adapter in (given, kohya, again):
        found = merged(base, adapter, tmp_path / "merged.safetensors")
        model = peft.PeftModel.from_pretrained(made(), again).merge_and_unload()
        same(found, {key: value.contiguous() for key, value in model.state_dict().items()})


def hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of such tensors in bfloat16, all of it a hole."""
    header, at = {}, 0
    for key, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    return path


@pytest.mark.parametrize("preset", ["lora-kohya", "lora-comfyui"])
def test_diffusers_takes_flux_apart_as_we_do(tmp_path, preset):
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    with torch.device("meta"):  # of the true size, which that function has in it
        model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    # and it knows no layers outside the blocks by the names of the original
    shapes = {name: shape for name, shape in layers(model).items() if "blocks." in name}
    base = hollow(
        tmp_path / "base.safetensors",
        {key: tuple(value.shape) for key, value in model.state_dict().items()},
    )
    given = of_peft(tmp_path / "given", shapes, [4])
    flat = load_file(named(given, base, preset, tmp_path / "flat.safetensors"))
    theirs = _convert_kohya_flux_lora_to_diffusers(dict(flat))
    made = named(tmp_path / "flat.safetensors", base, "lora-diffusers", tmp_path / "d.safetensors")
    ours = load_file(made)
    assert theirs.keys() == ours.keys()
    with safe_open(made, "pt") as opened:
        told = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert (told["transformer.r"], told["transformer.lora_alpha"]) == (4, 3)
    for key, value in ours.items():
        if ".lora_A." not in key:
            continue
        other = key.replace("lora_A", "lora_B")
        product = ours[other][:64].double() @ value[:, :64].double() * 0.75
        found = theirs[other][:64].double() @ theirs[key][:, :64].double()
        assert torch.allclose(found, product, rtol=1e-2, atol=1e-3), key


def test_a_dense_matrix_of_flux_is_that_of_each_part(tmp_path):
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    base = hollow(tmp_path / "base.safetensors", shapes)
    given: Tensors = {}
    for name, rows in (("double_blocks_0_txt_attn_qkv", 9216), ("single_blocks_0_linear1", 21504)):
        start = f"lora_unet_{name}"
        given[f"{start}.lora_down.weight"] = torch.randn(4, 3072)
        given[f"{start}.lora_up.weight"] = torch.randn(rows, 4)
        given[f"{start}.alpha"] = torch.tensor(4.0)
    save_file(given, tmp_path / "kohya.safetensors")
    theirs = _convert_kohya_flux_lora_to_diffusers(dict(given))
    made = named(tmp_path / "kohya.safetensors", base, "lora-diffusers", tmp_path / "d.safetensors")
    same(load_file(made), theirs)


def test_diffusers_loads_a_text_encoder_and_scales_each_layer(tmp_path):
    from diffusers.loaders.lora_base import _fetch_state_dict, _load_lora_into_text_encoder
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(1)
    sizes = CLIPTextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=12,
        num_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    model = CLIPTextModel(sizes)
    start = "" if hasattr(model, "text_model") else "text_model."  # in files it always is there
    state = {f"text_encoder.{start}{key}": value for key, value in model.state_dict().items()}
    base = tmp_path / "base.safetensors"
    save_file({key: value.contiguous() for key, value in state.items()}, base)
    shapes = {f"text_encoder.{start}{name}": shape for name, shape in layers(model).items()}
    given = of_peft(tmp_path / "given", shapes, [4, 4, 3])
    expected = merged(base, given, tmp_path / "expected.safetensors")
    made = named(given, base, "lora-diffusers", tmp_path / "pytorch_lora_weights.safetensors")
    places = ("weight_name", "local_files_only", "cache_dir", "proxies", "token", "revision")
    found, metadata = _fetch_state_dict(
        made, use_safetensors=True, force_download=False, subfolder=None, user_agent={},
        allow_pickle=False, **dict.fromkeys(places),
    )  # fmt: skip
    _load_lora_into_text_encoder(found, None, model, prefix="text_encoder", metadata=metadata)
    count = 0
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            layer.merge()
            wanted = expected[f"text_encoder.{start}{name}.weight"]
            assert torch.allclose(layer.get_base_layer().weight, wanted, rtol=0, atol=1e-6), name
            count += 1
    assert count == len(shapes)
