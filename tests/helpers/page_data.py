"""Reads the data of a page, in ways of its own."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"


def data_of(page: Path) -> dict[str, Any]:
    """The JSON in a page."""
    text = page.read_text("utf-8")
    [found] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    return dict(json.loads(found))


def names_of(file: dict[str, Any]) -> list[str]:
    """The names of the tensors of a file, in order."""
    made, before = [], b""
    for keep, word in zip(file["names"]["keep"], file["names"]["word"], strict=True):
        before = before[: 2 * keep] + file["names"]["words"][word].encode("utf-16-le")
        made.append(before.decode("utf-16-le"))
    return made


def numbers_of(text: str, letters: int) -> list[float]:
    """Packed numbers: each the leading bits of a float64."""
    made = []
    for at in range(0, len(text), letters):
        bits = "".join(f"{_LETTERS.index(letter):06b}" for letter in text[at : at + letters])
        made.append(struct.unpack(">d", int(bits.ljust(64, "0"), 2).to_bytes(8, "big"))[0])
    return made


def rows_of(text: list[float], width: int) -> list[list[float]]:
    """Numbers as rows of so many."""
    return [text[at : at + width] for at in range(0, len(text), width)]


def places_of(steps: list[int | None]) -> list[int | None]:
    """The places in a column of a comparison."""
    made: list[int | None] = []
    expected = 0
    for step in steps:
        made.append(None if step is None else expected + step)
        expected = expected if step is None else expected + step + 1
    return made
