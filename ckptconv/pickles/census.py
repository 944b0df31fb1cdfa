"""What a pickle names, counted opcode by opcode: its storages and its tensors.

A second pair of eyes beside `reader`, with which it shares nothing: no nodes, no reducers, no
shortcuts. Of a stream it keeps only what may lead to a name (short texts, globals, tuples of them),
so it finds storages that the reader has lost. It is made for streams that were read before, and
gives up where it does not follow. The opcodes are those of CPython's `pickletools`; storages and
rebuild functions those of torch (torch/serialization.py, torch/_utils.py).
"""

from __future__ import annotations

import codecs
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptconv.support.errors import MalformedCheckpoint

_UINT32 = struct.Struct("<I").unpack_from
_INT32 = struct.Struct("<i").unpack_from


class Span(NamedTuple):
    """Bytes of a stream that hold another one: from `start` to `stop`; `is_text` where they are the
    text of latin-1 bytes.
    """

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
    """Count what the pickle at the beginning of `stream` names; `MalformedCheckpoint` where it
    cannot be followed.
    """
    counter = _Counter(stream)
    try:
        counter.run()
    except (IndexError, KeyError, ValueError, struct.error) as error:
        what = f"counting what its pickle names stops near byte {counter.position}"
        raise MalformedCheckpoint(
            what, hint="please report this; convert it without --verify"
        ) from error
    return counter.census


def held_stream(stream: bytes, held: Span | bytes) -> bytes:
    """The bytes of a stream within a stream."""
    if not isinstance(held, Span):
        return held
    raw = stream[held.start : held.stop]
    return raw.decode("utf-8", "surrogatepass").encode("latin-1") if held.is_text else raw


class _Name(str):
    """The dotted name of a global."""

    __slots__ = ()


class _Memo(dict[int, Any]):
    """What was put and may lead to a name, by index; the others are only counted, for MEMOIZE puts
    at the count.
    """

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
            elif op == 0x2E:  # STOP
                return
            elif op in _CONSTANTS:
                self._stack.append(_CONSTANTS[op])
                self.position = at + 1
            elif op in _TUPLES:
                self.position = at + 1
                self._tuple(_TUPLES[op])
            elif op in _SIZED:
                self._sized(op, at + 1)
            elif op == 0x4D:  # BININT2
                self._stack.append(data[at + 1] | data[at + 2] << 8)
                self.position = at + 3
            elif op == 0x4A:  # BININT
                self._stack.append(_INT32(data, at + 1)[0])
                self.position = at + 5
            else:
                self._rare(op, at)

    def _rare(self, op: int, at: int) -> None:
        """An opcode that few tensors need."""
        if op == 0x47:  # BINFLOAT
            self._stack.append(None)
            self.position = at + 9
        elif op in _SKIPPED:
            self.position = at + _SKIPPED[op]
        elif op in _LINES:
            stop = self._data.index(b"\n", at)
            self.position = stop + 1
            self._line(op, self._data[at + 1 : stop])
        else:
            self.position = at + 1
            self._act(op)

    def _tuple(self, count: int) -> None:
        stack = self._stack
        parts = stack[-count:]
        if len(parts) != count:
            raise ValueError("a tuple of more values than there are")
        del stack[-count:]
        stack.append(_flat(parts))

    def _pop_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._marks.pop()
        return above

    def _sized(self, op: int, at: int) -> None:
        """A text, bytes or a long number behind its length."""
        start = at + _SIZED[op]
        stop = start + int.from_bytes(self._data[at:start], "little")
        if stop > len(self._data):
            raise ValueError("a length beyond the end")
        self.position = stop
        if op in _INTS:
            self._stack.append(
                int.from_bytes(self._data[start:stop], "little", signed=True)
                if stop - start <= 8
                else None
            )
        elif (
            op in _TEXTS
            and stop - start <= _LONG
            and (text := _text(self._data[start:stop])) is not None
        ):
            self._stack.append(text)
        else:
            self._stack.append(Span(start, stop, op in _UNICODE))

    def _line(self, op: int, text: bytes) -> None:
        """An opcode whose argument is a line of text, or two."""
        if op == 0x70:  # PUT
            self._memo.put(int(text), self._stack[-1])
        elif op == 0x67:  # GET
            self._stack.append(self._memo.get(int(text)))
        elif op in (0x63, 0x69):  # GLOBAL, INST
            stop = self._data.index(b"\n", self.position)
            name = _Name(f"{text.decode()}.{self._data[self.position : stop].decode()}")
            self.position = stop + 1
            self._stack.append(name if op == 0x63 else self._called(name, tuple(self._pop_mark())))
        elif op == 0x56:  # UNICODE
            self._stack.append(text.decode("raw-unicode-escape"))
        elif op == 0x53:  # STRING
            self._stack.append(
                codecs.escape_decode(text[1:-1])[0].decode("utf-8", "backslashreplace")
            )
        elif op in (0x49, 0x4C):  # INT, LONG
            self._stack.append(int(text.rstrip(b"L")))
        else:  # FLOAT, PERSID
            self._stack.append(None)

    def _act(self, op: int) -> None:
        """An opcode without an argument."""
        stack = self._stack
        if op == 0x52:  # REDUCE
            args = stack.pop()
            stack[-1] = self._called(stack[-1], args)
        elif op == 0x51:  # BINPERSID
            self._refer(stack.pop())
            stack.append(None)
        elif op == 0x74:  # TUPLE
            parts = self._pop_mark()
            self._stack.append(_flat(parts) if len(parts) <= _WIDE else None)
        elif op in _DROP_MARKED:
            self._pop_mark()
            if _DROP_MARKED[op]:
                self._stack.append(None)
        elif op in _DROP:
            del stack[-_DROP[op] :]
        elif op in (0x81, 0x92):  # NEWOBJ, NEWOBJ_EX
            del stack[-(op == 0x92) - 1 :]
            stack[-1] = None
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module}.{name}"))
        elif op == 0x6F:  # OBJ
            cls, *args = self._pop_mark()
            self._stack.append(self._called(cls, tuple(args)))
        elif op == 0x30:  # POP
            if stack:
                stack.pop()
            else:
                self._pop_mark()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        else:
            raise ValueError(f"the opcode 0x{op:02x}")

    def _called(self, func: Any, args: Any) -> Any:
        if type(func) is not _Name or type(args) is not tuple:
            return None
        if func in _PLAIN or (func in _FROM_TYPE and args and args[0] in _PLAIN):
            self.census.tensors += 1
        elif func == "torch.storage._load_from_bytes" and len(args) == 1 and type(args[0]) in _KEPT:
            self.census.streams.append(args[0].encode() if type(args[0]) is str else args[0])
        elif func == "_codecs.encode" and args:
            return args[0].encode("latin-1", "replace") if type(args[0]) is str else args[0]
        return None

    def _refer(self, pid: Any) -> None:
        if type(pid) is tuple and len(pid) > 4 and pid[0] == "storage":
            key, numel = pid[2], pid[4]
            if type(key) is not str or type(numel) is not int:
                raise ValueError("a storage without a name")
            self.census.storages[key] = max(numel, self.census.storages.get(key, 0))
        elif type(pid) in (int, str):
            self.census.references.add(str(pid))


_CONSTANTS: dict[int, Any] = dict.fromkeys(b"N\x88\x89]}\x8f") | {0x29: ()}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_DROP = {0x61: 1, 0x62: 1, 0x73: 2}  # APPEND, BUILD, SETITEM
_DROP_MARKED = {
    **dict.fromkeys(b"eu\x901", False),  # APPENDS, SETITEMS, ADDITEMS, POP_MARK
    **dict.fromkeys(b"ld\x91", True),  # LIST, DICT, FROZENSET
}
_UNICODE = frozenset(b"X\x8c\x8d")
_TEXTS = _UNICODE | frozenset(b"UT")
_INTS = frozenset(b"\x8a\x8b")
_SIZED = {
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcodes that declare the length of their argument, and the bytes that the length takes."""
_LINES = frozenset(b"FILPSVgpci")
_SKIPPED = {0x80: 2, 0x95: 9}  # PROTO, FRAME, with their arguments


def _text(raw: bytes) -> str | None:
    """A text; None for a string of python 2 that is none."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
