"""The numpy archive as an output format: the tensors of one state dict as arrays, by their keys.

It holds no device tags, no aliases, no metadata, and only the element types that numpy has. The
layout of a member stands in `npz`; the archive around them is laid out as torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptconv.formats import zip_archive
from ckptconv.formats.layout import Layout, WriteItem
from ckptconv.formats.npz import CONTAINER, MAGIC, SUFFIX, TYPES
from ckptconv.formats.target_format import NamedTensor, Retag, TargetFormat
from ckptconv.formats.zip_archive import Slot
from ckptconv.io.crc import combined_crc, crc32
from ckptconv.support.errors import RefusedObject, VerificationFailed
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Shape

_DESCRS = {dtype: f"{'|' if dtype.word == 1 else '<'}{code}" for code, dtype in TYPES.items()}
_ALIGNMENT = 64  # of the values in a member, as numpy has it
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
        """Refuse element types that numpy lacks, and keys that are not names in an archive."""
        met: dict[str, str] = {}
        for key, _, dtype in named:
            if dtype not in _DESCRS:
                cast = "cast it with --dtype f32, " if dtype.is_floating else ""
                raise RefusedObject(
                    f"numpy has no dtype {dtype.name}",
                    where=key,
                    hint=f"{cast}write safetensors (--to safetensors), "
                    "or leave it out with --exclude",
                )
            other = met.setdefault(key.lower(), key)
            if not _is_plain(key) or other != key:
                raise RefusedObject(
                    "its key cannot be the name of a member of an archive"
                    if other == key
                    else f"its key differs only in case from {other}",
                    where=key,
                    hint="rename it (--rename), or write safetensors (--to safetensors)",
                )

    def tensor_notes(self, named: Sequence[NamedTensor], retag: Retag) -> Iterator[str]:
        if any(retag(ref.location) != "cpu" for _, ref, _ in named):
            yield "a numpy archive has no device tags: its arrays are on no device"

    def lay_out(
        self, tensors: Sequence[NamedTensor], metadata: Mapping[str, str], retag: Retag
    ) -> Layout:
        items: list[WriteItem] = []
        slots: list[Slot] = []
        headers: list[bytes] = []
        end = 0
        for key, ref, dtype in tensors:
            header, nbytes = _header(dtype, ref.shape), ref.numel * dtype.itemsize
            name = f"{key}{SUFFIX}".encode()
            slot, lead, offset, end = zip_archive.lay_out(name, end, len(header) + nbytes)
            slots.append(slot)
            headers.append(header)
            at = offset + len(header)
            items.append(WriteItem(key, lead + header, at, nbytes, ref, dtype))

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

    def check_written(self, written: Path, name: Path, count: int) -> None:
        """Let numpy read the directory that was written, without unpickling anything."""
        import numpy as np

        try:
            with np.load(written, allow_pickle=False) as archive:
                seen = len(archive.files)
        except (OSError, ValueError) as error:
            raise VerificationFailed(
                f"{CONTAINER.by} does not open it: {error}", path=name
            ) from error
        if seen != count:
            raise VerificationFailed(f"{CONTAINER.by} sees {seen} arrays in it", path=name)


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
