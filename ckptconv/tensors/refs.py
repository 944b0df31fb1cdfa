"""Tensors as references: what type and shape they have and where their bytes lie, and how to stream
those bytes.

A `Storage` is a run of bytes in a source; a `TensorRef` is a strided view of one storage, or is put
together from pieces of several. Both are checked against each other when they are made, and trusted
afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

from ckptconv.io.source import Fingerprint, Source
from ckptconv.support.errors import LimitExceeded, MalformedCheckpoint, RefusedObject
from ckptconv.support.limits import in_force, refuse_beyond
from ckptconv.support.records import NamedTuple, dataclass, made
from ckptconv.support.report import short_repr
from ckptconv.tensors.dtypes import UINT8, DType

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Where a part of a tensor starts in it, and its shape."""


class Storage(NamedTuple):
    """A run of `nbytes` bytes at `offset` of `source`: a torch storage, or the data of one
    safetensors tensor.

    `location` is the device tag it was saved with; `dtype` the type that its storage class names
    (None: untyped); `crc32` the checksum that its record declares (None: none). `name` is what
    messages call it. Two tensors share memory when their pieces name one and the same storage
    object (identity, not equality). `part_of` is the storage that this one was cut out of, and that
    has the checksum.
    """

    source: Source
    offset: int
    nbytes: int
    location: str
    name: str
    dtype: DType | None = None
    crc32: int | None = None
    big_endian: bool = False
    part_of: Storage | None = None

    @property
    def whole(self) -> Storage:
        """The storage whose checksum covers this one."""
        return self.part_of or self

    @property
    def has_crc(self) -> bool:
        """Whether a checksum is declared that its bytes go into."""
        return self.whole.crc32 is not None

    def cut(self, start: int, nbytes: int, dtype: DType | None) -> Storage:
        """So many of its bytes as a storage of its own, for values that share no memory with the
        others; its checksum is that of the whole.
        """
        offset = self.offset + start
        return self._replace(
            offset=offset, nbytes=nbytes, dtype=dtype, crc32=None, part_of=self.whole
        )


class Piece(NamedTuple):
    """A box of a tensor: its `shape`, its `start` in the tensor, and the strided view of `storage`
    that holds it. `offset` and `stride` count elements.
    """

    storage: Storage
    offset: int
    shape: Shape
    stride: Shape
    start: Shape


_VALUES = "its values are those of open_checkpoint(PATH)[NAME]"


class _Fields(NamedTuple):
    dtype: DType
    shape: Shape
    stride: Shape
    pieces: tuple[Piece, ...]
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False


class TensorRef(_Fields):
    """A tensor: `dtype`, `shape`, `stride` (in elements) and the `pieces` that hold its values.

    `conj` and `neg` are torch's lazy bits: the values are the conjugate or the negative of what is
    stored. It is a tuple for its speed alone: an index would be taken for one of the tensor.
    """

    __slots__ = ()

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> TensorRef:  # type: ignore[override]  # no subclass
        """As of any named tuple, which asks for the length of what it made."""
        return made(cls, tuple(iterable))

    def __repr__(self) -> str:
        return short_repr("TensorRef", self.dtype.name, list(self.shown_shape), self.location)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(f"a TensorRef says where a tensor lies; {_VALUES}")

    def __len__(self) -> NoReturn:
        raise TypeError(f"a TensorRef has no length; {_VALUES}")

    def __bool__(self) -> bool:
        return True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def shown_shape(self) -> Shape:
        """Its shape in elements, where `shape` counts blocks along the last dimension."""
        if not self.dtype.is_block:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] * self.dtype.elements)

    @property
    def nbytes(self) -> int:
        """Bytes that the values take when written out, each once."""
        return prod(self.shape) * self.dtype.bits >> 3

    @property
    def storage(self) -> Storage:
        """The one storage of a tensor that is a view."""
        return self.pieces[0].storage

    @property
    def location(self) -> str:
        """The device tag of its (first) storage."""
        return self.pieces[0].storage.location

    @property
    def storage_offset(self) -> int:
        """Of a tensor that is a view: its first element's index in the storage."""
        return self.pieces[0].offset

    @property
    def is_view(self) -> bool:
        """Whether it is one strided view of one storage."""
        return len(self.pieces) == 1

    def byte_span(self) -> tuple[int, int]:
        """Of a view: the first byte of the storage that it uses, and the byte behind the last."""
        first = self.storage_offset * self.dtype.itemsize
        # of no values none is the last one, wherever strides may lead
        if 0 in self.shape:
            return first, first
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return first, first + ((last + 1) * self.dtype.bits >> 3)

    def is_dense(self) -> bool:
        """Of a view: whether its values lie without holes or overlaps, in any order."""
        start, stop = self.byte_span()
        if stop - start != self.nbytes:
            return False
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and step != expected:
                return False
            expected *= size
        return True


class DerivedSource(Source):
    """A source whose bytes are made of those of tensors, its `inputs`.

    `is_in_order`: they are made from the first to the last, by one reader at a time, and checked by
    themselves; whoever begins elsewhere waits for all that lie before.
    """

    inputs: tuple[TensorRef, ...]
    is_derived = True
    is_in_order = False

    def read(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        whole = bytearray(nbytes)
        self.read_into(offset, memoryview(whole))
        return bytes(whole)

    def needs_closing(self) -> bool:
        return False

    def close(self) -> None:
        """What it reads is closed by whoever opened it."""

    def check_unchanged(self) -> None:
        for storage in origins(self.inputs):
            storage.source.check_unchanged()

    def _of_inputs(self) -> Fingerprint:
        """What tells the bytes of its inputs from others."""
        return tuple(
            (piece.storage.source.fingerprint(), piece.storage.offset, *piece[1:])
            for ref in self.inputs
            for piece in ref.pieces
        )


def origins(values: Iterable[TensorRef | Storage]) -> Iterator[Storage]:
    """The storages that lie in files (or in memory), of which the bytes of some values are made:
    their own, and those of the inputs of what is computed, through any number of operations.
    """
    # a list, not recursion: any number of operations may stand on each other
    work = [*values][::-1]
    while work:
        value = work.pop()
        storages = (value,) if isinstance(value, Storage) else [one.storage for one in value.pieces]
        for storage in storages:
            if isinstance(storage.source, DerivedSource):
                work.extend(reversed(storage.source.inputs))
            else:
                yield storage


@dataclass(frozen=True, slots=True, eq=False)
class TensorObject:
    """A tensor with something around it: an `nn.Parameter`, or a subclass or a tensor with
    attributes.

    `cls` is the symbolic name of the class (None for Parameter) and `state` the symbolic attributes
    (None: there are none).
    """

    tensor: TensorRef
    cls: Any = None
    state: Any = None


def storages_of(refs: Iterable[TensorRef]) -> list[Storage]:
    """The storages of some tensors, each once."""
    return [*{id(piece[0]): piece[0] for ref in refs for piece in ref.pieces}.values()]


def homes(refs: Iterable[TensorRef]) -> list[int]:
    """For each tensor, the `id` of what it can share with others: of its storage, or of itself
    where it is put together from pieces. Where all differ, no two tensors share bytes.
    """
    return [id(ref.pieces[0][0]) if len(ref.pieces) == 1 else id(ref) for ref in refs]


def view_identity(ref: TensorRef) -> Hashable:
    """What the names of one tensor have in common: tensors with the same have the same values. Of
    one put together from pieces, only itself has it.
    """
    dtype, shape, stride, pieces, _, conj, neg = ref
    if len(pieces) != 1:
        return id(ref)
    return id(pieces[0][0]), pieces[0][1], shape, stride, dtype, conj, neg


@lru_cache(maxsize=1 << 14)  # shapes repeat, and then so does the tuple
def contiguous_stride(shape: Shape) -> Shape:
    """The C-order strides of `shape` in elements, as torch computes them (a size of 0 counts as 1).

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    if len(shape) == 1:
        return (1,)
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@lru_cache(maxsize=1 << 14)  # as above: very many tensors have one number together
def bytes_of(dtype: DType, shape: Shape) -> int:
    """Bytes that the values of a tensor of this shape take when written as `dtype`."""
    # in bits, for elements may be less than a byte (F4, F6)
    return prod(shape) * dtype.bits >> 3


def is_contiguous(shape: Shape, stride: Shape) -> bool:
    """Whether `stride` walks `shape` in C order without gaps; strides of dimensions of size 1 do
    not matter.

    >>> is_contiguous((2, 1, 3), (3, 99, 1)), is_contiguous((2, 3), (1, 2))
    (True, False)
    >>> is_contiguous((0, 3), (7, 7))
    True
    """
    if stride == contiguous_stride(shape):  # nearly all are, and it is known of the shape
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected and 0 not in shape:
                return False
            expected *= size
    return True


def view_of(
    storage: Storage,
    dtype: DType,
    offset: int,
    shape: Shape,
    stride: Shape,
    requires_grad: bool = False,
) -> TensorRef:
    """The strided view of `storage` that a checkpoint describes, after checking that it lies
    inside.

    `offset` and `stride` count elements. Raises `MalformedCheckpoint` when a number is not a plain
    int, is negative, or reaches beyond the storage, and `LimitExceeded` when a small storage claims
    to be a giant tensor.
    """
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise MalformedCheckpoint(
            "its shape and stride are not tuples of one length", where=storage.name
        )
    most = in_force()
    if len(shape) > _USUAL_DIMENSIONS or len(shape) > most.dimensions:
        _refuse_odd_shape(shape, storage.name)
    if type(offset) is not int or offset < 0:
        raise MalformedCheckpoint("its storage_offset is not a size", where=storage.name)
    numel, last = 1, offset
    for size, step in zip(shape, stride):  # noqa: B905 (of one length, and a hot path)
        if type(size) is not int or type(step) is not int or size < 0 or step < 0:
            raise MalformedCheckpoint(
                "its shape or stride holds something other than sizes", where=storage.name
            )
        numel *= size
        last += (size - 1) * step
    # in bits: elements of 4 and 6 end within a byte
    if numel and (last + 1) * dtype.bits > storage.nbytes << 3:
        raise MalformedCheckpoint(
            f"needs {(last + 1) * dtype.bits + 7 >> 3} bytes of a storage that has "
            f"{storage.nbytes}",
            where=storage.name,
        )
    if requires_grad:
        _refuse_grad(storage, dtype)
    if not numel and prod(size for size in shape if size) >= 1 << 63:
        raise MalformedCheckpoint(f"its shape {shape} overflows", where=storage.name)
    nbytes = numel * dtype.bits >> 3
    # a view of few bytes may be large by right (`expand`), and fill a disk when it is written
    if nbytes > most.view_free and nbytes > most.view_ratio * storage.nbytes:
        raise expanded(
            f"claims {nbytes} bytes out of a storage of {storage.nbytes}",
            nbytes,
            storage.nbytes,
            storage.name,
        )
    piece = made(Piece, (storage, offset, shape, stride, _ORIGINS[len(shape)]))
    return made(TensorRef, (dtype, shape, stride, (piece,), requires_grad, False, False))


def whole_view(storage: Storage, dtype: DType, shape: Shape) -> TensorRef:
    """All of a storage in C order; `shape` was checked to take just its bytes."""
    stride = contiguous_stride(shape)
    piece = made(Piece, (storage, 0, shape, stride, _ORIGINS[len(shape)]))
    return made(TensorRef, (dtype, shape, stride, (piece,), False, False, False))


def refuse_packed(named: Iterable[tuple[str, TensorRef]], hint: str) -> None:
    """Raise `RefusedObject` for a tensor of a type that torch does not have, naming its place."""
    for place, ref in named:
        if ref.dtype.is_packed:
            raise lacking("torch", ref.dtype, place, hint)


def lacking(owner: str, dtype: DType, where: str, hint: str) -> RefusedObject:
    """The refusal of a tensor of a type that `owner` does not have. Quantised blocks are not
    written as bytes either: nobody would know them again.
    """
    if dtype.is_block:
        hint = "convert it with --dequantize, or leave it out (--exclude)"
    return RefusedObject(f"{owner} has no dtype {dtype.name}", where=where, hint=hint)


def permuted(ref: TensorRef, order: Sequence[int]) -> TensorRef:
    """The dimensions in another order; those that `order` leaves out have to be of size 1."""

    def of(numbers: Shape) -> Shape:
        return tuple(numbers[axis] for axis in order)

    pieces = tuple(
        piece._replace(shape=of(piece.shape), stride=of(piece.stride), start=of(piece.start))
        for piece in ref.pieces
    )
    return ref._replace(shape=of(ref.shape), stride=of(ref.stride), pieces=pieces)


def blocks_of(start: int, count: int, size: int) -> tuple[int, int]:
    """The first of the blocks of `size` that some elements are in, and how many they are."""
    first = start // size
    return first, -(-(start + count) // size) - first


def index_of(number: int, shape: Shape) -> Shape:
    """The indices of the element with this number in C order."""
    place = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        place.append(at)
    return tuple(reversed(place))


def number_at(place: Sequence[int], shape: Shape) -> int:
    """How many elements of a tensor of this shape stand before the one at `place`, in C order."""
    return sum(at * step for at, step in zip(place, contiguous_stride(shape), strict=True))


def box_of(ref: TensorRef, start: Shape, shape: Shape) -> TensorRef:
    """The box of a tensor at `start`, which lies inside, as a tensor of its own."""
    pieces = []
    is_many = len(ref.pieces) > 1 and bool(shape)
    for piece in ref.pieces:
        if is_many and not (
            piece.start[0] < start[0] + shape[0] and start[0] < piece.start[0] + piece.shape[0]
        ):
            continue  # most of many are told by the first dimension
        low = tuple(max(a, b) for a, b in zip(start, piece.start, strict=True))
        ends = zip(start, shape, piece.start, piece.shape, strict=True)
        size = tuple(min(a + n, b + m) - c for c, (a, n, b, m) in zip(low, ends, strict=True))
        if all(count > 0 for count in size) or len(ref.pieces) == 1:
            within = zip(low, piece.start, piece.stride, strict=True)
            offset = piece.offset + sum((a - b) * step for a, b, step in within)
            place = tuple(a - b for a, b in zip(low, start, strict=True))
            pieces.append(Piece(piece.storage, offset, size, piece.stride, place))
    return ref._replace(shape=shape, pieces=tuple(pieces))


def requiring_grad(ref: TensorRef, requires_grad: bool) -> TensorRef:
    """`ref`, requiring grad or not; `MalformedCheckpoint` where none of its type can."""
    if requires_grad:
        _refuse_grad(ref.storage, ref.dtype)
    return ref._replace(requires_grad=requires_grad)


def _refuse_grad(storage: Storage, dtype: DType) -> None:
    if not dtype.is_differentiable:
        raise MalformedCheckpoint(
            f"a {dtype.name} tensor requires grad, which only floating ones can", where=storage.name
        )


class _Origins(dict[int, Shape]):
    """The origin of a space, by its number of dimensions."""

    def __missing__(self, count: int) -> Shape:
        return (0,) * count


_USUAL_DIMENSIONS = 64  # dim_bitset_size in ATen: most operations take no more
_ORIGINS = _Origins({count: (0,) * count for count in range(_USUAL_DIMENSIONS + 1)})


def _refuse_odd_shape(shape: Shape, where: str) -> None:
    """Refuse too many dimensions, and sizes of an endless product, before they are multiplied."""
    refuse_dimensions(len(shape), where)
    if any(type(size) is int and size >> 63 for size in shape):
        raise MalformedCheckpoint(
            "its shape or stride holds something other than sizes", where=where
        )


def refuse_dimensions(count: int, where: str | None = None) -> None:
    """Raise `LimitExceeded` when a tensor has more dimensions than may be."""
    refuse_beyond("dimensions", count, f"has {count} dimensions", where=where)


def expanded(
    what: str, claimed: int, stored: int, where: str | None = None, advice: str | None = None
) -> LimitExceeded:
    """The refusal of what claims many times the bytes that are stored."""
    allowed, needed = in_force().view_ratio, -(-claimed // stored)
    return LimitExceeded(
        what, limit="view_ratio", allowed=allowed, needed=needed, where=where, advice=advice
    )


def whole_storage(storage: Storage, start: int, stop: int, dtype: DType = UINT8) -> TensorRef:
    """Bytes `start` to `stop` of `storage` as a 1-D tensor of `dtype`, multiples of its size."""
    count = (stop - start) // dtype.itemsize
    return TensorRef(
        dtype, (count,), (1,), (Piece(storage, start // dtype.itemsize, (count,), (1,), (0,)),)
    )


def joined(refs: list[TensorRef]) -> TensorRef:
    """1-D tensors of one dtype, end to end."""
    pieces, at = [], 0
    for ref in refs:
        pieces.append(ref.pieces[0]._replace(start=(at,)))
        at += ref.numel
    return TensorRef(refs[0].dtype, (at,), (1,), tuple(pieces))
