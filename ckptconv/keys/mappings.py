"""Saved renamings as rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from ckptconv.keys.rules import Rule, Step
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.records import dataclass

MOVES = {
    "stack": 2,
    "unstack": 2,
    "concat": 2,
    "split": 2,
    "permute": 2,
    "reshape": 3,
    "order": 1,
    "tie": 1,
    "untie": 1,
}
"""The steps that a mapping may have, and how many lists of numbers each takes; what they do is
`tensors.layouts.MOVES`.
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
                back = MappedTensors(tuple(_named(row.targets)), row.moves, row.sources, True)
                rows.append(back)
                continue
            missing.update(row.sources)
            lost += [target for target in row.targets if isinstance(target, str)]
            gone += [source for source in row.sources if isinstance(source, str)]
        return tuple(rows), lost, gone


def _named(targets: Sequence[str | int | None]) -> Iterator[str | int]:
    return (target for target in targets if target is not None)


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
