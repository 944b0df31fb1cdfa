"""The chunks of a DCP folder as its `.metadata` tells of them: no item of theirs is opened before
its values are needed.

`.metadata` tells the dtype and the shape of a chunk and in which bytes its item lies. It does not
tell where in the item the values are, in which order of dimensions, in which byte order, or with
which checksum. So a chunk is foretold as its values in C order at a place that stands for them; who
reads there has the item opened, and is given those values from wherever they are. Whoever must know
more than values (`Checkpoint.certain`) has every item opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import prod
from operator import attrgetter
from typing import NamedTuple

from ckptconv.formats.folders.dcp_items import Items, SourceOpener
from ckptconv.formats.folders.dcp_metadata import with_key
from ckptconv.formats.folders.dcp_runs import Item
from ckptconv.io.location import Location
from ckptconv.io.source import MemorySource, Source, WrappedSource
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint
from ckptconv.support.limits import held, in_force
from ckptconv.tensors.assembly import assembled
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Shape, Storage, TensorRef, contiguous_stride, view_of
from ckptconv.tensors.stream import iter_chunks, verbatim_range
from ckptconv.tree.checkpoint import Checkpoint

_LEAST_AROUND = 22
"""An item has at least so many bytes more than its values: the end record of its archive."""
_USUAL_NAME = "archive/data/0"


class _Foretold(NamedTuple):
    """A chunk that an item is said to be; its values are expected at byte `place` of the file."""

    place: int
    item: Item
    key: str
    dtype: DType
    start: Shape
    shape: Shape


class ForetoldItems(Items):
    """The items of a folder of which only those are opened that are not chunks of tensors.

    `reread` opens the folder with all its items.
    """

    reads_chunks = False

    def __init__(
        self, folder: Location, open_source: SourceOpener, reread: Callable[[], Checkpoint]
    ) -> None:
        super().__init__(folder, open_source)
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

    def chunk(self, item: Item, key: str, dtype: DType, start: Shape, shape: Shape) -> TensorRef:
        """The chunk as `.metadata` tells of it; `MalformedCheckpoint` where it cannot be so."""
        self._file(item.relative_path)
        file = self._foretold[item.relative_path]
        nbytes = prod(shape) * dtype.itemsize
        around = item.length - nbytes
        if (
            item.transforms
            or dtype.is_packed
            or around < _LEAST_AROUND
            or item.length > file.size - item.offset
        ):
            raise MalformedCheckpoint("cannot be told without its item", where=key)
        place = item.offset + around // 2
        file.foretell(_Foretold(place, item, key, dtype, start, shape))
        storage = Storage(file, place, nbytes, "cpu", _USUAL_NAME, dtype)
        return view_of(storage, dtype, 0, shape, contiguous_stride(shape))

    def values_of(self, told: _Foretold) -> tuple[Source, int]:
        """Where the values of a foretold chunk are in C order, after its item was opened.

        Raises what opening the whole folder raises for this item, with the key.
        """
        try:
            with held(self._limits):
                ref = super().chunk(told.item, told.key, told.dtype, told.start, told.shape)
                ref = assembled(told.dtype, told.shape, [((0,) * len(told.shape), ref)])
        except CheckpointError as error:
            raise with_key(error, told.key) from error.__cause__
        if (run := verbatim_range(ref)) is not None:
            storage, first = run
            return storage.source, storage.offset + first
        path = self._read[told.item.relative_path].path
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
        self._gathered: tuple[int, Source] = (-1, self)

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
        """Where the byte is that is expected at `offset`."""
        if not self._is_sorted:
            self._told.sort(key=_PLACE)
            self._is_sorted = True
        told = self._told[max(0, bisect_right(self._told, offset, key=_PLACE) - 1)]
        source, at = self._values(told)
        return source, at + offset - told.place

    def _values(self, told: _Foretold) -> tuple[Source, int]:
        if (known := self._found.get(told.place)) is not None:
            return known
        if self._gathered[0] == told.place:
            return self._gathered[1], 0
        source, at = self._items.values_of(told)
        if source.is_in_memory():
            self._gathered = (told.place, source)
        else:
            self._found[told.place] = (source, at)
        return source, at

    def close(self) -> None:
        self._items.close()


_PLACE = attrgetter("place")
