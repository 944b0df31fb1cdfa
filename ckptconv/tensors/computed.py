"""Storages whose bytes are computed from tensors by an operation, when they are read.

`Computed` is the value: the name of an operation of `operations`, its inputs, its parameters.
`computed` makes a tensor of it, whose storage is read like any other. Nothing is kept: each read
computes what it returns. Whoever walks to what lies in files (checksums, read-ahead, threads,
shares, fingerprints, accounting) asks `origins`, so that no operation can be forgotten there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckptconv.io.crc import crc32
from ckptconv.io.source import CHUNK, Fingerprint, Source, WrappedSource
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.flat_runs import flat_boxes
from ckptconv.tensors.operations import OPERATIONS, Box, Parameters
from ckptconv.tensors.refs import (
    DerivedSource,
    Shape,
    Storage,
    TensorRef,
    contiguous_stride,
    origins,
    whole_storage,
    whole_view,
)
from ckptconv.tensors.stream import is_run, read_box, verbatim_range


class ReadRun(NamedTuple):
    """A run of a storage that was read: its first byte, how many they are, their CRC-32. No bytes
    mean that it was read in no order, and has to be read again for its checksum.
    """

    storage: Storage
    first: int
    nbytes: int
    crc: int


Note = Callable[[ReadRun], None]
"""Is told of what was read."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a tensor of `dtype` and `shape` is computed from: the name of an operation, tensors, and
    the operation's parameters.
    """

    operation: str
    inputs: tuple[TensorRef, ...]
    parameters: Parameters
    dtype: DType
    shape: Shape


def computed(value: Computed, name: str, checked: Checksums | None = None) -> TensorRef:
    """The tensor that an operation makes, in C order, saved where its first input was.

    `name` is what messages call it. `checked` remembers which inputs were held against their
    checksums; computed tensors that share it read no input twice for that.
    """
    source = ComputedSource(value, checked or Checksums())
    storage = Storage(source, 0, source.size, value.inputs[0].location, name, value.dtype)
    return whole_view(storage, value.dtype, value.shape)


def elementwise(
    operation: str,
    inputs: Sequence[TensorRef],
    parameters: Parameters,
    dtype: DType,
    name: str,
    checked: Checksums | None = None,
) -> TensorRef:
    """A tensor each of whose elements is made of those at its place in the inputs, which are of one
    shape.

    Inputs that lie in order are read as runs, whatever their shape.
    """
    shape = inputs[0].shape
    runs = [_as_run(ref) for ref in inputs]
    flat = [run for run in runs if run is not None]
    taken = flat if len(flat) == len(inputs) else inputs
    value = Computed(operation, tuple(taken), parameters, dtype, taken[0].shape)
    storage = computed(value, name, checked).storage
    return whole_view(storage, dtype, shape)._replace(requires_grad=inputs[0].requires_grad)


def _as_run(ref: TensorRef) -> TensorRef | None:
    """A tensor whose bytes lie in order, as one with a single dimension."""
    if (found := verbatim_range(ref)) is None:
        return None
    storage, first = found
    return whole_storage(storage, first, first + ref.nbytes, ref.dtype)


class Widener:
    """Shows floating tensors in another type, as `tensor.to(dtype)` makes them; those that share a
    storage share its stand-in.
    """

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype
        self._made: dict[tuple[int, DType], tuple[Storage, Storage]] = {}

    def __call__(self, ref: TensorRef) -> TensorRef:
        """`ref` in the type; itself where it has it already, or is of no floating type."""
        if ref.dtype is self._dtype or not ref.dtype.is_floating:
            return ref
        pieces = tuple(
            piece._replace(storage=self._storage(piece.storage, ref.dtype)) for piece in ref.pieces
        )
        return ref._replace(dtype=self._dtype, pieces=pieces)

    def _storage(self, storage: Storage, dtype: DType) -> Storage:
        known = self._made.get((id(storage), dtype))
        if known is None:
            stop = storage.nbytes // dtype.itemsize * dtype.itemsize
            whole = whole_storage(storage, 0, stop, dtype)
            made = elementwise("cast", [whole], (), self._dtype, storage.name)
            # the old one is kept, so that its id stays its own
            known = self._made[id(storage), dtype] = made.storage, storage
        return known[0]


class ComputedSource(DerivedSource):
    """The bytes of a computed tensor, little-endian, in C order.

    Whoever reads it plainly has all inputs held against their checksums first. Who reads it through
    `noting` does that by what is read for the values.
    """

    def __init__(self, value: Computed, checked: Checksums) -> None:
        self.value, self.inputs = value, value.inputs
        self.path = value.inputs[0].storage.source.path
        self.size = prod(value.shape) * value.dtype.itemsize
        self._checked = checked
        self._is_checked = False

    def read_into(self, offset: int, view: memoryview) -> None:
        if not self._is_checked:
            for storage in origins(self.inputs):
                self._checked.read(storage)
            self._is_checked = True
        self.compute_into(offset, view, _nobody)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        whole = bytearray(nbytes)
        self.read_into(offset, memoryview(whole))
        return bytes(whole)

    def compute_into(self, offset: int, view: memoryview, note: Note) -> None:
        """Fill `view` with the bytes from `offset` on; `note` is told what was read for them."""
        self._require(offset, len(view))
        size = self.value.dtype.itemsize
        while view:
            first, skipped = divmod(offset, size)
            count = min(-(-(skipped + len(view)) // size), CHUNK // size)
            part = self._computed(first, count, note)[skipped : skipped + len(view)]
            view[: len(part)] = part
            view, offset = view[len(part) :], offset + len(part)

    def needs(self, offset: int, nbytes: int) -> Iterator[tuple[TensorRef, Box]]:
        """The boxes of the inputs that are read for a run of bytes."""
        size = self.value.dtype.itemsize
        first, stop = offset // size, -(-(offset + nbytes) // size)
        for box in flat_boxes(self.value.shape, first, stop):
            yield from zip(self.inputs, self._needed(box), strict=True)

    def fingerprint(self) -> Fingerprint:
        inputs = tuple(
            (piece.storage.source.fingerprint(), piece.storage.offset, *piece[1:])
            for ref in self.inputs
            for piece in ref.pieces
        )
        types = tuple((ref.dtype.name, ref.conj, ref.neg) for ref in self.inputs)
        value = self.value
        return (value.operation, value.parameters, value.dtype.name, value.shape, types, inputs)

    def needs_closing(self) -> bool:
        return False

    def is_for_threads(self) -> bool:
        return all(storage.source.is_for_threads() for storage in origins(self.inputs))

    def close(self) -> None:
        """What it reads is closed by whoever opened it."""

    def check_unchanged(self) -> None:
        for storage in origins(self.inputs):
            storage.source.check_unchanged()

    def _computed(self, first: int, count: int, note: Note) -> memoryview:
        """The bytes of `count` elements from the one with this number on."""
        value, parts = self.value, []
        types = [ref.dtype for ref in self.inputs]
        make = OPERATIONS[value.operation].values
        for box in flat_boxes(value.shape, first, first + count):
            needed = zip(self.inputs, self._needed(box), strict=True)
            raw = [_read_box(ref, *part, note) for ref, part in needed]
            parts.append(make(value.parameters, types, raw, value.dtype))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _needed(self, box: Box) -> Sequence[Box]:
        """The box of each input that is read for a box of the output."""
        operation = OPERATIONS[self.value.operation]
        return operation.needs(self.value.parameters, box, len(self.inputs))


def _read_box(ref: TensorRef, start: Shape, shape: Shape, note: Note) -> memoryview:
    """The bytes of a box of a tensor in C order, little-endian; `note` is told what was read."""
    found = verbatim_range(ref)
    if found is None or not is_run(shape, ref.shape):
        for storage in origins([ref]):
            note(ReadRun(storage, 0, 0, 0))
        return read_box(ref, start, shape).data.cast("B")
    storage, at = found
    steps = contiguous_stride(ref.shape)
    first = sum(place * step for place, step in zip(start, steps, strict=True))
    raw = memoryview(bytearray(prod(shape) * ref.dtype.itemsize))
    read_run(storage, at + first * ref.dtype.itemsize, raw, note)
    return raw


def read_run(storage: Storage, first: int, view: memoryview, note: Note) -> None:
    """Fill `view` with the bytes of a storage from its byte `first` on; `note` is told what was
    read: of this storage, or of what its bytes are computed from.
    """
    source = storage.source
    if isinstance(source, ComputedSource):
        source.compute_into(storage.offset + first, view, note)
        return
    source.read_into(storage.offset + first, view)
    note(ReadRun(storage, first, len(view), crc32(view) if storage.has_crc else 0))


def noting(source: Source, checksums: Checksums | None) -> Source:
    """`source`; if it is computed, what is read for its bytes is told to `checksums`, and not read
    for them apart.
    """
    if checksums is None or not isinstance(source, ComputedSource):
        return source
    return _Noting(source, checksums)


class _Noting(WrappedSource):
    """A computed source that tells `checksums` what it reads."""

    def __init__(self, inner: ComputedSource, checksums: Checksums) -> None:
        super().__init__(inner)
        self._computed, self._checksums = inner, checksums

    def read_into(self, offset: int, view: memoryview) -> None:
        self._computed.compute_into(offset, view, lambda run: self._checksums.copied(*run))

    def read(self, offset: int, nbytes: int) -> bytes:
        whole = bytearray(nbytes)
        self.read_into(offset, memoryview(whole))
        return bytes(whole)


def _nobody(run: ReadRun) -> None:
    """Nobody has to be told: the inputs were checked."""
