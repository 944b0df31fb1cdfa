"""GGUF: tensors of blocks, whose type says all; their values are float32 where nothing asks for
another type, for a block has more bits than those of 16 have.
"""

from __future__ import annotations

from ckptconv.support.errors import RefusedObject
from ckptconv.tensors.computed import Computed, computed
from ckptconv.tensors.gguf_blocks import DECODERS
from ckptconv.tensors.refs import TensorRef, whole_view
from ckptconv.tensors.schemes.base import FLOAT32, Facts


def unblocked(key: str, ref: TensorRef, facts: Facts) -> TensorRef:
    """The values of a tensor of blocks; `RefusedObject` for a type whose tables are not here."""
    if ref.dtype not in DECODERS:
        raise RefusedObject(
            f"is {ref.dtype.name} of GGUF, whose values cannot be read here",
            where=key,
            hint="dequantise the file with llama.cpp",
        )
    dtype, shape = facts.dtype or FLOAT32, ref.shown_shape
    made = computed(
        Computed("unblock", (ref,), (ref.dtype.name,), dtype, shape), key, facts.checked
    )
    return whole_view(made.storage, dtype, shape)
