"""What a pickle stream says, as `tracer` follows it: names, bytes, and what is odd about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ckptconv.pickles.byte_window import (
    Held,
)


class Named(NamedTuple):
    """A global that a stream names, `module` and `name` as they stand in it."""

    module: str
    name: str


class Made(NamedTuple):
    """What a call of a global gives, and what a call of that gives in turn."""

    func: Named


class Alarm(NamedTuple):
    """Something in a stream that no writer of checkpoints does: `reason`, and the byte where.

    One that is `by_chance` stands in one of ten thousand small arrays too, when they are read as
    pickles.
    """

    reason: str
    at: int
    by_chance: bool = False


Use: TypeAlias = Literal["changed", "called", "looked up", "handed on"]


@dataclass(slots=True)
class Trace:
    """What a stream says: the globals that it names, bytes in it, and what is odd about it.

    `names` has the byte where each global is named first.

    `uses` are what was done with globals, and the byte where first: what a call gave was
    ``changed``, by items or a state, or ``called``; a function of attributes ``looked up`` what is
    among the `names`, or was ``handed on``. Bytes are numbered as those of the source are.
    `constants` are what may be a stream itself, or where it lies, for `held_bytes`. `end` is the
    byte behind its STOP; where it has none, `broken` says why, `cut` is True where the source just
    ended, and `stopped` where a limit was met. `followed` counts the bytes that were looked at.
    """

    names: dict[Named, int] = field(default_factory=dict)
    constants: list[Held | bytes] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    uses: dict[tuple[Use, Named], int] = field(default_factory=dict)
    end: int = 0
    followed: int = 0
    broken: str | None = None
    cut: bool = False
    stopped: bool = False
