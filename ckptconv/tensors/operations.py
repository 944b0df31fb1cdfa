"""The operations that make tensors of tensors: one row each.

An operation says which boxes of its inputs it needs for a box of what it makes, and what the values
there are. `plain` says the same once more for one element, in numbers of Python: `--verify` holds
the output against it, so a slip of the quick way is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ckptconv.support.arrays import Array, np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.casting import Cast, Raw, as_floats, cast, octets
from ckptconv.tensors.decoding import decode_needs, decode_plain, decode_values
from ckptconv.tensors.dtypes import BY_NAME, FLOAT32, FLOAT64, DType
from ckptconv.tensors.gguf_blocks import block_needs, block_plain, block_values
from ckptconv.tensors.low_rank import (
    kron_needs,
    kron_values,
    low_rank_needs,
    low_rank_plain,
    low_rank_values,
    multiply_plain,
    multiply_values,
    product_needs,
    product_plain,
    product_values,
    without_rounding,
)
from ckptconv.tensors.plain_numbers import Number
from ckptconv.tensors.refs import Box

Parameters = tuple[Hashable, ...]


def _as_they_are(parameters: Parameters) -> Parameters:
    return parameters


class Operation(NamedTuple):
    """How values are made.

    `needs(parameters, box, count)` gives, of each of so many inputs, the box that is read for a
    box of the output; `values(parameters, box, inputs, target)` the bytes of the output box, in the
    type `target`, from those of the inputs; `plain(parameters, box, numbers)` one element from the
    numbers that are in the boxes that it needs, those of each input in C order.

    The values are those of float32 (or float64), rounded once, to whatever `target` is: who casts
    what it made has it make the other type instead, of inputs that are not rounded, and with the
    parameters that `for_another_type` gives.
    """

    needs: Callable[[Any, Box, int], Sequence[Box]]
    values: Callable[[Any, Box, Sequence[Raw], DType], Cast]
    plain: Callable[[Any, Box, Sequence[Sequence[Number]]], Number]
    for_another_type: Callable[[Any], Any] = _as_they_are


def _the_same(parameters: Parameters, box: Box, count: int) -> Sequence[Box]:
    """Of each input the box itself: elements are made of those at their place."""
    return [box] * count


# ------------------------------------------------------------------------------------------- cast


def _cast(parameters: Parameters, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    return cast(*inputs[0], target)


def _itself(parameters: Parameters, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    return numbers[0][0]


# ------------------------------------------------------------------------------------------- mean

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def can_average(dtype: DType) -> bool:
    """Whether a type has means: floating and complex ones do."""
    return dtype.is_floating or dtype.kind == "complex"


def _mean(weights: Parameters, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """The weighted mean, in float64 in order, cast at the end as torch's `to` casts."""
    whole = sum(_numbers(weights))
    with np.errstate(all="ignore"):
        mean = _sum(inputs, _numbers(weights)) / whole
        if not np.isfinite(mean).all():  # the sum may be beyond all numbers, but not the mean
            shares = [weight / whole for weight in _numbers(weights)]
            mean = np.where(np.isfinite(mean), mean, _sum(inputs, shares))
    return cast(octets(mean), FLOAT64, _real(target))


def _real(dtype: DType) -> DType:
    return BY_NAME[_PARTS.get(dtype.name, dtype.name)]


def _sum(inputs: Sequence[Raw], weights: Sequence[float]) -> Array:
    total: Array | None = None
    for (one, dtype), weight in zip(inputs, weights, strict=True):
        numbers = as_floats(one, _real(dtype), FLOAT64) * weight
        total = numbers if total is None else np.add(total, numbers, out=total)
    assert total is not None
    return total


def _numbers(weights: Parameters) -> list[float]:
    return [weight for weight in weights if isinstance(weight, float)]


def _plain_mean(weights: Parameters, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    ones = [number for (number,) in numbers]
    mean = _plain_part(_numbers(weights), [one.real for one in ones])
    if all(isinstance(one, float) for one in ones):
        return mean
    return complex(mean, _plain_part(_numbers(weights), [one.imag for one in ones]))


def _plain_part(weights: Sequence[float], numbers: Sequence[float]) -> float:
    whole = sum(weights)
    mean = _plain_sum(numbers, weights) / whole
    if math.isfinite(mean):
        return mean
    return _plain_sum(numbers, [weight / whole for weight in weights])


def _plain_sum(numbers: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted sum, from the left: `sum` does it otherwise from Python 3.12 on."""
    total = numbers[0] * weights[0]
    for number, weight in zip(numbers[1:], weights[1:], strict=True):
        total += number * weight
    return total


# -------------------------------------------------------------------------------------------- add


def can_add(dtype: DType) -> bool:
    """Whether a number is added to values of a type: floating ones of 16 bits and more."""
    return dtype.is_floating and dtype.itemsize > 1


def _add(parameters: Parameters, box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """A number added to each value, in float32 as torch adds it to 16 bits; float64 in its own."""
    [number] = _numbers(parameters)
    wide = FLOAT32
    if inputs[0][1] is FLOAT64:
        wide = FLOAT64
    values = as_floats(*inputs[0], wide)
    with np.errstate(all="ignore"):
        return cast(octets(values + values.dtype.type(number)), wide, target)


def _plain_add(parameters: Parameters, box: Box, numbers: Sequence[Sequence[Number]]) -> Number:
    # a sum of two float32, rounded to float64 and then to float32, is what float32 makes of it
    return numbers[0][0] + _numbers(parameters)[0]


OPERATIONS = {
    "cast": Operation(_the_same, _cast, _itself),
    "mean": Operation(_the_same, _mean, _plain_mean),
    "add": Operation(_the_same, _add, _plain_add),
    "unblock": Operation(block_needs, block_values, block_plain),
    "decode": Operation(decode_needs, decode_values, decode_plain),
    "low-rank": Operation(low_rank_needs, low_rank_values, low_rank_plain, without_rounding),
    "matmul": Operation(product_needs, product_values, product_plain),
    "multiply": Operation(_the_same, multiply_values, multiply_plain),
    "kron": Operation(kron_needs, kron_values, multiply_plain),
}
