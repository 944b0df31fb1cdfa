"""Edits as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptconv.convert.edit import EditResult
from ckptconv.support.errors import printable
from ckptconv.support.rows import Row
from ckptconv.support.text import count_text, seconds_text, size_text

_STRINGS = 20  # metadata entries that are listed; --json lists all
_LONGEST = 200  # characters of one that are shown


def edit_headline(result: EditResult, *, dry_run: bool) -> str:
    """The line that says what was done, or would be."""
    file = f"{printable(result.path)} ({size_text(result.nbytes)})"
    if result.in_place is None:
        return (
            f"{file}: {'nothing to change' if not result.undone else 'as it was before the edit'}"
        )
    would = "would be " if dry_run else ""
    how = (
        f"only the header {would or 'is '}written"
        if result.in_place
        else f"the whole file {would or 'is '}written again"
    )
    return f"{file}: {how}" + ("" if dry_run else f", in {seconds_text(result.seconds)}")


def edit_lines(result: EditResult) -> Iterator[Row]:
    """What an edit changed, as rows."""
    if result.undone:
        yield Row("undone", "an edit that was interrupted in the middle of a write", "warning")
    if result.renamed:
        old, new = result.renamed[0]
        yield Row(
            "keys",
            f"{count_text(len(result.renamed), 'name')} changed, e.g. {printable(old)} → "
            f"{printable(new)}",
        )
    strings = [
        *(f"{printable(name)} = {printable(value, _LONGEST)}" for name, value in result.metadata),
        *(f"{printable(name)} is removed" for name in result.removed),
    ]
    yield from (Row("metadata", text) for text in strings[:_STRINGS])
    if len(strings) > _STRINGS:
        yield Row("metadata", f"and {len(strings) - _STRINGS:,} more")
    if result.mapping is not None and result.renamed:
        name = printable(result.mapping)
        yield Row("mapping", f"{name}; --rules {name} --reverse undoes it")
    if result.verified is not None:
        yield Row("verified", f"{count_text(result.verified, 'tensor')}", "good")


def edit_document(result: EditResult, *, dry_run: bool) -> dict[str, Any]:
    """An edit as JSON values."""
    return {
        "dry_run": dry_run,
        "path": str(result.path),
        "format": "safetensors",
        "bytes": result.nbytes,
        "tensors": result.tensors,
        "in_place": result.in_place,
        "renamed": dict(result.renamed),
        "metadata": dict(result.metadata),
        "removed": list(result.removed),
        "undone": result.undone,
        "mapping": None if result.mapping is None else str(result.mapping),
        "verified": result.verified,
        "seconds": round(result.seconds, 6),
    }
