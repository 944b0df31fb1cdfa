"""Files that are written: one buffered stream, and outputs that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

from ckptconv.errors import CheckpointError, OutputRefused
from ckptconv.sources import CHUNK, Source, crc32

_BUFFERS = 4
_RESERVE_FROM = 16 << 20
_TEMPORARY = ".ckptconv-tmp"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        self._buffer, self._free = memoryview(b""), SimpleQueue()  # many outputs may wait until they are put in place together

    def settle(self, *, fsync: bool) -> None:
        """Finish, cut off what was reserved and not used, and close the file: it can be put in place, not written to."""
        self.finish()
        os.ftruncate(self._fd, self.position)
        if fsync:
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file, once."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @property
    def is_settled(self) -> bool:
        """Whether the file is whole and closed."""
        return self._fd < 0

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
        _refuse_missing_folder(path, _target(path).parent)


def _refuse_missing_folder(path: Path, folder: Path) -> None:
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise OutputRefused("lies in a file, where a folder is needed", path=path, hint="name another folder")
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
        check_space(target, size)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        stream = OutputStream(fd, on_progress)
        try:
            _reserve(fd, size)
            yield stream, temporary
            if not stream.is_settled:
                stream.settle(fsync=fsync)
            _publish(temporary, target, force=force, fsync=fsync)
        finally:
            stream.abandon()
            stream.close()
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def made_folder(path: Path, *, wanted: bool) -> Iterator[None]:
    """A folder that is made for the block if it is `wanted` and missing, and taken away again when the block fails."""
    missing = wanted and not path.exists()
    with _output_errors(path):
        if missing:
            _refuse_missing_folder(path, path.parent)
            path.mkdir()
    try:
        yield
    except BaseException:
        if missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def all_or_none(paths: Sequence[Path], *, force: bool) -> Iterator[Callable[[Path], None]]:
    """Outputs of which all are put in place when the block ends well, or none: those that were are taken away again.

    Yields what must be told of each temporary, to know it again under another name. With `force` the files that were
    replaced cannot come back, and so those that replaced them stay.
    """
    made: set[tuple[int, int]] = set()

    def note(temporary: Path) -> None:
        made.add(_identity(temporary))

    try:
        yield note
    except BaseException:
        for path in paths if not force else ():
            with contextlib.suppress(OSError):
                if _identity(path) in made:
                    path.unlink()
        raise


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files that a new output has replaced under other names."""
    for path in paths:
        with _output_errors(path):
            path.unlink(missing_ok=True)


def check_folder(path: Path, *, force: bool) -> None:
    """Refuse a folder that must not be written, before any work is done.

    Raises `OutputRefused` when `path` exists and `force` is not set, when it is no folder, or one that holds something else
    than a DCP checkpoint, or when the folder around it is missing.
    """
    with _output_errors(path):
        if path.exists() and not path.is_dir():
            raise OutputRefused("is a file, where a folder is to be written", path=path, hint="name another folder")
        if path.exists() and not force:
            raise OutputRefused("exists", path=path, hint="add --force to replace it (force=True in code)")
        if path.exists() and not (path / ".metadata").is_file() and any(path.iterdir()):
            raise OutputRefused("holds something else than a DCP checkpoint", path=path, hint="name another folder")
        if not _target(path).parent.is_dir():
            raise OutputRefused("the folder around it does not exist", path=path, hint=f"mkdir -p {path.parent}")


@contextlib.contextmanager
def atomic_folder(path: Path, *, force: bool, fsync: bool) -> Iterator[Path]:
    """A folder that is at `path` only when the block has ended well: temporary sibling, fsync of its files, rename.

    Yields the temporary folder, which is removed when anything is raised. With `force` the folder that was there is
    renamed out of the way first, and back where the new one cannot take its place.
    """
    check_folder(path, force=force)
    target = _target(path)
    unique = f".{os.fsdecode(os.fsencode(target.name)[:200])}.{os.urandom(4).hex()}"
    temporary, aside = target.with_name(f"{unique}{_TEMPORARY}"), target.with_name(f"{unique}.old{_TEMPORARY}")
    with _output_errors(path):
        temporary.mkdir()
        try:
            yield temporary
            if fsync:
                for folder, _, names in os.walk(temporary):
                    _fsync_all(Path(folder), names)
            check_folder(path, force=force)
            _swap(temporary, target, aside)
            if fsync:
                _fsync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, target: Path, aside: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fsync_all(folder: Path, names: list[str]) -> None:
    for name in names:
        fd = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    _fsync_folder(folder)


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


def check_space(target: Path, size: int) -> None:
    """Refuse an output of `size` bytes that the file system of `target` has no room for."""
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
        full = "the disk is full" if error.errno in _NO_SPACE else os.strerror(error.errno) if error.errno else str(error)
        raise OutputRefused(f"cannot be written: {full}", path=path, hint="nothing was left behind") from error


def _publish(temporary: Path, target: Path, *, force: bool, fsync: bool) -> None:
    if force and target.exists():
        temporary.chmod(stat.S_IMODE(target.stat().st_mode))
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
