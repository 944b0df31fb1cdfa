"""Where an output goes: drafts of its files, put in their places together, whole or not at all.

`Destination` and `Draft` are what every kind can do; `outputs` has the kinds. For files of this
host, this module says where they may stand, and makes drafts of them, in a hidden folder until all
are whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path, PurePath
from shlex import quote
from typing import Any, TypeVar

from ckptconv.io.commit import FAILED, exists, is_folder_there
from ckptconv.io.files import refuse_inputs
from ckptconv.io.location import Location
from ckptconv.io.places import LocalPlace
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
            raise is_folder_there(path)
        if mode and not stat.S_ISREG(mode):
            raise OutputRefused(
                "is a pipe, socket or device, which cannot be replaced atomically", path=path
            )
        if mode and not force:
            raise exists(path)
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


def refuse_missing_folder(
    path: Path, folder: Path, what: str = "its folder does not exist"
) -> None:
    """Refuse an output `path` whose `folder` is not there; `what` is said where nothing is."""
    if folder.is_dir():
        return
    refuse_dangling(path)
    if os.path.lexists(folder):
        raise OutputRefused(
            "is inside a file, but must be inside a folder", path=path, hint="name another folder"
        )
    raise OutputRefused(what, path=path, hint=f"mkdir -p {quote(str(path.parent))}")


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
                with held_back(), contextlib.suppress(OSError):  # an error is on its way already
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
            raise exists(path)
        is_known = any((path / name).is_file() for name in _INDEXES)
        if mode and not is_known and any(path.iterdir()):
            what = "holds something other than a DCP checkpoint or a universal one"
            raise OutputRefused(what, path=path, hint="name another folder")
        if not mode and (is_link or not path.parent.is_dir()):
            what = "the folder around it does not exist"
            refuse_missing_folder(path, followed(path).parent, what)


# the files by which checkpoints are known that are folders of their own
_INDEXES = (".metadata", "latest_universal")


# bytes of an output from which there must be room before it is begun: less is written as quickly,
# and says so where the disk is full
_ASKED_FROM = 1 << 20


def check_space(folder: Path, size: int, path: PurePath) -> None:
    """Refuse an output of `size` bytes where the file system of `folder` says it has no room."""
    free = platforms.free_bytes(folder) if size >= _ASKED_FROM else None
    if free is not None and size > free:
        what = f"needs {size} bytes but the disk has {free} left"
        raise OutputRefused(what, path=path, hint="free some space or write to another disk")


@contextlib.contextmanager
def output_errors(path: PurePath) -> Iterator[None]:
    """Raise the block's `OSError`s as `OutputRefused` of `path`, of which nothing is there then."""
    try:
        yield
    except CheckpointError:
        raise
    except platforms.FileInUse as error:
        what = "is in use or read-only, and so cannot be replaced on this system"
        hint = (
            "close it: tensors of load_portable keep their file open unless mmap=False; "
            "nothing was left behind"
        )
        raise OutputRefused(what, path=path, hint=hint) from error
    except OSError as error:
        what = f"{FAILED}{_reason(error)}"
        raise OutputRefused(what, path=path, hint="nothing was left behind") from error


def _reason(error: OSError) -> str:
    if not error.errno:
        return str(error)
    return _REASONS.get(error.errno) or os.strerror(error.errno)


# what an error of the system means for an output, where its own words do not say what to do
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


# ------------------------------------------------------------------------------ drafts of this host


class LocalDraft(Draft):
    """A file `made` in a hidden folder, to become `path`; `when_whole` is called before that."""

    def __init__(
        self,
        made: Path,
        path: PurePath,
        size: int,
        on_progress: Callable[[int], None] | None,
        *,
        fsync: bool,
    ) -> None:
        self.is_whole = False
        self.when_whole: Callable[[], None] = lambda: None
        self.made, self._named, self._fsync = made, path, fsync
        self._writing = new_file(made, path, size=size, on_progress=on_progress, fsync=fsync)

    @property
    def place(self) -> Location:
        return LocalPlace(self.made)

    def __enter__(self) -> LocalDraft:
        self.stream = self._writing.__enter__()
        return self

    def __exit__(self, *failure: Any) -> bool | None:
        try:
            return self._writing.__exit__(*failure)
        finally:
            if not self.is_whole:
                self.discard()

    def commit(self) -> None:
        self.stream.settle(fsync=self._fsync)
        self.when_whole()
        self.is_whole = True

    def hand_out(self) -> Path | None:
        return self.made

    def take_back(self, nbytes: int) -> None:
        try:
            size = self.made.stat().st_size
        except FileNotFoundError:
            size = -1
        if size != nbytes:
            what = "was made by a worker on a disk that this machine does not see"
            hint = "write to a disk that all machines share, or leave --engine out"
            raise OutputRefused(what, path=self._named, hint=hint)
        self.when_whole()
        self.is_whole = True

    def discard(self) -> None:
        self.is_whole = False
        with held_back(), contextlib.suppress(OSError):
            self.made.unlink(missing_ok=True)


S = TypeVar("S", bound="Staged")


class Staged(Destination):
    """An output that is made in a hidden folder of this host; `size` is what all its files will
    have, `replaces` are the sources whose place it may take.
    """

    def __init__(
        self,
        path: PurePath,
        *,
        force: bool,
        fsync: bool,
        size: int,
        replaces: Iterable[Source] = (),
    ) -> None:
        self.path, self._replaces = path, tuple(replaces)
        self._force, self._fsync, self._size = force, fsync, size
        self._drafts: list[LocalDraft] = []
        self._made: Path | None = None
        self._leaving = ExitStack()

    def __enter__(self: S) -> S:
        with self._leaving:
            refuse_inputs(self._taken(), self._replaces)
            self._made = self._prepared(self._leaving)
            check_space(self._made, self._size, self.path)
            self._leaving = self._leaving.pop_all()
        return self

    def __exit__(self, *failure: Any) -> bool | None:
        self._made = None
        return self._leaving.__exit__(*failure)

    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> LocalDraft:
        made = self._folder() / name
        if "/" in name:
            made.parent.mkdir(parents=True, exist_ok=True)
        draft = LocalDraft(made, self._named(name), size, on_progress, fsync=self._fsync)
        self._drafts.append(draft)
        return draft

    def is_for_threads(self) -> bool:
        return True

    def forget(self, draft: Draft) -> None:
        self._drafts = [one for one in self._drafts if one is not draft]

    def commit(self, inputs: Iterable[Source] = ()) -> None:
        made = self._folder()
        if not all(draft.is_whole for draft in self._drafts):
            raise ValueError(f"{self.path}: not all drafts are whole")
        self._put(made, inputs)

    def discard(self) -> None:
        self._made = None
        self._leaving.close()

    def _folder(self) -> Path:
        if self._made is None:
            raise ValueError(f"{self.path}: is not open")
        return self._made

    def _named(self, name: str) -> PurePath:
        """How errors call the draft of that name."""
        return self.path.parent / name

    def _taken(self) -> Iterable[PurePath]:
        return [self.path]

    @abstractmethod
    def _prepared(self, leaving: ExitStack) -> Path:
        """Refuse what must not be written; the hidden folder, which goes when `leaving` does."""

    @abstractmethod
    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        """Give what is in the folder `made` its names."""
