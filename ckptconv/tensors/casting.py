"""Cast a run of little-endian elements from one floating type to another, as `tensor.to(dtype)`
does on a CPU.

The reference is torch 2.13 on CPU: its scalar conversions (`torch/headeronly/util/Half.h`,
`BFloat16.h`, `Float8_*.h`) and what it gave for every pattern of 8 and 16 bits, and for structured
ones of 32 and 64, under each of `ATEN_CPU_CAPABILITY=default`, `avx2` and `avx512`. It casts every
pair of the nine floating types. The rules:

- All casts go through float32, rounded to nearest, ties to even; so float64 to a smaller type
  rounds twice. Denormals are kept on both sides, and so is the sign of zero if the type has one.
- A finite value too large for the target becomes, with its sign: infinity in float32, float16,
  bfloat16 and float8_e5m2; NaN in float8_e4m3fnuz, float8_e5m2fnuz and float8_e8m0fnu; 448 in
  float8_e4m3fn. There the cast saturates, infinity included, since pytorch#178817 (older releases
  give NaN).
- The fnuz types have one NaN (0x80) and no negative zero or infinity. float8_e8m0fnu is a power of
  two: it drops the sign, takes zero to 2**-127, and its ties go up (the implied leading bit is
  odd), but for a denormal float32.
- NaN becomes the target's NaN: 0x7fc0 in bfloat16; 0x7f, signed, in float8_e4m3fn and float8_e5m2.
  float16, float32 and float64 keep sign and leading payload bits and set the quiet bit; only
  bfloat16 to float32 does not set it. The NaN of a type that has just one is 0x7f800001 in float32,
  and goes on from there.

torch contradicts itself only in the bits of some NaNs. To float16, code without F16C drops the
payload. To bfloat16 from float32 or float64, AVX code gives 0xffff in contiguous runs and 0x7fc0
elsewhere. float16 to float32 gives 0x7fffffff at the end of a run. Here the rules above hold in
these cases too, on every machine and at every offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypeAlias

from ckptconv.support.arrays import Array, np
from ckptconv.support.errors import CheckpointError
from ckptconv.support.records import dataclass
from ckptconv.tensors.dtypes import FLOAT32, DType

Raw: TypeAlias = tuple[memoryview, DType]
"""Numbers as bytes, little-endian and in C order, and their type."""
Bits: TypeAlias = "np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]"

# Elements per step: what a step touches (input, two scratch rows, output) stays within a
# second-level cache.
_STEP = 1 << 15

# Where a step is one loop, it is long: threads hand the lock of the interpreter on with each.
_LONG_STEP = 1 << 17

# A float32 without its sign; above infinity are the NaNs
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
# Their NaN has no payload: c10 makes 0x7F800001 of it
_SINGLE_NAN_TYPES = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"})


@dataclass(frozen=True, slots=True)
class Cast:
    """One run after its cast: the target's bytes (format ``B``), and how many finite values became
    infinite or NaN, or values 448 because they are beyond it.
    """

    data: memoryview
    overflowed: int


@dataclass(frozen=True, slots=True)
class _Narrowing:
    """How float32 becomes one smaller type.

    `round` is right for every magnitude below `limit`; from there on the code is `over`, or `nan`
    with the leading payload bits that `payload` lets through. Both are pairs: for a clear and for a
    set sign. `mantissa` counts stored bits, `lowest` is the exponent of the smallest normal number.
    """

    round: Callable[[_Narrowing, Bits, Bits, Bits], None]
    mantissa: int
    lowest: int
    limit: float
    over: tuple[int, int]
    nan: tuple[int, int]
    payload: int = 0
    saturates: bool = False

    def counted(self, numbers: Array) -> Array:
        """Which values at or above the limit are lost: infinite ones if they become numbers."""
        return ~np.isnan(numbers) if self.saturates else np.isfinite(numbers)


def overflow_text(targets: Iterable[str]) -> str:
    """What casts to these dtypes make of values that they cannot hold."""
    found = {name: _NARROWINGS[name] for name in targets if name in _NARROWINGS}
    made = {_over_text(item) for item in found.values()}
    return " or ".join(sorted(made)) or "infinite"


def _over_text(narrowing: _Narrowing) -> str:
    if narrowing.saturates:
        return "448"
    return "NaN" if narrowing.over == narrowing.nan else "infinite"


def cast(values: memoryview, source: DType, target: DType) -> Cast:
    """Cast the whole little-endian elements in `values`, a contiguous view; any cut of a tensor
    into runs is as good.

    Memory: the result and at most 2 MiB; a 16-bit `source` also leaves behind one table per target,
    of up to 576 KiB. Where both types are one, the result is `values` itself. Raises
    `CheckpointError` when they differ and either is not a floating type.
    """
    if source is target:
        return Cast(values.cast("B"), 0)
    if not (source.is_floating and target.is_floating):
        raise CheckpointError(
            f"cannot cast {source.name} to {target.name}", hint="only floating types are cast"
        )
    items = np.frombuffer(values, f"<u{source.itemsize}")
    codes = np.empty(items.size, f"<u{target.itemsize}")
    overflowed = 0
    with np.errstate(all="ignore"):
        count = _LONG_STEP if _is_one_loop(source, target) else _STEP
        step = _step(source, target, min(items.size, count))
        for start in range(0, items.size, count):
            overflowed += step(items[start : start + count], codes[start : start + count])
    return Cast(octets(codes), overflowed)


def octets(values: Array) -> memoryview:
    """The bytes of an array, in C order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def as_floats(raw: memoryview, dtype: DType, wide: DType) -> Array:
    """The numbers in some bytes as an array of float32 or float64, without a shape."""
    return np.frombuffer(cast(raw, dtype, wide).data, wide.array_type)


def _step(source: DType, target: DType, size: int) -> Callable[[Bits, Bits], int]:
    """What casts up to `size` elements of its first argument into its second; counts overflows."""
    if source.name == "bfloat16" and target.name == "float32":
        return _widen_bfloat16
    if source.itemsize <= 2:
        return partial(_look_up, *_table(source, target))
    if target.itemsize >= 4:
        return _convert
    if target.name == "bfloat16":
        return _to_bfloat16
    return partial(_narrow, _NARROWINGS[target.name], np.empty((3, size), np.uint32))


def _widen_bfloat16(items: Bits, codes: Bits) -> int:
    """The leading half of float32: a seventh of the time of a look-up."""
    # numpy 1 would shift the 16 bits of an item by the scalar's value, and so give zeros
    np.left_shift(items, 16, out=codes, dtype=np.uint32)
    return 0


def _convert(items: Bits, codes: Bits) -> int:
    """Between float32 and float64, where numpy does as torch does."""
    numbers, results = items.view(f"<f{items.itemsize}"), codes.view(f"<f{codes.itemsize}")
    np.copyto(results, numbers, casting="same_kind")
    return int(np.count_nonzero(np.isfinite(numbers)) - np.count_nonzero(np.isfinite(results)))


def _is_one_loop(source: DType, target: DType) -> bool:
    return source.itemsize >= 4 and (target.itemsize >= 4 or target.name == "bfloat16")


def _to_bfloat16(items: Bits, codes: Bits) -> int:
    """From float32 or float64: one loop of ml_dtypes, whose NaNs have a sign."""
    import ml_dtypes

    numbers = items.view(f"<f{items.itemsize}")
    singles = numbers.astype(np.float32, copy=False)
    np.copyto(codes.view(ml_dtypes.bfloat16), singles, casting="unsafe")
    if not _reaches(codes, _INFINITY >> 16):
        return 0
    special = np.flatnonzero((codes & (_MAGNITUDE >> 16)) >= _INFINITY >> 16)
    codes[special[np.isnan(numbers[special])]] = 0x7FC0
    return int(np.count_nonzero(np.isfinite(numbers[special])))


def _narrow(narrowing: _Narrowing, scratch: Bits, items: Bits, codes: Bits) -> int:
    """From float32 or float64 to a smaller type; what needs more than rounding is rare."""
    bits, numbers, scratch = items, items.view(f"<f{items.itemsize}"), scratch[:, : items.size]
    if items.itemsize == 8:
        bits = scratch[2]
        np.copyto(bits.view(np.float32), numbers, casting="same_kind")
    narrowing.round(narrowing, bits, scratch, codes)
    limit = int(np.float32(narrowing.limit).view(np.uint32))
    if not _reaches(bits, limit):
        return 0
    special = np.flatnonzero((bits & _MAGNITUDE) >= limit)
    codes[special] = _special_codes(narrowing, bits[special])
    return int(np.count_nonzero(narrowing.counted(numbers[special])))


def _special_codes(narrowing: _Narrowing, bits: Bits) -> Bits:
    """The codes of float32 values at or above the limit."""
    magnitude, sign = bits & _MAGNITUDE, bits >> 31
    payload = (magnitude >> (23 - narrowing.mantissa)) & narrowing.payload
    over, nan = (np.array(pair, np.uint32)[sign] for pair in (narrowing.over, narrowing.nan))
    codes: Bits = np.where(magnitude > _INFINITY, nan | payload, over)
    return codes


def _round_to_exponent(_: _Narrowing, bits: Bits, _scratch: Bits, codes: Bits) -> None:
    """float8_e8m0fnu: the exponent, one up from half way; a denormal's tie goes down."""
    magnitude = bits & _MAGNITUDE
    codes[:] = (np.minimum(magnitude >> 23, 1) + magnitude + 0x3FFFFF) >> 23


def _round_by_adding(narrowing: _Narrowing, bits: Bits, scratch: Bits, codes: Bits) -> None:
    """The types with fewer exponents than float32: let the float32 adder round.

    Added to the power of two whose last bit is worth one unit of the target, a magnitude leaves its
    rounded significand in the low bits of the sum; the exponent is added above it. What lies higher
    is cut off when the code is stored.
    """
    total, power = scratch[0], scratch[1]
    shift, top = 23 - narrowing.mantissa, 8 * codes.itemsize - 1
    lowest = (127 + narrowing.lowest) << 23
    np.bitwise_and(bits, _INFINITY, out=power)
    np.maximum(power, lowest, out=power)
    np.add(power, shift << 23, out=power)
    np.bitwise_and(bits, _MAGNITUDE, out=total)
    np.add(total.view(np.float32), power.view(np.float32), out=total.view(np.float32))
    np.right_shift(power, shift, out=power)
    np.add(total, power, out=total)
    np.right_shift(bits, 31 - top, out=power)
    np.bitwise_and(power, 1 << top, out=power)
    np.add(total, power, out=total)
    codes[:] = total
    np.subtract(codes, ((lowest >> 23) + shift << narrowing.mantissa) % (2 << top), out=codes)


def _round_to_positive_zero(narrowing: _Narrowing, bits: Bits, scratch: Bits, codes: Bits) -> None:
    """The fnuz types, where the code of a negative zero would be NaN."""
    _round_by_adding(narrowing, bits, scratch, codes)
    codes[codes == 0x80] = 0


_NARROWINGS = {
    "float16": _Narrowing(
        _round_by_adding, 10, -14, 65520.0, (0x7C00, 0xFC00), (0x7E00, 0xFE00), payload=0x1FF
    ),
    "float8_e4m3fn": _Narrowing(
        _round_by_adding, 3, -6, 464.0, (0x7E, 0xFE), (0x7F, 0xFF), saturates=True
    ),
    "float8_e5m2": _Narrowing(_round_by_adding, 2, -14, 61440.0, (0x7C, 0xFC), (0x7F, 0xFF)),
    "float8_e4m3fnuz": _Narrowing(
        _round_to_positive_zero, 3, -7, 248.0, (0x80, 0x80), (0x80, 0x80)
    ),
    "float8_e5m2fnuz": _Narrowing(
        _round_to_positive_zero, 2, -15, 61440.0, (0x80, 0x80), (0x80, 0x80)
    ),
    "float8_e8m0fnu": _Narrowing(
        _round_to_exponent, 0, -127, 1.5 * 2.0**127, (0xFF, 0xFF), (0xFF, 0xFF)
    ),
}


@cache
def _table(source: DType, target: DType) -> tuple[Bits, Array, int]:
    """A cast of all patterns of a small type: codes, overflowing patterns, the least of those."""
    numbers = every_value(source)
    codes = np.frombuffer(cast(octets(numbers), FLOAT32, target).data, f"<u{target.itemsize}")
    overflows = beyond(numbers, target)
    magnitudes = np.flatnonzero(overflows) & (numbers.size // 2 - 1)
    return codes, overflows, int(magnitudes.min(initial=numbers.size))


def beyond(numbers: Array, target: DType) -> Array:
    """Which float32 numbers a cast to this type counts as overflowed."""
    narrowing = _NARROWINGS.get(target.name)
    if narrowing is not None:
        return narrowing.counted(numbers) & (np.abs(numbers) >= narrowing.limit)
    if target.itemsize >= 4:
        return np.zeros(numbers.shape, bool)
    half = np.uint32(0x7F7F8000).view(np.float32)  # half way behind the largest of bfloat16
    return np.isfinite(numbers) & (np.abs(numbers) >= half)


def every_value(source: DType) -> Array:
    """All patterns of an 8- or 16-bit type as little-endian float32, with torch's NaNs: numpy and
    ml_dtypes differ.
    """
    import ml_dtypes

    patterns = np.arange(1 << 8 * source.itemsize, dtype=f"u{source.itemsize}")
    bits = (
        patterns.view(getattr(ml_dtypes, source.name, np.float16))
        .astype(np.float32)
        .view(np.uint32)
    )
    nan = (bits & _MAGNITUDE) > _INFINITY
    if source.name in _SINGLE_NAN_TYPES:
        bits[nan] = 0x7F800001
    elif source.name != "bfloat16":
        payload = patterns[nan].astype(np.uint32) << (23 - _NARROWINGS[source.name].mantissa)
        bits[nan] |= payload & 0x3FFFFF | 0x400000
    return bits.astype("<u4").view("<f4")


def _look_up(table: Bits, overflows: Array, limit: int, items: Bits, codes: Bits) -> int:
    """From an 8- or 16-bit type to any."""
    # every item is in the table; by its default mode numpy would buffer the output
    np.take(table, items, out=codes, mode="clip")
    return int(np.count_nonzero(overflows[items])) if _reaches(items, limit) else 0


def _reaches(bits: Bits, limit: int) -> bool:
    """Whether some magnitude is at least `limit`; the top bit is the sign, so one maximum looks at
    each sign.
    """
    negative = 1 << 8 * bits.itemsize - 1
    return (
        int(bits.view(f"<i{bits.itemsize}").max()) >= limit or int(bits.max()) >= negative + limit
    )
