"""ModelOpt: NVFP4, which has two scales, the second of which multiplies; fused experts.

Facts: `NVFP4QTensor.dequantize` and torch/export/unified_export_hf.py of nvidia-modelopt 0.47.
ComfyUI stores NVFP4 under the same names, the high nibble first and the scales in tiles: its
metadata, or the size of the scales, tell it.

The experts of Llama 4 and gpt-oss are quantised as outputs and inputs, and stored as inputs and
outputs: what was packed along the last axis lies along the one before it.
"""

from __future__ import annotations

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import E4M3, FLOAT8, UINT8
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    block_of,
    check_words,
    decoded,
    grid_of,
    one_number,
)
from ckptconv.tensors.schemes.scaled import block_text

_SIZE = 16  # values of NVFP4 that share a scale


def is_nvfp4(group: CodeGroup) -> bool:
    """Whether names and types are those of two scales of nibbles."""
    scale = group.parts.get("weight_scale")
    return (
        group.name == "weight"
        and group.codes.dtype.name == "uint8"
        and len(group.codes.shape) >= 2
        and scale is not None
        and scale.dtype is E4M3
        and {"weight", "weight_scale", "weight_scale_2"} == set(group.parts)
    )


def _is_modelopt(group: CodeGroup, _: Facts) -> bool:
    if not is_nvfp4(group):
        return False
    *outer, rows, octets = group.codes.shape
    scale = group.parts["weight_scale"].shape
    return scale == (*outer, rows, -(-2 * octets // _SIZE))


def _modelopt(group: CodeGroup, facts: Facts) -> Weight:
    codes = group.codes
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    check_words(group, codes, 4, shape[-1])
    inputs = {
        "codes": codes,
        "scale": grid_of(group, "weight_scale", shape, (1, _SIZE)),
        "second": one_number(group, "weight_scale_2"),
    }
    how = Decoding(tuple(inputs), "e2m1", (1, _SIZE), bits=4)
    values = decoded(group, facts, how, inputs, shape)
    return Weight("weight", values, f"nvfp4, groups of {_SIZE}")


def _is_experts(group: CodeGroup, _: Facts) -> bool:
    """Fused experts, whose scales have the name of the codes before their own."""
    scale = group.parts.get(f"{group.name}_weight_scale")
    if scale is None or len(group.codes.shape) != 3:
        return False
    names = {group.name, f"{group.name}_weight_scale"}
    if group.codes.dtype.name == "uint8":
        return scale.dtype is E4M3 and set(group.parts) == {*names, f"{group.name}_weight_scale_2"}
    return group.codes.dtype in FLOAT8 and set(group.parts) == names


def _experts(group: CodeGroup, facts: Facts) -> Weight:
    if group.codes.dtype is not UINT8:
        return _experts8(group, facts)
    return _experts4(group, facts)


def _experts4(group: CodeGroup, facts: Facts) -> Weight:
    """Nibbles along the last axis, or along the one before it: the scales tell which."""
    experts, first, last = group.codes.shape
    name = f"{group.name}_weight_scale"
    scale = group.need(name)
    shape, block, axis = (experts, first, 2 * last), (1, _SIZE), -1
    if scale.shape != (experts, first, -(-2 * last // _SIZE)):
        shape, block, axis = (experts, 2 * first, last), (_SIZE, 1), -2
        if scale.shape != (experts, -(-2 * first // _SIZE), last):
            group.misfit(scale)
    if group.need(f"{name}_2").numel != 1:
        group.refuse("has a second scale for each expert, in an order that is not known here")
    inputs = {
        "codes": group.codes,
        "scale": grid_of(group, name, shape, block),
        "second": one_number(group, f"{name}_2"),
    }
    how = Decoding(tuple(inputs), "e2m1", block, bits=4, axis=axis)
    values = decoded(group, facts, how, inputs, shape)
    return Weight(group.name, values, f"nvfp4 experts, groups of {_SIZE}")


def _experts8(group: CodeGroup, facts: Facts) -> Weight:
    """One scale, one for each expert, or one for each row or column of an expert."""
    shape = group.codes.shape
    experts, rows, columns = shape
    name = f"{group.name}_weight_scale"
    scale = group.need(name)
    if scale.shape == (experts, columns) and rows == columns:
        group.refuse(f"is square, and {name} does not say whether it is for rows or for columns")
    block = (rows, 1)
    if scale.shape != (experts, columns):
        block = block_of(group, scale, shape)
    inputs = {"codes": group.codes, "scale": grid_of(group, name, shape, block)}
    how = Decoding(tuple(inputs), group.codes.dtype.name, block)
    values = decoded(group, facts, how, inputs, shape)
    return Weight(group.name, values, f"fp8 experts, {block_text(block, shape)}")


SCHEMES = (
    Scheme("modelopt-nvfp4", ("modelopt",), _is_modelopt, _modelopt),
    Scheme("modelopt-experts", ("modelopt",), _is_experts, _experts, is_certain=True),
)
