"""What opening a file reads of it, told from its first bytes: so that it can be fetched for many
files at once.
"""

from __future__ import annotations

from ckptconv.formats.safetensors import is_safetensors
from ckptconv.io.source import Range
from ckptconv.support.limits import in_force

_END = 22 + 0xFFFF  # bytes in which the end record of an archive lies
_TAIL = 64 << 10  # bytes in which the directory of an archive of some hundred records lies


def scanned_first(head: bytes, size: int) -> list[Range]:
    """The same of `scan`, which also looks for an archive at the end of any file."""
    first = max(len(head), size - _END)
    return [(first, size - first)] if first < size else []


def first_reads(head: bytes, size: int) -> list[Range]:
    """The runs of bytes beyond its `head` that opening a file of `size` bytes will read."""
    known = len(head)
    if size <= known:
        return []
    if head.startswith(b"PK\3\4"):
        first = max(known, size - _TAIL)
        return [(first, size - first)]
    if is_safetensors(head):
        end = 8 + int.from_bytes(head[:8], "little")
        if known < end <= min(size, 8 + in_force().safetensors_header_bytes):
            return [(known, end - known)]
    return []
