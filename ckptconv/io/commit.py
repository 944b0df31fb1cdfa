"""Puts the files of a checkpoint in their places, together or not at all, wherever these are.

A kind of place says how one of its names is given, replaced, removed, looked for, synced and locked
(`FolderNames`). In which order that is done, and what is undone where something fails, is said
here, once for this host and for stores: an index never names a mixture of two sets.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import PurePath

from ckptconv.support.errors import OutputRefused, printable
from ckptconv.support.records import dataclass
from ckptconv.support.signals import held_back

FAILED = "cannot be written: "


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
        return (*self.shards, *filter(None, (self.index,)))

    @property
    def all_names(self) -> tuple[str, ...]:
        """All that must be free where nothing is to be replaced."""
        return (*self.claimed, *self.files, *self.companions)

    def taken(self) -> Iterator[str]:
        """What it takes the place of or removes, but for indexes: they go with their shards."""
        yield from self.shards
        yield from self.companions
        yield from (name for name in self.earlier() if not name.endswith(".index.json"))


class FolderNames(ABC):
    """The names in the folder of an output, for which files are made: what is done about one of
    them. `path` is how the user calls the output.

    What fails is raised as it is; `told` makes errors of it that a user is told.
    """

    path: PurePath

    @abstractmethod
    def name(self, name: str) -> None:
        """Give a file its name, which must be free."""

    @abstractmethod
    def replace(self, name: str) -> None:
        """Give a file its name, whether another one has it or not, in one step."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove the file of that name, if there is one, or the folder that was made for it."""

    @abstractmethod
    def there(self, names: Sequence[str]) -> list[str]:
        """Those of the names that are taken now."""

    @abstractmethod
    def sync(self, names: Sequence[str], *, are_last: bool = False) -> None:
        """Make names last; with `are_last` the output is in place by then, and errors say so."""

    def lock(self) -> AbstractContextManager[object]:
        """Within the block, signals are held back, and nobody else puts a set in this folder."""
        return held_back()

    def make_folder(self, name: str) -> bool:
        """Make the folder of that name for companions; False where none is needed."""
        return False

    def put_over(self, files: ShardNames, done: list[str]) -> bool:
        """Put shards and index in the places of those that have the same names, so that the index
        names a whole set at any moment; False, with nothing done, where that cannot be.

        As soon as the new index is in place, `done` is cleared.
        """
        return False

    @abstractmethod
    def told(self) -> AbstractContextManager[object]:
        """Within the block, what fails is an `OutputRefused`, which begins with `FAILED`."""


def put_set(at: FolderNames, files: ShardNames, *, force: bool) -> None:
    """Give the files their names so that an index never names a mixture, and remove earlier ones.

    Names that are free are taken first, and the index last; companions that are replaced follow.
    Where shards of the index that is there have the same names, that index goes first, unless the
    place can put one set over another (`FolderNames.put_over`).
    """
    with at.told(), at.lock():
        earlier = files.earlier()
        replaced = []
        if force:
            replaced = at.there(files.companions)
        elif taken := [*earlier, *at.there(files.all_names)]:
            raise exists_by_now(at.path.parent / taken[0])
        _put_checkpoint(at, files, earlier, replaced, force=force)
        for name in replaced:
            with _after_it(at, name, "replaced", "copy it, or run the command again"):
                at.replace(name)
        at.sync(replaced, are_last=True)
        # last of all: until the index was replaced, it named these
        own = set(files.files)
        for name in earlier:
            if name not in own:
                hint = "remove it: a program may take it for the checkpoint"
                with _after_it(at, name, "removed", hint):
                    at.remove(name)


def _put_checkpoint(
    at: FolderNames,
    files: ShardNames,
    earlier: Sequence[str],
    replaced: Sequence[str],
    *,
    force: bool,
) -> None:
    """All but the companions that are replaced; what was done is undone where something fails."""
    *shards, last = files.files
    is_over = files.index in earlier and not set(files.shards).isdisjoint(earlier)
    done: list[str] = []
    gone: list[str] = []
    with _undone(at, done, gone):
        new = [name for name in files.companions if name not in replaced]
        for name in new:
            folder = name.rpartition("/")[0]
            if folder and at.make_folder(folder):
                done.append(folder)
            at.name(name)
            done.append(name)
        at.sync(done)
        if is_over and at.put_over(files, done):
            return
        if is_over:
            at.remove(last)
            gone.append(last)
        # without force, a name that somebody took meanwhile is an error and stays theirs
        put = at.replace if force else at.name
        for name in shards:
            put(name)
            done.append(name)
        at.sync(shards)
        put(last)
        done.clear()  # they belong to it now, whatever is not known of the disk
        gone.clear()
        at.sync([last], are_last=True)


@contextlib.contextmanager
def _undone(at: FolderNames, done: Sequence[str], gone: Sequence[str]) -> Iterator[None]:
    """Where the block fails, the names that it has `done` are free again; they stay where an index
    is `gone` that named files of the same names.
    """
    try:
        with at.told():
            yield
    except BaseException as error:
        hint = ""
        if gone and done:
            hint = f"{_told(done)} is replaced by now; run the command again"
        elif gone:
            hint = f"{_told(gone)} is removed by now; run the command again"
        # the last first: a folder can go when the files in it are gone
        elif left := [name for name in reversed(done) if not _is_removed(at, name)]:
            hint = f"{_told(left)} may be left behind; remove it"
        if hint and isinstance(error, OutputRefused):
            error.hint = hint
        raise


def _is_removed(at: FolderNames, name: str) -> bool:
    try:
        with at.told():
            at.remove(name)
    except OutputRefused:
        return False
    return True


@contextlib.contextmanager
def _after_it(at: FolderNames, name: str, done: str, hint: str) -> Iterator[None]:
    """The block does something about a file of the earlier checkpoint; the new one is in place."""
    try:
        with at.told():
            yield
    except OutputRefused as error:
        why = error.what.removeprefix(FAILED)
        what = f"is in place, but {_told([name])} of the earlier one cannot be {done}: {why}"
        raise OutputRefused(what, path=at.path, hint=hint) from error


def _told(names: Sequence[str]) -> str:
    return ", ".join(printable(PurePath(name).name) for name in names)


def exists(path: PurePath) -> OutputRefused:
    """The error for a name that is taken, without force."""
    return OutputRefused("exists", path=path, hint="add --force to replace it")


def is_folder_there(path: PurePath) -> OutputRefused:
    """The error for the name of a folder, where a file is to be."""
    return OutputRefused("is a folder", path=path, hint="name a file to write")


def exists_by_now(path: PurePath) -> OutputRefused:
    """The error for a name that somebody took after it was looked for."""
    hint = "another process wrote it; add --force to replace it"
    return OutputRefused("exists now", path=path, hint=hint)
