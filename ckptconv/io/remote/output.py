"""Outputs in stores: uploads that become objects together, or not at all.

An object appears as a whole when its upload is finished. A set appears by its index, which comes
last; where one is replaced, the index that was there goes first, so that no index ever names a
mixture. An output that is read back is made under hidden keys beside its place, and moved by the
store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TypeVar

from ckptconv.io.destination import Destination, Draft
from ckptconv.io.location import Location
from ckptconv.io.remote.fetchers import fetched
from ckptconv.io.remote.patience import patiently
from ckptconv.io.remote.place import RemotePlace
from ckptconv.io.remote.store import StoreError, Upload
from ckptconv.io.remote.uploads import hidden_key
from ckptconv.io.source import Source
from ckptconv.io.staging import ShardNames
from ckptconv.io.stream import OutputStream, Sink
from ckptconv.support.errors import CheckpointError, OutputRefused
from ckptconv.support.limits import in_force
from ckptconv.support.signals import held_back

T = TypeVar("T")


def check_remote(place: Location, *, is_folder: bool, force: bool) -> None:
    """Raise `OutputRefused` where an output may not be made at `place`."""
    named = _writable(place)
    if is_folder:
        hint = "write it to a folder here, and upload that"
        raise OutputRefused("is a folder that torch makes, on this machine only", path=place.path,
                            hint=hint)  # fmt: skip
    with _told(named):
        kind = named.kind()
        if kind == "folder" and named.key.endswith("/"):
            raise OutputRefused("is a folder", path=place.path, hint="name a file to write")
        if kind == "file" and not force:
            raise _exists(named)


def _writable(place: Location) -> RemotePlace:
    if not isinstance(place, RemotePlace) or not place.site.store.can_write:
        hint = "write a file here, and upload it"
        raise OutputRefused("is a place that is only read", path=place.path, hint=hint)
    return place


def _exists(place: Location) -> OutputRefused:
    return OutputRefused(
        "exists", path=place.path, hint="add --force to replace it (force=True in code)"
    )


@contextmanager
def _told(place: Location) -> Iterator[None]:
    """Errors of the store and of the network as `OutputRefused` of the output."""
    try:
        yield
    except StoreError as error:
        if error.kind == "exists":
            raise _exists(place) from None
        raise OutputRefused(
            f"cannot be written: {error.what}",
            path=place.path,
            hint=error.hint or "nothing was left behind",
        ) from None
    except OutputRefused:
        raise
    except OSError as error:
        raise OutputRefused(f"cannot be written: {error.strerror}", path=place.path) from error


class _UploadSink(Sink):
    """Hands what is written to an upload."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def write(self, view: memoryview) -> None:
        self._upload.write(view)

    def end(self, size: int, *, fsync: bool) -> None:
        self._upload.end()

    def close(self) -> None:
        """The upload goes on: it is finished or aborted by its draft."""


class RemoteDraft(Draft):
    """An upload, which is to become the object at `target`, or at `hidden` if it is read back."""

    def __init__(
        self,
        target: RemotePlace,
        hidden: str | None,
        size: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.target = target
        self.is_whole = False
        self._hidden, self._on_progress = hidden, on_progress
        self._store = target.site.store
        self._upload: Upload | None = self._store.begin(hidden or target.key, size)
        self._is_staged = False

    @property
    def place(self) -> Location:
        if self._hidden is None:
            raise ValueError(f"{self.target}: is not made to be read back")
        return RemotePlace(self.target.site.anew(), self._hidden)

    def __enter__(self) -> RemoteDraft:
        assert self._upload is not None
        self.stream = OutputStream(_UploadSink(self._upload), self._on_progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if not self.is_whole:
            with held_back():
                if self._upload is not None:
                    self._upload.cancel()
                self.stream.abandon()
                self.discard()
        return None

    def commit(self) -> None:
        with _told(self.target):
            self.stream.settle(fsync=True)
            if self._hidden is not None:
                assert self._upload is not None
                self._upload.finish(create=True)
                self._upload, self._is_staged = None, True
        self.is_whole = True

    def put(self, *, create: bool) -> None:
        """Give it its name."""
        if self._hidden is not None:
            _asked(partial(self._store.move, self._hidden, self.target.key, create=create))
            self._is_staged = False
        elif self._upload is not None:
            self._upload.finish(create=create)
            self._upload = None

    def discard(self) -> None:
        self.is_whole = False
        upload, self._upload = self._upload, None
        with held_back():
            if upload is not None:
                upload.abort()
            if self._is_staged and self._hidden is not None:
                self._is_staged = False
                with contextlib.suppress(StoreError):
                    _asked(partial(self._store.remove, self._hidden))


class RemoteOutput(Destination):
    """One object, or the objects of a set in a folder."""

    def __init__(
        self, place: RemotePlace, files: ShardNames | None, *, force: bool, read_back: bool
    ) -> None:
        self.path = place.path
        self._place, self._files = place, files
        self._force, self._read_back = force, read_back
        self._drafts: list[RemoteDraft] = []
        self._is_open = False

    def __enter__(self) -> RemoteOutput:
        with _told(self._place):
            if self._files is None:
                check_remote(self._place, is_folder=False, force=self._force)
            else:
                self._check_set(self._files)
        self._is_open = True
        return self

    def _check_set(self, files: ShardNames) -> None:
        names = [*files.claimed, *files.earlier(), *files.shards, *files.companions]
        for name in dict.fromkeys([*names, *([files.index] if files.index else [])]):
            place = self._beside(name)
            if not self._force and place.is_file():
                raise _exists(place)

    def _beside(self, name: str) -> RemotePlace:
        return self._place.parent.child(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self.discard()
        if isinstance(error, (StoreError, OSError)) and not isinstance(error, CheckpointError):
            with _told(self._place):
                raise error
        return None

    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> RemoteDraft:
        if not self._is_open:
            raise ValueError(f"{self.path}: is not open")
        target = self._place if self._files is None else self._beside(name)
        hidden = hidden_key(target.key) if self._read_back else None
        with _told(target):
            draft = RemoteDraft(target, hidden, size, on_progress)
        self._drafts.append(draft)
        return draft

    def commit(self, inputs: Iterable[Source] = ()) -> None:
        if not self._is_open:
            raise ValueError(f"{self.path}: is not open")
        if not all(draft.is_whole for draft in self._drafts):
            raise ValueError(f"{self.path}: not all drafts are whole")
        index = None if self._files is None else self._files.index
        ordered = sorted(self._drafts, key=lambda draft: draft.target.name == index)
        leftover = self._leftover(ordered)
        put: list[RemoteDraft] = []
        with held_back():
            try:
                if self._force and index is not None:
                    self._remove([index])
                for draft in ordered:
                    with _told(draft.target):
                        draft.put(create=not self._force)
                    put.append(draft)
            except BaseException:
                if not self._force:  # where something was replaced it cannot be brought back
                    self._remove([draft.target.name for draft in put])
                raise
            self._drafts = []
            self._remove(leftover)

    def _leftover(self, drafts: Sequence[RemoteDraft]) -> list[str]:
        """Files of an earlier set that are not files of this one."""
        if self._files is None or not self._force:
            return []
        names = {draft.target.name for draft in drafts}
        return [name for name in self._files.earlier() if name not in names]

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            target = self._place if self._files is None else self._beside(name)
            with contextlib.suppress(StoreError):
                _asked(partial(target.site.store.remove, target.key))

    def discard(self) -> None:
        self._is_open = False
        drafts, self._drafts = self._drafts, []
        for draft in drafts:
            draft.discard()


def _asked(request: Callable[[], T]) -> T:
    return fetched(partial(patiently, request, in_force().remote_seconds)).result()


def remote_output(
    place: Location, *, force: bool, read_back: bool = False, files: ShardNames | None = None
) -> Destination:
    """One object, or shards and their index; `files` are the names of a set in a folder.

    With `read_back`, a committed draft can be read before the output is.
    """
    return RemoteOutput(_writable(place), files, force=force, read_back=read_back)
