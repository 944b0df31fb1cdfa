"""What is going to be read of tensors, told beforehand to sources over a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TypeGuard

from ckptconv.io.source import Source
from ckptconv.tensors.computed import ComputedSource
from ckptconv.tensors.refs import DerivedSource, Piece, Storage, TensorRef, box_of, origins
from ckptconv.tensors.stream import verbatim_runs

Run = tuple[Source, int, int]
Part = tuple[Storage, int, int]

_STEP = 4 << 20  # bytes of each piece of a gathered tensor that are wanted at about the same time


@contextlib.contextmanager
def read_soon(*values: Iterable[TensorRef | Storage]) -> Iterator[None]:
    """Within the block, the values are read in about this order: what is over a network is fetched
    ahead. Of several sequences, one value of each is read, then the next ones.

    It changes nothing for files of this host.
    """
    near: dict[int, bool] = {}
    runs: list[Run] = []
    given = list(map(list, values))
    if _all_are_near(given):
        yield
        return
    for value in chain.from_iterable(zip_longest(*given)):
        if value is None:
            continue
        is_near = True
        for storage in origins([value]):
            key = id(storage.source)
            if key not in near:
                near[key] = storage.source.fetched_from(0) is None
            is_near = is_near and near[key]
        if not is_near:
            runs += runs_of(value)
    if not runs:
        yield
        return
    # here, for most commands read nothing over a network
    from ckptconv.io.remote.readahead import FarSource, reading_ahead

    far = []
    for source, offset, nbytes in runs:
        at = source.fetched_from(offset) if nbytes else None
        if at is not None and isinstance(at[0], FarSource):
            far.append((at[0], at[1], nbytes))
    with reading_ahead(far):
        yield


def _all_are_near(values: Sequence[Sequence[TensorRef | Storage]]) -> bool:
    """Whether all are in files of this host and nothing is computed: told of very many at once."""
    refs = [value for each in values for value in each if type(value) is TensorRef]
    if len(refs) < sum(map(len, values)):
        return False
    sources = {piece.storage.source for ref in refs for piece in ref.pieces}
    return not any(
        isinstance(source, DerivedSource) or source.fetched_from(0) is not None
        for source in sources
    )


def runs_of(value: TensorRef | Storage) -> list[Run]:
    """The bytes that are read for a storage or a tensor, in about the order in which they are."""
    if isinstance(value, Storage):
        return _runs_in(value, 0, value.nbytes)
    runs = verbatim_runs(value)
    if runs is not None:
        return [run for part in runs for run in _runs_in(*part)]
    return _interleaved(_parts_of(value))


def _parts_of(ref: TensorRef) -> Sequence[Part]:
    """What is read for a tensor: runs where its values lie in order, else all around them."""
    runs = verbatim_runs(ref)
    if runs is not None:
        return runs
    return [_extent(piece, ref.dtype.itemsize) for piece in ref.pieces]


def _runs_in(storage: Storage, first: int, nbytes: int) -> list[Run]:
    """The bytes that are read for a run of a storage: of one that is computed, those of its inputs,
    as they are wanted side by side.
    """
    source, offset = storage.source, storage.offset + first
    if _is_in_order(source):
        return _interleaved([*_read_in_order(source)])
    if not isinstance(source, ComputedSource):
        return [(source, offset, nbytes)]
    runs: list[Run] = []
    for at in range(offset, offset + nbytes, _STEP):
        for ref, (start, shape) in source.needs(at, min(_STEP, offset + nbytes - at)):
            runs += _interleaved(_parts_of(box_of(ref, start, shape)))
    return runs


def _is_in_order(source: Source) -> TypeGuard[DerivedSource]:
    return isinstance(source, DerivedSource) and source.is_in_order


def _read_in_order(source: DerivedSource) -> Iterator[Part]:
    """What is read side by side, each from its beginning to its end, for what is made in order."""
    for ref in source.inputs:
        for part in _parts_of(ref):
            inner = part[0].source
            if _is_in_order(inner):
                yield from _read_in_order(inner)
            else:
                yield part


def _interleaved(parts: Sequence[Part]) -> list[Run]:
    """The bytes of parts of storages, in steps of each in turn."""
    steps = [
        (at / nbytes, number, (storage, first + at, min(_STEP, nbytes - at)))
        for number, (storage, first, nbytes) in enumerate(parts)
        for at in range(0, nbytes, _STEP)
    ]
    # by how much of its part is done, so that all parts end together; storages have no order
    steps.sort(key=lambda step: step[:2])
    return [run for _, _, step in steps for run in _runs_in(*step)]


def _extent(piece: Piece, itemsize: int) -> Part:
    """The bytes of a storage from the first to the last value of a piece."""
    if 0 in piece.shape:
        return piece.storage, 0, 0
    reach = sum((size - 1) * step for size, step in zip(piece.shape, piece.stride, strict=True))
    return piece.storage, piece.offset * itemsize, (reach + 1) * itemsize
