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
from ckptconv.io.inflate import Spool
from ckptconv.io.source import Source
from ckptconv.objects.torch_read import read_torch_pickle
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import CheckpointError, LimitExceeded, MalformedCheckpoint
from ckptconv.support.limits import in_force
from ckptconv.support.records import made
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage

Records: TypeAlias = Mapping[str, Record]
"""The records of an archive by name."""


def root_folder(records: Records, name: str) -> str | None:
    """The folder that holds the record `name`, with its slash; None where there is none, or
    several.
    """
    if not ends_one(records, name):
        return None
    found = [
        record[: -len(name)]
        for record in records
        if record.endswith(f"/{name}") and record.count("/") == 1
    ]
    return found[0] if len(found) == 1 else None


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
    """The tree in the pickle `record` of an archive, its tensors over `storages`, and that pickle;
    reads no payload.
    """
    try:
        pickle = read_limited(source, record)
        return read_torch_pickle(pickle, storages), pickle
    except CheckpointError as error:
        raise error.at(path=source.path, where="data.pkl") from error.__cause__


def read_limited(
    source: Source, record: Record, limit: Literal["pickle_bytes", "text_bytes"] = "pickle_bytes"
) -> bytes:
    """A whole pickle or text: of at most as many bytes as the limit of that name allows, and no
    bomb when it is deflated.
    """
    if record.deflated:
        _refuse_bomb(source, record)
    return zip_archive.read_record(source, record, limit)


def _refuse_bomb(source: Source, record: Record) -> None:
    most = in_force()
    if record.size <= max(most.pickle_free, most.pickle_ratio * record.stored):
        return claim_pickle(source, record.size)
    raise LimitExceeded(
        f"claims to inflate {record.stored} bytes to {record.size}",
        limit="pickle_ratio",
        allowed=most.pickle_ratio,
        needed=-(-record.size // max(1, record.stored)),
        path=source.path,
        where=record.name,
    )


def _no_storage(name: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(
        "the pickle names a storage that the archive does not hold", where=name
    )


class ArchiveStorages:
    """Finds the storages of one archive by key, each checked against its record.

    `used` are the records found so far; `inflated` the sources to close besides the archive itself.
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
        name = self._prefix + key
        if (record := self._records.get(name)) is None:
            raise _no_storage(name)
        if record.size != nbytes:
            raise MalformedCheckpoint(
                f"has {record.size} bytes where the pickle says {nbytes}", where=name
            )
        return self._made(record, location, dtype)

    def at(self, name: str, location: str, dtype: DType | None) -> Storage:
        """The storage that is the whole record `name`."""
        if (record := self._records.get(name)) is None:
            raise _no_storage(name)
        return self._made(record, location, dtype)

    def _made(self, record: Record, location: str, dtype: DType | None) -> Storage:
        name, _, offset, nbytes, _, is_deflated, crc32 = record
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
        return (
            None
            if record is None
            else zip_archive.read_record(self._source, record, "small_record_bytes")
        )

    def _is_big_endian(self, root: str) -> bool:
        order = self._small(f"{root}byteorder")
        if order not in (None, b"little", b"big"):
            raise MalformedCheckpoint(
                f"has the unknown byte order {order!r}",
                path=self._source.path,
                where=f"{root}byteorder",
            )
        return order == b"big"

    def _version(self, root: str) -> int | None:
        version = self._small(f"{root}version")
        if version is None:
            return None
        if not version.strip().isdigit():
            raise MalformedCheckpoint(
                f"is not a number: {version[:20]!r}", path=self._source.path, where=f"{root}version"
            )
        return int(version)
