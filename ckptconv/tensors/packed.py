"""References to tensors as another process can take them: what they are, and how the files are
opened again that they lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ckptconv.io.source import MemorySource, Reopening, Source
from ckptconv.support.errors import CheckpointError
from ckptconv.support.records import NamedTuple, dataclass, given_fields
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.computed import Computed, ComputedSource
from ckptconv.tensors.refs import Piece, Storage, TensorRef

_IN_MEMORY = PurePath("memory")


class NotPacked(Exception):
    """A source that only this process can read."""


class _PackedStorage(NamedTuple):
    """A storage without its source: `place` is the number of its file, or its bytes, or what they
    are computed from; `part_of` the number of another storage, -1 where there is none.
    """

    place: int | bytes | _PackedComputed
    offset: int
    part_of: int
    facts: tuple[Any, ...]
    """From `nbytes` to `big_endian`, as `Storage` has them."""


class _PackedTensor(NamedTuple):
    """A tensor: the numbers of the storages of its pieces, and all else as `TensorRef` has it."""

    ref: tuple[Any, ...]
    pieces: tuple[tuple[int, tuple[Any, ...]], ...]


class _PackedComputed(NamedTuple):
    """What a storage is computed from: the inputs, and all else as `Computed` has it."""

    inputs: tuple[_PackedTensor, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Tensors that can be pickled: the files that they lie in, their storages, themselves, and the
    number of each in turn: one that has several names has one number.

    Storages that were one stay one.
    """

    places: tuple[Reopening, ...]
    storages: tuple[_PackedStorage, ...]
    tensors: tuple[_PackedTensor, ...]
    numbers: tuple[int, ...]

    def opened(self, open_place: Callable[[Reopening], Source]) -> list[TensorRef]:
        """The tensors again; each file is opened once."""
        sources = [open_place(place) for place in self.places]
        storages: list[Storage] = []
        checked = Checksums()
        for item in self.storages:
            source: Source
            if isinstance(item.place, int):
                source = sources[item.place]
            elif isinstance(item.place, bytes):
                source = MemorySource(item.place, _IN_MEMORY)
            else:
                inputs = tuple(_unpacked(ref, storages) for ref in item.place.inputs)
                source = ComputedSource(Computed(inputs=inputs, **item.place.facts), checked)
            part_of = storages[item.part_of] if item.part_of >= 0 else None
            storages.append(Storage._make((source, item.offset, *item.facts, part_of)))
        refs = [_unpacked(ref, storages) for ref in self.tensors]
        return [refs[number] for number in self.numbers]


def _unpacked(ref: _PackedTensor, storages: Sequence[Storage]) -> TensorRef:
    pieces = tuple(Piece(storages[number], *piece) for number, piece in ref.pieces)
    return TensorRef._make(ref.ref)._replace(pieces=pieces)


def packed(refs: Sequence[TensorRef]) -> PackedTensors:
    """Tensors for another process; `NotPacked` where one lies in what only this one can read."""
    packing = _Packing()
    distinct = {id(ref): ref for ref in refs}
    numbers = {key: number for number, key in enumerate(distinct)}
    tensors = tuple(packing.tensor(ref) for ref in distinct.values())
    order = tuple(numbers[id(ref)] for ref in refs)
    return PackedTensors(tuple(packing.places), tuple(packing.storages), tensors, order)


class _Packing:
    """The files and storages of tensors, each with its number."""

    def __init__(self) -> None:
        self.places: dict[Reopening, int] = {}
        self.storages: list[_PackedStorage] = []
        self._numbers: dict[int, int] = {}  # of storages, by their identity
        self._known: dict[int, int] = {}  # of files, by that of their sources

    def storage(self, storage: Storage) -> int:
        """The number of a storage."""
        known = self._numbers.get(id(storage))
        if known is not None:
            return known
        part_of = -1 if storage.part_of is None else self.storage(storage.part_of)
        place, offset = self._place(storage)
        self.storages.append(_PackedStorage(place, offset, part_of, storage[2:-1]))
        self._numbers[id(storage)] = number = len(self.storages) - 1
        return number

    def tensor(self, ref: TensorRef) -> _PackedTensor:
        """A tensor, with the numbers of its storages."""
        pieces = tuple((self.storage(piece.storage), piece[1:]) for piece in ref.pieces)
        return _PackedTensor(tuple(ref._replace(pieces=())), pieces)

    def _place(self, storage: Storage) -> tuple[int | bytes | _PackedComputed, int]:
        """A storage's file by number, its place in it; its bytes; or what computes it."""
        # without bytes there is no file to be opened
        if not storage.nbytes:
            return b"", 0
        if isinstance(storage.source, ComputedSource):
            facts = given_fields(storage.source.value)
            inputs = tuple(self.tensor(ref) for ref in facts.pop("inputs"))
            return _PackedComputed(inputs, facts), storage.offset
        source, offset = storage.source.comes_from(storage.offset)
        if source.is_in_memory():
            return source.read(offset, storage.nbytes), 0
        number = self._known.get(id(source))
        if number is None:
            reopening = source.reopening()
            if reopening is None:
                raise NotPacked
            # two sources of one file are one there
            number = self.places.setdefault(reopening, len(self.places))
            self._known[id(source)] = number
        return number, offset


def check_same(source: Source, wanted: Reopening) -> Source:
    """A source that was opened again, if it has the bytes that it had. The number of the disk is
    left out: it is another one on each machine that shares it.
    """
    found, known = source.fingerprint(), wanted.fingerprint
    if found[1:] != known[1:]:
        source.close()
        raise CheckpointError(
            "is not the file that the conversion was planned for",
            path=source.path,
            hint="it was changed, or this machine has another one under this name; start again",
        )
    return source
