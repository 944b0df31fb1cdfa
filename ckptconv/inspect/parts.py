"""The parts of a checkpoint's tree, as far as they are shown."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ckptconv.inspect.inspection import Part, TensorFacts
from ckptconv.keys.rules import find_wrappers
from ckptconv.pickles.nodes import Call, Dict, Global, Node, children, mapping_pairs, spoken
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import natural_key
from ckptconv.tensors.refs import Storage, TensorRef
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import PLAIN, label_text, tensor_of, walk

_VALUE_LENGTH = 60
# levels of modules that are shown more for the wrappers around them; training wraps five times
_DEEPEST_WRAPPERS = 50


def tensor_facts(path: str, key: str | None, ref: TensorRef) -> TensorFacts:
    """The facts about the tensor at `path`, which is under `key` in a state dict, if in any."""
    return TensorFacts(path, key, ref.dtype.name, tuple(ref.shown_shape), ref.location, ref.nbytes)


def _tensor_part(name: str, ref: TensorRef) -> Part:
    return Part(
        name, _described(ref)[0], 1, ref.nbytes, tensor=tensor_facts(name, None, ref), sort="tensor"
    )


class PartTree(NamedTuple):
    """What the parts of a tree are shown with: its state dicts by node, the plain forms of objects.
    With `is_bare`, there are no tensors in it: then dicts of plain values are shown too.
    """

    found: Mapping[int, StateDict]
    overlay: Mapping[int, Node]
    is_bare: bool = False


def held_in(node: Node, overlay: Mapping[int, Node]) -> tuple[list[TensorRef], list[Storage]]:
    """The tensors in a node, numpy's arrays among them, and the storages that stand in it without
    a tensor over them, as in a quantized tensor.
    """
    refs: list[TensorRef] = []
    bare: list[Storage] = []
    for _, inner in walk(node, overlay):
        if type(inner) is Storage:
            bare.append(inner)
        elif (ref := tensor_of(inner)) is not None:
            refs.append(ref)
    return refs, bare


def part_of_tree(name: str, node: Node, tree: PartTree, depth: int, shown: set[int]) -> Part:
    """A node as a part, with `depth` levels of parts in it; `shown` are the nodes shown so far."""
    if id(node) in shown:
        words, sort = _described(node)
        return Part(name, f"{words}, shared with a part above", 0, 0, (), None, *sort, True)
    if type(node) in (Dict, list, Call):
        shown.add(id(node))
    item = tree.found.get(id(node))
    if item is not None and item.own is None:
        return _state_dict_part(name, item, tree, depth)
    node = tree.overlay.get(id(node), node)
    ref = tensor_of(node)
    if ref is not None:
        return _tensor_part(name, ref)
    refs = _held(node, tree.overlay)
    pairs = mapping_pairs(node)
    parts = []
    if depth > 0 and pairs is not None and (refs or tree.is_bare):
        own: tuple[int, ...] = ()
        if item is not None:
            own = item.own or ()
            parts.append(_state_dict_part(".", item, tree, depth))
        mine = frozenset(own)
        parts += [
            part_of_tree(label_text(label), child, tree, depth - 1, shown)
            for at, (label, child) in enumerate(children(node))
            if at not in mine
        ]
    words, sort = _described(node)
    return Part(name, words, len(refs), _nbytes(refs), tuple(parts), None, *sort)


_Held = Sequence[TensorRef | Storage]
_Entry = tuple[str, Node, _Held]
"""A key of a state dict, what it leads to, and the tensors in that: itself, or its components."""


def _state_dict_part(name: str, item: StateDict, tree: PartTree, depth: int) -> Part:
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
    ref = tensor_of(node)
    if ref is not None:
        return (ref,)
    if type(node) in PLAIN:
        return ()
    refs, bare = held_in(node, overlay)
    return [*refs, *bare]


def _all_held(named: Sequence[_Entry]) -> list[TensorRef | Storage]:
    return [held for _, _, all_held in named for held in all_held]


def _nbytes(held: _Held) -> int:
    """The bytes of the values, views of the same bytes and storages counted once."""
    met: dict[Hashable, int] = {}
    apart = 0
    for item in held:
        if isinstance(item, Storage):
            met[id(item)] = item.nbytes
        elif item.is_view:
            met[id(item.storage), item.storage_offset, item.shape, item.stride] = item.nbytes
        else:
            apart += item.nbytes
    return apart + sum(met.values())


def _modules(named: Sequence[_Entry], depth: int) -> tuple[Part, ...]:
    """The tensors of a state dict grouped by the leading segments of their keys."""
    if depth <= 0:
        return ()
    groups: dict[str, list[_Entry]] = {}
    for key, node, refs in named:
        head, _, rest = key.partition(".")
        groups.setdefault(head, []).append((rest, node, refs))
    heads = [*groups]
    if all(head.isascii() and head.isdigit() for head in heads):
        heads.sort(key=natural_key)  # safetensors has 10 before 2
    return tuple(_module(head, groups[head], depth) for head in heads)


def _module(head: str, group: Sequence[_Entry], depth: int) -> Part:
    refs = _all_held(group)
    if len(group) == 1 and not group[0][0]:
        [(_, node, _)] = group
        ref = tensor_of(node)
        if ref is not None:
            return _tensor_part(head, ref)
        words, sort = _described(node)
        return Part(head, _library_name(node) or words, len(refs), _nbytes(refs), (), None, *sort)
    return Part(head, "module", len(group), _nbytes(refs), _modules(group, depth - 1))


def _library_name(node: Node) -> str | None:
    """What an object is called that is a tensor to its library; None for anything else."""
    if type(node) is not Call:
        return None
    is_subclass = node.name == "torch._tensor._rebuild_from_type_v2"
    if is_subclass and type(node.args[1]) is Global:
        return str(node.args[1].path)
    return _PACKED.get(node.name)


_PACKED = {
    "torch._utils._rebuild_qtensor": "quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "sparse tensor",
}


_Sort = tuple[str, int | None, str | int | float | bool | None]


def _described(node: Node) -> tuple[str, _Sort]:
    """What a node is in words; its sort in one, its number of items, its plain value or name."""
    kind = type(node)
    name = kind.__name__
    ref = tensor_of(node)
    if ref is not None:
        return f"{ref.dtype.name} {list(ref.shown_shape)} on {ref.location}", ("tensor", None, None)
    pairs = mapping_pairs(node)
    if pairs is not None:
        if {"state", "param_groups"} <= {key for key, _ in pairs if type(key) is str}:
            return "optimizer", ("optimizer", len(pairs), None)
        return f"dict of {len(pairs)}", ("dict", len(pairs), None)
    if kind in (list, tuple):
        return f"{name} of {len(node)}", (name, len(node), None)
    if kind is Storage:
        words = f"storage of {node.nbytes} bytes on {node.location}"
        return words, ("storage", node.nbytes, None)
    if kind is Call:
        return node.name, ("object", None, node.name)
    if kind is Global:
        return f"the name {node.path}", ("name", None, node.path)
    if node is None:
        return spoken(node), ("none", None, None)
    if kind not in (str, int, float, complex, bool, bytes):
        return spoken(node), ("object", None, spoken(node))
    text = label_text(node)[:_VALUE_LENGTH]
    is_value = kind in (bool, float) or (kind is int and node.bit_length() <= _LONGEST_INT)
    return f"{name} {text}", (name, None, node if is_value else text)


_LONGEST_INT = 64  # bits; longer ones are texts, for few readers of JSON take them
