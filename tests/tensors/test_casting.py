"""casting.py promises the bits of `tensor.to(dtype)` on CPU: torch is asked about each pair,
pattern by pattern.
"""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import warnings
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptconv.support.errors import CheckpointError
from ckptconv.tensors.casting import Cast, cast
from ckptconv.tensors.dtypes import BY_NAME, DTYPES, DType
from ckptconv.tensors.plain_numbers import stands_for
from helpers.examples import examples, some

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating]
SMALL = [dtype for dtype in FLOATS if dtype.itemsize <= 2]
WIDE = [dtype for dtype in FLOATS if dtype.itemsize >= 4]
PAIRS = [pytest.param(a, b, id=f"{a.name}-{b.name}") for a in FLOATS for b in FLOATS if a is not b]
FLOAT32, FLOAT16, BFLOAT16 = BY_NAME["float32"], BY_NAME["float16"], BY_NAME["bfloat16"]

Bits = NDArray[np.unsignedinteger]


def nan_bits_vary(source: DType, target: DType) -> bool:
    """Whether torch's own NaN bits depend on the instruction set or on the place in the run (see
    the module's text).
    """
    wide_to_bfloat16 = target is BFLOAT16 and source.itemsize >= 4
    return target is FLOAT16 or wide_to_bfloat16 or (source is FLOAT16 and target is FLOAT32)


def as_tensor(bits: Bits, dtype: DType) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(
        getattr(torch, dtype.name)
    )


def as_bits(tensor: torch.Tensor, dtype: DType) -> Bits:
    return tensor.contiguous().view(torch.uint8).numpy().view(f"u{dtype.itemsize}")


def run(bits: Bits, source: DType, target: DType) -> Cast:
    return cast(memoryview(np.ascontiguousarray(bits).view(np.uint8)), source, target)


def assert_as_torch(bits: Bits, source: DType, target: DType) -> None:
    before = as_tensor(bits, source)
    after = before.to(getattr(torch, target.name))
    result = run(bits, source, target)
    ours, theirs = np.frombuffer(result.data, f"<u{target.itemsize}"), as_bits(after, target)
    assert ours.size == theirs.size
    differs = ours != theirs
    if nan_bits_vary(source, target):
        differs &= ~(as_tensor(ours, target).isnan() & after.isnan()).numpy()
    where = np.flatnonzero(differs)[:5]
    assert not where.size, [f"{bits[i]:#x}: torch {theirs[i]:#x}, ours {ours[i]:#x}" for i in where]
    lost = before.double().isfinite() & ~after.double().isfinite()
    if target.name == "float8_e4m3fn":  # saturates, from half way to what would be the next value
        lost = before.float().abs() >= 464
    assert result.overflowed == int(lost.sum())


def structured(exponent_bits: int, mantissa_bits: int) -> Bits:
    """Both signs, every exponent, and mantissas where rounding decides: powers of two and their
    neighbours, random.
    """
    top = (1 << mantissa_bits) - 1
    edges = {(1 << k) + d for k in range(mantissa_bits + 1) for d in (-1, 0, 1)}
    edges |= {(3 << k) + d for k in range(mantissa_bits - 1) for d in (-1, 0, 1)}
    random = np.random.default_rng(exponent_bits).integers(0, top, 20, np.uint64)
    mantissas = np.concatenate(
        [np.array(sorted(m for m in edges if 0 <= m <= top), np.uint64), random]
    )
    exponents = np.arange(1 << exponent_bits, dtype=np.uint64) << np.uint64(mantissa_bits)
    positive = (exponents[:, None] | mantissas).ravel()
    return np.concatenate([positive, positive | np.uint64(1 << (exponent_bits + mantissa_bits))])


@cache
def patterns(source: DType) -> Bits:
    """Every pattern of a small type; structured and random ones of float32 and float64. Odd in
    number.
    """
    if source in SMALL:
        every = np.arange(1 << 8 * source.itemsize, dtype=f"u{source.itemsize}")
        return np.concatenate([every, every[::-1][:-3]])
    rng = np.random.default_rng(source.itemsize)
    random = rng.integers(0, 1 << 8 * source.itemsize, 60_001, np.uint64)
    picked = structured(8, 23) if source is FLOAT32 else structured(11, 52)
    return rng.permutation(np.concatenate([picked, random])).astype(f"u{source.itemsize}")


@cache
def ties(target: DType) -> NDArray[np.float64]:
    """Halfway between each two neighbours of a small type and beyond its largest, and each value
    itself; both signs.
    """
    every = (
        as_tensor(np.arange(1 << 8 * target.itemsize, dtype=f"u{target.itemsize}"), target)
        .double()
        .numpy()
    )
    values = np.unique(np.abs(every[np.isfinite(every)]))
    last = values[-1] + (values[-1] - values[-2]) * np.array([0.5, 1, 2])
    positive = np.concatenate([values, (values[1:] + values[:-1]) / 2, last])
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize(("source", "target"), some(24, PAIRS))
def test_every_pair_gives_the_bits_and_the_overflow_count_of_torch(
    source: DType, target: DType
) -> None:
    bits = patterns(source)
    assert bits.size % 2
    assert_as_torch(bits, source, target)


@pytest.mark.parametrize("target", FLOATS, ids=lambda dtype: dtype.name)
def test_one_number_is_rounded_as_torch_rounds_it(target: DType) -> None:
    """What `--verify` holds a cast against."""
    exponents = np.exp2(np.arange(-149.0, 128))
    numbers = np.concatenate([part * exponents for part in (1, 1.25, 1.5, 1.75)] + [[0.0, np.inf]])
    before = torch.from_numpy(np.concatenate([numbers, -numbers, [np.nan]])).float()
    codes = as_bits(before.to(getattr(torch, target.name)), target)
    for number, code in zip(before.tolist(), codes, strict=True):
        assert stands_for(number, target, code.tobytes()), (number, code)


@pytest.mark.parametrize("target", SMALL, ids=lambda dtype: dtype.name)
def test_float32_at_and_beside_every_tie_rounds_as_torch(target: DType) -> None:
    with np.errstate(over="ignore"):
        exact = ties(target).astype(np.float32)
        beside = [np.nextafter(exact, np.float32(end)) for end in (-np.inf, np.inf)]
    assert_as_torch(np.concatenate([exact, *beside]).view(np.uint32), FLOAT32, target)


@pytest.mark.parametrize("target", SMALL, ids=lambda dtype: dtype.name)
def test_float64_beside_every_tie_rounds_twice_as_torch(target: DType) -> None:
    """A float64 just off a tie becomes the tie in float32, so it can end on the other side than one
    rounding would.
    """
    exact = ties(target)
    beside = [np.nextafter(exact, end) for end in (-np.inf, np.inf)]
    assert_as_torch(np.concatenate([exact, *beside]).view(np.uint64), BY_NAME["float64"], target)


@pytest.mark.parametrize("source", WIDE, ids=lambda dtype: dtype.name)
@settings(max_examples=examples(300), deadline=None)
@given(values=st.data())
def test_any_bit_patterns_cast_as_torch(source: DType, values: st.DataObject) -> None:
    width = 8 * source.itemsize
    as_pattern = st.floats(width=width).map(
        lambda number: int(np.array(number, f"f{width // 8}").view(f"u{width // 8}"))
    )
    chosen = values.draw(st.lists(st.integers(0, (1 << width) - 1) | as_pattern, max_size=40))
    bits = np.array(chosen, f"u{source.itemsize}")
    for target in FLOATS:
        if target is not source:
            assert_as_torch(bits, source, target)


@pytest.mark.parametrize(("source", "target"), some(24, PAIRS))
def test_short_runs_cast_as_torch(source: DType, target: DType) -> None:
    for length in (0, 1, 2, 3, 7, 15, 16, 17, 33, 63):
        assert_as_torch(patterns(source)[7 : 7 + length], source, target)


@pytest.mark.parametrize(("source", "target"), some(24, PAIRS))
def test_one_value_at_the_edge_of_overflow_is_noticed_alone(source: DType, target: DType) -> None:
    edge = ties(target if target in SMALL else FLOAT16)
    largest = edge[np.argsort(np.abs(edge))[-8:]]
    as_source = as_bits(torch.from_numpy(largest).to(getattr(torch, source.name)), source)
    for alone in range(largest.size):
        assert_as_torch(as_source[alone : alone + 1], source, target)


# Where torch's NaN bits vary, ours are those of its hardware conversion to float16 and of its
# scalar code elsewhere.
@pytest.mark.parametrize(
    ("source", "target", "nans", "results"),
    [
        (
            "float32",
            "bfloat16",
            [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFF8000],
            [0x7FC0] * 5,
        ),
        ("float64", "bfloat16", [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1], [0x7FC0] * 3),
        (
            "float32",
            "float16",
            [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FE601CC],
            [0x7E00, 0xFE00, 0x7E00, 0x7F30],
        ),
        ("float64", "float16", [0x7FF8 << 48, 0xFFFF << 48], [0x7E00, 0xFFC0]),
        ("bfloat16", "float16", [0x7FC0, 0x7F81, 0xFFFF], [0x7E00, 0x7E08, 0xFFF8]),
        ("float8_e4m3fn", "float16", [0x7F, 0xFF], [0x7F80, 0xFF80]),
        ("float8_e5m2", "float16", [0x7D, 0x7E, 0xFF], [0x7F00, 0x7E00, 0xFF00]),
        ("float16", "float32", [0x7E00, 0x7C01, 0xFFFE], [0x7FC00000, 0x7FC02000, 0xFFFFC000]),
    ],
)
def test_nan_bits_are_the_same_wherever_torch_varies(
    source: str, target: str, nans: list[int], results: list[int]
) -> None:
    a, b = BY_NAME[source], BY_NAME[target]
    for repeats in (1, 100):
        given_bits = np.repeat(np.array(nans, f"u{a.itemsize}"), repeats)
        data = run(given_bits, a, b).data
        assert (
            np.frombuffer(data, f"<u{b.itemsize}").tolist() == np.repeat(results, repeats).tolist()
        )


@pytest.mark.parametrize("target", FLOATS[1:], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("source", [*WIDE, BFLOAT16], ids=lambda dtype: dtype.name)
def test_how_a_tensor_is_cut_into_runs_does_not_matter(source: DType, target: DType) -> None:
    bits = np.resize(patterns(source), 100_003)
    whole = run(bits, source, target)
    cuts = [0, 1, 32_767, 32_768, 32_769, 65_537, 65_537, bits.size]
    runs = [run(bits[start:stop], source, target) for start, stop in pairwise(cuts)]
    assert b"".join(each.data for each in runs) == whole.data
    assert sum(each.overflowed for each in runs) == whole.overflowed


def test_only_values_that_a_type_cannot_hold_count_as_overflow() -> None:
    bits = np.array([65519.0, 65520.0, -7e4, np.inf, -np.inf, np.nan, 464.5], np.float32).view(
        np.uint32
    )
    counts = {
        target.name: run(bits, FLOAT32, target).overflowed
        for target in FLOATS
        if target is not FLOAT32
    }
    assert counts == {
        "float64": 0,
        "float16": 2,
        "bfloat16": 0,
        "float8_e4m3fn": 6,  # saturates to 448, infinity too
        "float8_e5m2": 3,
        "float8_e4m3fnuz": 4,
        "float8_e5m2fnuz": 3,
        "float8_e8m0fnu": 0,
    }


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64"])
def test_unaligned_and_read_only_bytes_cast_as_any_other(target: str) -> None:
    bits = patterns(FLOAT32)[:1001]
    shifted = memoryview(b"x" + bits.tobytes())[1:]
    assert shifted.readonly
    assert cast(shifted, FLOAT32, BY_NAME[target]) == run(bits, FLOAT32, BY_NAME[target])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_a_type_cast_to_itself_is_not_touched(dtype: DType) -> None:
    values = memoryview(bytes(range(240)))
    result = cast(values, dtype, dtype)
    assert result == Cast(values, 0)
    assert result.data.obj is values.obj


@pytest.mark.parametrize(("source", "target"), some(10, PAIRS))
def test_the_result_is_plain_bytes_of_the_target(source: DType, target: DType) -> None:
    data = run(np.zeros(24, f"u{source.itemsize}"), source, target).data
    assert (data.format, data.ndim, data.nbytes) == ("B", 1, 24 * target.itemsize)


@pytest.mark.parametrize(
    ("source", "target"), [("int64", "float16"), ("float32", "bool"), ("complex64", "float32")]
)
def test_a_type_that_is_not_floating_is_refused_by_name(source: str, target: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot cast {source} to {target}"):
        cast(memoryview(bytes(16)), BY_NAME[source], BY_NAME[target])


@pytest.mark.parametrize("target", SMALL, ids=lambda dtype: dtype.name)
def test_casting_warns_of_nothing_and_keeps_little_memory(target: DType) -> None:
    run(np.zeros(1, np.uint32), FLOAT32, target)
    worst = np.full(1 << 20, 0x7FA00001, np.uint32)
    worst[::2] = 0x7F7FFFFF
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = run(worst, FLOAT32, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= result.data.nbytes + (2 << 20)


def test_importing_the_module_imports_neither_numpy_nor_torch() -> None:
    program = (
        "import sys, ckptconv.tensors.casting; print(sorted({'numpy', 'ml_dtypes', 'torch'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
