"""Objects that `torch.load(weights_only=True)` refuses: rewritten in their plain form, dropped, or
refused with their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Literal

from ckptconv.objects.composites import Check, is_composite, parts_check
from ckptconv.objects.known_names import COPIES, VALUELESS, WEIGHTS_ONLY
from ckptconv.objects.plain import HOW, plain_form, spoken_name
from ckptconv.objects.threats import DO_NOT_LOAD, judge
from ckptconv.objects.torch_read import is_tensor_call
from ckptconv.objects.training import functions_of, is_class, is_config
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Global, Node, attributes, mapping_pairs
from ckptconv.support.errors import LimitExceeded, RefusedObject, printable
from ckptconv.support.limits import in_force
from ckptconv.support.records import dataclass
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef
from ckptconv.tree.walk import Place, chain_of, place_text, walk, where_text

Unknown = Literal["refuse", "drop", "keep"]
"""What becomes of a refused object without a plain form."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something of the source that the output does not hold: where it was, why, and what it was.

    `by_rule`: it is a key that the user's key rules, or the fitting to other keys, leave out;
    `seen` is its path as these had it, where rules before them had renamed it. `is_dropped`: it is
    an object without a plain form, which the user gave up.
    """

    path: str
    reason: str
    node: Node = field(default=None, repr=False, compare=False)
    by_rule: bool = False
    seen: str = field(default="", repr=False, compare=False)
    is_dropped: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """An object that is in the output in plain form: where, what it was, `how` (if not all)."""

    path: str
    name: str
    how: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """A tree whose objects are settled: what became of some of them, and the tensors and bare
    storages that are in it.

    `checks` read the indices of its sparse, quantized and nested tensors, which nothing may be made
    of before.
    """

    rewritten: list[Rewritten] = field(default_factory=list)
    dropped: list[Skipped] = field(default_factory=list)
    tensors: list[TensorRef] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cycles: list[Place] = field(default_factory=list)
    configs: set[int] = field(default_factory=set)


def settle_objects(root: Node, overlay: dict[int, Node], unknown: Unknown) -> Settled:
    """Rewrite, drop or refuse what `weights_only=True` refuses; collect what is left."""
    settled = Settled()
    refused: list[tuple[Place, str]] = []
    bound = cache(lambda: _bound_names(root, overlay))  # one more walk, for trees with classes
    for place, node in walk(root, overlay, settled.cycles):
        name = None
        if type(node) is not TensorRef and unknown != "keep":
            name = refused_name(node)
        if name is not None:
            name = spoken_name(node, name)
            if unknown == "drop":
                _refuse_part_of_tensor(place, name)
            if not _settle(node, name, place, overlay, settled, bound, drop=unknown == "drop"):
                refused.append((place, name))
            node = overlay.get(id(node), node)
        if type(node) is TensorRef:
            settled.tensors.append(node)
        elif type(node) is TensorObject:
            settled.tensors.append(node.tensor)
        elif type(node) is Storage:
            settled.storages.append(node)
        elif type(node) is Call and is_composite(node):
            settled.checks.append(parts_check(node, where_text(place)))
        if unknown != "keep" and (type(node) is Dict or type(node) is Call):
            refuse_keys(node, place)
    if refused:
        raise _refusal(refused)
    return settled


def _refuse_part_of_tensor(place: Place, name: str) -> None:
    """Refuse to drop what a tensor is made with: the tensor would be lost with it."""
    for above, _, holder in chain_of(place):
        if is_tensor_call(holder):
            what = f"a tensor of which {name} is a part cannot be written without it"
            if _is_dangerous(name):
                raise _dangerous(what, where_text(above), DO_NOT_LOAD)
            hint = "leave the tensor out with --exclude, or keep it as it is with --unknown keep"
            raise RefusedObject(what, where=where_text(above), hint=hint)


def _hashed(node: Node) -> Iterable[Node]:
    """What a reader of the output will hash: the keys of a dict, the elements of a set."""
    match node:
        case Call(name="builtins.set" | "builtins.frozenset", args=args):
            return args[0] if args and type(args[0]) in (list, tuple) else ()
    return (key for key, _ in mapping_pairs(node) or node.pairs)


def refuse_keys(node: Node, place: Place) -> None:
    """Refuse dict keys of slow hashing (nested tuples, ints of one hash), or of none."""
    try:
        odd = [key for key in _hashed(node) if type(key) is not str and not _is_harmless_key(key)]
    except LimitExceeded as error:
        raise error.at(where=where_text(place)) from None
    if not odd:
        return
    if any(type(key) is not int for key in odd):
        what = "a dict or set has keys that are not plain values"
        raise RefusedObject(what, where=where_text(place), hint=_HANG)
    # they may be made to have one hash, and then each key meets all before it
    most = in_force().large_int_keys
    if len(odd) > most:
        what = f"a dict or set has {len(odd)} keys that are ints beyond 61 bits"
        where, needed = where_text(place), len(odd)
        raise LimitExceeded(
            what, limit="large_int_keys", allowed=most, needed=needed, where=where, advice=_HANG
        )


_HANG = "they can make a reader hang; --unknown keep keeps them, --only PATH takes one part"


def _is_harmless_key(key: Node) -> bool:
    if type(key) is int:
        return -_LARGE_INT < key < _LARGE_INT
    if type(key) is tuple:
        return _is_small_tuple(key)
    if type(key) is Call:
        return key.name in ("torch.device", "torch.Size") and _is_small_tuple(key.args)
    return type(key) in (float, bool, bytes, type(None), Global)


def _is_small_tuple(key: tuple[Node, ...]) -> bool:
    """Whether a tuple holds plain values, and such tuples; `LimitExceeded` for many."""
    most = in_force().key_tuple
    work: list[Node] = [key]
    # the list grows while it is gone through, so that no depth of a tuple is too deep
    for count, part in enumerate(work):
        if count > most:
            what = f"a dict or set has a key that is a tuple of more than {most} parts"
            raise LimitExceeded(what, limit="key_tuple", allowed=most, advice=_HANG)
        if type(part) is tuple:
            work.extend(part)
        elif type(part) not in (str, int, float, bool, bytes, type(None)):
            return False
    return True


_LARGE_INT = (1 << 61) - 1  # Python's hash of an int is its remainder by this prime


def _settle(
    node: Node,
    name: str,
    place: Place,
    overlay: dict[int, Node],
    settled: Settled,
    bound: Callable[[], set[int]],
    *,
    drop: bool,
) -> bool:
    """Put what stands in for a refused object into the overlay; False when nothing may."""
    plain = plain_form_at(node, place)
    if type(node) is Global and plain is not node and id(node) in bound():
        plain = node
    if plain is not node:
        overlay[id(node)] = plain
        if not is_part_of_config(name, place, plain, settled.configs):
            how = "its name" if type(node) is Global else HOW.get(name, "")
            settled.rewritten.append(Rewritten(place_text(place), name, how))
    elif drop:
        overlay[id(node)] = node.tensor if type(node) is TensorObject else None
        why = f"dropped: {name} is not a plain object"
        settled.dropped.append(Skipped(place_text(place), why, node, is_dropped=True))
    return drop or plain is not node


def refused_name(node: Node) -> str | None:
    """The global for which `weights_only=True` refuses `node`, or without values; else None."""
    if type(node) is Call:
        name: str = node.name
        if name == "builtins.bytearray" and type(next(iter(node.args), b"")) is int:
            return name  # so many zero bytes: a file of a few bytes would take all memory
        known = name in WEIGHTS_ONLY and name not in VALUELESS and name not in COPIES
        return None if known and not has_more(node) else name
    if type(node) is TensorObject:
        node = node.cls
    if type(node) is Global and node.path not in WEIGHTS_ONLY:
        return node.path
    return None


def has_more(call: Call) -> bool:
    """Whether a call of a known class has more to it than its arguments or, if it is a dict, than
    its items and attributes.
    """
    if call.items or call.kwargs is not None:
        return True
    if call.name not in ("collections.OrderedDict", "collections.Counter"):
        return bool(call.pairs) or call.state not in (ABSENT, None)
    if call.args or (call.state is not ABSENT and type(call.state) is not Dict):
        return True
    return not all(type(name) is str for name, _ in attributes(call))


def is_part_of_config(name: str, place: Place, plain: Node, configs: set[int]) -> bool:
    """Whether an object is in a configuration of `configs`, which are told of, and become more."""
    if not is_config(name):
        return False
    configs.add(id(plain))
    return place is not None and id(place[2]) in configs


def plain_form_at(node: Node, place: Place) -> Node:
    """The plain form of a refused object at its place, where a class by itself is its name; the
    object itself when it has none.
    """
    if type(node) is Global and not _stands_alone(place):
        return node
    plain = _form(node)
    for _ in range(_NESTED):  # a leaf of a configuration may hold an object
        if plain is node or refused_name(plain) is None:
            return plain
        inner = _form(plain)
        if inner is plain:
            break
        plain = inner
    return node


_NESTED = 3


def _form(node: Node) -> Node:
    match node:
        case Call(name="functools.partial") if not all(map(_is_harmless, functions_of(node))):
            return node
        case Call():
            return plain_form(node)
        case Global() if is_class(node) and _is_harmless(node):
            return node.path
        case TensorObject(cls=Global(path="torch.nn.parameter.Buffer")):
            return node.tensor
    return node


def _is_harmless(name: Global) -> bool:
    return judge(name.module, name.name).level != "dangerous"


def _stands_alone(place: Place) -> bool:
    """Whether a node hangs in dicts and lists only, and is not part of how an object is made."""
    for _, label, holder in chain_of(place):
        if type(holder) is Call and (mapping_pairs(holder) is None or label == "<state>"):
            return False
        if type(holder) not in (Call, Dict, list, tuple) or label in ("<key>", "<value>"):
            return False
    return True


def _bound_names(root: Node, overlay: Mapping[int, Node]) -> set[int]:
    """The classes that some object is made of: one and the same node may stand alone elsewhere."""
    found: set[int] = set()
    for _, node in walk(root, overlay):
        work: list[Node] = []
        if type(node) is TensorObject:
            work = [node.cls, node.state]
        elif type(node) is Call and node.name in WEIGHTS_ONLY:
            work = [*node.args, node.kwargs, node.state]
        while work:
            part = work.pop()
            if type(part) is Global:
                found.add(id(part))
            elif type(part) in (list, tuple):
                work += part
            elif type(part) is Dict:
                work += [inner for pair in part.pairs for inner in pair]
    return found


def _refusal(unknown: Sequence[tuple[Place, str]]) -> RefusedObject:
    place, name = unknown[0]
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    if name in VALUELESS:
        what = f"a tensor without values ({name}){more}: there is nothing to convert"
        hint = "save it on a host that has its values, or leave it out with --unknown drop"
        return RefusedObject(what, where=where_text(place), hint=hint)
    what = "is an object that torch.load(weights_only=True) refuses"
    for place_of_it, dangerous in unknown:
        if _is_dangerous(dangerous):
            what = f"{printable(dangerous)}{more} {what}"
            return _dangerous(what, where_text(place_of_it), DROP_DANGEROUS)
    hint = "--unknown drop replaces it by None, --unknown keep keeps it, --only PATH takes one part"
    if name.startswith("torchao."):
        hint = f"--dequantize makes values of it, {hint}"
    return RefusedObject(f"{printable(name)}{more} {what}", where=where_text(place), hint=hint)


def _dangerous(what: str, where: str, hint: str) -> RefusedObject:
    return RefusedObject(what, where=where, hint=hint, code="dangerous")


DROP_DANGEROUS = f"{DO_NOT_LOAD}; --unknown drop replaces it by None"


def _is_dangerous(path: str) -> bool:
    """Whether `scan` would warn of a name, or the name loads further pickles, which run."""
    module, _, name = path.rpartition(".")
    # of a class and a text it names a method, as old pickles do; scan judges what it names
    if name == "getattr":
        return False
    return path == "torch.storage._load_from_bytes" or judge(module, name).level == "dangerous"
