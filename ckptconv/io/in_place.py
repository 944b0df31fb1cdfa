"""Writes over the first bytes of a file where it lies, and undoes what was not finished.

One write changes them, so who is killed between two calls of the system leaves the old bytes or the
new ones. For a kill or a power cut within that write there is a journal (`journals`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import IO

from ckptconv.io.destination import output_errors
from ckptconv.io.hidden_folders import remove_leftovers, staging_folder
from ckptconv.io.journals import Journal, first_bytes, journal_of, journal_path
from ckptconv.io.staging import folder_held, fsync_folder
from ckptconv.support import platforms
from ckptconv.support.errors import OutputRefused
from ckptconv.support.signals import held_back


def write_first_bytes(path: Path, old: bytes, new: bytes, *, fsync: bool) -> None:
    """Put `new` in the place of `old`, equally many bytes, at the start of the file `path`.

    Raises `OutputRefused` when the file may not be written to or does not begin with `old` any
    more; it is as it was then.
    """
    assert len(old) == len(new)
    with output_errors(path), folder_held(path), held_back(), _opened(path) as file:
        # another program may have written it since its header was read
        if first_bytes(file, len(old)) != old:
            raise OutputRefused(
                "was changed in the meantime", path=path, hint="run the command again"
            )
        journal = Journal(os.fstat(file.fileno()).st_size, old, new)
        try:
            _put_journal(journal, path, fsync=fsync)
        except BaseException:
            _remove_journal(path, fsync=False)
            raise
        try:
            _write(file, new, fsync=fsync)
        except BaseException as error:
            _put_back(file, old, path, error, fsync=fsync)
            _remove_journal(path, fsync=fsync)
            raise
        _remove_journal(path, fsync=fsync)


def _put_back(
    file: IO[bytes], old: bytes, path: Path, error: BaseException, *, fsync: bool
) -> None:
    """Write the old bytes again after an error; where that fails too, the journal has them."""
    try:
        _write(file, old, fsync=fsync)
    except OSError as again:
        raise OutputRefused(
            f"cannot be written, nor put back as it was: {os.strerror(again.errno or 0)}",
            path=path,
            hint=f"when the disk works again, undo it with: ckptconv edit {quote(str(path))}",
        ) from error


def undo_unfinished(path: Path, *, fsync: bool) -> bool:
    """Give a file its old bytes back if a process ended while it wrote the new ones; whether that
    was so. A journal that nobody needs is removed, as are other files of processes that ended.
    """
    remove_leftovers(path)
    if not os.path.lexists(journal_path(path)):
        return False
    with output_errors(path), folder_held(path), held_back():
        journal = journal_of(path)
        is_torn = False
        if journal is not None:
            with _opened(path) as file:
                is_torn = journal.state(file) == "torn"
                if is_torn:
                    _write(file, journal.old, fsync=fsync)
        _remove_journal(path, fsync=fsync)
        return is_torn


def _put_journal(journal: Journal, path: Path, *, fsync: bool) -> None:
    """Make a journal under another name, and rename it when it is whole."""
    with staging_folder(path, path) as folder:
        made = folder / "journal"
        made.write_bytes(journal.packed())
        if fsync:
            platforms.sync_file(made)
        platforms.replace(made, journal_path(path))
    if fsync:
        fsync_folder(path.parent)


def _remove_journal(path: Path, *, fsync: bool) -> None:
    """Remove it; one that stays beside bytes that are all old or all new does no harm."""
    with contextlib.suppress(OSError):
        journal_path(path).unlink(missing_ok=True)
        if fsync:
            fsync_folder(path.parent)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file to read and write; what was to be on the disk is when it is closed."""
    # unbuffered, so that one write is one call of the system
    file = path.open("r+b", buffering=0)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _write(file: IO[bytes], raw: bytes, *, fsync: bool) -> None:
    """Write the first bytes, in one call of the system where it takes them all."""
    file.seek(0)
    view = memoryview(raw)
    while view:
        view = view[file.write(view) :]
    if fsync:
        platforms.sync(file.fileno())
