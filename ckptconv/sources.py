"""Sources as ranges of bytes: files, files within files, inflated records, bytes in memory.

Only this module has files opened to read them (`outputs` those to write); how each system does it stands in `platforms`.
What the bytes mean is the business of the layers below.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, NoReturn, Protocol

from ckptconv import platforms
from ckptconv.bounds import in_force
from ckptconv.errors import LimitExceeded, MalformedCheckpoint, OutputRefused, UnsupportedCheckpoint, not_opened

try:  # several times quicker than zlib where the processor has carry-less multiplication
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = [
    "CHUNK",
    "SMALL",
    "FilePool",
    "FileSource",
    "InflatedSource",
    "MemorySource",
    "RangeSource",
    "Source",
    "Spool",
    "combined_crc",
    "crc32",
    "is_bomb",
    "let_go",
    "noting_files",
    "refuse_changed",
    "stamp",
]


def combined_crc(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, from that of each and the length of the second.

    Appending a zero byte is a linear map of the 32 bits; its powers are squared. The method is that of zlib's crc32_combine.
    """
    for bit in range(nbytes.bit_length()):
        if bit == len(_ZEROS):
            _ZEROS.append(tuple(_applied(_ZEROS[-1], row) for row in _ZEROS[-1]))
        if nbytes >> bit & 1:
            first = _applied(_ZEROS[bit], first)
    return first ^ second


def _applied(rows: tuple[int, ...], bits: int) -> int:
    """The image of `bits` under the map that takes bit i to `rows[i]`."""
    image = 0
    for row in rows:
        if bits & 1:
            image ^= row
        bits >>= 1
    return image


_ZEROS = [tuple(crc32(b"\0", 1 << bit) ^ crc32(b"\0", 0) for bit in range(32))]
"""What appending 1, 2, 4, ... zero bytes does to each bit; made as far as it is needed."""

CHUNK = 1 << 20
"""The size in bytes of every copy buffer, and so of the views that the readers yield."""

_WINDOW = 1 << 16
SMALL = 1 << 12
"""Up to this many bytes, a read fetches what follows too."""


class Source(Protocol):
    """Bytes that can be read at any offset: a file, or a record that must be inflated first."""

    path: Path
    size: int

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill all of `view` with the bytes from `offset` on; `MalformedCheckpoint` when they are not there."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The `nbytes` bytes from `offset` on."""

    def close(self) -> None:
        """Give the file descriptor back; a second call does nothing."""


class FileSource:
    """A regular file, opened for positioned reads only; it is never mapped, so a file that shrinks is an error."""

    def __init__(self, path: str | os.PathLike[str], fd: int | None = None) -> None:
        self.path = Path(path)
        self._fd = _open_regular(self.path) if fd is None else fd
        found = os.fstat(self._fd)
        self.size = found.st_size
        self._stamp = stamp(found)
        if (note := _NOTING.get()) is not None:
            note(found)
        self._window, self._window_at = b"", 0  # the last bytes fetched for a small read: small records lie side by side

    def __reduce__(self) -> NoReturn:
        """What is open here is not open in another process, and the number of its descriptor is another file's there."""
        raise TypeError("an open file cannot be pickled or copied; open it by its path where it is needed")

    def read_into(self, offset: int, view: memoryview) -> None:
        while view:
            with _read_errors(self.path):
                count = platforms.read_into_at(self._fd, view, offset)
            if not count:
                raise MalformedCheckpoint(f"ends at byte {offset}, more was expected", path=self.path)
            if count == len(view):
                return
            view, offset = view[count:], offset + count

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes > self.size - offset:
            raise MalformedCheckpoint(f"{nbytes} bytes at {offset} lie beyond its end ({self.size})", path=self.path)
        start = offset - self._window_at
        if start >= 0 and start + nbytes <= len(self._window):
            return self._window[start : start + nbytes]
        if nbytes <= SMALL:
            with _read_errors(self.path):
                self._window, self._window_at = platforms.read_at(self._fd, _WINDOW, offset), offset
            if len(self._window) >= nbytes:
                return self._window[:nbytes]
        whole = bytearray(nbytes)
        self.read_into(offset, memoryview(whole))
        return bytes(whole)

    def next_data(self, offset: int) -> int:
        """The first byte from `offset` on that lies on the disk and in no hole; the size where there is none."""
        return platforms.next_data(self._fd, offset, self.size) if offset < self.size else self.size

    def mappable_path(self) -> str:
        """A path under which another library can map this very file, even if its name is given to another meanwhile."""
        return platforms.path_of_open(self._fd) or str(self.path)

    def refuse_replaced(self) -> None:
        """Raise `MalformedCheckpoint` when `mappable_path` may have led to another file by now, where that is possible."""
        if platforms.ON_WINDOWS or platforms.path_of_open(self._fd) is not None:
            return
        try:
            now = stamp(self.path.stat())
        except OSError:
            now = ()
        if now != self._stamp:
            raise MalformedCheckpoint("was replaced while it was read", path=self.path, hint="load it again")

    def refuse_changed(self) -> None:
        """Raise `MalformedCheckpoint` when somebody wrote to the file since it was opened: old and new were read mixed."""
        if self._fd >= 0 and stamp(os.fstat(self._fd)) != self._stamp:
            raise MalformedCheckpoint("was changed while it was read", path=self.path, hint="convert it again")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written to it that could be lost
                os.close(fd)


_NOTING: ContextVar[Callable[[os.stat_result], None] | None] = ContextVar("what notes opened files", default=None)


@contextlib.contextmanager
def noting_files(note: Callable[[os.stat_result], None]) -> Iterator[None]:
    """Within the block, `note` is told of each file that is opened."""
    token = _NOTING.set(note)
    try:
        yield
    finally:
        _NOTING.reset(token)


def stamp(found: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is written to, or when its name is given to another."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot be read: {os.strerror(error.errno or 0)}"
        raise MalformedCheckpoint(what, path=path, hint="the disk or the network fails") from error


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
    """Close the files that lie at or in one of the paths that are to be `replaced`; they cannot be read any more."""
    targets = [os.path.realpath(path) for path in replaced]
    for source in sources:
        if isinstance(source, FileSource) and any(Path(os.path.realpath(source.path)).is_relative_to(path) for path in targets):
            source.close()


def refuse_changed(sources: Iterable[Source]) -> None:
    """Raise `MalformedCheckpoint` when somebody wrote to one of the files since it was opened."""
    for source in sources:
        if isinstance(source, FileSource):
            source.refuse_changed()


class FilePool:
    """Any number of files of which a few are open at a time: a checkpoint of 3,000 ranks has more than a process may open.

    A file that has to wait is closed, and opened again when it is read; one that was replaced meanwhile is an error.
    """

    def __init__(self) -> None:
        self._open: dict[PooledSource, None] = {}  # the one used last stands last
        self._most = in_force().open_files

    def source(self, path: Path) -> PooledSource:
        """The file at `path`, opened once to see that it is there and how long it is."""
        return PooledSource(path, self)

    def hold(self, source: PooledSource) -> None:
        """Note that `source` is open and in use; close the one that was not used for longest where there are too many."""
        self._open.pop(source, None)
        self._open[source] = None
        if len(self._open) > self._most:
            next(iter(self._open)).rest()

    def release(self, source: PooledSource) -> None:
        """Note that `source` is not open any more."""
        self._open.pop(source, None)


class PooledSource(FileSource):
    """A file of a `FilePool`."""

    def __init__(self, path: Path, pool: FilePool) -> None:
        super().__init__(path)
        self._pool = pool
        self._is_closed = False
        pool.hold(self)

    def read_into(self, offset: int, view: memoryview) -> None:
        self._wake()
        super().read_into(offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._wake()
        return super().read(offset, nbytes)

    def rest(self) -> None:
        """Give the file descriptor and the memory back until the next read."""
        super().close()
        self._window = b""
        self._pool.release(self)

    def close(self) -> None:
        self.rest()
        self._is_closed = True

    def _wake(self) -> None:
        if self._fd < 0 and not self._is_closed:
            self._fd = _open_regular(self.path)
            if stamp(os.fstat(self._fd)) != self._stamp:
                self.rest()
                raise MalformedCheckpoint("was replaced or changed while it was read", path=self.path)
        self._pool.hold(self)


def stays_within(path: Path, folder: Path) -> bool:
    """Whether no link leads from `path` out of `folder`.

    The ``blobs`` of a repository in the Hugging Face cache are not out of its snapshots, which consist of links to them.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    return real.is_relative_to(home) or (snapshots is not None and real.is_relative_to(snapshots.parent / "blobs"))


def within(path: Path, folder: Path) -> Path:
    """`path`, a file of a checkpoint of many files; `MalformedCheckpoint` when a link leads from it out of `folder`."""
    if not stays_within(path, folder):
        hint = "name the folder that it leads to, or copy the file"
        raise MalformedCheckpoint("is a link that leads out of the folder", path=path, hint=hint)
    return path


class Spool:
    """One unnamed temporary file for all that is inflated out of an archive."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def append(self, pieces: Iterator[bytes]) -> tuple[FileSource, int]:
        """Append the pieces; returns where they can be read."""
        try:
            if self._file is None:
                self._file, reading = platforms.unnamed_file("ckptconv-")
                self._source = FileSource(self._file.name, reading)
            start = self._file.seek(0, os.SEEK_END)
            for piece in pieces:
                self._file.write(piece)
            self._source.size = self._file.tell()
            self._file.flush()
        except OSError as error:
            what = f"cannot inflate into {platforms.temporary_folder()}: {os.strerror(error.errno or 0)}"
            raise OutputRefused(what, hint="set TMPDIR to a folder with enough room") from error
        return self._source, start

    def close(self) -> None:
        """Give the temporary file back."""
        if self._file is not None:
            self._source.close()
            self._file.close()


def is_bomb(deflated: int, size: int) -> bool:
    """Whether `deflated` bytes that claim to be `size` bytes are more than the limits allow."""
    most = in_force()
    return size > most.inflated_free and size > deflated * most.inflated_ratio


class InflatedSource:
    """A deflated run of another source, inflated once, on first use, into a spool.

    Memory stays bounded and every later layer sees plain bytes at plain offsets. The length and the CRC-32 are checked
    while inflating; `MalformedCheckpoint` when they do not hold.
    """

    def __init__(self, parent: Source, offset: int, deflated: int, size: int, crc: int | None, name: str, spool: Spool) -> None:
        if is_bomb(deflated, size):
            raise LimitExceeded(
                f"claims to inflate {deflated} bytes to {size}",
                limit="inflated_ratio",
                allowed=in_force().inflated_ratio,
                needed=-(-size // max(1, deflated)),
                path=parent.path,
                where=name,
                advice="it looks like a decompression bomb",
            )
        self.path, self.size = parent.path, size
        self._parent, self._offset, self._deflated, self._crc, self._name = parent, offset, deflated, crc, name
        self._spool = spool
        self._place: tuple[FileSource, int] | None = None

    def read_into(self, offset: int, view: memoryview) -> None:
        plain, start = self._inflated()
        plain.read_into(start + offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        plain, start = self._inflated()
        return plain.read(start + offset, nbytes)

    def close(self) -> None:
        self._spool.close()

    def _inflated(self) -> tuple[FileSource, int]:
        if self._place is None:
            self._place = self._spool.append(self._pieces())
        return self._place

    def _pieces(self) -> Iterator[bytes]:
        inflater, crc, total = zlib.decompressobj(-15), 0, 0
        for start in range(0, self._deflated, CHUNK):
            pending = self._parent.read(self._offset + start, min(CHUNK, self._deflated - start))
            piece = b""
            while pending or len(piece) == CHUNK:  # a full piece may leave more inside the inflater
                piece = self._decompress(inflater, pending)
                pending, crc, total = inflater.unconsumed_tail, crc32(piece, crc), total + len(piece)
                if total > self.size or inflater.unused_data:
                    raise MalformedCheckpoint("inflates to more than it declares", path=self.path, where=self._name)
                yield piece
        if not inflater.eof or total != self.size or (self._crc is not None and crc != self._crc):
            raise MalformedCheckpoint("does not inflate to what the archive says", path=self.path, where=self._name)

    def _decompress(self, inflater: zlib._Decompress, pending: bytes) -> bytes:
        try:
            return inflater.decompress(pending, CHUNK)
        except zlib.error as error:
            raise MalformedCheckpoint(f"is not deflated as declared ({error})", path=self.path, where=self._name) from error


class RangeSource:
    """The `size` bytes of another source from `start` on: a file within a file. Closing it leaves the other open."""

    def __init__(self, parent: Source, start: int, size: int) -> None:
        if start < 0 or size < 0 or start + size > parent.size:
            raise MalformedCheckpoint(f"{size} bytes at {start} lie beyond its end ({parent.size})", path=parent.path)
        self.path, self.size = parent.path, size
        self._parent, self._start = parent, start

    def read_into(self, offset: int, view: memoryview) -> None:
        if offset + len(view) > self.size:
            raise MalformedCheckpoint(f"ends at byte {self.size}, more was expected", path=self.path)
        self._parent.read_into(self._start + offset, view)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes > self.size - offset:
            raise MalformedCheckpoint(f"{nbytes} bytes at {offset} lie beyond its end ({self.size})", path=self.path)
        return self._parent.read(self._start + offset, nbytes)

    def close(self) -> None:
        """Nothing to give back: the other source is its opener's."""


class MemorySource:
    """Bytes that are in memory already, such as an array that a pickle holds."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path, self.size = path, len(data)
        self._data = data

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self.read(offset, len(view))

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes > self.size - offset:
            raise MalformedCheckpoint(f"{nbytes} bytes at {offset} lie beyond its end ({self.size})", path=self.path)
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        """Nothing to give back."""
