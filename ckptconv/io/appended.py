"""Files of lines that are only appended to, by one process at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from ckptconv.support import platforms
from ckptconv.support.errors import OutputRefused, UnsupportedCheckpoint

_PATIENCE = 5.0  # seconds for which a process that was killed may take to be gone


class AppendedLines:
    """A file that lines are appended to; it is locked against other processes until it is closed.

    A last line without its end was cut off by a crash: it is ended, and its reader ignores it.
    Raises `OutputRefused` when another process has it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1
        with contextlib.ExitStack() as failing, self._told():
            self._fd = platforms.open_to_append(path)
            failing.callback(self.close)
            self._lock()
            self._end_last_line()
            failing.pop_all()

    def _lock(self) -> None:
        if not platforms.taken_within(partial(platforms.lock_file, self._fd), _PATIENCE):
            what, hint = "is the ledger of a batch that runs now", "wait for it, or name another"
            raise OutputRefused(what, path=self.path, hint=f"{hint} with --ledger")

    def _end_last_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and platforms.read_at(self._fd, 1, size - 1) != b"\n":
            self._write(b"\n")

    def append(self, lines: Iterable[str], *, sync: bool) -> None:
        """Append lines in one piece; with `sync` the disk has them when this returns."""
        with self._told():
            self._write("".join(f"{line}\n" for line in lines).encode())
            if sync:
                platforms.sync(self._fd)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputRefused(f"cannot be written: {error.strerror}", path=self.path) from error

    def _write(self, raw: bytes) -> None:
        view = memoryview(raw)
        while view:
            view = view[os.write(self._fd, view) :]

    def descriptor(self) -> int:
        """The number by which the file is open: whoever has it too keeps the lock."""
        return self._fd

    def close(self) -> None:
        """Give the lock back, once or more often."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends; the last one may be cut off. Nothing where there is
    no file; `UnsupportedCheckpoint` where it cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            with path.open("rb") as file:
                for line in file:
                    yield line.rstrip(b"\n")
        except FileNotFoundError:
            raise
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise UnsupportedCheckpoint(what, path=path) from error
