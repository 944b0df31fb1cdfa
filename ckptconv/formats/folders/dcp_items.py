"""The items of a DCP folder, each a stream of `torch.save` of its own at a place in one of the data
files: opened one after the other, and what lies at their ends read for many at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from ckptconv.formats.folders.dcp_alike import Alike, Wanted
from ckptconv.formats.folders.dcp_runs import Item
from ckptconv.io.files import FilePool
from ckptconv.io.guarded import check_places
from ckptconv.io.location import Location, is_plain_path
from ckptconv.io.source import CHUNK, SMALL, Range, RangeSource, Source, WrappedSource
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.checkpoint import Checkpoint

# what opening a zip archive reads of it: its pickle and the headers before that, and the bytes in
# which its end record may be
_HEAD, _TAIL = SMALL, 22 + 0xFFFF
_AHEAD_FAR = 32 << 20  # bytes of the ends of items that are fetched together over a network

SourceOpener = Callable[[Source], Checkpoint]


class Items:
    """The files of one folder, and the items that were opened in them.

    `files` are the data files by name, `sources` what was opened besides them and has to be closed.
    """

    reads_chunks = True
    """Whether the items that are chunks of tensors are opened as well."""

    def __init__(self, folder: Location, open_source: SourceOpener) -> None:
        self.files: dict[str, Source] = {}
        self.sources: list[Source] = []
        self._folder = folder
        self._pool = FilePool()
        self._open_source = open_source
        self._read: dict[str, _ReadAhead] = {}
        self._coming: Iterator[Item] = iter(())
        self._held: dict[Item, list[tuple[int, bytes]]] = {}
        self._known: dict[Item, Node] = {}

    def recognize(self, wanted: Iterable[Wanted]) -> None:
        """Take note of those of the coming chunks that are known by others of their kind.

        They are looked at file by file. Over a network the order in which they are needed decides.
        """
        if self._folder.is_far() or not self.reads_chunks:
            return
        by_file: dict[str, list[Wanted]] = {}
        for one in wanted:
            if not one.item.transforms:
                by_file.setdefault(one.item.relative_path, []).append(one)
        alike = Alike(self._opened)
        for name, items in by_file.items():
            with contextlib.suppress(CheckpointError):  # said when the very item is opened
                self._known.update(alike.recognized(self._file(name), items))

    def expect(self, coming: Iterable[Item]) -> None:
        """Note the items that will be opened, in this order; they need not be there."""
        self._coming, self._held = iter(coming), {}

    def root_of(self, item: Item) -> Node:
        """What the stream at the place of an item holds."""
        if item.transforms:
            names = ", ".join(item.transforms)
            raise UnsupportedCheckpoint(
                f"was written through {names}, which ckptconv does not undo",
                hint="save it without extensions, or dcp.load it",
            )
        if (known := self._known.pop(item, None)) is not None:
            return known
        file = self._file(item.relative_path)
        if item not in self._held:
            self._read_ahead(item)
        file.held = self._held.pop(item, ())
        try:
            return self._opened(item)
        finally:
            file.held = ()

    def _opened(self, item: Item) -> Node:
        source = RangeSource(self._file(item.relative_path), item.offset, item.length)
        checkpoint = self._open_source(source)
        check_places(checkpoint.sources)
        self.sources += [source for source in checkpoint.sources if source.needs_closing()]
        return checkpoint.root

    def chunk(self, item: Item, key: str, dtype: DType, start: Shape, shape: Shape) -> TensorRef:
        """The chunk of the tensor `key` that an item is, which begins at `start` and has `shape`.

        Its dtype is whatever the item says.
        """
        ref = self.root_of(item)
        if type(ref) is not TensorRef:
            raise UnsupportedCheckpoint(
                "a chunk of it is not a plain tensor",
                hint="it was saved as a tensor of another class",
            )
        if ref.shape != shape:
            raise MalformedCheckpoint(
                f"its chunk at {list(start)} has the shape {list(ref.shape)} instead of "
                f"{list(shape)}"
            )
        return ref

    def _file(self, name: str) -> _ReadAhead:
        if name not in self._read:
            file = inside(self._folder, name).open(self._pool)
            self._read[name] = _ReadAhead(file)
            self.files[name] = self._in_front_of(name, file)
        return self._read[name]

    def open_all(self, names: Iterable[str]) -> None:
        """Open the data files, where each costs a request over a network: all are asked for at
        once, and then the ends of items in all of them.
        """
        if not self._folder.is_far():
            return
        plain = [name for name in names if is_plain_path(str(PurePosixPath(name)))]
        self._folder.foresee([self._folder.child(name) for name in plain])
        for name in plain:
            with contextlib.suppress(CheckpointError):  # said when the very file is needed
                self._file(name)

    def _in_front_of(self, name: str, file: Source) -> Source:
        return file

    def _read_ahead(self, item: Item) -> None:
        """Hold the ends of an item and of some that come next, in files that are open already."""
        wanted: dict[str, list[tuple[Item, Range]]] = {}
        total, most = 0, _AHEAD_FAR if self._folder.is_far() else CHUNK
        for other in _with_those_behind(item, self._coming):
            file = self._read.get(other.relative_path)
            if file is not None and 0 < other.length <= file.size - other.offset:
                for end in _ends(other):
                    wanted.setdefault(other.relative_path, []).append((other, end))
                    total += end[1]
            if total > most - _HEAD - _TAIL:  # so that one read may do
                break
        self._held = {}
        reading = {
            name: self._read[name].inner.begin_many([end for _, end in ranges])
            for name, ranges in wanted.items()
        }
        for name, ranges in wanted.items():
            try:
                found = reading[name]()
            except CheckpointError:  # said again when the very bytes are needed
                continue
            for (other, (at, _)), raw in zip(ranges, found, strict=True):
                self._held.setdefault(other, []).append((at, raw))

    def rest(self) -> None:
        """Close the files until they are read again."""
        self._pool.rest()

    def close(self) -> None:
        """Close all that was opened."""
        for source in (*self._read.values(), *self.sources):
            source.close()


def _with_those_behind(item: Item, coming: Iterator[Item]) -> Iterator[Item]:
    yield item
    for other in coming:
        if other is not item:
            yield other


def _ends(item: Item) -> list[Range]:
    if item.length <= _HEAD + _TAIL:
        return [(item.offset, item.length)]
    return [(item.offset, _HEAD), (item.offset + item.length - _TAIL, _TAIL)]


class _ReadAhead(WrappedSource):
    """A data file; what is `held` of it (places and bytes) was read before."""

    held: Sequence[tuple[int, bytes]] = ()

    def read(self, offset: int, nbytes: int) -> bytes:
        for at, raw in self.held:
            if at <= offset and offset + nbytes <= at + len(raw):
                return raw[offset - at : offset - at + nbytes]
        return self.inner.read(offset, nbytes)

    def read_into(self, offset: int, view: memoryview) -> None:
        for at, raw in self.held:
            if at <= offset and offset + len(view) <= at + len(raw):
                view[:] = raw[offset - at : offset - at + len(view)]
                return
        self.inner.read_into(offset, view)

    def foresee(self, ranges: Sequence[Range]) -> None:
        if not self.held:
            self.inner.foresee(ranges)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        if self.held:
            return super().read_many(ranges)
        return self.inner.read_many(ranges)


def inside(folder: Location, name: str) -> Location:
    """The file `name` of a folder; `MalformedCheckpoint` when it leads out of the folder."""
    place = folder.child(name)
    if not is_plain_path(str(PurePosixPath(name))):
        raise MalformedCheckpoint(
            f"names the file '{printable(name)}', which is not a plain relative path", path=folder
        )
    if not place.stays_within(folder):
        raise MalformedCheckpoint(
            f"names the file '{name}', which is a link out of the folder", path=folder
        )
    if not place.exists():
        raise MalformedCheckpoint(
            f"needs the file '{name}', which is not there",
            path=folder,
            hint="fetch or copy the whole folder",
        )
    return place
