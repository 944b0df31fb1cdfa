"""The numpy archive as an output format: the tensors of one state dict as arrays, by their keys.

It holds no device tags, no aliases, no metadata, and only the element types that numpy has. The
layout of a member stands in `npz`; the archive around them is laid out as torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from math import prod
from pathlib import Path, PurePath

from ckptconv.formats import zip_archive
from ckptconv.formats.layout import Layout, WriteItem
from ckptconv.formats.npz import CONTAINER, MAGIC, SUFFIX, TYPES
from ckptconv.formats.target_format import NamedTensor, Retag, TargetFormat
from ckptconv.formats.zip_archive import Slot
from ckptconv.io.crc import combined_crc, crc32
from ckptconv.support.errors import RefusedObject, VerificationFailed
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Shape, TensorRef

_DESCRS = {dtype: f"{'|' if dtype.word == 1 else '<'}{code}" for code, dtype in TYPES.items()}
_ALIGNMENT = 64  # of the values in a member, as numpy has it
_MOST_DIMENSIONS = 64
_LARGEST = (1 << 63) - 1  # bytes of an array, sizes of 0 not counted
_LONGEST_NAME = 0xFFFF  # bytes of a member's name in a zip archive


class NpzFile(TargetFormat):
    """What `numpy.savez` writes."""

    name = "npz"
    noun = "a numpy archive"
    suffix = ".npz"
    suffixes = (".npz",)
    claimed = (".npz",)
    holds_tags = False

    def refuse(self, named: Iterable[NamedTensor]) -> None:
        """Refuse types and shapes that numpy lacks, and keys that are not names in an archive."""
        tensors = [*named]
        bad = bad_names([key for key, _, _ in tensors])
        for key, ref, dtype in tensors:
            _refuse_array(key, dtype, ref.shape)
            if what := bad.get(key):
                raise RefusedObject(
                    what,
                    where=key,
                    hint="rename it (--rename), or write safetensors (--to safetensors)",
                )

    def tensor_notes(self, named: Sequence[NamedTensor], retag: Retag) -> Iterator[str]:
        if any(retag(ref.location) != "cpu" for _, ref, _ in named):
            yield "a numpy archive has no device tags: its arrays are on no device"

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        return lay_out_arrays([(key, dtype, ref.shape, ref) for key, ref, dtype in tensors])

    def check_written(self, written: Path, name: PurePath, count: int) -> None:
        """Let numpy read the directory that was written, without unpickling anything."""
        import numpy as np

        try:
            with np.load(written, allow_pickle=False) as archive:
                members = {*archive.zip.namelist()}
                # A key that is the name of a member is that member to numpy, else KEY.npy is.
                seen = {key if key in members else key + SUFFIX for key in archive.files}
        except (OSError, ValueError) as error:
            raise VerificationFailed(
                f"{CONTAINER.by} does not open it: {error}", path=name
            ) from error
        if len(seen) != count:
            raise VerificationFailed(f"{CONTAINER.by} sees {len(seen)} arrays in it", path=name)


def lay_out_arrays(
    arrays: Sequence[tuple[str, DType, Shape, TensorRef | bytes]],
) -> Layout:
    """The archive of arrays: the name, type, shape and values of each. The bytes of one may be left
    empty by who writes them himself.
    """
    items: list[WriteItem] = []
    slots: list[Slot] = []
    headers: list[bytes] = []
    end = 0
    for key, dtype, shape, values in arrays:
        header, nbytes = _header(dtype, shape), prod(shape) * dtype.itemsize
        name = f"{key}{SUFFIX}".encode()
        slot, lead, offset, end = zip_archive.lay_out(name, end, len(header) + nbytes)
        slots.append(slot)
        headers.append(header)
        items.append(WriteItem(key, lead + header, offset + len(header), nbytes, values, dtype))

    def member_crc(index: int, crc: int) -> int:
        return combined_crc(crc32(headers[index]), crc, items[index].nbytes)

    return Layout(
        tuple(items),
        end + zip_archive.ending_size(slots),
        lambda index, crc: zip_archive.descriptor(slots[index], member_crc(index, crc)),
        lambda crcs: zip_archive.ending(
            slots, [member_crc(index, crc) for index, crc in enumerate(crcs)], end
        ),
    )


def holds(dtype: DType) -> bool:
    """Whether numpy has this type by itself."""
    return dtype in _DESCRS


def bad_names(keys: Sequence[str]) -> dict[str, str]:
    """The keys that cannot all be names in one archive, and why."""
    known, met = {*keys}, dict[str, str]()
    found = {key: _why_no_name(key, met.setdefault(key.lower(), key), known) for key in keys}
    return {key: what for key, what in found.items() if what is not None}


def _refuse_array(key: str, dtype: DType, shape: Shape) -> None:
    """Refuse an array that numpy cannot have."""
    if dtype not in _DESCRS:
        cast = "cast it (--dtype f32), " if dtype.is_floating else ""
        what, remedy = f"numpy has no dtype {dtype.name}", cast
    elif len(shape) > _MOST_DIMENSIONS:
        what = f"it has {len(shape)} dimensions; numpy has at most {_MOST_DIMENSIONS}"
        remedy = ""
    elif prod(size for size in shape if size) * dtype.itemsize > _LARGEST:
        what, remedy = f"numpy cannot have an array of the shape {shape}", ""
    else:
        return
    raise RefusedObject(
        what,
        where=key,
        hint=f"{remedy}write safetensors (--to safetensors), or leave it out (--exclude)",
    )


def _why_no_name(key: str, other: str, keys: Set[str]) -> str | None:
    """Why a key, one of `keys`, cannot be one of the archive's; `other` is the same in lower case.

    `NpzFile[key]` first looks for a member of that very name, and takes array a for a.npy.
    """
    if other != key:
        return f"its key differs only in case from {other}"
    if not _is_plain(key):
        return "its key cannot be the name of a member of an archive"
    if key.endswith(SUFFIX) and key.removesuffix(SUFFIX) in keys:
        return f"numpy would read {key.removesuffix(SUFFIX)} under its key"
    return None


def _header(dtype: DType, shape: Shape) -> bytes:
    """All that stands before the values of an array, in the first version that there was."""
    text = f"{{'descr': '{_DESCRS[dtype]}', 'fortran_order': False, 'shape': {shape}, }}"
    unpadded = len(MAGIC) + 4 + len(text) + 1
    raw = f"{text}{' ' * (-unpadded % _ALIGNMENT)}\n".encode()
    return MAGIC + b"\1\0" + len(raw).to_bytes(2, "little") + raw


def _is_plain(key: str) -> bool:
    """Whether a key can be the name of a member that every reader takes for this one name."""
    if not key.isprintable() or "\\" in key or key.startswith("/") or ".." in key.split("/"):
        return False
    return len(f"{key}{SUFFIX}".encode(errors="replace")) <= _LONGEST_NAME


NPZ = NpzFile()
