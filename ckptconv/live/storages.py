"""The storages of live tensors: mapped, or read and checked, and moved to their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptconv.devices.host import require_device
from ckptconv.devices.mapping import resolve_map_location
from ckptconv.io.crc import crc32
from ckptconv.io.source import CHUNK, Pending, Source
from ckptconv.support.errors import OptionRefused, UnsupportedCheckpoint
from ckptconv.support.progress import Meter
from ckptconv.tensors.checksums import check_storage, refuse_crc
from ckptconv.tensors.computed import iter_cast_chunks
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage, TensorRef, whole_storage
from ckptconv.tensors.stream import iter_chunks

if TYPE_CHECKING:
    import torch

MapLocation = Any
"""What `torch.load` takes: None, a string (also ``auto``), a `torch.device`, a dict, a callable."""


class Restorer:
    """Moves a storage to where `map_location` wants it, as `torch.load` does."""

    def __init__(self, map_location: MapLocation) -> None:
        self._call: Callable[..., Any] | None = None
        if callable(map_location) and not isinstance(map_location, str):
            self._call = map_location
        else:
            self._device_of = resolve_map_location(map_location)

    def __call__(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if self._call is None:
            device = self._device_of(location)
        else:
            moved = self._call(storage, location)
            if moved is not None:
                return _untyped(moved)
            device = require_device(location)
        return storage if device.type == "cpu" else storage.to(device=device)


def _untyped(moved: Any) -> torch.UntypedStorage:
    """What a callable gave instead of a storage; a typed one stands for what it wraps."""
    untyped: torch.UntypedStorage = getattr(moved, "_untyped_storage", moved)
    if not hasattr(untyped, "data_ptr"):
        what = f"the callable map_location gave {moved!r:.100}, which is not a storage"
        hint = "return the storage, moved, or None; or give a string, a device or a dict"
        raise OptionRefused(what, hint=hint)
    return untyped


def lies_mappable(storage: Storage, dtype: DType) -> bool:
    """Whether a storage lies in its source as torch needs the values of `dtype` in memory."""
    in_order = not storage.big_endian or dtype.word == 1
    return in_order and storage.offset % dtype.itemsize == 0


def is_read_once(storage: Storage) -> bool:
    """Whether one pass gives both the values of a storage and its checksum."""
    return storage.part_of is None and not storage.big_endian


class Storages:
    """Makes live storages, one for each in the file, so that what was shared stays shared."""

    def __init__(self, restore: Restorer, mmap: bool, verify: bool, meter: Meter) -> None:
        import torch

        self._torch = torch
        self._restore = restore
        self._mmap = mmap
        self._verify = verify
        self._meter = meter
        self._maps: dict[int, torch.UntypedStorage | None] = {}
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._made_as: dict[tuple[int, str], torch.UntypedStorage] = {}
        self._checked: set[int] = set()
        self._cut_at: set[tuple[int, int]] = set()
        self._begun: dict[int, tuple[torch.Tensor, Pending]] = {}

    def of(self, storage: Storage, dtype: DType) -> torch.UntypedStorage:
        # bytes in another order are turned around word by word: not the same for other words
        word = dtype.word if storage.big_endian else 1
        made = self._storages.get((id(storage), word))
        if made is None:
            made = self._restore(self._on_cpu(storage, dtype, word), storage.location)
            self._storages[id(storage), word] = made
        return made

    def _on_cpu(self, storage: Storage, dtype: DType, word: int) -> torch.UntypedStorage:
        mapped = None
        if self._mmap and lies_mappable(storage, dtype) and not self._is_cut_again(storage):
            mapped = self._mapped(storage.source)
        if mapped is None and is_read_once(storage):
            return self._read(storage)
        if mapped is None or self._verify:
            self.check_read(storage)
        if mapped is None:
            return self._gathered(whole_storage(storage, 0, storage.nbytes, dtype))
        part: torch.UntypedStorage = mapped[storage.offset : storage.offset + storage.nbytes]
        return part

    def _is_cut_again(self, storage: Storage) -> bool:
        """Whether another storage was cut out of the same bytes: mapped, the two would be one
        memory, and what is written to one tensor would be in the other.
        """
        place = id(storage.source), storage.offset
        is_again = storage.part_of is not None and place in self._cut_at
        self._cut_at.add(place)
        return is_again

    @contextmanager
    def begun(self, storages: Iterable[Storage]) -> Iterator[None]:
        """Within the block, large storages of a network are on their way to where they will be."""
        for storage in storages:
            is_large = storage.nbytes >= CHUNK and is_read_once(storage)
            if is_large and storage.source.fetched_from(0) is not None:
                values = self._torch.empty(storage.nbytes, dtype=self._torch.uint8)
                pending = storage.source.begin_into(storage.offset, values.numpy().data)
                self._begun[id(storage)] = values, pending
        try:
            yield
        finally:
            # else it would go on writing into values that nobody waits for
            for _, pending in self._begun.values():
                pending.cancel()

    def _read(self, storage: Storage) -> torch.UntypedStorage:
        """A fresh CPU storage with the bytes of `storage`, held against its checksum on the way."""
        values, pending = self._begun.pop(id(storage), (None, None))
        if values is None:
            values = self._torch.empty(storage.nbytes, dtype=self._torch.uint8)
        if pending is not None:
            pending.wait()
        # part by part: the checksum needs no second pass, and the progress is told
        view, crc = values.numpy().data, 0
        for at in range(0, storage.nbytes, CHUNK):
            part = view[at : at + CHUNK]
            if pending is None:
                storage.source.read_into(storage.offset + at, part)
            crc = crc32(part, crc)
            self._meter.add(len(part))
        refuse_crc(storage, crc)
        self._checked.add(id(storage))
        return values.untyped_storage()

    def check_read(self, storage: Storage) -> None:
        """Hold a storage that is read, or the one that it is part of, against its checksum, once.
        What is mapped is not, but to verify it: nothing is read for it.
        """
        whole = storage.whole
        if id(whole) not in self._checked:
            self._checked.add(id(whole))
            check_storage(whole, self._meter)

    def _mapped(self, source: Source) -> torch.UntypedStorage | None:
        """All bytes of a source, mapped once; None for one that cannot be."""
        if id(source) not in self._maps:
            path = source.mappable_path()
            self._maps[id(source)] = None if path is None else self._map(source, path)
        return self._maps[id(source)]

    def _map(self, source: Source, path: str) -> torch.UntypedStorage:
        try:
            # False: not shared, so what is written to a tensor does not reach the file
            mapped = self._torch.UntypedStorage.from_file(path, False, source.size)
        except RuntimeError as error:  # the file is shorter by now
            source.check_unchanged()
            what, hint = f"cannot be mapped: {error}", "mmap=False reads it"
            raise UnsupportedCheckpoint(what, path=source.path, hint=hint) from error
        source.check_mapped()
        assert isinstance(mapped, self._torch.UntypedStorage)
        return mapped

    def cast(self, storage: Storage, dtype: DType, target: DType) -> torch.UntypedStorage:
        """The values of a computed storage in the type `target`, of which they are made once."""
        key = (id(storage), target.name)
        if key not in self._made_as:
            whole = whole_storage(storage, 0, storage.nbytes, dtype)
            nbytes = storage.nbytes // dtype.itemsize * target.itemsize
            values = self._torch.empty(nbytes, dtype=self._torch.uint8)
            self._fill(values.numpy().data, iter_cast_chunks(whole, target, [0]))
            self._made_as[key] = self._restore(values.untyped_storage(), storage.location)
        return self._made_as[key]

    def filled(self, ref: TensorRef, location: str) -> torch.UntypedStorage:
        """A fresh storage with the values of `ref` in C order, where `map_location` wants what was
        saved at `location`.
        """
        return self._restore(self._gathered(ref), location)

    def _gathered(self, ref: TensorRef) -> torch.UntypedStorage:
        values = self._torch.empty(ref.nbytes, dtype=self._torch.uint8)
        self._fill(values.numpy().data, iter_chunks(ref))
        return values.untyped_storage()

    def _fill(self, view: memoryview, chunks: Iterable[memoryview]) -> None:
        at = 0
        for chunk in chunks:
            view[at : at + len(chunk)] = chunk
            at += len(chunk)
            self._meter.add(len(chunk))
