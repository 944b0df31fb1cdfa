"""How many values of a tensor are NaN or infinite, told by their bits.

Which bits these are follows from each format: IEEE 754 for 16, 32 and 64 bits,
torch/headeronly/util/Float8_*.h for 8.
"""

from __future__ import annotations

from typing import Any

from ckptconv.support.arrays import Array, np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import TensorRef


class NonFinite(NamedTuple):
    """Elements that are NaN, and that are infinite (a complex one counts by its worse part)."""

    nan: int
    infinite: int


class _Bits(NamedTuple):
    """Without its sign (`magnitude` masks it), a code above `infinity` is NaN. The code `infinity`
    itself is infinite, or the largest finite value.
    """

    magnitude: int
    infinity: int
    has_infinity: bool = True


_IEEE = {
    2: _Bits(0x7FFF, 0x7C00),
    4: _Bits(0x7FFF_FFFF, 0x7F80_0000),
    8: _Bits((1 << 63) - 1, 0x7FF << 52),
}
_OTHERS = {
    "bfloat16": _Bits(0x7FFF, 0x7F80),
    "float8_e5m2": _Bits(0x7F, 0x7C),
    "float8_e4m3fn": _Bits(0x7F, 0x7E, has_infinity=False),
    "float8_e8m0fnu": _Bits(0xFF, 0xFE, has_infinity=False),
}
_ONE_NAN = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80}


class NonFiniteCounter:
    """A folder that counts the values of `dtype` that are not finite, as `nonfinite`."""

    def __init__(self, dtype: DType) -> None:
        self.nonfinite = NonFinite(0, 0)
        self._dtype = dtype

    def update(self, chunk: memoryview) -> None:
        words = np.frombuffer(chunk, dtype=f"<u{self._dtype.word}")
        is_nan, is_infinite = _told(words, self._dtype.name)
        if self._dtype.kind == "complex":
            is_nan = is_nan.reshape(-1, 2).any(axis=1)
            is_infinite = is_infinite.reshape(-1, 2).any(axis=1)
        nan, infinite = self.nonfinite
        nan += int(np.count_nonzero(is_nan))
        infinite += int(np.count_nonzero(is_infinite & ~is_nan))
        self.nonfinite = NonFinite(nan, infinite)


def nonfinite_counters(ref: TensorRef) -> tuple[NonFiniteCounter, ...]:
    """The counter for a tensor's values; none if its type has only finite values."""
    return (NonFiniteCounter(ref.dtype),) if ref.dtype.kind in ("float", "complex") else ()


def _told(words: Array, name: str) -> tuple[Any, Any]:
    """Which words are NaN, and which are infinite."""
    if name in _ONE_NAN:
        return words == _ONE_NAN[name], words != words
    bits = _OTHERS.get(name) or _IEEE[words.dtype.itemsize]
    magnitude = words & words.dtype.type(bits.magnitude)
    infinity = words.dtype.type(bits.infinity)
    return magnitude > infinity, (magnitude == infinity) & bits.has_infinity
