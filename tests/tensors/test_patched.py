"""Tensors with changes in them: made in order, given from anywhere, checked before they end."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

import numpy as np
import pytest

from ckptconv.io.inflate import Inflating
from ckptconv.io.source import CHUNK, MemorySource
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.patched import Change, patched
from ckptconv.tensors.refs import Storage, TensorRef, permuted, whole_storage, whole_view
from ckptconv.tensors.stream import iter_chunks
from helpers.deltas import SUMS, difference, packed

F32 = BY_NAME["float32"]
PATH = PurePath("weight_v000001")


def stored(raw: bytes, *, big_endian: bool = False) -> Storage:
    source = MemorySource(raw, PurePath("base"))
    return Storage(source, 0, len(raw), "cpu", "w", big_endian=big_endian)


def changed(
    base: TensorRef, old: bytes, new: bytes, encoding: str, told: str | None = None
) -> TensorRef:
    """What becomes of `base`, whose bytes are `old`."""
    frame = whole_storage(stored(made := packed(difference(old, new, encoding))), 0, len(made))
    after = SUMS["xxh3-128"](new) if told is None else told
    change = Change(PATH, encoding, "xxh3-128", frame, SUMS["xxh3-128"](old), after)
    return patched(base, change, "w")


@pytest.fixture
def versions() -> list[np.ndarray]:
    """A tensor of some chunks and a bit, and what became of it twice."""
    rng = np.random.default_rng(0)
    found = [rng.standard_normal((1025, 701), np.float32)]
    for _ in range(2):
        values = found[-1].copy()
        values.reshape(-1)[rng.choice(values.size, 9000, replace=False)] = 1.5
        found.append(values)
    return found


def plain(values: np.ndarray) -> TensorRef:
    return whole_view(stored(values.tobytes()), F32, values.shape)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_any_range_equals_the_whole(encoding, versions):
    old, new, _ = (values.tobytes() for values in versions)
    source = changed(plain(versions[0]), old, new, encoding).storage.source
    chance = random.Random(1)
    for _ in range(20):
        first = chance.choice([0, 1, CHUNK - 1, CHUNK, chance.randrange(len(new))])
        count = chance.choice([0, 1, CHUNK, chance.randrange(len(new))])
        count = min(count, len(new) - first)
        assert source.read(first, count) == new[first : first + count]
    with pytest.raises(MalformedCheckpoint):
        source.read(len(new) - 1, 2)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_threads_may_read_at_once(encoding, versions):
    old, new, _ = (values.tobytes() for values in versions)
    source = changed(plain(versions[0]), old, new, encoding).storage.source
    ranges = [(first, min(400_000, len(new) - first)) for first in range(0, len(new), 400_000)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda run: source.read(*run), ranges)]
    assert b"".join(found) == new


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_changes_on_top_of_changes(encoding, versions):
    raw = [values.tobytes() for values in versions]
    once = changed(plain(versions[0]), raw[0], raw[1], encoding)
    twice = changed(once, raw[1], raw[2], "xor")
    assert b"".join(map(bytes, iter_chunks(twice))) == raw[2]


def test_what_lies_otherwise_is_changed_in_the_order_of_its_values(versions):
    old, new, _ = (values.tobytes() for values in versions)
    transposed = permuted(plain(np.ascontiguousarray(versions[0].T)), (1, 0))
    swapped = whole_view(
        stored(versions[0].astype(">f4").tobytes(), big_endian=True), F32, versions[0].shape
    )
    for base in (transposed, swapped):
        made = changed(base, old, new, "xor")
        assert b"".join(map(bytes, iter_chunks(made))) == new
        assert made.shape == versions[0].shape


@pytest.mark.parametrize("first", [0, 1, CHUNK, 2 * CHUNK + 7])
def test_nothing_is_given_from_the_middle_or_the_end_that_was_not_checked(first, versions):
    old, new, _ = (values.tobytes() for values in versions)
    source = changed(plain(versions[0]), old, new, "xor", "0" * 32).storage.source
    for _ in range(2):  # who asks again is refused again
        with pytest.raises(MalformedCheckpoint, match="have the xxh3-128"):
            source.read(first, len(new) - first)
    if first:
        with pytest.raises(MalformedCheckpoint, match="have the xxh3-128"):
            source.read(first, 1)


def test_another_base_is_told_from_a_damaged_delta(versions):
    old, new, other = (values.tobytes() for values in versions)
    source = changed(plain(versions[2]), old, new, "xor").storage.source
    with pytest.raises(MalformedCheckpoint, match=r"in BASE have .* name the BASE"):
        source.read(0, len(new))
    assert other != old


def test_what_makes_the_bytes_is_gone_when_they_are_given(versions):
    old, new, _ = (values.tobytes() for values in versions)
    sources = [
        changed(plain(versions[0]), old, new, encoding).storage.source
        for encoding in ("xor", "overwrite") * 2
    ]
    for source in sources:
        assert source.read(0, len(new)) == new
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Inflating]


def test_a_tensor_that_is_only_checked_is_given_as_it_is(versions):
    raw = versions[0].tobytes()
    known = SUMS["blake3"](raw)
    made = patched(plain(versions[0]), Change(PATH, "xor", "blake3", None, known, known), "w")
    assert b"".join(map(bytes, iter_chunks(made))) == raw
    lie = Change(PATH, "xor", "blake3", None, "0" * 64, "0" * 64)
    with pytest.raises(MalformedCheckpoint, match="in BASE have the blake3"):
        patched(plain(versions[0]), lie, "w").storage.source.read(0, len(raw))


def test_bytes_are_told_of_before_they_are_read(versions):
    from ckptconv.tensors.ahead import runs_of

    raw = [values.tobytes() for values in versions]
    base = plain(versions[0])
    twice = changed(changed(base, raw[0], raw[1], "xor"), raw[1], raw[2], "xor")
    told = runs_of(twice)
    whole = {}
    for source, offset, nbytes in told:
        assert offset == whole.get(source, 0)  # each from its beginning, in order
        whole[source] = offset + nbytes
    assert len(whole) == 3 and whole[base.storage.source] == len(raw[0])
