"""What a comparison found, as text and JSON; everything that came out of a file is escaped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckptconv.diff.difference import Changed, Difference
from ckptconv.support.errors import printable
from ckptconv.support.rows import Level, Row
from ckptconv.support.text import count_text, size_text
from ckptconv.tensors.deviation import Deviation

_LISTED = 20


def difference_headline(found: Difference) -> str:
    """The line that says whether two checkpoints are the same."""
    verdict = "same"
    if not found.same:
        verdict = "damaged" if found.damaged else "differ"
    compared = f"{count_text(found.tensors, 'tensor')} in both, {size_text(found.nbytes)} compared"
    files = f"{printable(found.a)} ({found.a_format}), {printable(found.b)} ({found.b_format})"
    differing = found.differing
    total = f"; {differing:,} of {count_text(found.tensors, 'tensor')} differ" if differing else ""
    return f"{verdict}: {files}; {compared}{total}"


def difference_lines(found: Difference) -> Iterator[Row]:
    """What differs, as rows; at most 20 of a kind."""
    yield from _listed("damaged", [printable(text, 2000) for text in found.damaged], "error")
    yield from _listed("only in A", [printable(key) for key in found.only_a])
    yield from _listed("only in B", [printable(key) for key in found.only_b])
    yield from _listed(
        "dtype", _ignored_dtypes(found) if found.ignore_dtype else _changes(found.dtypes)
    )
    yield from _listed(
        "shape",
        [f"{printable(item.key)}: {list(item.a)} / {list(item.b)}" for item in found.shapes],
    )
    yield from _listed(
        "values",
        [f"{printable(item.key)}: {_deviation_text(item.deviation)}" for item in found.values],
    )
    yield from _listed("no tensor", _changes(found.others))
    counted = "" if found.strict_device else " (not counted)"
    tags = Counter((item.a, item.b) for item in found.locations).items()
    pairs = [
        f"{printable(ours)} / {printable(theirs)}: {count_text(count, 'tensor')}{counted}"
        for (ours, theirs), count in tags
    ]
    yield from _listed("device", pairs)
    for note in found.notes:
        yield Row("note", printable(note), "warning")
    if found.dtypes and not found.ignore_dtype and len(found.dtypes) == found.tensors:
        yield Row("note", "all dtypes differ; --ignore-dtype compares the numbers", "warning")


def _ignored_dtypes(found: Difference) -> list[str]:
    """The dtypes that differ, counted by pairs."""
    pairs = Counter((item.a, item.b) for item in found.dtypes).items()
    return [
        f"{printable(ours)} / {printable(theirs)}: {count_text(count, 'tensor')} (not counted)"
        for (ours, theirs), count in pairs
    ]


def _changes(items: Sequence[Changed]) -> list[str]:
    return [
        f"{printable(item.key) or 'the whole file'}: {printable(item.a)} / {printable(item.b)}"
        for item in items
    ]


def _listed(label: str, texts: Sequence[str], level: Level = "plain") -> Iterator[Row]:
    yield from (Row(label, text, level) for text in texts[:_LISTED])
    if len(texts) > _LISTED:
        yield Row(label, f"and {len(texts) - _LISTED:,} more", level)


def _deviation_text(found: Deviation) -> str:
    count = f"{found.count:,} of {count_text(found.numel, 'value')}"
    where = f"at {list(found.where)}: {_short(found.a)} / {_short(found.b)}"
    nans = f", {found.nans:,} with NaN" if found.nans else ""
    if found.max_abs is None:
        return f"{count}{nans}{_measures_text(found)}, first {where}"
    if found.max_abs == 0:
        return f"{count}{nans}, by bits only, {where}"
    rel = (
        ""
        if found.max_rel is None or math.isinf(found.max_rel)
        else f", max rel {found.max_rel:.6g}"
    )
    return f"{count}{nans}{_measures_text(found)}, max abs {found.max_abs:.6g}{rel}, {where}"


_DIGITS = 10  # characters: nine digits and a point


def _short(value: str) -> str:
    """A value of a tensor with at most 9 digits: as many as tell all float32 apart."""
    try:
        return (
            value
            if len(value) <= _DIGITS or value.lstrip("-").isdecimal()
            else f"{float(value):.9g}"
        )
    except ValueError:  # a complex number, a bool, bytes
        return value


def _measures_text(found: Deviation) -> str:
    """How far apart two tensors are as a whole."""
    if found.rel_l2 is None or found.nonfinite == found.numel:
        return ""
    cosine = "" if found.cosine is None else f", cosine {_cosine_text(found.cosine)}"
    rest = f" (without {found.nonfinite:,} that are NaN or infinite)" if found.nonfinite else ""
    if found.rel_l2 == 0 and found.nonfinite:
        return f", finite values equal{rest}"
    distance = (
        "B is all zero"
        if math.isinf(found.rel_l2) and found.cosine is None
        else f"rel L2 {found.rel_l2:.3g} of B"
    )
    return f", {distance}{cosine}{rest}"


def _cosine_text(cosine: float) -> str:
    """A cosine with as many nines as it takes to tell it from 1."""
    away = 1 - abs(cosine)
    digits = 7 if away <= 0 else min(16, max(7, 1 - math.floor(math.log10(away))))
    return f"{cosine:.{digits}f}"


def difference_document(found: Difference) -> dict[str, Any]:
    """A difference as JSON values; a number that JSON cannot hold is given as text (``inf``)."""
    return {
        "same": found.same,
        "damaged": list(found.damaged),
        "a": {"path": found.a, "format": found.a_format},
        "b": {"path": found.b, "format": found.b_format},
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "dtypes": _change_documents(found.dtypes),
        "shapes": [
            {"key": item.key, "a": list(item.a), "b": list(item.b)} for item in found.shapes
        ],
        "locations": _change_documents(found.locations),
        "values": [
            {"key": item.key, **_deviation_document(item.deviation)} for item in found.values
        ],
        "others": _change_documents(found.others),
        "notes": list(found.notes),
    }


def _change_documents(items: Sequence[Changed]) -> list[dict[str, str]]:
    return [{"key": item.key, "a": item.a, "b": item.b} for item in items]


def _deviation_document(found: Deviation) -> dict[str, Any]:
    return {
        "differing": found.count,
        "of": found.numel,
        "with_nan": found.nans,
        "max_abs": _number(found.max_abs),
        "max_rel": _number(found.max_rel),
        "rel_l2": _number(found.rel_l2),
        "cosine": found.cosine,
        "nonfinite": found.nonfinite,
        "where": list(found.where),
        "a": _value(found.a),
        "b": _value(found.b),
    }


def _value(text: str) -> float | bool | str:
    """A value of a tensor as JSON: a number, true or false; else text (``nan``, complex)."""
    if text in ("True", "False"):
        return text == "True"
    if text.lstrip("-").isdecimal():
        return int(text)
    try:
        return number if math.isfinite(number := float(text)) else text
    except ValueError:
        return text


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
