"""An open checkpoint as a mapping from names to tensors: nothing is read before values are asked
for, and of a part of a tensor only that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckptconv.devices.host import require_device, require_torch
from ckptconv.formats import registry
from ckptconv.formats.registry import Named
from ckptconv.io.files import refuse_changed
from ckptconv.pickles.nodes import Node
from ckptconv.support.arrays import Array, np
from ckptconv.support.choices import spelling_checked
from ckptconv.support.errors import MissingTensor, OptionRefused, RefusedObject, errors_at
from ckptconv.support.limits import held
from ckptconv.support.records import dataclass
from ckptconv.support.report import short_repr
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.refs import Shape
from ckptconv.tree.checkpoint import Checkpoint, Edit
from ckptconv.values.collect import TensorStatistics, statistics_of
from ckptconv.values.named import NamedValue, named_values
from ckptconv.values.picking import Box, picked, values_of, whole_box

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as TorchDevice


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor:
    """A tensor of an open checkpoint under its name, or a part of one.

    `numpy`, `torch` and `stats` read its values, each time anew; nothing else does. `tensor[0:2]`
    and `tensor[..., 3]` are parts, as numpy's basic indexing gives them, of which only what they
    need is read, also over a network. What is read whole is held against the checksums that the
    file declares. Quantized and packed values are decoded: to float32. A `dtype` equals its name
    and that type of numpy and of torch.
    """

    name: str
    _item: NamedValue
    _box: Box
    _all: _ByName

    @property
    def shape(self) -> Shape:
        """The sizes of its dimensions."""
        return self._box.shape

    @property
    def dtype(self) -> DType:
        """The type that the file has it in."""
        return self._item.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that its values take in the file; of quantized ones those of their codes."""
        return self._item.ref.nbytes * prod(self.shape) // max(1, self._item.numel)

    @property
    def device(self) -> str:
        """The device tag that it was saved with; of safetensors and numpy ``cpu``."""
        return self._item.ref.location

    def __repr__(self) -> str:
        return short_repr("LazyTensor", self.name, self.dtype.name, list(self.shape), self.device)

    def __len__(self) -> int:
        if not self.shape:
            what = f"{self.name} has no dimensions, so it has no length"
            raise TypeError(f"{what}; its value is what torch() or numpy() give")
        return self.shape[0]

    def __bool__(self) -> bool:
        """There is such a tensor: ``if checkpoint.get("bias")``."""
        return True

    def __iter__(self) -> Iterator[LazyTensor]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, index: Any) -> LazyTensor:
        box = self._box.at(index, f"the index of {self.name}")
        return LazyTensor(self.name, self._item, box, self._all)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.name} is in a file, so its values are always a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def numpy(self) -> Array:
        """Its values as an array of numpy; of types that numpy does not have as those of ml_dtypes,
        of quantized and packed ones as float32.
        """
        values = self._all.values(self.name, self._box)
        return values.astype("float32") if self._item.decode is not None else values

    def torch(self, device: str | TorchDevice = "cpu") -> Tensor:
        """Its values as a tensor of torch on `device`: of the file's type, or float32 where they
        are decoded.

        Raises `DeviceUnavailable` for a device that this host does not have.
        """
        torch = require_torch("making live tensors")
        target, values = require_device(str(device)), self.numpy()
        kind = getattr(torch, self.dtype.name, None)
        # by what was done, and not by sizes: codes of qint32 are as wide as float32
        is_decoded = self._item.decode is not None or values.itemsize * 8 != self.dtype.bits
        read = getattr(torch, values.dtype.name) if is_decoded else kind
        raw = np.array(values, order="C").reshape(-1).view(np.uint8)
        made = torch.from_numpy(raw).view(read).reshape(self.shape)
        # complex32 comes as complex64; what is decoded stays float32
        made = made.to(kind) if self.dtype.kind == "complex" else made
        found: Tensor = made.to(target)
        return found

    def stats(self) -> TensorStatistics:
        """The statistics of its values, in one pass over them; `OptionRefused` for a part."""
        if self._box != whole_box(self._item.shape):
            what = f"{self.name} is only a part here, and statistics are of whole tensors"
            raise OptionRefused(what, hint="take those of numpy() of the part")
        (found,) = statistics_of([self._all.certain(self.name)])
        return found


class _ByName:
    """The tensors of a checkpoint by their names, and what is known of their checksums."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._checksums = Checksums()
        with held(checkpoint.limits):
            self._found = named_values(checkpoint)
        self._items = _once(self._found.values)
        self.names = dict.fromkeys(
            [*(item.name for item in self._found.values), *self._found.unread]
        )

    @cached_property
    def _certain(self) -> Mapping[str, NamedValue]:
        """The same, of a folder whose index does not tell how its tensors lie in their files."""
        certain = self._checkpoint.certain()
        if certain is self._checkpoint:
            return self._items
        with held(certain.limits):
            return _once(named_values(certain).values)

    def tensor(self, name: str) -> LazyTensor:
        """The tensor of this name, unread."""
        path = self._checkpoint.path
        if not isinstance(name, str):  # a mapping has a KeyError for whatever it does not hold
            raise MissingTensor(f"{name!r:.100} is not the name of a tensor", path=path)
        if name not in self._items and name in self._found.unread:
            what = "is a tensor whose values cannot be taken one by one"
            raise RefusedObject(what, path=path, where=name, hint="load_portable loads it")
        item = self._items.get(name) or picked(self._found, name, path, is_whole=True)
        return LazyTensor(name, item, whole_box(item.shape), self)

    def certain(self, name: str) -> NamedValue:
        """The tensor as its own file has it."""
        return self._certain[name]

    def values(self, name: str, box: Box) -> Array:
        """The values of a part of a tensor, read now; of a whole one held against its checksums."""
        path, limits = self._checkpoint.path, self._checkpoint.limits
        with held(limits), errors_at(path=path, where=name):
            item = self.certain(name)
            if box == whole_box(item.shape):
                for piece in item.ref.pieces:
                    self._checksums.read(piece.storage)
            values = values_of(item, box)
            refuse_changed(self._checkpoint.sources)
            return values


def _once(values: Sequence[NamedValue]) -> dict[str, NamedValue]:
    """The tensors by their names, without those whose name another one has too."""
    counts = Counter(item.name for item in values)
    return {item.name: item for item in values if counts[item.name] == 1}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpenCheckpoint(Checkpoint, Mapping[str, LazyTensor]):
    """What `open_checkpoint` gives: a checkpoint, and a mapping from the names of all its tensors,
    as `stats` and `show` name them, to `LazyTensor`s, in the order of the file.

    A name that is not there is a `MissingTensor`, which is a `KeyError`.
    """

    _by_name: list[_ByName] = field(init=False, default_factory=list)  # made when first asked for
    _read_again: list[OpenCheckpoint] = field(init=False, default_factory=list)

    def __enter__(self) -> OpenCheckpoint:
        return self

    def _repr_html_(self) -> str:
        from ckptconv.inspect.report import tree_html  # only a notebook asks

        return tree_html(self)

    @property
    def tree(self) -> Node:
        """Its tree of symbolic nodes: its `root`."""
        return self.root

    def certain(self) -> OpenCheckpoint:
        """As `Checkpoint.certain`."""
        if self.reread is None:
            return self
        if not self._read_again:
            self._read_again.append(_open(Checkpoint.certain(self)))
        return self._read_again[0]

    def __getitem__(self, name: str) -> LazyTensor:
        return self._names().tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names().names)

    def __len__(self) -> int:
        return len(self._names().names)

    def __contains__(self, name: object) -> bool:
        return name in self._names().names

    def _names(self) -> _ByName:
        if not self._by_name:
            self._by_name.append(_ByName(self))
        return self._by_name[0]


def _open(found: Checkpoint) -> OpenCheckpoint:
    # field by field: `asdict` would copy the whole tree
    return OpenCheckpoint(**{item.name: getattr(found, item.name) for item in fields(Checkpoint)})


@spelling_checked
def open_checkpoint(
    source: Named,
    *,
    tag: str | None = None,
    whole_modules: bool = False,
    edits: Sequence[Edit] = (),
) -> OpenCheckpoint:
    """Open a checkpoint of one file or of many: read its index, but not the bytes of its tensors.

    `source` is a file, one that the caller has opened (`io.BytesIO` is like one; it is read from
    where it is, and stays there and open), the folder of a checkpoint of many files, the index in
    it, the folder around the only checkpoint or around the one that a file of it names, or a
    sequence of the files of all ranks (``torch.save`` of each rank's sharded state dict). `tag`
    chooses among the steps that a folder holds, by name or number, or among the variants of its
    weights. A whole module (``torch.save(model)``) appears as its state dict, unless
    `whole_modules` asks for the module itself. `edits` are made to it in their order, such as
    ``Drop("optimizer")``. Use the result as
    a context manager, or close it. Raises `UnsupportedCheckpoint` when it
    is something else (and says what), or one rank's file alone, `MalformedCheckpoint` or
    `LimitExceeded` when it contradicts itself.

    >>> with open_checkpoint("model.safetensors") as checkpoint:  # doctest: +SKIP
    ...     first = checkpoint["layer.weight"][0:2].numpy()
    """
    return _open(registry.open_by_index(source, tag=tag, whole_modules=whole_modules, edits=edits))
