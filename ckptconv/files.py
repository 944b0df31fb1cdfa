"""Files as ranges of bytes: positioned reads of a source, one buffered output that appears whole or not at all.

Nothing else in the package opens a file. What the bytes mean is the business of the layers below.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Protocol

from ckptconv.errors import CheckpointError, LimitExceeded, MalformedCheckpoint, OutputRefused, UnsupportedCheckpoint
from ckptconv.limits import LIMITS

try:  # several times quicker than zlib where the processor has carry-less multiplication
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["CHUNK", "FileSource", "InflatedSource", "OutputStream", "Source", "Spool", "atomic_output", "check_output", "crc32"]

CHUNK = 1 << 20
"""The size in bytes of every copy buffer, and so of the views that the readers yield."""

_BUFFERS = 4
_RESERVE_FROM = 16 << 20
_WINDOW = 1 << 16
SMALL = 1 << 12
"""Up to this many bytes, a read fetches what follows too."""
_TEMPORARY = ".ckptconv-tmp"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = _open_regular(self.path)
        self.size = os.fstat(self._fd).st_size
        self._window, self._window_at = b"", 0  # the last bytes fetched for a small read: small records lie side by side

    def read_into(self, offset: int, view: memoryview) -> None:
        while view:
            with _read_errors(self.path):
                count = os.preadv(self._fd, [view], offset)
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
                self._window, self._window_at = os.pread(self._fd, _WINDOW, offset), offset
            if len(self._window) >= nbytes:
                return self._window[:nbytes]
        whole = bytearray(nbytes)
        self.read_into(offset, memoryview(whole))
        return bytes(whole)

    def mappable_path(self) -> str:
        """A path under which another library can map this very file, even if its name is given to another meanwhile."""
        through_fd = f"/proc/self/fd/{self._fd}"
        return through_fd if Path(through_fd).exists() else str(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot be read: {os.strerror(error.errno or 0)}"
        raise MalformedCheckpoint(what, path=path, hint="the disk or the network behind it fails") from error


def _open_regular(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnsupportedCheckpoint("no such file", path=path, hint="check the path") from None
    except OSError as error:
        raise UnsupportedCheckpoint(f"cannot be opened: {os.strerror(error.errno or 0)}", path=path) from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise UnsupportedCheckpoint(
            "is a folder; folders of shards are not read yet", path=path, hint="name the file inside it"
        )
    raise UnsupportedCheckpoint("is not a regular file but a pipe, socket or device", path=path)


class Spool:
    """One unnamed temporary file for all that is inflated out of an archive."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def append(self, pieces: Iterator[bytes]) -> tuple[FileSource, int]:
        """Append the pieces; returns where they can be read."""
        import tempfile  # seldom needed, and slow to import

        try:
            if self._file is None:
                self._file = tempfile.NamedTemporaryFile(prefix="ckptconv-")  # noqa: SIM115
                self._source = FileSource(self._file.name)
            start = self._file.seek(0, os.SEEK_END)
            for piece in pieces:
                self._file.write(piece)
            self._source.size = self._file.tell()
            self._file.flush()
        except OSError as error:
            what = f"cannot inflate into {tempfile.gettempdir()}: {os.strerror(error.errno or 0)}"
            raise OutputRefused(what, hint="set TMPDIR to a folder with room") from error
        return self._source, start

    def close(self) -> None:
        """Give the temporary file back."""
        if self._file is not None:
            self._source.close()
            self._file.close()


class InflatedSource:
    """A deflated run of another source, inflated once, on first use, into a spool.

    Memory stays bounded and every later layer sees plain bytes at plain offsets. The length and the CRC-32 are checked
    while inflating; `MalformedCheckpoint` when they do not hold.
    """

    def __init__(self, parent: Source, offset: int, deflated: int, size: int, crc: int | None, name: str, spool: Spool) -> None:
        if size > LIMITS.inflated_free and size > deflated * LIMITS.inflated_ratio:
            raise LimitExceeded(
                f"claims to inflate {deflated} bytes to {size}, more than {LIMITS.inflated_ratio}-fold",
                path=parent.path,
                where=name,
                hint="a decompression bomb; store it uncompressed if it is real",
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


class OutputStream:
    """Sequential output through a ring of `CHUNK`-sized buffers that a second thread writes out.

    Reading, checksumming and casting fill one buffer while the kernel takes another, which is what makes a conversion
    as quick as a copy. A small file never starts the thread. Errors of the writing thread are raised by the next call.
    """

    def __init__(self, fd: int, on_progress: Callable[[int], None] | None = None) -> None:
        self.position = 0
        self._fd = fd
        self._on_progress = on_progress
        self._buffer = memoryview(bytearray(CHUNK))
        self._filled = 0
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`; the caller may reuse its memory at once."""
        size = len(data)
        end = self._filled + size
        if end < CHUNK:
            self._buffer[self._filled : end] = data
            self._filled = end
            self.position += size
            return
        view = memoryview(data)
        while view:
            room = min(CHUNK - self._filled, len(view))
            self._buffer[self._filled : self._filled + room] = view[:room]
            self._advance(room)
            view = view[room:]

    def copy(self, source: Source, offset: int, nbytes: int) -> int:
        """Append `nbytes` of `source` from `offset` on, read straight into the buffers; returns their CRC-32."""
        crc = 0
        while nbytes:
            room = min(CHUNK - self._filled, nbytes)
            view = self._buffer[self._filled : self._filled + room]
            source.read_into(offset, view)
            crc = crc32(view, crc)
            self._advance(room)
            offset, nbytes = offset + room, nbytes - room
        return crc

    def finish(self) -> None:
        """Write out what is left and wait for it."""
        if self._thread is None:
            _write_all(self._fd, self._buffer[: self._filled])
        else:
            self._full.put(self._buffer[: self._filled])
            self._stop()
            self._raise_failure()
        self._filled = 0

    def abandon(self) -> None:
        """Stop the writing thread without waiting for unwritten buffers to matter."""
        if self._thread is not None:
            self._stop()

    def _advance(self, count: int) -> None:
        self._filled += count
        self.position += count
        if self._filled == CHUNK:
            self._hand_over()
            if self._on_progress:
                self._on_progress(self.position)

    def _hand_over(self) -> None:
        if self._thread is None:
            for _ in range(_BUFFERS - 1):
                self._free.put(memoryview(bytearray(CHUNK)))
            self._thread = threading.Thread(target=self._drain, name="ckptconv-writer", daemon=True)
            self._thread.start()
        self._full.put(self._buffer)
        self._buffer, self._filled = self._free.get(), 0
        self._raise_failure()

    def _drain(self) -> None:
        while (view := self._full.get()) is not None:
            if self._failure is None:
                try:
                    _write_all(self._fd, view)
                except OSError as error:
                    self._failure = error
            self._free.put(view)

    def _stop(self) -> None:
        assert self._thread is not None
        self._full.put(None)
        self._thread.join()
        self._thread = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def check_output(path: Path, *, force: bool) -> None:
    """Refuse an output that must not be written, before any work is done.

    Raises `OutputRefused` when `path` exists and `force` is not set, when it is a folder or a device, or when its folder
    is missing.
    """
    with _output_errors(path):
        if path.is_dir():
            raise OutputRefused("is a folder", path=path, hint="name a file to write")
        if path.exists() and not path.is_file():
            raise OutputRefused("is a pipe, socket or device, which cannot be replaced atomically", path=path)
        if path.exists() and not force:
            raise OutputRefused("exists", path=path, hint="add --force to replace it (force=True in code)")
        if not _target(path).parent.is_dir():
            raise OutputRefused("its folder does not exist", path=path, hint=f"mkdir -p {path.parent}")


def _target(path: Path) -> Path:
    """The file that is meant: symbolic links are followed, as cp does."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before python 3.13
        raise OutputRefused("is a link that leads nowhere", path=path, hint="name a file to write") from error


@contextlib.contextmanager
def atomic_output(
    path: Path, *, force: bool, fsync: bool, size: int = 0, on_progress: Callable[[int], None] | None = None
) -> Iterator[tuple[OutputStream, Path]]:
    """An output that is at `path` only when the block has ended well: temporary sibling, fsync, rename, folder fsync.

    Yields the stream and the temporary's path. When anything is raised, the temporary is removed and what was at `path`
    stays. Without `force` a file that appeared in the meantime is not replaced. `size`, in bytes, is checked against the
    free space first. `fsync=False` skips the two fsyncs, never the rename.
    """
    check_output(path, force=force)
    target = _target(path)
    name = os.fsdecode(os.fsencode(target.name)[:200])  # a name has at most 255 bytes
    temporary = target.with_name(f".{name}.{os.urandom(4).hex()}{_TEMPORARY}")
    with _output_errors(path):
        _check_space(target, size)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        stream = OutputStream(fd, on_progress)
        try:
            _reserve(fd, size)
            yield stream, temporary
            os.ftruncate(fd, stream.position)
            _publish(fd, temporary, target, force=force, fsync=fsync)
        finally:
            stream.abandon()
            os.close(fd)
            temporary.unlink(missing_ok=True)


def _reserve(fd: int, size: int) -> None:
    """Have the file system set the blocks aside, where it can: a full disk shows at once, and writing is much quicker.

    This is fallocate(2) itself, for `os.posix_fallocate` writes to every block where a file system lacks the call.
    """
    if size < _RESERVE_FROM or sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) and ctypes.get_errno() in _NO_SPACE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _check_space(target: Path, size: int) -> None:
    free = os.statvfs(target.parent)
    if size > free.f_bavail * free.f_frsize:
        raise OutputRefused(
            f"needs {size} bytes but the disk has {free.f_bavail * free.f_frsize} left",
            path=target,
            hint="free some space or write to another disk",
        )


@contextlib.contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        full = "the disk is full" if error.errno in _NO_SPACE else os.strerror(error.errno or 0)
        raise OutputRefused(f"cannot be written: {full}", path=path, hint="nothing was left behind") from error


def _publish(fd: int, temporary: Path, target: Path, *, force: bool, fsync: bool) -> None:
    if force and target.exists():
        os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
    if fsync:
        os.fsync(fd)
    if force:
        temporary.replace(target)
    else:
        _rename_to_new(temporary, target)
    if fsync:
        _fsync_folder(target.parent)


def _rename_to_new(temporary: Path, target: Path) -> None:
    """Rename without replacing: a hard link fails when the name is taken; file systems without links get a check."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise OutputRefused("exists by now", path=target, hint="another process wrote it; add --force to replace it") from None
    except OSError:
        check_output(target, force=False)
        temporary.rename(target)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
