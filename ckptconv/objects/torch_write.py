"""Tensors to the opcodes of torch's pickles."""

from __future__ import annotations

from collections.abc import Callable

from ckptconv.objects.known_names import UTILS
from ckptconv.objects.torch_read import (
    REBUILD_FROM_TYPE,
    REBUILD_PARAMETER,
    REBUILD_PARAMETER_WITH_STATE,
    Window,
)
from ckptconv.pickles.nodes import ORDERED_DICT, Call, Dict, Global, Node
from ckptconv.pickles.writer import PickleWriter, integer, integers
from ckptconv.support.errors import RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import UINT8, DType
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef


class StoredAs(NamedTuple):
    """How a tensor (or a bare storage) is written: in a record of `nbytes` bytes, under the tag
    `location`.

    `storage_dtype` is the type of the storage class, None for an untyped storage; `dtype`, `offset`
    and `stride` (in elements) are the tensor's. `resolved`: its conj and neg bits are already in
    the values.
    """

    location: str
    storage_dtype: DType | None
    nbytes: int
    dtype: DType
    offset: int
    stride: tuple[int, ...]
    resolved: bool = False

    def bits(self, ref: TensorRef) -> list[str]:
        """The lazy bits of `ref` that stay bits."""
        bits = {"conj": ref.conj, "neg": ref.neg}
        return [name for name in bits if bits[name] and not self.resolved]


class _Bare(NamedTuple):
    """The tensor inside a Parameter, which does not require gradients itself."""

    ref: TensorRef


class _StorageOf(NamedTuple):
    """The persistent id of the storage of a tensor."""

    ref: TensorRef


class TorchLeaves:
    """Writes tensors and storages into a pickle; `stored_as` says of each of them the key of its
    record, and how it lies there.

    `stored_as` is asked in the order in which the storages stand in the pickle.
    """

    def __init__(self, stored_as: Callable[[TensorRef | Storage], tuple[str, StoredAs]]) -> None:
        self._stored_as = stored_as
        # What stands around a storage's key is the same bytes for all tensors of one form, once all
        # names in it are memoized.
        self._around: dict[tuple[object, ...], tuple[bytes, bytes]] = {}

    def __call__(self, node: Node, writer: PickleWriter) -> bytes | Node:
        kind = type(node)
        if kind is TensorRef:
            return self._tensor(node, node.requires_grad, writer)
        if kind is TensorObject:
            return self._object(node)
        if kind is _Bare:
            return self._tensor(node.ref, False, writer)
        if kind is Storage or kind is _StorageOf:
            key, stored = self._stored_as(node if kind is Storage else node.ref)
            return self._head(stored, False, writer) + _key(key) + self._tail(stored, writer)
        if kind is Window:
            what = "a storage that stands by itself as a part or another type of one"
            raise RefusedObject(what, where=node.storage.name, hint="--only PATH takes one part")
        raise TypeError(f"no such leaf: {kind}")

    def _tensor(self, ref: TensorRef, requires_grad: bool, writer: PickleWriter) -> bytes:
        key, stored = self._stored_as(ref)
        same = (stored, ref.shape, requires_grad, ref.conj, ref.neg)
        around = self._around.get(same)
        if around is not None:
            return around[0] + _key(key) + around[1]
        before = writer.count
        head = self._head(stored, True, writer)
        tail = self._tail(stored, writer) + integer(stored.offset)
        tail += integers(ref.shape) + integers(stored.stride)
        tail += b"\x88" if requires_grad else b"\x89"
        tail += writer.named("collections", "OrderedDict") + b")R"
        if stored.storage_dtype is None:
            tail += writer.named("torch", stored.dtype.name)
        bits = stored.bits(ref) if ref.conj or ref.neg else ()
        if bits:
            tail += b"}(" + b"".join(writer.text(bit) + b"\x88" for bit in bits) + b"u"
        tail += b"tR"
        if writer.count == before:
            self._around[same] = head, tail
        return head + _key(key) + tail

    def _head(self, stored: StoredAs, rebuild: bool, writer: PickleWriter) -> bytes:
        typed = stored.storage_dtype
        head = writer.named(UTILS, _REBUILD[typed is None]) + b"(" if rebuild else b""
        head += b"(" + writer.text("storage")
        if typed is None:
            return head + writer.named("torch.storage", "UntypedStorage")
        return head + writer.named("torch", typed.storage_class or "")

    def _tail(self, stored: StoredAs, writer: PickleWriter) -> bytes:
        count = stored.nbytes // (stored.storage_dtype or UINT8).itemsize
        return writer.text(stored.location) + integer(count) + b"tQ"

    def _object(self, node: TensorObject) -> Node:
        ref = node.tensor
        hooks = Call(ORDERED_DICT, ())
        if node.cls is None and node.state is None:
            return Call(REBUILD_PARAMETER, (_Bare(ref), ref.requires_grad, hooks))
        if node.cls is None:
            given = (_Bare(ref), ref.requires_grad, hooks, node.state)
            return Call(REBUILD_PARAMETER_WITH_STATE, given)
        _, stored = self._stored_as(ref)
        args: list[Node] = [_StorageOf(ref), stored.offset, ref.shape, stored.stride]
        args += [ref.requires_grad, hooks]
        if stored.storage_dtype is None:
            args.append(Global("torch", stored.dtype.name))
        bits = stored.bits(ref)
        if bits:
            args.append(Dict([(bit, True) for bit in bits]))
        rebuild = Global(UTILS, _REBUILD[stored.storage_dtype is None])
        return Call(REBUILD_FROM_TYPE, (rebuild, node.cls, tuple(args), node.state))


def _key(key: str) -> bytes:
    return _KEY_HEADS[len(key)] + key.encode()


# the function that makes a tensor over a storage that has a type, and over one that has none
_REBUILD = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
# BINUNICODE and a length of four bytes, made once: a key is the number of a storage, and so short
_KEY_HEADS = tuple(b"X%c\0\0\0" % size for size in range(256))
