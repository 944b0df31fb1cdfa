"""The state dicts of a tree, and the choice of the one that is the model: never a guess at a loss.

docs/state-dicts.md states the rule. Where something that somebody may want would be left out, the
error lists the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import PurePath

from ckptconv.objects.encodings import holds_tensors
from ckptconv.pickles.nodes import Dict, Node, attributes, children, mapping_pairs, with_pairs
from ckptconv.support.errors import AmbiguousStateDict, KeyConflict, printable
from ckptconv.support.limits import in_force
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.report import html_table, short_repr
from ckptconv.support.text import count_text, first_few, look_hint, part_text, quoted
from ckptconv.tensors.refs import TensorObject, TensorRef
from ckptconv.tree.candidates import (
    Candidate,
    Pairs,
    Survey,
    dict_pairs,
    is_of_no_module,
    is_training_state,
    metadata_of,
    survey,
    tells_of_wrappers,
)
from ckptconv.tree.labels import (
    WHOLE,
    averages_weights,
    is_bare,
    names_average,
    names_training_state,
)
from ckptconv.tree.walk import PLAIN, Place, chain_of, is_tensor, label_text, place_text, tensor_of

_LISTED = 8
_IN_TABLE = 20  # keys in a notebook
_LEAVES = frozenset((TensorRef, TensorObject, *PLAIN))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StateDict:
    """A state dict in a tree: its `path` (empty for the root), its `node`, and its keys and values
    in order.

    A path that ends in a dot means only the tensors that stand in the dict itself, beside others:
    `own` are then the numbers of their pairs. A key that is not text is given as text, so two may
    be equal; a value is a `TensorRef`, a `TensorObject`, or whatever else training left under the
    key. `place` is where the dict hangs. `is_bare`: its framework takes DDP's wrapper off, so a
    ``module.`` is an attribute of the model. `notes` tell where the keys are not the file's own,
    and what else there was to choose.
    """

    path: str
    node: Node
    keys: tuple[str, ...]
    values: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    own: tuple[int, ...] | None = None
    place: Place = None
    is_bare: bool = False

    @property
    def prefix(self) -> str:
        """What stands before its keys in the paths of its values."""
        return f"{self.path.removesuffix('.')}." if self.path.strip(".") else ""

    @property
    def telling_keys(self) -> tuple[str, ...]:
        """The keys that tell which wrappers stand around the model; all where none does. That of a
        bare one is a key of no module too.
        """
        named = zip(self.keys, self.values, strict=True)
        telling = [
            key for key, value in named if "." in key or tells_of_wrappers(self.place, key, value)
        ]
        telling = telling or [*self.keys]
        if self.is_bare:
            telling.append("")
        return tuple(telling)

    @property
    def keys_beside(self) -> tuple[str, ...]:
        """The keys of what training left beside the model: of no module, parameter or buffer."""
        named = zip(self.keys, self.values, strict=True)
        return tuple(
            [
                key
                for key, value in named
                if "." not in key and is_of_no_module(key) and not holds_tensors(value)
            ]
        )

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """The keys whose values are tensors, with them."""
        for key, value in zip(self.keys, self.values, strict=True):
            if type(value) is TensorRef:  # nearly all are
                yield key, value
            elif (tensor := tensor_of(value)) is not None:
                yield key, tensor

    def __repr__(self) -> str:
        first = [f"{key}, …" for key in self.keys[:1]]
        count = count_text(len(self.keys), "key")
        return short_repr("StateDict", self.path or "the root", count, *first)

    def _repr_html_(self) -> str:
        shown = islice(self.tensors(), _IN_TABLE)
        rows = ((key, ref.dtype.name, list(ref.shown_shape), ref.location) for key, ref in shown)
        return html_table(self.path or "the root", rows, more=max(0, len(self.keys) - _IN_TABLE))

    def beside(self) -> Iterator[tuple[str, Node, bool]]:
        """What stands in its dict beside it, and beside what the dict is in: path, value, and
        whether it is an item.

        What is not an item was set on a dict; the versions of a state dict's modules go without
        saying.
        """
        yield from _attributes(self.node, self.prefix)
        if self.own is not None:
            mine = set(self.own)
            for index, (key, value) in enumerate(dict_pairs(self.node) or ()):
                if index not in mine:
                    yield self.prefix + label_text(key), value, True
        child = self.node
        for above, _, holder in chain_of(self.place):
            path = place_text(above)
            base = path and f"{path}."
            yield from _attributes(holder, base)
            for label, value in dict_pairs(holder) or list(children(holder)):
                if value is not child:
                    yield base + label_text(label), value, True
            child = holder


def _attributes(node: Node, base: str) -> Iterator[tuple[str, Node, bool]]:
    if mapping_pairs(node) is not None:
        for name, value in attributes(node):
            if name != "_metadata":
                yield f"{base}<state>.{label_text(name)}", value, False


def holds_leaves(item: StateDict) -> bool:
    """Whether nothing but tensors and plain values stands in the dict of a state dict."""
    return item.own is None and _LEAVES.issuperset(map(type, item.values))


def is_all(item: StateDict) -> bool:
    """Whether a state dict is the whole tree: no optimizer's state can be anywhere in it."""
    return item.place is None and holds_leaves(item)


# ------------------------------------------------------------------------------------------ finding


def find_state_dicts(
    root: Node, whole: Node | None = None, only: str | None = None
) -> list[StateDict]:
    """The state dicts of a tree, by content: those that come first, and the others that look like a
    module's. `root` is the part at the path `only` of the `whole` tree, where one was asked for.
    """
    if whole is None:
        whole = root
    candidates = survey(root).candidates
    first = max((item.rank for item in candidates), default=0)
    return [
        replace(state_dict_at(item), is_bare=is_bare(whole, joined(only or "", item.path)))
        for item in candidates
        if item.rank == first or item.is_module
    ]


def state_dict_at(item: Candidate, notes: tuple[str, ...] = ()) -> StateDict:
    """The state dict that a candidate is, with the notes that go with it."""
    own, pairs = item.own, item.pairs
    if own is not None:
        pairs = [pairs[index] for index in own]
    keys = tuple(map(itemgetter(0), pairs))
    if {*map(type, keys)} != {str}:
        keys = tuple(map(label_text, keys))
    around = {id(item.node), *(id(holder) for _, _, holder in chain_of(item.place))}
    if item.beside and not around.isdisjoint(item.beside):
        notes = (*notes, "a dict contains itself, or one that it is in; that is left out")
    return StateDict(
        item.path, item.node, keys, tuple(map(itemgetter(1), pairs)), notes, own, item.place
    )


def nested_state_dict(part: FoundPart) -> StateDict | None:
    """A dict of dicts whose leaves are all tensors as one state dict, its keys joined by dots:
    Megatron and flax nest a model.

    None where a label in it names a whole model, where a tensor is a number of the training or the
    like, and where two keys would be equal.
    """
    found: list[tuple[str, Node]] = []
    work: list[tuple[str, Node, int]] = [("", part.node, 0)]
    is_nested, count, most = False, 0, in_force()
    while work:
        name, value, depth = work.pop()
        if is_tensor(value):
            found.append((name, value))
            continue
        count += 1
        # a dict may hold itself, or the same one twice at each level
        if depth > most.depth or count > most.modules:
            return None
        pairs = dict_pairs(value)
        is_plain = PLAIN.issuperset({type(key) for key, _ in pairs or ()})
        if pairs is None or not is_plain or is_training_state(value):
            return None
        is_nested = is_nested or value is not part.node
        named = [(label_text(key), inner) for key, inner in pairs]
        models = (inner for label, inner in named if label in WHOLE or names_average(label))
        if any(dict_pairs(inner) is not None for inner in models):
            return None
        if part.own_only and value is part.node and any(is_tensor(inner) for _, inner in named):
            return None
        lead = name and f"{name}."
        work += [(lead + label, inner, depth + 1) for label, inner in reversed(named)]
    if not is_nested or len({key for key, _ in found}) < len(found):
        return None
    wanted = sum(len(holder.tensors) for holder in survey(part.node).holders)
    if not wanted or wanted < len(found):  # some are numbers of the training
        return None
    note = "it is a dict of dicts of tensors: its keys are joined by dots"
    return _of_pairs(part.path, found, note)


def nested_parts(part: FoundPart) -> list[str]:
    """The paths of the dicts of dicts of tensors in a part, and of itself."""
    inside = [
        FoundPart(joined(part.path, label_text(key)), value, own_only=False)
        for key, value in dict_pairs(part.node) or ()
        if not (type(key) is str and names_training_state(key))
    ]
    itself = FoundPart(part.path or ".", part.node, own_only=not part.path)
    return [item.path for item in (*inside, itself) if nested_state_dict(item) is not None]


def _of_pairs(path: str, pairs: Sequence[tuple[str, Node]], note: str) -> StateDict:
    """The state dict of named tensors that do not stand in one dict."""
    keys, values = zip(*pairs, strict=True)
    return StateDict(path, Dict(list(pairs)), keys, values, (note,))


def bare_tensors(node: Node) -> StateDict | None:
    """A state dict for a lone tensor, a list of tensors, or of pairs with names; else None."""
    if is_tensor(node):
        note = "it is one tensor, not a state dict: its key is 'tensor'"
        return _of_pairs("", [("tensor", node)], note)
    if type(node) not in (list, tuple) or not node:
        return None
    if all(map(is_tensor, node)):
        what = f"it holds a {type(node).__name__} of {len(node)} tensors and no state dict"
        note = f"{what}: their keys are their numbers"
        return _of_pairs("", [(str(index), item) for index, item in enumerate(node)], note)
    listed = [tuple(item) for item in node if type(item) in (list, tuple) and len(item) == 2]
    pairs = [(name, value) for name, value in listed if type(name) is str and is_tensor(value)]
    if len(dict(pairs)) < len(node):  # something else is in it, or two have one name
        return None
    note = "it is a list of names and tensors, such as list(state_dict.items())"
    return _of_pairs("", pairs, note)


# ----------------------------------------------------------------------------------------- refusing


def joined(base: str, path: str) -> str:
    """The path of a part within another one; a dot at the end: the tensors in that dict itself."""
    if not base or not path:
        return base or path or "."
    return f"{base}." if path == "." else f"{base}.{path}"


def listed_parts(names: Sequence[str]) -> str:
    """Paths of state dicts in prose, the tensors at the root counted among them."""
    return first_few(names, _LISTED, part_text)


def choice_of_parts(names: Sequence[str]) -> str:
    """The hint of an error that leaves the choice: an option for each of the first parts."""
    more = ", …" if len(names) > _LISTED else ""
    return f"choose one: {' or '.join(f'--only {quoted(name)}' for name in names[:_LISTED])}{more}"


# ------------------------------------------------------------------------------------ parts by path


class FoundPart(NamedTuple):
    """A named part of a tree: its path, and whether only its own tensors are meant."""

    path: str
    node: Node
    own_only: bool


def find(root: Node, path: str | None, file: PurePath) -> Node:
    """The node at a dotted path such as ``optimizer.state``, or the root; keys may hold dots
    themselves.

    With a dot at its end, a dict of just the tensors that stand there; ``ema`` is the average,
    whatever it is called.
    """
    part = part_at(root, path, file)
    if not part.own_only or nested_state_dict(part) is not None:
        return part.node
    state_dict = own_of(part, survey(part.node), file)
    return own_node(state_dict)


def part_at(root: Node, only: str | None, file: PurePath) -> FoundPart:
    """The part of a tree at the path `only`, or all of it; `AmbiguousStateDict` where none is, or
    several are.
    """
    if not only or only == ".":
        return FoundPart("", root, only == ".")
    path = only.removesuffix(".")
    reached = _at(root, path)
    # `ema: 0.999` says how fast an average follows, and is not the average
    if path == "ema" and PLAIN.issuperset(map(type, reached)):
        average = _average(root, file)
        if average is not None:
            path, reached = average[0], [average[1]]
    if len(reached) > 1:
        what = f"{len(reached)} parts of it have the path '{printable(only)}'"
        raise AmbiguousStateDict(what, path=file, hint="rename one of them in Python")
    if reached:
        return FoundPart(path, reached[0], only.endswith("."))
    pairs = mapping_pairs(root)
    parts = [label for label, _ in (children(root) if pairs is None else pairs)]
    known = [printable(label_text(label)) for label in parts[:12]]
    what = f"there is nothing at '{printable(only)}'"
    raise AmbiguousStateDict(what, path=file, hint=f"it holds: {', '.join(known) or 'no parts'}")


def _at(root: Node, path: str) -> list[Node]:
    """The nodes at a path: keys may hold dots or be numbers, so it may be read in several ways."""
    found: dict[int, Node] = {}
    tried: set[tuple[int, str]] = set()
    work = [(root, path)]
    while work:
        node, rest = work.pop()
        if not rest:
            found[id(node)] = node
        elif (id(node), rest) not in tried:  # a dict may hold itself
            tried.add((id(node), rest))
            for label, child in children(node):
                text = label_text(label)
                if rest == text or rest.startswith(text + "."):
                    work.append((child, rest[len(text) + 1 :]))
    return [*found.values()]


def _average(root: Node, file: PurePath) -> tuple[str, Node] | None:
    """The part with the averaged weights: nearest to the root with ``ema`` in its label."""
    if averages_weights(root) and (nodes := _at(root, "state_dict")):
        return "state_dict", nodes[0]
    averages = [(len([*chain_of(place)]), place, node) for place, node in _averages(root)]
    if not averages:
        return None
    least = min(depth for depth, _, _ in averages)
    nearest = [(place_text(place), node) for depth, place, node in averages if depth == least]
    if len(nearest) > 1:
        names = [name for name, _ in nearest]
        what = f"holds {len(nearest)} averages: {first_few(names, _LISTED)}"
        raise AmbiguousStateDict(what, path=file, hint=choice_of_parts(names))
    return nearest[0]


def _averages(root: Node) -> list[tuple[Place, Node]]:
    """The outermost parts whose label names an average and that hold tensors somebody may want."""
    parts: dict[int, tuple[Place, Node]] = {}
    for holder in survey(root).holders:
        node, outermost = holder.node, None
        for place in chain_of(holder.place):
            if type(place[1]) is str and names_average(place[1]):
                outermost = place, node
            node = place[2]
        if outermost is not None:
            parts[id(outermost[1])] = outermost
    return list(parts.values())


def own_of(part: FoundPart, surveyed: Survey, file: PurePath) -> StateDict:
    """The tensors that stand in the dict of a part itself."""
    for item in surveyed.found:
        if item.place is None:
            return state_dict_at(item)
    what = "no named tensors lie in it" if part.path else "no named tensors lie at its root"
    raise AmbiguousStateDict(what, path=file, where=part.path or None, hint=look_hint(file))


# ----------------------------------------------------------------------------------------- new keys


RenamedModules = Callable[[Iterable[str]], Iterable[tuple[str, str]]]
"""From the module paths of a `_metadata` to each with a new name of it, in their new order."""


def own_node(state_dict: StateDict) -> Node:
    """The node of a state dict by itself: without what stands beside it in its dict."""
    if state_dict.own is None:
        return state_dict.node
    pairs = dict_pairs(state_dict.node) or ()
    return _like(state_dict.node, [pairs[index] for index in state_dict.own])


def renamed_state_dict(
    state_dict: StateDict, keys: tuple[str | None, ...], modules: RenamedModules
) -> Node:
    """A node of the state dict alone, whose i-th key is `keys[i]` (None: left out).

    Its `_metadata` follows: `modules` gives the module paths with their new names, in order; one
    has several where ones that had become one are told apart again.
    """
    pairs = [pair for pair in zip(keys, state_dict.values, strict=True) if pair[0] is not None]
    return _with_metadata(_like(state_dict.node, pairs), modules)


def renamed_in_place(
    state_dict: StateDict, keys: tuple[str | None, ...], modules: RenamedModules
) -> Node:
    """As `renamed_state_dict`; what stands beside the state dict in its dict stays there. Raises
    `KeyConflict` when a new key is the label of something else that stands there.
    """
    if state_dict.own is None:
        return renamed_state_dict(state_dict, keys, modules)
    before = dict_pairs(state_dict.node) or ()
    mine = set(state_dict.own)
    beside = (key for index, (key, _) in enumerate(before) if index not in mine)
    others = {key for key in beside if type(key) is str}
    taken = next((key for key in keys if key in others), None)
    if taken:
        what = "a key would get this name, but something else beside it has it already"
        raise KeyConflict(what, where=taken)
    renamed = list(zip(keys, state_dict.values, strict=True))
    # there may be more than there were, or fewer, where tensors were put together
    left_out = [(None, None)] * (len(mine) - len(renamed))
    own = dict(zip(state_dict.own, [*renamed, *left_out], strict=False))
    pairs = [own.get(index, pair) for index, pair in enumerate(before)]
    kept = [pair for index, pair in enumerate(pairs) if index not in mine or pair[0] is not None]
    return _with_metadata(_like(state_dict.node, [*kept, *renamed[len(own) :]]), modules)


def _like(node: Node, pairs: Pairs) -> Node:
    """A dict of the class of `node`, its state too, with these pairs."""
    # of a dict that was made of its arguments, the old pairs would stay in these
    if type(node) is Dict or len(dict_pairs(node) or ()) != len(node.pairs):
        return Dict(list(pairs))
    return with_pairs(node, list(pairs))


def _with_metadata(made: Node, modules: RenamedModules) -> Node:
    metadata = metadata_of(made)
    entries = mapping_pairs(metadata)
    if entries is None:
        return made
    versions = {key: value for key, value in entries if type(key) is str}
    renamed: dict[str, Node] = {}
    met: set[str] = set()
    for key, name in modules(versions):
        renamed[name] = versions[key]
        if key in met and type(versions[key]) is Dict:  # each module has a version of its own
            renamed[name] = Dict(list(versions[key].pairs))
        met.add(key)
    copy = with_pairs(metadata, list(renamed.items()))
    state = made.state.pairs
    made.state = Dict([(key, copy if key == "_metadata" else value) for key, value in state])
    return made
