"""Outputs in stores: uploads that become objects together, or not at all.

An object appears as a whole when its upload is finished. An output that is read back is made under
hidden keys beside its place, and moved by the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from ckptconv.io.commit import (
    FAILED,
    FolderNames,
    ShardNames,
    exists,
    exists_by_now,
    is_folder_there,
    put_set,
)
from ckptconv.io.destination import Destination, Draft, output_errors
from ckptconv.io.files import refuse_inputs
from ckptconv.io.location import Location
from ckptconv.io.remote.causes import Forbidden
from ckptconv.io.remote.patience import asked
from ckptconv.io.remote.place import RemotePlace
from ckptconv.io.remote.store import StoreError, Upload, unless_missing
from ckptconv.io.remote.uploads import hidden_key
from ckptconv.io.source import Source
from ckptconv.io.stream import OutputStream
from ckptconv.support.errors import OutputRefused
from ckptconv.support.signals import held_back

_NOTHING_LEFT = "nothing was left behind"
# where the store does not answer: neither to the last request, nor to the removal
_MAY_BE_LEFT = "check whether it is there; ckptconv cleanup finds what was left behind"


def check_remote(place: Location, *, is_folder: bool, force: bool) -> None:
    """Raise `OutputRefused` where an output may not be made at `place`."""
    named = _writable(place)
    if is_folder:
        what = "is a folder that torch makes, on this machine only"
        hint = "write it to a folder here, and upload that"
        raise OutputRefused(what, path=place.path, hint=hint)
    with _told(named, is_begun=False):
        if not named.key or named.key.endswith("/"):
            raise is_folder_there(place.path)
        if _is_there(named):
            if not force:
                raise exists(place.path)
        elif _is_folder(named):
            raise is_folder_there(place.path)


def _writable(place: Location) -> RemotePlace:
    if isinstance(place, RemotePlace):
        store = place.site.store
        if store.can_write or store.commits:
            return place
    hint = "write a file here, and upload it"
    raise OutputRefused("can be read, but not written", path=place.path, hint=hint)


def remote_output(
    place: Location,
    files: ShardNames | None,
    *,
    force: bool,
    size: int,
    read_back: bool,
    replaces: Iterable[Source],
) -> Destination:
    """The output at `place`, in the way in which its store takes files; see `RemoteOutput`."""
    named = _writable(place)
    if not named.site.store.commits:
        return RemoteOutput(named, files, force=force, read_back=read_back, replaces=replaces)
    from ckptconv.io.remote.hub_output import HubOutput

    return HubOutput(named, files, force=force, size=size, read_back=read_back, replaces=replaces)


def _is_there(place: RemotePlace) -> bool:
    """Whether there is an object, asked now; who may not know hears it when it is written."""
    store = place.site.store
    with unless_missing(), suppress(Forbidden):
        # one byte: to read is all that every store can be asked, for not each of them lists
        asked(lambda: store.get(place.key, 0, 1, None))
        return True
    return False


def _is_folder(place: RemotePlace) -> bool:
    store = place.site.store
    with suppress(Forbidden):
        return store.can_list and bool(asked(lambda: store.list(f"{place.key}/")))
    return False


@contextmanager
def _told(place: Location, *, is_begun: bool = True) -> Iterator[None]:
    """Errors of the store and of the system as `OutputRefused` of the output."""
    try:
        with output_errors(place.path):
            yield
    except StoreError as error:
        if error.kind == "exists":
            raise exists_by_now(place.path) from None
        left = _NOTHING_LEFT
        if is_begun and error.kind == "passing":
            left = _MAY_BE_LEFT
        hint = "; ".join(filter(None, (error.hint, left)))
        raise OutputRefused(f"{FAILED}{error.what}", path=place.path, hint=hint) from None


class RemoteDraft(Draft):
    """An upload, which is to become the object at `target`, or at `hidden` if it is read back."""

    def __init__(
        self,
        name: str,
        target: RemotePlace,
        hidden: str | None,
        size: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.name, self.target = name, target
        self.is_whole = False
        self._hidden, self._on_progress = hidden, on_progress
        self._store = target.site.store
        self._upload: Upload | None = self._store.begin(hidden or target.key, size)
        self._is_staged = False
        self.is_still_hidden = False  # too, though it has its name

    @property
    def place(self) -> Location:
        """Where it is read back; a draft that is not to be is nowhere before it is committed."""
        # anew, for what was listed or fetched before does not have the object
        return RemotePlace(self.target.site.anew(), self._hidden or self.target.key)

    def __enter__(self) -> RemoteDraft:
        assert self._upload is not None
        self.stream = OutputStream(self._upload, self._on_progress)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> None:
        if not self.is_whole:
            with held_back():
                if self._upload is not None:
                    # else the thread that writes would go on until its request ends
                    self._upload.cancel()
                self.stream.abandon()
                self.discard()
        if isinstance(error, (StoreError, OSError)):
            with _told(self.target):
                raise error

    def commit(self) -> None:
        self.stream.settle(fsync=True)
        if self._hidden is not None:
            assert self._upload is not None
            self._is_staged = True  # perhaps: an answer may be lost
            self._upload.finish(create=True)
            self._upload = None
        self.is_whole = True

    def put(self, *, create: bool) -> None:
        """Give it its name."""
        with _told(self.target):
            if self._hidden is not None:
                hidden = self._hidden
                asked(lambda: self._store.move(hidden, self.target.key, create=create))
                self._is_staged = False
                self.is_still_hidden = self._store.keeps_moved and not self._is_unhidden()
            elif self._upload is not None:
                self._upload.finish(create=create)
                self.is_still_hidden = self._upload.is_left
                self._upload = None

    def discard(self) -> None:
        self.is_whole = False
        upload, self._upload = self._upload, None
        with held_back():
            if upload is not None:
                upload.abort()
            if self._is_staged:
                self._is_staged = False
                self._is_unhidden()

    def _is_unhidden(self) -> bool:
        try:
            asked(partial(self._store.remove, self._hidden or ""))
        except StoreError:
            return False
        return True


class _ObjectNames(FolderNames):
    """Keys beside that of the output, and the drafts for them by their names.

    Objects are where they are as soon as the store answers, and nothing locks a folder: the
    condition of each request decides between two writers.
    """

    def __init__(self, place: RemotePlace, drafts: Mapping[str, RemoteDraft]) -> None:
        self.path, self._place, self._drafts = place.path, place, drafts

    def name(self, name: str) -> None:
        self._drafts[name].put(create=True)

    def replace(self, name: str) -> None:
        self._drafts[name].put(create=False)

    def remove(self, name: str) -> None:
        item = self._place.parent.child(name)
        asked(lambda: item.site.store.remove(item.key))

    def there(self, names: Sequence[str]) -> list[str]:
        """As their folders are listed now."""
        store, found = self._place.site.store, set[str]()
        for folder in dict.fromkeys(name.rpartition("/")[0] for name in names):
            inside = "/".join(filter(None, (self._place.parent.key.rstrip("/"), folder)))
            listing = asked(partial(store.list, f"{inside}/" if inside else ""))
            found |= {f"{folder}/{name}" if folder else name for name in listing.files}
        return [name for name in names if name in found or store.written(name) in found]

    def sync(self, names: Sequence[str], *, are_last: bool = False) -> None:
        """A store that answers has it."""

    def told(self) -> AbstractContextManager[object]:
        return _told(self._place)


class RemoteOutput(Destination):
    """One object, or shards and their index; `files` are the names of a set in a folder. Of what
    the run has read it may take the place of `replaces` alone.

    With `read_back`, a committed draft can be read before the output is.
    """

    def __init__(
        self,
        place: Location,
        files: ShardNames | None = None,
        *,
        force: bool,
        read_back: bool = False,
        replaces: Iterable[Source] = (),
    ) -> None:
        self.path, self._replaces = place.path, replaces
        self._place, self._files = _writable(place), files
        self._force, self._read_back = force, read_back
        self._drafts: list[RemoteDraft] = []
        self._is_open = False

    def __enter__(self) -> RemoteOutput:
        with _told(self._place, is_begun=False):
            if self._files is None:
                check_remote(self._place, is_folder=False, force=self._force)
            elif not self._force:
                found = [*self._files.earlier(), *self._names().there(self._files.all_names)]
                if found:
                    raise exists(self._place.parent.child(found[0]).path)
            taken = [self.path]
            if self._files is not None and self._force:
                taken += (self._place.parent.child(name).path for name in self._files.taken())
            refuse_inputs(taken, self._replaces)
        self._is_open = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> None:
        self.discard()
        if isinstance(error, (StoreError, OSError)):
            with _told(self._place):
                raise error

    def draft(
        self, name: str, size: int, on_progress: Callable[[int], None] | None = None
    ) -> RemoteDraft:
        if not self._is_open:
            raise ValueError(f"{self.path}: is not open")
        target = self._place if self._files is None else self._place.parent.child(name)
        hidden = hidden_key(target.key) if self._read_back else None
        draft = RemoteDraft(name, target, hidden, size, on_progress)
        self._drafts.append(draft)
        return draft

    # ---------------------------------------------------------------------------------- commit

    def commit(self, inputs: Iterable[Source] = ()) -> None:
        if not self._is_open:
            raise ValueError(f"{self.path}: is not open")
        if not all(draft.is_whole for draft in self._drafts):
            raise ValueError(f"{self.path}: not all drafts are whole")
        with held_back():
            if self._files is None:
                for draft in self._drafts:
                    draft.put(create=not self._force)
            else:
                put_set(self._names(), self._files, force=self._force)
            drafts, self._drafts = self._drafts, []
        if any(draft.is_still_hidden for draft in drafts):
            what = "is in place, but hidden objects beside it cannot be removed"
            raise OutputRefused(what, path=self.path, hint="ckptconv cleanup finds them")

    def _names(self) -> _ObjectNames:
        return _ObjectNames(self._place, {draft.name: draft for draft in self._drafts})

    def discard(self) -> None:
        self._is_open = False
        drafts, self._drafts = self._drafts, []
        with held_back():
            for draft in drafts:
                draft.discard()
