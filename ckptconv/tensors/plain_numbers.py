"""Floating numbers out of their bits and back, one by one, in nothing but Python.

It says once more, by the definition of each type, what `casting` does quickly for many: whoever
checks a cast or another operation must not use what made it.
"""

from __future__ import annotations

import math
import struct

from ckptconv.support.arrays import np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import DType

Number = float | complex


class _Form(NamedTuple):
    """A floating type of at most 16 bits: its bits of exponent and mantissa, the exponent's bias,
    and its largest finite number.

    Where it `has_infinity`, the highest exponent is for infinity and NaN, as IEEE 754 has it.
    """

    exponent: int
    mantissa: int
    bias: int
    largest: float
    has_infinity: bool


# OCP 8-bit Floating Point 1.0; the fnuz types: ONNX's float8 page; bfloat16: the leading half of
# float32.
_FORMS = {
    "float16": _Form(5, 10, 15, 65504.0, True),
    "bfloat16": _Form(8, 7, 127, 2.0**128 - 2.0**120, True),
    "float8_e4m3fn": _Form(4, 3, 7, 448.0, False),
    "float8_e5m2": _Form(5, 2, 15, 57344.0, True),
    "float8_e4m3fnuz": _Form(4, 3, 8, 240.0, False),
    "float8_e5m2fnuz": _Form(5, 2, 16, 57344.0, False),
}


# The letters of `struct` for floats of so many bytes
_CODES = {2: "e", 4: "f", 8: "d"}


def number_of(raw: bytes, dtype: DType) -> Number:
    """The number that the little-endian bytes of one element stand for; an int of integers."""
    if dtype.kind in ("int", "bits", "bool"):
        return int.from_bytes(raw, "little", signed=dtype.name.startswith("int"))
    if dtype.kind == "complex":
        return complex(*struct.unpack(f"<2{_CODES[dtype.word]}", raw))
    if dtype.itemsize >= 4:
        wide: float = struct.unpack(f"<{_CODES[dtype.word]}", raw)[0]
        return wide
    bits = int.from_bytes(raw, "little")
    if dtype.name == "float8_e8m0fnu":
        return math.nan if bits == 0xFF else 2.0 ** (bits - 127)
    form = _FORMS[dtype.name]
    sign = -1.0 if bits >> (form.exponent + form.mantissa) else 1.0
    exponent = bits >> form.mantissa & (1 << form.exponent) - 1
    mantissa = bits & (1 << form.mantissa) - 1
    if form.has_infinity and exponent == (1 << form.exponent) - 1:
        return math.nan if mantissa else sign * math.inf
    if dtype.name == "float8_e4m3fn" and bits & 0x7F == 0x7F:
        return math.nan
    if dtype.name.endswith("fnuz") and bits == 0x80:
        return math.nan
    if exponent:
        mantissa += 1 << form.mantissa
    return sign * mantissa * 2.0 ** (max(exponent, 1) - form.bias - form.mantissa)


def stands_for(number: Number, dtype: DType, raw: bytes) -> bool:
    """Whether the bytes of an element of `dtype` are what `number` becomes in it: rounded to
    nearest, ties to even, by way of float32 where the type is smaller (as torch's `to` does).
    """
    here, there = complex(rounded(number, dtype)), complex(number_of(raw, dtype))
    return _same(here.real, there.real) and _same(here.imag, there.imag)


def rounded(number: Number, dtype: DType) -> Number:
    """What a number becomes in a type; one of integers is only moved, never rounded."""
    if dtype.kind in ("int", "bits", "bool"):
        return number
    if isinstance(number, complex):
        part = {16: "float64", 8: "float32", 4: "float16"}[dtype.itemsize]
        return complex(_rounded(number.real, part), _rounded(number.imag, part))
    return _rounded(number, dtype.name)


def _same(one: float, other: float) -> bool:
    """Whether two numbers are one, the sign of zero too; the bits of NaN are not looked at."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other and math.copysign(1, one) == math.copysign(1, other)


def _rounded(number: float, name: str) -> float:
    """The number that a type has for `number`."""
    if name == "float64" or math.isnan(number):
        return number
    number = single(number)
    if name == "float32":
        return number
    if name == "float8_e8m0fnu":
        return _to_power(abs(number))
    form = _FORMS[name]
    is_fnuz = name.endswith("fnuz")
    near = number
    if not math.isinf(number):
        near = _near(number, form.mantissa, 1 - form.bias)
    if abs(near) > form.largest:
        if name == "float8_e4m3fn":  # saturates, infinity included (pytorch#178817)
            return math.copysign(form.largest, number)
        return math.nan if is_fnuz else math.copysign(math.inf, number)
    if is_fnuz and near == 0:
        return 0.0
    return near


def real(number: Number) -> float:
    """A number without its imaginary part."""
    return number.real


def quotient(one: float, other: float) -> float:
    """A quotient as IEEE 754 has it: by 0 it is infinite or NaN."""
    with np.errstate(all="ignore"):
        return float(np.float64(one) / np.float64(other))


def single(number: float) -> float:
    """The nearest number of float32."""
    try:
        narrow: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:  # struct refuses what rounds to infinity
        return math.copysign(math.inf, number)
    return narrow


def _near(number: float, mantissa: int, lowest: int) -> float:
    """The nearest number with so many bits behind the leading one, ties to even; `lowest` is the
    exponent of the smallest normal one.
    """
    if number == 0:
        return number
    exponent = max(math.frexp(number)[1] - 1, lowest)
    step = 2.0 ** (exponent - mantissa)
    return math.copysign(round(abs(number) / step) * step, number)


def _to_power(number: float) -> float:
    """The nearest power of two that float8_e8m0fnu has; ties go up, for its leading bit is odd."""
    if math.isinf(number):
        return math.nan
    if number < 2.0**-126:  # denormal in float32: torch compares its bits with half of the lowest
        return 2.0**-126 if number > 2.0**-127 else 2.0**-127
    fraction, exponent = math.frexp(number)
    near = 2.0 ** (exponent if fraction >= 0.75 else exponent - 1)
    return math.nan if near > 2.0**127 else near
