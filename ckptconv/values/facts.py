"""What the values of the tensors of a checkpoint are, in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ckptconv.support.errors import printable
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import count_text
from ckptconv.tensors.refs import Shape
from ckptconv.tensors.statistics import Statistics

HEAD = (
    "tensor", "dtype", "shape", "min", "max", "mean", "std", "zeros", "nan", "inf", "abs-max",
    "distinct",
)  # fmt: skip
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
        return html_table(self.name, [HEAD, row(self)])


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointStatistics:
    """The statistics of the tensors of a checkpoint, in its order.

    `unread` are the names of tensors whose numbers ckptconv does not know how to read, such as
    those of six bits.
    """

    path: str
    format: str
    tensors: tuple[TensorStatistics, ...]
    unread: tuple[str, ...] = ()

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
        return html_table(self.path, [HEAD, *map(row, self.tensors)])


def row(item: TensorStatistics) -> tuple[str, ...]:
    """The figures of a tensor as texts, under `HEAD`."""
    known = item.statistics
    return (
        printable(item.name, 500) or "the root",
        item.dtype,
        "×".join(map(str, item.shape)) or "scalar",
        *map(number_text, (known.minimum, known.maximum, known.mean, known.std)),
        f"{known.zeros:,}",
        f"{known.nan:,}",
        f"{known.infinite:,}",
        number_text(known.abs_max),
        _distinct_text(known),
    )


def _distinct_text(known: Statistics) -> str:
    if known.distinct is None:
        return "-"
    return f"{known.distinct:,}" if known.distinct_is_exact else f"≥{known.distinct:,}"


def number_text(value: float | int | None) -> str:
    """A figure in at most ten characters; a dash where there is none.

    >>> number_text(0.123456), number_text(-3), number_text(1e-30), number_text(None)
    ('0.1235', '-3', '1e-30', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    return f"{float(value):.4g}"


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
