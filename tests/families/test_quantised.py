"""Random quantised weights become what the framework's own code makes of them, bit for bit.

Codes are random bytes, so that all of them occur; sizes are odd where the format lets them be;
scales are ordinary, tiny, huge, infinite and NaN. Each checkpoint is converted to float32, bfloat16
and float16, with ``--verify``. Where a framework rounds more often (docs/quantised.md), its own
code is asked in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import convert_checkpoint

pytestmark = [pytest.mark.families, pytest.mark.filterwarnings("ignore")]

Tensors = dict[str, torch.Tensor]
F8 = torch.float8_e4m3fn
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes would compile for a minute
        yield


def octets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> torch.Tensor:
    return octets(*shape[:-1], 4 * shape[-1]).view(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scales of all sizes, the last of them extreme."""
    made = torch.randn(shape) * torch.exp2(torch.randint(-40, 20, shape).float())
    flat = made.view(-1)
    extreme = torch.tensor([float("nan"), float("inf"), 3e38, 1e-45, -0.0, 1e-39])
    count = min(len(extreme), len(flat) // 4)
    if count:
        flat[-count:] = extreme[:count]
    return made.to(dtype)


def powers(*shape: int) -> torch.Tensor:
    """E8M0 but for 255, which frameworks that read it from uint8 take for infinity."""
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits, but for those of NaN."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    integer = torch.int32 if one.dtype.itemsize == 4 else torch.int16
    one, other = (part.contiguous().view(integer).masked_fill(nan, 0) for part in (one, other))
    return torch.equal(one, other)


def check(
    folder: Path,
    tensors: Tensors,
    expected: Tensors,
    config: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    source = folder / "model.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, source, metadata)
    if config is not None:
        told = {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(told))
    check_file(source, expected)


def check_file(source: Path, expected: Tensors, dtypes: tuple[str, ...] = tuple(DTYPES)) -> None:
    for word in dtypes:
        if word == "f16" and any(value.dtype is torch.bfloat16 for value in expected.values()):
            continue
        out = source.parent / f"{word}.safetensors"
        out.unlink(missing_ok=True)
        convert_checkpoint(source, out, dequantize=True, dtype=word, verify=True)
        found = load_file(out)
        assert set(found) == set(expected)
        for key, value in expected.items():
            made, wanted = found[key], value.to(DTYPES[word])
            if value.dtype is torch.bfloat16:  # the framework gives no more bits of it
                made, wanted = made.to(torch.bfloat16), wanted.to(torch.bfloat16)
            assert made.dtype is wanted.dtype and is_same(made, wanted), (word, key)


# ------------------------------------------------------------------------------ compressed-tensors


def decompressed(form: str, tensors: Tensors, **weights: Any) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)
    return compressor.decompress(tensors, scheme)["weight"]


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def check_compressed(folder: Path, form: str, tensors: Tensors, **weights: Any) -> None:
    expected = decompressed(form, tensors, **weights)
    named = {f"model.layers.0.mlp.up_proj.{key}": value for key, value in tensors.items()}
    named["lm_head.weight"] = torch.randn(3, 2)
    wanted = {
        "model.layers.0.mlp.up_proj.weight": expected,
        "lm_head.weight": named["lm_head.weight"],
    }
    check(folder, named, wanted, compressed_config(form, **weights))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("columns", "size"), [(96, 32), (40, 8), (37, None)])
def test_packed_integers(tmp_path, bits, is_symmetric, columns, size):
    rows = 45
    groups = columns // size if size else 1
    tensors = {
        "weight_packed": words(rows, -(-columns * bits // 32)),
        "weight_scale": scales(rows, groups),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words(-(-rows * bits // 32), groups)
    told = {"num_bits": bits, "type": "int", "symmetric": is_symmetric}
    how = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    check_compressed(tmp_path, "pack-quantized", tensors, **told, **how)


@pytest.mark.parametrize("rows", [1, 50, 300])
@pytest.mark.parametrize(
    ("how", "shape"),
    [
        ({"strategy": "tensor"}, lambda rows, columns: (1,)),
        ({"strategy": "channel"}, lambda rows, columns: (rows, 1)),
        ({"strategy": "group", "group_size": 16}, lambda rows, columns: (rows, columns // 16)),
        (
            {"strategy": "block", "block_structure": [128, 128]},
            lambda rows, columns: (-(-rows // 128), -(-columns // 128)),
        ),
    ],
    ids=["tensor", "channel", "group", "block"],
)
@pytest.mark.parametrize("kind", ["float", "int"])
def test_codes_of_a_byte(tmp_path, rows, how, shape, kind):
    columns = 208
    codes = octets(rows, columns).view(F8 if kind == "float" else torch.int8)
    tensors = {"weight": codes, "weight_scale": scales(*shape(rows, columns))}
    form = f"{kind}-quantized"
    check_compressed(tmp_path, form, tensors, num_bits=8, type=kind, symmetric=True, **how)


def test_codes_of_a_byte_with_zeros(tmp_path):
    tensors = {
        "weight": octets(50, 37).view(torch.int8),
        "weight_scale": scales(50, 1),
        "weight_zero_point": octets(50, 1).view(torch.int8),
    }
    how = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
    check_compressed(tmp_path, "int-quantized", tensors, **how)


FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
MX = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def test_nvfp4(tmp_path):
    for rows, columns, second in ((5, 48, 300.0), (1, 16, 1e-3), (130, 208, 2e6)):
        tensors = {
            "weight_packed": octets(rows, columns // 2),
            "weight_scale": octets(rows, columns // 16).view(F8),
            "weight_global_scale": torch.tensor([second]),
        }
        how = {**FLOAT4, "strategy": "tensor_group", "group_size": 16}
        check_compressed(tmp_path, "nvfp4-pack-quantized", tensors, **how)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_microscaling(tmp_path, bits):
    for rows, columns in ((5, 96), (1, 32), (33, 288)):
        codes = octets(rows, columns * bits // 8)
        packed = {"weight": codes.view(F8)} if bits == 8 else {"weight_packed": codes}
        tensors = {**packed, "weight_scale": powers(rows, columns // 32)}
        form = "mxfp8-quantized" if bits == 8 else f"mxfp{bits}-pack-quantized"
        check_compressed(tmp_path, form, tensors, **MX, num_bits=bits)


# ------------------------------------------------------------------------- transformers, DeepSeek


def fp8_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **more}


@pytest.mark.parametrize("as_type", ["float32", "bfloat16", "float8_e8m0fnu", "power"])
@pytest.mark.parametrize("shape", [(128, 128), (576, 200), (192, 256), (1, 513), (129, 1)])
def test_fp8_in_blocks(tmp_path, as_type, shape):
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    grid = tuple(-(-size // 128) for size in shape)
    if as_type == "power":
        scale = torch.exp2(powers(*grid).float() - 127)
    elif as_type == "float8_e8m0fnu":
        scale = octets(*grid).view(torch.float8_e8m0fnu)
    else:
        scale = scales(*grid, dtype=getattr(torch, as_type))
    tensors = {"a.weight": octets(*shape).view(F8), "a.weight_scale_inv": scale}
    oracle = FP8BlockDequantizer(dtype=torch.float32)
    expected = oracle.process(dict(tensors))
    check(tmp_path, tensors, expected, fp8_config(weight_block_size=[128, 128]))


def of_transformers(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)


@pytest.mark.parametrize("experts", [1, 3])
def test_fp8_experts_in_blocks(tmp_path, experts):
    base = "model.layers.0.mlp.experts"
    tensors, expected = {}, {}
    for name, shape in (("gate_up_proj", (256, 128)), ("down_proj", (128, 384))):
        codes = octets(experts, *shape).view(F8)
        scale = scales(experts, shape[0] // 128, shape[1] // 128)
        tensors |= {f"{base}.{name}": codes, f"{base}.{name}_scale_inv": scale}
        expected[f"{base}.{name}"] = of_transformers(codes, scale)
    check(tmp_path, tensors, expected, fp8_config(weight_block_size=[128, 128]))


def test_fp8_experts_whose_blocks_are_cut_are_those_of_their_slices(tmp_path):
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    codes, scale = octets(3, 200, 130).view(F8), scales(3, 2, 2)
    oracle = FP8BlockDequantizer(dtype=torch.float32)
    slices = [oracle._create_dequantized_weight(*pair) for pair in zip(codes, scale, strict=True)]
    tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    expected = {"experts.gate_up_proj": torch.stack(slices)}
    check(tmp_path, tensors, expected, fp8_config(weight_block_size=[128, 128]))


def test_fp4_of_deepseek(tmp_path):
    codes = octets(6, 48).view(torch.int8)
    scale = powers(6, 3).view(torch.float8_e8m0fnu)
    tensors = {"a.weight": codes, "a.scale": scale}
    dense = octets(256, 128).view(F8), scales(2, 1)
    tensors |= {"b.weight": dense[0], "b.scale": dense[1]}
    expected = {"a.weight": of_transformers(codes, scale), "b.weight": of_transformers(*dense)}
    check(tmp_path, tensors, expected, fp8_config(weight_block_size=[128, 128]))


def test_mxfp8(tmp_path):
    codes, scale = octets(7, 96).view(F8), powers(7, 3)
    for name in ("weight_scale", "weight_scale_inv"):
        tensors = {"a.weight": codes, f"a.{name}": scale}
        config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
        check(tmp_path, tensors, {"a.weight": of_transformers(codes, scale)}, config)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("kind", [F8, torch.float8_e5m2])
def test_fp8_by_tensor_and_by_rows(tmp_path, name, kind):
    for shape in ((), (1,), (1, 1), (64, 1), (64,)):
        codes, scale = octets(64, 64).view(kind), scales(*shape)
        rows = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
        tensors = {"a.weight": codes, f"a.{name}": scale, "a.input_scale": torch.ones(())}
        expected = {"a.weight": codes.float() * rows}
        check(tmp_path, tensors, expected, fp8_config(weight_block_size=None))


@pytest.mark.parametrize("shape", [(2, 48, 32), (2, 32, 32), (1, 32, 32), (32, 32, 32)])
def test_fp8_experts_of_llama_4(tmp_path, shape):
    """Stored as they multiply: a scale for each column (FBGEMM), or for each expert."""
    experts, _, columns = shape
    codes = octets(*shape).view(F8)
    for size in ((experts, 1, columns), (experts, 1, 1)):
        scale = scales(*size)
        tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale": scale}
        expected = {"experts.gate_up_proj": codes.float() * scale}
        check(tmp_path, tensors, expected, {"quant_method": "fbgemm_fp8"})
    tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale": scale.reshape(-1)}
    check(tmp_path, tensors, expected, {"quant_method": "fbgemm_fp8"})


def test_experts_of_gpt_oss(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    base, tensors, expected = "model.layers.0.mlp.experts", {}, {}
    for name, rows, blocks in (("gate_up_proj", 10, 3), ("down_proj", 7, 1)):
        codes, scale = octets(3, rows, blocks, 16), powers(3, rows, blocks)
        bias = torch.randn(3, rows)
        tensors |= {
            f"{base}.{name}_blocks": codes,
            f"{base}.{name}_scales": scale,
            f"{base}.{name}_bias": bias,
        }
        expected[f"{base}.{name}"] = convert_moe_packed_tensors(codes, scale, dtype=torch.float32)
        expected[f"{base}.{name}_bias"] = bias
    check(tmp_path, tensors, expected, {"quant_method": "mxfp4"})


# ------------------------------------------------------------------------------------ bitsandbytes


def of_bitsandbytes(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """By the generic kernels: that for CPUs is wrong where blocks do not divide the columns."""
    from bitsandbytes.backends.default import ops

    absmax = state.absmax
    if state.nested:
        inner = state.state2
        absmax = ops._dequantize_blockwise_compute(
            absmax, inner.absmax, inner.code, inner.blocksize, torch.float32
        )
        absmax = absmax + state.offset
    return ops._dequantize_4bit_compute(
        codes.view(torch.uint8).reshape(-1),
        absmax,
        state.code,
        state.blocksize,
        tuple(state.shape),
        torch.float32,
    )


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "size"), [((24, 96), 64), ((64, 512), 64), ((7, 9), 128)])
def test_four_bits_of_bitsandbytes(tmp_path, kind, is_nested, storage, shape, size):
    from bitsandbytes.functional import quantize_4bit

    if storage != "uint8" and shape == (7, 9):
        shape = (7, 16)
    weight = torch.randn(shape) * torch.exp2(torch.randint(-20, 9, shape).float())
    codes, state = quantize_4bit(
        weight,
        blocksize=size,
        quant_type=kind,
        compress_statistics=is_nested,
        quant_storage=getattr(torch, storage),
    )
    codes.view(torch.uint8).random_(0, 256)
    if not is_nested:
        state.absmax = scales(*state.absmax.shape)
    packed = state.as_dict(packed=True)
    tensors = {"a.weight": codes, "a.bias": torch.randn(3)}
    tensors |= {f"a.weight.{key}": value for key, value in packed.items()}
    expected = {"a.weight": of_bitsandbytes(codes, state), "a.bias": tensors["a.bias"]}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check(tmp_path, tensors, expected, config)


def test_int8_of_bitsandbytes(tmp_path):
    from bitsandbytes.functional import int8_vectorwise_dequant

    codes, scale = octets(33, 17).view(torch.int8), scales(33)
    tensors = {
        "a.weight": codes,
        "a.SCB": scale,
        "a.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    expected = {"a.weight": int8_vectorwise_dequant(codes, scale)}
    check(tmp_path, tensors, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


# ----------------------------------------------------------------------------------------- torchao


def check_torchao(folder: Path, weight: torch.Tensor, expected: torch.Tensor) -> None:
    """In safetensors and in a torch file."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = {"a.weight": weight, "a.bias": torch.randn(3)}
    wanted = {"a.weight": expected, "a.bias": state["a.bias"]}
    tensors, metadata = flatten_tensor_state_dict(state)
    check(folder, tensors, wanted, metadata=metadata)
    torch.save(state, folder / "model.pt")
    check_file(folder / "model.pt", wanted)


def quantised(config: Any, *shape: int) -> torch.Tensor:
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float()))
    quantize_(layer, config)
    return layer.weight.detach()


@pytest.mark.parametrize("shape", [(5, 64), (33, 96)])
@pytest.mark.parametrize("kind", ["int8", "float8", "float8 by tensor"])
def test_codes_of_a_byte_of_torchao(tmp_path, kind, shape):
    from torchao import quantization as ao

    config = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "float8": ao.Float8WeightOnlyConfig,
        "float8 by tensor": ao.Float8WeightOnlyConfig,
    }[kind]()
    weight = quantised(config, *shape)
    check_torchao(tmp_path, weight, weight.dequantize(output_dtype=torch.float32))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("of", ["group", "row"])
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
def test_intx_of_torchao(tmp_path, bits, of, mapping):
    from torchao import quantization as ao
    from torchao.quantization.quant_primitives import MappingType

    granularity = ao.PerGroup(32) if of == "group" else ao.PerAxis(0)
    config = ao.IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"),
        granularity=granularity,
        mapping_type=MappingType[mapping],
    )
    weight = quantised(config, 5, 96)
    check_torchao(tmp_path, weight, weight.dequantize())


@pytest.mark.parametrize(
    ("shape", "is_swizzled"),
    [
        ((5, 64), False),
        ((130, 160), False),
        ((2, 3, 64), False),
        ((5, 64), True),
        ((130, 160), True),
    ],
)
@pytest.mark.parametrize("kind", [F8, torch.float8_e5m2, torch.float4_e2m1fn_x2, "nvfp4"])
def test_micro_of_torchao(tmp_path, kind, is_swizzled, shape):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    weight = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())
    if kind == "nvfp4":
        made = NVFP4Tensor.to_nvfp4(
            weight,
            per_tensor_scale=torch.tensor(0.0123),
            is_swizzled_scales=is_swizzled,
        )
    else:
        made = MXTensor.to_mx(weight, kind, is_swizzled_scales=is_swizzled)
    check_torchao(tmp_path, made, made.dequantize(torch.float32))


# --------------------------------------------------------------------------------------------- MLX


def to_mlx(value: torch.Tensor) -> Any:
    import mlx.core as mx
    import numpy as np

    return mx.array(np.ascontiguousarray(value.numpy()))


def of_mlx(codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, **how: Any):
    import mlx.core as mx
    import numpy as np

    arrays = [to_mlx(codes.view(torch.uint32)), to_mlx(scale)]
    if bias is not None:
        arrays.append(to_mlx(bias))
    else:
        how["dtype"] = mx.float32
    made = mx.dequantize(*arrays, **how, stream=mx.cpu)
    return torch.from_numpy(np.array(made))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("outer", [(7,), (3, 5)], ids=["rows", "experts"])
def test_affine_of_mlx(tmp_path, bits, size, outer):
    codes = words(*outer, 3 * size * bits // 32)
    scale, bias = scales(*outer, 3), torch.randn(*outer, 3)
    tensors = {
        "a.weight": codes.view(torch.uint32),
        "a.scales": scale,
        "a.biases": bias,
        "a.bias": torch.randn(7),
    }
    expected = {
        "a.weight": of_mlx(codes, scale, bias, bits=bits, group_size=size),
        "a.bias": tensors["a.bias"],
    }
    told = {"bits": 4, "group_size": 64, "mode": "affine", "a": {"bits": bits, "group_size": size}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": told}))
    check(tmp_path, tensors, expected, metadata={"format": "mlx"})


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_floats_of_mlx(tmp_path, mode):
    size, bits = (16 if mode == "nvfp4" else 32), (8 if mode == "mxfp8" else 4)
    codes = words(7, 4 * size * bits // 32)
    scale = octets(7, 4) if mode == "nvfp4" else powers(7, 4)
    tensors = {"a.weight": codes.view(torch.uint32), "a.scales": scale}
    expected = {"a.weight": of_mlx(codes, scale, None, bits=bits, group_size=size, mode=mode)}
    told = {"bits": bits, "group_size": size, "mode": mode}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": told}))
    check(tmp_path, tensors, expected, metadata={"format": "mlx"})


# ---------------------------------------------------------------------------- ComfyUI and ModelOpt


def of_comfyui(layout: str, codes: torch.Tensor, scale: torch.Tensor, **more: Any) -> torch.Tensor:
    """By comfy-kitchen, in float32: in the type of the output it rounds scales first."""
    from comfy_kitchen import tensor as layouts

    with comfy_kitchen_on_cpu():
        kind = getattr(layouts, layout)
        params = kind.Params(
            scale=scale, orig_dtype=torch.float32, orig_shape=tuple(codes.shape), **more
        )
        return kind.dequantize(codes, params)


def comfy_kitchen_on_cpu() -> Any:
    import comfy_kitchen

    return comfy_kitchen.use_backend("eager")


def check_comfyui(folder: Path, kind: str, tensors: Tensors, expected: torch.Tensor) -> None:
    """Told by the metadata of the file, and by a tensor in each layer."""
    layer = "model.diffusion_model.blocks.0.proj"
    named = {f"{layer}.{name}": value for name, value in tensors.items()}
    named[f"{layer}.bias"] = torch.randn(3)
    wanted = {f"{layer}.weight": expected, f"{layer}.bias": named[f"{layer}.bias"]}
    told = {"format": kind}
    layers = {"layers": {layer.removeprefix("model.diffusion_model."): told}}
    check(folder, named, wanted, metadata={"_quantization_metadata": json.dumps(layers)})
    text = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    check(folder, named | {f"{layer}.comfy_quant": text}, wanted)


@pytest.mark.parametrize("kind", [F8, torch.float8_e5m2])
def test_fp8_of_comfyui(tmp_path, kind):
    for shape in ((5, 7), (96, 64)):
        codes, scale = octets(*shape).view(kind), scales(1).reshape(())
        expected = of_comfyui("TensorCoreFP8Layout", codes, scale)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}
        check_comfyui(tmp_path, str(kind).removeprefix("torch."), tensors, expected)
        old = {"a.weight": codes, "a.scale_weight": scale, "scaled_fp8": torch.zeros(0, dtype=kind)}
        check(tmp_path, old, {"a.weight": expected})


@pytest.mark.parametrize("rows", [1, 48, 33])
def test_int8_of_comfyui(tmp_path, rows):
    codes = octets(rows, 40).view(torch.int8)
    for shape in ((), (rows, 1)):
        scale = scales(*shape)
        expected = of_comfyui("TensorWiseINT8Layout", codes, scale)
        tensors = {"weight": codes, "weight_scale": scale}
        check_comfyui(tmp_path, "int8_tensorwise", tensors, expected)


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (144, 208), (128, 64)])
def test_nvfp4_of_comfyui(tmp_path, shape):
    rows, columns = shape
    tiles = -(-rows // 128) * 128, -(-columns // 64) * 4
    for second in (1e-3, 3e8):
        codes, scale = octets(rows, columns // 2), octets(*tiles).view(F8)
        whole = torch.tensor(second)
        expected = of_comfyui("TensorCoreNVFP4Layout", codes, whole, block_scale=scale)
        tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": whole}
        check_comfyui(tmp_path, "nvfp4", tensors, expected)


@pytest.mark.parametrize("shape", [(32, 32), (96, 160), (160, 288)])
def test_mxfp8_of_comfyui(tmp_path, shape):
    rows, columns = shape
    tiles = -(-rows // 128) * 128, -(-columns // 128) * 4
    codes, scale = octets(*shape).view(F8), powers(*tiles).clamp(min=1)  # it reads 0 as 0
    expected = of_comfyui("TensorCoreMXFP8Layout", codes, scale.view(torch.float8_e8m0fnu))
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        check_comfyui(tmp_path, "mxfp8", {"weight": codes, "weight_scale": stored}, expected)


@pytest.mark.parametrize("shape", [(5, 48), (1, 16), (130, 208), (3, 7, 64)])
def test_nvfp4_of_modelopt(tmp_path, shape):
    """But for the code of -0, which it reads as 0."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    nibbles = octets(*shape) & 15
    nibbles[nibbles == 8] = 0
    codes = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).contiguous()
    scale = octets(*shape[:-1], shape[-1] // 16).view(F8)
    for second in (0.00123, 4e5):
        whole = torch.tensor(second)
        made = NVFP4QTensor(torch.Size(shape), torch.float32, codes)
        block = {-1: 16}
        value = made.dequantize(scale=scale, double_scale=whole, block_sizes=block)
        tensors = {
            "a.weight": codes,
            "a.weight_scale": scale,
            "a.weight_scale_2": whole,
            "a.input_scale": torch.ones(()),
        }
        told = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        check(tmp_path, tensors, {"a.weight": value}, told)


def test_fp8_of_modelopt(tmp_path):
    from modelopt.torch.quantization.qtensor import FP8QTensor

    codes, scale = octets(33, 48).view(F8), scales(1).reshape(())
    value = FP8QTensor(torch.Size((33, 48)), torch.float32, codes).dequantize(scale=scale)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.ones(())}
    told = {"quant_method": "modelopt", "quant_algo": "FP8"}
    check(tmp_path, tensors, {"a.weight": value}, told)


# ------------------------------------------------------------------------------------ GPTQ and AWQ


def fields(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of the words of each row, by the definition: end to end from the lowest bit."""
    octet = stored.contiguous().view(torch.uint8)
    flat = octet[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    stream = flat.flatten(-2)
    whole = stream[..., : stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits)).int()
    return (whole << torch.arange(bits, dtype=torch.int32)).sum(-1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("order", ["in order", "act order", "no index"])
@pytest.mark.parametrize(("inputs", "size"), [(160, 64), (96, 32), (64, -1)])
def test_gptq(tmp_path, bits, version, order, inputs, size):
    """By a statement of the format: gptqmodel needs a compiler to be installed."""
    outputs = 64
    group = inputs if size == -1 else size
    groups = -(-inputs // group)
    index = torch.arange(inputs) // group
    if order == "act order":
        index = index[torch.randperm(inputs)]
    tensors = {
        "a.qweight": words(inputs * bits // 32, outputs),
        "a.qzeros": words(groups, outputs * bits // 32),
        "a.scales": scales(groups, outputs, dtype=torch.float16),
    }
    if order != "no index":
        tensors["a.g_idx"] = index.int()
    code = fields(tensors["a.qweight"].T, bits)
    zero = fields(tensors["a.qzeros"], bits).T
    if version != "gptq_v2":
        zero = zero + 1 & (1 << bits) - 1
    value = (code - zero[:, index]).float() * tensors["a.scales"].T.float()[:, index]
    config = {"quant_method": "gptq", "bits": bits, "group_size": size}
    if version:
        config["checkpoint_format"] = version
    check(tmp_path, tensors, {"a.weight": value}, config)


@pytest.mark.parametrize(("inputs", "size"), [(96, 32), (64, -1), (128, 128)])
def test_awq(tmp_path, inputs, size):
    """By autoawq's statement of the order (awq/utils/packing_utils.py of 0.2.9)."""
    outputs = 40
    groups = 1 if size == -1 else inputs // size
    tensors = {
        "a.qweight": words(inputs, outputs // 8),
        "a.qzeros": words(groups, outputs // 8),
        "a.scales": scales(groups, outputs, dtype=torch.float16),
    }
    order = torch.arange(outputs).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()
    code, zero = (fields(tensors[f"a.{name}"], 4)[:, order] for name in ("qweight", "qzeros"))
    index = torch.arange(inputs) // (inputs // groups)
    value = (code - zero[index]).float() * tensors["a.scales"].float()[index]
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    check(tmp_path, tensors, {"a.weight": value.T}, config)


# -------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize(
    "kind",
    [
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
    ],
)
def test_gguf(tmp_path, kind):
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize

    number = GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[number]
    raw = octets(7, 3 * size).numpy()
    for shape in ((7, 3 * size), (7, 1, 3 * size)):
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tensor("blk.0.ffn_up.weight", raw.reshape(shape), raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with np.errstate(all="ignore"):
            value = torch.from_numpy(dequantize(raw, number)).reshape(*shape[:-1], 3 * elements)
        check_file(tmp_path / "model.gguf", {"blk.0.ffn_up.weight": value})
