"""What the opcodes of a pickle make of the values on its stack: globals, calls and containers.

Dicts that are made of arguments (`OrderedDict(pairs)`, `defaultdict(factory, dict)`,
`Counter(dict)`, `dict(pairs)`) become calls without these, whose pairs are what the class would
have made of them at that moment, so that nobody behind the reader has to look for the items of a
dict in two places. What cannot be told without running something (the items of an object of an
unknown class) stays an argument. Source: collections and builtins of CPython.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeAlias

from ckptconv.pickles.nodes import (
    ABSENT,
    BYTES,
    COUNTER,
    DEFAULT_DICT,
    DICT,
    ENCODE,
    FROZENSET,
    MAPPINGS,
    ORDERED_DICT,
    SET,
    Call,
    Dict,
    Global,
    Node,
)
from ckptconv.pickles.traces import CALLERS
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint, malformed
from ckptconv.support.limits import in_force
from ckptconv.support.settings import set_within

Reducer: TypeAlias = Callable[[tuple[Node, ...]], Node]
_Pairs: TypeAlias = list[tuple[Node, Node]]
_Reading: TypeAlias = Callable[[Node, Global], _Pairs | None]

_OTHERS = "builtins.set builtins.list builtins.bytearray collections.deque"
# Classes whose `__new__` ignores its arguments: `__init__` takes them, uncalled by NEWOBJ
_IGNORE_NEW_ARGUMENTS = MAPPINGS.union(_OTHERS.split())

# Classes that have neither `append` nor `extend`
_NO_LISTS = MAPPINGS | {"builtins.set", "builtins.frozenset"}

_NAMED: ContextVar[set[tuple[str, str]] | None] = ContextVar("globals that are named", default=None)


CALLED_RESULT = ("", "what a call gives")
"""Noted in place of a name where a stream calls what is not a global."""


def names_noted() -> AbstractContextManager[set[tuple[str, str]]]:
    """The globals that the streams read within the block name, as module and name.

    Those of values are among them that a stream makes and drops again, which no tree shows; so is
    `CALLED_RESULT`, where something is called that has no name.
    """
    noted: set[tuple[str, str]] = set()
    return set_within(_NAMED, noted)


def _note(module: str, name: str) -> None:
    noted = _NAMED.get()
    if noted is not None:
        noted.add((module, name))


def _note_inner_class(cls: Node) -> None:
    """Note a class that is the attribute of another by its name: protocols before 4 have `getattr`
    find it, as for `ShardedTensor.ProcessGroupState`.
    """
    match cls:
        case Call(args=(Global() as holder, str() as name)) if cls.name == "builtins.getattr":
            _note(holder.module, f"{holder.name}.{name}")
        case _:
            _note(*CALLED_RESULT)


class NodeMaker:
    """Makes the nodes of one stream; `position` is the byte that errors name.

    BUILD, APPEND and SETITEM touch nothing but the containers and calls of this very stream.
    `reducers` are those of `read_pickle`.
    """

    def __init__(self, reducers: Mapping[str, Reducer]) -> None:
        self.position = 0
        self._reducers = reducers
        self._globals: dict[tuple[str, str], Global] = {}
        self._known: dict[Global, Reducer] = {}

    def _malformed(self, what: str) -> MalformedCheckpoint:
        return malformed(f"the pickle {what} (near byte {self.position})")

    def _global(self, module: str, name: str) -> Global:
        known = self._globals.get((module, name))
        if known is None:
            known = self._globals[module, name] = Global(module, name)
            _note(module, name)
            reducer = self._reducers.get(known.path)
            if reducer:
                self._known[known] = reducer
        return known

    def _set_items(self, target: Node, flat: list[Node]) -> None:
        if type(target) is not Dict and type(target) is not Call:
            raise self._malformed("sets an item on something that is not a dict")
        if len(flat) % 2:
            raise self._malformed("sets a key without a value")
        pairs = zip(flat[::2], flat[1::2])  # noqa: B905 (the length is even)
        if type(target.pairs) is list:
            target.pairs.extend(pairs)
        else:  # it has none yet, or those of an argument
            target.pairs = _merged([*target.pairs, *pairs]) if target.pairs else list(pairs)

    def _extend(self, target: Node, flat: list[Node]) -> None:
        if type(target) is list:
            target.extend(flat)
        elif type(target) is Call and target.name not in _NO_LISTS:
            target.items = [*target.items, *flat] if target.items else flat
        else:
            raise self._malformed("appends to something that is not a list")

    def _build(self, target: Node, state: Node) -> None:
        if type(target) is not Call:
            raise self._malformed("sets the state of something that was not made by a call")
        if target.state is not ABSENT:
            raise self._malformed("sets the state of one object twice")
        target.state = state

    def _called(self, func: Node, args: tuple[Node, ...]) -> Node:
        if type(func) is not Global:
            _note(*CALLED_RESULT)
            return Call(func, args)
        if func.path in CALLERS and args and type(args[0]) is not Global:
            _note(*CALLED_RESULT)
        reducer = self._known.get(func)
        return Call(func, args) if reducer is None else reducer(args)

    def _new(self, cls: Node, args: tuple[Node, ...], kwargs: Node) -> Call:
        if type(cls) is not Global:
            _note_inner_class(cls)
        elif cls.path in _IGNORE_NEW_ARGUMENTS:
            return Call(cls, (), new=True)
        return Call(cls, args, new=True, kwargs=kwargs)

    def _from_mark(self, op: int, made: list[Node], stack: list[Node]) -> None:
        if op == 0x6C:  # LIST
            stack.append(made)
        elif op == 0x64:  # DICT
            stack.append(Dict())
            self._set_items(stack[-1], made)
        elif op == 0x6F:  # OBJ
            stack.append(self._called(made[0], tuple(made[1:])))
        elif op == 0x91:  # FROZENSET
            stack.append(Call(FROZENSET, (made,)))
        elif type(stack[-1]) is Call and stack[-1].func is SET:  # ADDITEMS
            stack[-1].args[0].extend(made)
        else:
            raise self._malformed("adds to something that is not a set")


# ------------------------------------------------------------------------ bytes, dicts of arguments


def _encoded(args: tuple[Node, ...]) -> Node:
    """Bytes, which protocol 2 has no opcode for: pickle writes `_codecs.encode(text, "latin1")`."""
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        try:
            return args[0].encode("latin1")
        except UnicodeEncodeError:
            pass
    return Call(ENCODE, args)


BYTES_REDUCERS: dict[str, Reducer] = {
    "_codecs.encode": _encoded,
    "builtins.bytes": lambda args: Call(BYTES, args) if args else b"",
}
"""The calls that every stream uses for plain bytes."""


class MappingCalls:
    """The calls of a stream that make dicts; what they copy counts as `nodes`, eight an item."""

    def __init__(self) -> None:
        self._copied = 0

    def reducers(self) -> dict[str, Reducer]:
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
            raise _bad_call(DEFAULT_DICT, "a factory that cannot be called")
        return self._made(DEFAULT_DICT, args[:1], args[1:], _items)

    def _made(
        self, cls: Global, kept: tuple[Node, ...], given: tuple[Node, ...], read: _Reading
    ) -> Call:
        if len(given) > 1:
            raise _bad_call(cls, f"{len(kept) + len(given)} arguments")
        pairs: _Pairs | None = []
        if given:
            self._refuse_many(_size(given[0]))
            pairs = read(given[0], cls)
        if pairs is None:
            return Call(cls, (*kept, *given))
        made = Call(cls, kept)
        if pairs:
            made.pairs = tuple(_merged(pairs))
        return made

    def _refuse_many(self, count: int) -> None:
        self._copied += count
        if self._copied * _WEIGHT > (most := in_force().nodes):
            what = f"the pickle copies more than {most // _WEIGHT} items into dicts"
            raise LimitExceeded(what, limit="nodes", allowed=most, needed=self._copied * _WEIGHT)


def _merged(pairs: _Pairs) -> _Pairs:
    """Items as a dict has them, set one by one: the place of the first, the value of the last."""
    if all(_is_plain(key) for key, _ in pairs):
        return list(dict(pairs).items())
    return pairs


def _size(given: Node) -> int:
    """How much is looked at to read the items of an argument."""
    if type(given) is Dict or type(given) is Call:
        return len(given.pairs)
    if type(given) in (list, tuple, str):
        return len(given)
    return 0


def _items(given: Node, cls: Global) -> _Pairs | None:
    """The items of a mapping, or the pairs in a sequence; None where that cannot be told."""
    pairs = _pairs_of(given)
    if pairs is not None:
        return pairs
    if type(given) in (list, tuple):
        found = [_pair(element, cls) for element in given]
        return None if None in found else [pair for pair in found if pair is not None]
    if type(given) in (str, bytes) and not given:
        return []
    if type(given) in _NO_PAIRS:
        raise _bad_call(cls, "something that does not hold pairs")
    return None


def _pairs_of(node: Node) -> _Pairs | None:
    """The items of a dict whose items are known, in a list of its own."""
    if type(node) is Dict:
        return list(node.pairs)
    is_mapping = type(node) is Call and node.name in MAPPINGS and not node.items
    if is_mapping and len(node.args) <= (node.name == DEFAULT_DICT.path):  # which has a factory
        return list(node.pairs)
    return None


def _pair(element: Node, cls: Global) -> tuple[Node, Node] | None:
    """A key and its value; None for an object that may be a pair."""
    if type(element) in (list, tuple):
        if len(element) != 2:
            raise _bad_call(cls, f"an item of {len(element)} parts, where a pair is needed")
        return element[0], element[1]
    if type(element) in _NO_PAIRS and (type(element) not in (str, bytes) or len(element) != 2):
        raise _bad_call(cls, "an item that is not a pair")
    return None


def _counts(given: Node, cls: Global) -> _Pairs | None:
    """The items of a mapping, or how often each element of a sequence stands in it."""
    if given is None:
        return []
    pairs = _pairs_of(given)
    if pairs is not None:
        return pairs
    if type(given) in (list, tuple, str):
        elements: Sequence[Node] = given
        return list(Counter(elements).items()) if all(map(_is_plain, elements)) else None
    if type(given) in (int, float, bool):
        raise _bad_call(cls, "a number")
    return None


def _is_plain(key: Node) -> bool:
    """Whether a key may be hashed: not ints that may all have one hash."""
    if type(key) is int:
        return -_LARGE_INT < key < _LARGE_INT
    return type(key) in (str, bytes, bool, type(None))


# nodes that a copied item counts for: a stream of a few bytes may ask for millions of them
_WEIGHT = 8
_LARGE_INT = 1 << 60  # python's hashes of ints repeat from 2**61 - 1 on
_NO_PAIRS = (str, bytes, int, float, bool, type(None))


def _bad_call(cls: Global, what: str) -> MalformedCheckpoint:
    hint = "the file is damaged or forged"
    return MalformedCheckpoint(f"the pickle calls {cls.path} with {what}", hint=hint)
