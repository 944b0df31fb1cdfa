"""What a configuration or metadata say of codes is held against them; what is no number or no name
of theirs is refused, for what is guessed instead may be another block.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import convert_checkpoint
from ckptconv.support.errors import MalformedCheckpoint, RefusedObject

Tensors = dict[str, torch.Tensor]


def words(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def fp8(*shape: int) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(shape).to(torch.float8_e4m3fn)


def made(folder: Path, tensors: Tensors, config: object, metadata: dict | None = None) -> Tensors:
    """What tensors become beside a config."""
    save_file(tensors, folder / "in.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "out.safetensors"
    convert_checkpoint(
        folder / "in.safetensors", out, dequantize=True, dtype="f32", verify=True, force=True
    )
    return load_file(out)


def refused(folder: Path, tensors: Tensors, config: object, metadata: dict | None = None) -> str:
    with pytest.raises((MalformedCheckpoint, RefusedObject)) as error:
        made(folder, tensors, config, metadata)
    assert not (folder / "out.safetensors").exists()
    return str(error.value)


NO_NUMBERS = ["96", 96.0, [96], {}, True]


def of_fp8(block: object) -> dict:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}


@pytest.mark.parametrize(
    "block", [*NO_NUMBERS, 96, [96], ["96", "96"], [96.0, 96.0], [0, 0], [-1, 96], [96, 96, 1]]
)
def test_a_block_that_is_not_two_numbers_is_refused(tmp_path, block):
    """192 rows in two blocks may be 96 and 96, or 128 and 64, if nothing says which."""
    tensors = {"a.weight": fp8(192, 192), "a.weight_scale_inv": torch.rand(2, 2)}
    assert "whole numbers" in refused(tmp_path, tensors, of_fp8(block))


def test_a_block_that_is_none_is_none(tmp_path):
    tensors = {"a.weight": fp8(8, 8), "a.weight_scale": torch.rand(())}
    value = made(tmp_path, tensors, of_fp8(None))["a.weight"]
    assert torch.equal(value, tensors["a.weight"].float() * tensors["a.weight_scale"])


def of_compressed(**weights: object) -> dict:
    told = {"num_bits": 4, "type": "int", "group_size": 96, **weights}
    group = {"targets": ["Linear"], "weights": told}
    told = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return {"quantization_config": told}


PACKED = {
    "a.weight_packed": words(8, 24),
    "a.weight_scale": torch.rand(8, 2),
    "a.weight_shape": torch.tensor([8, 192]),
}


@pytest.mark.parametrize("size", NO_NUMBERS)
@pytest.mark.parametrize("name", ["group_size", "num_bits"])
def test_a_size_of_compressed_tensors_that_is_no_number_is_refused(tmp_path, name, size):
    assert f"{name} is not a whole number" in refused(
        tmp_path, PACKED, of_compressed(**{name: size})
    )


@pytest.mark.parametrize("bits", [0, -4, 9, 1 << 63])
def test_bits_that_no_code_has_are_refused(tmp_path, bits):
    assert "not 1 to 8" in refused(tmp_path, PACKED, of_compressed(num_bits=bits))


@pytest.mark.parametrize("order", ["group", "GROUP", "dynamic", True])
def test_act_order_without_its_index_is_refused(tmp_path, order):
    assert "no weight_g_idx" in refused(tmp_path, PACKED, of_compressed(actorder=order))


def of_gptq(**more: object) -> dict:
    return {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 96, **more}}


GPTQ = {"a.qweight": words(24, 32), "a.qzeros": words(2, 4), "a.scales": torch.rand(2, 32).half()}


@pytest.mark.parametrize("size", NO_NUMBERS)
def test_a_group_size_of_gptq_and_awq_that_is_no_number_is_refused(tmp_path, size):
    """It was taken for 128 before, in which 192 inputs have two groups too."""
    assert "not a whole number" in refused(tmp_path, GPTQ, of_gptq(group_size=size))
    awq = {**GPTQ, "a.qweight": words(192, 4)}
    told = of_gptq(group_size=size, quant_method="awq")
    assert "not a whole number" in refused(tmp_path, awq, told)


def test_a_group_size_that_the_scales_do_not_have_is_refused(tmp_path):
    one = {**GPTQ, "a.qzeros": words(1, 4), "a.scales": torch.rand(1, 32).half()}
    assert "1 groups of 96" in refused(tmp_path, one, of_gptq())
    assert made(tmp_path, one, of_gptq(group_size=-1))["a.weight"].shape == (32, 192)


def test_modules_of_gptq_have_groups_of_their_own(tmp_path):
    """As GPTQModel's README has it: `dynamic={"+:a": {"bits": 8, "group_size": 64}}`."""
    tensors = {"a.qweight": words(64, 8), "a.qzeros": words(4, 2), "a.scales": torch.rand(4, 8),
               "a.g_idx": torch.arange(256, dtype=torch.int32) // 64}  # fmt: skip
    assert "4 groups of 128" in refused(tmp_path, tensors, of_gptq(group_size=128))
    config = of_gptq(bits=4, group_size=128, dynamic={"+:a": {"bits": 8, "group_size": 64}})
    codes = tensors["a.qweight"].T.contiguous().view(torch.uint8).float()
    zeros = tensors["a.qzeros"].view(torch.uint8).float().T + 1  # stored less one
    each = (codes.unflatten(1, (4, 64)) - zeros[:, :, None]) * tensors["a.scales"].T[:, :, None]
    assert torch.equal(made(tmp_path, tensors, config)["a.weight"], each.flatten(1))


def test_scales_of_modelopt_in_blocks_have_a_size_of_1_behind_each(tmp_path):
    """FP8_PB_WO: vLLM's `ModelOptFp8PbWoLinearMethod` reads [rows, 1, columns, 1] too."""
    codes, scales = fp8(256, 384), torch.rand(2, 1, 3, 1)
    tensors = {"a.weight": codes, "a.weight_scale": scales}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    value = made(tmp_path, tensors, {"quantization_config": config})["a.weight"]
    blocks = codes.float().unflatten(1, (3, 128)).unflatten(0, (2, 128))
    assert torch.equal(value, (blocks * scales).flatten(2, 3).flatten(0, 1))


def test_act_order_of_gptq_may_be_said_in_other_words(tmp_path):
    assert "no g_idx" in refused(tmp_path, GPTQ, of_gptq(desc_act="true"))


def test_awq_of_other_bits_is_refused(tmp_path):
    awq = {**GPTQ, "a.qweight": words(192, 4)}
    told = of_gptq(quant_method="awq", bits=8)
    assert "other than 4 bits" in refused(tmp_path, awq, told)


MLX = {
    "a.weight": words(8, 24).view(torch.uint32),
    "a.scales": torch.rand(8, 3),
    "a.biases": torch.rand(8, 3),
}


def test_a_mode_of_mlx_that_the_tensors_do_not_have_is_refused(tmp_path):
    told = {"bits": 4, "group_size": 64, "mode": "mxfp4"}
    assert "the mode affine" in refused(tmp_path, MLX, {"quantization": told})
    floats = {"a.weight": MLX["a.weight"], "a.scales": torch.ones(8, 6, dtype=torch.uint8)}
    told = {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    assert "the mode mxfp4" in refused(tmp_path, floats, {"quantization": told})


def test_the_entry_of_a_module_of_mlx_stands_for_itself(tmp_path):
    """What it leaves out is MLX's default, not what the others have: `mlx.nn.quantize`."""
    told = {"bits": 4, "group_size": 32, "mode": "mxfp4", "a": {"bits": 4, "group_size": 64}}
    value = made(tmp_path, MLX, {"quantization": told})["a.weight"]
    octets = MLX["a.weight"].view(torch.uint8)
    codes = torch.stack([octets & 15, octets >> 4], -1).reshape(8, 192).float()
    scale, bias = (MLX[f"a.{name}"].repeat_interleave(64, 1) for name in ("scales", "biases"))
    assert torch.equal(value, codes * scale + bias)


# ------------------------------------------------------------------------------------------ ComfyUI


def of_comfy(**layers: object) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"layers": layers})}


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        (torch.float8_e5m2, "float8_e4m3fn"),
        (torch.float8_e4m3fn, "float8_e5m2"),
        (torch.int8, "float8_e4m3fn"),
        (torch.float8_e4m3fn, "int8_tensorwise"),
        (torch.float8_e4m3fn, ["float8_e4m3fn"]),
        (torch.float8_e4m3fn, None),
    ],
)
def test_a_format_of_comfyui_that_the_codes_do_not_have_is_refused(tmp_path, dtype, told):
    tensors = {"a.weight": torch.ones(4, 4).to(dtype), "a.weight_scale": torch.rand(())}
    assert "ComfyUI" in refused(tmp_path, tensors, {}, of_comfy(a={"format": told}))


def test_swizzled_scales_that_are_stored_as_bytes_are_verified_too(tmp_path):
    """`--verify` stopped with a KeyError there."""
    torch.manual_seed(1)
    grid = torch.randint(100, 140, (128, 4), dtype=torch.uint8)
    tiles = grid.reshape(1, 4, 32, 1, 4).permute(0, 3, 2, 1, 4).reshape(128, 4).contiguous()
    codes = fp8(96, 128)
    for scale in (tiles, tiles.view(torch.float8_e8m0fnu)):
        tensors = {"a.weight": codes, "a.weight_scale": scale}
        value = made(tmp_path, tensors, {}, of_comfy(a={"format": "mxfp8"}))["a.weight"]
        spread = torch.exp2(grid[:96].float() - 127).repeat_interleave(32, 1)
        assert torch.equal(value, codes.float() * spread)
