"""compressed-tensors (llm-compressor, vLLM, Kimi K2): packed integers, NVFP4, MXFP4, MXFP6.

Facts: compressed_tensors/compressors of release 0.20 and its quantization/lifecycle/forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import E4M3, E8M0
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    all_integers,
    as_scale,
    block_of,
    check_groups,
    check_words,
    decoded,
    grid_of,
    group_size,
    one_number,
    read_integers,
    told_size,
    weights_config,
)
from ckptconv.tensors.schemes.scaled import block_text

_PACKED = "_packed"


def _base(group: CodeGroup) -> str:
    return group.name.removesuffix(_PACKED)


def _is_packed(group: CodeGroup, *types: str) -> bool:
    base = _base(group)
    return (
        group.name == base + _PACKED
        and group.codes.dtype.name in types
        and f"{base}_scale" in group.parts
    )


def _is_pack_quantized(group: CodeGroup, _: Facts) -> bool:
    return _is_packed(group, "int32")


def _pack_quantized(group: CodeGroup, facts: Facts) -> Weight:
    """Integers of 1 to 8 bits, end to end in words of 32 bits; zeros are packed along the rows."""
    base, codes = _base(group), group.codes
    shape = _shape(group)
    *_, rows, columns = shape
    config = weights_config(facts, group)
    bits = _bits(group, config, columns)
    check_words(group, codes, bits, columns)
    inputs = {"codes": codes}
    index = _order(group, f"{base}_g_idx", columns)
    if f"{base}_g_idx" not in group.parts and _is_ordered(config):
        group.fail(f"is quantised in act order, and has no {base}_g_idx")
    scale = group.need(f"{base}_scale")
    block = block_of(group, scale, shape, group_size(group, config))
    # compressed-tensors raises too: only a scale for each row takes any number of columns
    if block[1] < columns and columns % block[1]:
        group.fail(f"has {columns} columns, which groups of {block[1]} do not divide")
    inputs["scale"] = grid_of(group, f"{base}_scale", shape, block)
    zero = group.first(f"{base}_zero_point")
    if zero is not None:
        words = (-(-rows * bits // 32), *inputs["scale"].shape[-1:])
        if zero.dtype.name != "int32" or zero.shape[-2:] != words:
            group.fail(f"{base}_zero_point has to be {list(words)} of int32")
        inputs["zero"] = zero
    groups = inputs["scale"].shape[-1]
    if index is not None:
        check_groups(group, f"{base}_g_idx", columns, groups)
        inputs["groups"] = index
    how = Decoding(
        tuple(inputs),
        "uint",
        block,
        bits=bits,
        # codes and zeros are stored plus this, whatever their sign
        offset=1 << bits - 1,
        word=4,
        packed_zero=True,
        groups=groups,
    )
    values = decoded(group, facts, how, inputs, shape, default=scale.dtype)
    told = [f"int{bits}", block_text(block, shape)]
    if zero is not None:
        told.insert(1, "asymmetric")
    if index is not None:
        told.append("act order")
    return Weight(base, values, ", ".join(told))


def _is_ordered(config: Mapping[str, Any]) -> bool:
    """Whether the columns of a group are not side by side: ``dynamic`` is a name of ``group``."""
    order = config.get("actorder")
    return order is True or (isinstance(order, str) and order.lower() in ("group", "dynamic"))


def _order(group: CodeGroup, name: str, columns: int) -> TensorRef | None:
    """The index of groups; None where there is none, or nothing was put into it (all are -1)."""
    index = group.first(name)
    if index is None or set(all_integers(group, name, columns)) == {-1}:
        return None
    return index


def _shape(group: CodeGroup) -> tuple[int, ...]:
    base, codes = _base(group), group.codes
    told = read_integers(group.need(f"{base}_shape"), f"{group.prefix}{base}_shape")
    *outer, rows, _ = codes.shape if len(codes.shape) > 1 else (0, 0)
    is_right = told in ((rows, *told[-1:]), (*outer, rows, *told[-1:]))
    if not is_right or min(told) < 0:
        group.fail(f"{base}_shape says {list(told)}, and the codes are {list(codes.shape)}")
    return (*outer, rows, told[-1])


def _bits(group: CodeGroup, config: Mapping[str, Any], columns: int) -> int:
    words = group.codes.shape[-1]
    told = told_size(group, config, "num_bits")
    if told is not None and not 1 <= told <= 8:
        group.fail(f"is described by a config whose num_bits is {told}, not 1 to 8")
    if told is not None:
        return told
    # sizes may leave a choice: five codes of 7 and of 8 bits both take two words
    fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words]
    if len(fitting) != 1:
        group.refuse(
            f"has {columns} codes in {words} words: they may have "
            f"{' or '.join(map(str, fitting)) or 'no number of'} bits",
            hint="the config.json that belongs to it says num_bits",
        )
    return fitting[0]


def _is_float(group: CodeGroup, facts: Facts) -> bool:
    return _is_packed(group, "uint8")


# The formats by whether they are NVFP4 and the bytes of codes of a scale: name, bits, codes
_FLOATS = {
    (True, 8): ("nvfp4", 4, 16),
    (False, 16): ("mxfp4", 4, 32),
    (False, 24): ("mxfp6", 6, 32),
}


def _float(group: CodeGroup, facts: Facts) -> Weight:
    """NVFP4, MXFP4 and MXFP6: told by the type of the scale, and by how many codes it is for."""
    base, codes = _base(group), group.codes
    scale = group.need(f"{base}_scale")
    second = group.first(f"{base}_global_scale")
    if len(codes.shape) < 2 or len(scale.shape) != len(codes.shape) or not scale.shape[-1]:
        group.misfit(scale)
    octets, rest = divmod(codes.shape[-1], scale.shape[-1])  # bytes of codes for a scale
    is_nv = scale.dtype is E4M3 and second is not None
    is_mx = as_scale(scale) or scale.dtype is E8M0
    name, bits, size = _FLOATS.get((is_nv, octets), ("", 0, 0))
    if rest or not bits or (second is not None) != is_nv or not (is_nv or is_mx):
        what = f"{scale.dtype.name} scales for {octets} bytes each"
        group.refuse(f"is packed in a way that is not known: {what}")
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 // bits)
    block = (1, size)
    check_words(group, codes, bits, shape[-1])
    inputs = {"codes": codes, "scale": grid_of(group, f"{base}_scale", shape, block)}
    if second is not None:
        inputs["second"] = one_number(group, f"{base}_global_scale")
    # the global scale divides, where the second one of ModelOpt and torchao multiplies
    numbers = {4: "e2m1", 6: "e2m3"}[bits]
    how = Decoding(tuple(inputs), numbers, block, bits=bits, scale_as=as_scale(scale), divides=True)
    values = decoded(group, facts, how, inputs, shape)
    return Weight(base, values, f"{name}, groups of {size}")


_METHODS = ("compressed-tensors",)

SCHEMES = (
    Scheme("pack-quantized", _METHODS, _is_pack_quantized, _pack_quantized, is_certain=True),
    Scheme("float-pack-quantized", _METHODS, _is_float, _float, is_certain=True),
)
