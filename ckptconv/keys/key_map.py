"""Key rules: what each key of a state dict is called in the output, and which keys are left out.

Works on names alone. The rules of a list are applied in its order, each decided on all keys of one
state dict together, then applied to its keys and to the module paths of its `_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, field, replace
from typing import Any, Literal, TypeAlias

from ckptconv.keys.mappings import (
    Followed,
    Mapped,
    PathStep,
    path_step,
    path_step_by_name,
    reordered,
)
from ckptconv.keys.rules import (
    AddPrefix,
    KeyFunction,
    Patience,
    Regex,
    Rename,
    Rule,
    Select,
    Step,
    StripPrefix,
    wrapper_steps,
)
from ckptconv.support.choices import (
    WRAPPERS,
    is_pair,
    refuse_no_keys,
    refuse_no_text,
    refuse_no_texts,
    refuse_other,
    spelling_checked,
)
from ckptconv.support.errors import KeyConflict, OptionRefused, printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import short_repr
from ckptconv.support.text import first_few

_IN_REPR = 10  # rules


@dataclass(frozen=True, slots=True, repr=False)
class KeyRules:
    """What to do with keys: `wrappers` first, then `rules` in their order.

    `wrappers`: ``strip`` removes the wrapper segments of DataParallel, DDP, torch.compile, FSDP and
    activation checkpointing, in any nesting; ``module`` removes just leading ``module.``: those
    that all keys have, or else key by key; ``add-module`` puts ``module.`` before every key, unless
    all have it; ``keep`` does nothing, and so do all of them beside a mapping, which says
    everything.

    The short forms are rules that come before `rules`: each of `strip_prefixes` is cut off where a
    key starts with it, each (old, new) of `renames` gives a key or a literal prefix another name,
    `add_prefix` is put in front, and `include` and `exclude` are globs over the resulting keys. A
    rule that meets no key is a `KeyConflict` when it is applied.

    >>> KeyRules("keep", add_prefix="net.") == KeyRules.of([("add-prefix", "net.")], "keep")
    True
    """

    wrappers: Literal["strip", "module", "add-module", "keep"] = "strip"
    strip_prefixes: InitVar[Sequence[str]] = ()
    renames: InitVar[Sequence[tuple[str, str]]] = ()
    add_prefix: InitVar[str] = ""
    include: InitVar[Sequence[str]] = ()
    exclude: InitVar[Sequence[str]] = ()
    rules: tuple[Rule, ...] = ()
    _init_by = staticmethod(spelling_checked)

    def __post_init__(
        self,
        strip_prefixes: Sequence[str],
        renames: Sequence[tuple[str, str]],
        add_prefix: str,
        include: Sequence[str],
        exclude: Sequence[str],
    ) -> None:
        refuse_other("wrappers", self.wrappers, WRAPPERS)
        given: object = self.rules
        if not isinstance(given, tuple) or (
            given and not all(isinstance(rule, Rule) for rule in given)
        ):
            what = f"rules={self.rules!r:.100} is not a tuple of rules"
            raise OptionRefused(what, hint="KeyRules.of makes them from words")
        if (strip_prefixes, renames, add_prefix, include, exclude) == ((), (), "", (), ()):
            return
        refuse_no_texts(strip_prefixes=strip_prefixes, include=include, exclude=exclude)
        refuse_no_text(add_prefix=add_prefix or None)
        if (
            isinstance(renames, str)
            or not isinstance(renames, Sequence)
            or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in renames)
        ):
            what = f"renames={renames!r:.100} is not a list of pairs"
            raise OptionRefused(what, hint="write it as renames=[('old', 'new')]")
        short: list[Rule] = [StripPrefix(prefix) for prefix in strip_prefixes if prefix]
        short += [Rename(old, new) for old, new in renames]
        if add_prefix:
            short.append(AddPrefix(add_prefix))
        if include or exclude:
            short.append(Select(tuple(include), tuple(exclude)))
        object.__setattr__(self, "rules", (*short, *self.rules))

    @classmethod
    def of(
        cls,
        rules: Iterable[tuple[str, str] | Mapping[str, Any] | Rule],
        wrappers: Literal["strip", "module", "add-module", "keep"] = "strip",
    ) -> KeyRules:
        r"""Rules in the words of the command line, as (option, value), tensor rules in the words of
        a file, as objects of ``from``, ``to`` and ``operations``, or made ones; `KeyConflict` for
        what is not a list of rules.

        Globs that follow each other are one choice among the same keys.

        >>> renames = [("strip-prefix", "model."), ("regex", r"^blocks\.=>layers.")]
        >>> rules = KeyRules.of([*renames, ("exclude", "*.bias")])
        >>> map_keys(["model.blocks.0.weight", "model.blocks.0.bias"], rules).new
        ('layers.0.weight', None)
        """
        if isinstance(rules, (str, Mapping)) or is_pair(rules) or not isinstance(rules, Iterable):
            what = f"{rules!r:.100} is not a list of rules"
            raise KeyConflict(what, hint="write it as [('rename', 'OLD=NEW')]")
        made: list[Rule] = []
        for given in rules:
            rule = _rule(given)
            last = next(reversed(made), None)
            if isinstance(rule, Select) and isinstance(last, Select):
                made[-1] = Select(last.include + rule.include, last.exclude + rule.exclude)
            else:
                made.append(rule)
        return cls(wrappers, rules=tuple(made))

    def __repr__(self) -> str:
        what = "KeyRules"
        return short_repr(what, self.wrappers, *(rule.words for rule in self.rules[:_IN_REPR]))

    @property
    def mapped(self) -> bool:
        """Whether a mapping is among the rules."""
        return any(isinstance(rule, Mapped) for rule in self.rules)

    @property
    def globs(self) -> KeyRules:
        """Just the globs, to choose the same keys of a checkpoint that has its names already."""
        globs = tuple(rule for rule in self.rules if isinstance(rule, Select))
        return KeyRules("keep", rules=globs)

    @property
    def leaving(self) -> str:
        """The words of the rules that leave keys out."""
        return " or ".join(rule.words for rule in self.rules if rule.leaves_out) or "the rules"


def _rule(given: tuple[str, str] | Mapping[str, Any] | Rule) -> Rule:
    if isinstance(given, Rule):
        return given
    if isinstance(given, Mapping):
        from ckptconv.keys.tensor_rules import tensor_rule  # seldom needed

        return tensor_rule(given)
    pair = given
    if isinstance(given, list):  # as JSON has it, in a line of a manifest
        pair = tuple(given)
    if not is_pair(pair):
        what = f"{given!r:.100} is not a rule"
        raise KeyConflict(what, hint="write it as ('rename', 'OLD=NEW')")
    return parse_rule(*pair)


def parse_rule(word: str, text: str) -> Rule:
    """The rule that `word` and its value stand for; `KeyConflict` for none."""
    if not text:
        raise KeyConflict(f"--{printable(word)} is empty", hint="leave it out")
    if word not in _MAKERS:
        what = f"there is no rule '{printable(word)}'"
        raise KeyConflict(what, hint=f"there are {', '.join(RULE_WORDS)}")
    return _MAKERS[word](text)


def _halves(word: str, text: str, between: str, form: str) -> tuple[str, str]:
    first, found, second = text.partition(between)
    if not found or not first:
        raise KeyConflict(f"--{word} '{printable(text)}' is not of the form {form}")
    return first, second


def _preset(name: str) -> Rule:
    from ckptconv.keys.presets import Preset  # seldom needed

    return Preset(name)


_MAKERS: dict[str, Callable[[str], Rule]] = {
    "strip-prefix": StripPrefix,
    "add-prefix": AddPrefix,
    "rename": lambda text: Rename(*_halves("rename", text, "=", "OLD=NEW")),
    "regex": lambda text: Regex(*_halves("regex", text, "=>", "PATTERN=>REPLACEMENT")),
    "include": lambda text: Select(include=(text,)),
    "exclude": lambda text: Select(exclude=(text,)),
    "preset": _preset,
}
RULE_WORDS = tuple(_MAKERS)
"""The rules by their names on the command line and in files."""


Keys: TypeAlias = Literal["strip", "keep"] | KeyRules | Callable[[str], str | None]
"""What is done with keys: a word, rules, or a function that gives the new name, or None."""


def rules_of(keys: Keys) -> KeyRules:
    """The rules that an option `keys` stands for; `OptionRefused` for any other word."""
    if isinstance(keys, KeyRules):
        return keys
    if callable(keys):
        return KeyRules("keep", rules=(KeyFunction(keys),))
    refuse_no_keys(keys)
    return {"strip": STRIP, "keep": KEEP}[keys]


STRIP = KeyRules()
"""The default: strip wrappers, nothing else."""
KEEP = KeyRules("keep")
"""Leave all keys as they are."""


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The keys of one state dict before and after: `new[i]` belongs to `old[i]`, None where it was
    left out.

    `wrappers` are those found before, `idle` the words of the rules that met no key. `why` says of
    each key that was left out, by its number, which rule did it, and `seen` what it was when that
    rule met it. `filled` are further keys, each with the one of `new` whose value it has too.
    `orders` are the places of module paths after those of the `path_steps`, by number, that undo
    something.
    """

    old: tuple[str, ...]
    new: tuple[str | None, ...]
    wrappers: tuple[str, ...] = ()
    path_steps: tuple[PathStep, ...] = ()
    idle: tuple[str, ...] = ()
    filled: tuple[tuple[str, str], ...] = ()
    why: Mapping[int, str] = field(default_factory=dict)
    seen: Mapping[int, str] = field(default_factory=dict)
    orders: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def renamed_modules(self, paths: Iterable[str]) -> list[tuple[str, str]]:
        """Module paths, each with a new name of it, in the order in which `_metadata` has them:
        where a mapping is undone, in the one from before it.
        """
        renamed = [(path, path) for path in paths]
        for number, step in enumerate(self.path_steps):
            renamed = [(path, after) for path, before in renamed for after in step(before)]
            if number in self.orders:
                renamed = reordered(renamed, self.orders[number])
        return renamed


def map_keys(
    keys: Sequence[str],
    rules: KeyRules,
    path: str = "",
    telling: Sequence[str] | None = None,
    beside: Collection[str] = (),
) -> KeyMap:
    """Apply `rules` to all keys of the state dict at `path`.

    `telling` are the keys that tell which wrappers there are (None: all); numbers of the training
    beside them do not. `beside` are the keys of what is not the model's, which therefore gets no
    wrapper.

    Raises `KeyConflict` when two keys become one, one becomes empty, or one is not in a mapping.
    That every rule met a key is for `refuse_idle` to say, of all state dicts together.
    """
    telling = keys if telling is None else telling
    word = rules.wrappers
    if rules.mapped:  # which says everything
        word = "keep"
    found, steps = wrapper_steps(word, telling, {*beside})
    new: list[str | None] = list(keys)
    for step in steps:
        new = [None if key is None else step(key) for key in new]
    path_steps = [path_step_by_name(step) for step in steps]
    orders: dict[int, Mapping[str, int]] = {}
    idle: list[str] = []
    why: dict[int, str] = {}
    seen: dict[int, str] = {}
    filled: list[tuple[str, str]] = []
    for given in rules.rules:
        rule = given.at(path)
        live = [key for key in new if key is not None]
        with (patience := Patience(rule)):
            step = rule.step(live)
            after = [None if key is None else step(key) for key in new]
            # a rule for `module.` is not idle where that was taken off as a wrapper before
            if not (steps and rule.is_done_by(found)):
                idle += rule.idle(live)
        if rule.leaves_out:
            gone = {at: key for at, key in enumerate(new) if key is not None and after[at] is None}
            why |= {at: rule.why(key) for at, key in gone.items()}
            seen |= gone
        filled = [(_of_twin(step, key), _of_twin(step, twin)) for key, twin in filled]
        if isinstance(rule, Mapped):
            filled += rule.filled({*after})
            order = rule.module_order()
            if order:
                orders[len(path_steps)] = order
        path_steps.append(path_step(rule, step, patience, Followed(new, after)))
        new = after
    before, after = [*keys], [*new]
    for key, twin in filled:
        before.append(twin)
        after.append(key)
    _refuse_collisions(before, after)
    changed = KeyMap(tuple(keys), tuple(new), found, tuple(path_steps), tuple(idle), tuple(filled))
    return replace(changed, why=why, seen=seen, orders=orders)


def _of_twin(step: Step, key: str) -> str:
    """What a step makes of a key that has the tensor of another, or of that one: it stays."""
    after = step(key)
    if after is None:
        what = f"the mapping gives the tensor of '{printable(key)}' two names, which stay together"
        raise KeyConflict(what, where=key, hint="leave it out in a second step")
    return after


def unchanged(keys: Sequence[str]) -> KeyMap:
    """The map that leaves every key as it is."""
    return KeyMap(tuple(keys), tuple(keys))


def refuse_idle(maps: Sequence[KeyMap], rules: KeyRules) -> None:
    """Raise `KeyConflict` when a rule met no key of any state dict, which no careful user wants."""
    for words in maps[0].idle if maps else ():
        if all(words in item.idle for item in maps):
            raise KeyConflict(f"{words} matches no key", hint=hint_of_starts(maps, rules))


def hint_of_starts(maps: Sequence[KeyMap], rules: KeyRules) -> str:
    """How the keys start before the rules, and what was stripped of them."""
    heads = dict.fromkeys("".join(key.partition(".")[:2]) for item in maps for key in item.old)
    some = first_few(list(heads), 5, lambda head: printable(head, 40))
    hint = f"before the rules the keys start with {some}"
    wrappers = dict.fromkeys(name for item in maps for name in item.wrappers)
    if wrappers and rules.wrappers == "strip":
        hint += f"; --keys keep leaves the wrapper {', '.join(wrappers)}"
    return hint


_TWO_TYPES = (
    "rename one of them in Python (--rename takes both), or write a torch file with --keys keep"
)


def refuse_half_characters(keys: Collection[str]) -> None:
    """Raise `KeyConflict` for a key with half a character, which no file can hold."""
    try:
        "".join(keys).encode()  # all at once, for there may be a million
    except UnicodeEncodeError as error:
        bad = next(key for key in keys if error.object[error.start] in key)
        raise KeyConflict("a key holds half a character (a lone surrogate)", where=bad) from None


def _refuse_collisions(keys: Sequence[str], renamed: Sequence[str | None]) -> None:
    """Raise `KeyConflict` when two of the keys left are the same, or one is empty or not text."""
    new = [after for after in renamed if after is not None]
    refuse_half_characters(new)
    if len(set(new)) == len(new) and ("" not in new or "" in keys):
        return
    owner: dict[str, str] = {}
    for before, after in zip(keys, renamed, strict=True):
        if after is None:
            continue
        if not after and before:
            what = f"the rules leave nothing of the key '{printable(before)}'"
            raise KeyConflict(what, where=before)
        if after in owner and owner[after] == before:
            raise KeyConflict(f"two keys read as '{printable(before)}'", hint=_TWO_TYPES)
        if after in owner:
            both = f"the keys '{printable(owner[after])}' and '{printable(before)}'"
            hint = "use --keys keep or other rules; nothing was written"
            raise KeyConflict(f"{both} both become '{printable(after)}'", hint=hint)
        owner[after] = before
