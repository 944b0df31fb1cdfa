"""The values of a tensor as an array of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptconv.support.errors import UnsupportedCheckpoint
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tensors.stream import read_box

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


def numpy_type(dtype: DType) -> Any:
    """The numpy type of a type's elements, of ml_dtypes where numpy has none; None where neither
    has one.
    """
    import ml_dtypes
    import numpy as np

    if dtype.numpy is None:
        return None
    return np.dtype(getattr(ml_dtypes, dtype.numpy, dtype.numpy)).newbyteorder("<")


def array_of(ref: TensorRef, start: Shape | None = None, shape: Shape | None = None) -> Array:
    """The box of a tensor at `start` of this shape (by default all of it), in C order.

    complex32, which numpy does not have, becomes complex64. `UnsupportedCheckpoint` for a type
    whose elements numpy and ml_dtypes have no numbers for.
    """
    import numpy as np

    start = (0,) * len(ref.shape) if start is None else start
    shape = ref.shape if shape is None else shape
    kind = numpy_type(ref.dtype)
    if kind is None and ref.dtype.name != "complex32":
        raise UnsupportedCheckpoint(f"numpy has no type for elements of {ref.dtype.name}")
    raw = read_box(ref, start, shape).view(np.uint8) if 0 not in shape else np.zeros(0, np.uint8)
    values: Array = raw.view("<f2").astype(np.float32) if kind is None else raw
    return values.view(np.complex64 if kind is None else kind).reshape(shape)
