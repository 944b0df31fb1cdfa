"""Rules for keys, one kind at a time: what each makes of a key, and whether it meets any key at
all.

A rule is decided on all keys of one state dict together, then applied key by key. The ordered list
of rules, and what must hold after it, are the part of `key_map`. The wrappers that torch puts
around keys are taken off by steps of their own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from types import FrameType
from typing import Any, ClassVar, NoReturn

from ckptconv.support import platforms
from ckptconv.support.errors import KeyConflict, LimitExceeded, printable
from ckptconv.support.limits import in_force
from ckptconv.support.records import dataclass

Step = Callable[[str], str | None]
"""A key before one rule → after it; None where the rule leaves it out."""


class Rule:
    """One rule; `words` are those of the command line that stand for it: its `option`, and its
    fields with what stands `between` them.
    """

    __slots__: tuple[str, ...] = ()
    option: ClassVar[str] = ""
    between: ClassVar[str] = ""

    @property
    def words(self) -> str:
        texts = [str(getattr(self, name)) for name in self.__slots__]
        return _option(self.option, self.between.join(texts))

    @property
    def leaves_out(self) -> bool:
        """Whether the rule may leave keys out."""
        return False

    def why(self, key: str) -> str:
        """Why the rule leaves out `key`, as it is before the rule: what to say of such keys."""
        return f"left out by {self.words}"

    def at(self, path: str) -> Rule:
        """The rule for the state dict at `path` in the tree."""
        return self

    def step(self, keys: Sequence[str]) -> Step:
        """What the rule does to each of `keys`: those of a state dict, left when its turn comes."""
        raise NotImplementedError

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        """The words of what in the rule meets none of `keys`."""
        return ()

    def _idle_unless(self, is_met: bool) -> tuple[str, ...]:
        if is_met:
            return ()
        return (self.words,)

    def is_done_by(self, wrappers: Sequence[str]) -> bool:
        """Whether taking these wrapper segments off has done all that the rule is for."""
        return False

    @property
    def parts(self) -> Sequence[Rule]:
        """The rules that it stands for, in their order: itself, but where it is a name of some."""
        return (self,)

    @property
    def of_adapters(self) -> str:
        """The preset that it is, where that gives LoRA adapters the names of a convention."""
        return ""

    @property
    def needs_config(self) -> bool:
        """Whether it has to be settled by the model's config before it is applied."""
        return False

    def with_config(self, config: Mapping[str, Any]) -> Rule:
        """The rule for the model that has this ``config.json``."""
        return self


def _option(name: str, text: str) -> str:
    return f"--{name} '{printable(text)}'"


@dataclass(frozen=True, slots=True)
class StripPrefix(Rule):
    """Cuts `prefix` off each key that starts with it, once."""

    option = "strip-prefix"
    prefix: str

    def step(self, keys: Sequence[str]) -> Step:
        return lambda key: key.removeprefix(self.prefix)

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._idle_unless(any(key.startswith(self.prefix) for key in keys))

    def is_done_by(self, wrappers: Sequence[str]) -> bool:
        return self.prefix.endswith(".") and set(self.prefix[:-1].split(".")) <= set(wrappers)


@dataclass(frozen=True, slots=True)
class AddPrefix(Rule):
    """Puts `prefix` before every key."""

    option = "add-prefix"
    prefix: str

    def step(self, keys: Sequence[str]) -> Step:
        return lambda key: self.prefix + key


@dataclass(frozen=True, slots=True)
class Rename(Rule):
    """Gives the key `old` the name `new`; where there is no such key, replaces the prefix `old`."""

    option, between = "rename", "="
    old: str
    new: str

    def step(self, keys: Sequence[str]) -> Step:
        old, new = self.old, self.new
        # a whole key goes first: `head` starts `head.weight` too, which is not meant then
        if old in keys:
            names = {old: new}
            return lambda key: names.get(key, key)
        return lambda key: new + key[len(old) :] if key.startswith(old) else key

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._idle_unless(any(key.startswith(self.old) for key in keys))


# Characters of a key to which replacements may lengthen it: each of many can double it.
_LONGEST_MADE = 1 << 20


@dataclass(frozen=True, slots=True)
class Regex(Rule):
    r"""Replaces what `pattern` matches, wherever in a key, by `replacement`, as `re.sub` does
    (``\1``, ``\g<name>``).

    Raises `KeyConflict` when the pattern or the replacement is broken.

    >>> Regex(r"blocks\.(\d+)", r"layers.\1").step([])("net.blocks.3.weight")
    'net.layers.3.weight'
    """

    option, between = "regex", "=>"
    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        try:
            self._compiled().sub(self.replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            # IndexError: an unknown group in the replacement; OverflowError: far too many repeats
            hint = "write it as PATTERN=>REPLACEMENT, in Python's re syntax"
            raise KeyConflict(f"{self.words} is not a valid pattern: {error}", hint=hint) from None

    def _compiled(self) -> re.Pattern[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what future versions will read otherwise
            return re.compile(self.pattern)

    def step(self, keys: Sequence[str]) -> Step:
        pattern, replacement = self._compiled(), self.replacement

        def replaced(key: str) -> str:
            made = pattern.sub(replacement, key)
            if len(made) > max(_LONGEST_MADE, len(key)):
                raise KeyConflict(f"{self.words} makes a key of {len(made)} characters", where=key)
            return made

        return replaced

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._idle_unless(any(map(self._compiled().search, keys)))


@dataclass(frozen=True, slots=True)
class Select(Rule):
    """Leaves out keys that match none of the globs `include` (if any), or one of `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return " ".join(words for words, _ in self._globs())

    @property
    def leaves_out(self) -> bool:
        return True

    def step(self, keys: Sequence[str]) -> Step:
        exclude = self.exclude
        return lambda key: key if self._is_wanted(key) and _met(key, exclude) is None else None

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            words for words, glob in self._globs() if all(_met(key, [glob]) is None for key in keys)
        )

    def why(self, key: str) -> str:
        met = _met(key, self.exclude)
        if met is not None and self._is_wanted(key):
            return f"matched {_option('exclude', met)}"
        return f"did not match {' or '.join(_option('include', glob) for glob in self.include)}"

    def _is_wanted(self, key: str) -> bool:
        return not self.include or _met(key, self.include) is not None

    def _globs(self) -> Iterator[tuple[str, str]]:
        yield from ((_option("include", glob), glob) for glob in self.include)
        yield from ((_option("exclude", glob), glob) for glob in self.exclude)


def _met(key: str, globs: Sequence[str]) -> str | None:
    """The first of the globs that a key matches."""
    # case counts, on Windows too, where `fnmatch` ignores it
    return next((glob for glob in globs if fnmatchcase(key, glob)), None)


def without_segments(key: str, names: Collection[str]) -> str:
    """A key without the module names `names`, wherever they stand in it but last."""
    *modules, last = key.split(".")
    return ".".join([*(name for name in modules if name not in names), last])


@dataclass(frozen=True, slots=True)
class KeyFunction(Rule):
    """What a function of the caller makes of each key: its new name, or None to leave it out."""

    function: Callable[[str], str | None]

    @property
    def words(self) -> str:
        return f"keys={getattr(self.function, '__name__', None) or type(self.function).__name__}"

    @property
    def leaves_out(self) -> bool:
        return True

    def step(self, keys: Sequence[str]) -> Step:
        def called(key: str) -> str | None:
            made: object = self.function(key)
            if made is not None and type(made) is not str:
                what = f"{self.words} gave {made!r:.100}, which is not a key"
                raise KeyConflict(what, where=key, hint="return a text, or None to leave it out")
            return made

        return called


@dataclass(frozen=True, slots=True)
class DropSegment(Rule):
    """Takes the module name `segment` out of keys, wherever it stands in them but last."""

    segment: str

    @property
    def words(self) -> str:
        return f"the segment '{self.segment}'"

    def step(self, keys: Sequence[str]) -> Step:
        return self._without

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._idle_unless(any(self._without(key) != key for key in keys))

    def is_done_by(self, wrappers: Sequence[str]) -> bool:
        return self.segment in wrappers

    def _without(self, key: str) -> str:
        if self.segment not in key:
            return key
        return without_segments(key, (self.segment,))


# ----------------------------------------------------------------------------------------- patience


class Patience:
    """The time that a pattern has, of which each block in it uses some: `regex_seconds`, then
    `LimitExceeded` stops it.

    Some patterns take time that doubles with each character (``(a+)+$``). Python's matcher looks
    for signals, so an alarm stops it; where there is none (other threads than the main one, an
    alarm that is somebody else's, Windows) nothing is stopped.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._most = in_force().regex_seconds
        self._left = self._most
        self._armed = False

    def __enter__(self) -> None:
        self._armed = isinstance(self._rule, Regex) and platforms.can_set_alarm()
        if self._armed:
            platforms.set_alarm(self._left, self._stop)

    def __exit__(self, *_: object) -> None:
        if self._armed:
            self._left = max(platforms.stop_alarm(), 1e-6)  # 0 would be no alarm at all

    def _stop(self, _number: int, _frame: FrameType | None) -> NoReturn:
        advice = "make it simpler: avoid nested repetitions"
        what = f"{self._rule.words} takes more than {self._most} s"
        raise LimitExceeded(what, limit="regex_seconds", allowed=self._most, advice=advice)


# -------------------------------------------------------------------------------- wrappers of torch


MODULE = "module"
UNMISTAKABLE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Wrapper segments that torch writes and no user does: compile, FSDP, activation checkpointing."""


def find_wrappers(keys: Iterable[str]) -> tuple[str, ...]:
    """The wrappers that `strip` would remove, outermost first.

    ``module`` counts once for each level at which it is the first segment of every key; the
    unmistakable ones count wherever they stand.

    >>> find_wrappers(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
    ('module', '_orig_mod')
    >>> find_wrappers(["module.weight", "weight"])
    ()
    """
    keys = list(keys)
    # nearly no key has one: all are searched in one text
    text = "\n".join(keys)
    known = [name for name in UNMISTAKABLE if name in text]
    inside = [
        name for name in known if any(name in key and name in key.split(".")[:-1] for key in keys)
    ]
    if inside:
        keys = [drop_unmistakable(key) for key in keys]
    return (*[MODULE] * _depth_of_all(keys), *inside)


LEAD = MODULE + "."


def find_wrapped_parts(keys: Collection[str]) -> tuple[str, ...]:
    """The starts of keys, with ``module.`` at their ends, that look like wrapped parts of a model:
    all keys of the part have it, and stay apart without it.

    >>> find_wrapped_parts(["features.module.0.weight", "classifier.weight"])
    ('features.module.',)
    >>> find_wrapped_parts(["lstm.module.weight", "lstm.weight_raw"])
    ()
    """
    inside = f".{LEAD}"
    starts = dict.fromkeys(key.partition(inside)[0] + "." for key in keys if inside in key)
    for key in keys:
        if starts and inside not in key:
            for head in accumulate(key.split("."), "{}.{}".format):
                starts.pop(f"{head}.", None)
    found = [start + LEAD for start in starts]
    led = [key for key in keys if key.startswith(LEAD)]
    if led and {key[len(LEAD) :] for key in led}.isdisjoint(keys):
        found.insert(0, LEAD)
    return tuple(found)


def _depth_of_all(keys: Sequence[str]) -> int:
    """How often ``module.`` is the first segment of every key."""
    depth = next(map(_depth, keys), 0)
    if depth and not all_start(keys, LEAD * depth):
        return min(map(_depth, keys))
    return depth


def _depth(key: str) -> int:
    """How often a key starts with ``module.`` before something else, its last segment at least."""
    at = _end_of_lead(key, len(key))
    return at // len(LEAD) - (0 < at == len(key))


def _end_of_lead(key: str, most: int) -> int:
    """Where the leading ``module.`` of a key end, `most` of them counted."""
    at = 0
    while most and key.startswith(LEAD, at):
        at, most = at + len(LEAD), most - 1
    return at


def bare_key(key: str) -> str:
    """A key without the ``module.`` that it starts with."""
    if key.startswith(LEAD) and not key.startswith(LEAD, len(LEAD)):
        return key[len(LEAD) :]
    return key[_end_of_lead(key, len(key)) :]


def all_start(keys: Sequence[str], prefix: str) -> bool:
    """Whether all keys start with `prefix` and go on behind it; not where there are none."""
    if not keys:
        return False
    # in order, what starts alike stands together
    first, last = min(keys), max(keys)
    return first.startswith(prefix) and last.startswith(prefix) and first != prefix


def drop_unmistakable(key: str) -> str:
    """A key without the segments of torch.compile, FSDP and activation checkpointing."""
    for name in UNMISTAKABLE:  # a plain loop: nearly no key has one
        if name in key:
            return without_segments(key, UNMISTAKABLE)
    return key


def stripping(times: int) -> Step:
    """Takes ``module.`` off the start of a key, so many times at most."""
    lead = LEAD * times
    return lambda key: key[len(lead) :] if key.startswith(lead) else key[_end_of_lead(key, times) :]


def wrapper_steps(
    word: str, telling: Sequence[str], beside: Collection[str]
) -> tuple[tuple[str, ...], list[Step]]:
    """The wrappers in the keys `telling`, and the steps that `word` asks for; see `KeyRules`."""
    found = find_wrappers(telling)
    if word == "strip":
        steps: list[Step] = []
        if found:
            steps.append(drop_unmistakable)
        if MODULE in found:
            steps.append(stripping(found.count(MODULE)))
        return found, steps
    if word == "module":
        # as the keys are, with the other wrappers; behind what all have, it is a module's own name
        depth = _depth_of_all(telling)
        return found, [stripping(depth) if depth else bare_key]
    if word == "add-module" and not all_start(telling, LEAD):
        return found, [lambda key: key if key in beside else LEAD + key]
    return found, []
