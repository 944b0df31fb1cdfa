"""The layouts of transformers as rules: of what is on the Hub what its version 5 holds, and back.

The rules are data, beside this module: `tools/transformers_mapping.py` takes them from a release.
What transformers does with them (its `core_model_loading.py`), and what is done here:

- All renames are applied to a key in their order. Each searches for its pattern and replaces the
  text that it found, once. Then at most one conversion takes the key. Back, the conversions come
  first, and the renames, turned around, in the opposite order.
- Of the patterns of one rule the longest comes first; ``*.`` stands for anything up to a dot; one
  that ends in a letter or a digit ends where a name ends.
- The rules of a model that is a part of another one apply below the path of that module, with or
  without the prefix of the base model before it.

Where transformers looks at the model itself (the size of a parameter), `config.json` says it here,
or the model type is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, get_args

from ckptconv.keys.config_numbers import number_in, part_of
from ckptconv.keys.rules import Rule, Step
from ckptconv.keys.tensor_rules import RuleOperation, TensorRule
from ckptconv.support.errors import KeyConflict, printable
from ckptconv.support.name_lists import data_beside
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.text import first_few

Direction = Literal["v5", "original"]
T = TypeVar("T")


@cache
def _release() -> Mapping[str, Any]:
    return data_beside(__file__, "transformers_mapping.json")


# --------------------------------------------------------------------------------------- one rule


@dataclass(frozen=True, slots=True)
class Scope:
    """An entry, and what it is for: `below` are the starts of keys, the longest first, each cut off
    while a rule looks at a key; `config_path` is where their config stands in that of the model.
    """

    entry: str
    below: tuple[str, ...] = ("",)
    config_path: str = ""


@dataclass(frozen=True, slots=True)
class Transform:
    """One rule of transformers, in one direction.

    `operations` are transformers' own, by their names there. `kind`: ``GroupWeightRename``, of
    which each source has a target of its own, and the first must meet a key;
    ``Inkling2IndexOffsetWeightRename`` adds `offset` to the number that it finds.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] | None
    kind: str
    offset: int
    scope: Scope

    def regex(self) -> re.Pattern[str]:
        """What is searched for in a key: a group ``g0``, ``g1``, ... for each source."""
        numbered = sorted(enumerate(self.sources), key=lambda item: -len(item[1]))
        return re.compile("|".join(f"(?P<g{at}>{_body(source)})" for at, source in numbered))


def _body(source: str, star: str = r".*\.") -> str:
    body = source.replace("*.", star)
    if re.search(r"[a-zA-Z0-9]$", body):
        body += r"(?!\w)"
    return body


# ------------------------------------------------------------------------------ which rules apply


def scopes(
    config: Mapping[str, Any], name: str | None = None, preset: str = "transformers-v5"
) -> list[Scope]:
    """The entries that apply to a model, in the order in which they do, without those for all.

    `name` is its model type, or its class; left out, `config` says it. Raises `KeyConflict` where
    neither does, or transformers does not have it, or its parts are not known; `preset` is the one
    that was asked for.
    """
    release = _release()
    named = f"write the model type behind the preset: --preset {preset}:mixtral"
    of_class = name or _first(config.get("architectures"))
    if of_class in release["classes"]:
        return _of_class(of_class, config)
    model_type = name or config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        what = "the layout depends on the model, and no config.json says which one it is"
        raise KeyConflict(what, hint=f"put config.json beside the checkpoint, or {named}")
    if model_type in release["types"] or _has_entry(model_type):
        return _of_type(model_type, config, preset)
    what = f"transformers {release['version']} has no model type '{printable(model_type)}'"
    raise KeyConflict(what, hint=f"of the one that it is like {named}")


def _first(listed: object) -> str:
    """The first of a list of names; no name for anything else."""
    if isinstance(listed, list) and listed and isinstance(listed[0], str):
        return listed[0]
    return ""


def _has_entry(name: str | None) -> bool:
    return name in _release()["entries"] or name in _release()["aliases"]


def _of_type(model_type: str, config: Mapping[str, Any], preset: str) -> list[Scope]:
    """Of a model whose class is not known, or has no other models in it."""
    classes = _release()["classes"]
    alike = [name for name, (_, parts) in classes.items() if parts[0][3] == model_type]
    ways = [_of_class(name, config) for name in alike]
    own = []
    if _has_entry(model_type):
        own.append(Scope(model_type))
    if any(way != own for way in ways):
        named = first_few(alike, 4)
        what = f"the layout of '{model_type}' depends on the class of the model: {named}"
        hint = f"write it: --preset {preset}:{alike[0]}, or as architectures in config.json"
        raise KeyConflict(what, hint=hint)
    inner = sorted(_inner_entries(config))
    if inner and not alike:
        what = f"which parts of '{model_type}' have the layout of '{inner[0]}' is not known"
        raise KeyConflict(what, hint="write key rules: ckptconv help layouts")
    return own


def _inner_entries(config: Mapping[str, Any]) -> Iterator[str]:
    for value in config.values():
        if isinstance(value, Mapping):
            inner = value.get("model_type")
            if inner and (_has_entry(inner) or inner in _release()["bases"]):
                yield inner
            yield from _inner_entries(value)


def _of_class(name: str, config: Mapping[str, Any]) -> list[Scope]:
    """As transformers' `get_model_conversion_mapping` walks through the modules: an entry of the
    class comes before that of the model type, and what one above has claimed is not taken again.
    """
    prefix, parts = _release()["classes"][name]
    claimed: dict[str, list[str]] = defaultdict(list)
    found = []
    for module, of_class, path, usual in parts:
        model_type = _type_at(config, path) or usual
        if model_type != usual:
            of_class = _release()["bases"].get(model_type, "")
        entry, claims = of_class, [of_class]
        if not _has_entry(of_class):
            entry, claims = model_type, [of_class, model_type]
        if any(name and _is_within(module, claimed[name]) for name in claims):
            continue
        if not _has_entry(entry):
            continue
        below: tuple[str, ...] = ("",)
        if module:
            dotted = f"{module}.".removeprefix(f"{prefix}.")
            below = (f"{prefix}.{dotted}", dotted) if prefix else (dotted,)
        found.append(Scope(entry, below, path or ""))
        for name in claims:
            claimed[name].append(module)
    return found


def _is_within(module: str, claimed: Sequence[str]) -> bool:
    return any(above == "" or module.startswith(f"{above}.") for above in claimed)


def _type_at(config: Mapping[str, Any], path: str | None) -> str | None:
    """The model type in a part of a config; None where that part says none, or it is not known."""
    if path is None:
        return None
    found = part_of(config, path).get("model_type")
    return found if isinstance(found, str) else None


def _transforms(scope: Scope, direction: Direction) -> Iterator[Transform]:
    """The rules of an entry, in the order in which they apply."""
    release = _release()
    listed = release["entries"][release["aliases"].get(scope.entry, scope.entry)]
    way = {"v5": 1, "original": -1}[direction]
    for told in listed[::way]:
        sources, targets = told["from"], told["to"]
        if direction == "original":
            if told.get("kind") == "PrefixChange" and not told["adds"]:
                # whether a checkpoint had it is not known then, and its loader takes both
                continue
            sources, targets = told.get("back", [targets, sources])
        operations = told.get("ops")
        if operations is not None:
            operations = tuple((name, _frozen(given)) for name, given in operations)
        kind, offset = told.get("kind", ""), told.get("offset", 0) * way
        yield Transform(tuple(sources), tuple(targets), operations, kind, offset, scope)


# The entry of rules for all models, on the way to version 5
_ALL = "legacy"


def _frozen(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in given.items()
    )


def transforms_of(listed: Sequence[Scope], direction: Direction) -> list[Transform]:
    """All rules in the order in which they apply: renames first, or last on the way back."""
    if direction == "v5":
        made = [item for scope in (*listed, Scope(_ALL)) for item in _transforms(scope, "v5")]
    else:
        made = [item for scope in reversed(listed) for item in _transforms(scope, "original")]
    return sorted(made, key=lambda item: (item.operations is None) == (direction == "original"))


# ------------------------------------------------------------------------------------------ renames


@dataclass(frozen=True, slots=True)
class Renames(Rule):
    """Renames of transformers, one after another; names whose form is one of `kept` (``{}`` is a
    number) are those of version 5 already.

    `about` are the rules of a model type that somebody named, both ways: it is the wrong one where
    no key is one of theirs.
    """

    transforms: tuple[Transform, ...]
    kept: frozenset[str] = frozenset()
    about: tuple[Transform, ...] = ()

    @property
    def words(self) -> str:
        return f"the renames of transformers {_release()['version']}"

    def step(self, keys: Sequence[str]) -> Callable[[str], str]:
        names = [key for key in keys if not self._is_kept(key)]
        steps = []
        for transform in self.transforms:
            steps.append(_renaming(transform, names))
            names = list(map(steps[-1], names))

        def renamed(key: str) -> str:
            if not self._is_kept(key):
                for step in steps:
                    key = step(key)
            return key

        return renamed

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        if not self.about:
            return ()  # what is in the layout already has nothing to be done
        known = re.compile("|".join(map(_anywhere, self.about)), re.DOTALL).match
        return self._idle_unless(any(map(known, keys)))

    def _is_kept(self, key: str) -> bool:
        return bool(self.kept) and re.sub(r"(?<![^.])\d+(?![^.])", "{}", key) in self.kept


def _renaming(transform: Transform, keys: Sequence[str]) -> Callable[[str], str]:
    """What one rename does to a key: the first text that a source matches becomes its target."""
    regex, below = transform.regex(), transform.scope.below
    is_group = transform.kind == "GroupWeightRename"

    def found_in(key: str) -> tuple[str, re.Match[str]] | None:
        # the text before is cut off, for `^` and what looks behind
        for start in below:
            if key.startswith(start):
                found = regex.search(key[len(start) :])
                return found and (start, found)
        return None

    def renamed(key: str) -> str:
        both = found_in(key)
        if both is None:
            return key
        start, found = both
        at = _source(found)
        target = transform.targets[at if is_group else 0]
        if r"\1" in target:
            group = found.group(regex.groupindex[f"g{at}"] + 1)
            if transform.offset:
                group = str(int(group) + transform.offset)
            target = target.replace(r"\1", group)
        return start + key[len(start) :].replace(found.group(), target, 1)

    if is_group and not any(both and not _source(both[1]) for both in map(found_in, keys)):
        return lambda key: key  # the names of version 5 lack the first
    return renamed


def _source(found: re.Match[str]) -> int:
    return next(
        int(name[1:])
        for name, text in found.groupdict().items()
        if text is not None and re.fullmatch(r"g\d+", name)
    )


# ------------------------------------------------------------------------------------- conversions


class AskedConversion(NamedTuple):
    """A conversion, its way, and the configs with its numbers: its own, and of the whole model."""

    transform: Transform
    is_back: bool
    own: Mapping[str, Any]
    whole: Mapping[str, Any]

    def way(self, there: T, back: T) -> T:
        """The one of two that is for its way."""
        return back if self.is_back else there

    @property
    def cut(self) -> str:
        """The one name on the side that is in one piece."""
        names = {len(side): side for side in (self.transform.sources, self.transform.targets)}
        return names.get(1, ("",))[0]


def _tensor_rule(asked: AskedConversion, earlier: Sequence[Transform]) -> TensorRule:
    """A conversion as a tensor rule, for keys that none of the `earlier` ones takes."""
    transform = asked.transform
    others = "|".join(_anywhere(item) for item in earlier)
    start = f"^(?!{others})" if others else "^"
    below = "|".join(map(re.escape, transform.scope.below))
    sources = tuple(
        re.compile(
            f"(?#{_shown(source)}){start}(?P<_>(?:{below}).*?)" + _body(source, r"(?P<e>.*)\."),
            re.DOTALL,
        )
        for source in transform.sources
    )
    targets = tuple("{_}" + target.replace("*.", "{e}.") for target in transform.targets)
    return TensorRule(sources, targets, tuple(_operations(asked)), optional=True)


def _anywhere(transform: Transform) -> str:
    """A regular expression that matches from their start the keys that a conversion takes."""
    below = "|".join(map(re.escape, transform.scope.below))
    bodies = "|".join(map(_body, transform.sources))
    return f"(?:{below}).*?(?:{bodies})"


def _shown(source: str) -> str:
    """A source as a pattern of a tensor rule would be written; without what only looks around."""
    plain = re.sub(r"\(\?.*?\)", "", source).replace("*.", "{e}.").replace("\\", "")
    return re.sub("[()]", "", plain)


def _operations(asked: AskedConversion) -> Iterator[RuleOperation]:
    """The operations of a rule; on the way back the inverse ones, the last of them first."""
    listed = asked.transform.operations or ()
    for name, given in listed[:: asked.way(1, -1)]:
        if name not in _MAKERS:
            raise _inexpressible(asked.transform, f"{name} cannot be told by a tensor rule")
        yield from _MAKERS[name](asked, dict(given))


def _inexpressible(transform: Transform, why: str) -> KeyConflict:
    what = f"the layout of '{transform.scope.entry}' is not supported: {why}"
    return KeyConflict(what, hint="write rules for it: ckptconv help layouts")


def _stack(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    yield RuleOperation.of(asked.way("stack", "unstack"), given["dim"], over="e")


def _concat(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    yield asked.way(_join, _split)(asked, given)


def _chunk(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    yield asked.way(_split, _join)(asked, given)


def _split_as_model(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    """Parts as large as the parameters of the model, which its code says."""
    if not asked.is_back and (asked.transform.scope.entry, asked.cut) not in _SIZES:
        raise _inexpressible(asked.transform, "the sizes of parts are those in code of the model")
    yield from _chunk(asked, given)


def _join(asked: AskedConversion, given: Mapping[str, Any]) -> RuleOperation:
    return RuleOperation.of("concat", given["dim"], over=_over(asked.transform.sources))


def _over(names: Sequence[str]) -> str | None:
    return "e" if len(names) == 1 else None


def _split(asked: AskedConversion, given: Mapping[str, Any]) -> RuleOperation:
    parts = sizes = None
    count = given.get("num_shards_attribute")
    if count is not None:
        parts = number_in(count, asked.whole.get("text_config", asked.whole))
    texts = _SIZES.get((asked.transform.scope.entry, asked.cut))
    if texts:
        sizes = [number_in(text, asked.own) for text in texts]
    over = _over(asked.transform.targets)
    return RuleOperation.of("split", given["dim"], parts=parts, sizes=sizes, over=over)


# The sizes of parts that are not equal, by entry and by what is cut: those of the parameters in
# transformers' `models/olmo_hybrid`, `models/lara_mini` and `models/molmo2`. On the way back
# transformers cuts in equal parts, and what it writes is not what was read.
_SIZES = {
    ("olmo_hybrid", "linear_attn.conv1d.weight"): (
        "linear_num_key_heads * linear_key_head_dim",
        "linear_num_key_heads * linear_key_head_dim",
        "linear_num_value_heads * linear_value_head_dim",
    ),
    ("lara_mini", "linear_attn.in_proj"): (
        "2 * linear_num_key_heads * linear_key_head_dim"
        " + linear_num_value_heads * linear_value_head_dim",
        "linear_num_value_heads * linear_value_head_dim",
        "linear_num_value_heads",
        "linear_num_value_heads",
    ),
    ("Molmo2TextModel", "embed_tokens.weight"): ("vocab_size", "additional_vocab_size"),
    ("Molmo2TextModel", "self_attn.att_proj"): (
        "num_attention_heads * head_dim",
        "num_key_value_heads * head_dim",
        "num_key_value_heads * head_dim",
    ),
}


def _rope(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    inner = asked.whole.get(given.get("subconfig_key") or "", asked.whole)
    heads = number_in("num_attention_heads", inner)
    permuted = given.get("permute_layer_names")
    on = None
    if permuted is not None:
        names = asked.way(asked.transform.targets, asked.transform.sources)
        on = [at for at, name in enumerate(names) if any(part in name for part in permuted)]
    yield RuleOperation.of(asked.way("rope", "unrope"), heads=heads, on=on)


def _transpose(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    dims = [given["dim0"], given["dim1"]]
    if given.get("check_dims"):
        # the same name before and after: only the size of a dimension tells which layout it is
        texts = _BEFORE_TRANSPOSE.get((asked.transform.scope.entry, asked.cut))
        if texts is None:
            raise _inexpressible(asked.transform, "code of the model decides what is transposed")
        config = asked.own.get("text_config", asked.own)
        sizes = [number_in(text, config) for text in texts]
        if sizes[0] == sizes[1]:
            raise _inexpressible(asked.transform, f"both dimensions of {asked.cut} are {sizes[0]}")
        yield RuleOperation.of("split", dims[0], sizes=[sizes[asked.is_back]])
    yield RuleOperation.of("transpose", dims=dims)


# The size of the first dimension that is transposed, on the Hub and in version 5: those of the
# parameters in transformers' `models/qwen3_vl_moe`.
_BEFORE_TRANSPOSE = {
    ("qwen3_vl_moe", "mlp.experts.gate_up_proj"): ("hidden_size", "2 * moe_intermediate_size"),
    ("qwen3_vl_moe", "mlp.experts.down_proj"): ("moe_intermediate_size", "hidden_size"),
}


def _interleave(asked: AskedConversion, given: Mapping[str, Any]) -> Iterator[RuleOperation]:
    yield RuleOperation.of(asked.way("deinterleave", "interleave"), given["dim"])


# What makes of each operation of transformers those of a tensor rule
_MAKERS: Mapping[str, Callable[[AskedConversion, Mapping[str, Any]], Iterator[RuleOperation]]] = {
    "MergeModulelist": _stack,
    "Concatenate": _concat,
    "Chunk": _chunk,
    "Split": _split_as_model,
    "PermuteForRope": _rope,
    "Transpose": _transpose,
    "Interleave": _interleave,
}


# --------------------------------------------------------------------------------------- the preset


@dataclass(frozen=True, slots=True)
class IsVersion5(Rule):
    """Refuses names that are not those of version 5, and those whose way back is not known: of 65
    renames the target stands in the source, so the way back, gone twice, would corrupt names.
    """

    there: Renames
    back: Renames
    words = "--preset transformers-original"

    def idle(self, keys: Sequence[str]) -> tuple[str, ...]:
        return (self.words,)  # it does nothing by itself

    def step(self, keys: Sequence[str]) -> Step:
        for key, name in zip(keys, through(self.there, keys), strict=True):
            if name != key:
                what = f"is not a name of transformers 5, which calls it '{printable(name)}'"
                hint = "it is in the original layout already, or in neither"
                raise KeyConflict(what, where=key, hint=hint)
        names = through(self.back, keys)
        for key, name, again in zip(keys, names, through(self.there, names), strict=True):
            if again != key:
                what = f"the original name is not known: '{printable(name)}' is loaded as another"
                raise KeyConflict(what, where=key, hint="write rules for it: ckptconv help layouts")
        return lambda key: key


def through(renames: Renames, keys: Sequence[str]) -> list[str]:
    """Keys after renames."""
    return list(map(renames.step(keys), keys))


def layout_rules(model: str | None, config: Mapping[str, Any], *, back: bool) -> tuple[Rule, ...]:
    """The rules that give a checkpoint the layout that transformers 5 holds, or `back` to the
    original one.

    `model` is its model type or its class; left out, `config` says it. Raises `KeyConflict` for
    one that transformers does not have, or whose rules depend on the code of the model.
    """
    preset, direction = "transformers-v5", "v5"
    if back:
        preset, direction = "transformers-original", "original"
    listed = scopes(config, model, preset)
    ways = {way: transforms_of(listed, way) for way in get_args(Direction)}
    conversions = [item for item in ways[direction] if item.operations is not None]
    made = []
    for at, item in enumerate(conversions):
        asked = AskedConversion(item, back, part_of(config, item.scope.config_path), config)
        made.append(_tensor_rule(asked, conversions[:at]))
    every = (*ways["v5"], *ways["original"])
    for item in every:
        if item.kind not in _KINDS:
            raise _inexpressible(item, f"{item.kind} is not a rename")
    about = _about(every) if model is not None else ()
    there = Renames(_renames(ways["v5"]), _kept(config, model), about)
    if not back:
        return (there, *made)
    again = Renames(_renames(ways["original"]), about=about)
    return (IsVersion5(there, again), *made, again)


_KINDS = ("", "PrefixChange", "GroupWeightRename", "Inkling2IndexOffsetWeightRename")


def _renames(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    return tuple(item for item in transforms if item.operations is None)


def _about(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """The rules that tell a model type: conversions, where there are some, for names that are
    changed may be those of many models.
    """
    own = tuple(item for item in transforms if item.scope.entry != _ALL)
    return tuple(item for item in own if item.operations is not None) or own


def _kept(config: Mapping[str, Any], model: str | None) -> frozenset[str]:
    """The forms of names that the rules are not for; of a type all of whose classes have the same
    rules as it those of all of them.
    """
    kept: Mapping[str, list[str]] = _release()["kept"]
    return frozenset(form for name in _classes(config, model) for form in kept.get(name, ()))


def _classes(config: Mapping[str, Any], model: str | None) -> list[str]:
    """The classes that a model may be of, among those that are known."""
    classes = _release()["classes"]
    listed, model_type = config.get("architectures"), config.get("model_type")
    if model is not None:
        listed, model_type = [model], model
    if isinstance(listed, list):
        named = [name for name in listed if name in classes]
        if named:
            return named[:1]
    return [name for name, (_, parts) in classes.items() if parts[0][3] == model_type]
