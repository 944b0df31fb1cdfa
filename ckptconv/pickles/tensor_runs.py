"""The opcodes that torch writes for a tensor, matched as one run and read at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ckptconv.pickles.making import Reducer
from ckptconv.pickles.nodes import Call, Global, Node

# The opcodes that torch writes for a tensor, behind the rebuild function and the MARK of its
# arguments: a storage's persistent id, offset, shape, stride, requires_grad and hooks. They are
# nine tenths of a large checkpoint's opcodes; as one match they cost a third. It holds the form of
# torch (names fetched by BINGET, own values put by LONG_BINPUT) and of ckptconv (which puts none of
# them), and no names. Legacy files say of every storage that it is not a view (N). What is put has
# an index above those that BINGET fetches, so the names that runs fetch are never put by a run.
_INTEGER = rb"(K.|M..|J....)"
_PUT = rb"(?:r((?!.\0\0\0)....))?"
_INTEGERS = (
    rb"((?:K.|M..|J....)[\x85]|(?:K.|M..|J....){2}[\x86]|(?:K.|M..|J....){3}[\x87]"
    rb"|\((?:K.|M..|J....){4,}t)" + _PUT
)
_PERSISTENT_ID = (
    rb"\(h(.)h(.)X(.)\0\0\0([0-9]{1,20})" + _PUT + rb"h(.)" + _INTEGER + rb"(N?)t" + _PUT + rb"Q"
)
_FLAG_AND_HOOKS = rb"([\x88\x89])h(.)\)R" + _PUT + rb"t" + _PUT + rb"R"
_TENSOR = _PERSISTENT_ID + _INTEGER + _INTEGERS + _INTEGERS + _FLAG_AND_HOOKS
TENSOR_RUN = re.compile(_TENSOR, re.DOTALL).match
# An entry of a state dict behind another: what puts the value before it into the memo, its key, and
# its tensor with the name of the rebuild function. Where the key is taken for longer or shorter
# than it is, its length tells.
_KEY = rb"X(.)\0\0\0([\w.]{1,255})"
_ENTRY_RUN = re.compile(_PUT + _KEY + _PUT + rb"h(.)\(" + _TENSOR, re.DOTALL).match
_INT_RUNS: dict[bytes, tuple[int, ...]] = {}


class RunReader:
    """Does at once what the opcodes of the runs of one stream do one by one.

    `memo` gets what they put, `runs` the places of the runs, whose own values the memo makes when
    one is fetched.
    """

    def __init__(
        self,
        memo: dict[bytes, Node],
        runs: list[int],
        persistent: Callable[[Node], Node],
        reducers: Mapping[Global, Reducer],
    ) -> None:
        self._memo = memo
        self._runs = runs
        self._persistent = persistent
        self._reducers = reducers
        # the empty hooks that were made: a leaf does not hold them, so all leaves may be made of
        # the same
        self._hookless: dict[int, Call] = {}

    def tensor(self, run: re.Match[bytes], func: Node) -> Node | None:
        """The tensor that `func` makes of the opcodes of `run`; None if they are not as they
        look.
        """
        leaf = self._leaf(run.group(1, 2, 3, 4, 6, 7, 8, 10, 11, 13, 15, 16), func)
        if leaf is not None:
            self._runs.append(run.start())
        return leaf

    def entries(self, stream: bytes, pos: int, end: int, stack: list[Node]) -> int:
        """Push the keys and tensors of the entries that stand at `pos`; the place behind them.

        A tensor stands on the stack already. It stops before what is not as it looks, and at `end`.
        """
        memo, runs = self._memo, self._runs
        while (run := _ENTRY_RUN(stream, pos, end)) is not None:
            before, size, raw_key, put, func, *tensor = run.group(
                1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 18, 20, 21
            )
            if size[0] != len(raw_key):
                break
            if before is not None:
                memo[before] = stack[-1]
            leaf = self._leaf(tensor, memo[MEMO_KEYS[func[0]]])
            if leaf is None:
                break
            key = raw_key.decode()
            if put is not None:
                memo[put] = key
            stack += (key, leaf)
            runs.append(run.end(5) + 1)
            pos = run.end()
        return pos

    def _leaf(self, fields: Sequence[bytes], func: Node) -> Node | None:
        """A leaf of what stands in a run."""
        kind, cls, size, raw_key, location, count, view, offset, shape, stride, flag, hooks = fields
        if size[0] != len(raw_key) or type(func) is not Global:
            return None
        keys, memo = MEMO_KEYS, self._memo
        pid: Node = (
            memo[keys[kind[0]]],
            memo[keys[cls[0]]],
            raw_key.decode(),
            memo[keys[location[0]]],
            count[1] if count[0] == 0x4B else integer(count),
        )
        if view:
            pid = (*pid, None)
        dims = _INT_RUNS.get(shape) or int_run(shape)
        steps = _INT_RUNS.get(stride) or int_run(stride)
        reducer = self._reducers.get(func)
        hooked = memo[keys[hooks[0]]]
        if reducer is None or (made := self._hookless.get(id(hooked))) is None:
            made = self._hookless[id(hooked)] = Call(hooked, ())
        start = 0 if offset == b"K\0" else integer(offset)
        args = (self._persistent(pid), start, dims, steps, flag == b"\x88", made)
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
