"""DCP folders (`torch.distributed.checkpoint`): `.metadata` and the `__R_N.distcp` files in which
the items lie.

Each item is a stream of `torch.save` of its own: a chunk of a tensor, or any other object. Chunks
become the pieces of their tensor, and the nested state dict is rebuilt from the paths that the
planner noted. What frameworks put beside the items says `dcp_flavours`. Source:
torch/distributed/checkpoint/filesystem.py and _nested_dict.py, torch 2.0 to 2.13.

DCP's HuggingFace writer leaves the files of ranks in a folder ``sharded/``: safetensors files that
hold chunks of tensors, called ``shard-RANK-model-FILE-of-FILES.safetensors``. Each says in its
metadata, under ``DCP_SHARDING_INFO``, where its chunks start: ``{key: {"saved_offsets": [...]}}``.
No file says how large a whole tensor is, or how many ranks there were. Where the consolidated files
lie one folder up, their index gives the sum of all sizes. Source:
torch/distributed/checkpoint/hf_storage.py and _hf_utils.py, torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from ckptconv.formats.containers import NotForetold, all_open, open_file
from ckptconv.formats.folders.dcp_alike import Chunk
from ckptconv.formats.folders.dcp_flavours import flavour_of
from ckptconv.formats.folders.dcp_items import Coming, ForetoldItems, Items, inside
from ckptconv.formats.folders.dcp_metadata import (
    INDEX,
    Item,
    Metadata,
    Path,
    TensorEntry,
    merged,
    read_metadata,
    with_key,
)
from ckptconv.formats.folders.ranks import Copies
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, read_small, within
from ckptconv.pickles.nodes import ABSENT, Dict, Node, mapping_pairs, ordered_dict
from ckptconv.support.errors import (
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import made
from ckptconv.tensors.assembly import assembled, check_cover
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.checkpoint import Checkpoint, Container, whole_of
from ckptconv.tree.walk import label_text

Entries = Mapping[str, "TensorEntry | None"]

_DATA = ".distcp"
_OF_A_RANK = re.compile(rf"__.*{re.escape(INDEX)}").fullmatch
_MOST_PARTS = 50  # of an optimizer state, which has two and what somebody put beside them
# items that are held against each other before any is opened; of fewer, what is wrong with one is
# told first
_MANY = 1000


def is_dcp(path: Location) -> bool:
    """Whether `path` is a folder with `.metadata` (of every rank), that file, or data beside it."""
    return (
        path.name == INDEX
        or path.child(INDEX).kind() not in ("nothing", "folder")
        or path.child(f"__0{INDEX}").is_file()
        or _is_data_file(path)
    )


def _is_data_file(path: Location) -> bool:
    return path.suffix == _DATA and path.beside(INDEX).is_file() and path.is_file()


def open_dcp(path: Location, *_: object) -> Checkpoint:
    """Open a DCP folder: its `.metadata`, and the directory and pickle of every item; no payload is
    read.

    Raises `MalformedCheckpoint` when an item is missing or cut off, or when chunks do not cover
    their tensor, with the key.
    """
    folder = _folder(path)
    return _opened(folder, Items(folder))


def foretell_dcp(path: Location, reread: Callable[[], Checkpoint]) -> Checkpoint:
    """Open a DCP folder without the chunks of its tensors, which `.metadata` tells of; `reread`
    opens all of it.

    Raises `NotForetold` where anything is wrong: `open_dcp` says what, in the order of the items.
    """
    folder = _folder(path)
    items = ForetoldItems(folder, reread)
    try:
        return replace(_opened(folder, items), reread=items.reopen)
    except (CheckpointError, OSError) as error:
        raise NotForetold from error


def _folder(path: Location) -> Location:
    if _is_data_file(path):
        what = "is one of the files of a DCP folder, which hold parts of tensors"
        raise UnsupportedCheckpoint(what, path=path, hint=f"name the folder: {path.parent}")
    return path.parent if path.name == INDEX else path


def _opened(folder: Location, items: Items) -> Checkpoint:
    try:
        metadata, nbytes = _read_index(folder)
        flavour = flavour_of(folder, metadata)
        fragments = flavour.fragments(metadata)
        kept = {key: entry for key, entry in metadata.entries.items() if key not in fragments}
        if len(metadata.items) > _MANY:
            _refuse_shared_bytes(folder, metadata)
        items.open_all(dict.fromkeys(item.relative_path for item in metadata.items.values()))
        found = items.opened([*_in_order(metadata, kept)])
        root = _tree(metadata, kept, flavour.paths(metadata), found)
        del found  # which ends it: what it read ahead is let go of
        if len(metadata.items) <= _MANY:
            _refuse_shared_bytes(folder, metadata)
        _refuse_copies(folder, items)
        nbytes += sum(source.size for source in items.files.values())
        notes: tuple[str, ...] = ()
        stored = None
        if fragments:
            left = f"{len(fragments)} tensors of the optimizer are left out"
            notes = (f"{left}: an older Megatron stored them in flat fragments",)
        place = folder.child(flavour.beside)
        if place.is_file():
            beside = open_file(within(place, folder))
            items.sources += beside.sources
            stored = flavour.stored(metadata, root, beside)
            root, told = flavour.merged(root, beside)
            nbytes, notes = nbytes + beside.nbytes, (*notes, *told)
    except BaseException:
        items.close()
        raise
    sources = (*items.files.values(), *items.sources)
    made = Checkpoint(folder.path, flavour.container, root, nbytes, notes=notes, sources=sources)
    return replace(made, stored=stored)


def _read_index(folder: Location) -> tuple[Metadata, int]:
    """The metadata of a folder and its size in bytes: one file, or one of each rank
    (`dcp.save(use_collectives=False)`).
    """
    files: Sequence[Location] = [folder.child(INDEX)]
    if not files[0].is_file() and folder.child(f"__0{INDEX}").is_file():
        of_ranks = sorted(filter(_OF_A_RANK, folder.names()), key=lambda name: (len(name), name))
        files = [folder.child(name) for name in of_ranks]
    found, nbytes = [], 0
    for file in files:
        with closing(file.open()) as source:
            found.append(read_metadata(source))
        nbytes += source.size
    return found[0] if len(found) == 1 else merged(found), nbytes


def _refuse_shared_bytes(folder: Location, metadata: Metadata) -> None:
    """Raise `MalformedCheckpoint` when two items share bytes of a file: each is written alone.

    A file may be spelled in two ways. A link is a name of its own: caches link to one file from the
    names of all that have the same bytes.
    """
    names = {item.relative_path for item in metadata.items.values()}
    spelled = {name: str(PurePosixPath(name)) for name in names}
    placed: dict[str, list[tuple[int, int, str]]] = {}
    for (key, _), item in metadata.items.items():
        placed.setdefault(spelled[item.relative_path], []).append((item.offset, item.length, key))
    for path, items in sorted(placed.items()):
        items.sort()
        for (start, length, key), (at, _, other) in pairwise(items):
            if at < start + length:
                whose = "another item of it" if key == other else f"'{printable(key)}'"
                what = f"lies at byte {at} of '{printable(inside(folder, path).name)}'"
                raise MalformedCheckpoint(f"{what}, and so does {whose}", where=other)


def _refuse_copies(folder: Location, items: Items) -> None:
    """Raise `MalformedCheckpoint` where a data file is a copy of another one. One tensor alone may
    have equal halves (a mask), so that files of one chunk tell nothing.
    """
    copies = Copies()
    for name, chunks in items.chunks.items():
        if len(chunks) > 1:
            copies.refuse(inside(folder, name).path, chunks)


# ----------------------------------------------------------------------------------------- the tree


def _tree(
    metadata: Metadata, entries: Entries, paths: dict[str, Path], found: Iterator[Node]
) -> Dict:
    """The tree of what was `found` in the items of the entries, in their order."""
    tree = _Nested()
    for key, entry in entries.items():
        try:
            value = _value(entry, found, is_reshaped=key in metadata.reshaped)
            tree.put(paths.get(key, (key,)), value)
        except CheckpointError as error:
            raise with_key(error, key) from error.__cause__
    for node in tree.dicts():
        _number_states(node)
    return tree.root


def _number_states(node: Dict) -> None:
    """Have the states of an optimizer that goes by numbers under numbers. The planner's paths have
    them as text: torch's `load_state_dict` would find the state of no parameter, and say nothing.
    """
    if len(node.pairs) > _MOST_PARTS:
        return
    parts = dict(node.pairs)
    states, groups = parts.get("state"), parts.get("param_groups")
    if type(states) is not Dict or type(groups) is not list:
        return
    params = {
        param
        for group in groups
        for label, listed in mapping_pairs(group) or ()
        if label == "params" and type(listed) is list
        for param in listed
        if type(param) in (int, str)
    }
    numbers = {str(param): param for param in params if type(param) is int}
    numbers.update((param, param) for param in params)
    states.pairs = [(numbers.get(key, key), value) for key, value in states.pairs]


def _in_order(metadata: Metadata, entries: Entries) -> Iterator[Coming]:
    """The items of the entries, up to the first that has no place."""
    for key, entry in entries.items():
        dtype, _, chunks = entry or (None, None, ((None, ()),))
        for start, shape in chunks:
            item = metadata.items.get((key, start)) or _unplaced(metadata, key, start)
            if item is None:
                return
            yield item, None if entry is None else made(Chunk, (key, dtype, start, shape))


def _value(entry: TensorEntry | None, found: Iterator[Node], *, is_reshaped: bool) -> Node:
    if entry is None:
        return _next(found, None)
    if len(entry.chunks) > _MANY:
        check_cover(entry.shape, entry.chunks)
    parts: list[Any] = [(start, _next(found, start)) for start, _ in entry.chunks]
    if is_reshaped:
        what = "was stored in flat fragments by an older Megatron, which is not read yet"
        raise UnsupportedCheckpoint(what, hint="save it with a newer Megatron")
    return assembled(entry.dtype, entry.shape, parts)


def _next(found: Iterator[Node], start: Shape | None) -> Node:
    root = next(found, ABSENT)
    if root is ABSENT:
        what = "" if start is None else f" of its chunk at {list(start)}"
        raise MalformedCheckpoint(f"{INDEX} does not say where the bytes{what} lie")
    return root


def _unplaced(metadata: Metadata, key: str, start: Shape | None) -> Item | None:
    """The item of a whole tensor, or of another object, which may have no offset."""
    if any(start or ()):
        return None
    return metadata.items.get((key, None), metadata.items.get((key, ())))


class _Nested:
    """The nested state dict, put together from paths: a text label is a key of a dict, an int the
    index in a list. `_labels` has what is in each of these, by its identity: a dict or list by its
    label, and None for any other value.
    """

    def __init__(self) -> None:
        self.root = Dict()
        self._labels: defaultdict[int, dict[str | int, Node]] = defaultdict(dict)
        self._gaps = 0

    def put(self, path: Path, value: Node) -> None:
        """Hang `value` at `path`; `MalformedCheckpoint` if something else is in the way."""
        holder: Node = self.root
        there = self._labels[id(holder)]
        for label, following in pairwise(path):
            inner = there.get(label)
            if inner is None:
                if label in there:
                    what = f"goes through '{printable(label)}', which is a value of another kind"
                    raise MalformedCheckpoint(f"its path {what}")
                inner = there[label] = [] if type(following) is int else Dict()
                self._hang(holder, label, inner)
            holder, there = inner, self._labels[id(inner)]
        label = path[-1]
        if label in there:
            raise MalformedCheckpoint("two keys have one place in the state dict")
        self._hang(holder, label, value)
        there[label] = None

    def dicts(self) -> Iterator[Dict]:
        """The root, and all dicts that paths go through."""
        yield self.root
        for there in self._labels.values():
            yield from (holder for holder in there.values() if type(holder) is Dict)

    def _hang(self, holder: Node, label: str | int, value: Node) -> None:
        if (type(holder) is list) is not (type(label) is int):
            what = "its path mixes the keys of a dict with the indices of a list"
            raise MalformedCheckpoint(what)
        if isinstance(label, str):
            holder.pairs.append((label, value))
            return
        missing = max(0, label + 1 - len(holder))
        if missing > 1:
            self._gaps += missing - 1
            what = f"is item {label_text(label)} of a list of which most other items are missing"
            # python refuses to print the longest ints, and the index may be any
            refuse_beyond("list_gaps", min(self._gaps, 1 << 63), what)
        holder.extend([None] * missing)
        holder[label] = value


# ----------------------------------------------------------------- shards of its HuggingFace writer

OF_SHARDS = Container(
    "DCP shards (safetensors)",
    "torch.distributed.checkpoint.HuggingFaceStorageReader",
    is_folder=True,
)
_INFO = "DCP_SHARDING_INFO"
_OF_DCP = frozenset({_INFO, "DCP_VERSION"})
_HF_INDEX = "model.safetensors.index.json"
# SHARDED_FILE_NAME in torch/distributed/checkpoint/_hf_utils.py
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors").fullmatch

Parts = dict[str, list[tuple[Shape, TensorRef]]]


def is_dcp_shards(path: Location) -> bool:
    """Whether a folder is one of such rank files."""
    return any(map(_SHARD, path.names()))


def refuse_one_rank(checkpoint: Checkpoint, *_: object) -> None:
    """Raise for the file of one rank: its chunks must not pass for tensors."""
    starts = _starts(checkpoint)
    if starts and (_SHARD(checkpoint.path.name) or any(any(start) for start in starts.values())):
        what, path = "holds the chunks of one rank, not whole tensors", checkpoint.path
        hint = f"name the folder of all ranks: {path.parent}"
        raise UnsupportedCheckpoint(what, path=path, hint=hint)


def open_dcp_shards(path: Location, *_: object) -> Checkpoint:
    """Open a folder of rank files: headers only. `MalformedCheckpoint` for a gap in a tensor."""
    files = [within(file, path) for file in path.list() if _SHARD(file.name)]
    with all_open(path, files, FilePool()) as opened:
        parts: Parts = {}
        for checkpoint in opened:
            _collect(checkpoint, parts)
        root = ordered_dict([(key, _whole(key, chunks, path)) for key, chunks in parts.items()])
        known = _consolidated_size(path.beside(_HF_INDEX))
        nbytes = sum(ref.nbytes for _, ref in root.pairs)
        if known is not None and known != nbytes:
            what = (
                f"its chunks have {nbytes} bytes, but {_HF_INDEX} in the folder above says {known}"
            )
            raise MalformedCheckpoint(what, path=path, hint="a rank's file is missing")
    whole = whole_of(opened, OF_SHARDS, root, path.path)
    metadata = {name: text for name, text in opened[0].metadata.items() if name not in _OF_DCP}
    return replace(whole, metadata=metadata, notes=() if known is not None else (_UNTOLD,))


_UNTOLD = "the files do not say how many ranks there were; these are taken to be all of them"


def _collect(checkpoint: Checkpoint, parts: Parts) -> None:
    starts = _starts(checkpoint)
    for key, ref in checkpoint.root.pairs:
        start = starts.get(key, (0,) * len(ref.shape))
        if len(start) != len(ref.shape):
            what = "its saved_offsets do not fit its shape"
            raise MalformedCheckpoint(what, path=checkpoint.path, where=key)
        parts.setdefault(key, []).append((start, ref))


def _starts(checkpoint: Checkpoint) -> dict[str, Shape]:
    try:
        return dict(_offsets(json.loads(checkpoint.metadata.get(_INFO, "{}"))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = "is not a table of saved_offsets"
        raise MalformedCheckpoint(what, path=checkpoint.path, where=_INFO) from error


def _offsets(info: Any) -> Iterator[tuple[str, Shape]]:
    for key, entry in info.items():
        start: Sequence[Any] = entry["saved_offsets"]
        if any(type(at) is not int or not 0 <= at < 1 << 60 for at in start):
            raise ValueError
        yield key, tuple(start)


def _whole(key: str, chunks: Sequence[tuple[Shape, TensorRef]], path: Location) -> TensorRef:
    """The tensor of all chunks, as large as they reach; of copies the first is taken."""
    distinct: dict[tuple[Shape, Shape], TensorRef] = {}
    for start, ref in chunks:
        distinct.setdefault((start, ref.shape), ref)
    with errors_at(path=path, where=key):
        if len({len(start) for start, _ in distinct}) != 1:
            raise MalformedCheckpoint("its chunks differ in their number of dimensions")
        ends = [map(sum, zip(start, shape, strict=True)) for start, shape in distinct]
        shape = tuple(map(max, zip(*ends, strict=True)))
        placed = [(start, ref) for (start, _), ref in distinct.items()]
        return assembled(chunks[0][1].dtype, shape, placed)


def _consolidated_size(index: Location) -> int | None:
    """The sum of all tensors' bytes by the index of the consolidated files, if there is one."""
    if not index.is_file():
        return None
    raw = read_small(index, "index_bytes")
    try:
        found = json.loads(raw)["metadata"]["total_size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if type(found) is int else None
