"""JSON, read and written strictly.

Read (the safetensors header, the index of shards): only objects will do, without a name twice.
Written (the documents of `--json`): what every reader takes: ASCII, no NaN, no half of a character.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from typing import Any, NoReturn

from ckptconv.support.errors import malformed

# ------------------------------------------------------------------------------------------- read


def read_object(
    raw: bytes, path: PurePath, where: str, *, of_python: bool = False
) -> dict[str, Any]:
    """The JSON object in `raw`; `MalformedCheckpoint` if it is another value or repeats a name.
    `of_python`: it may hold NaN and Infinity, as Python writes them (``config.json`` of Mamba 2).
    """
    refuse_crowded(raw, path, where)
    constant = None if of_python else _refuse_constant
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise malformed(f"is not valid JSON ({error})", path=path, where=where) from None
    if not isinstance(found, dict):
        raise malformed("is not a JSON object", path=path, where=where)
    return found


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and the place behind; `ValueError` for none, or a double name."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
    return decoder.raw_decode(text, at)


def refuse_crowded(raw: bytes, path: PurePath, where: str | None) -> None:
    """Raise `MalformedCheckpoint` for little but lists and objects, each 20 times as large made."""
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
        raise ValueError("a name occurs twice in it")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# ---------------------------------------------------------------------------------------- written

SCHEMA = 1
"""The first field of every document; it counts the changes that remove or redefine a field."""


def json_pieces(document: dict[str, Any]) -> Iterator[str]:
    r"""The text of a document with its schema number first, in ASCII; in pieces, for that of
    100,000 tensors is large, and its parts larger.

    A number that is NaN or infinite becomes the text ``nan``, ``inf`` or ``-inf``; half of a
    surrogate pair, which names in hostile files and names of files in other encodings hold, becomes
    its escape as six characters of text.

    >>> print(*json_pieces({"loss": float("nan"), "name": "a\udc80", "sizes": []}))
    {
      "schema": 1,
      "loss": "nan",
      "name": "a\\udc80",
      "sizes": []
    }
    """
    whole = {"schema": SCHEMA, **document}
    if not _is_strict(whole):
        whole = strict(whole)
    pieces = json.JSONEncoder(indent=2, allow_nan=False).iterencode(whole)
    while piece := "".join(islice(pieces, _PIECE)):
        yield piece


_PIECE = 10_000  # tokens


def _is_strict(document: dict[str, Any]) -> bool:
    try:
        return "\\ud" not in json.dumps(document, allow_nan=False)
    except ValueError:  # a number that JSON does not have
        return False


def strict(value: Any) -> Any:
    """A value as `json_pieces` writes it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return _strict_object(value)
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def _strict_object(found: dict[str, Any]) -> dict[str, Any]:
    """An object whose names stay as many as they were: one that became another's is numbered."""
    made: dict[str, Any] = {}
    for name, value in found.items():
        plain, count = strict(name), 2
        wanted = plain
        while wanted in made:
            wanted, count = f"{plain}#{count}", count + 1
        made[wanted] = strict(value)
    return made
