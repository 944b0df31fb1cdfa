"""Chunks that one writer made alike: of the many items of a DCP folder, one of a kind is opened,
and the others are held against its bytes.

Two archives that torch.save made of tensors of one dtype and shape differ in the values, in the
CRC-32 of these, and in an id that is derived from it. What is told of an archive without reading
its values depends on all its other bytes. So an item with the same other bytes is the same tensor
with another checksum. An item that differs anywhere else is opened by itself.

One look at the values is put off. Readers look for the end record of an archive from its end
backwards, past what may be a comment of 64 KB, and values there may look like a second one. They
are looked through when values of the item are first read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from struct import Struct

from ckptconv.formats.folders.dcp_metadata import Item, with_key
from ckptconv.formats.zip_archive import Record, open_archive
from ckptconv.formats.zip_directory import MOST_BEHIND, central_places, check_end, has_one_end
from ckptconv.io.guarded import GuardedSource
from ckptconv.io.source import SMALL, RangeSource, Source
from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import CheckpointError
from ckptconv.support.records import NamedTuple, made
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Piece, Shape, Storage, TensorRef

_RECORDS = ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", "data/0")
# The records of a tensor; of the last, nothing is read
_ID = ".data/serialization_id"
_DESCRIPTOR = b"PK\7\x08"  # a data descriptor may begin with it, or with its CRC
_CRC = 4  # bytes
_CRC_IN_LOCAL, _CRC_IN_CENTRAL, _CRC_IN_DESCRIPTOR = 14, 16, 4
SHORT = SMALL + MOST_BEHIND
"""Bytes of an item that is read whole."""
_MOST_KINDS = 1000


class Chunk(NamedTuple):
    """What `.metadata` tells of an item: a chunk of the tensor `key` that begins at `start`."""

    key: str
    dtype: DType
    start: Shape
    shape: Shape


Wanted = tuple[Item, Chunk]


class _Kind(NamedTuple):
    """The bytes of an item around its values: `head` before them, and of the `behind` bytes behind
    them those that are `fixed`, as `runs` takes them out. The checksum is at `crc_at` there.
    """

    ref: TensorRef
    head: bytes
    behind: int
    runs: Struct
    fixed: tuple[bytes, ...]
    crc_at: int


class Alike(NamedTuple):
    """An item of a known kind: what its tensor is made of. The tensors are made in the order of the
    tree, in which all that follows walks through them: it takes a third less time where they do not
    lie all over the memory.
    """

    kind: _Kind
    source: Source
    crc: int | None

    def tensor(self, item: Item) -> TensorRef:
        """The tensor that the item holds."""
        kind, source, crc = self
        dtype, shape, stride, pieces, requires_grad, conj, neg = kind.ref
        storage, offset, inner_shape, inner_stride, start = pieces[0]
        _, _, nbytes, location, name, typed, _, big_endian, _ = storage
        place = item.offset + len(kind.head)
        fields = (source, place, nbytes, location, name, typed, crc, big_endian, None)
        piece = (made(Storage, fields), offset, inner_shape, inner_stride, start)
        parts = (made(Piece, piece),)
        return made(TensorRef, (dtype, shape, stride, parts, requires_grad, conj, neg))


# What `.metadata` tells of items of one kind: their length, and type and shape of the chunk
_Told = tuple[int, DType, Shape]


class Kinds:
    """The kinds of items of one folder, as they are met."""

    def __init__(self) -> None:
        self._kinds: dict[_Told, list[_Kind]] = {}
        self._ends: dict[_Told, tuple[int, int]] = {}
        self._count = 0

    def ends(self, item: Item, chunk: Chunk | None) -> tuple[int, int] | None:
        """The bytes at both ends of an item by which it may be known; None where no kind is."""
        return None if chunk is None else self._ends.get((item.length, chunk.dtype, chunk.shape))

    def alike(
        self, wanted: Wanted, ends: Sequence[tuple[int, bytes]], guarded: GuardedSource
    ) -> Alike | None:
        """What an item holds, by the bytes at its `ends`, with their places; None where no kind is
        known that it is of. Its values are read through `guarded`.
        """
        item, chunk = wanted
        told = item.length, chunk.dtype, chunk.shape
        head, tail = ends[0][1], ends[-1][1]
        for kind in self._kinds.get(told, ()):
            if _is_of(kind, head, tail):
                break
        else:
            return None
        is_whole = head is tail
        if is_whole and not has_one_end(tail):
            return None
        at = len(tail) - kind.behind + kind.crc_at
        crc = int.from_bytes(tail[at : at + _CRC], "little") or None
        return made(Alike, (kind, guarded.inner if is_whole else guarded, crc))

    def learn(self, wanted: Wanted, file: Source, node: Node) -> None:
        """Note the kind of an item of `file` that was opened and holds `node`."""
        if self._count >= _MOST_KINDS:
            return
        self._count += 1
        item, chunk = wanted
        with contextlib.suppress(CheckpointError):
            kind = _kind_of(RangeSource(file, item.offset, item.length), node)
            if kind:
                told = item.length, chunk.dtype, chunk.shape
                before, behind = self._ends.get(told, (0, 0))
                self._ends[told] = max(before, len(kind.head)), max(behind, kind.behind)
                self._kinds.setdefault(told, []).append(kind)


def with_ends_checked(file: Source, wanted: Sequence[Wanted]) -> GuardedSource:
    """`file`, of which long items are seen to have one end only before they are read."""
    items = [one for one in wanted if SHORT < one[0].length <= file.size - one[0].offset]
    items.sort(key=lambda one: one[0].offset)

    def check(first: int, stop: int) -> Mapping[int, int]:
        ends = (item.offset + item.length for item, _ in items[first:stop])
        file.foresee([(end - MOST_BEHIND, MOST_BEHIND) for end in ends])
        for item, chunk in items[first:stop]:
            try:
                check_end(RangeSource(file, item.offset, item.length))
            except CheckpointError as error:
                raise with_key(error, chunk.key) from None
        return {}

    return GuardedSource(file, [item.offset for item, _ in items], check)


def _is_of(kind: _Kind, head: bytes, tail: bytes) -> bool:
    begin = len(tail) - kind.behind
    if begin < 0 or not head.startswith(kind.head):
        return False
    return kind.runs.unpack_from(tail, begin) == kind.fixed


def _kind_of(source: RangeSource, node: Node) -> _Kind | None:
    """The kind of an item that holds a tensor; None where others cannot be known by it."""
    if type(node) is not TensorRef or not node.is_view:
        return None
    guarded, records = open_archive(source)
    storage = node.storage
    values, identity = _named(records, storage.name)
    if values is None or storage.offset != values.offset or storage.nbytes != values.size:
        return None
    guarded.check_all()
    begin, end = values.offset, values.offset + values.size
    behind = source.size - end
    places = ((one.deflated, guarded.place(one.offset) == one.offset) for one in records.values())
    is_plain = set(places) == {(False, True)}
    if not (is_plain and values.size and begin <= SMALL and behind <= SMALL):
        return None
    head, tail = source.read(0, begin), source.read(end, behind)
    varying = [record for record in (values, identity) if record is not None]
    free = _free(head, tail, end, source, varying)
    if free is None:
        return None
    runs = _runs_between(sorted(free), behind)
    return _Kind(node, head, behind, runs, runs.unpack(tail), crc_at=free[-1][0])


def _named(records: Mapping[str, Record], name: str) -> tuple[Record | None, Record | None]:
    """The record of the values, and that of the id, of an archive with the records of torch."""
    root = name.partition("/")[0]
    usual = {f"{root}/{record}" for record in (*_RECORDS, _ID)}
    if name != f"{root}/data/0" or not usual.issuperset(records):
        return None, None
    return records.get(name), records.get(f"{root}/{_ID}")


def _free(
    head: bytes, tail: bytes, end: int, source: Source, records: Sequence[Record]
) -> list[tuple[int, int]] | None:
    """The runs of `tail` (which begins at byte `end`) that may differ: of two records the checksums
    and of the second the contents. The last run is the checksum of the first in the directory.

    None where a checksum stands before the payload too, or is none.
    """
    places = central_places(source)
    found: list[tuple[int, int]] = []
    for number, record in reversed([*enumerate(records)]):
        local = record.header + _CRC_IN_LOCAL
        raw = head[local : local + _CRC] if number == 0 else tail[local - end :][:_CRC]
        if raw != bytes(_CRC) or not record.crc32 or (number and record.header < end):
            return None
        after = record.offset + record.stored - end
        if number:
            found.append((after - record.stored, after))
        if tail[after : after + len(_DESCRIPTOR)] == _DESCRIPTOR:
            found.append((after + _CRC_IN_DESCRIPTOR, after + _CRC_IN_DESCRIPTOR + _CRC))
        at = places[record.name] + _CRC_IN_CENTRAL - end
        found.append((at, at + _CRC))
    return found


def _runs_between(free: Sequence[tuple[int, int]], nbytes: int) -> Struct:
    """What takes the runs of bytes out of so many between which the `free` ones lie."""
    pattern, at = "", 0
    for start, stop in (*free, (nbytes, nbytes)):
        pattern += f"{max(0, start - at)}s{max(0, stop - max(start, at))}x"
        at = max(at, stop)
    return Struct(pattern)
