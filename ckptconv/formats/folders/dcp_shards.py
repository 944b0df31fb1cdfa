"""The rank files of DCP's HuggingFace writer (its `sharded/` folder): safetensors files that hold
chunks of tensors.

They are called ``shard-RANK-model-FILE-of-FILES.safetensors``. Each says in its metadata, under
``DCP_SHARDING_INFO``, where its chunks start: ``{key: {"saved_offsets": [...]}}``. No file says how
large a whole tensor is, or how many ranks there were. Where the consolidated files lie one folder
up, their index gives the sum of all sizes. Source: torch/distributed/checkpoint/hf_storage.py and
_hf_utils.py, torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.formats.containers import all_open
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, read_small, within
from ckptconv.pickles.nodes import ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, errors_at
from ckptconv.tensors.assembly import assembled
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tree.checkpoint import Checkpoint, Container, whole_of

CONTAINER = Container(
    "DCP shards (safetensors)",
    "torch.distributed.checkpoint.HuggingFaceStorageReader",
    is_folder=True,
)
_INFO = "DCP_SHARDING_INFO"
_OF_DCP = frozenset({_INFO, "DCP_VERSION"})
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors").fullmatch

Parts = dict[str, list[tuple[Shape, TensorRef]]]


def is_dcp_shards(path: Location) -> bool:
    """Whether `path` is a folder of such rank files."""
    return path.is_folder() and any(map(_SHARD, path.names()))


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
        known = _consolidated_size(path.beside(_INDEX))
        nbytes = sum(ref.nbytes for _, ref in root.pairs)
        if known is not None and known != nbytes:
            what = f"its chunks have {nbytes} bytes, but {_INDEX} in the folder above says {known}"
            raise MalformedCheckpoint(what, path=path, hint="a rank's file is missing")
    whole = whole_of(opened, CONTAINER, root, path.path)
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
