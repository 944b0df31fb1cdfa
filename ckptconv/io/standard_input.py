"""Standard input as a place: a file that it is redirected from, or a pipe, copied to a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from ckptconv.io.files import FilePool, FileSource
from ckptconv.io.location import Alone, Kind
from ckptconv.io.source import CHUNK, Fingerprint, Source
from ckptconv.support import platforms
from ckptconv.support.errors import UnsupportedCheckpoint
from ckptconv.support.text import STANDARD_INPUT

_NAME = Path(STANDARD_INPUT)
_STDIN = 0


class StandardInput(Alone):
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

    def kind(self) -> Kind:
        return "file"

    def open(self, pool: FilePool | None = None) -> Source:
        if self._fd is None:
            self._fd = self._whole()
        return FileSource(_NAME, os.dup(self._fd))

    def fingerprint(self) -> Fingerprint | None:
        with closing(self.open()) as source:
            return source.fingerprint()

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
        written, read = platforms.unnamed_file("ckptconv-")
        try:
            with written:
                while data := os.read(_STDIN, CHUNK):
                    written.write(data)
        except BaseException:
            os.close(read)
            raise
        return read
