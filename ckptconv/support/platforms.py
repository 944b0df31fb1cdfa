"""The operating system: what Linux, macOS and Windows do differently, and what each guarantees.

Only this module names what not every system has: flags of open(2), positioned reads, locks, links,
signals, calls of libc. What is there is asked for by name, never by the name of the system, so that
a test can take it away.

|                     | Linux                    | macOS                    | Windows              |
|---------------------|--------------------------|--------------------------|----------------------|
| positioned reads    | preadv(2)                | preadv(2), or pread(2)   | seek, read; a lock   |
| locks               | flock(2) on the folder   | flock(2) on the folder   | msvcrt, a file in it |
| a file synced       | fsync(2)                 | F_FULLFSYNC, or fsync(2) | FlushFileBuffers     |
| a folder synced     | fsync(2)                 | F_FULLFSYNC, or fsync(2) | not possible         |
| open files          | are replaced and removed | are replaced and removed | are neither          |
| two folders swapped | renameat2(2), one step   | by two renames           | by two renames       |
| blocks reserved     | fallocate(2)             | no                       | no                   |
| a sync begun        | sync_file_range(2)       | no                       | no                   |
| patterns stopped    | by an alarm              | by an alarm              | no                   |

Where a system has neither flock(2) nor msvcrt, there are no locks: outputs are still whole or not
there, but two programs that write shards under the same names at once may mix them, and what a
killed one left behind stays.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

try:
    import fcntl as _posix_locks
    import resource as _posix_resource

    _fcntl: Any = _posix_locks
    _resource: Any = _posix_resource
except ImportError:  # systems have both or none
    _fcntl = _resource = None

_os: Any = os  # by which what this system may lack is asked for
_signal: Any = signal

ON_WINDOWS = hasattr(os, "O_BINARY")
"""Whether files have text and binary modes, and an open one can be neither replaced nor removed."""

_BINARY: int = getattr(os, "O_BINARY", 0)
# where it is missing, Python itself takes care that children get no descriptor
_CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | _BINARY | _CLOEXEC
_FOLDER: int = _READ | getattr(os, "O_DIRECTORY", 0)
NO_SPACE = tuple(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)
)
"""The error numbers of a disk that is full, or of a user's part of it."""


# --------------------------------------------------------------------------------------- open files


def open_to_read(path: str | os.PathLike[str]) -> int:
    """A descriptor of what is at `path`, in binary mode and without waiting for a pipe's writer.
    `IsADirectoryError` for a folder where folders cannot be opened; elsewhere a descriptor of it.
    """
    try:
        return os.open(path, _READ | getattr(os, "O_NONBLOCK", 0))
    except PermissionError:
        if ON_WINDOWS and os.path.isdir(path):  # noqa: PTH112 (False for no name at all)
            raise IsADirectoryError(
                errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path)
            ) from None
        raise


def most_open_files() -> int | None:
    """How many descriptors this process may have open at a time; None where nobody says."""
    if _resource is None:
        return None
    soft: int = _resource.getrlimit(_resource.RLIMIT_NOFILE)[0]
    return None if soft == _resource.RLIM_INFINITY else soft


def create_file(path: Path) -> int:
    """A descriptor of a new file, in binary mode, to write and read; else `FileExistsError`."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY | _CLOEXEC, 0o666)


def open_to_append(path: Path) -> int:
    """A descriptor of a file that may be new, in binary mode; what is written goes to its end."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY | _CLOEXEC, 0o666)


def unnamed_file() -> tuple[IO[bytes], int]:
    """A new temporary file to write, and a second descriptor that reads it.

    It is gone when both are closed, also by the end of the process.

    POSIX: its name is removed at once. Windows: it is opened so that the system removes it
    (O_TEMPORARY).
    """
    import tempfile  # seldom needed, and slow to import

    if ON_WINDOWS:
        file = tempfile.NamedTemporaryFile(prefix="ckptconv-")  # noqa: SIM115
        return file, os.open(file.name, _READ | getattr(os, "O_TEMPORARY", 0))
    file = tempfile.NamedTemporaryFile(prefix="ckptconv-", delete=False)  # noqa: SIM115
    try:
        return file, open_to_read(file.name)
    finally:
        os.unlink(file.name)  # noqa: PTH108 (a process that is killed leaves nothing)


def file_of_process(content: bytes, suffix: str) -> str:
    """The path of a new temporary file of these bytes, which this process removes at its end."""
    import atexit
    import tempfile

    fd, path = tempfile.mkstemp(suffix=suffix)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    maker = os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # and not a process that was forked from it
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    atexit.register(remove)
    return path


def after_fork_in_child(forget: Callable[[], None]) -> None:
    """Have `forget` called in each process that is forked from this one, where that can be."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)


def temporary_folder() -> str:
    """The folder in which unnamed files are made."""
    import tempfile

    return tempfile.gettempdir()


def fill_descriptors() -> None:
    """Take the numbers 0, 1 and 2 where they are free, which an output would get otherwise. Nothing
    can be written to number 1 then.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode | _BINARY)  # gets the lowest number that is free


# ------------------------------------------------------------------- the memory of our own program


def share_memory_between_threads(pools: int = 2) -> None:
    """Have threads take the memory that others have freed: all of so many pools.

    glibc keeps it for each thread: of 16 threads that fetch 8 MiB at a time, hundreds of megabytes.
    """
    _set_malloc({_M_ARENA_MAX: pools})


def keep_freed_memory() -> None:
    """Have what is freed used again, where it would be given back to the kernel and fetched anew.

    glibc does that with large arrays, and with what is free at the end of its heap: to make 512 MB
    of values of int4 took 314,000 page faults, and takes 12,000.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 4 << 20, _M_TRIM_THRESHOLD: 16 << 20})


# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def _set_malloc(settings: dict[int, int]) -> None:
    """Change malloc, of the whole process: only a program of our own does that."""
    with contextlib.suppress(AttributeError):  # another C library, or none that can be asked
        mallopt = _libc().mallopt
        for name, value in settings.items():
            mallopt(name, value)


def tame_blas() -> None:
    """Have numpy's OpenBLAS take little memory, numpy not imported where that is not there, and its
    arrays use again what was freed: it is here for casts and checks, not for linear algebra.
    """
    # OpenBLAS takes memory for a thread per core when it is imported. Where it gets none, it tries
    # for seconds and ends the process from within, past every handler.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.meta_path.insert(0, _Room())


class _Room:
    """Finds nothing; raises `MemoryError` where numpy is to be imported and would not fit."""

    def find_spec(self, fullname: str, path: object, target: object = None, /) -> None:
        if fullname == "numpy":
            import mmap

            try:
                mmap.mmap(-1, _NUMPY).close()
            except OSError as error:
                raise MemoryError("numpy") from error
            keep_freed_memory()


_NUMPY = 86_000_000  # the address space that numpy 2 takes, with OpenBLAS for one thread


# --------------------------------------------------------------------------------- positioned reads


def read_into_at(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset` on, as far as the system does in one go.

    Returns how many bytes that are, 0 at the end of the file. Any number of threads may read one
    descriptor so: its place does not matter.
    """
    if hasattr(os, "preadv"):
        return int(_os.preadv(fd, [view], offset))
    found = read_at(fd, len(view), offset)
    view[: len(found)] = found
    return len(found)


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Up to `nbytes` bytes from `offset` on, for any number of threads, as `read_into_at`."""
    if hasattr(os, "pread"):
        raw: bytes = _os.pread(fd, nbytes, offset)
        return raw
    with _PLACES[fd % len(_PLACES)]:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


CAN_WRITE_AT = hasattr(os, "pwrite")
"""Whether several threads may write to one descriptor, each at a place of its own."""


def write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write `view` from `offset` on, as far as the system does in one go; where `CAN_WRITE_AT`."""
    return int(_os.pwrite(fd, view, offset))


# held while the place of a descriptor is used; several descriptors may share one
_PLACES = tuple(threading.Lock() for _ in range(64))


def will_need(fd: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Have the system fetch these runs of bytes (place and size) from the disk, all at once, where
    it can be asked to; nothing is waited for.
    """
    if hasattr(os, "posix_fadvise"):
        for offset, nbytes in ranges:
            with contextlib.suppress(OSError, OverflowError):  # a place that no file has
                _os.posix_fadvise(fd, offset, nbytes, _os.POSIX_FADV_WILLNEED)


def next_data(fd: int, offset: int, size: int) -> int:
    """The first byte from `offset` on that lies on the disk and in no hole; `size` where there is
    none.

    Where holes are unknown, `offset`: everything is data. Systems that have them have positioned
    reads.
    """
    if not hasattr(os, "SEEK_DATA") or not hasattr(os, "pread"):
        return offset
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole from there to the end
            return size
        return offset


def path_of_open(fd: int) -> str | None:
    """A path to an open file whatever becomes of its name (Linux); None where there is none."""
    through_fd = f"/proc/self/fd/{fd}"
    return through_fd if Path(through_fd).exists() else None


# -------------------------------------------------------------------------------------------- names


class FileInUse(PermissionError):
    """A name that cannot be given: who has it is open somewhere, or read-only (Windows)."""


def link(made: Path, target: Path) -> None:
    """Give a file a second name, in one step. `FileExistsError` where the name is taken, another
    `OSError` where the file system has no links.
    """
    if not hasattr(os, "link"):
        raise _lacking()
    os.link(made, target)


def replace(made: Path, target: Path) -> None:
    """Give `made` the name `target` in one step, whoever has it; Windows: `FileInUse` if open."""
    _unless_in_use(made.replace, made, target)


def rename(made: Path, target: Path) -> None:
    """Rename a file or folder in one step.

    Windows: `FileExistsError` where the name is taken, `FileInUse` while it is open, or a file in
    it. POSIX: a file that has the name is replaced, and so is a folder that is empty.
    """
    _unless_in_use(made.rename, made, target)


def _unless_in_use(change: Callable[[Path], object], made: Path, target: Path) -> None:
    for wait in _WAITS:
        try:
            change(target)
            return
        except PermissionError:
            if not ON_WINDOWS:
                raise
            time.sleep(wait)
    raise FileInUse(errno.EACCES, os.strerror(errno.EACCES), str(made), None, str(target))


# seconds between tries on Windows, where virus scanners and indexers hold files for a moment
_WAITS = (0.01, 0.05, 0.1, 0.2, 0.0)


def exchange(one: Path, other: Path) -> bool:
    """Two names change places in one step, by renameat2(2); False where that is lacking."""
    call = getattr(_libc(), "renameat2", None)  # glibc 2.28, musl 1.2.4
    at_cwd, swap = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h
    if call is None:
        return False
    if not call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap):
        return True
    failed = _error_of_libc()
    # EINVAL: of a file system that cannot
    if failed.errno in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise failed


def give_owner(path: Path, uid: int, gid: int) -> None:
    """Give a file to a user and a group, where this process may; on Windows to nobody."""
    if hasattr(os, "chown"):
        with contextlib.suppress(PermissionError):
            os.chown(path, uid, gid)


def make_private_folder(path: Path) -> None:
    """Make a folder of this user alone. Windows: with the rights of the folder around it, for files
    keep those that they were made with.
    """
    path.mkdir(mode=0o777 if ON_WINDOWS else 0o700)


def is_own(path: Path) -> bool:
    """Whether this user made what is at `path`; a link is asked for itself. Windows does not tell,
    but each user has a temporary folder there.
    """
    return not hasattr(os, "geteuid") or path.lstat().st_uid == _os.geteuid()


def is_plain_path(name: str) -> bool:
    """Whether a relative path that a file names means the same file, inside its folder, on every
    system.

    It is printable; its parts, between slashes, have no backslash and no colon (drives, streams),
    are not empty and no dots, end in neither a dot nor a space (which Windows leaves off), and are
    not the names of devices (``NUL``, ``aux.txt``).
    """
    return name.isprintable() and all(_is_plain_part(part) for part in name.split("/"))


def _is_plain_part(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and part[-1] not in ". "
        and not set(part) & set("\\:")
        and part.partition(".")[0].rstrip(" ").upper() not in _DEVICES
    )


# Names that Windows takes for devices in any folder, whatever follows after a dot. Source: "Naming
# Files, Paths, and Namespaces" in Microsoft's documentation of Win32.
_PORTS = {f"{kind}{number}" for kind in ("COM", "LPT") for number in "0123456789¹²³"}
_DEVICES = {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"} | _PORTS


# -------------------------------------------------------------------------------------------- locks


_LOCK = ".ckptconv-lock"


class FolderLock(NamedTuple):
    """What a folder is locked by until it is closed, or the process ends. That is the folder's own
    descriptor, or that of a `file` in it; below 0 where there are no locks.
    """

    fd: int
    folder: Path
    file: Path | None = None

    def take(self, *, wait: bool) -> None:
        """Take the lock; without `wait`, `BlockingIOError` when another has it. Another `OSError`
        where locks are unknown.
        """
        if self.fd < 0:
            raise _lacking()
        _lock(self.fd, wait=wait)

    def inside(self) -> Path:
        """Where files are made: the folder, or one in it, to be renamed while `file` is open."""
        if self.file is None:
            return self.folder
        inner = self.folder / "made"
        inner.mkdir()
        return inner

    def close(self) -> None:
        """Give the lock back, and remove the file that stood for it; once."""
        if self.fd >= 0:
            os.close(self.fd)
        if self.file is not None:
            with contextlib.suppress(OSError):  # another process waits for it, and will remove it
                self.file.unlink()


def folder_lock(folder: Path, *, follow: bool = False) -> FolderLock:
    """What `folder` can be locked by, not locked yet; a link is followed only with `follow`."""
    if ON_WINDOWS:
        file = folder / _LOCK
        return FolderLock(os.open(file, os.O_RDWR | os.O_CREAT | _BINARY, 0o666), folder, file)
    if not hasattr(os, "O_DIRECTORY"):
        return FolderLock(-1, folder)
    flags = _FOLDER
    if not follow:  # a link with the name of a left-over may lead to a folder that is not one
        flags |= _os.O_NOFOLLOW
    return FolderLock(os.open(folder, flags), folder)


def lock_file(fd: int) -> None:
    """Lock an open file until every descriptor that came of this one is closed.

    `BlockingIOError` when another process has it; another `OSError` where locks are unknown.

    Windows: a byte far behind its end is locked, for what is locked cannot be read by others.
    """
    _lock(fd, wait=False, at=1 << 40)


def taken_within(take: Callable[[], None], seconds: float) -> bool:
    """Take a lock that another process may give back soon: `take` is tried for so many seconds.
    Whether it was taken, which every lock is where locks are unknown.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            take()
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:
            return True
        else:
            return True


def _lock(fd: int, *, wait: bool, at: int = 0) -> None:
    """Lock what is open, on Windows by its byte `at`."""
    if ON_WINDOWS:
        _lock_byte(fd, wait, at)
    elif _fcntl is None:
        raise _lacking()
    elif wait:
        _fcntl.flock(fd, _fcntl.LOCK_EX)
    else:
        _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)


def _lacking() -> OSError:
    """The error of what this system does not have."""
    return OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def _lock_byte(fd: int, wait: bool, at: int) -> None:
    import msvcrt

    calls: Any = msvcrt
    while True:  # LK_LOCK would wait too, and give up after ten seconds
        os.lseek(fd, at, os.SEEK_SET)
        try:
            calls.locking(fd, calls.LK_NBLCK, 1)
            return
        except PermissionError:
            if not wait:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            time.sleep(0.01)


# --------------------------------------------------------------------------------------------- disk


def sync(fd: int) -> None:
    """Have the disk confirm what was written to a file, or the names in a folder."""
    if hasattr(_fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # macOS: fsync(2) leaves it in the disk's own memory
            _fcntl.fcntl(fd, _fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def begin_sync(fd: int) -> None:
    """Have the disk begin with what was written to a file, where the system can be asked to; only
    `sync` waits for it, and tells of what fails.
    """
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        import ctypes

        call(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def sync_file(path: Path) -> None:
    """Have the disk confirm a file that is closed."""
    flags = _READ
    if ON_WINDOWS:  # which syncs only what may be written to
        flags |= os.O_RDWR
    _sync_path(path, flags)


def sync_folder(path: Path) -> None:
    """Have the disk confirm the names in a folder; not on Windows, where NTFS has a journal."""
    if not ON_WINDOWS:
        _sync_path(path, _FOLDER)


def _sync_path(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        sync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, size: int) -> None:
    """Have the file system set `size` bytes aside, where it can; `OSError` when there is no room.

    This is fallocate(2) itself, for `os.posix_fallocate` writes to every block where a file system
    lacks the call.
    """
    import ctypes

    call = getattr(_libc(), "fallocate", None)
    if (
        call is not None
        and call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))
        and (failed := _error_of_libc()).errno in NO_SPACE
    ):
        raise failed


def cores() -> int:
    """The cores that this process may use; of the whole host where that is not known."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class PassedOn:
    """An open file for a process that `multiprocessing` starts, which gets a descriptor, or None on
    Windows. It is duplicated when it is pickled: no server has to hand it over.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[..., int | None], tuple[Any, ...]]:
        from multiprocessing import reduction

        maker: Any = reduction
        return _detached, (None if ON_WINDOWS else maker.DupFd(self.fd),)


def _detached(duplicate: Any) -> int | None:
    return None if duplicate is None else int(duplicate.detach())


def free_bytes(folder: Path) -> int | None:
    """What this user may still write to the file system of `folder`; None: it does not tell."""
    import shutil

    found = shutil.disk_usage(folder)
    return found.free if found.total else None


def _libc() -> Any:
    """The functions of the C library; None where Python cannot get at them by no name (Windows)."""
    import ctypes

    try:
        return ctypes.CDLL(None, use_errno=True)
    except (TypeError, OSError):
        return None


def _error_of_libc() -> OSError:
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# ------------------------------------------------------------------------------------------ signals


STOPPING: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)
"""The signals that ask a program to stop; SIGBREAK: Ctrl-Break and a closed console, of Windows."""


def signal_main_thread(number: int) -> None:
    """Have the handler of a signal called in the main thread, as soon as may be. pthread_kill(2)
    wakes it from a read or a sleep.
    """
    ident = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and ident is not None:
        _signal.pthread_kill(ident, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


@contextlib.contextmanager
def unheard_by_children() -> Iterator[None]:
    """A process that is started in the block does not hear Ctrl-C, which a terminal sends to all,
    from its first moment on; on Windows it does.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker  # which starts with the first, and lets it hear

    resource_tracker.ensure_running()
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def can_set_alarm() -> bool:
    """Whether an alarm can be set: in the main thread, where nobody else uses alarms."""
    main = threading.current_thread() is threading.main_thread()
    return (
        main and hasattr(signal, "SIGALRM") and signal.getsignal(_signal.SIGALRM) == signal.SIG_DFL
    )


def set_alarm(seconds: float, handler: Callable[..., Any]) -> None:
    """Call `handler` in the main thread after so many seconds, even while a pattern is matched."""
    signal.signal(_signal.SIGALRM, handler)
    _signal.setitimer(_signal.ITIMER_REAL, seconds)


def stop_alarm() -> float:
    """Take the alarm back; returns the seconds that were left."""
    left, _interval = _signal.setitimer(_signal.ITIMER_REAL, 0)
    signal.signal(_signal.SIGALRM, signal.SIG_DFL)
    return float(left)
