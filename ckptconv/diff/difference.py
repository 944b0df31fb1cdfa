"""What `diff_checkpoints` gives: the differences between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ckptconv.support.errors import (
    printable,
)
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import count_text
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
        counted = [self.shapes, self.values]
        counted += [self.dtypes] * (not self.ignore_dtype) + [self.locations] * self.strict_device
        return len({item.key for items in counted for item in items})  # type: ignore[attr-defined]

    def _counts(self) -> list[tuple[str, int]]:
        """How many keys differ, by what differs."""
        named = ("damaged", "only_a", "only_b", "dtypes", "shapes", "values", "others", "locations")
        return [(name, len(getattr(self, name))) for name in named if getattr(self, name)]

    @property
    def _verdict(self) -> str:
        if self.same:
            return "same"
        return "damaged" if self.damaged else "different"

    def __repr__(self) -> str:
        differing = [f"{count_text(self.differing, 'tensor')} differ"] if self.differing else []
        told = [
            f"{count:,} {name}"
            for name, count in self._counts()
            if name in ("damaged", "only_a", "only_b", "others")
        ]
        counts = [*differing, *told]
        return short_repr(
            "Difference", self._verdict, f"{self.tensors:,} tensors compared", *counts
        )

    def _repr_html_(self) -> str:
        rows = (
            (name, count, ", ".join(map(_key, getattr(self, name)[:5])))
            for name, count in self._counts()
        )
        return html_table(f"{self.a}, {self.b}: {self._verdict}", rows)


def _key(item: str | Changed | Reshaped | ValueChange) -> str:
    return printable(item if isinstance(item, str) else item.key)
