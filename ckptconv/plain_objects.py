"""Symbolic objects that have an exact plain form, which every reader of the output accepts.

What `torch.load(weights_only=True)` refuses is mostly harmless: numbers of numpy, namespaces, dicts of another name, paths.
Each such call is rewritten as the number, dict or text that it stands for; anything else has no plain form. Nothing is
executed. Sources: the `__reduce__` forms of numpy, argparse, types, collections and pathlib.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from ckptconv.nodes import ABSENT, SET, Call, Dict, Global, Node

_DICT_CLASSES = ("AttributeDict", "EasyDict", "Munch", "AttrDict", "ConfigDict")
_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q",
            "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}  # fmt: skip


def plain_form(call: Call) -> Node:
    """The plain value that `call` stands for, or the call itself when it has none."""
    name, state = _class_and_state(call)
    make = _FORMS.get(name)
    if make is not None:
        return make(call, state)
    return _as_dict(call, name, state)


def _class_and_state(call: Call) -> tuple[str, Node]:
    """The class that the call makes an object of, protocol 1's `copyreg._reconstructor` looked through."""
    name = call.name
    if name == "copyreg._reconstructor" and call.args and type(call.args[0]) is Global:
        name = call.args[0].path
    return name, call.state


def _as_dict(call: Call, name: str, state: Node) -> Node:
    """A subclass of dict: made without content, filled with pairs, and with no state of its own."""
    given = _base_pairs(call)
    known = name.rpartition(".")[2] in _DICT_CLASSES
    if call.items or call.kwargs is not None or given is None or not (call.pairs or given or known):
        return call
    pairs = [*given, *call.pairs]
    names = {key for key, _ in pairs if type(key) is str}
    extra = state.pairs if type(state) is Dict else [] if state in (ABSENT, None) else None
    if extra is None or any(type(key) is not str or key not in names for key, _ in extra):
        return call
    return Dict(pairs)


def _base_pairs(call: Call) -> list[tuple[Node, Node]] | None:
    """The pairs that the constructor was given; None when it was given something else."""
    if not call.args or call.name == "collections.defaultdict":
        return []
    last = call.args[-1]
    if len(call.args) == 3 and call.name == "copyreg._reconstructor" and type(last) is Dict:
        return last.pairs
    return None


def _namespace(call: Call, state: Node) -> Node:
    return Dict(state.pairs) if type(state) is Dict else Dict() if state in (ABSENT, None) else call


def _default_dict(call: Call, state: Node) -> Node:
    return Dict([*call.pairs]) if state in (ABSENT, None) else call


def _deque(call: Call, state: Node) -> Node:
    given = call.args[0] if call.args and type(call.args[0]) in (list, tuple) else []
    return [*given, *call.items] if state in (ABSENT, None) else call


def _frozen_set(call: Call, _: Node) -> Node:
    return Call(SET, call.args)


def _posix_path(call: Call, _: Node) -> Node:
    parts = call.args
    if not all(type(part) is str for part in parts):
        return call
    return "/" + "/".join(parts[1:]) if parts[:1] == ("/",) else "/".join(parts) or "."


def _windows_path(call: Call, _: Node) -> Node:
    parts = call.args
    if not all(type(part) is str for part in parts):
        return call
    return parts[0] + "\\".join(parts[1:]) if parts and parts[0].endswith("\\") else "\\".join(parts) or "."


def _numpy_scalar(call: Call, _: Node) -> Node:
    """`numpy.core.multiarray.scalar(dtype, bytes)` as a Python number; float32 and shorter widen exactly."""
    if len(call.args) != 2 or type(dtype := call.args[0]) is not Call or dtype.name != "numpy.dtype":
        return call
    code = _NUMBERS.get(dtype.args[0]) if dtype.args and type(dtype.args[0]) is str else None
    state = dtype.state
    order = state[1] if type(state) is tuple and len(state) > 1 and type(state[1]) is str else "<"
    raw = _raw_bytes(call.args[1])
    if code is None or raw is None or len(raw) != struct.calcsize(code):
        return call
    return struct.unpack((">" if order == ">" else "<") + code, raw)[0]


def _raw_bytes(node: Node) -> bytes | None:
    """The bytes of a scalar; python 2's may have been read as text, if they happened to be UTF-8."""
    if type(node) is bytes:
        return node
    return node.encode() if type(node) is str else None


_FORMS: dict[str, Callable[[Call, Node], Node]] = {
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _namespace,
    "collections.defaultdict": _default_dict,
    "collections.deque": _deque,
    "builtins.frozenset": _frozen_set,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    **{
        f"pathlib{module}.{name}": make
        for module in ("", "._local")
        for name, make in (
            ("PosixPath", _posix_path),
            ("PurePosixPath", _posix_path),
            ("WindowsPath", _windows_path),
            ("PureWindowsPath", _windows_path),
        )
    },
}
