"""Zip archives laid out for writing, as torch's own writer does, whose reader computes offsets
instead of looking them up.

Local header with flags 0x808 and no sizes, an extra field ``FB`` that pads the payload to 64 bytes,
payload, data descriptor (none for an empty record), central directory, zip64 end record and
locator, end record. Source: PyTorch's inline_container.cc and the files that torch 2.13 writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import count

from ckptconv.formats.target_format import Layout, WriteItem
from ckptconv.formats.zip_directory import (
    CENTRAL,
    CENTRAL_USED,
    DESCRIPTOR,
    DESCRIPTOR64,
    END,
    END64,
    LOCAL,
    LOCATOR,
    MAX32,
    local_flags,
    local_header,
)
from ckptconv.io.crc import combined_crc, crc32
from ckptconv.support.records import NamedTuple, made
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import TensorRef

ALIGNMENT = 64


class NewRecord(NamedTuple):
    """A record to be written: what its values are called in messages, its name, the bytes `head`
    of its payload, and behind them `nbytes` bytes of `values` as `dtype`.
    """

    called: str
    name: bytes
    head: bytes
    nbytes: int
    values: TensorRef | bytes
    dtype: DType


class _Slot(NamedTuple):
    """The place of a record: its local header is at byte `header`, its payload has `size` bytes."""

    name: bytes
    header: int
    size: int


def lay_out_records(records: Iterable[NewRecord]) -> Layout:
    """The archive of these records, in this order."""
    items: list[WriteItem] = []
    slots: list[_Slot] = []
    heads: dict[int, bytes] = {}  # of those that have one; torch's records have none
    end = 0
    for called, name, head, nbytes, values, dtype in records:
        slot, lead, offset, end = _placed(name, end, len(head) + nbytes)
        slots.append(slot)
        if head:
            heads[len(items)] = head
        at = offset + len(head)
        items.append(made(WriteItem, (called, lead + head, at, nbytes, values, dtype)))

    def whole_crc(index: int, crc: int) -> int:
        if index in heads:
            return combined_crc(crc32(heads[index]), crc, items[index].nbytes)
        return crc

    def trail(index: int, crc: int) -> bytes:
        return _descriptor(slots[index], whole_crc(index, crc))

    def ending(crcs: Sequence[int]) -> bytes:
        return _ending(slots, map(whole_crc, count(), crcs), end)

    return Layout(tuple(items), end + _ending_size(slots), trail, ending)


def _placed(name: bytes, header: int, size: int) -> tuple[_Slot, bytes, int, int]:
    """The record `name` of `size` bytes from byte `header` on, its payload at a multiple of 64.

    Returns the slot, the bytes before the payload (local header and padding), the payload's offset,
    and the end of it all.
    """
    slot = made(_Slot, (name, header, size))
    wide = b""
    if size >= MAX32 or header >= MAX32:
        wide = _wide(slot)
    extra = len(wide) + 4
    unpadded = header + LOCAL.size + len(name) + extra
    padding = -unpadded % ALIGNMENT
    lead = local_header(size > 0, len(name), extra + padding) + name + wide + _PADDINGS[padding]
    offset = unpadded + padding
    end = offset + size
    if size:
        end += DESCRIPTOR64.size if wide else DESCRIPTOR.size
    return slot, lead, offset, end


# As torch pads: an extra field FB, filled with Z
_PADDINGS = tuple(b"FB%c\0" % size + b"Z" * size for size in range(ALIGNMENT))


def _wide(slot: _Slot) -> bytes:
    """The zip64 extra field, empty while both fit 32 bits; torch repeats it in local headers."""
    _, header, size = slot
    numbers = [number for number in (size, size, header) if number >= MAX32]
    if not numbers:
        return b""
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _descriptor(slot: _Slot, crc: int) -> bytes:
    """The data descriptor behind a payload; nothing for an empty one."""
    _, header, size = slot
    if not size:
        return b""
    kind = DESCRIPTOR if size < MAX32 and header < MAX32 else DESCRIPTOR64
    return kind.pack(b"PK\7\x08", crc, size, size)


def _ending_size(slots: Sequence[_Slot]) -> int:
    names = sum(len(name) for name, _, _ in slots)
    wide = sum(map(len, map(_wide, slots))) if sum(slots[-1][1:]) >= MAX32 else 0
    return len(slots) * CENTRAL.size + names + wide + END64.size + LOCATOR.size + END.size


def _ending(slots: Sequence[_Slot], crcs: Iterable[int], start: int) -> bytes:
    """Central directory, from byte `start` on, and end records, for records with these CRC-32s."""
    directory = b"".join(map(_central, slots, crcs))
    many, size = len(slots), len(directory)
    # made on Unix by version 3.0 of the format, which 4.5 is needed to read: that has zip64
    end64 = END64.pack(b"PK\6\6", END64.size - 12, 0x031E, 45, 0, 0, many, many, size, start)
    locator = LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    short = (min(many, 0xFFFF), min(many, 0xFFFF), min(size, MAX32), min(start, MAX32))
    return directory + end64 + locator + END.pack(b"PK\5\6", 0, 0, *short, 0)


def _central(slot: _Slot, crc: int) -> bytes:
    name, header, size = slot
    wide = b""
    if size >= MAX32 or header >= MAX32:
        wide = _wide(slot)
        header, size = min(header, MAX32), min(size, MAX32)
    fields = (b"PK\1\2", local_flags(size), 0, crc, size, size, len(name), len(wide), 0, 0, header)
    return CENTRAL_USED.pack(*fields) + name + wide
