"""Outputs in repositories of the Hugging Face Hub: files made on this host, which huggingface_hub
uploads and puts in their places by one commit.

The Hub wants the SHA-256 of a file before it takes the file, so that nothing is streamed there.
What it has by now, from a run that was killed too, is not sent again: the library knows that, as it
knows Git LFS and xet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ckptconv.io.commit import FAILED, ShardNames, exists
from ckptconv.io.destination import LocalDraft, Staged
from ckptconv.io.hidden_folders import temporary_folder
from ckptconv.io.remote.hub import IS_COMMIT, HubStore, Repository, endpoint, hub_token
from ckptconv.io.remote.patience import asked
from ckptconv.io.remote.place import RemotePlace
from ckptconv.io.remote.store import StoreError, split
from ckptconv.io.source import Source
from ckptconv.support.errors import CheckpointError, MissingDependency, OutputRefused, printable

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_AGAIN = "nothing was committed; run the command again: what the Hub has is not sent again"


class HubOutput(Staged):
    """One file of a repository, or the `files` of a set beside each other there.

    A draft is uploaded as soon as it is whole, and leaves this host then; with `read_back` all stay
    until they are committed.
    """

    def __init__(
        self,
        place: RemotePlace,
        files: ShardNames | None,
        *,
        force: bool,
        size: int,
        read_back: bool,
        replaces: Iterable[Source],
    ) -> None:
        if not read_back and files is not None and len(files.shards) > 1:
            size = 0  # of room that is needed: each leaves before the next is made
        super().__init__(place.path, force=force, fsync=False, size=size, replaces=replaces)
        self._place, self._files, self._read_back = place, files, read_back
        self._sent: dict[str, CommitOperationAdd] = {}

    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> LocalDraft:
        draft = super().draft(name, size, on_progress)
        if not self._read_back:
            draft.when_whole = lambda: self._send(draft.made)
        return draft

    def is_for_threads(self) -> bool:
        """The library uses several threads for each file."""
        return False

    def _taken(self) -> Iterable[PurePath]:
        if self._files is None or not self._force:
            return [self.path]
        return [self.path, *(self._beside(name).path for name in self._files.taken())]

    def _prepared(self, leaving: ExitStack) -> Path:
        self._refuse_readers()
        self._hub = _library(self.path)
        with _told(self.path):
            self._refuse_there(self._now())
        return leaving.enter_context(temporary_folder())

    def _beside(self, name: str) -> RemotePlace:
        return self._place if self._files is None else self._place.parent.child(name)

    def _now(self) -> HubStore:
        return HubStore(self._repository)

    @property
    def _repository(self) -> Repository:
        store = self._place.site.store
        assert isinstance(store, HubStore)
        return store.repository

    def _refuse_readers(self) -> None:
        """Refuse what can only be read, before all is made and uploaded for nothing."""
        if hub_token() is None:
            hint = "log in: hf auth login (or set HF_TOKEN)"
            raise OutputRefused("needs a token that may write", path=self.path, hint=hint)
        if IS_COMMIT(self._repository.revision):
            what, hint = "names a commit, which stays as it is", "name a branch or a pull request"
            raise OutputRefused(what, path=self.path, hint=hint)

    def _refuse_there(self, store: HubStore) -> None:
        """Raise `OutputRefused` where a name is taken that must be free."""
        if self._force:
            return
        names = [self.path.name]
        if self._files is not None:
            names = [*self._files.earlier(), *self._files.all_names]
        wanted = {self._beside(name).key: name for name in names}
        there = _files(store, wanted)
        for key, name in wanted.items():
            if key in there:
                raise exists(self._beside(name).path)

    # ------------------------------------------------------------------------------- the library

    def _send(self, made: Path) -> None:
        name = made.relative_to(self._folder()).as_posix()
        with _told(self.path):
            addition = self._sent[name] = self._addition(name)
            self._hub.preupload_lfs_files(**self._where(), additions=[addition])
        if addition.path_or_fileobj == b"":  # which is how the library lets go of what it has sent
            made.unlink()

    def _addition(self, name: str) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd

        return CommitOperationAdd(self._beside(name).key, self._folder() / name)

    def _what(self) -> str:
        """What a commit is of: the file, or the folder of a set, by its path in the repository."""
        if self._files is not None and self._files.index is not None:
            return self._place.parent.key or self._place.key
        return self._place.key

    def _where(self) -> dict[str, Any]:
        kind = self._repository.kind.removesuffix("s")
        revision = self._repository.revision
        return {"repo_id": self._repository.name, "repo_type": kind, "revision": revision}

    def _put(self, made: Path, inputs: Iterable[Source]) -> None:
        from huggingface_hub import CommitInfo, CommitOperationDelete

        with _told(self.path):
            store = self._now()
            self._refuse_there(store)
            names = [draft.made.relative_to(made).as_posix() for draft in self._drafts]
            added = [self._sent.get(name) or self._addition(name) for name in names]
            own = {addition.path_in_repo for addition in added}
            gone: set[str] = set()
            if self._files is not None:
                gone = {self._beside(name).key for name in self._files.earlier()} - own
            done: CommitInfo = self._hub.create_commit(
                **self._where(),
                operations=[*added, *map(CommitOperationDelete, sorted(gone))],
                commit_message=f"Upload {self._what()} with ckptconv",
                parent_commit=store.commit(),
            )
            _refuse_unlike(replace(self._repository, revision=done.oid), added, self.path)


def _files(store: HubStore, keys: Iterable[str]) -> dict[str, int]:
    """The sizes of the files in the folders of `keys`, by their keys."""
    folders = {split(key)[0] for key in keys}
    found = {folder: asked(partial(store.list, folder)).files for folder in folders}
    return {f"{at}{name}": seen.size for at, files in found.items() for name, seen in files.items()}


def _refuse_unlike(made: Repository, added: Iterable[CommitOperationAdd], path: PurePath) -> None:
    """Raise `OutputRefused` unless a commit has all the files: the library leaves out those that a
    ``.gitignore`` of the repository names, and says nothing.
    """
    sizes = {addition.path_in_repo: addition.upload_info.size for addition in added}
    there = _files(HubStore(made), sizes)
    for key, size in sizes.items():
        if there.get(key) != size:
            what = f"is committed, but {printable(key)} is not in the commit as it was made here"
            hint = "look for its name in the .gitignore of the repository"
            raise OutputRefused(what, path=path, hint=hint)


def _library(path: PurePath) -> HfApi:
    """huggingface_hub, for the Hub and the token that the reading half has too."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        what, hint = "needs huggingface_hub to be written", "pip install 'huggingface_hub>=1.4'"
        raise MissingDependency(what, path=path, hint=hint) from None
    disable_progress_bars()  # this program shows its own
    return HfApi(endpoint(), token=hub_token() or False, library_name="ckptconv")


@contextmanager
def _told(path: PurePath) -> Iterator[None]:
    """Errors of the library and of the Hub as `OutputRefused` of the output."""
    try:
        yield
    except CheckpointError:
        raise
    except StoreError as error:
        hint = "; ".join(filter(None, (error.hint, _AGAIN)))
        raise OutputRefused(f"{FAILED}{error.what}", path=path, hint=hint) from None
    except Exception as error:  # the library raises what the libraries below it do, too
        what, hint = _said(error)
        raise OutputRefused(f"{FAILED}{what}", path=path, hint=hint) from error


def _said(error: Exception) -> tuple[str, str]:
    """What went wrong, by the status of the answer where there is one, and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 412:
        return "somebody else committed to the repository meanwhile", _AGAIN
    if status in (401, 403):
        return "the token may not write there", "check what it may do at the Hub"
    told = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return printable(" ".join(str(told).split()), 300), _AGAIN
