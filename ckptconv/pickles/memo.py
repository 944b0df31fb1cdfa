"""The memo of a pickle stream: what opcodes put into it, kept in as few bytes as can be."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence

from ckptconv.pickles.nodes import Call, Node
from ckptconv.pickles.tensor_runs import MEMO_KEYS, TENSOR_RUN, int_run, integer
from ckptconv.support.errors import MalformedCheckpoint

_REMEMBERED = 1 << 16
"""Entries of MEMOIZE that are kept, fetched or not: more than small pickles have."""
_SEARCHED = 1 << 20  # bytes in which fetches are looked for together
_LONG_BINGETS = re.compile(rb"j(?=(.{4}))", re.DOTALL).findall
_FORGOTTEN: Node = object()
UNMADE: Node = object()
"""Stands for a value that the opcodes of a run put and nobody is expected to fetch."""
_PUTS = (5, 9, 12, 14, 17, 18)
"""The groups of a run that are the indexes of what it puts."""


def _put_twice() -> MalformedCheckpoint:
    hint = "no program writes that; the file is damaged or forged"
    return MalformedCheckpoint("the pickle puts two values into one memo entry", hint=hint)


class FetchedUnmade(Exception):
    """Something fetches what a run put without making it: the stream is to be read without runs."""


class Memo(dict[bytes, Node]):
    """The memo, by the index as LONG_BINPUT has it (which saves decoding it).

    A tensor's run puts six values that are hardly ever fetched: they are made when one is. `runs`
    are the places of the runs. What MEMOIZE puts, whose index is the number of entries, goes to the
    list `memoized` as long as nothing else is put: an entry takes 8 bytes there, and 130 in the
    dict. Those of them that were `fetched` are in the dict too, if they are among the first. The
    list begins with the entry `base`; the first entries, and those before it that can be fetched,
    are kept elsewhere.
    """

    def __init__(self, stream: bytes, persistent: Callable[[Node], Node]) -> None:
        super().__init__()
        self.runs: list[int] = []
        self.memoized: list[Node] = []
        self.fetched = 0
        self.base = 0
        self._first: list[Node] = []
        self._kept: dict[int, Node] = {}
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
        return self[MEMO_KEYS[get[1]] if len(get) == 2 else get[1:]]

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
            self._kept[indexes[at]] = self.memoized[indexes[at] - first]
        self.memoized.clear()
        self.base = end

    def memoize(self, value: Node) -> None:
        """MEMOIZE where other opcodes put entries too: they all go to the dict from now on."""
        if self.base:
            hint = "no program writes that; the file is damaged or forged"
            raise MalformedCheckpoint("the pickle numbers its memo entries in two ways", hint=hint)
        for index, earlier in enumerate(self.memoized):
            self.setdefault(index.to_bytes(4, "little"), earlier)
        self.memoized.clear()
        self.fetched = -1
        self[len(self).to_bytes(4, "little")] = value

    def __missing__(self, key: bytes) -> Node:
        if (index := int.from_bytes(key, "little")) < self.base + len(self.memoized):
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
        elif index < len(self._first):
            value = self._first[index]
        else:
            value = self._kept.get(index, _FORGOTTEN)
        if value is _FORGOTTEN:
            raise KeyError(key)
        if value is UNMADE:
            raise FetchedUnmade
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
        puts = [
            put
            for start in self.runs
            if (run := TENSOR_RUN(self._stream, start)) is not None
            for put in run.group(*_PUTS)
            if put is not None
        ]
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
        run = TENSOR_RUN(self._stream, start)
        assert run is not None
        kind, cls, raw_key, location, count, view, offset, shape, stride, flag, hooks = run.group(
            1, 2, 4, 6, 7, 8, 10, 11, 13, 15, 16
        )
        key_put, pid_put, shape_put, stride_put, hooks_put, args_put = run.group(*_PUTS)
        names = [self[MEMO_KEYS[index[0]]] for index in (kind, cls, location, hooks)]
        made = Call(names[3], ())
        dims, steps = int_run(shape), int_run(stride)
        pid = (
            names[0],
            names[1],
            raw_key.decode(),
            names[2],
            integer(count),
            *([None] if view else []),
        )
        args = (self._persistent(pid), integer(offset), dims, steps, flag == b"\x88", made)
        puts = {
            key_put: pid[2],
            pid_put: pid,
            shape_put: dims,
            stride_put: steps,
            hooks_put: made,
            args_put: args,
        }
        # ckptconv itself puts none of them
        return {put: value for put, value in puts.items() if put is not None}


def _fetchable(stream: bytes) -> array[int]:
    """The numbers of all entries that a LONG_BINGET in a stream can fetch, ascending."""
    found: set[bytes] = set()
    for start in range(0, len(stream), _SEARCHED):
        found.update(_LONG_BINGETS(stream, start, start + _SEARCHED + 4))
    return array("L", sorted([int.from_bytes(index, "little") for index in found]))
