"""The opcodes that torch writes for a tensor, matched as one run and read at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ckptconv.pickles.making import Reducer
from ckptconv.pickles.nodes import Call, Global, Node

# The opcodes that torch writes for a tensor, behind the rebuild function and the MARK of its
# arguments: a storage's persistent id, offset, shape, stride, requires_grad and hooks. They are
# nine tenths of a large checkpoint's opcodes; as one match they cost a third. It holds the form of
# torch (names fetched by BINGET, own values put by LONG_BINPUT) and of ckptconv (which puts none of
# them), and no names. Legacy files say of every storage that it is not a view (N).
_INTEGER = rb"(K.|M..|J....)"
_INTEGERS = (
    rb"((?:K.|M..|J....)[\x85]|(?:K.|M..|J....){2}[\x86]|(?:K.|M..|J....){3}[\x87]"
    rb"|\((?:K.|M..|J....){4,}t)(?:r(....))?"
)
_PERSISTENT_ID = (
    rb"\(h(.)h(.)X(.)\0\0\0([0-9]{1,20})(?:r(....))?h(.)" + _INTEGER + rb"(N?)t(?:r(....))?Q"
)
TENSOR_RUN = re.compile(
    _PERSISTENT_ID
    + (_INTEGER + _INTEGERS + _INTEGERS)
    + rb"([\x88\x89])h(.)\)R(?:r(....))?t(?:r(....))?R",
    re.DOTALL,
).match
_INT_RUNS: dict[bytes, tuple[int, ...]] = {}


def read_run(
    run: re.Match[bytes],
    func: Node,
    memo: Mapping[bytes, Node],
    persistent: Callable[[Node], Node],
    reducers: Mapping[Global, Reducer],
    hookless: dict[int, Call],
) -> Node | None:
    """The tensor that `func` makes of the opcodes of `run`; None if they are not as they look.

    This does at once what the opcodes do one by one. `hookless` keeps the empty hooks that were
    made: a leaf does not hold them, so all leaves may be made of the same.
    """
    kind, cls, size, raw_key, location, count, view, offset, shape, stride, flag, hooks = run.group(
        1, 2, 3, 4, 6, 7, 8, 10, 11, 13, 15, 16
    )
    if size[0] != len(raw_key) or type(func) is not Global:
        return None
    keys = MEMO_KEYS
    pid: Node = (
        memo[keys[kind[0]]],
        memo[keys[cls[0]]],
        raw_key.decode(),
        memo[keys[location[0]]],
        integer(count),
    )
    if view:
        pid = (*pid, None)
    dims = _INT_RUNS.get(shape) or int_run(shape)
    steps = _INT_RUNS.get(stride) or int_run(stride)
    reducer = reducers.get(func)
    hooked = memo[keys[hooks[0]]]
    if reducer is None or (made := hookless.get(id(hooked))) is None:
        made = hookless[id(hooked)] = Call(hooked, ())
    start = 0 if offset == b"K\0" else integer(offset)
    args = (persistent(pid), start, dims, steps, flag == b"\x88", made)
    return Call(func, args) if reducer is None else reducer(args)


def integer(raw: bytes) -> int:
    """The number of a BININT1, BININT2 or BININT opcode."""
    return raw[1] if raw[0] == 0x4B else int.from_bytes(raw[1:], "little", signed=raw[0] == 0x4A)


def int_run(raw: bytes) -> tuple[int, ...]:
    """The tuple that a run of integer opcodes and a TUPLE opcode make; kept, for shapes repeat."""
    if len(_INT_RUNS) > 1 << 14:
        _INT_RUNS.clear()
    values, pos = [], int(raw[0] == 0x28)
    while pos < len(raw) - 1:
        width = _WIDTHS[raw[pos]]
        values.append(integer(raw[pos : pos + width]))
        pos += width
    return _INT_RUNS.setdefault(raw, tuple(values))


_WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5}
MEMO_KEYS = tuple(index.to_bytes(4, "little") for index in range(256))
