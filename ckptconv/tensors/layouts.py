"""Tensors laid out otherwise: stacked, joined, taken apart, their dimensions in another order.

No value is computed or read: what is made are pieces with strides, and boxes of them where strides
alone cannot say it. A `Move` is one such step on a list of tensors; its numbers are settled, so it
knows its own reverse. `settled` makes moves of the operations that people write. Only ``add``
computes, when its values are read, and has no reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, product
from math import prod

from ckptconv.io.source import CHUNK
from ckptconv.support.errors import KeyMismatch, RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import count_text
from ckptconv.tensors.assembly import flat_boxes
from ckptconv.tensors.refs import (
    Piece,
    Shape,
    TensorRef,
    box_of,
    contiguous_stride,
    permuted,
    view_identity,
)
from ckptconv.tensors.stream import verbatim_runs
from ckptconv.tensors.views import in_order

# Of a tensor that is reshaped, where they follow each other in it: a piece takes about 0.5 kB of
# memory, and is a request of its own of a server.
_MOST_PIECES = 4096
# The same, where they lie between each other, so that each block of values is put together from
# many of them. Beyond these numbers the tensor is gathered in its former shape, a large part at a
# time, when it is read: interleaving 1,536 rows is 7 times as quick like that as from 768 pieces.
_MOST_APART = 16
# Made in one step. A mapping, or the shape of a tensor without values, may say any number.
_MOST_MADE = 1_000_000


class Move(NamedTuple):
    """One step on a list of tensors, by its name in `MOVES`; `numbers` are its arguments."""

    name: str
    numbers: tuple[Shape, ...]

    def reversed(self) -> Move:
        """The move that undoes it."""
        name, numbers = MOVES[self.name].back(*self.numbers)
        return Move(name, numbers)

    def on(self, refs: Sequence[TensorRef]) -> list[TensorRef]:
        """The list after it; `KeyMismatch` where shapes or types do not fit."""
        return MOVES[self.name].make(refs, *self.numbers)


class _Row(NamedTuple):
    """What a move makes of a list, and its reverse; both take its numbers, single ones as tuples of
    one.
    """

    make: Callable[..., list[TensorRef]]
    back: Callable[..., tuple[str, tuple[Shape, ...]]]


def _shapes(refs: Sequence[TensorRef]) -> str:
    found = [str(list(shape)) for shape in dict.fromkeys(ref.shape for ref in refs)]
    return " and ".join(found[:2])


# -------------------------------------------------------------------------------- join, take apart


def _runs(refs: Sequence[TensorRef], count: int, what: str) -> Iterator[Sequence[TensorRef]]:
    if not count or len(refs) % count:
        raise KeyMismatch(f"{count_text(len(refs), 'tensor')} are not in sets of {count} to {what}")
    for first in range(0, len(refs), count):
        run = refs[first : first + count]
        # one tensor has one type, and a cast that nobody asked for would round
        if len({ref.dtype for ref in run}) > 1:
            names = " and ".join(dict.fromkeys(ref.dtype.name for ref in run))
            raise KeyMismatch(
                f"{names} cannot be put into one tensor",
                hint="give them one dtype in a conversion before",
            )
        if len({(ref.conj, ref.neg, ref.storage.big_endian) for ref in run}) > 1:
            raise RefusedObject(
                "tensors that differ in byte order or in their conj and neg bits cannot be put "
                "into one",
                hint="convert the checkpoint without these rules first",
            )
        yield run


def _stack(refs: Sequence[TensorRef], dim: Shape, count: Shape) -> list[TensorRef]:
    made = []
    for run in _runs(refs, count[0], "stack"):
        if len({ref.shape for ref in run}) > 1:
            raise KeyMismatch(f"tensors of shapes {_shapes(run)} cannot be stacked")
        made.append(_joined([_with_dim(ref, dim[0]) for ref in run], dim[0]))
    return made


def _with_dim(ref: TensorRef, dim: int) -> TensorRef:
    _refuse_dim(dim, len(ref.shape) + 1)

    def more(numbers: Shape, number: int) -> Shape:
        return (*numbers[:dim], number, *numbers[dim:])

    pieces = tuple(
        Piece(
            piece.storage,
            piece.offset,
            more(piece.shape, 1),
            more(piece.stride, prod(piece.shape)),
            more(piece.start, 0),
        )
        for piece in ref.pieces
    )
    return _of_pieces(ref, more(ref.shape, 1), pieces)


def _concat(refs: Sequence[TensorRef], dim: Shape, sizes: Shape) -> list[TensorRef]:
    [at] = dim
    made = []
    for run in _runs(refs, len(sizes), "concatenate"):
        for ref in run:
            _refuse_dim(at, len(ref.shape))
        others = {(*ref.shape[:at], *ref.shape[at + 1 :]) for ref in run}
        found = tuple(ref.shape[at] for ref in run)
        if len(others) > 1 or len({len(ref.shape) for ref in run}) > 1:
            what = f"tensors of shapes {_shapes(run)} cannot be concatenated along dimension {at}"
            raise KeyMismatch(what)
        if found != sizes:
            what = f"the sizes along dimension {at} are {list(found)}, not {list(sizes)}"
            raise KeyMismatch(what)
        made.append(_joined(run, at))
    return made


def _joined(refs: Sequence[TensorRef], dim: int) -> TensorRef:
    first = refs[0]
    if len(refs) == 1:
        return first
    starts = [0, *accumulate(ref.shape[dim] for ref in refs)]
    shape = (*first.shape[:dim], starts[-1], *first.shape[dim + 1 :])
    pieces = tuple(
        piece._replace(start=(*piece.start[:dim], piece.start[dim] + at, *piece.start[dim + 1 :]))
        for ref, at in zip(refs, starts, strict=False)
        for piece in ref.pieces
        if ref.numel
    )
    made = _of_pieces(first, shape, pieces or first.pieces[:1])
    return made._replace(requires_grad=all(ref.requires_grad for ref in refs))


def _of_pieces(ref: TensorRef, shape: Shape, pieces: tuple[Piece, ...]) -> TensorRef:
    """`ref` put together otherwise: a view has the stride of its piece."""
    if prod(shape) == 0:
        whole = Piece(pieces[0].storage, 0, shape, contiguous_stride(shape), (0,) * len(shape))
        return ref._replace(shape=shape, stride=whole.stride, pieces=(whole,))
    stride = pieces[0].stride if len(pieces) == 1 else contiguous_stride(shape)
    return ref._replace(shape=shape, stride=stride, pieces=pieces)


def _refuse_many(count: int) -> None:
    if count > _MOST_MADE:
        raise KeyMismatch(f"{count} tensors would be made in one step, of {_MOST_MADE:,} at most")


def _unstack(refs: Sequence[TensorRef], dim: Shape, count: Shape) -> list[TensorRef]:
    [at] = dim
    _refuse_many(len(refs) * count[0])
    ones = _split(refs, dim, (1,) * count[0])
    return [_without_dim(ref, at) for ref in ones]


def _without_dim(ref: TensorRef, dim: int) -> TensorRef:
    def less(numbers: Shape) -> Shape:
        return (*numbers[:dim], *numbers[dim + 1 :])

    pieces = tuple(
        piece._replace(shape=less(piece.shape), stride=less(piece.stride), start=less(piece.start))
        for piece in ref.pieces
    )
    return _of_pieces(ref, less(ref.shape), pieces)


def _split(refs: Sequence[TensorRef], dim: Shape, sizes: Shape) -> list[TensorRef]:
    [at] = dim
    made = []
    starts = [0, *accumulate(sizes)]
    for ref in refs:
        _refuse_dim(at, len(ref.shape))
        if ref.shape[at] != starts[-1]:
            raise KeyMismatch(
                f"the sizes {_listed(sizes)} add up to {starts[-1]}, and dimension {at} of "
                f"{list(ref.shape)} is {ref.shape[at]}"
            )
        for first, size in zip(starts, sizes, strict=False):
            start = (*(0,) * at, first, *(0,) * (len(ref.shape) - at - 1))
            shape = (*ref.shape[:at], size, *ref.shape[at + 1 :])
            if prod(shape):
                made.append(apart(box_of(ref, start, shape)))
            else:
                made.append(_of_pieces(ref, shape, ref.pieces))
    return made


def _listed(sizes: Shape) -> str:
    if len(sizes) > _MOST_LISTED and len(set(sizes)) == 1:
        return f"{len(sizes)} × {sizes[0]}"
    return str(list(sizes))


_MOST_LISTED = 8


def apart(ref: TensorRef) -> TensorRef:
    """A part of a tensor with a storage of its own: the parts do not share memory, for they are
    other parameters.
    """
    if not ref.is_view or ref.dtype.is_packed:
        return _of_pieces(ref, ref.shape, ref.pieces)
    [piece] = ref.pieces
    view = ref._replace(stride=piece.stride)
    start, stop = view.byte_span()
    storage = piece.storage.cut(start, stop - start, piece.storage.dtype)
    return view._replace(pieces=(piece._replace(storage=storage, offset=0),))


def _refuse_dim(dim: int, dimensions: int, least: int = 0) -> None:
    if not least <= dim < dimensions:
        raise KeyMismatch(f"there is no dimension {dim} of {dimensions}")


# --------------------------------------------------------------------------- one tensor at a time


def _chosen(
    refs: Sequence[TensorRef], on: Shape, make: Callable[[TensorRef], TensorRef]
) -> list[TensorRef]:
    """The list with the tensors at these places made others; all where there are no places."""
    if any(at >= len(refs) for at in on):
        raise KeyMismatch(f"there is no tensor {max(on)} in a list of {len(refs)}")
    wanted = {*on}
    return [make(ref) if not on or at in wanted else ref for at, ref in enumerate(refs)]


def _permute(refs: Sequence[TensorRef], dims: Shape, on: Shape = ()) -> list[TensorRef]:
    def turned(ref: TensorRef) -> TensorRef:
        if sorted(dims) != list(range(len(ref.shape))):
            what = f"{list(dims)} is not an order of the dimensions of {list(ref.shape)}"
            raise KeyMismatch(what)
        made = permuted(ref, dims)
        return _of_pieces(made, made.shape, made.pieces)

    return _chosen(refs, on, turned)


def _reshape(
    refs: Sequence[TensorRef], shape: Shape, before: Shape, on: Shape = ()
) -> list[TensorRef]:
    def reshaped(ref: TensorRef) -> TensorRef:
        if ref.shape != before:
            raise KeyMismatch(f"has the shape {list(ref.shape)}, not {list(before)}")
        return in_shape(ref, shape)

    return _chosen(refs, on, reshaped)


def in_shape(ref: TensorRef, shape: Shape) -> TensorRef:
    """The values in C order under another shape, of as many elements (`KeyMismatch` else)."""
    if prod(shape) != ref.numel:
        raise KeyMismatch(f"{list(ref.shape)} cannot have the shape {list(shape)}")
    if ref.shape == shape:
        return ref
    if not ref.numel:
        return _of_pieces(ref, shape, ref.pieces)
    groups = list(size_groups(ref.shape, shape))
    made = (part for piece in ref.pieces for part in _in_groups(piece, groups))
    # one more than may be tells enough, where there may be one for each value
    pieces = tuple(islice(made, _MOST_PIECES + 1))
    made_of = _of_pieces(ref, shape, pieces)
    few = _MOST_PIECES if verbatim_runs(made_of) is not None else _MOST_APART
    if len(pieces) > max(few, len(ref.pieces)):
        return in_shape(in_order(ref), shape)
    return made_of


def if_turned(ref: TensorRef) -> TensorRef:
    """A tensor whose dimensions are in another order than they lie in, gathered in C order when it
    is read: in large parts, by several threads. Others stay as they are.
    """
    return in_order(ref) if ref.nbytes > CHUNK and any(map(_is_turned, ref.pieces)) else ref


def _is_turned(piece: Piece) -> bool:
    """Whether elements that lie next to each other are far apart in the tensor."""
    steps = [step for size, step in zip(piece.shape, piece.stride, strict=True) if size > 1]
    return bool(steps) and steps[-1] > min(steps)


class SizeGroup(NamedTuple):
    """Neighbouring dimensions that become others together: those of `old` sizes from the axis
    `first` on, and their `new` sizes.
    """

    first: int
    old: Shape
    new: Shape


def size_groups(old: Shape, new: Shape) -> Iterator[SizeGroup]:
    """The smallest runs of dimensions whose sizes have the same product on both sides."""
    a = b = 0
    while a < len(old) or b < len(new):
        first, left = a, b
        a, b = min(a + 1, len(old)), min(b + 1, len(new))
        while (ours := prod(old[first:a])) != (theirs := prod(new[left:b])):
            if ours < theirs:
                a += 1
            else:
                b += 1
        yield SizeGroup(first, old[first:a], new[left:b])


def _in_groups(piece: Piece, groups: Sequence[SizeGroup]) -> Iterator[Piece]:
    """A piece as pieces of a tensor whose dimensions are grouped otherwise; of very many, enough
    to see it.
    """
    parts = [list(islice(_boxes(piece, group), _MOST_PIECES + 1)) for group in groups]
    for boxes in product(*parts):
        yield Piece(
            piece.storage,
            piece.offset + sum(box.offset for box in boxes),
            tuple(size for box in boxes for size in box.shape),
            tuple(step for box in boxes for step in box.stride),
            tuple(at for box in boxes for at in box.start),
        )


class _Box(NamedTuple):
    """A part of a piece in the new dimensions of a group."""

    start: Shape
    shape: Shape
    stride: Shape
    offset: int


def _boxes(piece: Piece, group: SizeGroup) -> Iterator[_Box]:
    """What a piece is in the new dimensions of a group: runs of the flattened group, each cut into
    boxes.
    """
    stop = group.first + len(group.old)
    start, shape, stride = (
        each[group.first : stop] for each in (piece.start, piece.shape, piece.stride)
    )
    if group.old == group.new:
        yield _Box(start, shape, stride, 0)
        return
    for first, count, step, offset in _flat_runs(group.old, start, shape, stride):
        done = 0
        for box_start, box_shape in flat_boxes(group.new, first, first + count):
            steps = tuple(step * each for each in contiguous_stride(group.new))
            yield _Box(box_start, box_shape, steps, offset + done * step)
            done += prod(box_shape)


def _flat_runs(
    sizes: Shape, start: Shape, shape: Shape, stride: Shape
) -> Iterator[tuple[int, int, int, int]]:
    """The runs of a box in the C order of `sizes`, flattened: (first, count, step in the storage,
    offset from the first element of the box).
    """
    axis, count, step, inner, first = len(sizes), 1, 1, 1, 0
    is_closed = False  # a dimension that is not whole lets no more around it be of the same run
    while axis:
        at = axis - 1
        if shape[at] != 1:
            if is_closed or (count > 1 and stride[at] != step * inner):
                break
            step = step if count > 1 else stride[at]
            count *= shape[at]
        first += start[at] * inner
        is_closed = is_closed or shape[at] != sizes[at]
        inner *= sizes[at]
        axis = at
    outer_steps = contiguous_stride(sizes)
    for index in product(*(range(size) for size in shape[:axis])):
        base = sum((start[at] + place) * outer_steps[at] for at, place in enumerate(index))
        offset = sum(place * stride[at] for at, place in enumerate(index))
        yield base + first, count, step, offset


# ---------------------------------------------------------------------------- several names, order


def _order(refs: Sequence[TensorRef], places: Shape) -> list[TensorRef]:
    if sorted(places) != list(range(len(refs))):
        raise KeyMismatch(f"{count_text(len(refs), 'tensor')} do not have the order {places!r:.50}")
    return [refs[at] for at in places]


def _inverse(places: Shape) -> Shape:
    return tuple(sorted(range(len(places)), key=places.__getitem__))


def _tie(refs: Sequence[TensorRef], count: Shape) -> list[TensorRef]:
    _refuse_many(len(refs) * count[0])
    return [ref for ref in refs for _ in range(count[0])]


def _untie(refs: Sequence[TensorRef], count: Shape) -> list[TensorRef]:
    """One of each set of names, whose values must be the same: they are read where they lie in
    several places.
    """
    made = []
    for run in _runs(refs, count[0], "be names of one"):
        if not are_alike(run):
            raise KeyMismatch("are names of one tensor to the mapping, and their values differ")
        made.append(run[0])
    return made


def are_alike(refs: Sequence[TensorRef]) -> bool:
    """Whether tensors have the same shape and the same bytes: these are read where they lie in
    several places.
    """
    from ckptconv.support.progress import Meter  # seldom needed, as the next one is
    from ckptconv.tensors.comparison import compare_bytes

    first = refs[0]
    others = [ref for ref in refs[1:] if view_identity(ref) != view_identity(first)]
    if any(ref.shape != first.shape or ref.dtype is not first.dtype for ref in others):
        return False
    pairs = [(first, ref) for ref in others]
    return not pairs or not compare_bytes(pairs, Meter("read", 0, None)).differing


def _add(refs: Sequence[TensorRef], number: Shape, on: Shape = ()) -> list[TensorRef]:
    from ckptconv.tensors.computed import elementwise, unrounded  # only these moves compute
    from ckptconv.tensors.operations import can_add

    def added(ref: TensorRef) -> TensorRef:
        if not can_add(ref.dtype) or ref.neg:
            what = f"nothing is added to values of {ref.dtype.name}"
            raise KeyMismatch(what, hint="of quantised weights --dequantize makes values first")
        inputs, name = [unrounded(ref)], ref.storage.name
        return elementwise("add", inputs, (float(number[0]),), ref.dtype, name)

    return _chosen(refs, on, added)


def _no_way_back(*numbers: Shape) -> tuple[str, tuple[Shape, ...]]:
    raise KeyMismatch("values were computed, and what was rounded is lost")


COMPUTING = frozenset(("add",))
"""The moves that compute values; they have no reverse, so a mapping does not have them."""

MOVES: Mapping[str, _Row] = {
    "stack": _Row(_stack, lambda dim, count: ("unstack", (dim, count))),
    "unstack": _Row(_unstack, lambda dim, count: ("stack", (dim, count))),
    "concat": _Row(_concat, lambda dim, sizes: ("split", (dim, sizes))),
    "split": _Row(_split, lambda dim, sizes: ("concat", (dim, sizes))),
    "permute": _Row(_permute, lambda dims, on: ("permute", (_inverse(dims), on))),
    "reshape": _Row(_reshape, lambda shape, before, on: ("reshape", (before, shape, on))),
    "order": _Row(_order, lambda places: ("order", (_inverse(places),))),
    "tie": _Row(_tie, lambda count: ("untie", (count,))),
    "untie": _Row(_untie, lambda count: ("tie", (count,))),
    "add": _Row(_add, _no_way_back),
}
"""What each move makes, and its reverse."""


# ------------------------------------------------------------------------------ operations as moves


class _AskedOperation(NamedTuple):
    """An operation that was asked for, of some tensors; as `settled` is told of it."""

    arguments: Mapping[str, object]
    refs: Sequence[TensorRef]
    sets: int | None
    on: Shape

    def axis(self, more: int = 0) -> int:
        """The dimension that is named, of so many more than the first tensor has."""
        return _axis(self.arguments["dim"], len(self.refs[0].shape) + more)


_Settle = Callable[[_AskedOperation], list[Move]]
# Moves of one tensor, by their names and numbers
_Steps = Iterator[tuple[str, tuple[Shape, ...]]]


def settled(
    name: str,
    arguments: Mapping[str, object],
    refs: Sequence[TensorRef],
    count: int | None,
    on: Sequence[int],
) -> list[Move]:
    """The moves that an operation is for these tensors.

    `count` is how many tensors are joined each time, or made of each one (None: as many as the
    size of the dimension); `on` the places in the list that it is for (none: all). Raises
    `KeyMismatch` where shapes do not fit.
    """
    return _SETTLED[name](_AskedOperation(arguments, refs, count, tuple(on)))


def _numbers(value: object) -> Shape:
    assert isinstance(value, tuple)
    return value


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _axis(value: object, dimensions: int) -> int:
    axis = _number(value)
    _refuse_dim(axis, dimensions, least=-dimensions)
    return axis % dimensions


def _settle_stack(asked: _AskedOperation) -> list[Move]:
    return [Move("stack", ((asked.axis(1),), (asked.sets or 1,)))]


def _settle_unstack(asked: _AskedOperation) -> list[Move]:
    dim, shape, count = asked.axis(), asked.refs[0].shape, asked.sets
    if count is not None and shape[dim] != count:
        raise KeyMismatch(
            f"dimension {dim} of {list(shape)} is {shape[dim]}, for {count_text(count, 'target')}"
        )
    return [Move("unstack", ((dim,), (shape[dim],)))]


def _settle_concat(asked: _AskedOperation) -> list[Move]:
    dim, some = asked.axis(), asked.refs[: asked.sets or 1]
    sizes = tuple(ref.shape[dim] for ref in some if dim < len(ref.shape))
    parts = asked.arguments.get("parts")
    if parts and (len(sizes) != parts or len({*sizes}) > 1):
        raise KeyMismatch(f"{list(sizes)} along dimension {dim} are not {parts} equal sizes")
    return [Move("concat", ((dim,), sizes))]


def _settle_split(asked: _AskedOperation) -> list[Move]:
    dim, shape = asked.axis(), asked.refs[0].shape
    if (given := asked.arguments.get("sizes")) is not None:
        return [Move("split", ((dim,), _numbers(given)))]
    parts = _number(asked.arguments.get("parts") or asked.sets)
    _refuse_many(parts)
    size, rest = divmod(shape[dim], parts)
    if rest:
        raise KeyMismatch(
            f"dimension {dim} of {list(shape)} cannot be split into {parts} equal parts",
            hint='say their sizes: {"split": {"dim": 0, "sizes": [...]}}',
        )
    return [Move("split", ((dim,), (size,) * parts))]


def _for_each(make: Callable[[Mapping[str, object], Shape], _Steps]) -> _Settle:
    """Moves of single tensors: those of one shape at a time."""

    def settle(asked: _AskedOperation) -> list[Move]:
        places: dict[Shape, list[int]] = {}
        for at in asked.on or range(len(asked.refs)):
            places.setdefault(asked.refs[at].shape, []).append(at)
        moves = []
        for shape, of_shape in places.items():
            where = tuple(of_shape)
            if len(of_shape) == len(asked.refs):
                where = ()
            for name, numbers in make(asked.arguments, shape):
                moves.append(Move(name, (*numbers, where)))
        return moves

    return settle


def _transposes(arguments: Mapping[str, object], shape: Shape) -> _Steps:
    one, other = (_axis(axis, len(shape)) for axis in _numbers(arguments["dims"]))
    dims = list(range(len(shape)))
    dims[one], dims[other] = other, one
    yield "permute", (tuple(dims),)


def _permutes(arguments: Mapping[str, object], shape: Shape) -> _Steps:
    yield "permute", (tuple(_axis(axis, len(shape)) for axis in _numbers(arguments["dims"])),)


def _reshapes(arguments: Mapping[str, object], shape: Shape) -> _Steps:
    wanted = _numbers(arguments["shape"])
    if wanted.count(-1) > 1 or any(size < -1 for size in wanted):
        raise KeyMismatch(f"{list(wanted)} is not a shape", hint="one of its sizes may be -1")
    made = list(wanted)
    if -1 in made:
        known = prod(size for size in made if size != -1)
        if not known or prod(shape) % known:
            raise KeyMismatch(f"{list(shape)} cannot have the shape {list(wanted)}")
        made[made.index(-1)] = prod(shape) // known
    if prod(made) != prod(shape):
        raise KeyMismatch(f"{list(shape)} cannot have the shape {made}")
    yield "reshape", (tuple(made), shape)


def _unflattens(arguments: Mapping[str, object], shape: Shape) -> _Steps:
    dim = _axis(arguments["dim"], len(shape))
    sizes = _numbers(arguments["sizes"])
    [(_, (inner, _))] = _reshapes({"shape": sizes}, shape[dim : dim + 1])
    yield "reshape", ((*shape[:dim], *inner, *shape[dim + 1 :]), shape)


def _flattens(arguments: Mapping[str, object], shape: Shape) -> _Steps:
    first, last = (_axis(axis, len(shape)) for axis in _numbers(arguments["dims"]))
    if first > last:
        raise KeyMismatch(f"flatten goes from a dimension to a later one, not {first} to {last}")
    inner = prod(shape[first : last + 1])
    yield "reshape", ((*shape[:first], inner, *shape[last + 1 :]), shape)


def _turned(shape: Shape, dim: int, inner: Shape, what: str) -> _Steps:
    """A dimension taken apart into two or three, of which the last two change places."""
    if shape[dim] != prod(inner):
        raise KeyMismatch(f"dimension {dim} of {list(shape)} is not of {what}")
    apart = (*shape[:dim], *inner, *shape[dim + 1 :])
    dims = list(range(len(apart)))
    last = dim + len(inner) - 1
    dims[last - 1], dims[last] = last, last - 1
    turned = tuple(apart[axis] for axis in dims)
    yield "reshape", (apart, shape)
    yield "permute", (tuple(dims),)
    yield "reshape", (shape, turned)


def _interleaves(arguments: Mapping[str, object], shape: Shape, way: int = 1) -> _Steps:
    """Parts side by side, one value of each in turn; by the `way` -1 back."""
    dim = _axis(arguments["dim"], len(shape))
    parts = _number(arguments.get("parts") or 2)
    inner = (parts, shape[dim] // parts)[::way]
    yield from _turned(shape, dim, inner, f"{parts} equal parts")


def _ropes(arguments: Mapping[str, object], shape: Shape, way: int = 1) -> _Steps:
    """Rows of each head in pairs, and in halves. Source: the permutation of q and k in
    transformers' ``convert_llama_weights_to_hf.py``, stated as view and transpose.
    """
    heads = _number(arguments["heads"])
    if not shape:
        raise KeyMismatch("a number has no heads")
    inner = (heads, *(shape[0] // heads // 2, 2)[::way])
    yield from _turned(shape, 0, inner, f"{count_text(heads, 'head')} of an even size")


_SETTLED: Mapping[str, _Settle] = {
    "stack": _settle_stack,
    "unstack": _settle_unstack,
    "concat": _settle_concat,
    "split": _settle_split,
    "transpose": _for_each(_transposes),
    "permute": _for_each(_permutes),
    "reshape": _for_each(_reshapes),
    "unflatten": _for_each(_unflattens),
    "flatten": _for_each(_flattens),
    "interleave": _for_each(_interleaves),
    "deinterleave": _for_each(partial(_interleaves, way=-1)),
    "rope": _for_each(_ropes),
    "unrope": _for_each(partial(_ropes, way=-1)),
    "add": lambda asked: [Move("add", ((_number(asked.arguments["value"]),), asked.on))],
    "tie": lambda asked: [Move("tie", ((asked.sets or 1,),))],
}
