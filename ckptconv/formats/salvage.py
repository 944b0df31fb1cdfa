"""Damaged files of one checkpoint, opened as far as they can be: the tree, and which storages of it
are there as they were written.

Nothing is guessed. Whatever says what the tensors are (the pickle, the header) has to be whole, or
there are only bytes that nobody can name.

- A torch zip archive without its directory, which stood at its end: the records follow one another
  without a gap, each behind a local header. torch writes a size and a CRC-32 behind each payload,
  and the pickle says the sizes of storages; both have to agree with the bytes. Where a header is
  not where it must be, nothing behind it is taken: a file that lies in a tensor has headers too.
- A torch zip archive with its directory: each storage has to have the CRC-32 that stands there.
- A legacy file: a storage has its element count before it. There are no checksums, so whole means
  that all bytes are there, and that the count behind them is right too, or the file ends.
- A safetensors file whose data end early: a tensor is whole if all its bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import NoReturn

from ckptconv.formats import safetensors, torch_legacy, torch_zip
from ckptconv.formats.containers import (
    HEAD,
    closed_on_error,
    is_safetensors,
    is_torch_legacy,
    is_zip,
)
from ckptconv.formats.folders.alone import part_of
from ckptconv.formats.registry import open_as, open_certain
from ckptconv.formats.zip_archive import Record, open_archive
from ckptconv.formats.zip_directory import (
    DEFLATED,
    DESCRIPTOR,
    DESCRIPTOR64,
    ENCRYPTED,
    LOCAL,
    MAX32,
    STORED,
    zip64_numbers,
)
from ckptconv.io.crc import crc32
from ckptconv.io.guarded import check_places
from ckptconv.io.location import Location
from ckptconv.io.source import Source, WrappedSource
from ckptconv.objects.torch_read import named_storages, read_torch_pickle
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.pickles.reader import read_pickle
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, errors_at, printable
from ckptconv.support.limits import in_force, refuse_beyond
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.checksums import check_storage
from ckptconv.tensors.dtypes import UINT8, DType
from ckptconv.tensors.refs import Storage
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.dropping import IsWhole


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A checkpoint as far as it could be opened, and which of its storages are whole. `damage` is
    what is wrong with the file; None where it opens as any other.
    """

    checkpoint: Checkpoint
    is_whole: IsWhole
    damage: str | None = None


def salvage(place: Location) -> Salvaged:
    """Open a checkpoint of one file, damaged or not; the caller closes it. Raises the error that
    opening it raises where nothing of it can be saved, with the reason.
    """
    if place.is_folder():
        hint = "name one of its files"
        raise UnsupportedCheckpoint("is a folder, and files are recovered", path=place, hint=hint)
    try:
        return _as_it_is(place)
    except MalformedCheckpoint as error:
        with closing(place.open()) as source:
            head = source.read(0, min(HEAD, source.size))
        for is_one, open_damaged, is_whole in _KINDS:
            if is_one(head):
                told = f"{printable(error.where)}: {error.what}" if error.where else error.what
                checkpoint = open_as(place, open_damaged)
                with closed_on_error(checkpoint):
                    _refuse_delta(place, checkpoint)
                return Salvaged(checkpoint, is_whole, told)
        raise


def _refuse_delta(place: Location, checkpoint: Checkpoint) -> None:
    """Refuse a file of a delta, whose tensors are not weights. Other parts are saved as they are:
    each of their tensors is one.
    """
    part = part_of(place, checkpoint)
    if part is not None and part.is_delta:
        raise UnsupportedCheckpoint(part.what, path=place, hint="fetch the delta again")


def _as_it_is(place: Location) -> Salvaged:
    """A checkpoint that can be opened, whose storages may be damaged."""
    checkpoint = open_certain(place)
    with closed_on_error(checkpoint):
        check_places(checkpoint.sources)
    return Salvaged(checkpoint, _Checked())


class _Checked:
    """Whether a storage can be read, and has the CRC-32 that is declared; each is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Storage, bool]] = {}

    def __call__(self, storage: Storage) -> bool:
        whole = storage.whole
        if id(whole) not in self._known:
            self._known[id(whole)] = whole, _is_readable(whole)
        return self._known[id(whole)][1]


def _is_readable(storage: Storage) -> bool:
    try:
        if storage.crc32 is not None:
            check_storage(storage)
        elif storage.source.is_inflated:  # it is held against its checksum when it is read
            for _ in storage.source.stream([(storage.offset, storage.nbytes)]):
                pass
    except MalformedCheckpoint:
        return False
    return True


class _Lost(WrappedSource):
    """Stands for the bytes of a storage that are lost: nobody is given any."""

    def read_into(self, offset: int, view: memoryview) -> None:
        self._refuse()

    def read(self, offset: int, nbytes: int) -> bytes:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise MalformedCheckpoint("holds bytes that are lost", path=self.path)

    def close(self) -> None:
        """The file is closed by whoever opened it."""


def _is_there(storage: Storage) -> bool:
    return not isinstance(storage.source, _Lost)


# ----------------------------------------------------------------------------------- torch zip


def _open_damaged_zip(source: Source) -> Checkpoint:
    records, seen = _records(source)
    roots = [name[: -len("data.pkl")] for name in sorted(seen) if _is_tree(name)]
    root = next(iter(roots), "")
    if len(roots) > 1:
        what = f"holds two checkpoints, {printable(roots[0])} and {printable(roots[1])}"
        raise MalformedCheckpoint(what, path=source.path)
    if f"{root}data.pkl" not in records:
        what = "its data.pkl is lost, which says the names, types and shapes of its tensors"
        hint = "the bytes that are left have no names; recover another copy"
        raise MalformedCheckpoint(what, path=source.path, hint=hint)
    if f"{root}constants.pkl" in records:
        what = "is a damaged TorchScript archive, whose code is needed to read it"
        raise UnsupportedCheckpoint(what, path=source.path, hint="recover another copy")
    if f"{root}byteorder" in seen - records.keys():
        what = "its byteorder is lost, which says how numbers are stored"
        raise MalformedCheckpoint(what, path=source.path, hint="recover another copy")
    payload = records[f"{root}data.pkl"]
    refuse_beyond("pickle_bytes", payload.nbytes, "has too long a pickle", path=source.path)
    pickle = source.read(payload.offset, payload.nbytes)
    storages = _ZipStorages(source, records, root)
    with errors_at(path=source.path, where="data.pkl"):
        tree = read_torch_pickle(pickle, storages)
    return Checkpoint(source.path, torch_zip.CONTAINER, tree, source.size, sources=(source,))


def _is_tree(name: str) -> bool:
    return name.count("/") == 1 and name.endswith("/data.pkl")


class _Payload(NamedTuple):
    """The bytes of a record that have the size and the CRC-32 that the archive says."""

    offset: int
    nbytes: int
    crc32: int


class _ZipStorages:
    """The storages that a pickle names; of those not among the `records` the bytes are lost."""

    def __init__(self, source: Source, records: Mapping[str, _Payload], root: str) -> None:
        self._source, self._records, self._root = source, records, root
        self._lost = _Lost(source)
        self._big_endian = _byte_order(source, records.get(f"{root}byteorder")) == b"big"

    def __call__(self, key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
        name = f"{self._root}data/{key}"
        found = self._records.get(name)
        if found is None or found.nbytes != nbytes:
            return Storage(self._lost, 0, nbytes, location, name, dtype)
        fields = (found.offset, nbytes, location, name, dtype, found.crc32, self._big_endian)
        return Storage(self._source, *fields)


def _byte_order(source: Source, record: _Payload | None) -> bytes:
    found = b"little"
    if record is not None:
        found = source.read(record.offset, min(record.nbytes, 16))
    if found not in (b"little", b"big"):
        raise MalformedCheckpoint(f"has the unknown byte order {found!r}", path=source.path)
    return found


def _records(source: Source) -> tuple[dict[str, _Payload], set[str]]:
    """The whole records of an archive, by name, with or without its directory; all names met."""
    try:
        _, told = open_archive(source)
        met = {record.name: _by_directory(source, record) for record in told.values()}
    except MalformedCheckpoint:
        met = dict(_walked(source))
    whole = {name: payload for name, payload in met.items() if payload is not None}
    return whole, {*met}


def _by_directory(source: Source, record: Record) -> _Payload | None:
    """The payload of a record with the CRC-32 of the directory, where the local header says it is,
    or where it must be by the next one.
    """
    if record.deflated:
        return None
    lead = source.read(record.header, LOCAL.size)
    name_size, extra_size = LOCAL.unpack(lead)[-2:]
    expected = record.crc32 if record.size else 0
    for offset in {record.offset, record.header + LOCAL.size + name_size + extra_size}:
        is_inside = offset + record.size <= source.size
        if is_inside and _crc_of(source, offset, record.size) == expected:
            return _Payload(offset, record.size, expected or 0)
    return None


def _crc_of(source: Source, offset: int, nbytes: int) -> int:
    crc = 0
    for view in source.stream([(offset, nbytes)]):
        crc = crc32(view, crc)
    return crc


class _LocalHeader(NamedTuple):
    """A local header, and where the payload begins. Where it `has_descriptor`, size and CRC-32
    stand behind the payload, and may be 0 here.
    """

    name: str
    offset: int
    nbytes: int
    crc32: int
    has_descriptor: bool
    is_wide: bool
    is_deflated: bool


def _walked(source: Source) -> Iterator[tuple[str, _Payload | None]]:
    """The records of an archive without a directory, in their order; None for what is not whole."""
    at, sizes = 0, dict[str, int]()
    met: set[str] = set()
    while (header := _header(source, at)) is not None:
        refuse_beyond("archive_records", len(met), f"has {len(met)} records", path=source.path)
        if header.name.lower() in met:  # another file begins, or somebody forged one
            return
        met.add(header.name.lower())
        end, payload = _payload(source, header, sizes)
        yield header.name, payload
        if payload is not None and _is_tree(header.name):
            sizes = _named_sizes(source, header.name, payload)
        if end is None:
            return
        at = end


def _named_sizes(source: Source, name: str, payload: _Payload) -> dict[str, int]:
    """The size of the record of each storage that a pickle names."""
    folder = name.removesuffix("data.pkl")
    with errors_at(path=source.path, where="data.pkl"):
        named = named_storages(source.read(payload.offset, payload.nbytes))
    return {f"{folder}data/{key}": nbytes for key, (nbytes, _) in named.items()}


def _header(source: Source, at: int) -> _LocalHeader | None:
    """The local header at a place; None where there is none, or it is cut off."""
    if at + LOCAL.size > source.size:
        return None
    fields = LOCAL.unpack(source.read(at, LOCAL.size))
    signature, _, flags, method, _, _, crc, stored, plain, name_size, extra_size = fields
    offset = at + LOCAL.size + name_size + extra_size
    if signature != b"PK\3\4" or method not in (STORED, DEFLATED) or offset > source.size:
        return None
    if flags & ENCRYPTED:
        return None
    raw = source.read(at + LOCAL.size, name_size + extra_size)
    try:
        name = raw[:name_size].decode()
    except UnicodeDecodeError:
        return None
    if not name.isprintable() or "\\" in name or name.startswith("/") or ".." in name.split("/"):
        return None
    wide = zip64_numbers(raw[name_size:])
    if wide and MAX32 in (stored, plain):
        stored = wide[0]
    is_described, is_deflated = bool(flags & 8), method == DEFLATED
    return _LocalHeader(name, offset, stored, crc, is_described, wide is not None, is_deflated)


def _payload(
    source: Source, header: _LocalHeader, sizes: Mapping[str, int]
) -> tuple[int | None, _Payload | None]:
    """Where the record behind this one begins (None: nobody knows), and the payload, if whole."""
    nbytes: int | None = header.nbytes
    if header.has_descriptor and not nbytes:
        nbytes = sizes.get(header.name)
        if nbytes is None and not header.is_deflated:
            nbytes = _described_size(source, header)
    if nbytes is None or header.offset + nbytes > source.size:
        return None, None
    end, crc = header.offset + nbytes, header.crc32
    if header.has_descriptor:
        described = _descriptor(source, header, nbytes)
        if described is None:
            return None, None
        end, crc = described
    if header.is_deflated or _crc_of(source, header.offset, nbytes) != crc:
        return end, None
    return end, _Payload(header.offset, nbytes, crc)


def _descriptor(source: Source, header: _LocalHeader, nbytes: int) -> tuple[int, int] | None:
    """What is behind a payload of so many bytes: where its data descriptor ends, and the CRC-32 in
    there. None where there is none that says this size.
    """
    at = header.offset + nbytes
    if not nbytes:  # torch writes none behind an empty one
        return at, 0
    # torch also writes the wide one for a record that begins beyond 4 GiB
    kinds = (DESCRIPTOR64, DESCRIPTOR) if header.is_wide else (DESCRIPTOR,)
    for kind in kinds:
        if at + kind.size <= source.size:
            signature, crc, stored, plain = kind.unpack(source.read(at, kind.size))
            if signature == b"PK\7\x08" and stored == plain == nbytes:
                return at + kind.size, crc
    return None


def _described_size(source: Source, header: _LocalHeader) -> int | None:
    """The size of a payload that only its data descriptor says: one with just that distance and
    just that CRC-32 stands behind it. Storages are not looked for like this, so it is short.
    """
    limits = in_force()
    most = limits.pickle_bytes if _is_tree(header.name) else limits.small_record_bytes
    room = min(most + DESCRIPTOR64.size, source.size - header.offset)
    size, searched = 0, 1  # torch writes none behind an empty payload
    while size < room:
        size = min(room, 4 * size or _FIRST)  # what is held in memory is as long as what is found
        raw = source.read(header.offset, size)
        at = raw.find(b"PK\7\x08", searched)
        while at >= 0:
            described = _descriptor(source, header, at)
            if described is not None and crc32(raw[:at]) == described[1]:
                return at
            at = raw.find(b"PK\7\x08", at + 1)
        searched = max(1, size - 3)  # a signature may be cut in two
    return None


_FIRST = 1 << 16  # bytes in which the end of a record is looked for first


# -------------------------------------------------------------------------------- torch legacy


def _open_damaged_legacy(source: Source) -> Checkpoint:
    with errors_at(path=source.path, where="pickles"):
        (_, _, _, tree, keys), start = read_pickles(source, 0, 5)
        named = named_storages(tree)
        listed = torch_legacy.listed(read_pickle(keys))
        offsets = dict(_sound(source, named, listed, start))
        lost = _Lost(source)

        def storage_for(key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
            name = torch_legacy.storage_name(key)
            if key not in offsets:
                return Storage(lost, 0, nbytes, location, name, dtype)
            return Storage(source, offsets[key], nbytes, location, name, dtype)

        root = read_torch_pickle(tree, storage_for)
    container = torch_legacy.CONTAINER
    return Checkpoint(source.path, container, root, source.size, sources=(source,))


def _sound(
    source: Source, named: Mapping[str, tuple[int, DType | None]], keys: list[str], start: int
) -> Iterator[tuple[str, int]]:
    """The storages that are there by their keys, and where their bytes begin.

    Where a count is wrong, the bytes before it may be as wrong: that storage is not among them. A
    count of 0 says nothing, for a download that had reserved its place ends in zeros.
    """
    held: list[tuple[str, int]] = []
    at = start
    for key in keys:
        if key not in named:
            break
        nbytes, dtype = named[key]
        if at + 8 > source.size:
            break
        count = int.from_bytes(source.read(at, 8), "little", signed=True)
        if count != nbytes // (dtype or UINT8).itemsize:
            return
        if count:
            yield from held
            held = []
        at += 8 + nbytes
        if at > source.size:
            break
        held.append((key, at - nbytes))
    yield from held


# --------------------------------------------------------------------------------- safetensors


class _Longer(WrappedSource):
    """A file as long as its header says; bytes that are not there cannot be read."""

    def __init__(self, inner: Source, size: int) -> None:
        super().__init__(inner)
        self.size = size


def _is_in_file(storage: Storage) -> bool:
    source = storage.source
    return not isinstance(source, _Longer) or storage.offset + storage.nbytes <= source.inner.size


def _open_damaged_safetensors(source: Source) -> Checkpoint:
    header, start = safetensors.read_header(source)
    ends = [_end_of(entry) for name, entry in header.items() if name != safetensors.RESERVED]
    needed = start + max(ends, default=0)
    return safetensors.open_safetensors(_Longer(source, max(needed, source.size)))


def _end_of(entry: object) -> int:
    """Where the bytes of a tensor end; 0 for an entry that says it in no known way."""
    match entry:
        case {"data_offsets": [*_, int(end)]}:
            return end
    return 0


# By its first bytes, what opens a damaged file, and which of the storages are whole then
_KINDS: tuple[tuple[Callable[[bytes], bool], Callable[[Source], Checkpoint], IsWhole], ...] = (
    (is_zip, _open_damaged_zip, _is_there),
    (is_torch_legacy, _open_damaged_legacy, _is_there),
    (is_safetensors, _open_damaged_safetensors, _is_in_file),
)
