"""Pickles in a source, one behind another or where one may begin: followed, judged, looked into."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import field

from ckptconv.io.source import CHUNK, MemorySource, RangeSource, Source
from ckptconv.objects.threats import Level, Verdict, gives_what_was_there, judge
from ckptconv.pickles.byte_window import Held
from ckptconv.pickles.tracer import held_bytes, trace_pickle
from ckptconv.pickles.traces import ATTRIBUTES, NESTED_LOADERS, NamedGlobal, Trace
from ckptconv.support.limits import in_force
from ckptconv.support.records import NamedTuple, dataclass

_BEGINS = re.compile(rb"\x80[\0-\5]").match
_SHORT = 16  # bytes that may be a pickle by chance: a text may begin with "N." or "I1\n."


@dataclass(frozen=True, slots=True)
class Sighting:
    """One thing that a pickle of a file names or does.

    `where` is the record, and the stream within it, in which it stands; `name` the global as the
    pickle has it (empty where there is none), `at` the byte of the stream.
    """

    where: str
    name: str
    level: Level
    reason: str
    at: int


@dataclass(slots=True)
class Room:
    """How much more work a file of `size` bytes may make.

    That is what it has inflated to, and what was followed for nothing.

    Records of a broken archive may lie in each other, and pickles may seem to begin anywhere: of a
    small file that is made to, each look would take as long as the last.
    """

    size: int
    inflated: Counter[bool] = field(default_factory=Counter)  # of pickles, and of what is none
    followed: int = 0
    is_used_up: bool = False

    def inflate(
        self, source: Source, offset: int, stored: int, *, pickle: bool
    ) -> tuple[bytes, bool]:
        """What a deflated run inflates to, as far as there is room; and whether there is more."""
        most = in_force()
        free = most.pickle_free if pickle else most.inflated_free
        left = max(free, most.pickle_ratio * self.size) - self.inflated[pickle]
        limit = min(most.pickle_bytes, max(free, most.pickle_ratio * stored), left)
        if limit <= 0:
            return b"", True
        inflated = inflated_head(source, offset, stored, limit)
        self.inflated[pickle] += len(inflated)
        return inflated, len(inflated) >= limit

    @property
    def is_searched(self) -> bool:
        """Whether so much was followed for nothing that the search ends."""
        return self.followed > max(in_force().scanned_in_vain, self.size // _PART_IN_VAIN)


_PART_IN_VAIN = 64  # random bytes that seem to be a pickle break after a few


def inflated_head(source: Source, offset: int, stored: int, limit: int) -> bytes:
    """At most the first `limit` bytes of a deflated run, as far as it inflates."""
    inflater = zlib.decompressobj(-15)
    made = bytearray()
    with contextlib.suppress(zlib.error):
        step = min(CHUNK, max(limit, 512))
        for start in range(0, stored, step):
            piece = source.read(offset + start, min(step, stored - start))
            # with a limit for each call: a piece of 1 MiB may inflate to 1 GiB
            made += inflater.decompress(piece, limit - len(made))
            if inflater.eof or len(made) >= limit:
                break
    return bytes(made)


class Stream(NamedTuple):
    """Bytes to look into: where they stand, in how many streams, and whether they are an `array`,
    which nothing unpickles: of many thousands some read as pickles by chance, so only what names a
    global counts.
    """

    source: Source
    where: str = ""
    depth: int = 0
    array: bool = False

    def named(self, name: str) -> str:
        """Where something of this name in it stands."""
        return f"{self.where}/{name}" if self.where else name

    def part(self, offset: int, nbytes: int, where: str, *, array: bool = False) -> Stream:
        """Some of the bytes, as a stream of its own."""
        return Stream(RangeSource(self.source, offset, nbytes), where, self.depth + 1, array)

    def made(self, raw: bytes, where: str, *, array: bool = False) -> Stream:
        """Bytes that were made of some of it."""
        return Stream(MemorySource(raw, self.source.path), where, self.depth + 1, array)


class PickleScanner:
    """The pickles that were found in one file so far, and what they name."""

    def __init__(self, room: Room) -> None:
        self.findings: list[Sighting] = []
        self.pickles = 0
        self._counted: set[tuple[str, int]] = set()
        self._room = room

    def scan(self, stream: Stream) -> str:
        """Look into a stream for whatever it is; says what that is."""
        raise NotImplementedError

    def _odd(self, where: str, reason: str, at: int = 0) -> None:
        self.findings.append(Sighting(where, "", "unknown", reason, at))

    def _more_pickles(self, where: str, how: str, at: int = 0) -> None:
        most = in_force().scanned_pickles
        what = f"more than {most} pickles {how}; the rest was not looked at"
        self._odd(where, f"{what} (--limit scanned_pickles={2 * most} looks further)", at)

    def _pickles(self, stream: Stream, start: int) -> int:
        """Follow the pickles that lie one behind another; how many there are."""
        count, at = 0, start
        for _ in range(in_force().scanned_pickles):
            before, end = self.pickles, 0
            if at < stream.source.size:
                end = self._pickle(stream, at, certain=True)
            count += self.pickles > before
            if end <= at:
                return count
            at = end
        if at < stream.source.size:
            self._more_pickles(stream.where, "lie one behind another", at)
        return count

    def _pickle(self, stream: Stream, start: int, *, certain: bool) -> int:
        """Follow the pickle at byte `start`, if it is one; the byte behind it, or 0 without one.

        What breaks counts as a pickle where it names something dangerous, or is `certain` to be one
        by how it begins. In one that is not, another may lie: 0 too.
        """
        source, where = stream.source, stream.where
        trace = trace_pickle(source, start)
        is_passed = certain or not trace.constants
        if not certain and not (trace.end and is_passed):
            self._room.followed += trace.followed
        named = _judged(trace, where)
        has_proto = _BEGINS(source.read(start, min(2, source.size - start))) is not None
        is_chance = stream.array and not trace.names
        alarms = [
            alarm
            for alarm in trace.alarms
            if not is_chance and (trace.names or has_proto or not alarm.by_chance)
        ]
        is_bad = bool(alarms) or any(finding.level == "dangerous" for finding in named)
        is_begun = has_proto and bool(trace.names or trace.cut) and not is_chance
        is_told = is_bad or has_proto or bool(trace.names) or trace.end - start > _SHORT
        if trace.broken is not None:
            is_told = is_bad or (certain and not is_chance and (is_begun or trace.stopped))
        if is_told:
            if (where, start) not in self._counted:  # once, however often it is come upon
                self._counted.add((where, start))
                self.pickles += 1
            self.findings += named
            if trace.broken is not None:
                self._odd(where, f"the pickle {trace.broken}; what comes before was judged", start)
            self.findings += [
                Sighting(where, "", "dangerous", alarm.reason, alarm.at) for alarm in alarms
            ]
            self._nested(trace, stream)
        return trace.end if is_passed else 0

    def _nested(self, trace: Trace, stream: Stream) -> None:
        """Look into the bytes that a pickle holds: each may be a stream itself."""
        most = in_force().pickle_bytes
        array = not any(f"{name.module}.{name.name}" in NESTED_LOADERS for name in trace.names)
        for number, held in enumerate(trace.constants):
            inside = f"{stream.where}<bytes {number}>"
            if isinstance(held, Held) and held.form != "bytes" and held.nbytes > most:
                more = f"--limit pickle_bytes={held.nbytes} does"
                self._odd(inside, f"a text of {held.nbytes} bytes was not looked at ({more})")
                continue
            if isinstance(held, Held) and held.form == "bytes":
                inner = stream.part(held.offset, held.nbytes, inside, array=array)
            else:
                inner = stream.made(_bytes_of(stream.source, held), inside, array=array)
            # the shortest pickle has two bytes: a value and its end
            if inner.source.size > 1:
                self.scan(inner)


def _judged(trace: Trace, where: str) -> list[Sighting]:
    named = [(name, _verdict(name, trace), at) for name, at in trace.names.items()]
    return [
        Sighting(where, ".".join(name), *verdict, at)
        for name, verdict, at in (*named, *_misused(trace))
    ]


def _verdict(name: NamedGlobal, trace: Trace) -> Verdict:
    if (
        name in ATTRIBUTES
        and ("looked up", name) in trace.uses
        and ("handed on", name) not in trace.uses
    ):
        return Verdict("plain", "looks up attributes by their names, which are judged themselves")
    return judge(*name)


def _misused(trace: Trace) -> Iterator[tuple[NamedGlobal, Verdict, int]]:
    """Globals of which what they gave is called, or is changed though it was there before."""
    for (use, name), at in trace.uses.items():
        if use == "changed" and gives_what_was_there(*name):
            reason = "changes items or attributes of an object that exists already"
            yield name, Verdict("dangerous", reason), at
        elif use == "called" and judge(*name).level != "dangerous":
            yield name, Verdict("dangerous", "makes an object that is called in turn"), at


def _bytes_of(source: Source, held: Held | bytes) -> bytes:
    """What a pickle in `source` holds; nothing where a text has no such form."""
    if isinstance(held, bytes):
        return held
    with contextlib.suppress(ValueError):
        return held_bytes(source, held)
    return b""
