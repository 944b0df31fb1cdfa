"""Nodes of a fresh tree replaced by others, everywhere at once, shared and cyclic structures
included.

An overlay (see `checkpoint`) leaves a tree as it is; this is for the moment before anyone else has
seen it, when what a node stands for becomes known only after the whole stream was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptconv.pickles.nodes import ABSENT, Call, Dict, Node

_CONTAINERS = frozenset((Dict, Call, list, tuple))


def calls_of(root: Node) -> Iterator[Call]:
    """Every call of a tree, quickly: leaves are not looked at."""
    seen: set[int] = set()
    work: list[Node] = [root]
    while work:
        node = work.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kind = type(node)
        if kind is Call:
            yield node
            inner = [*node.args, *node.items, *(value for _, value in node.pairs)]
            if node.state is not ABSENT:
                inner.append(node.state)
        elif kind is Dict:
            inner = [value for _, value in node.pairs]
        elif kind is list or kind is tuple:
            inner = node
        else:
            continue
        work.extend([value for value in inner if type(value) in _CONTAINERS])


def containers(root: Node) -> list[Node]:
    """Every dict, list, tuple and call of a tree, each once."""
    found: list[Node] = []
    seen: set[int] = set()
    work = [root]
    while work:
        node = work.pop()
        if type(node) not in _CONTAINERS or id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        work.extend(_inner(node))
    return found


def _inner(node: Node) -> Iterable[Node]:
    if type(node) is Dict:
        return [part for pair in node.pairs for part in pair]
    if type(node) is Call:
        inner = [
            node.func,
            *node.args,
            *node.items,
            *(part for pair in node.pairs for part in pair),
        ]
        return inner if node.state is ABSENT else [*inner, node.state]
    given: Sequence[Node] = node
    return given


def substituted(root: Node, holders: list[Node], stand_ins: dict[int, Node]) -> Node:
    """`root` with every node of `stand_ins` (by `id`) replaced by what stands in for it.

    `holders` are the containers that are looked into: dicts, lists and calls are changed in place,
    tuples are made anew.
    """
    for node in _inner_first([node for node in holders if type(node) is tuple]):
        new = _mapped(node, stand_ins)
        if any(a is not b for a, b in zip(new, node, strict=True)):
            stand_ins[id(node)] = new
    for node in holders:
        if type(node) is list:
            node[:] = _mapped(node, stand_ins)
        elif type(node) is Dict:
            node.pairs = _mapped_pairs(node.pairs, stand_ins)
        elif type(node) is Call:
            node.args = _mapped(node.args, stand_ins)
            node.items = list(_mapped(node.items, stand_ins))
            node.pairs = _mapped_pairs(node.pairs, stand_ins)
            node.state = stand_ins.get(id(node.state), node.state)
    return stand_ins.get(id(root), root)


def _inner_first(tuples: list[tuple[Node, ...]]) -> Iterator[tuple[Node, ...]]:
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


def _mapped(nodes: Sequence[Node], stand_ins: dict[int, Node]) -> tuple[Node, ...]:
    return tuple(stand_ins.get(id(node), node) for node in nodes)


def _mapped_pairs(
    pairs: Sequence[tuple[Node, Node]], stand_ins: dict[int, Node]
) -> list[tuple[Node, Node]]:
    return [(stand_ins.get(id(key), key), stand_ins.get(id(value), value)) for key, value in pairs]
