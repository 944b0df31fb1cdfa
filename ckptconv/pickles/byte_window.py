"""A pickle stream read through a window: the arguments of opcodes, and where a frame ends.

A stream is read in windows, and of the bytes that it holds only where they lie, so that one of any
size takes little memory.
"""

from __future__ import annotations

import codecs
from typing import Any, Literal, TypeAlias

from ckptconv.io.source import CHUNK, Source
from ckptconv.support.records import NamedTuple

Form: TypeAlias = Literal["bytes", "utf-8", "raw-unicode-escape", "quoted", "quoted-utf-8"]


class Held(NamedTuple):
    """Bytes or a long text that a stream holds: first byte, length, and what they stand for."""

    offset: int
    nbytes: int
    form: Form = "bytes"


_QUOTED: dict[Form, str] = {"quoted": "latin-1", "quoted-utf-8": "utf-8"}


def text_of(raw: bytes, form: Form) -> str:
    """What bytes of a stream mean as a text."""
    if form == "bytes":
        return raw.decode("latin-1")
    if form in _QUOTED:
        return codecs.escape_decode(raw.strip()[1:-1])[0].decode(_QUOTED[form])
    return raw.decode(form, "surrogatepass" if form == "utf-8" else "strict")


class CutStream(Exception):
    """The stream ends within an opcode, or before its STOP."""


class Broken(Exception):
    """An opcode that no unpickler knows."""


ELSEWHERE = "after which unpicklers continue at different places"
# How many bytes are read first; most of what is looked at is not a pickle and breaks in them
_FIRST_WINDOW = 512
LONGEST_NAME = 4096
"""Of longer texts only the place is kept: they are arrays, in python 2 and protocols up to 2."""
_LONGEST_NUMBER = 1 << 20  # bytes of a line of digits and of the blanks around them


class ByteWindow:
    """The bytes of `source` from `start` on, taken as the arguments of opcodes. What unpicklers
    understand in different ways is an `alarm`, which a subclass takes.
    """

    def __init__(self, source: Source, start: int) -> None:
        self._source, self._start, self._at = source, start, start
        self._window, self._base, self._width = b"", start, _FIRST_WINDOW
        self._passed = 0  # bytes of constants and texts that were not read
        # bytes behind the last opcode in which the end of a line was looked for in vain
        self._searched = 0
        self._frame_end = 0

    def alarm(self, reason: str, *, by_chance: bool = False) -> None:
        """Something that no writer of checkpoints does."""
        raise NotImplementedError

    @property
    def followed(self) -> int:
        """How many bytes were looked at."""
        return min(self._at, self._source.size) - self._start - self._passed + self._searched

    def _fetch(self, at: int) -> None:
        """Read a window, which grows the further the stream is followed, from byte `at` on."""
        self._window = self._source.read(at, min(self._width, self._source.size - at))
        self._base, self._width = at, min(2 * self._width, CHUNK)

    def pass_over(self, count: int, form: Form = "bytes") -> Held:
        """The next `count` bytes, unread."""
        start = self._at
        self._at += count
        if self._frame_end:
            self._refuse_crossing(start)
        if self._at > self._source.size:
            raise CutStream
        if count > LONGEST_NAME:
            self._passed += count - LONGEST_NAME
        return Held(start, count, form)

    def take(self, count: int) -> bytes:
        """The next `count` bytes, which are few."""
        start = self._at - self._base
        if start + count > len(self._window) or self._frame_end:
            held = self.pass_over(count)
            if start + count > len(self._window):
                self._width = max(count, self._width)
                self._fetch(held.offset)
                start = 0
        else:
            self._at += count
        return self._window[start : start + count]

    def _refuse_crossing(self, start: int) -> None:
        """Alarm about an argument that leaves its FRAME. Some unpicklers go on behind the argument,
        others behind the FRAME (cpython gh-154848).
        """
        if start < self._frame_end < self._at:
            self.alarm(f"an argument crosses the end of its frame, {ELSEWHERE}")
            self._frame_end = 0

    def frame(self) -> None:
        """A frame; one longer than the source does not count for who goes on nevertheless."""
        end = self.number(8) + self._at
        if self._at < self._frame_end:
            self.alarm(f"a frame begins within another, {ELSEWHERE}")
        self._frame_end = end if end <= self._source.size else 0

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self, form: Form = "bytes") -> Held:
        """The bytes up to the next newline, which may be many."""
        start = self._at
        index = self._window.find(b"\n", start - self._base)
        if index < 0 and start != self._base:
            self._fetch(start)
            index = self._window.find(b"\n")
        behind = self._base + len(self._window)
        end = self._base + index if index >= 0 else self._next_newline(behind)
        self._at = end + 1
        self._refuse_crossing(start)
        return Held(start, end - start, form)

    def _next_newline(self, at: int) -> int:
        """The first newline from byte `at` on, behind the window."""
        begun = at
        while at < self._source.size:
            part = self._source.read(at, min(CHUNK, self._source.size - at))
            index = part.find(b"\n")
            if index >= 0:
                return at + index
            at += len(part)
        self._searched = at - begun
        raise CutStream

    def short(self, held: Held) -> Any:
        """The text at a place just passed; the place itself, where it is longer than a name."""
        if held.nbytes > LONGEST_NAME:
            return held
        index = held.offset - self._base
        is_near = 0 <= index <= len(self._window) - held.nbytes
        raw = self._window[index : index + held.nbytes] if is_near else self._source.read(*held[:2])
        return text_of(raw, held.form)

    def digits(self) -> int:
        """A number in a line, which unpicklers written in C read up to a NUL."""
        line = self.line()
        if line.nbytes > _LONGEST_NUMBER:
            self.alarm(f"a number is written in more than {_LONGEST_NUMBER} bytes")
            raise Broken("has a number that was not read")
        return int(self._source.read(line.offset, line.nbytes).split(b"\0", 1)[0])
