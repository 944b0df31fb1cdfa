"""Documents as JSON that every reader takes: ASCII, no NaN, no half of a character; one schema number for all of them."""

from __future__ import annotations

import json
import math
from typing import Any

SCHEMA = 1
"""The first field of every document; a field that goes, or means something else, makes it one more."""


def json_text(document: dict[str, Any]) -> str:
    r"""A document with its schema number first, in ASCII.

    A number that is NaN or infinite becomes the text ``nan``, ``inf`` or ``-inf``; half of a surrogate pair, which names in
    hostile files and names of files in other encodings hold, becomes its escape as six characters of text.

    >>> print(json_text({"loss": float("nan"), "name": "a\udc80", "sizes": []}))
    {
      "schema": 1,
      "loss": "nan",
      "name": "a\\udc80",
      "sizes": []
    }
    """
    whole = {"schema": SCHEMA, **document}
    try:
        text = json.dumps(whole, indent=2, allow_nan=False)
        if "\\ud" not in text:
            return text
    except ValueError:  # a number that JSON has not
        pass
    return json.dumps(_strict(whole), indent=2, allow_nan=False)


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
