"""What a result says of itself: rows for a terminal, a document for JSON, a table for a notebook.

Each kind of result has its words and its table of `Fields` beside it; who shows them chooses the
colours. Text from files is escaped in rows and tables; a document has it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Literal

from ckptconv.support.errors import CheckpointError, KeyMismatch, printable
from ckptconv.support.records import dataclass

# -------------------------------------------------------------------------------- rows, a terminal

Level = Literal["plain", "heading", "good", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report; `is_command`: its text is for a shell, so it is never broken."""

    label: str
    text: str
    level: Level = "plain"
    is_command: bool = False


LISTED = 20
"""Rows of one label, at most; the rest is counted, and listed by `--json`."""


def listed(
    label: str, texts: Sequence[str], level: Level = "plain", *, most: int = LISTED
) -> Iterator[Row]:
    """A row for each of the first texts, and one that counts the others."""
    for text in texts[:most]:
        yield Row(label, text, level)
    if len(texts) > most:
        yield Row(label, f"and {len(texts) - most:,} more", level)


DANGER = "dangerous: "
"""What the note begins with that says that a file is dangerous to load."""


def danger_in(notes: Iterable[str]) -> str:
    """What the notes say of the danger of loading; nothing where there is none."""
    return next((note[len(DANGER) :] for note in notes if note.startswith(DANGER)), "")


def note_rows(notes: Iterable[str]) -> Iterator[Row]:
    """Notes as rows; one on danger is red."""
    for note in notes:
        if note.startswith(DANGER):
            yield Row("dangerous", printable(note[len(DANGER) :], 500), "error")
        else:
            yield Row("note", printable(note), "warning")


# -------------------------------------------------------------------------------- documents, JSON


class Fields:
    """The table of a document: its names in order, ``bytes=nbytes`` where the attribute has another
    name, ``source=.`` where a group of fields is of the result itself.

    `inner` says what a value becomes: the fields of it, or of each of several, or a function's
    result. Without that, tuples are lists and paths are texts.

    >>> Fields("text level").of(Row("note", "slow"))
    {'text': 'slow', 'level': 'plain'}
    """

    def __init__(self, names: str, **inner: Fields | Callable[[Any], Any]) -> None:
        self._fields: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = []
        for word in names.split():
            name, _, attribute = word.partition("=")
            get = _itself if attribute == "." else attrgetter(attribute or name)
            shape = inner.get(name, _plain)
            if isinstance(shape, Fields):
                shape = shape.of_all
            self._fields.append((name, get, shape))

    def of(self, result: object) -> dict[str, Any]:
        """The document of a result."""
        return {name: shape(get(result)) for name, get, shape in self._fields}

    def of_all(self, value: Any) -> Any:
        """The document of a value that may be several, or None."""
        if isinstance(value, (tuple, list)):
            return [self.of(item) for item in value]
        return None if value is None else self.of(value)


def _itself(result: Any) -> Any:
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, PurePath) else value


_ERROR = Fields(
    "kind=. message=. path where what hint", kind=lambda error: type(error).__name__, message=str
)


def error_document(error: CheckpointError, exit_code: int) -> dict[str, Any]:
    """An error as JSON values, with the program's exit code; of keys that do not fit, each one."""
    document: dict[str, Any] = {"error": {**_ERROR.of(error), "exit_code": exit_code}}
    if isinstance(error, KeyMismatch) and error.fit is not None:
        document["fit"] = error.fit.document()
    return document


# --------------------------------------------------------------------------- a prompt, a notebook

WIDTH = 120
"""Columns of a `repr`, at most."""

_CELL = 200  # characters


def short_repr(kind: str, *facts: object) -> str:
    """One line of at most `WIDTH` columns that says what something is; facts that are None or empty
    are left out.

    >>> short_repr("Scan", "models/", "plain", None, "3 files")
    '<Scan models/: plain, 3 files>'
    """
    shown = [printable(fact) for fact in facts if fact is not None and fact != ""]
    text = kind
    if shown:
        text = f"{kind} {': '.join(filter(None, (shown[0], ', '.join(shown[1:]))))}"
    if len(text) > WIDTH - 2:
        text = f"{text[: WIDTH - 3]}…"
    return f"<{text}>"


def html_table(
    title: object,
    rows: Iterable[tuple[object, ...]],
    *,
    head: tuple[object, ...] = (),
    most: int = LISTED,
    more: int = 0,
    cells: str = "",
) -> str:
    """A table of at most `most` rows, with a caption, as HTML; `more` rows are not among those
    given, `cells` are the attributes of all cells.

    >>> html_table("<a>", [("keys", 2)])
    '<table><caption>&lt;a&gt;</caption><tr><td>keys</td><td>2</td></tr></table>'
    """
    remaining = iter(rows)
    shown = [_html_row(row, "td", cells) for row in islice(remaining, most)]
    if head and shown:
        shown.insert(0, _html_row(head, "th"))
    left = more + sum(1 for _ in remaining)
    if left:
        shown.append(_html_row((f"and {left:,} more",), "td", cells))
    return f"<table><caption>{_cell(title)}</caption>{''.join(shown)}</table>"


def _html_row(row: Iterable[object], tag: str, attributes: str = "") -> str:
    cells = "".join(f"<{tag}{attributes}>{_cell(cell)}</{tag}>" for cell in row)
    return f"<tr>{cells}</tr>"


def _cell(value: object) -> str:
    from html import escape

    return escape(printable(value, _CELL))
