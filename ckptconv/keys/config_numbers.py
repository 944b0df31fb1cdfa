"""Numbers that a model's config gives: its names, and what ``+ - * //`` make of them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ckptconv.support.errors import KeyConflict, printable

Number: TypeAlias = "int | str"
"""A whole number, or a text that says how it is made of a config's."""

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_LONGEST = 500  # characters; ast nests as deep as the text is long


def number_in(text: Number, config: Mapping[str, Any]) -> int:
    """The number that a text stands for, names being those of `config`, dots going into it.

    Raises `KeyConflict` for a name that it lacks, or whose value is not a whole number, and for
    any other text.

    >>> number_in("2 * head_dim + text_config.extra", {"head_dim": 64, "text_config": {"extra": 1}})
    129
    """
    if isinstance(text, int):
        return text
    try:
        if len(text) > _LONGEST:
            raise SyntaxError
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # as the docs of ast warn
        raise _no_number(text) from None
    try:
        return _value(tree, text, config)
    except ZeroDivisionError:
        raise KeyConflict(f"'{printable(text)}' divides by 0 for this config") from None


def _value(node: ast.expr, text: str, config: Mapping[str, Any]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_value(side, text, config) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _named(ast.unparse(node), config)
    raise _no_number(text)


def _named(name: str, config: Mapping[str, Any]) -> int:
    path, _, last = name.rpartition(".")
    found = part_of(config, path).get(last)
    if type(found) is int:
        return found
    what = f"config.json has no {printable(name)}"
    if found is not None:
        what = f"config.json says {found!r:.50} for {printable(name)}, not a number"
    hint = "put config.json beside the checkpoint, or write the number itself"
    raise KeyConflict(what, hint=hint)


def part_of(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """A part of a config, by the names on the way to it; empty where there is none."""
    found = config
    for name in filter(None, path.split(".")):
        found = found.get(name, {})
        if not isinstance(found, Mapping):
            return {}
    return found


def _no_number(text: str) -> KeyConflict:
    what = f"'{printable(text)}' is not a number, nor made of numbers and names of config.json"
    return KeyConflict(what, hint="such as 'num_attention_heads * head_dim'")
