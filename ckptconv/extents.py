"""Where pickles end, found by stepping from opcode to opcode: nothing is made of them.

Some containers put pickles in front of gigabytes of tensors without saying how long they are. The opcodes and the sizes of
their arguments are those of CPython's `pickletools`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from ckptconv.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.limits import LIMITS
from ckptconv.sources import Source

_WINDOW = 1 << 20
_STOP = 0x2E
_HINT = "the file is corrupt or cut off"
_RUN = re.compile(
    rb"(?:[(012NQR\]abdelostu)}\x81\x85-\x89\x8f-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jrj\x84]....|[G\x95].{8}"
    rb"|[FILPSVgp][^\n]*\n|[ci][^\n]*\n[^\n]*\n){0,1000}",
    re.DOTALL,
).match
"""Opcodes whose end does not depend on a length that they declare."""
_CUT = frozenset(b"Khq\x80\x82M\x83Jrj\x84G\x95FILPSVgpci")
"""Those of them that have an argument: where one stands that does not match, its argument is cut off."""
_SIZED = {
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcodes that declare the length of their argument, and the bytes that the length takes."""


def read_pickles(source: Source, start: int, count: int, *, window: int = _WINDOW) -> tuple[list[bytes], int]:
    """The bytes of each of the `count` pickles that lie back to back from `start` on, and the byte behind the last.

    Little more than the pickles is read: `window` bytes at first, then four times as much, up to `LIMITS.pickle_bytes`.
    Raises `MalformedCheckpoint` where they are cut off or are no pickles, `LimitExceeded` where they are too long.
    """
    left = source.size - start
    stream, at, ends = b"", 0, [0]
    while len(ends) <= count:
        at, needed = _step(stream, at)
        if not needed:
            ends.append(at)
            continue
        if needed > left:
            raise MalformedCheckpoint(
                f"ends in the middle of a pickle (near byte {start + at})",
                path=source.path,
                hint="the file is corrupt or cut off",
            )
        if needed > LIMITS.pickle_bytes:
            raise LimitExceeded(f"its pickles are longer than {LIMITS.pickle_bytes} bytes", path=source.path)
        stream = source.read(start, min(left, LIMITS.pickle_bytes, max(window, needed, 4 * len(stream))))
    return [stream[begin:end] for begin, end in pairwise(ends)], start + ends[-1]


def _step(stream: bytes, at: int) -> tuple[int, int]:
    """From the opcode at `at` to the end of its pickle.

    Returns the byte behind the end and 0; or the opcode that is cut off, and the least length of `stream` that could hold it.
    """
    while True:
        run = _RUN(stream, at)
        assert run is not None  # it may be empty
        begin, at = run.span()
        if at >= len(stream):
            return at, at + 1
        opcode = stream[at]
        if opcode == _STOP:
            return at + 1, 0
        if width := _SIZED.get(opcode):
            argument = at + 1 + width
            stop = argument + int.from_bytes(stream[at + 1 : argument], "little")
            if argument > len(stream) or stop > len(stream):
                return at, max(argument, stop)
            at = stop
        elif at == begin:
            if opcode in _CUT:
                return at, len(stream) + 1
            raise MalformedCheckpoint(f"the pickle holds the unknown opcode 0x{opcode:02x} (near byte {at})", hint=_HINT)
