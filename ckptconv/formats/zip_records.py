"""The records of one zip archive that make up a tree: its pickle, and the storages that the pickle
names.

Archives of `torch.save` and of TorchScript have them alike: ``data.pkl`` and ``data/N`` under one
root folder, with ``byteorder`` and ``version`` beside them. Which archive it is, and what its tree
means, is the business of the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from ckptconv.formats import zip_archive
from ckptconv.formats.inflation import claim_pickle
from ckptconv.formats.zip_archive import Record
from ckptconv.io.inflate import Spool, refuse_bomb
from ckptconv.io.source import Source
from ckptconv.objects.torch_read import read_torch_pickle
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import MalformedCheckpoint, errors_at
from ckptconv.support.records import made
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage

Records: TypeAlias = Mapping[str, Record]
"""The records of an archive by name."""


def root_folder(records: Records, name: str) -> str | None:
    """The folder that holds the record `name`, with its slash; None if there is not just one."""
    found = root_folders(records, name)
    return found[0] if len(found) == 1 else None


def root_folders(records: Records, name: str) -> list[str]:
    """The folders that hold a record `name`, each with its slash."""
    if not ends_one(records, name):
        return []
    found = [record for record in records if record.endswith(f"/{name}")]
    return [record[: -len(name)] for record in found if record.count("/") == 1]


def ends_one(records: Records, name: str) -> bool:
    """Whether a record has this name, in whatever folder."""
    # no name has a line break in it, and one search in all of them is the quickest
    listed = "\n".join(["", *records, ""])
    return f"/{name}\n" in listed or f"\n{name}\n" in listed


def checksum_notes(records: Records) -> Iterator[str]:
    """Tell of an archive that was written without checksums."""
    if any(record.size and record.crc32 is None for record in records.values()):
        yield "the archive has no checksums (CRC-32 fields are 0), so damage cannot be detected"


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
    return zip_archive.read_record(source, record, limit)


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
            source, offset = zip_archive.record_source(source, record, self._spool)
            self.inflated.append(source)
            crc32 = None
        fields = (source, offset, nbytes, location, name, dtype, crc32, self._big_endian, None)
        return made(Storage, fields)

    def _small(self, name: str) -> bytes | None:
        record = self._records.get(name)
        if record is None:
            return None
        return zip_archive.read_record(self._source, record, "small_record_bytes")

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
