"""Key rules in files: lists of rules in JSON, TOML or YAML, and the mappings that conversions
leave, in JSON.

A file of rules is a list, or ``rules`` in an object, of objects with one rule each, by its name on
the command line::

    {"rules": [{"strip-prefix": "model."}, {"rename": {"head.": "classifier."}},
               {"exclude": ["*.bias", "*.mean"]}]}

A tensor rule is an object of its patterns and operations (`tensor_rules`)::

    {"from": "layers.{l}.experts.{e}.w1.weight", "to": "layers.{l}.experts.w1",
     "operations": [{"stack": 0}]}

A mapping is an object with ``"mapping": 1`` and ``state_dicts``: for each its ``path``, ``keys``
(old → new), ``left_out`` (old ones), ``modules`` (old → new paths of its `_metadata`) and, where
there are any, ``filled`` (new ones without an old one → the new one whose tensor they have).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, Literal, NoReturn

from ckptconv.io.location import read_small
from ckptconv.io.places import place_of
from ckptconv.keys.key_map import RULE_WORDS, KeyRules, parse_rule
from ckptconv.keys.mappings import MOVES, Mapped, MappedKeys, MappedTensors
from ckptconv.keys.rules import Regex, Rename, Rule
from ckptconv.keys.tensor_rules import tensor_rule
from ckptconv.support.choices import refuse_no_flag, refuse_no_path, spelling_checked
from ckptconv.support.errors import CheckpointError, KeyConflict, MissingDependency, printable
from ckptconv.support.json_text import read_object, refuse_crowded
from ckptconv.support.records import dataclass

_MAPPING = "mapping"
_VERSION = 1


# What a file holds in place of rules, each with the line where it begins (None: not known)
_Entries = list[tuple[Any, "int | None"]]


@spelling_checked
def read_key_rules(
    path: str | os.PathLike[str],
    *,
    wrappers: Literal["strip", "keep"] = "strip",
    reverse: bool = False,
) -> KeyRules:
    """Read key rules from a JSON, TOML or YAML file, or a mapping that a conversion saved
    (`reverse` undoes it).

    `wrappers` is what comes before the rules; a mapping says that itself. Raises `CheckpointError`
    with the line and the rule that is wrong.

    >>> read_key_rules("rules.toml")  # doctest: +SKIP
    >>> load_portable("renamed.pt", keys=read_key_rules("map.json", reverse=True))  # doctest: +SKIP
    """
    refuse_no_path(path=path)
    refuse_no_flag(reverse=reverse)
    return KeyRules.of(read_rules(path, reverse=reverse), wrappers)


def read_rules(path: str | os.PathLike[str], *, reverse: bool = False) -> list[Rule]:
    """The rules in a file, or the one mapping in it, with `reverse` turned around.

    Raises `CheckpointError` with the line and the rule that is wrong; `KeyConflict` when `reverse`
    is asked of rules.
    """
    refuse_no_path(rules=path)
    place = place_of(path)
    path, raw = place.path, read_small(place, "rules_bytes")
    text = _text(raw, path)
    kind = path.suffix.lower()
    if kind not in _ENTRIES:
        what = "does not look like a file of key rules"
        raise KeyConflict(what, path=path, hint=f"its name must end in {', '.join(_ENTRIES)}")
    if kind == ".json":
        refuse_crowded(raw, path, None)
        mapping = _mapping(text, path)
        if mapping is not None and reverse:
            mapping = tuple(item.reversed() for item in mapping)
        if mapping is not None:
            return [Mapped(mapping)]
    if reverse:
        what = "holds rules, but only a mapping can be undone"
        raise KeyConflict(what, path=path, hint="--save-mapping writes one")
    return [rule for entry in _ENTRIES[kind](text, path) for rule in _rules(*entry, path)]


def _text(raw: bytes, path: PurePath) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        hint = "rules stand in a .json, .toml or .yaml file"
        raise KeyConflict("is not UTF-8 text", path=path, hint=hint) from None


# -------------------------------------------------------------------------------------------- rules


def _rules(entry: Any, line: int | None, path: PurePath) -> Iterator[Rule]:
    rule = entry if isinstance(entry, dict) else {}
    if "from" in rule:
        try:
            yield tensor_rule(_written(rule))
        except CheckpointError as error:
            raise error.at(path=path, where=_where(line)) from None
        return
    says_nothing = [
        values in ([], {}, None) or (isinstance(values, dict) and "" in values)
        for values in rule.values()
    ]
    if says_nothing != [False]:
        hint = f"the names are {', '.join(RULE_WORDS)}"
        _refuse(path, line, "a rule is one name with its value", hint)
    ((word, values),) = rule.items()
    try:
        if word in _PAIRS and isinstance(values, dict):
            yield from (_PAIRS[word](_text_of(old), _text_of(new)) for old, new in values.items())
            return
        for text in values if isinstance(values, list) else [values]:
            yield parse_rule(str(word), _text_of(text))
    except CheckpointError as error:
        raise error.at(path=path, where=_where(line, word)) from None


def _written(value: Any) -> Any:
    """A value with the numbers and flags that YAML leaves as text."""
    if isinstance(value, list):
        return [_written(item) for item in value]
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    if isinstance(value, _NoText):
        if _NUMBER(value.text):
            return int(value.text)
        return {"true": True, "false": False}.get(value.text.lower(), value.text)
    return value


_NUMBER = re.compile(r"-?[0-9]{1,18}").fullmatch  # so many digits fit 64 bits

# The rules that may be written as a table, old → new
_PAIRS: dict[Any, Callable[[str, str], Rule]] = {"rename": Rename, "regex": Regex}


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise KeyConflict("its value is not text", hint="write it as on the command line")
    return value


def _refuse(path: PurePath, line: int | None, what: str, hint: str | None = None) -> NoReturn:
    raise KeyConflict(what, path=path, where=_where(line), hint=hint)


def _where(line: int | None, *words: object) -> str | None:
    """Where something is wrong: in which line, if that is known, and in what of it."""
    told = [f"line {number}" for number in (line,) if number is not None]
    return ": ".join([*told, *map(str, words)]) or None


def _listed(found: Any, path: PurePath) -> list[Any]:
    listed = found.get("rules") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        _refuse(path, None, "has no list of rules", 'write {"rules": [...]}, or [[rules]] in TOML')
    return listed


def _json_entries(text: str, path: PurePath) -> _Entries:
    try:
        listed = _listed(json.loads(text, object_pairs_hook=_unique), path)
    except json.JSONDecodeError as error:
        _refuse(path, error.lineno, f"is not valid JSON: {error.msg}")
    except KeyConflict as error:
        raise error.at(path=path) from None
    except (RecursionError, ValueError):
        _refuse(path, None, "nests too deeply, or holds a number that is too long")
    return list(zip(listed, _json_lines(text), strict=True))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # of two values under one name json keeps the last, and a rule would be gone without a word
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        what = f"'{printable(twice)}' occurs twice in one object"
        raise KeyConflict(what, hint="write one rule in each object")
    return found


def _json_lines(text: str) -> Iterator[int]:
    """The lines on which the items of the list of rules begin, in a text known to be JSON."""
    decoder = json.JSONDecoder()
    at = _after_space(text, 0)
    while at < len(text) and text[at] != "[":  # an object: go from name to name until "rules"
        name, at = decoder.raw_decode(text, _after_space(text, at + 1))
        at = _after_space(text, _after_space(text, at) + 1)
        if name == "rules":
            break
        _, at = decoder.raw_decode(text, at)
        at = _after_space(text, at)
    line, counted = 1, 0
    while at < len(text) and text[at] in "[,":
        at = _after_space(text, at + 1)
        line, counted = line + text.count("\n", counted, at), at
        yield line
        _, at = decoder.raw_decode(text, at)
        at = _after_space(text, at)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _toml_entries(text: str, path: PurePath) -> _Entries:
    try:
        import tomllib
    except ImportError:  # before python 3.11
        try:
            import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
        except ImportError:
            hint = "pip install tomli, or write the rules as JSON"
            what = "needs tomli on this version of Python"
            raise MissingDependency(what, path=path, hint=hint) from None
    _refuse_dots(text, path)
    try:
        listed = _listed(tomllib.loads(text), path)
    except tomllib.TOMLDecodeError as error:
        _refuse(path, None, f"is not valid TOML: {error}")
    except (RecursionError, ValueError):
        _refuse(path, None, "nests too deeply, or holds a number that is too long")
    # tomllib tells no lines: they are those of the headings, where each rule has one
    plain = [line.partition("#")[0].strip() for line in text.splitlines()]
    heads: list[int | None] = [at for at, line in enumerate(plain, 1) if line == "[[rules]]"]
    if len(heads) != len(listed):
        heads = [None] * len(listed)
    return list(zip(listed, heads, strict=True))


_MOST_DOTS = 100


def _refuse_dots(text: str, path: PurePath) -> None:
    """Refuse a name of very many parts: tomllib's time is their square, and no rule has one."""
    for number, line in enumerate(text.splitlines(), 1):
        most = max(name.count(".") for name in _NAME_ENDS(line))
        if most > _MOST_DOTS:
            _refuse(path, number, f"has a name of more than {_MOST_DOTS} parts")


_NAME_ENDS = re.compile(r"[=,\[\]{}]").split


def _yaml_entries(text: str, path: PurePath) -> _Entries:
    try:
        import yaml
    except ImportError:
        hint = "pip install 'pyyaml>=6', or write the rules as JSON or TOML"
        raise MissingDependency("needs PyYAML", path=path, hint=hint) from None
    try:
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        listed = _listed(_plain(root, path, set()), path)
    except yaml.YAMLError as error:
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        _refuse(path, mark and mark.line + 1, f"is not valid YAML: {problem or 'malformed'}")
    except (ValueError, RecursionError):
        _refuse(path, None, "is not valid YAML")
    if isinstance(root.value[0], tuple):
        root = next(value for name, value in root.value if name.value == "rules")
    return list(zip(listed, (node.start_mark.line + 1 for node in root.value), strict=True))


@dataclass(frozen=True, slots=True)
class _NoText:
    """A number, date or the like in YAML, which no rule has: a long one takes for ever to make."""

    text: str

    def __str__(self) -> str:
        return self.text


def _plain(node: Any, path: PurePath, seen: set[int]) -> Any:
    """A YAML node as lists, dicts and texts; no aliases: a few lines make billions of values."""
    if node is None:
        return None
    line, kind = node.start_mark.line + 1, node.tag.removeprefix(_YAML_TAG)
    if id(node) in seen:
        _refuse(path, line, "is used again through an alias", "write it out at each place")
    seen.add(id(node))
    if kind == "map":
        pairs = [[_plain(part, path, seen) for part in pair] for pair in node.value]
        names = [name for name, _ in pairs]
        if any(isinstance(name, list | dict) for name in names) or len({*names}) != len(names):
            _refuse(path, line, "a name occurs twice in it, or is not text")
        return dict(pairs)
    if kind == "seq":
        return [_plain(value, path, seen) for value in node.value]
    if kind not in _YAML_SCALARS:
        _refuse(path, line, f"is not valid YAML: it has the tag {printable(node.tag)}")
    if kind == "null":
        return None
    if kind == "str":
        return node.value
    return _NoText(node.value)


_YAML_TAG = "tag:yaml.org,2002:"
_YAML_SCALARS = ("str", "null", "bool", "int", "float", "timestamp", "merge", "value")


_ENTRIES = {
    ".json": _json_entries,
    ".toml": _toml_entries,
    ".yaml": _yaml_entries,
    ".yml": _yaml_entries,
}


# ----------------------------------------------------------------------------------------- mappings


def mapping_text(state_dicts: Sequence[MappedKeys]) -> bytes:
    """A mapping as the bytes of its file."""
    document = {_MAPPING: _VERSION, "state_dicts": list(map(_document, state_dicts))}
    return (json.dumps(document, indent=1) + "\n").encode()


def _document(item: MappedKeys) -> dict[str, Any]:
    made: dict[str, Any] = {
        "path": item.path,
        "keys": {old: new for old, new in item.keys.items() if new is not None},
        "left_out": [old for old, new in item.keys.items() if new is None],
    }
    if item.filled:
        made["filled"] = dict(item.filled)
    if item.tensors:
        made["tensors"] = [
            {
                "from": list(row.sources),
                "moves": [_move_text(*move) for move in row.moves],
                "to": list(row.targets),
            }
            for row in item.tensors
        ]
        made["order"] = list(item.key_order)
    made["modules"] = {
        old: news[0] if len(news) == 1 else list(news) for old, news in item.modules.items()
    }
    return made


def _mapped_tensors(rows: list[Any], path: PurePath) -> Iterator[MappedTensors]:
    """The rows of a mapping that `_document` wrote."""
    numbered: set[object] = set()
    for row in rows:
        match row:
            case {"from": list() as sources, "moves": list() as moves, "to": list() as targets}:
                pass
            case _:
                raise _no_mapping(path)
        are_known = all(type(each) is str or each in numbered for each in sources)
        if not sources or not are_known or not all(map(_is_target, targets)):
            raise _no_mapping(path)
        numbered.update(each for each in targets if type(each) is int)
        made = tuple(_move(move, path) for move in moves)
        yield MappedTensors(tuple(sources), made, tuple(targets))


def _is_target(value: Any) -> bool:
    return value is None or type(value) in (str, int)


def _move_text(name: str, numbers: Sequence[Sequence[int]]) -> str:
    """A step as text: ``concat 1 48,48``; a list without a number is a dash."""
    return " ".join([name, *(",".join(map(str, each)) or "-" for each in numbers)])


def _move(move: Any, path: PurePath) -> tuple[str, tuple[tuple[int, ...], ...]]:
    name, *lists = str(move).split(" ")
    taken = MOVES.get(name)
    if taken is None or len(taken) != len(lists):
        raise _no_mapping(path)
    if not all(_NUMBERS[of](text) for of, text in zip(taken, lists, strict=True)):
        raise _no_mapping(path)
    return name, tuple(tuple(int(n) for n in each.split(",") if n != "-") for each in lists)


_NUMBERS = {  # digits that fit 64 bits
    "1": re.compile(r"[0-9]{1,18}").fullmatch,
    "*": re.compile(r"-|[0-9]{1,18}(,[0-9]{1,18})*").fullmatch,
}


def _mapping(text: str, path: PurePath) -> tuple[MappedKeys, ...] | None:
    """The mapping in a JSON text; None when it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or _MAPPING not in found:
        return None
    found = read_object(text.encode(), path, _MAPPING)  # strictly: no name twice
    if found[_MAPPING] != _VERSION:
        what = f"is a mapping of version {printable(found[_MAPPING])}"
        raise KeyConflict(what, path=path, hint="upgrade ckptconv")
    listed = found.get("state_dicts")
    if not isinstance(listed, list) or not listed:
        raise KeyConflict("is a mapping without a state dict", path=path)
    return tuple(_mapped_keys(item, path) for item in listed)


def _mapped_keys(item: Any, path: PurePath) -> MappedKeys:
    if not isinstance(item, dict):
        raise _no_mapping(path)
    match {"filled": {}, "tensors": [], "order": [], **item}:
        case {
            "path": str() as where,
            "keys": dict() as keys,
            "left_out": list() as left,
            "modules": dict() as modules,
            "filled": (dict() | list()) as filled,
            "tensors": list() as rows,
            "order": list() as order,
        } if _are_texts([*keys.values(), *left, *filled, *order]):
            paths = {old: [new] if isinstance(new, str) else new for old, new in modules.items()}
        case _:
            raise _no_mapping(path)
    if isinstance(filled, list):  # as mappings were before they named twins
        filled = dict.fromkeys(filled)
    twins = [twin for twin in filled.values() if twin is not None]
    if not _are_texts(twins) or not {*twins} <= {*keys.values()}:
        raise _no_mapping(path)
    if not all(isinstance(news, list) and news and _are_texts(news) for news in paths.values()):
        raise _no_mapping(path)
    tensors = tuple(_mapped_tensors(rows, path))
    used = [name for row in tensors for name in row.sources if isinstance(name, str)]
    made = [name for row in tensors for name in row.targets if isinstance(name, str)]
    named, before = [*keys.values(), *filled, *made], [*keys, *left, *used]
    if len({*before}) != len(before) or len({*named}) != len(named):
        what = "two keys become one, or a key is left out and kept"
        raise KeyConflict(what, path=path, where=where)
    modules = {old: tuple(news) for old, news in paths.items()}
    return MappedKeys(
        where,
        {**keys, **dict.fromkeys(left)},
        modules,
        filled,
        tensors=tensors,
        key_order=tuple(order),
    )


def _no_mapping(path: PurePath) -> KeyConflict:
    what = "is not a mapping that ckptconv wrote"
    return KeyConflict(what, path=path, hint="--save-mapping writes one")


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(text, str) for text in values)
