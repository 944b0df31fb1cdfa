"""Sums near a border of rounding: where the order of a product decides a bit, it is that of the
chain, whatever the library for matrices does.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.low_rank import LowRank, Term, chained, low_rank_values

ROWS, RANK, COLUMNS = 96, 24, 130
FLOAT32 = BY_NAME["float32"]


def factors(chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    up = chance.standard_normal((ROWS, RANK)).astype("f4")
    return up, chance.standard_normal((RANK, COLUMNS)).astype("f4")


def raw(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view("u1").data


def summed(base, up, down, target, **how):
    """The bytes of a box of a weight of float32, in the type `target`."""
    made = low_rank_values(
        LowRank((Term(RANK, 1.0),), **how),
        ((0, 0), base.shape),
        [(raw(values), FLOAT32) for values in (base, up, down)],
        BY_NAME[target],
    )
    return torch.frombuffer(bytearray(made.data), dtype=getattr(torch, target))


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_a_sum_that_is_a_tie_is_decided_by_the_chain(target):
    chance = np.random.default_rng(1)
    up, down = factors(chance)
    delta = chained(up, down)
    halves = torch.from_numpy(chance.standard_normal(delta.shape).astype("f4"))
    near = halves.to(getattr(torch, target))
    after = torch.nextafter(near, torch.full_like(near, 9.0))
    ties = ((near.float() + after.float()) / 2).numpy()  # exact: one more bit is enough
    base = ties - delta
    # one row far from all borders, so that not all elements are near one
    base = np.concatenate([base, np.tile(base[:1] * 1.37, (20 * ROWS, 1))])
    up = np.concatenate([up, np.tile(up[:1], (20 * ROWS, 1))])
    expected = torch.from_numpy(base + chained(up, down)).to(getattr(torch, target))
    assert torch.equal(summed(base, up, down, target), expected.reshape(-1))


@pytest.mark.parametrize("scale", [1e-30, 1e25, float("inf"), float("nan")])
def test_values_without_a_bound_are_worked_out_by_the_chain(scale):
    up, down = factors(np.random.default_rng(2))
    with np.errstate(all="ignore"):
        up[3:5] *= np.float32(scale)
        down[:, 7] *= np.float32(scale)
        expected = torch.from_numpy(chained(up, down)).bfloat16().reshape(-1)
    found = summed(np.zeros((ROWS, COLUMNS), "f4"), up, down, "bfloat16")
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_torch_sums_in_the_order_of_the_chain():
    up, down = (torch.from_numpy(one) for one in factors(np.random.default_rng(3)))
    apart = (up @ down - torch.from_numpy(chained(up.numpy(), down.numpy()))).abs()
    assert apart.max() <= 1e-5  # equal in every bit where torch has MKL and AVX2
