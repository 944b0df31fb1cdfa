"""What quantised weights stand for, said plainly with torch: the formats once more, one element
after the other where need be, and nothing of ckptconv.

It has an opinion on the commonest schemes, of files whose config says all that it takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

HALF = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT4 = torch.cat([HALF, -HALF])


class Wrong(Exception):
    """Codes, scales and config do not fit: no value can be told."""


def other_value(source: Path, output: Path) -> str | None:
    """What is wrong with a dequantised `output` in float32 of the folder `source`; None where
    nothing is, or nothing can be told.
    """
    files = sorted(source.glob("*.safetensors"))
    found = load_file(output)
    tensors: Tensors = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except Exception:  # a header that torch does not read: the tool's own tests are for it
            return None
    config = _config(source)
    if config is None:
        return None
    for key in tensors:
        for name, work in READERS.items():
            prefix, is_there, rest = key.rpartition(name)
            if not is_there or rest:
                continue
            try:
                made = work(prefix, tensors, config)
            except Exception as error:  # torch refuses in many ways what does not fit
                return f"{key} was dequantised: {type(error).__name__}: {error}"
            if made is None:
                continue
            new, value = made
            if new not in found:
                return f"{new} is not there"
            if not _is_same(found[new], value):
                return f"{new} has other values"
    return None


def _config(source: Path) -> Config | None:
    """The quantization config; None where it cannot be told."""
    path = source / "config.json"
    try:
        told = json.loads(path.read_bytes())["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return told if isinstance(told, dict) and told else None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    nan = one.isnan()
    return bool(torch.equal(nan, other.isnan())) and torch.equal(
        one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    )


def _part(tensors: Tensors, key: str) -> torch.Tensor:
    if key not in tensors:
        raise Wrong(f"without {key}")
    return tensors[key]


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise Wrong(what)


def _fields(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of the words of each row, end to end from the lowest bit on."""
    octets = stored.flatten().view(torch.uint8).reshape(*stored.shape[:-1], 4 * stored.shape[-1])
    stream = (octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    whole = stream[..., : stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits)).int()
    return (whole << torch.arange(bits, dtype=torch.int32)).sum(-1)


def _low_first(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


Made = tuple[str, torch.Tensor] | None


def _fp8(prefix: str, tensors: Tensors, config: Config) -> Made:
    key = f"{prefix}weight"
    codes, scale = tensors[key], tensors.get(f"{key}_scale_inv")
    block = config.get("weight_block_size")
    if not codes.dtype.is_floating_point or codes.dtype.itemsize > 1 or scale is None:
        return None
    if codes.dim() != 2 or scale.dim() != 2 or scale.dtype is not torch.float32 or block is None:
        return None
    sizes = block if isinstance(block, list) else []
    _require(len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes), f"block {block}")
    if scale.numel() == 1:
        return key, codes.float() * scale
    grid = [-(-size // n) for size, n in zip(codes.shape, sizes, strict=True)]
    _require(list(scale.shape) == grid, f"{list(scale.shape)} scales for a grid of {grid}")
    rows, columns = (torch.arange(size) // n for size, n in zip(codes.shape, sizes, strict=True))
    return key, codes.float() * scale[rows][:, columns]


def _packed(prefix: str, tensors: Tensors, config: Config) -> Made:
    codes, shape = tensors[f"{prefix}weight_packed"], _part(tensors, f"{prefix}weight_shape")
    scale = _part(tensors, f"{prefix}weight_scale")
    zero = tensors.get(f"{prefix}weight_zero_point")
    groups = config.get("config_groups")
    told = [item for item in groups.values() if isinstance(item, dict)] if _is(groups) else []
    weights = told[0].get("weights") if len(told) == 1 else None
    if codes.dtype is not torch.int32 or not _is(weights) or f"{prefix}weight_g_idx" in tensors:
        return None
    assert isinstance(weights, dict)
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if bits is None or size is None or codes.dim() != 2:
        return None
    _require(type(bits) is int and 1 <= bits <= 8, f"num_bits {bits}")
    _require(shape.numel() == 2 and not shape.is_floating_point(), "weight_shape")
    rows, columns = map(int, shape)
    _require(rows == codes.shape[0] and columns >= 0, f"weight_shape {rows}, {columns}")
    _require(codes.shape[1] == -(-columns * bits // 32), f"{codes.shape[1]} words")
    if scale.dim() != 2 or type(size) is not int or size <= 0 or scale.shape == (1, 1):
        return None
    count = -(-columns // size)
    _require(scale.shape == (rows, count) and scale.is_floating_point(), "scales")
    index = torch.arange(columns) // size
    number = _fields(codes, bits)[:, :columns] - (1 << bits - 1)
    if zero is not None:
        _require(zero.dtype is torch.int32, "zeros")
        _require(zero.shape == (-(-rows * bits // 32), count), "zeros")
        number = number - (_fields(zero.T, bits)[:, :rows].T - (1 << bits - 1))[:, index]
    return f"{prefix}weight", number.float() * scale.float()[:, index]


def _is(value: object) -> bool:
    return isinstance(value, dict)


def _gptq(prefix: str, tensors: Tensors, config: Config) -> Made:
    codes = tensors[f"{prefix}qweight"]
    zero, scale = _part(tensors, f"{prefix}qzeros"), _part(tensors, f"{prefix}scales")
    index = tensors.get(f"{prefix}g_idx")
    bits, size = config.get("bits"), config.get("group_size")
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("quant_method") != "gptq" or version not in ("gptq", "gptq_v2"):
        return None
    if bits != 4 or index is None:
        return None
    _require(codes.dtype is zero.dtype is torch.int32, "words")
    _require(codes.dim() == zero.dim() == scale.dim() == 2, "dimensions")
    inputs, outputs = 8 * codes.shape[0], codes.shape[1]
    _require(index.shape == (inputs,) and not index.is_floating_point(), "g_idx")
    _require(scale.shape[1] == outputs and zero.shape[1] * 8 == outputs, "outputs")
    _require(scale.shape[0] == zero.shape[0], "groups")
    if inputs:
        _require(int(index.min()) >= 0 and int(index.max()) < scale.shape[0], "a group beyond")
    if size is not None:
        _require(type(size) is int, f"group_size {size}")
    number = _fields(codes.T, 4)
    zeros = _fields(zero, 4).T
    if version == "gptq":
        zeros = zeros + 1 & 15
    groups = index.long()
    value = (number - zeros[:, groups]).float() * scale.float().T[:, groups]
    return f"{prefix}weight", value


def _experts(prefix: str, tensors: Tensors, config: Config) -> Made:
    codes = tensors[f"{prefix}_blocks"]
    scale = _part(tensors, f"{prefix}_scales")
    if codes.dtype is not torch.uint8 or scale.dtype is not torch.uint8 or codes.dim() != 4:
        return None
    _require(codes.shape[-1] == 16 and scale.shape == codes.shape[:3], "scales")
    power = torch.exp2(scale.double() - 127).float().masked_fill(scale == 255, torch.nan)
    value = FLOAT4[_low_first(codes).long()] * power[..., None]
    return prefix, value.flatten(-2).transpose(1, 2)


def _nvfp4(prefix: str, tensors: Tensors, config: Config) -> Made:
    codes = tensors[f"{prefix}weight"]
    scale, second = (tensors.get(f"{prefix}weight_scale{end}") for end in ("", "_2"))
    if config.get("quant_method") != "modelopt" or codes.dtype is not torch.uint8:
        return None
    if scale is None or second is None or scale.dtype is not torch.float8_e4m3fn:
        return None
    _require(second.numel() == 1 and second.is_floating_point(), "weight_scale_2")
    if codes.dim() < 2:
        return None
    _require(scale.shape == (*codes.shape[:-1], -(-codes.shape[-1] // 8)), "scales")
    each = (scale.float() * second.float().reshape(())).repeat_interleave(16, -1)
    number = FLOAT4[_low_first(codes).long()]
    return f"{prefix}weight", number * each[..., : number.shape[-1]]


def _bitsandbytes(prefix: str, tensors: Tensors, config: Config) -> Made:
    key = f"{prefix}weight"
    state = [name for name in tensors if name.startswith(f"{key}.quant_state.bitsandbytes__")]
    if len(state) != 1 or tensors[key].dtype is not torch.uint8:
        return None
    told = json.loads(bytes(tensors[state[0]].tolist()))
    absmax, table = _part(tensors, f"{key}.absmax"), _part(tensors, f"{key}.quant_map")
    if absmax.dtype is not torch.float32:
        return None
    shape, size = told["shape"], told["blocksize"]
    count = torch.Size(shape).numel()
    codes = tensors[key].flatten()
    _require(codes.numel() == -(-count // 2) and table.shape == (16,), "codes")
    _require(absmax.shape == (-(-count // size),), "absmax")
    nibbles = torch.stack([codes >> 4, codes & 15], -1).flatten()[:count]
    spread = absmax.repeat_interleave(size)[:count]
    return key, (table[nibbles.long()] * spread).reshape(shape)


def _plain(prefix: str, tensors: Tensors, config: Config) -> Made:
    """A weight of float32 has the value that it had."""
    key = f"{prefix}bias"
    return (key, tensors[key]) if tensors[key].dtype is torch.float32 else None


def _weights(prefix: str, tensors: Tensors, config: Config) -> Made:
    for work in (_fp8, _nvfp4, _bitsandbytes):
        if (made := work(prefix, tensors, config)) is not None:
            return made
    return None


READERS: dict[str, Callable[[str, Tensors, Config], Made]] = {
    "weight": _weights,
    "weight_packed": _packed,
    "qweight": _gptq,
    "_blocks": _experts,
    "bias": _plain,
}
