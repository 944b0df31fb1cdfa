"""The kinds of destinations: one file, a set of shards with an index, a folder.

Those of this host are made in a hidden folder beside their place and get their names when they are
whole (`staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckptconv.io.commit import ShardNames, put_set
from ckptconv.io.destination import (
    Destination,
    LocalDraft,
    Staged,
    check_folder,
    check_output,
    followed,
    refuse_missing_folder,
)
from ckptconv.io.files import let_go
from ckptconv.io.hidden_folders import BATCH, remove_leftovers, staging_folder, temporary_folder
from ckptconv.io.location import Location
from ckptconv.io.open_files import OpenFile
from ckptconv.io.places import local_path
from ckptconv.io.source import Source
from ckptconv.io.staging import NamesBeside, put_file, put_folder, put_new_folder
from ckptconv.support import platforms


class FileOutput(Staged):
    """One file. The one that is there is replaced in one step, and gives its permissions on."""

    path: Path

    def _prepared(self, leaving: ExitStack) -> Path:
        self._target = check_output(self.path, force=self._force)
        return leaving.enter_context(staging_folder(self._target, self.path))

    def _named(self, name: str) -> Path:
        return self.path

    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        _close_replaced(inputs, lambda: [self.path])
        how: Any = {"force": self._force, "fsync": self._fsync}
        put_file(made / self.path.name, self.path, target=self._target, **how)


class OpenOutput(Staged):
    """A file that the caller has opened: its bytes are written to it when all are made."""

    def __init__(self, place: OpenFile, **how: Any) -> None:
        super().__init__(Path(place.path), **how)
        self._place = place

    def _taken(self) -> Iterable[Path]:
        return []

    def _prepared(self, leaving: ExitStack) -> Path:
        self._place.refuse_unwritable()
        return leaving.enter_context(temporary_folder())

    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        self._place.take(made / self.path.name)


class SetOutput(Staged):
    """Shards and their index, or the one file that they fit in; in a new folder if asked for."""

    path: Path

    def __init__(self, path: Path, files: ShardNames, *, in_folder: bool, **how: Any) -> None:
        super().__init__(path, **how)
        self._files = files
        self._in_folder, self._is_new = in_folder, False

    def _taken(self) -> Iterable[Path]:
        yield self.path
        yield from (self.path.parent / name for name in self._files.taken())

    def _prepared(self, leaving: ExitStack) -> Path:
        folder = self.path.parent
        self._is_new = self._in_folder and not folder.exists()
        if self._is_new:
            refuse_missing_folder(folder, folder.parent)
        else:
            files = self._files
            for name in (*files.claimed, *files.earlier(), *files.files):
                check_output(folder / name, force=self._force)
            for path in (folder / name for name in files.companions):
                if path.parent.exists():
                    check_output(path, force=self._force)
        if self._in_folder:
            # of a process that was killed just when the folder was there
            remove_leftovers(followed(folder))
        made = leaving.enter_context(staging_folder(self._beside(), self.path))
        if self._is_new:
            made = made / folder.name
            made.mkdir()
        return made

    def _beside(self) -> Path:
        """What it is made beside: its new folder, the file that it will be, or its name in a folder
        of shards.

        A link that has the name of a shard is replaced, not followed: the blobs of a cache are not
        for writing.
        """
        if self._is_new or self._files.index is None:
            return followed(self.path.parent if self._is_new else self.path)
        return followed(self.path.parent) / self.path.name

    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        if self._is_new and put_new_folder(made, self.path.parent, fsync=self._fsync):
            return
        folder = self.path.parent
        _close_replaced(
            inputs, lambda: [self.path, *(folder / name for name in self._files.earlier())]
        )
        put_set(NamesBeside(made, self.path, fsync=self._fsync), self._files, force=self._force)


class FolderOutput(Staged):
    """A folder of files, which takes the place of a DCP folder only."""

    path: Path

    def folder(self) -> Path:
        """The folder that will be put in place, empty at first, for others to write into."""
        made = self._folder() / followed(self.path).name
        made.mkdir(exist_ok=True)
        return made

    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> LocalDraft:
        self.folder()
        return super().draft(f"{followed(self.path).name}/{name}", size, on_progress)

    def scratch(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> LocalDraft:
        """A file beside the folder that is not put in place, and does not wait for the disk."""
        return LocalDraft(self._folder() / name, self.path, size, on_progress, fsync=False)

    def _named(self, name: str) -> Path:
        return self.path

    def _prepared(self, leaving: ExitStack) -> Path:
        check_folder(self.path, force=self._force)
        return leaving.enter_context(staging_folder(followed(self.path), self.path))

    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        _close_replaced(inputs, lambda: [self.path])
        put_folder(self.folder(), self.path, force=self._force, fsync=self._fsync)


def folder_nbytes(folder: Path) -> int:
    """The size of all files in a folder, in bytes."""
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())


def clear_leftovers(place: Location) -> None:
    """Remove what a killed process left of the output at `place`, whose files have their names."""
    path = place.local()
    if path is None:
        return
    for target in {path, followed(path), followed(path.parent)}:
        remove_leftovers(target)


def clear_kept(places: Iterable[Location]) -> None:
    """Remove what killed workers left beside outputs, or in those that are folders."""
    paths = [path for place in places if (path := place.local()) is not None]
    for folder in {*(path.parent for path in paths), *filter(Path.is_dir, paths)}:
        remove_leftovers(folder / BATCH)


def check_place_free(place: Location, *, is_folder: bool, force: bool) -> None:
    """Raise `OutputRefused` where an output, a file or a folder, may not be made at `place`."""
    path = place.local()
    if path is not None:
        (check_folder if is_folder else check_output)(path, force=force)
        return
    if isinstance(place, OpenFile):
        place.refuse_unwritable(is_folder=is_folder)
        return
    from ckptconv.io.remote.output import check_remote

    check_remote(place, is_folder=is_folder, force=force)


def file_output(
    place: Location,
    files: ShardNames | None = None,
    *,
    in_folder: bool = False,
    force: bool,
    fsync: bool,
    size: int,
    read_back: bool = False,
    replaces: Iterable[Source] = (),
) -> Destination:
    """One file at `place`, or the `files` of a set, which are named after it; `in_folder`: in a
    folder that may be made. With `read_back` drafts are read before they are in their places; of
    what the run has read it may take the place of `replaces` alone.
    """
    how: Any = {"force": force, "size": size, "replaces": replaces}
    path = place.local()
    if path is None and not isinstance(place, OpenFile):
        from ckptconv.io.remote.output import remote_output

        return remote_output(place, files, read_back=read_back, **how)
    how["fsync"] = fsync
    if isinstance(place, OpenFile):
        return OpenOutput(place, **how)
    assert path is not None
    if files is None:
        return FileOutput(path, **how)
    return SetOutput(path, files, in_folder=in_folder, **how)


def write_file(place: Location, *pieces: memoryview | bytes, force: bool) -> int:
    """Put a file of these runs of bytes in its place, whole or not at all; returns its size."""
    size = sum(map(len, pieces))
    with file_output(place, force=force, fsync=True, size=size) as output:
        with output.draft(place.name, size) as draft:
            for piece in pieces:
                draft.stream.write(memoryview(piece))
            draft.commit()
        output.commit()
    return size


def folder_output(
    place: Location, *, force: bool, fsync: bool, size: int, replaces: Iterable[Source] = ()
) -> FolderOutput:
    """A folder at `place`, into which others write files of this host."""
    path = local_path(place, "a folder of this kind is made on this machine only")
    return FolderOutput(path, force=force, fsync=fsync, size=size, replaces=replaces)


def _close_replaced(inputs: Iterable[Source], paths: Callable[[], Iterable[Path]]) -> None:
    if platforms.ON_WINDOWS:  # which replaces no file that is open
        let_go(inputs, paths())
