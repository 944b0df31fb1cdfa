"""Pickle streams read as documents, never executed.

A stream becomes the nodes of `nodes`. Nothing that it names is imported or called, and none of its
values is hashed while it is read. The caller says which calls it knows (`reducers`) and what a
persistent id stands for; this module knows no torch name. The opcodes are those of CPython's
`pickletools`.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias

from ckptconv.pickles.making import BYTES_REDUCERS, MappingCalls, NodeMaker, Reducer
from ckptconv.pickles.memo import MEMO_KEYS, RUN, FetchedUnmade, Memo, RunReader
from ckptconv.pickles.nodes import BYTEARRAY, SET, Call, Dict, Global, Node, PersistentId
from ckptconv.pickles.opcodes import LINES, SIZED
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import Limits, in_force
from ckptconv.support.settings import collector_paused

_INT32 = struct.Struct("<i").unpack_from
_UINT32 = struct.Struct("<I").unpack_from
_UINT16 = struct.Struct("<H").unpack_from
_UINT64 = struct.Struct("<Q").unpack_from
_DOUBLE = struct.Struct(">d").unpack_from  # BINFLOAT alone is big-endian


Run: TypeAlias = Callable[[bytes, int, int, Memo], tuple[int, list[Node]]]
"""Does at once what the opcodes of objects of one class do one by one: of a stream, from behind the
class of the first object and the EMPTY_TUPLE up to an end. Gives the place behind what it read and
what that leaves on the stack in the place of the class: nothing where the opcodes are others.
"""


def read_pickle(
    stream: bytes,
    *,
    reducers: Mapping[str, Reducer] | None = None,
    persistent: Callable[[Node], Node] = PersistentId,
    runs: Mapping[str, Run] | None = None,
) -> Node:
    """The root node of the pickle in `stream`.

    `reducers` maps the dotted name of a function to what makes a leaf of its arguments; every other
    call becomes a `Call`. `persistent` makes a leaf of a persistent id. `runs` maps the dotted name
    of a class to what reads objects of it at once, where there are very many. Bytes behind the end
    of the pickle are not allowed. Raises `MalformedCheckpoint` (with the byte) or `LimitExceeded`.
    """
    known = {**BYTES_REDUCERS, **MappingCalls().reducers(), **(reducers or {})}
    reader = PickleReader(stream, known, persistent, runs)
    try:
        root = reader.read()
    except FetchedUnmade:  # seldom: then each opcode is done by itself
        reader = PickleReader(stream, known, persistent)
        root = reader.read()
    if reader.position != len(stream):
        what = f"{len(stream) - reader.position} bytes follow the end of the pickle"
        hint = "pickle.load may accept it, but ckptconv does not read what it cannot account for"
        raise MalformedCheckpoint(what, hint=hint)
    return root


class PickleReader(NodeMaker):
    """Reads the pickles of `stream` one after another; `position` is the byte behind the last one.

    Hazards of pickle streams that this loop answers: declared lengths are held against what is left
    before anything is allocated; an opcode may not cross the end of its FRAME; a stack never
    reaches below its MARK; the memo is a dict, so an index allocates nothing; EXT opcodes and
    out-of-band buffers are refused.
    """

    def __init__(
        self,
        stream: bytes,
        reducers: Mapping[str, Reducer],
        persistent: Callable[[Node], Node],
        runs: Mapping[str, Run] | None = None,
    ) -> None:
        super().__init__(reducers)
        self._runs = runs or {}
        self._stream = stream
        self._persistent = persistent

    def read(self) -> Node:
        """The root of the next pickle."""
        start = self.position
        try:
            with collector_paused():
                return self._read()
        except (IndexError, struct.error):
            what = "ends in the middle, or takes more from its stack than there is"
            raise self._malformed(what) from None
        except KeyError:
            raise self._malformed("reads a memo entry that was never written") from None
        except (ValueError, UnicodeError, OverflowError) as error:
            what = f"has an argument that is not a number or text ({error})"
            raise self._malformed(what) from None
        finally:
            if self.position == start:
                self.position = start + 1

    # One loop, opcodes in order of how often checkpoints hold them, with the state in locals. It is
    # long because a call per opcode costs as much as all the checks here: for 30,000 tensors, this
    # takes 0.36 s without the runs of `memo` (0.15 s with them), python's own `pickle._Unpickler`,
    # which calls a method for each opcode and checks nothing, 0.37 s.
    def _read(self) -> Node:
        data = self._stream
        size = len(data)
        pos = start = self.position
        end = size
        stack: list[Node] = []
        push = stack.append
        marks: list[list[Node]] = []
        memo = Memo(data, self._persistent)
        memoized = memo.memoized
        intern: dict[str, str] = {}
        known = self._known
        persistent = self._persistent
        runs = RunReader(memo, memo.runs, persistent, known)
        run_starts = memo.runs
        object_runs = self._runs
        is_fetched = False  # a memo entry that a run may have put
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
                    key = data[pos : pos + 4]
                    if run_starts and key in memo:
                        memo.refuse_other(key)
                    memo[key] = stack[-1]
                    pos += 4
                elif op == 0x68:  # BINGET
                    push(memo[MEMO_KEYS[data[pos]]])
                    pos += 1
                elif op == 0x71:  # BINPUT
                    key = MEMO_KEYS[data[pos]]
                    if run_starts and key in memo:
                        memo.refuse_other(key)
                    memo[key] = stack[-1]
                    pos += 1
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[data[pos : pos + 4]])
                    is_fetched = True
                    pos += 4
                elif op == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                elif op == 0x28:  # MARK
                    run = RUN(data, pos, end) if data[pos] == 0x28 else None
                    leaf = None if run is None else runs.tensor(run, stack[-1])
                    if run is not None and leaf is not None:
                        stack[-1] = leaf
                        pos = runs.entries(data, run.end(), look, stack)
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
                    stack[-1] = self._called(func, args) if reducer is None else reducer(args)
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
                    stack[-1] = persistent(stack[-1])
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
                        stack[-1] = self._called(func, args) if reducer is None else reducer(args)
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
                        object_run = None
                        if object_runs and type(stack[-1]) is Global:
                            object_run = object_runs.get(stack[-1].path)
                        if object_run is not None:
                            behind, values = object_run(data, pos, look, memo)
                            if values:
                                stack[-1:] = values
                                nodes += len(values) + (behind - pos >> _NODE_IN_RUN)
                                unread += behind - pos - _LONGEST_OPCODE * len(values)
                                pos = behind
                                if len(stack) > widest:
                                    raise _too_wide(widest)
                                continue
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
                    stop = data.index(b"\n", data.index(b"\n", pos, end) + 1, end)
                    push(self._global(*data[pos:stop].decode().split("\n")))
                    pos = stop + 1
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
                    if args or type(stack[-1]) is not Global:
                        stack[-1] = self._new(stack[-1], args, None)
                    else:
                        stack[-1] = Call(stack[-1], (), new=True)
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
                    if run_starts and (is_fetched or memo.is_ordered()):
                        memo.check_runs()
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
            memo.forget()
            look = min(end, pos + _LOOK)
            if pos < end:
                continue
            self.position = pos
            if end == size:
                raise self._malformed("has no end")
            if pos != end:
                raise self._malformed(_CROSSING)
            end = size
            look = min(end, pos + _LOOK)

    def _crossing(self, pos: int, stop: int, size: int) -> NoReturn:
        self.position = pos
        if stop > size:
            raise self._malformed(f"declares {stop - pos} bytes where {size - pos} are left")
        raise self._malformed(_CROSSING)

    def _rare(
        self, op: int, stack: list[Node], marks: list[list[Node]], memo: Memo, pos: int, end: int
    ) -> tuple[list[Node], int]:
        """The opcodes that are rare today; gives the stack, and the position behind the opcode."""
        data = self._stream
        if op == 0x80:  # PROTO
            if data[pos] > 5:
                raise self._malformed(f"has the unknown protocol {data[pos]}")
            return stack, pos + 1
        if LINES.get(op) == 1:
            stop = data.index(b"\n", pos, end)
            self._text(op, data[pos:stop], stack, memo)
            return stack, stop + 1
        if op in _OF_BYTES:
            start = pos + SIZED[op]
            stop = start + int.from_bytes(data[pos:start], "little")
            if stop > end:
                self._crossing(start, stop, len(data))
            stack.append(_OF_BYTES[op](data[start:stop]))
            return stack, stop
        if op == 0x69:  # INST
            stop = data.index(b"\n", data.index(b"\n", pos, end) + 1, end)
            cls = self._global(*data[pos:stop].decode().split("\n"))
            args, stack = tuple(stack), marks.pop()
            stack.append(self._called(cls, args))
            return stack, stop + 1
        return self._stack_only(op, stack, marks), pos

    def _text(self, op: int, text: bytes, stack: list[Node], memo: Memo) -> None:
        if op == 0x67:  # GET
            memo.is_fetched = True
            stack.append(memo[int(text).to_bytes(4, "little")])
        elif op == 0x70:  # PUT
            key = int(text).to_bytes(4, "little")
            memo.refuse_other(key)
            memo[key] = stack[-1]
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
            digits = text.strip().lstrip(b"+-").rstrip(b"L")
            if len(digits) > 1 and digits[0] == 0x30:  # octal to some readers, an error to others
                raise self._malformed("has a number that begins with 0")
            stack.append(int(text.rstrip(b"L")))
        else:  # PERSID
            what = "its pickle is of protocol 0, which turns what refers to a storage into text"
            what = f"{what}; torch does not read it either (near byte {self.position})"
            raise MalformedCheckpoint(what, hint="save it again with another pickle protocol")

    def _stack_only(self, op: int, stack: list[Node], marks: list[list[Node]]) -> list[Node]:
        if op == 0x92:  # NEWOBJ_EX
            kwargs, args = stack.pop(), stack.pop()
            if type(args) is not tuple:
                raise self._malformed("makes an object with arguments that are not a tuple")
            stack[-1] = self._new(stack[-1], args, kwargs)
        elif op == 0x30 and stack:  # POP
            stack.pop()
        elif op in b"01":  # POP of a mark, POP_MARK
            stack = marks.pop()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        elif op == 0x8F:  # EMPTY_SET
            stack.append(Call(SET, ([],)))
            widest = in_force().stack
            if len(stack) > widest:
                raise _too_wide(widest)
        elif op in b"ldo\x90\x91":  # LIST, DICT, OBJ, ADDITEMS, FROZENSET
            made, stack = stack, marks.pop()
            self._from_mark(op, made, stack)
        else:
            raise self._malformed(f"holds the opcode 0x{op:02x}, which is refused or unknown")
        return stack


_CROSSING = "has an opcode that crosses the end of its frame"
# Bytes of a stream between two looks at what was made of it: at most some 60 MB of nodes
_LOOK = 1 << 18
_NODE_IN_RUN = 7  # a run counts as a node for each 128 bytes of it
_LONGEST_OPCODE = 16  # bytes, with its argument but for bytes and text


def _refuse_many(most: Limits, nodes: int, opcode_bytes: int) -> None:
    if nodes > most.nodes:
        what = f"the pickle makes more than {most.nodes} containers and calls"
        raise LimitExceeded(what, limit="nodes", allowed=most.nodes)
    if opcode_bytes > most.opcode_bytes:
        what = f"the pickle has more than {most.opcode_bytes} bytes of opcodes"
        raise LimitExceeded(what, limit="opcode_bytes", allowed=most.opcode_bytes)


def _too_wide(widest: int) -> LimitExceeded:
    what = f"the pickle has more than {widest} values side by side on its stack"
    return LimitExceeded(what, limit="stack", allowed=widest)


# NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE: the attributes of an object made of nothing follow
_NEW_WITH_STATE = b"\x81\x94}\x94"
# What follows EMPTY_TUPLE where an object has attributes, and TUPLE1 in a torch.Size of one
_CALLED_WITH_TUPLE = b"\x94\x85\x94R\x94"


def _decode(text: bytes, intern: dict[str, str]) -> str:
    decoded = text.decode("utf-8", "surrogatepass")
    if len(decoded) < 32:
        return intern.setdefault(decoded, decoded)
    return decoded


def _python2_text(raw: bytes) -> str | bytes:
    """A python 2 string: text if it is UTF-8 (torch's own default), else the bytes as they are."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


# What the bytes behind a length mean
_OF_BYTES: dict[int, Callable[[bytes], Node]] = {
    **dict.fromkeys(b"UT", _python2_text),  # SHORT_BINSTRING, BINSTRING
    **dict.fromkeys(b"CB\x8e", bytes),  # SHORT_BINBYTES, BINBYTES, BINBYTES8
    0x8D: lambda raw: raw.decode("utf-8", "surrogatepass"),  # BINUNICODE8
    0x96: lambda raw: Call(BYTEARRAY, (raw,)),  # BYTEARRAY8
    **dict.fromkeys(b"\x8a\x8b", lambda raw: int.from_bytes(raw, "little", signed=True)),  # LONGs
}
