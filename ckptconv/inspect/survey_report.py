"""Several checkpoints in one table that fits a terminal of any width, and as JSON.

Text from files is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import combining, east_asian_width

from ckptconv.inspect.report import inspection_document
from ckptconv.inspect.surveys import Surveyed, Unread
from ckptconv.support.errors import printable
from ckptconv.support.rows import Level, Row
from ckptconv.support.text import count_text, size_text

_HEAD = ("name", "format", "size", "tensors", "dtypes", "devices", "portable")
_RIGHT = frozenset((2, 3))  # columns of numbers
_GAP = 2
_NARROWEST = 12  # cells of the names; where less is left, each checkpoint has lines of its own
_SHOWN = 3  # dtypes and devices that are named; the rest is counted

Fields = tuple[str, ...]


def is_portable(item: Surveyed | Unread) -> bool:
    """Whether it could be opened, and its own library opens it on any host."""
    return isinstance(item, Surveyed) and item.found.portable


def survey_lines(items: Sequence[Surveyed | Unread], width: int) -> Iterator[Row]:
    """The table, as rows without labels.

    Where it does not fit `width`, each checkpoint has lines of its own.
    """
    rows = [_row(item) for item in items]
    widths = [max(map(_cells, column)) for column in zip(_HEAD, *rows, strict=True)]
    room = width - sum(widths[1:]) - _GAP * (len(widths) - 1)
    fits = room >= min(widths[0], _NARROWEST)
    widths[0] = min(widths[0], room)
    if fits:
        yield Row("", _aligned(_HEAD, widths), "heading")
    for item, row in zip(items, rows, strict=True):
        if fits and _cells(row[0]) <= room:
            yield Row("", _aligned(row, widths))
        elif fits:
            yield from (Row("", line) for line in _wrapped(row[0], width, ""))
            yield Row("", _aligned(("", *row[1:]), widths))
        else:
            yield from _stacked(item, row, width)
        yield from _told(item, width, brief=fits)
    portable = sum(map(is_portable, items))
    level: Level = "good" if portable == len(items) else "warning"
    yield Row("", f"{portable} of {len(items)} portable", level)


def _row(item: Surveyed | Unread) -> Fields:
    name = ", ".join(printable(path) for path in item.paths)
    if isinstance(item, Unread):
        return (name, *("-" for _ in _HEAD[1:]))
    found = item.found
    return (
        name,
        found.format,
        size_text(found.nbytes),
        f"{found.tensors:,}",
        _some(found.dtypes),
        _some(found.locations),
        "yes" if is_portable(item) else "no",
    )


def _some(counted: Mapping[str, int]) -> str:
    names = sorted(counted, key=lambda name: -counted[name])
    return (
        ", ".join(printable(name, 30) for name in names[:_SHOWN])
        + f" +{len(names) - _SHOWN}" * (len(names) > _SHOWN)
        or "-"
    )


def _aligned(row: Fields, widths: Sequence[int]) -> str:
    padded = [
        " " * (width - _cells(cell)) + cell
        if index in _RIGHT
        else cell + " " * (width - _cells(cell))
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return (" " * _GAP).join(padded).rstrip()


def _stacked(item: Surveyed | Unread, row: Fields, width: int) -> Iterator[Row]:
    yield from (Row("", line, "heading") for line in _wrapped(row[0], width, ""))
    if isinstance(item, Surveyed):
        facts = [row[1], row[2], count_text(item.found.tensors, "tensor"), row[4], row[5]]
        text = ", ".join(fact for fact in facts if fact != "-")
        yield from (Row("", line) for line in _wrapped(text, width, "  "))


def _told(item: Surveyed | Unread, width: int, *, brief: bool) -> Iterator[Row]:
    """Who opens it anywhere, why nobody does, or why it could not be opened.

    `brief`: not what is said of nearly all.
    """
    if isinstance(item, Unread):
        error = item.error
        where = f"{printable(error.where)}: " if error.where else ""
        text = f"error: {where}{printable(error.what, 2000)}" + (
            f"; {printable(error.hint, 2000)}" if error.hint else ""
        )
        yield from (Row("", line, "error") for line in _wrapped(text, width, "  "))
    elif reasons := item.found.reasons:
        text = f"not portable: {'; '.join(reason.what for reason in reasons)}"
        yield from (Row("", line, "warning") for line in _wrapped(text, width, "  "))
    elif not brief or not item.found.opening.is_usual:
        yield from (
            Row("", line, "good")
            for line in _wrapped(f"portable ({item.found.opening.by})", width, "  ")
        )


def _wrapped(text: str, width: int, indent: str) -> Iterator[str]:
    """Lines of at most `width` cells; a word that is longer is cut."""
    room = max(width - len(indent), 10)
    line = ""
    for word in text.split(" "):
        if line and _cells(line) + 1 + _cells(word) > room:
            yield indent + line
            line = ""
        line = f"{line} {word}" if line else word
        while _cells(line) > room:
            fit = next(count for count in range(len(line), 0, -1) if _cells(line[:count]) <= room)
            yield indent + line[:fit]
            line = line[fit:]
    if line:
        yield indent + line


def _cells(text: str) -> int:
    """The columns that a terminal needs for a text: two for a wide character (Unicode annex 11)."""
    wide = sum(east_asian_width(char) in "WF" for char in text if not combining(char))
    return wide + sum(not combining(char) for char in text)


def survey_document(items: Sequence[Surveyed | Unread]) -> dict[str, Any]:
    """Several checkpoints as JSON values, errors as items among them."""
    return {"checkpoints": [_document(item) for item in items]}


def _document(item: Surveyed | Unread) -> dict[str, Any]:
    if isinstance(item, Unread):
        from ckptconv.convert.error_document import error_document

        return {"path": str(item.paths[0]), **error_document(item.error, 1)}
    return inspection_document(item.found, item.fix)
