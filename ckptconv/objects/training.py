"""Plain forms of what training scripts keep beside tensors: configurations, dates, histories,
buffers of bytes, names of code.

`plain` has the objects whose plain form is all of them; here something of the object is
left out, and `HOW` says what. Sources: omegaconf/base.py and nodes.py (2.0 to 2.4),
mmengine/logging/history_buffer.py, fastcore/foundation.py, the `__reduce__` forms of datetime, io
and functools.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator

from ckptconv.pickles.nodes import ABSENT, Call, Dict, Global, Node

_OMEGACONF = "omegaconf."
_HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"
_CONFIG = "without its types and flags, interpolations as text"
HOW = {
    "omegaconf.dictconfig.DictConfig": _CONFIG,
    "omegaconf.listconfig.ListConfig": _CONFIG,
    "omegaconf.tupleconfig.TupleConfig": _CONFIG,
    _HISTORY: "its methods as names",
    "_io.BytesIO": "its bytes, without the position in them",
    "functools.partial": "as text",
    "datetime.datetime": "as ISO text",
    "datetime.date": "as ISO text",
    "datetime.time": "as ISO text",
    "datetime.timezone": "as text",
    "datetime.timedelta": "in seconds",
}
"""What the plain form of an object says of it, and what it does not."""


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
        return code_name(node)
    if (
        type(node) is Call
        and node.name == "builtins.getattr"
        and [type(part) for part in node.args] == [Global, str]
    ):
        return f"{code_name(node.args[0])}.{node.args[1]}"
    return None


def code_name(node: Global) -> str:
    """The name of a class or function as python 3 has it: protocol 2 says ``long`` for ``int``."""
    return _PYTHON3.get(node.path, node.path)


def is_class(node: Global) -> bool:
    """Whether a name is written as that of a class, or is a type of Python itself."""
    if node.path.startswith("builtins."):
        return code_name(node).removeprefix("builtins.") in _TYPES
    return node.name.rpartition(".")[2].lstrip("_")[:1].isupper()


_TYPES = frozenset(
    [
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int"),
        *("list", "object", "set", "str", "tuple", "type"),
    ]
)
_PYTHON3 = {
    "builtins.long": "builtins.int",
    "builtins.unicode": "builtins.str",
    "builtins.xrange": "builtins.range",
}


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
    words = [
        code_name(function),
        *(f"{name}{text}" for name, text in zip(names, written, strict=True)),
    ]
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
    return code_name(value) if type(value) is Global else None


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


def _dated(make: Callable[[Call], str | float]) -> Callable[[Call, Node], Node]:
    """A form of an object that its arguments make; the call itself where they do not."""

    def form(call: Call, state: Node) -> Node:
        if state is not ABSENT or call.kwargs is not None:
            return call
        try:
            return make(call)
        except (ValueError, OverflowError, TypeError):
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


OF_STATE = (_config, _history, _list, _buffer, _partial)
"""The forms that look at the state of an object."""

FORMS: dict[str, Callable[[Call, Node], Node]] = {
    **dict.fromkeys((name for name in HOW if is_config(name)), _config),
    **{
        f"omegaconf.nodes.{kind}Node": _config
        for kind in (
            "Any",
            "String",
            "Integer",
            "Float",
            "Boolean",
            "Bytes",
            "Path",
            "Enum",
            "InterpolationResult",
        )
    },
    "omegaconf.base.UnionNode": _config,
    _HISTORY: _history,
    "fastcore.foundation.L": _list,
    "_io.BytesIO": _buffer,
    "functools.partial": _partial,
    "datetime.datetime": _dated(_datetime),
    "datetime.date": _dated(_date),
    "datetime.time": _dated(_time),
    "datetime.timezone": _dated(_timezone),
    "datetime.timedelta": _dated(_seconds),
}
