"""A checkpoint of which some bytes are lost: what can be told without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptconv.objects.torch_read import Window
from ckptconv.pickles.nodes import (
    Node,
    children,
    containers,
    mapping_pairs,
    substituted,
    with_pairs,
)
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, origins
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import chain_of, walk

IsWhole = Callable[[Storage], bool]
"""Whether the bytes of a storage are there, all of them, as they were written."""


def without_lost(checkpoint: Checkpoint, is_whole: IsWhole) -> Checkpoint:
    """The checkpoint without what is not whole: the items of dicts that are lost tensors, or hold
    one in a list or an object, whose other items would get other numbers without it.

    Raises `MalformedCheckpoint` where a lost tensor is in no dict.
    """
    root = checkpoint.root
    if _holds_lost(root, is_whole):
        what = "what is lost is not in a dict, and cannot be left out of anything else"
        raise MalformedCheckpoint(what, path=checkpoint.path)
    # a dict inside one that is made anew is another dict then: so from the outside inwards
    while found := _outermost(root, is_whole):
        root = substituted(root, containers(root), found)
    return replace(checkpoint, root=root)


def _outermost(root: Node, is_whole: IsWhole) -> dict[int, Node]:
    """What stands in for dicts with lost items, by id; no dict that is in another of them."""
    found: dict[int, Node] = {}
    for place, node in walk(root):
        if found and any(id(step[2]) in found for step in chain_of(place)):
            continue
        pairs = mapping_pairs(node)
        if not pairs:
            continue
        kept = [pair for pair in pairs if not _holds_lost(pair[1], is_whole)]
        if len(kept) < len(pairs):
            found[id(node)] = with_pairs(node, kept)
    return found


def _holds_lost(value: Node, is_whole: IsWhole) -> bool:
    """Whether a value is lost, or holds something lost that no dict in it can leave out."""
    seen: set[int] = set()
    work = [value]
    while work:
        node = work.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is TensorObject:
            # the dicts within belong to the tensor
            if _holds_lost_anywhere(node, is_whole):
                return True
        elif _is_lost(node, is_whole):
            return True
        elif mapping_pairs(node) is None:
            work += [child for _, child in children(node)]
    return False


def _holds_lost_anywhere(tensor: TensorObject, is_whole: IsWhole) -> bool:
    nodes = (node for _, node in walk(tensor.state))
    return _is_lost(tensor.tensor, is_whole) or any(_is_lost(node, is_whole) for node in nodes)


def _is_lost(node: Node, is_whole: IsWhole) -> bool:
    if type(node) is TensorObject:
        return _is_lost(node.tensor, is_whole)
    if type(node) is Window:
        return not is_whole(node.storage)
    if type(node) is TensorRef:
        return not all(map(is_whole, origins([node])))
    return type(node) is Storage and not all(map(is_whole, origins([node])))
