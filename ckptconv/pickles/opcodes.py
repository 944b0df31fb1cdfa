"""The opcodes of pickles with their arguments; and where pickles end, found by these alone.

One table for all who follow a stream: `tracer`, `census`, the ends of pickles, what is rare in
`reader` (its loop has the rest written out, for speed). What opcodes do, each says for itself:
`census` is to see what the reader misses.
Source: CPython's `pickletools`, protocols 0 to 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

from ckptconv.io.source import Source
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import in_force

STOP = 0x2E
FIXED = {
    **dict.fromkeys(b"(012NQR]abdelostu)}\x81\x85\x86\x87\x88\x89", 0),
    **dict.fromkeys(b"\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
    **dict.fromkeys(b"Khq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jrj\x84", 4),
    **dict.fromkeys(b"G\x95", 8),
}
"""Opcodes whose argument takes always as many bytes; STOP is none of them."""
LINES = {**dict.fromkeys(b"FILPSVgp", 1), **dict.fromkeys(b"ci", 2)}
"""Opcodes whose argument is as many lines of text."""
SIZED = {
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcodes that declare the length of their argument, and the bytes that the length takes."""


# ------------------------------------------------------------------------------- runs of integers

INTEGER = rb"(?:K.|M..|J....)"
"""The pattern of an integer as torch writes it: BININT1, BININT2 or BININT."""
LONG_INTEGER = rb"(?:K.|M..|J....|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}))"
"""The same, or LONG1 of 5 to 7 bytes: no size or place in a file is longer."""


def tuple_of(integer: bytes) -> bytes:
    """The pattern of a tuple, not an empty one, of integers that have the pattern `integer`."""
    return rb"(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,}t)" % (integer, integer, integer, integer)


def integer_of(raw: bytes) -> int:
    """The number of a BININT1, BININT2, BININT or LONG1 opcode."""
    kind = raw[0]
    if kind == _BININT1:
        return raw[1]
    return int.from_bytes(raw[2 if kind == _LONG1 else 1 :], "little", signed=kind != _BININT2)


def integers_of(raw: bytes) -> tuple[int, ...]:
    """The tuple that such opcodes make, with the MARK before them and the TUPLE behind them."""
    values, at = [], int(raw[0] == _MARK)
    while at < len(raw) - 1:
        width = 2 + raw[at + 1] if raw[at] == _LONG1 else 1 + FIXED[raw[at]]
        values.append(integer_of(raw[at : at + width]))
        at += width
    return tuple(values)


_MARK, _BININT1, _BININT2, _LONG1 = b"(KM\x8a"


# ---------------------------------------------------------------------------------- ends of pickles

# Some containers put pickles in front of gigabytes of tensors without saying how long they are.

_WINDOW = 1 << 20  # bytes that are read at once
_FIRST_WINDOW = 1 << 16  # the pickles of most checkpoints are no longer
_HINT = "the file is damaged or cut off"
# Opcodes in a run that have an argument: where one stands that does not match, it is cut off
_CUT = {opcode for opcode, width in FIXED.items() if width} | LINES.keys()


def _patterns() -> Iterator[bytes]:
    for width in sorted(set(FIXED.values())):
        opcodes = re.escape(bytes(opcode for opcode in FIXED if FIXED[opcode] == width))
        yield b"[%b]%b" % (opcodes, b"." * width or b"{1,1000}")
    for count in (1, 2):
        opcodes = re.escape(bytes(opcode for opcode in LINES if LINES[opcode] == count))
        yield b"[%b]%b" % (opcodes, rb"[^\n]*\n" * count)


@cache
def _run() -> Callable[[bytes, int], re.Match[bytes] | None]:
    """What matches opcodes whose end does not depend on a length that they declare."""
    return re.compile(b"(?:%b){0,1000}" % b"|".join(_patterns()), re.DOTALL).match


def read_pickles(
    source: Source, start: int, count: int, *, window: int = _WINDOW
) -> tuple[list[bytes], int]:
    """The bytes of each of the `count` pickles that lie back to back from `start` on, and the byte
    behind the last.

    Their ends are looked for through a window of `window` bytes, so that nothing else is held in
    memory. Raises `MalformedCheckpoint` where they are cut off or are not pickles, `LimitExceeded`
    beyond the limit `pickle_bytes`.
    """
    ends = _ends(source, start, count, window)
    return [source.read(begin, end - begin) for begin, end in pairwise([start, *ends])], ends[-1]


def _ends(source: Source, start: int, count: int, window: int) -> list[int]:
    """The byte behind each of `count` pickles."""
    ends: list[int] = []
    most = in_force().pickle_bytes
    # the bytes of the source from `base` on; the opcode that comes next; the bytes read at a time
    seen, base, at = b"", start, start
    ahead = min(window, _FIRST_WINDOW)
    while len(ends) < count:
        stepped, ended = _step(seen, at - base)
        at = base + stepped
        if not ended and (
            at >= source.size or (seen and at == base and base + len(seen) == source.size)
        ):
            where = f"near byte {at}" if at <= source.size else "an argument reaches beyond the end"
            what = f"ends in the middle of a pickle ({where})"
            raise MalformedCheckpoint(what, path=source.path, hint=_HINT)
        if max(at - start, len(seen)) > most:
            what = f"its pickles are longer than {most} bytes"
            raise LimitExceeded(what, limit="pickle_bytes", allowed=most, path=source.path)
        if ended:
            ends.append(at)
            continue
        size = ahead
        if seen and at == base:  # an argument may be longer than the window
            size = 4 * len(seen)
        ahead = min(window, 4 * ahead)
        seen, base = source.read(at, min(size, source.size - at)), at
    return ends


def _step(seen: bytes, at: int) -> tuple[int, bool]:
    """From the opcode at `at` to the byte behind its pickle's end, and True. False where `seen`
    ends before: then to the opcode that is cut off in it, or to the one behind what is in it.
    """
    run_from = _run()
    while at < len(seen):
        run = run_from(seen, at)
        assert run is not None  # it may be empty
        begin, at = run.span()
        if at == len(seen):
            break
        opcode = seen[at]
        if opcode == STOP:
            return at + 1, True
        width = SIZED.get(opcode)
        if width:
            argument = at + 1 + width
            if argument > len(seen):
                break
            at = argument + int.from_bytes(seen[at + 1 : argument], "little")
        elif at == begin:
            if opcode in _CUT:
                break
            what = f"the pickle holds the unknown opcode 0x{opcode:02x}"
            raise MalformedCheckpoint(what, hint=_HINT)
    return at, False
