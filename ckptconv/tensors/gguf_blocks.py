"""The values of the quantised types of GGUF: from whole blocks of bytes to float32, and one element
once more in numbers of Python; the operation ``unblock``.

A block is codes and what they are read with: a scale ``d`` (and a minimum ``m``) in float16, for
the types with a K also a small factor of either for each group of 16 or 32 elements. A value is
``d * code``, ``d * code + m`` or ``d * factor * code - m * factor``, rounded once, as ggml and
gguf-py have it. Codes lie in runs of bytes: the lowest bits of all bytes of a run are its first
elements, the next bits those after them. Source: ggml-common.h and ggml-quants.c (MIT).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from ckptconv.support.arrays import np
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.casting import Cast, Raw, cast, octets
from ckptconv.tensors.dtypes import BLOCKS, FLOAT32, DType
from ckptconv.tensors.plain_numbers import single
from ckptconv.tensors.refs import Box, blocks_of

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

# What the codes of IQ4 stand for (kvalues_iq4nl in ggml), and those of E2M1: twice the number,
# code 8 without its sign.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Decoder(NamedTuple):
    """How the blocks of a type are read: `decode(blocks)` makes the float32 values (n, elements) of
    uint8 (n, bytes), in C order; `plain(block, index)` is one of a block's values.
    """

    dtype: DType
    decode: Callable[[Bytes], Floats]
    plain: Callable[[bytes, int], float]


# -------------------------------------------------------------------------------- whole blocks

# Elements that are decoded at a time: with those of 1 MiB, the allocator gives the memory back and
# takes it anew each time, which costs more than the decoding.
_STEP = 1 << 17


def _decoded(fill: Callable[[Bytes, Floats], None], elements: int, blocks: Bytes) -> Floats:
    """The values of some blocks, which `fill` makes of a few at a time."""
    out = np.empty((len(blocks), elements), np.float32)
    step = _STEP // elements
    with np.errstate(all="ignore"):  # a scale may be infinite or NaN
        for first in range(0, len(blocks), step):
            fill(blocks[first : first + step], out[first : first + step])
    return out


def _halves(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def _runs(parts: Sequence[Bytes], run: int) -> Bytes:
    """Codes in their order: the first `run` of each part, then the next of each."""
    count, width = parts[0].shape
    codes = np.empty((count, width * len(parts)), np.uint8)
    kind = f"V{run}"  # whole runs are copied as one item each
    runs = codes.view(kind).reshape(count, -1, len(parts))
    for number, part in enumerate(parts):
        runs[:, :, number] = part.view(kind)
    return codes


def _fields(raw: Bytes, bits: int, run: int) -> Bytes:
    """The fields of so many bits, from the lowest on, of runs of bytes."""
    raw, mask = np.ascontiguousarray(raw), np.uint8((1 << bits) - 1)
    return _runs([(raw >> np.uint8(shift)) & mask for shift in range(0, 8, bits)], run)


def _looked_up(raw: Bytes, numbers: Sequence[int], run: int) -> Bytes:
    """What the nibbles of runs of bytes stand for, as int8."""
    found = []
    for shift in (0, 4):
        table = bytes(numbers[byte >> shift & 15] & 255 for byte in range(256))
        # quicker than indexing, which makes numbers of 8 bytes of the codes
        found.append(np.frombuffer(raw.tobytes().translate(table), np.uint8).reshape(raw.shape))
    return _runs(found, run).view(np.int8)


def _scale(out: Floats, codes: Bytes, scales: Floats, minima: Floats | None = None) -> None:
    """Fill `out` with codes times scales minus minima, one of each for a group of a block."""
    np.copyto(out, codes)
    # spread out, because a step for each group costs more than the memory
    out *= np.repeat(scales, out.shape[1] // scales.shape[1], axis=1)
    if minima is not None:
        out -= np.repeat(minima, out.shape[1] // minima.shape[1], axis=1)


def _signed(codes: Bytes, zero: int) -> Bytes:
    """Codes minus that of zero, as int8."""
    codes -= np.uint8(zero)
    return codes.view(np.int8)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _scale(out, _signed(_fields(blocks[:, 2:], 4, 16), 8), _halves(blocks, 0))


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _scale(out, _fields(blocks[:, 4:], 4, 16), _halves(blocks, 0))
    out += _halves(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Codes whose fifth bits stand by themselves, in the order of the elements."""
    bits = np.unpackbits(high, axis=1, bitorder="little")
    codes = _fields(low, 4, 16)
    codes |= bits << 4
    return codes


def _q5_0(blocks: Bytes, out: Floats) -> None:
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    _scale(out, _signed(codes, 16), _halves(blocks, 0))


def _q5_1(blocks: Bytes, out: Floats) -> None:
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    _scale(out, codes, _halves(blocks, 0))
    out += _halves(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    _scale(out, np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _halves(blocks, 0))


def _q2_k(blocks: Bytes, out: Floats) -> None:
    factors = blocks[:, :16]
    scales, minima = _halves(blocks, 80) * (factors & 15), _halves(blocks, 82) * (factors >> 4)
    _scale(out, _fields(blocks[:, 16:80], 2, 32), scales, minima)


def _q3_k(blocks: Bytes, out: Floats) -> None:
    codes = _fields(blocks[:, 32:96], 2, 32)
    codes |= _fields(blocks[:, :32], 1, 32) << 2
    factors = _fields(blocks[:, 96:104], 4, 8)
    factors |= _fields(blocks[:, 104:108], 2, 4) << 4
    scales = _halves(blocks, 108) * _signed(factors, 32).astype(np.float32)
    _scale(out, _signed(codes, 4), scales)


def _factors(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 factors of 6 bits of the scale, and those of the minimum, out of 12 bytes: 4 and 4, and
    8 whose two upper bits stand above these.
    """
    # four bytes are one number here: columns of so many are quick, rows of four bytes are not
    words = np.ascontiguousarray(packed).view("<u4")
    found = []
    for low, rest in ((words[:, 0], words[:, 2]), (words[:, 1], words[:, 2] >> 4)):
        factors = np.empty((len(words), 2), "<u4")
        factors[:, 0] = low & 0x3F3F3F3F
        factors[:, 1] = (rest & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)
        found.append(factors.view(np.uint8))
    return found[0], found[1]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    factors, below = _factors(blocks[:, 4:16])
    scales, minima = _halves(blocks, 0) * factors, _halves(blocks, 2) * below
    _scale(out, _fields(blocks[:, 16:], 4, 32), scales, minima)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    factors, below = _factors(blocks[:, 4:16])
    scales, minima = _halves(blocks, 0) * factors, _halves(blocks, 2) * below
    codes = _fields(blocks[:, 48:], 4, 32)
    codes |= _fields(blocks[:, 16:48], 1, 32) << 4
    _scale(out, codes, scales, minima)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    codes = _fields(blocks[:, :128], 4, 64)
    codes |= _fields(blocks[:, 128:192], 2, 32) << 4
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    _scale(out, _signed(codes, 32), scales)


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    _scale(out, _looked_up(blocks[:, 2:], _IQ4, 16), _halves(blocks, 0))


def _iq4_xs(blocks: Bytes, out: Floats) -> None:
    factors = _fields(blocks[:, 4:8], 4, 1)
    factors |= _fields(blocks[:, 2:4], 2, 1) << 4
    scales = _halves(blocks, 0) * _signed(factors, 32).astype(np.float32)
    _scale(out, _looked_up(blocks[:, 8:], _IQ4, 16), scales)


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    exponents = np.arange(256)
    # half of 2 ** (byte - 127), for the codes are doubled; ggml has no NaN in byte 255
    table = np.ldexp(np.float32(1), exponents - 128)
    _scale(out, _looked_up(blocks[:, 1:], _FP4, 16), table[blocks[:, :1]])


def _nvfp4(blocks: Bytes, out: Floats) -> None:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    table = np.where(
        exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8.0 + mantissa, exponent - 11)
    ).astype(np.float32)
    table[[0x7F]] = 0.0  # as ggml reads what is NaN elsewhere
    _scale(out, _looked_up(blocks[:, 4:], _FP4, 8), table[blocks[:, :4]])


# ----------------------------------------------------------------------------- one element


def _half(block: bytes, at: int) -> float:
    found: float = struct.unpack_from("<e", block, at)[0]
    return found


def _nibble(block: bytes, at: int, index: int, run: int) -> int:
    """The code of 4 bits of an element, whose runs of bytes begin at byte `at`."""
    group, place = divmod(index, 2 * run)
    byte = block[at + group * run + place % run]
    return byte >> 4 if place >= run else byte & 15


def _pair(block: bytes, at: int, index: int) -> int:
    """The same for 2 bits; runs have 32 bytes."""
    return block[at + index // 128 * 32 + index % 32] >> index % 128 // 32 * 2 & 3


def _bit(block: bytes, at: int, index: int) -> int:
    """The same for 1 bit."""
    return block[at + index % 32] >> index // 32 & 1


def _plain_q4_0(block: bytes, index: int) -> float:
    return _half(block, 0) * (_nibble(block, 2, index, 16) - 8)


def _plain_q4_1(block: bytes, index: int) -> float:
    return single(_half(block, 0) * _nibble(block, 4, index, 16) + _half(block, 2))


def _plain_q5_0(block: bytes, index: int) -> float:
    fifth = block[2 + index // 8] >> index % 8 & 1
    return _half(block, 0) * (_nibble(block, 6, index, 16) + 16 * fifth - 16)


def _plain_q5_1(block: bytes, index: int) -> float:
    fifth = block[4 + index // 8] >> index % 8 & 1
    return single(_half(block, 0) * (_nibble(block, 8, index, 16) + 16 * fifth) + _half(block, 2))


def _plain_q8_0(block: bytes, index: int) -> float:
    code = block[2 + index]
    return _half(block, 0) * (code - 256 if code > 127 else code)


def _plain_q2_k(block: bytes, index: int) -> float:
    factor = block[index // 16]
    minimum = _half(block, 82) * (factor >> 4)
    return single(_half(block, 80) * (factor & 15) * _pair(block, 16, index) - minimum)


def _plain_q3_k(block: bytes, index: int) -> float:
    group = index // 16
    low = block[96 + group % 8] >> group // 8 * 4 & 15
    high = block[104 + group % 4] >> group // 4 * 2 & 3
    code = _pair(block, 32, index) + 4 * _bit(block, 0, index) - 4
    return _half(block, 108) * (low + 16 * high - 32) * code


def _plain_factors(block: bytes, group: int) -> tuple[int, int]:
    """The factors of scale and minimum of a group of 32, as `get_scale_min_k4` of ggml."""
    packed = block[4:16]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, above = packed[group + 4], (packed[group - 4], packed[group])
    return low & 15 | above[0] >> 6 << 4, low >> 4 | above[1] >> 6 << 4


def _plain_q4_k(block: bytes, index: int) -> float:
    factor, below = _plain_factors(block, index // 32)
    code = _nibble(block, 16, index, 32)
    return single(_half(block, 0) * factor * code - _half(block, 2) * below)


def _plain_q5_k(block: bytes, index: int) -> float:
    factor, below = _plain_factors(block, index // 32)
    code = _nibble(block, 48, index, 32) + 16 * _bit(block, 16, index)
    return single(_half(block, 0) * factor * code - _half(block, 2) * below)


def _plain_q6_k(block: bytes, index: int) -> float:
    factor = block[192 + index // 16]
    code = _nibble(block, 0, index, 64) + 16 * _pair(block, 128, index) - 32
    return _half(block, 208) * (factor - 256 if factor > 127 else factor) * code


def _plain_iq4_nl(block: bytes, index: int) -> float:
    return _half(block, 0) * _IQ4[_nibble(block, 2, index, 16)]


def _plain_iq4_xs(block: bytes, index: int) -> float:
    group = index // 32
    low = block[4 + group // 2] >> group % 2 * 4 & 15
    high = block[2 + group // 4] >> group % 4 * 2 & 3
    factor = low + 16 * high - 32
    return _half(block, 0) * factor * _IQ4[_nibble(block, 8, index, 16)]


def _plain_mxfp4(block: bytes, index: int) -> float:
    return single(2.0 ** (block[0] - 128) * _FP4[_nibble(block, 1, index, 16)])


def _plain_nvfp4(block: bytes, index: int) -> float:
    scale = block[index // 16]
    exponent, mantissa = scale >> 3 & 15, scale & 7
    factor = mantissa * 2.0**-10 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 11)
    code = _FP4[_nibble(block, 4, index, 8)]
    return 0.0 * code if scale == 127 else factor * code


_WAYS = {
    "Q4_0": (_q4_0, _plain_q4_0),
    "Q4_1": (_q4_1, _plain_q4_1),
    "Q5_0": (_q5_0, _plain_q5_0),
    "Q5_1": (_q5_1, _plain_q5_1),
    "Q8_0": (_q8_0, _plain_q8_0),
    "Q2_K": (_q2_k, _plain_q2_k),
    "Q3_K": (_q3_k, _plain_q3_k),
    "Q4_K": (_q4_k, _plain_q4_k),
    "Q5_K": (_q5_k, _plain_q5_k),
    "Q6_K": (_q6_k, _plain_q6_k),
    "IQ4_NL": (_iq4_nl, _plain_iq4_nl),
    "IQ4_XS": (_iq4_xs, _plain_iq4_xs),
    "MXFP4": (_mxfp4, _plain_mxfp4),
    "NVFP4": (_nvfp4, _plain_nvfp4),
}

DECODERS: dict[DType, Decoder] = {
    dtype: Decoder(dtype, partial(_decoded, fill, dtype.elements), plain)
    for dtype in BLOCKS
    if dtype.name in _WAYS
    for fill, plain in (_WAYS[dtype.name],)
}
"""The types whose values are read. The others need tables of a few kB (IQ1, IQ2, IQ3) or are hardly
ever met (TQ, Q1_0).
"""


# ------------------------------------------------------------------------------ the operation


def block_needs(names: tuple[str], box: Box, count: int) -> Sequence[Box]:
    """The blocks for a box of values; the parameter is the name of their type."""
    (*outer, first), (*sizes, number) = box
    start, blocks = blocks_of(first, number, _BY_NAME[names[0]].dtype.elements)
    return [((*outer, start), (*sizes, blocks))]


def block_values(names: tuple[str], box: Box, inputs: Sequence[Raw], target: DType) -> Cast:
    """The values of a box, of the bytes of the blocks that it needs."""
    decoder = _BY_NAME[names[0]]
    (*_, first), (*_, number) = box
    _, blocks = blocks_of(first, number, decoder.dtype.elements)
    stored = np.frombuffer(inputs[0][0], np.uint8).reshape(-1, decoder.dtype.itemsize)
    rows = decoder.decode(stored).reshape(-1, blocks * decoder.dtype.elements)
    skipped = first % decoder.dtype.elements
    return cast(octets(rows[:, skipped : skipped + number]), FLOAT32, target)


def block_plain(names: tuple[str], box: Box, numbers: Sequence[Sequence[Any]]) -> float:
    """One value, of its block, which is read as one number."""
    decoder = _BY_NAME[names[0]]
    ((block,),) = numbers
    raw = block.to_bytes(decoder.dtype.itemsize, "little")
    return decoder.plain(raw, box[0][-1] % decoder.dtype.elements)


_BY_NAME = {dtype.name: decoder for dtype, decoder in DECODERS.items()}
