"""Documents as JSON that every reader takes: ASCII, no NaN, no half of a character.

One schema number for all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

SCHEMA = 1
"""The first field of every document; it counts the changes that remove or redefine a field."""


def json_text(document: dict[str, Any]) -> str:
    r"""A document with its schema number first, in ASCII.

    A number that is NaN or infinite becomes the text ``nan``, ``inf`` or ``-inf``; half of a
    surrogate pair, which names in hostile files and names of files in other encodings hold, becomes
    its escape as six characters of text.

    >>> print(json_text({"loss": float("nan"), "name": "a\udc80", "sizes": []}))
    {
      "schema": 1,
      "loss": "nan",
      "name": "a\\udc80",
      "sizes": []
    }
    """
    return "".join(json_pieces(document))


def json_pieces(document: dict[str, Any]) -> Iterator[str]:
    """The text of `json_text` in pieces: that of 100,000 tensors is large, and its parts larger."""
    whole = {"schema": SCHEMA, **document}
    if not _is_strict(whole):
        whole = _strict(whole)
    pieces = json.JSONEncoder(indent=2, allow_nan=False).iterencode(whole)
    while piece := "".join(islice(pieces, _PIECE)):
        yield piece


_PIECE = 10_000  # tokens


def _is_strict(document: dict[str, Any]) -> bool:
    try:
        return "\\ud" not in json.dumps(document, allow_nan=False)
    except ValueError:  # a number that JSON does not have
        return False


def _strict(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return _strict_object(value)
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def _strict_object(found: dict[str, Any]) -> dict[str, Any]:
    """An object whose names stay as many as they were: one that became another's is numbered."""
    made: dict[str, Any] = {}
    for name, value in found.items():
        plain, count = _strict(name), 2
        wanted = plain
        while wanted in made:
            wanted, count = f"{plain}#{count}", count + 1
        made[wanted] = _strict(value)
    return made
