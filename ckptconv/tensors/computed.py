"""Storages whose bytes are computed from tensors by an operation, when they are read.

`Computed` is the value: the name of an operation of `operations`, its inputs, its parameters.
`computed` makes a tensor of it, whose storage is read like any other. Nothing is kept: each read
computes what it returns. Whoever walks to what lies in files (checksums, read-ahead, threads,
shares, fingerprints, accounting) asks `origins`, so that no operation can be forgotten there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckptconv.io.crc import crc32
from ckptconv.io.source import CHUNK, Fingerprint, Source, WrappedSource
from ckptconv.support.arrays import Array, np
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.assembly import flat_boxes
from ckptconv.tensors.casting import Cast, cast
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import FLOAT32, DType
from ckptconv.tensors.refs import (
    Box,
    DerivedSource,
    Shape,
    Storage,
    TensorRef,
    box_of,
    number_at,
    origins,
    permuted,
    whole_storage,
    whole_view,
)
from ckptconv.tensors.stream import (
    A_READ,
    copy_values,
    is_run,
    iter_chunks,
    read_box_into,
    verbatim_range,
    verbatim_runs,
    words,
)

if TYPE_CHECKING:
    from ckptconv.tensors.operations import Operation, Parameters


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


def computed_value(ref: TensorRef) -> Computed | None:
    """What a tensor is computed from; None for one that is stored, or put together of several."""
    if len(ref.pieces) != 1:
        return None
    source = ref.pieces[0].storage.source
    if not source.is_derived:  # as nearly always, and quicker to ask
        return None
    return source.value if isinstance(source, ComputedSource) else None


def elementwise(
    operation: str,
    inputs: Sequence[TensorRef],
    parameters: Parameters,
    dtype: DType,
    name: str,
    checked: Checksums | None = None,
) -> TensorRef:
    """A tensor each of whose elements is made of those at its place in the inputs, which are of one
    shape. Inputs that lie in order are read as runs, whatever their shape.
    """
    shape = inputs[0].shape
    runs = [as_run(ref) for ref in inputs]
    flat = [run for run in runs if run is not None]
    taken = flat if len(flat) == len(inputs) else inputs
    value = Computed(operation, tuple(taken), parameters, dtype, taken[0].shape)
    storage = computed(value, name, checked).storage
    return whole_view(storage, dtype, shape)._replace(requires_grad=inputs[0].requires_grad)


def as_run(ref: TensorRef) -> TensorRef | None:
    """A tensor whose bytes lie in order, as one with a single dimension."""
    found = verbatim_range(ref)
    if found is None:
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
        self.checked = checked
        self._is_checked = False

    def read_into(self, offset: int, view: memoryview) -> None:
        # before any value is given: a flipped byte spreads, and no record has a checksum of what is
        # computed
        if not self._is_checked:
            for storage in origins(self.inputs):
                self.checked.read(storage)
            self._is_checked = True
        self.compute_into(offset, view, _nobody)

    def compute_into(self, offset: int, view: memoryview, note: Note) -> None:
        """Fill `view` with the bytes from `offset` on; `note` is told what was read for them."""
        self._require(offset, len(view))
        size = self.value.dtype.itemsize
        while view:
            first, skipped = divmod(offset, size)
            if self.is_a_copy and not skipped and len(view) >= size:
                whole = len(view) // size * size
                self._copy(first, view[:whole], note)
                view, offset = view[whole:], offset + whole
                continue
            count = min(-(-(skipped + len(view)) // size), CHUNK // size)
            made = self.computed_as(self.value.dtype, first, count, note)
            part = made.data[skipped : skipped + len(view)]
            view[: len(part)] = part
            view, offset = view[len(part) :], offset + len(part)

    def needs(self, offset: int, nbytes: int) -> Iterator[tuple[TensorRef, Box]]:
        """The boxes of the inputs that are read for a run of bytes."""
        size = self.value.dtype.itemsize
        first, stop = offset // size, -(-(offset + nbytes) // size)
        for box in flat_boxes(self.value.shape, first, stop):
            yield from zip(self.inputs, self._needed(box), strict=True)

    @cached_property
    def is_once_rounded(self) -> bool:
        """Whether it can be made in another type without being rounded twice: any operation can,
        but a copy of what lies in a file is only cast.
        """
        return not self.is_a_copy or any(
            is_once_rounded(piece.storage) for piece in self.inputs[0].pieces
        )

    @cached_property
    def unrounded(self) -> ComputedSource:
        """The same of inputs that are not rounded to their types where they are computed."""
        inputs = tuple(map(unrounded, self.inputs))
        parameters = self._operation.for_another_type(self.value.parameters)
        if (inputs, parameters) == (self.inputs, self.value.parameters):
            return self
        value = replace(self.value, inputs=inputs, parameters=parameters)
        return ComputedSource(value, self.checked)

    @property
    def is_a_copy(self) -> bool:
        """Whether its values are those of its input, in order."""
        return self.value.operation == "cast" and self.inputs[0].dtype is self.value.dtype

    @property
    def _operation(self) -> Operation:
        # what decodes quantised weights is large, and most checkpoints have none
        from ckptconv.tensors.operations import OPERATIONS

        return OPERATIONS[self.value.operation]

    def fingerprint(self) -> Fingerprint:
        types = tuple((ref.dtype.name, ref.conj, ref.neg) for ref in self.inputs)
        told = self.value
        made = (told.operation, told.parameters, told.dtype.name, told.shape)
        return (*made, types, self._of_inputs())

    def is_for_threads(self) -> bool:
        return all(storage.source.is_for_threads() for storage in origins(self.inputs))

    def computed_as(self, target: DType, first: int, count: int, note: Note) -> Cast:
        """So many elements from the one with this number on, in the type `target`: another one than
        its own only where it is once rounded.
        """
        if target is not self.value.dtype and self.unrounded is not self:
            return self.unrounded.computed_as(target, first, count, note)
        value, parts, overflowed = self.value, [], 0
        make = self._operation.values
        for box in _steps(value.shape, first, first + count):
            needed = enumerate(self._needed(box))
            inputs = [(self._box(at, *part, note), self.inputs[at].dtype) for at, part in needed]
            made = make(value.parameters, box, inputs, target)
            parts.append(made.data)
            overflowed += made.overflowed
        return Cast(parts[0] if len(parts) == 1 else memoryview(b"".join(parts)), overflowed)

    def _copy(self, first: int, view: memoryview, note: Note) -> None:
        """Fill `view` with elements of what is a copy, from the one with this number on."""
        count = len(view) // self.value.dtype.itemsize
        for box in flat_boxes(self.value.shape, first, first + count):
            nbytes = prod(box[1]) * self.value.dtype.itemsize
            self._box_into(0, *box, view[:nbytes], note)
            view = view[nbytes:]

    def _box(self, index: int, start: Shape, shape: Shape, note: Note) -> memoryview:
        """The bytes of a box of an input in C order; `note` is told what was read."""
        raw = fresh(prod(shape) * self.inputs[index].dtype.itemsize)
        self._box_into(index, start, shape, raw, note)
        return raw

    def _box_into(
        self, index: int, start: Shape, shape: Shape, raw: memoryview, note: Note
    ) -> None:
        ref = self.inputs[index]
        found = verbatim_range(ref)
        if found is None or not is_run(shape, ref.shape):
            self._gather_into(index, start, shape, raw, note)
            return
        storage, at = found
        read_run(storage, at + number_at(start, ref.shape) * ref.dtype.itemsize, raw, note)

    def _gather_into(
        self, index: int, start: Shape, shape: Shape, raw: memoryview, note: Note
    ) -> None:
        if not raw:
            return
        ref = self.inputs[index]
        out = np.frombuffer(raw, words(ref.dtype.itemsize)).reshape(shape)
        strips = [*_strips_of(ref, start, shape)]
        # by the cost of reads: by a ratio of bytes, interleaved rows were read 3.5 times
        if _cost(ref, (start, shape)) <= 2 * _cost(ref, strips[0][0]):
            _note_all(ref, note)
            read_box_into(ref, start, shape, out)
            return
        for strip, (at, size) in strips:
            places = zip(at, start, size, strict=True)
            inside = tuple(slice(a - b, a - b + n) for a, b, n in places)
            _strips.copy(self, index, strip, (at, size), out[inside], note)

    def _needed(self, box: Box) -> Sequence[Box]:
        return self._operation.needs(self.value.parameters, box, len(self.inputs))


# About the elements that are computed at a time. Fewer have more of their time go into Python; of
# more, a thread takes more memory: some arrays of 2 MB.
_STEP = 1 << 19


def _steps(shape: Shape, first: int, stop: int) -> Iterator[Box]:
    """The boxes that some elements are, in order, of about so many each; ends with short rows."""
    row = prod(shape[-1:])
    while first < stop:
        end = min(stop, first + _STEP)
        if end < stop and end // row * row > first:
            end = end // row * row
        yield from flat_boxes(shape, first, end)
        first = end


# ------------------------------------------------------------- what does not lie in order is kept

# The most bytes of gathered inputs that are kept: what is read next lies between them.
_KEPT = 36 << 20

# About the bytes of an input that are gathered at a time: a row that lies in the file gives only
# some of its bytes for each of them.
_STRIP = 16 << 20


def _cost(ref: TensorRef, box: Box) -> float:
    """About how many bytes are read for each of a box, each read counted as some more."""
    whole, size = 0, ref.dtype.itemsize
    for piece in box_of(ref, *box).pieces:
        reach, cost = size, size + A_READ
        for step, count in sorted(zip(piece.stride, piece.shape, strict=True)):
            reach += (count - 1) * step * size
            cost = min(reach + A_READ, count * cost)
        whole += cost
    return whole / prod(box[1]) / size


def _strips_of(ref: TensorRef, start: Shape, shape: Shape) -> Iterator[tuple[Box, Box]]:
    """The boxes of about 16 MB that are gathered at a time, of those that cover a tensor in C
    order, in which a box lies; and what of it lies in each.
    """
    axis, inner = len(shape), 1
    most = max(1, _STRIP // ref.dtype.itemsize)
    while axis and inner * ref.shape[axis - 1] <= most:
        axis -= 1
        inner *= ref.shape[axis]
    if not axis:
        yield ((0,) * len(shape), ref.shape), (start, shape)
        return
    axis -= 1
    count = max(1, most // inner)
    whole, ones = (0,) * (len(shape) - axis - 1), (1,) * axis
    stop = start[axis] + shape[axis]
    before = zip(start[:axis], shape[:axis], strict=True)
    for outer in product(*(range(at, at + size) for at, size in before)):
        for begin in range(start[axis] // count * count, stop, count):
            end = min(begin + count, ref.shape[axis])
            first, last = max(begin, start[axis]), min(end, stop)
            strip = (*outer, begin, *whole), (*ones, end - begin, *ref.shape[axis + 1 :])
            part = (*outer, first, *start[axis + 1 :]), (*ones, last - first, *shape[axis + 1 :])
            yield strip, part


def fresh(nbytes: int) -> memoryview:
    """So many bytes to be filled; many in huge pages, where there are such."""
    return np.empty(nbytes, np.uint8).data


def _note_all(ref: TensorRef, note: Note) -> None:
    for storage in origins([ref]):
        note(ReadRun(storage, 0, 0, 0))


class _Strip:
    """A box of an input, gathered by the thread that asks for it first."""

    def __init__(self, room: memoryview) -> None:
        self.room = room
        self.users = 0  # threads that copy out of it: its memory is theirs so long
        self.values: Array | None = None
        # what is gathered may be computed itself, of what has to be gathered
        self._lock = threading.RLock()

    def gathered(self, ref: TensorRef, box: Box, note: Note) -> Array:
        """Its values, in the order in which they lie in the file, seen in that of the tensor."""
        with self._lock:  # one thread gathers, the others have it then
            if self.values is None:
                _note_all(ref, note)
                steps = box_of(ref, *box).pieces[0].stride
                order = sorted(range(len(steps)), key=lambda axis: (-steps[axis], axis))
                start, shape = (tuple(numbers[axis] for axis in order) for numbers in box)
                raw = np.frombuffer(self.room, words(ref.dtype.itemsize), prod(shape))
                values = raw.reshape(shape)
                read_box_into(permuted(ref, order), start, shape, values)
                self.values = values.transpose(np.argsort(order))
            return self.values


class _Strips:
    """The strips of inputs that were gathered last; they go with what they are for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: WeakKeyDictionary[ComputedSource, dict[tuple[int, Box], _Strip]]
        self._kept = WeakKeyDictionary()

    def copy(
        self, source: ComputedSource, index: int, box: Box, part: Box, out: Array, note: Note
    ) -> None:
        """Fill `out` with a part of a box of the input with this number, gathered now or before."""
        ref = source.inputs[index]
        with self._lock:
            own = self._kept.setdefault(source, {})
            strip = own.pop((index, box), None)
            strip = strip or _Strip(self._room_for(prod(box[1]) * ref.dtype.itemsize))
            own[index, box] = strip  # behind those that were used before
            strip.users += 1
        try:
            values = strip.gathered(ref, box, note)
            places = zip(part[0], box[0], part[1], strict=True)
            copy_values(out, values[tuple(slice(a - b, a - b + n) for a, b, n in places)])
        finally:
            with self._lock:
                strip.users -= 1

    def _room_for(self, nbytes: int) -> memoryview:
        """Memory for a new strip: that of one that was used longest ago, where others have to go
        for it.
        """
        # before it is read: with one strip more, a transpose of 1 GB took 92 to 106 MB, now 85
        excess = nbytes - _KEPT
        excess += sum(len(one.room) for own in self._kept.values() for one in own.values())
        room = memoryview(b"")
        for own in list(self._kept.values()):
            for key in [key for key, one in own.items() if not one.users]:
                if excess <= 0:
                    break
                gone = own.pop(key).room
                excess -= len(gone)
                room = gone if len(gone) >= nbytes else room
        return room if len(room) >= nbytes else fresh(nbytes)


_strips = _Strips()


def read_run(storage: Storage, first: int, view: memoryview, note: Note) -> None:
    """Fill `view` with the bytes of a storage from its byte `first` on; `note` is told what was
    read: of this storage, or of what its bytes are computed from.
    """
    source = storage.source
    if isinstance(source, ComputedSource):
        source.compute_into(storage.offset + first, view, note)
        return
    source.read_into(storage.offset + first, view)
    # 0.1 s of a core for each GB, and safetensors declares none
    note(ReadRun(storage, first, len(view), crc32(view) if storage.has_crc else 0))


def step_in(storage: Storage, nbytes: int, room: int = 0) -> int:
    """About `nbytes` bytes: how many of a storage to read at a time, from its first on; about
    `room` bytes, if that is more, of a copy whose values lie so far from each other that fewer
    would be read again and again. Of what is computed, they are whole rows, or matrices, and so on:
    one that is cut is a box of its own.
    """
    source = storage.source
    if not (isinstance(source, ComputedSource) and source.value.shape):
        return nbytes
    if room > nbytes and source.is_a_copy and _is_far(source.inputs[0], nbytes):
        nbytes = room
    block = step = source.value.dtype.itemsize
    for size in reversed(source.value.shape):
        block *= size
        step = nbytes // block * block if 0 < block <= nbytes else step
    return step if step > source.value.dtype.itemsize else nbytes


def _is_far(ref: TensorRef, nbytes: int) -> bool:
    """Whether it costs much more to gather so many of its bytes than a strip."""
    if verbatim_range(ref) is not None:
        return False
    boxes = flat_boxes(ref.shape, 0, min(ref.numel, nbytes // ref.dtype.itemsize))
    largest = max(boxes, key=lambda box: prod(box[1]), default=None)
    if largest is None:
        return False
    [strip, _] = next(_strips_of(ref, *largest))
    return _cost(ref, largest) > 2 * _cost(ref, strip)


def is_once_rounded(storage: Storage) -> bool:
    """Whether its values are computed, and can be in another type without being rounded twice."""
    return isinstance(storage.source, ComputedSource) and storage.source.is_once_rounded


def read_cast(
    storage: Storage, first: int, view: memoryview, source: DType, target: DType, note: Note
) -> Cast:
    """The values of type `source` in `len(view)` bytes of a storage, from its byte `first` on, in
    the type `target`; `view` is room for them.

    What an operation rounds once is made in that type at once, and not rounded twice; of its own
    type too, for the values that are beyond it are counted then.
    """
    made_by = storage.source
    if isinstance(made_by, ComputedSource) and made_by.is_a_copy and target is source:
        made_by.compute_into(storage.offset + first, view, note)
        return Cast(view, 0)
    if isinstance(made_by, ComputedSource) and (target is source or is_once_rounded(storage)):
        at = (storage.offset + first) // source.itemsize
        return made_by.computed_as(target, at, len(view) // source.itemsize, note)
    read_run(storage, first, view, note)
    return cast(view, source, target)


def iter_cast_chunks(ref: TensorRef, target: DType, overflowed: list[int]) -> Iterator[memoryview]:
    """As `iter_chunks`, in type `target`; finite values lost are added to `overflowed[0]`."""
    runs = verbatim_runs(ref)
    is_made = runs is not None and any(is_once_rounded(storage) for storage, _, _ in runs)
    if target is ref.dtype and not is_made:
        yield from iter_chunks(ref)
    elif runs is None and any(is_once_rounded(piece.storage) for piece in ref.pieces):
        if target.name not in _WIDEST:
            for chunk in iter_chunks(ref):
                overflowed[0] += cast(chunk, ref.dtype, target).overflowed
        yield from iter_chunks(_made_as(ref, target))
    elif runs is None:
        for chunk in iter_chunks(ref):
            yield _counted(cast(chunk, ref.dtype, target), overflowed)
    else:
        buffer = memoryview(bytearray(min(CHUNK, ref.nbytes)))
        for storage, first, nbytes in runs:
            step = step_in(storage, CHUNK)
            for start in range(first, first + nbytes, step):
                view = buffer[: min(step, first + nbytes - start)]
                made = read_cast(storage, start, view, ref.dtype, target, _nobody)
                yield _counted(made, overflowed)


# Types that hold the values of all others: none becomes infinite.
_WIDEST = ("float32", "float64")


def _made_as(ref: TensorRef, target: DType) -> TensorRef:
    """A tensor of pieces in the type `target`: what an operation rounds once is made in that type,
    whatever order its values are seen in; all else is cast.
    """
    widened = Widener(target)
    pieces = []
    for piece in ref.pieces:
        made_by = piece.storage.source
        if not isinstance(made_by, ComputedSource) or not made_by.is_once_rounded:
            [cast_piece] = widened(ref._replace(pieces=(piece,))).pieces
            pieces.append(cast_piece)
            continue
        value = made_by.value
        made = value if target is value.dtype else made_by.unrounded.value
        whole = computed(replace(made, dtype=target), piece.storage.name, made_by.checked)
        first = piece.storage.offset // value.dtype.itemsize
        storage = whole.storage._replace(
            offset=first * target.itemsize,
            nbytes=piece.storage.nbytes // value.dtype.itemsize * target.itemsize,
        )
        pieces.append(piece._replace(storage=storage))
    return ref._replace(dtype=target, pieces=tuple(pieces))


def unrounded(ref: TensorRef) -> TensorRef:
    """A tensor in float32 where it is computed and would be rounded to a smaller type."""
    is_rounded = any(is_once_rounded(piece.storage) for piece in ref.pieces)
    return _made_as(ref, FLOAT32) if is_rounded and ref.dtype.itemsize < 4 else ref


def _counted(made: Cast, overflowed: list[int]) -> memoryview:
    overflowed[0] += made.overflowed
    return made.data


def noting(source: Source, checksums: Checksums | None) -> Source:
    """`source`; what is read for a computed one is told to `checksums`, and not read again."""
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


def _nobody(run: ReadRun) -> None:
    """Nobody has to be told: the inputs were checked."""
