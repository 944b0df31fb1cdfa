"""Elements of less than a byte, taken out of their bytes; torch and ml_dtypes are the oracles."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from ckptconv.tensors.decoding import FLOAT4
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.packing import codes_in, packed_nbytes, unpacked
from ckptconv.tensors.running_statistics import RunningStatistics


def test_the_codes_of_4_bits_are_the_numbers_of_the_standard():
    codes = np.arange(16, dtype=np.uint8)
    ours = np.array(FLOAT4)
    assert np.array_equal(ours, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    assert np.signbit(ours[8]) and ours[8] == 0


def test_of_a_pair_the_first_has_the_low_bits():
    """As torch/headeronly/util/Float4_e2m1fn_x2.h says: bits 7654 are val1, bits 3210 are val0."""
    first, second = 0b0101, 0b1001
    assert unpacked(memoryview(bytes([second << 4 | first])), 4).tolist() == [first, second]
    assert [FLOAT4[first], FLOAT4[second]] == [3.0, -0.5]


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4])
@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31])
def test_quantized_elements_stand_end_to_end(dtype, numel):
    bits = 4 if dtype is torch.quint4x2 else 2
    levels = 1 << bits
    plain = torch.randint(0, levels, (numel,)).float()
    quantized = torch.quantize_per_tensor(plain, 1.0, 0, dtype)
    assert torch.equal(quantized.dequantize(), plain)
    raw = bytes(quantized.untyped_storage())[: packed_nbytes(numel, bits)]
    assert np.array_equal(unpacked(memoryview(raw), bits)[:numel], plain.numpy())
    counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
    found = codes_in(counts, bits, raw[-1], -numel % (8 // bits))
    assert np.array_equal(found, np.bincount(plain.numpy().astype(int), minlength=levels))


@pytest.mark.parametrize("numel", [10, 9_999, 100_000])
@pytest.mark.parametrize("bits", [2, 4])
def test_statistics_count_each_element_and_no_padding(numel, bits):
    generator = np.random.default_rng(numel + bits)
    numbers = generator.normal(size=1 << bits).astype(np.float32).astype(np.float64)
    raw = generator.integers(0, 256, packed_nbytes(numel, bits), np.uint8).tobytes()
    values = numbers[unpacked(memoryview(raw), bits)[:numel]]
    counter = RunningStatistics(BY_NAME["uint8"], numel, bits=bits, numbers=numbers)
    for at in range(0, len(raw), 1001):
        counter.update(memoryview(raw)[at : at + 1001])
    found = counter.statistics()
    assert (found.numel, found.distinct) == (numel, len(np.unique(values)))
    assert (found.minimum, found.maximum) == (values.min(), values.max())
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert found.quantiles([0.3]) == [np.sort(values)[int(np.ceil(0.3 * numel)) - 1]]
