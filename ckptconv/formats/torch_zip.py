"""The zip container of `torch.save` (torch ≥ 1.6): read it, and lay it out for writing.

Records under one root folder of any name: ``data.pkl`` (the tree), ``data/N`` (a storage each),
and, where the writer was new enough, ``byteorder``, ``version``, ``.format_version``,
``.storage_alignment``, ``.data/serialization_id``. Source: torch/serialization.py and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckptconv.formats import zip_archive
from ckptconv.formats.layout import Layout, WriteItem
from ckptconv.formats.zip_archive import Slot
from ckptconv.formats.zip_records import ArchiveStorages, Records, checksum_notes, read_tree
from ckptconv.io.crc import crc32
from ckptconv.io.source import Source
from ckptconv.objects.torch_write import StoredAs, TorchLeaves
from ckptconv.pickles.nodes import Node
from ckptconv.pickles.writer import write_pickle
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.records import made
from ckptconv.tensors.compaction import CastRule, NewStorage, compact
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tree.checkpoint import PICKLE_HEAD, Checkpoint, FileFacts
from ckptconv.tree.containers import TORCH_LOAD, Container
from ckptconv.tree.walk import Overlay

CONTAINER = Container(
    "torch zip",
    TORCH_LOAD,
    weights_only=True,
    is_torch=True,
    has_version=True,
    has_checksums=True,
    names_storages=True,
)
ROOT = "archive"
"""The folder of the records in what is written."""
_OPTIONAL = (
    "version",
    "byteorder",
    ".format_version",
    ".storage_alignment",
    ".data/serialization_id",
)


def open_torch_zip(
    source: Source, records: Records, _: Callable[[Source], Checkpoint]
) -> Checkpoint:
    """Open the zip checkpoint with these records; reads its pickle, no payload.

    Raises `MalformedCheckpoint` when directory, pickle and storages contradict each other,
    `UnsupportedCheckpoint` when the archive is something else than what `torch.save` writes.
    """
    root = _root_folder(source, records)
    storages = ArchiveStorages(source, records, root)
    tree, pickle = read_tree(source, records[f"{root}data.pkl"], storages)
    others = _others(records, root, storages)
    return Checkpoint(
        path=source.path,
        container=CONTAINER,
        root=tree,
        nbytes=source.size,
        notes=tuple(_notes(records, others)),
        sources=(source, *storages.inflated),
        facts=FileFacts(
            head=pickle[:PICKLE_HEAD],
            dead=max(0, source.size - _alive(records, others)),
            strays=tuple(name for name in others if not name.startswith(root)),
            version=storages.version,
        ),
    )


def _root_folder(source: Source, records: Records) -> str:
    """The folder that holds data.pkl, with its slash."""
    roots = [
        name[: -len("data.pkl")]
        for name in records
        if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if len(roots) > 1:
        raise MalformedCheckpoint(
            f"holds two checkpoints, {printable(roots[0])} and {printable(roots[1])}",
            path=source.path,
            where="zip directory",
        )
    if not roots:
        raise _other_archive(source, records)
    return roots[0]


def _other_archive(source: Source, records: Records) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        "is a zip archive without a data.pkl, so torch.save did not write it", path=source.path
    )


def _others(records: Records, root: str, storages: ArchiveStorages) -> list[str]:
    """The records that are none of torch's own and that the pickle does not name."""
    known = {f"{root}{name}" for name in ("data.pkl", *_OPTIONAL)}
    return [name for name in records if name not in known and name not in storages.used]


def _alive(records: Records, others: Sequence[str]) -> int:
    """An upper bound of the bytes that all records but `others` need, in what torch writes."""
    stored = sum([record.stored for record in records.values()])
    stored -= sum([records[name].stored for name in others])
    return stored + _AROUND * (len(records) - len(others))


_AROUND = 400  # bytes at most of the headers, the padding and the directory's entry of a record


def _notes(records: Records, others: Sequence[str]) -> Iterable[str]:
    if others:
        yield (
            f"{len(others)} records do not belong to a tensor and are left out, e.g. "
            f"{printable(others[0])}"
        )
    yield from checksum_notes(records)


# ------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A tree to write: `root` seen through `overlay`, and all the tensors and bare storages that
    are in it.
    """

    root: Node
    overlay: Overlay
    tensors: Sequence[TensorRef]
    storages: Sequence[Storage]


def lay_out_torch_zip(tree: Tree, cast: CastRule, retag: Callable[[str], str]) -> Layout:
    """The output file for a tree: its pickle, and a record for each storage that its tensors need.

    `cast` gives the element type in which a type is written; `retag` the location tag of a storage.
    Records are numbered in the order in which the pickle names them, which torch's reader relies
    on.
    """
    placements = compact(tree.tensors, tree.storages, cast)
    numbers: dict[int, int] = {}
    ordered: list[NewStorage] = []

    tags: dict[str, str] = {}

    def stored_as(node: TensorRef | Storage) -> tuple[str, StoredAs]:
        new, dtype, offset, stride, resolved = placements[id(node)]
        _, _, storage_dtype, location, nbytes = new
        count = len(ordered)
        if (number := numbers.setdefault(id(new), count)) == count:
            ordered.append(new)
        if (tag := tags.get(location)) is None:
            tag = tags[location] = retag(location)
        return str(number), made(
            StoredAs, (tag, storage_dtype, nbytes, dtype, offset, stride, resolved)
        )

    pickle = write_pickle(tree.root, TorchLeaves(stored_as), tree.overlay)
    return _records([
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % zip_archive.ALIGNMENT),
        ("byteorder", b"little"),
        *((f"data/{number}", new) for number, new in enumerate(ordered)),
        ("version", b"3\n"),
        (".data/serialization_id", _serialization_id(pickle)),
    ])  # fmt: skip


def _serialization_id(pickle: bytes) -> bytes:
    """Forty digits that are the same for the same tree, as torch's are (a name for logs, not a
    checksum).
    """
    return b"%030d%010d" % (len(pickle), crc32(pickle))


def _records(contents: Iterable[tuple[str, bytes | NewStorage]]) -> Layout:
    items: list[WriteItem] = []
    slots: list[Slot] = []
    end = 0
    values: TensorRef | bytes
    folder, lay_out = f"{ROOT}/".encode(), zip_archive.lay_out
    for name, content in contents:
        if isinstance(content, bytes):
            values, dtype, nbytes = content, UINT8, len(content)
        else:
            values, dtype, _, _, nbytes = content
        slot, lead, offset, end = lay_out(folder + name.encode(), end, nbytes)
        slots.append(slot)
        items.append(made(WriteItem, (name, lead, offset, nbytes, values, dtype)))
    return Layout(
        tuple(items),
        end + zip_archive.ending_size(slots),
        lambda index, crc: zip_archive.descriptor(slots[index], crc),
        lambda crcs: zip_archive.ending(slots, crcs, end),
    )
