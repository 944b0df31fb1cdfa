"""bitsandbytes: 4 bits by a table of values in blocks of the flattened weight, and int8 by rows.

Fact: the generic kernels of bitsandbytes 0.50 (backends/default/ops.py); its kernel for CPUs is
wrong where blocks do not divide the columns. The table that is stored counts, not a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckptconv.tensors.decoding import Decoding
from ckptconv.tensors.dtypes import BY_NAME, FLOAT32, UINT8
from ckptconv.tensors.plain_numbers import single
from ckptconv.tensors.refs import Piece, Shape, TensorRef
from ckptconv.tensors.schemes.base import (
    CodeGroup,
    Facts,
    Scheme,
    Weight,
    decoded,
    is_size,
    json_object,
    known_dtype,
    read_integers,
    read_small,
)
from ckptconv.tensors.views import reshaped

_STATE = ".quant_state.bitsandbytes__"
_HIGH_FIRST = (1, 0)  # of two codes in a byte, the first stands in the upper bits
_ROWS = 0  # of weight_format: others are orders of a kernel


def _state_name(group: CodeGroup) -> str | None:
    found = [name for name in group.parts if name.startswith(group.name + _STATE)]
    return found[0] if len(found) == 1 else None


def _is_four_bits(group: CodeGroup, _: Facts) -> bool:
    return _state_name(group) is not None


def _is_eight_bits(group: CodeGroup, _: Facts) -> bool:
    known = {group.name, "SCB", "weight_format"}
    return (
        group.codes.dtype.name == "int8" and "SCB" in group.parts and known.issuperset(group.parts)
    )


def _four_bits(group: CodeGroup, facts: Facts) -> Weight:
    name = _state_name(group)
    assert name is not None
    state = _state(group, name)
    kind, shape, size = state.get("quant_type"), _sizes(group, state), state.get("blocksize")
    if kind not in ("nf4", "fp4") or not is_size(size):
        group.fail("has a quant_state that is not one of nf4 or fp4")
    numel = prod(shape)
    codes = group.codes
    if codes.nbytes != -(-numel // 2):
        group.fail(f"has {codes.nbytes} bytes for {numel} codes of 4 bits")
    inputs = {
        "codes": _as_bytes(group, codes),
        "scale": _absmax(group, state, -(-numel // size)),
        "table": _table(group, "quant_map", 16),
    }
    how = Decoding(tuple(inputs), "uint", (1, size), bits=4, order=_HIGH_FIRST, table=16)
    dtype = facts.dtype or known_dtype(state.get("dtype"))
    values = decoded(group, facts, how, inputs, (1, numel), dtype=dtype)
    words = f"bitsandbytes {kind}, blocks of {size}"
    if "nested_blocksize" in state:
        words += ", nested"
    return Weight(group.name, reshaped(values, shape, group.key), words)


def _state(group: CodeGroup, name: str) -> Mapping[str, Any]:
    state = json_object(read_small(group.parts[name], group.prefix + name))
    if state is None:
        group.fail(f"has a {name} that is not a JSON object")
    return state


def _sizes(group: CodeGroup, state: Mapping[str, Any]) -> Shape:
    sizes = state.get("shape")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        group.fail("has a quant_state without a shape")
    return tuple(sizes)


def _as_bytes(group: CodeGroup, codes: TensorRef) -> TensorRef:
    """The bytes of codes, which are stored as another type by some, in one row."""
    flat = reshaped(codes, (codes.numel,), group.key)
    [piece] = flat.pieces
    size = codes.dtype.itemsize
    count = codes.nbytes
    shape, stride = (1, count), (count, 1)
    part = Piece(piece.storage, piece.offset * size, shape, stride, (0, 0))
    return TensorRef(UINT8, shape, stride, (part,))


def _table(group: CodeGroup, name: str, count: int) -> TensorRef:
    table = group.need(f"{group.name}.{name}")
    if table.shape != (count,) or table.dtype is not FLOAT32:
        group.fail(f"has a {name} that is not {count} numbers of float32")
    return table


def _absmax(group: CodeGroup, state: Mapping[str, Any], blocks: int) -> TensorRef:
    """The scale of each block, in one row; where it is quantised itself, decoded."""
    absmax = group.need(f"{group.name}.absmax")
    if absmax.shape != (blocks,):
        group.fail(f"has {absmax.numel} scales for {blocks} blocks")
    if absmax.dtype.is_floating:
        return reshaped(absmax, (1, blocks), group.key)
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not is_size(size) or not isinstance(offset, (int, float)) or absmax.dtype is not UINT8:
        group.fail("has scales that are codes, and a quant_state that does not say of what")
    inner = group.need(f"{group.name}.nested_absmax")
    if inner.shape != (-(-blocks // size),) or inner.dtype is not FLOAT32:
        group.fail(f"has {inner.numel} scales for {blocks} scales in blocks of {size}")
    inputs = {
        "codes": reshaped(absmax, (1, blocks), group.key),
        "scale": reshaped(inner, (1, inner.numel), group.key),
        "table": _table(group, "nested_quant_map", 256),
    }
    plus = _offset(group, offset)
    how = Decoding(tuple(inputs), "uint", (1, size), table=256, plus=plus)
    return decoded(group, Facts(), how, inputs, (1, blocks), dtype=FLOAT32)


def _offset(group: CodeGroup, offset: float) -> float:
    try:
        return single(float(offset))
    except OverflowError:  # an integer of hundreds of digits
        group.fail("has a nested_offset that is not a float")


def _eight_bits(group: CodeGroup, facts: Facts) -> Weight:
    codes, scale = group.codes, group.need("SCB")
    if len(codes.shape) != 2 or scale.shape != codes.shape[:1]:
        group.misfit(scale)
    order = group.first("weight_format")
    if order is not None and read_integers(order, f"{group.prefix}weight_format") != (_ROWS,):
        group.refuse("is int8 of bitsandbytes in the order of a kernel, which is not known here")
    inputs = {"codes": codes, "scale": reshaped(scale, (codes.shape[0], 1), group.key)}
    block = (1, max(1, codes.shape[1]))
    # bitsandbytes multiplies by float32(1 / 127), which rounds otherwise than to divide by 127
    how = Decoding(("codes", "scale"), "int8", block, last=single(1 / 127))
    values = decoded(group, facts, how, inputs, codes.shape, default=BY_NAME["float16"])
    return Weight(group.name, values, "bitsandbytes int8, a scale for each row")


SCHEMES = (
    Scheme("bitsandbytes-4bit", ("bitsandbytes",), _is_four_bits, _four_bits, is_certain=True),
    Scheme("bitsandbytes-int8", ("bitsandbytes",), _is_eight_bits, _eight_bits, is_certain=True),
)
