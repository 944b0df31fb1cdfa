"""The memo of a pickle stream, kept in as few bytes as can be; and the opcodes that torch writes
for a tensor, matched as one run and read at once.

They belong together: what a run puts into the memo is made only when it is fetched.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from struct import unpack

from ckptconv.pickles.making import Reducer
from ckptconv.pickles.nodes import Call, Global, Node
from ckptconv.pickles.opcodes import INTEGER, integer_of, integers_of, tuple_of
from ckptconv.support.errors import MalformedCheckpoint

# Entries of MEMOIZE that are kept, fetched or not: more than small pickles have
_REMEMBERED = 1 << 16
_SEARCHED = 1 << 20  # bytes in which fetches are looked for together
_LONG_BINGETS = re.compile(rb"j(?=(....))", re.DOTALL).findall
_FORGOTTEN: Node = object()
UNMADE: Node = object()
"""Stands for a value that the opcodes of a run put and nobody is expected to fetch."""
# The groups of a run that a leaf is made of, and those that are the indexes of what it puts
_FIELDS = (6, 7, 8, 9, 11, 12, 13, 15, 16, 18, 20, 21)
_PUTS = (10, 14, 17, 19, 22, 23)


def _forged(what: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(what, hint="no program writes that; the file is damaged or forged")


def _put_twice() -> MalformedCheckpoint:
    return _forged("the pickle puts two values into one memo entry")


class FetchedUnmade(Exception):
    """Something fetches what a run put without making it: the stream is to be read without runs."""


class Memo(dict[bytes, Node]):
    """The memo, by the index as LONG_BINPUT has it (which saves decoding it).

    A tensor's run puts six values that are hardly ever fetched: they are made when one is. `runs`
    are the places of the runs. What MEMOIZE puts, whose index is the number of entries, goes to the
    list `memoized` as long as nothing else is put: an entry takes 8 bytes there, and 130 in the
    dict. The list begins with the entry `base`; the first entries are kept elsewhere. So many of
    all these are in the dict too as `fetched` says: of the first those that were fetched, of the
    others before the list those that can be.
    """

    def __init__(self, stream: bytes, persistent: Callable[[Node], Node]) -> None:
        super().__init__()
        self.runs: list[int] = []
        self.memoized: list[Node] = []
        self.fetched = 0
        self.base = 0
        self._first: list[Node] = []
        self._by_runs = 0
        self._fetchable: array[int] | None = None
        self._stream = stream
        self._persistent = persistent
        self._indexed = 0
        self._run_of: dict[bytes, int] = {}
        self._made: dict[bytes, Node] = {}
        self.is_fetched = False  # by an opcode whose index is a text

    def count(self) -> int:
        """The entries, a run counted as one."""
        memoized = self.base + len(self.memoized) - self._by_runs
        return len(self) + len(self.runs) + memoized - max(0, self.fetched)

    def put_by_run(self, values: Sequence[Node]) -> None:
        """Put what the opcodes of a run put by MEMOIZE, which counts for nothing by itself."""
        self.memoized += values
        self._by_runs += len(values)

    def fetched_by(self, get: bytes) -> Node:
        """What a BINGET or LONG_BINGET opcode fetches."""
        if len(get) == 2:
            return self[MEMO_KEYS[get[1]]]
        return self[get[1:]]

    def forget(self) -> None:
        """Let go of the many entries of MEMOIZE that no LONG_BINGET in the stream can fetch.

        pickle puts nearly all of them for nothing. Whatever bytes look like that opcode count as
        one. BINGET reaches only the first entries, which all stay.
        """
        first, end = self.base, self.base + len(self.memoized)
        if end <= _REMEMBERED:
            return
        if self._fetchable is None:
            self._fetchable = _fetchable(self._stream)
        if not first:
            self._first = self.memoized[:_REMEMBERED]
        start = max(first, _REMEMBERED)
        indexes = self._fetchable
        for at in range(bisect_left(indexes, start), bisect_left(indexes, end)):
            value, key = self.memoized[indexes[at] - first], indexes[at].to_bytes(4, "little")
            if value is not UNMADE and key not in self:
                self.fetched += 1
                self[key] = value
        self.memoized.clear()
        self.base = end

    def memoize(self, value: Node) -> None:
        """MEMOIZE where other opcodes put entries too: they all go to the dict from now on."""
        if self.base:
            raise _forged("the pickle numbers its memo entries in two ways")
        for index, earlier in enumerate(self.memoized):
            self.setdefault(index.to_bytes(4, "little"), earlier)
        self.memoized.clear()
        self.fetched = -1
        self[len(self).to_bytes(4, "little")] = value

    def __missing__(self, key: bytes) -> Node:
        index = int.from_bytes(key, "little")
        if index < self.base + len(self.memoized):
            return self._memoized(index, key)
        for start in self.runs[self._indexed :]:
            self._run_of.update((put, start) for put in self._puts(start))
        self._indexed = len(self.runs)
        for put, value in self._puts(self._run_of[key]).items():
            if put in self:
                raise _put_twice()
            self[put] = self._made[put] = value
        return self[key]

    def _memoized(self, index: int, key: bytes) -> Node:
        """The entry of that number, of those that MEMOIZE put."""
        if index >= self.base:
            value = self.memoized[index - self.base]
        else:
            value = self._first[index] if index < _REMEMBERED else UNMADE
        if value is UNMADE:  # or let go of, where a GET has its index as text
            raise FetchedUnmade if self._by_runs else KeyError(key)
        if index < _REMEMBERED:
            self.fetched += 1
            self[key] = value
        return value

    def is_ordered(self) -> bool:
        """Whether the order of what was put matters: MEMOIZE counts, or a text fetched some."""
        return self.is_fetched or bool(self.base or self.memoized) or self.fetched < 0

    def check_runs(self) -> None:
        """Raise `MalformedCheckpoint` where what a run puts goes to an entry that something else
        is put into too, before it or behind it.

        Which of them a fetch gives is a matter of order, and what a run puts is made too late.
        """
        found = (RUN(self._stream, start) for start in self.runs)
        runs = (run.group(*_PUTS) for run in found if run is not None)
        puts = [put for put in chain.from_iterable(runs) if put is not None]
        if not puts:
            return
        numbered_apart = bool(self.base or self.memoized) or self.fetched < 0
        if numbered_apart or len(set(puts)) != len(puts):
            raise _put_twice()
        for put in puts:
            if put in self and self._made.get(put, _FORGOTTEN) is not self[put]:
                raise _put_twice()

    def refuse_other(self, key: bytes) -> None:
        """Raise `MalformedCheckpoint` where a run may have fetched what an opcode replaces."""
        if self.runs and key in self:
            raise _put_twice()

    def _puts(self, start: int) -> dict[bytes, Node]:
        """What the run at `start` puts: key, persistent id, shape, stride, hooks and arguments."""
        run = RUN(self._stream, start)
        assert run is not None
        kind, cls, raw_key, location, count, view, offset, shape, stride, flag, hooks = run.group(
            6, 7, 9, 11, 12, 13, 15, 16, 18, 20, 21
        )
        names = [self[MEMO_KEYS[index[0]]] for index in (kind, cls, location, hooks)]
        made = Call(names[3], ())
        dims, steps = int_run(shape), int_run(stride)
        pid: Node = (names[0], names[1], raw_key.decode(), names[2], integer_of(count))
        if view:
            pid = (*pid, None)
        args = (self._persistent(pid), integer_of(offset), dims, steps, flag == b"\x88", made)
        puts = zip(run.group(*_PUTS), (pid[2], pid, dims, steps, made, args), strict=True)
        return {put: value for put, value in puts if put is not None}  # ckptconv puts none of them


def _fetchable(stream: bytes) -> array[int]:
    """The numbers of all entries that a LONG_BINGET in a stream can fetch, ascending."""
    found: set[bytes] = set()
    for start in range(0, len(stream), _SEARCHED):
        found.update(_LONG_BINGETS(stream, start, start + _SEARCHED + 4))
    return array("L", sorted(unpack(f"<{len(found)}I", b"".join(found))))


# ---------------------------------------------------------------------------------- tensors at once

# The opcodes that torch writes for a tensor, behind the rebuild function and the MARK of its
# arguments: a storage's persistent id, offset, shape, stride, requires_grad and hooks. They are
# nine tenths of a large checkpoint's opcodes; as one match they cost a third. It holds the form of
# torch (names fetched by BINGET, own values put by LONG_BINPUT) and of ckptconv (which puts none of
# them), and no names. Legacy files say of every storage that it is not a view (N). What is put has
# an index above those that BINGET fetches, so the names that runs fetch are never put by a run.
_INTEGER = b"(" + INTEGER + b")"
_PUT = rb"(?:r((?!.\0\0\0)....))?"  # LONG_BINPUT of an index above 255, which BINGET cannot fetch
_INTEGERS = b"(" + tuple_of(INTEGER) + b")" + _PUT
_PERSISTENT_ID = (
    rb"\(h(.)h(.)X(.)\0\0\0([0-9]{1,20})" + _PUT + rb"h(.)" + _INTEGER + rb"(N?)t" + _PUT + rb"Q"
)
_FLAG_AND_HOOKS = rb"([\x88\x89])h(.)\)R" + _PUT + rb"t" + _PUT + rb"R"
_TENSOR = _PERSISTENT_ID + _INTEGER + _INTEGERS + _INTEGERS + _FLAG_AND_HOOKS
# An entry of a state dict behind another begins with what puts the value before it into the memo,
# its key, and the name of the rebuild function. Where the key is taken for longer or shorter than
# it is, its length tells.
_KEY = rb"X(.)\0\0\0([\w.]{1,255})"
RUN = re.compile(b"(?:" + _PUT + _KEY + _PUT + rb"h(.)\()?" + _TENSOR, re.DOTALL).match
_INT_RUNS: dict[bytes, tuple[int, ...]] = {}


class RunReader:
    """Does at once what the opcodes of the runs of one stream do one by one. `memo` gets what they
    put, `runs` the places of the runs, whose own values the memo makes when one is fetched.
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
        """The tensor that `func` makes of the opcodes of `run`; None: they are not as they look."""
        leaf = self._leaf(run.group(*_FIELDS), func)
        if leaf is not None:
            self._runs.append(run.start())
        return leaf

    def entries(self, stream: bytes, pos: int, end: int, stack: list[Node]) -> int:
        """Push the keys and tensors of the entries that stand at `pos`; the place behind them. A
        tensor stands on the stack already. It stops before what is not as it looks, and at `end`.
        """
        memo, runs = self._memo, self._runs
        while (run := RUN(stream, pos, end)) is not None:
            before, size, raw_key, put, func, *tensor = run.group(1, 2, 3, 4, 5, *_FIELDS)
            if size is None or size[0] != len(raw_key):
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
            count[1] if count[0] == 0x4B else integer_of(count),
        )
        if view:
            pid = (*pid, None)
        dims = _INT_RUNS.get(shape) or int_run(shape)
        steps = _INT_RUNS.get(stride) or int_run(stride)
        reducer = self._reducers.get(func)
        hooked = memo[keys[hooks[0]]]
        made = None if reducer is None else self._hookless.get(id(hooked))
        if made is None:
            made = self._hookless[id(hooked)] = Call(hooked, ())
        start = 0 if offset == b"K\0" else integer_of(offset)
        args = (self._persistent(pid), start, dims, steps, flag == b"\x88", made)
        return Call(func, args) if reducer is None else reducer(args)


def int_run(raw: bytes) -> tuple[int, ...]:
    """The tuple that a run of integer opcodes and a TUPLE opcode make; kept, for shapes repeat."""
    if len(_INT_RUNS) > 1 << 14:  # a forged file may have no two alike
        _INT_RUNS.clear()
    return _INT_RUNS.setdefault(raw, integers_of(raw))


# The memo goes by the four bytes of LONG_BINPUT; these are of what BINPUT names by one
MEMO_KEYS = tuple(index.to_bytes(4, "little") for index in range(256))
