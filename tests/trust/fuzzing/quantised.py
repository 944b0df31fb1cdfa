"""Small models of quantised weights, and lies about them: the fuzzer starts from both."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from fuzzing.inputs import Trial
from fuzzing.mutations import value_changed
from fuzzing.plain_weights import Tensors
from fuzzing.structures import Draw, edges, json_values, mostly, rarely


def good_folders() -> Iterator[tuple[str, Tensors, dict[str, Any]]]:
    """Small models of every scheme, with their configs, by name."""
    generator = torch.Generator().manual_seed(1)

    def octets(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def words(*shape: int) -> torch.Tensor:
        return octets(*shape[:-1], 4 * shape[-1]).view(torch.int32)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    bias = {"a.bias": scales(3)}
    fp8 = octets(20, 24).view(torch.float8_e4m3fn)
    told: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    yield "fp8", {"a.weight": fp8, "a.weight_scale_inv": scales(2, 3), **bias}, told
    rows = {"a.weight": fp8, "a.weight_scale": scales(20, 1), "a.input_scale": scales(1)}
    yield "fp8_rows", {**rows, **bias}, {"quant_method": "fbgemm_fp8"}
    weights = {"num_bits": 3, "type": "int", "group_size": 12, "symmetric": False}
    groups = {"group_0": {"targets": ["re:a.*"], "weights": weights}}
    packed = {
        "a.weight_packed": words(10, 4),
        "a.weight_scale": scales(10, 3),
        "a.weight_zero_point": words(1, 3),
        "a.weight_shape": torch.tensor([10, 36]),
    }
    told = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    yield "packed", {**packed, **bias}, told
    order = torch.arange(24).flip(0).int() // 16
    gptq = {
        "a.qweight": words(3, 16),
        "a.qzeros": words(2, 2),
        "a.scales": scales(2, 16).half(),
        "a.g_idx": order,
    }
    told = {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq"}
    yield "gptq", {**gptq, **bias}, {**told, "desc_act": True}
    awq = {**gptq, "a.qweight": words(24, 2)}
    del awq["a.g_idx"]
    yield "awq", {**awq, **bias}, {"quant_method": "awq", "bits": 4, "group_size": 16}
    experts = {"e.up_proj_blocks": octets(2, 3, 2, 16), "e.up_proj_scales": octets(2, 3, 2)}
    yield "experts", {**experts, **bias}, {"quant_method": "mxfp4"}
    nvfp4 = {
        "a.weight": octets(5, 16),
        "a.weight_scale": octets(5, 2).view(torch.float8_e4m3fn),
        "a.weight_scale_2": scales(1),
    }
    yield "nvfp4", {**nvfp4, **bias}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [9, 15]}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    nf4 = {
        "a.weight": octets(68, 1),
        "a.weight.absmax": scales(3),
        "a.weight.quant_map": scales(16),
        "a.weight.quant_state.bitsandbytes__nf4": text,
    }
    yield "nf4", {**nf4, **bias}, {"quant_method": "bitsandbytes", "load_in_4bit": True}
    mlx = {"a.weight": words(4, 12).view(torch.uint32), "a.scales": scales(4, 3)}
    mlx["a.biases"] = scales(4, 3)
    yield "mlx", {**mlx, **bias}, {"quant_method": "mlx", "bits": 4, "group_size": 32}


@st.composite
def folders(draw: Draw) -> Trial:
    """Quantised weights of which a part is missing, cut, of another type or shape, or has odd
    values; or whose config says something else.
    """
    _, tensors, told = draw(st.sampled_from([*good_folders()]))
    for _ in range(draw(mostly(st.integers(0, 1), st.integers(2, 3)))):
        key = draw(st.sampled_from(sorted(tensors)))
        made = draw(st.sampled_from(LIES))(draw, tensors[key])
        if made is None:
            del tensors[key]
        else:
            other = draw(rarely(st.just(key), st.sampled_from(sorted(tensors))))
            tensors[other] = made.clone(memory_format=torch.contiguous_format)
        if not tensors:
            tensors = {"w": torch.ones(1)}
    if draw(st.booleans()):
        chance = random.Random(draw(st.integers(0, 1 << 30)))
        told = value_changed(told, chance)
    model = draw(
        rarely(
            st.just({"torch_dtype": "bfloat16", "quantization_config": told}),
            st.one_of(st.just({"text_config": {"quantization_config": told}}), json_values()),
        )
    )
    config = json.dumps(model).encode("utf-8", "surrogatepass")
    files = {"model.safetensors": save(tensors), "config.json": config}
    return Trial(files, kind="quantised")


def _odd_values(draw: Draw, part: Any) -> Any:
    value = draw(edges)
    if part.dtype.is_floating_point:
        value = draw(st.sampled_from([float("nan"), float("inf"), -0.0, 1e-45, 3e38]))
        return torch.full(part.shape, value).to(part.dtype)
    limits = torch.iinfo(part.dtype)
    return torch.full(part.shape, min(max(value, limits.min), limits.max), dtype=part.dtype)


def _other_type(draw: Draw, part: Any) -> Any:
    names = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64",
             "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bool", "complex64")  # fmt: skip
    dtype = getattr(torch, draw(st.sampled_from(names)))
    if part.dtype.is_complex or dtype is torch.float8_e8m0fnu:
        return torch.ones(part.shape).to(dtype)
    return part.to(torch.float32).to(dtype)


LIES: tuple[Callable[[Draw, Any], Any], ...] = (
    lambda draw, part: None,
    _odd_values,
    _other_type,
    lambda draw, part: part[: draw(st.integers(0, 3))] if part.dim() else part,
    lambda draw, part: part[..., :1] if part.dim() else part,
    lambda draw, part: part.expand(2, *part.shape),
    lambda draw, part: part.flatten(),
    lambda draw, part: part.transpose(0, -1) if part.dim() else part,
    lambda draw, part: part.flatten()[:1].reshape(()) if part.numel() else part,
)
"""What may be wrong with a tensor; None: it is missing."""
