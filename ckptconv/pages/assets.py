"""The style sheet and the script of a page, which lie beside this module."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "web"


@cache
def asset(name: str) -> str:
    """The text of an asset: page.css, page.js."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """A text as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
