"""A checkpoint as a tree of symbolic nodes, and the state dicts in it.

The tree is never changed: a change is an *overlay*, a node that stands in for another by identity, which the walk here and
the pickle writer both look through. What is a state dict is decided by content; names only rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, TypeAlias

from ckptconv.bounds import Limits, held, in_force, merged
from ckptconv.errors import AmbiguousStateDict, LimitExceeded, printable
from ckptconv.nodes import Call, Dict, Node, PersistentId, children, mapping_pairs, spoken
from ckptconv.plain_objects import is_array, plain_form
from ckptconv.sources import Source
from ckptconv.tensors import TensorObject, TensorRef
from ckptconv.torch_objects import is_tensor_call

Place: TypeAlias = "tuple[Place, Node, Node] | None"
"""Where a node hangs: (the container's place, the label in it, the container); None for the root."""

Overlay = Mapping[int, Node]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a torch file holds besides its tree: `head` are the first 16 bytes of its pickle.

    `dead` are the bytes of a zip file that the pickle does not refer to: records that were added or left over, and what lies
    between records; `strays` are the records outside the pickle's folder.
    """

    head: bytes = b""
    dead: int = 0
    strays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stray:
    """What a whole module holds at `path` besides the node `state_dict`; `is_refused`: its class may save it."""

    path: str
    reason: str
    is_refused: bool
    state_dict: Node


PICKLE_HEAD = 16  # bytes of `FileFacts.head`


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its tree, with `TensorRef` leaves that still lie in the file.

    `format` is what its container is called: ``torch zip``, ``torch legacy``, ``safetensors``, ``memory``, …; `metadata` are
    a safetensors file's own strings; `notes` tell what was odd about the file without being wrong; `modules` counts the whole
    modules in whose places their state dicts stand, `module_strays` are what these do not hold; `facts` are what a torch file
    holds besides its tree; `limits` are those under which it was opened. Use it as a context manager, or `close()` it.
    """

    path: Path
    format: str
    root: Node
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    modules: int = 0
    facts: FileFacts = FileFacts()
    limits: Limits = field(default_factory=in_force)
    module_strays: tuple[Stray, ...] = ()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files behind the tensors; they cannot be read afterwards."""
        for source in self.sources:
            source.close()

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """Every tensor of the tree with the path at which it is first met."""
        return tensors_of(self.root, depth=merged(self.limits).depth)

    def state_dicts(self) -> list[StateDict]:
        """The state dicts found in the tree, in its order; see `find_state_dicts`."""
        with held(self.limits):
            return find_state_dicts(self.root)

    def state_dict(self, only: str | None = None) -> StateDict:
        """The one state dict, or the one at the path `only`; `AmbiguousStateDict` when there is none or a choice."""
        with held(self.limits):
            return choose_state_dict(self.root, only, self.path)


@dataclass(frozen=True, slots=True, eq=False)
class StateDict:
    """A state dict in a tree: its `path` (empty for the root), its `node`, and its keys and values in order.

    A key that is no text is given as text, so two may be equal; a value is a `TensorRef`, a `TensorObject`, or whatever else
    training left under the key. `notes` tell where the keys are not the file's own.
    """

    path: str
    node: Node
    keys: tuple[str, ...]
    values: tuple[Node, ...]
    notes: tuple[str, ...] = ()

    def tensors(self) -> Iterator[tuple[str, TensorRef]]:
        """The keys whose values are tensors, with them."""
        for key, value in zip(self.keys, self.values, strict=True):
            if (tensor := tensor_of(value)) is not None:
                yield key, tensor


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


def place_text(place: Place) -> str:
    """The path of a place: labels joined by dots, empty for the root."""
    labels = []
    while place is not None:
        labels.append(label_text(place[1])[:_LONGEST_LABEL])
        place = place[0]
    return ".".join(reversed(labels))


_PLAIN = frozenset((str, int, float, bool, bytes, type(None), complex))


def walk(
    root: Node, overlay: Overlay | None = None, cycles: list[Place] | None = None, *, depth: int | None = None
) -> Iterator[tuple[Place, Node]]:
    """Every node that is no plain value, with its first place, each once, parents before children.

    Shared and cyclic structures are entered once; where a container holds one that it is in, the place goes to `cycles`.
    The overlay may grow while walking: what stands in for a node just yielded is entered in its place. `LimitExceeded`
    when containers nest more than `depth` deep (None: the limit in force when the walk begins).
    """
    most = in_force().depth if depth is None else depth
    over = {} if overlay is None else overlay
    root = over.get(id(root), root)
    if type(root) in _PLAIN:
        return
    seen = {id(root)}
    yield None, root
    root = over.get(id(root), root)
    work: list[tuple[Place, Node, Iterator[tuple[Node, Node]]]] = [(None, root, _inner(root))]
    entered = {id(root)}
    while work:
        place, holder, remaining = work[-1]
        for label, child in remaining:
            if type(child) in _PLAIN:
                continue
            if over:
                child = over.get(id(child), child)
            if id(child) in seen or type(child) in _PLAIN:
                if id(child) in entered and cycles is not None:
                    cycles.append((place, label, holder))
                continue
            seen.add(id(child))
            here = (place, label, holder)
            yield here, child
            if over:
                child = over.get(id(child), child)
            if type(child) in _CONTAINERS:
                if type(child) in (tuple, list) and len(work) < most and _PLAIN.issuperset(map(type, child)):
                    continue  # nothing in it, and there may be a million of it
                work.append((here, child, _inner(child)))
                entered.add(id(child))
                if len(work) > most:
                    what = f"nests more than {most} containers"
                    raise LimitExceeded(what, limit="depth", allowed=most, where=place_text(here)[:60] + "…")
                break
        else:
            entered.discard(id(work.pop()[1]))


_CONTAINERS = frozenset((Dict, list, tuple, Call, PersistentId, TensorObject))


def _inner(node: Node) -> Iterator[tuple[Node, Node]]:
    if type(node) is TensorObject:
        return iter((("<class>", node.cls), ("<state>", node.state)))
    return children(node)


def tensors_of(root: Node, overlay: Overlay | None = None, *, depth: int | None = None) -> Iterator[tuple[str, TensorRef]]:
    """Every tensor of a tree with its path; tensors met twice under different keys of state dicts appear once."""
    for place, node in walk(root, overlay, depth=depth):
        if (tensor := tensor_of(node)) is not None:
            yield place_text(place), tensor


# --------------------------------------------------------------------------------------------------------- state dicts

_USUAL_NAMES = """
    state_dict model_state_dict model model_state net network module weights params params_ema ema ema_state_dict model_ema
    ema_model state_dict_ema generator discriminator netG netD G D encoder decoder backbone head teacher student actor critic
    policy
"""
_USUAL = frozenset(_USUAL_NAMES.split())
"""Labels under which training scripts keep a state dict."""

_NEVER = ("optim", "scheduler", "rng", "random", "scaler", "callbacks", "loops")
"""Parts of labels under which no state dict is looked for."""


def find_state_dicts(root: Node) -> list[StateDict]:
    """The state dicts of a tree, by content.

    A state dict is a dict with text keys that holds tensors and no container with further tensors in it, outside of
    optimizers, schedulers and random states. Of several, those count that look most like a module's: by a usual name or
    `_metadata`, else by dots in their keys. A root that is one is the only one.
    """
    return [_state_dict(*item) for item in _best_and_lesser(root)[0]]


def _best_and_lesser(root: Node) -> tuple[list[_Mapping], list[_Mapping]]:
    """The dicts that look most like state dicts, and those that look less like one."""
    mappings, holders = _mappings(root)
    found = [item for item in mappings if _is_state_dict(item[2], holders)]
    ranks = [_rank(*item) for item in found]
    best = [item for item, rank in zip(found, ranks, strict=True) if rank == max(ranks)]
    return best, [item for item, rank in zip(found, ranks, strict=True) if rank < max(ranks)]


def _refuse_part_of_a_model(best: _Mapping, lesser: Sequence[_Mapping], base: str, path: Path) -> None:
    """Refuse a state dict that is one of several parts of a model: Megatron nests embedding, encoder and output layer."""
    labels = _labels(best[0])
    beside = [place_text(place) for place, _, _ in lesser if len(labels) > 1 and _labels(place)[:1] == labels[:1]]
    if beside:
        names = [f"{base}.{name}".strip(".") for name in (place_text(best[0]), *beside)]
        raise AmbiguousStateDict(
            f"its model is in {len(names)} parts: {', '.join(map(printable, names[:8]))}",
            path=path,
            hint=f"choose one with --only {quote(printable(names[0]))} (only= in code), or write a torch file, of them all",
        )


def _labels(place: Place) -> list[Node]:
    """The labels that lead to a place, from the root on."""
    labels = []
    while place is not None:
        labels.append(place[1])
        place = place[0]
    return labels[::-1]


def choose_state_dict(root: Node, only: str | None, path: Path) -> StateDict:
    """The state dict at the path `only`, or the single one there is; `AmbiguousStateDict` otherwise."""
    base = "" if only is None else only
    part = root if only is None else find(root, only, path)
    best, lesser = _best_and_lesser(part)
    found = [_state_dict(*item) for item in best]
    if len(found) == 1:
        _refuse_part_of_a_model(best[0], lesser, base, path)
        return found[0]
    if not found and (bare := _bare_tensors(part)) is not None:
        return bare
    if found:
        names = ", ".join(printable(f"{base}.{item.path}".strip(".") or ".") for item in found[:8])
        first = next(printable(f"{base}.{item.path}".strip(".")) for item in found if item.path)
        raise AmbiguousStateDict(
            f"holds {len(found)} state dicts: {names}",
            path=path,
            hint=f"choose one with --only {quote(first)} (only= in code)",
        )
    raise AmbiguousStateDict(
        "no state dict (a dict of named tensors) was found in it",
        path=path,
        where=only,
        hint="see what it holds with: ckptconv inspect",
    )


def _bare_tensors(node: Node) -> StateDict | None:
    """A state dict for a tensor that stands by itself, or for a list of nothing but tensors; None for anything else."""
    if is_tensor(node):
        note = "it holds one tensor and no state dict: its key is 'tensor'"
        return StateDict("", Dict([("tensor", node)]), ("tensor",), (node,), (note,))
    if type(node) not in (list, tuple) or not node or not all(map(is_tensor, node)):
        return None
    keys = tuple(map(str, range(len(node))))
    note = f"it holds a {type(node).__name__} of {len(node)} tensors and no state dict: their keys are their numbers"
    return StateDict("", Dict(list(zip(keys, node, strict=True))), keys, tuple(node), (note,))


_EMA = ("ema", "state_dict_ema", "ema_state_dict", "model_ema", "params_ema", "ema_model")
"""Labels under which training scripts keep the exponential moving average; ``ema`` finds whichever there is."""


def find(root: Node, path: str, file: Path) -> Node:
    """The node at a dotted path such as ``optimizer.state``; keys may hold dots themselves."""
    if path == "ema":
        labels = {label_text(label) for label, _ in children(root)}
        path = next((name for name in _EMA if name in labels), path)
    work = [(root, path)]
    while work:
        node, rest = work.pop()
        if not rest:
            return node
        for label, child in children(node):
            text = label_text(label)
            if rest == text or rest.startswith(text + "."):
                work.append((child, rest[len(text) + 1 :]))
    known = [printable(label_text(label)) for label, _ in children(root)][:12]
    raise AmbiguousStateDict(
        f"there is nothing at '{printable(path)}'", path=file, hint=f"it holds: {', '.join(known) or 'no parts'}"
    )


_Mapping = tuple[Place, Node, Sequence[tuple[Node, Node]]]


def _mappings(root: Node) -> tuple[list[_Mapping], set[int]]:
    """The dicts that may be state dicts, and the identities of all containers with a tensor somewhere in them."""
    mappings: list[_Mapping] = []
    holders: set[int] = set()
    closed: set[int] = set()
    for place, node in walk(root):
        if type(node) not in _CONTAINERS or type(node) is TensorObject:
            if tensor_of(node) is not None:
                _mark(place, holders)
            if type(node) is TensorObject:
                closed.add(id(node))  # a tensor's attributes are no state dict
            continue
        pairs = _pairs(node)
        values = node if type(node) in (list, tuple) else [value for _, value in pairs or ()]
        held = any(tensor_of(value) is not None or is_tensor_call(value) for value in values)
        if held:
            _mark((place, None, node), holders)
        if (place is not None and (id(place[2]) in closed or _is_never(place[1]))) or (
            pairs is not None and {"state", "param_groups"} <= {key for key, _ in pairs if type(key) is str}
        ):
            closed.add(id(node))
        elif pairs is not None and (held or any(map(is_array, values))):
            mappings.append((place, node, pairs))
    return mappings, holders


def _pairs(node: Node) -> Sequence[tuple[Node, Node]] | None:
    """The pairs of a dict, of whatever class; None for anything else."""
    pairs = mapping_pairs(node)
    if pairs is None and type(node) is Call and node.pairs and type(plain := plain_form(node)) is Dict:
        return plain.pairs
    return pairs


def _mark(place: Place, holders: set[int]) -> None:
    while place is not None and id(place[2]) not in holders:
        holders.add(id(place[2]))
        place = place[0]


_PACKED = ("_extra_state", "_packed_params")
"""Endings of keys under which modules keep what they like, tensors in tuples and dicts among it."""


def _is_never(label: Node) -> bool:
    return type(label) is str and any(word in label.lower() for word in _NEVER) and "." not in label


def _is_state_dict(pairs: Sequence[tuple[Node, Node]], holders: set[int]) -> bool:
    if any(type(key) not in _PLAIN for key, _ in pairs):
        return False
    further = (key for key, value in pairs if id(value) in holders and tensor_of(value) is None and not is_tensor_call(value))
    return all(type(key) is str and key.endswith(_PACKED) for key in further)


def _rank(place: Place, node: Node, pairs: Sequence[tuple[Node, Node]]) -> int:
    """How much a dict of tensors looks like the state of a module: by its place, name or `_metadata`, then by dotted keys.

    Among equals, tensors count for more than arrays.
    """
    has_tensors = any(tensor_of(value) is not None or is_tensor_call(value) for _, value in pairs)
    if place is None or place[1] in _USUAL or metadata_of(node) is not None:
        return 4 + has_tensors
    return 2 * any(type(key) is str and "." in key for key, _ in pairs) + has_tensors


def _state_dict(place: Place, node: Node, pairs: Sequence[tuple[Node, Node]]) -> StateDict:
    path = place_text(place)
    keys = [label_text(key) for key, _ in pairs]
    return StateDict(path, node, tuple(keys), tuple(value for _, value in pairs))


def metadata_of(node: Node) -> Any:
    """The node of a state dict's `_metadata` (module path → {"version": n}), or None."""
    if type(node) is not Call or type(node.state) is not Dict:
        return None
    return next((value for key, value in node.state.pairs if key == "_metadata"), None)


def renamed_state_dict(found: StateDict, keys: tuple[str | None, ...], module_paths: Callable[[str], tuple[str, ...]]) -> Node:
    """A node like `found.node` whose i-th key is `keys[i]` (None: left out) and whose `_metadata` follows.

    `module_paths` gives the new names of a module: one, or several where ones that had become one are told apart again.
    """
    pairs = [(new, value) for new, value in zip(keys, found.values, strict=True) if new is not None]
    if type(found.node) is Dict:
        return Dict(pairs)
    plain = mapping_pairs(found.node) is not None
    made = Call(found.node.func, () if plain else found.node.args, new=found.node.new)
    made.pairs = pairs
    made.state = found.node.state
    if (metadata := metadata_of(found.node)) is not None and (entries := mapping_pairs(metadata)) is not None:
        renamed = {
            name: Dict(list(value.pairs)) if index and type(value) is Dict else value  # each module has a version of its own
            for key, value in entries
            if type(key) is str
            for index, name in enumerate(module_paths(key))
        }
        copy: Node = Dict() if type(metadata) is Dict else Call(metadata.func, ())
        copy.pairs = list(renamed.items())
        made.state = Dict([(key, copy if key == "_metadata" else value) for key, value in found.node.state.pairs])
    return made
