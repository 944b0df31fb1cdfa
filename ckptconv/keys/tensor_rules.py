"""Tensor rules: which tensors become which others, by patterns of keys, and by which operations.

A tensor rule stands in the ordered list of key rules. It works on names and numbers alone here;
`tensors.layouts` has the shapes and pieces of each operation, `tree.reshaping` applies both.

A pattern is a whole key with variables: ``layers.{l}.experts.{e}.w1.weight``. A variable that is a
whole segment stands for any segment; one beside other characters (``w{n}``) stands for digits. A
leading ``**.`` stands for any number of segments, none included. ``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal, TypeAlias

from ckptconv.keys.config_numbers import Number, number_in
from ckptconv.keys.rules import Rule, Step
from ckptconv.support.choices import one_or_several
from ckptconv.support.errors import KeyConflict, KeyMismatch, printable
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.text import count_text, first_few

LIST = ""
"""The name of the axis of a list of tensors that its patterns are; other axes are variables."""


# ----------------------------------------------------------------------------------- operations

Kind = Literal["dim", "number", "dims", "numbers", "places", "variable", "value"]


class OperationArgument(NamedTuple):
    """An argument of an operation: its name, what it is, whether it may be left out."""

    name: str
    kind: Kind
    optional: bool = False


_DIM = OperationArgument("dim", "dim")
_OVER = OperationArgument("over", "variable", optional=True)
_ON = OperationArgument("on", "places", optional=True)
_PARTS = OperationArgument("parts", "number", optional=True)

OPERATIONS: Mapping[str, tuple[OperationArgument, ...]] = {
    "stack": (_DIM, _OVER),
    "unstack": (_DIM, _OVER),
    "concat": (_DIM, _PARTS, _OVER),
    "split": (
        _DIM,
        _PARTS,
        OperationArgument("sizes", "numbers", optional=True),
        _OVER,
    ),
    "transpose": (OperationArgument("dims", "dims"), _ON),
    "permute": (OperationArgument("dims", "dims"), _ON),
    "reshape": (OperationArgument("shape", "numbers"), _ON),
    "unflatten": (_DIM, OperationArgument("sizes", "numbers"), _ON),
    "flatten": (OperationArgument("dims", "dims"), _ON),
    "interleave": (_DIM, _PARTS, _ON),
    "deinterleave": (_DIM, _PARTS, _ON),
    "rope": (OperationArgument("heads", "number"), _ON),
    "unrope": (OperationArgument("heads", "number"), _ON),
    "add": (OperationArgument("value", "value"), _ON),
    "tie": (),
    "drop": (),
}
"""The operations and their arguments; the first is the one that may be given without its name.

- ``stack``, ``unstack``: along a new dimension `dim`; ``concat``, ``split``: along `dim`, of or
  into `parts` equal ones (left out: a concat takes any, a split makes as many as there are targets)
  or into `sizes` (``like``: those of the target that keys are fitted to).
  `over` is the variable whose values are joined or made. Left out: a stack takes the one variable
  that is left, a concat the list of sources where there are several of them.
- ``transpose``: two dimensions; ``permute``: all of them. ``reshape``: to a shape, of which one
  size may be -1; ``unflatten``: one dimension becomes several of these sizes, and ``flatten``:
  those from the first to the last of two become one, as in torch.
- ``interleave``: of ``[a0 a1 b0 b1]`` along `dim` makes ``[a0 b0 a1 b1]``, of so many `parts`
  (2); ``deinterleave`` undoes it.
- ``rope``: rows of each head from pairs ``(0, 1), (2, 3), ...`` to halves ``(0, d/2), ...``, as
  transformers has q and k; ``unrope`` back, as Meta has them.
- ``add``: a whole number to each value, in the type of the tensor, rounded once. It alone computes
  values, and cannot be undone: what was rounded is lost.
- ``tie``: one tensor under several names; ``drop``: it is left out.

`on` are the places in the list of tensors (0 is the first) that an operation is for; left out: all.
Dimensions count from the end where they are negative.
"""

JOINS = frozenset(("stack", "concat"))
SPLITS = frozenset(("unstack", "split"))

LIKE = "like"
"""The word for sizes that are those of the target."""

Argument: TypeAlias = "Number | tuple[Number, ...]"


@dataclass(frozen=True, slots=True)
class RuleOperation:
    """One operation of a tensor rule: a name of `OPERATIONS` with its arguments.

    Numbers may be text: names of ``config.json`` (``num_attention_heads``,
    ``text_config.head_dim``) and what ``+ - * //`` make of them. Raises `KeyConflict` for what is
    not one.

    >>> RuleOperation.of("stack", 0)
    RuleOperation(name='stack', arguments=(('dim', 0),))
    >>> RuleOperation.of("split", dim=0, sizes=["num_attention_heads * head_dim", 128, 128])["dim"]
    0
    """

    name: str
    arguments: tuple[tuple[str, Argument], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            what = f"there is no operation '{printable(self.name)}'"
            raise KeyConflict(what, hint=f"there are {', '.join(OPERATIONS)}")
        known = {item.name: item for item in OPERATIONS[self.name]}
        for name, value in self.arguments:
            if name not in known:
                what = f"{self.name} has no '{printable(name)}'"
                raise KeyConflict(what, hint=f"it has {', '.join(known) or 'no arguments'}")
            if not _is_of(known[name].kind, value):
                raise KeyConflict(
                    f"{self.name}: {name} is {value!r:.100}", hint=_FORMS[known[name].kind]
                )
        given = dict(self.arguments)
        for item in known.values():
            if item.name not in given and not item.optional:
                raise KeyConflict(f"{self.name} needs {item.name}", hint=_FORMS[item.kind])
        if "parts" in given and "sizes" in given:
            raise KeyConflict(f"{self.name} takes parts or sizes, not both")
        dims = given.get("dims")
        if self.name in ("transpose", "flatten") and isinstance(dims, tuple) and len(dims) != 2:
            raise KeyConflict(f"{self.name} takes two dimensions, as [0, 1]")

    @classmethod
    def of(cls, name: str, /, *value: Any, **arguments: Any) -> RuleOperation:
        """An operation by its name, its first argument, and others by their names."""
        if value and name in OPERATIONS:
            first = [item.name for item in OPERATIONS[name][:1]]
            if len(value) > 1 or not first or first[0] in arguments:
                raise KeyConflict(f"{name} takes one argument without its name at most")
            arguments = {first[0]: value[0], **arguments}
        frozen = {key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()}
        return cls(name, tuple((key, v) for key, v in frozen.items() if v is not None))

    def __getitem__(self, name: str) -> Argument:
        return dict(self.arguments)[name]

    def get(self, name: str) -> Argument | None:
        """An argument; None where it was left out."""
        return dict(self.arguments).get(name)

    @property
    def is_of_list(self) -> bool:
        """Whether it joins tensors of the list, or makes several of one."""
        return self.name in JOINS or self.name in SPLITS or self.name == "tie"

    @property
    def over(self) -> str | None:
        found = self.get("over")
        assert found is None or isinstance(found, str)
        return found

    @property
    def words(self) -> str:
        """As it is told: ``stack 0 over e``."""
        first = [item.name for item in OPERATIONS[self.name][:1]]
        told = [
            _value_text(value) if [key] == first else f"{key} {_value_text(value)}"
            for key, value in self.arguments
        ]
        return " ".join([self.name, *told])

    def texts(self) -> Iterator[str]:
        """The numbers in it that a config has to give."""
        for name, value in self.arguments:
            if name != "over":
                yield from (
                    it for it in one_or_several(value) if isinstance(it, str) and it != LIKE
                )

    def with_config(self, config: Mapping[str, Any]) -> RuleOperation:
        """The same with numbers in the place of names of a config; `KeyConflict` where one lacks
        or is not a whole number.
        """

        def settled(name: str, value: Argument) -> Argument:
            if name == "over" or value == LIKE:
                return value
            if isinstance(value, tuple):
                return tuple(number_in(item, config) for item in value)
            return number_in(value, config)

        return replace(
            self, arguments=tuple((name, settled(name, v)) for name, v in self.arguments)
        )


def _value_text(value: Argument) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


_FORMS: Mapping[Kind, str] = {
    "dim": "a dimension is a whole number; -1 is the last",
    "number": "write a number, or a name of config.json",
    "dims": "write dimensions as a list: [0, 1]",
    "numbers": "write a list of numbers, or of names of config.json",
    "places": "places in the list of tensors, from 0 on, as a list: [0, 1]",
    "variable": "the name of a variable of the patterns",
    "value": "write a whole number other than 0, as -1",
}


def _is_of(kind: Kind, value: object) -> bool:
    if kind == "dim":
        return type(value) is int
    if kind == "variable":
        return type(value) is str
    if kind == "value":
        return type(value) is int and value != 0
    if kind == "number":
        return (type(value) is int and value > 0) or (type(value) is str and bool(value))
    if kind == "numbers" and value == LIKE:
        return True
    if not isinstance(value, tuple) or not value:
        return False
    if kind == "numbers":
        return all(type(item) in (int, str) for item in value)
    return all(type(item) is int and (kind == "dims" or item >= 0) for item in value)


# --------------------------------------------------------------------------------------- patterns

Pattern: TypeAlias = "str | re.Pattern[str]"
"""A whole key with variables; or a regular expression that is searched for in keys, whose named
groups are variables. What stands around its match stays around the target.
"""

_BEFORE, _AFTER, _HEAD = "<", ">", "**"
# A doubled brace, {variable}, a brace alone (refused), text
_TOKENS = re.compile(r"(\{\{|\}\})|\{([A-Za-z_]\w*)\}|([{}])|([^{}]+)")


def _parsed(pattern: str) -> Iterator[tuple[bool, str]]:
    """The parts of a pattern: (whether it is a variable, its name or the text)."""
    if pattern.startswith("**."):
        yield True, _HEAD
        pattern = pattern[3:]
    if not pattern or "**" in pattern:
        what = f"'{printable(pattern)}' is not a pattern of keys"
        raise KeyConflict(what, hint="**. stands at its start only")
    for brace, variable, odd, text in _TOKENS.findall(pattern):
        if odd or (variable and not variable.isidentifier()):
            what = f"'{printable(pattern)}' is not a pattern of keys"
            raise KeyConflict(what, hint="a variable is {name}; {{ and }} are braces")
        yield bool(variable), variable or text or brace[0]


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = list(_parsed(pattern))
    made, seen = "", set()
    for at, (is_variable, text) in enumerate(parts):
        if not is_variable:
            made += re.escape(text)
        elif text == _HEAD:
            made += r"((?:.*\.)?)"  # without a name: any name may be that of a variable
        elif text in seen:
            made += f"(?P={text})"
        else:
            before, after = parts[at - 1 : at], parts[at + 1 : at + 2]
            is_segment = (not before or before[0][1] == _HEAD or before[0][1].endswith(".")) and (
                not after or (not after[0][0] and after[0][1].startswith("."))
            )
            made += f"(?P<{text}>{'[^.]+' if is_segment else '[0-9]+'})"
            seen.add(text)
    return re.compile(made, re.DOTALL)


def variables_of(pattern: Pattern) -> frozenset[str]:
    """The variables of a pattern."""
    if isinstance(pattern, str):
        return frozenset(text for is_variable, text in _parsed(pattern) if is_variable)
    return frozenset((*pattern.groupindex, _BEFORE, _AFTER))


def matched(pattern: Pattern, key: str) -> dict[str, str] | None:
    """The values of the variables for which a pattern is the key; None where it is not."""
    if isinstance(pattern, str):
        found = _compiled(pattern).fullmatch(key)
        if found is None:
            return None
        values = found.groupdict()
        if pattern.startswith(f"{_HEAD}."):
            values[_HEAD] = found[1]
        return values
    found = pattern.search(key)
    if found is None:
        return None
    values = {name: text or "" for name, text in found.groupdict().items()}
    return {**values, _BEFORE: key[: found.start()], _AFTER: key[found.end() :]}


def filled_in(target: str, values: Mapping[str, str]) -> str:
    """A key: the target with values in the places of its variables."""
    made = "".join(
        values[text] if is_variable else text for is_variable, text in _parsed_once(target)
    )
    return f"{values.get(_BEFORE, '')}{made}{values.get(_AFTER, '')}"


@cache
def _parsed_once(target: str) -> tuple[tuple[bool, str], ...]:
    return tuple(_parsed(target))


# ------------------------------------------------------------------------------------------ rules


class Group(NamedTuple):
    """Tensors that a rule takes together.

    `values` are those of the variables that its targets have too. `keys` are in C order of `axes`
    (name, values): the list of sources first, then each variable that is to be joined.
    """

    values: Mapping[str, str]
    keys: tuple[str, ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class TensorRule(Rule):
    """Tensors whose keys are those of `sources` become those of `targets`, by `operations` in
    their order; without any, they have other keys.

    A variable that sources and targets share tells groups of tensors apart, each made by itself.
    One of the sources alone is joined by an operation (`over`), one of the targets alone made by
    one. `optional`: it may meet no tensor.

    Sources are all patterns or all compiled regular expressions; targets are patterns either way.
    Raises `KeyConflict` where patterns and operations do not fit together.

    >>> w1, w3 = "l.{n}.experts.{e}.w1", "l.{n}.experts.{e}.w3"
    >>> rule = TensorRule.of([w1, w3], "l.{n}.gate_up", ["stack 0", "concat 1"])
    >>> [group.keys for group in rule.groups(["l.0.experts.0.w1", "l.0.experts.0.w3"])]
    [('l.0.experts.0.w1', 'l.0.experts.0.w3')]
    """

    sources: tuple[Pattern, ...]
    targets: tuple[str, ...]
    operations: tuple[RuleOperation, ...] = ()
    optional: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            raise KeyConflict("a tensor rule has no source")
        if len({isinstance(source, str) for source in self.sources}) > 1:
            raise KeyConflict("sources are all patterns, or all regular expressions")
        own = _same_variables(self.sources, "sources")
        implicit = frozenset((_BEFORE, _AFTER)) & own
        is_drop = self.operations == (RuleOperation("drop"),)
        if is_drop and self.targets:
            raise KeyConflict("drop stands alone, and has no target")
        if is_drop:
            return
        if not self.targets:
            raise KeyConflict("a tensor rule has no target")
        made = _same_variables(self.targets, "targets") | implicit
        _refuse_unfit(self, own - made, made - own)

    @classmethod
    def of(
        cls,
        sources: Pattern | Sequence[Pattern],
        targets: str | Sequence[str],
        operations: Sequence[RuleOperation | str | Mapping[str, Any]] = (),
        *,
        optional: bool = False,
    ) -> TensorRule:
        """A rule in the words of a file: one or several sources and targets; operations are made
        ones, or as `operation` takes them.
        """
        made = tuple(map(operation, operations))
        return cls(tuple(one_or_several(sources)), tuple(one_or_several(targets)), made, optional)

    @property
    def words(self) -> str:
        sources = first_few(list(self.source_texts), 2)
        return f"the tensor rule {sources} → {first_few(list(self.target_texts), 2) or 'nothing'}"

    @property
    def source_texts(self) -> tuple[str, ...]:
        """The sources as they are told."""
        return tuple(map(_text, self.sources))

    @property
    def target_texts(self) -> tuple[str, ...]:
        """The targets as they are told: without ``{_}``, which is what stood before a match."""
        return tuple(target.removeprefix("{_}") for target in self.targets)

    @property
    def operations_text(self) -> str:
        """The operations as they are told."""
        return ", ".join(item.words for item in self.operations)

    @property
    def leaves_out(self) -> bool:
        return not self.targets

    @property
    def created(self) -> frozenset[str]:
        """The variables of its targets that operations make."""
        own = variables_of(self.sources[0])
        return frozenset(name for each in self.targets[:1] for name in variables_of(each) - own)

    def is_for(self, key: str) -> bool:
        """Whether a key is one of its sources."""
        return bool(_met(self.sources, key))

    @property
    def needs_config(self) -> bool:
        return any(True for item in self.operations for _ in item.texts())

    def with_config(self, config: Mapping[str, Any]) -> TensorRule:
        try:
            operations = tuple(item.with_config(config) for item in self.operations)
        except KeyConflict as error:
            raise error.at(where=self.words) from None
        return replace(self, operations=operations)

    def step(self, keys: Sequence[str]) -> Step:
        """What becomes of a key where there are no operations, or it is dropped: what they make of
        tensors is not one key of one.
        """
        names: dict[str, str | None] = {}
        for group in self.groups(keys):
            if not self.targets:
                names |= dict.fromkeys(group.keys)
                continue
            for source, target in zip(group.keys, self.targets, strict=True):
                names[source] = filled_in(target, group.values)
        return lambda key: names.get(key, key)

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return self._idle_unless(self.optional or any(map(self.is_for, keys)))

    def groups(self, keys: Sequence[str]) -> list[Group]:
        """The groups that the keys make, in the order in which they are met.

        Raises `KeyConflict` where two sources are one key, a source of a group lacks, or the
        values of a variable to be joined are not 0, 1, 2 and so on.
        """
        shared = self._shared()
        joined = sorted(variables_of(self.sources[0]) - shared, key=self._rank)
        found: dict[tuple[str, ...], dict[tuple[int, tuple[str, ...]], str]] = {}
        order = sorted(shared)
        for key in keys:
            if not (met := _met(self.sources, key)):
                continue
            if len(met) > 1:
                names = " and ".join(self.source_texts[at] for at, _ in met[:2])
                what = f"{self.words}: it is both {printable(names)}"
                raise KeyConflict(what, where=key, hint="make one of the patterns narrower")
            [(at, values)] = met
            members = found.setdefault(tuple(values[name] for name in order), {})
            member = at, tuple(values[name] for name in joined)
            if member in members:
                what = f"and '{printable(members[member])}' are one to {self.words}"
                raise KeyConflict(what, where=key, hint="make its pattern narrower")
            members[member] = key
        groups = [
            self._group(dict(zip(order, values, strict=True)), joined, members)
            for values, members in found.items()
        ]
        self._refuse_other_counts(groups)
        return groups

    def _refuse_other_counts(self, groups: Sequence[Group]) -> None:
        """Refuse groups of other sizes than the first: the last ones of a set may be missing."""
        for group in groups[1:]:
            for (name, ours), (_, theirs) in zip(groups[0].axes, group.axes, strict=True):
                if len(ours) != len(theirs):
                    raise KeyMismatch(
                        f"{self.words} joins {len(theirs)} of {{{name}}} here, and {len(ours)} of "
                        f"them at '{printable(groups[0].keys[0])}'",
                        where=group.keys[0],
                        hint="some are missing, or each of the two needs a rule of its own",
                    )

    def _shared(self) -> frozenset[str]:
        own = variables_of(self.sources[0])
        if not self.targets:
            return own
        return own & (variables_of(self.targets[0]) | {_BEFORE, _AFTER})

    def _rank(self, variable: str) -> int:
        source = self.sources[0]
        text = source if isinstance(source, str) else source.pattern
        return max(text.find(f"{{{variable}}}"), text.find(f"<{variable}>"))

    def _group(
        self,
        values: Mapping[str, str],
        joined: Sequence[str],
        members: Mapping[tuple[int, tuple[str, ...]], str],
    ) -> Group:
        axes = [(LIST, tuple(map(str, range(len(self.sources)))))]
        for place, name in enumerate(joined):
            numbers = {member[place] for _, member in members}
            axes.append((name, self._counted(name, numbers, members)))
        each = list(product(*(numbers for _, numbers in axes[1:])))
        wanted = [(at, place) for at in range(len(self.sources)) for place in each]
        lacking = [item for item in wanted if item not in members]
        if lacking:
            at, missing = lacking[0]
            source = self.sources[at]
            given = {**values, **dict(zip(joined, missing, strict=True))}
            name = filled_in(source, given) if isinstance(source, str) else source.pattern
            raise KeyMismatch(
                f"{self.words} needs '{printable(name)}', which is not there "
                f"({count_text(len(lacking), 'key')} of {len(wanted):,} missing)",
                where=next(iter(members.values())),
            )
        return Group(values, tuple(members[item] for item in wanted), tuple(axes))

    def _counted(
        self, name: str, numbers: set[str], members: Mapping[tuple[int, tuple[str, ...]], str]
    ) -> tuple[str, ...]:
        """The values of a variable that is joined, in the order of the numbers that they are."""
        example = next(iter(members.values()))
        # digits of another script are other keys, and int() takes no more than 4300 digits
        odd = [text for text in sorted(numbers) if not re.fullmatch("[0-9]{1,19}", text)]
        if odd:
            told = printable(odd[0])
            what = f"{self.words} joins over {{{name}}}, which is '{told}', not a number"
            raise KeyConflict(what, where=example)
        ordered = sorted(numbers, key=lambda text: (int(text), text))
        for place, text in enumerate(ordered):
            if int(text) != place:
                are = "a hole"
                if int(text) < place:
                    are = "two spellings of one number"
                raise KeyMismatch(
                    f"{self.words} joins over {{{name}}} from 0 on, and there is {are}: "
                    f"{first_few(ordered[max(0, place - 2) : place + 1], 3)}"
                    f" where {place} should be",
                    where=example,
                    hint="all parts of a set are needed; the numbers have no gap",
                )
        return tuple(ordered)


def _text(pattern: Pattern) -> str:
    """A pattern as it is told: of a regular expression the comment that it begins with, if any."""
    if isinstance(pattern, str):
        return pattern
    comment = re.match(r"\(\?#([^)]*)\)", pattern.pattern)
    if comment is None:
        return pattern.pattern
    return comment[1]


def _met(sources: Sequence[Pattern], key: str) -> list[tuple[int, dict[str, str]]]:
    """The sources that a key is one of, by their numbers, with the values of their variables."""
    found = ((at, matched(source, key)) for at, source in enumerate(sources))
    return [(at, values) for at, values in found if values is not None]


def _same_variables(patterns: Sequence[Pattern], what: str) -> frozenset[str]:
    found = [variables_of(pattern) for pattern in patterns]
    if any(names != found[0] for names in found):
        listed = " and ".join(_text(pattern) for pattern in patterns[:2])
        raise KeyConflict(f"the {what} of one rule have the same variables: {printable(listed)}")
    return found[0]


def operation(given: RuleOperation | str | Mapping[str, Any]) -> RuleOperation:
    """An operation as it is written in a file: its name, ``name number``, or an object of its name
    and its arguments.

    >>> operation({"split": {"dim": 0, "sizes": [8, 4]}}).words
    'split 0 sizes [8, 4]'
    """
    if isinstance(given, RuleOperation):
        return given
    if isinstance(given, str):
        name, _, text = given.strip().partition(" ")
        value = text.strip()
        if not value:
            return RuleOperation(name)
        if re.fullmatch(r"-?\d{1,9}", value):
            return RuleOperation.of(name, int(value))
        return RuleOperation.of(name, value)
    if isinstance(given, Mapping) and len(given) == 1:
        ((word, value),) = given.items()
        if isinstance(value, Mapping):
            return RuleOperation.of(str(word), **{str(key): item for key, item in value.items()})
        return RuleOperation.of(str(word), value)
    what = f"{given!r:.100} is not an operation"
    raise KeyConflict(what, hint='write it as {"stack": 0}, or {"split": {"dim": 0, "parts": 3}}')


_OF_A_RULE = ("from", "to", "operations", "optional")


def tensor_rule(entry: Mapping[str, Any]) -> TensorRule:
    """A rule in the words of a file: an object of its sources, targets and operations.

    >>> tensor_rule({"from": "a.{n}.w", "to": "a.w", "operations": ["stack 0"]}).words
    'the tensor rule a.{n}.w → a.w'
    """
    unknown = [name for name in entry if name not in _OF_A_RULE]
    if unknown:
        what = f"a tensor rule has no '{printable(unknown[0])}'"
        raise KeyConflict(what, hint=f"it has {', '.join(_OF_A_RULE)}")
    operations, optional = entry.get("operations", []), entry.get("optional", False)
    if type(optional) is not bool:
        raise KeyConflict(f"optional is true or false, not {optional!r:.50}")
    sources, targets = _texts_of(entry, "from"), _texts_of(entry, "to")
    return TensorRule.of(sources, targets, one_or_several(operations), optional=optional)


def _texts_of(entry: Mapping[str, Any], name: str) -> list[Any]:
    listed = one_or_several(entry.get(name, []))
    if not all(isinstance(item, (str, re.Pattern)) for item in listed):
        raise KeyConflict(f"'{name}' is not a pattern of keys, nor a list of them")
    return listed


# ----------------------------------------------------------------- what operations do to a list


def _refuse_unfit(rule: TensorRule, joined: frozenset[str], made: frozenset[str]) -> None:
    """Raise `KeyConflict` unless the operations join what is to be joined, and make the rest."""
    axes = Axes([(LIST, len(rule.sources)), *((name, 1) for name in sorted(joined))])
    left, still = set(joined), set(made)
    for item in rule.operations:
        axis = axis_of(item, axes, left, still, rule)
        if item.name in JOINS:
            left.discard(axis)
        elif item.name in SPLITS:
            still.discard(axis)
            if item.name == "split" and axis != LIST and len(item.arguments) < 3:
                what = f"{rule.words}: {item.words} does not say into how many parts"
                raise KeyConflict(what, hint="say parts or sizes")
        count = parts_of(item, axes, rule) if axis == LIST else 1
        axes.step(item, axis, count)
    if left or still:
        names = ", ".join(f"{{{name}}}" for name in sorted(left | still))
        side, how = ("sources", "joins") if left else ("targets", "makes")
        raise KeyConflict(
            f"{rule.words}: {names} is in the {side} alone, and no operation {how} it",
            hint="stack or concat joins, unstack or split makes: "
            + '{"stack": {"dim": 0, "over": "e"}}',
        )
    if axes.size(LIST) != len(rule.targets):
        tensors = count_text(axes.size(LIST), "tensor")
        sources = count_text(len(rule.sources), "source")
        targets = count_text(len(rule.targets), "target")
        what = f"its operations make {tensors} of {sources}, for {targets}"
        raise KeyConflict(f"{rule.words}: {what}")


def axis_of(
    item: RuleOperation, axes: Axes, left: set[str], still: set[str], rule: TensorRule
) -> str:
    """The axis that an operation joins or makes: a variable, or the list."""
    if not item.is_of_list:
        return LIST
    names, side, is_listed = still, "targets", len(rule.targets) > axes.size(LIST)
    if item.name in JOINS:
        names, side, is_listed = left, "sources", axes.size(LIST) > 1
    over = item.over
    if over is not None:
        if over not in names:
            what = f"{rule.words}: {item.words}, but {{{over}}} is not in the {side} alone"
            raise KeyConflict(what)
        return over
    free = sorted(names - {other.over for other in rule.operations})
    if item.name == "tie" or not free or (item.name in ("concat", "split") and is_listed):
        return LIST
    if len(free) > 1:
        told = " or ".join(f"over {name}" for name in free)
        raise KeyConflict(f"{rule.words}: {item.name} could be {told}", hint="say which")
    return free[0]


def parts_of(item: RuleOperation, axes: Axes, rule: TensorRule) -> int:
    """Into how many tensors each one is taken apart, where it becomes several of the list."""
    if item.name in JOINS or not item.is_of_list:
        return 1
    sizes, parts = item.get("sizes"), item.get("parts")
    if isinstance(sizes, tuple):
        return len(sizes)
    if isinstance(parts, int):
        return parts
    whole, rest = divmod(len(rule.targets), axes.size(LIST))
    if rest:
        what = f"{rule.words}: {item.words} of {axes.size(LIST)} tensors does not make "
        raise KeyConflict(f"{what}{len(rule.targets)} targets")
    return max(1, whole)


class Axes:
    """How a list of tensors is counted: in C order by axes (name, size). Joining takes the
    innermost axis away, taking apart adds one innermost.
    """

    def __init__(self, axes: Sequence[tuple[str, int]]) -> None:
        self.sizes = list(axes)

    def size(self, name: str) -> int:
        return dict(self.sizes).get(name, 1)

    def moved_innermost(self, name: str) -> list[int]:
        """Make an axis the innermost one; the order in which the tensors are to stand then."""
        before = list(enumerate(self.places()))
        others = [axis for axis in self.sizes if axis[0] != name]
        self.sizes = [*others, (name, self.size(name))]
        places = {tuple(place.get(each, 0) for each, _ in self.sizes): at for at, place in before}
        return [places[tuple(place.values())] for place in self.places()]

    def step(self, item: RuleOperation, axis: str, count: int) -> None:
        """Count as after an operation, for which the axis is the innermost one."""
        if item.name in JOINS:
            self.sizes = [(name, size) for name, size in self.sizes if name != axis]
            if axis == LIST:
                self.sizes.append((LIST, 1))
        elif item.is_of_list:
            sizes = dict(self.sizes)
            sizes[axis] = sizes.get(axis, 1) * count
            self.sizes = list(sizes.items())

    def places(self) -> Iterator[dict[str, int]]:
        """Of each tensor of the list, in order, its place along each axis."""
        names, sizes = zip(*self.sizes, strict=True)
        for place in product(*map(range, sizes)):
            yield dict(zip(names, place, strict=True))
