"""gpt-oss: MXFP4 of fused experts, whose values are seen transposed.

Fact: `convert_moe_packed_tensors` of transformers' integrations/mxfp4.
"""

from __future__ import annotations

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.schemes.base import Facts, Group, Scheme, Weight, decoded
from ckptconv.tensors.views import reshaped, transposed

_BLOCKS, _MX = "_blocks", 32


def _is_experts(group: Group, _: Facts) -> bool:
    base = group.name.removesuffix(_BLOCKS)
    scale = group.parts.get(f"{base}_scales")
    return (
        group.name == base + _BLOCKS
        and scale is not None
        and group.codes.dtype.name == scale.dtype.name == "uint8"
        and len(group.codes.shape) == 4
    )


def _experts(group: Group, facts: Facts) -> Weight:
    base = group.name.removesuffix(_BLOCKS)
    codes, scale = group.codes, group.need(f"{base}_scales")
    experts, outputs, blocks, octets = codes.shape
    if octets != _MX // 2 or scale.shape != codes.shape[:3]:
        group.fail(f"is {list(codes.shape)}, which scales of {list(scale.shape)} do not fit")
    packed = reshaped(codes, (experts, outputs, blocks * octets), group.key)
    inputs = {"codes": transposed(packed), "scale": transposed(scale)}
    how = Decoding(("codes", "scale"), "e2m1", (_MX, 1), bits=4, axis=-2, scale_as="float8_e8m0fnu")
    values = decoded(group, facts, how, inputs, (experts, blocks * _MX, outputs), None)
    return Weight(base, values, "mxfp4 experts, groups of 32")


SCHEMES = (Scheme("gpt-oss", ("mxfp4",), _is_experts, _experts, is_certain=True),)
