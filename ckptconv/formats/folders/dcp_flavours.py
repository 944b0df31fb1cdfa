"""What frameworks put beside the items of a DCP folder, and how they name what is in them.

Megatron saves the parts of a checkpoint under flat keys, and what it does not shard in `common.pt`.
What an optimizer keeps of a parameter is stored under ``optimizer.state.FIELD.KEY``, KEY the key of
the parameter among the weights, FIELD ``exp_avg``, ``exp_avg_sq``, ``fp32_param`` (the master
weights), …; with several optimizers ``chained_N.`` stands before it. The step is the same for all
parameters, and lies with the groups in `common.pt`. Groups do not say which parameters are theirs:
only where an optimizer has one group they are all of its own. Distributed optimizers may keep flat
buckets instead (``optimizer.distributed.…``), which only Megatron takes apart. Source:
megatron/core/dist_checkpointing/mapping.py and optimizer.py, megatron/core/optimizer/optimizer.py
and distrib_optimizer.py, 0.16.

Lightning saves all that is not a tensor in `meta.pt`. Fabric keeps the user's own names in both.
The Trainer's strategies have the model under ``model`` (FSDP) or ``state_dict``, and optimizers
under ``optimizer_0``, ``optimizer_1``, …; Lightning's own consolidation gives them the names that
its single files have. Source: lightning/fabric/utilities/load.py and
lightning/pytorch/utilities/consolidate_checkpoint.py (2.6).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckptconv.formats.folders.dcp_metadata import INDEX, Metadata, Path
from ckptconv.io.location import Location
from ckptconv.pickles.nodes import Dict, Node, listed, mapping_pairs
from ckptconv.support.errors import MalformedCheckpoint, printable
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.refs import Storage, whole_storage
from ckptconv.tree.checkpoint import Checkpoint, Container
from ckptconv.tree.optimizer_forms import OF_LOADER
from ckptconv.tree.optimizer_states import read_number
from ckptconv.tree.walk import is_tensor, label_text

CONTAINER = Container("DCP", "torch.distributed.checkpoint", is_folder=True)
OF_MEGATRON = replace(CONTAINER, by="megatron", why_not="only Megatron opens it")


class Flavour(NamedTuple):
    """A writer of DCP folders: the file `beside` the items, which is `merged` with the tree of
    them (and gives notes), the `paths` of the items, and the `fragments` among them that are left
    out. `stored` gives the tree under the writer's own names, of the items and the file beside.
    """

    container: Container
    beside: str
    merged: Callable[[Dict, Checkpoint], tuple[Dict, tuple[str, ...]]]
    paths: Callable[[Metadata], dict[str, Path]] = lambda metadata: metadata.paths
    fragments: Callable[[Metadata], set[str]] = lambda _: set()
    stored: Callable[[Metadata, Dict, Checkpoint], Dict | None] = lambda *_: None


def flavour_of(folder: Location, metadata: Metadata) -> Flavour:
    """The writer of a folder; Lightning's is like any other but for its `meta.pt`."""
    told_by = (MEGATRON.beside, _BACKENDS)
    if metadata.is_megatron or all(folder.child(name).is_file() for name in told_by):
        return MEGATRON
    return LIGHTNING


# ----------------------------------------------------------------------------------------- Megatron

_BACKENDS = "metadata.json"  # the names of its storage backends, in every Megatron checkpoint
# ShardedObject.unique_key: KEY/shard_0.1_2.4, an offset and a shape
_OBJECT = re.compile(r"(.+)/shard_[\d.]+_[\d.]+").fullmatch
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.").match


def _megatron_paths(metadata: Metadata) -> dict[str, Path]:
    """Where Megatron's items belong: what is called ``optimizer.…`` is put under ``optimizer``,
    every other tensor and extra state under ``model``. An object of several ranks,
    ``NAME/shard_N_OF``, becomes a list.
    """
    if metadata.paths:
        return metadata.paths
    paths: dict[str, Path] = {}
    counts: Counter[str] = Counter()
    for key, entry in metadata.entries.items():
        name: str = key
        index: tuple[int, ...] = ()
        shard = _OBJECT(key)
        if entry is None and shard is not None:
            name, index = shard[1], (counts[shard[1]],)
            counts[name] += 1
        part: tuple[str, ...] = ()
        if _OPTIMIZER(key):
            part = ("optimizer",)
        elif entry is not None or name.endswith("_extra_state"):
            part = ("model",)
        paths[key] = (*part, name, *index)
    return paths


def _with_common(root: Dict, common: Checkpoint) -> tuple[Dict, tuple[str, ...]]:
    """The parts of `common.pt` hung into the tree, dicts that both have entered."""
    work = [(root, common.root, "")]
    while work:
        node, other, place = work.pop()
        pairs = mapping_pairs(other)
        # several optimizers have numbers
        if pairs is None or any(type(key) not in (str, int) for key, _ in pairs):
            what = "is not a dict of names"
            raise MalformedCheckpoint(what, path=common.path, where=place or None)
        known = dict(node.pairs)
        for label, value in pairs:
            if label not in known:
                node.pairs.append((label, value))
            elif type(known[label]) is Dict and mapping_pairs(value) is not None:
                work.append((known[label], value, f"{place}{label}."))
            else:
                what, where = f"is in {INDEX} too", f"{place}{label}"
                raise MalformedCheckpoint(what, path=common.path, where=where)
    return _by_names(root)


def _as_megatron(metadata: Metadata, root: Dict, common: Checkpoint) -> Dict | None:
    """The items under the keys that Megatron's loader looks for: weights and extra states in
    ``model``, states in ``optimizer``, other objects at the root; and the bytes of `common.pt`.
    None for a folder of an older Megatron, or one that torch's planner wrote.
    """
    if metadata.paths or metadata.reshaped:
        return None
    held = {part: dict(mapping_pairs(value) or ()) for part, value in root.pairs}
    lists = {part: value for part, value in root.pairs if type(value) is list}
    parts: dict[Node, list[tuple[Node, Node]]] = {"model": [], "optimizer": []}
    others: list[tuple[Node, Node]] = []
    for key, (part, *labels) in _megatron_paths(metadata).items():
        value: Node = lists.get(part, held[part])
        for label in labels:
            value = value[label]
        parts.get(part, others).append((key, value))
    source = common.sources[0]
    storage = Storage(source, 0, source.size, "cpu", MEGATRON.beside)
    found = [(part, Dict(pairs)) for part, pairs in parts.items() if pairs]
    whole = whole_storage(storage, 0, source.size)
    return Dict([*found, *others, (OF_LOADER, [whole])])  # in a list, rules do not look for keys


MEGATRON = Flavour(
    OF_MEGATRON,
    "common.pt",
    _with_common,
    _megatron_paths,
    # tensors that were stored in another shape; their own is not restored here
    lambda metadata: {key for key in metadata.reshaped if _OPTIMIZER(key)},
    _as_megatron,
)


# ---------------------------------------------------------------------- Megatron's optimizer states

_STATE = re.compile(
    r"(?:chained_(?P<number>\d+)\.)?optimizer\.state\.(?P<field>[^.]+)\.(?P<key>.+)"
)
_STAY = "the states of the optimizer stay as Megatron names them"
_PARTS = ("state", "param_groups")


@dataclass(slots=True)
class _Optimizer:
    """One of the optimizers: what it keeps of each parameter, and what is said of it besides."""

    states: dict[str, dict[str, Node]] = field(default_factory=dict)
    others: dict[Node, Node] = field(default_factory=dict)


def _by_names(root: Dict) -> tuple[Dict, tuple[str, ...]]:
    """The tree with its optimizer in torch's form, and notes; as it is where it has another one."""
    parts = dict(root.pairs)
    optimizer, model = parts.get("optimizer"), dict(mapping_pairs(parts.get("model")) or ())
    if type(optimizer) is not Dict:
        return root, ()
    tensors = [key for key, value in optimizer.pairs if is_tensor(value)]
    told = {key: found for key in tensors if (found := _STATE.fullmatch(str(key)))}
    if not told:
        return root, ()
    if len(told) < len(tensors) or any(found["key"] not in model for found in told.values()):
        return root, (f"{_STAY}: some of them belong to no parameter by their names",)
    optimizers = _apart(optimizer, told)
    groups, notes = _groups_of(optimizers)
    if groups is None:
        return root, (f"{_STAY}: nothing says its groups of parameters and their settings",)
    states = {key: state for each in optimizers for key, state in each.states.items()}
    if len(states) < sum(len(each.states) for each in optimizers):
        return root, (f"{_STAY}: two optimizers have one parameter",)
    by_key = Dict([(key, Dict([*state.items()])) for key, state in states.items()])
    made = [("state", by_key), ("param_groups", groups)]
    parts["optimizer"] = Dict([*made, *_others_of(optimizers)])
    return Dict(list(parts.items())), notes


def _apart(optimizer: Dict, told: Mapping[Node, re.Match[str]]) -> list[_Optimizer]:
    """The optimizers in the order of their numbers; the only one is number 0."""
    found: defaultdict[int, _Optimizer] = defaultdict(_Optimizer)
    for key, value in optimizer.pairs:
        if key in told:
            said = told[key]
            of = found[int(said["number"] or 0)]
            of.states.setdefault(said["key"], {})[said["field"]] = value
        elif type(key) is int and (own := mapping_pairs(value)) is not None:
            found[key].others |= dict(own)
        else:
            found[0].others[key] = value
    for each in found.values():
        # that of 16 bits, and the distributed one, have torch's in them
        inner = mapping_pairs(each.others.get("optimizer"))
        if inner is not None:
            del each.others["optimizer"]
            each.others = {**dict(inner), **each.others}
    return [found[number] for number in sorted(found)]


def _groups_of(optimizers: Sequence[_Optimizer]) -> tuple[list[Dict] | None, tuple[str, ...]]:
    """The groups of all optimizers, None where one has none, and a note where they do not say
    their parameters; each state gets the step.
    """
    found: list[Dict] = []
    untold = 0
    for each in optimizers:
        groups = list(map(mapping_pairs, listed(each.others.get("param_groups"))))
        if not groups or None in groups:
            return None, ()
        settings = [list(group or ()) for group in groups]
        step = _step(each, [dict(group) for group in settings])
        if step is not None:
            for state in each.states.values():
                state["step"] = step
        if len(settings) == 1:
            settings[0].append(("params", list(each.states)))
        else:
            untold += len(settings)
        found += map(Dict, settings)
    note = f"the {untold} groups of the optimizer do not say which parameters are theirs"
    return found, (note,) if untold else ()


def _step(optimizer: _Optimizer, groups: Sequence[Mapping[Node, Node]]) -> float | None:
    """The step of all parameters as a number: a tensor would be one for all of them, and torch
    counts in each.
    """
    common = dict(mapping_pairs(optimizer.others.get("state")) or ())
    found = [group["step"] for group in groups if "step" in group]
    if "common_step" in common:
        found = [common["common_step"]]
    numbers = {read_number(node) for node in found} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _others_of(optimizers: Sequence[_Optimizer]) -> Iterator[tuple[Node, Node]]:
    """What is said of optimizers besides (a scaler of the loss), that of the first under its own
    names.
    """
    for number, each in enumerate(optimizers):
        for key, value in each.others.items():
            if key not in _PARTS:
                yield (key if not number else f"{label_text(key)}_{number}"), value


# ---------------------------------------------------------------------------------------- Lightning

_TRAINER = "pytorch-lightning_version"


def _with_meta(root: Dict, meta: Checkpoint) -> tuple[Dict, tuple[str, ...]]:
    """The two trees as one, and a note on a `meta.pt` of somebody else, which is left out."""
    left_out = f"{LIGHTNING.beside} beside it is left out:"
    known = {key for key, _ in root.pairs}
    pairs = mapping_pairs(meta.root)
    if pairs is None or any(type(key) is not str for key, _ in pairs):
        return root, (*meta.notes, f"{left_out} it holds no dict of names")
    twice = [key for key, _ in pairs if key in known]
    if twice:
        what = f"'{printable(twice[0])}' is in the checkpoint too"
        return root, (*meta.notes, f"{left_out} {what}")
    joined = Dict([*root.pairs, *pairs])
    if any(key == _TRAINER for key, _ in pairs):
        joined = _as_single_file(joined)
    return joined, meta.notes


def _as_single_file(root: Dict) -> Dict:
    """The tree with the Trainer's names: ``state_dict``, and a list of ``optimizer_states``."""
    found: dict[Node, Node] = dict(root.pairs)
    if "state_dict" not in found and "model" in found:
        found["state_dict"] = found.pop("model")
    optimizers: list[Node] = []
    if "optimizer_states" not in found:
        while (name := f"optimizer_{len(optimizers)}") in found:
            optimizers.append(found.pop(name))
    if optimizers:
        found["optimizer_states"] = optimizers
    return Dict(list(found.items()))


LIGHTNING = Flavour(CONTAINER, "meta.pt", _with_meta)
