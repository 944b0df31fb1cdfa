"""What a source is by its first bytes, where `formats` does not know it."""

from __future__ import annotations

import contextlib
import re
import zlib

BEGINS = re.compile(rb"\x80[\0-\5]").match
BLOCK = 512  # bytes of a tar header, and of what the parts of a tar file are multiples of
# the older container of lzma, which has no magic of its own
LZMA = re.compile(rb"\x5d\0\0..\xff{8}", re.DOTALL).match
_NUMPY = b"\x93NUMPY"


def is_tar_header(block: bytes) -> bool:
    """Whether a member of a tar file begins so; `tarfile` knows it by its checksum alone.

    That is the sum of the 512 bytes, those of the checksum itself taken as spaces.
    """
    field = block[148:156].strip(b" \0")
    if len(block) < BLOCK or not field.isdigit() or b"8" in field or b"9" in field:
        return False
    return int(field, 8) == sum(block) - sum(block[148:156]) + 8 * 0x20


def may_be_json(head: bytes) -> bool:
    """Whether a text that begins so may be a JSON object; blanks may stand before it."""
    return head.lstrip(b" \t\r\n")[:1] in (b"{", b"")


def text_kind(head: bytes) -> str | None:
    """What a file is that begins so and in which no pickle was found; None for what is not text."""
    if not head:
        return "empty file"
    if any(byte < 32 and byte not in b"\t\n\r" for byte in head):
        return None
    text = head.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "git-LFS pointer"
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "web page"
    return "JSON text" if text[:1] in (b"{", b"[") else "text"


_INERT = frozenset(("empty file", "git-LFS pointer", "web page", "JSON text", "text"))


def is_inert(kind: str) -> bool:
    """Whether a file of this kind, without findings, is not a checkpoint: nothing in it can run."""
    return kind in _INERT


def is_zlib(head: bytes) -> bool:
    """Whether it begins as a zlib stream (RFC 1950) with a window of 32 KiB, and inflates."""
    if len(head) < 8 or head[0] != 0x78 or head[1] & 0x20 or int.from_bytes(head[:2], "big") % 31:
        return False
    with contextlib.suppress(zlib.error):
        return bool(zlib.decompressobj().decompress(head, 512))
    return False


SHORT = 16  # bytes that may be a pickle by chance: a text may begin with "N." or "I1\n."


def numpy_end(head: bytes) -> int:
    """The byte at which the pickle of a numpy file of objects begins; 0 for any other file."""
    if not head.startswith(_NUMPY) or len(head) < 12:
        return 0
    width = 2 if head[6] == 1 else 4
    return 8 + width + int.from_bytes(head[8 : 8 + width], "little")
