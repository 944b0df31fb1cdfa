"""Matrices taken apart by rows and put together: the products are those of torch, and what was put
together comes apart again, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptconv import KeyMismatch, open_checkpoint
from ckptconv.tree.lora_configs import Factors, put_together, taken_apart

SIZES = (3, 3, 3, 5)
COLUMNS = 4


@pytest.fixture(scope="module")
def refs(tmp_path_factory):
    """Gives the references of tensors, and reads tensors of references."""
    path = tmp_path_factory.mktemp("blocks") / "file.pt"
    opened = []

    def of(*tensors):
        torch.save({str(at): each for at, each in enumerate(tensors)}, path)
        opened.append(open_checkpoint(path).__enter__())
        return [ref for _, ref in opened[-1].tensors()]

    yield of
    for each in opened:
        each.close()


def values(ref):
    from ckptconv.tensors.stream import read_box

    raw = read_box(ref, (0,) * len(ref.shape), ref.shape).tobytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(ref.shape)


def matrices(rank, seed, rows=14):
    torch.manual_seed(seed)
    return torch.randn(rows, rank), torch.randn(rank, COLUMNS)


@settings(max_examples=60)
@given(ranks=st.lists(st.integers(0, 3), min_size=4, max_size=4), seed=st.integers(0, 99))
def test_blocks_come_apart_as_they_were_put_together(refs, ranks, seed):
    if not any(ranks):
        return
    given = [
        matrices(rank, seed + at, size) if rank else None
        for at, (rank, size) in enumerate(zip(ranks, SIZES, strict=True))
    ]
    flat = refs(*(each for pair in given if pair for each in pair))
    pairs = iter(zip(flat[::2], flat[1::2], strict=True))
    parts = [Factors(*next(pairs)) if pair else None for pair in given]
    whole = put_together(parts, SIZES, "key")
    up, down = map(values, whole)
    expected = torch.cat([
        pair[0] @ pair[1] if pair else torch.zeros(size, COLUMNS)
        for pair, size in zip(given, SIZES, strict=True)
    ])  # fmt: skip
    assert torch.allclose(up @ down, expected, atol=1e-5)
    apart = taken_apart(whole, SIZES)
    for made, pair in zip(apart, given, strict=True):
        assert (made is None) == (pair is None)
        if made and pair:
            assert all(
                torch.equal(values(one), other) for one, other in zip(made, pair, strict=True)
            )


@settings(max_examples=40, deadline=None)
@given(rank=st.integers(1, 6), seed=st.integers(0, 99), zeros=st.lists(st.booleans(), max_size=6))
def test_rows_of_a_dense_product_are_the_products_of_rows(refs, rank, seed, zeros):
    up, down = matrices(rank, seed)
    for at, is_zero in enumerate(zeros[:rank]):
        if is_zero:
            up[:, at] = 0  # a column that nobody uses must not be lost
    apart = taken_apart(Factors(*refs(up, down)), SIZES)
    found = [
        torch.zeros(size, COLUMNS) if part is None else values(part.up) @ values(part.down)
        for part, size in zip(apart, SIZES, strict=True)
    ]
    assert torch.allclose(torch.cat(found), up @ down, atol=1e-5)
    again = put_together(apart, SIZES, "key")
    assert torch.allclose(values(again.up) @ values(again.down), up @ down, atol=1e-5)


def test_a_minus_zero_is_a_bit_that_is_kept(refs):
    up = torch.block_diag(*(torch.ones(size, 1) for size in SIZES))
    up[0, 3] = -0.0
    apart = taken_apart(Factors(*refs(up, torch.ones(4, COLUMNS))), SIZES)
    assert [part.down.shape[0] for part in apart if part] == [4, 4, 4, 4]


def test_types_that_differ_are_not_put_together(refs):
    one, other = refs(torch.ones(3, 1), torch.ones(3, 1).half())
    down, half = refs(torch.ones(1, COLUMNS), torch.ones(1, COLUMNS).half())
    with pytest.raises(KeyMismatch, match="differs in type"):
        put_together([Factors(one, down), Factors(other, half)], (3, 3), "key")
