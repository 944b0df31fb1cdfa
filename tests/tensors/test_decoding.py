"""Codes and scales become the same values whichever way is quickest: held against one element after
the other, worked out in plain numbers.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from ckptconv.tensors import decoding
from ckptconv.tensors.decoding import Decoding, decode_needs, decode_plain, decode_values
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.plain_numbers import number_of, rounded

E8M0 = "float8_e8m0fnu"
WAYS = {
    "blocks": (Decoding(("codes", "scale"), "float8_e4m3fn", (32, 32)), "float8_e4m3fn", "float32"),
    "rows": (Decoding(("codes", "scale"), "int8", (1, 2000)), "int8", "float16"),
    "one scale": (
        Decoding(("codes", "scale"), "float8_e5m2", (99, 2000)),
        "float8_e5m2",
        "float32",
    ),
    "two scales": (
        Decoding(("codes", "scale", "second"), "float8_e4m3fn", (1, 2000), divides=True),
        "float8_e4m3fn",
        "bfloat16",
    ),
    "mxfp8": (
        Decoding(("codes", "scale"), "float8_e4m3fn", (1, 32), scale_as=E8M0),
        "float8_e4m3fn",
        "uint8",
    ),
    "mxfp4": (Decoding(("codes", "scale"), "e2m1", (1, 32), bits=4, scale_as=E8M0), *["uint8"] * 2),
    "mxfp4 in words": (
        Decoding(("codes", "scale"), "e2m1", (1, 32), bits=4, word=4, scale_as=E8M0),
        *("uint32", "uint8"),
    ),
    "in an order of the fields of a word": (
        Decoding(
            ("codes", "scale"), "e2m1", (1, 32), bits=4, word=4, order=(0, 2, 4, 6, 1, 3, 5, 7)
        ),
        *("uint32", "float32"),
    ),
    "mxfp4 transposed": (
        Decoding(("codes", "scale"), "e2m1", (32, 1), bits=4, axis=-2, scale_as=E8M0),
        *("uint8", "uint8"),
    ),
    "nvfp4": (
        Decoding(("codes", "scale", "second"), "e2m1", (1, 16), bits=4, order=(1, 0)),
        *("uint8", "float8_e4m3fn"),
    ),
}
SHAPE = (2, 70, 1100)
BOXES = [
    ((0, 0, 0), SHAPE),
    ((1, 3, 0), (1, 67, 1100)),
    ((0, 31, 7), (2, 35, 1000)),
    ((1, 69, 41), (1, 1, 1030)),
    ((0, 5, 1099), (1, 1, 1)),
]


def parts_of(how, types, box, draw):
    """The bytes of each input for a box: codes of all kinds, and scales that are not infinite."""
    found = []
    for role, dtype, (_, shape) in zip(
        how.roles, types, decode_needs(how, box, len(types)), strict=True
    ):
        count = math.prod(shape)
        if role == "codes":
            found.append(draw.randbytes(count * dtype.itemsize))
        elif dtype.itemsize == 1:
            found.append(bytes(draw.choice((0, 1, 3, 119, 121, 126)) for _ in range(count)))
        else:
            numbers = [draw.choice((1e-3, 0.3, -0.0, 7.7, 300.0)) for _ in range(count)]
            found.append(b"".join(encoded(number, dtype) for number in numbers))
    return [memoryview(part) for part in found]


def encoded(number, dtype):
    kind = {"float32": "<f4", "float16": "<f2"}.get(dtype.name, "<f4")
    raw = np.array(number, kind).tobytes()
    return raw[2:] if dtype.name == "bfloat16" else raw


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_values_of_plain_numbers(monkeypatch, way, target):
    monkeypatch.setattr(decoding, "_WORTH_ITEMS", 0)
    how, codes, scale = WAYS[way]
    kinds = {"codes": codes, "scale": scale, "second": "float32"}
    types = [BY_NAME[kinds[role]] for role in how.roles]
    draw = random.Random(way)
    for box in BOXES:
        parts = parts_of(how, types, box, draw)
        made = decode_values(how, box, list(zip(parts, types, strict=True)), BY_NAME[target])
        kind = BY_NAME[target]
        assert len(made.data) == math.prod(box[1]) * kind.itemsize
        wide = dict(zip(how.roles, decode_needs(how, box, len(types)), strict=True))
        for _ in range(40):
            at = tuple(draw.randrange(size) for size in box[1])
            place = tuple(start + step for start, step in zip(box[0], at, strict=True))
            one = (place, (1, 1, 1))
            given = [
                picked(part, dtype, wide[role], needed)
                for role, part, dtype, needed in zip(
                    how.roles, parts, types, decode_needs(how, one, len(types)), strict=True
                )
            ]
            wanted = rounded(decode_plain(how, one, given), kind)
            [found] = picked(made.data, kind, box, one)
            assert found == wanted or (math.isnan(found) and math.isnan(wanted)), (box, at)


def picked(part, dtype, whole, needed):
    """The numbers of a box, from the bytes of a box around it."""
    (start, shape), (first, size) = whole, needed
    cut = tuple(
        slice(at - begin, at - begin + count)
        for at, begin, count in zip(first, start, size, strict=True)
    )
    taken = np.frombuffer(part, f"V{dtype.itemsize}").reshape(shape)[cut]
    return [number_of(one.tobytes(), dtype) for one in taken.ravel()]


@pytest.mark.parametrize("way", ["blocks", "rows"])
def test_values_beyond_the_type_are_counted_where_they_are(way):
    how, codes, scale = WAYS[way]
    types = [BY_NAME[codes], BY_NAME[scale]]
    box = ((0, 0), (600, 1100))
    needs = decode_needs(how, box, 2)
    raw = bytearray(math.prod(needs[0][1]))
    raw[5] = raw[70] = raw[1100 * 40] = raw[1100 * 500] = 0x70  # 112, 128 as float8
    scales = np.full(needs[1][1], 1e3, {"float32": "<f4", "float16": "<f2"}[scale])
    scales[len(scales) // 2 :] = 1.0
    parts = [memoryview(raw), scales.view("u1").data]
    made = decode_values(how, box, list(zip(parts, types, strict=True)), BY_NAME["float16"])
    assert made.overflowed == 3
