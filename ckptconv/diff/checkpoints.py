"""What differs between two checkpoints, whatever their formats: keys, dtypes, shapes, device tags,
values.

Both are opened as indexes and walked together; only tensors that both have, with one dtype and
shape, are read. Keys are compared by name, not by order; the class of a mapping (`OrderedDict` or
dict), the `_metadata` of a state dict, `requires_grad`, strides and the sharing of storages do not
count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ckptconv.formats.registry import Named, open_checkpoint
from ckptconv.io.guarded import check_places
from ckptconv.keys.key_map import (
    STRIP,
    KeyMap,
    KeyRules,
    hint_of_starts,
    map_keys,
    refuse_idle,
    rules_of,
)
from ckptconv.objects.encodings import flat
from ckptconv.objects.plain import plain_form, tensor_form
from ckptconv.objects.torch_read import Window
from ckptconv.pickles.nodes import (
    Call,
    Dict,
    Global,
    Node,
    PersistentId,
    attributes,
    children,
    mapping_pairs,
)
from ckptconv.support.choices import refuse_no_flag, refuse_no_text, spelling_checked
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    LimitExceeded,
    OptionRefused,
    printable,
)
from ckptconv.support.gc_pause import collector_paused
from ckptconv.support.limits import in_force
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.showing import html_table, short_repr
from ckptconv.support.text import count_text
from ckptconv.tensors.comparison import (
    Deviation,
    Pair,
    Tolerance,
    compare_bytes,
    damaged_storages,
    deviation,
)
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, view_identity, whole_storage
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import StateDict, find
from ckptconv.tree.walk import label_text

Part = TypeVar("Part")
Labelled = dict[tuple[str, str, int], tuple[str, Node]]
"""What a container holds: each child with the text of its label, by the type of the label, its
text, and a number.
"""

_SHOWN = 60  # characters of a plain value in a report


@dataclass(frozen=True, slots=True)
class Changed:
    """One fact about a key that is `a` in the first checkpoint and `b` in the second."""

    key: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor that has the shape `a` in the first checkpoint and `b` in the second."""

    key: str
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A tensor whose values differ, and how."""

    key: str
    deviation: Deviation


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """The differences between the checkpoints `a` and `b`, in the order of the keys of `a`
    (`values`: the largest first).

    `tensors` were compared, each of `nbytes` in sum. `others` are values that are not tensors, or a
    tensor in one of them only. `locations` are device tags that differ; they make a difference only
    with `strict_device`, and `dtypes` do unless `ignore_dtype`. `damaged` tells of records that
    were compared and do not have the checksum that their archive declares.
    """

    a: str
    b: str
    a_format: str
    b_format: str
    tensors: int
    nbytes: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    dtypes: tuple[Changed, ...]
    shapes: tuple[Reshaped, ...]
    locations: tuple[Changed, ...]
    values: tuple[ValueChange, ...]
    others: tuple[Changed, ...]
    notes: tuple[str, ...] = ()
    strict_device: bool = False
    ignore_dtype: bool = False
    damaged: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing that counts differs, and nothing that was compared is damaged."""
        counted = (self.only_a, self.only_b, self.shapes, self.values, self.others, self.damaged)
        if any(counted) or (self.dtypes and not self.ignore_dtype):
            return False
        return not (self.strict_device and self.locations)

    @property
    def differing(self) -> int:
        """How many tensors that both have differ, in whatever counts."""
        counted = [self.shapes, self.values]
        counted += [self.dtypes] * (not self.ignore_dtype) + [self.locations] * self.strict_device
        return len({item.key for items in counted for item in items})  # type: ignore[attr-defined]

    def _counts(self) -> list[tuple[str, int]]:
        """How many keys differ, by what differs."""
        named = ("damaged", "only_a", "only_b", "dtypes", "shapes", "values", "others", "locations")
        return [(name, len(getattr(self, name))) for name in named if getattr(self, name)]

    def __repr__(self) -> str:
        verdict = "same" if self.same else "damaged" if self.damaged else "different"
        differing = [f"{count_text(self.differing, 'tensor')} differ"] if self.differing else []
        told = [
            f"{count:,} {name}"
            for name, count in self._counts()
            if name in ("damaged", "only_a", "only_b", "others")
        ]
        counts = [*differing, *told]
        return short_repr("Difference", verdict, f"{self.tensors:,} tensors compared", *counts)

    def _repr_html_(self) -> str:
        verdict = "same" if self.same else "damaged" if self.damaged else "different"
        rows = (
            (name, count, ", ".join(map(_key, getattr(self, name)[:5])))
            for name, count in self._counts()
        )
        return html_table(f"{self.a}, {self.b}: {verdict}", rows)


def _key(item: str | Changed | Reshaped | ValueChange) -> str:
    return printable(item if isinstance(item, str) else item.key)


@spelling_checked
def diff_checkpoints(
    a: Named,
    b: Named,
    *,
    keys: Literal["strip", "keep"] | KeyRules = "keep",
    only: str | None = None,
    only_b: str | None = None,
    whole: bool = False,
    tolerance: Tolerance | None = None,
    ignore_dtype: bool = False,
    strict_device: bool = False,
    tag: str | None = None,
    tag_b: str | None = None,
    on_progress: OnProgress | None = None,
) -> Difference:
    """Compare the state dict of checkpoint `a`, its keys renamed by `keys`, with that of `b`.

    Values must be the same bit for bit (NaN of the same bits included, -0.0 is not 0.0), or equal
    within `tolerance`. `only` is the path of the part to compare in both, `only_b` that in `b`
    where it is another (empty: all of it). `whole` compares everything in the files, by path. With
    `ignore_dtype`, tensors of different dtypes are compared as numbers. The globs of `keys` choose
    keys of both; a rule that meets no key is an error. `tag` and `tag_b` pick the step of a folder
    of several. `on_progress` is called with a `Progress`, about once for every 16 MB that were
    read. Raises `CheckpointError` when one of them cannot be read or holds no single state dict.
    """
    rules = rules_of(keys)
    refuse_no_text(only=only, only_b=only_b or None)
    refuse_no_flag(whole=whole, ignore_dtype=ignore_dtype, strict_device=strict_device)
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise OptionRefused(
            f"tolerance={tolerance!r:.100} is not a tolerance", hint="give Tolerance(atol, rtol)"
        )
    with open_checkpoint(a, tag=tag) as first, open_checkpoint(b, tag=tag_b) as second:
        check_places((*first.sources, *second.sources))
        found = _Found()
        with collector_paused():
            only_of = (only, only if only_b is None else only_b or None)
            ours, theirs, left_out = _parts(first, second, rules, only_of, whole=whole)
            for path, one, other in _walk_together(ours, theirs, found):
                found.compare(path, one, other, ignore_dtype=ignore_dtype)
        values, damaged = _compare_values(found.pairs, tolerance, on_progress)
        return Difference(
            a=str(first.path),
            b=str(second.path),
            a_format=first.format,
            b_format=second.format,
            tensors=found.tensors,
            nbytes=sum(ours.nbytes for _, ours, _ in found.pairs),
            only_a=tuple(found.only_a),
            only_b=tuple(found.only_b),
            dtypes=tuple(found.dtypes),
            shapes=tuple(found.shapes),
            locations=tuple(found.locations),
            values=tuple(sorted(values, key=lambda item: item.deviation.badness, reverse=True)),
            others=tuple(found.others),
            notes=(*left_out, *_notes(found)),
            strict_device=strict_device,
            ignore_dtype=ignore_dtype,
            damaged=tuple(damaged),
        )


def _parts(
    first: Checkpoint,
    second: Checkpoint,
    keys: KeyRules,
    only: tuple[str | None, str | None],
    *,
    whole: bool,
) -> tuple[Node, Node, list[str]]:
    """The two nodes to compare, and what is to be said of keys that the rules leave out."""
    if whole:
        ours = find(first.root, only[0] or "", first.path)
        return ours, _second_part(lambda: find(second.root, only[1] or "", second.path), only), []
    ours, theirs = first.state_dict(only[0]), _second_part(lambda: second.state_dict(only[1]), only)
    renamed, chosen = _mapped(ours, keys, first), _mapped(theirs, keys.globs, second)
    _refuse_idle(renamed, chosen, keys, first)
    left_out = [*_left_out(renamed, "A"), *_left_out(chosen, "B")]
    return _under(renamed, ours), _under(chosen, theirs), left_out


def _left_out(names: KeyMap, which: str) -> Iterator[str]:
    """How many keys of a checkpoint were not compared, by what left them out."""
    for why, count in Counter(names.why.values()).items():
        yield (
            f"{count:,} of {count_text(len(names.old), 'key')} of {which} {why}, and so were not "
            "compared"
        )


def _second_part(part: Callable[[], Part], only: tuple[str | None, str | None]) -> Part:
    """The part of the second checkpoint; where it has none of the path that was named for both,
    `only_b` is offered.
    """
    try:
        return part()
    except CheckpointError as error:
        if only[0] is not None and only[0] == only[1]:
            advice = (
                "--only-b PATH names the part of B where it has another path; '' is all of it "
                "(only_b= in code)"
            )
            error.hint = f"{error.hint}; {advice}" if error.hint else advice
        raise


def _mapped(found: StateDict, rules: KeyRules, checkpoint: Checkpoint) -> KeyMap:
    try:
        return map_keys(found.keys, rules, telling=found.telling_keys, beside=found.keys_beside)
    except CheckpointError as error:
        raise error.at(path=checkpoint.path) from error.__cause__


def _refuse_idle(ours: KeyMap, theirs: KeyMap, keys: KeyRules, first: Checkpoint) -> None:
    """Refuse a rule that meets no key, or a choice that leaves none, on either side: nothing
    compared is not the same.
    """
    try:
        of_both = {words for rule in keys.globs.rules for words in rule.idle(())}
        idle = tuple(words for words in ours.idle if words in theirs.idle or words not in of_both)
        refuse_idle([replace(ours, idle=idle)], keys)
        if ours.old and not any(key is not None for key in (*ours.new, *theirs.new)):
            raise KeyConflict(
                f"no key is left after {keys.leaving}", hint=hint_of_starts([ours], keys)
            )
    except KeyConflict as error:
        raise error.at(path=first.path) from error.__cause__


def _under(names: KeyMap, found: StateDict) -> Dict:
    return Dict(
        [
            (key, value)
            for key, value in zip(names.new, found.values, strict=True)
            if key is not None
        ]
    )


def _notes(found: _Found) -> Iterator[str]:
    """Say what would make keys meet that do not."""
    if found.tensors or not (found.only_a and found.only_b):
        return
    if _without_wrappers(found.only_a) & set(found.only_b):
        yield "the keys of the first carry wrapper prefixes; compare without them: --keys strip"
    if _without_wrappers(found.only_b) & set(found.only_a):
        yield "the keys of the second carry wrapper prefixes; name it first, and add --keys strip"


def _without_wrappers(keys: Sequence[str]) -> set[str]:
    """The keys as `--keys strip` would have them; none where it cannot."""
    try:
        return {key for key in map_keys(keys, STRIP).new if key is not None}
    except CheckpointError:
        return set()


# ----------------------------------------------------------------------------------------- the walk


@dataclass(slots=True)
class _Found:
    """What the walk has met: differences, and the tensors whose values are still to be compared."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    dtypes: list[Changed] = field(default_factory=list)
    shapes: list[Reshaped] = field(default_factory=list)
    locations: list[Changed] = field(default_factory=list)
    others: list[Changed] = field(default_factory=list)
    pairs: list[tuple[str, TensorRef, TensorRef]] = field(default_factory=list)
    tensors: int = 0

    def compare(self, path: str, ours: Node, theirs: Node, *, ignore_dtype: bool) -> None:
        """Compare two leaves by all but the values of tensors."""
        if type(ours) is TensorRef and type(theirs) is TensorRef:
            self._tensors(path, ours, theirs, ignore_dtype=ignore_dtype)
        elif not _same_leaf(ours, theirs):
            self.others.append(Changed(path, _spoken(ours), _spoken(theirs)))

    def _tensors(
        self, path: str, ours: TensorRef, theirs: TensorRef, *, ignore_dtype: bool
    ) -> None:
        self.tensors += 1
        if ours.dtype is not theirs.dtype:
            self.dtypes.append(Changed(path, ours.dtype.name, theirs.dtype.name))
        if ours.shape != theirs.shape:
            self.shapes.append(Reshaped(path, tuple(ours.shape), tuple(theirs.shape)))
        if (tags := _tags(ours, theirs)) is not None:
            self.locations.append(Changed(path, *tags))
        if (
            ours.shape == theirs.shape
            and (ours.dtype is theirs.dtype or ignore_dtype)
            and ours.numel
        ):
            self.pairs.append((path, ours, theirs))


def _tags(ours: TensorRef, theirs: TensorRef) -> tuple[str, str] | None:
    """The device tags of two tensors, where they differ."""
    if not ours.pieces or not theirs.pieces or ours.location == theirs.location:
        return None
    return ours.location, theirs.location


def _walk_together(first: Node, second: Node, found: _Found) -> Iterator[tuple[str, Node, Node]]:
    """The leaves that stand at one path in both trees; what stands in one of them only is noted in
    `found`.

    A pair of containers that was met before, as shared and cyclic ones are, is not entered again.
    """
    work = [("", first, second)]
    most = in_force().compared_pairs
    met: set[tuple[int, int]] = set()
    alive: list[Node] = []  # plain forms are made here, and told apart by their addresses
    while work:
        path, ours, theirs = work.pop()
        ours, theirs = _forms(ours, theirs)
        inside, other = _inside(ours), _inside(theirs)
        if inside is None or other is None or _kind(ours) != _kind(theirs):
            yield path, ours, theirs
            continue
        if (id(ours), id(theirs)) in met:
            continue
        met.add((id(ours), id(theirs)))
        alive += (ours, theirs)
        if len(met) > most:
            what = f"more than {most} pairs of containers would have to be compared"
            raise LimitExceeded(what, limit="compared_pairs", allowed=most)
        work.extend(reversed(list(_entries_of_both(path, inside, other, found))))


def _entries_of_both(
    path: str, inside: Labelled, other: Labelled, found: _Found
) -> Iterator[tuple[str, Node, Node]]:
    unclear = _unclear(inside, other)
    for label, (text, value) in inside.items():
        shown = _joined(path, _told_apart(label, text) if text in unclear else text)
        if label in other:
            yield shown, value, other[label][1]
        else:
            found.only_a.append(shown)
    for label, (text, _) in other.items():
        if label not in inside:
            found.only_b.append(
                _joined(path, _told_apart(label, text) if text in unclear else text)
            )


def _unclear(inside: Labelled, other: Labelled) -> set[str]:
    """The texts that stand for keys of several types: 0 and '0'."""
    kinds: dict[str, str] = {}
    return {text for kind, text, _ in (*inside, *other) if kinds.setdefault(text, kind) != kind}


def _told_apart(label: tuple[str, str, int], text: str) -> str:
    """The text of a label in a way that shows its type."""
    kind = label[0]
    return repr(text) if kind == "str" else text if kind == "int" else f"{text} ({kind})"


def _joined(path: str, label: str) -> str:
    return f"{path}.{label}" if path else label


def _forms(ours: Node, theirs: Node) -> tuple[Node, Node]:
    """Both nodes in the form in which they are compared; a number of numpy is a tensor beside a
    tensor.
    """
    ours, theirs = (_tensor_of(ours) or ours), (_tensor_of(theirs) or theirs)
    if type(ours) is TensorRef and type(theirs) is Call:
        theirs = tensor_form(theirs) or theirs
    if type(theirs) is TensorRef and type(ours) is Call:
        ours = tensor_form(ours) or ours
    return _form(ours), _form(theirs)


def _tensor_of(node: Node) -> TensorRef | None:
    """The tensor that a leaf is, carries, or stands for."""
    if type(node) is TensorObject:
        return node.tensor
    if type(node) is Storage:
        dtype = node.dtype or UINT8
        return whole_storage(node, 0, node.nbytes, UINT8 if node.nbytes % dtype.itemsize else dtype)
    if type(node) is Window:
        dtype = node.dtype or UINT8
        return whole_storage(
            node.storage, node.start * dtype.itemsize, node.stop * dtype.itemsize, dtype
        )
    return None


def _form(node: Node) -> Node:
    """A call as the plain value that it stands for, or as the tensors that it is made of."""
    if type(node) is not Call:
        return node
    if (pairs := mapping_pairs(node)) is not None:
        others = [(name, value) for name, value in attributes(node) if name != "_metadata"]
        return Dict([*pairs, *([("<attributes>", Dict(others))] if others else [])])
    if (plain := plain_form(node)) is not node:
        return plain
    if (made := flat("", node)) is not None:
        recipes = json.dumps(made.recipes, sort_keys=True)
        return Dict(
            [*((name.lstrip("."), ref) for name, ref in made.tensors), ("encoding", recipes)]
        )
    return node


def _kind(node: Node) -> str:
    """What sort of container a node is; two of different sorts are not entered."""
    return f"object of {node.name}" if type(node) is Call else type(node).__name__.lower()


def _inside(node: Node) -> Labelled | None:
    """What a container holds: each child with the text of its label, under what tells it from the
    others; None for a leaf.
    """
    if type(node) not in (Dict, list, tuple, Call, PersistentId):
        return None
    held: Labelled = {}
    met: Counter[tuple[str, str]] = Counter()  # keys that are containers have one label
    for label, child in children(node):
        text = label_text(label)
        at = type(label).__name__, text
        held[(*at, met[at])] = text, child
        met[at] += 1
    return held


def _same_leaf(ours: Node, theirs: Node) -> bool:
    if type(ours) is not type(theirs):
        return False
    if type(ours) is Global:
        return bool(ours.path == theirs.path)
    if type(ours) in (float, complex):
        return repr(ours) == repr(theirs)  # NaN is NaN, and 0.0 is not -0.0
    return type(ours) in _PLAIN and bool(ours == theirs)


_PLAIN = (str, int, bool, bytes, type(None))


def _spoken(node: Node) -> str:
    """A value as a report names it."""
    if type(node) is TensorRef:
        return f"{node.dtype.name} {list(node.shape)}"
    if type(node) is Global:
        return f"the name {node.path}"
    if node is None or type(node) in (*_PLAIN, float, complex):
        return label_text(node)[:_SHOWN] if type(node) in (int, bytes) else repr(node)[:_SHOWN]
    return _kind(node)


# ------------------------------------------------------------------------------------------- values


def _compare_values(
    pairs: Sequence[tuple[str, TensorRef, TensorRef]],
    tolerance: Tolerance | None,
    tell: OnProgress | None,
) -> tuple[list[ValueChange], list[str]]:
    """The tensors whose values differ, and what is damaged of what was read.

    With a tolerance, those that hold NaN are looked at even where all bits are the same. What
    several keys name is compared once.
    """
    firsts: dict[Hashable, int] = {}
    stands_for = [
        firsts.setdefault((view_identity(ours), view_identity(theirs)), at)
        for at, (_, ours, theirs) in enumerate(pairs)
    ]
    exact = [at for at in firsts.values() if _by_bytes(pairs[at][1:], tolerance)]
    meter = Meter("read", sum(pairs[at][1].nbytes for at in exact), tell)
    found = compare_bytes([pairs[at][1:] for at in exact], meter)
    meter.finish()
    same = {number for at, number in enumerate(exact) if at not in found.differing}
    others = [at for at in firsts.values() if at not in same]
    unread = {exact[at] for at in found.unread}
    read = [pairs[at][1:] for at in firsts.values() if at in unread or at not in same]
    meter = Meter(
        "measure",
        sum(pairs[at][1].nbytes for at in others) + sum(ours.nbytes for ours, _ in read),
        tell,
    )
    unlike = {
        at: change
        for at in others
        if (change := deviation(*pairs[at][1:], tolerance, meter)) is not None
    }
    changes = [
        ValueChange(path, unlike[first])
        for first, (path, _, _) in zip(stands_for, pairs, strict=True)
        if first in unlike
    ]
    damaged = damaged_storages(found, read, meter)
    if read:
        meter.finish()
    return changes, damaged


def _by_bytes(pair: Pair, tolerance: Tolerance | None) -> bool:
    """Whether the same bytes are the same values, of two tensors of one shape."""
    first, second = pair
    if first.dtype is not second.dtype:
        return False
    return tolerance is None or tolerance.equal_nan or first.dtype.kind not in ("float", "complex")
