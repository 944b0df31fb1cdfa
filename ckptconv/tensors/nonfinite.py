"""How many values of a tensor are NaN or infinite, told by their bits, in a stream.

Which bits these are follows from each format: IEEE 754 for 16, 32 and 64 bits,
torch/headeronly/util/Float8_*.h for 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.support.progress import Meter
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.stream import iter_chunks

if TYPE_CHECKING:
    import numpy as np

    Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


class NonFinite(NamedTuple):
    """Elements that are NaN, and elements that are infinite (a complex one counts by its worse
    part).
    """

    nan: int
    infinite: int


class _Bits(NamedTuple):
    """A code above `infinity`, without its sign (`magnitude` masks it), is NaN; `infinity` itself
    is infinite, or finite.
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


def count_nonfinite(ref: TensorRef, meter: Meter | None = None) -> NonFinite:
    """Read a tensor once and count; (0, 0) for types that have only finite values. Memory is
    bounded by a few chunks.

    `meter` counts the bytes that are read.
    """
    import numpy as np

    nan = infinite = 0
    if ref.dtype.kind not in ("float", "complex"):
        return NonFinite(0, 0)
    for chunk in iter_chunks(ref):
        if meter is not None:
            meter.add(len(chunk))
        words = np.frombuffer(chunk, dtype=f"<u{ref.dtype.word}")
        is_nan, is_infinite = _told(words, ref.dtype.name)
        if ref.dtype.kind == "complex":
            is_nan, is_infinite = (
                part.reshape(-1, 2).any(axis=1) for part in (is_nan, is_infinite)
            )
        nan += int(np.count_nonzero(is_nan))
        infinite += int(np.count_nonzero(is_infinite & ~is_nan))
    return NonFinite(nan, infinite)


def _told(words: Words, name: str) -> tuple[Any, Any]:
    """Which words are NaN, and which are infinite."""
    if name in _ONE_NAN:
        return words == _ONE_NAN[name], words != words
    bits = _OTHERS.get(name) or _IEEE[words.dtype.itemsize]
    magnitude = words & words.dtype.type(bits.magnitude)
    infinity = words.dtype.type(bits.infinity)
    return magnitude > infinity, (magnitude == infinity) & bits.has_infinity
