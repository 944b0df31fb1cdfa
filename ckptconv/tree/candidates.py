"""Which parts of a tree may be the model: the candidates, their ranks, and what each would leave
out.

Decided by content and by the labels of parts; docs/state-dicts.md states the rule.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.objects.plain import is_array, plain_form, tensor_form
from ckptconv.objects.torch_read import is_tensor_call
from ckptconv.pickles.nodes import MAPPINGS, Call, Node, attributes, children, mapping_pairs
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.refs import TensorObject, TensorRef, view_identity
from ckptconv.tree.labels import (
    USUAL,
    looks_like_a_module,
    names_generator,
    names_number,
    names_scaler,
    names_training_state,
    words,
)
from ckptconv.tree.walk import (
    CONTAINERS,
    PLAIN,
    Place,
    chain_of,
    kinds_in,
    label_of,
    place_text,
    tensor_of,
    walk,
)

Pairs = Sequence[tuple[Node, Node]]
Tensors = Sequence[tuple[Node, Node]]
"""The pairs of a container whose values are tensors."""

# Ranks; of two alike the one with tensors, not arrays, is one higher
_ROOT, _MODULE, _OTHER = 4, 2, 0

# Last segments of keys where modules keep what they like, also tensors in tuples and dicts
_PACKED = ("_extra_state", "_packed_params")


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A dict that may be the model, or those of its tensors that stand in it beside other dicts of
    tensors.

    `beside` are the identities of its values that are not part of the state dict, None where all
    are. `count` are its tensors, `weak` tells that all of them are numbers of the training or the
    like.
    """

    place: Place
    node: Node
    pairs: Pairs
    beside: frozenset[int] | None
    count: int
    rank: int
    is_module: bool
    weak: bool

    @property
    def path(self) -> str:
        """The path of the dict, with a dot behind it where its own tensors alone are meant."""
        path = place_text(self.place)
        return path if self.beside is None else f"{path}."

    @property
    def own(self) -> tuple[int, ...] | None:
        """The numbers of the pairs that are the state dict; None where all are."""
        if self.beside is None:
            return None
        return tuple(index for index, (key, value) in enumerate(self.pairs) if _is_own(key, value))

    def holds(self, place: Place, node: Node) -> bool:
        """Whether the container `node` at `place` is its dict, or a part of its state dict."""
        if node is self.node:
            return True
        for _, _, holder in chain_of(place):
            if holder is self.node:
                return self.beside is None or id(node) not in self.beside
            node = holder
        return False


class Holder(NamedTuple):
    """A container in which tensors stand that somebody may want, and their pairs in it."""

    place: Place
    node: Node
    tensors: Tensors


class Survey(NamedTuple):
    """The candidates of a tree in its order, and all containers with tensors that somebody may
    want.

    `found` are all dicts with tensors; the candidates are those that are not weak, or all where
    there are no others.
    """

    found: tuple[Candidate, ...]
    holders: tuple[Holder, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The dicts that may be the model."""
        return tuple(item for item in self.found if not item.weak) or self.found

    def ranked(self) -> tuple[list[Candidate], list[Candidate]]:
        """The candidates that come first, and the others."""
        candidates = self.candidates
        first = max((item.rank for item in candidates), default=0)
        best = [item for item in candidates if item.rank == first]
        return best, [item for item in candidates if item.rank < first]

    def lost_by(self, chosen: Candidate) -> list[Holder]:
        """The containers with tensors that are lost where `chosen` is taken: they stand outside of
        it, and none of its own is the very same view.
        """
        left = [item for item in self.holders if not chosen.holds(item.place, item.node)]
        if not left:  # nearly always: a million views need not be looked at
            return []
        kept = {_view(value) for _, value in chosen.pairs} - {None}
        lost = [
            item._replace(tensors=[pair for pair in item.tensors if _view(pair[1]) not in kept])
            for item in left
        ]
        return [item for item in lost if item.tensors]


def _view(value: Node) -> Hashable:
    ref = tensor_of(value)
    return None if ref is None else view_identity(ref)


def survey(root: Node) -> Survey:
    """Look through a tree for its candidates."""
    look = _Look()
    for place, node in walk(root, look.aside, leaves=False):
        look.at(place, node)
    return Survey(tuple(look.found()), tuple(look.holders))


class _Look:
    """What a walk through a tree finds; all containers are known by their identity.

    `aside` are training states, an overlay that keeps the walk out of them, so that what stands in
    one and elsewhere too is met elsewhere. `full` have a tensor somewhere in them; `closed` are
    parts of a tensor; `inner` are attributes of a tensor, or what belongs to the state dict around
    it; `numbered` are (in) parts whose label names a number of the training. `outside` is where
    containers stand under labels that do not name a training state.
    """

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.aside: dict[int, Node] = {}
        self._states: list[tuple[Place, Node]] = []
        self._mappings: list[tuple[Place, Node, Pairs, Tensors, bool]] = []
        self._full: set[int] = set()
        self._closed: set[int] = set()
        self._inner: set[int] = set()
        self._numbered: set[int] = set()
        self._outside: dict[int, Place] = {}

    def at(self, place: Place, node: Node) -> None:
        """Take note of a node. Of a dict of nothing but tensors, these need not come too."""
        if tensor_of(node) is not None:
            self._fill(place)
        if type(node) not in CONTAINERS:
            return
        # the very same part may stand under another label too, and be the model there
        if _names_state(label_of(place)):
            place = self._outside.get(id(node), place)
        label = label_of(place)
        is_state = is_training_state(node) or is_flat_state(node)
        if is_state or (_names_state(label) and not _stands_for_tensor(node)):
            self.aside[id(node)] = None
            self._states.append((place, node))
            return
        self._classify(place, node)
        pairs = dict_pairs(node)
        if pairs is None:
            tensors = _tensors_in(list(children(node)))
        else:
            tensors = _tensors_in(pairs)
            for key, value in () if tensors is pairs else pairs:
                if type(value) in CONTAINERS and not _names_state(key):
                    self._outside.setdefault(id(value), (place, key, node))
        if tensors:
            self._fill((place, None, node))
            if id(node) in self._closed:
                return
        numbered = id(node) in self._numbered
        wanted = _wanted(node, tensors, numbered=numbered, above=label)
        if wanted:
            self.holders.append(Holder(place, node, wanted))
        if pairs is None or id(node) in self._inner:
            return
        if wanted or any(
            not _is_random_state(key, _numbers_of(value), numbered=numbered, above=label)
            for key, value in pairs
            if _is_own(key, value)
        ):
            self._mappings.append((place, node, pairs, tensors, not wanted))

    def found(self) -> list[Candidate]:
        """The dicts with tensors under plain keys, when all nodes were seen."""
        for place, node in self._states:
            if any(_stands_for_tensor(inner) for _, inner in walk(node)):
                self._fill((place, None, node))
        made = [
            self._candidate(*item)
            for item in self._mappings
            # a key that is a container names no tensor
            if PLAIN.issuperset(kinds_in(item[2], 0))
        ]
        return [item for item in made if item.count or not item.weak]

    def _candidate(
        self, place: Place, node: Node, pairs: Pairs, tensors: Tensors, weak: bool
    ) -> Candidate:
        beside: set[int] = set()
        own = [key for key, _ in tensors or pairs]
        if tensors is not pairs:
            for key, value in pairs:
                if id(value) in self._full:
                    if _is_own(key, value):
                        own.append(key)
                    else:
                        beside.add(id(value))
        is_module = any(type(key) is str and looks_like_a_module(key) for key in own)
        has_tensors = not tensors or any(
            type(value) is not Call or not is_array(value) for _, value in tensors
        )
        rank = _MODULE if is_module else _OTHER
        if place is None or place[1] in USUAL or metadata_of(node) is not None:
            rank = _ROOT
        made = Candidate(
            place=place,
            node=node,
            pairs=pairs,
            beside=frozenset(beside) or None,
            count=len(tensors),
            rank=rank + has_tensors,
            is_module=is_module,
            weak=weak,
        )
        if not weak:
            return made
        # tensors may belong to it that stand deeper, in packed values
        deeper = (holder for holder in self.holders if holder.node is not node)
        is_weak = not any(made.holds(holder.place, holder.node) for holder in deeper)
        return replace(made, weak=is_weak)

    def _classify(self, place: Place, node: Node) -> None:
        _, label, parent = place or (None, None, None)
        if id(parent) in self._closed or is_tensor_call(node):
            self._closed.add(id(node))
        # set on a dict, not items of it
        is_attributes = label == "<state>" and mapping_pairs(parent) is not None
        is_packed = type(node) is TensorObject or _is_packed(label)
        if id(parent) in self._inner or is_packed or is_attributes:
            self._inner.add(id(node))
        is_numbered = id(parent) in self._numbered
        if type(label) is str and not is_numbered:
            is_scaler = names_scaler(label) and _scales_gradients(node)
            is_numbered = names_number(label) or is_scaler
        if is_numbered:
            self._numbered.add(id(node))

    def _fill(self, place: Place) -> None:
        while place is not None and id(place[2]) not in self._full:
            self._full.add(id(place[2]))
            place = place[0]


def dict_pairs(node: Node) -> Pairs | None:
    """The pairs of a dict, of whatever class; None for anything else."""
    pairs = mapping_pairs(node)
    if pairs is None and type(node) is Call and (node.pairs or node.name in MAPPINGS):
        return mapping_pairs(plain_form(node))
    return pairs


def metadata_of(node: Node) -> Any:
    """The node of a state dict's `_metadata` (module path → {"version": n}), or None."""
    return next((value for key, value in attributes(node) if key == "_metadata"), None)


def tells_of_wrappers(place: Place, key: str, value: Node) -> bool:
    """Whether a key of a state dict at `place` must carry the wrappers of its model. Numbers of the
    training, tensors with the label of a training state and values that are not tensors need not.
    """
    if not is_of_no_module(key):
        return True
    if not _stands_for_tensor(value):
        return False
    labels = (label for _, label, _ in chain_of(place))
    numbered = any(type(label) is str and names_number(label) for label in labels)
    return _is_wanted(key, value, numbered=numbered)


def is_of_no_module(key: str) -> bool:
    """Whether a key names no module in it, and nothing that a module keeps beside its tensors."""
    return "." not in key and key not in _PACKED


def _tensors_in(pairs: Pairs) -> Tensors:
    """Those of the pairs whose values are tensors; the very same sequence where all are."""
    if kinds_in(pairs, 1) == {TensorRef}:
        return pairs
    return [(label, value) for label, value in pairs if _stands_for_tensor(value)]


def _stands_for_tensor(value: Node) -> bool:
    if type(value) is Call:
        return is_tensor_call(value) or is_array(value)
    return type(value) is TensorRef or type(value) is TensorObject


def _is_own(key: Node, value: Node) -> bool:
    """Whether a value belongs to the state dict of its key, though it may have tensors inside."""
    if _stands_for_tensor(value):
        return True
    is_dotted = type(key) is str and "." in key and type(value) in CONTAINERS
    return _is_packed(key) or (is_dotted and mapping_pairs(value) is None)


def _is_packed(key: Node) -> bool:
    return type(key) is str and key.rpartition(".")[2] in _PACKED


def _wanted(node: Node, tensors: Tensors, *, numbered: bool, above: Node) -> Tensors:
    """Those of the tensors of a container that somebody may want."""
    if not tensors or (type(node) in (list, tuple) and node[0] == _NUMPYS_GENERATOR):
        return []
    return [
        (label, value)
        for label, value in tensors
        # nearly all have a label with a dot: a look at it decides, and there may be a million
        if (type(label) is str and "." in label and "/" not in label)
        or _is_wanted(label, value, numbered=numbered, above=above)
    ]


def _is_wanted(label: Node, value: Node, *, numbered: bool, above: Node = None) -> bool:
    """Whether somebody may want a tensor: not a random state, not a number of the training. `above`
    is the label of what it stands in.
    """
    if _names_state(label):
        return False
    tensor = _numbers_of(value)
    if _is_random_state(label, tensor, numbered=numbered, above=above):
        return False
    if tensor is None or tensor.numel != 1:
        return True
    if type(label) is not str:
        return not numbered
    return looks_like_a_module(label) or not (numbered or names_number(label))


# With what `numpy.random.get_state()` begins; its numbers follow
_NUMPYS_GENERATOR = "MT19937"
# Bytes of a state of torch's generators: CPU, CUDA of old, MPS, CUDA (ATen/*GeneratorImpl.cpp)
_OF_GENERATORS = (5056, 816, 44, 16)
_LARGE = 100  # bytes of a state that tells by its size alone


def _numbers_of(value: Node) -> TensorRef | None:
    return tensor_of(value) or tensor_form(value)


def _is_random_state(
    label: Node, tensor: TensorRef | None, *, numbered: bool, above: Node = None
) -> bool:
    """Whether a tensor is what `torch.get_rng_state()` gives, by its form and its label; in a list
    it has that of the list, and where none stands above it, its size must tell.
    """
    if tensor is None or tensor.dtype.name != "uint8" or len(tensor.shape) != 1:
        return False
    if tensor.numel not in _OF_GENERATORS:
        return False
    if type(label) is str:
        above = label
    if above is None:
        return tensor.numel > _LARGE
    return numbered or (type(above) is str and names_generator(above))


def is_random_state(node: Node, path: str = "") -> bool:
    """Whether a tensor is the state of a random generator: by its form, and by the last label of
    its path, where there is one.
    """
    label = next((name for name in reversed(path.split(".")) if not name.isdigit()), None)
    return _is_random_state(label or None, tensor_of(node), numbered=False)


def _scales_gradients(node: Node) -> bool:
    """Whether a scaler is that of gradients: it grows. Those of the data are wanted."""
    pairs = dict_pairs(node) or ()
    return any(type(key) is str and "growth" in words(key) for key, _ in pairs)


def _names_state(label: Node) -> bool:
    return type(label) is str and "." not in label and names_training_state(label)


_OF_STATES = ("state", "param_groups", "hypers", "bit_generator")


def is_training_state(node: Node) -> bool:
    """Whether a node is what `optimizer.state_dict()` gives (torch/optim/optimizer.py,
    fastai/optimizer.py), or numpy's `get_state(legacy=False)`.
    """
    pairs = mapping_pairs(node)
    # a state has a few items; the state dicts that are met here may have a million
    if pairs is None or not 2 <= len(pairs) < 50:
        return False
    parts = {key: value for key, value in pairs if key in _OF_STATES}
    if "bit_generator" in parts:
        return mapping_pairs(parts.get("state")) is not None
    hypers = parts.get("hypers")
    # fastai's, with a list of the parameters' states; it saves its `hypers` as fastcore's `L`
    if type(hypers) is list or (type(hypers) is Call and type(plain_form(hypers)) is list):
        return type(parts.get("state")) is list
    return mapping_pairs(parts.get("state")) is not None and type(parts.get("param_groups")) is list


FLAT_STATES = ("state.", "param_groups.")


def is_flat_state(node: Node) -> bool:
    """Whether a node is an optimizer's state by its keys alone, wherever it is: such as
    ``state.fc.weight.exp_avg`` and ``param_groups.fc.weight.lr``, some of both, and nothing else.
    """
    pairs = mapping_pairs(node)
    if not pairs or type(pairs[0][0]) is not str or not pairs[0][0].startswith(FLAT_STATES):
        return False
    keys = [key for key, _ in pairs]
    return all(type(key) is str and key.startswith(FLAT_STATES) for key in keys) and all(
        any(key.startswith(start) for key in keys) for start in FLAT_STATES
    )
