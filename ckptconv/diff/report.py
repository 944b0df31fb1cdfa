"""What a comparison gives, and how that is shown: as a table, as JSON and as HTML.

Everything that came out of a file is escaped here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ckptconv.support.errors import printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import LISTED, Fields, Row, listed, note_rows, short_repr
from ckptconv.support.table import Table
from ckptconv.support.text import count_text, number_text, size_text
from ckptconv.tensors.scaled_weights import LOOK_THROUGH

if TYPE_CHECKING:
    from ckptconv.tensors.deviation import Deviation


@dataclass(frozen=True, slots=True)
class Changed:
    """One fact about a key that is `a` in the first checkpoint and `b` in the second."""

    key: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor that has the shape `a` in the first checkpoint and `b` in the second."""

    key: str
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A tensor whose values differ, and how."""

    key: str
    deviation: Deviation


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """The differences between the checkpoints `a` and `b`, in the order of the keys of `a`
    (`values`: the largest first).

    `tensors` were compared, each of `nbytes` in sum. `others` are values that are not tensors, or a
    tensor in one of them only. `locations` are device tags that differ; they make a difference only
    with `strict_device`, and `dtypes` do unless `ignore_dtype`. `damaged` tells of records that
    were compared and do not have the checksum that their archive declares.
    """

    a: str
    b: str
    a_format: str
    b_format: str
    tensors: int
    nbytes: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    dtypes: tuple[Changed, ...]
    shapes: tuple[Reshaped, ...]
    locations: tuple[Changed, ...]
    values: tuple[ValueChange, ...]
    others: tuple[Changed, ...]
    notes: tuple[str, ...] = ()
    strict_device: bool = False
    ignore_dtype: bool = False
    damaged: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing that counts differs, and nothing that was compared is damaged."""
        counted = (self.only_a, self.only_b, self.shapes, self.values, self.others, self.damaged)
        if any(counted) or (self.dtypes and not self.ignore_dtype):
            return False
        return not (self.strict_device and self.locations)

    @property
    def differing(self) -> int:
        """How many tensors that both have differ, in whatever counts."""
        keys = {item.key for item in self.shapes} | {item.key for item in self.values}
        if not self.ignore_dtype:
            keys |= {item.key for item in self.dtypes}
        if self.strict_device:
            keys |= {item.key for item in self.locations}
        return len(keys)

    def __bool__(self) -> bool:
        """Raises `TypeError`: whether it is the same or a difference that is true, nobody knows."""
        raise TypeError("a Difference is neither true nor false: write .same or not .same")

    def _counts(self) -> list[tuple[str, int]]:
        """How many keys differ, by what differs."""
        named = ("damaged", "only_a", "only_b", "dtypes", "shapes", "values", "others", "locations")
        return [(name, len(getattr(self, name))) for name in named if getattr(self, name)]

    def _verdict(self, different: str = "different") -> str:
        if self.same:
            return "same"
        if self.damaged:
            return "damaged"
        return different

    def __repr__(self) -> str:
        told = ("damaged", "only_a", "only_b", "others")
        counts = [f"{count:,} {name}" for name, count in self._counts() if name in told]
        if self.differing:
            counts.insert(0, f"{count_text(self.differing, 'tensor')} differ")
        compared = f"{self.tensors:,} tensors compared"
        return short_repr("Difference", self._verdict(), compared, *counts)

    def _repr_html_(self) -> str:
        return difference_table(self, most=None).html(difference_headline(self))


# ------------------------------------------------------------------------------------------- text


def difference_headline(found: Difference) -> str:
    """The line that says whether two checkpoints are the same."""
    tensors = count_text(found.tensors, "tensor")
    files = f"{printable(found.a)} ({found.a_format}), {printable(found.b)} ({found.b_format})"
    compared = f"{tensors} in both, {size_text(found.nbytes)} compared"
    text = f"{found._verdict('differ')}: {files}; {compared}"
    if not found.differing:
        return text
    verb = "differs" if found.tensors == 1 else "differ"
    return f"{text}; {found.differing:,} of {tensors} {verb}"


HEAD = ("key", "differs", "rel L2", "cosine", "max abs", "max rel", "at", "A", "B")
# The columns that are left out where there is no room, the first of them first
_LEAVING, _LEAVING_LAST = ("B", "A", "at", "max rel"), ("cosine", "max abs")


def difference_table(found: Difference, *, most: int | None = LISTED) -> Table:
    """A row for each key that differs, the worst first: what only one has or cannot be measured,
    then values, those with NaN and the farthest first; at most `most` of a kind (None: all).
    """
    kinds: list[tuple[str, Sequence[tuple[str, ...]]]] = [
        ("only in A", [(_key(key), "only in A") for key in found.only_a]),
        ("only in B", [(_key(key), "only in B") for key in found.only_b]),
        ("no tensor", _changes("no tensor", found.others)),
        (
            "of another shape",
            [(_key(at.key), f"shape: {list(at.a)} / {list(at.b)}") for at in found.shapes],
        ),
        ("of another dtype", () if found.ignore_dtype else _changes("dtype", found.dtypes)),
        ("with other values", [_values_row(item) for item in found.values]),
    ]
    rows: list[tuple[str, ...]] = []
    for kind, of_kind in kinds:
        rows += of_kind[:most]
        if most is not None and len(of_kind) > most:
            rows.append((f"and {len(of_kind) - most:,} more {kind}; --all shows all",))
    head = HEAD if found.values else HEAD[:2]
    return Table(head, rows, {"key", "differs", "at"}, _LEAVING, _LEAVING_LAST)


def difference_rows(found: Difference) -> Iterator[Row]:
    """What is said beside the table: damage, device tags, what was chosen."""
    yield from listed("damaged", [printable(text, 2000) for text in found.damaged], "error")
    if found.ignore_dtype:
        yield from listed("dtype", _pairs(found.dtypes, is_counted=False))
    yield from listed("device", _pairs(found.locations, is_counted=found.strict_device))
    measured = (item.deviation for item in found.values if not _is_by_nonfinite(item.deviation))
    apart = sum(deviation.nonfinite for deviation in measured)
    if apart:
        text = f"rel L2 and cosine leave out NaN and infinity ({count_text(apart, 'value')})"
        yield Row("note", text)
    yield from note_rows(found.notes)
    has_codes = any(note.endswith(LOOK_THROUGH) for note in found.notes)
    if found.dtypes and not found.ignore_dtype and not has_codes:
        text = "values of different dtypes are not compared; --ignore-dtype compares them"
        yield Row("note", text, "warning")


def _key(key: str) -> str:
    return printable(key, 500) or "the whole file"


def _changes(what: str, items: Sequence[Changed]) -> list[tuple[str, ...]]:
    return [
        (_key(item.key), f"{what}: {printable(item.a)} / {printable(item.b)}") for item in items
    ]


def _pairs(items: Sequence[Changed], *, is_counted: bool) -> list[str]:
    """What differs, counted by pairs, and whether that is a difference."""
    counted = "" if is_counted else " (not counted)"
    pairs = Counter((item.a, item.b) for item in items).items()
    return [
        f"{printable(ours)} / {printable(theirs)}: {count_text(count, 'tensor')}{counted}"
        for (ours, theirs), count in pairs
    ]


def _values_row(item: ValueChange) -> tuple[str, ...]:
    found = item.deviation
    differs = f"{found.count:,} of {found.numel:,}"
    if found.nans:
        differs += f", {found.nans:,} NaN"
    if found.max_abs == 0:
        differs += ", by bits only"
    rel_l2, cosine = number_text(found.rel_l2), _cosine_text(found.cosine)
    if _is_by_nonfinite(found):
        rel_l2 = cosine = "-"
    elif rel_l2 == "inf" and found.cosine is None:
        differs, rel_l2 = f"{differs}, B all 0", "-"
    max_rel = number_text(found.max_rel)
    if found.max_rel == math.inf:  # of a zero in B
        max_rel = number_text(None)
    far = (rel_l2, cosine, number_text(found.max_abs), max_rel)
    return (_key(item.key), differs, *far, str(list(found.where)), _short(found.a), _short(found.b))


def _is_by_nonfinite(found: Deviation) -> bool:
    """Whether tensors differ in NaN or infinity alone, which rel L2 and cosine leave out."""
    return found.nonfinite == found.numel or (found.rel_l2 == 0 and found.nonfinite > 0)


_DIGITS = 10  # characters: nine digits and a point


def _short(value: str) -> str:
    """A value of a tensor with at most 9 digits: as many as tell all float32 apart."""
    if len(value) <= _DIGITS or value.lstrip("-").isdecimal():
        return value
    try:
        return f"{float(value):.9g}"
    except ValueError:  # a complex number, a bool, bytes
        return value


def _cosine_text(cosine: float | None) -> str:
    """A cosine of four digits, or with as many nines as it takes to tell it from 1."""
    if cosine is None:
        return "-"
    digits = 4
    away = 1 - abs(cosine)
    if away > 0:  # a double has 16 digits
        digits = min(16, max(digits, -math.floor(math.log10(away))))
    return f"{cosine:.{digits}f}"


# ------------------------------------------------------------------------------------------- JSON


def _value(text: str) -> float | bool | str:
    """A value of a tensor as JSON: a number, true or false; else text (``nan``, complex)."""
    if text in ("True", "False"):
        return text == "True"
    if text.lstrip("-").isdecimal():
        return int(text)
    with suppress(ValueError):
        number = float(text)
        if math.isfinite(number):
            return number
    return text


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


_CHANGE = Fields("key a b")
_VALUES = Fields(
    "key differing=deviation.count of=deviation.numel with_nan=deviation.nans "
    "max_abs=deviation.max_abs max_rel=deviation.max_rel rel_l2=deviation.rel_l2 "
    "cosine=deviation.cosine nonfinite=deviation.nonfinite where=deviation.where "
    "a=deviation.a b=deviation.b",
    **dict.fromkeys(("max_abs", "max_rel", "rel_l2"), _number),
    **dict.fromkeys(("a", "b"), _value),
)
DIFFERENCE = Fields(
    "same damaged a=. b=. tensors bytes=nbytes only_a only_b dtypes shapes locations values others "
    "notes",
    a=Fields("path=a format=a_format"),
    b=Fields("path=b format=b_format"),
    values=_VALUES,
    **dict.fromkeys(("dtypes", "shapes", "locations", "others"), _CHANGE),
)
"""The document of a `Difference`; a number that JSON cannot hold is given as text (``inf``)."""
