"""What `inspect_checkpoint` gives: the facts about a checkpoint, and why it is not portable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from ckptconv.inspect.refusals import Refusal
from ckptconv.support.errors import printable
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import count_text, size_text, some_text
from ckptconv.tree.containers import UNKNOWN, Container


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
        return (
            self._all() == tuple(other)
            if isinstance(other, (TensorList, tuple))
            else NotImplemented
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[TensorList], tuple[tuple[TensorFacts, ...]]]:
        return TensorList, (self._all(),)

    def __repr__(self) -> str:
        return short_repr(
            "TensorList",
            "made when it is looked at" if callable(self._make) else f"{len(self):,} tensors",
        )


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a checkpoint does not open everywhere as it is, in a word (``device``, ``object``, ...)
    and in words.
    """

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
    """An object that `torch.load(weights_only=True)` refuses: where it stands, its class, whether
    it has a plain form.
    """

    path: str
    name: str
    has_plain_form: bool


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """The facts about one checkpoint. `locations` and `dtypes` count storages and tensors; `nbytes`
    is the file's size.

    `state_dicts` maps the path of each state dict to the wrappers found in its keys; `producer` is
    the framework that wrote it, where it can be told; `offered` maps paths of state dicts to a
    prefix that may be taken off. `stored` is the size of the storages and `used` of the bytes that
    tensors use, which differ where slices dragged whole storages along. `modules` counts the whole
    modules that are shown as their state dicts; `named` are the files that were named, where they
    are several.

    `dead` is how much of a zip file its pickle does not refer to: records that were added or left
    over, bytes between them. `strays` are records outside its folder, `protocol` is that of a
    pickle, and `untyped` what a legacy file holds, that `weights_only=True` does not read.
    `lacking`: the state dict of a whole module may lack what its class saves. `opening` is the
    container, and so who opens it without ckptconv. `training_state` says whose state all its
    tensors are, where it holds no weights (an optimizer's). `refused` is what its own library
    refuses besides. `tensor_list` has a record for each tensor, made when it is first looked at.
    `portable` says whether the checkpoint's own library opens it on any host and a bare model takes
    its keys, and `reasons` why not.
    """

    path: str
    format: str
    nbytes: int
    tensors: int
    stored: int
    used: int
    locations: Mapping[str, int]
    dtypes: Mapping[str, int]
    state_dicts: Mapping[str, tuple[str, ...]]
    producer: str | None
    offered: Mapping[str, str]
    odd_objects: tuple[OddObject, ...]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]
    root: Part
    modules: int = 0
    named: tuple[str, ...] = ()
    dead: int = 0
    strays: tuple[str, ...] = ()
    protocol: int | None = None
    untyped: tuple[str, ...] = ()
    lacking: bool = False
    opening: Container = UNKNOWN
    training_state: str | None = None
    refused: tuple[Refusal, ...] = ()
    tensor_list: TensorList = field(default_factory=TensorList, compare=False)

    @property
    def portable(self) -> bool:
        """Whether its own library opens it on any host, and a bare model takes its keys."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why it is not portable."""
        return tuple(_reasons(self))

    def __repr__(self) -> str:
        verdict = "portable" if self.portable else "not portable"
        return short_repr(
            "Inspection",
            Path(self.path).name,
            self.format,
            size_text(self.nbytes),
            count_text(self.tensors, "tensor"),
            verdict,
        )

    def _repr_html_(self) -> str:
        facts = [
            ("format", self.format),
            ("size", size_text(self.nbytes)),
            ("tensors", self.tensors),
        ]
        facts += [("saved on", ", ".join(self.locations)), ("dtypes", ", ".join(self.dtypes))]
        facts += [(f"not portable: {reason.code}", reason.what) for reason in self.reasons]
        facts += [
            (part.name, f"{part.kind}, {count_text(part.tensors, 'tensor')}")
            for part in self.root.parts[:_SHOWN]
        ]
        return html_table(self.path, facts, more=max(0, len(self.root.parts) - _SHOWN))


_SHOWN = 10  # parts in a notebook


def _reasons(inspection: Inspection) -> Iterator[Reason]:
    if elsewhere := [name for name in inspection.locations if name != "cpu"]:
        yield Reason("device", f"needs {some_text(elsewhere)}")
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
        what = (
            "its archive has records outside its folder "
            f"({printable(inspection.strays[0])}), which torch.load refuses"
        )
        yield Reason("stray-records", what)
    if inspection.protocol is not None:
        yield Reason(
            "protocol",
            "torch.load(weights_only=True) does not read the protocol of its pickle "
            f"({inspection.protocol})",
        )
    if inspection.untyped:
        yield Reason(
            "untyped",
            f"torch's reader for such old files cannot hold {', '.join(inspection.untyped)}",
        )
    yield from (Reason(one.code, one.what) for one in inspection.refused)
    if any(inspection.state_dicts.values()):
        yield Reason("wrapper", "its keys carry a wrapper")
