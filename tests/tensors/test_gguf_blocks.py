"""The quantised types of GGUF: their values are those of gguf-py to the bit, whose checksums
`tests/data/make_gguf.py` wrote down; and what --verify computes says the same once more.
"""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from ckptconv.tensors.dtypes import BLOCKS, DType
from ckptconv.tensors.gguf_blocks import DECODERS
from helpers import gguf_files
from helpers.paths import DATA

EXPECTED = json.loads((DATA / "gguf" / "blocks.json").read_text())
BY_NAME = {dtype.name: DECODERS[dtype] for dtype in DECODERS}


def blocks_of(dtype: DType) -> np.ndarray:
    raw = gguf_files.blocks(dtype.name, dtype.itemsize)
    return np.frombuffer(raw, np.uint8).reshape(-1, dtype.itemsize)


def test_a_block_has_the_bytes_of_the_structure_of_ggml():
    """The fields of ggml-common.h, in their order: scales of 2 bytes or their like, codes."""
    fields = {
        "Q4_0": (2, 16), "Q4_1": (2, 2, 16), "Q5_0": (2, 4, 16), "Q5_1": (2, 2, 4, 16),
        "Q8_0": (2, 32), "IQ4_NL": (2, 16), "MXFP4": (1, 16), "NVFP4": (4, 32), "Q1_0": (2, 16),
        "Q2_K": (16, 64, 2, 2), "Q3_K": (32, 64, 12, 2), "Q4_K": (2, 2, 12, 128),
        "Q5_K": (2, 2, 12, 32, 128), "Q6_K": (128, 64, 16, 2), "IQ2_XXS": (2, 32 * 2),
        "IQ2_XS": (2, 32 * 2, 8), "IQ3_XXS": (2, 3 * 32), "IQ1_S": (2, 32, 8 * 2),
        "IQ3_S": (2, 64, 8, 32, 4), "IQ2_S": (2, 64, 8, 8), "IQ4_XS": (2, 2, 4, 128),
        "IQ1_M": (32, 16, 8), "TQ1_0": (48, 4, 2), "TQ2_0": (64, 2),
    }  # fmt: skip
    assert {one.name: one.itemsize for one in BLOCKS} == {
        name: sum(sizes) for name, sizes in fields.items()
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_the_values_are_those_of_gguf_py_to_the_bit(name):
    dtype, decode, _ = BY_NAME[name]
    values = decode(blocks_of(dtype))
    assert values.dtype == np.float32 and values.shape == (gguf_files.BLOCKS, dtype.elements)
    assert gguf_files.digest(values) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_plain_statement_of_one_element_says_the_same(name):
    dtype, decode, plain = BY_NAME[name]
    blocks = blocks_of(dtype)
    values = decode(blocks)
    # every element of some blocks, and one of each
    places = [(row, at) for row in (0, 9, 300, 511) for at in range(dtype.elements)]
    places += [(row, row * 7 % dtype.elements) for row in range(len(blocks))]
    for row, at in places:
        one, value = plain(blocks[row].tobytes(), at), values[row, at]
        is_same = struct.pack("<f", one) == value.tobytes()
        assert is_same or (one != one and value != value), (row, at)


def test_blocks_are_decoded_alike_however_many_there_are_and_wherever_they_lie():
    dtype, decode, _ = BY_NAME["Q5_K"]
    blocks = np.tile(blocks_of(dtype), (5, 1))  # more than are decoded at a time
    whole = decode(blocks)
    assert gguf_files.digest(whole[-gguf_files.BLOCKS :]) == EXPECTED["Q5_K"]
    odd = np.zeros((3, dtype.itemsize + 3), np.uint8)[:, 1:-2]
    odd[:] = blocks[300:303]
    assert decode(odd).tobytes() == whole[300:303].tobytes()
    assert decode(blocks[:0]).shape == (0, 256)


def test_the_types_that_need_tables_are_named_and_not_decoded():
    assert {dtype.name for dtype in BLOCKS} - BY_NAME.keys() == {
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
        "Q1_0",
    }  # fmt: skip
    assert BY_NAME.keys() == EXPECTED.keys()
