"""JSON that a file brings along: the safetensors header, the index of shards. Read strictly, and only objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from ckptconv.errors import MalformedCheckpoint


def read_object(raw: bytes, path: Path, where: str) -> dict[str, Any]:
    """The JSON object in `raw`; `MalformedCheckpoint` when it is none, or a name stands in one object twice."""
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, where, f"is no valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise _malformed(path, where, "is no JSON object")
    return found


def _malformed(path: Path, where: str, what: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(what, path=path, where=where, hint="the file is damaged, cut off or made to deceive")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
