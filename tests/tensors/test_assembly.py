"""Runs of elements as boxes, put together, and storages seen as float32: numpy and torch are the
oracles.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.io.source import MemorySource
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.tensors.assembly import Flat, assembled, check_cover, flat_boxes, shaped
from ckptconv.tensors.computed import Widener
from ckptconv.tensors.dtypes import BY_NAME, FLOAT4
from ckptconv.tensors.refs import Storage, TensorRef, origins, view_of, whole_storage, whole_view
from ckptconv.tensors.stream import iter_chunks, verbatim_runs
from helpers import oracle

FLOAT32 = BY_NAME["float32"]
SHAPES = st.lists(st.integers(1, 5), max_size=5).map(tuple)


def storage_of(
    raw: bytes, dtype: str = "float32", *, before: int = 3, big_endian: bool = False
) -> Storage:
    """A storage of these bytes, somewhere in a source."""
    source = MemorySource(b"x" * before + raw, Path("memory"))
    return Storage(
        source, before, len(raw), "cpu", "a storage", BY_NAME[dtype], big_endian=big_endian
    )


def flat_of(parts: list[list[float]]) -> Flat:
    refs = []
    for part in parts:
        raw = np.asarray(part, "<f4").tobytes()
        refs.append(whole_storage(storage_of(raw), 0, len(raw), FLOAT32))
    return Flat(refs, "a group")


def values(ref: TensorRef) -> bytes:
    return b"".join(map(bytes, iter_chunks(ref)))


@given(SHAPES, st.data())
def test_boxes_cover_just_the_elements_of_the_run_in_order(shape, data):
    numel = prod(shape)
    stop = data.draw(st.integers(0, numel))
    first = data.draw(st.integers(0, stop))
    numbered = np.arange(numel).reshape(shape)
    boxes = list(flat_boxes(shape, first, stop))
    found = [
        numbered[tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))].reshape(-1)
        for start, box in boxes
    ]
    assert [number for box in found for number in box] == list(range(first, stop))
    assert all(len(box) for box in found)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=5), st.data())
def test_a_tensor_of_runs_has_their_values_one_after_the_other(parts, data):
    everything = [value for part in parts for value in part]
    first = data.draw(st.integers(0, len(everything)))
    count = data.draw(st.integers(0, len(everything) - first))
    rows = data.draw(
        st.sampled_from([rows for rows in range(1, count + 1) if count % rows == 0] or [1])
    )
    flat = flat_of(parts)
    ref = shaped(flat.runs(first, count), flat.dtype, (rows, count // rows))
    assert flat.numel == len(everything)
    assert values(ref) == np.asarray(everything[first : first + count], "<f4").tobytes()
    assert verbatim_runs(ref) is not None


def test_each_box_of_a_run_is_read_where_it_lies():
    flat = flat_of([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]])
    ref = shaped(flat.runs(1, 12), FLOAT32, (2, 3, 2))
    assert [(piece.start, piece.shape, piece.offset) for piece in ref.pieces] == [
        ((0, 0, 0), (1, 2, 2), 1),
        ((0, 2, 0), (1, 1, 2), 0),
        ((1, 0, 0), (1, 3, 2), 2),
    ]
    assert values(ref) == np.arange(1, 13, dtype="<f4").tobytes()


def test_boxes_of_elements_that_are_not_whole_bytes_are_not_put_together():
    halves = [whole_view(storage_of(b"\x21\x43"), FLOAT4, (1, 4)) for _ in range(2)]
    whole = assembled(FLOAT4, (1, 4), [((0, 0), halves[0])])
    assert values(whole) == b"\x21\x43"
    what = "is float4_e2m1fn in 2 chunks, whose elements do not fill whole bytes"
    with pytest.raises(UnsupportedCheckpoint, match=what):
        assembled(FLOAT4, (2, 4), [((0, 0), halves[0]), ((1, 0), halves[1])])


@pytest.mark.parametrize(
    ("box", "what"),
    [
        (((0, 0), (2, 2)), "has 1 dimensions, but one of its chunks 2"),
        (((3,), (2,)), r"has the shape \[4\], but a chunk of \[2\] at \[3\]"),
        (((0,), (3,)), "its 1 chunk holds 3 of 4 values"),
    ],
)
def test_a_box_that_does_not_fit_is_named(box, what):
    with pytest.raises(MalformedCheckpoint, match=what):
        check_cover((4,), [box])


def test_neighbours_are_storages_of_their_own_that_know_whose_checksum_they_have():
    flat = flat_of([[1, 2, 3, 4]])
    a, b = (shaped(flat.runs(first, 2), FLOAT32, (2,)) for first in (0, 2))
    assert a.storage is not b.storage
    assert a.storage.part_of is b.storage.part_of is not None
    assert (a.storage.nbytes, b.storage.nbytes, a.storage.part_of.nbytes) == (8, 8, 16)


def test_a_part_of_a_part_is_part_of_the_whole():
    whole = storage_of(np.arange(8, dtype="<f4").tobytes())
    half = shaped(Flat([whole_storage(whole, 0, 32, FLOAT32)], "a").runs(4, 4), FLOAT32, (4,))
    quarter = shaped(Flat([half], "a").runs(2, 2), FLOAT32, (2,))
    assert quarter.storage.part_of is whole
    assert values(quarter) == np.asarray([6, 7], "<f4").tobytes()


def test_parts_of_other_byte_orders_or_bits_are_not_put_together():
    little = view_of(storage_of(bytes(8)), FLOAT32, 0, (2,), (1,))
    big = view_of(storage_of(bytes(8), big_endian=True), FLOAT32, 0, (2,), (1,))
    for other in (big, little._replace(neg=True)):
        with pytest.raises(UnsupportedCheckpoint, match="differ in byte order or in their conj"):
            assembled(FLOAT32, (4,), [((0,), little), ((2,), other)])


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (view_of(storage_of(bytes(32)), FLOAT32, 0, (4,), (2,)), "is not one contiguous"),
        (
            view_of(storage_of(bytes(32), big_endian=True), FLOAT32, 0, (4,), (1,)),
            "is not one contiguous",
        ),
        (
            view_of(storage_of(bytes(32), "float64"), BY_NAME["float64"], 0, (4,), (1,)),
            "float32 and float64",
        ),
    ],
)
def test_partitions_that_do_not_fit_each_other(part, what):
    good = whole_storage(storage_of(bytes(8)), 0, 8, FLOAT32)
    with pytest.raises(MalformedCheckpoint, match=what):
        Flat([good, part], "a group")
    with pytest.raises(MalformedCheckpoint, match="has no partitions"):
        Flat([], "a group")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("big_endian", [False, True])
def test_a_widened_tensor_has_the_values_that_float_gives(dtype, big_endian):
    tensor = (torch.rand(7, 300) - 0.5).to(dtype)
    raw = oracle.stored_bytes(tensor)
    if big_endian:
        raw = np.frombuffer(raw, f"u{tensor.element_size()}").byteswap().tobytes()
    storage = storage_of(raw, str(dtype).removeprefix("torch."), big_endian=big_endian)
    ref = view_of(storage, storage.dtype, 0, (300, 7), (1, 300))
    wide = Widener(FLOAT32)(ref)
    assert wide.dtype is FLOAT32
    assert values(wide) == oracle.stored_bytes(tensor.float().T)
    assert list(origins([wide])) == [storage]


@given(st.integers(0, 4000), st.integers(0, 4000))
def test_a_widened_storage_is_read_from_any_byte_on(first, count):
    tensor = torch.arange(1000).to(torch.bfloat16)
    storage = storage_of(oracle.stored_bytes(tensor), "bfloat16")
    source = Widener(FLOAT32)(whole_storage(storage, 0, 2000, storage.dtype)).storage.source
    expected = oracle.stored_bytes(tensor.float())
    count = min(count, 4000 - first)
    assert source.size == 4000
    assert source.read(first, count) == expected[first : first + count]
    with pytest.raises(MalformedCheckpoint, match="beyond its end"):
        source.read(first, 4001 - first)


def test_what_is_wide_or_no_number_with_a_point_stays_and_what_was_shared_is():
    widened = Widener(FLOAT32)
    for dtype in ("float32", "int64", "bool", "complex64"):
        ref = whole_storage(storage_of(bytes(16), dtype), 0, 16, BY_NAME[dtype])
        assert widened(ref) is ref
    shared = storage_of(bytes(16), "bfloat16")
    a, b = (view_of(shared, shared.dtype, offset, (2,), (1,)) for offset in (0, 2))
    assert widened(a).storage is widened(b).storage
