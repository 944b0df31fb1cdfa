"""What a pickle stream says, as a tree of nodes: plain Python values and four kinds of symbolic
ones.

`Global` is a name that would be imported, `Call` what would be called with what and then done to
the result, `Dict` pairs in order, `PersistentId` a reference out of the stream. Nothing here
imports, calls or hashes what a file names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


# What Python 2 and numpy before 2.0 call them
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
        """The dotted name of what is called; ``?`` where it is the result of another call."""
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
    """The pairs of a dict or an OrderedDict; None for others, and where they cannot be told."""
    if type(node) is Dict:
        return node.pairs
    if type(node) is not Call or node.args or node.items or node.kwargs is not None:
        return None
    if type(node.func) is Global and node.func.path == "collections.OrderedDict":
        return node.pairs
    return None


def entries(node: Node) -> dict[str, Node]:
    """The values of a dict by those keys that are text; none for what is not a dict."""
    return {key: value for key, value in mapping_pairs(node) or () if type(key) is str}


def listed(node: Node) -> list[Node]:
    """What is in a list or a tuple; nothing for what is neither."""
    return list(node) if type(node) in (list, tuple) else []


def attributes(node: Node) -> Sequence[tuple[Node, Node]]:
    """What was set on an object beside its items, by name: `_metadata` of a state dict, say."""
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
        return _call_children(node)
    if kind is PersistentId:
        return iter([("<persistent id>", node.pid)])
    return iter(())


def _call_children(node: Call) -> Iterator[tuple[Node, Node]]:
    if type(node.func) is not Global:
        yield "<function>", node.func
    for index, argument in enumerate(node.args):
        yield f"<argument {index}>", argument
    if node.kwargs is not None:
        yield "<arguments>", node.kwargs
    yield from enumerate(node.items)
    yield from _pair_children(node.pairs)
    if node.state is not ABSENT:
        yield "<state>", node.state


def _pair_children(pairs: Sequence[tuple[Node, Node]]) -> Iterator[tuple[Node, Node]]:
    if _PLAIN_KEYS.issuperset(map(type, map(itemgetter(0), pairs))):
        return iter(pairs)
    return chain.from_iterable(
        [(key, value)] if type(key) in _PLAIN_KEYS else [("<key>", key), ("<value>", value)]
        for key, value in pairs
    )


def spoken(node: Node) -> str:
    """A node in few words, whatever it holds: written out, a shared one may have no end."""
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


def ordered_dict(pairs: Sequence[tuple[Node, Node]] = (), like: Node = None) -> Call:
    """An `OrderedDict` of these pairs, with what was set on another one (`_metadata`, say)."""
    made = Call(ORDERED_DICT, ())
    made.pairs = pairs
    if type(like) is Call:
        made.state = like.state
    return made


# ---------------------------------------------------------------------- other nodes in their places

# Where an overlay (see `tree.walk`) stands before the old nodes, these give a tree that does not
# have them any more. They are for what a node stands for as soon as the whole stream was read.

_CONTAINERS = frozenset((Dict, Call, list, tuple))


def containers(root: Node) -> Iterator[Node]:
    """Every dict, list, tuple and call of a tree, each once; leaves are not looked at."""
    seen: set[int] = set()
    work = [root]
    while work:
        node = work.pop()
        if type(node) not in _CONTAINERS or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if type(node) is Call:
            work.append(node.func)
        work.extend([part for part in _parts(node) if type(part) in _CONTAINERS])


def calls_of(root: Node) -> Iterator[Call]:
    """Every call of a tree."""
    return (node for node in containers(root) if type(node) is Call)


def with_pairs(holder: Node, pairs: list[tuple[Node, Node]]) -> Node:
    """A dict of the same class with other items."""
    if type(holder) is Dict:
        return Dict(pairs)
    made = Call(holder.func, holder.args, new=holder.new)
    made.pairs, made.state = pairs, holder.state
    return made


def substituted(
    root: Node, stand_ins: Mapping[int, Node], holders: Iterable[Node] | None = None
) -> Node:
    """`root` with every node of `stand_ins` (by `id`) replaced by what stands in for it.

    `holders` are the containers that are looked into, all of the tree by default. Nothing is
    changed: those that hold a replaced node, however deep, are made anew, and all others are
    shared with the tree as it was.
    """
    new = dict(stand_ins)
    around = _around(containers(root) if holders is None else holders, stand_ins)
    for node in around:
        if type(node) is not tuple:
            new[id(node)] = _like(node)
    tuples = {id(node): node for node in around if type(node) is tuple}
    for node in _inner_first(tuples.values()):
        if id(node) in tuples:
            new[id(node)] = _mapped(node, new)
    for node in around:
        _fill(new[id(node)], node, new)
    return new.get(id(root), root)


def seen_through(root: Node, overlay: Mapping[int, Node]) -> Node:
    """`root` as who looks through an overlay sees it, also through what stands in for parts."""
    while True:
        inside = chain([root], chain.from_iterable(map(_parts, containers(root))))
        met = {id(node): overlay[id(node)] for node in inside if id(node) in overlay}
        if not met:
            return root
        root = substituted(root, met)


def _around(holders: Iterable[Node], stand_ins: Mapping[int, Node]) -> list[Node]:
    """The containers that hold one of the nodes of `stand_ins`, directly or in other containers."""
    known = [node for node in holders if type(node) in _CONTAINERS and id(node) not in stand_ins]
    above: dict[int, list[Node]] = {}
    for node in known:
        for part in _parts(node):
            if type(part) in _CONTAINERS or id(part) in stand_ins:
                above.setdefault(id(part), []).append(node)
    found: dict[int, Node] = {}
    work = [node for key in stand_ins for node in above.get(key, ())]
    while work:
        node = work.pop()
        if id(node) not in found:
            found[id(node)] = node
            work += above.get(id(node), ())
    return [node for node in known if id(node) in found]


def _parts(node: Node) -> Iterable[Node]:
    """What may be replaced in a container: everything in it but what a call calls."""
    if type(node) is Dict:
        return chain.from_iterable(node.pairs)
    if type(node) is Call:
        return [*node.args, *node.items, *chain.from_iterable(node.pairs), node.state]
    given: Sequence[Node] = node
    return given


def _like(node: Node) -> Node:
    """A new container of the kind of another, with nothing in it yet."""
    if type(node) is Call:
        return Call(node.func, node.args, new=node.new, kwargs=node.kwargs)
    return Dict() if type(node) is Dict else []


def _fill(made: Node, node: Node, new: Mapping[int, Node]) -> None:
    """Put into a new container what is in the one that it stands in for."""
    if type(node) is list:
        made[:] = _mapped(node, new)
    elif type(node) is Dict:
        made.pairs = _mapped_pairs(node.pairs, new)
    elif type(node) is Call:
        made.args = _mapped(node.args, new)
        made.items = list(_mapped(node.items, new))
        made.pairs = _mapped_pairs(node.pairs, new)
        made.state = new.get(id(node.state), node.state)


def _inner_first(tuples: Iterable[tuple[Node, ...]]) -> Iterator[tuple[Node, ...]]:
    """Each tuple once, behind the tuples that are in it."""
    done: set[int] = set()
    for start in tuples:
        work = [start]
        while work:
            node = work[-1]
            if id(node) in done:
                work.pop()
            elif inside := [part for part in node if type(part) is tuple and id(part) not in done]:
                work.extend(inside)
            else:
                done.add(id(node))
                yield work.pop()


def _mapped(nodes: Sequence[Node], stand_ins: Mapping[int, Node]) -> tuple[Node, ...]:
    return tuple(stand_ins.get(id(node), node) for node in nodes)


def _mapped_pairs(
    pairs: Sequence[tuple[Node, Node]], stand_ins: Mapping[int, Node]
) -> list[tuple[Node, Node]]:
    return [(stand_ins.get(id(key), key), stand_ins.get(id(value), value)) for key, value in pairs]
