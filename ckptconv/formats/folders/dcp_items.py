"""The items of a DCP folder, each a stream of `torch.save` of its own at a place in one of the data
files: opened one after the other, the ends of many read at once, or foretold by `.metadata`.

`.metadata` tells the dtype and the shape of a chunk and in which bytes its item lies. It does not
tell where in the item the values are, in which order of dimensions, in which byte order, or with
which checksum. So a chunk is foretold as its values in C order at a place that stands for them; who
reads there has the item opened, and is given those values from wherever they are. Whoever must know
more than values (`Checkpoint.certain`) has every item opened.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from operator import attrgetter
from pathlib import PurePosixPath

from ckptconv.formats.containers import open_source
from ckptconv.formats.folders.dcp_alike import SHORT, Alike, Chunk, Kinds, with_ends_checked
from ckptconv.formats.folders.dcp_metadata import Item, with_key
from ckptconv.formats.zip_directory import MOST_BEHIND
from ckptconv.io.files import FilePool
from ckptconv.io.guarded import GuardedSource, check_places
from ckptconv.io.location import Location, is_plain_path
from ckptconv.io.source import CHUNK, SMALL, MemorySource, Range, RangeSource, Source, WrappedSource
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.limits import held, in_force
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.assembly import assembled
from ckptconv.tensors.refs import Storage, TensorRef, contiguous_stride, view_of
from ckptconv.tensors.stream import iter_chunks, verbatim_range
from ckptconv.tree.checkpoint import Checkpoint

Coming = tuple[Item, "Chunk | None"]

_AHEAD_FAR = 32 << 20  # bytes of the ends of items that are fetched together over a network


class Items:
    """The files of one folder, and the items that were opened in them.

    `files` are the data files by name, `sources` what was opened besides them and has to be closed;
    `chunks` are the opened chunks of each file, each with the key of its tensor.
    """

    def __init__(self, folder: Location) -> None:
        self.files: dict[str, Source] = {}
        self.sources: list[Source] = []
        self.chunks: dict[str, list[tuple[str, TensorRef]]] = {}
        self._folder = folder
        self._pool = FilePool()
        self._read: dict[str, _ReadAhead] = {}
        self._coming: Iterator[Coming] = iter(())
        # by the identity of items, of which there is one of each: a hash is made of four values
        self._ends: dict[int, list[tuple[int, bytes]]] = {}
        self._kinds = Kinds()
        self._guarded: dict[str, GuardedSource] = {}

    def opened(self, coming: Sequence[Coming]) -> Iterator[Node]:
        """What the items hold, in this order; of a chunk of a tensor a `TensorRef` of its shape,
        whose dtype is whatever the item says. What is wrong with one is raised when it is its turn.
        """
        try:
            met = self._meet(coming)
            met.reverse()
            for item, chunk in coming:
                yield self._held(item, chunk, met.pop())
        finally:
            self._coming, self._ends = iter(()), {}

    def _meet(self, coming: Sequence[Coming]) -> list[Node | Alike]:
        """Open the items file by file; what they hold, in the order of `coming`, None where it was
        not opened. A tensor has a chunk in each rank's file, so in the order of the tree each of
        100,000 items would open its file again: few may be open at a time.

        The first error ends it: it is said in the order of the tree, when the very item is needed.
        Chunks may be known by others of their kind. Not over a network: there, their ends would
        have to be fetched a second time to be checked, so nothing is opened yet.
        """
        met: list[Node | Alike] = [None] * len(coming)
        self._coming = iter(coming)
        if self._folder.is_far():
            return met
        places: dict[str, list[tuple[int, int]]] = {}
        for number, (item, _) in enumerate(coming):
            places.setdefault(item.relative_path, []).append((item.offset, number))
        ordered: list[int] = []
        for name in sorted(places):
            numbers = [number for _, number in sorted(places[name])]
            ordered += numbers
            chunks = [
                (item, chunk)
                for item, chunk in map(coming.__getitem__, numbers)
                if chunk is not None and not item.transforms
            ]
            if chunks:
                with contextlib.suppress(CheckpointError):  # said when the very item is opened
                    self._guarded[name] = with_ends_checked(self._file(name), chunks)
        self._coming = map(coming.__getitem__, ordered)
        with contextlib.suppress(CheckpointError):
            for number in ordered:
                met[number] = self._root_of(*coming[number])
        self._coming, self._ends = iter(()), {}
        return met

    def _root_of(self, item: Item, chunk: Chunk | None) -> Node | Alike:
        if item.transforms:
            what = f"was written through {', '.join(item.transforms)}, which ckptconv does not undo"
            raise UnsupportedCheckpoint(what, hint="save it without extensions, or dcp.load it")
        file = self._file(item.relative_path)
        ends = self._ends.pop(id(item), None)
        if ends is None:
            self._read_ahead((item, chunk))
            ends = self._ends.pop(id(item), [])
        guarded = self._guarded.get(item.relative_path)
        if chunk is not None and guarded is not None and ends:
            known = self._kinds.alike((item, chunk), ends, guarded)
            if known is not None:
                return known
        file.held = ends
        try:
            root = self._opened(item)
            if chunk is not None and guarded is not None:
                self._kinds.learn((item, chunk), file, root)
        finally:
            file.held = ()
        return root

    def _opened(self, item: Item) -> Node:
        source = RangeSource(self._file(item.relative_path), item.offset, item.length)
        checkpoint = open_source(source)
        check_places(checkpoint.sources)
        self.sources += [source for source in checkpoint.sources if source.needs_closing()]
        return checkpoint.root

    def _held(self, item: Item, chunk: Chunk | None, met: Node | Alike = None) -> Node:
        """What an item holds, by what was `met` at its place, if anything."""
        if met is None:
            met = self._root_of(item, chunk)
        root = met.tensor(item) if type(met) is Alike else met
        if chunk is None:
            return root
        if type(root) is not TensorRef:
            hint = "it was saved as a tensor of another class"
            raise UnsupportedCheckpoint("a chunk of it is not a plain tensor", hint=hint)
        if root.shape != chunk.shape:
            what = f"has the shape {list(root.shape)} instead of {list(chunk.shape)}"
            raise MalformedCheckpoint(f"its chunk at {list(chunk.start)} {what}")
        self.chunks.setdefault(item.relative_path, []).append((chunk.key, root))
        return root

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

    def _read_ahead(self, one: Coming) -> None:
        """Hold the ends of an item and of some that come next, in files that are open already."""
        wanted: dict[str, list[tuple[Item, list[Range]]]] = {}
        total, most = 0, _AHEAD_FAR if self._folder.is_far() else CHUNK
        behind = (other for other in self._coming if other[0] is not one[0])
        for item, chunk in chain([one], behind):
            file = self._read.get(item.relative_path)
            if file is not None and 0 < item.length <= file.size - item.offset:
                ends = _ends(item, *(self._kinds.ends(item, chunk) or (SMALL, MOST_BEHIND)))
                wanted.setdefault(item.relative_path, []).append((item, ends))
                for _, size in ends:
                    total += size
            if total > most - SHORT:  # so that one read may do
                break
        self._ends = {}
        reading = {
            name: self._read[name].inner.begin_many([end for _, ends in items for end in ends])
            for name, items in wanted.items()
        }
        for name, items in wanted.items():
            try:
                found = iter(reading[name]())
            except CheckpointError:  # said again when the very bytes are needed
                continue
            for item, ends in items:
                self._ends[id(item)] = [(at, next(found)) for at, _ in ends]

    def rest(self) -> None:
        """Close the files until they are read again."""
        self._pool.rest()

    def close(self) -> None:
        """Close all that was opened."""
        for source in (*self._read.values(), *self.sources):
            source.close()


def _ends(item: Item, before: int, behind: int) -> list[Range]:
    """What opening an archive reads of it: its pickle and the headers before that, in `before`
    bytes, and `behind` bytes, in which its directory is, or whatever may hold its end record.
    """
    if item.length <= SHORT:
        return [(item.offset, item.length)]
    return [(item.offset, before), (item.offset + item.length - behind, behind)]


class _ReadAhead(WrappedSource):
    """A data file; what is `held` of it (places and bytes) was read before."""

    held: Sequence[tuple[int, bytes]] = ()

    def read(self, offset: int, nbytes: int) -> bytes:
        for at, raw in self.held:
            if at <= offset and offset + nbytes <= at + len(raw):
                return raw[offset - at : offset - at + nbytes]
        return self.inner.read(offset, nbytes)

    def read_into(self, offset: int, view: memoryview) -> None:
        if self.held:
            view[:] = self.read(offset, len(view))
        else:
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
    place, hint = folder.child(name), None
    if not is_plain_path(str(PurePosixPath(name))):
        what = f"names the file '{printable(name)}', which is not a plain relative path"
    elif not place.stays_within(folder):
        what = f"names the file '{name}', which is a link out of the folder"
    elif not place.exists():
        what = f"needs the file '{name}', which is not there"
        hint = "fetch or copy the whole folder"
    else:
        return place
    raise MalformedCheckpoint(what, path=folder, hint=hint)


# ---------------------------------------------------------------------------------------- foretold

# An item has at least so many bytes more than its values: the end record of its archive
_LEAST_AROUND = 22
_USUAL_NAME = "archive/data/0"  # torch calls the folder so where it saves into a buffer


class _Foretold(NamedTuple):
    """A chunk that an item is said to be; its values are expected at byte `place` of the file."""

    place: int
    item: Item
    chunk: Chunk


class ForetoldItems(Items):
    """The items of a folder of which only those are opened that are not chunks of tensors.

    `reread` opens the folder with all its items.
    """

    def __init__(self, folder: Location, reread: Callable[[], Checkpoint]) -> None:
        super().__init__(folder)
        self._reread = reread
        self._limits = in_force()
        self._whole: Checkpoint | None = None
        self._foretold: dict[str, ForetoldSource] = {}

    def reopen(self) -> Checkpoint:
        """The checkpoint with all its items opened; closed with these."""
        if self._whole is None:
            self.rest()
            self._whole = self._reread()
        return self._whole

    def opened(self, coming: Sequence[Coming]) -> Iterator[Node]:
        others = super().opened([one for one in coming if one[1] is None])
        for item, chunk in coming:
            yield next(others) if chunk is None else self._told(item, chunk)

    def _told(self, item: Item, chunk: Chunk) -> TensorRef:
        """The chunk as `.metadata` tells of it; `MalformedCheckpoint` where it cannot be so."""
        key, dtype, _, shape = chunk
        self._file(item.relative_path)
        file = self._foretold[item.relative_path]
        nbytes = prod(shape) * dtype.itemsize
        around = item.length - nbytes
        is_odd = bool(item.transforms) or dtype.is_packed or around < _LEAST_AROUND
        if is_odd or item.length > file.size - item.offset:
            raise MalformedCheckpoint("cannot be told without its item", where=key)
        place = item.offset + around // 2
        file.foretell(_Foretold(place, item, chunk))
        storage = Storage(file, place, nbytes, "cpu", _USUAL_NAME, dtype)
        return view_of(storage, dtype, 0, shape, contiguous_stride(shape))

    def values_of(self, told: _Foretold) -> tuple[Source, int]:
        """Where the values of a foretold chunk are in C order, after its item was opened.

        Raises what opening the whole folder raises for this item, with the key.
        """
        _, item, (key, dtype, _, shape) = told
        try:
            with held(self._limits):
                ref = self._held(item, told.chunk)
                ref = assembled(dtype, shape, [((0,) * len(shape), ref)])
        except CheckpointError as error:
            raise with_key(error, key) from error.__cause__
        run = verbatim_range(ref)
        if run is not None:
            storage, first = run
            return storage.source, storage.offset + first
        path = self._read[item.relative_path].path
        return MemorySource(b"".join(map(bytes, iter_chunks(ref))), path), 0

    def _in_front_of(self, name: str, file: Source) -> Source:
        self._foretold[name] = found = ForetoldSource(file, self)
        return found

    def close(self) -> None:
        super().close()
        if self._whole is not None:
            self._whole.close()


class ForetoldSource(WrappedSource):
    """A data file whose foretold chunks are opened when they are read."""

    def __init__(self, inner: Source, items: ForetoldItems) -> None:
        super().__init__(inner)
        self._items = items
        self._told: list[_Foretold] = []
        self._is_sorted = True
        # where the values of chunks are, by the places where they were expected; of those that had
        # to be gathered, only the last ones are kept
        self._found: dict[int, tuple[Source, int]] = {}
        self._gathered = -1

    def foretell(self, told: _Foretold) -> None:
        """Note that the values of a chunk are expected at its place."""
        self._told.append(told)
        self._is_sorted = False

    def read(self, offset: int, nbytes: int) -> bytes:
        source, at = self._place(offset)
        return source.read(at, nbytes)

    def read_into(self, offset: int, view: memoryview) -> None:
        source, at = self._place(offset)
        source.read_into(at, view)

    def comes_from(self, offset: int) -> tuple[Source, int]:
        source, at = self._place(offset)
        return source.comes_from(at)

    def data_from(self, offset: int) -> int:
        """`offset`: where a chunk is expected tells nothing of the holes of `inner`."""
        return offset

    def _place(self, offset: int) -> tuple[Source, int]:
        if not self._is_sorted:
            self._told.sort(key=_PLACE)
            self._is_sorted = True
        told = self._told[max(0, bisect_right(self._told, offset, key=_PLACE) - 1)]
        source, at = self._values(told)
        return source, at + offset - told.place

    def _values(self, told: _Foretold) -> tuple[Source, int]:
        found = self._found.get(told.place)
        if found is None:
            found = self._found[told.place] = self._items.values_of(told)
            if found[0].is_in_memory():
                self._found.pop(self._gathered, None)
                self._gathered = told.place
        return found

    def close(self) -> None:
        self._items.close()


_PLACE = attrgetter("place")
