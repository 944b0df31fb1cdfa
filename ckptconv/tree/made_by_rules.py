"""Tensor rules at work: the tensors that they take out of a state dict, and what these become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from ckptconv.keys.key_map import KeyMap, KeyRules, map_keys
from ckptconv.keys.mappings import Mapped, MappedTensors, PathStep
from ckptconv.keys.rules import Rule
from ckptconv.keys.tensor_rules import (
    JOINS,
    LIKE,
    LIST,
    Axes,
    Group,
    RuleOperation,
    TensorRule,
    axis_of,
    filled_in,
    parts_of,
)
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    RefusedObject,
    printable,
)
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import count_text
from ckptconv.tensors.layouts import Move, if_turned, settled
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, origins
from ckptconv.tensors.scaled_weights import find_scaled, key_of_values
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.reshaping import Applied, Made, Origin, RulesResult, Shapes
from ckptconv.tree.settling import Skipped
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import tensor_of

if TYPE_CHECKING:
    from ckptconv.tree.carrying import Scales


def made_by_rules(
    item: StateDict, rules: KeyRules, checkpoint: Checkpoint, like: Shapes | None
) -> Applied | None:
    """As `renaming.apply_rules`; None where no rule makes a tensor."""
    parts = [part for rule in rules.rules for part in flat_parts(rule)]
    if not any(isinstance(part, (TensorRule, Mapped)) for part in parts):
        return None
    scales: Scales | None = None
    found = find_scaled(dict(item.tensors()))
    if found:
        from ckptconv.tree.carrying import Scales  # with all schemes, which few need

        scales = Scales(item, found, checkpoint)
    if not any(makes_tensors(part, scales) for part in parts):
        return None
    return _Application(item, rules, like, scales).applied()


def flat_parts(rule: Rule) -> list[Rule]:
    """The rules that a rule stands for, and these stand for."""
    if rule.parts == (rule,):
        return [rule]
    return [part for each in rule.parts for part in flat_parts(each)]


def makes_tensors(rule: Rule, scales: Scales | None = None) -> bool:
    """Whether a rule makes tensors; one that gives codes other names moves their scales too, so
    where there are `scales` it does.
    """
    if isinstance(rule, Mapped):
        return any(each.tensors for each in rule.state_dicts)
    if not isinstance(rule, TensorRule) or not rule.targets:
        return False
    return bool(rule.operations) or scales is not None


class _Entry(NamedTuple):
    """A tensor under its key of now; `rank`: the place of the first of what it is made of."""

    origin: Origin
    name: str
    value: Node
    rank: int


class _Application:
    """The rules at work: the entries that there are, and what was done until now."""

    def __init__(
        self, item: StateDict, rules: KeyRules, like: Shapes | None, scales: Scales | None
    ) -> None:
        self.item, self.rules, self.like, self.scales = item, rules, like, scales
        pairs = zip(item.keys, item.values, strict=True)
        self.entries = [_Entry(key, key, value, at) for at, (key, value) in enumerate(pairs)]
        # 1 and '1' are two keys of a dict, and one name
        if len({*item.keys}) < len(item.keys):
            twice = next(key for key, count in Counter(item.keys).items() if count > 1)
            raise KeyConflict(f"two keys read as '{printable(twice)}'")
        self.values: dict[Origin, Node] = {entry.origin: entry.value for entry in self.entries}
        self.made: list[Made] = []
        self._number = count().__next__
        self.taken: dict[str, str] = {}
        self.skipped: list[Skipped] = []
        self.steps: list[KeyMap] = []

    def applied(self) -> Applied:
        """What all the rules make, the last tensor rule and those behind it told apart."""
        parts = [(rule, part) for rule in self.rules.rules for part in flat_parts(rule)]
        last = max(at for at, (_, part) in enumerate(parts) if makes_tensors(part, self.scales))
        idle: list[str] = []
        # key rules wait for the next tensor rule: keys are gone through once for all of them
        waiting: list[Rule] = []
        for rule, part in parts[: last + 1]:
            if not makes_tensors(part, self.scales):
                waiting.append(part)
                continue
            self._rename(waiting)
            waiting = []
            if isinstance(part, Mapped):
                self._by_mapping(part.at(self.item.path))
                continue
            assert isinstance(part, TensorRule)
            if part is not rule:
                self._refuse_packed(part)
            names = [entry.name for entry in self.entries]
            # each rule of a preset may be idle, but not all of them: `_really_idle` looks at them
            # together
            idle += replace(part, optional=part.optional and part is rule).idle(names)
            self._by_rule(part)
        self.steps.append(self._mapped([part for _, part in parts[last + 1 :]]))
        self._check_scales()
        idle += [words for keys in self.steps for words in keys.idle]
        origins = {entry.name: entry.origin for entry in self.entries}
        reshaped = RulesResult(self.item, origins, tuple(self.made), tuple(self.skipped))
        return Applied(self._item(), self._all_steps(self._really_idle(idle)), reshaped)

    def _check_scales(self) -> None:
        """Refuse codes that nobody would read as before, under the keys of the output."""
        if self.scales is not None:
            named = zip(self.entries, self.steps[-1].new, strict=True)
            left = [(new, entry) for entry, new in named if new is not None]
            tensors = ((new, tensor_of(entry.value)) for new, entry in left)
            self.scales.check(
                {entry.origin: new for new, entry in left},
                {new: ref for new, ref in tensors if ref is not None},
            )

    def _item(self) -> StateDict:
        keys = tuple(entry.name for entry in self.entries)
        return replace(self.item, keys=keys, values=tuple(entry.value for entry in self.entries))

    def _really_idle(self, idle: Sequence[str]) -> tuple[str, ...]:
        """Of a name of several rules, all of them have to meet nothing."""
        several = {rule: flat_parts(rule) for rule in self.rules.rules if rule.parts != (rule,)}
        of_several = {part.words for parts in several.values() for part in parts}
        named = [
            rule for rule, parts in several.items() if all(part.words in idle for part in parts)
        ]
        alone = [words for words in idle if words not in of_several]
        return (*alone, *(rule.words for rule in named))

    def _all_steps(self, idle: tuple[str, ...]) -> KeyMap:
        """What the last key rules make of the keys, with what all of them make of module paths."""
        paths: list[PathStep] = []
        orders: dict[int, Mapping[str, int]] = {}
        for keys in self.steps:
            orders |= {at + len(paths): order for at, order in keys.orders.items()}
            paths += keys.path_steps
        wrappers = self.steps[0].wrappers
        path_steps = tuple(paths)
        return replace(
            self.steps[-1], wrappers=wrappers, path_steps=path_steps, orders=orders, idle=idle
        )

    # ------------------------------------------------------------------------------- key rules

    def _mapped(self, rules: Sequence[Rule]) -> KeyMap:
        """What key rules make of the names that there are; wrappers are looked for once."""
        names = [entry.name for entry in self.entries]
        if self.steps:
            return map_keys(names, KeyRules.of(rules, "keep"), self.item.path)
        wrappers = "keep" if self.rules.mapped else self.rules.wrappers
        telling, beside = self.item.telling_keys, self.item.keys_beside
        return map_keys(names, KeyRules.of(rules, wrappers), self.item.path, telling, beside)

    def _rename(self, rules: Sequence[Rule]) -> None:
        try:
            keys = self._mapped(rules)
        except KeyConflict as error:
            names = {entry.name: entry.origin for entry in self.entries}
            if self.scales is not None and self.scales.is_part(names.get(error.where or "", "")):
                error.hint = "--dequantize makes values first"
            raise
        self.steps.append(keys)
        kept = []
        for at, (entry, new) in enumerate(zip(self.entries, keys.new, strict=True)):
            if new is not None:
                kept.append(entry._replace(name=new))
                continue
            path = seen = self.item.prefix + keys.seen.get(at, entry.name)
            if isinstance(entry.origin, str):
                path = self.item.prefix + entry.origin
            why = keys.why.get(at, "")
            self.skipped.append(Skipped(path, why, entry.value, by_rule=True, seen=seen))
        self.entries = kept
        for key, twin in keys.filled:
            self._fill(key, twin)

    def _fill(self, key: str, twin: str) -> None:
        """One more name for the tensor that has the name `twin`: they are made of it together."""
        at = next(at for at, entry in enumerate(self.entries) if entry.name == twin)
        taken = self.entries[at]
        if self.scales is not None and self.scales.is_codes(taken.origin):
            what = "is codes, which have one name where rules lay tensors out"
            raise RefusedObject(what, where=key, hint="--dequantize makes values first")
        made = [self._entry(name, taken.value, taken.rank) for name in (twin, key)]
        self._note(self.rules.rules[0], [taken], [Move("tie", ((2,),))], made)
        self.entries[at : at + 1] = made

    def _entry(self, name: str, value: Node, rank: int) -> _Entry:
        return _Entry(self._number(), name, value, rank)

    # ---------------------------------------------------------------------------- tensor rules

    def _by_rule(self, rule: TensorRule) -> None:
        if rule.needs_config:
            what = f"{rule.words} needs numbers of config.json, which is not read here"
            raise KeyConflict(what, hint="write the numbers themselves")
        there = {entry.name: entry for entry in self.entries}
        self._refuse_taken_twice(rule, there)
        made: list[_Entry] = []
        gone: dict[str, str] = {}
        for group in rule.groups([*there]):
            made += self._made_of(rule, group, [there[key] for key in group.keys])
            gone |= dict.fromkeys(group.keys, rule.words)
        gone |= dict.fromkeys(self._names_beside([there[key] for key in gone]), rule.words)
        self.taken |= gone
        self._put([entry for entry in self.entries if entry.name not in gone], made, rule)

    def _refuse_packed(self, rule: TensorRule) -> None:
        """Refuse a rule of a preset for a weight whose codes have another name (``qweight``): they
        would stay as they are, beside others that are laid out.
        """
        packed = self.scales.packed if self.scales is not None else frozenset()
        for entry in self.entries if packed else ():
            if entry.origin in packed and rule.is_for(key_of_values(entry.name)):
                what = f"{rule.words}: is codes that are not laid out otherwise"
                raise RefusedObject(what, where=entry.name, hint="--dequantize makes values first")

    def _names_beside(self, codes: Sequence[_Entry]) -> list[str]:
        """The names of what codes among some tensors are read with."""
        if self.scales is None:
            return []
        named = {entry.origin: entry.name for entry in self.entries}
        return [name for entry in codes for name in self.scales.names(entry.origin, named)]

    def _with_scales(self, entry: _Entry) -> list[_Entry]:
        """A tensor that was made; behind codes stands what they are read with."""
        if self.scales is None:
            return [entry]
        found = self.scales.named(entry.origin, entry.name)
        return [entry, *(_Entry(origin, name, ref, entry.rank) for origin, name, ref in found)]

    def _put(self, left: Sequence[_Entry], made: Sequence[_Entry], rule: Rule) -> None:
        """Put what was made in the places of what it was made of."""
        names = {entry.name for entry in left}
        new: set[str] = set()
        for entry in made:
            if entry.name in new:
                raise KeyConflict(f"{rule.words} would make it twice", where=entry.name)
            if entry.name in names:
                what = f"is there already, and {rule.words} would make it"
                raise KeyConflict(what, where=entry.name)
            new.add(entry.name)
        # each in the place of its first source: who numbers parameters goes by this order
        self.entries = sorted([*left, *made], key=lambda entry: entry.rank)

    def _refuse_taken_twice(self, rule: TensorRule, there: Container[str]) -> None:
        """Refuse a rule for what an earlier one took: it may be meant for either."""
        for key, words in self.taken.items():
            if key not in there and rule.is_for(key):
                what = f"is taken by {words}, and {rule.words} is for it too"
                raise KeyConflict(what, where=key, hint="make one of the patterns narrower")

    def _made_of(self, rule: TensorRule, group: Group, taken: Sequence[_Entry]) -> list[_Entry]:
        try:
            refs = [self._tensor(entry) for entry in taken]
            done = _worked_out(rule, group, refs, self.like or {})
            made = [
                self._entry(name, ref, taken[0].rank)
                for name, ref in zip(done.names, done.refs, strict=True)
            ]
            self._note(rule, [taken[at] for at in done.order], done.moves, made)
            return [each for entry in made for each in self._with_scales(entry)]
        except CheckpointError as error:
            error.what = f"{rule.words}: {error.what}"
            raise error.at(where=group.keys[0]) from None

    def _note(
        self, rule: Rule, taken: Sequence[_Entry], moves: Sequence[Move], made: Sequence[_Entry]
    ) -> None:
        origins = tuple(entry.origin for entry in taken)
        numbers = tuple(entry.origin for entry in made if type(entry.origin) is int)
        first = _shape_text(taken[0].value), _shape_text(made[0].value)
        self.made.append(Made(rule, origins, tuple(moves), numbers, first))
        if any(move.name == "untie" for move in moves):
            self._skip_twins(origins, [entry.value for entry in made])
        if self.scales is not None:
            for went in self.scales.follow(origins, moves, numbers, self._number):
                first = _shape_text(went.first), _shape_text(went.made[0])
                known = went.sources, (), went.numbers, first, True, went.comes_back
                self.made.append(Made(rule, *known))
                self._skip_twins(went.sources, went.made)

    def _skip_twins(self, origins: Sequence[Origin], made: Sequence[Node]) -> None:
        """Note the tensors of the checkpoint that went into one with others of the same bytes."""
        kept = {id(storage) for storage in _storages_of(made)}
        for key in origins:
            value = self.values.get(key)
            if value is not None and kept.isdisjoint(map(id, _storages_of([value]))):
                path = self.item.prefix + str(key)
                why = "hold the same bytes as those that they were joined with"
                self.skipped.append(Skipped(path, why, value, by_rule=True, seen=path))

    def _tensor(self, entry: _Entry) -> TensorRef:
        """The tensor of an entry, which no value that is more than one, nor codes are."""
        value = entry.value
        if type(value) is TensorObject and value.cls is None and value.state is None:
            value = value.tensor
        if type(value) is not TensorRef:
            raise RefusedObject("is not a plain tensor", where=entry.name)
        if self.scales is not None and self.scales.is_beside(entry.origin):
            what = "is what codes are read with, and goes where these go"
            hint = "write the rule for the codes alone, or --dequantize makes values first"
            raise RefusedObject(what, where=entry.name, hint=hint)
        if value.dtype.is_packed or value.dtype.is_block:
            what = f"{value.dtype.name} that is quantised is not laid out otherwise"
            raise RefusedObject(what, where=entry.name, hint="--dequantize makes values first")
        return value

    # -------------------------------------------------------------------------------- mappings

    def _by_mapping(self, rule: Mapped) -> None:
        """The tensors that a mapping lists are made; the other keys become what it says."""
        [mapping] = rule.state_dicts
        there = {entry.name: entry for entry in self.entries}
        numbered: dict[int, _Entry] = {}
        made: list[_Entry] = []
        gone: set[str] = set()
        for row in mapping.tensors:
            taken = []
            for source in row.sources:
                if not isinstance(source, str):
                    taken.append(numbered[source])
                    continue
                if source not in there:
                    hint = "--reverse undoes a mapping; it fits the checkpoints that it came from"
                    what = "is not there, and the mapping needs it"
                    raise KeyMismatch(what, where=source, hint=hint)
                taken.append(there[source])
                gone.update((source, *self._names_beside([there[source]])))
            for target, entry in zip(row.targets, self._made_by(rule, row, taken), strict=True):
                if isinstance(target, int):
                    numbered[target] = entry
                elif target is not None:
                    made += self._with_scales(entry._replace(name=target))
        self.entries = [entry for entry in self.entries if entry.name not in gone]
        self._rename([replace(rule, state_dicts=(replace(mapping, tensors=()),))])
        self._put(self.entries, made, rule)
        if mapping.places:
            places = {key: at for at, key in enumerate(mapping.places)}
            self.entries.sort(key=lambda entry: places.get(entry.name, len(places)))

    def _made_by(self, rule: Mapped, row: MappedTensors, taken: Sequence[_Entry]) -> list[_Entry]:
        moves = [Move(name, numbers) for name, numbers in row.moves]
        if row.is_undone:
            moves = [move.reversed() for move in reversed(moves)]
        try:
            refs = [self._tensor(entry) for entry in taken]
            for move in moves:
                refs = move.on(refs)
            if len(refs) != len(row.targets):
                names = count_text(len(row.targets), "name")
                raise KeyMismatch(f"{count_text(len(refs), 'tensor')} made, for {names}")
        except CheckpointError as error:
            error.what = f"the mapping does not fit: {error.what}"
            raise error.at(where=taken[0].name) from None
        rank = min(entry.rank for entry in taken)
        made = [self._entry("", if_turned(ref), rank) for ref in refs]
        self._note(rule, taken, moves, made)
        return made


def _storages_of(values: Sequence[Node]) -> Iterator[Storage]:
    """The storages in files of which tensors are made, whole."""
    refs = [ref for value in values if (ref := tensor_of(value)) is not None]
    return (storage.whole for storage in origins(refs))


def _shape_text(value: Node) -> str:
    ref = tensor_of(value)
    return "" if ref is None else f"{ref.dtype.name} {list(ref.shape)}"


# ---------------------------------------------------------------------------- one use of one rule


class _Done(NamedTuple):
    """What a rule made of a group: keys and tensors, by which moves of its tensors, in order."""

    names: list[str]
    refs: list[TensorRef]
    moves: list[Move]
    order: list[int]


def _worked_out(rule: TensorRule, group: Group, refs: list[TensorRef], like: Shapes) -> _Done:
    order = list(range(len(refs)))
    axes = Axes([(name, len(values)) for name, values in group.axes])
    left, still = {name for name, _ in group.axes[1:]}, set(rule.created)
    moves: list[Move] = []
    for item in rule.operations:
        axis = axis_of(item, axes, left, still, rule)
        if item.is_of_list:
            places = axes.moved_innermost(axis)
            if places != sorted(places):
                refs = [refs[at] for at in places]
                if moves:
                    moves.append(Move("order", (tuple(places),)))
                else:
                    order = [order[at] for at in places]
        count: int | None = None
        if item.name in JOINS:
            count = axes.size(axis)
        elif axis == LIST:
            count = parts_of(item, axes, rule)
        sized = _with_sizes(item, rule, group, like)
        before = len(refs)
        for move in settled(sized.name, dict(sized.arguments), refs, count, _on(item, axes)):
            refs = move.on(refs)
            moves.append(move)
        left.discard(axis)
        still.discard(axis)
        axes.step(item, axis, len(refs) // before)
    names = [
        filled_in(
            rule.targets[place[LIST]],
            {**group.values, **{name: str(at) for name, at in place.items()}},
        )
        for place in axes.places()
    ]
    # what is turned is gathered in large parts when it is read, not element by element
    return _Done(names, [if_turned(ref) for ref in refs], moves, order)


def _with_sizes(item: RuleOperation, rule: TensorRule, group: Group, like: Shapes) -> RuleOperation:
    """A split by the sizes of its targets, which are among what the keys are fitted to."""
    if item.get("sizes") != LIKE:
        return item
    dim, sizes = item["dim"], []
    for target in rule.targets:
        key = filled_in(target, group.values)
        shape = like.get(key)
        if shape is None or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
            what = f"the size of '{printable(key)}' is not known"
            raise KeyMismatch(what, hint="--like names a checkpoint that has it")
        sizes.append(shape[dim])
    return RuleOperation.of("split", dim=dim, sizes=sizes)


def _on(item: RuleOperation, axes: Axes) -> list[int]:
    """The places in the list that an operation is for."""
    on = item.get("on")
    if not isinstance(on, tuple):
        return []
    return [at for at, place in enumerate(axes.places()) if place[LIST] in on]
