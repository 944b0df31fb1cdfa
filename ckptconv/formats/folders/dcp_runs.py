"""The opcodes of a `.metadata` that there are for every chunk, matched as runs and read at once.

Nearly all of a large `.metadata` are three kinds of objects, as CPython's pickle writes them in
protocol 4 and later: the `TensorStorageMetadata` of a key with its chunks, and the `MetadataIndex`
of an item with its `_StorageInfo`. A run has no name in it that is not fetched from the memo, and
what was fetched is looked at once. Whatever does not look so is read opcode by opcode.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ckptconv.pickles.memo import UNMADE, Memo
from ckptconv.pickles.nodes import Global, Node
from ckptconv.pickles.reader import Run
from ckptconv.support.limits import in_force
from ckptconv.support.records import made
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Shape

LARGEST = 1 << 60
"""No size or place is as large."""


class Item(NamedTuple):
    """Where an item lies: `length` bytes at `offset` of `relative_path`, after the `transforms`."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class TensorEntry(NamedTuple):
    """A tensor: its type, its shape and its chunks, each as its start and its shape."""

    dtype: DType
    shape: Shape
    chunks: tuple[tuple[Shape, Shape], ...]


class Indexed(NamedTuple):
    """What a `MetadataIndex` names: a key and, of a chunk, its start."""

    key: str
    start: Shape


_GET = rb"(h.|j....)"
_LONG = rb"\x8a(?:\x05.{5}|\x06.{6}|\x07.{7})"
_INT = rb"(K.|M..|J....|" + _LONG + rb")"
_ANY_INT = rb"(?:K.|M..|J....|" + _LONG + rb")"
_SIZE = (
    _GET + rb"(" + _ANY_INT + rb"\x85|" + _ANY_INT + rb"{2}\x86|" + _ANY_INT + rb"{3}\x87|"
    rb"\(" + _ANY_INT + rb"{4,}t)\x94\x85\x94R\x94"
)
_TEXT = rb"(?:(h.|j....)|\x8c(.)([\w./-]{1,255})\x94)"
_OBJECT = rb"\x81\x94}\x94\("
# behind the class and EMPTY_TUPLE; of a tensor up to its chunks
_TENSOR = re.compile(
    _OBJECT + _GET + _GET + rb"\)\x81\x94\(" + _GET + _GET + rb"[\x88\x89]" + _GET
    + rb"[\x88\x89]t\x94b" + _GET + _SIZE + _GET + rb"\]\x94(\(?)", re.DOTALL,
).match  # fmt: skip
_CHUNK = re.compile(_GET + rb"\)" + _OBJECT + _GET + _SIZE + _GET + _SIZE + rb"ub", re.DOTALL).match
_KEY = re.compile(rb"\x8c(.)([\w./-]{1,255})\x94" + _GET + rb"\)", re.DOTALL).match
_INDEX_AND_PLACE = re.compile(
    _OBJECT + _GET + _TEXT + _GET + rb"(?:N|" + _ANY_INT + rb")" + _GET + _SIZE + rb"ub"
    + _GET + rb"\)" + _OBJECT + _GET + _TEXT + _GET + _INT + _GET + _INT + rb"ub", re.DOTALL,
).match  # fmt: skip
_NEXT_INDEX = re.compile(_GET + rb"\)", re.DOTALL).match

_TORCH = "torch.distributed.checkpoint"
TENSOR = f"{_TORCH}.metadata.TensorStorageMetadata"
CHUNK = f"{_TORCH}.metadata.ChunkStorageMetadata"
INDEX = f"{_TORCH}.metadata.MetadataIndex"
PLACE = f"{_TORCH}.filesystem._StorageInfo"
_PROPERTIES = f"{_TORCH}.metadata.TensorProperties"
_SIZE_CLASS = "torch.Size"


def runs() -> dict[str, Run]:
    """What reads the runs of one stream, by the class that stands before them."""
    reader = _Runs()
    return {TENSOR: reader.tensors, INDEX: reader.items}


class _Runs:
    """Reads the runs of one stream; what it has seen to be the names that it needs is kept."""

    def __init__(self) -> None:
        self._named: set[tuple[bytes, ...]] = set()
        self._classes: dict[bytes, str] = {}
        self._dtypes: dict[tuple[bytes, ...], DType] = {}
        self._sizes: dict[bytes, Shape | None] = {}
        self._boxes: dict[Any, Any] = {}

    def tensors(self, stream: bytes, pos: int, end: int, memo: Memo) -> tuple[int, list[Node]]:
        """Entries of `state_dict_metadata`, from behind the class of the first one on."""
        values: list[Node] = []
        done, key = pos, ""
        while (found := self._tensor(stream, pos, end, memo)) is not None:
            done, entry, puts = found
            if values:
                values.append(key)
                memo.put_by_run((key,))
            values.append(entry)
            memo.put_by_run(puts)
            following = _KEY(stream, done, end)
            if following is None:
                break
            size, raw, cls = following.groups()
            if size[0] != len(raw) or not self._is(memo, cls, TENSOR):
                break
            key, pos = raw.decode(), following.end()
        return done, values

    def _tensor(
        self, stream: bytes, pos: int, end: int, memo: Memo
    ) -> tuple[int, TensorEntry, list[Node]] | None:
        """The entry whose opcodes are at `pos`: its end, itself, and what they put."""
        run = _TENSOR(stream, pos, end)
        if run is None:
            return None
        *names, raw_shape, chunks_name, opened = run.groups()
        gets = (*names, chunks_name)
        dtype, shape = self._dtypes.get(gets) or self._dtype(gets, memo), self._size(raw_shape)
        if dtype is None or shape is None:
            return None
        puts: list[Node] = [None, UNMADE, UNMADE, UNMADE, shape, UNMADE, shape, UNMADE]
        pos, chunks = run.end(), []
        while (chunk := _CHUNK(stream, pos, end)) is not None:
            cls, first, size_class, raw_start, second, size_class_too, raw_size = chunk.groups()
            gets = (cls, first, size_class, second, size_class_too)
            box = self._size(raw_start), self._size(raw_size)
            if None in box or not (gets in self._named or self._names_chunk(gets, memo)):
                return None
            chunks.append(self._boxes.setdefault(box, box))
            puts += (UNMADE, UNMADE, box[0], UNMADE, box[0], box[1], UNMADE, box[1])
            pos = chunk.end()
            if not opened:
                break
        if not chunks or not stream.startswith(b"eub" if opened else b"aub", pos, end):
            return None
        puts[0] = made(TensorEntry, (dtype, shape, tuple(chunks)))
        return pos + 3, puts[0], puts

    def _dtype(self, gets: tuple[bytes, ...], memo: Memo) -> DType | None:
        """The type that the properties of a tensor name, where all other names are as they are."""
        properties, cls, named, layout, order, size, size_class, chunks = gets
        dtype = _fetched(memo, named)
        if (
            not _are(memo, ((properties, "properties"), (size, "size"), (chunks, "chunks")))
            or not _is(memo, cls, _PROPERTIES)
            or not _is(memo, size_class, _SIZE_CLASS)
            or type(dtype) is not Global
            or dtype.module != "torch"
            or dtype.name not in BY_NAME
            or any(_fetched(memo, get) is UNMADE for get in (layout, order))
        ):
            return None
        return self._dtypes.setdefault(gets, BY_NAME[dtype.name])

    def _names_chunk(self, gets: tuple[bytes, ...], memo: Memo) -> bool:
        cls, offsets, size_class, sizes, size_class_too = gets
        if not (
            _is(memo, cls, CHUNK)
            and _are(memo, ((offsets, "offsets"), (sizes, "sizes")))
            and _is(memo, size_class, _SIZE_CLASS)
            and _is(memo, size_class_too, _SIZE_CLASS)
        ):
            return False
        self._named.add(gets)
        return True

    def items(self, stream: bytes, pos: int, end: int, memo: Memo) -> tuple[int, list[Node]]:
        """Pairs of `storage_data`, from behind the class of the first one's index on."""
        values: list[Node] = []
        done = pos
        while (run := _INDEX_AND_PLACE(stream, pos, end)) is not None:
            (fqn, got_key, key_size, raw_key, index, offset, size_class, raw_start, cls, path_name,
                got_path, path_size, raw_path, place_name, raw_place, length_name,
                raw_length) = run.groups()  # fmt: skip
            gets = (fqn, index, offset, size_class, cls, path_name, place_name, length_name)
            start, place, length = (
                self._size(raw_start),
                _integer(raw_place),
                _integer(raw_length),
            )
            key = _text(got_key, key_size, raw_key, memo)
            path = _text(got_path, path_size, raw_path, memo)
            if (
                start is None
                or key is None
                or path is None
                or not 0 <= place < LARGEST
                or not 0 <= length < LARGEST
                or not (gets in self._named or self._names_item(gets, memo))
            ):
                break
            named, item = made(Indexed, (key, start)), made(Item, (path, place, length, ()))
            values += (named, item)
            memo.put_by_run((named, UNMADE) if raw_key is None else (named, UNMADE, key))
            memo.put_by_run((start, UNMADE, start, item, UNMADE))
            if raw_path is not None:
                memo.put_by_run((path,))
            done = run.end()
            following = _NEXT_INDEX(stream, done, end)
            if following is None or not self._is(memo, following[1], INDEX):
                break
            pos = following.end()
        return done, values

    def _is(self, memo: Memo, get: bytes, path: str) -> bool:
        """Whether an opcode fetches the class of that name, which is kept."""
        if self._classes.get(get) == path:
            return True
        if is_it := _is(memo, get, path):
            self._classes[get] = path
        return is_it

    def _names_item(self, gets: tuple[bytes, ...], memo: Memo) -> bool:
        fqn, index, offset, size_class, cls, path, place, length = gets
        if not (
            _are(memo, ((fqn, "fqn"), (index, "index"), (offset, "offset"), (place, "offset")))
            and _are(memo, ((path, "relative_path"), (length, "length")))
            and _is(memo, size_class, _SIZE_CLASS)
            and _is(memo, cls, PLACE)
        ):
            return False
        self._named.add(gets)
        return True

    def _size(self, raw: bytes) -> Shape | None:
        """The size that opcodes make; None where it is none."""
        if (known := self._sizes.get(raw)) is not None:
            return known
        values, pos = [], int(raw[0] == _MARK)
        while pos < len(raw) - 1:
            width = 2 + raw[pos + 1] if raw[pos] == _LONG1 else _WIDTHS[raw[pos]]
            values.append(_integer(raw[pos : pos + width]))
            pos += width
        if len(values) > in_force().dimensions or not all(0 <= one < LARGEST for one in values):
            return None
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        return self._sizes.setdefault(raw, tuple(values))


_MARK, _LONG1 = 0x28, 0x8A
_WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5}
_MOST_SIZES = 1 << 14


def _integer(raw: bytes) -> int:
    """The number of a BININT1, BININT2, BININT or LONG1 opcode."""
    kind = raw[0]
    if kind == 0x4B:
        return raw[1]
    return int.from_bytes(raw[2 if kind == _LONG1 else 1 :], "little", signed=kind != 0x4D)


def _text(got: bytes | None, size: bytes | None, raw: bytes | None, memo: Memo) -> str | None:
    """A text that is fetched, or stands there; None where it is none."""
    if got is None:
        return raw.decode() if size is not None and raw and size[0] == len(raw) else None
    found = _fetched(memo, got)
    return found if type(found) is str else None


def _is(memo: Memo, get: bytes, path: str) -> bool:
    """Whether an opcode fetches the class of that name."""
    found = _fetched(memo, get)
    return type(found) is Global and found.path == path


def _are(memo: Memo, names: Iterable[tuple[bytes, str]]) -> bool:
    return all(_fetched(memo, get) == name for get, name in names)


def _fetched(memo: Memo, get: bytes) -> Node:
    """What an opcode fetches, `UNMADE` where that is not there yet: it may be put by the run."""
    try:
        return memo.fetched_by(get)
    except KeyError:
        return UNMADE
