"""SHA-256 of bytes that pass by in order: of all of them, and of runs of them.

OpenSSL lets go of the interpreter while it hashes, so both are done in threads beside the copy that
the bytes are for. A conversion costs what hashing costs where it has a core to spare, and reads
nothing again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from hashlib import sha256

from ckptconv.io.crc import crc32
from ckptconv.io.source import Range, Source
from ckptconv.io.stream import Sink
from ckptconv.support.progress import Counting
from ckptconv.support.records import NamedTuple

_WORTH_THREADS = 1 << 16  # bytes from which to hand them to a thread takes less than to hash them


class Digests(NamedTuple):
    """The hexadecimal SHA-256 of a file, and of runs of its bytes."""

    whole: str
    runs: dict[Range, str]


class RunDigests:
    """The SHA-256 of all bytes it is given, and that of each of `runs`, which are not empty, lie in
    ascending order and do not overlap.

    `crcs` are the CRC-32 of the runs, with `has_crcs`, known when the last byte was given. `close`
    gives the threads back.
    """

    def __init__(self, runs: Sequence[Range], *, has_crcs: bool = False) -> None:
        self.crcs: list[int] = []
        self._digests: list[str] = []
        self._runs, self._has_crcs = runs, has_crcs
        self._whole, self._run, self._crc = sha256(), sha256(), 0
        self._at = 0
        self._threads: tuple[ThreadPoolExecutor, ...] = ()
        self._waiting: deque[tuple[Future[None], ...]] = deque()

    def result(self) -> Digests:
        """The digests, when all bytes were given."""
        runs = dict(zip(self._runs, self._digests, strict=True))
        return Digests(self._whole.hexdigest(), runs)

    def begin(self, view: memoryview) -> None:
        """Take the next bytes, which stay as they are until `wait` says so."""
        # while a thread still hashes what came before, this has to queue behind it
        if len(view) < _WORTH_THREADS and not self._waiting:
            self._whole.update(view)
            self._take(view)
            return
        if not self._threads:  # one each: the order of bytes is that in which they are handed over
            self._threads = tuple(ThreadPoolExecutor(1, "ckptconv-digest") for _ in range(2))
        whole, runs = self._threads
        self._waiting.append(
            (whole.submit(self._whole.update, view), runs.submit(self._take, view))
        )

    def wait(self, behind: int = 0) -> None:
        """Of the views that were given, at most the last `behind` are still looked at."""
        while len(self._waiting) > behind:
            for each in self._waiting.popleft():
                each.result()

    def close(self) -> None:
        """Take all that was given, and end the threads."""
        threads, self._threads = self._threads, ()
        for each in threads:
            each.shutdown()

    def _take(self, view: memoryview) -> None:
        """Give each run what there is of it."""
        at, end = self._at, self._at + len(view)
        while len(self._digests) < len(self._runs):
            first, nbytes = self._runs[len(self._digests)]
            if first >= end:
                break
            part = view[max(0, first - at) : min(first + nbytes, end) - at]
            self._run.update(part)
            if self._has_crcs:
                self._crc = crc32(part, self._crc)
            if first + nbytes > end:
                break
            self._digests.append(self._run.hexdigest())
            self.crcs.append(self._crc)
            self._run, self._crc = sha256(), 0
        self._at = end


def digested(
    source: Source, runs: Sequence[Range], meter: Counting, *, has_crcs: bool = False
) -> RunDigests:
    """The digests of a whole source and of runs of it, all of which is read once."""
    with closing(RunDigests(runs, has_crcs=has_crcs)) as digests:
        for view in source.stream([(0, source.size)]):
            digests.begin(view)
            digests.wait()
            meter.add(len(view))
    return digests


def refuse_other(source: Source, sha256: str) -> None:
    """Raise `MalformedCheckpoint` where a source has another SHA-256 than its server says."""
    stated = source.stated_sha256()
    if stated is not None and stated != sha256:
        hint = "fetch it again; what is there now is not what was put there"
        what = f"has the SHA-256 {sha256}, and the Hub says {stated}"
        raise source.wrong(what, code="checksum", hint=hint)


class PassingDigest:
    """The SHA-256 of a file that is read in pieces, as long as they follow one another from its
    first byte on. What was hashed may be read again; what is passed over leaves it unknown. Several
    threads may tell of what they read.
    """

    def __init__(self) -> None:
        self._digest, self._at = sha256(), 0
        self._lock = threading.Lock()

    def add(self, offset: int, view: memoryview) -> None:
        """The bytes from `offset` on were read."""
        with self._lock:
            known = self._at - offset
            if 0 <= known < len(view):
                self._digest.update(view[known:])
                self._at += len(view) - known

    def whole(self, size: int) -> str | None:
        """The SHA-256 of a file of so many bytes; None where not all of them have passed by."""
        return self._digest.hexdigest() if self._at == size else None


class DigestingSink(Sink):
    """Another sink, whose bytes are hashed while it takes them. They are hashed in their order, so
    no part of them may be written before another.
    """

    holds = 3
    """So the threads have a view to go on with when they are done with one: where they waited for
    each other at each MiB, two cores were idle for a third of the time.
    """

    def __init__(self, inner: Sink, passing: RunDigests) -> None:
        self._inner, self._passing = inner, passing

    def write(self, view: memoryview) -> None:
        self._passing.wait(self.holds - 1)
        self._passing.begin(view)
        self._inner.write(view)

    def end(self, size: int, *, fsync: bool) -> None:
        self._passing.wait()
        self._passing.close()
        self._inner.end(size, fsync=fsync)

    def close(self) -> None:
        self._passing.close()
        self._inner.close()
