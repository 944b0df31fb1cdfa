"""The zip container of `torch.save` (torch ≥ 1.6), read.

Records under one root folder of any name: ``data.pkl`` (the tree), ``data/N`` (a storage each),
and, where the writer was new enough, ``byteorder``, ``version``, ``.format_version``,
``.storage_alignment``, ``.data/serialization_id``. Source: torch/serialization.py and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptconv.formats.zip_records import (
    ArchiveStorages,
    Records,
    checksum_notes,
    read_tree,
    root_folders,
)
from ckptconv.io.source import Source
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.tree.checkpoint import PICKLE_HEAD, TORCH_LOAD, Checkpoint, Container, FileFacts

CONTAINER = Container(
    "torch zip",
    TORCH_LOAD,
    weights_only=True,
    is_torch=True,
    has_version=True,
    has_checksums=True,
    names_storages=True,
)
_OWN = "data.pkl version byteorder .format_version .storage_alignment .data/serialization_id"
"""The records that torch writes besides the storages."""


def open_torch_zip(source: Source, records: Records) -> Checkpoint:
    """Open the zip checkpoint with these records; reads its pickle, no payload.

    Raises `MalformedCheckpoint` when directory, pickle and storages contradict each other,
    `UnsupportedCheckpoint` when the archive is something else than what `torch.save` writes.
    """
    root = _root_folder(source, records)
    storages = ArchiveStorages(source, records, root)
    tree, pickle = read_tree(source, records[f"{root}data.pkl"], storages)
    known = {f"{root}{name}" for name in _OWN.split()}
    others = [name for name in records if name not in known and name not in storages.used]
    notes = [*checksum_notes(records)]
    if others:
        told = "records do not belong to a tensor and are left out, e.g."
        notes.insert(0, f"{len(others)} {told} {printable(others[0])}")
    dead = max(0, source.size - _alive(records, others))
    strays = tuple(name for name in others if not name.startswith(root))
    return Checkpoint(
        source.path,
        CONTAINER,
        tree,
        source.size,
        notes=tuple(notes),
        sources=(source, *storages.inflated),
        facts=FileFacts(pickle[:PICKLE_HEAD], dead, strays, storages.version, root.rstrip("/")),
    )


def _root_folder(source: Source, records: Records) -> str:
    """The folder that holds data.pkl, with its slash."""
    roots = root_folders(records, "data.pkl")
    if len(roots) > 1:
        what = f"holds two checkpoints, {printable(roots[0])} and {printable(roots[1])}"
        raise MalformedCheckpoint(what, path=source.path, where="zip directory")
    if not roots:
        what = "is a zip archive without a data.pkl, so torch.save did not write it"
        raise UnsupportedCheckpoint(what, path=source.path)
    return roots[0]


def _alive(records: Records, others: Sequence[str]) -> int:
    """An upper bound of the bytes that all records but `others` need, in what torch writes."""
    stored = sum([record.stored for record in records.values()])
    stored -= sum([records[name].stored for name in others])
    return stored + _AROUND * (len(records) - len(others))


_AROUND = 400  # bytes at most of the headers, the padding and the directory's entry of a record
