"""Scales laid out otherwise, as the codes are that they belong to.

Along each dimension of its codes a scale is for one of them, for those of a block, or for all. A
`Beside` says it; `moved` follows a `Move` of the codes. Where that would cut a block, join blocks
that are not whole, or mix the codes of several ones, it is refused: no scale would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckptconv.support.errors import RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.layouts import Move, apart, are_alike, in_shape, size_groups
from ckptconv.tensors.refs import Shape, TensorRef

Steps = tuple["int | None", ...]
"""Of each dimension of codes, how many of them a value beside is for; None: all that there are."""


class Beside(NamedTuple):
    """What codes of the shape `codes` are read with, with as many dimensions as they have. The
    first `own` ones are stored; the others are of size 1.
    """

    ref: TensorRef
    codes: Shape
    steps: Steps
    own: int

    @property
    def stored(self) -> TensorRef:
        """The tensor with its own dimensions alone."""
        return in_shape(self.ref, self.ref.shape[: self.own])


def beside(ref: TensorRef, codes: Shape, blocks: Sequence[int | None]) -> Beside | None:
    """A tensor that codes of this shape are read with; None where sizes do not tell what is for
    what.

    `blocks` are the sizes of a block along the last dimensions of the codes (None: it is for all,
    or each for one). A tensor with fewer dimensions is for the first ones, each value for one.
    """
    added = len(codes) - len(ref.shape)
    if added < 0:
        return None
    if added:
        blocks = ()
    told = (*(None,) * (len(codes) - len(blocks)), *blocks)
    grid = (*ref.shape, *(1,) * added)
    steps = []
    for size, count, block in zip(codes, grid, told, strict=True):
        step = block or (None if count == 1 else 1)
        if count != _count(size, step):
            return None
        steps.append(step)
    return Beside(in_shape(ref, grid), codes, tuple(steps), len(ref.shape))


def _count(size: int, step: int | None) -> int:
    if step is None:
        return 1
    return -(-size // step)


def are_for_the_same(one: Beside, other: Beside) -> bool:
    """Whether both are for the same of their codes, in blocks of the last two dimensions."""
    blocks = (step for item in (one, other) for step in item.steps[:-2])
    is_right = all(step in (None, 1) for step in blocks) and one.ref.shape == other.ref.shape
    return is_right and _reach(one) == _reach(other)


def _reach(item: Beside) -> list[int]:
    both = zip(item.codes, item.steps, strict=True)
    return [size if step is None else min(step, size) for size, step in both]


def moved(move: Move, items: Sequence[Beside]) -> list[Beside]:
    """What stands beside codes after a move of them; `RefusedObject` where no scale would be right.
    The move was made with the codes before, so its numbers fit them.
    """
    # a list, so that a refusal is raised here, not by whoever looks first
    return list(MOVED[move.name](items, *move.numbers))


def _laid(move: str, numbers: Sequence[Shape], items: Sequence[Beside]) -> list[TensorRef]:
    return Move(move, tuple(numbers)).on([item.ref for item in items])


def _runs(items: Sequence[Beside], count: int) -> Iterator[tuple[Sequence[Beside], Steps]]:
    """Those that are joined, and for how many codes each of their values is; one that is for all
    may be for a block that has room for them.
    """
    for first in range(0, len(items), count):
        run = items[first : first + count]
        steps = []
        for dim, each in enumerate(zip(*(item.steps for item in run), strict=True)):
            known = {step for step in each if step is not None}
            step = max(known, default=None)
            rest = [item.codes[dim] for item in run if item.steps[dim] is None]
            if len(known) > 1 or (step is not None and max(rest, default=0) > step):
                raise RefusedObject("their scales are for blocks of different sizes")
            steps.append(step)
        yield run, tuple(steps)


def _stack(items: Sequence[Beside], dim: Shape, count: Shape) -> Iterator[Beside]:
    [at] = dim
    for run, steps in _runs(items, count[0]):
        if at > run[0].own:
            raise RefusedObject(_NO_DIMENSION)
        [ref] = _laid("stack", (dim, count), run)
        codes = (*run[0].codes[:at], count[0], *run[0].codes[at:])
        yield Beside(ref, codes, (*steps[:at], 1, *steps[at:]), run[0].own + 1)


def _unstack(items: Sequence[Beside], dim: Shape, count: Shape) -> Iterator[Beside]:
    [at] = dim
    for item in items:
        if at >= item.own or item.ref.shape[at] != count[0]:
            raise RefusedObject(_NO_DIMENSION)
        codes = (*item.codes[:at], *item.codes[at + 1 :])
        steps = (*item.steps[:at], *item.steps[at + 1 :])
        for ref in _laid("unstack", (dim, count), [item]):
            yield Beside(ref, codes, steps, item.own - 1)


_NO_DIMENSION = "their scales do not have the dimension along which they are stacked"


def _resized(item: Beside, dim: int, size: int, ref: TensorRef) -> Beside:
    return item._replace(ref=ref, codes=(*item.codes[:dim], size, *item.codes[dim + 1 :]))


def _concat(items: Sequence[Beside], dim: Shape, sizes: Shape) -> Iterator[Beside]:
    [at] = dim
    for run, steps in _runs(items, len(sizes)):
        ref, step = run[0].ref, steps[at]
        if step is None and at < run[0].own and {*sizes} == {1}:
            step = 1  # each may be one of several scales, as when they were split
        if step is not None:
            [ref] = _laid("concat", (dim, _blocks(at, sizes, step)), run)
        elif not are_alike([item.ref for item in run]):
            what = f"each has one scale for all codes along dimension {at}, and these differ"
            raise RefusedObject(what)
        steps = (*steps[:at], step, *steps[at + 1 :])
        yield _resized(run[0]._replace(steps=steps), at, sum(sizes), ref)


def _split(items: Sequence[Beside], dim: Shape, sizes: Shape) -> Iterator[Beside]:
    [at] = dim
    for item in items:
        step, refs = item.steps[at], [apart(item.ref) for _ in sizes]
        if step is not None:
            refs = _laid("split", (dim, _blocks(at, sizes, step)), [item])
        yield from (_resized(item, at, size, ref) for size, ref in zip(sizes, refs, strict=True))


def _blocks(dim: int, sizes: Shape, step: int) -> Shape:
    """How many blocks the parts of a dimension have, of which only the last one may be cut."""
    odd = next((size for size in sizes[:-1] if size % step), None)
    if odd is not None:
        what = f"a part of {odd} along dimension {dim} is not whole blocks of {step} codes"
        raise RefusedObject(f"{what}, which have a scale each")
    return tuple(-(-size // step) for size in sizes)


def _of_chosen(
    items: Sequence[Beside], on: Shape, make: Callable[[Beside], Beside]
) -> Iterator[Beside]:
    for at, item in enumerate(items):
        yield make(item) if not on or at in on else item


def _permute(items: Sequence[Beside], dims: Shape, on: Shape = ()) -> Iterator[Beside]:
    def turned(item: Beside) -> Beside:
        large = [axis for axis, size in enumerate(item.codes) if size != 1]
        steps = tuple(item.steps[axis] for axis in dims)
        if item.ref.numel > 1 and {*dims[: item.own]} != {*range(item.own)}:
            raise RefusedObject("their scales do not have the dimensions that change places")
        inner = [axis for axis in dims if axis in large][-2:]
        if [item.steps[axis] for axis in inner] != [item.steps[axis] for axis in large[-2:]]:
            what = f"their scales are for blocks of {_told(item.steps)}, which are not square"
            raise RefusedObject(what)
        [ref] = _laid("permute", (dims,), [item])
        codes = tuple(item.codes[axis] for axis in dims)
        return item._replace(ref=ref, codes=codes, steps=steps)

    return _of_chosen(items, on, turned)


def _told(steps: Steps) -> str:
    return " x ".join("all" if step is None else str(step) for step in steps[-2:])


def _reshape(
    items: Sequence[Beside], shape: Shape, before: Shape, on: Shape = ()
) -> Iterator[Beside]:
    def reshaped(item: Beside) -> Beside:
        steps: list[int | None] = []
        own = 0
        for group in size_groups(before, shape):
            stop = group.first + len(group.old)
            if group.old != group.new and group.first < item.own < stop:
                raise RefusedObject("their scales do not have all the dimensions that change")
            steps += _regrouped(group.old, item.steps[group.first : stop], group.new)
            own += len(group.new) if item.own >= stop else max(0, item.own - group.first)
        grid = tuple(map(_count, shape, steps))
        return item._replace(ref=in_shape(item.ref, grid), codes=shape, steps=tuple(steps), own=own)

    return _of_chosen(items, on, reshaped)


def _regrouped(old: Shape, steps: Steps, new: Shape) -> Steps:
    """The steps of neighbouring dimensions of sizes `old` that become others of sizes `new`: the
    blocks lie in the last one, and stay whole there.
    """
    if old == new:
        return steps
    live = [step for size, step in zip(old, steps, strict=True) if size != 1]
    if all(step is None for step in live):
        return (None,) * len(new)
    *outer, inner = live
    at = max((place for place, size in enumerate(new) if size != 1), default=None)
    is_whole = inner is not None and (
        inner == 1 or (at is not None and not old[-1] % inner and not new[at] % inner)
    )
    if not is_whole or any(step != 1 for step in outer):
        raise RefusedObject("codes that have a scale in common would lie apart")
    return tuple(inner if place == at else 1 for place in range(len(new)))


def _order(items: Sequence[Beside], places: Shape) -> Iterator[Beside]:
    yield from (items[at] for at in places)


def _tie(items: Sequence[Beside], count: Shape) -> Iterator[Beside]:
    yield from (item for item in items for _ in range(count[0]))


def _untie(items: Sequence[Beside], count: Shape) -> Iterator[Beside]:
    for run, _ in _runs(items, count[0]):
        if not are_alike([item.ref for item in run]):
            raise RefusedObject("are names of one tensor to the mapping, and their scales differ")
        yield run[0]


def _add(items: Sequence[Beside], number: Shape, on: Shape = ()) -> Iterator[Beside]:
    raise RefusedObject("codes are not values, to which something could be added")


MOVED: Mapping[str, Callable[..., Iterator[Beside]]] = {
    "stack": _stack,
    "unstack": _unstack,
    "concat": _concat,
    "split": _split,
    "permute": _permute,
    "reshape": _reshape,
    "order": _order,
    "tie": _tie,
    "untie": _untie,
    "add": _add,
}
"""What stands beside codes after each move of `tensors.layouts.MOVES`."""
