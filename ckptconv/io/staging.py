"""Puts outputs in their places, whole or not at all: a file, a folder, shards and their index."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from ckptconv.io.commit import FolderNames, ShardNames, exists_by_now
from ckptconv.io.destination import check_folder, check_output, followed, output_errors
from ckptconv.io.hidden_folders import OLD, SHARDS, hidden_name, remove_hidden, remove_leftovers
from ckptconv.io.journals import journal_path
from ckptconv.support import platforms
from ckptconv.support.errors import OutputRefused, printable
from ckptconv.support.signals import held_back

_PASSING_INDEX = "index.json"
_PATIENCE = 60.0  # seconds for which another process may put its shards in place


def put_file(
    made: Path, path: Path, *, force: bool, fsync: bool, target: Path | None = None
) -> None:
    """Give the file `made` the name `path`. The one that had it, replaced with `force` only, gives
    its permissions on. `target` is the file that is meant, where that is known (`followed`).
    """
    target = target or followed(path)
    with output_errors(path), held_back():
        if force:
            _replace(made, target)
        else:
            _name(made, target)
        if fsync:
            _confirm(target.parent, path)


def put_folder(made: Path, path: Path, *, force: bool, fsync: bool) -> None:
    """Give the folder `made` the name `path`; with `force` it swaps with the DCP folder there."""
    target = followed(path)
    with output_errors(path), held_back():
        if fsync:
            _fsync_tree(made)
        check_folder(path, force=force)
        aside = None
        if not _rename_folder(made, target):
            if not force:
                raise exists_by_now(path)
            aside = _swap(made, target)
        if fsync:
            _confirm(target.parent, path)
        if aside is not None:
            remove_hidden(aside)
        remove_leftovers(target, OLD)


def put_new_folder(made: Path, path: Path, *, fsync: bool) -> bool:
    """Give the folder `made`, whose files are synced, the name `path`; False when that is taken."""
    target = followed(path)
    with output_errors(path), held_back():
        if fsync:
            for inner in filter(Path.is_dir, made.iterdir()):
                fsync_folder(inner)
            fsync_folder(made)
        if not _rename_folder(made, target):
            return False
        if fsync:
            _confirm(target.parent, path)
    return True


class NamesBeside(FolderNames):
    """The names beside `path`; the files for them were made in the hidden folder `made`. A link
    that has the name of a shard is replaced; `path` itself, where there is no index, is followed.
    """

    path: Path

    def __init__(self, made: Path, path: Path, *, fsync: bool) -> None:
        self.path, self._made, self._fsync = path, made, fsync
        self._folders: set[str] = set()
        self._passing: Path | None = None

    def _at(self, name: str) -> Path:
        return followed(self.path) if name == self.path.name else self.path.parent / name

    def name(self, name: str) -> None:
        _name(self._made / name, self._at(name))

    def replace(self, name: str) -> None:
        _replace(self._made / name, self._at(name))

    def remove(self, name: str) -> None:
        if name in self._folders:
            self._at(name).rmdir()
        else:
            self._at(name).unlink(missing_ok=True)

    def there(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if os.path.lexists(self._at(name))]

    def sync(self, names: Sequence[str], *, are_last: bool = False) -> None:
        if not self._fsync:
            return
        for folder in {self._at(name).parent for name in names}:
            if are_last:
                _confirm(folder, self.path)
            else:
                fsync_folder(folder)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        with folder_held(self.path), super().lock():
            try:
                yield
            finally:
                if self._passing is not None:
                    remove_hidden(self._passing)
            remove_leftovers(self.path, SHARDS)

    def make_folder(self, name: str) -> bool:
        if self._at(name).exists():
            return False
        self._at(name).mkdir()
        self._folders.add(name)
        return True

    def put_over(self, files: ShardNames, done: list[str]) -> bool:
        """The new shards are first named by a passing index, where they lie in a hidden folder;
        then they get their own names, and the new index follows. That takes hard links.
        """
        assert files.index is not None
        made, path, index = self._made, self.path, self._at(files.index)
        if not _has_links(made / index.name):
            return False
        passing = hidden_name(path, SHARDS)
        _write(made / _PASSING_INDEX, files.moved_index(passing.name), fsync=self._fsync)
        for name in (_PASSING_INDEX, index.name):
            _take_over(made / name, index.stat())
        # who may read the shards by their own names may do so meanwhile
        made.chmod(stat.S_IMODE(path.parent.stat().st_mode))
        with _renamed(made, passing, path, "the folder {} is left behind; remove it"):
            if self._fsync:
                fsync_folder(passing)
                fsync_folder(path.parent)
            platforms.replace(passing / _PASSING_INDEX, index)
        done.clear()
        try:
            _rename_behind_index(passing, files.shards, index, fsync=self._fsync)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            what = f"is in place, but its shards could not get their names: {why}"
            hint = f"they are complete, in {passing.name}; run the command again"
            raise OutputRefused(what, path=path, hint=hint) from error
        self._made = self._passing = passing
        return True

    def told(self) -> AbstractContextManager[object]:
        return output_errors(self.path)


# ------------------------------------------------------------------------------------------ locking


@contextlib.contextmanager
def folder_held(path: Path) -> Iterator[None]:
    """The folder of `path`, locked against others who put shards there: sets must not be mixed."""
    lock = platforms.folder_lock(path.parent, follow=True)
    try:
        if not platforms.taken_within(partial(lock.take, wait=False), _PATIENCE):
            what = f"its folder was locked by another process for {_PATIENCE:.0f} s"
            raise OutputRefused(what, path=path)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.close()


# -------------------------------------------------------------------------------------------- names


def _name(made: Path, target: Path) -> None:
    """Give a free name by a hard link, which fails if it is taken; without links, after a look."""
    try:
        platforms.link(made, target)
    except FileExistsError:
        raise exists_by_now(target) from None
    except OSError:
        check_output(target, force=False)
        _rename_file(made, target)
    else:
        with contextlib.suppress(OSError):  # it goes with its folder else
            made.unlink()


def _rename_file(made: Path, target: Path) -> None:
    """Where a rename replaces nothing, it is as good as a link."""
    try:
        platforms.rename(made, target)
    except FileExistsError:
        raise exists_by_now(target) from None


def _replace(made: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # there is no earlier file
        _take_over(made, target.stat())
    platforms.replace(made, target)
    with contextlib.suppress(OSError):  # of an edit that was interrupted
        journal_path(target).unlink()


def _take_over(made: Path, before: os.stat_result) -> None:
    """The permissions of the file to be replaced, no set-user-ID; its owners where we may."""
    now = made.stat()
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        platforms.give_owner(made, before.st_uid, before.st_gid)
    made.chmod(stat.S_IMODE(before.st_mode) & 0o777)


def _rename_behind_index(passing: Path, shards: Sequence[str], index: Path, *, fsync: bool) -> None:
    """Shards that an index names where they lie get their own names too, then the index."""
    sync = fsync_folder if fsync else lambda folder: None
    sync(index.parent)
    for name in shards:
        again = passing / f"{name}.again"
        platforms.link(passing / name, again)
        _replace(again, index.with_name(name))
    sync(index.parent)
    platforms.replace(passing / index.name, index)
    sync(index.parent)


def _has_links(path: Path) -> bool:
    again = path.with_name(f"{path.name}.again")
    try:
        platforms.link(path, again)
    except OSError:
        return False  # FAT has none
    again.unlink()
    return True


def _write(path: Path, raw: bytes, *, fsync: bool) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        if fsync:
            platforms.sync(file.fileno())


def _rename_folder(made: Path, target: Path) -> bool:
    """Rename a folder, which never replaces one with something in it; False where there is one."""
    try:
        platforms.rename(made, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _swap(made: Path, target: Path) -> Path | None:
    """Two folders change names in a step; else the old one stands aside, where is returned."""
    if platforms.exchange(made, target):
        return None
    aside = hidden_name(target, OLD)
    with _renamed(target, aside, target, "the earlier folder is {} now; rename it"):
        platforms.rename(made, target)
    return aside


@contextlib.contextmanager
def _renamed(one: Path, other: Path, path: Path, left: str) -> Iterator[None]:
    """A folder has another name, and its own again where the block fails; `left` is what to do
    where it cannot have it.
    """
    platforms.rename(one, other)
    try:
        yield
    except BaseException as error:
        try:
            platforms.rename(other, one)
        except OSError:
            try:
                with output_errors(path):
                    raise error
            except OutputRefused as refused:
                refused.hint = left.format(printable(other.name))
                raise
        raise


# --------------------------------------------------------------------------------------------- disk


def _confirm(folder: Path, path: Path) -> None:
    """Sync a folder in which the output has its name by now."""
    try:
        fsync_folder(folder)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        what = f"is in place and complete, but the disk does not confirm its name: {why}"
        raise OutputRefused(what, path=path, hint="check the disk") from error


def _fsync_tree(folder: Path) -> None:
    for inside, _, names in os.walk(folder):
        for name in names:
            platforms.sync_file(Path(inside, name))
        fsync_folder(Path(inside))


def drafted(made: Path) -> bytes:
    """All of a short file that was made and is not in its place yet: no input of this run."""
    with open(made, "rb", buffering=0) as file:
        return file.read()


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder last; one that may not be read cannot be synced."""
    with contextlib.suppress(PermissionError):
        platforms.sync_folder(folder)


def sync_file(path: Path) -> None:
    """Have the disk confirm a file that is in its place, and its name."""
    with output_errors(path):
        platforms.sync_file(path)
        fsync_folder(path.parent)
