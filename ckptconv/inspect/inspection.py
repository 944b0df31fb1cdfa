"""What `inspect_checkpoint` gives: the facts about a checkpoint, and why it is not portable: what
the library of its own kind refuses on any host, although ckptconv reads it.

Sources: torch/_weights_only_unpickler.py (opcodes and globals), caffe2/serialize/versions.h (file
format versions 1 to 10), torch/_utils.py (nested tensors), safetensors/torch.py (dtypes). Each was
provoked with torch 2.13 and safetensors 0.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from ckptconv.pickles.nodes import Call, Dict, Node, children
from ckptconv.support.errors import LimitExceeded, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import danger_in, html_table, short_repr
from ckptconv.support.text import count_text, size_text, some_text
from ckptconv.tree.checkpoint import SAFETENSORS_LIBRARY, UNKNOWN, Checkpoint, Container
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
    names the library. A library that hangs says nothing.
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
        refs = (tensor_of(node) for _, node in walk(file.root))
        packed = sorted({ref.dtype.name for ref in refs if ref is not None and ref.dtype.is_packed})
        if packed:
            what = f"torch does not have its dtypes {', '.join(packed)}"
            yield Refusal("dtype", what, "Dtype not understood", "safetensors.torch")


def _torch_refusals(file: Checkpoint) -> Iterator[Refusal]:
    if file.container.has_version and file.facts.version not in _VERSIONS:
        told = "no version" if file.facts.version is None else f"the version {file.facts.version}"
        what = f"its archive has {told}; torch reads the versions 1 to 10"
        yield Refusal("version", what, "PytorchStreamReader failed")
    legacy = file.container.is_legacy
    unread: set[Refusal] = set()  # many nodes have the same fault: it is told once
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
        except RefusedObject:  # cannot be hashed, or not slowly: no reader hangs
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


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor: its `path` in the checkpoint, its `key` in the state dict that it is in (None: in
    none), its dtype by torch's name, its shape, the device tag that it was saved with, and the
    bytes of its values.
    """

    path: str
    key: str | None
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int


class TensorList(Sequence[TensorFacts]):
    """A checkpoint's tensors, made when first looked at: a file may hold 100,000, and few ask."""

    __slots__ = ("_make",)

    def __init__(
        self, make: Callable[[], tuple[TensorFacts, ...]] | tuple[TensorFacts, ...] = ()
    ) -> None:
        self._make = make

    def _all(self) -> tuple[TensorFacts, ...]:
        if not isinstance(self._make, tuple):
            self._make = self._make()
        return self._make

    @overload
    def __getitem__(self, index: int) -> TensorFacts: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TensorFacts, ...]: ...
    def __getitem__(self, index: int | slice) -> TensorFacts | tuple[TensorFacts, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (TensorList, tuple)):
            return NotImplemented
        return self._all() == tuple(other)

    # it equals tuples, and could have their hash only by making its records
    __hash__ = None  # type: ignore[assignment]

    # what makes them holds the open checkpoint, and cannot be pickled
    def __reduce__(self) -> tuple[type[TensorList], tuple[tuple[TensorFacts, ...]]]:
        return TensorList, (self._all(),)

    def __repr__(self) -> str:
        is_made = isinstance(self._make, tuple)
        told = f"{len(self):,} tensors" if is_made else "made when it is looked at"
        return short_repr("TensorList", told)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a checkpoint does not open everywhere: in a word (``device``, ``object``), in words."""

    code: str
    what: str


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of a checkpoint: what it is, its tensors and their bytes (tensors that share
    memory count once).

    `kind` says it in words. `sort` is its sort alone (``tensor``, ``state dict``, ``optimizer``,
    ``dict``, ``int``, ...), `length` of how many items a container or bytes a storage is, `value` a
    plain value or the name of a class, and `tensor` the facts about a part that is one tensor
    itself. With `shared`, what it holds is listed with a part above.
    """

    name: str
    kind: str
    tensors: int
    nbytes: int
    parts: tuple[Part, ...] = ()
    tensor: TensorFacts | None = None
    sort: str = "module"
    length: int | None = None
    value: str | int | float | bool | None = None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class OddObject:
    """An object that `weights_only=True` refuses: its place, its class, if it has a plain form."""

    path: str
    name: str
    has_plain_form: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """The storages and tensors of a checkpoint: `locations` counts storages, `dtypes` tensors.

    `stored` is the size of the storages and `used` of the bytes that tensors use, which differ
    where slices dragged whole storages along. `dead` is how much of a zip file its pickle does not
    refer to: records that were added or left over, bytes between them.
    """

    tensors: int
    stored: int
    used: int
    locations: Mapping[str, int]
    dtypes: Mapping[str, int]
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Quantized:
    """Weights that are codes beside scales: how they are quantised, in words, and how many are so;
    the bytes of codes and scales, those of the values that `dequantize` makes, and their dtype.

    `word` is that of ``--scheme`` (``gguf`` for GGUF). Where it cannot be told how (`scheme` is
    None), `problem` says why.
    """

    scheme: str | None
    weights: int = 0
    stored: int = 0
    values: int = 0
    dtype: str = ""
    problem: str = ""
    word: str = ""


@dataclass(frozen=True, slots=True)
class Weights:
    """Whose weights a checkpoint holds, and under which keys.

    `state_dicts` maps the path of each state dict to the wrappers found in its keys; `producer` is
    the framework that wrote it, where it can be told; `offered` maps paths of state dicts to a
    prefix that may be taken off. `keys` and `parameters` count those of each state dict, the
    numbers of a tensor under several keys once. `modules` counts the whole modules that are shown
    as their state dicts. `training_state` says whose state all tensors are, where there are no
    weights (an optimizer's). `quantized` are the ways in which weights are quantised.
    """

    state_dicts: Mapping[str, tuple[str, ...]]
    producer: str | None
    offered: Mapping[str, str]
    modules: int = 0
    training_state: str | None = None
    keys: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    quantized: tuple[Quantized, ...] = ()


@dataclass(frozen=True, slots=True)
class Hindrances:
    """What in a file its own library refuses.

    `odd_objects` are those that `weights_only=True` refuses, `strays` records outside the folder of
    an archive, `protocol` is that of a pickle, and `untyped` what a legacy file holds, that
    `weights_only=True` does not read; `refused` is what the library refuses besides.
    """

    odd_objects: tuple[OddObject, ...]
    strays: tuple[str, ...] = ()
    protocol: int | None = None
    untyped: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


Fact = TypeVar("Fact")


class _Of(Generic[Fact]):
    """A fact of a group of facts, told by what holds the group."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __set_name__(self, owner: type, name: str) -> None:
        self._get = attrgetter(f"{self._group}.{name}")

    @overload
    def __get__(self, holder: None, owner: type) -> _Of[Fact]: ...
    @overload
    def __get__(self, holder: object, owner: type) -> Fact: ...
    def __get__(self, holder: object, owner: type) -> Any:
        return self if holder is None else self._get(holder)


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """The facts about one checkpoint: `nbytes` is the file's size, `contents` and `weights` are
    what it holds, `hindrances` what keeps it from opening.

    `opening` is the container, and so who opens it without ckptconv; `named` are the files that
    were named, where they are several. `tensor_list` has a record for each tensor, made when it is
    first looked at. `portable` says whether the checkpoint's own library opens it on any host and a
    bare model takes its keys, and `reasons` why not.
    """

    path: str
    format: str
    nbytes: int
    contents: Contents
    weights: Weights
    hindrances: Hindrances
    metadata: Mapping[str, str]
    notes: tuple[str, ...]
    root: Part
    opening: Container = UNKNOWN
    named: tuple[str, ...] = ()
    tensor_list: TensorList = field(default_factory=TensorList, compare=False)

    tensors = _Of[int]("contents")
    stored = _Of[int]("contents")
    used = _Of[int]("contents")
    locations = _Of[Mapping[str, int]]("contents")
    dtypes = _Of[Mapping[str, int]]("contents")
    dead = _Of[int]("contents")
    state_dicts = _Of[Mapping[str, tuple[str, ...]]]("weights")
    producer = _Of[str | None]("weights")
    offered = _Of[Mapping[str, str]]("weights")
    modules = _Of[int]("weights")
    training_state = _Of[str | None]("weights")
    keys = _Of[Mapping[str, int]]("weights")
    parameters = _Of[Mapping[str, int]]("weights")
    quantized = _Of[tuple[Quantized, ...]]("weights")
    odd_objects = _Of[tuple[OddObject, ...]]("hindrances")
    strays = _Of[tuple[str, ...]]("hindrances")
    protocol = _Of[int | None]("hindrances")
    untyped = _Of[tuple[str, ...]]("hindrances")
    refused = _Of[tuple[Refusal, ...]]("hindrances")

    @property
    def portable(self) -> bool:
        """Whether its own library opens it on any host, and a bare model takes its keys."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why it is not portable."""
        return tuple(_reasons(self))

    def __repr__(self) -> str:
        facts = (self.format, size_text(self.nbytes), count_text(self.tensors, "tensor"))
        verdict = "portable" if self.portable else "not portable"
        return short_repr("Inspection", Path(self.path).name, *facts, verdict)

    def _repr_html_(self) -> str:
        facts: list[tuple[object, ...]] = [
            ("format", self.format),
            ("size", size_text(self.nbytes)),
            ("tensors", self.tensors),
            ("saved on", ", ".join(self.locations)),
            ("dtypes", ", ".join(self.dtypes)),
        ]
        facts += [(f"not portable: {reason.code}", reason.what) for reason in self.reasons]
        facts += [
            (part.name, f"{part.kind}, {count_text(part.tensors, 'tensor')}")
            for part in self.root.parts[:_SHOWN]
        ]
        return html_table(self.path, facts, more=max(0, len(self.root.parts) - _SHOWN))


_SHOWN = 10  # parts in a notebook


def _reasons(inspection: Inspection) -> Iterator[Reason]:
    elsewhere = [name for name in inspection.locations if name != "cpu"]
    if elsewhere:
        yield Reason("device", f"needs {some_text(elsewhere)}")
    if danger_in(inspection.notes):
        yield Reason("dangerous", "names code that is dangerous to load")
    if inspection.odd_objects:
        yield Reason("object", "holds objects that weights_only=True refuses")
    if inspection.modules == 1:
        yield Reason("module", "holds a whole module, which needs its class to load")
    elif inspection.modules:
        count = count_text(inspection.modules, "whole module")
        yield Reason("module", f"holds {count}, which need their classes to load")
    if not inspection.opening.anywhere:
        yield Reason("container", f"{inspection.opening.why_not} ({inspection.format})")
    if inspection.strays:
        what = f"its archive has records outside its folder ({printable(inspection.strays[0])})"
        yield Reason("stray-records", f"{what}, which torch.load refuses")
    if inspection.protocol is not None:
        what = "torch.load(weights_only=True) does not read the protocol of its pickle"
        yield Reason("protocol", f"{what} ({inspection.protocol})")
    if inspection.untyped:
        what = "torch's reader for such old files cannot hold"
        yield Reason("untyped", f"{what} {', '.join(inspection.untyped)}")
    yield from (Reason(one.code, one.what) for one in inspection.refused)
    if any(inspection.state_dicts.values()):
        yield Reason("wrapper", "its keys carry a wrapper")
