"""MLX: integers with a scale and a bias for each group, and the modes mxfp4, mxfp8, nvfp4.

Fact: `mx.dequantize` of mlx 0.32, whose values these are if it computes in float32; in bfloat16 it
rounds the product before the bias is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.support.records import NamedTuple
from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.schemes.base import CodeGroup, Facts, Scheme, Weight, decoded, grid_of

_BITS, _SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of mlx.core.quantize
_DEFAULTS = {"mode": "affine", "bits": 4, "group_size": 64}  # of mlx.core.quantize


class _Mode(NamedTuple):
    numbers: str
    bits: int
    size: int
    scale: str


_MODES = {
    "mxfp4": _Mode("e2m1", 4, 32, "float8_e8m0fnu"),
    "mxfp8": _Mode("float8_e4m3fn", 8, 32, "float8_e8m0fnu"),
    "nvfp4": _Mode("e2m1", 4, 16, "float8_e4m3fn"),
}


def _is_mlx(group: CodeGroup, _: Facts) -> bool:
    scales = group.parts.get("scales")
    known = {"weight", "scales", "biases"}
    return (
        group.name == "weight"
        and group.codes.dtype.name == "uint32"
        and len(group.codes.shape) >= 2
        and scales is not None
        and len(scales.shape) == len(group.codes.shape)
        and known.issuperset(group.parts)
    )


def _config(group: CodeGroup, facts: Facts) -> Mapping[str, Any]:
    """The mode, the bits and the group size of a module: its own, or those of all. What its own
    entry leaves out is MLX's default, not what all have (`mlx.nn.quantize`).
    """
    own = facts.config.get(group.module)
    if not isinstance(own, dict):
        return facts.config
    return {**_DEFAULTS, **own}


def _mlx(group: CodeGroup, facts: Facts) -> Weight:
    if "biases" not in group.parts:
        return _floats(group, facts)
    codes, scales = group.codes, group.need("scales")
    _refuse_other_mode(group, facts, "affine")
    bits, size = _bits(group, _config(group, facts), codes.shape[-1], scales.shape[-1])
    shape = (*codes.shape[:-1], scales.shape[-1] * size)
    block = (1, size)
    inputs = {
        "codes": codes,
        "scale": grid_of(group, "scales", shape, block),
        "bias": grid_of(group, "biases", shape, block),
    }
    how = Decoding(tuple(inputs), "uint", block, bits=bits, word=4)
    values = decoded(group, facts, how, inputs, shape, default=scales.dtype)
    return Weight("weight", values, f"MLX {bits} bit, groups of {size}")


def _refuse_other_mode(group: CodeGroup, facts: Facts, mode: str) -> None:
    """Refuse tensors of one mode that the configuration says are of another."""
    told = _config(group, facts).get("mode")
    if told is not None and told != mode:
        group.fail(f"has the tensors of the mode {mode}, and its config says another one")


def _bits(group: CodeGroup, config: Mapping[str, Any], words: int, groups: int) -> tuple[int, int]:
    """The bits of a code and the codes of a group, which fit the words of a row."""
    fitting = [
        (bits, size) for bits in _BITS for size in _SIZES if words * 32 == groups * size * bits
    ]
    told = config.get("bits"), config.get("group_size")
    if told in fitting:
        return fitting[fitting.index(told)]
    if told != (None, None) or len(fitting) != 1:
        found = " or ".join(f"{bits} bits in groups of {size}" for bits, size in fitting)
        group.refuse(
            f"has {words} words and {groups} scales in a row, which is {found or 'nothing known'}",
            hint="the config.json that belongs to it says bits and group_size",
        )
    return fitting[0]


def _floats(group: CodeGroup, facts: Facts) -> Weight:
    codes, scales = group.codes, group.need("scales")
    words, groups = codes.shape[-1], scales.shape[-1]
    fitting = [
        name for name, mode in _MODES.items() if words * 32 == groups * mode.size * mode.bits
    ]
    if scales.dtype.name != "uint8" or len(fitting) != 1:
        what = f"{words} words and {groups} scales of {scales.dtype.name} in a row"
        group.refuse(f"has {what}, which is not a mode of MLX")
    _refuse_other_mode(group, facts, fitting[0])
    mode = _MODES[fitting[0]]
    shape = (*codes.shape[:-1], groups * mode.size)
    block = (1, mode.size)
    inputs = {"codes": codes, "scale": grid_of(group, "scales", shape, block)}
    how = Decoding(
        ("codes", "scale"), mode.numbers, block, bits=mode.bits, word=4, scale_as=mode.scale
    )
    values = decoded(group, facts, how, inputs, shape)
    return Weight("weight", values, f"MLX {fitting[0]}, groups of {mode.size}")


SCHEMES = (Scheme("mlx", ("mlx",), _is_mlx, _mlx, is_certain=True),)
