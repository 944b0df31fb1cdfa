"""Values that do not lie in order, gathered: numpy is the oracle."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from ckptconv.io.source import MemorySource
from ckptconv.tensors import stream
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.refs import Storage, view_of
from ckptconv.tensors.stream import iter_chunks, read_box

SHAPES = [(300, 500), (2, 130, 300), (257, 3, 70), (1, 70, 1, 400)]


class Counting(MemorySource):
    """Notes how long the reads of it are."""

    longest = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        self.longest = max(self.longest, nbytes)
        return super().read(offset, nbytes)


def views_of(shape, kind):
    """An array, its bytes as a storage, and all orders of its dimensions."""
    dtype = BY_NAME[kind]
    raw = np.random.default_rng(0).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, "u1")
    storage = Storage(Counting(raw.tobytes(), Path("memory")), 0, raw.size, "cpu", "a", dtype)
    array = raw.view(f"V{dtype.itemsize}").reshape(shape)
    for order in permutations(range(len(shape))):
        turned = array.transpose(order)
        steps = tuple(step // dtype.itemsize for step in turned.strides)
        yield storage, turned, view_of(storage, dtype, 0, turned.shape, steps)


@pytest.mark.parametrize("kind", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dimensions_in_any_order_are_gathered_as_numpy_does(shape, kind):
    for _, array, ref in views_of(shape, kind):
        assert b"".join(map(bytes, iter_chunks(ref))) == array.tobytes()
        start = tuple(size // 3 for size in array.shape)
        box = tuple(size - at for size, at in zip(array.shape, start, strict=True))
        cut = array[tuple(slice(at, None) for at in start)]
        assert read_box(ref, start, box).tobytes() == cut.tobytes()


def test_no_read_of_what_lies_in_another_order_is_longer_than_a_span(monkeypatch):
    monkeypatch.setattr(stream, "_SPAN", 1 << 15)
    for storage, array, ref in [*views_of((300, 500), "float32")][1:]:
        assert read_box(ref, (0, 0), array.shape).tobytes() == array.tobytes()
        assert 0 < storage.source.longest <= 1 << 15
