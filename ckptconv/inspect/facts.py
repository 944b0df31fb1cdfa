"""What is in a checkpoint, as plain facts, without reading the bytes of tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from ckptconv.formats.registry import Named, checkpoints_of, open_to_look
from ckptconv.inspect.inspection import (
    Contents,
    Hindrances,
    Inspection,
    OddObject,
    Part,
    Quantized,
    TensorFacts,
    TensorList,
    Weights,
    files_of,
    refusals,
)
from ckptconv.inspect.parts import PartTree, held_in, part_of_tree, tensor_facts
from ckptconv.io.guarded import check_places
from ckptconv.io.location import Location
from ckptconv.io.places import places_of
from ckptconv.keys.rules import find_wrappers
from ckptconv.pickles.nodes import Call, Node, children
from ckptconv.support.choices import spelling_checked
from ckptconv.support.errors import CheckpointError, OptionRefused
from ckptconv.support.limits import held, merged
from ckptconv.support.records import dataclass
from ckptconv.tensors.dtypes import BY_NAME, FLOAT4_PAIRS
from ckptconv.tensors.refs import Storage, TensorRef, origins, view_identity
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.choosing import only_training_state
from ckptconv.tree.labels import names_training_state, offered_prefix, producer_of
from ckptconv.tree.settling import is_part_of_config, plain_form_at, refused_name
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import PLAIN, label_text, place_text, tensor_of, walk

if TYPE_CHECKING:
    from ckptconv.convert.fixes import Prescription
    from ckptconv.tensors.schemes.table import Decoded


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
        with open_to_look(source, tag=tag, is_delta=None) as opened:
            found = inspect_checkpoint(opened, depth)
        return _of_named(found, places_of(source))
    if tag is not None:
        raise OptionRefused(
            "tag is for a path, and the checkpoint is open already",
            hint="give tag to open_checkpoint",
        )
    try:
        with held(source.limits):
            checkpoint = source
            if not source.is_far:
                checkpoint = source.certain()
                check_places(checkpoint.sources)
            return _inspect(checkpoint, depth)
    except CheckpointError as error:
        raise error.at(path=source.path) from error.__cause__


def _of_named(found: Inspection, places: Sequence[Location]) -> Inspection:
    if len(places) == 1:
        return found
    return replace(found, named=tuple(map(str, places)))


def _inspect(checkpoint: Checkpoint, depth: int) -> Inspection:
    state_dicts = {id(item.node): item for item in checkpoint.state_dicts()}
    overlay: dict[int, Node] = {}
    odd = tuple(_odd_objects(checkpoint.root, overlay))
    # their keys do not count: no conversion writes what is refused and has no plain form
    refused = {number for number, plain in overlay.items() if id(plain) == number}
    refs, bare = held_in(checkpoint.root, overlay)
    root = part_of_tree("", checkpoint.root, PartTree(state_dicts, overlay, not refs), depth, set())
    named = (ref for item in state_dicts.values() for _, ref in item.tensors())
    dead = checkpoint.facts.dead if checkpoint.facts.dead > _MUCH else 0
    return Inspection(
        path=str(checkpoint.path),
        format=checkpoint.format,
        nbytes=checkpoint.nbytes,
        contents=_contents([*refs, *_other_names(named)], bare, dead),
        weights=_weights(checkpoint, state_dicts.values(), refused),
        hindrances=_hindrances(checkpoint, odd),
        metadata=checkpoint.metadata,
        notes=checkpoint.notes,
        root=root,
        opening=checkpoint.container,
        tensor_list=TensorList(lambda: _tensor_list(checkpoint, overlay, {*state_dicts})),
    )


def _weights(
    checkpoint: Checkpoint, state_dicts: Collection[StateDict], refused: Collection[int]
) -> Weights:
    """Whose weights they are, under which keys; the values in `refused` do not count."""
    decoded, problem = _quantized(checkpoint, state_dicts)
    offered = {item.path: offered_prefix(checkpoint.root, item.keys) for item in state_dicts}
    return Weights(
        state_dicts={item.path: find_wrappers(item.telling_keys) for item in state_dicts},
        producer=producer_of(checkpoint.root),
        offered={path: prefix for path, prefix in offered.items() if prefix},
        modules=checkpoint.modules,
        training_state=only_training_state(checkpoint.root),
        keys={
            item.path: sum(id(value) not in refused for value in item.values)
            for item in state_dicts
        },
        parameters={
            item.path: _parameters(item, decoded.get(item.path, ())) for item in state_dicts
        },
        quantized=tuple(_schemes(chain.from_iterable(decoded.values()), problem)),
    )


def _hindrances(checkpoint: Checkpoint, odd: tuple[OddObject, ...]) -> Hindrances:
    files = files_of(checkpoint)
    return Hindrances(
        odd_objects=odd,
        strays=tuple(name for file in files for name in file.facts.strays),
        protocol=newer_protocol(checkpoint),
        untyped=tuple(dict.fromkeys(name for file in files for name in _untyped(file))),
        refused=tuple(refusals(checkpoint)),
    )


def tree_of(checkpoint: Checkpoint, depth: int = 2) -> Part:
    """The parts of an open checkpoint, as its inspection has them."""
    state_dicts = {id(item.node): item for item in checkpoint.state_dicts()}
    overlay: dict[int, Node] = {}
    for _ in _odd_objects(checkpoint.root, overlay):
        pass
    refs, _ = held_in(checkpoint.root, overlay)
    tree = PartTree(state_dicts, overlay, not refs)
    return part_of_tree("", checkpoint.root, tree, depth, set())


def _quantized(
    checkpoint: Checkpoint, found: Iterable[StateDict]
) -> tuple[dict[str, list[Decoded]], str]:
    """The quantised weights by the paths of their state dicts, or why it cannot be told how they
    are quantised. Over a network it is not looked at: each small tensor costs a request.
    """
    is_plain = all(_is_plain(value) for item in found for value in item.values)
    if is_plain or checkpoint.is_far:
        return {}, ""
    from ckptconv.tree.dequantizing import quantized_in  # few checkpoints need it

    try:
        return quantized_in(checkpoint), ""
    except CheckpointError as error:
        return {}, f"{error.where}: {error.what}" if error.where else error.what


def _schemes(decoded: Iterable[Decoded], problem: str) -> Iterator[Quantized]:
    """The ways in which weights are quantised."""
    if problem:
        yield Quantized(None, problem=problem)
    by_scheme: dict[tuple[str, str], list[TensorRef]] = {}
    for item in decoded:
        by_scheme.setdefault((item.scheme, item.word), []).append(item.values)
    for (scheme, word), values in by_scheme.items():
        stored = {id(one): one.nbytes for one in origins(values)}
        types = ", ".join(sorted({ref.dtype.name for ref in values}))
        nbytes = sum(ref.nbytes for ref in values)
        yield Quantized(scheme, len(values), sum(stored.values()), nbytes, types, word=word)


def _is_plain(value: Node) -> bool:
    """Whether a value of a state dict cannot be codes."""
    ref = tensor_of(value)
    if ref is None:
        return type(value) is not Call or value.name != "torch._tensor._rebuild_from_type_v2"
    dtype = ref.dtype
    # codes are bytes, float8, or packed in words of 32 bits
    is_small = dtype.kind == "int" and dtype.itemsize <= 4
    return not (is_small or dtype.kind == "bits" or dtype.name.startswith("float8"))


def _parameters(item: StateDict, decoded: Sequence[Decoded]) -> int:
    """The numbers in a state dict, of quantized and packed tensors those that they stand for."""
    counted: dict[Hashable, int] = {id(one): one.values.numel for one in decoded}
    read = {key for one in decoded for key in (one.codes, *one.used)}
    if read:
        from ckptconv.tensors.schemes.table import left_out_with  # imported by then

        read |= left_out_with(decoded, dict(item.tensors()))
    others = []
    for key, value in zip(item.keys, item.values, strict=True):
        if key in read:
            continue
        ref = tensor_of(value)
        if ref is not None and ref.dtype is not FLOAT4_PAIRS:
            counted[view_identity(ref)] = prod(ref.shown_shape)
        elif type(value) not in PLAIN:
            others.append(value)
    if others:
        from ckptconv.values.named import values_in  # few state dicts need it

        counted |= {view_identity(named.ref): named.numel for named in values_in(others).values}
    return sum(counted.values())


def _other_names(named: Iterable[TensorRef]) -> Iterator[TensorRef]:
    """The tensors of further keys: a tensor counts under each key, as wherever keys are counted."""
    seen = set[int]()
    for ref in named:
        if id(ref) in seen:
            yield ref
        seen.add(id(ref))


def _contents(refs: Sequence[TensorRef], bare: Sequence[Storage], dead: int) -> Contents:
    """What tensors hold together with bare storages, which are used whole. One that no tensor has
    counts as a tensor, if its type is known.
    """
    storages = {id(piece.storage): piece.storage for ref in refs for piece in ref.pieces}
    packed = [
        storage.dtype
        for storage in bare
        if id(storage) not in storages and storage.dtype is not None
    ]
    storages |= {id(storage): storage for storage in bare}
    used = _used_bytes({id(ref): ref for ref in refs}.values()) | {
        id(storage): storage.nbytes for storage in bare
    }
    dtypes = [*(ref.dtype for ref in refs), *packed]
    return Contents(
        tensors=len(dtypes),
        stored=sum(storage.nbytes for storage in storages.values()),
        used=sum(used.values()),
        locations=Counter(storage.location for storage in storages.values()),
        dtypes=Counter(dtype.name for dtype in dtypes),
        dead=dead,
    )


def _tensor_list(
    checkpoint: Checkpoint, overlay: Mapping[int, Node], state_dicts: Collection[int]
) -> tuple[TensorFacts, ...]:
    """The facts about all tensors; `state_dicts` are the numbers of the nodes with their keys."""
    made = []
    for place, node in walk(checkpoint.root, overlay, depth=merged(checkpoint.limits).depth):
        ref = tensor_of(node)
        if ref is not None:
            key = None
            if place is not None and id(place[2]) in state_dicts:
                key = label_text(place[1])
            made.append(tensor_facts(place_text(place), key, ref))
    return tuple(made)


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


def is_bloated(inspection: Inspection) -> bool:
    """Whether storages are much larger than what tensors use of them (twice, and a megabyte)."""
    wasted = inspection.stored - inspection.used + inspection.dead
    return wasted > inspection.used and wasted > _MUCH


_MUCH = 1_000_000


def newer_protocol(checkpoint: Checkpoint) -> int | None:
    """The protocol of the pickle in a torch file, if torch's own weights-only reader lacks it.

    `torch.save(pickle_protocol=...)` makes such files. The reader lacks the opcodes of protocol 4,
    of protocol 3 those of bytes, and of protocol 1 those of bools, which every tensor has. Of
    several files, it is the protocol of the first such one.
    """
    unread = map(_unread_protocol, files_of(checkpoint))
    return next((number for number in unread if number is not None), None)


def _unread_protocol(file: Checkpoint) -> int | None:
    head = file.facts.head
    if not head:
        return None
    number = 1  # protocols 0 and 1 do not say their number
    if head[:1] == b"\x80":
        number = head[1]
    is_unread = number < 2
    if number == 3:
        inside = (child for _, node in walk(file.root) for _, child in children(node))
        is_unread = any(type(child) is bytes for child in inside)
    elif number > 3:
        is_unread = head[2:3] == _FRAME or _MEMOIZE in head
    return number if is_unread else None


_FRAME, _MEMOIZE = b"\x95", b"\x94"  # pickletools: opcodes of protocol 4


def _untyped(checkpoint: Checkpoint) -> list[str]:
    """What a legacy file holds in untyped storages, which torch does not take in such files."""
    if not checkpoint.container.is_legacy:
        return []
    refs = (tensor_of(node) for _, node in walk(checkpoint.root))
    dtypes = dict.fromkeys(ref.dtype.name for ref in refs if ref is not None)
    types = [dtype for dtype in dtypes if BY_NAME[dtype].storage_class is None]
    if any(type(node) is Storage and node.dtype is None for _, node in walk(checkpoint.root)):
        types.append("untyped storages")
    return types


def _used_bytes(refs: Iterable[TensorRef]) -> dict[int, int]:
    """Bytes used of each storage: the largest sum of what its tensors span, at most its size."""
    used: Counter[int] = Counter()
    for ref in refs:
        start, stop = 0, ref.nbytes
        if ref.is_view:
            start, stop = ref.byte_span()
        for piece in ref.pieces:
            sum_of_spans = used[id(piece.storage)] + stop - start
            used[id(piece.storage)] = min(piece.storage.nbytes, sum_of_spans)
    return used


def _odd_objects(root: Node, overlay: dict[int, Node]) -> Iterator[OddObject]:
    """The objects that are refused; the overlay gets the plain forms that a conversion uses."""
    configs: set[int] = set()
    for place, node in walk(root, overlay):
        name = refused_name(node)
        if name is not None:
            overlay[id(node)] = plain = plain_form_at(node, place)
            if not is_part_of_config(name, place, plain, configs) or plain is node:
                yield OddObject(place_text(place), name, plain is not node)


# ------------------------------------------------------------------------- several checkpoints


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A checkpoint: its facts, what makes it portable (None: it is, or nobody asked)."""

    paths: tuple[Location, ...]
    found: Inspection
    fix: Prescription | CheckpointError | None


@dataclass(frozen=True, slots=True)
class Unread:
    """What could not be opened, and why."""

    paths: tuple[Location, ...]
    error: CheckpointError


def survey(
    paths: Sequence[str | os.PathLike[str]], depth: int, tag: str | None, *, in_table: bool = False
) -> Iterator[Surveyed | Unread]:
    """Look at the checkpoints that paths name; the files of all ranks of one are one. For a fix a
    whole conversion is planned, so of several in a table none is looked for.
    """
    groups = checkpoints_of(paths)
    for group in groups:
        try:
            yield _surveyed(group, depth, tag, has_fix=len(groups) == 1 or not in_table)
        except CheckpointError as error:
            yield Unread(group, error)


def _surveyed(
    paths: tuple[Location, ...], depth: int, tag: str | None, *, has_fix: bool
) -> Surveyed:
    with open_to_look(paths, tag=tag, is_delta=None) as checkpoint:
        found = inspect_checkpoint(checkpoint, depth)
        fix = None
        # a delta says itself what is done with it
        if has_fix and not found.portable and not found.opening.is_delta:
            fix = _fix(checkpoint)
    return Surveyed(paths, _of_named(found, paths), fix)


def _fix(checkpoint: Checkpoint) -> Prescription | CheckpointError:
    """The conversion that makes it portable, or why none does."""
    from ckptconv.convert.fixes import Fix, Prescription, surely_works, workable  # few ask

    if surely_works(checkpoint):
        return Prescription(Fix())
    return workable(Fix(), checkpoint)
