"""What a format hands to the writer: every output byte in order, payloads still as references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptconv.tensors.dtypes import UINT8, DType
from ckptconv.tensors.refs import TensorRef


class WriteItem(NamedTuple):
    """One payload: after the bytes `lead`, at byte `offset` of the output, `nbytes` bytes of
    `values`.

    `values` are ready bytes, or a tensor whose values in C order are cast to `dtype`.
    """

    name: str
    lead: bytes
    offset: int
    nbytes: int
    values: TensorRef | bytes
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A whole output file of `nbytes` bytes: `items`, what follows each of them, and what ends the
    file.

    `trail(i, crc)` gives the bytes behind item i, whose payload had the CRC-32 `crc`;
    `ending(crcs)` those behind all.
    """

    items: tuple[WriteItem, ...]
    nbytes: int
    trail: Callable[[int, int], bytes]
    ending: Callable[[Sequence[int]], bytes]


def one_item(name: str, raw: bytes) -> Layout:
    """A file of ready bytes."""
    return Layout(
        (WriteItem(name, b"", 0, len(raw), raw, UINT8),),
        len(raw),
        lambda _index, _crc: b"",
        lambda _crcs: b"",
    )
