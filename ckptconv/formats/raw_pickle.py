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
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, errors_at, printable
from ckptconv.support.limits import refuse_beyond
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef
from ckptconv.tree.checkpoint import Checkpoint, Container
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
    `pickle_bytes`. Raises `UnsupportedCheckpoint` when it holds no tensors or arrays.
    """
    size, path = source.size, source.path
    refuse_beyond("pickle_bytes", size, f"is a pickle of {size} bytes", path=path)

    def nested(stream: bytes) -> Node:
        try:
            return open_source(MemorySource(stream, source.path)).root
        except UnsupportedCheckpoint as error:
            what = f"a stream in it {error.what}"
            raise MalformedCheckpoint(what, where="pickle", hint=error.hint) from error

    with errors_at(path=path, where="pickle"):
        root = read_torch_pickle(source.read(0, size), _elsewhere, nested=nested)
    if not any(_has_values(node) for _, node in walk(root)):
        what = f"is a bare pickle ({_what(root)}) without tensors or arrays in it"
        raise UnsupportedCheckpoint(what, path=path)
    return Checkpoint(path, CONTAINER, root, size, sources=(source,))


def _elsewhere(key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
    what = f"names the storage {printable(key)}, which is not in this file"
    taken = "it was taken out of a checkpoint, like the data.pkl of a zip"
    raise MalformedCheckpoint(what, hint=f"{taken}; name the checkpoint itself")


def _has_values(node: Node) -> bool:
    if type(node) is Call:
        return is_tensor_call(node) or node.name.startswith("numpy.")
    return type(node) in (TensorRef, TensorObject, Storage)


def _what(root: Node) -> str:
    if type(root) is Call:
        return f"an object of {printable(root.name)}"
    return "a dict" if type(root) is Dict else f"a {type(root).__name__.lower()}"
