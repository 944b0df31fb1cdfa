"""The layouts of programs other than transformers, as tensor rules: to that of Hugging Face and
back.

A layout is a table, in the text beside this module. Its rows say which tensor is which, in the
names of the program and in those that the model has on the Hub, and what is done to it on the way
to the Hub. The way back is the same table, read from the right. Where the numbers of heads are
needed, they come from the config beside the checkpoint or stand behind the name of the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from ckptconv.keys.rules import Rule, Step
from ckptconv.keys.tensor_rules import Pattern, RuleOperation, TensorRule, matched
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.name_lists import lines_beside
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.text import first_few, some_text

Operations = tuple[RuleOperation, ...]


class Heads(NamedTuple):
    """How many heads there are of queries, and of keys and values."""

    queries: int
    keys: int


class LayoutRow(NamedTuple):
    """Which tensors are which: `theirs`, and those of the Hub; none of these: dropped there, and
    not made on the way back. `operation` is what is done on the way; `older` are further names
    that `theirs` had.
    """

    theirs: str
    hub: tuple[str, ...]
    operation: str
    older: tuple[str, ...]


@dataclass(slots=True)
class FrameworkLayout:
    """A table of rows, and the `source` of its facts.

    `is_whole`: all keys of a checkpoint are in it; another one is an error. `one_way` says why
    there is no way back, if there is none. `only` has what the config of the model may say, where
    it says anything: of another model some keys are the same, and the values laid out otherwise.
    `heads_named` are further names that a config has for the number of heads of queries.
    """

    source: str = ""
    rows: list[LayoutRow] = field(default_factory=list)
    needs_heads: bool = False
    heads_named: tuple[str, ...] = ()
    is_whole: bool = True
    one_way: str = ""
    only: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def take(self, line: str, parts: Mapping[str, FrameworkLayout]) -> None:
        """Take in a line of the table; `parts` are the layouts before it."""
        word, _, told = line.partition(": ")
        match word.split():
            case ["source"]:
                self.source = told
            case ["heads"]:
                self.needs_heads = True
                self.heads_named = tuple(told.split()[1:])
            case ["keys"]:
                self.is_whole = False
            case ["one", "way"]:
                self.one_way = told
            case ["only", key]:
                self.only[key] = tuple(_FLAGS.get(value, value) for value in told.split())
            case ["rows"]:
                for part in map(parts.__getitem__, told.split()):
                    self.source = self.source or part.source
                    self.one_way = self.one_way or part.one_way
                    self.rows += part.rows
                    self.only |= part.only
            case _:
                self.rows.append(_row(line))


_FLAGS = {"true": True, "false": False}


def _row(line: str) -> LayoutRow:
    text, _, older = line.partition(" was ")
    names, _, operation = text.partition(" @")
    theirs, *hub = names.split()
    return LayoutRow(theirs, tuple(hub), operation.strip(), tuple(older.split()))


def _layouts() -> Iterator[tuple[str, FrameworkLayout]]:
    """The layouts of the table; those in parentheses are only parts of others."""
    parts: dict[str, FrameworkLayout] = {}
    for line in lines_beside(__file__):
        if line[0] in "[(":
            layout = parts[line[1:-1]] = FrameworkLayout()
            if line[0] == "[":
                yield line[1:-1], layout
        else:
            layout.take(line, parts)


LAYOUTS: Mapping[str, FrameworkLayout] = dict(_layouts())
"""The layouts by the names of their presets; ``to-NAME`` goes back, but for `one_way`."""


def refuse_other_model(words: str, name: str, config: Mapping[str, Any]) -> None:
    """Raise `KeyConflict` where the config is that of a model for which the layout `name` is not;
    `words` are those of the preset.
    """
    # the keys of a Gemma in GGUF are those of a Llama, and only the config tells that they are not
    for key, allowed in LAYOUTS[name].only.items():
        told = config.get(key)
        if told is not None and told not in allowed:
            what = f"{words} is for {key} {some_text(list(map(str, allowed)))}"
            hint = f"take the preset for this model: {first_few(_presets_for(key, told), 4)}"
            if not _presets_for(key, told):
                hint = "there is no preset for this model; write the rules in a file (--rules)"
            raise KeyConflict(f"{what}, and the model says {printable(told)}", hint=hint)


def _presets_for(key: str, told: object) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if told in layout.only.get(key, ())]


def layouts_between(keys: Collection[str], wanted: str) -> list[str]:
    """The layouts by which one of these keys becomes `wanted`, a key of the Hub.

    >>> layouts_between(["layers.0.self_attn.qkv_proj.weight"], "layers.0.self_attn.k_proj.weight")
    ['phi3']
    """
    met: dict[str, None] = {}
    for name, layout in LAYOUTS.items():
        for row in layout.rows:
            for theirs, hub, _, _ in _settled(row, Heads(1, 1)):
                if _has_any(hub, [wanted]) and _has_any((theirs, *row.older), keys):
                    met[name] = None
    return [*met]


def _has_any(patterns: Sequence[Pattern], keys: Collection[str]) -> bool:
    return any(matched(pattern, key) is not None for pattern in patterns for key in keys)


def layout_rules(name: str, heads: Heads | None, *, back: bool) -> tuple[Rule, ...]:
    """The rules of the layout `name`, to the Hub or `back`."""
    layout = LAYOUTS[name]
    making = _rules_back if back else _rules_there
    rules = [rule for row in layout.rows for rule in making(row, heads or Heads(1, 1))]
    if back and layout.is_whole:
        # Llamas of older transformers have saved it; all programs compute it themselves
        rules.append(TensorRule.of(_ROPE_FREQS, (), ["drop"], optional=True))
    if not layout.is_whole:
        return tuple(rules)
    return (InLayout(name, tuple(rules), is_back=back), *rules)


def _rules_there(row: LayoutRow, heads: Heads) -> Iterator[TensorRule]:
    if not row.hub:
        yield TensorRule.of(row.theirs, (), ["drop"], optional=True)
    for theirs, hub, there, _ in _settled(row, heads):
        yield TensorRule((theirs,), hub, there, optional=True)
        for name in row.older:
            yield TensorRule((name,), hub, there, optional=True)


def _rules_back(row: LayoutRow, heads: Heads) -> Iterator[TensorRule]:
    for theirs, hub, _, back in _settled(row, heads):
        yield TensorRule(hub, (theirs,), back, optional=True)


@dataclass(frozen=True, slots=True)
class InLayout(Rule):
    """Refuses keys that no rule of a layout is for: they would stay, unnoticed, as they are."""

    layout: str
    rules: tuple[TensorRule, ...]
    is_back: bool

    @property
    def words(self) -> str:
        way = "to-" if self.is_back else ""
        return f"--preset {way}{self.layout}"

    def step(self, keys: Sequence[str]) -> Step:
        sources = [source for rule in self.rules for source in rule.sources]
        for key in keys:
            if not _has_any(sources, [key]):
                whose = "Hugging Face's" if self.is_back else "its"
                what = f"{self.words} does not know this key; it is none of {whose} names"
                hint = f"leave it out: --exclude '{printable(key)}', before the preset"
                if self._makes(key):
                    what = f"{self.words} makes such names, and this key has one already"
                    hint = self._other_way
                raise KeyConflict(what, where=key, hint=hint)
        return lambda key: key

    def _makes(self, key: str) -> bool:
        targets = (target for rule in self.rules for target in rule.targets)
        return any(matched(target, key) is not None for target in targets)

    @property
    def _other_way(self) -> str:
        if not self.is_back and LAYOUTS[self.layout].one_way:
            return "leave the preset out"
        other = self.layout if self.is_back else f"to-{self.layout}"
        return f"leave the preset out, or go the other way: --preset {other}"

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return (self.words,)  # it does nothing by itself


_ROPE_FREQS = "model.layers.{n}.self_attn.rotary_emb.inv_freq"


# ------------------------------------------------------------------------------------- operations

_QKV = ("q_proj", "k_proj", "v_proj")


def _settled(
    row: LayoutRow, heads: Heads
) -> Iterator[tuple[str, tuple[str, ...], Operations, Operations]]:
    """The names of a row there and on the Hub, and the operations on the way there and back."""
    if not row.hub:
        return
    if row.operation not in _FUSED:
        yield row.theirs, row.hub, *_operations(row.operation, heads)
        return
    operations = _FUSED[row.operation](heads)
    for kind in ("weight", "bias"):
        hub = tuple(f"{row.hub[0]}{name}.{kind}" for name in _QKV)
        yield f"{row.theirs}.{kind}", hub, *operations


def _operations(name: str, heads: Heads) -> tuple[Operations, Operations]:
    if name.startswith("rope"):
        count = heads.queries if name == "rope-queries" else heads.keys
        return (RuleOperation.of("rope", count),), (RuleOperation.of("unrope", count),)
    return _PLAIN[name]


_PLAIN: Mapping[str, tuple[Operations, Operations]] = {
    "": ((), ()),
    "experts": (
        (RuleOperation.of("unstack", 0, over="e"),),
        (RuleOperation.of("stack", 0, over="e"),),
    ),
    "halves": ((RuleOperation.of("split", 0),), (RuleOperation.of("concat", 0, parts=2),)),
    "less-1": ((RuleOperation.of("add", -1),), ()),
}


def _one_after_another(heads: Heads) -> tuple[Operations, Operations]:
    """Rows of all heads of q, of k, of v."""
    counts = [heads.queries, heads.keys, heads.keys]
    there = (
        RuleOperation.of("unflatten", 0, sizes=[sum(counts), -1]),
        RuleOperation.of("split", 0, sizes=counts),
        RuleOperation.of("flatten", dims=[0, 1]),
    )
    # by heads too: concat alone would join what has rows of other things among them
    back = (
        RuleOperation.of("unflatten", 0, sizes=[heads.queries, -1], on=[0]),
        RuleOperation.of("unflatten", 0, sizes=[heads.keys, -1], on=[1, 2]),
        RuleOperation.of("concat", 0),
        RuleOperation.of("flatten", dims=[0, 1]),
    )
    return there, back


def _by_group(heads: Heads) -> tuple[Operations, Operations]:
    """For each head of k and v the rows of its heads of q, then its own of k, of v."""
    each, rest = divmod(heads.queries, heads.keys)
    if rest:
        what = f"{heads.queries} heads cannot be in {heads.keys} groups"
        raise KeyConflict(what, hint="write HEADS,GROUPS")
    there = (
        RuleOperation.of("unflatten", 0, sizes=[heads.keys, each + 2, -1]),
        RuleOperation.of("split", 1, sizes=[each, 1, 1]),
        RuleOperation.of("flatten", dims=[0, 2]),
    )
    back = (
        RuleOperation.of("unflatten", 0, sizes=[heads.keys, each, -1], on=[0]),
        RuleOperation.of("unflatten", 0, sizes=[heads.keys, 1, -1], on=[1, 2]),
        RuleOperation.of("concat", 1),
        RuleOperation.of("flatten", dims=[0, 2]),
    )
    return there, back


# What is done to q, k and v in one, by how their rows lie
_FUSED: Mapping[str, Callable[[Heads], tuple[Operations, Operations]]] = {
    "qkv": _one_after_another,
    "qkv-by-group": _by_group,
    "qkv-by-head": lambda heads: _by_group(Heads(heads.queries, heads.queries)),
}
