"""GGUF files put together by hand, so that each part of one can lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
