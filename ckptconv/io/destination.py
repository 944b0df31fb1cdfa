"""Where an output goes: drafts of its files, put in their places together, whole or not at all.

`Destination` and `Draft` are what every kind can do; `outputs` has the kinds. For files of this
host, this module says where they may stand, and makes the new file that a draft is written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from shlex import quote

from ckptconv.io.commit import FAILED
from ckptconv.io.location import Location
from ckptconv.io.source import Source
from ckptconv.io.stream import RESERVE_FROM, FileSink, OutputStream
from ckptconv.support import platforms
from ckptconv.support.errors import CheckpointError, OutputRefused, printable
from ckptconv.support.signals import held_back


class Draft(AbstractContextManager["Draft"]):
    """One file of an output, which nobody finds before its destination is committed. It is written
    to within a ``with`` block; a block that is left without `commit` discards it.
    """

    stream: OutputStream

    @property
    @abstractmethod
    def place(self) -> Location:
        """Where it can be read as soon as it is committed, until its destination is."""

    @abstractmethod
    def commit(self) -> None:
        """It is whole, with all that was written to `stream`, and can be put in its place."""

    @abstractmethod
    def discard(self) -> None:
        """Nothing of it is to remain, and its destination is not to be committed."""

    def hand_out(self) -> Path | None:
        """The path of a new file at which another process may make it, instead of this one within
        a ``with`` block; None where only this one can.
        """
        return None

    def take_back(self, nbytes: int) -> None:
        """Commit what another process made, so many bytes; `OutputRefused` if it is not there."""
        raise NotImplementedError


class Destination(AbstractContextManager["Destination"]):
    """An output of one file or of many: what is drafted within a ``with`` block is put in its place
    by `commit`, all together; a block that is left without it leaves nothing behind.

    Entering it refuses an output that must not be written. `OutputRefused` names the output by the
    `path` that the user gave.
    """

    path: PurePath

    @abstractmethod
    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> Draft:
        """A new file of the output, called `name`, which will have about `size` bytes."""

    def is_for_threads(self) -> bool:
        """Whether several threads may each make a draft and write it at the same time."""
        return False

    def forget(self, draft: Draft) -> None:
        """A draft that was discarded is not one of its files; another of its name may follow."""
        raise NotImplementedError

    @abstractmethod
    def commit(self, inputs: Iterable[Source] = ()) -> None:
        """Put all drafts in their places, an index last, in the place of what was there only with
        force; of `inputs`, those that stand in the way are closed where the system needs that.
        """

    @abstractmethod
    def discard(self) -> None:
        """Leave nothing behind, and what was there before as it was."""


def check_output(path: Path, *, force: bool) -> Path:
    """Refuse an output that must not be written, before any work is done; returns the file that is
    meant, which is `path` unless a link is there.

    Raises `OutputRefused` when `path` exists and `force` is not set, when it is a folder or a
    device, or when its folder is missing.
    """
    with output_errors(path):
        _refuse_reserved(path)
        mode, is_link = _look_at(path)
        if stat.S_ISDIR(mode):
            raise OutputRefused("is a folder", path=path, hint="name a file to write")
        if mode and not stat.S_ISREG(mode):
            raise OutputRefused(
                "is a pipe, socket or device, which cannot be replaced atomically", path=path
            )
        if mode and not force:
            raise OutputRefused("exists", path=path, hint="add --force to replace it")
        if not mode and (is_link or not path.parent.is_dir()):
            refuse_missing_folder(path, followed(path).parent)
        return followed(path) if is_link else path


def _refuse_reserved(path: Path) -> None:
    """On Windows, ``nul.pt`` is a device, ``a.pt:b`` a stream, and ``a.pt.`` another file."""
    if platforms.ON_WINDOWS and path.name and not platforms.is_plain_path(path.name):
        raise OutputRefused(
            "is not a plain file name on Windows", path=path, hint="choose another name"
        )


def _look_at(path: Path) -> tuple[int, bool]:
    """The mode of what is at a path, 0 for nothing, and whether a link is there. Each is asked
    once: another process may replace it meanwhile.
    """
    is_link = False
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            is_link = True
            mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0, is_link
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0, is_link
        raise
    return mode, is_link


def refuse_missing_folder(path: Path, folder: Path) -> None:
    """Refuse an output `path` whose `folder` is not there."""
    if folder.is_dir():
        return
    refuse_dangling(path)
    if os.path.lexists(folder):
        raise OutputRefused(
            "is inside a file, but must be inside a folder", path=path, hint="name another folder"
        )
    raise OutputRefused(
        "its folder does not exist", path=path, hint=f"mkdir -p {quote(str(path.parent))}"
    )


def refuse_dangling(path: Path) -> None:
    """Refuse a path through a symbolic link to a folder that is not there: mkdir does not help."""
    for link in (path, *path.parents):
        if not link.is_symlink():
            continue
        meant, own = link.resolve(), f"its folder is the link {printable(link)}"
        if link == path:
            meant, own = meant.parent, "is a link"
        if not meant.exists():
            what = f"{own} to {printable(link.readlink())}, and {printable(meant)} does not exist"
            raise OutputRefused(what, path=path, hint="correct the link, or name a file to write")


def followed(path: Path) -> Path:
    """The file that is meant: symbolic links are followed, as cp does."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before python 3.13
        what = "cannot be reached: the symbolic links in its path lead in a circle"
        raise OutputRefused(
            what, path=path, hint="correct the links, or name a file to write"
        ) from error


@contextlib.contextmanager
def new_file(
    made: Path,
    path: PurePath,
    *,
    size: int = 0,
    on_progress: Callable[[int], None] | None = None,
    fsync: bool = False,
) -> Iterator[OutputStream]:
    """A stream into the file `made`, new and in a folder of this process alone, which is to become
    `path`.

    It will have about `size` bytes, for which there was room when its output was begun; with
    `fsync` it is to be synced. Errors name `path`; whoever made the folder removes the file.
    """
    with output_errors(path):
        fd = platforms.create_file(made)
        stream = OutputStream(FileSink(fd, fsync=fsync), on_progress, size)
        try:
            if size >= RESERVE_FROM:  # a full disk shows at once, and writing is much quicker
                platforms.reserve(fd, size)
            yield stream
        finally:
            if not stream.is_closed:
                with held_back(), contextlib.suppress(OSError):
                    stream.abandon()
                    stream.close()


def check_folder(path: Path, *, force: bool) -> None:
    """Refuse a folder that must not be written, before any work is done.

    Raises `OutputRefused` when `path` exists and `force` is not set, when it is not a folder, or
    one that holds something else than a DCP checkpoint or a universal one, or when the folder
    around it is missing.
    """
    with output_errors(path):
        _refuse_reserved(path)
        mode, is_link = _look_at(path)
        if mode and not stat.S_ISDIR(mode):
            raise OutputRefused(
                "is a file, but a folder is to be written", path=path, hint="name another folder"
            )
        if mode and not force:
            raise OutputRefused("exists", path=path, hint="add --force to replace it")
        is_known = any((path / name).is_file() for name in _INDEXES)
        if mode and not is_known and any(path.iterdir()):
            what = "holds something other than a DCP checkpoint or a universal one"
            raise OutputRefused(what, path=path, hint="name another folder")
        is_missing = not mode and (is_link or not path.parent.is_dir())
        if is_missing and not followed(path).parent.is_dir():
            refuse_dangling(path)
            raise OutputRefused(
                "the folder around it does not exist",
                path=path,
                hint=f"mkdir -p {quote(str(path.parent))}",
            )


_INDEXES = (".metadata", "latest_universal")
"""The files by which checkpoints are known that are folders of their own."""


_ASKED_FROM = 1 << 20
"""Bytes of an output from which there must be room before it is begun: less is written as quickly,
and says so where the disk is full.
"""


def check_space(folder: Path, size: int, path: PurePath) -> None:
    """Refuse an output of `size` bytes where the file system of `folder` says it has no room."""
    free = platforms.free_bytes(folder) if size >= _ASKED_FROM else None
    if free is not None and size > free:
        what = f"needs {size} bytes but the disk has {free} left"
        raise OutputRefused(what, path=path, hint="free some space or write to another disk")


class output_errors:
    """Raise the block's `OSError`s as `OutputRefused` of `path`, of which nothing is there then."""

    def __init__(self, path: PurePath) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, CheckpointError):
            return
        if isinstance(error, platforms.FileInUse):
            what = "is in use or read-only, and so cannot be replaced on this system"
            hint = (
                "close it: tensors of load_portable keep their file open unless mmap=False; "
                "nothing was left behind"
            )
            raise OutputRefused(what, path=self._path, hint=hint) from error
        what = f"{FAILED}{_reason(error)}"
        raise OutputRefused(what, path=self._path, hint="nothing was left behind") from error


def _reason(error: OSError) -> str:
    if error.errno in _REASONS:
        return _REASONS[error.errno]
    return os.strerror(error.errno) if error.errno else str(error)


_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EFBIG: "it exceeds the largest file size of this process (ulimit -f) or of the file "
    "system",
    errno.EDQUOT: "the disk quota of this user or group is used up (quota -s)",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENAMETOOLONG: "its name is too long for the file system",
    errno.EACCES: "this user may not write there (Permission denied)",
    errno.EPERM: "the system does not permit it there (Operation not permitted)",
    errno.ELOOP: "the symbolic links in its path lead in a circle",
    errno.ENOTDIR: "a part of its path is a file, not a folder",
    errno.EBUSY: "it is a mount point, so it cannot be replaced",
    errno.EXDEV: "it is a mount point, so it cannot be replaced",
}
"""What an error of the system means for an output, where its own words do not say what to do."""
