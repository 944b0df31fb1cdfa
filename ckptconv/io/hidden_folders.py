"""Hidden folders beside an output: makes them, locks them, and removes them and what others left.

Such a folder is ``.NAME.XXXXXXXX.ckptconv-tmp``: its owner's alone, and locked as long as the
process lives that made it (`platforms` says by what). What a killed process left is thus told from
what another one is writing, and removed by the next output of that name. Two more kinds hold whole
checkpoints while names change, and stay until another output has taken their place:
``….ckptconv-shards``, which an index names meanwhile, and ``….ckptconv-old``, the DCP folder
that was there before.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path

from ckptconv.io.destination import output_errors
from ckptconv.io.journals import visible_prefix
from ckptconv.support import platforms
from ckptconv.support.settings import set_within
from ckptconv.support.signals import held_back

TEMPORARY, SHARDS, OLD = "ckptconv-tmp", "ckptconv-shards", "ckptconv-old"


@contextlib.contextmanager
def staging_folder(target: Path, path: Path) -> Iterator[Path]:
    """A hidden folder beside `target` in which what will stand there is made; gone, with what is in
    it, after the block.

    `OSError`s of the block are raised as `OutputRefused` of `path`, which is how the user calls it.
    """
    kept = _KEPT.get()
    if kept is not None and not kept.is_used:
        with output_errors(path), kept.folder_in(target.parent) as folder:
            yield folder
        return
    remove_leftovers(target)
    with output_errors(path), _hidden_folder(target) as folder:
        yield folder


class KeptFolder:
    """A hidden folder that many outputs are made in, one after the other: to make and remove one
    for each takes longer than to write a small file.

    It is in the folder of the last output, ``.ckptconv-batch.XXXXXXXX.ckptconv-tmp``, and empty
    between two. It is for one thread.
    """

    def __init__(self) -> None:
        self.is_used = False  # what is made meanwhile gets a folder of its own
        self._parent: Path | None = None
        self._folder = Path()
        self._leaving = contextlib.ExitStack()

    def used(self) -> AbstractContextManager[object]:
        """Outputs that are made within the block, in this thread, are made in it."""
        return set_within(_KEPT, self)

    @contextlib.contextmanager
    def folder_in(self, parent: Path) -> Iterator[Path]:
        """The folder, beside what is to be made in `parent`; empty again after the block."""
        if parent != self._parent or not self._folder.is_dir():
            self.close()
            remove_leftovers(parent / BATCH)
            with contextlib.ExitStack() as leaving:
                self._folder = leaving.enter_context(_hidden_folder(parent / BATCH))
                self._leaving, self._parent = leaving.pop_all(), parent
        self.is_used = True
        try:
            yield self._folder
        finally:
            self.is_used = False
            if self._is_filled():
                with held_back(), contextlib.suppress(OSError):
                    _empty(self._folder)

    def _is_filled(self) -> bool:
        try:
            return os.listdir(self._folder) != []  # noqa: PTH208 (a third of the time of iterdir)
        except OSError:
            return True

    def close(self) -> None:
        """Remove it; once or more often."""
        self._parent = None
        self._leaving.close()


BATCH = "ckptconv-batch"
"""How a `KeptFolder` is called, where others have the name of what they are beside."""
_KEPT: ContextVar[KeptFolder | None] = ContextVar("ckptconv.kept_folder", default=None)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """The same in the folder of temporary files, which others use: theirs is not touched."""
    target = Path(platforms.temporary_folder()) / "ckptconv"
    remove_leftovers(target, own=True)
    with _hidden_folder(target) as folder:
        yield folder


@contextlib.contextmanager
def _hidden_folder(target: Path) -> Iterator[Path]:
    folder, lock = hidden_name(target, TEMPORARY), None
    try:
        lock = _locked_folder(folder)
        yield lock.inside()
    finally:
        with held_back(), contextlib.suppress(OSError):
            remove_hidden(folder)
            if lock is not None:
                lock.close()
                # to list it takes a descriptor, which a process that has no other gets by closing
                # this one
                remove_hidden(folder)


def hidden_name(target: Path, kind: str) -> Path:
    """A new name of a hidden folder of one kind, beside `target`."""
    return target.with_name(f".{visible_prefix(target)}.{os.urandom(4).hex()}.{kind}")


def _locked_folder(folder: Path) -> platforms.FolderLock:
    """Make a folder and lock it; where locks are unknown, nobody else can take one either."""
    while True:
        platforms.make_private_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            lock = platforms.folder_lock(folder)
            with contextlib.suppress(OSError):
                lock.take(wait=True)
            if folder.exists():
                return lock
            lock.close()  # another process took it for a left-over before it was locked


def remove_hidden(folder: Path) -> None:
    """Remove a hidden folder, tried twice; what cannot be removed stays."""
    for _ in ("once", "again: a fault may pass"):
        with contextlib.suppress(OSError):
            _remove_tree(folder)
    with contextlib.suppress(OSError):
        folder.rmdir()  # an empty one needs no descriptor


def _remove_tree(folder: Path) -> None:
    """Remove a folder of ours, as far as can be, with one descriptor, unlike `shutil.rmtree`."""
    _empty(folder)
    folder.rmdir()


def _empty(folder: Path) -> None:
    for inner in list(folder.iterdir()):  # closed before the next one is opened
        with contextlib.suppress(OSError):
            if inner.is_dir() and not inner.is_symlink():
                _remove_tree(inner)
            else:
                inner.unlink()


def remove_leftovers(target: Path, kind: str = TEMPORARY, *, own: bool = False) -> None:
    """Remove the hidden folders of `target` that nobody holds; with `own`, those of this user."""
    is_ours = re.compile(rf"\.{re.escape(visible_prefix(target))}\.[0-9a-f]{{8}}\.{kind}").fullmatch
    with contextlib.suppress(OSError):  # a folder that may not be listed, or is not there
        # many outputs may lie in one folder: most names are told by their ends
        hidden = [name for name in os.listdir(target.parent) if name.endswith(kind)]  # noqa: PTH208
        for item in (target.parent / name for name in hidden if is_ours(name)):
            if not own or platforms.is_own(item):
                _remove_unheld(item)


def _remove_unheld(folder: Path) -> None:
    # held by its process; of another user; on a file system that knows no locks
    with contextlib.suppress(OSError):
        lock = platforms.folder_lock(folder)
        try:
            lock.take(wait=False)
            _remove_tree(folder)
        finally:
            lock.close()
            if lock.file is not None:
                folder.rmdir()  # what was in it was removed under the lock, but for the lock
