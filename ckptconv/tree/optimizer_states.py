"""Optimizer states in a tree, and which of them a change of the model's keys leaves behind.

Optimizers know parameters in two ways. `torch.optim.Optimizer.state_dict()` numbers them in the
order in which it was given them (torch/optim/optimizer.py): new keys do not matter to it, but it
fits no model that has lost a parameter. Names stand in `param_names` of its groups (torch 2.6, for
`named_parameters()`); in place of the numbers, where FSDP or
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` made it; and in the keys
``state.NAME.exp_avg`` and ``param_groups.NAME.lr`` of one that was flattened. Names follow the keys
(`optimizer_names`), numbers cannot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from ckptconv.keys.rules import bare_key, drop_unmistakable
from ckptconv.pickles.nodes import Dict, Node, mapping_pairs
from ckptconv.support.errors import RefusedObject, printable
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.plain_numbers import number_of
from ckptconv.tensors.refs import Shape, TensorRef, view_identity
from ckptconv.tensors.stream import read_box
from ckptconv.tree.candidates import FLAT_STATES, is_flat_state, is_training_state
from ckptconv.tree.labels import names_training_state
from ckptconv.tree.renaming import RenamedKeys
from ckptconv.tree.reshaping import Tied
from ckptconv.tree.state_dicts import StateDict, holds_leaves
from ckptconv.tree.walk import Place, labels_of, place_text, tensor_of, walk

_IN_SHAPE = "exp_avg exp_avg_sq exp_inf momentum_buffer square_avg acc_delta sum prev ax"
SHAPED = frozenset(_IN_SHAPE.split())
"""What torch's optimizers keep in the shape of the parameter (torch/optim/*.py)."""
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""How the keys of buffers end that torch itself makes; nobody calls a parameter so."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer state at `path` knows of its parameters.

    `names` are those that it names. `shapes` has an item for each that it numbers, and for no
    other: the shape, or None where its state does not tell. `is_flat`: its keys hold the names
    (`flat_key`).
    """

    path: str
    names: tuple[str, ...]
    shapes: tuple[Shape | None, ...]
    node: Node = field(default=None, repr=False)
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What of an optimizer state does not go with the model any more.

    `renamed` and `gone` are names of parameters that have other keys now, or are left out.
    `is_short`: it numbers its parameters, and the model has too few that could be them.
    """

    state: OptimizerState
    renamed: tuple[str, ...]
    gone: tuple[str, ...]
    is_short: bool


def left_behind(
    root: Node,
    overlay: Mapping[int, Node],
    before: Sequence[StateDict],
    after: Sequence[tuple[StateDict, RenamedKeys]],
) -> list[LeftBehind]:
    """The optimizer states in a tree that do not go with its state dicts as they are now.

    `before` are the state dicts before anything was left out, `after` those that are there still,
    with what became of their keys.
    """
    states = list(optimizer_states(root, overlay, (item for item, _ in after)))
    if not states:
        return []
    fates = fates_of(before, after)
    known = {new for fate in fates for new in fate.keys.values()}
    found = []
    for state in states:
        renamed, gone = _stale(state.names, fates, known)
        is_short = bool(state.shapes) and _is_short(state.shapes, fates)
        if renamed or gone or is_short:
            found.append(LeftBehind(state, renamed, gone, is_short))
    return found


def refuse_reshaped(
    root: Node, overlay: Mapping[int, Node], after: Sequence[tuple[StateDict, RenamedKeys]]
) -> None:
    """Raise `RefusedObject` where a parameter of an optimizer state would be another tensor, which
    tensor rules made: torch would take the old moments for it where the shapes are the same.
    """
    reshaped = [
        (item, done, others)
        for item, done in after
        if (others := [made for made in done.made if not made.is_same])
    ]
    if not reshaped:
        return
    for state in optimizer_states(root, overlay, (item for item, _ in after)):
        for item, done, others in reshaped:
            tied = {key for each in done.tied for key in each.before}
            old = {bare_name(key) for key in done.consumed - tied}
            again = {bare_name(key) for made in others for key in made.targets}
            hit = [name for name in state.names if bare_name(name) in old & again]
            unnamed = state.shapes and not state.names
            if hit or (unnamed and _fits(state.shapes, _may_be_parameters(dict(item.tensors())))):
                which = printable(hit[0]) if hit else "numbered parameters"
                what = f"holds states of {which}, of which rules make other tensors"
                hint = f"leave it out: --drop {printable(state.path) or 'PATH'}"
                raise RefusedObject(what, where=state.path or None, hint=hint)


# ------------------------------------------------------------------------------------- made by name


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A group of parameters, which one set of hyperparameters (`settings`: ``lr``, …) is for.
    `params` are their names, or their numbers.
    """

    settings: Mapping[str, Node]
    params: Sequence[Node]


def named_optimizer(
    states: Mapping[Node, Mapping[str, Node]], groups: Iterable[ParamGroup]
) -> Dict:
    """An optimizer state that goes by the names of parameters, in the form of
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

    `states` are what the optimizer keeps of each parameter (``exp_avg``, ``step``, …), by its key
    in the state dict of weights beside it. Groups keep their order; ``params`` stands last in each,
    as torch has it.
    """
    of_each: list[tuple[Node, Node]] = [
        (name, Dict(list(state.items()))) for name, state in states.items()
    ]
    listed = [Dict([*group.settings.items(), ("params", list(group.params))]) for group in groups]
    return Dict([("state", Dict(of_each)), ("param_groups", listed)])


# --------------------------------------------------------------------------------- optimizer states


def optimizer_states(
    root: Node, overlay: Mapping[int, Node], models: Iterable[StateDict] = ()
) -> Iterator[OptimizerState]:
    """The optimizer states of a tree; the state dicts `models` need not be searched for them."""
    # plain values stand in for what is not to be entered
    over = dict(overlay) | {id(item.node): None for item in models if holds_leaves(item)}
    for place, node in walk(root, over):
        state = _numbered_or_named(place, node) or _flat(place, node)
        if state is not None:
            over[id(node)] = None
            yield state


def is_optimizer_state(root: Node, part: Node) -> bool:
    """Whether a part of a tree is one of its optimizer states."""
    return any(state.node is part for state in optimizer_states(root, {}))


def _numbered_or_named(place: Place, node: Node) -> OptimizerState | None:
    if not is_training_state(node):
        return None
    parts = dict(mapping_pairs(node) or ())
    if type(parts.get("param_groups")) is not list:  # fastai's has hypers, numpy's generator none
        return None
    states = dict(mapping_pairs(parts["state"]) or ())
    groups = [dict(mapping_pairs(group) or ()) for group in parts["param_groups"]]
    # a dict has each name once and keeps their order
    names = dict.fromkeys(key for key in states if type(key) is str)
    numbers: list[int] = []
    for group in groups:
        for name in ("params", "param_names"):
            listed = group.get(name)
            if type(listed) is list:
                names |= dict.fromkeys(each for each in listed if type(each) is str)
                if name == "params":
                    numbers += [at for at in listed if type(at) is int]
    shapes = tuple(shape_of_state(states.get(at)) for at in dict.fromkeys(numbers))
    return OptimizerState(place_text(place), tuple(names), shapes, node)


def shape_of_state(state: Node) -> Shape | None:
    """The shape of the parameter that a state belongs to, where it tells."""
    pairs = [pair for pair in mapping_pairs(state) or () if type(pair[0]) is str]
    refs = [tensor_of(value) for key, value in pairs if key in SHAPED]
    shapes = {ref.shape for ref in refs if ref is not None}
    return shapes.pop() if len(shapes) == 1 else None


def read_number(node: Node) -> float | None:
    """The one real number that a value is, or a tensor holds, such as a step; else None."""
    if type(node) in (int, float):
        return node  # type: ignore[no-any-return]
    if type(node) is not TensorRef or node.numel != 1 or node.dtype.kind not in ("float", "int"):
        return None
    Checksums().read(node.storage)
    number = number_of(read_box(node, (0,) * len(node.shape), node.shape).tobytes(), node.dtype)
    assert not isinstance(number, complex)  # of these kinds of types none is
    return number


def _flat(place: Place, node: Node) -> OptimizerState | None:
    """A flattened optimizer state: `StateDictOptions(flatten_optimizer_state_dict=True)`."""
    pairs = mapping_pairs(node)
    if not pairs:  # nearly all nodes: their places are not looked at
        return None
    if not is_flat_state(node):
        labels = labels_of(place)
        if not any(type(label) is str and names_training_state(label) for label in labels):
            return None
        texts = [key for key, _ in pairs if type(key) is str]
        kinds = (lambda key: key.startswith(FLAT_STATES)), _OF_MEGATRON
        if len(texts) < len(pairs) or not any(all(map(kind, texts)) for kind in kinds):
            return None
    keys = flat_keys([key for key, _ in pairs])
    names = dict.fromkeys(key.name for key in keys if key.name)
    return OptimizerState(place_text(place), tuple(names), (), node, is_flat=True)


class FlatKey(NamedTuple):
    """A key of a flattened state: ``state`` or ``param_groups``, the name of a parameter, and what
    it holds of that; `name` is empty where the key has none.
    """

    part: str
    name: str
    field: str
    is_name_last: bool = False

    def called(self, name: str) -> str:
        """The key of another parameter for the same."""
        if self.is_name_last:
            return f"{self.part}.{self.field}.{name}"
        return f"{self.part}.{name}.{self.field}"


# optimizer.state.exp_avg.NAME; of several optimizers chained_0.optimizer.state.…
_OF_MEGATRON = re.compile(r"((?:chained_\d+\.)?optimizer\.state)\.([^.]+)\.(.+)").fullmatch


def flat_keys(keys: Sequence[str]) -> list[FlatKey]:
    """The keys of a flattened state, taken apart. Megatron has the name last:
    ``optimizer.state.exp_avg.NAME`` (megatron/core/dist_checkpointing/optimizer.py, 0.16).

    What is in a group has no dots in its name, so groups tell the names of parameters; states may
    be nested (Shampoo's), and are those of the longest such name that they begin with.
    """
    theirs = [match.groups() for match in map(_OF_MEGATRON, keys) if match is not None]
    if len(theirs) == len(keys):
        return [FlatKey(part, name, held, True) for part, held, name in theirs]
    parted = [key.partition(".") for key in keys]
    known = {rest.rpartition(".")[0] for part, _, rest in parted if part == "param_groups"}
    found = []
    for part, _, rest in parted:
        name, _, held = rest.rpartition(".")
        at = len(name)
        while at > 0 and rest[:at] not in known:
            at = rest.rfind(".", 0, at)
        if at > 0:
            name, held = rest[:at], rest[at + 1 :]
        found.append(FlatKey(part, name, held))
    return found


# ----------------------------------------------------------------------------------- what became of


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of the keys of a state dict: each with its new one, or None; tensors that have
    more names now, or fewer.
    """

    keys: dict[str, str | None]
    tensors: dict[str, TensorRef]
    tied: tuple[Tied, ...] = ()

    def parameters(self, *, left: bool) -> list[TensorRef]:
        """The tensors that may be parameters, those of one view once; only what is `left`."""
        there = self.tensors.items()
        kept = {key: ref for key, ref in there if not (left and self.keys[key] is None)}
        return _may_be_parameters(kept)


def _may_be_parameters(tensors: Mapping[str, TensorRef]) -> list[TensorRef]:
    refs = [ref for key, ref in tensors.items() if not key.endswith(BUFFERS)]
    return list({view_identity(ref): ref for ref in refs}.values())


def fates_of(
    before: Sequence[StateDict], after: Sequence[tuple[StateDict, RenamedKeys]]
) -> list[Fate]:
    """What became of the keys of each of the state dicts `before`."""
    fates = []
    for item in before:
        path = item.path.removesuffix(".")
        there = [pair for pair in after if pair[0].path.removesuffix(".") == path]
        # one that was put at another place is known by its keys
        there = there or [pair for pair in after if pair[0].keys == item.keys]
        kept: dict[str, str] = {}
        tied: tuple[Tied, ...] = ()
        for found, done in there[-1:]:
            kept, tied = done.kept(found.keys), done.tied
        now = {key: kept.get(key) for key in item.keys}
        fates.append(Fate(now, dict(item.tensors()), tied))
    return fates


def _stale(
    names: Sequence[str], fates: Sequence[Fate], known: set[str | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of parameters that have other keys now, and of those that are left out."""
    if not names:
        return (), ()
    exact = {key: new for fate in fates for key, new in fate.keys.items()}
    plain = {bare_name(key): new for fate in fates for key, new in fate.keys.items()}
    same = {key for fate in fates for key, new in fate.keys.items() if key == new}
    renamed: list[str] = []
    gone: list[str] = []
    for name in names:
        bare = bare_name(name)
        # one whose bare name is the same went by another name before, and nothing has changed
        is_told = name in exact or (bare in plain and bare not in same)
        if is_told and name not in known:
            now = exact.get(name, plain[bare])
            (gone if now is None else renamed).append(name)
    return tuple(renamed), tuple(gone)


def bare_name(key: str) -> str:
    """The name of a parameter without wrappers, which optimizers may know or not."""
    return bare_key(drop_unmistakable(key))


def _is_short(shapes: Sequence[Shape | None], fates: Sequence[Fate]) -> bool:
    """Whether parameters of these shapes were in a state dict, or in all, and are not any more."""
    fit = [fate for fate in fates if _fits(shapes, fate.parameters(left=False))]
    if fit:
        return not any(_fits(shapes, fate.parameters(left=True)) for fate in fit)
    every, left = (
        [ref for fate in fates for ref in fate.parameters(left=only)] for only in (False, True)
    )
    return _fits(shapes, every) and not _fits(shapes, left)


def _fits(shapes: Sequence[Shape | None], refs: Sequence[TensorRef]) -> bool:
    """Whether there is a tensor for each of the shapes."""
    wanted = Counter(shape for shape in shapes if shape is not None)
    return len(shapes) <= len(refs) and wanted <= Counter(ref.shape for ref in refs)
