"""What all pages are made of: the frame around a body, small pieces of HTML, the files beside this
module.

Every text that comes from a checkpoint goes through `escaped`. The policy in the head lets nothing
run and nothing load but the script and the style sheet of the page itself.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from pathlib import Path
from string import Template

from ckptconv import __version__
from ckptconv.support.errors import printable

_FOLDER = Path(__file__).parent / "web"

SCRIPTS = ("text", "columns", "table", "tensor", "colors", "map", "start")
"""The parts of the script, which are one function; later ones use what earlier ones define."""


@cache
def asset(name: str) -> str:
    """A file beside this module."""
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """The script of a page."""
    parts = "\n".join(asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def page(title: str, body: Iterable[str], *, looks: str, code: str | None = None) -> str:
    """The whole text of a page of these looks, which may run `code` only."""
    runs = ""
    if code is not None:
        runs = f"script-src {_hash(code)}; "
    return filled(
        "frame.html",
        policy=f"default-src 'none'; {runs}style-src {_hash(looks)}; base-uri 'none'; "
        "form-action 'none'",
        version=__version__,
        title=escaped(title),
        style=looks,
        body="".join(body),
    )


def filled(name: str, **values: str) -> str:
    """A file beside this module with values in it, which are HTML."""
    return Template(asset(name)).substitute(values)


def _hash(source: str) -> str:
    """A text as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def escaped(value: object, limit: int = 2000) -> str:
    """A text as HTML: one line, what cannot be seen escaped, and nothing in it markup."""
    return escape(printable(value, limit))


def verdict(level: str, words: str) -> str:
    """An item of a list of verdicts."""
    return f'<li class="{level}">{escaped(words)}</li>\n'


def tiles(facts: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Facts side by side: a label, a value, and what is said below it."""
    yield '<dl class="tiles">\n'
    for label, value, *more in facts:
        small = "".join(f"<small>{escaped(words)}</small>" for words in more)
        yield f"<div><dt>{label}</dt><dd>{escaped(value)}{small}</dd></div>\n"
    yield "</dl>\n"
