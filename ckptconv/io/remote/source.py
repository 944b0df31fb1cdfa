"""An object of a store as a source: few requests, all of one version, several at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import NoReturn

from ckptconv.io.digests import PassingDigest, refuse_other
from ckptconv.io.files import note_input
from ckptconv.io.remote.patience import Budget, fetched
from ckptconv.io.remote.readahead import BLOCK, FarSource, copied, reading_ahead
from ckptconv.io.remote.store import ObjectBytes, Seen
from ckptconv.io.source import CHUNK, SMALL, Fingerprint, Pending, Range, Reopening, merged_runs

HEAD = 128 << 10
"""The bytes that the first request of an object fetches, and the last ones that any read near its
end does: the directories of most archives lie in them.
"""

_KEPT = 8 << 20  # bytes of windows that one source keeps
_MERGED = 128 << 20  # bytes of merged reads that all sources of the process keep
_GAP = 256 << 10  # bytes that nobody asked for, fetched because another request would cost more
_LONGEST = 8 << 20  # the bytes of one request
_WINDOW = 64 << 10  # bytes that a small read fetches
_FORESEEN = 4096  # small reads that are asked for together
# The ends of items of a DCP folder (64 KiB each) are read just before their values: up to this many
# times as much lies between them, and is fetched with them, if there is room to keep it.
_RATIO = 8


_BUDGET = Budget(_MERGED)


class RemoteSource(FarSource):
    """An object of a store, pinned to the version that was there when it was opened.

    `get` gives the bytes from a place on, as many as are asked for, and may be called by any
    thread; `windows` are bytes that are known already, by where they begin.
    """

    def __init__(
        self,
        get: Callable[[int, int], ObjectBytes],
        path: PurePath,
        seen: Seen,
        windows: Iterable[tuple[int, bytes]],
    ) -> None:
        self.path, self.size = path, seen.size
        note_input(str(path), path)
        self._get, self._seen = get, seen
        self._lock = threading.RLock()  # closing may be left to the garbage collector
        # what was fetched for small reads, by where it begins; the last one used stands last
        self._windows: OrderedDict[int, bytes | memoryview] = OrderedDict()
        self._small: dict[int, bytes] = {}  # what was foreseen, by where it begins
        self._is_closed = False
        self._passed = None if seen.sha256 is None else PassingDigest()
        self._merged = 0  # bytes of merged reads among the windows, which are not dropped
        for first, data in windows:
            self._keep(first, data)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an open file cannot be pickled or copied; open it by its address where it is needed"
        )

    # ------------------------------------------------------------------------------- reading

    def read_into(self, offset: int, view: memoryview) -> None:
        nbytes = len(view)
        self._require(offset, nbytes)
        if nbytes <= SMALL or not self._fill_ahead(offset, view):
            view[:] = self._bytes(offset, nbytes)
        if self._passed is not None:
            self._passed.add(offset, view)

    def begin_into(self, offset: int, view: memoryview) -> Pending:
        self._require(offset, len(view))

        def fill(at: int) -> None:
            part = view[at : at + BLOCK]
            copied(self.fetch(offset + at, len(part)), part)

        filling = [fetched(partial(fill, at)) for at in range(0, len(view), BLOCK)]

        def wait() -> None:
            for future in filling:
                future.result()
            if self._passed is not None:
                self._passed.add(offset, view)

        def cancel() -> None:
            for future in filling:
                future.cancel()

        return Pending(wait, cancel)

    def read(self, offset: int, nbytes: int) -> bytes:
        found = self._read(offset, nbytes)
        if self._passed is not None:
            self._passed.add(offset, memoryview(found))
        return found

    def _read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        if nbytes > SMALL and self.ahead is not None:
            whole = bytearray(nbytes)
            if self._fill_ahead(offset, memoryview(whole)):
                return bytes(whole)
        elif self.ahead is not None:
            held = self.ahead.held(self, offset, nbytes)
            if held is not None:
                return bytes(held)
        return bytes(self._bytes(offset, nbytes))

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        return self.begin_many(ranges)()

    def begin_many(self, ranges: Sequence[Range]) -> Callable[[], list[bytes]]:
        """Runs that lie near each other are fetched in one request, several requests at a time."""
        found = [b""] * len(ranges)
        waiting = []
        for number, (offset, nbytes) in enumerate(ranges):
            self._require(offset, nbytes)
            held = self._held(offset, nbytes)
            if held is None:
                waiting.append(number)
            else:
                found[number] = bytes(held)
        wanted = [ranges[number] for number in waiting]
        runs = list(merged_runs(wanted, longest=_LONGEST, gap=_near))
        if sum(last - first for first, last, _ in runs) > _BUDGET.left:
            runs = list(merged_runs(wanted, longest=_LONGEST, gap=lambda nbytes: _GAP))
        fetching = [
            (first, [waiting[at] for at in run], fetched(partial(self.fetch, first, last - first)))
            for first, last, run in runs
        ]

        def wait() -> list[bytes]:
            for first, members, future in fetching:
                data = future.result()
                if len(data) > 2 * sum(ranges[number][1] for number in members):
                    self._keep_merged(first, data)  # the payloads between them are read next
                for number in members:
                    offset, nbytes = ranges[number]
                    found[number] = bytes(data[offset - first : offset - first + nbytes])
            return found

        return wait

    def foresee(self, ranges: Sequence[Range]) -> None:
        for begin in range(0, len(ranges), _FORESEEN):
            some = [run for run in ranges[begin : begin + _FORESEEN] if run[1] <= HEAD]
            for (offset, _), data in zip(some, self.read_many(some), strict=True):
                self._small[offset] = data

    def stream(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        wanted = self._required(ranges)
        if self.ahead is not None or sum(nbytes for _, nbytes in wanted) <= CHUNK:
            yield from super().stream(wanted)
            return
        with reading_ahead([(self, offset, nbytes) for offset, nbytes in wanted]):
            yield from super().stream(wanted)

    def fetch(self, first: int, nbytes: int) -> memoryview:
        """The bytes from `first` on, but those in a window; any thread may ask."""
        pieces: list[memoryview] = []
        at, last = first, first + nbytes
        for start, data in self._within(first, last):
            if start > at:
                pieces.append(self._requested(at, start - at))
            pieces.append(data)
            at = start + len(data)
        if at < last or not pieces:
            pieces.append(self._requested(at, last - at))
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _within(self, first: int, last: int) -> list[tuple[int, memoryview]]:
        """What windows hold of a stretch, ascending; in the middle of it only what is worth asking
        once more for what follows.
        """
        with self._lock:
            windows = sorted(self._windows.items())
        found: list[tuple[int, memoryview]] = []
        at = first
        for start, data in windows:
            begin, end = max(at, start), min(last, start + len(data))
            least = 1 if begin == at or end == last else _GAP
            if end - begin >= least:
                found.append((begin, memoryview(data)[begin - start : end - start]))
                at = end
        return found

    def _requested(self, first: int, nbytes: int) -> memoryview:
        if self._is_closed:
            raise self.closed()
        part = self._get(first, nbytes)
        data = memoryview(part.data)
        self._refuse_other(part)
        if len(data) != nbytes:
            raise self.wrong(f"the server sent {len(data)} of {nbytes} bytes at {first}")
        return data

    def _fill_ahead(self, offset: int, view: memoryview) -> bool:
        return self.ahead is not None and self.ahead.fill(self, offset, view)

    def _bytes(self, offset: int, nbytes: int) -> bytes | memoryview:
        """Bytes out of a window, or fetched with what is likely to be asked for next."""
        if not nbytes:
            return b""
        held = self._held(offset, nbytes)
        if held is not None:
            return held
        begun = self._begun(offset)
        first, last = offset + len(begun), offset + nbytes
        rest = self._held(first, last - first) if begun else None
        if rest is not None:
            return b"".join((begun, rest))
        if nbytes <= SMALL:
            if offset >= self.size - _WINDOW:
                first, begun = max(0, self.size - _WINDOW), b""
            last = min(self.size, max(last, first + _WINDOW))
        elif begun and last - first < BLOCK:
            # who reads on and on is given more at a time
            last = min(self.size, first + min(BLOCK, max(last - first, 2 * len(begun))))
        data = self._in_blocks(first, last)
        if begun:
            data = b"".join((begun, data))
            first = offset
        if last - first <= BLOCK:
            self._keep(first, bytes(data))
        return memoryview(data)[offset - first : offset - first + nbytes]

    def _in_blocks(self, first: int, last: int) -> bytes | memoryview:
        """Bytes that may be many: fetched in several requests at a time."""
        if last - first <= 2 * BLOCK:
            return fetched(partial(self.fetch, first, last - first)).result()
        whole = bytearray(last - first)
        with reading_ahead([(self, first, last - first)]):
            for at in range(first, last, BLOCK):
                view = memoryview(whole)[at - first : min(at + BLOCK, last) - first]
                if not self._fill_ahead(at, view):
                    view[:] = self.fetch(at, len(view))
        return memoryview(whole)

    def _held(self, offset: int, nbytes: int) -> memoryview | None:
        """Bytes that one of the windows has all of."""
        known = self._small.get(offset, b"")
        if len(known) >= nbytes:
            return memoryview(known)[:nbytes]
        with self._lock:
            for start, data in reversed(self._windows.items()):
                if start <= offset and offset + nbytes <= start + len(data):
                    self._windows.move_to_end(start)
                    return memoryview(data)[offset - start : offset - start + nbytes]
        return None

    def _begun(self, offset: int) -> bytes | memoryview:
        """The bytes from `offset` on that one of the windows has, at its end."""
        with self._lock:
            for start, data in reversed(self._windows.items()):
                if start <= offset < start + len(data):
                    return data[offset - start :]
        return b""

    def _keep(self, first: int, data: bytes | memoryview) -> None:
        with self._lock:
            self._windows[first] = data
            self._windows.move_to_end(first)
            most = _KEPT + self._merged
            while len(self._windows) > 1 and sum(map(len, self._windows.values())) > most:
                self._windows.popitem(last=False)

    def _keep_merged(self, first: int, data: memoryview) -> None:
        if not self._is_closed and _BUDGET.take(len(data)):
            self._merged += len(data)
            self._keep(first, data)

    # ---------------------------------------------------------------------------- what it is

    def fingerprint(self) -> Fingerprint:
        return (str(self.path), self._seen.size, self._seen.tag)

    def reopening(self) -> Reopening | None:
        """None for an address of the web, which may hold a secret that is not to be passed on."""
        name = str(self.path)
        if name.startswith(("http:", "https:")):
            return None
        return Reopening(name, self.fingerprint())

    def is_file(self) -> bool:
        return True

    def is_for_threads(self) -> bool:
        return True

    def stated_sha256(self) -> str | None:
        return self._seen.sha256

    def check_unchanged(self) -> None:
        """Where the version is pinned, all that was read is of one version; so it is where nothing
        tells versions apart, for it came in one answer. What was read from end to end has to have
        the SHA-256 that the server says.
        """
        if self._passed is not None and (whole := self._passed.whole(self.size)):
            refuse_other(self, whole)
        if self._seen.tag and not self._seen.is_pinned and not self._is_closed:
            self._refuse_other(self._get(0, 1))

    def _refuse_other(self, part: ObjectBytes) -> None:
        if part.seen != self._seen:
            raise self.wrong("was changed while it was read", hint="start again")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._windows.clear()
            self._small.clear()
            _BUDGET.give_back(self._merged)
            self._merged = 0

    def __del__(self) -> None:
        self.close()


def _near(nbytes: int) -> int:
    """How many bytes before a run of `nbytes` are fetched with it, to save a request."""
    return _GAP if nbytes > HEAD else max(_GAP, _RATIO * nbytes)
