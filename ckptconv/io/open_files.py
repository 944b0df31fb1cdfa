"""Files that are open by now: those of the caller, what is like one (`io.BytesIO`), and standard
input. They are read from where they are to their end, or written to from there on, and stay the
caller's: nothing here closes them.

What is read does not move them, as ``pread(2)`` does not (`torch.load` leaves a file behind what it
read of it); what is written does, as by `torch.save`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NoReturn, Protocol

from ckptconv.io.crc import crc32
from ckptconv.io.files import FilePool, FileSource
from ckptconv.io.location import Alone, Kind
from ckptconv.io.source import CHUNK, Fingerprint, Source
from ckptconv.support import platforms
from ckptconv.support.errors import OutputRefused, UnsupportedCheckpoint
from ckptconv.support.text import STANDARD_INPUT


class Readable(Protocol):
    """A file that is open for reading bytes, at any place."""

    def read(self, size: int = ..., /) -> bytes: ...
    def seek(self, offset: int, whence: int = ..., /) -> int: ...
    def tell(self) -> int: ...


class Writable(Protocol):
    """A file that is open for writing bytes."""

    def write(self, data: bytes, /) -> object: ...


def is_open_file(given: object) -> bool:
    """Whether it is an open file, and not a path."""
    return hasattr(given, "read") or hasattr(given, "write")


class OpenPath(PurePosixPath):
    """How an open file is called: by its name where it has one. It leads to that file in this
    process alone; a copy behind a pickle is its name.
    """

    place: OpenFile | None = None

    def __reduce__(self) -> Any:
        return PurePosixPath, (str(self),)


class _Opened(Alone):
    """A file that is open by now."""

    def kind(self) -> Kind:
        return "file"

    def fingerprint(self) -> Fingerprint | None:
        with contextlib.closing(self.open()) as source:
            return source.fingerprint()


class OpenFile(_Opened):
    """A file that the caller has opened."""

    def __init__(self, file: Any) -> None:
        path = OpenPath(_name(file))
        path.place = self
        super().__init__(path)
        self._file = file
        self._start: int | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open file cannot be pickled: another process has its own")

    def open(self, pool: FilePool | None = None) -> Source:
        file = self._file
        if isinstance(file, io.TextIOBase):
            self._refuse("is opened as text", "open it with open(path, 'rb')")
        with self._told():
            if not hasattr(file, "seek") or not getattr(file, "seekable", lambda: True)():
                self._refuse("cannot be read to and fro", "give io.BytesIO(file.read())")
            if not getattr(file, "readable", lambda: True)():
                self._refuse("is not open for reading", "open it with open(path, 'rb')")
            if self._start is None:
                self._start = file.tell()
            if type(file) is io.BytesIO:  # a copy on write: what it holds now
                file = io.BytesIO(file.getvalue())
            elif self._start == 0:
                fd = _descriptor(file)
                if fd is not None:
                    file.flush()
                    return FileSource(self.path, os.dup(fd))
            source = SeekSource(file, self._start, self.path)
        if self._start and not source.size:
            self._refuse("is at its end, so there is nothing to read", "seek(0) goes to its start")
        return source

    def take(self, made: Path) -> None:
        """Write the bytes of a file to it, from where it is on."""
        try:
            with made.open("rb", buffering=0) as whole:
                while data := whole.read(CHUNK):
                    view = memoryview(data)
                    while view:
                        view = view[self._written(view) :]
            if hasattr(self._file, "flush"):
                self._file.flush()
        except (OSError, ValueError) as error:
            what, hint = f"cannot be written: {error}", "it may hold a part of the output"
            raise OutputRefused(what, path=self.path, hint=hint) from error

    def _written(self, view: memoryview) -> int:
        """How many bytes it took, which may be few of a raw file."""
        count = self._file.write(view)
        if isinstance(count, int):
            return count
        # who writes a file of his own may return nothing for all; of a raw one None is none of them
        if isinstance(self._file, io.RawIOBase):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return len(view)

    def refuse_unwritable(self, *, is_folder: bool = False) -> None:
        """Raise `OutputRefused` where it cannot be written to, or would have to be a folder."""
        file, hint = self._file, "open it with open(path, 'wb')"
        why = None
        if is_folder:
            why, hint = "is an open file, but several files are to be written", "name a folder"
        elif isinstance(file, io.TextIOBase):
            why = "is opened as text"
        elif getattr(file, "closed", False):
            why = "is closed"
        elif not hasattr(file, "write") or not getattr(file, "writable", lambda: True)():
            why = "is not open for writing"
        if why is not None:
            raise OutputRefused(why, path=self.path, hint=hint)

    def _refuse(self, what: str, hint: str) -> NoReturn:
        raise UnsupportedCheckpoint(what, path=self.path, hint=hint)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise UnsupportedCheckpoint(f"cannot be read: {error}", path=self.path) from error


def _name(file: Any) -> str:
    """How a file is called: an unnamed one by what tells it from others."""
    name = getattr(file, "name", None)
    if type(name) is str and name:
        return PurePath(name).as_posix()
    return f"{type(file).__name__} at {id(file):#x}"


def _descriptor(file: Any) -> int | None:
    """That of a regular file, where what is read of it are the bytes of that, and reading by it
    does not move its place: not that of an archive within it, which has a descriptor too.
    """
    raw = getattr(file, "raw", file)
    if type(raw) is not io.FileIO or platforms.ON_WINDOWS:
        return None
    return raw.fileno() if stat.S_ISREG(os.fstat(raw.fileno()).st_mode) else None


class SeekSource(Source):
    """A file that is read by its methods, from byte `start` on; it is left where it was."""

    def __init__(self, file: Any, start: int, path: PurePath) -> None:
        self.path, self._file, self._start = path, file, start
        self._lock = threading.Lock()
        self._id = id(file)
        self._told: Fingerprint | None = None
        self.size = self._end() - start

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self.read(offset, len(view))

    def read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        found: list[bytes] = []
        left = nbytes
        with self._kept() as file:
            file.seek(self._start + offset)
            while left:
                data = file.read(left)
                if not data:
                    raise self.wrong(f"ends at byte {offset + nbytes - left}, more was expected")
                found.append(data)
                left -= len(data)
        return found[0] if len(found) == 1 else b"".join(found)

    def fingerprint(self) -> Fingerprint:
        if self._told is None:
            self._told = (self._id, self._start, self.size)
            if type(self._file) is io.BytesIO:  # who opened it may write others into its place
                self._told = (crc32(self._file.getbuffer()[self._start :]), self.size)
        return self._told

    def is_file(self) -> bool:
        return True

    def check_unchanged(self) -> None:
        if self._file is not None and self._end() - self._start != self.size:
            raise self.wrong("was changed while it was read", hint="read it again")

    def close(self) -> None:
        self._file = None

    def _end(self) -> int:
        with self._kept() as file:
            file.seek(0, os.SEEK_END)
            return int(file.tell())

    @contextlib.contextmanager
    def _kept(self) -> Iterator[Any]:
        """The file, for one thread at a time; after the block it is where it was."""
        file = self._file
        if file is None:
            raise self.closed()
        with self._lock:
            try:
                before = file.tell()
                try:
                    yield file
                finally:
                    file.seek(before)
            except (OSError, ValueError, EOFError) as error:
                raise self.wrong(f"cannot be read: {error}") from error


# ---------------------------------------------------------------------------------- standard input

_NAME, _STDIN = Path(STANDARD_INPUT), 0


class StandardInput(_Opened):
    """What is piped into the program, or the file that its standard input is.

    The directory of most files is at their end, and readers go to and fro: what comes through a
    pipe is copied to an unnamed temporary file, all of it, when it is first opened. `tell` is
    called with the folder of that file before it is begun.
    """

    def __init__(self, tell: Callable[[str], None] = lambda folder: None) -> None:
        super().__init__(_NAME)
        self._tell = tell
        self._fd: int | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("standard input cannot be pickled: another process has its own")

    def open(self, pool: FilePool | None = None) -> Source:
        if self._fd is None:
            self._fd = self._whole()
        return FileSource(_NAME, os.dup(self._fd))

    def _whole(self) -> int:
        """A descriptor of a regular file with all of it."""
        try:
            found = os.fstat(_STDIN)
            if os.isatty(_STDIN):
                hint = "name a file; ./- is the file named -"
                raise UnsupportedCheckpoint("is a terminal", path=_NAME, hint=hint)
            if stat.S_ISREG(found.st_mode) and os.lseek(_STDIN, 0, os.SEEK_CUR) == 0:
                return os.dup(_STDIN)
            return self._copied()
        except OSError as error:
            folder, why = platforms.temporary_folder(), os.strerror(error.errno or 0)
            raise UnsupportedCheckpoint(
                f"cannot be copied to {folder}: {why}",
                path=_NAME,
                hint="free some space, or set TMPDIR to another folder",
            ) from error

    def _copied(self) -> int:
        self._tell(platforms.temporary_folder())
        written, read = platforms.unnamed_file()
        try:
            with written:
                while data := self._next():
                    written.write(data)
        except BaseException:
            os.close(read)
            raise
        return read

    def _next(self) -> bytes:
        while True:
            try:
                return os.read(_STDIN, CHUNK)
            except BlockingIOError:  # who shares the pipe may have made it one that does not wait
                from select import select  # few read a pipe

                select([_STDIN], [], [])
