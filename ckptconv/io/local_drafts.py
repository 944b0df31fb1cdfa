"""Drafts of files of this host, in a hidden folder until all are whole: what its outputs share."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any, TypeVar

from ckptconv.io.destination import Destination, Draft, check_space, new_file
from ckptconv.io.files import refuse_inputs
from ckptconv.io.local import LocalPlace
from ckptconv.io.location import Location
from ckptconv.io.source import Source
from ckptconv.support.errors import OutputRefused
from ckptconv.support.signals import held_back


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
        """Where the drafts are made."""
        if self._made is None:
            raise ValueError(f"{self.path}: is not open")
        return self._made

    def _named(self, name: str) -> PurePath:
        """How errors call the draft of that name."""
        return self.path.parent / name

    def _taken(self) -> Iterable[PurePath]:
        """The places that it takes."""
        return [self.path]

    @abstractmethod
    def _prepared(self, leaving: ExitStack) -> Path:
        """Refuse what must not be written; the hidden folder, which goes when `leaving` does."""

    @abstractmethod
    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        """Give what is in the folder `made` its names."""
