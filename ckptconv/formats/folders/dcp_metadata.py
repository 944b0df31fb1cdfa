"""The `.metadata` of a DCP folder, as plain values: what there is, in which chunks, and where each
item lies.

It is a pickle of `Metadata`: ``state_dict_metadata`` (key → properties, size and chunks of a
tensor, or the mark of any other object), ``planner_data`` (key → path in the nested state dict;
absent where it was not flattened), ``storage_data`` (key and offsets → file, offset, length and the
transforms that the item went through). Megatron's `MCoreMetadata` adds ``mcore_data``. Source:
torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptconv.formats.folders.dcp_runs import LARGEST, Indexed, Item, TensorEntry, runs
from ckptconv.io.source import Source
from ckptconv.objects.torch_read import plain_sizes
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Global, Node, mapping_pairs, spoken
from ckptconv.pickles.reader import read_pickle
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.limits import in_force, refuse_beyond
from ckptconv.support.records import dataclass
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Shape, refuse_dimensions

INDEX = ".metadata"
Path = tuple["str | int", ...]
"""Where a value hangs in the nested state dict: keys of dicts, indices of lists."""
_LABELS = {str, int}

_SIZE = Global("torch", "Size")


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
    named = state[0] if type(state) is tuple and state else _attribute(state, "dtype")
    if type(named) is not Global or named.module != "torch" or named.name not in BY_NAME:
        raise UnsupportedCheckpoint(f"has the unknown dtype {spoken(named)}", where=key)
    return BY_NAME[named.name]


def _attribute(state: Node, name: str) -> Node:
    return next((value for key, value in mapping_pairs(state) or () if key == name), None)


def _plain_size(args: tuple[Node, ...]) -> Node:
    """A `torch.Size` as the tuple that it is made of, for what there are two of in every chunk."""
    return args[0] if len(args) == 1 and type(args[0]) is tuple else Call(_SIZE, args)


def _size(node: Node, key: str) -> Shape:
    """A `torch.Size`, or a plain tuple or list."""
    sizes = plain_sizes(node)
    if sizes is None or not all(0 <= size < LARGEST for size in sizes):
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
        own = _attribute(noted, "nd_reformulated_orig_global_shape")
        if own is not None:
            yield key, _size(own, key)
