"""Pickle streams followed opcode by opcode, for what they name; nothing is made, and what an
unpickler takes is never refused.

Where `reader` refuses a stream, this goes on: it answers what the program in a pickle, broken
or made to deceive, would have named by the time it breaks. The opcodes are those of CPython's
`pickletools`; where its C and its Python unpickler differ, the more tolerant one is followed, and
where they go on in different places, that is an alarm. A stream is read in windows, and of the
bytes that it holds only where they lie, so that one of any size takes little memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sized
from typing import Any

from ckptconv.io.source import Source
from ckptconv.pickles import byte_window
from ckptconv.pickles.byte_window import (
    LONGEST_NAME,
    Broken,
    ByteWindow,
    CutStream,
    Form,
    Held,
    text_of,
)
from ckptconv.pickles.opcodes import FIXED, LINES, SIZED, STOP
from ckptconv.pickles.traces import (
    ATTRIBUTES,
    BYTES_CLASSES,
    CALLERS,
    CHANGERS,
    ENCODE,
    NESTED_LOADERS,
    WATCHED,
    Alarm,
    CallResult,
    NamedGlobal,
    Trace,
    Use,
    rebuilds,
)
from ckptconv.support.limits import in_force
from ckptconv.support.settings import collector_paused


def trace_pickle(source: Source, start: int = 0) -> Trace:
    """Follow the pickle at byte `start` of `source` to its end, or to where it breaks."""
    tracer = _Tracer(source, start)
    try:
        with collector_paused():
            tracer.run()
    except CutStream:
        tracer.trace.broken, tracer.trace.cut = "is cut off", True
    except _TooMany as error:
        tracer.trace.broken, tracer.trace.stopped = str(error), True
    except Broken as error:
        tracer.trace.broken = str(error)
    except (IndexError, KeyError, ValueError, OverflowError):
        tracer.trace.broken = "takes what does not exist"
    tracer.trace.followed = tracer.followed
    return tracer.trace


def held_bytes(source: Source, held: Held) -> bytes:
    """What a held text means as bytes: its latin-1 form. Python 2 and the protocols up to 2 write
    bytes so. Raises `ValueError` where it has none.
    """
    raw = source.read(held.offset, held.nbytes)
    if held.form == "bytes":
        return raw
    return text_of(raw, held.form).encode("latin-1")


_AS_UTF8: dict[Form, Form] = {"bytes": "utf-8", "quoted": "quoted-utf-8"}


class _TooMany(Exception):
    """More values than the limit."""


# What a mark takes on a stack: an empty list, as much memory as so many values
_MARK = 8
# A value that does not matter here: a number, or a container that the stream itself makes
_OTHER: Any = object()
# An object of which nothing is known, not even that the stream made it
_STRANGE: Any = object()


# bytes of a pickle that calls something; what is shorter is not a stream to be looked into
_SHORTEST = 10
_MOST_ALARMS = 100  # of one stream; the first one decides


class _Tracer(ByteWindow):
    """The stack and the memo of one stream. They hold texts, tuples and globals as they are, `Held`
    for bytes, `CallResult` for what calls give, and `_OTHER` or `_STRANGE` for the rest.
    """

    def __init__(self, source: Source, start: int) -> None:
        super().__init__(source, start)
        self.trace = Trace()
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._under = 0  # values below the last mark, a mark being worth eight
        self._memo: dict[int, Any] = {}
        self._lines: dict[bytes, NamedGlobal] = {}  # globals by their two lines
        self._most_found = in_force().scanned_pickles
        # one for each global, for a stream may call one very often
        self._made: dict[NamedGlobal, CallResult] = {}
        # whether a function was named that may be called, and not handed on
        self._is_guarded = False

    def run(self) -> None:
        steps, most = _STEPS, in_force().scanned_values
        while self._at < self._source.size:
            index = self._at - self._base
            if index >= len(self._window):
                self._fetch(self._at)
                index = 0
            opcode = self._window[index]
            self._at += 1
            if opcode == STOP:
                self._stack.pop()
                if self._at < self._frame_end:
                    self.alarm(f"ends within its frame, {byte_window.ELSEWHERE}")
                self.trace.end = self._at
                return
            step = steps.get(opcode)
            if step is None:
                raise Broken(f"holds the unknown opcode 0x{opcode:02x} at byte {self._at - 1}")
            step(self)
            if len(self._stack) + self._under > most or len(self._memo) > most:
                advice = f"(--limit scanned_values={2 * most} looks further)"
                raise _TooMany(f"has more than {most} values side by side {advice}")
        raise CutStream

    # Steps, in the words of pickletools.

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def constant(self, held: Held) -> None:
        self.kept(held)
        self.push(held)

    def kept(self, held: Held | bytes) -> None:
        """Keep what may be a stream, for which it needs some bytes."""
        if (held.nbytes if isinstance(held, Held) else len(held)) >= _SHORTEST:
            self._refuse_many(self.trace.constants)
            self.trace.constants.append(held)

    def _refuse_many(self, kept: Sized) -> None:
        if len(kept) >= self._most_found:
            what = f"holds more than {self._most_found} texts or names"
            raise _TooMany(f"{what} (--limit scanned_pickles={2 * self._most_found} looks further)")

    def python2_text(self, held: Held) -> None:
        """A text of python 2, which may be bytes."""
        self.kept(held)
        self.push(self.short(held))

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

    def taken(self, count: int) -> list[Any]:
        """The last `count` values, which leave the stack."""
        if count > len(self._stack):
            raise Broken("takes more from its stack than there is")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def tuple_of(self, count: int) -> None:
        self.push(tuple(self.passed_on(self.taken(count))))

    def container(self) -> None:
        self.passed_on(self.to_mark())
        self.push(_OTHER)

    def add_marked(self) -> None:
        self.passed_on(self.to_mark())
        self._refuse_growing(self._stack[-1])

    def drop(self, count: int) -> None:
        """The last `count` values put into what is below them."""
        if count >= len(self._stack):
            raise Broken("takes more from its stack than there is")
        self.passed_on(self.taken(count))
        self._refuse_growing(self._stack[-1])

    def passed_on(self, values: list[Any]) -> list[Any]:
        """Values that go into others; what loads streams is called by pickles alone."""
        if self._is_guarded:
            for value in [value for value in values if type(value) is NamedGlobal]:
                if ".".join(value) in NESTED_LOADERS:
                    self.alarm(
                        "a function that loads streams is passed on, so it is unknown what it loads"
                    )
                if value in ATTRIBUTES:
                    self.use("handed on", value)
        return values

    def _refuse_growing(self, target: Any) -> None:
        if type(target) in (bytes, Held):
            self.alarm("bytes are changed after they are written, so they are unknown")
        elif target is not _OTHER:
            self._note_change(target, "items")

    def _note_change(self, target: Any, what: str) -> None:
        """What is changed must be the stream's own; of what a call gave, ``changed`` tells it."""
        if type(target) is CallResult:
            self.use("changed", target.func)
        elif type(target) is NamedGlobal:
            self.alarm(f"{what} of {target.module}.{target.name} itself are set")
        elif target is _STRANGE:
            self.alarm(f"{what} of an object are set that the pickle does not make", by_chance=True)

    def use(self, use: Use, name: NamedGlobal) -> None:
        self.trace.uses.setdefault((use, name), self._at)

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def name(self, module: Any, name: Any) -> Any:
        """A global by its names, as far as they are known."""
        if type(module) is str and type(name) is str:
            named = NamedGlobal(module, name)
            self._refuse_many(self.trace.names)
            self.trace.names.setdefault(named, self._at)
            self._is_guarded |= f"{module}.{name}" in NESTED_LOADERS or named in ATTRIBUTES
            return named
        if {type(module), type(name)} <= {str, Held}:
            self.alarm(f"a global is named in more than {LONGEST_NAME} bytes")
        else:
            what = "the name of a global is computed while the pickle runs, so it is unknown"
            self.alarm(what, by_chance=True)
        return _OTHER

    def alarm(self, reason: str, *, by_chance: bool = False) -> None:
        if len(self.trace.alarms) < _MOST_ALARMS:
            self.trace.alarms.append(Alarm(reason, self._at, by_chance))

    def name_of_lines(self) -> Any:
        held, held_name = self.line("utf-8"), self.line("utf-8")
        first = held.offset - self._base
        lines = self._window[first : self._at - self._base] if first >= 0 else b""
        named = self._lines.get(lines)
        if named is None:
            named = self.name(self.short(held), self.short(held_name))
            if lines and type(named) is NamedGlobal:
                self._lines[lines] = named
        return named

    def global_of_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.push(self.name(module, name))

    def reduce(self) -> None:
        args, func = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple:
            args = (_OTHER,)
        self.push(self.called(func, args))

    def instance(self) -> None:
        func = self.name_of_lines()
        self.push(self.called(func, tuple(self.passed_on(self.to_mark()))))

    def object(self) -> None:
        func, *args = self.to_mark()
        self.push(self.called(func, tuple(self.passed_on(args))))

    def new_object(self, count: int) -> None:
        """NEWOBJ, or NEWOBJ_EX (3), with keywords that are not known here."""
        func, args = self._stack[-count], self._stack[-count + 1]
        self.taken(count)
        if type(args) is not tuple or count != 2:
            args = (_OTHER,)
        self.push(self.called(func, args))

    def called(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What a call gives: bytes if it gives them, a global if its name is known, or a
        `CallResult`.
        """
        if type(func) is not NamedGlobal:
            return self._called_result(func)
        made = self._made.get(func)
        if made is None:
            path = f"{func.module}.{func.name}"
            if path in WATCHED or func in ATTRIBUTES:
                return self._watched(func, path, args)
            made = self._made[func] = CallResult(func)
        return made

    def _watched(self, func: NamedGlobal, path: str, args: tuple[Any, ...]) -> Any:
        """What a function gives whose arguments matter."""
        first = args[0] if args else b""
        is_text = type(first) in (str, Held)
        if path == ENCODE and is_text and args[1:] in (("latin1",), ("latin-1",)):
            return self.encoded(first)
        is_bytes = type(first) is bytes or (type(first) is Held and first.form == "bytes")
        if path in BYTES_CLASSES and len(args) < 2 and is_bytes:
            return first
        if path in NESTED_LOADERS and type(first) not in (bytes, str, Held):
            what = "is given bytes that are computed while the pickle runs, so they are unknown"
            self.alarm(f"{path} {what}")
        if func in ATTRIBUTES:
            return self._attribute(func, args)
        if path in CHANGERS and not rebuilds(first):
            self.alarm(f"{path} is made to call something that does not rebuild a tensor")
        if path in CALLERS:
            return self._called_by(first, changes=path in CHANGERS)
        return CallResult(func)

    def _called_result(self, func: Any) -> Any:
        """What a call of something else than a global gives."""
        if type(func) is CallResult:
            self.use("called", func.func)
        elif func is _STRANGE:
            self.alarm("an object is called that the pickle does not name", by_chance=True)
        else:
            return _OTHER
        return func

    def _called_by(self, func: Any, *, changes: bool) -> Any:
        """What a function gives that calls, or makes an object of, its first argument."""
        if type(func) is not NamedGlobal:
            return self._called_result(func)
        if changes:
            self.use("changed", func)
        return CallResult(func)

    def _attribute(self, func: NamedGlobal, args: tuple[Any, ...]) -> Any:
        """The attribute that is looked up by its name: a global, whose name has one more dot."""
        if len(args) != 2 or type(args[0]) is not NamedGlobal or type(args[1]) is not str:
            self.use("handed on", func)
            return CallResult(func)
        self.use("looked up", func)
        return self.name(args[0].module, f"{args[0].name}.{args[1]}")

    def encoded(self, text: Any) -> Held | bytes:
        """The latin-1 form of a text; python 2's may be UTF-8 too, and both are kept."""
        if type(text) is Held:
            if text.form in _AS_UTF8:
                self.kept(text._replace(form=_AS_UTF8[text.form]))
            self.kept(text)
            return text
        made = str(text).encode("latin-1")
        self.kept(made)
        if not made.isascii():
            with contextlib.suppress(UnicodeError):  # it is not UTF-8
                self.kept(made.decode().encode("latin-1"))
        return made

    def build(self) -> None:
        self.passed_on([self._stack.pop()])
        target = self._stack[-1]
        if target is not _OTHER:
            self._note_change(target, "attributes")

    def persistent(self) -> None:
        """What the loader gives for an id: a storage, or the class of a module in legacy files."""
        (pid,) = self.passed_on(self._stack[-1:])
        parts = pid if type(pid) is tuple else ()
        self._stack[-1] = _STRANGE
        if parts[:1] == ("storage",):
            self._stack[-1] = _OTHER
        elif parts[:1] == ("module",) and len(parts) > 1 and type(parts[1]) is NamedGlobal:
            self._stack[-1] = parts[1]

    def extension(self, code: int) -> None:
        what = f"a global is named by its number, {code}, in a registry of the process"
        self.alarm(f"{what}, so it is unknown", by_chance=True)
        self.push(_OTHER)

    def other(self, *_: Any) -> None:
        """A value that does not matter here, whatever its argument."""
        self.push(_OTHER)

    def text(self, held: Held) -> None:
        self.push(self.short(held))


# How arguments are written that are not bytes as they stand
_FORMS: dict[int, Form] = {
    **dict.fromkeys(b"X\x8c\x8d", "utf-8"),
    ord("V"): "raw-unicode-escape",
    ord("S"): "quoted",
}
_DIGITS = frozenset(b"gp")  # lines that are an index of the memo
# Opcodes of two lines, and FRAME: what is done for them takes their argument from the window
_LOOK_THEMSELVES = frozenset(b"ci\x95")
# What opcodes do to the stack and the memo, with their argument
_ACTS: dict[int, Callable[..., Any]] = {
    # numbers, NONE, NEWTRUE, NEWFALSE, NEXT_BUFFER and containers that are empty
    **dict.fromkeys(b"JKMGFIL\x8a\x8bN]}\x88\x89\x8f\x97", _Tracer.other),
    **dict.fromkeys(b"ld\x91", _Tracer.container),  # LIST, DICT, FROZENSET
    **dict.fromkeys(b"eu\x90", _Tracer.add_marked),  # APPENDS, SETITEMS, ADDITEMS
    **dict.fromkeys(b"TUS", _Tracer.python2_text),
    **dict.fromkeys(b"VX\x8c\x8d", _Tracer.text),
    **dict.fromkeys(b"BC\x8e\x96", _Tracer.constant),
    **dict.fromkeys(b"ghj", _Tracer.get),
    **dict.fromkeys(b"pqr", _Tracer.put),
    **dict.fromkeys(b"\x82\x83\x84", _Tracer.extension),
    **dict.fromkeys(b"\x80\x98", lambda *_: None),  # PROTO, READONLY_BUFFER
    ord(")"): lambda tracer: tracer.push(()),
    ord("("): _Tracer.mark,
    ord("0"): _Tracer.pop,
    ord("1"): _Tracer.to_mark,
    ord("2"): lambda tracer: tracer.push(tracer._stack[-1]),
    ord("P"): lambda tracer, _: tracer.push(_STRANGE),
    ord("Q"): _Tracer.persistent,
    ord("R"): _Tracer.reduce,
    ord("a"): lambda tracer: tracer.drop(1),
    ord("s"): lambda tracer: tracer.drop(2),
    ord("b"): _Tracer.build,
    ord("c"): lambda tracer: tracer.push(tracer.name_of_lines()),
    ord("i"): _Tracer.instance,
    ord("o"): _Tracer.object,
    ord("t"): lambda tracer: tracer.push(tuple(tracer.passed_on(tracer.to_mark()))),
    0x85: lambda tracer: tracer.tuple_of(1),
    0x86: lambda tracer: tracer.tuple_of(2),
    0x87: lambda tracer: tracer.tuple_of(3),
    0x94: lambda tracer: tracer.put(len(tracer._memo)),
    0x81: lambda tracer: tracer.new_object(2),
    0x92: lambda tracer: tracer.new_object(3),
    0x93: _Tracer.global_of_stack,
    0x95: _Tracer.frame,
}


def _step(opcode: int, act: Callable[..., Any]) -> Callable[[_Tracer], Any]:
    """What takes the argument of an opcode from the window, and does what the opcode does."""
    form = _FORMS.get(opcode, "bytes")
    if opcode in _DIGITS:
        return lambda tracer: act(tracer, tracer.digits())
    if opcode in _LOOK_THEMSELVES:
        return act
    if opcode in LINES:
        return lambda tracer: act(tracer, tracer.line(form))
    if opcode in SIZED:
        width = SIZED[opcode]
        return lambda tracer: act(tracer, tracer.pass_over(tracer.number(width), form))
    width = FIXED[opcode]
    if width:
        return lambda tracer: act(tracer, tracer.number(width))
    return act


_STEPS = {opcode: _step(opcode, act) for opcode, act in _ACTS.items()}
