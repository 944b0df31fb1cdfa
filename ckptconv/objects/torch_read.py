"""torch's own classes and functions in a pickle: rebuild calls and persistent ids → `TensorRef` and
`Storage`.

The way back is `torch_write`. What `torch.save` pickles is
read from torch/_utils.py, torch/storage.py and torch/_tensor.py (torch 2.13); what
`torch.load(weights_only=True)` accepts, from torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ckptconv.io.source import MemorySource
from ckptconv.objects.known_names import UTILS
from ckptconv.pickles.making import Reducer
from ckptconv.pickles.nodes import Call, Dict, Global, Node, spoken
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.dtypes import BY_NAME, BY_STORAGE_CLASS, UINT8, DType
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, requiring_grad, view_of

StorageLookup = Callable[[str, str, int, "DType | None"], Storage]
"""From key, location tag, size in bytes and type (None: untyped) to the storage, or an error."""
REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_LOAD_FROM_BYTES = Global("torch.storage", "_load_from_bytes")
_NOWHERE = Path()
REBUILD_PARAMETER = Global(UTILS, "_rebuild_parameter")
REBUILD_PARAMETER_WITH_STATE = Global(UTILS, "_rebuild_parameter_with_state")


def read_torch_pickle(
    stream: bytes, storage_for: StorageLookup, *, nested: Callable[[bytes], Node] | None = None
) -> Node:
    """The tree of a `data.pkl`, its tensors as `TensorRef` over the storages that `storage_for`
    finds.

    `nested` reads the torch streams inside (`torch.storage._load_from_bytes`), which are left alone
    without it.
    """
    reducers = REDUCERS
    if nested is not None:
        reducers = {**REDUCERS, _LOAD_FROM_BYTES.path: _nested_reducer(nested)}
    return _read(stream, reducers, storage_for)


def named_storages(stream: bytes) -> dict[str, tuple[int, DType | None]]:
    """The storages that a pickle names, by key: size in bytes and element type (None: untyped).

    For containers in which a storage's place depends on the sizes of others; nothing else is made
    of the stream.
    """
    found: dict[str, tuple[int, DType | None]] = {}

    def note(key: str, location: str, nbytes: int, dtype: DType | None) -> Storage:
        found[key] = nbytes, dtype
        return Storage(MemorySource(b"", _NOWHERE), 0, nbytes, location, f"storage {key}", dtype)

    _read(stream, dict.fromkeys(REDUCERS, lambda _: None), note)
    return found


def _read(stream: bytes, reducers: Mapping[str, Reducer], storage_for: StorageLookup) -> Node:
    from ckptconv.pickles.reader import read_pickle  # what is not a pickle does not need it

    return read_pickle(stream, reducers=reducers, persistent=StorageIds(storage_for))


def _nested_reducer(nested: Callable[[bytes], Node]) -> Reducer:
    def reduce(args: tuple[Node, ...]) -> Node:
        match args:
            case (bytes() as raw,):
                return nested(raw)
            case (str() as text,):  # python 2's bytes, if they happened to be UTF-8
                return nested(text.encode())
        return Call(_LOAD_FROM_BYTES, args)

    return reduce


class StorageIds:
    """Turns the persistent ids of one stream into storages, one object for each storage key.

    Legacy files have two more kinds: a window of another storage, and the class of a module (with
    its source text).
    """

    def __init__(self, storage_for: StorageLookup) -> None:
        self._storage_for = storage_for
        self._found: dict[str, tuple[Storage, Node, Node]] = {}
        self._last_class: Node = object()
        self._last_dtype: DType | None = None

    def __call__(self, pid: Node) -> Storage | Window | Global:
        if type(pid) is tuple and len(pid) == 5 and pid[0] == "storage":
            return self._storage(*pid)  # what torch writes today
        if type(pid) is not tuple or len(pid) < 4:
            raise MalformedCheckpoint("a persistent id is not that of a storage")
        kind = _text(pid[0])
        if kind == "module" and type(pid[1]) is Global:  # of legacy: class, file, source text
            return pid[1]
        if kind != "storage" or len(pid) < 5:
            raise MalformedCheckpoint("a persistent id is not that of a storage")
        whole = self._storage(*pid[:5])
        if len(pid) < 6 or pid[5] is None:
            return whole
        view = pid[5]  # of legacy files: its key, offset and size in elements
        if type(view) is not tuple or len(view) != 3:
            raise MalformedCheckpoint("a view of it is not a tuple of key, offset and size")
        if not isinstance(whole, Window):
            whole = window(whole)
        return part_of(whole, view[1], view[2])

    def _storage(
        self, _: Node, cls: Node, key: Node, location: Node, numel: Node
    ) -> Storage | Window:
        if type(key) is not str or type(location) is not str:
            key, location = _text(key), _text(location)
        if key is None or location is None or type(numel) is not int or numel < 0 or numel >> 60:
            what = "its persistent id holds something other than names and sizes"
            raise MalformedCheckpoint(what, where=f"storage {key}")
        known = self._found.get(key)
        if known is not None:
            if known[1] is cls and known[2] == numel:
                return known[0]
            return _retyped(known[0], storage_dtype(cls), numel)
        if cls is not self._last_class:  # nearly all storages of a file are of one
            self._last_class, self._last_dtype = cls, storage_dtype(cls)
        dtype = self._last_dtype
        nbytes = numel * (dtype or UINT8).itemsize
        storage = self._storage_for(key, location, nbytes, dtype)
        self._found[key] = storage, cls, numel
        return storage


class Window(NamedTuple):
    """A part of a storage that stands for one: elements `start` to `stop` of `dtype` (None: of
    bytes).

    torch saves typed and untyped views of one storage; old torch also saved slices of storages.
    """

    storage: Storage
    dtype: DType | None
    start: int
    stop: int


def _retyped(storage: Storage, dtype: DType | None, numel: int) -> Window:
    both_typed = dtype is not None and storage.dtype is not None and storage.nbytes
    if both_typed or numel * (dtype or UINT8).itemsize != storage.nbytes:
        what = "two persistent ids of it contradict each other"
        raise MalformedCheckpoint(what, where=storage.name)
    return Window(storage, dtype, 0, numel)


def part_of(whole: Window, start: Node, size: Node) -> Window:
    """The window of `size` elements at `start` of another; `MalformedCheckpoint` if outside."""
    are_sizes = all(type(number) is int and number >= 0 for number in (start, size))
    if not are_sizes or start + size > whole.stop - whole.start:
        raise MalformedCheckpoint("a view of it is not inside it", where=whole.storage.name)
    return whole._replace(start=whole.start + start, stop=whole.start + start + size)


def window(storage: Storage) -> Window:
    """All of a storage."""
    return Window(storage, storage.dtype, 0, storage.nbytes // (storage.dtype or UINT8).itemsize)


def tensor_of_storage(
    node: Node,
    offset: Node,
    shape: Node,
    stride: Node,
    requires_grad: bool = False,
    dtype: DType | None = None,
) -> TensorRef:
    """The tensor over a storage or a window; of the type of the storage's class, or `dtype`."""
    if type(node) is Storage:
        return view_of(node, dtype or node.dtype or UINT8, offset, shape, stride, requires_grad)
    if type(node) is not Window:
        raise MalformedCheckpoint("a tensor is rebuilt from something other than a storage")
    storage, typed, start, stop = node
    dtype = dtype or typed or UINT8
    unit = (typed or UINT8).itemsize
    if type(offset) is not int or offset < 0 or start * unit % dtype.itemsize:
        raise MalformedCheckpoint("its storage_offset is not a size", where=storage.name)
    offset += start * unit // dtype.itemsize
    ref = view_of(storage, dtype, offset, shape, stride, requires_grad)
    if ref.numel and ref.byte_span()[1] > stop * unit:
        what = "a tensor reaches beyond the view of a storage that it is made of"
        raise MalformedCheckpoint(what, where=storage.name)
    return ref


def _text(value: Node) -> str | None:
    if type(value) is bytes:
        return value.decode("utf-8", "replace")
    return value if type(value) is str else None


def storage_dtype(cls: Node) -> DType | None:
    """The type of a storage class, None if untyped; `UnsupportedCheckpoint` for an unknown one."""
    if type(cls) is Global and cls.module.partition(".")[0] == "torch":
        if cls.name == "UntypedStorage":
            return None
        dtype = BY_STORAGE_CLASS.get(cls.name)
        if dtype is not None:
            return dtype
    raise UnsupportedCheckpoint(f"has the unknown storage class {spoken(cls)}")


def _tensor_v2(args: tuple[Node, ...]) -> Node:
    if not 4 <= len(args) <= 7:
        raise MalformedCheckpoint("a tensor is rebuilt from too few or too many arguments")
    storage, offset, shape, stride = args[:4]
    requires_grad = len(args) > 4 and args[4] is True
    if type(storage) is Storage:
        dtype = storage.dtype or UINT8
        ref = view_of(storage, dtype, offset, shape, stride, requires_grad)
    else:
        ref = tensor_of_storage(storage, offset, shape, stride, requires_grad)
    if len(args) < 7:
        return ref
    return _with_bits(ref, args[6])


def _tensor_v3(args: tuple[Node, ...]) -> Node:
    if not 7 <= len(args) <= 8 or type(args[6]) is not Global:
        raise MalformedCheckpoint("a tensor is rebuilt from too few or too many arguments")
    dtype = BY_NAME.get(args[6].name)
    if dtype is None or args[6].module != "torch":
        raise UnsupportedCheckpoint(f"a tensor has the unknown dtype {args[6].path}")
    ref = tensor_of_storage(args[0], args[1], args[2], args[3], args[4] is True, dtype)
    if len(args) < 8:
        return ref
    return _with_bits(ref, args[7])


def _with_bits(ref: TensorRef, metadata: Node) -> TensorRef:
    """`ref` with torch's lazy conj and neg bits, the only tensor metadata that torch knows.

    A bit is set where it is named, whatever its value: torch looks no further
    (`_set_tensor_metadata`, c10's TensorImpl).
    """
    if metadata is None:
        return ref
    pairs = metadata.pairs if type(metadata) is Dict else [(None, None)]
    if any(
        type(name) is not str or name not in ("conj", "neg") or type(value) not in _TRUTHS
        for name, value in pairs
    ):
        what = "a tensor carries metadata other than its conj and neg bits"
        raise MalformedCheckpoint(what, where=ref.storage.name)
    bits = dict(pairs)
    conj, neg = "conj" in bits, "neg" in bits
    if (conj and ref.dtype.kind != "complex") or (neg and ref.dtype.kind == "bool"):
        what = f"a {ref.dtype.name} tensor carries a bit that it cannot have"
        raise MalformedCheckpoint(what, where=ref.storage.name)
    return ref._replace(conj=conj, neg=neg)


_TRUTHS = (bool, int, float, type(None))  # what torch takes for a bool


def _parameter(func: Global, count: int, args: tuple[Node, ...]) -> Node:
    if len(args) != count or type(args[0]) is not TensorRef:
        return Call(func, args)
    ref, requires_grad, _hooks, *state = args
    return TensorObject(requiring_grad(ref, requires_grad is True), None, *state)


def _from_type(args: tuple[Node, ...]) -> Node:
    match args:
        case (Global(path=path), cls, given, state) if type(given) is tuple:
            if path in _PLAIN_REBUILDS:
                return TensorObject(_PLAIN_REBUILDS[path](given), cls=cls, state=state)
    return Call(REBUILD_FROM_TYPE, args)


_PLAIN_REBUILDS: dict[str, Reducer] = {
    f"{UTILS}._rebuild_tensor": _tensor_v2,
    f"{UTILS}._rebuild_tensor_v2": _tensor_v2,
    f"{UTILS}._rebuild_tensor_v3": _tensor_v3,
}
REDUCERS: dict[str, Reducer] = {
    **_PLAIN_REBUILDS,
    REBUILD_PARAMETER.path: partial(_parameter, REBUILD_PARAMETER, 3),
    REBUILD_PARAMETER_WITH_STATE.path: partial(_parameter, REBUILD_PARAMETER_WITH_STATE, 4),
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
}
"""The calls that become leaves; every other function that torch pickles stays a symbolic call."""


def is_tensor_call(node: Node) -> bool:
    """Whether a node rebuilds a tensor that has no `TensorRef` (sparse, quantized, ...)."""
    return type(node) is Call and "torch" in node.name and "_rebuild" in node.name


def plain_sizes(size: Node) -> tuple[int, ...] | None:
    """The numbers in a `torch.Size`, a tuple or a list; None where it holds anything else."""
    if type(size) is Call and size.name == "torch.Size" and len(size.args) == 1:
        size = size.args[0]
    if type(size) not in (tuple, list) or any(type(number) is not int for number in size):
        return None
    return tuple(size)
