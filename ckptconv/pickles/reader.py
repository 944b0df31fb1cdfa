"""Pickle streams read as documents, never executed.

A stream becomes the nodes of `nodes`. Nothing that it names is imported or called, and none of its
values is hashed while it is read. The caller says which calls it knows (`reducers`) and what a
persistent id stands for; this module knows no torch name. The opcodes are those of CPython's
`pickletools`.
"""

from __future__ import annotations

import codecs
import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias

from ckptconv.pickles.mapping_calls import IGNORE_NEW_ARGUMENTS, NO_LISTS, MappingCalls, merged
from ckptconv.pickles.nodes import (
    ABSENT,
    BYTEARRAY,
    BYTES,
    ENCODE,
    FROZENSET,
    SET,
    Call,
    Dict,
    Global,
    Node,
    PersistentId,
)
from ckptconv.support.errors import CheckpointError, LimitExceeded, MalformedCheckpoint
from ckptconv.support.gc_pause import collector_paused
from ckptconv.support.limits import Limits, in_force

Reducer: TypeAlias = Callable[[tuple[Node, ...]], Node]

_INT32 = struct.Struct("<i").unpack_from
_UINT32 = struct.Struct("<I").unpack_from
_UINT16 = struct.Struct("<H").unpack_from
_UINT64 = struct.Struct("<Q").unpack_from
_DOUBLE = struct.Struct(">d").unpack_from


def read_pickle(
    stream: bytes,
    *,
    reducers: Mapping[str, Reducer] | None = None,
    persistent: Callable[[Node], Node] = PersistentId,
    states: Mapping[str, Callable[[Node], Node]] | None = None,
) -> Node:
    """The root node of the pickle in `stream`.

    `reducers` maps the dotted name of a function to what makes a leaf of its arguments; every other
    call becomes a `Call`. `persistent` makes a leaf of a persistent id. `states` maps the dotted
    name of a class to what makes a smaller node of the states of its objects, where there are very
    many. Bytes behind the end of the pickle are not allowed. Raises `MalformedCheckpoint` (with the
    byte) or `LimitExceeded`.
    """
    known = {**BYTES_REDUCERS, **MappingCalls().reducers(), **(reducers or {})}
    reader = PickleReader(stream, known, persistent, states)
    root = reader.read()
    if reader.position != len(stream):
        what = f"{len(stream) - reader.position} bytes follow the end of the pickle"
        raise MalformedCheckpoint(
            what,
            hint="pickle.load may accept it, but ckptconv does not read what it cannot account for",
        )
    return root


class PickleReader:
    """Reads the pickles of `stream` one after another; `position` is the byte behind the last one
    read.

    Hazards of pickle streams that this loop answers: declared lengths are held against what is left
    before anything is allocated; an opcode may not cross the end of its FRAME; a stack never
    reaches below its MARK; the memo is a dict, so an index allocates nothing; EXT opcodes and
    out-of-band buffers are refused; BUILD, APPEND and SETITEM touch nothing but the containers and
    calls of this very stream.
    """

    def __init__(
        self,
        stream: bytes,
        reducers: Mapping[str, Reducer],
        persistent: Callable[[Node], Node],
        states: Mapping[str, Callable[[Node], Node]] | None = None,
    ) -> None:
        self.position = 0
        self._stream = stream
        self._reducers = reducers
        self._persistent = persistent
        self._globals: dict[tuple[str, str], Global] = {}
        self._known: dict[Global, Reducer] = {}
        self._states = {} if states is None else states
        self._smaller: dict[Global, Callable[[Node], Node]] = {}
        self._no_hooks = Call(None, ())

    def read(self) -> Node:
        """The root of the next pickle."""
        start = self.position
        try:
            with collector_paused():
                return self._read()
        except CheckpointError:
            raise
        except (IndexError, struct.error):
            raise self._malformed(
                "ends in the middle, or takes more from its stack than there is"
            ) from None
        except KeyError:
            raise self._malformed("reads a memo entry that was never written") from None
        except (ValueError, UnicodeError, OverflowError) as error:
            raise self._malformed(
                f"has an argument that is not a number or text ({error})"
            ) from None
        finally:
            if self.position == start:
                self.position = start + 1

    def _malformed(self, what: str) -> MalformedCheckpoint:
        hint = "the file is damaged, cut off or forged"
        return MalformedCheckpoint(f"the pickle {what} (near byte {self.position})", hint=hint)

    # One loop, opcodes in order of how often checkpoints hold them: a call per opcode would cost
    # more than its work.
    def _read(self) -> Node:
        data = self._stream
        size = len(data)
        pos = start = self.position
        end = size
        stack: list[Node] = []
        push = stack.append
        marks: list[list[Node]] = []
        memo = _Memo(data, self._persistent)
        memoized = memo.memoized
        intern: dict[str, str] = {}
        known = self._known
        most = in_force()
        deepest, widest = most.depth, most.stack
        # what was made, and the bytes of arguments that are not opcodes; held against the limits at
        # `look`
        nodes = unread = 0
        look = min(end, pos + _LOOK)
        while True:
            while pos < look:
                op = data[pos]
                pos += 1
                if op == 0x72:  # LONG_BINPUT
                    memo[data[pos : pos + 4]] = stack[-1]
                    pos += 4
                elif op == 0x68:  # BINGET
                    push(memo[_MEMO_KEYS[data[pos]]])
                    pos += 1
                elif op == 0x71:  # BINPUT
                    memo[_MEMO_KEYS[data[pos]]] = stack[-1]
                    pos += 1
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[data[pos : pos + 4]])
                    pos += 4
                elif op == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                elif op == 0x28:  # MARK
                    if (
                        data[pos] == 0x28
                        and (run := _TENSOR_RUN(data, pos, end))
                        and self._tensor_run(run, stack, memo)
                    ):
                        pos = run.end()
                        continue
                    marks.append(stack)
                    if len(marks) > deepest:
                        what = f"the pickle nests more than {deepest} containers"
                        raise LimitExceeded(what, limit="depth", allowed=deepest)
                    stack = []
                    push = stack.append
                elif op == 0x74:  # TUPLE
                    made = tuple(stack)
                    stack = marks.pop()
                    push = stack.append
                    push(made)
                    nodes += 1
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    func = stack[-1]
                    if type(args) is not tuple:
                        self.position = pos
                        raise self._malformed("calls something with arguments that are not a tuple")
                    reducer = known.get(func) if type(func) is Global else None
                    stack[-1] = Call(func, args) if reducer is None else reducer(args)
                    nodes += 1
                elif op == 0x58:  # BINUNICODE
                    pos += 4
                    stop = pos + _UINT32(data, pos - 4)[0]
                    if stop > look:
                        if stop > end:
                            self._crossing(pos, stop, size)
                        unread += stop - pos
                    text = data[pos:stop]
                    push(_decode(text, intern))
                    pos = stop
                elif op == 0x94:  # MEMOIZE
                    if len(memo) == memo.fetched:
                        memoized.append(stack[-1])
                    else:
                        memo.memoize(stack[-1])
                elif op == 0x51:  # BINPERSID
                    self.position = pos
                    stack[-1] = self._persistent(stack[-1])
                elif op == 0x85:  # TUPLE1
                    if (
                        data[pos : pos + 5] == _CALLED_WITH_TUPLE
                        and pos + 5 <= look
                        and len(memo) == memo.fetched
                    ):
                        inner = (stack.pop(),)
                        args = (inner,)
                        func = stack[-1]
                        reducer = known.get(func) if type(func) is Global else None
                        stack[-1] = Call(func, args) if reducer is None else reducer(args)
                        memoized += (inner, args, stack[-1])
                        nodes += 3
                        pos += 5
                        continue
                    stack[-1] = (stack[-1],)
                    nodes += 1
                elif op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                    nodes += 1
                elif op == 0x87:  # TUPLE3
                    last = stack.pop()
                    middle = stack.pop()
                    stack[-1] = (stack[-1], middle, last)
                    nodes += 1
                elif op == 0x4D:  # BININT2
                    push(_UINT16(data, pos)[0])
                    pos += 2
                elif op == 0x4A:  # BININT
                    push(_INT32(data, pos)[0])
                    pos += 4
                elif op == 0x29:  # EMPTY_TUPLE
                    if (
                        data[pos : pos + 4] == _NEW_WITH_STATE
                        and pos + 4 <= look
                        and len(memo) == memo.fetched
                    ):
                        stack[-1] = Call(stack[-1], (), new=True)
                        state = Dict()
                        memoized += (stack[-1], state)
                        push(state)
                        nodes += 2
                        pos += 4
                        if len(stack) > widest:
                            raise _too_wide(widest)
                        continue
                    push(())
                elif op == 0x89:  # NEWFALSE
                    push(False)
                elif op == 0x88:  # NEWTRUE
                    push(True)
                elif op == 0x4E:  # NONE
                    push(None)
                elif op == 0x7D:  # EMPTY_DICT
                    push(Dict())
                    nodes += 1
                    if len(stack) > widest:
                        raise _too_wide(widest)
                elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
                    if op == 0x75:
                        flat = stack
                        stack = marks.pop()
                        push = stack.append
                    else:
                        flat = stack[-2:]
                        del stack[-2:]
                    self.position = pos
                    self._set_items(stack[-1], flat)
                elif op == 0x5D:  # EMPTY_LIST
                    push([])
                    nodes += 1
                    if len(stack) > widest:
                        raise _too_wide(widest)
                elif op == 0x65 or op == 0x61:  # APPENDS, APPEND
                    if op == 0x65:
                        flat = stack
                        stack = marks.pop()
                        push = stack.append
                    else:
                        flat = [stack.pop()]
                    self.position = pos
                    self._extend(stack[-1], flat)
                elif op == 0x47:  # BINFLOAT
                    push(_DOUBLE(data, pos)[0])
                    pos += 8
                elif op == 0x8C:  # SHORT_BINUNICODE
                    pos += 1
                    stop = pos + data[pos - 1]
                    if stop > end:
                        self._crossing(pos, stop, size)
                    push(_decode(data[pos:stop], intern))
                    pos = stop
                elif op == 0x63:  # GLOBAL
                    module_end = data.index(b"\n", pos, end)
                    name_end = data.index(b"\n", module_end + 1, end)
                    push(
                        self._global(
                            data[pos:module_end].decode(), data[module_end + 1 : name_end].decode()
                        )
                    )
                    pos = name_end + 1
                elif op == 0x93:  # STACK_GLOBAL
                    name = stack.pop()
                    module = stack.pop()
                    self.position = pos
                    if type(name) is not str or type(module) is not str:
                        raise self._malformed("names a global by something other than text")
                    (module + name).encode()  # half a character is not a name
                    push(self._global(module, name))
                elif op == 0x81:  # NEWOBJ
                    args = stack.pop()
                    self.position = pos
                    if type(args) is not tuple:
                        raise self._malformed("makes an object with arguments that are not a tuple")
                    stack[-1] = (
                        self._new(stack[-1], args, None) if args else Call(stack[-1], (), new=True)
                    )
                    nodes += 1
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    self.position = pos
                    self._build(stack[-1], state)
                elif op == 0x2E:  # STOP
                    self.position = pos
                    if marks or len(stack) != 1:
                        raise self._malformed("ends with something left on its stack")
                    _refuse_many(most, nodes + memo.count(), pos - start - unread)
                    return stack[0]
                elif op == 0x95:  # FRAME
                    if end != size:
                        self.position = pos
                        raise self._malformed("opens a frame within a frame")
                    end = pos + 8 + _UINT64(data, pos)[0]
                    pos += 8
                    if end > size:
                        self._crossing(pos, end, size)
                    look = min(end, pos + _LOOK)
                else:
                    self.position = pos
                    stack, pos = self._rare(op, stack, marks, memo, pos, end)
                    push = stack.append
                    nodes += 1
                    unread += max(0, pos - self.position - _LONGEST_OPCODE)
            _refuse_many(most, nodes + memo.count(), pos - start - unread)
            if len(memoized) > _REMEMBERED:
                memo.forget()
            look = min(end, pos + _LOOK)
            if pos < end:
                continue
            if pos != end or end == size:
                self.position = pos
                raise self._malformed(
                    "has no end"
                    if end == size
                    else "has an opcode that crosses the end of its frame"
                )
            end = size
            look = min(end, pos + _LOOK)

    def _tensor_run(self, run: re.Match[bytes], stack: list[Node], memo: _Memo) -> bool:
        """Do at once what the opcodes of `run` do one by one; False, with nothing done, when they
        are not as they look.
        """
        kind, cls, size, raw_key, location, count, view, offset, shape, stride, flag, hooks = (
            run.group(1, 2, 3, 4, 6, 7, 8, 10, 11, 13, 15, 16)
        )
        func = stack[-1]
        if size[0] != len(raw_key) or type(func) is not Global:
            return False
        keys = _MEMO_KEYS
        pid: Node = (
            memo[keys[kind[0]]],
            memo[keys[cls[0]]],
            raw_key.decode(),
            memo[keys[location[0]]],
            _integer(count),
        )
        if view:
            pid = (*pid, None)
        reducer = self._known.get(func)
        hooked = memo[keys[hooks[0]]]
        if reducer is None or hooked is not self._no_hooks.func:
            # a leaf holds no hooks, so all leaves may be made of the same
            self._no_hooks = Call(hooked, ())
        args = (
            self._persistent(pid),
            0 if offset == b"K\0" else _integer(offset),
            _INT_RUNS.get(shape) or _int_run(shape),
            _INT_RUNS.get(stride) or _int_run(stride),
            flag == b"\x88",
            self._no_hooks,
        )
        stack[-1] = Call(func, args) if reducer is None else reducer(args)
        memo.runs.append(run.start())
        return True

    def _crossing(self, pos: int, stop: int, size: int) -> NoReturn:
        self.position = pos
        if stop > size:
            raise self._malformed(f"declares {stop - pos} bytes where {size - pos} are left")
        raise self._malformed("has an opcode that crosses the end of its frame")

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

    def _rare(
        self, op: int, stack: list[Node], marks: list[list[Node]], memo: _Memo, pos: int, end: int
    ) -> tuple[list[Node], int]:
        """The opcodes that today's checkpoints seldom hold; returns the stack and the position
        behind the opcode.
        """
        data = self._stream
        if op == 0x80:  # PROTO
            if data[pos] > 5:
                raise self._malformed(f"has the unknown protocol {data[pos]}")
            return stack, pos + 1
        if op in _TEXT_OPCODES:
            stop = data.index(b"\n", pos, end)
            self._text(op, data[pos:stop], stack, memo)
            return stack, stop + 1
        if op in _SIZED_OPCODES:
            width, make = _SIZED_OPCODES[op]
            start = pos + width
            stop = start + int.from_bytes(data[pos:start], "little")
            if stop > end:
                self._crossing(start, stop, len(data))
            stack.append(make(data[start:stop]))
            return stack, stop
        if op == 0x69:  # INST
            module_end = data.index(b"\n", pos, end)
            pos = data.index(b"\n", module_end + 1, end) + 1
            cls = self._global(
                data[self.position : module_end].decode(), data[module_end + 1 : pos - 1].decode()
            )
            args, stack = tuple(stack), marks.pop()
            stack.append(self._called(cls, args))
            return stack, pos
        return self._stack_only(op, stack, marks), pos

    def _text(self, op: int, text: bytes, stack: list[Node], memo: _Memo) -> None:
        if op == 0x67:  # GET
            stack.append(memo[int(text).to_bytes(4, "little")])
        elif op == 0x70:  # PUT
            memo[int(text).to_bytes(4, "little")] = stack[-1]
        elif op == 0x46:  # FLOAT
            stack.append(float(text))
        elif op == 0x56:  # UNICODE
            stack.append(text.decode("raw-unicode-escape"))
        elif op == 0x53:  # STRING
            if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
                raise self._malformed("has a string without quotes")
            stack.append(_python2_text(codecs.escape_decode(text[1:-1])[0]))
        elif op == 0x49 and text in (b"00", b"01"):  # INT, the booleans of protocols 0 and 1
            stack.append(text == b"01")
        elif op in (0x49, 0x4C):  # INT, LONG
            stack.append(int(text.rstrip(b"L")))
        else:  # PERSID
            what = "its pickle is of protocol 0, which turns what refers to a storage into text; torch does not read it either"
            raise MalformedCheckpoint(
                f"{what} (near byte {self.position})",
                hint="save it again with another pickle protocol",
            )

    def _stack_only(self, op: int, stack: list[Node], marks: list[list[Node]]) -> list[Node]:
        if op == 0x92:  # NEWOBJ_EX
            kwargs = stack.pop()
            args = stack.pop()
            if type(args) is not tuple:
                raise self._malformed("makes an object with arguments that are not a tuple")
            stack[-1] = self._new(stack[-1], args, kwargs)
        elif op == 0x30:  # POP
            if stack:
                stack.pop()
            else:
                stack = marks.pop()
        elif op == 0x31:  # POP_MARK
            stack = marks.pop()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        elif op == 0x8F:  # EMPTY_SET
            stack.append(Call(SET, ([],)))
            if len(stack) > (widest := in_force().stack):
                raise _too_wide(widest)
        elif op in (0x6C, 0x64, 0x6F, 0x90, 0x91):  # LIST, DICT, OBJ, ADDITEMS, FROZENSET
            made = stack
            stack = marks.pop()
            self._from_mark(op, made, stack)
        else:
            raise self._malformed(f"holds the opcode 0x{op:02x}, which is refused or unknown")
        return stack

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


_LOOK = 1 << 18
"""Bytes of a stream between two looks at what was made of it: at most some 60 MB of nodes."""
_LONGEST_OPCODE = 16  # bytes, with its argument but for bytes and text


def _refuse_many(most: Limits, nodes: int, opcode_bytes: int) -> None:
    if nodes > most.nodes:
        raise LimitExceeded(
            f"the pickle makes more than {most.nodes} containers and calls",
            limit="nodes",
            allowed=most.nodes,
        )
    if opcode_bytes > most.opcode_bytes:
        what = f"the pickle has more than {most.opcode_bytes} bytes of opcodes"
        raise LimitExceeded(what, limit="opcode_bytes", allowed=most.opcode_bytes)


def _too_wide(widest: int) -> LimitExceeded:
    what = f"the pickle has more than {widest} values side by side on its stack"
    return LimitExceeded(what, limit="stack", allowed=widest)


# The opcodes that torch writes for a tensor, behind the rebuild function and the MARK of its
# arguments: a storage's persistent id, offset, shape, stride, requires_grad and hooks. They are
# nine tenths of a large checkpoint's opcodes; as one match they cost a third. It holds the form of
# torch (names fetched by BINGET, own values put by LONG_BINPUT) and of ckptconv (which puts none of
# them), and no names. Legacy files say of every storage that it is not a view (N).
_INTEGER = rb"(K.|M..|J....)"
_INTEGERS = rb"((?:K.|M..|J....)[\x85]|(?:K.|M..|J....){2}[\x86]|(?:K.|M..|J....){3}[\x87]|\((?:K.|M..|J....){4,}t)(?:r(....))?"
_TENSOR_RUN = re.compile(
    rb"\(h(.)h(.)X(.)\0\0\0([0-9]{1,20})(?:r(....))?h(.)" + _INTEGER + rb"(N?)t(?:r(....))?Q" + _INTEGER + _INTEGERS + _INTEGERS
    + rb"([\x88\x89])h(.)\)R(?:r(....))?t(?:r(....))?R",
    re.DOTALL,
).match  # fmt: skip
_INT_RUNS: dict[bytes, tuple[int, ...]] = {}


_NEW_WITH_STATE = b"\x81\x94}\x94"
_CALLED_WITH_TUPLE = b"\x94\x85\x94R\x94"
"""What follows EMPTY_TUPLE and TUPLE1 where pickle writes an object with attributes, and a
torch.Size of one dimension.
"""
_REMEMBERED = 1 << 16
"""Entries of MEMOIZE that are kept whether they may be fetched or not: more than small pickles
have.
"""
_LONG_BINGETS = re.compile(rb"j(?=(.{4}))", re.DOTALL).findall
_FORGOTTEN: Node = object()


class _Memo(dict[bytes, Node]):
    """The memo, by the index as LONG_BINPUT has it (which saves decoding it).

    A tensor's run puts six values that are hardly ever fetched: they are made when one is. `runs`
    are the places of the runs. What MEMOIZE puts, whose index is the number of entries, goes to the
    list `memoized` as long as nothing else is put: an entry takes 8 bytes there, and 130 in the
    dict. Those of them that were `fetched` are in the dict too.
    """

    def __init__(self, stream: bytes, persistent: Callable[[Node], Node]) -> None:
        super().__init__()
        self.runs: list[int] = []
        self.memoized: list[Node] = []
        self.fetched = 0
        self._kept_until = _REMEMBERED
        self._fetchable: list[int] | None = None
        self._stream = stream
        self._persistent = persistent
        self._indexed = 0
        self._run_of: dict[bytes, int] = {}

    def count(self) -> int:
        """The entries, a run counted as one."""
        return len(self) + len(self.runs) + len(self.memoized) - max(0, self.fetched)

    def forget(self) -> None:
        """Let go of the entries of MEMOIZE that no LONG_BINGET in the stream can fetch, for pickle
        puts nearly all for nothing.

        Whatever bytes look like that opcode count as one. BINGET reaches only the first entries,
        which all stay.
        """
        if self._fetchable is None:
            indexes = {int.from_bytes(index, "little") for index in _LONG_BINGETS(self._stream)}
            self._fetchable = sorted(indexes)
        first, end = self._kept_until, len(self.memoized)
        may_be = self._fetchable[
            bisect_left(self._fetchable, first) : bisect_left(self._fetchable, end)
        ]
        kept = [(index, self.memoized[index]) for index in may_be]
        self.memoized[first:end] = [_FORGOTTEN] * (end - first)
        for index, value in kept:
            self.memoized[index] = value
        self._kept_until = end

    def memoize(self, value: Node) -> None:
        """What MEMOIZE does where other opcodes put entries too: they all go to the dict from now
        on.
        """
        if self._kept_until > _REMEMBERED:
            hint = "no program writes that; the file is damaged or forged"
            raise MalformedCheckpoint("the pickle numbers its memo entries in two ways", hint=hint)
        for index, earlier in enumerate(self.memoized):
            self.setdefault(index.to_bytes(4, "little"), earlier)
        self.memoized.clear()
        self.fetched = -1
        self[len(self).to_bytes(4, "little")] = value

    def __missing__(self, key: bytes) -> Node:
        if (index := int.from_bytes(key, "little")) < len(self.memoized):
            if (value := self.memoized[index]) is _FORGOTTEN:
                raise KeyError(key)
            self.fetched += 1
            self[key] = value
            return value
        for start in self.runs[self._indexed :]:
            self._run_of.update((put, start) for put in self._puts(start))
        self._indexed = len(self.runs)
        self.update(self._puts(self._run_of[key]))
        return self[key]

    def _puts(self, start: int) -> dict[bytes, Node]:
        """What the run at `start` puts: key, persistent id, shape, stride, hooks and arguments."""
        run = _TENSOR_RUN(self._stream, start)
        assert run is not None
        (kind, cls, _, raw_key, key_put, location, count, view, pid_put, offset, shape, shape_put,
            stride, stride_put, flag,
         hooks, hooks_put, args_put) = run.groups()  # fmt: skip
        names = [self[_MEMO_KEYS[index[0]]] for index in (kind, cls, location, hooks)]
        made = Call(names[3], ())
        dims, steps = _int_run(shape), _int_run(stride)
        pid = (
            names[0],
            names[1],
            raw_key.decode(),
            names[2],
            _integer(count),
            *([None] if view else []),
        )
        args = (self._persistent(pid), _integer(offset), dims, steps, flag == b"\x88", made)
        puts = {
            key_put: pid[2],
            pid_put: pid,
            shape_put: dims,
            stride_put: steps,
            hooks_put: made,
            args_put: args,
        }
        # ckptconv itself puts none of them
        return {put: value for put, value in puts.items() if put is not None}


def _integer(raw: bytes) -> int:
    return raw[1] if raw[0] == 0x4B else int.from_bytes(raw[1:], "little", signed=raw[0] == 0x4A)


def _int_run(raw: bytes) -> tuple[int, ...]:
    """The tuple that a run of integer opcodes and a TUPLE opcode make; kept, for shapes repeat."""
    if len(_INT_RUNS) > 1 << 14:
        _INT_RUNS.clear()
    values, pos = [], int(raw[0] == 0x28)
    while pos < len(raw) - 1:
        width = _WIDTHS[raw[pos]]
        values.append(_integer(raw[pos : pos + width]))
        pos += width
    return _INT_RUNS.setdefault(raw, tuple(values))


_WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5}
_MEMO_KEYS = tuple(index.to_bytes(4, "little") for index in range(256))


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


def _decode(text: bytes, intern: dict[str, str]) -> str:
    decoded = text.decode("utf-8", "surrogatepass")
    return intern.setdefault(decoded, decoded) if len(decoded) < 32 else decoded


def _python2_text(raw: bytes) -> str | bytes:
    """A python 2 string: text where it is UTF-8 (torch's own default), else the bytes as they are."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


_TEXT_OPCODES = frozenset(b"gpFVSILP")
_SIZED_OPCODES: dict[int, tuple[int, Callable[[bytes], Node]]] = {
    0x55: (1, _python2_text),  # SHORT_BINSTRING
    0x54: (4, _python2_text),  # BINSTRING
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x42: (4, bytes),  # BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x8D: (8, lambda raw: raw.decode("utf-8", "surrogatepass")),  # BINUNICODE8
    0x96: (8, lambda raw: Call(BYTEARRAY, (raw,))),  # BYTEARRAY8
    0x8A: (1, lambda raw: int.from_bytes(raw, "little", signed=True)),  # LONG1
    0x8B: (4, lambda raw: int.from_bytes(raw, "little", signed=True)),  # LONG4
}
