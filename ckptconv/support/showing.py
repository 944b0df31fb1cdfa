"""How results show themselves: one short line in a prompt, a small table in a notebook.

Text from files is escaped in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ckptconv.support.errors import printable

WIDTH = 120
"""Columns of a `repr`, at most."""

_ROWS = 20
_CELL = 200  # characters


def short_repr(kind: str, *facts: object) -> str:
    """One line of at most `WIDTH` columns that says what something is; facts that are None or empty
    are left out.

    >>> short_repr("Scan", "models/", "plain", None, "3 files")
    '<Scan models/: plain, 3 files>'
    """
    told = [printable(fact) for fact in facts if fact is not None and fact != ""]
    text = f"{kind} {': '.join(filter(None, (told[0], ', '.join(told[1:]))))}" if told else kind
    return f"<{text}>" if len(text) <= WIDTH - 2 else f"<{text[: WIDTH - 3]}…>"


def html_table(title: object, rows: Iterable[tuple[object, ...]], *, more: int = 0) -> str:
    """A table of at most 20 rows, with a caption, as HTML; `more` rows are not among those given.

    >>> html_table("<a>", [("keys", 2)])
    '<table><caption>&lt;a&gt;</caption><tr><td>keys</td><td>2</td></tr></table>'
    """
    remaining = iter(rows)
    shown = [
        f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>"
        for row in islice(remaining, _ROWS)
    ]
    if left := more + sum(1 for _ in remaining):
        shown.append(f"<tr><td>and {left:,} more</td></tr>")
    return f"<table><caption>{_cell(title)}</caption>{''.join(shown)}</table>"


def _cell(value: object) -> str:
    from html import escape

    return escape(printable(value, _CELL))
