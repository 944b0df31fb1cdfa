"""The zip container of `torch.save` (torch ≥ 1.6), read; TorchScript has its tree and its storages
in the same records.

Records under one root folder of any name: ``data.pkl`` (the tree), ``data/N`` (a storage each),
and, where the writer was new enough, ``byteorder``, ``version``, ``.format_version``,
``.storage_alignment``, ``.data/serialization_id``. Source: torch/serialization.py and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ckptconv.formats.containers import claim_pickle
from ckptconv.formats.zip_archive import (
    Record,
    Records,
    checksum_notes,
    read_record,
    record_source,
    root_folders,
)
from ckptconv.io.inflate import Spool, refuse_bomb
from ckptconv.io.source import Source
from ckptconv.objects.torch_read import read_torch_pickle
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, errors_at, printable
from ckptconv.support.records import made
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage
from ckptconv.tree.checkpoint import PICKLE_HEAD, TORCH_LOAD, Checkpoint, Container, TorchFileFacts

CONTAINER = Container(
    "torch zip",
    TORCH_LOAD,
    weights_only=True,
    is_torch=True,
    has_version=True,
    has_checksums=True,
    names_storages=True,
)
# The records that torch writes besides the storages
_OWN = "data.pkl version byteorder .format_version .storage_alignment .data/serialization_id"


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
        facts=TorchFileFacts(
            pickle[:PICKLE_HEAD], dead, strays, storages.version, root.rstrip("/")
        ),
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
    dead = {*others}
    return sum([one.stored + _AROUND for name, one in records.items() if name not in dead])


_AROUND = 400  # bytes at most of the headers, the padding and the directory's entry of a record


# ---------------------------------------------------------------------- what TorchScript has too


def read_tree(source: Source, record: Record, storages: ArchiveStorages) -> tuple[Node, bytes]:
    """The tree in the pickle `record`, its tensors over `storages`, and that pickle; no payload."""
    with errors_at(path=source.path, where="data.pkl"):
        pickle = read_limited(source, record)
        return read_torch_pickle(pickle, storages), pickle


def read_limited(
    source: Source, record: Record, limit: Literal["pickle_bytes", "text_bytes"] = "pickle_bytes"
) -> bytes:
    """A whole pickle or text, within the limit of that name, and no bomb when deflated."""
    name, stored, size = record.name, record.stored, record.size
    if record.deflated:
        what = f"claims to inflate {stored} bytes to {size}"
        refuse_bomb(stored, size, what, "pickle", path=source.path, where=name)
        claim_pickle(source, size)
    return read_record(source, record, limit)


class ArchiveStorages:
    """Finds the storages of one archive by key, each checked against its record. `used` are the
    records found so far; `inflated` the sources to close besides the archive itself.
    """

    def __init__(self, source: Source, records: Mapping[str, Record], root: str) -> None:
        self._source = source
        self._records = records
        self._prefix = f"{root}data/"
        self._big_endian = self._is_big_endian(root)
        self.version = self._version(root)
        self.used: set[str] = set()
        self.inflated: list[Source] = []
        self._spool = Spool()

    def __call__(self, key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
        return self.at(self._prefix + key, location, dtype, nbytes)

    def at(
        self, name: str, location: str, dtype: DType | None, claimed: int | None = None
    ) -> Storage:
        """The storage that is the whole record `name`, of `claimed` bytes where that is known."""
        record = self._records.get(name)
        if record is None:
            what = "the pickle names a storage that the archive does not hold"
            raise MalformedCheckpoint(what, where=name)
        name, _, offset, nbytes, _, is_deflated, crc32 = record
        if claimed not in (None, nbytes):
            what = f"has {nbytes} bytes where the pickle says {claimed}"
            raise MalformedCheckpoint(what, where=name)
        self.used.add(name)
        source = self._source
        if is_deflated:
            source, offset = record_source(source, record, self._spool)
            self.inflated.append(source)
            # the source of the inflated bytes has held them against it
            crc32 = None
        fields = (source, offset, nbytes, location, name, dtype, crc32, self._big_endian, None)
        return made(Storage, fields)

    def _small(self, name: str) -> bytes | None:
        record = self._records.get(name)
        if record is None:
            return None
        return read_record(self._source, record, "small_record_bytes")

    def _is_big_endian(self, root: str) -> bool:
        where = f"{root}byteorder"
        order = self._small(where)
        if order not in (None, b"little", b"big"):
            what = f"has the unknown byte order {order!r}"
            raise MalformedCheckpoint(what, path=self._source.path, where=where)
        return order == b"big"

    def _version(self, root: str) -> int | None:
        where = f"{root}version"
        version = self._small(where)
        if version is None:
            return None
        if not version.strip().isdigit():
            what = f"is not a number: {version[:20]!r}"
            raise MalformedCheckpoint(what, path=self._source.path, where=where)
        return int(version)
