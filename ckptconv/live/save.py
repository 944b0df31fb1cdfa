"""Saves live values as a portable file: tensors from any device, written as a stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options
from ckptconv.convert.planner import plan_conversion
from ckptconv.convert.targets import check_place
from ckptconv.devices.host import require_torch
from ckptconv.formats.target_format import Target
from ckptconv.io.places import Output, path_of
from ckptconv.io.source import Fingerprint, Source
from ckptconv.keys.key_map import Keys
from ckptconv.pickles.nodes import BYTEARRAY, SET, Call, Dict, Global, Node, ordered_dict
from ckptconv.support.choices import (
    DeviceName,
    DTypeName,
    Words,
    refuse_no_flag,
    refuse_no_output,
    spelling_checked,
)
from ckptconv.support.errors import RefusedObject, printable, too_deep
from ckptconv.support.progress import OnProgress
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Storage, TensorObject, view_of
from ckptconv.tree.checkpoint import MEMORY, Checkpoint
from ckptconv.tree.walk import place_text, tensors_of

if TYPE_CHECKING:
    import torch


@spelling_checked
def save_portable(
    state_dict: Any,
    output: Output,
    *,
    device: DeviceName | None = None,
    to: Target | None = None,
    keys: Keys = "strip",
    dtype: DTypeName | None = None,
    metadata: Words | Mapping[str, str] = (),
    max_shard_size: int | str | None = None,
    force: bool = False,
    fsync: bool = True,
    on_progress: OnProgress | None = None,
) -> ConversionResult:
    """Save live tensors, wherever they are, as a portable file: `model.state_dict()`, or a whole
    training checkpoint.

    `output` is a path, or a file that is open for writing, which gets the bytes when all are made.
    The format follows its name (or `to`; ``torch`` for an open file without a name). Every storage
    is tagged `device` (``cpu`` by default), whether this host has it or not; wrapper prefixes are
    stripped, and `keys`, `dtype`, `metadata` and `max_shard_size` mean what they mean in `Options`.
    What is written is what `convert_checkpoint` makes of the same values in a file. Tensors of
    other devices are copied to the CPU one at a time. The file appears whole or not at all, and an
    existing one is replaced only with `force`. `on_progress` is called with a `Progress` (bytes),
    about once a MiB. Raises `CheckpointError`, `RefusedObject` for values other than tensors and
    plain Python.

    >>> save_portable(model.state_dict(), "out.safetensors", device="cpu")  # doctest: +SKIP
    """
    refuse_no_output(output)
    refuse_no_flag(force=force, fsync=fsync)
    request = Options(
        to=to,
        keys=keys,
        device=device,
        dtype=dtype,
        metadata=metadata,
        max_shard_size=max_shard_size,
    ).request(None)
    require_torch("saving live tensors")
    check_place(output, request, force=force)
    try:
        root = _Symbolic().node(state_dict, None)
    except RecursionError:
        raise too_deep("nests too many containers to be saved", path=path_of(output)) from None
    nbytes = sum(ref.nbytes for _, ref in tensors_of(root))
    plan = plan_conversion(Checkpoint(_IN_MEMORY, MEMORY, root, nbytes), output, request)
    return execute_plan(plan, force=force, fsync=fsync, on_progress=on_progress)


_IN_MEMORY = Path("the state dict")
_LONGEST_INT = 2031  # bits; weights_only=True reads no longer ones


class _TensorSource(Source):
    """The bytes of a live storage, copied to the CPU while they are read."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        import torch

        self.path = _IN_MEMORY
        self.size = storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self._bytes[offset : offset + len(view)].cpu().numpy().data

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._bytes[offset : offset + nbytes].cpu().numpy().tobytes()

    def fingerprint(self) -> Fingerprint:
        # torch counts the changes in place of a tensor
        return (self._bytes.data_ptr(), self.size, self._bytes._version)

    def close(self) -> None:
        vars(self).pop("_bytes", None)


class _Symbolic:
    """Makes nodes of live values, one for each object."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._constants = (
            torch.dtype, torch.qscheme, torch.device, torch.Size, complex, set, bytearray,
        )  # fmt: skip
        self._nodes: dict[int, Node] = {}
        self._alive: list[Any] = []  # what is known by its address: nothing else may get it
        self._storages: dict[int, Storage] = {}

    def node(self, value: Any, place: Any) -> Node:
        """The node of `value`, which stands at `place`."""
        torch = self._torch
        if type(value) is int and value.bit_length() > _LONGEST_INT:
            self._refuse(value, place, f"of {value.bit_length()} bits cannot be saved portably")
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            made = self._tensor(value, place)
        elif isinstance(value, self._constants):  # a Size is a tuple too
            made = self._constant(value)
        elif isinstance(value, torch.layout):
            made = Call(Global("torch.serialization", "_get_layout"), (str(value),))
        elif isinstance(value, torch.storage.TypedStorage):
            dtype = BY_NAME[str(value.dtype).removeprefix("torch.")]
            made = self._storage(value._untyped_storage, dtype)
        elif isinstance(value, Mapping):
            return self._mapping(value, place)
        elif isinstance(value, list):
            made = self._nodes[id(value)] = []
            made.extend(self._items(value, place))
        elif isinstance(value, tuple):
            made = tuple(self._items(value, place))
        elif type(value).__module__ == "numpy" and hasattr(value, "item") and not value.ndim:
            made = self.node(value.item(), place)
        else:
            self._refuse(value, place)
        self._nodes[id(value)] = made
        return made

    def _items(self, value: Iterable[Any], place: Any) -> Iterator[Node]:
        return (self.node(item, (place, index, None)) for index, item in enumerate(value))

    def _refuse(self, value: Any, place: Any, what: str = "cannot be saved portably") -> Any:
        kind = printable(f"{type(value).__module__}.{type(value).__qualname__}")
        where, hint = place_text(place) or None, "save tensors and plain Python values only"
        if isinstance(value, self._torch.nn.Module):
            hint = "save what its state_dict() gives"
        raise RefusedObject(f"{kind} {what}", where=where, hint=hint)

    def _constant(self, value: Any) -> Node:
        torch = self._torch
        if isinstance(value, (torch.dtype, torch.qscheme)):
            return Global("torch", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            index = () if value.index is None else (value.index,)
            return Call(Global("torch", "device"), (value.type, *index))
        if isinstance(value, torch.Size):
            return Call(Global("torch", "Size"), (tuple(value),))
        if isinstance(value, complex):
            return Call(Global("builtins", "complex"), (value.real, value.imag))
        if isinstance(value, bytearray):
            return Call(BYTEARRAY, (bytes(value).decode("latin1"), "latin-1"))
        return Call(SET, ([self.node(item, None) for item in value],))

    def _mapping(self, value: Mapping[Any, Any], place: Any) -> Node:
        made: Any = ordered_dict() if isinstance(value, OrderedDict) else Dict()
        self._nodes[id(value)] = made
        made.pairs = [
            (self.node(key, place), self.node(item, (place, key, None)))
            for key, item in value.items()
        ]
        metadata = getattr(value, "_metadata", None)
        if metadata is not None and type(made) is Call:
            made.state = Dict([("_metadata", self.node(metadata, place))])
        return made

    def _tensor(self, tensor: torch.Tensor, place: Any) -> Node:
        torch = self._torch
        buffer = getattr(torch.nn, "Buffer", torch.Tensor)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, buffer)
        # of a class that is not known nothing is asked: its code would answer
        if not plain or tensor.is_nested or tensor.is_meta:
            kind = f"({tensor.layout}, {tensor.dtype}, {tensor.device})"
            self._refuse(tensor, place, f"{kind} has no plain values here")
        if tensor.is_quantized or tensor.layout != torch.strided:
            return self._made_of_parts(tensor, place)
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        storage = self._storage(tensor.untyped_storage(), dtype)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        ref = view_of(storage, dtype, int(tensor.storage_offset()), shape, stride)
        ref = ref._replace(
            requires_grad=tensor.requires_grad, conj=tensor.is_conj(), neg=tensor.is_neg()
        )
        return TensorObject(ref) if isinstance(tensor, torch.nn.Parameter) else ref

    def _made_of_parts(self, tensor: torch.Tensor, place: Any) -> Node:
        """The call by which torch pickles a sparse or quantized tensor: a conversion makes of it
        what it makes of one in a file.
        """
        made_by: Any = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        make, arguments = made_by[:2]
        if isinstance(tensor, self._torch.nn.Parameter):
            self._refuse(tensor, place, f"({tensor.layout}) has no plain values here")
        args = tuple(self.node(item, place) for item in arguments)
        return Call(Global(make.__module__, make.__name__), args)

    def _storage(self, live: torch.UntypedStorage, dtype: DType) -> Storage:
        known = self._storages.get(live._cdata)
        if known is None:
            self._alive.append(live)
            typed, device = dtype if dtype.storage_class else None, str(live.device)
            source = _TensorSource(live)
            known = Storage(source, 0, source.size, device, "a live storage", typed)
            self._storages[live._cdata] = known
        return known
