"""Pickle streams followed opcode by opcode, for what they name; nothing is made, and what an unpickler takes is never refused.

Where `unpickling` refuses a stream, this goes on: it answers what the program in a pickle, broken or made to deceive,
would have named by the time it breaks. The opcodes are those of CPython's `pickletools`; where its C and its Python
unpickler differ, the more tolerant one is followed.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptconv.bounds import in_force


class Named(NamedTuple):
    """A global that a stream names, `module` and `name` as they stand in it."""

    module: str
    name: str


class Alarm(NamedTuple):
    """Something in a stream that no writer of checkpoints does: `reason`, and the byte where."""

    reason: str
    at: int


@dataclass(slots=True)
class Trace:
    """What a stream says: the globals that it names (and the byte where first), bytes in it, and what is odd about it.

    `end` is the byte behind its STOP; where it has none, `broken` says why, `cut` is True where the bytes given just ended,
    and `stopped` where a limit was met. `reached` is how far it was followed.
    """

    names: dict[Named, int] = field(default_factory=dict)
    constants: list[bytes] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    end: int = 0
    reached: int = 0
    broken: str | None = None
    cut: bool = False
    stopped: bool = False


def trace_pickle(stream: bytes, start: int = 0) -> Trace:
    """Follow the pickle at byte `start` of `stream` to its end, or to where it breaks."""
    tracer = _Tracer(stream, start)
    try:
        tracer.run()
    except _Cut:
        tracer.trace.broken, tracer.trace.cut = "is cut off", True
    except _TooMany as error:
        tracer.trace.broken, tracer.trace.stopped = str(error), True
    except (_Broken, IndexError, KeyError, ValueError, UnicodeError, OverflowError) as error:
        tracer.trace.broken = str(error) if type(error) is _Broken else "takes what is not there"
    tracer.trace.reached = tracer.reached
    return tracer.trace


class _Cut(Exception):
    """The stream ends within an opcode, or before its STOP."""


class _TooMany(Exception):
    """More values than the limit."""


class _Broken(Exception):
    """An opcode that no unpickler knows."""


_MARK = 8
"""What a mark takes on a stack: an empty list, as much memory as so many values."""
_OTHER: Any = object()
"""A value that does not matter here: a number, a container, the result of a call."""


class _Tracer:
    """The stack and the memo of one stream, with texts, bytes, tuples and globals as they are, and `_OTHER` for the rest."""

    def __init__(self, stream: bytes, start: int) -> None:
        self.trace = Trace()
        self._stream, self._at = stream, start
        self._frame_end = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._under = 0  # values below the last mark, a mark being worth eight
        self._memo: dict[int, Any] = {}

    def run(self) -> None:
        stream, steps = self._stream, _STEPS
        size, most = len(stream), in_force().scanned_values
        while self._at < size:
            opcode = stream[self._at]
            self._at += 1
            if opcode == 0x2E:  # STOP
                self._stack.pop()
                self.trace.end = self._at
                return
            if (step := steps.get(opcode)) is None:
                raise _Broken(f"holds the unknown opcode 0x{opcode:02x} at byte {self._at - 1}")
            step(self)
            if len(self._stack) + self._under > most or len(self._memo) > most:
                raise _TooMany(f"has more than {most} values side by side (--limit scanned_values={2 * most} looks further)")
        raise _Cut

    @property
    def reached(self) -> int:
        """The byte behind the last opcode that was followed."""
        return min(self._at, len(self._stream))

    # Arguments of opcodes.

    def take(self, count: int) -> bytes:
        self._at += count
        self._refuse_crossing(self._at - count)
        if self._at > len(self._stream):
            raise _Cut
        return self._stream[self._at - count : self._at]

    def _refuse_crossing(self, start: int) -> None:
        """Some unpicklers go on behind an argument that leaves its FRAME, others behind the FRAME (cpython gh-154848)."""
        if start < self._frame_end < self._at:
            self.alarm("an argument crosses the end of its frame, behind which unpicklers go on in different places")
            self._frame_end = 0

    def frame(self) -> None:
        self._frame_end = self.number(8) + self._at

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        end = self._stream.find(b"\n", self._at)
        if end < 0:
            raise _Cut
        start, text = self._at, self._stream[self._at : end]
        self._at = end + 1
        self._refuse_crossing(start)
        return text

    # Steps, in the words of pickletools.

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def constant(self, value: bytes) -> None:
        self.trace.constants.append(value)
        self.push(value)

    def python2_text(self, raw: bytes) -> None:
        self.trace.constants.append(raw)
        self.push(raw.decode("latin-1"))

    def quoted(self) -> None:
        self.python2_text(codecs.escape_decode(self.line().strip()[1:-1])[0])

    def mark(self) -> None:
        self._under += len(self._stack) + _MARK
        self._marks.append(self._stack)
        self._stack = []

    def to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        self._under -= len(self._stack) + _MARK
        return items

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.to_mark()

    def replace(self, count: int, value: Any) -> None:
        """The last `count` values replaced by one."""
        if count > len(self._stack):
            raise _Broken("takes more from its stack than is there")
        if count:
            del self._stack[-count:]
        self.push(value)

    def tuple_of(self, count: int) -> None:
        if count > len(self._stack):
            raise _Broken("takes more from its stack than is there")
        self.replace(count, tuple(self._stack[-count:]))

    def container(self) -> None:
        self.to_mark()
        self.push(_OTHER)

    def mark_tuple(self) -> None:
        self.push(tuple(self.to_mark()))

    def add_marked(self) -> None:
        self.to_mark()
        self._stack[-1]

    def drop(self, count: int) -> None:
        """The last `count` values put into what is below them."""
        if count >= len(self._stack):
            raise _Broken("takes more from its stack than is there")
        del self._stack[-count:]

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def name(self, module: str, name: str) -> Named:
        found = Named(module, name)
        self.trace.names.setdefault(found, self._at)
        return found

    def alarm(self, reason: str) -> None:
        self.trace.alarms.append(Alarm(reason, self._at))

    def global_of_lines(self) -> None:
        module = self.line()
        self.push(self.name(module.decode(), self.line().decode()))

    def global_of_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is str and type(module) is str:
            self.push(self.name(module, name))
            return
        self.alarm("the name of a global is computed while the pickle runs, so it cannot be known")
        self.push(_OTHER)

    def reduce(self) -> None:
        args, func = self._stack.pop(), self._stack.pop()
        self.push(self.called(func, args if type(args) is tuple else (_OTHER,)))

    def instance(self) -> None:
        module = self.line()
        func = self.name(module.decode(), self.line().decode())
        self.push(self.called(func, tuple(self.to_mark())))

    def object(self) -> None:
        func, *args = self.to_mark()
        self.push(self.called(func, tuple(args)))

    def new_object(self, count: int) -> None:
        func, args = self._stack[-count], self._stack[-count + 1]
        self.replace(count, self.called(func, args if type(args) is tuple else (_OTHER,)))

    def called(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What a call gives, where it is bytes that matter."""
        if type(func) is not Named:
            return _OTHER
        path = f"{func.module}.{func.name}"
        first = args[0] if args else b""
        if path == "_codecs.encode" and type(first) is str and args[1:] in (("latin1",), ("latin-1",)):
            made = first.encode("latin-1")
            self.trace.constants.append(made)
            return made
        if path in _BYTES_CLASSES and len(args) < 2 and type(first) is bytes:
            return first
        if path in NESTED_LOADERS and type(first) not in (bytes, str):
            self.alarm(f"{path} is given bytes that are computed while the pickle runs, so they cannot be known")
        return _OTHER

    def build(self) -> None:
        self._stack.pop()
        if type(target := self._stack[-1]) is Named:
            self.alarm(f"attributes of {target.module}.{target.name} itself are set")

    def extension(self, width: int) -> None:
        code = self.number(width)
        self.alarm(f"a global is named by its number, {code}, in a registry of the process, so it cannot be known")
        self.push(_OTHER)


NESTED_LOADERS = frozenset(("torch.storage._load_from_bytes",))
"""Functions of checkpoints that load a stream within the stream."""
_BYTES_CLASSES = frozenset(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray"))

_Step = Callable[[_Tracer], Any]


def _other(width: int) -> _Step:
    return lambda tracer: tracer.push(_OTHER) if tracer.take(width) is not None else None


def _line_of(act: Callable[[_Tracer, bytes], Any]) -> _Step:
    return lambda tracer: act(tracer, tracer.line())


def _sized(width: int, act: Callable[[_Tracer, bytes], Any]) -> _Step:
    return lambda tracer: act(tracer, tracer.take(tracer.number(width)))


def _text(tracer: _Tracer, raw: bytes) -> None:
    tracer.push(raw.decode("utf-8", "surrogatepass"))


_STEPS: dict[int, _Step] = {
    **dict.fromkeys(b"N]}\x88\x89\x8f\x97", _other(0)),  # NONE, NEWTRUE, NEWFALSE, NEXT_BUFFER, empty ones
    **dict.fromkeys(b"FIL", _line_of(lambda tracer, _: tracer.push(_OTHER))),
    **dict.fromkeys(b"ld\x91", _Tracer.container),  # LIST, DICT, FROZENSET
    **dict.fromkeys(b"eu\x90", _Tracer.add_marked),  # APPENDS, SETITEMS, ADDITEMS
    **dict.fromkeys(b"\x8a", _sized(1, lambda tracer, _: tracer.push(_OTHER))),  # LONG1
    **dict.fromkeys(b"\x8b", _sized(4, lambda tracer, _: tracer.push(_OTHER))),  # LONG4
    ord("J"): _other(4),
    ord("K"): _other(1),
    ord("M"): _other(2),
    ord("G"): _other(8),
    ord(")"): lambda tracer: tracer.push(()),
    ord("("): _Tracer.mark,
    ord("0"): _Tracer.pop,
    ord("1"): _Tracer.to_mark,
    ord("2"): lambda tracer: tracer.push(tracer._stack[-1]),
    ord("P"): _line_of(lambda tracer, _: tracer.push(_OTHER)),
    ord("Q"): lambda tracer: tracer.replace(1, _OTHER),
    ord("R"): _Tracer.reduce,
    ord("S"): _Tracer.quoted,
    ord("T"): _sized(4, _Tracer.python2_text),
    ord("U"): _sized(1, _Tracer.python2_text),
    ord("V"): _line_of(lambda tracer, raw: tracer.push(raw.decode("raw-unicode-escape"))),
    ord("X"): _sized(4, _text),
    0x8C: _sized(1, _text),
    0x8D: _sized(8, _text),
    ord("B"): _sized(4, _Tracer.constant),
    ord("C"): _sized(1, _Tracer.constant),
    0x8E: _sized(8, _Tracer.constant),
    0x96: _sized(8, _Tracer.constant),
    ord("a"): lambda tracer: tracer.drop(1),
    ord("s"): lambda tracer: tracer.drop(2),
    ord("b"): _Tracer.build,
    ord("c"): _Tracer.global_of_lines,
    ord("i"): _Tracer.instance,
    ord("o"): _Tracer.object,
    ord("t"): _Tracer.mark_tuple,
    0x85: lambda tracer: tracer.tuple_of(1),
    0x86: lambda tracer: tracer.tuple_of(2),
    0x87: lambda tracer: tracer.tuple_of(3),
    ord("g"): _line_of(lambda tracer, raw: tracer.get(int(raw))),
    ord("h"): lambda tracer: tracer.get(tracer.number(1)),
    ord("j"): lambda tracer: tracer.get(tracer.number(4)),
    ord("p"): _line_of(lambda tracer, raw: tracer.put(int(raw))),
    ord("q"): lambda tracer: tracer.put(tracer.number(1)),
    ord("r"): lambda tracer: tracer.put(tracer.number(4)),
    0x94: lambda tracer: tracer.put(len(tracer._memo)),
    0x80: lambda tracer: tracer.take(1),
    0x81: lambda tracer: tracer.new_object(2),
    0x92: lambda tracer: tracer.new_object(3),
    0x82: lambda tracer: tracer.extension(1),
    0x83: lambda tracer: tracer.extension(2),
    0x84: lambda tracer: tracer.extension(4),
    0x93: _Tracer.global_of_stack,
    0x95: _Tracer.frame,
    0x98: lambda tracer: None,
}
