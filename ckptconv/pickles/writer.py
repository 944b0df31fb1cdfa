"""Pickle streams written from nodes: protocol 2, with just the opcodes that torch's `weights_only`
reader accepts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from ckptconv.pickles.nodes import ABSENT, ENCODE, Call, Dict, Global, Node
from ckptconv.support.errors import RefusedObject
from ckptconv.support.records import NamedTuple

Leaf: TypeAlias = "Callable[[Node, PickleWriter], bytes | Node]"
_BATCH = 1000  # items between a MARK and its opcode, as CPython's pickle has them


class _Raw(bytes):
    """Opcode bytes among the nodes still to be written."""


class _Put(NamedTuple):
    """The place in the work where a node has been written and gets its memo index."""

    node: Node


class _Alias(NamedTuple):
    """A replacement: the node that stands for another, fetched from the same memo entry."""

    node: Node
    made: Node


def write_pickle(root: Node, leaf: Leaf, overlay: Mapping[int, Node] | None = None) -> bytes:
    """The protocol 2 pickle of `root`, shared nodes written once.

    `leaf(node, writer)` is asked about every value that is neither plain Python nor a node of this
    module; it returns either opcode bytes or a node to write in its place. A container whose `id`
    is in `overlay` is written as what stands there. Raises `RefusedObject` for what protocol 2
    cannot hold.
    """
    return PickleWriter(leaf, overlay or {}).write(root)


class PickleWriter:
    """One stream, without recursion; a node is memoized by identity, a text by value."""

    def __init__(self, leaf: Leaf, overlay: Mapping[int, Node]) -> None:
        self._leaf = leaf
        self._overlay = overlay
        self._out = bytearray(b"\x80\x02")
        # id of a node → memo index; likewise for texts and the names of globals
        self._memo: dict[int, int] = {}
        self._texts: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._kept: list[Node] = []
        self._open: set[int] = set()
        self.count = 0  # memo entries so far

    def write(self, root: Node) -> bytes:
        """The bytes of the whole stream; a writer is used once."""
        work: list[Iterator[Node]] = [iter((root,))]
        text, write_one = self.text, self._write_one
        while work:
            for node in work[-1]:
                if type(node) is str:
                    self._out += text(node)
                elif (inner := write_one(node)) is not None:
                    work.append(inner)
                    break
            else:
                work.pop()
        return bytes(self._out) + b"."

    def put(self) -> bytes:
        """The opcode that gives what was just written the next memo index."""
        index = self.count
        self.count = index + 1
        return _PUTS[index] if index < 256 else b"r" + _UINT32(index)

    def text(self, text: str) -> bytes:
        """The opcodes for a text: written once, fetched afterwards."""
        index = self._texts.get(text)
        if index is not None:
            return _fetch(index)
        raw = text.encode("utf-8", "surrogatepass")
        index = self._texts[text] = self.count
        self.count = index + 1
        put = _PUTS[index] if index < 256 else b"r" + _UINT32(index)
        return b"X" + _UINT32(len(raw)) + raw + put

    def named(self, module: str, name: str) -> bytes:
        """The opcodes for a global: written once, fetched afterwards."""
        path = f"{module}\n{name}\n"
        index = self._names.get(path)
        if index is not None:
            return _fetch(index)
        if "\n" in module or "\n" in name or not module:
            raise RefusedObject("the name of a global holds a line break", where=f"{module}.{name}")
        self._names[path] = self.count
        return b"c" + path.encode() + self.put()

    def _write_one(self, node: Node) -> Iterator[Node] | None:
        """Write a value that needs no further work, or return the work that a container makes."""
        key = id(node)
        while key in self._overlay:  # what stands in for a node may have a stand-in itself
            node = self._overlay[key]
            key = id(node)
        kind = type(node)
        if kind not in _NOT_LEAVES:
            index = self._memo.get(key)
            if index is None:
                return self._write_leaf(node)
            self._out += _fetch(index)
        elif (plain := _SCALARS.get(kind)) is not None:
            self._out += plain(node)
        elif kind is str:
            self._out += self.text(node)
        elif (index := self._memo.get(id(node))) is not None:
            self._out += _fetch(index)
        else:
            return _WORK[kind](self, node)
        return None

    def _write_leaf(self, node: Node) -> Iterator[Node] | None:
        made = self._leaf(node, self)
        if type(made) is bytes:
            index = self._memo[id(node)] = self.count
            self.count = index + 1  # `put`, without a call for each of very many
            self._out += made + (_PUTS[index] if index < 256 else b"r" + _UINT32(index))
            return None
        return self._write_instead(node, made)

    def _write_instead(self, node: Node, made: Node) -> Iterator[Node]:
        self._kept.append(made)
        return iter((made, _Alias(node, made)))

    def _write_put(self, node: _Put) -> None:
        self._open.discard(id(node.node))
        self._memo[id(node.node)] = self.count
        self._out += self.put()

    def _write_alias(self, node: _Alias) -> None:
        self._memo[id(node.node)] = self._memo[id(node.made)]

    def _write_dict(self, node: Dict) -> Iterator[Node]:
        self._out += b"}"
        self._write_put(_Put(node))
        return _batches_of_pairs(node.pairs)

    def _write_list(self, node: list[Node]) -> Iterator[Node]:
        self._out += b"]"
        self._write_put(_Put(node))
        return _batches(node)

    def _write_tuple(self, node: tuple[Node, ...]) -> Iterator[Node] | None:
        if not node:
            self._out += b")"
            return None
        self._enter(node)
        return _tuple_work(node)

    def _write_call(self, node: Call) -> Iterator[Node]:
        self._enter(node)
        return _call_work(node)

    def _enter(self, node: Node) -> None:
        if id(node) in self._open:
            raise RefusedObject("a tuple or object that contains itself cannot be written")
        self._open.add(id(node))


_UINT32 = struct.Struct("<I").pack
_PUTS = tuple(b"q%c" % index for index in range(256))


def _fetch(index: int) -> bytes:
    return b"h%c" % index if index < 256 else b"j" + _UINT32(index)


def integer(value: int) -> bytes:
    """The opcodes for an int of any size."""
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) > 255:  # LONG1 has one byte for it
        longer = "is longer than torch.load(weights_only=True) reads"
        what = f"an integer of {value.bit_length()} bits {longer}"
        raise RefusedObject(what, hint="--only PATH takes one part")
    return b"\x8a%c" % len(raw) + raw


def integers(values: tuple[int, ...]) -> bytes:
    """The opcodes for a tuple of ints, not memoized."""
    if not values:
        return b")"
    body = b"".join(map(integer, values))
    return body + _TUPLES[len(values)] if len(values) <= 3 else b"(" + body + b"t"


_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_SCALARS: dict[type, Callable[[Node], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: integer,
    float: lambda value: b"G" + struct.pack(">d", value),
}


def _tuple_work(node: tuple[Node, ...]) -> Iterator[Node]:
    if len(node) > 3:
        yield _Raw(b"(")
    yield from node
    yield _Raw(_TUPLES[len(node)] if len(node) <= 3 else b"t")
    yield _Put(node)


def _call_work(node: Call) -> Iterator[Node]:
    if node.kwargs is not None:
        what = "an object made with keyword arguments cannot be written in protocol 2"
        raise RefusedObject(what, where=node.name)
    yield node.func
    yield node.args
    yield _Raw(b"\x81" if node.new else b"R")
    yield _Put(node)
    yield from _batches(node.items)
    yield from _batches_of_pairs(node.pairs)
    if node.state is not ABSENT:
        yield node.state
        yield _Raw(b"b")


def _batches(items: Sequence[Node]) -> Iterator[Node]:
    for start in range(0, len(items), _BATCH):
        yield _Raw(b"(")
        yield from items[start : start + _BATCH]
        yield _Raw(b"e")


def _batches_of_pairs(pairs: Sequence[tuple[Node, Node]]) -> Iterator[Node]:
    for start in range(0, len(pairs), _BATCH):
        yield _Raw(b"(")
        yield from chain.from_iterable(pairs[start : start + _BATCH])
        yield _Raw(b"u")


# How each kind of node is written; every other one is a leaf
_WORK: dict[type, Callable[[PickleWriter, Any], Iterator[Node] | None]] = {
    _Raw: lambda writer, node: writer._out.extend(node),
    _Put: PickleWriter._write_put,
    _Alias: PickleWriter._write_alias,
    Global: lambda writer, node: writer._out.extend(writer.named(node.module, node.name)),
    Dict: PickleWriter._write_dict,
    list: PickleWriter._write_list,
    tuple: PickleWriter._write_tuple,
    Call: PickleWriter._write_call,
    bytes: lambda writer, node: writer._write_instead(
        node, Call(ENCODE, (node.decode("latin1"), "latin1"))
    ),
}
_NOT_LEAVES = frozenset((*_SCALARS, str, *_WORK))
