"""Statistics of values, held against torch and numpy in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.running_statistics import RunningStatistics
from ckptconv.tensors.statistics import FEW, QUANTILE_ERROR, Statistics
from helpers.examples import crossed

FRACTIONS = [0.0, 0.001, 0.25, 0.5, 0.9, 0.999, 1.0]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_FLOATS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
]  # fmt: skip


def told(tensor: torch.Tensor, chunk: int = 1 << 16, *, is_counted: bool = True) -> Statistics:
    """The statistics of a tensor, given in chunks of whole elements."""
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    raw = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    counter = RunningStatistics(dtype, tensor.numel(), is_counted=is_counted)
    for start in range(0, len(raw), chunk):
        counter.update(raw[start : start + chunk])
    return counter.statistics()


def drawn(dtype: torch.dtype, count: int) -> torch.Tensor:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3
    if dtype == torch.bool:
        return numbers > 0
    if not dtype.is_floating_point:
        numbers = (numbers * 40).round()
        numbers = numbers.abs() if dtype.is_signed is False else numbers
    numbers[: count // 7] = 0
    return numbers.to(torch.float64).to(dtype)


def as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    small = tensor.dtype in SMALL_FLOATS
    return (tensor.float() if small else tensor).double()


@pytest.mark.parametrize(
    ("dtype", "count"),
    crossed(
        [*FLOATS, *SMALL_FLOATS, *INTEGERS, torch.bool],
        [300_001, 1, 2, 3, 4096, 4097, 300_001],
    ),
    ids=str,
)
def test_every_type_as_torch_has_it(dtype, count):
    tensor = drawn(dtype, count)
    found, numbers = told(tensor), as_doubles(tensor)
    assert (found.minimum, found.maximum) == (numbers.min().item(), numbers.max().item())
    assert found.abs_max == numbers.abs().max().item()
    assert (found.numel, found.finite) == (count, count)
    assert found.zeros == int((numbers == 0).sum())
    assert found.mean == pytest.approx(numbers.mean().item(), rel=1e-12, abs=1e-12)
    if count > 1:
        # torch's own std is off by 1e-12 where one thread makes it
        std = numbers.numpy().std(ddof=1)
        assert found.std == pytest.approx(std, rel=1e-12, abs=1e-300)
    else:
        assert found.std is None
    if found.distinct_is_exact:
        assert found.distinct == len(numbers.unique())
    else:
        assert 0 < found.distinct <= len(numbers.unique())


@pytest.mark.parametrize("count", [5, 4096, 300_001])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.int32, torch.uint8], ids=str)
def test_quantiles_lie_within_the_stated_error(dtype, count):
    tensor = drawn(dtype, count)
    found, numbers = told(tensor), as_doubles(tensor).sort().values
    error = 0.0 if found.distinct_is_exact else QUANTILE_ERROR
    for fraction, value in zip(FRACTIONS, found.quantiles(FRACTIONS), strict=True):
        exact = numbers[max(math.ceil(fraction * count), 1) - 1].item()
        assert abs(value - exact) <= error * abs(exact), (fraction, value, exact)
    assert found.distinct_is_exact == (dtype.itemsize <= 2 or count <= FEW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("kind", ["normal", "positive", "first positive", "sparse", "odd"])
@pytest.mark.parametrize("chunk", [1 << 16, 1 << 20])
def test_figures_without_a_distribution_are_those_with_one(dtype, kind, chunk):
    tensor = torch.randn(100_001, generator=torch.Generator().manual_seed(7)) * 500
    if "positive" in kind:
        tensor[: 50_000 if kind == "first positive" else None].abs_()
        tensor[90_000] = 1e-30  # in a bucket of its own, far from the others
    if kind == "sparse":
        tensor[torch.arange(100_001) % 5 != 0] = -0.0
    if kind == "odd" and dtype.is_floating_point:
        tensor[[5, 50_000, 90_000]] = torch.tensor([math.nan, math.inf, -math.inf])
    tensor = tensor.to(dtype)
    counted, known = told(tensor, chunk), told(tensor, chunk, is_counted=False)
    assert known == replace(counted, distribution=None) and known.quantiles([0.5]) is None
    finite = tensor[tensor.isfinite()].double()
    assert known.zeros == int((finite == 0).sum()) and known.distinct > 500
    assert (known.mean, known.std) == pytest.approx((finite.mean().item(), finite.std().item()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float16], ids=str)
def test_histograms_of_small_types_are_those_of_numpy(dtype):
    tensor = drawn(dtype, 50_000)
    expected, _ = np.histogram(as_doubles(tensor).numpy(), 37)
    assert told(tensor).histogram(37) == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_histograms_of_wide_types_move_what_lies_in_one_bucket(dtype):
    tensor = drawn(dtype, 50_000)
    found, expected = told(tensor).histogram(16), np.histogram(tensor.double().numpy(), 16)[0]
    assert sum(found) == 50_000
    assert np.abs(np.array(found) - expected).sum() <= 0.04 * 50_000


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [9, 70_000])
def test_nan_and_infinity_are_counted_and_in_nothing_else(dtype, count):
    tensor = drawn(torch.float32, count)
    tensor[[1, count // 2]] = math.nan
    tensor[2], tensor[3] = math.inf, -math.inf
    finite = tensor[tensor.isfinite()].to(dtype)
    found, numbers = (
        told(tensor.to(dtype)),
        as_doubles(finite.abs() if dtype.is_complex else finite),
    )
    assert (found.nan, found.infinite, found.finite) == (2, 2, count - 4)
    assert (found.minimum, found.maximum) == (numbers.min().item(), numbers.max().item())
    assert found.mean == pytest.approx(numbers.mean().item(), rel=1e-12, abs=1e-12)
    assert sum(found.histogram(8)) == count - 4


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_finite_values_there_are_no_figures(dtype, values):
    found = told(torch.tensor(values, dtype=dtype))
    assert (found.minimum, found.maximum, found.abs_max, found.mean, found.std) == (None,) * 5
    assert found.quantiles([0.5]) is None and found.histogram() is None
    assert (found.nan, found.infinite) == ((1, 1) if values else (0, 0))


def test_a_complex_value_with_one_nan_is_nan():
    found = told(torch.tensor([complex(math.inf, math.nan), complex(3, 4), complex(math.inf, 0)]))
    assert (found.nan, found.infinite, found.maximum, found.of_magnitudes) == (1, 1, 5.0, True)


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1.7e308])
def test_extreme_numbers_do_not_overflow(scale):
    tensor = torch.tensor([-1.0, 1.0, 0.5, 0.25] * 50_000, dtype=torch.float64) * scale
    found = told(tensor)
    small = (tensor / scale).std().item()
    assert found.std == pytest.approx(small * scale, rel=1e-12)
    assert found.mean == pytest.approx((tensor / scale).mean().item() * scale, rel=1e-12)


def test_a_large_offset_costs_no_digits():
    tensor = torch.randn(1 << 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tensor += 1e9
    exact = np.std(tensor.numpy().astype(np.longdouble), ddof=1)
    assert told(tensor).std == pytest.approx(float(exact), rel=1e-7)


def test_the_largest_integers_are_exact():
    numbers = [-(1 << 63), (1 << 63) - 1, 0]
    found = told(torch.tensor(numbers))
    assert (found.minimum, found.maximum, found.abs_max) == (numbers[0], numbers[1], 1 << 63)
    unsigned = RunningStatistics(BY_NAME["uint64"], 2)
    unsigned.update(memoryview(np.array([(1 << 64) - 1, 7], "<u8").tobytes()))
    assert unsigned.statistics().maximum == (1 << 64) - 1


def test_bytes_of_a_bool_that_are_neither_0_nor_1_are_true():
    counter = RunningStatistics(BY_NAME["bool"], 3)
    counter.update(memoryview(b"\0\1\7"))
    found = counter.statistics()
    assert (found.zeros, found.maximum, found.mean) == (1, 1, pytest.approx(2 / 3))


def test_bytes_in_chunks_of_odd_length_are_all_counted():
    tensor = drawn(torch.uint8, 100_003)
    found, numbers = told(tensor, chunk=1001), tensor.double()
    assert found.zeros == int((tensor == 0).sum())
    assert found.mean == pytest.approx(numbers.mean().item(), rel=1e-12)
    assert found.histogram(256) == np.histogram(numbers.numpy(), 256)[0].tolist()


@pytest.mark.parametrize("name", ["bits8", "quint8", "float4_e2m1fn_x2"])
def test_types_without_numbers_have_only_a_size(name):
    counter = RunningStatistics(BY_NAME[name], 4)
    counter.update(memoryview(b"abcd"))
    assert counter.statistics() == Statistics(4)


@pytest.mark.parametrize(
    ("dtype", "count"),
    crossed(
        [*FLOATS, torch.float8_e5m2, torch.int64, torch.int8, torch.bool],
        [1, 2, 3, 8, 63, 64, 65],
    ),
    ids=str,
)
def test_a_few_values_are_told_as_many_are(dtype, count):
    tensor = drawn(dtype, count)
    numbers = as_doubles(tensor).numpy()
    found = told(tensor)
    assert (found.minimum, found.maximum) == (numbers.min(), numbers.max())
    assert found.zeros == np.count_nonzero(numbers == 0)
    assert found.mean == pytest.approx(numbers.mean(), rel=1e-13, abs=1e-15)
    assert (found.std is None) == (count < 2)
    if count > 1:
        assert found.std == pytest.approx(numbers.std(ddof=1), rel=1e-13, abs=1e-15)
    bins = found.histogram(7)
    assert sum(bins) == count
    if count <= FEW:
        assert found.distinct == len(np.unique(numbers))
        ranks = [max(math.ceil(fraction * count), 1) - 1 for fraction in FRACTIONS]
        assert found.quantiles(FRACTIONS) == np.sort(numbers)[ranks].tolist()
        edges = np.linspace(numbers.min(), numbers.max(), 8)
        if len(np.unique(edges)) == 8 and not np.isin(numbers, edges[1:-1]).any():
            assert bins == np.histogram(numbers, edges)[0].tolist()


def test_a_few_values_of_any_size():
    for numbers in ([1e300, -1e300, 3.0], [1e-300, 3e-300], [math.nan, 1.0], [math.inf, 2.0, 2.5]):
        tensor = torch.tensor(numbers, dtype=torch.float64)
        finite = tensor[tensor.isfinite()]
        found = told(tensor)
        assert (found.finite, found.nan) == (len(finite), int(tensor.isnan().sum()))
        if len(finite) > 1:
            scale = finite.abs().max().item()
            expected = (finite / scale).std().item()
            assert found.std / scale == pytest.approx(expected, rel=1e-12)
    widest = [-1.7e308, 1.7e308, 0.0]
    assert told(torch.tensor(widest, dtype=torch.float64)).histogram(3) == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("center", [1.0, -2.5, 1e-30])
def test_numbers_that_lie_close_together_have_a_histogram_like_numpys(dtype, center):
    numbers = (np.random.default_rng(0).normal(center, abs(center) / 500, 40_000)).astype(dtype)
    counter = RunningStatistics(BY_NAME["float32" if dtype == "<f4" else "float64"], len(numbers))
    for part in np.array_split(numbers, 3):
        counter.update(memoryview(part.tobytes()))
    known = counter.statistics()
    expected = np.histogram(numbers.astype(np.float64), 64)[0]
    assert np.abs(np.array(known.histogram(64)) - expected).sum() <= len(numbers) // 500
    fractions = [0.01, 0.25, 0.5, 0.75, 0.99]
    exact = np.quantile(numbers.astype(np.float64), fractions, method="inverted_cdf")
    spread = numbers.max() - numbers.min()
    assert np.allclose(known.quantiles(fractions), exact, rtol=0, atol=float(spread) / 4000)


@pytest.mark.parametrize("count", [5, 10_000])
def test_values_that_are_all_one_number_are_in_the_first_bin(count):
    found = told(torch.full((count,), 2.5))
    assert found.histogram(4) == [count, 0, 0, 0]
    assert found.quantiles([0, 0.5, 1]) == [2.5] * 3


@pytest.mark.parametrize("fraction", [-0.1, 1.5, math.nan])
def test_a_quantile_of_more_than_all_is_refused_as_numpy_does(fraction):
    with pytest.raises(ValueError, match="range"):
        np.quantile([1.0, 2.0], fraction)
    with pytest.raises(ValueError, match="are not all from 0 to 1"):
        told(torch.ones(2)).quantiles([0.5, fraction])
