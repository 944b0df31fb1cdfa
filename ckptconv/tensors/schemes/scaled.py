"""Codes of one byte each beside a scale for the tensor, for rows, groups or blocks: fp8 and int8 of
Hugging Face, DeepSeek, compressed-tensors, FBGEMM, Quark and ModelOpt; FP4 of DeepSeek V4, Quark
and gpt-oss.

Facts: transformers' finegrained_fp8 and, for gpt-oss, `convert_moe_packed_tensors`;
compressed_tensors' naive_quantized; Quark 0.13's Pack_fp4 and to_e8m0_uint8. A block size is that
of the configuration: transformers 5.23 divides the rows by those of the grid, and reads a weight of
192 rows in blocks of 96.
"""

from __future__ import annotations

from math import prod

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import BY_NAME, E8M0, FLOAT8
from ckptconv.tensors.refs import Shape
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    as_scale,
    block_of,
    decoded,
    grid_of,
    group_size,
    told_block,
    weights_config,
)
from ckptconv.tensors.views import reshaped, transposed

_INT8 = BY_NAME["int8"]
_MX = 32  # elements of a scale in the Microscaling formats


def scale_name(group: CodeGroup) -> str | None:
    """The name of the scale of codes that are called as the weight is."""
    name = group.name
    for known in (f"{name}_scale_inv", f"{name}_scale", f"scale_{name}", f"qscale_{name}", "scale"):
        if known in group.parts:
            return known
    return None


def _holds(group: CodeGroup) -> bool:
    """Whether there is nothing but a scale, and perhaps zeros."""
    known = {group.name, scale_name(group), f"{group.name}_zero_point"}
    return scale_name(group) is not None and known.issuperset(group.parts)


def _is_float8(group: CodeGroup, _: Facts) -> bool:
    return group.codes.dtype in FLOAT8 and _holds(group)


def _is_int8(group: CodeGroup, _: Facts) -> bool:
    name = scale_name(group)
    # int8 beside powers of two is FP4 of DeepSeek V4, two codes in a byte
    is_int = group.codes.dtype is _INT8 and _holds(group)
    return is_int and name is not None and group.parts[name].dtype is not E8M0


def _is_float4(group: CodeGroup, _: Facts) -> bool:
    name = scale_name(group)
    if name is None or group.codes.dtype.name not in _OF_PAIRS or not _holds(group):
        return False
    scale, codes = group.parts[name], group.codes
    is_bytes = scale.dtype.name == "uint8" and codes.dtype is not _INT8  # as Quark stores them
    is_mx = (scale.dtype is E8M0 or is_bytes) and len(scale.shape) == len(codes.shape) >= 2
    return is_mx and scale.shape[-1] * _MX == 2 * codes.shape[-1]


# The types of two nibbles: DeepSeek's, Quark's, torch's own.
_OF_PAIRS = ("int8", "uint8", "float4_e2m1fn_x2")


def given_block(facts: Facts, group: CodeGroup) -> tuple[int, int] | None:
    """The block that a configuration names: of all weights, or by groups of them."""
    if "weight_block_size" in facts.config:
        return told_block(group, facts.config["weight_block_size"])
    config = weights_config(facts, group)
    if config.get("block_structure"):
        return told_block(group, config["block_structure"])
    return group_size(group, config)


def scaled(group: CodeGroup, facts: Facts, words: str) -> Weight:
    """The values of codes of one byte; `words` say what they are."""
    name, codes = scale_name(group), group.codes
    assert name is not None
    shape = _at_least_two(codes.shape)
    scale = group.need(name)
    block = block_of(group, scale, shape, given_block(facts, group))
    inputs = {
        "codes": reshaped(codes, shape, group.key),
        "scale": grid_of(group, name, shape, block),
    }
    zero = f"{group.name}_zero_point"
    for beside in (name, zero):
        _refuse_kernels(group, beside)
    if zero in group.parts:
        inputs["zero"] = grid_of(group, zero, shape, block)
    how = Decoding(tuple(inputs), codes.dtype.name, block, scale_as=as_scale(scale))
    values = reshaped(decoded(group, facts, how, inputs, shape), codes.shape, group.key)
    return Weight(group.name, values, f"{words}, {block_text(block, shape)}")


def _refuse_kernels(group: CodeGroup, name: str) -> None:
    """Refuse what is not one for each output of a convolution, or one for all."""
    ref = group.parts.get(name)
    is_like = ref is not None and len(ref.shape) == len(group.codes.shape) > 3
    if ref is not None and is_like and any(size != 1 for size in ref.shape[1:]):
        group.fail(f"is {list(group.codes.shape)}, which {name} of {list(ref.shape)} does not fit")


def _at_least_two(shape: Shape) -> Shape:
    """A shape as rows and columns, of experts too; kernels of a convolution are columns."""
    if len(shape) < 2:
        return 1, prod(shape)
    if len(shape) > 3:
        return shape[0], prod(shape[1:])
    return shape


def block_text(block: tuple[int, int], shape: Shape) -> str:
    """What a scale is for, in words."""
    rows, columns = shape[-2:]
    if block[0] >= rows and block[1] >= columns:
        return "one scale"
    if block[0] == 1:
        return "a scale for each row" if block[1] >= columns else f"groups of {block[1]}"
    return f"blocks of {block[0]} x {block[1]}"


def _float8(group: CodeGroup, facts: Facts) -> Weight:
    return scaled(group, facts, "fp8")


def _int8(group: CodeGroup, facts: Facts) -> Weight:
    return scaled(group, facts, "int8")


def _float4(group: CodeGroup, facts: Facts) -> Weight:
    name, codes = scale_name(group), group.codes
    assert name is not None
    *outer, columns = codes.shape
    shape = (*outer, 2 * columns)
    inputs = {"codes": codes, "scale": grid_of(group, name, shape, (1, _MX))}
    as_power = as_scale(group.need(name))
    how = Decoding(("codes", "scale"), "e2m1", (1, _MX), bits=4, scale_as=as_power)
    values = decoded(group, facts, how, inputs, shape)
    return Weight(group.name, values, f"mxfp4, groups of {_MX}")


# ------------------------------------------------------------------- fused experts of gpt-oss

_BLOCKS = "_blocks"


def _is_gpt_oss(group: CodeGroup, _: Facts) -> bool:
    base = group.name.removesuffix(_BLOCKS)
    scale = group.parts.get(f"{base}_scales")
    return (
        group.name == base + _BLOCKS
        and scale is not None
        and group.codes.dtype.name == scale.dtype.name == "uint8"
        and len(group.codes.shape) == 4
    )


def _gpt_oss(group: CodeGroup, facts: Facts) -> Weight:
    """MXFP4, whose values are seen transposed."""
    base = group.name.removesuffix(_BLOCKS)
    codes, scale = group.codes, group.need(f"{base}_scales")
    experts, outputs, blocks, octets = codes.shape
    if octets != _MX // 2 or scale.shape != codes.shape[:3]:
        group.misfit(scale)
    packed = reshaped(codes, (experts, outputs, blocks * octets), group.key)
    inputs = {"codes": transposed(packed), "scale": transposed(scale)}
    how = Decoding(("codes", "scale"), "e2m1", (_MX, 1), bits=4, axis=-2, scale_as=E8M0.name)
    values = decoded(group, facts, how, inputs, (experts, blocks * _MX, outputs))
    return Weight(base, values, "mxfp4 experts, groups of 32")


GPT_OSS = Scheme("gpt-oss", ("mxfp4",), _is_gpt_oss, _gpt_oss, is_certain=True)

_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "quark", "mxfp8")

SCHEMES = (
    Scheme("fp8", _METHODS, _is_float8, _float8),
    Scheme("int8", ("compressed-tensors", "modelopt", "quark"), _is_int8, _int8),
    Scheme("mxfp4", _METHODS, _is_float4, _float4),
)
