"""State dicts under their new keys, and what became of the old ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptconv.keys.key_map import (
    KEEP,
    STRIP,
    KeyMap,
    KeyRules,
    hint_of_starts,
    map_keys,
    refuse_idle,
    unchanged,
)
from ckptconv.keys.mappings import MappedKeys
from ckptconv.keys.rules import find_wrappers
from ckptconv.pickles.nodes import Node, mapping_pairs
from ckptconv.support.errors import AmbiguousStateDict, KeyConflict, KeyMismatch, printable
from ckptconv.support.records import dataclass
from ckptconv.support.text import look_hint
from ckptconv.tensors.refs import homes
from ckptconv.tensors.scaled_weights import may_hold_codes, refuse_apart
from ckptconv.tree.candidates import metadata_of
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.reshaping import Applied, MadeKeys, Shapes, Tied
from ckptconv.tree.settling import Skipped
from ckptconv.tree.state_dicts import StateDict, renamed_in_place

if TYPE_CHECKING:
    from ckptconv.tree.fitted_keys import KeyTarget


def refuse_codes_apart(applied: Applied) -> None:
    """Raise `RefusedObject` where new names part codes from what they are read with."""
    if applied.keeps_names:
        return
    item, keys = applied.item, applied.keys
    if applied.reshaped is not None:
        _refuse_apart(applied.reshaped.before, applied.names())
    _refuse_apart(item, dict(zip(keys.old, keys.new, strict=True)))


def _refuse_apart(item: StateDict, names: Mapping[str, str | None]) -> None:
    """The same for new `names` of all keys; one without a name is left out."""
    tensors = dict(item.tensors())
    if not may_hold_codes(tensors.values()) or all(names.get(key) == key for key in tensors):
        return
    before = {item.prefix + key: ref for key, ref in tensors.items()}
    named = ((names.get(key), ref) for key, ref in tensors.items())
    refuse_apart(before, {item.prefix + new: ref for new, ref in named if new is not None})


def rename_state_dicts(
    found: Sequence[StateDict],
    overlay: dict[int, Node],
    rules: KeyRules,
    checkpoint: Checkpoint,
    fit_to: KeyTarget | None = None,
) -> tuple[list[Applied], tuple[RenamedKeys, ...], list[Skipped]]:
    """Put renamed state dicts into the overlay: what rules made of each, what changed as it is
    told, and what was left out.
    """
    if not found and (rules not in (STRIP, KEEP) or fit_to):
        what = "it does not hold a state dict whose keys could be changed"
        raise AmbiguousStateDict(what, hint=look_hint(checkpoint.path))
    applied = []
    for item in found:
        # somewhere inside a checkpoint, keys that stay need not be fit for names
        has_wrappers = rules == STRIP and (not item.path or find_wrappers(item.telling_keys))
        if fit_to or has_wrappers or rules not in (STRIP, KEEP):
            applied.append(map_state_dict(item, rules, checkpoint, fit_to))
        else:
            applied.append(Applied(item, unchanged(item.keys)))
    maps = [each.keys for each in applied]
    if found:
        refuse_nothing_left(sum(new is not None for keys in maps for new in keys.new), maps, rules)
    refuse_idle(maps, rules)
    renamed, skipped = [], []
    for each in applied:
        skipped += excluded(each, fit_to)
        item, keys = each.item, each.keys
        renamed.append(renamed_keys(each))
        is_changed = keys.new != keys.old or keys.filled or each.reshaped is not None
        if not is_changed and keys.orders:
            # undoing a mapping may change `_metadata` alone: of modules that had become one, all
            # keys may have been left out
            modules = keys.renamed_modules(_module_paths(item))
            is_changed = any(old != new for old, new in modules)
        if is_changed:
            new, values = with_filled(item, keys)
            filled = replace(item, values=values)
            overlay[id(item.node)] = renamed_in_place(filled, new, keys.renamed_modules)
    return applied, tuple(renamed), skipped


def with_filled(item: StateDict, keys: KeyMap) -> tuple[tuple[str | None, ...], tuple[Node, ...]]:
    """The new keys and their values, with those behind them that fitting filled."""
    if not keys.filled:
        return keys.new, item.values
    values = dict(zip(keys.new, item.values, strict=True))
    names = (*keys.new, *(key for key, _ in keys.filled))
    return names, (*item.values, *(values[name] for _, name in keys.filled))


def map_state_dict(
    item: StateDict, rules: KeyRules, checkpoint: Checkpoint, fit_to: KeyTarget | None
) -> Applied:
    """The rules applied to a state dict of a checkpoint, then the keys fitted. Where wrappers are
    all that the rules are about, fitting finds them itself.
    """
    try:
        if fit_to is None:
            return apply_rules(item, rules, checkpoint)
        if rules == STRIP:
            rules = KEEP
        applied = apply_rules(item, rules, checkpoint, fit_to.shapes)
        from ckptconv.tree.fitted_keys import fitted

        return replace(applied, keys=fitted(applied.item, applied.keys, fit_to))
    except (KeyConflict, KeyMismatch) as error:
        raise error.at(where=item.path or None) from None


def apply_rules(
    item: StateDict, rules: KeyRules, checkpoint: Checkpoint, like: Shapes | None = None
) -> Applied:
    """What rules make of a state dict of a checkpoint; `like` are the keys and shapes that it is
    fitted to later.

    Raises `KeyConflict` and `KeyMismatch` where a rule does not fit what is there, and
    `RefusedObject` where codes would become others, and no scales would be right for these.
    """
    if rules.rules:
        from ckptconv.tree.made_by_rules import made_by_rules  # with tensor rules, and all layouts

        made = made_by_rules(item, rules, checkpoint, like)
        if made is not None:
            return made
    keys = map_keys(item.keys, rules, item.path, item.telling_keys, item.keys_beside)
    return Applied(item, keys)


def refuse_nothing_left(left: int, maps: Sequence[KeyMap], rules: KeyRules) -> None:
    """Raise `KeyConflict` when the rules leave no key."""
    if not left:
        raise KeyConflict(f"no key is left after {rules.leaving}", hint=hint_of_starts(maps, rules))


def excluded(applied: Applied, fit_to: KeyTarget | None) -> list[Skipped]:
    """The keys that the rules, or the fitting, left out, with the reason."""
    item, keys = applied.item, applied.keys
    skipped: list[Skipped] = []
    if applied.reshaped:
        skipped += applied.reshaped.skipped
    target = "the target"
    if fit_to:
        target = printable(fit_to.name)
    for at, new in enumerate(keys.new):
        if new is None:
            seen = item.prefix + keys.seen.get(at, keys.old[at])
            why = keys.why.get(at, f"are not in {target}")  # what no rule left out the fitting did
            path = item.prefix + applied.key_before(keys.old[at])
            skipped.append(Skipped(path, why, item.values[at], by_rule=True, seen=seen))
    return skipped


def _module_paths(item: StateDict) -> list[str]:
    entries = mapping_pairs(metadata_of(item.node)) or ()
    return [path for path, _ in entries if type(path) is str]


def renamed_keys(applied: Applied, unheld: Collection[str] = ()) -> RenamedKeys:
    """What became of a state dict's keys; `unheld`: new keys whose values are not in the output."""
    item, keys = applied.item, applied.keys
    # lists in all of this, which cost less than generators: there may be a million keys
    held, filled = keys.new, keys.filled
    if unheld:
        held = tuple([None if new in unheld else new for new in held])
        filled = tuple([pair for pair in filled if pair[0] not in unheld])
    odd: tuple[str, ...] = ()
    if not "".join(keys.old).isprintable():  # one look, for hardly a checkpoint has such a key
        odd = tuple(key for key in keys.old if not key.isprintable())
    pairs: tuple[tuple[str, str | None], ...] = ()
    if held != keys.old:
        pairs = tuple(zip(keys.old, held, strict=True))
    gone = {old for old, new in pairs if new is None}
    storages = homes(ref for key, ref in item.tensors() if key not in gone)
    shared = len(storages) - len(set(storages))

    def mapped() -> MappedKeys:
        now = dict(zip(keys.old, held, strict=True))
        if len(now) != len(held):
            raise KeyConflict("two keys read the same, so there is no mapping", where=item.path)
        modules: dict[str, tuple[str, ...]] = dict.fromkeys(_module_paths(item), ())
        for path, name in keys.renamed_modules([*modules]):
            modules[path] = (*modules[path], name)
        plain = MappedKeys(item.path, now, modules, dict(filled))
        return plain if applied.reshaped is None else applied.reshaped.mapped(plain)

    made: tuple[MadeKeys, ...] = ()
    tied: tuple[Tied, ...] = ()
    before, consumed = item.keys, frozenset[str]()
    if applied.reshaped is not None:
        before, consumed = applied.reshaped.before.keys, applied.reshaped.consumed
        names = dict(zip(keys.old, held, strict=True))
        made = tuple(applied.reshaped.told(names))
        tied = tuple(applied.reshaped.tied(names))
        fates = applied.reshaped.fates(names)
        pairs = tuple((key, fates.get(key)) for key in before if key not in consumed)
    return RenamedKeys(
        path=item.path,
        wrappers=keys.wrappers,
        count=len(before),
        changed=tuple([(old, new) for old, new in pairs if new is not None and new != old]),
        odd=odd,
        shared=shared,
        left_out=tuple([old for old, new in pairs if new is None]),
        mapped=mapped,
        filled=filled,
        made=made,
        consumed=consumed,
        tied=tied,
    )


@dataclass(frozen=True, slots=True)
class RenamedKeys:
    """What became of the keys of one state dict: `path` of it, the wrappers found, and (old, new)
    pairs that differ.

    `count` counts the keys of the source. `left_out` are those that the rules left out, or whose
    values the output does not hold; `mapped` works out all of it. `odd` are the keys with
    characters that cannot be printed; `shared` counts the tensors of the output whose storage
    another key of it has too. `filled` are keys that were
    absent, each with the new key whose tensor it has. `made` are tensors that rules made of those
    of the keys that are `consumed`; of these, `tied` are still what they were, by other names.
    """

    path: str
    wrappers: tuple[str, ...]
    count: int
    changed: tuple[tuple[str, str], ...]
    odd: tuple[str, ...] = ()
    shared: int = 0
    left_out: tuple[str, ...] = ()
    mapped: Callable[[], MappedKeys] | None = None
    filled: tuple[tuple[str, str], ...] = ()
    made: tuple[MadeKeys, ...] = ()
    consumed: frozenset[str] = frozenset()
    tied: tuple[Tied, ...] = ()

    @property
    def written(self) -> int:
        """How many keys the output has."""
        made = sum(len(item.targets) for item in self.made)
        return self.count - len(self.left_out) - len(self.consumed) + len(self.filled) + made

    @property
    def untouched(self) -> int:
        """How many keys stay as they are."""
        return self.count - len(self.changed) - len(self.left_out) - len(self.consumed)

    def kept(self, keys: Sequence[str]) -> dict[str, str]:
        """The keys that were not left out, nor became others, each with its new one; of several
        the first, by which frameworks know a parameter that has more (`named_parameters`).
        """
        tied = {key: item.after[0] for item in self.tied for key in item.before}
        now, gone = {**dict(self.changed), **tied}, {*self.left_out, *self.consumed} - tied.keys()
        return {key: now.get(key, key) for key in keys if key not in gone}
