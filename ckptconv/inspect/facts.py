"""What is in a checkpoint, as plain facts: parts and their sizes, tags, dtypes, wrappers, objects
that will not load.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, overload

from ckptconv.formats.registry import Named, open_checkpoint
from ckptconv.inspect.refusals import Refusal, files_of, refusals
from ckptconv.io.guarded import check_places
from ckptconv.keys.key_map import find_wrappers
from ckptconv.pickles.nodes import Call, Dict, Global, Node, children, mapping_pairs, spoken
from ckptconv.support.choices import spelling_checked
from ckptconv.support.errors import CheckpointError, OptionRefused, printable
from ckptconv.support.limits import held, merged
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import count_text, size_text, some_text
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import UNKNOWN, Container
from ckptconv.tree.labels import names_training_state
from ckptconv.tree.producers import offered_prefix, producer_of
from ckptconv.tree.settling import is_part_of_config, plain_form_at, refused_name
from ckptconv.tree.state_dicts import StateDict, only_training_state
from ckptconv.tree.walk import PLAIN, label_text, place_text, tensor_of, walk

_VALUE_LENGTH = 60
# levels of modules that are shown more for the wrappers around them; training wraps five times
_DEEPEST_WRAPPERS = 50


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
    """The tensors of a checkpoint, made when they are first looked at: a file may hold 100,000, and
    few ask.
    """

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
        """Whether the checkpoint's own library opens it on any host, and a bare model takes its
        keys.
        """
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


def _reasons(found: Inspection) -> Iterator[Reason]:
    if elsewhere := [name for name in found.locations if name != "cpu"]:
        yield Reason("device", f"needs {some_text(elsewhere)}")
    if found.odd_objects:
        yield Reason("object", "holds objects that weights_only=True refuses")
    if found.modules == 1:
        yield Reason("module", "holds a whole module, which needs its class to load")
    elif found.modules:
        count = count_text(found.modules, "whole module")
        yield Reason("module", f"holds {count}, which need their classes to load")
    if not found.opening.anywhere:
        yield Reason("container", f"{found.opening.why_not} ({found.format})")
    if found.strays:
        what = (
            f"its archive has records outside its folder ({printable(found.strays[0])}), which "
            "torch.load refuses"
        )
        yield Reason("stray-records", what)
    if found.protocol is not None:
        yield Reason(
            "protocol",
            "torch.load(weights_only=True) does not read the protocol of its pickle "
            f"({found.protocol})",
        )
    if found.untyped:
        yield Reason(
            "untyped", f"torch's reader for such old files cannot hold {', '.join(found.untyped)}"
        )
    yield from (Reason(one.code, one.what) for one in found.refused)
    if any(found.state_dicts.values()):
        yield Reason("wrapper", "its keys carry a wrapper")


@spelling_checked
def inspect_checkpoint(
    source: Named | Checkpoint, depth: int = 2, *, tag: str | None = None
) -> Inspection:
    """Collect the facts about a checkpoint (tensors, devices, what will not load and why), without
    reading tensor bytes.

    `source` is a path, the paths of the files of all ranks, or an opened checkpoint; `tag` picks a
    step of a folder of several. Modules of state dicts are grouped down to `depth` segments of
    their keys. Raises `CheckpointError`.

    >>> found = inspect_checkpoint("train.pt")  # doctest: +SKIP
    >>> [tensor.key for tensor in found.tensor_list if tensor.device != "cpu"]  # doctest: +SKIP
    """
    if type(depth) is not int or depth < 0:
        raise OptionRefused(
            f"depth={depth!r:.100} is not a number of levels", hint="give 0 or more"
        )
    if not isinstance(source, Checkpoint):
        with open_checkpoint(source, tag=tag) as opened:
            named = (
                ()
                if isinstance(source, (str, os.PathLike))
                else tuple(str(path) for path in source)
            )
            return replace(inspect_checkpoint(opened, depth), named=named if len(named) > 1 else ())
    if tag is not None:
        raise OptionRefused(
            "tag is for a path, and the checkpoint is open already",
            hint="give tag to open_checkpoint",
        )
    try:
        with held(source.limits):
            check_places(source.sources)
            return _inspect(source, depth)
    except CheckpointError as error:
        raise error.at(path=source.path) from error.__cause__


def _inspect(checkpoint: Checkpoint, depth: int) -> Inspection:
    found = {id(item.node): item for item in checkpoint.state_dicts()}
    overlay: dict[int, Node] = {}
    odd = tuple(_odd_objects(checkpoint.root, overlay))
    refs = _refs(checkpoint.root, overlay)
    root = _part("", checkpoint.root, _Tree(found, overlay, not refs), depth, set())
    bare = _bare_storages(checkpoint.root, overlay)
    storages = {id(piece.storage): piece.storage for ref in refs for piece in ref.pieces}
    packed = [
        storage for storage in bare if id(storage) not in storages and storage.dtype is not None
    ]
    storages |= {id(storage): storage for storage in bare}
    used = _used_bytes(refs) | {id(storage): storage.nbytes for storage in bare}
    dtypes = Counter(
        [
            *(ref.dtype.name for ref in refs),
            *(item.dtype.name for item in packed if item.dtype is not None),
        ]
    )
    return Inspection(
        path=str(checkpoint.path),
        format=checkpoint.format,
        nbytes=checkpoint.nbytes,
        tensors=len(refs) + len(packed),
        stored=sum(storage.nbytes for storage in storages.values()),
        used=sum(used.values()),
        locations=Counter(storage.location for storage in storages.values()),
        dtypes=dtypes,
        state_dicts={item.path: find_wrappers(item.telling_keys) for item in found.values()},
        producer=producer_of(checkpoint.root),
        offered={
            item.path: prefix
            for item in found.values()
            if (prefix := offered_prefix(checkpoint.root, item.keys))
        },
        odd_objects=odd,
        metadata=checkpoint.metadata,
        notes=checkpoint.notes,
        root=root,
        modules=checkpoint.modules,
        tensor_list=TensorList(lambda: _tensor_list(checkpoint, overlay, {*found})),
        lacking=any(stray.is_refused for stray in checkpoint.module_strays),
        dead=checkpoint.facts.dead if checkpoint.facts.dead > _MUCH else 0,
        strays=tuple(name for file in files_of(checkpoint) for name in file.facts.strays),
        protocol=newer_protocol(checkpoint),
        untyped=tuple(
            dict.fromkeys(name for file in files_of(checkpoint) for name in _untyped(file))
        ),
        refused=tuple(refusals(checkpoint)),
        opening=checkpoint.container,
        training_state=only_training_state(checkpoint.root),
    )


def _tensor_list(
    checkpoint: Checkpoint, overlay: Mapping[int, Node], state_dicts: Collection[int]
) -> tuple[TensorFacts, ...]:
    """The facts about all tensors; `state_dicts` are the numbers of the nodes that hold them under
    keys.
    """
    made = []
    for place, node in walk(checkpoint.root, overlay, depth=merged(checkpoint.limits).depth):
        if (ref := tensor_of(node)) is not None:
            key = (
                label_text(place[1]) if place is not None and id(place[2]) in state_dicts else None
            )
            made.append(_facts(place_text(place), key, ref))
    return tuple(made)


def _facts(path: str, key: str | None, ref: TensorRef) -> TensorFacts:
    return TensorFacts(path, key, ref.dtype.name, tuple(ref.shape), ref.location, ref.nbytes)


def training_states(part: Part) -> Iterator[Part]:
    """The outermost parts that are the state of an optimizer, a scheduler or a random generator."""
    if part.kind == "optimizer":
        yield part
        return
    for inner in part.parts:
        if names_training_state(inner.name):
            yield inner
        elif inner.kind != "state dict":
            yield from training_states(inner)


def is_bloated(found: Inspection) -> bool:
    """Whether the storages, and what is dead, are much larger than what tensors use of them (twice,
    and a megabyte).
    """
    wasted = found.stored - found.used + found.dead
    return wasted > found.used and wasted > _MUCH


_MUCH = 1_000_000


def newer_protocol(checkpoint: Checkpoint) -> int | None:
    """The protocol of the pickle in a torch file, where `torch.save(pickle_protocol=...)` made it
    one that torch's own weights-only reader does not know: it lacks the opcodes of protocol 4, of
    protocol 3 those of bytes, and of protocol 1 those of bools, which every tensor has. Of several
    files, that of the first such one.
    """
    return next(
        (number for file in files_of(checkpoint) if (number := _unread_protocol(file)) is not None),
        None,
    )


def _unread_protocol(file: Checkpoint) -> int | None:
    head = file.facts.head
    if not head:
        return None
    number = head[1] if head[:1] == b"\x80" else 1
    return (
        number
        if number < 2 or (_holds_bytes(file) if number == 3 else _is_newer(number, head))
        else None
    )


def _is_newer(number: int, head: bytes) -> bool:
    return number > 3 and (head[2:3] == _FRAME or _MEMOIZE in head)


_FRAME, _MEMOIZE = b"\x95", b"\x94"  # pickletools: opcodes of protocol 4


def _holds_bytes(checkpoint: Checkpoint) -> bool:
    return any(
        type(child) is bytes for _, node in walk(checkpoint.root) for _, child in children(node)
    )


def _untyped(checkpoint: Checkpoint) -> list[str]:
    """What a legacy file holds in untyped storages, which torch's reader of such files does not
    take.
    """
    if not checkpoint.container.is_legacy:
        return []
    dtypes = dict.fromkeys(
        ref.dtype.name for _, node in walk(checkpoint.root) if (ref := tensor_of(node)) is not None
    )
    types = [dtype for dtype in dtypes if BY_NAME[dtype].storage_class is None]
    bare = any(type(node) is Storage and node.dtype is None for _, node in walk(checkpoint.root))
    return types + ["untyped storages"] * bare


def _used_bytes(refs: list[TensorRef]) -> dict[int, int]:
    """Bytes used of each storage: the largest sum of what its tensors span, at most its size."""
    used: Counter[int] = Counter()
    for ref in refs:
        for piece in ref.pieces:
            span = ref.byte_span() if ref.is_view else (0, ref.nbytes)
            used[id(piece.storage)] = min(
                piece.storage.nbytes, used[id(piece.storage)] + span[1] - span[0]
            )
    return used


def _odd_objects(root: Node, overlay: dict[int, Node]) -> Iterator[OddObject]:
    """The objects that are refused; the overlay gets the plain forms that a conversion uses."""
    configs: set[int] = set()
    for place, node in walk(root, overlay):
        if (name := refused_name(node)) is not None:
            overlay[id(node)] = plain = plain_form_at(node, place)
            if not is_part_of_config(name, place, plain, configs) or plain is node:
                yield OddObject(place_text(place), name, plain is not node)


def _tensor_part(name: str, ref: TensorRef) -> Part:
    return Part(name, _kind(ref), 1, ref.nbytes, tensor=_facts(name, None, ref), sort="tensor")


class _Tree(NamedTuple):
    """What the parts of a tree are shown with: its state dicts by their nodes, and the plain forms
    of its objects.

    With `is_bare`, there are no tensors in it: then dicts of plain values are shown too.
    """

    found: Mapping[int, StateDict]
    overlay: Mapping[int, Node]
    is_bare: bool = False


def _refs(node: Node, overlay: Mapping[int, Node]) -> list[TensorRef]:
    """The tensors in a node, numpy's arrays among them."""
    return [ref for _, inner in walk(node, overlay) if (ref := tensor_of(inner)) is not None]


def _bare_storages(node: Node, overlay: Mapping[int, Node]) -> list[Storage]:
    """The storages that stand in a node without a tensor over them, as in a quantized tensor."""
    return [inner for _, inner in walk(node, overlay) if type(inner) is Storage]


def _part(name: str, node: Node, tree: _Tree, depth: int, shown: set[int]) -> Part:
    if id(node) in shown:
        return Part(
            name, f"{_kind(node)}, shared with a part above", 0, 0, (), None, *_sort(node), True
        )
    if type(node) in (Dict, list, Call):
        shown.add(id(node))
    item = tree.found.get(id(node))
    if item is not None and item.own is None:
        return _state_dict_part(name, item, tree, depth)
    node = tree.overlay.get(id(node), node)
    if (ref := tensor_of(node)) is not None:
        return _tensor_part(name, ref)
    refs = _held(node, tree.overlay)
    pairs = mapping_pairs(node)
    inside = depth > 0 and pairs is not None and (bool(refs) or tree.is_bare)
    own = set(() if item is None else item.own or ())
    beside = (
        [part for index, part in enumerate(children(node)) if index not in own] if inside else []
    )
    parts = [_part(label_text(label), child, tree, depth - 1, shown) for label, child in beside]
    if item is not None and inside:
        parts.insert(0, _state_dict_part(".", item, tree, depth))
    return Part(name, _kind(node), len(refs), _nbytes(refs), tuple(parts), None, *_sort(node))


_Held = Sequence[TensorRef | Storage]
_Entry = tuple[str, Node, _Held]
"""A key of a state dict, what it leads to, and the tensors in that: itself, or what a quantized one
and the like is made of.
"""


def _state_dict_part(name: str, item: StateDict, tree: _Tree, depth: int) -> Part:
    plain = (
        (key, tree.overlay.get(id(value), value))
        for key, value in zip(item.keys, item.values, strict=True)
    )
    held = ((key, value, _held(value, tree.overlay)) for key, value in plain)
    named = [entry for entry in held if entry[2]]
    modules = _modules(
        named, depth and depth + min(len(find_wrappers(item.telling_keys)), _DEEPEST_WRAPPERS)
    )
    refs = _all_held(named)
    size = _nbytes(refs)
    return Part(
        name, "state dict", len(refs), size, modules, sort="state dict", length=len(item.keys)
    )


def _held(node: Node, overlay: Mapping[int, Node]) -> _Held:
    if (ref := tensor_of(node)) is not None:
        return (ref,)
    return () if type(node) in PLAIN else [*_refs(node, overlay), *_bare_storages(node, overlay)]


def _all_held(named: Sequence[_Entry]) -> list[TensorRef | Storage]:
    return [held for _, _, all_held in named for held in all_held]


def _nbytes(held: _Held) -> int:
    """The bytes of the values, views of the same bytes and storages counted once."""
    refs = [item for item in held if type(item) is TensorRef]
    views = {
        (id(ref.storage), ref.storage_offset, ref.shape, ref.stride): ref.nbytes
        for ref in refs
        if ref.is_view
    }
    bare = {id(item): item.nbytes for item in held if type(item) is Storage}
    return (
        sum(views.values())
        + sum(bare.values())
        + sum(ref.nbytes for ref in refs if not ref.is_view)
    )


def _modules(named: Sequence[_Entry], depth: int) -> tuple[Part, ...]:
    """The tensors of a state dict grouped by the leading segments of their keys."""
    if depth <= 0:
        return ()
    groups: dict[str, list[_Entry]] = {}
    for key, node, refs in named:
        head, _, rest = key.partition(".")
        groups.setdefault(head, []).append((rest, node, refs))
    return tuple(_module(head, group, depth) for head, group in groups.items())


def _module(head: str, group: Sequence[_Entry], depth: int) -> Part:
    refs = _all_held(group)
    if len(group) == 1 and not group[0][0]:
        if (ref := tensor_of(group[0][1])) is not None:
            return _tensor_part(head, ref)
        return Part(
            head, _entry_kind(group[0][1]), len(refs), _nbytes(refs), (), None, *_sort(group[0][1])
        )
    return Part(head, "module", len(group), _nbytes(refs), _modules(group, depth - 1))


def _entry_kind(node: Node) -> str:
    """What a key leads to; of an object that is a tensor to its library, its class."""
    if (
        type(node) is Call
        and node.name == "torch._tensor._rebuild_from_type_v2"
        and type(node.args[1]) is Global
    ):
        return str(node.args[1].path)
    return _PACKED.get(node.name, _kind(node)) if type(node) is Call else _kind(node)


_PACKED = {
    "torch._utils._rebuild_qtensor": "quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "sparse tensor",
}


def _kind(node: Node) -> str:
    if (ref := tensor_of(node)) is not None:
        return f"{ref.dtype.name} {list(ref.shape)} on {ref.location}"
    if type(node) is Call and mapping_pairs(node) is None:
        return node.name
    if (pairs := mapping_pairs(node)) is not None:
        names = {key for key, _ in pairs if type(key) is str}
        return "optimizer" if {"state", "param_groups"} <= names else f"dict of {len(pairs)}"
    if type(node) in (list, tuple):
        return f"{type(node).__name__} of {len(node)}"
    if type(node) is Global:
        return f"the name {node.path}"
    if type(node) is Storage:
        return f"storage of {node.nbytes} bytes on {node.location}"
    if type(node) in (str, int, float, complex, bool, bytes):
        return f"{type(node).__name__} {label_text(node)[:_VALUE_LENGTH]}"
    return spoken(node)


def _sort(node: Node) -> tuple[str, int | None, str | int | float | bool | None]:
    """The sort of a node in a word, how many items it has, and its value where it is a plain one or
    a name.
    """
    pairs = mapping_pairs(node)
    if pairs is not None:
        names = {key for key, _ in pairs if type(key) is str}
        return "optimizer" if {"state", "param_groups"} <= names else "dict", len(pairs), None
    if type(node) in (list, tuple):
        return type(node).__name__, len(node), None
    if type(node) is Storage:
        return "storage", node.nbytes, None
    if type(node) is Call:
        return "object", None, node.name
    if type(node) is Global:
        return "name", None, node.path
    if node is None or tensor_of(node) is not None:
        return "none" if node is None else "tensor", None, None
    if type(node) in (bool, float) or (type(node) is int and node.bit_length() <= _LONGEST_INT):
        return type(node).__name__, None, node
    if type(node) in (str, int, complex, bytes):
        return type(node).__name__, None, label_text(node)[:_VALUE_LENGTH]
    return "object", None, spoken(node)


_LONGEST_INT = 64  # bits; longer ones are texts, for few readers of JSON take them
