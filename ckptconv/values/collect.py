"""The statistics of all tensors of a checkpoint, in one pass over its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.guarded import check_places
from ckptconv.support.choices import refuse_no_text, refuse_no_texts, spelling_checked
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import count_text
from ckptconv.tensors.fold import fold_all
from ckptconv.tensors.refs import Shape
from ckptconv.tensors.statistics import Statistics, StatisticsFolder
from ckptconv.values.named import NamedValue, named_values

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """The statistics of the tensors of a checkpoint, in its order.

    `unread` are the names of tensors whose numbers ckptconv does not know how to read, such as
    those that are quantized to less than a byte.
    """

    path: str
    format: str
    tensors: tuple[TensorStatistics, ...]
    unread: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return short_repr(
            "CheckpointStatistics", self.path, self.format, count_text(len(self.tensors), "tensor")
        )

    def _repr_html_(self) -> str:
        from ckptconv.values.report import notebook_rows

        return html_table(self.path, notebook_rows(self))


@spelling_checked
def stats(
    source: Named,
    *,
    only: str | None = None,
    match: Sequence[str] = (),
    tag: str | None = None,
    on_progress: OnProgress | None = None,
) -> CheckpointStatistics:
    """The statistics of every tensor of the checkpoint `source`, of any container.

    `only` is the path of the part to look at, `match` are globs over the names of its tensors;
    `tag` picks the step of a folder of several. Each byte is read once, by several threads, and
    held against the checksums that the file declares. `on_progress` is called with a `Progress`,
    one call at a time. Memory is bounded by some 100 MB. Raises `CheckpointError` when the
    checkpoint cannot be read, or is damaged.
    """
    refuse_no_text(only=only)
    refuse_no_texts(match=match)
    with open_certain(source, tag=tag) as checkpoint:
        found = named_values(checkpoint, only).matching(match)
        check_places(checkpoint.sources)
        return CheckpointStatistics(
            str(checkpoint.path),
            checkpoint.format,
            statistics_of(found.values, on_progress),
            found.unread,
        )


def statistics_of(
    values: Sequence[NamedValue], on_progress: OnProgress | None = None
) -> tuple[TensorStatistics, ...]:
    """The statistics of each of some tensors of an open checkpoint, in their order."""
    # equal views share a pass, but the same bytes may be decoded in different ways
    groups = [[item for item in values if item.decode is None]]
    groups += [[item] for item in values if item.decode is not None]
    folders = {
        id(item): folder
        for items in groups
        for item, folder in zip(items, _folded(items, on_progress), strict=True)
    }
    return tuple(
        TensorStatistics(
            item.name,
            item.dtype.name,
            item.ref.shape,
            item.ref.nbytes,
            item.ref.location,
            folders[id(item)].statistics(),
        )
        for item in values
    )


def _folded(items: Sequence[NamedValue], on_progress: OnProgress | None) -> list[StatisticsFolder]:
    """The folder of each of some tensors after a pass over all of them."""
    by_ref = {id(item.ref): item for item in items}
    made = fold_all(
        [item.ref for item in items],
        lambda ref: [StatisticsFolder(ref.dtype, ref.numel, by_ref[id(ref)].decode)],
        lambda nbytes: Meter("read", nbytes, on_progress),
        threads=_THREADS,
    )
    return [folder for [folder] in made]


Sort = Literal["order", "name", "min", "max", "abs-max", "mean", "std", "zeros", "nan", "size"]
"""What `stats` sorts by; all but ``order`` and ``name`` begin with the largest."""


def in_order(found: CheckpointStatistics, sort: Sort, top: int | None) -> list[TensorStatistics]:
    """The tensors sorted, the first `top` of them (None: all); those without a figure come last."""
    tensors = list(found.tensors)
    if sort == "name":
        tensors.sort(key=lambda item: item.name)
    elif sort != "order":
        tensors.sort(key=lambda item: _rank(_figure(item, sort)))
    return tensors[:top]


def _rank(figure: float | int | None) -> tuple[bool, float]:
    return figure is None, 0.0 if figure is None else -figure


def _figure(item: TensorStatistics, sort: Sort) -> float | int | None:
    known = item.statistics
    return {
        "min": known.minimum,
        "max": known.maximum,
        "abs-max": known.abs_max,
        "mean": known.mean,
        "std": known.std,
        "zeros": known.zeros,
        "nan": known.nan + known.infinite,
        "size": item.nbytes,
    }[sort]
