"""GGUF files put together by hand, so that each part of one can lie."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

UINT32, FLOAT32, TEXT, ARRAY, UINT16, INT32 = 4, 6, 8, 9, 2, 5
F32, Q4_0, BF16 = 0, 2, 30
ALIGNMENT = "general.alignment"


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str, kind: int, raw: bytes) -> bytes:
    """An entry of the metadata with a value of these bytes."""
    return text(name) + struct.pack("<I", kind) + raw


def array(name: str, kind: int, count: int, raw: bytes = b"") -> bytes:
    """An entry that is an array."""
    return entry(name, ARRAY, struct.pack("<IQ", kind, count) + raw)


def number(name: str, value: int, kind: int = UINT32) -> bytes:
    return entry(name, kind, struct.pack({UINT16: "<H", INT32: "<i"}.get(kind, "<I"), value))


def split(index: int, count: int, tensors: int) -> list[bytes]:
    """The entries of one file of a set."""
    told = (("no", index, UINT16), ("count", count, UINT16), ("tensors.count", tensors, INT32))
    return [number(f"split.{name}", value, kind) for name, value, kind in told]


def tensor(
    name: str | bytes = "w", sizes: Sequence[int] = (4,), kind: int = F32, offset: int = 0
) -> bytes:
    """What a header says of a tensor; the first of the sizes is the fastest."""
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf(
    *tensors: bytes,
    metadata: Sequence[bytes] = (),
    data: bytes = bytes(32),
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file: what its header says of its tensors, its metadata, its data."""
    told = (len(tensors), len(metadata)) if counts is None else counts
    head = b"GGUF" + struct.pack("<IQQ", version, *told) + b"".join((*metadata, *tensors))
    return head + bytes(-len(head) % alignment) + data


HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_XS": [0], "MXFP4": [], "NVFP4": [],
}  # fmt: skip
"""Where the float16 numbers of a block are, by its type."""

_EDGES = (0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00)
"""Zeros, the least, the largest, infinities, NaN and 1, in float16."""

BLOCKS = 512


def blocks(name: str, nbytes: int) -> bytes:
    """`BLOCKS` blocks of a type, always the same ones: all codes are met, and in half of them the
    numbers are extreme. The first bytes are all there are, which are the exponents of MXFP4.
    """
    raw = bytearray(hashlib.shake_256(name.encode()).digest(BLOCKS * nbytes))
    for block in range(BLOCKS // 2):
        for number, at in enumerate(HALVES[name]):
            edge = _EDGES[(block // len(_EDGES) ** number) % len(_EDGES)]
            struct.pack_into("<H", raw, block * nbytes + at, edge)
    if not HALVES[name]:
        raw[::nbytes] = bytes(range(256)) * (BLOCKS // 256)
    return bytes(raw)


def digest(values: Any) -> str:
    """The checksum of float32 values, in which one NaN is like another."""
    words = values.astype("<f4").view("<u4")
    words[values != values] = 0x7FC00000
    return hashlib.sha256(words.tobytes()).hexdigest()


WHOLE = tensor(sizes=(4,))
HUGE = struct.pack("<Q", 1 << 63)
LYING: dict[str, tuple[bytes, str]] = {
    "version 1": (gguf(WHOLE, version=1), "is GGUF of the version 1; 2 and 3 are read"),
    "version 4": (gguf(WHOLE, version=4), "version 4"),
    "cut in the counts": (gguf()[:20], "reaches byte 24 of a file of 20"),
    "a count of tensors": (gguf(WHOLE, counts=(1 << 62, 0)), "names 4611686018427387904 tens"),
    "a count of entries": (gguf(WHOLE, counts=(1, 1 << 40)), "names 1099511627776 entries"),
    "a name of 2**63 bytes": (
        gguf(HUGE, counts=(1, 0), data=bytes(64)),
        "reaches byte 9223372036854775840",
    ),
    "a text of 2**63 bytes": (
        gguf(WHOLE, metadata=[entry("a", TEXT, HUGE)]),
        "header: reaches byte",
    ),
    "an array of 2**63 numbers": (
        gguf(WHOLE, metadata=[array("a", UINT32, 1 << 63)]),
        "header: reaches byte",
    ),
    "an array of 2**63 texts": (
        gguf(WHOLE, metadata=[array("a", TEXT, 1 << 63)]),
        "names 9223372036854775808 texts",
    ),
    "a text of 2**63 bytes in an array": (
        gguf(WHOLE, metadata=[array("a", TEXT, 2, HUGE + bytes(8))]),
        "header: reaches byte",
    ),
    "an array of arrays": (
        gguf(WHOLE, metadata=[array("a", ARRAY, 1)]),
        "a: is an array of arrays",
    ),
    "an unknown type of value": (
        gguf(WHOLE, metadata=[entry("a", 13, bytes(8))]),
        "a: has a value of the unknown type 13",
    ),
    "an unknown type of elements": (
        gguf(WHOLE, metadata=[array("a", 99, 0)]),
        "a: is an array of the unknown type 99",
    ),
    "an entry twice": (
        gguf(WHOLE, metadata=[number("a.b", 1)] * 2),
        "a.b: is in the metadata twice",
    ),
    "an alignment of 0": (
        gguf(WHOLE, metadata=[number(ALIGNMENT, 0)]),
        "general.alignment: is 0, not a power of two",
    ),
    "an alignment of 48": (
        gguf(WHOLE, metadata=[number(ALIGNMENT, 48)]),
        "general.alignment: is 48, not a power of two",
    ),
    "an alignment that is a text": (
        gguf(WHOLE, metadata=[entry(ALIGNMENT, TEXT, text("32"))]),
        "general.alignment: is not a uint32",
    ),
    "5 dimensions": (gguf(tensor(sizes=[1] * 5)), "w: has 5 dimensions"),
    "2**32 dimensions": (
        gguf(text("w") + b"\xff" * 4, counts=(1, 0)),
        "w: has 4294967295 dimensions",
    ),
    "a shape that overflows": (
        gguf(tensor(sizes=[1 << 32, 1 << 32])),
        "w: its shape [4294967296, 4294967296] overflows",
    ),
    "an empty shape that overflows": (
        gguf(tensor(sizes=[0, 1 << 62, 1 << 62])),
        "overflows",
    ),
    "a type that nobody knows": (gguf(tensor(kind=31)), "w: has the unknown type 31"),
    "rows of half a block": (
        gguf(tensor(sizes=[48], kind=Q4_0), data=bytes(64)),
        "w: its rows of 48 elements are not whole blocks of 32 (Q4_0)",
    ),
    "a block without a dimension": (
        gguf(tensor(sizes=[], kind=Q4_0), data=bytes(64)),
        "w: its rows of 1 elements are not whole blocks",
    ),
    "a name that is not UTF-8": (gguf(tensor(b"\xff")), "its name is not UTF-8"),
    "a tensor twice": (
        gguf(WHOLE, tensor(offset=32), data=bytes(64)),
        "w: is in the header twice",
    ),
    "an offset beyond the end": (
        gguf(tensor(sizes=(64,))),
        "w: needs 256 bytes at byte 64 of a file of 96",
    ),
    "an offset of 2**63": (gguf(tensor(offset=1 << 63)), "leaves a gap before byte"),
    "an offset between multiples": (
        gguf(WHOLE, tensor("v", offset=16)),
        "v: its offset 16 is not a multiple of 32",
    ),
    "tensors that overlap": (
        gguf(tensor(sizes=(16,)), tensor("v", offset=32), data=bytes(64)),
        "v: begins at byte 32 of the data, within another tensor",
    ),
    "two tensors in one place": (gguf(WHOLE, tensor("v")), "within another tensor"),
    "a gap": (gguf(WHOLE, tensor("v", offset=64), data=bytes(96)), "v: leaves a gap"),
}
"""What is wrong with a file: its bytes, and what must be said of it."""
