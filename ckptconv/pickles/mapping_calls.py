"""Dicts that a pickle makes of arguments: `OrderedDict(pairs)`, `defaultdict(factory, dict)`,
`Counter(dict)`, `dict(pairs)`.

Each such call becomes one without these arguments, whose pairs are what the class would have made
of them at that moment, so that nobody behind the reader has to look for the items of a dict in two
places. What cannot be told without running something (the items of an object of an unknown class)
stays an argument. Source: collections and builtins of CPython.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ckptconv.pickles.nodes import (
    COUNTER,
    DEFAULT_DICT,
    DICT,
    MAPPINGS,
    ORDERED_DICT,
    Call,
    Dict,
    Global,
    Node,
)
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import in_force

Pairs: TypeAlias = list[tuple[Node, Node]]
_Reading: TypeAlias = Callable[[Node, Global], Pairs | None]

IGNORE_NEW_ARGUMENTS = MAPPINGS | {
    "builtins.set",
    "builtins.list",
    "builtins.bytearray",
    "collections.deque",
}
"""Classes whose `__new__` does nothing with its arguments: `__init__` does, which NEWOBJ does not
call.
"""

NO_LISTS = MAPPINGS | {"builtins.set", "builtins.frozenset"}
"""Classes that have neither `append` nor `extend`."""


class MappingCalls:
    """The calls of one stream that make dicts; what they copy counts against the limit `nodes`,
    eight for an item.
    """

    def __init__(self) -> None:
        self._copied = 0

    def reducers(self) -> dict[str, Callable[[tuple[Node, ...]], Node]]:
        """What makes the calls of these classes of their arguments."""
        return {
            ORDERED_DICT.path: lambda args: (
                self._made(ORDERED_DICT, (), args, _items) if args else Call(ORDERED_DICT, ())
            ),
            DICT.path: lambda args: self._made(DICT, (), args, _items),
            COUNTER.path: lambda args: self._made(COUNTER, (), args, _counts),
            DEFAULT_DICT.path: self._default_dict,
        }

    def _default_dict(self, args: tuple[Node, ...]) -> Node:
        if args and type(args[0]) not in (Global, Call, type(None)):
            raise _malformed(DEFAULT_DICT, "a factory that cannot be called")
        return self._made(DEFAULT_DICT, args[:1], args[1:], _items)

    def _made(
        self, cls: Global, kept: tuple[Node, ...], given: tuple[Node, ...], read: _Reading
    ) -> Call:
        if len(given) > 1:
            raise _malformed(cls, f"{len(kept) + len(given)} arguments")
        if given:
            self._refuse_many(_size(given[0]))
        pairs = read(given[0], cls) if given else []
        if pairs is None:
            return Call(cls, (*kept, *given))
        made = Call(cls, kept)
        if pairs:
            made.pairs = tuple(merged(pairs))
        return made

    def _refuse_many(self, count: int) -> None:
        self._copied += count
        if self._copied * _WEIGHT > (most := in_force().nodes):
            what = f"the pickle copies more than {most // _WEIGHT} items into dicts"
            raise LimitExceeded(what, limit="nodes", allowed=most, needed=self._copied * _WEIGHT)


def merged(pairs: Pairs) -> Pairs:
    """Items as a dict has them when they are set one after the other: the place of the first, the
    value of the last.
    """
    return list(dict(pairs).items()) if all(_is_plain(key) for key, _ in pairs) else pairs


def _size(given: Node) -> int:
    """How much is looked at to read the items of an argument."""
    if type(given) is Dict or type(given) is Call:
        return len(given.pairs)
    return len(given) if type(given) in (list, tuple, str) else 0


def _items(given: Node, cls: Global) -> Pairs | None:
    """The items of a mapping, or the pairs in a sequence; None where that cannot be told."""
    if (pairs := _pairs_of(given)) is not None:
        return pairs
    if type(given) in (list, tuple):
        found = [_pair(element, cls) for element in given]
        return None if None in found else [pair for pair in found if pair is not None]
    if type(given) in (str, bytes) and not given:
        return []
    if type(given) in _NO_PAIRS:
        raise _malformed(cls, "something that does not hold pairs")
    return None


def _pairs_of(node: Node) -> Pairs | None:
    """The items of a dict whose items are known, in a list of its own."""
    if type(node) is Dict:
        return list(node.pairs)
    if type(node) is not Call or node.name not in MAPPINGS or node.items:
        return None
    return None if len(node.args) > (node.name == DEFAULT_DICT.path) else list(node.pairs)


def _pair(element: Node, cls: Global) -> tuple[Node, Node] | None:
    """A key and its value; None for an object that may be a pair."""
    if type(element) in (list, tuple):
        if len(element) != 2:
            raise _malformed(cls, f"an item of {len(element)} parts, where a pair is needed")
        return element[0], element[1]
    if type(element) in _NO_PAIRS and (type(element) not in (str, bytes) or len(element) != 2):
        raise _malformed(cls, "an item that is not a pair")
    return None


def _counts(given: Node, cls: Global) -> Pairs | None:
    """The items of a mapping, or how often each element of a sequence stands in it."""
    if given is None:
        return []
    if (pairs := _pairs_of(given)) is not None:
        return pairs
    if type(given) in (list, tuple, str):
        elements: Sequence[Node] = given
        return list(Counter(elements).items()) if all(map(_is_plain, elements)) else None
    if type(given) in (int, float, bool):
        raise _malformed(cls, "a number")
    return None


def _is_plain(key: Node) -> bool:
    """Whether a key may be hashed: not ints that may all have one hash."""
    return (
        -_LARGE_INT < key < _LARGE_INT
        if type(key) is int
        else type(key) in (str, bytes, bool, type(None))
    )


# nodes that a copied item counts for: a stream of a few bytes may ask for millions of them
_WEIGHT = 8
_LARGE_INT = 1 << 60
_NO_PAIRS = (str, bytes, int, float, bool, type(None))


def _malformed(cls: Global, what: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(
        f"the pickle calls {cls.path} with {what}", hint="the file is damaged or forged"
    )
