"""What the library of a file's own kind refuses on any host, although ckptconv reads it: values,
versions, names, dtypes.

Sources: torch/_weights_only_unpickler.py (opcodes and globals), caffe2/serialize/versions.h (file
format versions 1 to 10), torch/_utils.py (nested tensors), safetensors/torch.py (dtypes). Each was
provoked with torch 2.13 and safetensors 0.8.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.pickles.nodes import Call, Dict, Node, children
from ckptconv.support.errors import LimitExceeded, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import SAFETENSORS_LIBRARY
from ckptconv.tree.settling import refuse_keys
from ckptconv.tree.walk import Place, tensor_of, walk

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_VERSIONS = range(1, 11)
# bits without the sign; LONG1 has one byte for the length, and torch does not read LONG4
_LONGEST_INT = 255 * 8 - 1
_NESTED = "torch._utils._rebuild_nested_tensor"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a file does not open: a `code`, `what` it is, and the words that the library `said`; `by`
    names the library.

    A library that hangs says nothing.
    """

    code: str
    what: str
    said: str
    by: str = "torch.load(weights_only=True)"


def refusals(checkpoint: Checkpoint) -> Iterator[Refusal]:
    """Why files of a checkpoint do not open in their own library; of several, each by its name."""
    for file in files_of(checkpoint):
        for found in _refusals(file):
            name = f"{printable(file.path.name)}: " if checkpoint.files else ""
            yield Refusal(found.code, name + found.what, found.said, found.by)


def files_of(checkpoint: Checkpoint) -> tuple[Checkpoint, ...]:
    """The files that a checkpoint was put together of, as opened; itself where it is one file."""
    return checkpoint.files or (checkpoint,)


def _refusals(file: Checkpoint) -> Iterator[Refusal]:
    suffix = file.path.suffix.lower()
    name = "it is a {} file with the name of a {} file, and the libraries go by the name"
    if file.container.weights_only:
        if suffix == ".safetensors":
            what, said = name.format("torch", "safetensors"), "Error while deserializing header"
            yield Refusal("name", what, said, "safetensors")
        yield from _torch_refusals(file)
    elif file.container.by == SAFETENSORS_LIBRARY:
        if suffix in TORCH_SUFFIXES:
            what = name.format("safetensors", "torch")
            yield Refusal("name", what, "Weights only load failed")
        refs = (ref for _, node in walk(file.root) if (ref := tensor_of(node)) is not None)
        if packed := sorted({ref.dtype.name for ref in refs if ref.dtype.is_packed}):
            what = f"torch does not have its dtypes {', '.join(packed)}"
            yield Refusal("dtype", what, "Dtype not understood", "safetensors.torch")


def _torch_refusals(file: Checkpoint) -> Iterator[Refusal]:
    if file.container.has_version and file.facts.version not in _VERSIONS:
        told = "no version" if file.facts.version is None else f"the version {file.facts.version}"
        what = f"its archive has {told}; torch reads the versions 1 to 10"
        yield Refusal("version", what, "PytorchStreamReader failed")
    legacy = file.container.is_legacy
    unread: set[Refusal] = set()
    slow: str | None = None
    for place, node in walk(file.root):
        unread.update(_unread_values(node, legacy))
        slow = slow or _slow_keys(place, node)
    yield from sorted(unread, key=lambda one: (one.code, one.what, one.said))
    if slow is not None:
        yield Refusal("keys", f"{slow}, which can make its reader hang", "")


def _slow_keys(place: Place, node: Node) -> str | None:
    """What is wrong with the keys of a dict or set that take a reader hours to hash."""
    if type(node) is Dict or type(node) is Call:
        try:
            refuse_keys(node, place)
        except LimitExceeded as error:
            return f"{error.what} ({printable(error.where or '')})"
        except RefusedObject:  # cannot be hashed, or not slowly
            return None
    return None


def _unread_values(node: Node, legacy: bool) -> Iterator[Refusal]:
    """What is wrong with a node and the plain values in it."""
    if legacy and type(node) is Call and node.name == _NESTED:
        what = "it holds nested tensors, which torch misreads from legacy files"
        yield Refusal("nested", what, "Storage size calculation overflowed")
    for label, child in children(node):
        for value in (label, child):
            if type(value) is int and value.bit_length() > _LONGEST_INT:
                what = "it holds an integer of more than 255 bytes"
                yield Refusal("integer", what, "Unsupported operand 139")
            elif type(value) is bytes and not value:
                what = "it holds empty bytes, which torch writes as a call of bytes()"
                yield Refusal("bytes", what, "Unsupported global: GLOBAL")
