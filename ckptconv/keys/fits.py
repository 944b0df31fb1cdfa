"""What fitting keys to a target gives: which key becomes which, and what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import Any

from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, html_table, short_repr

Shape = tuple[int, ...] | None
"""The shape of the tensor under a key; None, which fits all, where there is none or none known."""
Shapes = Mapping[str, Shape]
Ties = Sequence[Sequence[str]]
"""The keys of a target that are names of one tensor, group by group."""


SAME_KEYS, WRAPPERS = "the same keys", "wrappers"
"""The ways to fit keys that do not assign any to a key of another name."""


@dataclass(frozen=True, slots=True)
class Misshapen:
    """A target key and the source key that has its name but another shape."""

    key: str
    source_key: str
    source: Shape
    target: Shape


@dataclass(frozen=True, slots=True)
class Candidates:
    """A target key that nothing was assigned to, and the source keys that come nearest to it."""

    key: str
    source_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Fit:
    """What happened to each key: `renames` maps each matched source key to its target key, even if
    both are the same.

    `missing` are the target keys that nothing was assigned to; `ambiguous` are those of them that
    several source keys could be meant for, `nearest` those for which something similar is left.
    `unexpected` are the source keys that are left over, and `mismatched` those of the right name
    and another shape. `filled` maps target keys that the source lacks to the source key of another
    name of the same tensor. `how` says in a word or two what the renaming is. `preset` names the
    framework's rules under which the keys would fit, where they do not and there are such.
    """

    how: str
    renames: Mapping[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Misshapen, ...] = ()
    ambiguous: tuple[Candidates, ...] = ()
    nearest: tuple[Candidates, ...] = ()
    filled: Mapping[str, str] = field(default_factory=dict)
    preset: str = ""

    @property
    def assigned(self) -> Mapping[str, str]:
        """The source keys that became keys of other names, by more than wrappers around them."""
        if self.how in (SAME_KEYS, WRAPPERS):
            return {}
        return {old: new for old, new in self.renames.items() if old != new}

    @property
    def covers(self) -> bool:
        """Whether every key of the target is met exactly once, in its shape, or filled."""
        return not (self.missing or self.mismatched)

    @property
    def fits(self) -> bool:
        """Whether the target is covered and no key of the source is left over."""
        return self.covers and not self.unexpected

    def __bool__(self) -> bool:
        """Raises `TypeError`: a result that is always true would be taken for keys that fit."""
        raise TypeError("a Fit is neither true nor false: write .fits")

    def document(self) -> dict[str, Any]:
        """What became of each key, as JSON values."""
        return _FIT.of(self)

    @property
    def _verdict(self) -> str:
        if self.fits:
            return "fits"
        return "covers" if self.covers else "does not fit"

    def __repr__(self) -> str:
        named = ("renames", "filled", "missing", "unexpected", "mismatched", "ambiguous")
        counts = (f"{len(found):,} {name}" for name in named if (found := getattr(self, name)))
        return short_repr("Fit", self._verdict, self.how, *counts)

    def _repr_html_(self) -> str:
        pairs = ((key, "→", new) for key, new in self.renames.items())
        named = {"missing": self.missing, "unexpected": self.unexpected}
        left = [(name, "", key) for name, keys in named.items() for key in keys]
        return html_table(f"{self._verdict}: {self.how}", chain(left, pairs))


def _choices(items: Sequence[Candidates]) -> dict[str, list[str]]:
    return {item.key: list(item.source_keys) for item in items}


_FIT = Fields(
    "how fits covers renames missing unexpected mismatched ambiguous nearest filled",
    mismatched=Fields("key source_key source target"),
    ambiguous=_choices,
    nearest=_choices,
)
