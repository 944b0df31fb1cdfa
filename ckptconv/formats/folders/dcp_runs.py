"""The opcodes of a `.metadata` that there are for every chunk, matched as runs and read at once.

Nearly all of a large `.metadata` are three kinds of objects, as CPython's pickle writes them in
protocol 4 and later: the `TensorStorageMetadata` of a key with its chunks, and the `MetadataIndex`
of an item with its `_StorageInfo`. A run has no name in it that is not fetched from the memo, and
what was fetched is looked at once. Whatever does not look so is read opcode by opcode.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from ckptconv.pickles.memo import UNMADE, Memo
from ckptconv.pickles.nodes import Global, Node
from ckptconv.pickles.opcodes import LONG_INTEGER, integer_of, integers_of, tuple_of
from ckptconv.pickles.reader import Run
from ckptconv.support.limits import in_force
from ckptconv.support.records import NamedTuple, made
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


_TORCH = "torch.distributed.checkpoint"
_TENSOR = Global(f"{_TORCH}.metadata", "TensorStorageMetadata")
_INDEX = Global(f"{_TORCH}.metadata", "MetadataIndex")


# -------------------------------------------------------------------------------------- the opcodes


class _Value(bytes):
    """The pattern of opcodes whose value is read."""


class _Opcodes:
    """Opcodes that follow one another, as `parts`: the patterns of opcodes, and the text or class
    that others must fetch from the memo (None: they may fetch anything).
    """

    def __init__(self, *parts: bytes | str | Global | None) -> None:
        groups = [part for part in parts if type(part) is not bytes]
        pattern = b"".join(map(_pattern, parts))
        self.match = re.compile(pattern, re.DOTALL).match
        self.names: list[Any] = [part for part in groups if type(part) is not _Value]
        self.fetching = [at for at, part in enumerate(groups, 1) if type(part) is not _Value]
        self.values = [at for at, part in enumerate(groups, 1) if type(part) is _Value]


def _pattern(part: bytes | str | Global | None) -> bytes:
    if type(part) is bytes:
        return part
    return b"(%b)" % (part if type(part) is _Value else _GET)


_GET = rb"h.|j...."
_INT = _Value(LONG_INTEGER)
_NEW = 0x8C  # SHORT_BINUNICODE: the text stands there and is put
_NEW_TEXT = rb"\x8c.[\w./-]{1,255}\x94"
_TEXT = _Value(_GET + b"|" + _NEW_TEXT)
_SIZE = (Global("torch", "Size"), _Value(tuple_of(LONG_INTEGER)), rb"\x94\x85\x94R\x94")
_OBJECT = rb"\)\x81\x94}\x94\("  # behind its class
_BOOL = rb"[\x88\x89]"
_ENTRY = (
    rb"\x81\x94}\x94\(", "properties", Global(f"{_TORCH}.metadata", "TensorProperties"),
    rb"\)\x81\x94\(", _Value(_GET), None, _BOOL, None, _BOOL, rb"t\x94b",
    "size", *_SIZE, "chunks", rb"\]\x94", _Value(rb"\(?"),
)  # fmt: skip
_CHUNK = _Opcodes(
    Global(f"{_TORCH}.metadata", "ChunkStorageMetadata"), _OBJECT,
    "offsets", *_SIZE, "sizes", *_SIZE, b"ub",
)  # fmt: skip
_PAIR = (
    rb"\x81\x94}\x94\(", "fqn", _TEXT, "index", b"(?:N|%b)" % LONG_INTEGER, "offset", *_SIZE,
    b"ub", Global(f"{_TORCH}.filesystem", "_StorageInfo"), _OBJECT,
    "relative_path", _TEXT, "offset", _INT, "length", _INT, b"ub",
)  # fmt: skip
# the reader calls behind the class and EMPTY_TUPLE of the first; each other has these before it
_FIRST_ENTRY, _FIRST_PAIR = _Opcodes(*_ENTRY), _Opcodes(*_PAIR)
_ENTRY_BEHIND = _Opcodes(_Value(_NEW_TEXT), _TENSOR, rb"\)", *_ENTRY)
_PAIR_BEHIND = _Opcodes(_INDEX, rb"\)", *_PAIR)


# ------------------------------------------------------------------------------------- their values


def runs() -> dict[str, Run]:
    """What reads the runs of one stream, by the class that stands before them."""
    reader = _Runs()
    return {_TENSOR.path: reader.tensors, _INDEX.path: reader.items}


class _Runs:
    """Reads the runs of one stream; which opcodes were seen to fetch the names is kept."""

    def __init__(self) -> None:
        self._seen: defaultdict[_Opcodes, set[tuple[bytes, ...]]] = defaultdict(set)
        self._dtypes: dict[bytes, DType] = {}
        self._sizes: dict[bytes, Shape | None] = {}
        self._boxes: dict[Any, Any] = {}

    def tensors(self, stream: bytes, pos: int, end: int, memo: Memo) -> tuple[int, list[Node]]:
        """Entries of `state_dict_metadata`, from behind the class of the first one on."""
        values: list[Node] = []
        opcodes = _FIRST_ENTRY
        while (run := self._run(opcodes, stream, pos, end, memo)) is not None:
            *keys, named, raw_shape, mark = run.group(*opcodes.values)
            key = [_text(raw, memo) for raw in keys]
            dtype = self._dtypes.get(named) or self._dtype(named, memo)
            shape = self._size(raw_shape)
            if dtype is None or shape is None or None in key:
                break
            puts: list[Node] = [*key, None, UNMADE, UNMADE, UNMADE, shape, UNMADE, shape, UNMADE]
            at, chunks = run.end(), []
            while (run := self._run(_CHUNK, stream, at, end, memo)) is not None:
                raw_start, raw_shape = run.group(*_CHUNK.values)
                box = start, shape_there = self._size(raw_start), self._size(raw_shape)
                if None in box:
                    return pos, values
                chunks.append(self._boxes.setdefault(box, box))
                puts += (UNMADE, UNMADE, start, UNMADE, start, shape_there, UNMADE, shape_there)
                at = run.end()
                if not mark:
                    break
            if not chunks or not stream.startswith(b"eub" if mark else b"aub", at, end):
                break
            puts[len(key)] = entry = made(TensorEntry, (dtype, shape, tuple(chunks)))
            values += (*key, entry)
            memo.put_by_run(puts)
            pos, opcodes = at + 3, _ENTRY_BEHIND
        return pos, values

    def items(self, stream: bytes, pos: int, end: int, memo: Memo) -> tuple[int, list[Node]]:
        """Pairs of `storage_data`, from behind the class of the first one's index on."""
        values: list[Node] = []
        opcodes = _FIRST_PAIR
        while (run := self._run(opcodes, stream, pos, end, memo)) is not None:
            raw_key, raw_start, raw_path, raw_place, raw_length = run.group(*opcodes.values)
            key, path = _text(raw_key, memo), _text(raw_path, memo)
            start = self._size(raw_start)
            place, length = integer_of(raw_place), integer_of(raw_length)
            is_placed = 0 <= place < LARGEST and 0 <= length < LARGEST
            if start is None or key is None or path is None or not is_placed:
                break
            named, item = made(Indexed, (key, start)), made(Item, (path, place, length, ()))
            values += (named, item)
            puts = [named, UNMADE, start, UNMADE, start, item, UNMADE]
            if raw_key[0] == _NEW:
                puts.insert(2, key)
            if raw_path[0] == _NEW:
                puts.append(path)
            memo.put_by_run(puts)
            pos, opcodes = run.end(), _PAIR_BEHIND
        return pos, values

    def _run(
        self, opcodes: _Opcodes, stream: bytes, pos: int, end: int, memo: Memo
    ) -> re.Match[bytes] | None:
        """These opcodes at `pos`, where they stand there and fetch the names that they must."""
        run = opcodes.match(stream, pos, end)
        if run is None:
            return None
        fetching = run.group(*opcodes.fetching)
        if fetching not in (seen := self._seen[opcodes]):
            fetched = (_fetched(memo, get) for get in fetching)
            if not all(map(_is_named, fetched, opcodes.names)):
                return None
            seen.add(fetching)
        return run

    def _dtype(self, get: bytes, memo: Memo) -> DType | None:
        """The type that an opcode fetches; None where it is none."""
        found = _fetched(memo, get)
        if type(found) is not Global or found.module != "torch" or found.name not in BY_NAME:
            return None
        return self._dtypes.setdefault(get, BY_NAME[found.name])

    def _size(self, raw: bytes) -> Shape | None:
        """The size that opcodes make; None where it is none."""
        known = self._sizes.get(raw)
        if known is not None:
            return known
        values = integers_of(raw)
        if len(values) > in_force().dimensions or not all(0 <= one < LARGEST for one in values):
            return None
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        return self._sizes.setdefault(raw, values)


_MOST_SIZES = 1 << 14  # that are kept: a forged file may have no two alike


def _text(raw: bytes, memo: Memo) -> str | None:
    """A text that stands there, or is fetched; None where it is none."""
    if raw[0] == _NEW:
        return raw[2:-1].decode() if raw[1] == len(raw) - 3 else None
    found = _fetched(memo, raw)
    return found if type(found) is str else None


def _is_named(found: Node, name: str | Global | None) -> bool:
    """Whether what was fetched is that text or class, or anything where it need not be."""
    if type(name) is Global:
        return type(found) is Global and found.path == name.path
    return found is not UNMADE if name is None else type(found) is str and found == name


def _fetched(memo: Memo, get: bytes) -> Node:
    """What an opcode fetches, `UNMADE` where that is not there yet: it may be put by the run."""
    try:
        return memo.fetched_by(get)
    except KeyError:
        return UNMADE
