"""The header of a safetensors file as JSON values and as bytes.

Eight bytes of length (little-endian), then a JSON object, which spaces may follow. Source: the
format's README and `Metadata::validate` of the safetensors library 0.8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptconv.io.source import Source
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.support.json_text import read_object
from ckptconv.support.limits import in_force

RESERVED = "__metadata__"
"""The name in a header that is not a tensor's: an object of strings."""


def read_header(source: Source) -> tuple[dict[str, Any], int]:
    """The header of a file, whose entries are not checked yet, and where its data begin."""
    if source.size < 8:
        raise MalformedCheckpoint("is too short for a header", path=source.path)
    size = int.from_bytes(source.read(0, 8), "little")
    if 8 + size > source.size:
        raise malformed(
            source, "header length", f"declares {size} bytes where {source.size - 8} are left"
        )
    if size > (most := in_force().safetensors_header_bytes):
        raise LimitExceeded(
            f"declares {size} bytes",
            limit="safetensors_header_bytes",
            allowed=most,
            needed=size,
            path=source.path,
            where="header length",
        )
    raw = source.read(8, size)
    if not raw.startswith(b"{"):
        raise malformed(source, "header", "does not begin with '{'")
    header = read_object(raw, source.path, "header")
    return header, 8 + size


def header_text(header: Mapping[str, Any]) -> bytes:
    """A header as JSON, in its shortest form."""
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def header_bytes(text: bytes, nbytes: int | None = None) -> bytes:
    """What a file begins with: the length, the text, and spaces up to `nbytes` bytes in all (None:
    to a multiple of 8, as the library does).

    Raises `LimitExceeded` for a header that is too long for the library.
    """
    raw = text + b" " * (-len(text) % 8 if nbytes is None else nbytes - 8 - len(text))
    if len(raw) > (most := in_force().safetensors_header_bytes):
        raise LimitExceeded(
            f"its header would take {len(raw)} bytes",
            limit="safetensors_header_bytes",
            allowed=most,
            needed=len(raw),
            advice="the safetensors library opens headers of at most 100,000,000 bytes: write a "
            "torch file, or shards",
        )
    return len(raw).to_bytes(8, "little") + raw


def malformed(source: Source, where: str, what: str) -> MalformedCheckpoint:
    """The error of a file that is not what its format says."""
    return MalformedCheckpoint(
        what, path=source.path, where=where, hint="the file is damaged, cut off or forged"
    )
