"""torch's own classes and functions in a pickle: rebuild calls and persistent ids ↔ `TensorRef` and `Storage`.

The only owner of torch's class names. What `torch.save` pickles is read from torch/_utils.py, torch/storage.py and
torch/_tensor.py (torch 2.13); what `torch.load(weights_only=True)` accepts, from torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, DTYPES, UINT8, DType
from ckptconv.errors import MalformedCheckpoint, RefusedObject, UnsupportedCheckpoint
from ckptconv.nodes import ORDERED_DICT, Call, Dict, Global, Node, spoken
from ckptconv.pickling import PickleWriter, integer, integers
from ckptconv.sources import MemorySource
from ckptconv.tensors import Storage, TensorObject, TensorRef, requiring_grad, view_of
from ckptconv.unpickling import Reducer, read_pickle

StorageLookup = Callable[[str, str, int, "DType | None"], Storage]
"""From key, location tag, size in bytes and element type (None: untyped) to the storage; raises when it is not there."""

_UTILS = "torch._utils"
_REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
_NOWHERE = Path()
_REBUILD_PARAMETER = Global(_UTILS, "_rebuild_parameter")
_REBUILD_PARAMETER_WITH_STATE = Global(_UTILS, "_rebuild_parameter_with_state")

VALUELESS = frozenset({f"{_UTILS}._rebuild_meta_tensor_no_storage", f"{_UTILS}._rebuild_wrapper_subclass"})
"""Rebuild functions whose tensors have no storage: there are no values to convert, and none may be invented."""

COPIES = frozenset(
    f"{_UTILS}._rebuild_{name}" for name in ("device_tensor_from_numpy", "xla_tensor", "device_tensor_from_cpu_tensor")
)
"""Rebuild functions that copy an array or a tensor to a device: a tensor that is there stands for them."""

_REBUILD_FUNCTIONS = """
    parameter parameter_with_state qtensor tensor tensor_v2 tensor_v3 sparse_tensor meta_tensor_no_storage nested_tensor
    wrapper_subclass device_tensor_from_numpy device_tensor_from_cpu_tensor
"""
_KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_TENSOR_CLASSES = [f"{module}.{kind}Tensor" for module in ("torch", "torch.cuda") for kind in _KINDS]
_TENSOR_CLASSES += [f"{module}.{kind}Tensor" for module in ("torch.sparse", "torch.cuda.sparse") for kind in _KINDS[:-1]]

WEIGHTS_ONLY = frozenset([
    "collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
    "torch.Size", "torch.Tensor", "torch.device", "_codecs.encode", "builtins.bytearray", "builtins.set",
    "builtins.complex", "torch._tensor._rebuild_from_type_v2", "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    *(f"torch.{dtype.name}" for dtype in DTYPES),
    *(f"{_UTILS}._rebuild_{name}" for name in _REBUILD_FUNCTIONS.split()),
    *(f"torch.{name}" for name in BY_STORAGE_CLASS),
    *(f"torch.cuda.{name}" for name in BY_STORAGE_CLASS if not name.startswith("Q")),
    *(f"torch.per_{name}" for name in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric",
                                       "channel_affine_float_qparams")),
    *_TENSOR_CLASSES,
])  # fmt: skip
"""The globals that `torch.load(weights_only=True)` accepts without being told to."""


# ------------------------------------------------------------------------------------------------------------- reading


def read_torch_pickle(stream: bytes, storage_for: StorageLookup, *, nested: Callable[[bytes], Node] | None = None) -> Node:
    """The tree of a `data.pkl`, its tensors as `TensorRef` over the storages that `storage_for` finds.

    `nested` reads the torch streams inside (`torch.storage._load_from_bytes`), which are left alone without it.
    """
    reducers = REDUCERS if nested is None else {**REDUCERS, "torch.storage._load_from_bytes": _nested_reducer(nested)}
    return read_pickle(stream, reducers=reducers, persistent=StorageIds(storage_for))


def named_storages(stream: bytes) -> dict[str, tuple[int, DType | None]]:
    """The storages that a pickle names, by key: size in bytes and element type (None: untyped).

    For containers in which a storage's place depends on the sizes of others; nothing else is made of the stream.
    """
    found: dict[str, tuple[int, DType | None]] = {}

    def note(key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
        found[key] = nbytes, dtype
        return Storage(MemorySource(b"", _NOWHERE), 0, nbytes, location, f"storage {key}", dtype)

    read_pickle(stream, reducers=dict.fromkeys(REDUCERS, lambda _: None), persistent=StorageIds(note))
    return found


def _nested_reducer(nested: Callable[[bytes], Node]) -> Reducer:
    def reduce(args: tuple[Node, ...]) -> Node:
        if len(args) != 1 or type(args[0]) not in (bytes, str):
            return Call(_LOAD_FROM_BYTES, args)
        return nested(args[0] if type(args[0]) is bytes else args[0].encode())  # python 2's, if it happened to be UTF-8

    return reduce


class StorageIds:
    """Turns the persistent ids of one stream into storages, one object for each storage key.

    Legacy files have two more kinds: a window of another storage, and the class of a module (with its source text).
    """

    def __init__(self, storage_for: StorageLookup) -> None:
        self._storage_for = storage_for
        self._found: dict[str, tuple[Storage, Node, Node]] = {}
        self._dtypes: dict[Global, DType | None] = {}

    def __call__(self, pid: Node) -> Storage | Window | Global:
        if type(pid) is not tuple or len(pid) < 4:
            raise MalformedCheckpoint("a persistent id is not that of a storage")
        if pid[0] != "storage" and _text(pid[0]) != "storage":
            return _module_class(pid)
        if len(pid) < 5:
            raise MalformedCheckpoint("a persistent id is not that of a storage")
        whole = self._storage(pid)
        if len(pid) < 6 or pid[5] is None:
            return whole
        view = pid[5]  # of legacy files: its key, offset and size in elements
        if type(view) is not tuple or len(view) != 3:
            raise MalformedCheckpoint("a view of it is not a tuple of key, offset and size")
        return part_of(whole if isinstance(whole, Window) else window(whole), view[1], view[2])

    def _storage(self, pid: tuple[Node, ...]) -> Storage | Window:
        cls, key, location, numel = pid[1:5]
        if type(key) is not str or type(location) is not str:
            key, location = _text(key), _text(location)
        if key is None or location is None or type(numel) is not int or numel < 0 or numel >> 60:
            raise MalformedCheckpoint("its persistent id holds something other than names and sizes", where=f"storage {key}")
        if (known := self._found.get(key)) is not None:
            if known[1] is cls and known[2] == numel:
                return known[0]
            return _retyped(known[0], storage_dtype(cls), numel)
        if type(cls) is not Global or cls not in self._dtypes:
            self._dtypes[cls] = storage_dtype(cls)
        dtype = self._dtypes[cls]
        storage = self._storage_for(key, location, numel * dtype.itemsize if dtype else numel, dtype)
        self._found[key] = storage, cls, numel
        return storage


class Window(NamedTuple):
    """A part of a storage that stands for one: elements `start` to `stop` of `dtype` (None: of bytes).

    torch saves typed and untyped views of one storage; old torch also saved slices of storages.
    """

    storage: Storage
    dtype: DType | None
    start: int
    stop: int


def _retyped(storage: Storage, dtype: DType | None, numel: int) -> Window:
    both_typed = dtype is not None and storage.dtype is not None and storage.nbytes
    if both_typed or numel * (dtype or UINT8).itemsize != storage.nbytes:
        raise MalformedCheckpoint("two persistent ids of it contradict each other", where=storage.name)
    return Window(storage, dtype, 0, numel)


def part_of(whole: Window, start: Node, size: Node) -> Window:
    """The window of `size` elements at `start` of another; `MalformedCheckpoint` where it does not lie inside."""
    if type(start) is not int or type(size) is not int or start < 0 or size < 0 or start + size > whole.stop - whole.start:
        raise MalformedCheckpoint("a view of it is not inside it", where=whole.storage.name)
    return whole._replace(start=whole.start + start, stop=whole.start + start + size)


def window(storage: Storage) -> Window:
    """All of a storage."""
    return Window(storage, storage.dtype, 0, storage.nbytes // (storage.dtype or UINT8).itemsize)


def _module_class(pid: tuple[Node, ...]) -> Global:
    """The class of a legacy id `('module', class, file, source text)`."""
    if _text(pid[0]) != "module" or type(pid[1]) is not Global:
        raise MalformedCheckpoint("a persistent id is not that of a storage")
    return pid[1]


def tensor_of_storage(
    node: Node, offset: Node, shape: Node, stride: Node, requires_grad: bool = False, dtype: DType | None = None
) -> TensorRef:
    """The tensor over a storage or a window of one; of the type that the storage's class names, or of `dtype`."""
    if type(node) is Storage:
        return view_of(node, dtype or node.dtype or UINT8, offset, shape, stride, requires_grad)
    if type(node) is not Window:
        raise MalformedCheckpoint("a tensor is rebuilt from something other than a storage")
    storage, typed, start, stop = node
    dtype = dtype or typed or UINT8
    unit = (typed or UINT8).itemsize
    if type(offset) is not int or offset < 0 or start * unit % dtype.itemsize:
        raise MalformedCheckpoint("its storage_offset is not a size", where=storage.name)
    ref = view_of(storage, dtype, start * unit // dtype.itemsize + offset, shape, stride, requires_grad)
    if ref.numel and ref.byte_span()[1] > stop * unit:
        raise MalformedCheckpoint("a tensor reaches beyond the view of a storage that it is made of", where=storage.name)
    return ref


def _text(value: Node) -> str | None:
    if type(value) is bytes:
        return value.decode("utf-8", "replace")
    return value if type(value) is str else None


def storage_dtype(cls: Node) -> DType | None:
    """The element type of a storage class, None for the untyped one; `UnsupportedCheckpoint` for an unknown class."""
    if type(cls) is Global and cls.module.partition(".")[0] == "torch":
        if cls.name == "UntypedStorage":
            return None
        if (dtype := BY_STORAGE_CLASS.get(cls.name)) is not None:
            return dtype
    raise UnsupportedCheckpoint(f"has the unknown storage class {spoken(cls)}")


def _tensor_v2(args: tuple[Node, ...]) -> Node:
    if not 4 <= len(args) <= 7:
        raise MalformedCheckpoint("a tensor is rebuilt from too few or too many arguments")
    ref = tensor_of_storage(args[0], args[1], args[2], args[3], len(args) > 4 and args[4] is True)
    return ref if len(args) < 7 or args[6] is None else _with_bits(ref, args[6])


def _tensor_v3(args: tuple[Node, ...]) -> Node:
    if not 7 <= len(args) <= 8 or type(args[6]) is not Global:
        raise MalformedCheckpoint("a tensor is rebuilt from too few or too many arguments")
    dtype = BY_NAME.get(args[6].name) if args[6].module == "torch" else None
    if dtype is None:
        raise UnsupportedCheckpoint(f"a tensor has the unknown dtype {args[6].path}")
    ref = tensor_of_storage(args[0], args[1], args[2], args[3], args[4] is True, dtype)
    return ref if len(args) < 8 or args[7] is None else _with_bits(ref, args[7])


def _with_bits(ref: TensorRef, metadata: Node) -> TensorRef:
    """`ref` with torch's lazy conj and neg bits, the only tensor metadata that torch knows.

    A bit is set where it is named, whatever its value: torch looks no further (`_set_tensor_metadata`, c10's TensorImpl).
    """
    bits = dict(metadata.pairs) if type(metadata) is Dict and all(type(k) is str for k, _ in metadata.pairs) else None
    if bits is None or not bits.keys() <= {"conj", "neg"} or not all(type(value) in _TRUTHS for value in bits.values()):
        raise MalformedCheckpoint("a tensor carries metadata other than its conj and neg bits", where=ref.storage.name)
    conj, neg = "conj" in bits, "neg" in bits
    if (conj and ref.dtype.kind != "complex") or (neg and ref.dtype.kind == "bool"):
        raise MalformedCheckpoint(f"a {ref.dtype.name} tensor carries a bit that it cannot have", where=ref.storage.name)
    return ref._replace(conj=conj, neg=neg)


_TRUTHS = (bool, int, float, type(None))  # what torch takes for a bool


def _parameter(args: tuple[Node, ...]) -> Node:
    if len(args) == 3 and type(args[0]) is TensorRef:
        return TensorObject(requiring_grad(args[0], args[1] is True))
    return Call(_REBUILD_PARAMETER, args)


def _parameter_with_state(args: tuple[Node, ...]) -> Node:
    if len(args) == 4 and type(args[0]) is TensorRef:
        return TensorObject(requiring_grad(args[0], args[1] is True), state=args[3])
    return Call(_REBUILD_PARAMETER_WITH_STATE, args)


def _from_type(args: tuple[Node, ...]) -> Node:
    if len(args) == 4 and type(args[0]) is Global and args[0].path in _PLAIN_REBUILDS and type(args[2]) is tuple:
        return TensorObject(_PLAIN_REBUILDS[args[0].path](args[2]), cls=args[1], state=args[3])
    return Call(_REBUILD_FROM_TYPE, args)


_PLAIN_REBUILDS: dict[str, Reducer] = {
    f"{_UTILS}._rebuild_tensor": _tensor_v2,
    f"{_UTILS}._rebuild_tensor_v2": _tensor_v2,
    f"{_UTILS}._rebuild_tensor_v3": _tensor_v3,
}
REDUCERS: dict[str, Reducer] = {
    **_PLAIN_REBUILDS,
    f"{_UTILS}._rebuild_parameter": _parameter,
    f"{_UTILS}._rebuild_parameter_with_state": _parameter_with_state,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
}
"""The calls that become leaves; every other function that torch pickles stays a symbolic call."""


# ------------------------------------------------------------------------------------------------------------- writing


class StoredAs(NamedTuple):
    """How a tensor (or a bare storage) is written: in a record of `nbytes` bytes, under the tag `location`.

    `storage_dtype` is the type of the storage class, None for an untyped storage; `dtype`, `offset` and `stride` (in
    elements) are the tensor's. `resolved`: its conj and neg bits are already in the values.
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
        return [] if self.resolved else [name for name, on in (("conj", ref.conj), ("neg", ref.neg)) if on]


class _Bare(NamedTuple):
    """The tensor inside a Parameter, which does not require gradients itself."""

    ref: TensorRef


class _StorageOf(NamedTuple):
    """The persistent id of the storage of a tensor."""

    ref: TensorRef


class TorchLeaves:
    """Writes tensors and storages into a pickle; `stored_as` says of each of them the key of its record, and how it lies there.

    `stored_as` is asked in the order in which the storages stand in the pickle.
    """

    def __init__(self, stored_as: Callable[[TensorRef | Storage], tuple[str, StoredAs]]) -> None:
        self._stored_as = stored_as
        # What stands around a storage's key is the same bytes for all tensors of one form, once all names in it are memoized.
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
            raise RefusedObject(
                "a storage that stands by itself as a part or another type of one",
                where=node.storage.name,
                hint="--only PATH takes one part",
            )
        raise TypeError(f"no such leaf: {kind}")

    def _tensor(self, ref: TensorRef, requires_grad: bool, writer: PickleWriter) -> bytes:
        key, stored = self._stored_as(ref)
        same = (stored, ref.shape, requires_grad, ref.conj, ref.neg)
        if (around := self._around.get(same)) is not None:
            return around[0] + _key(key) + around[1]
        before = writer.count
        head = self._head(stored, True, writer)
        tail = self._tail(stored, writer) + integer(stored.offset) + integers(ref.shape) + integers(stored.stride)
        tail += (b"\x88" if requires_grad else b"\x89") + writer.named("collections", "OrderedDict") + b")R"
        if stored.storage_dtype is None:
            tail += writer.named("torch", stored.dtype.name)
        if (ref.conj or ref.neg) and (bits := stored.bits(ref)):
            tail += b"}(" + b"".join(writer.text(bit) + b"\x88" for bit in bits) + b"u"
        tail += b"tR"
        if writer.count == before:
            self._around[same] = head, tail
        return head + _key(key) + tail

    def _head(self, stored: StoredAs, rebuild: bool, writer: PickleWriter) -> bytes:
        """The opcodes up to the storage's key."""
        typed = stored.storage_dtype
        head = b""
        if rebuild:
            head = writer.named(_UTILS, "_rebuild_tensor_v3" if typed is None else "_rebuild_tensor_v2") + b"("
        head += b"(" + writer.text("storage")
        head += (
            writer.named("torch.storage", "UntypedStorage")
            if typed is None
            else writer.named("torch", typed.storage_class or "")
        )
        return head

    def _tail(self, stored: StoredAs, writer: PickleWriter) -> bytes:
        """Location and element count of the storage, and the end of its persistent id."""
        count = stored.nbytes // (stored.storage_dtype or UINT8).itemsize
        return writer.text(stored.location) + integer(count) + b"tQ"

    def _object(self, node: TensorObject) -> Node:
        ref = node.tensor
        if node.cls is None:
            given = (_Bare(ref), ref.requires_grad, Call(ORDERED_DICT, ()))
            return Call(_REBUILD_PARAMETER, given) if node.state is None else Call(
                _REBUILD_PARAMETER_WITH_STATE, (*given, node.state)
            )  # fmt: skip
        _, stored = self._stored_as(ref)
        typed = stored.storage_dtype is not None
        args: tuple[Node, ...] = (_StorageOf(ref), stored.offset, ref.shape, stored.stride, ref.requires_grad)
        args += (Call(ORDERED_DICT, ()),) if typed else (Call(ORDERED_DICT, ()), Global("torch", stored.dtype.name))
        if bits := stored.bits(ref):
            args += (Dict([(bit, True) for bit in bits]),)
        rebuild = Global(_UTILS, "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        return Call(_REBUILD_FROM_TYPE, (rebuild, node.cls, args, node.state))


def _key(key: str) -> bytes:
    return b"X%c\0\0\0" % len(key) + key.encode()


def plain_sizes(size: Node) -> tuple[int, ...] | None:
    """The numbers in a `torch.Size`, a tuple or a list; None where it is something else, or holds something else."""
    if type(size) is Call and size.name == "torch.Size" and len(size.args) == 1:
        size = size.args[0]
    if type(size) not in (tuple, list) or any(type(number) is not int for number in size):
        return None
    return tuple(size)


def is_tensor_call(node: Node) -> bool:
    """Whether a symbolic node rebuilds a tensor of a kind that has no `TensorRef` (sparse, quantized, subclass, ...)."""
    return type(node) is Call and "torch" in node.name and "_rebuild" in node.name
