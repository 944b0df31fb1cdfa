"""The zip container of `torch.save` (torch ≥ 1.6): read it, and lay it out for writing.

Records under one root folder of any name: ``data.pkl`` (the tree), ``data/N`` (a storage each), and, where the writer was new
enough, ``byteorder``, ``version``, ``.format_version``, ``.storage_alignment``, ``.data/serialization_id``. A
``constants.pkl`` marks a TorchScript archive. Source: torch/serialization.py and caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptconv import archives
from ckptconv.archives import Record, Slot
from ckptconv.checkpoint import Checkpoint, Overlay
from ckptconv.compaction import CastRule, NewStorage, compact
from ckptconv.dtypes import UINT8, DType
from ckptconv.errors import CheckpointError, LimitExceeded, MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.layout import Layout, WriteItem
from ckptconv.limits import LIMITS
from ckptconv.nodes import Dict, Node, made
from ckptconv.pickling import write_pickle
from ckptconv.sources import RangeSource, Source, Spool, crc32
from ckptconv.tensors import Storage, TensorRef
from ckptconv.torch_objects import StoredAs, TorchLeaves, read_torch_pickle

NAME = "torch zip"
_ROOT = b"archive"
_OPTIONAL = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")


def is_torch_zip(head: bytes) -> bool:
    """Whether a file that starts with `head` (4 bytes are enough) is a zip archive."""
    return head[:4] == b"PK\3\4"


def open_torch_zip(source: Source, opener: Callable[[Source], Checkpoint]) -> Checkpoint:
    """Open a zip checkpoint, or an archive of checkpoints; reads directories and pickles, no payload.

    Raises `MalformedCheckpoint` when directory, pickle and storages contradict each other, `UnsupportedCheckpoint` when the
    archive is something else than what `torch.save` writes.
    """
    records = archives.read_directory(source)
    if (members := _open_members(source, records, opener)) is not None:
        return members
    root = _root_folder(source, records)
    storages = _Storages(source, records, root)
    try:
        record = records[f"{root}data.pkl"]
        limit = max(LIMITS.pickle_free, LIMITS.pickle_ratio * record.stored) if record.deflated else LIMITS.pickle_bytes
        pickle = archives.read_record(source, record, min(limit, LIMITS.pickle_bytes))
        tree = read_torch_pickle(pickle, storages)
    except CheckpointError as error:
        raise error.at(path=source.path, where="data.pkl") from error.__cause__
    return Checkpoint(
        path=source.path,
        format=NAME,
        root=tree,
        nbytes=source.size,
        notes=tuple(_notes(records, root, storages)),
        sources=(source, *storages.inflated),
    )


def _root_folder(source: Source, records: Mapping[str, Record]) -> str:
    """The folder that holds data.pkl, with its slash."""
    roots = [name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) > 1:
        raise MalformedCheckpoint(
            f"holds two checkpoints, {printable(roots[0])} and {printable(roots[1])}",
            path=source.path,
            where="zip directory",
        )
    if not roots:
        raise _other_archive(source, records)
    if f"{roots[0]}constants.pkl" in records:
        raise UnsupportedCheckpoint(
            "is a TorchScript archive, which is not read yet",
            path=source.path,
            hint="save its state dict: torch.save(torch.jit.load(PATH, 'cpu').state_dict(), OUT)",
        )
    return roots[0]


def _other_archive(source: Source, records: Mapping[str, Record]) -> UnsupportedCheckpoint:
    what = "a zip archive without a data.pkl, so not one that torch.save wrote"
    if any(name.endswith("model.json") for name in records):
        what = "a TorchScript archive of before torch 1.4, which is not read yet"
    return UnsupportedCheckpoint(f"is {what}", path=source.path)


def _notes(records: Mapping[str, Record], root: str, storages: _Storages) -> Iterable[str]:
    known = {f"{root}{name}" for name in ("data.pkl", *_OPTIONAL)}
    others = [name for name in records if name not in known and name not in storages.used]
    if others:
        yield f"{len(others)} records belong to no tensor and are left out, e.g. {printable(others[0])}"
    if any(record.size and record.crc32 is None for record in records.values()):
        yield "the archive has no checksums (CRC-32 fields are 0), so damage cannot be noticed"


class _Storages:
    """Finds the storages of one archive by key, each checked against its record."""

    def __init__(self, source: Source, records: Mapping[str, Record], root: str) -> None:
        self._source = source
        self._records = records
        self._prefix = f"{root}data/"
        self._big_endian = self._is_big_endian(root)
        self._check_version(root)
        self.used: set[str] = set()
        self.inflated: list[Source] = []
        self._spool = Spool()

    def __call__(self, key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
        name = self._prefix + key
        record = self._records.get(name)
        if record is None:
            raise MalformedCheckpoint("the pickle names a storage that the archive does not hold", where=name)
        if record.size != nbytes:
            raise MalformedCheckpoint(f"has {record.size} bytes where the pickle says {nbytes}", where=name)
        self.used.add(name)
        if not record.deflated:
            fields = (self._source, record.offset, nbytes, location, name, dtype, record.crc32, self._big_endian, None)
            return made(Storage, fields)
        source, offset = archives.record_source(self._source, record, self._spool)
        self.inflated.append(source)
        return Storage(source, offset, nbytes, location, name, dtype, None, self._big_endian)

    def _small(self, name: str) -> bytes | None:
        record = self._records.get(name)
        return None if record is None else archives.read_record(self._source, record, LIMITS.small_record_bytes)

    def _is_big_endian(self, root: str) -> bool:
        order = self._small(f"{root}byteorder")
        if order not in (None, b"little", b"big"):
            raise MalformedCheckpoint(f"names the byte order {order!r}", path=self._source.path, where=f"{root}byteorder")
        return order == b"big"

    def _check_version(self, root: str) -> None:
        version = self._small(f"{root}version")
        if version is not None and not version.strip().isdigit():
            raise MalformedCheckpoint(f"is no number: {version[:20]!r}", path=self._source.path, where=f"{root}version")


# ------------------------------------------------------------------------------------------------- archives of checkpoints

_MOST_MEMBERS = 1000  # of an archive that is looked into for checkpoints


def _open_members(source: Source, records: Mapping[str, Record], opener: Callable[[Source], Checkpoint]) -> Checkpoint | None:
    """An archive of files some of which are checkpoints: each under its name, the others left out; None for any other one.

    Stored members are read in place; deflated ones are inflated, for a directory cannot be read otherwise.
    """
    if len(records) > _MOST_MEMBERS or any(name.endswith(("/data.pkl", "model.json")) for name in records):
        return None
    _refuse_bombs(source, records)
    spool = Spool()
    found: dict[str, Checkpoint] = {}
    inners = {name: _member_source(source, record, spool) for name, record in records.items()}
    try:
        for name, inner in inners.items():
            if (member := _open_member(name, inner, opener)) is not None:
                found[name] = member
    finally:
        if not found:
            spool.close()
    if not found:
        return None
    notes = [f"{name}: {note}" for name, member in found.items() for note in member.notes]
    if left := [name for name in records if name not in found]:
        notes.append(f"{len(left)} members are no checkpoints and are left out: {printable(', '.join(left))}")
    return Checkpoint(
        path=source.path,
        format="zip of checkpoints",
        root=Dict([(name, member.root) for name, member in found.items()]),
        nbytes=source.size,
        notes=tuple(notes),
        sources=(source, *inners.values(), *(inner for member in found.values() for inner in member.sources)),
    )


def _member_source(source: Source, record: Record, spool: Spool) -> Source:
    """The member as a source of its own; a deflated one is inflated when it is first read."""
    if not record.deflated:
        return RangeSource(source, record.offset, record.size)
    return archives.record_source(source, record, spool)[0]


def _open_member(name: str, inner: Source, opener: Callable[[Source], Checkpoint]) -> Checkpoint | None:
    """The checkpoint that a member is; None when it is something else."""
    try:
        return opener(inner)
    except CheckpointError as error:
        if isinstance(error, UnsupportedCheckpoint) and error.where is None:
            return None
        error.where = ": ".join([name, *([error.where] if error.where else [])])
        raise


def _refuse_bombs(source: Source, records: Mapping[str, Record]) -> None:
    inflated = sum(record.size for record in records.values() if record.deflated)
    if inflated > LIMITS.inflated_free and inflated > source.size * LIMITS.inflated_ratio:
        raise LimitExceeded(
            f"its members claim to inflate to {inflated} bytes, more than {LIMITS.inflated_ratio}-fold",
            path=source.path,
            hint="a decompression bomb; unpack it and name the file inside if it is real",
        )


# ------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A tree to write: `root` seen through `overlay`, and all the tensors and bare storages that are in it."""

    root: Node
    overlay: Overlay
    tensors: Sequence[TensorRef]
    storages: Sequence[Storage]


def lay_out_torch_zip(tree: Tree, cast: CastRule, retag: Callable[[str], str]) -> Layout:
    """The output file for a tree: its pickle, and a record for each storage that its tensors need.

    `cast` gives the element type in which a type is written; `retag` the location tag of a storage. Records are numbered in
    the order in which the pickle names them, which torch's reader relies on.
    """
    placements = compact(tree.tensors, tree.storages, cast)
    numbers: dict[int, int] = {}
    ordered: list[NewStorage] = []

    tags: dict[str, str] = {}

    def stored_as(node: TensorRef | Storage) -> tuple[str, StoredAs]:
        new, dtype, offset, stride, resolved = placements[id(node)]
        _, _, storage_dtype, location, nbytes = new
        if (number := numbers.get(id(new))) is None:
            number = numbers[id(new)] = len(ordered)
            ordered.append(new)
        if (tag := tags.get(location)) is None:
            tag = tags[location] = retag(location)
        return str(number), made(StoredAs, (tag, storage_dtype, nbytes, dtype, offset, stride, resolved))

    pickle = write_pickle(tree.root, TorchLeaves(stored_as), tree.overlay)
    return _records([
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % archives.ALIGNMENT),
        ("byteorder", b"little"),
        *((f"data/{number}", new) for number, new in enumerate(ordered)),
        ("version", b"3\n"),
        (".data/serialization_id", _serialization_id(pickle)),
    ])  # fmt: skip


def _serialization_id(pickle: bytes) -> bytes:
    """Forty digits that are the same for the same tree, as torch's are (a name for logs, not a checksum)."""
    return b"%030d%010d" % (len(pickle), crc32(pickle))


def _records(contents: Iterable[tuple[str, bytes | NewStorage]]) -> Layout:
    items: list[WriteItem] = []
    slots: list[Slot] = []
    end = 0
    values: TensorRef | bytes
    for name, content in contents:
        if isinstance(content, NewStorage):
            values, dtype, nbytes = content.values, content.dtype, content.nbytes
        else:
            values, dtype, nbytes = content, UINT8, len(content)
        slot, lead, offset, end = archives.lay_out(b"%s/%s" % (_ROOT, name.encode()), end, nbytes)
        slots.append(slot)
        items.append(made(WriteItem, (name, lead, offset, nbytes, values, dtype)))
    return Layout(
        tuple(items),
        end + archives.ending_size(slots),
        lambda index, crc: archives.descriptor(slots[index], crc),
        lambda crcs: archives.ending(slots, crcs, end),
    )
