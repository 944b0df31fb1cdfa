"""Plain forms of what training scripts keep beside tensors: configurations, dates, histories,
buffers of bytes, names of code.

`plain` has the objects whose plain form is all of them; here something of the object is
left out, and `HOW` says what. Sources: omegaconf/base.py and nodes.py (2.0 to 2.4),
mmengine/logging/history_buffer.py, fastcore/foundation.py, the `__reduce__` forms of datetime, io
and functools.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections.abc import Callable, Iterator, Sequence

from ckptconv.pickles.nodes import ABSENT, Call, Dict, Global, Node

_OMEGACONF = "omegaconf."
_HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"
_CONFIG = "without its types and flags, interpolations as text"


def is_config(name: str) -> bool:
    """Whether a class is omegaconf's; what is in a configuration needs no mention of its own."""
    return name.startswith(_OMEGACONF)


def _attributes(state: Node) -> dict[str, Node] | None:
    """The state of an object as its attributes; None where it is something else."""
    if type(state) is not Dict or any(type(name) is not str for name, _ in state.pairs):
        return None
    return dict(state.pairs)


def _config(call: Call, state: Node) -> Node:
    """A node of omegaconf: containers hold others in ``_content``, which is text for an
    interpolation; leaves have ``_val``.
    """
    found = _attributes(state)
    if found is None or call.args or call.items or call.pairs or call.kwargs is not None:
        return call
    if call.name.startswith("omegaconf.nodes."):
        return found.get("_val", call)
    content = found.get("_content", call)
    if type(content) is Dict:
        return Dict(list(content.pairs))
    if type(content) is list:
        return tuple(content) if call.name.endswith(".TupleConfig") else list(content)
    return content if content is None or type(content) is str or type(content) is Call else call


def _history(call: Call, state: Node) -> Node:
    """A history: its arrays, its length, and the names of the functions registered for it."""
    found = _attributes(state)
    methods = None if found is None else _attributes(found.get("statistics_methods"))
    if found is None or methods is None:
        return call
    named = Dict([(name, _code_name(method) or method) for name, method in methods.items()])
    return Dict(
        [(name, named if name == "statistics_methods" else value) for name, value in found.items()]
    )


def _code_name(node: Node) -> str | None:
    """The name of a class or function, also of one that is pickled as the attribute of another."""
    if type(node) is Global:
        return node.path
    if (
        type(node) is Call
        and node.name == "builtins.getattr"
        and [type(part) for part in node.args] == [Global, str]
    ):
        return f"{node.args[0].path}.{node.args[1]}"
    return None


def is_class(node: Global) -> bool:
    """Whether a name is written as that of a class, or is a type of Python itself."""
    if node.path.startswith("builtins."):
        return node.path.removeprefix("builtins.") in _TYPES
    return node.name.rpartition(".")[2].lstrip("_")[:1].isupper()


_TYPES = frozenset(
    [
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int"),
        *("list", "object", "set", "str", "tuple", "type"),
    ]
)


def _list(call: Call, state: Node) -> Node:
    found = _attributes(state)
    items = None if found is None or found.keys() != {"items"} else found["items"]
    return list(items) if type(items) is list and not call.args else call


def _buffer(call: Call, state: Node) -> Node:
    """`BytesIO` with the state (bytes, position, attributes)."""
    if (
        type(state) is not tuple
        or len(state) != 3
        or type(state[0]) is not bytes
        or state[2] is not None
        or call.args
    ):
        return call
    return state[0]


def _partial(call: Call, state: Node) -> Node:
    """`partial` as written, with the state (function, arguments, keyword arguments, attributes)."""
    if (
        type(state) is not tuple
        or len(state) != 4
        or type(state[2]) is not Dict
        or state[3] is not None
    ):
        return call
    function, args, kwargs, _ = state
    if type(args) is not tuple or any(
        type(name) is not str or not name.isidentifier() for name, _ in kwargs.pairs
    ):
        return call
    values = [*args, *(value for _, value in kwargs.pairs)]
    written = [_written(value) for value in values]
    if type(function) is not Global or len(values) > _MOST or None in written:
        return call
    names = [*("" for _ in args), *(f"{name}=" for name, _ in kwargs.pairs)]
    words = [function.path, *(f"{name}{text}" for name, text in zip(names, written, strict=True))]
    return f"functools.partial({', '.join(words)})"


_MOST = 50  # arguments that are written out
_LONGEST = 1000  # characters of one


def _written(value: Node) -> str | None:
    if type(value) in (str, bytes):
        return repr(value) if len(value) <= _LONGEST else None
    if type(value) is int:
        return repr(value) if value.bit_length() <= _LONGEST else None
    if type(value) in (float, bool, type(None)):
        return repr(value)
    return value.path if type(value) is Global else None


def functions_of(call: Call) -> Iterator[Global]:
    """The classes and functions that a `partial` names."""
    state = call.state if type(call.state) is tuple else ()
    inner = [state[2]] if len(state) == 4 and type(state[2]) is Dict else []
    parts = [
        *call.args,
        *state[:1],
        *(part for part in state[1:2] if type(part) is tuple for part in part),
    ]
    yield from (
        part
        for part in [*parts, *(value for item in inner for _, value in item.pairs)]
        if type(part) is Global
    )


# -------------------------------------------------------------------------------------------- dates


def _made(make: Callable[[Call], Node]) -> Callable[[Call, Node], Node]:
    """A form of an object that its arguments make; the call itself where they do not."""

    def form(call: Call, state: Node) -> Node:
        if state is not ABSENT or call.kwargs is not None:
            return call
        try:
            return make(call)
        except (ArithmeticError, ValueError, TypeError):
            return call

    return form


def _packed(call: Call, size: int) -> bytes:
    # python 2's bytes
    raw = call.args[0].encode("latin-1") if type(call.args[0]) is str else call.args[0]
    if type(raw) is not bytes or len(raw) != size or len(call.args) > 2:
        raise ValueError
    return raw


def _zone(call: Call) -> datetime.tzinfo | None:
    if len(call.args) < 2:
        return None
    return _timezone_of(call.args[1])


def _timezone_of(node: Node) -> datetime.timezone:
    if type(node) is not Call or node.name != "datetime.timezone" or not 1 <= len(node.args) <= 2:
        raise ValueError
    name = node.args[1] if len(node.args) > 1 else None
    offset = _delta_of(node.args[0])
    return datetime.timezone(offset) if type(name) is not str else datetime.timezone(offset, name)


def _delta_of(node: Node) -> datetime.timedelta:
    if type(node) is not Call or node.name != "datetime.timedelta" or len(node.args) != 3:
        raise ValueError
    if any(type(part) is not int for part in node.args):
        raise ValueError
    return datetime.timedelta(*node.args)


def _datetime(call: Call) -> str:
    raw = _packed(call, 10)
    day, clock = _day(raw[:4]), _clock(raw[4:], raw[2] >> 7, _zone(call))
    return datetime.datetime.combine(day, clock).isoformat()


def _date(call: Call) -> str:
    return _day(_packed(call, 4)).isoformat()


def _time(call: Call) -> str:
    raw = _packed(call, 6)
    return _clock(bytes([raw[0] & 127]) + raw[1:], raw[0] >> 7, _zone(call)).isoformat()


def _day(raw: bytes) -> datetime.date:
    return datetime.date(int.from_bytes(raw[:2], "big"), raw[2] & 127, raw[3])


def _clock(raw: bytes, fold: int, zone: datetime.tzinfo | None) -> datetime.time:
    return datetime.time(raw[0], raw[1], raw[2], int.from_bytes(raw[3:], "big"), zone, fold=fold)


def _seconds(call: Call) -> float:
    seconds = (delta := _delta_of(call)).total_seconds()
    if datetime.timedelta(seconds=seconds) != delta:
        raise ValueError
    return seconds


def _timezone(call: Call) -> str:
    zone = _timezone_of(call)
    plain = str(datetime.timezone(zone.utcoffset(None)))
    return plain if str(zone) == plain else f"{zone} ({plain})"


# ----------------------------------------------------------------------------- numbers and the like


def _range(call: Call) -> Node:
    """A range, as what reads it like one: a list; but not a long one, of a few bytes."""
    numbers = range(*_ints(call.args))
    if len(numbers) > _MOST_NUMBERS:
        raise ValueError
    return list(numbers)


_MOST_NUMBERS = 10_000


def _slice(call: Call) -> str:
    """A slice; not its three numbers, which index something else."""
    return str(slice(*(None if part is None else _ints([part])[0] for part in call.args)))


def _decimal(call: Call) -> str:
    (text,) = call.args
    if type(text) is not str or len(text) > _LONGEST:
        raise ValueError
    return str(decimal.Decimal(text))


def _fraction(call: Call) -> str:
    """A fraction, pickled as two numbers since Python 3.12 and as text before."""
    given: Sequence[Node] = call.args
    if len(given) == 1 and type(given[0]) is str and len(given[0]) <= _LONGEST:
        given = [int(part) for part in given[0].split("/")]  # not by Fraction: it reads 1e99999999
    return str(fractions.Fraction(*_ints(given)))


def _ints(values: Sequence[Node]) -> list[int]:
    if any(type(value) is not int or value.bit_length() > _LONGEST for value in values):
        raise ValueError
    return list(values)


def _uuid(call: Call, state: Node) -> Node:
    number = (_attributes(state) or {}).get("int")
    if call.args or type(number) is not int or not 0 <= number < 1 << 128:
        return call
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def moment(dtype: Call, raw: bytes) -> str | None:
    """A datetime64 or timedelta64 as numpy writes it; None where its dtype has no unit."""
    import numpy as np  # seldom needed, and slow to load

    match dtype.state:
        case (_, str() as order, *_, (_, (bytes() as unit, int() as count, 1, *_))):
            code = f"{'>' if order == '>' else '<'}{dtype.args[0]}[{count}{unit.decode('latin-1')}]"
        case _:
            return None
    if not unit.isalpha():
        return None
    try:
        return str(np.frombuffer(raw, code)[0])
    except (TypeError, ValueError, IndexError):
        return None


OF_STATE = (_config, _history, _list, _buffer, _partial, _uuid)
"""The forms that look at the state of an object."""

_TABLE: dict[str, tuple[Callable[[Call, Node], Node], str]] = {
    "omegaconf.dictconfig.DictConfig": (_config, _CONFIG),
    "omegaconf.listconfig.ListConfig": (_config, _CONFIG),
    "omegaconf.tupleconfig.TupleConfig": (_config, _CONFIG),
    _HISTORY: (_history, "its methods as names"),
    "_io.BytesIO": (_buffer, "its bytes, without the position in them"),
    "functools.partial": (_partial, "as text"),
    "datetime.datetime": (_made(_datetime), "as ISO text"),
    "datetime.date": (_made(_date), "as ISO text"),
    "datetime.time": (_made(_time), "as ISO text"),
    "datetime.timezone": (_made(_timezone), "as text"),
    "datetime.timedelta": (_made(_seconds), "in seconds"),
    "builtins.range": (_made(_range), "as the list of its numbers"),
    "builtins.slice": (_made(_slice), "as text"),
    "decimal.Decimal": (_made(_decimal), "as text"),
    "fractions.Fraction": (_made(_fraction), "as text"),
    "uuid.UUID": (_uuid, "as text"),
}
HOW = {name: how for name, (_, how) in _TABLE.items()} | {
    "numpy.datetime64": "as ISO text",
    "numpy.timedelta64": "as text",
}
"""What the plain form of an object says of it, and what it does not."""
_NODES = ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum")
FORMS: dict[str, Callable[[Call, Node], Node]] = {
    **{name: form for name, (form, _) in _TABLE.items()},
    **{f"omegaconf.nodes.{kind}Node": _config for kind in (*_NODES, "InterpolationResult")},
    "omegaconf.base.UnionNode": _config,
    "fastcore.foundation.L": _list,
}
