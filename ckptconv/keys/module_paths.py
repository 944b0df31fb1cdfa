"""What key rules make of the module paths in `_metadata`, by their words or as the keys went."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptconv.keys.mappings import Mapped
from ckptconv.keys.rules import Called, Patience, Regex, Rule, Step

PathStep = Callable[[str], tuple[str, ...]]
"""A module path before one rule → after it; several where a mapping is undone."""


def reordered(renamed: list[tuple[str, str]], order: Mapping[str, int]) -> list[tuple[str, str]]:
    """Put new names in an order; one that is not in it stays behind the one before it."""
    places, place = [], -1
    for _, name in renamed:
        place = order.get(name, place)
        places.append(place)
    return [renamed[at] for at in sorted(range(len(renamed)), key=places.__getitem__)]


def path_step_by_name(step: Step) -> PathStep:
    """The step of a rule for module paths: what it makes of the keys in the module."""
    return lambda path: ((step(f"{path}." if path else "") or "").rstrip("."),)


def path_step(rule: Rule, step: Step, patience: Patience, followed: Followed) -> PathStep:
    """What a rule makes of a module path: by its words, else as the keys in the module went."""
    if isinstance(rule, Mapped):
        return lambda path: rule.module_paths(path) or (followed.or_same(path),)

    if isinstance(rule, Called):  # which knows keys alone
        return lambda path: (followed.or_same(path),)

    def by_name(path: str) -> str:
        name = f"{path}." if path else ""
        with patience:
            after = step(name)
        # a name stays where the step leaves it out, for it leaves out keys only
        return (name if after is None else after).rstrip(".")

    def follow(path: str) -> tuple[str, ...]:
        if isinstance(rule, Regex):  # what a pattern says of a name cut short is the weaker sign
            return (found,) if (found := followed.get(path)) is not None else (by_name(path),)
        moved = by_name(path)
        return (moved if moved != path or rule.leaves_out else followed.or_same(path),)

    return follow


class Followed:
    """Module paths as their keys went, where all keys of a module went the same way; sorted out
    when first asked.

    A module of which a prefix took the name away, but not that of the modules in it, has become the
    root. Each key is compared with its new name, and with its neighbour's, once: a key may be of a
    million modules.
    """

    def __init__(self, before: Sequence[str | None], after: Sequence[str | None]) -> None:
        self._pairs = (before, after)
        self._sorted: list[_Moved] | None = None
        self._old: list[str] = []

    def or_same(self, path: str) -> str:
        found = self.get(path)
        return path if found is None else found

    def get(self, path: str) -> str | None:
        """The new path of the module; None where it has no key, or its keys went several ways."""
        inside = self._inside(f"{path}." if path else "")
        first = next(inside, None)
        length = None if first is None else first.length(path)
        if first is None or length is None:
            return None
        alike = first.alike
        for moved in inside:
            if alike < length or moved.length(path) != length:
                return None
            alike = moved.alike
        return first.new[:length]

    def _inside(self, prefix: str) -> Iterator[_Moved]:
        """The keys that start with `prefix`, sorted."""
        if self._sorted is None:
            both = zip(*self._pairs, strict=True)
            pairs = sorted((old, new) for old, new in both if old is not None and new is not None)
            nexts = [*(new for _, new in pairs[1:]), ""]
            self._old = [old for old, _ in pairs]
            self._sorted = [
                _moved(old, new, after) for (old, new), after in zip(pairs, nexts, strict=True)
            ]
        for at in range(bisect_left(self._old, prefix), len(self._old)):
            if not self._old[at].startswith(prefix):
                return
            yield self._sorted[at]


class _Moved(NamedTuple):
    """A key and its new name; how many characters these have in common at their ends, and the new
    name with the next one at their starts.
    """

    old: str
    new: str
    same: int
    alike: int

    def length(self, path: str) -> int | None:
        """Characters of the new path of the module `path`, which the key is in.

        None where only a part of the key is left.
        """
        rest = len(self.old) - len(path) - (path != "")  # of the key, what is inside the module
        more = len(self.new) - rest
        is_left = more <= 0 and self.same == len(self.new)
        if is_left and (not more or self.old[-len(self.new) - 1] == "."):
            return 0
        return more - 1 if more > 0 and self.same >= rest and self.new[more - 1] == "." else None


def _moved(old: str, new: str, after: str) -> _Moved:
    same = _count(min(len(old), len(new)), lambda count: old.endswith(new[len(new) - count :]))
    alike = _count(min(len(new), len(after)), lambda count: after.startswith(new[:count]))
    return _Moved(old, new, same, alike)


def _count(most: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to `most` that holds, where none below it fails."""
    if holds(most):  # most often
        return most
    return bisect_left(range(most), True, key=lambda count: not holds(count + 1))
