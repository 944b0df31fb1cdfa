"""Reads JSON files strictly: the safetensors header, the index of shards. Only objects will do."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any, NoReturn

from ckptconv.support.errors import malformed


def read_object(raw: bytes, path: PurePath, where: str) -> dict[str, Any]:
    """The JSON object in `raw`; `MalformedCheckpoint` if it is another value or repeats a name."""
    refuse_crowded(raw, path, where)
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise malformed(f"is not valid JSON ({error})", path=path, where=where) from None
    if not isinstance(found, dict):
        raise malformed("is not a JSON object", path=path, where=where)
    return found


def refuse_crowded(raw: bytes, path: PurePath, where: str | None) -> None:
    """Raise `MalformedCheckpoint` for a JSON text of little but lists and objects, each 20 times as
    large in memory.
    """
    count = raw.count(b"[") + raw.count(b"{")
    if count > _FREE and count * _BYTES > len(raw):
        raise malformed(
            f"holds {count} lists and objects in {len(raw)} bytes", path=path, where=where
        )


_BYTES = 12  # for each list or object; the entry of an empty tensor, which has three, takes 50
_FREE = 100_000  # lists and objects that are never questioned


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs in it twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
