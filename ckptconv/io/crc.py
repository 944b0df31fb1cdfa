"""CRC-32, and the CRC-32 of two runs of bytes from the CRC-32 of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:  # several times quicker than zlib where the processor has carry-less multiplication
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

CrcOf = Callable[[Any, int], int]
"""`crc32` or `no_crc`: the CRC-32 of bytes, given that of what comes before them."""


def no_crc(data: Any, before: int = 0, /) -> int:
    """0: stands where `crc32` does for bytes whose CRC-32 nobody asks for."""
    return 0


def combined_crc(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, from that of each and the length of the
    second.

    Appending a zero byte is a linear map of the 32 bits; its powers are squared. The method is that
    of zlib's crc32_combine.
    """
    if not first:
        return second
    for bit in range(nbytes.bit_length()):
        if bit == len(_ZEROS):
            _ZEROS.append(tuple(_applied(_ZEROS[-1], row) for row in _ZEROS[-1]))
        if nbytes >> bit & 1:
            first = _applied(_ZEROS[bit], first)
    return first ^ second


def _applied(rows: tuple[int, ...], bits: int) -> int:
    """The image of `bits` under the map that takes bit i to `rows[i]`."""
    image = 0
    for row in rows:
        if bits & 1:
            image ^= row
        bits >>= 1
    return image


# what appending 1, 2, 4, ... zero bytes does to each bit; made as far as it is needed
_ZEROS = [tuple(crc32(b"\0", 1 << bit) ^ crc32(b"\0", 0) for bit in range(32))]
