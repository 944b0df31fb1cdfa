"""DCP folders (`torch.distributed.checkpoint`): `.metadata` and the `__R_N.distcp` files in which
the items lie.

Each item is a stream of `torch.save` of its own: a chunk of a tensor, or any other object. Chunks
become the pieces of their tensor, and the nested state dict is rebuilt from the paths that the
planner noted. Megatron puts what it does not shard into `common.pt` beside them. Source:
torch/distributed/checkpoint/filesystem.py and _nested_dict.py, torch 2.0 to 2.13.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath

from ckptconv.formats.containers import NotForetold, open_file
from ckptconv.formats.folders import dcp_metadata
from ckptconv.formats.folders.dcp_alike import Chunk
from ckptconv.formats.folders.dcp_items import Coming, ForetoldItems, Items, inside
from ckptconv.formats.folders.dcp_metadata import Metadata, with_key
from ckptconv.formats.folders.dcp_runs import Item, TensorEntry
from ckptconv.formats.folders.lightning import META, with_meta
from ckptconv.io.location import Location, within
from ckptconv.pickles.nodes import Dict, Node, mapping_pairs
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.limits import in_force
from ckptconv.tensors.assembly import assembled, check_cover
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import Container
from ckptconv.tree.walk import label_text

CONTAINER = Container("DCP", "torch.distributed.checkpoint", is_folder=True)
MEGATRON = replace(CONTAINER, by="megatron", why_not="only Megatron opens it")
INDEX = ".metadata"
_DATA = ".distcp"
_OF_A_RANK = re.compile(rf"__.*{re.escape(INDEX)}").fullmatch
_COMMON = "common.pt"
# items that are held against each other before any is opened; of fewer, what is wrong with one is
# told first
_MANY = 1000
_MEGATRON = "metadata.json"  # the names of its storage backends, in every Megatron checkpoint


def is_dcp(path: Location) -> bool:
    """Whether `path` is a folder with a `.metadata`, or one of every rank, or that file itself, or
    a data file beside it.
    """
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
        raise UnsupportedCheckpoint(
            "is one of the files of a DCP folder, which hold parts of tensors",
            path=path,
            hint=f"name the folder: {path.parent}",
        )
    return path.parent if path.name == INDEX else path


def _opened(folder: Location, items: Items) -> Checkpoint:
    try:
        metadata, nbytes = _read_index(folder)
        is_megatron = metadata.is_megatron or (
            folder.child(_COMMON).is_file() and folder.child(_MEGATRON).is_file()
        )
        fragments = _flat_fragments(metadata) if is_megatron else set()
        if len(metadata.items) > _MANY:
            _refuse_shared_bytes(folder, metadata)
        items.open_all(dict.fromkeys(item.relative_path for item in metadata.items.values()))
        items.expect([*_in_order(metadata, fragments, chunks=items.reads_chunks)])
        root = _tree(
            metadata,
            _megatron_paths(metadata) if is_megatron else metadata.paths,
            fragments,
            items,
        )
        items.expect(())
        if len(metadata.items) <= _MANY:
            _refuse_shared_bytes(folder, metadata)
        nbytes += sum(source.size for source in items.files.values())
        notes = _notes(fragments)
        if is_megatron and folder.child(_COMMON).is_file():
            nbytes += _merge_common(root, open_file(within(folder.child(_COMMON), folder)), items)
        elif not is_megatron and folder.child(META).is_file():
            meta = open_file(within(folder.child(META), folder))
            items.sources += meta.sources
            root, left_out = with_meta(root, meta.root)
            nbytes, notes = nbytes + meta.nbytes, (*notes, *meta.notes, *left_out)
    except BaseException:
        items.close()
        raise
    sources = (*items.files.values(), *items.sources)
    container = MEGATRON if is_megatron else CONTAINER
    return Checkpoint(folder.path, container, root, nbytes, notes=notes, sources=sources)


def _notes(fragments: Sized) -> tuple[str, ...]:
    note = (
        f"{len(fragments)} tensors of the optimizer are left out: an older Megatron stored them "
        "in flat fragments"
    )
    return (note,) * bool(fragments)


def _read_index(folder: Location) -> tuple[Metadata, int]:
    """The metadata of a folder and its size in bytes: one file, or one of each rank
    (`dcp.save(use_collectives=False)`).
    """
    files: Sequence[Location] = [folder.child(INDEX)]
    if not files[0].is_file() and folder.child(f"__0{INDEX}").is_file():
        of_ranks = [name for name in folder.names() if _OF_A_RANK(name)]
        files = [
            folder.child(name) for name in sorted(of_ranks, key=lambda name: (len(name), name))
        ]
    found, nbytes = [], 0
    for file in files:
        source = file.open()
        try:
            found.append(dcp_metadata.read_metadata(source))
        finally:
            source.close()
        nbytes += source.size
    return found[0] if len(found) == 1 else dcp_metadata.merged(found), nbytes


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
                raise _overlap(inside(folder, path).name, at, other, key)


def _overlap(name: str, at: int, key: str, other: str) -> MalformedCheckpoint:
    whose = "another item of it" if key == other else f"'{printable(other)}'"
    return MalformedCheckpoint(
        f"lies at byte {at} of '{printable(name)}', and so does {whose}", where=key
    )


# ----------------------------------------------------------------------------------------- the tree


def _tree(
    metadata: Metadata, paths: dict[str, dcp_metadata.Path], left_out: set[str], items: Items
) -> Dict:
    tree = _Nested()
    for key, entry in metadata.entries.items():
        if key in left_out:
            continue
        try:
            value = (
                items.root_of(_found(metadata, key, None))
                if entry is None
                else _tensor(metadata, key, entry, items)
            )
            tree.put(paths.get(key, (key,)), value)
        except CheckpointError as error:
            raise with_key(error, key) from error.__cause__
    return tree.root


def _in_order(metadata: Metadata, left_out: set[str], *, chunks: bool) -> Iterator[Coming]:
    """The items in the order in which the tree is made of them."""
    for key, entry in metadata.entries.items():
        if key in left_out:
            continue
        if entry is None:
            if (item := _item(metadata, key, None)) is not None:
                yield item, None
            continue
        for start, shape in entry.chunks if chunks else ():
            if (item := _item(metadata, key, start)) is not None:
                yield item, Chunk(key, entry.dtype, start, shape)


def _tensor(metadata: Metadata, key: str, entry: TensorEntry, items: Items) -> TensorRef:
    if len(entry.chunks) > _MANY:
        check_cover(entry.shape, entry.chunks)
    parts = []
    for start, shape in entry.chunks:
        chunk = Chunk(key, entry.dtype, start, shape)
        parts.append((start, items.chunk(_found(metadata, key, start), chunk)))
    if key in metadata.reshaped:
        raise UnsupportedCheckpoint(
            "was stored in flat fragments by an older Megatron, which is not read yet",
            hint="save it with a newer Megatron",
        )
    return assembled(entry.dtype, entry.shape, parts)


def _found(metadata: Metadata, key: str, start: Shape | None) -> Item:
    item = _item(metadata, key, start)
    if item is None:
        what = "" if start is None else f" of its chunk at {list(start)}"
        raise MalformedCheckpoint(f"{INDEX} does not say where the bytes{what} lie", where=key)
    return item


def _item(metadata: Metadata, key: str, start: Shape | None) -> Item | None:
    item = metadata.items.get((key, start))
    if item is None and (start is None or not any(start)):  # a whole tensor may have no offset
        return metadata.items.get((key, None), metadata.items.get((key, ())))
    return item


class _Nested:
    """The nested state dict, put together from paths: a text label is a key of a dict, an int the
    index in a list.
    """

    def __init__(self) -> None:
        self.root = Dict()
        self._inside: dict[int, dict[str | int, Node]] = {id(self.root): {}}
        self._last: tuple[dcp_metadata.Path, Node] = (), self.root
        self._gaps = 0
        self._most_gaps = in_force().list_gaps

    def put(self, path: dcp_metadata.Path, value: Node) -> None:
        """Hang `value` at `path`; `MalformedCheckpoint` if something else is in the way."""
        around, last = path[:-1], path[-1]
        known, node = self._last
        if known != around or type(last) is int:
            node = self.root
            for label, following in pairwise(path):
                node = self._branch(node, label, list if type(following) is int else Dict)
            self._last = around, node
        if last in self._children(node, last):
            raise MalformedCheckpoint("two keys have one place in the state dict")
        self._hang(node, last, value)

    def _branch(self, node: Node, label: str | int, kind: type) -> Node:
        known = self._children(node, label).get(label)
        if known is None:
            known = kind()
            self._inside[id(known)] = {}
            self._hang(node, label, known)
        if type(known) is not kind or id(known) not in self._inside:
            raise MalformedCheckpoint(
                f"its path goes through '{printable(label)}', which is a value of another kind"
            )
        return known

    def _children(self, node: Node, label: str | int) -> dict[str | int, Node]:
        if (type(node) is list) is not (type(label) is int):
            raise MalformedCheckpoint(
                "its path mixes the keys of a dict with the indices of a list"
            )
        return self._inside[id(node)]

    def _hang(self, node: Node, label: str | int, value: Node) -> None:
        self._inside[id(node)][label] = value
        if isinstance(label, str):
            node.pairs.append((label, value))
            return
        missing = max(0, label + 1 - len(node))
        self._gaps += max(0, missing - 1)
        if self._gaps > self._most_gaps:
            what = f"is item {label_text(label)} of a list of which most other items are missing"
            raise LimitExceeded(
                what, limit="list_gaps", allowed=self._most_gaps, needed=min(self._gaps, 1 << 63)
            )
        node.extend([None] * missing)
        node[label] = value


# ----------------------------------------------------------------------------------------- Megatron


_OBJECT = re.compile(r"(.+)/shard_[\d.]+_[\d.]+").fullmatch
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.").match


def _megatron_paths(metadata: Metadata) -> dict[str, dcp_metadata.Path]:
    """Where Megatron's items belong: it saves the parts of a checkpoint under flat keys, without
    the names of the parts.

    What is called ``optimizer.…`` is put under ``optimizer``, every other tensor and extra state
    under ``model``. An object of several ranks, ``NAME/shard_N_OF``, becomes a list. Source:
    megatron/core/dist_checkpointing/mapping.py, 0.16.
    """
    if metadata.paths:
        return metadata.paths
    paths: dict[str, dcp_metadata.Path] = {}
    counts: Counter[str] = Counter()
    for key, entry in metadata.entries.items():
        name: str = key
        index: tuple[int, ...] = ()
        if entry is None and (shard := _OBJECT(key)):
            name, index = shard[1], (counts[shard[1]],)
            counts[name] += 1
        if _OPTIMIZER(key):
            paths[key] = ("optimizer", name, *index)
        elif entry is not None or name.endswith("_extra_state"):
            paths[key] = ("model", name, *index)
        else:
            paths[key] = (name, *index)
    return paths


def _flat_fragments(metadata: Metadata) -> set[str]:
    """The optimizer's tensors that were stored in another shape; their own is not restored here."""
    return {key for key in metadata.reshaped if _OPTIMIZER(key)}


def _merge_common(root: Dict, common: Checkpoint, items: Items) -> int:
    """Hang the parts of Megatron's `common.pt` into the tree, dicts that both have entered.

    Returns its size in bytes.
    """
    items.sources += common.sources
    work = [(root, common.root, "")]
    while work:
        node, other, place = work.pop()
        pairs = mapping_pairs(other)
        if pairs is None or any(type(key) is not str for key, _ in pairs):
            raise MalformedCheckpoint(
                "is not a dict of names", path=common.path, where=place or None
            )
        known = dict(node.pairs)
        for label, value in pairs:
            if label not in known:
                node.pairs.append((label, value))
            elif type(known[label]) is Dict and mapping_pairs(value) is not None:
                work.append((known[label], value, f"{place}{label}."))
            else:
                raise MalformedCheckpoint(
                    f"is in {INDEX} too", path=common.path, where=f"{place}{label}"
                )
    return common.nbytes
