"""What a pickle stream says, as a tree of nodes: plain Python values and four kinds of symbolic
ones.

`Global` is a name that would be imported, `Call` what would be called with what and then done to
the result, `Dict` pairs in order, `PersistentId` a reference out of the stream. Nothing here
imports, calls or hashes what a file names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import chain
from operator import itemgetter
from typing import Any, Final, TypeAlias

from ckptconv.support.records import dataclass

Node: TypeAlias = Any
"""A value of the tree: plain Python, one of the nodes below, or what a reducer made of a call."""

ABSENT: Final = object()
"""The state of a `Call` that no BUILD was applied to."""


@dataclass(slots=True, eq=False, repr=False)
class Global:
    """The name of a class or function; one object per name and stream, never resolved."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The dotted name, python 2's names (which protocol 2 has) given as python 3's."""
        path = f"{_PYTHON3_MODULES.get(self.module, self.module)}.{self.name}"
        return _PYTHON3_NAMES.get(path, path)

    def __repr__(self) -> str:
        return f"Global({self.path})"


_PYTHON3_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
_PYTHON3_NAMES = {
    "builtins.long": "builtins.int",
    "builtins.unicode": "builtins.str",
    "builtins.xrange": "builtins.range",
}


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """`func(*args, **kwargs)` (or `func.__new__` when `new`), then its appended `items`, its set
    `pairs`, its `state`.
    """

    func: Node
    args: tuple[Node, ...]
    new: bool = field(default=False, kw_only=True)
    kwargs: Node = field(default=None, kw_only=True)
    # lists once something is appended or set: most calls get nothing
    items: Sequence[Node] = field(default=(), init=False)
    pairs: Sequence[tuple[Node, Node]] = field(default=(), init=False)
    state: Node = field(default=ABSENT, init=False)

    @property
    def name(self) -> str:
        """The dotted name of what is called, or ``?`` where that is not a name but the result of
        another call.
        """
        return self.func.path if type(self.func) is Global else "?"

    def __repr__(self) -> str:
        return f"Call({self.name}, {len(self.args)} arguments)"


@dataclass(slots=True, eq=False, repr=False)
class Dict:
    """A dict as the pairs that were set, in order; a key may be any node and is not hashed."""

    pairs: list[tuple[Node, Node]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class PersistentId:
    """A reference out of the stream whose meaning the caller did not know."""

    pid: Node


SET = Global("builtins", "set")
FROZENSET = Global("builtins", "frozenset")
BYTES = Global("builtins", "bytes")
BYTEARRAY = Global("builtins", "bytearray")
DICT = Global("builtins", "dict")
ORDERED_DICT = Global("collections", "OrderedDict")
DEFAULT_DICT = Global("collections", "defaultdict")
COUNTER = Global("collections", "Counter")
MAPPINGS = frozenset(cls.path for cls in (DICT, ORDERED_DICT, DEFAULT_DICT, COUNTER))
"""The classes of dicts whose items, also those given as an argument, are `pairs` of the call."""
ENCODE = Global("_codecs", "encode")


def mapping_pairs(node: Node) -> Sequence[tuple[Node, Node]] | None:
    """The pairs of a dict or of an OrderedDict; None for anything else, and for one whose items
    cannot be told.
    """
    if type(node) is Dict:
        return node.pairs
    if type(node) is not Call or node.args or node.items or node.kwargs is not None:
        return None
    is_ordered = type(node.func) is Global and node.func.path == "collections.OrderedDict"
    return node.pairs if is_ordered else None


def attributes(node: Node) -> Sequence[tuple[Node, Node]]:
    """What was set on an object beside its items, by name: the `_metadata` of a state dict, and
    whatever else.
    """
    return node.state.pairs if type(node) is Call and type(node.state) is Dict else ()


def children(node: Node) -> Iterator[tuple[Node, Node]]:
    """The (label, child) pairs of a container: keys of dicts, indices of lists and tuples, parts of
    calls.

    The keys of a dict are plain in any sane stream; keys that are containers themselves are given
    as children under the label ``<key>``.
    """
    kind = type(node)
    if kind is Dict:
        return _pair_children(node.pairs)
    if kind is list or kind is tuple:
        return enumerate(node)
    if kind is Call:
        state = [] if node.state is ABSENT else [("<state>", node.state)]
        return chain(_called_with(node), enumerate(node.items), _pair_children(node.pairs), state)
    return iter([("<persistent id>", node.pid)] if kind is PersistentId else [])


def _called_with(node: Call) -> Iterator[tuple[Node, Node]]:
    if type(node.func) is not Global:
        yield "<function>", node.func
    for index, argument in enumerate(node.args):
        yield f"<argument {index}>", argument
    if node.kwargs is not None:
        yield "<arguments>", node.kwargs


def _pair_children(pairs: Sequence[tuple[Node, Node]]) -> Iterator[tuple[Node, Node]]:
    if _PLAIN_KEYS.issuperset(map(type, map(itemgetter(0), pairs))):
        return iter(pairs)
    return chain.from_iterable(
        [(key, value)] if type(key) in _PLAIN_KEYS else [("<key>", key), ("<value>", value)]
        for key, value in pairs
    )


def spoken(node: Node) -> str:
    """A node as messages name it, in few words whatever it holds: one that is shared at each level
    has no end written out.
    """
    if type(node) is Global:
        return node.path
    if type(node) is Call:
        return f"an object of {node.name}"
    if type(node) is int and node.bit_length() > 1000:
        return f"an int of {node.bit_length()} bits"  # python refuses to print the longest ones
    if type(node) in (int, float, complex, bool, type(None)):
        return str(node)
    if type(node) in (str, bytes):
        return repr(node[:_SPOKEN])
    return f"a {type(node).__name__.lower()}"


_SPOKEN = 60  # characters of a text that is named
_PLAIN_KEYS = frozenset((str, int, float, bool, bytes, type(None)))


def ordered_dict(pairs: Sequence[tuple[Node, Node]] = ()) -> Call:
    """An `OrderedDict` of these pairs."""
    made = Call(ORDERED_DICT, ())
    made.pairs = pairs
    return made
