"""Plain forms of what training scripts keep beside tensors: configurations, dates, histories,
buffers of bytes, names of code.

`plain` has the objects whose plain form is all of them; here something of the object is
left out, and `Form.how` says what. Sources: omegaconf/base.py and nodes.py (2.0 to 2.4),
mmengine/logging/history_buffer.py, fastcore/foundation.py, the `__reduce__` forms of datetime, io
and functools.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptconv.pickles.nodes import Call, Dict, Global, Node
from ckptconv.support.arrays import np
from ckptconv.support.records import NamedTuple


class Form(NamedTuple):
    """How an object of a class, or what a function gives, becomes a plain value.

    `make` is given the call and its state, and gives the call itself where it has no plain form.
    `reads` names what `make` looks at; where a call has more to it, there is no plain form. `how`
    is what the plain form says of the object, and what it does not.
    """

    make: Callable[[Call, Node], Node]
    reads: str = "args"
    how: str = ""


_OMEGACONF = "omegaconf."


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
    return content if type(content) in (str, Call, type(None)) else call


def _history(call: Call, state: Node) -> Node:
    """A history: its arrays, its length, and the names of the functions registered for it."""
    found = _attributes(state) or {}
    methods = _attributes(found.get("statistics_methods"))
    if methods is None:
        return call
    named = Dict([(name, _code_name(method) or method) for name, method in methods.items()])
    return Dict(list({**found, "statistics_methods": named}.items()))


def _code_name(node: Node) -> str | None:
    """The name of a class or function, also of one that is pickled as the attribute of another."""
    if type(node) is Global:
        return node.path
    if type(node) is Call and node.name == "builtins.getattr":
        match node.args:
            case (Global() as holder, str() as attribute):
                return f"{holder.path}.{attribute}"
    return None


def is_class(node: Global) -> bool:
    """Whether a name is written as that of a class, or is a type of Python itself."""
    if node.path.startswith("builtins."):
        return node.path.removeprefix("builtins.") in _TYPES
    return node.name.rpartition(".")[2].lstrip("_")[:1].isupper()


_TYPE_NAMES = """
    bool bytearray bytes complex dict float frozenset int list object set str tuple type
"""
_TYPES = frozenset(_TYPE_NAMES.split())


def _list(call: Call, state: Node) -> Node:
    match _attributes(state):
        case {"items": list() as items, **others} if not others and not call.args:
            return list(items)
    return call


def _buffer(call: Call, state: Node) -> Node:
    match state:
        case tuple((bytes() as content, _, None)) if not call.args:
            return content
    return call


def _partial(call: Call, state: Node) -> Node:
    """`partial` as written, with the state (function, arguments, keyword arguments, attributes)."""
    match state:
        case tuple((Global() as function, tuple() as args, Dict(pairs=pairs), None)):
            given = [*(("", value) for value in args), *pairs]
        case _:
            return call
    if len(given) > _MOST or not all(
        type(name) is str and name.isidentifier() for name, _ in given[len(args) :]
    ):
        return call
    words = [function.path]
    for name, value in given:
        text = _written(value)
        if text is None:
            return call
        words.append(f"{name}={text}" if name else text)
    return f"functools.partial({', '.join(words)})"


_MOST = 50  # arguments that are written out
_LONGEST = 1000  # characters of one


def _written(value: Node) -> str | None:
    if type(value) is Global:
        return value.path
    is_short = type(value) in (float, bool, type(None))
    is_short |= type(value) in (str, bytes) and len(value) <= _LONGEST
    is_short |= type(value) is int and value.bit_length() <= _LONGEST
    return repr(value) if is_short else None


def functions_of(call: Call) -> Iterator[Global]:
    """The classes and functions that a `partial` names."""
    parts = list(call.args)
    state = call.state if type(call.state) is tuple else ()
    parts += state[:1]
    for given in state[1:2]:
        parts += given if type(given) is tuple else ()
    if len(state) == 4 and type(state[2]) is Dict:
        parts += [value for _, value in state[2].pairs]
    yield from (part for part in parts if type(part) is Global)


# -------------------------------------------------------------------------------------------- dates


def _of_arguments(make: Callable[[Call], Node]) -> Callable[[Call, Node], Node]:
    """A form of an object that its arguments make; the call itself where they do not."""

    def form(call: Call, _: Node) -> Node:
        try:
            return make(call)
        except (ArithmeticError, ValueError, TypeError):
            return call

    return form


def _moment(cls: Any, size: int) -> Callable[[Call], str]:
    """A date or a time of so many bytes, as ISO text."""

    def make(call: Call) -> str:
        raw, *zone = call.args
        if type(raw) is str:  # python 2's bytes
            raw = raw.encode("latin-1")
        if type(raw) is not bytes or len(raw) != size or len(zone) > 1:
            raise ValueError
        # of bytes they are made unchecked; as another one of the same numbers they are checked
        text: str = cls(raw, *map(_timezone_of, zone)).replace().isoformat()
        return text

    return make


def _timezone_of(node: Node) -> datetime.timezone:
    if type(node) is not Call or node.name != "datetime.timezone" or not 1 <= len(node.args) <= 2:
        raise ValueError
    names = [name for name in node.args[1:] if type(name) is str]
    return datetime.timezone(_delta_of(node.args[0]), *names)


def _delta_of(node: Node) -> datetime.timedelta:
    is_delta = type(node) is Call and node.name == "datetime.timedelta"
    if not is_delta or [type(part) for part in node.args] != [int, int, int]:
        raise ValueError
    return datetime.timedelta(*node.args)


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
    numbers = range(*_ints(call.args))
    if len(numbers) > _MOST_NUMBERS:
        raise ValueError
    return list(numbers)


_MOST_NUMBERS = 10_000  # a range of a few bytes may be of any length


def _slice(call: Call) -> str:
    """A slice; not its three numbers, which index something else."""
    return str(slice(*(None if part is None else _ints([part])[0] for part in call.args)))


def _decimal(call: Call) -> str:
    from decimal import Decimal  # a module of 5 ms, for a value that few files have

    (text,) = call.args
    if type(text) is not str or len(text) > _LONGEST:
        raise ValueError
    return str(Decimal(text))


def _fraction(call: Call) -> str:
    """A fraction, pickled as two numbers since Python 3.12 and as text before."""
    given: Sequence[Node] = call.args
    if len(given) == 1 and type(given[0]) is str and len(given[0]) <= _LONGEST:
        given = [int(part) for part in given[0].split("/")]  # not by Fraction: it reads 1e99999999
    from fractions import Fraction  # seldom needed: it takes 4 ms to import

    return str(Fraction(*_ints(given)))


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


_CONFIG = Form(_config, "args state", "without its types and flags, interpolations as text")
_CONFIGS = ("dictconfig.DictConfig", "listconfig.ListConfig", "tupleconfig.TupleConfig")
_NODES = (
    *("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum"),
    "InterpolationResult",
)
_TEXT = "as text"
_ISO_TEXT = "as ISO text"
FORMS = {
    **{f"omegaconf.{name}": _CONFIG for name in _CONFIGS},
    **{
        f"omegaconf.{name}": _CONFIG._replace(how="")
        for name in ("base.UnionNode", *(f"nodes.{kind}Node" for kind in _NODES))
    },
    "mmengine.logging.history_buffer.HistoryBuffer": Form(
        _history, "args state", "its methods as names"
    ),
    "fastcore.foundation.L": Form(_list, "args state"),
    "_io.BytesIO": Form(_buffer, "args state", "its bytes, without the position in them"),
    "functools.partial": Form(_partial, "args state", _TEXT),
    "datetime.datetime": Form(_of_arguments(_moment(datetime.datetime, 10)), how=_ISO_TEXT),
    "datetime.date": Form(_of_arguments(_moment(datetime.date, 4)), how=_ISO_TEXT),
    "datetime.time": Form(_of_arguments(_moment(datetime.time, 6)), how=_ISO_TEXT),
    "datetime.timezone": Form(_of_arguments(_timezone), how=_TEXT),
    "datetime.timedelta": Form(_of_arguments(_seconds), how="in seconds"),
    "builtins.range": Form(_of_arguments(_range), how="as the list of its numbers"),
    "builtins.slice": Form(_of_arguments(_slice), how=_TEXT),
    "decimal.Decimal": Form(_of_arguments(_decimal), how=_TEXT),
    "fractions.Fraction": Form(_of_arguments(_fraction), how=_TEXT),
    "uuid.UUID": Form(_uuid, "args state", _TEXT),
}
