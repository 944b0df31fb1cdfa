"""What the opcodes of a pickle make of the values on its stack: globals, calls and containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ckptconv.pickles.mapping_calls import IGNORE_NEW_ARGUMENTS, NO_LISTS, merged
from ckptconv.pickles.nodes import (
    ABSENT,
    FROZENSET,
    SET,
    Call,
    Dict,
    Global,
    Node,
)
from ckptconv.support.errors import MalformedCheckpoint, malformed

Reducer: TypeAlias = Callable[[tuple[Node, ...]], Node]


class NodeMaker:
    """Makes the nodes of one stream; `position` is the byte that errors name.

    BUILD, APPEND and SETITEM touch nothing but the containers and calls of this very stream.
    `reducers` and `states` are those of `read_pickle`.
    """

    def __init__(
        self,
        reducers: Mapping[str, Reducer],
        states: Mapping[str, Callable[[Node], Node]] | None = None,
    ) -> None:
        self.position = 0
        self._reducers = reducers
        self._globals: dict[tuple[str, str], Global] = {}
        self._known: dict[Global, Reducer] = {}
        self._states = {} if states is None else states
        self._smaller: dict[Global, Callable[[Node], Node]] = {}

    def _malformed(self, what: str) -> MalformedCheckpoint:
        return malformed(f"the pickle {what} (near byte {self.position})")

    def _global(self, module: str, name: str) -> Global:
        known = self._globals.get((module, name))
        if known is None:
            known = self._globals[module, name] = Global(module, name)
            if reducer := self._reducers.get(known.path):
                self._known[known] = reducer
            if smaller := self._states.get(known.path):
                self._smaller[known] = smaller
        return known

    def _set_items(self, target: Node, flat: list[Node]) -> None:
        if type(target) is not Dict and type(target) is not Call:
            raise self._malformed("sets an item on something that is not a dict")
        if len(flat) % 2:
            raise self._malformed("sets a key without a value")
        if type(target.pairs) is list:
            target.pairs.extend(zip(flat[::2], flat[1::2]))  # noqa: B905 (the length is even)
        else:  # it has none yet, or those of an argument
            set_now = list(zip(flat[::2], flat[1::2]))  # noqa: B905
            target.pairs = merged([*target.pairs, *set_now]) if target.pairs else set_now

    def _extend(self, target: Node, flat: list[Node]) -> None:
        if type(target) is list:
            target.extend(flat)
        elif type(target) is Call and target.name not in NO_LISTS:
            target.items = [*target.items, *flat] if target.items else flat
        else:
            raise self._malformed("appends to something that is not a list")

    def _build(self, target: Node, state: Node) -> None:
        if type(target) is not Call:
            raise self._malformed("sets the state of something that was not made by a call")
        if target.state is not ABSENT:
            raise self._malformed("sets the state of one object twice")
        smaller = (
            self._smaller.get(target.func)
            if self._smaller and type(target.func) is Global
            else None
        )
        target.state = state if smaller is None else smaller(state)

    def _called(self, func: Node, args: tuple[Node, ...]) -> Node:
        reducer = self._known.get(func) if type(func) is Global else None
        return Call(func, args) if reducer is None else reducer(args)

    def _new(self, cls: Node, args: tuple[Node, ...], kwargs: Node) -> Call:
        if type(cls) is Global and cls.path in IGNORE_NEW_ARGUMENTS:
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
