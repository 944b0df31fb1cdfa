"""NVFP4 of ModelOpt: two scales, the second of which multiplies.

Fact: `NVFP4QTensor.dequantize` of nvidia-modelopt 0.47. ComfyUI stores NVFP4 under the same names,
the high nibble first and the scales in tiles: its metadata, or the size of the scales, tell it.
"""

from __future__ import annotations

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.schemes.base import (
    E4M3,
    Facts,
    Group,
    Scheme,
    Weight,
    check_words,
    decoded,
    grid_of,
    one_number,
)

_SIZE = 16


def is_nvfp4(group: Group) -> bool:
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


def _is_modelopt(group: Group, _: Facts) -> bool:
    if not is_nvfp4(group):
        return False
    *outer, rows, octets = group.codes.shape
    scale = group.parts["weight_scale"].shape
    return scale == (*outer, rows, -(-2 * octets // _SIZE))


def _modelopt(group: Group, facts: Facts) -> Weight:
    codes = group.codes
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    check_words(group, codes, 4, shape[-1])
    inputs = {
        "codes": codes,
        "scale": grid_of(group, "weight_scale", shape, (1, _SIZE)),
        "second": one_number(group, "weight_scale_2"),
    }
    how = Decoding(tuple(inputs), "e2m1", (1, _SIZE), bits=4)
    values = decoded(group, facts, how, inputs, shape, None)
    return Weight("weight", values, f"nvfp4, groups of {_SIZE}")


SCHEMES = (Scheme("modelopt-nvfp4", ("modelopt",), _is_modelopt, _modelopt),)
