"""Files of this host as sources: by themselves, or many of which a few are open at a time.

Only this module has files opened to read them (`destination` those to write); how each system does
it stands in `platforms`. What the bytes mean is the business of the layers below.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import NoReturn

from ckptconv.io.source import SMALL, Fingerprint, Range, Reopening, Source, merged_runs
from ckptconv.support import platforms
from ckptconv.support.errors import (
    CheckpointError,
    OutputRefused,
    UnsupportedCheckpoint,
    not_opened,
)
from ckptconv.support.limits import in_force, refuse_beyond
from ckptconv.support.settings import set_within

_WINDOW = 1 << 16  # bytes that are fetched where few are read: the next mostly lie near


class FileSource(Source):
    """A regular file, for positioned reads; never mapped, so one that shrinks is an error."""

    path: Path

    def __init__(self, path: str | os.PathLike[str], fd: int | None = None) -> None:
        self.path = path if isinstance(path, Path) else Path(path)
        self._fd = _open_regular(self.path) if fd is None else fd
        found = os.fstat(self._fd)
        self.size = found.st_size
        self._stamp = stamp(found)
        note = _NOTING.get()
        if note is not None:
            note(found)
        note_input((found.st_dev, found.st_ino), self.path)
        # the last bytes fetched for a small read, and their place: small records lie side by side
        self._window = b"", 0

    def __reduce__(self) -> NoReturn:
        """What is open here is not so in another process, whose descriptor is another file's."""
        raise TypeError(
            "an open file cannot be pickled or copied; open it by its path where it is needed"
        )

    def read_into(self, offset: int, view: memoryview) -> None:
        if offset < 0:  # preadv(2) takes -1 for the place that the descriptor has
            raise self.wrong(f"byte {offset} lies before its start")
        while view:
            fd = self._descriptor()  # each time: meanwhile another thread may close it
            try:
                count = platforms.read_into_at(fd, view, offset)
            except OSError as error:
                raise self._unread(error) from error
            if not count:
                raise self.wrong(f"ends at byte {offset}, more was expected")
            if count == len(view):
                return
            view, offset = view[count:], offset + count

    def read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        known = self._in_window(offset, nbytes)
        if known is not None:
            return known
        if nbytes <= SMALL:
            fd = self._descriptor()
            try:
                window = platforms.read_at(fd, _WINDOW, offset)
            except OSError as error:
                raise self._unread(error) from error
            self._window = window, offset
            if len(window) >= nbytes:
                return window[:nbytes]
        return self._exactly(offset, nbytes)

    def foresee(self, ranges: Sequence[Range]) -> None:
        """Have the disk work on all of them, not on one after the other."""
        if len(ranges) > 1:
            with contextlib.suppress(CheckpointError):  # it only asks; reading says what is wrong
                platforms.will_need(self._descriptor(), ranges)

    def _in_window(self, offset: int, nbytes: int) -> bytes | None:
        """Bytes that were fetched with others."""
        window, at = self._window  # in one go: another thread may put another one there
        start = offset - at
        if start >= 0 and start + nbytes <= len(window):
            return window[start : start + nbytes]
        return None

    def _known(self, offset: int, nbytes: int) -> bytes:
        known = self._in_window(offset, nbytes)
        return self._exactly(offset, nbytes) if known is None else known

    def _exactly(self, offset: int, nbytes: int) -> bytes:
        fd = self._descriptor()
        try:
            raw = platforms.read_at(fd, nbytes, offset)
        except OSError as error:
            raise self._unread(error) from error
        if len(raw) == nbytes:
            return raw
        whole = bytearray(nbytes)  # in pieces, or not all there
        self.read_into(offset, memoryview(whole))
        return bytes(whole)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Runs that lie near each other are read in one go, what is between them too."""
        found = [b""] * len(ranges)
        for first, last, members in merged_runs(ranges):
            self._require(first, last - first)
            if len(members) == 1:
                found[members[0]] = self._known(*ranges[members[0]])
                continue
            whole = self._known(first, last - first)
            for member in members:
                offset, nbytes = ranges[member]
                found[member] = whole[offset - first : offset - first + nbytes]
        return found

    def _descriptor(self) -> int:
        if self._fd < 0:
            raise self.closed()
        return self._fd

    def _unread(self, error: OSError) -> CheckpointError:
        what = f"cannot be read: {os.strerror(error.errno or 0)}"
        return self.wrong(what, hint="the disk or the network fails")

    def fingerprint(self) -> Fingerprint:
        return self._stamp

    def is_file(self) -> bool:
        return True

    def reopening(self) -> Reopening | None:
        return Reopening(str(self.path.absolute()), self._stamp)

    def is_for_threads(self) -> bool:
        return True

    def data_from(self, offset: int) -> int:
        if offset >= self.size:
            return self.size
        return platforms.next_data(self._descriptor(), offset, self.size)

    def mappable_path(self) -> str | None:
        """A path to this very file whoever gets its name meanwhile, where the system has one."""
        return platforms.path_of_open(self._fd) or str(self.path)

    def check_mapped(self) -> None:
        if platforms.ON_WINDOWS or platforms.path_of_open(self._fd) is not None:
            return
        try:
            now = stamp(self.path.stat())
        except OSError:
            now = ()  # it is gone
        if now != self._stamp:
            raise self.wrong("was replaced while it was read", hint="load it again")

    def check_unchanged(self) -> None:
        if self._fd >= 0 and stamp(os.fstat(self._fd)) != self._stamp:
            raise self.wrong("was changed while it was read", hint="convert it again")

    def let_go(self, replaced: Sequence[str]) -> None:
        here = Path(os.path.realpath(self.path))
        if any(here.is_relative_to(path) for path in replaced):
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        self._window = b"", 0
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written to it that could be lost
                os.close(fd)


_NOTING: ContextVar[Callable[[os.stat_result], None] | None] = ContextVar(
    "what notes opened files", default=None
)


def noting_files(note: Callable[[os.stat_result], None]) -> AbstractContextManager[object]:
    """Within the block, `note` is told of each file that is opened."""
    return set_within(_NOTING, note)


# What the run in which this is called has opened to read: files by their device and inode, objects
# of stores by their addresses. By inodes, for a file may have several names, and links lead to it.
_INPUTS: ContextVar[dict[tuple[int, int] | str, PurePath] | None]
_INPUTS = ContextVar("inputs", default=None)


def note_input(named: tuple[int, int] | str, path: PurePath) -> None:
    """The run has opened a file, or an object, to read."""
    inputs = _INPUTS.get()
    if inputs is not None:
        inputs.setdefault(named, path)


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """The block is one run: no output takes the place of a file that it has read. Within another
    one it is part of that.
    """
    inputs = _INPUTS.get()
    with set_within(_INPUTS, {} if inputs is None else inputs):
        yield


@contextlib.contextmanager
def compared() -> Iterator[None]:
    """What is read in the block is not an input of the run: it is an output, to be replaced."""
    apart: dict[tuple[int, int] | str, PurePath] = {}
    with set_within(_INPUTS, apart):
        yield


def refuse_inputs(outputs: Iterable[PurePath], replaced: Iterable[Source] = ()) -> None:
    """Raise `OutputRefused` where an output is, or is a folder around, a file that this run has
    read: a checkpoint, a part of one, rules, a list of keys. `replaced` are the sources whose place
    it is to take.
    """
    files = [source for source in replaced if source.is_file()]
    own = {*(source.fingerprint()[:2] for source in files), *(str(source.path) for source in files)}
    inputs = _INPUTS.get() or {}
    if inputs.keys() <= own:
        return  # names of an earlier set are not asked for: a store has to list them
    for output in outputs:
        try:
            found = output.stat() if isinstance(output, Path) else None
        except OSError:
            continue  # nothing is there, so no input is
        named = str(output) if found is None else (found.st_dev, found.st_ino)
        # a lookup: a batch of 10,000 files asks 10,000 times, of as many inputs
        if named in inputs and named not in own:
            what = "is read by this run, so it cannot be one of its outputs"
            raise OutputRefused(what, path=output, hint="name another file")
        if found is not None and stat.S_ISDIR(found.st_mode):
            real = Path(os.path.realpath(output))
            read = (path for named, path in inputs.items() if named not in own)
            local = (path for path in read if isinstance(path, Path))
            inside = [path for path in local if Path(os.path.realpath(path)).is_relative_to(real)]
            if inside:
                what = f"holds {inside[0].name}, which is read by this run"
                raise OutputRefused(what, path=output, hint="name another folder")


def stamp(found: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is written to, or when its name is given to another."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _open_regular(path: Path) -> int:
    try:
        fd = platforms.open_to_read(path)
    except OSError as error:
        raise not_opened(error, path) from (None if error.errno == errno.ENOENT else error)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise not_opened(errno.EISDIR, path)
    raise UnsupportedCheckpoint("is not a regular file but a pipe, socket or device", path=path)


def let_go(sources: Iterable[Source], replaced: Iterable[Path]) -> None:
    """Close the files at or in the paths that are to be `replaced`, which cannot be read then."""
    targets = [os.path.realpath(path) for path in replaced]
    for source in sources:
        source.let_go(targets)


def refuse_changed(sources: Iterable[Source]) -> None:
    """Raise `MalformedCheckpoint` when somebody wrote to one of the files since it was opened."""
    for source in sources:
        source.check_unchanged()


def read_whole(source: Source, limit: str) -> bytes:
    """All of a source, which is closed then. `limit` is the name of the limit of its size, and
    `LimitExceeded` is raised where it is larger.
    """
    with contextlib.closing(source):
        refuse_beyond(limit, source.size, f"has {source.size} bytes", path=source.path)
        return source.read(0, source.size)


_RESERVED = 16  # descriptors for the program itself: streams, modules, locks, outputs, pipes


def kept_open(most: int) -> int:
    """How many files of a checkpoint may be open at a time: `most`, or as many as this process may
    open where that is less.

    Several checkpoints are open where they are compared or merged: one has a quarter.
    """
    allowed = platforms.most_open_files()
    if allowed is None:
        return most
    return min(most, max(1, (allowed - _RESERVED) // 4))


class FilePool:
    """Any number of files of which a few are open at a time: a checkpoint of 3,000 ranks has more
    than a process may open.

    A file that has to wait is closed, and opened again when it is read; one that was replaced
    meanwhile is an error.
    """

    def __init__(self) -> None:
        self._open: dict[PooledSource, None] = {}  # the one used last stands last
        self._most = kept_open(in_force().open_files)

    def hold(self, source: PooledSource) -> None:
        """Note that `source` is open and in use; of too many, close the one unused for longest."""
        self._open.pop(source, None)
        self._open[source] = None
        if len(self._open) > self._most:
            next(iter(self._open)).rest()

    def release(self, source: PooledSource) -> None:
        """Note that `source` is not open any more."""
        self._open.pop(source, None)

    def rest(self) -> None:
        """Close all that are open until they are read again."""
        for source in [*self._open]:
            source.rest()


class PooledSource(FileSource):
    """A file of a `FilePool`, opened once at first to see that it is there and how long it is."""

    def __init__(self, path: Path, pool: FilePool) -> None:
        super().__init__(path)
        self._pool = pool
        self._is_closed = False
        pool.hold(self)

    def is_for_threads(self) -> bool:
        return False  # to open one, a pool closes another one, which a thread may be reading

    def mappable_path(self) -> str | None:
        """None: a mapping would hold the file open while it rests."""
        return None

    def rest(self) -> None:
        """Give the file descriptor and the memory back until the next read."""
        super().close()
        self._pool.release(self)

    def close(self) -> None:
        self.rest()
        self._is_closed = True

    def _descriptor(self) -> int:
        if self._fd < 0:
            if self._is_closed:
                raise self.closed()
            self._fd = _open_regular(self.path)
            if stamp(os.fstat(self._fd)) != self._stamp:
                self.rest()
                raise self.wrong("was replaced or changed while it was read")
        self._pool.hold(self)
        return self._fd
