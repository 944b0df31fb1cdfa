"""Nodes of a tree replaced by others, everywhere at once, shared and cyclic structures included.

Where an overlay (see `walk`) stands before the old nodes, this gives a tree that does not have them
any more. It is for what a node stands for as soon as the whole stream was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ckptconv.pickles.nodes import Call, Dict, Node

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


def substituted(root: Node, holders: Iterable[Node], stand_ins: Mapping[int, Node]) -> Node:
    """`root` with every node of `stand_ins` (by `id`) replaced by what stands in for it.

    `holders` are the containers that are looked into. Nothing is changed: those that hold a
    replaced node, however deep, are made anew, and all others are shared with the tree as it was.
    """
    new = dict(stand_ins)
    around = _around(holders, stand_ins)
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
    """`root` as who looks through an overlay sees it: also what stands in for a part of what stands
    in for another node.
    """
    while True:
        inside = chain([root], chain.from_iterable(map(_parts, containers(root))))
        met = {id(node): overlay[id(node)] for node in inside if id(node) in overlay}
        if not met:
            return root
        root = substituted(root, containers(root), met)


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
