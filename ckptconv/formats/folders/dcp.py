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
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePosixPath

from ckptconv.formats.folders import dcp_metadata
from ckptconv.formats.folders.dcp_metadata import Item, Metadata, TensorEntry
from ckptconv.formats.folders.lightning import META, with_meta
from ckptconv.io.files import FilePool
from ckptconv.io.guarded import check_places
from ckptconv.io.location import Location, is_plain_path, within
from ckptconv.io.source import RangeSource, Source
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

SourceOpener = Callable[[Source], Checkpoint]
FileOpener = Callable[[Location], Checkpoint]


def is_dcp(path: Location) -> bool:
    """Whether `path` is a folder with a `.metadata`, or one of every rank, or that file itself, or
    a data file beside it.
    """
    return (
        path.name == INDEX
        or path.child(INDEX).is_file()
        or path.child(f"__0{INDEX}").is_file()
        or _is_data_file(path)
    )


def _is_data_file(path: Location) -> bool:
    return path.suffix == _DATA and path.beside(INDEX).is_file() and path.is_file()


def open_dcp(path: Location, open_file: FileOpener, open_source: SourceOpener) -> Checkpoint:
    """Open a DCP folder: its `.metadata`, and the directory and pickle of every item; no payload is
    read.

    Raises `MalformedCheckpoint` when an item is missing or cut off, or when chunks do not cover
    their tensor, with the key.
    """
    if _is_data_file(path):
        raise UnsupportedCheckpoint(
            "is one of the files of a DCP folder, which hold parts of tensors",
            path=path,
            hint=f"name the folder: {path.parent}",
        )
    folder = path.parent if path.name == INDEX else path
    opened = _Opened(folder, open_source)
    try:
        metadata, nbytes = _read_index(folder)
        is_megatron = metadata.is_megatron or (
            folder.child(_COMMON).is_file() and folder.child(_MEGATRON).is_file()
        )
        fragments = _flat_fragments(metadata) if is_megatron else set()
        if len(metadata.items) > _MANY:
            _refuse_shared_bytes(folder, metadata)
        root = _tree(
            metadata,
            _megatron_paths(metadata) if is_megatron else metadata.paths,
            fragments,
            opened,
        )
        if len(metadata.items) <= _MANY:
            _refuse_shared_bytes(folder, metadata)
        nbytes += sum(source.size for source in opened.files.values())
        notes = _notes(fragments)
        if is_megatron and folder.child(_COMMON).is_file():
            nbytes += _merge_common(root, open_file(within(folder.child(_COMMON), folder)), opened)
        elif not is_megatron and folder.child(META).is_file():
            meta = open_file(within(folder.child(META), folder))
            opened.sources += meta.sources
            root, left_out = with_meta(root, meta.root)
            nbytes, notes = nbytes + meta.nbytes, (*notes, *meta.notes, *left_out)
    except BaseException:
        opened.close()
        raise
    sources = (*opened.files.values(), *opened.sources)
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
    """Raise `MalformedCheckpoint` when two items lie in the same bytes of a file: every item is
    written by itself.
    """
    placed = sorted(
        (item.relative_path, item.offset, item.length, key)
        for (key, _), item in metadata.items.items()
    )
    for (path, start, length, key), (other_path, at, _, other) in pairwise(placed):
        if path == other_path and at < start + length:
            raise _overlap(inside(folder, path).name, at, other, key)


def _overlap(name: str, at: int, key: str, other: str) -> MalformedCheckpoint:
    whose = "another item of it" if key == other else f"'{printable(other)}'"
    return MalformedCheckpoint(
        f"lies at byte {at} of '{printable(name)}', and so does {whose}", where=key
    )


class _Opened:
    """The files of one folder, and the items that were opened in them."""

    def __init__(self, folder: Location, open_source: SourceOpener) -> None:
        self.files: dict[str, Source] = {}
        self.sources: list[Source] = []
        self._folder = folder
        self._pool = FilePool()
        self._open_source = open_source

    def root_of(self, item: Item) -> Node:
        """What the stream at the place of an item holds."""
        if item.transforms:
            names = ", ".join(item.transforms)
            raise UnsupportedCheckpoint(
                f"was written through {names}, which ckptconv does not undo",
                hint="save it without extensions, or dcp.load it",
            )
        checkpoint = self._open_source(
            RangeSource(self._file(item.relative_path), item.offset, item.length)
        )
        check_places(checkpoint.sources)
        self.sources += [source for source in checkpoint.sources if source.needs_closing()]
        return checkpoint.root

    def _file(self, name: str) -> Source:
        if name not in self.files:
            self.files[name] = inside(self._folder, name).open(self._pool)
        return self.files[name]

    def close(self) -> None:
        for source in (*self.files.values(), *self.sources):
            source.close()


def inside(folder: Location, name: str) -> Location:
    """The file `name` of a folder; `MalformedCheckpoint` when it leads out of the folder."""
    place = folder.child(name)
    if not is_plain_path(str(PurePosixPath(name))):
        raise MalformedCheckpoint(
            f"names the file '{printable(name)}', which is not a plain relative path", path=folder
        )
    if not place.stays_within(folder):
        raise MalformedCheckpoint(
            f"names the file '{name}', which is a link out of the folder", path=folder
        )
    if not place.exists():
        raise MalformedCheckpoint(
            f"needs the file '{name}', which is not there",
            path=folder,
            hint="fetch or copy the whole folder",
        )
    return place


# ----------------------------------------------------------------------------------------- the tree


def _tree(
    metadata: Metadata, paths: dict[str, dcp_metadata.Path], left_out: set[str], opened: _Opened
) -> Dict:
    tree = _Nested()
    for key, entry in metadata.entries.items():
        if key in left_out:
            continue
        try:
            value = (
                opened.root_of(_found(metadata, key, None))
                if entry is None
                else _tensor(metadata, key, entry, opened)
            )
            tree.put(paths.get(key, (key,)), value)
        except CheckpointError as error:
            raise _with_key(error, key) from error.__cause__
    return tree.root


def _with_key(error: CheckpointError, key: str) -> CheckpointError:
    """The error of an item with its key in the first place: which record of which stream it was,
    comes second.
    """
    error.where = key if error.where in (None, key) else f"{key} ({error.where})"
    return error


def _tensor(metadata: Metadata, key: str, entry: TensorEntry, opened: _Opened) -> TensorRef:
    if len(entry.chunks) > _MANY:
        check_cover(entry.shape, entry.chunks)
    parts = []
    for start, shape in entry.chunks:
        ref = opened.root_of(_found(metadata, key, start))
        if type(ref) is not TensorRef:
            raise UnsupportedCheckpoint(
                "a chunk of it is not a plain tensor",
                hint="it was saved as a tensor of another class",
            )
        if ref.shape != shape:
            raise MalformedCheckpoint(
                f"its chunk at {list(start)} has the shape {list(ref.shape)} instead of "
                f"{list(shape)}"
            )
        parts.append((start, ref))
    if key in metadata.reshaped:
        raise UnsupportedCheckpoint(
            "was stored in flat fragments by an older Megatron, which is not read yet",
            hint="save it with a newer Megatron",
        )
    return assembled(entry.dtype, entry.shape, parts)


def _found(metadata: Metadata, key: str, start: Shape | None) -> Item:
    item = metadata.items.get((key, start))
    if item is None and (start is None or not any(start)):  # a whole tensor may have no offset
        item = metadata.items.get((key, None), metadata.items.get((key, ())))
    if item is None:
        what = "" if start is None else f" of its chunk at {list(start)}"
        raise MalformedCheckpoint(f"{INDEX} does not say where the bytes{what} lie", where=key)
    return item


class _Nested:
    """The nested state dict, put together from paths: a text label is a key of a dict, an int the
    index in a list.
    """

    def __init__(self) -> None:
        self.root = Dict()
        self._inside: dict[int, dict[str | int, Node]] = {id(self.root): {}}
        self._gaps = 0
        self._most_gaps = in_force().list_gaps

    def put(self, path: dcp_metadata.Path, value: Node) -> None:
        """Hang `value` at `path`; `MalformedCheckpoint` if something else is in the way."""
        node: Node = self.root
        for label, following in pairwise(path):
            node = self._branch(node, label, list if type(following) is int else Dict)
        if path[-1] in self._children(node, path[-1]):
            raise MalformedCheckpoint("two keys have one place in the state dict")
        self._hang(node, path[-1], value)

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
    """The optimizer's tensors that were stored in another shape, from which their own is not
    restored here.
    """
    return {key for key in metadata.reshaped if _OPTIMIZER(key)}


def _merge_common(root: Dict, common: Checkpoint, opened: _Opened) -> int:
    """Hang the parts of Megatron's `common.pt` into the tree, dicts that both have entered; returns
    its size in bytes.
    """
    opened.sources += common.sources
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
