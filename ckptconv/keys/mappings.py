"""Saved renamings as rules, and what key rules make of the module paths in `_metadata`: by their
words, or as the keys went.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field

from ckptconv.keys.rules import KeyFunction, Patience, Regex, Rule, Step
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.records import NamedTuple, dataclass

MOVES = {
    "stack": "11",
    "unstack": "11",
    "concat": "1*",
    "split": "1*",
    "permute": "**",
    "reshape": "***",
    "order": "*",
    "tie": "1",
    "untie": "1",
}
"""The steps of a mapping (`tensors.layouts.MOVES`), and the lists of numbers that each takes: of
one number, or of any.
"""


class MappedTensors(NamedTuple):
    """Tensors that become others: `sources` and `targets` are their keys, in order, or numbers of
    what is made on the way; a target without a key is left out.

    `moves` are the steps, as names and numbers (`tensors.layouts.MOVES`); `is_undone`: they are
    made backwards.
    """

    sources: tuple[str | int, ...]
    moves: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    targets: tuple[str | int | None, ...]
    is_undone: bool = False


@dataclass(frozen=True, slots=True)
class MappedKeys:
    """What becomes of the keys of the state dict at `path`: old → new (None: left out).

    `tensors` become others; all keys before stand in `key_order` then. What this makes is put in
    the order of `places`, where it says one.

    `modules` are the module paths of its `_metadata`: old → new, several where reversing tells ones
    apart that had become one. `filled` are further new keys, each with the one of the others whose
    tensor it has too (None: not known); they go when this is reversed. `order` are the module paths
    as they stood before what this undoes.
    """

    path: str
    keys: Mapping[str, str | None]
    modules: Mapping[str, tuple[str, ...]]
    filled: Mapping[str, str | None] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    tensors: tuple[MappedTensors, ...] = ()
    key_order: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def reversed(self) -> MappedKeys:
        """The way back; keys that were left out are not in it."""
        modules: dict[str, tuple[str, ...]] = {}
        for old, news in self.modules.items():
            for new in news:
                modules[new] = (*modules.get(new, ()), old)
        back: dict[str, str | None] = {
            new: old for old, new in self.keys.items() if new is not None
        }
        rows, lost, _ = self._reversed_tensors()
        keys = {**back, **dict.fromkeys(self.filled), **dict.fromkeys(lost)}
        order, places = tuple(self.modules), self.key_order
        return MappedKeys(self.path, keys, modules, order=order, tensors=rows, places=places)

    def lost(self) -> list[str]:
        """The keys whose tensors do not come back: a part of what they became was left out."""
        return self._reversed_tensors()[2]

    def _reversed_tensors(self) -> tuple[tuple[MappedTensors, ...], list[str], list[str]]:
        """The tensors undone, the last ones first; of those that cannot be, for something that was
        made with them was left out, the keys of now and of before.
        """
        rows: list[MappedTensors] = []
        lost: list[str] = []
        gone: list[str] = []
        missing: set[str | int | None] = {None}
        for row in reversed(self.tensors):
            if missing.isdisjoint(row.targets):
                named = tuple(target for target in row.targets if target is not None)
                rows.append(MappedTensors(named, row.moves, row.sources, True))
                continue
            missing.update(row.sources)
            lost += [target for target in row.targets if isinstance(target, str)]
            gone += [source for source in row.sources if isinstance(source, str)]
        return tuple(rows), lost, gone


@dataclass(frozen=True, slots=True)
class Mapped(Rule):
    """Exactly the renaming of a conversion that was: no key may be met that is not in it."""

    state_dicts: tuple[MappedKeys, ...]

    @property
    def words(self) -> str:
        return "the mapping"

    @property
    def leaves_out(self) -> bool:
        return True

    def at(self, path: str) -> Mapped:
        """The mapping of one state dict: that at `path`, or the only one."""
        found = [item for item in self.state_dicts if item.path == path] or self.state_dicts
        if len(found) != 1:
            known = [printable(item.path) or "the root" for item in self.state_dicts]
            what = "the mapping is for other state dicts than this one"
            raise KeyConflict(what, hint=f"those at: {', '.join(known) or 'none'}")
        return Mapped((found[0],))

    def step(self, keys: Sequence[str]) -> Step:
        (found,) = self.state_dicts
        unknown = [key for key in keys if key not in found.keys]
        if unknown:
            what = f"{len(unknown)} of {len(keys)} keys are not in the mapping"
            hint = "--reverse undoes a mapping; it fits the checkpoints that it came from"
            first = unknown[0]
            raise KeyConflict(f"{what}, e.g. '{printable(first)}'", where=first, hint=hint)
        return lambda key: found.keys.get(key, key)

    def filled(self, keys: Collection[str | None]) -> list[tuple[str, str]]:
        """The further keys, each with that of the new `keys` whose tensor it has."""
        known = self.state_dicts[0].filled.items()
        return [(key, twin) for key, twin in known if twin is not None and twin in keys]

    def module_order(self) -> dict[str, int]:
        """The places of module paths before what is undone; nothing where nothing is."""
        return {path: place for place, path in enumerate(self.state_dicts[0].order)}

    def module_paths(self, path: str) -> tuple[str, ...]:
        """What becomes of a module path; none where the mapping does not say."""
        return self.state_dicts[0].modules.get(path, ())


# ------------------------------------------------------------------------------------- module paths


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
    return lambda path: ((step(_start(path)) or "").rstrip("."),)


def _start(path: str) -> str:
    return f"{path}." if path else ""


def path_step(rule: Rule, step: Step, patience: Patience, followed: Followed) -> PathStep:
    """What a rule makes of a module path: by its words, else as the keys in the module went."""
    if isinstance(rule, Mapped):
        return lambda path: rule.module_paths(path) or (followed.or_same(path),)

    if isinstance(rule, KeyFunction):  # which knows keys alone
        return lambda path: (followed.or_same(path),)

    def by_name(path: str) -> str:
        with patience:
            after = step(_start(path))
        if after is None:  # a rule that leaves something out leaves out keys, not modules
            return path
        return after.rstrip(".")

    def follow(path: str) -> tuple[str, ...]:
        if isinstance(rule, Regex):  # what a pattern says of a name cut short is the weaker sign
            found = followed.get(path)
            if found is not None:
                return (found,)
        moved = by_name(path)
        if moved == path and not (rule.leaves_out or isinstance(rule, Regex)):
            moved = followed.or_same(path)
        return (moved,)

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
        if found is None:
            return path
        return found

    def get(self, path: str) -> str | None:
        """The new path of the module; None where it has no key, or its keys went several ways."""
        inside = self._inside(_start(path))
        first = next(inside, None)
        if first is None:
            return None
        length = first.length(path)
        if length is None:
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
        """Characters of the new path of the module `path` of a key; None for a part of one."""
        rest = len(self.old) - len(path) - (path != "")  # of the key, what is inside the module
        more = len(self.new) - rest
        is_left = more <= 0 and self.same == len(self.new)
        if is_left and (not more or self.old[-len(self.new) - 1] == "."):
            return 0
        if more > 0 and self.same >= rest and self.new[more - 1] == ".":
            return more - 1
        return None


def _moved(old: str, new: str, after: str) -> _Moved:
    same = _count(min(len(old), len(new)), lambda count: old.endswith(new[len(new) - count :]))
    alike = _count(min(len(new), len(after)), lambda count: after.startswith(new[:count]))
    return _Moved(old, new, same, alike)


def _count(most: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to `most` that holds, where none below it fails."""
    if holds(most):  # most often
        return most
    return bisect_left(range(most), True, key=lambda count: not holds(count + 1))
