"""Walking a tree of symbolic nodes: its tensors, its places, and the overlay through which it is
seen changed.

The tree is never changed: a change is an *overlay*, a node that stands in for another by identity,
which the walk here and the pickle writer both look through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import TypeAlias

from ckptconv.objects.plain import is_array
from ckptconv.objects.torch_read import is_tensor_call
from ckptconv.pickles.nodes import (
    ABSENT,
    Call,
    Dict,
    Node,
    PersistentId,
    children,
    mapping_pairs,
    spoken,
)
from ckptconv.support.errors import LimitExceeded
from ckptconv.support.limits import in_force
from ckptconv.tensors.refs import TensorObject, TensorRef

Place: TypeAlias = "tuple[Place, Node, Node] | None"
"""Where a node hangs: (the container's place, the label, the container); None for the root."""

Overlay = Mapping[int, Node]


def tensor_of(node: Node) -> TensorRef | None:
    """The tensor that a leaf is or carries; None for anything else."""
    if type(node) is TensorRef:
        return node
    return node.tensor if type(node) is TensorObject else None


def is_tensor(node: Node) -> bool:
    """Whether a node is a tensor of any kind, or an array whose values a tensor can hold."""
    return tensor_of(node) is not None or is_tensor_call(node) or is_array(node)


def label_text(label: Node) -> str:
    """A dict key or index as it stands in paths and messages; bytes as the text they are."""
    if type(label) is str:
        return label
    return label.decode("utf-8", "backslashreplace") if type(label) is bytes else spoken(label)


_LONGEST_LABEL = 500  # characters of a key in a path


def chain_of(place: Place) -> Iterator[tuple[Place, Node, Node]]:
    """A place, that of the container around it, and so on up to the root."""
    while place is not None:
        yield place
        place = place[0]


def label_of(place: Place) -> Node:
    """The label under which a node hangs; None for the root."""
    return None if place is None else place[1]


def labels_of(place: Place) -> list[Node]:
    """The labels that lead to a place, from the root on."""
    return [label for _, label, _ in chain_of(place)][::-1]


def place_text(place: Place) -> str:
    """The path of a place: labels joined by dots, empty for the root."""
    labels = []
    while place is not None:
        labels.append(label_text(place[1])[:_LONGEST_LABEL])
        place = place[0]
    return ".".join(reversed(labels))


def where_text(place: Place) -> str:
    """A place as errors name it."""
    return place_text(place) or WHOLE_FILE


WHOLE_FILE = "the whole file"
PLAIN = frozenset((str, int, float, bool, bytes, type(None), complex))


def walk(
    root: Node,
    overlay: Overlay | None = None,
    cycles: list[Place] | None = None,
    *,
    depth: int | None = None,
    leaves: bool = True,
) -> Iterator[tuple[Place, Node]]:
    """Every node that is not a plain value, with its first place, each once, parents before
    children.

    Shared and cyclic structures are entered once; where a container holds one that it is in, the
    place goes to `cycles`. The overlay may grow while walking: what stands in for a node just
    yielded is entered in its place. Without `leaves`, the tensors in a dict of nothing but tensors
    are left out: there may be a million. `LimitExceeded` when containers nest more than `depth`
    deep (None: the limit in force when the walk begins).
    """
    most = in_force().depth if depth is None else depth
    over: Overlay = {}
    if overlay is not None:  # also an empty one: it may grow while this walks
        over = overlay
    root = over.get(id(root), root)
    if type(root) in PLAIN:
        return
    seen = {id(root)}
    yield None, root
    root = over.get(id(root), root)
    if not leaves and holds_only_tensors(root):
        return
    # no recursion: a file may nest as deep as it likes
    work: list[tuple[Place, Node, Iterator[tuple[Node, Node]]]] = [(None, root, inner(root))]
    entered = {id(root)}  # those that the walk is in: one that is met again within is a cycle
    while work:
        place, holder, remaining = work[-1]
        for label, child in remaining:
            if type(child) in PLAIN:
                continue
            key = id(child)
            if key in over:
                child = over[key]
                key = id(child)
                if type(child) in PLAIN:
                    continue
            if key in seen:
                if key in entered and cycles is not None:
                    cycles.append((place, label, holder))
                continue
            seen.add(key)
            here = (place, label, holder)
            yield here, child
            if over:
                child = over.get(id(child), child)
            if type(child) in CONTAINERS:
                if (
                    type(child) in (tuple, list)
                    and len(work) < most
                    and PLAIN.issuperset(map(type, child))
                ):
                    continue  # nothing in it, and there may be a million of it
                if not leaves and len(work) < most and holds_only_tensors(child):
                    continue
                work.append((here, child, inner(child)))
                entered.add(id(child))
                if len(work) > most:
                    what = f"nests more than {most} containers"
                    raise LimitExceeded(
                        what, limit="depth", allowed=most, where=place_text(here)[:60] + "…"
                    )
                break
        else:
            entered.discard(id(work.pop()[1]))


def holds_only_tensors(node: Node) -> bool:
    """Whether a node is a dict of plain tensors under texts, with nothing else about it."""
    pairs = mapping_pairs(node)
    if not pairs or (type(node) is Call and node.state is not ABSENT):
        return False
    return kinds_in(pairs, 1) == {TensorRef} and kinds_in(pairs, 0) == {str}


def kinds_in(pairs: Iterable[tuple[Node, Node]], at: int) -> set[type]:
    """The types of the keys (`at` 0) or of the values (1) of a dict."""
    return {*map(type, map(itemgetter(at), pairs))}  # there may be a million: no loop of Python


# by their very types, as everywhere here: a TensorRef and a Storage are instances of tuple too
CONTAINERS = frozenset((Dict, list, tuple, Call, PersistentId, TensorObject))


def inner(node: Node) -> Iterator[tuple[Node, Node]]:
    """What is in a container, each with its label."""
    if type(node) is TensorObject:
        return iter((("<class>", node.cls), ("<state>", node.state)))
    return children(node)


def tensors_of(
    root: Node, overlay: Overlay | None = None, *, depth: int | None = None
) -> Iterator[tuple[str, TensorRef]]:
    """Every tensor of a tree with its path; tensors met twice under other keys appear once."""
    for place, node in walk(root, overlay, depth=depth):
        tensor = tensor_of(node)
        if tensor is not None:
            yield place_text(place), tensor
