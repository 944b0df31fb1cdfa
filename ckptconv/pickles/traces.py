"""What a pickle stream says, as `tracer` follows it: names, bytes, and what is odd about it; and
the functions in checkpoints whose arguments matter for that.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ckptconv.pickles.nodes import Global
from ckptconv.support.records import NamedTuple, dataclass

if TYPE_CHECKING:
    from ckptconv.pickles.byte_window import Held


class NamedGlobal(NamedTuple):
    """A global that a stream names, `module` and `name` as they stand in it."""

    module: str
    name: str


class CallResult(NamedTuple):
    """What a call of a global gives, and what a call of that gives in turn."""

    func: NamedGlobal


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

    names: dict[NamedGlobal, int] = field(default_factory=dict)
    constants: list[Held | bytes] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    uses: dict[tuple[Use, NamedGlobal], int] = field(default_factory=dict)
    end: int = 0
    followed: int = 0
    broken: str | None = None
    cut: bool = False
    stopped: bool = False


# ---------------------------------------------------------------------------- functions that matter


def rebuilds(func: Any) -> bool:
    """Whether a global rebuilds a tensor itself, given nothing else to call (torch._utils)."""
    if not isinstance(func, (NamedGlobal, Global)) or f"{func.module}.{func.name}" in CHANGERS:
        return False
    return func.name.rpartition(".")[2].startswith("_rebuild")


NESTED_LOADERS = frozenset(("torch.storage._load_from_bytes",))
"""Functions of checkpoints that load a stream within the stream."""
ATTRIBUTES = frozenset(NamedGlobal(module, "getattr") for module in ("builtins", "__builtin__"))
"""What protocols up to 3 name methods by: a call with a global and a text is another name."""


def _named(modules: str, names: str) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module in modules.split() for name in names.split())


CHANGERS = _named("torch._tensor torch.tensor", "_rebuild_from_type _rebuild_from_type_v2")
"""Functions of checkpoints that call their first argument and set attributes of what it gives."""
CALLERS = CHANGERS | _named("copyreg copy_reg", "_reconstructor __newobj__ __newobj_ex__")
"""Functions of checkpoints whose first argument is called, or is the class of what they make."""
BYTES_CLASSES = _named("builtins __builtin__", "bytes bytearray")
ENCODE = "_codecs.encode"
WATCHED = CALLERS | BYTES_CLASSES | NESTED_LOADERS | {ENCODE}
"""Functions of which it matters what they are given."""
