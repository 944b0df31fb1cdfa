"""The style sheet and the script of a page, which lie beside this module."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "web"


SCRIPTS = ("text", "columns", "table", "tensor", "colors", "map", "start")
"""The parts of the script, which are one function; later ones use what earlier ones define."""


@cache
def style() -> str:
    """The style sheet of a page."""
    return _asset("page.css")


@cache
def script() -> str:
    """The script of a page."""
    parts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """A text as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
