"""Elements of two and four bits, taken out of their bytes.

The first element stands in the lowest bits. So torch packs ``quint4x2`` and ``quint2x4`` (end to
end, whatever the shape: aten/src/ATen/native/quantized/AffineQuantizerBase.cpp) and pairs of
``float4_e2m1fn_x2`` (torch/headeronly/util/Float4_e2m1fn_x2.h), and safetensors' library takes F4
for the latter. How F6 is packed nobody says: the OCP MX specification prescribes no layout in
memory, and safetensors leaves it to its users (safetensors#611). For ``int1`` to ``uint7`` torch
has no kernel that reads a value.
"""

from __future__ import annotations

from ckptconv.support.arrays import Array, np

BITS = {"quint4x2": 4, "quint2x4": 2, "float4_e2m1fn_x2": 4}
"""The bits of an element of the packed types whose layout is known."""


def unpacked(raw: memoryview, bits: int) -> Array:
    """The elements in some bytes, one in a byte each."""
    every = np.frombuffer(raw, np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Array = (every[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(-1)


def packed_nbytes(numel: int, bits: int) -> int:
    """How many bytes so many elements take."""
    return -(-numel * bits // 8)


def codes_in(counts: Array, bits: int, last: int, padding: int) -> Array:
    """How often each element occurs in bytes of which each occurs so many times; the highest
    `padding` elements of the byte `last` are none.
    """
    mask = (1 << bits) - 1
    made = np.zeros(1 << bits, np.int64)
    for shift in range(0, 8, bits):
        np.add.at(made, (np.arange(256) >> shift) & mask, counts)
    for place in range(padding):
        made[last >> (8 - bits * (place + 1)) & mask] -= 1
    return made
