"""What is going to be read of tensors, told beforehand to sources over a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

from ckptconv.io.source import Source
from ckptconv.tensors.refs import Piece, Storage, TensorRef
from ckptconv.tensors.stream import verbatim_runs

Run = tuple[Source, int, int]

_STEP = 4 << 20  # bytes of each piece of a gathered tensor that are wanted at about the same time


@contextlib.contextmanager
def read_soon(*values: Iterable[TensorRef | Storage]) -> Iterator[None]:
    """Within the block, the values are read in about this order: what is over a network is fetched
    ahead. Of several sequences, one value of each is read, then the next ones.

    It changes nothing for files of this host.
    """
    near: dict[int, bool] = {}
    runs: list[Run] = []
    for value in chain.from_iterable(zip_longest(*values)):
        if value is None:
            continue
        storages = [value] if isinstance(value, Storage) else [one.storage for one in value.pieces]
        is_near = True
        for storage in storages:
            key = id(storage.source)
            if key not in near:
                near[key] = storage.source.fetched_from(0) is None
            is_near = is_near and near[key]
        if not is_near:
            runs += runs_of(value)
    if not runs:
        yield
        return
    from ckptconv.io.remote.readahead import FarSource, reading_ahead

    far = []
    for source, offset, nbytes in runs:
        at = source.fetched_from(offset) if nbytes else None
        if at is not None and isinstance(at[0], FarSource):
            far.append((at[0], at[1], nbytes))
    with reading_ahead(far):
        yield


def runs_of(value: TensorRef | Storage) -> list[Run]:
    """The bytes that are read for a storage or a tensor, in about the order in which they are."""
    if isinstance(value, Storage):
        return [(value.source, value.offset, value.nbytes)]
    if (runs := verbatim_runs(value)) is not None:
        return [(storage.source, storage.offset + first, nbytes) for storage, first, nbytes in runs]
    steps = [
        (at / max(1, nbytes), number, (source, offset + at, min(_STEP, nbytes - at)))
        for number, piece in enumerate(value.pieces)
        for source, offset, nbytes in [_extent(piece, value.dtype.itemsize)]
        for at in range(0, nbytes, _STEP)
    ]
    return [run for _, _, run in sorted(steps, key=lambda step: step[:2])]


def _extent(piece: Piece, itemsize: int) -> Run:
    """The bytes of a storage from the first to the last value of a piece."""
    if 0 in piece.shape:
        return piece.storage.source, piece.storage.offset, 0
    reach = sum((size - 1) * step for size, step in zip(piece.shape, piece.stride, strict=True))
    first = piece.storage.offset + piece.offset * itemsize
    return piece.storage.source, first, (reach + 1) * itemsize
