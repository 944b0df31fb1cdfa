"""Puts outputs in their places, whole or not at all: a file, a folder, shards and their index."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Give the file `made` the name `path`.

    The one that had it, replaced with `force` only, gives its permissions on. `target` is the file
    that is meant, where that is known (`followed`).
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
                raise _exists_by_now(path)
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


@dataclass(frozen=True, slots=True)
class ShardNames:
    """A checkpoint of many files by their names in a folder, wherever that is: its shards and its
    index, or one file without an index. `claimed` are other names that must be free. `companions`
    are files that come along, in that folder or in a folder in it.

    `earlier()` are the files that are there by now under these names or others of such a set;
    `moved_index(folder)` is an index of the same shards in `folder`, a folder beside the index.
    """

    shards: Sequence[str]
    index: str | None
    earlier: Callable[[], Sequence[str]]
    moved_index: Callable[[str], bytes]
    claimed: Sequence[str] = ()
    companions: Sequence[str] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The shards, and the index if there is one."""
        return (*self.shards, *([self.index] if self.index is not None else []))

    def taken(self) -> Iterator[str]:
        """What it takes the place of or removes, but for indexes: they go with their shards."""
        yield from self.shards
        yield from self.companions
        yield from (name for name in self.earlier() if not name.endswith(".index.json"))


def put_set(made: Path, files: ShardNames, path: Path, *, force: bool, fsync: bool) -> None:
    """Give the files in the folder `made` their names beside `path`, so that an index never names a
    mixture, and remove earlier ones.

    Names that are free are taken first, and the index last; companions that are replaced follow.
    Where shards of the index that is there have the same names, the new ones are first named by a
    passing index, where they lie in a hidden folder; then they get their own names, and the new
    index follows. Where a file system has no hard links, there is no index for that moment.
    """
    home = path.parent
    with output_errors(path), folder_held(path), held_back():
        earlier = files.earlier()
        replaced = [name for name in files.companions if os.path.lexists(home / name)]
        there = [*earlier, *replaced]
        if there and not force:
            raise _exists_by_now(home / there[0])
        left = made
        with _taken_back(path, home / (files.index or path.name)) as placed:
            new = [name for name in files.companions if name not in replaced]
            _name_companions(made, new, home, placed, fsync=fsync)
            if files.index is None:
                put_file(made / path.name, path, force=force, fsync=fsync)
            elif files.index in earlier and set(files.shards) & set(earlier):
                left = _put_over(made, files, path, placed, fsync=fsync)
            else:
                _put_new(made, files, path, placed, force=force, fsync=fsync)
        try:
            _replace_companions(left, replaced, path, fsync=fsync)
        finally:
            if left != made:
                remove_hidden(left)
        own = {*files.files}
        for name in earlier:
            if name not in own:
                with _after_it(
                    path, name, "removed", "remove it: a program may take it for the checkpoint"
                ):
                    (home / name).unlink(missing_ok=True)
        remove_leftovers(path, SHARDS)


@contextlib.contextmanager
def _taken_back(path: Path, last: Path) -> Iterator[list[Path]]:
    """What is put into the list within the block loses its name again where the block fails before
    the checkpoint is in place, which `last` tells: after that, it belongs to it.
    """
    before, placed = _identity(last), list[Path]()
    try:
        yield placed
    except BaseException as error:
        now = _identity(last)
        if now is not None and now != before:
            raise
        left = [item for item in reversed(placed) if not _is_removed(item)]
        if left:
            names = ", ".join(printable(item.name) for item in left)
            raise _not_undone(error, path, f"{names} may be left behind; remove it") from error
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _name_companions(
    made: Path, names: Sequence[str], home: Path, placed: list[Path], *, fsync: bool
) -> None:
    """Give companions names that are free."""
    folders = set()
    for item in (home / name for name in names):
        if item.parent != home and not item.parent.exists():
            item.parent.mkdir()
            placed.append(item.parent)
            folders.add(home)
        _name(made / item.relative_to(home), item)
        placed.append(item)
        folders.add(item.parent)
    if fsync:
        for folder in folders:
            fsync_folder(folder)


def _replace_companions(made: Path, names: Sequence[str], path: Path, *, fsync: bool) -> None:
    """Companions in the places of earlier ones, each in one step, when the checkpoint is in its."""
    items = [path.parent / name for name in names]
    for name, item in zip(names, items, strict=True):
        with _after_it(path, name, "replaced", "copy it, or run the command again"):
            _replace(made / name, item)
    if fsync:
        for folder in {item.parent for item in items}:
            _confirm(folder, path)


@contextlib.contextmanager
def _after_it(path: Path, name: str, done: str, hint: str) -> Iterator[None]:
    """The block does something about a file of the earlier checkpoint; the new one is in place."""
    try:
        yield
    except OSError as error:
        why, last = os.strerror(error.errno or 0), Path(name).name
        what = f"is in place, but {last} of the earlier one cannot be {done}: {why}"
        raise OutputRefused(what, path=path, hint=hint) from error


# ------------------------------------------------------------------------------------------ locking


@contextlib.contextmanager
def folder_held(path: Path) -> Iterator[None]:
    """The folder of `path` locked against others who put shards in place there.

    Names of two sets must not be mixed.
    """
    lock = platforms.folder_lock(path.parent, follow=True)
    try:
        _lock_patiently(lock, path)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.close()


def _lock_patiently(lock: platforms.FolderLock, path: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return lock.take(wait=False)
        except BlockingIOError:
            if time.monotonic() > end:
                raise OutputRefused(
                    f"its folder was locked by another process for {_PATIENCE:.0f} s", path=path
                ) from None
            time.sleep(0.01)
        except OSError:  # no locks on this file system
            return None


# -------------------------------------------------------------------------------------------- names


def _exists_by_now(path: Path) -> OutputRefused:
    return OutputRefused(
        "exists now", path=path, hint="another process wrote it; add --force to replace it"
    )


def _name(made: Path, target: Path) -> None:
    """Give a free name: a hard link fails when it is taken.

    On file systems without links there is only a look before.
    """
    try:
        platforms.link(made, target)
    except FileExistsError:
        raise _exists_by_now(target) from None
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
        raise _exists_by_now(target) from None


def _replace(made: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        _take_over(made, target.stat())
    platforms.replace(made, target)
    with contextlib.suppress(OSError):  # of an edit that was interrupted
        journal_path(target).unlink()


def _take_over(made: Path, before: os.stat_result) -> None:
    """The permissions of the file to be replaced, without set-user-ID and the like; its owners
    where this process may.
    """
    now = made.stat()
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        platforms.give_owner(made, before.st_uid, before.st_gid)
    made.chmod(stat.S_IMODE(before.st_mode) & 0o777)


def _put_new(
    made: Path, files: ShardNames, path: Path, placed: list[Path], *, force: bool, fsync: bool
) -> None:
    """Shards under names that no index names by now, then the index, in one step."""
    put = _replace if force else _name
    for name in files.shards:
        put(made / name, path.with_name(name))
        placed.append(path.with_name(name))
    if fsync:
        fsync_folder(path.parent)
    assert files.index is not None
    put(made / files.index, path.with_name(files.index))
    placed.clear()  # they belong to it now, whatever is not known of the disk
    if fsync:
        _confirm(path.parent, path)


def _is_removed(path: Path) -> bool:
    try:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _not_undone(error: BaseException, path: Path, left: str) -> BaseException:
    """What is raised instead of `error` when what was done until then cannot be undone either."""
    try:
        with output_errors(path):
            raise error
    except OutputRefused as refused:
        refused.hint = left
        return refused


def _put_over(
    made: Path, files: ShardNames, path: Path, placed: list[Path], *, fsync: bool
) -> Path:
    """Shards under names that the index names, and a new index; where what is left of `made` is."""
    assert files.index is not None
    index = path.with_name(files.index)
    if not _has_links(made / index.name):
        index.unlink()
        _put_new(made, files, path, placed, force=True, fsync=fsync)
        return made
    passing = hidden_name(path, SHARDS)
    _write(made / _PASSING_INDEX, files.moved_index(passing.name), fsync=fsync)
    for name in (_PASSING_INDEX, index.name):
        _take_over(made / name, index.stat())
    # who may read the shards by their own names may do so meanwhile
    shutil.copymode(path.parent, made)
    with _renamed(made, passing, path, "the folder {} is left behind; remove it"):
        if fsync:
            fsync_folder(passing)
            fsync_folder(path.parent)
        platforms.replace(passing / _PASSING_INDEX, index)
    try:
        _rename_behind_index(passing, files.shards, index, fsync=fsync)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        what = f"is in place, but its shards could not get their names: {why}"
        raise OutputRefused(
            what, path=path, hint=f"they are complete, in {passing.name}; run the command again"
        ) from error
    return passing


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
        return False
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
    """Two folders change their names in one step.

    Where that is not known, the old one stands aside, where is returned.
    """
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
            raise _not_undone(error, path, left.format(printable(other.name))) from error
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
    return made.read_bytes()


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder last; one that may not be read cannot be synced."""
    with contextlib.suppress(PermissionError):
        platforms.sync_folder(folder)


def sync_file(path: Path) -> None:
    """Have the disk confirm a file that is in its place, and its name."""
    with output_errors(path):
        platforms.sync_file(path)
        fsync_folder(path.parent)
