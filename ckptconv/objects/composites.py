"""Tensors made of parts (sparse, quantized, nested), checked here because torch accepts them
without a check.

torch rebuilds them unchecked: an index beyond the size makes `to_dense()` write outside of the
heap. `parts_check` compares types, shapes and sizes at once, and gives what looks at the indices,
which are payload. Not asked for: that the columns in one row of a compressed tensor are sorted and
differ. torch's own check asks for that, but no memory depends on it.

Sources: the rebuild functions in torch/_utils.py; `_validate_sparse_coo_tensor_args` and
`_validate_sparse_compressed_tensor_args` (aten/src/ATen/native/sparse); `NestedTensorImpl`, whose
offsets count from the beginning of the buffer's storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

from ckptconv.io.source import CHUNK
from ckptconv.objects.torch_read import plain_sizes, tensor_of_storage
from ckptconv.pickles.nodes import Call, Global, Node
from ckptconv.support.arrays import np
from ckptconv.support.errors import CheckpointError, MalformedCheckpoint, errors_at
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Shape, Storage, TensorRef, refuse_dimensions, view_of

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.signedinteger[Any]]]"
Check = Callable[[], None]
"""Reads what the parts of a tensor point at; raises `MalformedCheckpoint` where that is nowhere."""

_UTILS = "torch._utils"


def is_composite(node: Call) -> bool:
    """Whether a call makes a tensor of parts."""
    return _rebuilt(node)[0] in _CHECKS


def parts_check(node: Call, where: str) -> Check:
    """What is left to check of a composite whose parts fit; else `MalformedCheckpoint`."""
    name, args = _rebuilt(node)
    try:
        check = _CHECKS[name](args)
    except CheckpointError as error:
        error.where = where  # and not the storage that one of its parts names
        raise

    def run() -> None:
        with errors_at(where=where):
            check()

    return run


def _rebuilt(node: Call) -> tuple[str, tuple[Node, ...]]:
    """The function that rebuilds, and its arguments, also inside a subclass or attributes."""
    match node:
        case Call(name="torch._tensor._rebuild_from_type_v2", args=(Global() as made, _, args, _)):
            if type(args) is tuple:
                return made.path, args
    return node.name, node.args


def _wrong(what: str) -> MalformedCheckpoint:
    hint = "the file is damaged or forged; --exclude or --only leaves it out"
    return MalformedCheckpoint(what, hint=hint)


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise _wrong(what)


def _nothing() -> None:
    """No payload to look at."""


def _read_integers(ref: TensorRef) -> Iterator[tuple[int, Numbers]]:
    """The values of an integer tensor in C order, each run with the number of its first."""
    from ckptconv.tensors.stream import iter_chunks  # what reads values, for few objects

    first = 0
    for chunk in iter_chunks(ref):
        numbers = np.frombuffer(chunk, f"<i{ref.dtype.itemsize}")
        yield first, numbers
        first += numbers.size


def _read_integer_box(ref: TensorRef, start: Shape, shape: Shape) -> Numbers:
    from ckptconv.tensors.stream import read_box

    return read_box(ref, start, shape).view(f"<i{ref.dtype.itemsize}").reshape(shape)


# ------------------------------------------------------------------------------------------- sparse

_COO = "torch.sparse_coo"
_BY_ROW = ("torch.sparse_csr", "torch.sparse_bsr")
_BLOCKED = ("torch.sparse_bsr", "torch.sparse_bsc")
# of how many tensors each layout is made
_PARTS = {_COO: 2, **dict.fromkeys((*_BY_ROW, "torch.sparse_csc", "torch.sparse_bsc"), 3)}
_INT64 = BY_NAME["int64"]
_INDEX_TYPES = (BY_NAME["int32"], _INT64)  # of compressed ones; those of COO are int64


def _sparse(args: tuple[Node, ...]) -> Check:
    match args:
        case (Call(args=(str() as layout, *_)), given) if layout in _PARTS:
            count = _PARTS[layout]
        case _:
            raise _wrong("a sparse tensor has a layout that torch does not know")
    size = None
    if type(given) is tuple and count < len(given) <= 4:
        size = plain_sizes(given[count])
    if size is None or any(type(part) is not TensorRef for part in given[:count]):
        raise _wrong("a sparse tensor is not made of tensors and a size")
    refuse_dimensions(len(size))
    # torch counts elements in an int64
    fits = min(size, default=0) >= 0 and prod(number for number in size if number) < 1 << 63
    _require(fits, f"its size {size} cannot be that of a tensor")
    if layout == _COO:
        return _coo(given[0], given[1], size, coalesced=given[-1] is True)
    return _compressed(layout, given[0], given[1], given[2], size)


def _coo(indices: TensorRef, values: TensorRef, size: Shape, *, coalesced: bool) -> Check:
    fits = indices.dtype is _INT64 and not indices.neg and len(indices.shape) == 2
    _require(fits, "the indices of a sparse tensor are not an int64 matrix")
    dimensions, count = indices.shape
    fits = dimensions <= len(size) and values.shape == (count, *size[dimensions:])
    parts = f"indices of {indices.shape}, values of {values.shape}, size {size}"
    _require(fits, f"the parts of a sparse tensor do not fit: {parts}")
    return partial(_check_coo, indices, size[:dimensions], coalesced)


def _check_coo(indices: TensorRef, size: Shape, coalesced: bool) -> None:
    dimensions, count = indices.shape
    step = max(1, CHUNK // (8 * max(1, dimensions)))
    limits = np.array(size, np.int64).reshape(-1, 1)
    for first in range(0, count, step):
        # one more, which is the first of the next: neighbours are compared
        stop = min(count, first + step + 1)
        block = _read_integer_box(indices, (0, first), (dimensions, stop - first))
        _refuse_beyond(block, limits)
        if coalesced and not _is_ascending(block):
            what = "says that it is coalesced, but its indices are not sorted, or one occurs twice"
            raise _wrong(what)


def _refuse_beyond(numbers: Numbers, limits: Any) -> None:
    beyond = (numbers < 0) | (numbers >= limits)
    if beyond.any():
        arrays = (numbers, np.broadcast_to(limits, numbers.shape))
        index, limit = (array[beyond][0] for array in arrays)
        raise _wrong(f"an index of a sparse tensor is {index}, where its size is {limit}")


def _is_ascending(columns: Numbers) -> bool:
    """Whether each column comes before the next one, compared from the first row on."""
    before, after = columns[:, :-1], columns[:, 1:]
    rising = np.zeros(before.shape[1], bool)
    for row in range(columns.shape[0] - 1, -1, -1):
        rising = (before[row] < after[row]) | ((before[row] == after[row]) & rising)
    return bool(rising.all())


def _compressed(
    layout: str, compressed: TensorRef, plain: TensorRef, values: TensorRef, size: Shape
) -> Check:
    batch = len(compressed.shape) - 1
    misfit = (
        f"the parts of a sparse tensor do not fit: compressed indices of {compressed.shape}, "
        f"plain indices of {plain.shape}, values of {values.shape}, size {size}"
    )
    _require(batch >= 0 and len(size) >= batch + 2 and len(plain.shape) == batch + 1, misfit)
    count = plain.shape[-1]
    block: Shape = ()
    outer, inner = size[batch : batch + 2]
    if layout in _BLOCKED:
        block = values.shape[batch + 1 : batch + 3]
        _require(len(block) == 2 and min(block) > 0, misfit)
        _require(not (outer % block[0] or inner % block[1]), misfit)
        outer, inner = outer // block[0], inner // block[1]
    if layout not in _BY_ROW:
        outer, inner = inner, outer
    around, behind = size[:batch], size[batch + 2 :]
    _require(compressed.shape == (*around, outer + 1), misfit)
    _require(plain.shape == (*around, count), misfit)
    _require(values.shape == (*around, count, *block, *behind), misfit)
    fits = compressed.dtype in _INDEX_TYPES and plain.dtype is compressed.dtype
    fits = fits and not (compressed.neg or plain.neg)
    _require(fits, "the indices of a sparse tensor are not both int32 or both int64")
    return partial(_check_compressed, compressed, plain, outer, inner)


def _check_compressed(compressed: TensorRef, plain: TensorRef, outer: int, inner: int) -> None:
    """Each run must rise from 0 to the number of plain indices, which must be below `inner`."""
    last = 0
    count = plain.shape[-1]
    for first, numbers in _read_integers(compressed):
        at = np.arange(first, first + numbers.size) % (outer + 1)
        before = np.concatenate(([last], numbers[:-1]))
        wrong = np.where(at == 0, numbers != 0, numbers < before)
        if (wrong | ((at == outer) & (numbers != count))).any():
            raise _wrong(f"the compressed indices of a sparse tensor do not rise from 0 to {count}")
        last = int(numbers[-1])
    for _, numbers in _read_integers(plain):
        _refuse_beyond(numbers, inner)


# ---------------------------------------------------------------------------------------- quantized

_RANGES = {
    "quint8": (0, 255),
    "qint8": (-128, 127),
    "qint32": (-(1 << 31), (1 << 31) - 1),
    "quint4x2": (0, 15),
    "quint2x4": (0, 3),
}
_IN_A_BYTE = {"quint4x2": 2, "quint2x4": 4}
_CHANNELS = "torch.per_channel_affine"
_FLOAT_CHANNELS = "torch.per_channel_affine_float_qparams"


def _quantized(args: tuple[Node, ...]) -> Check:
    match args:
        case (storage, offset, shape, stride, tuple([Global(path=scheme), *params]), *more) if (
            len(more) <= 2
        ):
            dtype = getattr(storage, "dtype", None)
        case _:
            raise _wrong("a quantized tensor is not rebuilt from a storage, a shape and a scheme")
    if type(dtype) is not DType or dtype.name not in _RANGES:
        what = "a quantized tensor is rebuilt from a storage that does not hold quantized numbers"
        raise _wrong(what)
    packed = _IN_A_BYTE.get(dtype.name)
    if packed is None:
        tensor_of_storage(storage, offset, shape, stride, dtype=dtype)
    else:
        _require(type(storage) is Storage, "a quantized tensor is rebuilt from a part of a storage")
        view_of(storage._replace(nbytes=storage.nbytes * packed), dtype, offset, shape, stride)
    low, high = _RANGES[dtype.name]
    if scheme == "torch.per_tensor_affine":
        fits = len(params) == 2 and _is_float(params[0]) and _is_within(params[1], low, high)
        values = f"a value of {dtype.name} ({low} to {high})"
        _require(fits, f"its scale is not a number, or its zero point is not {values}")
        return _nothing
    fits = scheme in (_CHANNELS, _FLOAT_CHANNELS) and len(params) == 3
    _require(fits, "is quantized by a scheme that torch does not rebuild")
    return _by_channel(params, shape, low, high)


def _is_float(value: Node) -> bool:
    return type(value) is float or (type(value) is int and value.bit_length() < 1000)


def _is_within(value: Node, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _by_channel(params: Sequence[Node], shape: Shape, low: int, high: int) -> Check:
    """Zero points may be floats under either scheme: torch saves the plain one for both."""
    scales, zero_points, axis = params
    fits = _is_within(axis, 0, len(shape) - 1)
    _require(fits, f"its axis {axis!r} is not one of the {len(shape)} of its shape")
    fits = all(_length(part) == shape[axis] for part in (scales, zero_points))
    what = f"does not have one scale and one zero point for each of its {shape[axis]} channels"
    _require(fits, what)
    fits = type(scales) is list or scales.dtype.is_floating
    _require(fits, "its scales are not floating numbers")
    if type(zero_points) is list:
        fits = all(type(zero) is float or _is_within(zero, low, high) for zero in zero_points)
        _require(fits, f"a zero point is not a number from {low} to {high}")
        return _nothing
    fits = zero_points.dtype.kind in ("int", "float") and not zero_points.neg
    _require(fits, "its zero points are not numbers")
    if zero_points.dtype.kind == "float":
        return _nothing
    return partial(_check_zero_points, zero_points, low, high)


def _length(part: Node) -> int:
    """Of a list, or of a tensor of one dimension; -1 for anything else."""
    if type(part) is list:
        return len(part)
    return part.shape[0] if type(part) is TensorRef and len(part.shape) == 1 else -1


def _check_zero_points(zero_points: TensorRef, low: int, high: int) -> None:
    for _, numbers in _read_integers(zero_points):
        if int(numbers.min()) < low or int(numbers.max()) > high:
            raise _wrong(f"a zero point is not a number from {low} to {high}")


# ------------------------------------------------------------------------------------------- nested


def _nested(args: tuple[Node, ...]) -> Check:
    fits = len(args) == 4 and all(type(part) is TensorRef for part in args)
    _require(fits, "a nested tensor is not made of tensors")
    buffer, sizes, strides, offsets = args
    is_run = buffer.is_view and buffer.storage_offset == 0 and buffer.stride == (1,)
    what = "the buffer of a nested tensor is not one run from the beginning of its storage"
    _require(is_run and not (buffer.conj or buffer.neg), what)
    # one of no tensors has a scalar of any type here
    if sizes.shape == strides.shape == () and offsets.shape == (0,):
        return _nothing
    # torch prints such a one beyond its end
    _require(sizes.shape[:1] != (0,), "a nested tensor without tensors has sizes")
    fits = all(part.dtype is _INT64 and not part.neg for part in (sizes, strides, offsets))
    _require(fits, "the sizes, strides and offsets of a nested tensor are not int64")
    fits = len(sizes.shape) == 2 and strides.shape == sizes.shape
    parts = f"sizes of {sizes.shape}, strides of {strides.shape}, offsets of {offsets.shape}"
    _require(fits and offsets.shape == sizes.shape[:1], f"a nested tensor has {parts}")
    refuse_dimensions(sizes.shape[1] + 1)
    return partial(_check_nested, buffer.numel, sizes, strides, offsets)


def _check_nested(there: int, sizes: TensorRef, strides: TensorRef, offsets: TensorRef) -> None:
    """Each component must lie in the buffer, and all together must not claim more than it has."""
    count, dimensions = sizes.shape
    step = max(1, CHUNK // (8 * max(1, dimensions)))
    claimed = 0
    for first in range(0, count, step):
        rows = min(step, count - first)
        box = (first, 0), (rows, dimensions)
        size, stride = (_read_integer_box(part, *box) for part in (sizes, strides))
        claimed += _claimed(size, stride, _read_integer_box(offsets, (first,), (rows,)), there)
    fits = claimed <= there
    _require(fits, f"a nested tensor claims {claimed} elements of a buffer that has {there}")


def _claimed(size: Numbers, stride: Numbers, offset: Numbers, there: int) -> int:
    """How many elements these components have, after they were found to lie within the `there`
    elements of the buffer.

    Floats first: what they cannot hold exactly is far beyond any buffer, and what passes them does
    not overflow.
    """
    fits = all(int(part.min(initial=0)) >= 0 for part in (size, stride, offset))
    _require(fits, "a size of a nested tensor is negative")
    spread = (size.clip(1).astype(float) - 1) * stride
    numbers = np.prod(size.clip(1).astype(float), axis=1)
    fits = (numbers < 2.0**62).all() and (spread.sum(axis=1) + offset < 2.0**62).all()
    _require(bool(fits), "a nested tensor has sizes or strides that are too large")
    numel = np.prod(size, axis=1)
    last = offset + ((size.clip(1) - 1) * stride).sum(axis=1)
    fits = not ((numel > 0) & (last >= there)).any()
    _require(fits, f"a nested tensor reaches beyond its buffer of {there} elements")
    return sum(map(int, numel))


_CHECKS: dict[str, Callable[[tuple[Node, ...]], Check]] = {
    f"{_UTILS}._rebuild_sparse_tensor": _sparse,
    f"{_UTILS}._rebuild_sparse_csr_tensor": _sparse,
    f"{_UTILS}._rebuild_qtensor": _quantized,
    f"{_UTILS}._rebuild_nested_tensor": _nested,
}
