"""Plain pickles with tensors inside (`pickle.dump` of a state dict): any protocol, one stream to
the end of the file.

A storage is pickled as a call of `torch.storage._load_from_bytes` with a whole torch stream in it,
which is opened as a file within the file. Source: `__reduce__` in torch/storage.py.
"""

from __future__ import annotations

from ckptconv.formats.containers import open_source
from ckptconv.io.source import MemorySource, Source
from ckptconv.objects.torch_read import is_tensor_call, read_torch_pickle
from ckptconv.pickles.nodes import Call, Dict, Node
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.limits import in_force
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import Container
from ckptconv.tree.walk import walk

CONTAINER = Container(
    "pickle",
    "pickle.load",
    why_not="only pickle.load opens it, which runs what it names",
    torch_says="Weights only load failed",
    names_storages=True,
)


def open_raw_pickle(source: Source) -> Checkpoint:
    """Open a bare pickle; its tensors lie within it, so all of it is read, at most the limit
    `pickle_bytes`.

    Raises `UnsupportedCheckpoint` when it holds no tensors or arrays.
    """
    if source.size > (most := in_force().pickle_bytes):
        what = f"is a pickle of {source.size} bytes"
        raise LimitExceeded(
            what, limit="pickle_bytes", allowed=most, needed=source.size, path=source.path
        )

    def nested(stream: bytes) -> Node:
        try:
            return open_source(MemorySource(stream, source.path)).root
        except UnsupportedCheckpoint as error:
            raise MalformedCheckpoint(
                f"a stream in it {error.what}", where="pickle", hint=error.hint
            ) from error

    try:
        root = read_torch_pickle(source.read(0, source.size), _elsewhere, nested=nested)
    except CheckpointError as error:
        raise error.at(path=source.path, where="pickle") from error.__cause__
    if not any(_has_values(node) for _, node in walk(root)):
        raise UnsupportedCheckpoint(
            f"is a bare pickle ({_what(root)}) without tensors or arrays in it", path=source.path
        )
    return Checkpoint(source.path, CONTAINER, root, source.size, sources=(source,))


def _elsewhere(key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
    raise MalformedCheckpoint(
        f"names the storage {printable(key)}, which is not in this file",
        hint="it was taken out of a checkpoint, like the data.pkl of a zip; name the checkpoint "
        "itself",
    )


def _has_values(node: Node) -> bool:
    if type(node) is Call:
        return is_tensor_call(node) or node.name.startswith("numpy.")
    return type(node) in (TensorRef, TensorObject, Storage)


def _what(root: Node) -> str:
    if type(root) is Call:
        return f"an object of {printable(root.name)}"
    return "a dict" if type(root) is Dict else f"a {type(root).__name__.lower()}"
