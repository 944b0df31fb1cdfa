"""Which bytes of each storage a torch output needs, and where the tensors over it move.

Tensors that share a storage keep sharing one. Bytes that no tensor uses are left out, so that a
slice does not drag its whole storage along; a tensor with holes that is alone is written without
them. A cast applies to whole storages, so that sharing survives it: tensors of one storage that
become different types share it only with those of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import prod

from ckptconv.support.errors import RefusedObject
from ckptconv.support.records import NamedTuple, made
from ckptconv.tensors.dtypes import UINT8, DType
from ckptconv.tensors.refs import (
    Storage,
    TensorRef,
    contiguous_stride,
    is_contiguous,
    joined,
    view_identity,
    whole_storage,
)

_MOST_RUNS = 1000  # beyond, the gaps between the used bytes are kept
_ALIGNMENT = 16  # where gaps are cut out, so that every element type stays aligned


class NewStorage(NamedTuple):
    """A storage of the output: `values` cast to `dtype`, its class by `storage_dtype` or none."""

    values: TensorRef
    dtype: DType
    storage_dtype: DType | None
    location: str
    nbytes: int


class Placed(NamedTuple):
    """Where a tensor lies in its new storage; `dtype` is the one it is written with, offset and
    stride count elements. `resolved`: its conj and neg bits are already in the values there.
    """

    storage: NewStorage
    dtype: DType
    offset: int
    stride: tuple[int, ...]
    resolved: bool = False


CastRule = Callable[[TensorRef], DType]
"""The type in which a tensor is written."""


def compact(
    refs: Iterable[TensorRef], bare: Iterable[Storage], cast: CastRule
) -> dict[int, Placed]:
    """The placement of every tensor of `refs` and every storage of `bare`, by `id`.

    `bare` are storages that the tree holds by themselves: they stay whole and uncast, and so do the
    tensors over them.
    """
    first: dict[int, TensorRef] = {}
    groups: dict[int, list[TensorRef]] = {}
    placed: dict[int, Placed] = {}
    for ref in refs:
        pieces = ref.pieces
        if len(pieces) != 1:
            # its pieces lie in several storages, of files perhaps: none can be shared
            placed[id(ref)] = _gathered(ref, cast)
        elif (other := first.setdefault(id(pieces[0].storage), ref)) is not ref:
            groups.setdefault(id(other.storage), [other]).append(ref)
    for storage in bare:
        alone = first.pop(id(storage), None)
        placed.update(_whole(storage, groups.pop(id(storage), [alone] if alone else [])))
    for key, ref in first.items():
        if key not in groups:
            placed[id(ref)] = _alone(ref, cast)
    for group in groups.values():
        for together in _together(group, cast):
            placed.update(_shared(together, cast))
    return placed


def count_parted(refs: Iterable[TensorRef], cast: CastRule) -> int:
    """How many more storages the tensors need because a cast parts some that share one."""
    groups: dict[int, list[TensorRef]] = {}
    for ref in refs:
        pieces = ref.pieces
        if len(pieces) == 1:
            groups.setdefault(id(pieces[0].storage), []).append(ref)
    return sum(len(_together(group, cast)) - 1 for group in groups.values() if len(group) > 1)


def _together(group: list[TensorRef], cast: CastRule) -> list[list[TensorRef]]:
    """The tensors of one storage in groups that can go on sharing one: all of them where none is
    cast, else those of the same types. What the neg bit turns is written alone when it is cast.
    """
    parts: dict[object, list[TensorRef]] = {}
    for ref in group:
        kind: object = (ref.dtype, cast(ref), view_identity(ref) if ref.neg else None)
        if cast(ref) is ref.dtype:  # bytes of another order are turned by their type
            kind = ref.dtype if ref.storage.big_endian else None
        parts.setdefault(kind, []).append(ref)
    return list(parts.values())


def _new(values: TensorRef, dtype: DType, storage_dtype: DType | None, location: str) -> NewStorage:
    return NewStorage(values, dtype, storage_dtype, location, prod(values.shape) * dtype.itemsize)


def _class_of(dtype: DType) -> DType | None:
    return dtype if dtype.storage_class else None


def _gathered(ref: TensorRef, cast: CastRule) -> Placed:
    """The tensor's values one after another; its conj and neg bits stay bits, unless it is cast."""
    dtype = cast(ref)
    resolved = dtype is not ref.dtype
    values = ref if resolved or not (ref.conj or ref.neg) else ref._replace(conj=False, neg=False)
    new = _new(values, dtype, _class_of(dtype), ref.location)
    return Placed(new, dtype, 0, contiguous_stride(ref.shape), resolved)


def _whole(storage: Storage, group: list[TensorRef]) -> dict[int, Placed]:
    dtype = storage.dtype or UINT8
    other = next((ref for ref in group if ref.dtype is not dtype), None)
    if other:
        raise RefusedObject(
            f"a {dtype.name} storage that the checkpoint holds as a value is also read as "
            f"{other.dtype.name}",
            where=storage.name,
            hint="--only PATH takes one part",
        )
    values = whole_storage(storage, 0, storage.nbytes, dtype)
    new = _new(values, dtype, storage.dtype, storage.location)
    placed = {id(ref): Placed(new, ref.dtype, ref.storage_offset, ref.stride) for ref in group}
    placed[id(storage)] = Placed(new, dtype, 0, ())
    return placed


def _alone(ref: TensorRef, cast: CastRule) -> Placed:
    source, shape, stride, ((storage, *_),), _, conj, neg = ref
    dtype = cast(ref)
    values, count = ref, prod(shape)
    if conj or neg or (stride != (1,) and not is_contiguous(shape, stride)):
        start, stop = ref.byte_span()
        # not every dtype can be negated
        if stop - start > ref.nbytes or (neg and dtype is not source):
            return _gathered(ref, cast)
        values = whole_storage(storage, start, stop, source)
        count = values.shape[0]
    storage_dtype = dtype if dtype.storage_class else None
    new = made(NewStorage, (values, dtype, storage_dtype, storage.location, count * dtype.itemsize))
    return made(Placed, (new, dtype, 0, stride, False))


def _shared(group: list[TensorRef], cast: CastRule) -> dict[int, Placed]:
    first = group[0]
    storage, source, target = first.storage, first.dtype, cast(first)
    if len(group) == 1 or (first.neg and target is not source):
        placed = _alone(first, cast)
        return {id(ref): placed for ref in group}
    mixed = any(ref.dtype is not source for ref in group)
    if mixed:
        source = target = UINT8
    runs = _used_runs(group, storage.nbytes - storage.nbytes % source.itemsize)
    values = joined([whole_storage(storage, start, stop, source) for start, stop in runs])
    new = _new(values, target, None if mixed else _class_of(target), storage.location)
    starts = [start for start, _ in runs]
    kept = accumulate((stop - start for start, stop in runs), initial=0)
    # there is one sum more than runs
    shifts = [start - before for start, before in zip(starts, kept, strict=False)]
    made_of = {}
    for ref in group:
        begin = ref.byte_span()[0] if ref.numel else starts[0]
        moved = begin - shifts[bisect_right(starts, begin) - 1]
        dtype = ref.dtype if mixed else target
        made_of[id(ref)] = Placed(new, dtype, moved // ref.dtype.itemsize, ref.stride)
    return made_of


def _used_runs(group: list[TensorRef], nbytes: int) -> list[tuple[int, int]]:
    """The byte ranges that the tensors use, merged where they touch; an empty one for none."""
    spans = sorted(
        (start - start % _ALIGNMENT, min(nbytes, stop + -stop % _ALIGNMENT))
        for start, stop in (ref.byte_span() for ref in group if ref.numel)
    )
    runs: list[tuple[int, int]] = []
    for start, stop in spans:
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    if len(runs) > _MOST_RUNS:
        return [(runs[0][0], runs[-1][1])]
    return runs or [(0, 0)]
