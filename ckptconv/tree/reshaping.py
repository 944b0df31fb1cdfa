"""What rules made of a state dict: its keys, and where tensor rules are among them, its tensors.

Key rules work on names alone (`keys.key_map`). A tensor rule takes tensors out of the list and
puts what it makes of them in its place (`made_by_rules`); the rules behind it meet these by their
new names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from ckptconv.keys.key_map import KeyMap, KeyRules
from ckptconv.keys.mappings import MappedKeys, MappedTensors
from ckptconv.keys.rules import Rule
from ckptconv.support.errors import KeyConflict, RefusedObject
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.settling import Skipped
from ckptconv.tree.state_dicts import StateDict

if TYPE_CHECKING:
    from ckptconv.tensors.layouts import Move

Origin: TypeAlias = "str | int"
"""Where a tensor is from: its key in the checkpoint, or its number among those that rules made."""

Shapes: TypeAlias = "Mapping[str, tuple[int, ...] | None]"


class Made(NamedTuple):
    """Tensors that a rule made of others: those of `origins`, in this order, by `moves`; the made
    ones have `numbers` as their origins from then on. `first` of both are the types and shapes of
    the first ones. `goes_along`: they are scales, which were laid out as their codes were;
    `comes_back`: a mapping gives them the shapes that they had.
    """

    rule: Rule
    origins: tuple[Origin, ...]
    moves: tuple[Move, ...]
    numbers: tuple[int, ...]
    first: tuple[str, str]
    goes_along: bool = False
    comes_back: bool = True

    def same(self) -> Iterator[tuple[Origin, ...]]:
        """The tensors that are one and the same, before and made; none where moves make others."""
        moves = () if self.goes_along else self.moves
        if len(moves) == 1 and moves[0].name in ("tie", "untie"):
            count = min(len(self.numbers), len(self.origins))  # of tensors; each side has names
            before, after = len(self.origins) // count, len(self.numbers) // count
            for at in range(count):
                taken = self.origins[at * before : (at + 1) * before]
                yield (*taken, *self.numbers[at * after : (at + 1) * after])


class MadeKeys(NamedTuple):
    """What is told of the tensors that one use of a rule made: how many of how many, which keys of
    the checkpoint these are and which ones of the output (not those that are neither), the types
    and shapes of the first ones before and after; whether they are scales, which go along with the
    codes that the rule names; whether they are the tensors that they were, by more or fewer names.
    """

    rule: Rule
    counts: tuple[int, int]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    first: tuple[str, str]
    goes_along: bool = False
    is_same: bool = False


class Tied(NamedTuple):
    """A tensor that rules gave more names, or fewer: its keys in the checkpoint, and those in the
    output, of which there is one or more.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RulesResult:
    """What tensor rules did: `origins` are those of the keys behind the last one, `made` what was
    made until there, `skipped` what was left out until there.
    """

    before: StateDict
    origins: Mapping[str, Origin]
    made: tuple[Made, ...]
    skipped: tuple[Skipped, ...]

    @property
    def consumed(self) -> frozenset[str]:
        """The keys of the checkpoint whose tensors became others."""
        origins = (origin for item in self.made for origin in item.origins)
        return frozenset(origin for origin in origins if type(origin) is str)

    def fates(self, names: Mapping[str, str | None]) -> dict[Origin, str | None]:
        """What became of each origin that there was at the end, by what became of `names`."""
        return {self.origins[key]: new for key, new in names.items()}

    def told(self, names: Mapping[str, str | None]) -> Iterator[MadeKeys]:
        """What rules made, as it is told."""
        fates = self.fates(names)
        for item in self.made:
            targets = tuple(new for at in item.numbers if (new := fates.get(at)) is not None)
            sources = tuple(origin for origin in item.origins if isinstance(origin, str))
            counts = len(item.origins), len(item.numbers)
            is_same = any(item.same())
            facts = item.first, item.goes_along, is_same
            yield MadeKeys(item.rule, counts, sources, targets, *facts)

    def tied(self, names: Mapping[str, str | None]) -> Iterator[Tied]:
        """The tensors that rules gave other names and no more, by what became of `names`."""
        sets: dict[Origin, tuple[Origin, ...]] = {}
        for item in self.made:
            for same in item.same():
                joined = (each for origin in same for each in sets.get(origin, (origin,)))
                whole = tuple(dict.fromkeys(joined))
                sets |= dict.fromkeys(whole, whole)
        fates = self.fates(names)
        places = {origin: at for at, origin in enumerate(fates)}
        for whole in dict.fromkeys(sets.values()):
            left = sorted((origin for origin in whole if origin in fates), key=places.__getitem__)
            after = tuple(new for origin in left if (new := fates[origin]) is not None)
            if after:
                yield Tied(tuple(origin for origin in whole if type(origin) is str), after)

    def mapped(self, plain: MappedKeys) -> MappedKeys:
        """The mapping of all, of that of the keys behind the last tensor rule. Raises `KeyConflict`
        where values were computed: nothing brings those back that there were; `RefusedObject` for
        a scale that would not come back as it was.
        """
        from ckptconv.tensors.layouts import COMPUTING

        for item in self.made:
            if any(move.name in COMPUTING for move in item.moves):
                what = f"{item.rule.words} computes values, which a mapping does not undo"
                hint = "leave --save-mapping out, and keep the source"
                raise KeyConflict(what, where=str(item.origins[0]), hint=hint)
            if not item.comes_back:
                what = "is a scale that would have another shape where a mapping is undone"
                hint = "leave --save-mapping out, or take the values first (--dequantize)"
                raise RefusedObject(what, where=str(item.origins[0]), hint=hint)
        fates = self.fates(plain.keys)
        later = {origin for item in self.made for origin in item.origins}

        def target(number: int) -> str | int | None:
            return number if number in later else fates.get(number)

        rows = tuple(
            MappedTensors(item.origins, item.moves, tuple(map(target, item.numbers)))
            for item in self.made
            if not item.goes_along  # as it will when this is undone
        )
        consumed, order = self.consumed, self.before.keys
        keys = {key: fates.get(key) for key in order if key not in consumed}
        return replace(plain, keys=keys, tensors=rows, key_order=order)


@dataclass(frozen=True, slots=True)
class Applied:
    """A state dict after rules: `item` has the keys and values behind the last tensor rule (those
    of the checkpoint where there is none), `keys` say what the other rules make of them.
    """

    item: StateDict
    keys: KeyMap
    reshaped: RulesResult | None = None

    @property
    def keeps_names(self) -> bool:
        """Whether every key stays, under its own name."""
        return self.reshaped is None and self.keys.new == self.keys.old

    def key_before(self, key: str) -> str:
        """The key in the checkpoint of one of `item`; of what a rule made it is the key itself."""
        if self.reshaped is not None and isinstance(origin := self.reshaped.origins[key], str):
            return origin
        return key

    def kept(self) -> dict[str, str]:
        """The keys of `item` that are not left out, each with its new one."""
        pairs = zip(self.keys.old, self.keys.new, strict=True)
        return {old: new for old, new in pairs if new is not None}

    def left_out(self) -> frozenset[str]:
        """The keys of the checkpoint that are left out, and are not part of another tensor."""
        gone = frozenset(key for key, new in self.names().items() if new is None)
        if self.reshaped is not None:
            gone -= self.reshaped.consumed
        return gone

    def names(self) -> dict[str, str | None]:
        """The keys of the checkpoint, each with its new one; None: left out, or became others."""
        pairs = zip(self.keys.old, self.keys.new, strict=True)
        if self.reshaped is None:
            return dict(pairs)
        fates = self.reshaped.fates(dict(pairs))
        return {key: fates.get(key) for key in self.reshaped.before.keys}


def with_config(rules: KeyRules, checkpoint: Checkpoint) -> KeyRules:
    """The rules for this checkpoint: with numbers in the place of names of its ``config.json``.
    Raises `KeyConflict` where a rule needs one that is not there.
    """
    if not any(rule.needs_config for rule in rules.rules):
        return rules
    from ckptconv.tree.model_config import config_beside  # seldom needed

    config = config_beside(checkpoint)
    settled = [rule.with_config(config) if rule.needs_config else rule for rule in rules.rules]
    return replace(rules, rules=tuple(settled))
