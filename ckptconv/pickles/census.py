"""What a pickle names, counted opcode by opcode: its storages and its tensors.

A second pair of eyes beside `reader`, with which it shares nothing: no nodes, no reducers, no
shortcuts. Of a stream it keeps only what may lead to a name (short texts, globals, tuples of them),
so it finds storages that the reader has lost. It is made for streams that were read before, and
gives up where it does not follow. How long opcodes are, `opcodes` says; what they do, this module.
Storages and rebuild functions are those of torch (torch/serialization.py, torch/_utils.py).
"""

from __future__ import annotations

import codecs
import struct
from dataclasses import field
from typing import Any

from ckptconv.pickles.opcodes import FIXED, LINES, SIZED, STOP
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.records import NamedTuple, dataclass

_UINT32 = struct.Struct("<I").unpack_from


class Span(NamedTuple):
    """Bytes `start` to `stop` that hold a stream; `is_text`: as the text of latin-1 bytes."""

    start: int
    stop: int
    is_text: bool = False


@dataclass(slots=True)
class Census:
    """What one pickle names: the element counts of `storages` by key, the number of `tensors` that
    are rebuilt.

    `references` are the persistent ids that are not a tuples (keys of tensors, in tar files);
    `streams` are the torch streams that storages are loaded from, as bare pickles have them.
    """

    storages: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    references: set[str] = field(default_factory=set)
    streams: list[Span | bytes] = field(default_factory=list)


def take_census(stream: bytes) -> Census:
    """Count what a pickle names; `MalformedCheckpoint` where it cannot be followed."""
    counter = _Counter(stream)
    try:
        counter.run()
    except (IndexError, KeyError, ValueError, struct.error) as error:
        what = f"counting what its pickle names stops near byte {counter.position}"
        hint = "please report this; convert it without --verify"
        raise MalformedCheckpoint(what, hint=hint) from error
    return counter.census


def held_stream(stream: bytes, held: Span | bytes) -> bytes:
    """The bytes of a stream within a stream."""
    if not isinstance(held, Span):
        return held
    raw = stream[held.start : held.stop]
    if held.is_text:
        return raw.decode("utf-8", "surrogatepass").encode("latin-1")
    return raw


class _Name(str):
    """The dotted name of a global."""

    __slots__ = ()


class _Memo(dict[int, Any]):
    """What was put and may lead to a name, by index; others are counted, as MEMOIZE needs."""

    def __init__(self) -> None:
        super().__init__()
        self._dense = 0  # all indices below were put
        self._sparse: set[int] = set()

    def put(self, index: int, value: Any) -> None:
        """Note the value of an index, unless nothing depends on it."""
        if index == self._dense:
            self._dense += 1
            while self._sparse and self._dense in self._sparse:
                self._sparse.remove(self._dense)
                self._dense += 1
        elif index > self._dense:
            self._sparse.add(index)
        if _is_kept(value):
            self[index] = value
        elif index in self:
            del self[index]

    def append(self, value: Any) -> None:
        """MEMOIZE."""
        self.put(self._dense + len(self._sparse), value)


def _is_kept(value: Any) -> bool:
    kind = type(value)
    return kind in _KEPT or (kind is tuple and any(type(part) in _KEPT for part in value))


def _flat(parts: list[Any]) -> tuple[Any, ...]:
    """A tuple of values; what leads to a name lies in no tuple within a tuple."""
    return tuple([None if type(part) is tuple else part for part in parts])


_KEPT = frozenset((str, _Name, Span, bytes))
_LONG = 1000  # of longer texts only the place is kept
_WIDE = 16  # longer tuples are not persistent ids or arguments that matter
_PLAIN = frozenset(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type_v2")


class _Counter:
    """The stack and the memo of one stream; None stands for a value that cannot lead to a name."""

    def __init__(self, stream: bytes) -> None:
        self.census = Census()
        self.position = 0
        self._data = stream
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo = _Memo()

    def run(self) -> None:
        """Follow the stream to its STOP."""
        data, memo = self._data, self._memo
        while True:
            at = self.position
            op = data[at]
            if op == 0x72:  # LONG_BINPUT
                memo.put(_UINT32(data, at + 1)[0], self._stack[-1])
                self.position = at + 5
            elif op == 0x71:  # BINPUT
                memo.put(data[at + 1], self._stack[-1])
                self.position = at + 2
            elif op == 0x68:  # BINGET
                self._stack.append(memo.get(data[at + 1]))
                self.position = at + 2
            elif op == 0x6A:  # LONG_BINGET
                self._stack.append(memo.get(_UINT32(data, at + 1)[0]))
                self.position = at + 5
            elif op == 0x94:  # MEMOIZE
                memo.append(self._stack[-1])
                self.position = at + 1
            elif op == 0x4B:  # BININT1
                self._stack.append(data[at + 1])
                self.position = at + 2
            elif op == 0x28:  # MARK
                self._marks.append(self._stack)
                self._stack = []
                self.position = at + 1
            elif op == STOP:
                return
            elif op in FIXED:
                self.position = stop = at + 1 + FIXED[op]
                self._act(op, at + 1, stop)
            else:
                self._act(op, *self._argument(op, at + 1))

    def _argument(self, op: int, start: int) -> tuple[int, int]:
        """Where the argument of an opcode that tells its end lies; behind it is the next one."""
        data = self._data
        if op in SIZED:
            size, start = start, start + SIZED[op]
            self.position = stop = start + int.from_bytes(data[size:start], "little")
            if stop > len(data):
                raise ValueError("a length beyond the end")
        else:
            stop = data.index(b"\n", start)
            if LINES[op] == 2:
                stop = data.index(b"\n", stop + 1)
            self.position = stop + 1
        return start, stop

    def _move(self, taken: int, is_made: bool) -> None:
        """Take values off the stack, those above the mark where `taken` is negative, and put one
        there of which nothing depends, where one `is_made`.
        """
        if taken < 0:
            self._pop_mark()
        elif taken:
            del self._stack[-taken:]
        if is_made:
            self._stack.append(None)

    def _value(self, op: int, start: int, stop: int) -> Any:
        """What an opcode makes of its argument alone."""
        if op in b"X\x8c\x8dUT":
            if stop - start <= _LONG and (text := _text(self._data[start:stop])) is not None:
                return text
            return Span(start, stop, op in b"X\x8c\x8d")
        if op in b"CB\x8e\x96":
            return Span(start, stop)
        raw = self._data[start:stop]
        if op in b"MJ\x8a\x8b":
            if len(raw) <= 8:
                return int.from_bytes(raw, "little", signed=op != 0x4D)
            return None  # no count of elements is as long
        if op in b"FP":  # FLOAT, PERSID
            return None
        if op == 0x56:  # UNICODE
            return raw.decode("raw-unicode-escape")
        if op == 0x53:  # STRING
            return codecs.escape_decode(raw[1:-1])[0].decode("utf-8", "backslashreplace")
        return int(raw.rstrip(b"L"))  # INT, LONG

    def _act(self, op: int, start: int, stop: int) -> None:
        stack = self._stack
        if op in _TUPLES:
            parts = stack[-_TUPLES[op] :]
            if len(parts) != _TUPLES[op]:
                raise ValueError("a tuple of more values than there are")
            stack[-len(parts) :] = [_flat(parts)]
        elif op == 0x52:  # REDUCE
            args = stack.pop()
            stack[-1] = self._called(stack[-1], args)
        elif op in _VALUES:
            stack.append(self._value(op, start, stop))
        elif op in _EFFECTS:
            self._move(*_EFFECTS[op])
        elif op == 0x74:  # TUPLE
            parts = self._pop_mark()
            self._stack.append(_flat(parts) if len(parts) <= _WIDE else None)
        elif op == 0x51:  # BINPERSID
            self._refer(stack.pop())
            stack.append(None)
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif op in b"ci":  # GLOBAL, INST
            made = _Name(self._data[start:stop].decode().replace("\n", ".", 1))
            if op == 0x69:
                made = self._called(made, tuple(self._pop_mark()))
            self._stack.append(made)
        elif op == 0x93:  # STACK_GLOBAL
            last, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module}.{last}"))
        elif op == 0x6F:  # OBJ
            cls, *given = self._pop_mark()
            self._stack.append(self._called(cls, tuple(given)))
        elif op == 0x70:  # PUT
            self._memo.put(int(self._data[start:stop]), stack[-1])
        elif op == 0x67:  # GET
            stack.append(self._memo.get(int(self._data[start:stop])))
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        elif op == 0x30:  # POP
            self._move(1 if stack else -1, False)
        else:
            raise ValueError(f"the opcode 0x{op:02x}")

    def _pop_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._marks.pop()
        return above

    def _called(self, func: Any, args: Any) -> Any:
        if type(func) is not _Name or type(args) is not tuple:
            return None
        if func in _PLAIN or (func in _FROM_TYPE and args and args[0] in _PLAIN):
            self.census.tensors += 1
        elif func == "torch.storage._load_from_bytes" and len(args) == 1 and type(args[0]) in _KEPT:
            self.census.streams.append(args[0].encode() if type(args[0]) is str else args[0])
        elif func == "_codecs.encode" and args:
            if type(args[0]) is str:
                return args[0].encode("latin-1", "replace")
            return args[0]
        return None

    def _refer(self, pid: Any) -> None:
        if type(pid) is tuple and len(pid) > 4 and pid[0] == "storage":
            key, numel = pid[2], pid[4]
            if type(key) is not str or type(numel) is not int:
                raise ValueError("a storage without a name")
            self.census.storages[key] = max(numel, self.census.storages.get(key, 0))
        elif type(pid) in (int, str):
            self.census.references.add(str(pid))


_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}  # TUPLE1, TUPLE2, TUPLE3
_VALUES = frozenset(b"X\x8c\x8dUTCB\x8e\x96MJ\x8a\x8bFPVSIL")
# Opcodes that lead to no name: how many values they take (-1: above the mark) and make
_EFFECTS = {
    # NONE, NEWTRUE, NEWFALSE, EMPTY_LIST, EMPTY_DICT, EMPTY_SET, BINFLOAT
    **dict.fromkeys(b"N\x88\x89]}\x8fG", (0, True)),
    **dict.fromkeys(b"\x80\x95", (0, False)),  # PROTO, FRAME
    **dict.fromkeys(b"ab", (1, False)),  # APPEND, BUILD
    ord("s"): (2, False),  # SETITEM
    0x81: (2, True),  # NEWOBJ
    0x92: (3, True),  # NEWOBJ_EX
    **dict.fromkeys(b"eu\x901", (-1, False)),  # APPENDS, SETITEMS, ADDITEMS, POP_MARK
    **dict.fromkeys(b"ld\x91", (-1, True)),  # LIST, DICT, FROZENSET
}


def _text(raw: bytes) -> str | None:
    """A text; None for a string of python 2 that is none."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
