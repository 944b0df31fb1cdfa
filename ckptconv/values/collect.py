"""The statistics of all tensors of a checkpoint, in one pass over its bytes, and how they are
shown: as text, JSON and HTML. Everything that came out of a file is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import Any, Literal

from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.guarded import check_places
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_text,
    refuse_no_texts,
    spelling_checked,
)
from ckptconv.support.errors import OptionRefused, printable
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, Level, Row, html_table, short_repr
from ckptconv.support.table import Table, wrapped
from ckptconv.support.text import count_text, natural_key, number_text, some_text
from ckptconv.tensors.compute_ahead import THREADS
from ckptconv.tensors.fold import fold_all
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tensors.running_statistics import RunningStatistics
from ckptconv.tensors.scaled_weights import codes_note
from ckptconv.tensors.statistics import QUANTILE_ERROR, Statistics
from ckptconv.tree.checkpoint import Edit
from ckptconv.values.named import NamedValue, named_values
from ckptconv.values.picking import Box, plain_values

_FIGURES = {
    "min": "minimum", "max": "maximum", "mean": "mean", "std": "std", "zeros": "zeros",
    "nan": "nan", "inf": "infinite", "abs-max": "abs_max",
}  # fmt: skip
"""The figures that are told, and the attributes of `Statistics` that they are."""
_COUNTS = ("zeros", "nan", "inf")

HEAD = ("tensor", "dtype", "shape", *_FIGURES, "distinct")
"""What the columns of a table of tensors are."""


@dataclass(frozen=True, slots=True, repr=False)
class TensorStatistics:
    """The statistics of one tensor, and what it is: `dtype` by torch's name, `nbytes` that its
    values take, the device tag `location` that it was saved with.
    """

    name: str
    dtype: str
    shape: Shape
    nbytes: int
    location: str
    statistics: Statistics

    def __repr__(self) -> str:
        name, dtype, shape, low, high, mean, std, *_ = row(self)
        figures = f"min {low}, max {high}, mean {mean}, std {std}"
        return short_repr("TensorStatistics", name, dtype, shape, figures)

    def _repr_html_(self) -> str:
        return html_table(self.name, [row(self)], head=HEAD)


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointStatistics:
    """The statistics of the tensors of a checkpoint, in its order.

    `unread` are the names of tensors whose numbers ckptconv does not know how to read, such as
    those of six bits. `notes` say what there is to know of the checkpoint: of a folder, which of
    its files are not read.
    """

    path: str
    format: str
    tensors: tuple[TensorStatistics, ...]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorStatistics]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> TensorStatistics:
        """The statistics of the tensor of this name; `KeyError` where there is none."""
        for item in self.tensors:
            if item.name == name:
                return item
        raise KeyError(name)

    def __repr__(self) -> str:
        return short_repr(
            "CheckpointStatistics", self.path, self.format, count_text(len(self.tensors), "tensor")
        )

    def _repr_html_(self) -> str:
        return html_table(self.path, map(row, self.tensors), head=HEAD)


def row(item: TensorStatistics) -> tuple[str, ...]:
    """The figures of a tensor as texts, under `HEAD`."""
    known, distinct = item.statistics, "-"
    if known.distinct is not None:
        distinct = f"{known.distinct:,}"
        if not known.distinct_is_exact:
            distinct = f"≥{distinct}"
    figures = [
        f"{getattr(known, what):,}" if name in _COUNTS else number_text(getattr(known, what))
        for name, what in _FIGURES.items()
    ]
    name = printable(item.name, 500) or "the root"
    return name, item.dtype, str(list(item.shape)), *figures, distinct


Sort = Literal["order", "name", "min", "max", "abs-max", "mean", "std", "zeros", "nan", "size"]
"""What `stats` sorts by; all but ``order`` and ``name`` begin with the largest."""


def in_order(found: CheckpointStatistics, sort: Sort, top: int | None) -> list[TensorStatistics]:
    """The tensors sorted, the first `top` of them (None: all); those without a figure come last."""
    tensors = list(found.tensors)
    if sort == "name":
        tensors.sort(key=lambda item: natural_key(item.name))
    elif sort != "order":
        tensors.sort(key=lambda item: _rank(item, sort))
    return tensors[:top]


def _rank(item: TensorStatistics, sort: Sort) -> tuple[bool, float]:
    figure: float | int | None = item.nbytes
    if sort in _FIGURES:
        figure = getattr(item.statistics, _FIGURES[sort])
    if sort == "nan":
        figure = item.statistics.nan + item.statistics.infinite
    return figure is None, -(figure or 0.0)


# ---------------------------------------------------------------------------------- the table

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The fractions whose quantiles are told."""
_LEAVING = ("dtype", "shape", "distinct", "abs-max", "zeros", "max", "min", "inf", "nan", "std")
"""The columns that are left out where there is no room, the first of them first."""


def statistics_lines(
    found: CheckpointStatistics, tensors: Sequence[TensorStatistics], width: int, sort: str = ""
) -> Iterator[Row]:
    """The table of some of the tensors, as rows without labels.

    Where it is wider than `width` columns, the first of `_LEAVING` are left out, but never the one
    that it is sorted by. A tensor with NaN or infinite values is a warning.
    """
    levels: list[Level] = ["warning" if _is_odd(item) else "plain" for item in tensors]
    leaving = tuple(name for name in _LEAVING if name != sort)
    yield from Table(HEAD, [*map(row, tensors)], HEAD[:3], leaving, levels=levels).lines(width)
    more = len(found.tensors) - len(tensors)
    if more:
        yield Row("", f"and {more:,} more")
    if found.unread:
        unread = f"the numbers of {count_text(len(found.unread), 'tensor')} are not read"
        text = f"{unread}: {some_text([*found.unread])}"
        yield from (Row("", line, "warning") for line in wrapped(text, width))
    yield Row("", *_total(found))


def _is_odd(item: TensorStatistics) -> bool:
    return bool(item.statistics.nan or item.statistics.infinite)


def _total(found: CheckpointStatistics) -> tuple[str, Level]:
    odd = [item for item in found.tensors if _is_odd(item)]
    counted = count_text(len(found.tensors), "tensor")
    if odd:
        return f"{counted}, {len(odd):,} of them with NaN or infinite values", "warning"
    if not found.tensors:
        return "it holds no tensors", "good"
    return f"{counted}, all values finite", "good"


# -------------------------------------------------------------------------------- a histogram

_BARS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 8  # lines


def histogram_lines(item: TensorStatistics, width: int) -> Iterator[Row]:
    """The histogram of a tensor, drawn in at most `width` columns, with its figures."""
    known = item.statistics
    yield Row("", "  ".join(row(item)[:3]), "heading")
    bins = min(64, width - 4, max(8, 2 * math.isqrt(known.numel)))
    counts = known.histogram(bins)
    if counts is None:
        yield Row("", "  it holds no finite numbers", "warning")
        return
    largest = max(counts)
    for line in range(_HEIGHT, 0, -1):
        yield Row("", "  " + "".join(_bar(count, largest, line) for count in counts).rstrip())
    low, high = number_text(known.minimum), number_text(known.maximum)
    yield Row("", f"  {low}{high.rjust(max(bins - len(low), len(high) + 1))}")
    quantiles = known.quantiles(QUANTILES) or []
    shown = "  ".join(
        f"{100 * q:g}% {number_text(value)}" for q, value in zip(QUANTILES, quantiles, strict=True)
    )
    yield Row("", f"  quantiles  {shown}")
    counted = f"{known.zeros:,} zeros, {known.nan:,} NaN, {known.infinite:,} infinite"
    moments = f"mean {number_text(known.mean)}, std {number_text(known.std)}"
    if known.of_magnitudes:
        moments += " of the magnitudes"
    yield Row("", f"  {moments}; {known.numel:,} values: {counted}; highest bar {largest:,}")


def _bar(count: int, largest: int, line: int) -> str:
    """The part of a bar that stands in a line, counted from below."""
    eighths = math.ceil(8 * _HEIGHT * count / largest) - 8 * (line - 1)
    return _BARS[max(0, min(8, eighths))]


# ------------------------------------------------------------------------------------------- JSON

_TENSOR = Fields(
    "name dtype shape nbytes location numel=statistics.numel nan=statistics.nan "
    "infinite=statistics.infinite zeros=statistics.zeros min=statistics.minimum "
    "max=statistics.maximum abs_max=statistics.abs_max mean=statistics.mean std=statistics.std "
    "distinct=statistics.distinct distinct_is_exact=statistics.distinct_is_exact "
    "of_magnitudes=statistics.of_magnitudes quantiles=statistics "
    "quantile_error=statistics.distinct_is_exact",
    quantiles=lambda known: _quantiles(known),
    quantile_error=lambda is_exact: 0.0 if is_exact else QUANTILE_ERROR,
)


def _quantiles(known: Statistics) -> dict[str, float] | None:
    values = known.quantiles(QUANTILES)
    if values is None:
        return None
    return {f"{q:g}": value for q, value in zip(QUANTILES, values, strict=True)}


def statistics_document(
    found: CheckpointStatistics, tensors: Sequence[TensorStatistics], *, bins: int = 0
) -> dict[str, Any]:
    """The statistics of some of the tensors as a JSON object; with `bins`, histograms too."""
    documents = [_TENSOR.of(item) for item in tensors]
    if bins:
        for document, item in zip(documents, tensors, strict=True):
            document["histogram"] = item.statistics.histogram(bins)
    return {
        "path": found.path,
        "format": found.format,
        "tensors": documents,
        "left_out": len(found.tensors) - len(tensors),
        "unread": list(found.unread),
        "notes": list(found.notes),
    }


_MOST_VALUES = 1_000_000


def picked_document(
    path: PurePath, chosen: Sequence[tuple[NamedValue, Box]], output: Path | None
) -> dict[str, Any]:
    """Parts of tensors as a JSON object, with their values where they go to no `output`. Raises
    `OptionRefused` for more values than a document should have.
    """
    count = sum(prod(box.shape) for _, box in chosen)
    if output is None and count > _MOST_VALUES:
        raise OptionRefused(
            f"{count:,} values are too many for a document",
            hint="give indices such as '[:100]', or write them with --npy FILE",
        )
    return {
        "path": str(path),
        "output": None if output is None else str(output),
        "tensors": [
            {
                "name": item.name,
                "dtype": item.dtype.name,
                "shape": list(item.shape),
                "location": item.ref.location,
                "part": list(box.shape),
                "values": None if output is not None else plain_values(item, box),
            }
            for item, box in chosen
        ],
    }


def picked_headline(item: NamedValue, box: Box) -> str:
    """What the tensor is of which values are shown, and the shape of the part."""
    shape = str(list(item.shape))
    if box.shape != item.shape:
        shape += f", {list(box.shape)} of it"
    return f"{printable(item.name, 500)}  {item.dtype.name}  {shape}  {item.ref.location}"


# -------------------------------------------------------------------------- the pass over the bytes


@spelling_checked
def stats_checkpoint(
    source: Named,
    *,
    only: str | None = None,
    include: str | Sequence[str] = (),
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    distributions: bool = True,
    on_progress: OnProgress | None = None,
) -> CheckpointStatistics:
    """The statistics of every tensor of the checkpoint `source`, of any container.

    `only` is the path of the part to look at, `include` a glob, or several, over the names of its
    tensors; `tag` picks the step of a folder of several; `edits` are made to the checkpoint first.
    Without `distributions` there are no quantiles and histograms of numbers of more than 16 bits,
    which take a fifth of the time. Each byte is read once, by several threads, and held against the
    checksums that the file declares. `on_progress` is called with a `Progress`, one call at a time.
    Memory is bounded by some 100 MB. Raises `CheckpointError` when the checkpoint cannot be read,
    or is damaged.
    """
    refuse_no_text(only=only)
    refuse_no_flag(distributions=distributions)
    if isinstance(include, str):
        include = (include,)
    refuse_no_texts(include=include)
    with open_certain(source, tag=tag, edits=edits) as checkpoint:
        found = named_values(checkpoint, only).matching(include)
        check_places(checkpoint.sources)
        numbers = [item for item in found.values if item.has_numbers]
        others = [item.name for item in found.values if not item.has_numbers]
        known = statistics_of(numbers, on_progress, distributions=distributions)
        unread = (*found.unread, *others)
        told = (str(checkpoint.path), checkpoint.format)
        codes = codes_note(dict(item.tensors()) for item in checkpoint.state_dicts())
        notes = (*checkpoint.notes, *filter(None, [codes]))
        return CheckpointStatistics(*told, known, unread, notes)


stats = stats_checkpoint  # the name that it had first


def statistics_of(
    values: Sequence[NamedValue],
    on_progress: OnProgress | None = None,
    *,
    distributions: bool = True,
) -> tuple[TensorStatistics, ...]:
    """The statistics of each of some tensors of an open checkpoint, in their order."""
    # equal views share a pass, but the same bytes may be decoded in different ways
    groups = [[item for item in values if item.decode is None]]
    groups += [[item] for item in values if item.decode is not None]
    counters = {
        id(item): counter
        for items in groups
        for item, counter in zip(items, _folded(items, on_progress, distributions), strict=True)
    }
    made = []
    for item in values:
        told = (item.name, item.dtype.name, item.shape, item.ref.nbytes, item.ref.location)
        made.append(TensorStatistics(*told, counters[id(item)].statistics()))
    return tuple(made)


def _folded(
    items: Sequence[NamedValue], on_progress: OnProgress | None, distributions: bool
) -> list[RunningStatistics]:
    """The counter of each of some tensors after a pass over all of them."""
    by_ref = {id(item.read): item for item in items}

    def counters(ref: TensorRef) -> list[RunningStatistics]:
        one = by_ref[id(ref)]
        counter = RunningStatistics(
            ref.dtype,
            one.numel,
            one.decode,
            bits=one.bits,
            numbers=one.numbers,
            is_counted=distributions,
        )
        return [counter]

    made = fold_all(
        [item.read for item in items],
        counters,
        lambda nbytes: Meter("read", nbytes, on_progress),
        threads=THREADS,
    )
    return [counter for [counter] in made]
