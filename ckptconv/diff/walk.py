"""Two trees walked together: which keys, shapes, dtypes and values differ, but for the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import field

from ckptconv.diff.report import Changed, Reshaped
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
from ckptconv.support.errors import LimitExceeded
from ckptconv.support.limits import in_force
from ckptconv.support.records import dataclass
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, whole_storage
from ckptconv.tree.walk import label_text

Label = tuple[str, str, int]
"""The type of the label of a child, its text, and a number that tells it from others like it."""
Labelled = dict[Label, Node]
"""What a container holds, by labels."""
_SHOWN = 60  # characters of a plain value in a report


@dataclass(slots=True)
class Differences:
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
            if ignore_dtype:
                ours, theirs = _unblocked(path, ours), _unblocked(path, theirs)
        if ours.shown_shape != theirs.shown_shape:
            self.shapes.append(Reshaped(path, tuple(ours.shown_shape), tuple(theirs.shown_shape)))
        if ours.pieces and theirs.pieces and ours.location != theirs.location:
            self.locations.append(Changed(path, ours.location, theirs.location))
        is_one_type = ours.dtype is theirs.dtype or ignore_dtype
        if ours.shape == theirs.shape and is_one_type and ours.numel:
            self.pairs.append((path, ours, theirs))


def _unblocked(path: str, ref: TensorRef) -> TensorRef:
    """The values of a tensor of blocks of GGUF, of any other itself."""
    if not ref.dtype.is_block:
        return ref
    from ckptconv.tensors.schemes.base import Facts, unblocked  # of GGUF alone

    return unblocked(path, ref, Facts())


def walk_together(
    first: Node, second: Node, differences: Differences
) -> Iterator[tuple[str, Node, Node]]:
    """The leaves that stand at one path in both trees; `differences` gets what stands in one only.
    A pair of containers that was met before, as shared and cyclic ones are, is not entered again.
    """
    work = [("", first, second)]
    # one container may stand beside many others: there are more pairs than containers
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
        work.extend(reversed(list(_entries_of_both(path, inside, other, differences))))


def _entries_of_both(
    path: str, inside: Labelled, other: Labelled, differences: Differences
) -> Iterator[tuple[str, Node, Node]]:
    kinds: dict[str, set[str]] = {}
    for kind, text, _ in (*inside, *other):
        kinds.setdefault(text, set()).add(kind)
    for label in inside | other:
        _, text, _ = label
        # 0 and '0' are the same text
        shown = _joined(path, _told_apart(label) if len(kinds[text]) > 1 else text)
        if label not in other:
            differences.only_a.append(shown)
        elif label not in inside:
            differences.only_b.append(shown)
        else:
            yield shown, inside[label], other[label]


def _told_apart(label: Label) -> str:
    """The text of a label in a way that shows its type."""
    kind, text, _ = label
    if kind == "str":
        return repr(text)
    return text if kind == "int" else f"{text} ({kind})"


def _joined(path: str, label: str) -> str:
    return f"{path}.{label}" if path else label


def _forms(ours: Node, theirs: Node) -> tuple[Node, Node]:
    """Both nodes in the form to compare; a number of numpy is a tensor beside a tensor."""
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
        if node.nbytes % dtype.itemsize:
            dtype = UINT8
        return whole_storage(node, 0, node.nbytes, dtype)
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
    pairs = mapping_pairs(node)
    if pairs is not None:
        others = [(name, value) for name, value in attributes(node) if name != "_metadata"]
        if others:
            pairs = [*pairs, ("<attributes>", Dict(others))]
        return Dict([*pairs])
    plain = plain_form(node)
    if plain is not node:
        return plain
    made = flat("", node)
    if made is not None:
        import json

        recipes = json.dumps(made.recipes, sort_keys=True)
        return Dict(
            [*((name.lstrip("."), ref) for name, ref in made.tensors), ("encoding", recipes)]
        )
    return node


def _kind(node: Node) -> str:
    """What sort of container a node is; two of different sorts are not entered."""
    return f"object of {node.name}" if type(node) is Call else type(node).__name__.lower()


def _inside(node: Node) -> Labelled | None:
    """What a container holds, by what tells the children apart; None for a leaf."""
    if type(node) not in (Dict, list, tuple, Call, PersistentId):
        return None
    held: Labelled = {}
    met: Counter[tuple[str, str]] = Counter()  # keys that are containers have one label
    for label, child in children(node):
        at = type(label).__name__, label_text(label)
        held[(*at, met[at])] = child
        met[at] += 1
    return held


def _same_leaf(ours: Node, theirs: Node) -> bool:
    if type(ours) is not type(theirs):  # to Python, 1, 1.0 and True are equal
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
        return f"{node.dtype.name} {list(node.shown_shape)}"
    if type(node) is Global:
        return f"the name {node.path}"
    if node is None or type(node) in (*_PLAIN, float, complex):
        return label_text(node)[:_SHOWN] if type(node) in (int, bytes) else repr(node)[:_SHOWN]
    return _kind(node)
