"""The values of a tensor as a file of numpy (``.npy``)."""

from __future__ import annotations

from pathlib import Path

from ckptconv.io.local import place_of
from ckptconv.io.outputs import file_output
from ckptconv.support.errors import OptionRefused
from ckptconv.values.named import NamedValue
from ckptconv.values.picking import Box, values_of


def write_npy(item: NamedValue, box: Box, output: Path, *, force: bool) -> None:
    """Write a part of a tensor, whole or not at all; its values are in memory meanwhile.

    Raises `OptionRefused` for types that numpy does not have by itself (bfloat16, 8-bit floats),
    `OutputRefused` where the file may not be written.
    """
    import io

    import numpy as np

    values = values_of(item, box)
    if values.dtype.kind == "V" or values.dtype.name not in np.sctypeDict:
        raise OptionRefused(
            f"numpy has no dtype {item.dtype.name} by itself",
            hint="ckptconv convert IN OUT.npz --dtype f32 writes it as float32",
        )
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(values))
    )
    body = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    raw = head.getvalue()
    size = len(raw) + body.nbytes
    with file_output(place_of(output), force=force, fsync=True, size=size) as destination:
        with destination.draft(output.name, size) as draft:
            draft.stream.write(raw)
            draft.stream.write(body.data)
            draft.commit()
        destination.commit()
