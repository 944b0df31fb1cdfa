"""The `.metadata` of a DCP folder, as plain values: what there is, in which chunks, and where each
item lies.

It is a pickle of `Metadata`: ``state_dict_metadata`` (key → properties, size and chunks of a
tensor, or the mark of any other object), ``planner_data`` (key → path in the nested state dict;
absent where it was not flattened), ``storage_data`` (key and offsets → file, offset, length and the
transforms that the item went through). Megatron's `MCoreMetadata` adds ``mcore_data``. Source:
torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.0 to 2.13.

Nearly all of a large one are three kinds of objects, as CPython's pickle writes them in protocol 4
and later: the `TensorStorageMetadata` of a key with its chunks, and the `MetadataIndex` of an item
with its `_StorageInfo`. Their opcodes are matched as runs and read at once. A run has no name in it
that is not fetched from the memo, and what was fetched is looked at once. Whatever does not look so
is read opcode by opcode.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, TypeAlias

from ckptconv.io.source import Source
from ckptconv.objects.torch_read import plain_sizes
from ckptconv.pickles.memo import UNMADE, Memo
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Global, Node, entries, mapping_pairs, spoken
from ckptconv.pickles.opcodes import LONG_INTEGER, integer_of, integers_of, tuple_of
from ckptconv.pickles.reader import Run, read_pickle
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.limits import in_force, refuse_beyond
from ckptconv.support.records import NamedTuple, dataclass, made
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Shape, refuse_dimensions

INDEX = ".metadata"
Path = tuple["str | int", ...]
"""Where a value hangs in the nested state dict: keys of dicts, indices of lists."""
_LABELS = {str, int}
_SIZE = Global("torch", "Size")
# No size or place is as large
_LARGEST = 1 << 60


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


def with_key(error: CheckpointError, key: str) -> CheckpointError:
    """The error of an item, its key first; second, which record of which stream it was."""
    error.where = key if error.where in (None, key) else f"{key} ({error.where})"
    return error


@dataclass(frozen=True, slots=True)
class Metadata:
    """A whole `.metadata`. An entry is None for an object that is not a tensor; `items` are found
    by key and offsets.

    `reshaped` are Megatron's tensors that were stored in another shape than their own, by key, with
    that own shape.
    """

    entries: dict[str, TensorEntry | None]
    paths: dict[str, Path]
    items: dict[tuple[str, Shape | None], Item]
    reshaped: dict[str, Shape]
    is_megatron: bool


def read_metadata(source: Source) -> Metadata:
    """The metadata that a source holds; `MalformedCheckpoint` when it is something else."""
    size, path = source.size, source.path
    refuse_beyond("pickle_bytes", size, f"has {size} bytes", path=path)
    with errors_at(path=path):
        reducers = {"torch.Size": _plain_size}
        return _metadata(read_pickle(source.read(0, size), reducers=reducers, runs=runs()))


def merged(ranks: Sequence[Metadata]) -> Metadata:
    """What the metadata of all ranks say together; of an item in several, the first is taken."""
    whole = Metadata({}, {}, {}, {}, False)
    for rank in ranks:
        for key, entry in rank.entries.items():
            known = whole.entries.setdefault(key, entry)
            if known is not entry and (known is None or entry is None or known[:2] != entry[:2]):
                raise _malformed("two ranks have it in different types or shapes", key)
            if known is not None and entry is not None:
                chunks = dict.fromkeys((*known.chunks, *entry.chunks))
                whole.entries[key] = known._replace(chunks=tuple(chunks))
        for key, path in rank.paths.items():
            whole.paths.setdefault(key, path)
        for index, item in rank.items.items():
            whole.items.setdefault(index, item)
    return whole


def _metadata(root: Node) -> Metadata:
    fields = _fields(root, "Metadata", None)
    named = _pairs(fields.get("state_dict_metadata"), "state_dict_metadata")
    entries = {key: _entry(node, key) for key, node in named}
    planner = fields.get("planner_data")
    paths = {}
    if type(planner) is Dict:
        paths = {key: _path(node, key) for key, node in _pairs(planner, "planner_data")}
    items = dict(_items(fields.get("storage_data")))
    is_megatron = "mcore_data" in fields or root.name.endswith(".MCoreMetadata")
    reshaped = dict(_reshaped(fields.get("mcore_data") or Dict()))
    return Metadata(entries, paths, items, reshaped, is_megatron)


def _malformed(what: str, key: str | None) -> MalformedCheckpoint:
    hint = "it is not a .metadata of torch.distributed.checkpoint, or it is damaged"
    return MalformedCheckpoint(what, where=key, hint=hint)


def _fields(node: Node, kind: str, key: str | None) -> dict[str, Node]:
    """The attributes of an object whose class is called `kind` (or ends so)."""
    if type(node) is not Call or not node.name.endswith(kind):
        raise _malformed(f"holds something else where a {kind} belongs", key)
    if node.state is ABSENT:
        return {}
    pairs = mapping_pairs(node.state)
    if pairs is None:
        raise _malformed(f"has a {kind} without attributes", key)
    return {name: value for name, value in pairs if type(name) is str}


def _pairs(node: Node, field: str) -> Iterator[tuple[str, Node]]:
    pairs = mapping_pairs(node)
    names = [key for key, _ in pairs or ()]
    if pairs is None or not set(map(type, names)) <= {str}:
        raise _malformed(f"its {field} is not a dict of names", None)
    if len(set(names)) != len(names):
        raise _malformed(f"its {field} has a name twice", None)
    return iter(pairs)


def _entry(node: Node, key: str) -> TensorEntry | None:
    if type(node) is TensorEntry:
        return node
    if type(node) is Call and node.name.endswith(".BytesStorageMetadata"):
        return None
    fields = _fields(node, "TensorStorageMetadata", key)
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise _malformed("its chunks are not a list", key)
    dtype, shape = _dtype(fields.get("properties"), key), _size(fields.get("size"), key)
    boxes = (_fields(chunk, "ChunkStorageMetadata", key) for chunk in chunks)
    placed = [(_size(box.get("offsets"), key), _size(box.get("sizes"), key)) for box in boxes]
    return TensorEntry(dtype, shape, tuple(placed))


def _dtype(properties: Node, key: str) -> DType:
    """The type that tensor properties name: first of a tuple in every torch so far."""
    state = properties.state if type(properties) is Call else None
    named = state[0] if type(state) is tuple and state else entries(state).get("dtype")
    if type(named) is not Global or named.module != "torch" or named.name not in BY_NAME:
        raise UnsupportedCheckpoint(f"has the unknown dtype {spoken(named)}", where=key)
    return BY_NAME[named.name]


def _plain_size(args: tuple[Node, ...]) -> Node:
    """A `torch.Size` as the tuple that it is made of, for what there are two of in every chunk."""
    return args[0] if len(args) == 1 and type(args[0]) is tuple else Call(_SIZE, args)


def _size(node: Node, key: str) -> Shape:
    """A `torch.Size`, or a plain tuple or list."""
    sizes = plain_sizes(node)
    if sizes is None or not all(0 <= size < _LARGEST for size in sizes):
        raise _malformed("a size or offset is not a tuple of sizes", key)
    refuse_dimensions(len(sizes), key)
    return sizes


def _path(node: Node, key: str) -> Path:
    if type(node) is not tuple or not node or not set(map(type, node)) <= _LABELS:
        raise _malformed("its path in the state dict is not a tuple of names and indices", key)
    indices = [label for label in node if type(label) is int]
    if type(node[0]) is int or (indices and min(indices) < 0):
        raise _malformed("its path in the state dict is not possible", key)
    if len(node) > in_force().depth:
        what = f"its path in the state dict has {len(node)} parts"
        refuse_beyond("depth", len(node), what, where=key)
    return node


def _items(node: Node) -> Iterator[tuple[tuple[str, Shape | None], Item]]:
    pairs = mapping_pairs(node)
    if pairs is None:
        raise _malformed("its storage_data is not a dict", None)
    for index, info in pairs:
        if type(index) is Indexed:
            yield index, info if type(info) is Item else _item(info, index.key)
            continue
        name = _fields(index, "MetadataIndex", None)
        key, offset = name.get("fqn"), name.get("offset")
        if type(key) is not str:
            raise _malformed("an index in its storage_data has no name", None)
        yield (key, None if offset is None else _size(offset, key)), _item(info, key)


def _item(node: Node, key: str) -> Item:
    if type(node) is Item:
        return node
    fields = _fields(node, "_StorageInfo", key)
    path, start, size = (fields.get(name) for name in ("relative_path", "offset", "length"))
    transforms = fields.get("transform_descriptors") or ()
    if type(path) is not str or type(transforms) not in (tuple, list):
        raise _malformed("the place of an item is not given by the name of a file", key)
    offset, length = _size((start, size), key)
    named = [printable(name) if type(name) is str else spoken(name) for name in transforms]
    return Item(path, offset, length, tuple(named))


def _reshaped(node: Node) -> Iterator[tuple[str, Shape]]:
    """Megatron's own note on a tensor that it stored as (fragments…, values of a fragment)."""
    for key, noted in _pairs(node, "mcore_data"):
        own = entries(noted).get("nd_reformulated_orig_global_shape")
        if own is not None:
            yield key, _size(own, key)


# ------------------------------------------------------------------------------- runs of opcodes

_TORCH = "torch.distributed.checkpoint"
_TENSOR = Global(f"{_TORCH}.metadata", "TensorStorageMetadata")
_INDEX = Global(f"{_TORCH}.metadata", "MetadataIndex")


_Match: TypeAlias = Callable[[bytes, int, int], "re.Match[bytes] | None"]


class _Value(bytes):
    """The pattern of opcodes whose value is read."""


class _Opcodes:
    """Opcodes that follow one another, as `parts`: the patterns of opcodes, and the text or class
    that others must fetch from the memo (None: they may fetch anything).
    """

    def __init__(self, *parts: bytes | str | Global | None) -> None:
        self._parts = parts
        groups = [part for part in parts if type(part) is not bytes]
        self.match = self._compiled(repeat(_GET))
        self.names: list[Any] = [part for part in groups if type(part) is not _Value]
        self.fetching = [at for at, part in enumerate(groups, 1) if type(part) is not _Value]
        self.values = [at for at, part in enumerate(groups, 1) if type(part) is _Value]

    def fetching_by(self, gets: Sequence[bytes]) -> _Match:
        """What matches those that fetch by just these opcodes."""
        return self._compiled(map(re.escape, gets))

    def _compiled(self, gets: Iterator[bytes]) -> _Match:
        pattern = b"".join([_pattern(part, gets) for part in self._parts])
        return re.compile(pattern, re.DOTALL).match


def _pattern(part: bytes | str | Global | None, gets: Iterator[bytes]) -> bytes:
    if type(part) is bytes:
        return part
    return b"(%b)" % (part if type(part) is _Value else next(gets))


_GET = rb"h.|j...."
_INT = _Value(LONG_INTEGER)
_NEW = 0x8C  # SHORT_BINUNICODE: the text stands there and is put
_NEW_TEXT = rb"\x8c.[\w./-]{1,255}\x94"
_TEXT = _Value(_GET + b"|" + _NEW_TEXT)
_SIZE_RUN = (_SIZE, _Value(tuple_of(LONG_INTEGER)), rb"\x94\x85\x94R\x94")
_OBJECT = rb"\)\x81\x94}\x94\("  # behind its class
_BOOL = rb"[\x88\x89]"
_ENTRY = (
    rb"\x81\x94}\x94\(", "properties", Global(f"{_TORCH}.metadata", "TensorProperties"),
    rb"\)\x81\x94\(", _Value(_GET), None, _BOOL, None, _BOOL, rb"t\x94b",
    "size", *_SIZE_RUN, "chunks", rb"\]\x94", _Value(rb"\(?"),
)  # fmt: skip
_CHUNK = _Opcodes(
    Global(f"{_TORCH}.metadata", "ChunkStorageMetadata"), _OBJECT,
    "offsets", *_SIZE_RUN, "sizes", *_SIZE_RUN, b"ub",
)  # fmt: skip
_PAIR = (
    rb"\x81\x94}\x94\(", "fqn", _TEXT, "index", b"(?:N|%b)" % LONG_INTEGER, "offset", *_SIZE_RUN,
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
        self._first: dict[_Opcodes, _Match] = {}
        self._seen: defaultdict[_Opcodes, set[tuple[bytes, ...]]] = defaultdict(set)
        self._dtypes: dict[bytes, DType] = {}
        self._sizes: dict[bytes, Shape | None] = {}
        self._boxes: dict[Any, Any] = {}

    def tensors(self, stream: bytes, pos: int, end: int, memo: Memo) -> tuple[int, list[Node]]:
        """Entries of `state_dict_metadata`, from behind the class of the first one on."""
        values: list[Node] = []
        opcodes, sizes = _FIRST_ENTRY, self._sizes
        while (run := self._run(opcodes, stream, pos, end, memo)) is not None:
            *keys, named, raw_shape, mark = run.group(*opcodes.values)
            key = [_text(raw, memo) for raw in keys]
            dtype = self._dtypes.get(named) or self._dtype(named, memo)
            shape = sizes.get(raw_shape) or self._size(raw_shape)
            if dtype is None or shape is None or None in key:
                break
            puts: list[Node] = [*key, None, UNMADE, UNMADE, UNMADE, shape, UNMADE, shape, UNMADE]
            at, chunks = run.end(), []
            while (run := self._run(_CHUNK, stream, at, end, memo)) is not None:
                raw_start, raw_shape = run.group(*_CHUNK.values)
                start = sizes.get(raw_start) or self._size(raw_start)
                shape_there = sizes.get(raw_shape) or self._size(raw_shape)
                box = start, shape_there
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
        opcodes, sizes = _FIRST_PAIR, self._sizes
        path, raw_known = None, b""  # the items of a file stand together, and fetch its name alike
        while (run := self._run(opcodes, stream, pos, end, memo)) is not None:
            raw_key, raw_start, raw_path, raw_place, raw_length = run.group(*opcodes.values)
            key = _text(raw_key, memo)
            if raw_path != raw_known:
                path, raw_known = _text(raw_path, memo), raw_path
            start = sizes.get(raw_start) or self._size(raw_start)
            place, length = integer_of(raw_place), integer_of(raw_length)
            is_placed = 0 <= place < _LARGEST and 0 <= length < _LARGEST
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
        first = self._first.get(opcodes)
        run = first and first(stream, pos, end)  # nearly all fetch as the first of them did
        if run:
            return run
        run = opcodes.match(stream, pos, end)
        if run is None:
            return None
        fetching = run.group(*opcodes.fetching)
        seen = self._seen[opcodes]
        if fetching not in seen:
            fetched = (_fetched(memo, get) for get in fetching)
            if not all(map(_is_named, fetched, opcodes.names)):
                return None
            seen.add(fetching)
            self._first.setdefault(opcodes, opcodes.fetching_by(fetching))
        return run

    def _dtype(self, get: bytes, memo: Memo) -> DType | None:
        """The type that an opcode fetches; None where it is none."""
        found = _fetched(memo, get)
        if type(found) is not Global or found.module != "torch" or found.name not in BY_NAME:
            return None
        return self._dtypes.setdefault(get, BY_NAME[found.name])

    def _size(self, raw: bytes) -> Shape | None:
        """The size that opcodes make, which is kept; None where it is none."""
        values = integers_of(raw)
        if len(values) > in_force().dimensions or not all(0 <= one < _LARGEST for one in values):
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
