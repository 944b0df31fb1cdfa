"""torchao's tensors as `flatten_tensor_state_dict` saves them: the metadata name each one's class.

Fact: torchao 0.18, prototype/safetensors and the `dequantize` of each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import FLOAT4_PAIRS, UINT8
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    as_scale,
    decoded,
    grid_of,
    is_size,
    json_object,
    known_dtype,
    one_number,
)
from ckptconv.tensors.schemes.scaled import block_text
from ckptconv.tensors.views import cut, reshaped, unswizzled, whole_tiles

_CODES, _OF_INPUTS = "_qdata", "act_pre_scale"
_ROWS = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")


def described(name: str, facts: Facts) -> Mapping[str, Any] | None:
    """What the metadata say of a tensor: its class and its attributes."""
    found = json_object(facts.metadata.get(name, ""))
    if found is None or not isinstance(found.get("_data"), dict):
        return None
    return found


def _weight_name(group: CodeGroup) -> str:
    return group.name.removeprefix("_").removesuffix(_CODES)


def _is_torchao(group: CodeGroup, facts: Facts) -> bool:
    name = _weight_name(group)
    return group.name == f"_{name}{_CODES}" and described(group.prefix + name, facts) is not None


def _torchao(group: CodeGroup, facts: Facts) -> Weight:
    name = _weight_name(group)
    found = described(group.prefix + name, facts)
    assert found is not None
    parts = {part.removeprefix(f"_{name}_"): part for part in group.parts}
    beside = found.get("_tensor_data_names")
    if isinstance(beside, list) and _OF_INPUTS in beside:
        parts[_OF_INPUTS] = f"_{name}_{_OF_INPUTS}"
    return torchao_weight(group, facts, name, str(found.get("_type")), found["_data"], parts)


def torchao_weight(
    group: CodeGroup,
    facts: Facts,
    name: str,
    kind: str,
    told: Mapping[str, Any],
    parts: Mapping[str, str],
) -> Weight:
    """The values of a tensor of the class `kind`, whose attributes `told` are, and whose tensors
    are called `parts` in the group.
    """
    if _OF_INPUTS in parts:
        group.refuse(f"has an {_OF_INPUTS}, which belongs to the inputs of its layer")
    dtype = facts.dtype or known_dtype(_spelt(told.get("dtype", told.get("orig_dtype"))))
    if kind in _ROWS:
        values, words = _rows(group, facts, told, parts, dtype)
    elif kind in ("MXTensor", "NVFP4Tensor"):
        values, words = _micro(group, facts, kind, told, parts, dtype)
    else:
        group.refuse(f"is {kind:.60} of torchao, whose order of codes is not known here")
    return Weight(name, values, f"torchao {words}")


def _spelt(value: object) -> object:
    """A dtype out of the JSON of one."""
    return value.get("_data") if isinstance(value, dict) else value


def _rows(
    group: CodeGroup, facts: Facts, told: Mapping[str, Any], parts: Mapping[str, str], dtype: Any
) -> tuple[TensorRef, str]:
    codes, scale = group.codes, _scale(group, parts)
    block = told.get("block_size")
    sizes = list(codes.shape)
    if not isinstance(block, list) or len(block) != len(sizes) or len(sizes) < 2:
        group.fail("has no block_size that fits it")
    if any(type(size) is not int or size < 1 for size in block) or any(n != 1 for n in block[:-2]):
        group.refuse(f"has blocks of {block!r:.60}, which are not of rows and columns")
    pair = (block[-2], block[-1])
    inputs = {"codes": codes, "scale": grid_of(group, scale, codes.shape, pair)}
    if "zero_point" in parts:
        inputs["zero"] = grid_of(group, parts["zero_point"], codes.shape, pair)
    how = Decoding(tuple(inputs), codes.dtype.name, pair)
    values = decoded(group, facts, how, inputs, codes.shape, dtype=dtype)
    kind = _spelt(told.get("target_dtype"))
    if not isinstance(kind, str):
        kind = codes.dtype.name
    return values, f"{kind.removeprefix('torch.')}, {block_text(pair, codes.shape)}"


def _scale(group: CodeGroup, parts: Mapping[str, str]) -> str:
    if "scale" not in parts:
        group.fail("is quantised by torchao, and has no scale")
    return parts["scale"]


def _micro(
    group: CodeGroup,
    facts: Facts,
    kind: str,
    told: Mapping[str, Any],
    parts: Mapping[str, str],
    dtype: Any,
) -> tuple[TensorRef, str]:
    """MX and NVFP4: nibbles, the low one first, or bytes."""
    codes, name = group.codes, _scale(group, parts)
    if len(codes.shape) < 2:
        group.fail(f"is {list(codes.shape)}, which are not rows and columns")
    scale = group.need(name)
    bits, numbers = 8, codes.dtype.name
    if codes.dtype in (UINT8, FLOAT4_PAIRS):
        bits, numbers = 4, "e2m1"
    word, size = {"NVFP4Tensor": ("nvfp4", 16)}.get(kind, (f"mxfp{bits}", 32))
    if is_size(told.get("block_size")):
        size = told["block_size"]
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 // bits)
    if told.get("is_swizzled_scales"):
        rows, columns = shape[-2], -(-shape[-1] // size)
        wanted = whole_tiles(rows, columns)
        if len(shape) != 2 or scale.numel != wanted[0] * wanted[1]:
            group.fail(f"has swizzled scales of {list(scale.shape)}, not {list(wanted)}")
        tiles = reshaped(scale, wanted, group.prefix + name)
        grid = cut(unswizzled(tiles, group.prefix + name), (rows, columns))
    else:
        grid = grid_of(group, name, shape, (1, size))
    inputs = {"codes": codes, "scale": grid}
    if "per_tensor_scale" in parts:
        inputs["second"] = one_number(group, parts["per_tensor_scale"])
    how = Decoding(tuple(inputs), numbers, (1, size), bits=bits, scale_as=as_scale(scale))
    values = decoded(group, facts, how, inputs, shape, dtype=dtype)
    return values, f"{word}, groups of {size}"


SCHEMES = (Scheme("torchao", ("torchao",), _is_torchao, _torchao, is_certain=True),)
