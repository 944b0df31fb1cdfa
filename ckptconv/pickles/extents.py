"""Where pickles end, found by stepping from opcode to opcode: nothing is made of them.

Some containers put pickles in front of gigabytes of tensors without saying how long they are. The
opcodes and the sizes of their arguments are those of CPython's `pickletools`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from ckptconv.io.source import Source
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import in_force

_WINDOW = 1 << 20
_FIRST_WINDOW = 1 << 16  # the pickles of most checkpoints are no longer
_STOP = 0x2E
_HINT = "the file is damaged or cut off"
_RUN = re.compile(
    rb"(?:[(012NQR\]abdelostu)}\x81\x85-\x89\x8f-\x94\x97\x98]{1,1000}|[Khq\x80\x82].|[M\x83]..|[Jrj\x84]....|[G\x95].{8}"
    rb"|[FILPSVgp][^\n]*\n|[ci][^\n]*\n[^\n]*\n){0,1000}",
    re.DOTALL,
).match
"""Opcodes whose end does not depend on a length that they declare."""
_CUT = frozenset(b"Khq\x80\x82M\x83Jrj\x84G\x95FILPSVgpci")
"""Those of them that have an argument: where one stands that does not match, its argument is cut
off.
"""
_SIZED = {
    **dict.fromkeys(b"U\x8cC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcodes that declare the length of their argument, and the bytes that the length takes."""


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
            raise MalformedCheckpoint(
                f"ends in the middle of a pickle ({where})", path=source.path, hint=_HINT
            )
        if max(at - start, len(seen)) > most:
            what = f"its pickles are longer than {most} bytes"
            raise LimitExceeded(what, limit="pickle_bytes", allowed=most, path=source.path)
        if ended:
            ends.append(at)
            continue
        # an argument may be longer than the window
        size = 4 * len(seen) if seen and at == base else ahead
        ahead = min(window, 4 * ahead)
        seen, base = source.read(at, min(size, source.size - at)), at
    return ends


def _step(seen: bytes, at: int) -> tuple[int, bool]:
    """From the opcode at `at` to the byte behind its pickle's end, and True.

    False where `seen` ends before: then to the opcode that is cut off in it, or to the one behind
    what is in it.
    """
    while at < len(seen):
        run = _RUN(seen, at)
        assert run is not None  # it may be empty
        begin, at = run.span()
        if at == len(seen):
            break
        opcode = seen[at]
        if opcode == _STOP:
            return at + 1, True
        if width := _SIZED.get(opcode):
            argument = at + 1 + width
            if argument > len(seen):
                break
            at = argument + int.from_bytes(seen[at + 1 : argument], "little")
        elif at == begin:
            if opcode in _CUT:
                break
            raise MalformedCheckpoint(
                f"the pickle holds the unknown opcode 0x{opcode:02x}", hint=_HINT
            )
    return at, False
