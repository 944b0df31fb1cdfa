"""Values of tensors as files of numpy: one as ``.npy``, several as ``.npz``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptconv.formats.npz_output import NPZ, bad_names, holds, lay_out_arrays
from ckptconv.io.crc import crc32
from ckptconv.io.outputs import file_output
from ckptconv.io.places import place_of
from ckptconv.support.errors import OptionRefused, OutputRefused, RefusedObject
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.values.named import NamedValue
from ckptconv.values.picking import Box, values_of


def _written_type(item: NamedValue) -> DType:
    """The type that numpy gets; `OptionRefused` for one that it does not have by itself (bfloat16,
    8-bit floats).
    """
    dtype = BY_NAME["float64"] if item.decode is not None else item.dtype
    dtype = BY_NAME["complex64"] if dtype.name == "complex32" else dtype
    if not holds(dtype):
        raise OptionRefused(
            f"numpy has no dtype {item.dtype.name} by itself",
            hint="write it as float32 with: ckptconv convert IN OUT.npz --include NAME --dtype f32",
        )
    return dtype


def refuse_source(output: Path | None, checkpoint: Checkpoint) -> None:
    """Raise `OutputRefused` for an output that is a file of the checkpoint itself."""
    for source in checkpoint.sources:
        read = Path(source.path)
        is_there = output is not None and output.exists() and read.exists()
        if output is not None and is_there and output.samefile(read):
            raise OutputRefused(
                "is the checkpoint that is read", path=output, hint="name another file"
            )


def check_whole(item: NamedValue, box: Box) -> None:
    """Hold a tensor of which all is wanted against its checksums; of parts, others are not read.

    Raises `MalformedCheckpoint`.
    """
    if all(len(numbers) == size for numbers, size in zip(box.ranges, item.shape, strict=True)):
        checksums = Checksums()
        for piece in item.ref.pieces:
            checksums.read(piece.storage)


def write_npy(item: NamedValue, box: Box, output: Path, *, force: bool) -> None:
    """Write a part of a tensor, whole or not at all; its values are in memory meanwhile.

    Raises `OptionRefused` for types that numpy does not have by itself, `OutputRefused` where the
    file may not be written.
    """
    import io

    import numpy as np

    _written_type(item)
    values = np.asarray(values_of(item, box), order="C")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
    raw = head.getvalue()
    size = len(raw) + values.nbytes
    with file_output(place_of(output), force=force, fsync=True, size=size) as destination:
        with destination.draft(output.name, size) as draft:
            draft.stream.write(raw)
            draft.stream.write(values.reshape(-1).view(np.uint8).data)
            draft.commit()
        destination.commit()


def write_npz(chosen: Sequence[tuple[NamedValue, Box]], output: Path, *, force: bool) -> None:
    """Write parts of several tensors as one archive, whole or not at all, under their names.

    The values of one of them are in memory at a time. Raises `OptionRefused` as `write_npy` does,
    `RefusedObject` for names that an archive cannot hold, `OutputRefused`.
    """
    import numpy as np

    named = [(item.name, _written_type(item), box.shape, b"") for item, box in chosen]
    names = [name for name, _, _, _ in named]
    for name, what in bad_names(names).items():
        raise RefusedObject(what, where=name, hint="write it by itself, with --npy")
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise OptionRefused(f"{twice} is named twice", hint="name each tensor once")
    layout = lay_out_arrays(named)
    place = place_of(output)
    with file_output(place, force=force, fsync=True, size=layout.nbytes) as destination:
        with destination.draft(output.name, layout.nbytes) as draft:
            crcs: list[int] = []
            for at, (item, box) in enumerate(chosen):
                values = np.asarray(values_of(item, box), order="C").reshape(-1).view(np.uint8)
                draft.stream.write(layout.items[at].lead)
                draft.stream.write(values.data)
                crcs.append(crc32(values.data))
                draft.stream.write(layout.trail(at, crcs[-1]))
            draft.stream.write(layout.ending(crcs))
            draft.commit()
        if place.local() is not None and (made := draft.place.local()) is not None:
            NPZ.check_written(made, output, len(chosen))
        destination.commit()
