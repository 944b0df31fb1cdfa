"""The optimizer's states of a step of ZeRO, by the names of parameters.

A rank's optimizer has one parameter for each of its partitions. What it keeps in the shape of that
(``exp_avg``, ``exp_avg_sq``, …) lies as the weights lie, and is joined as they are; what it keeps
otherwise (``step``) is the same for all parameters of the group. Muon's ``momentum_buffer`` of
stages 1 and 2 has the whole of each parameter that has an element in the partition. Source:
`state_dict` of stage_1_and_2.py, stage3.py and bf16_optimizer.py in deepspeed/runtime,
`_muon_momentum_buffer` there, and deepspeed/checkpoint/ds_to_universal.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from ckptconv.formats.folders.zero import FlatGroup, RankStates, contradiction
from ckptconv.objects.plain import plain_form
from ckptconv.pickles.nodes import Call, Node, entries, listed, mapping_pairs
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint
from ckptconv.support.records import dataclass
from ckptconv.tensors.assembly import Flat, shaped
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.stream import verbatim_range
from ckptconv.tree.optimizer_states import ParamGroup, named_optimizer, read_number
from ckptconv.tree.walk import tensor_of

_BESIDE = """
    loss_scaler dynamic_loss_scale overflow clip_grad
    cur_scale cur_iter last_overflow_iter scale_factor scale_window
"""
_STATES = "base_optimizer_state"
_SAME = ("step", "lr")
_MUONS = "momentum_buffer"
_MOST_GROUPS = 1 << 20  # where no file says how many there are


@dataclass(frozen=True, slots=True)
class RankOptimizer:
    """What the optimizer of one rank keeps: of each partition its state, and the groups, each with
    its hyperparameters and the numbers of its partitions.
    """

    states: tuple[Mapping[str, Node], ...]
    groups: tuple[PlainGroup, ...]


def optimizer_of(ranks: Sequence[RankStates], groups: Sequence[FlatGroup]) -> Node:
    """The optimizer's states; None where the ranks have none.

    Raises `UnsupportedCheckpoint` where a state lies otherwise than the weights, and
    `MalformedCheckpoint` where the ranks contradict each other.
    """
    found = [_read(states) for states in ranks]
    optimizers = [one for one in found if one is not None]
    if len(optimizers) != len(found):
        if not optimizers:
            return None
        rank = found.index(None)
        what = f"rank {rank} has no optimizer states, and others have some"
        raise contradiction(what, where=_STATES)
    _require_same_settings(optimizers)
    states: dict[str, dict[str, Node]] = {}
    for group in groups:
        states.update(_of_group(group, ranks, optimizers))
    return named_optimizer(states, _named_groups(optimizers[0], groups))


def _require_same_settings(optimizers: Sequence[RankOptimizer]) -> None:
    """Raise where ranks are of different steps: some optimizers count them in their groups."""
    for rank, each in enumerate(optimizers):
        for number, ((first, _), (own, _)) in enumerate(
            zip(optimizers[0].groups, each.groups, strict=False)
        ):
            for key in _SAME:
                both = [first.get(key), own.get(key)]
                require_equal(both, (0, rank), f"param_groups.{number}.{key}")


def require_equal(values: Sequence[Node], ranks: Sequence[int], where: str) -> None:
    """Raise where numbers of ranks differ, that are of one step."""
    first = read_number(values[0])
    for rank, value in zip(ranks, values, strict=True):
        number = read_number(value)
        if None not in (first, number) and number != first:
            what = f"is {first:g} on rank {ranks[0]} and {number:g} on rank {rank}"
            raise contradiction(what, where=where)


def other_steps(
    optimizer: Sequence[tuple[Node, Node]], states: Mapping[str, Node]
) -> Iterator[str]:
    """Tell of an optimizer, an entry of a tree, that has done another number of steps than the
    model states say. It may be a new one; or the files are of different steps.
    """
    for _, said in optimizer:
        kept = [state for _, state in mapping_pairs(entries(said).get("state")) or ()]
        told = [*kept[:1], *listed(entries(said).get("param_groups"))[:1]]
        done = [number for one in told if (number := read_number(entries(one).get("step")))]
        steps, skipped = states.get("global_steps"), states.get("skipped_steps", 0)
        counts = [
            count for count in (steps, skipped) if type(count) is int and abs(count) < 1 << 53
        ]
        if not done or len(counts) < 2:
            continue
        # some optimizers of DeepSpeed take a first step without gradients, to make their states
        if done[0] not in (steps - skipped, steps - skipped + 1):
            yield (
                f"the optimizer has done {done[0]:.0f} steps, and the model states say that it was "
                f"{steps - skipped}: their files may be of different steps"
            )


PlainGroup = tuple[Mapping[str, Node], tuple[int, ...]]
"""A group of an optimizer: its hyperparameters, and the numbers of its partitions."""


def kept_beside(said: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """What an optimizer of DeepSpeed keeps of the training besides its states; the loss scaler as
    its numbers. `said` is all that it says, by name.
    """
    for key in _BESIDE.split():
        if key in said:
            value = said[key]
            yield key, plain_form(value) if type(value) is Call else value


# ------------------------------------------------------------------------------ what a rank's says


def _read(rank: RankStates) -> RankOptimizer | None:
    """What a rank's optimizer keeps; None where that is not saved."""
    where = "optimizer_state_dict" if rank.stage == 3 else _STATES
    base: Node = rank.rest.get(where)
    count = len(rank.groups)
    if type(base) in (list, tuple):  # elastic, of older releases
        return _elastic(base, rank, where)
    parts = entries(base)
    groups: Node = parts.get("param_groups")
    numbered = mapping_pairs(parts.get("state"))
    if numbered is None or type(groups) is not list:
        return None
    read = read_groups(groups, f"{where}.param_groups", count)
    states: list[Mapping[str, Node]] = [{} for _ in range(count)]
    for number, state in numbered:
        if type(number) is not int or not 0 <= number < count:
            what = f"has a state for a partition that is none of its {count}"
            raise contradiction(what, where=f"{where}.state")
        states[number] = entries(state)
    return RankOptimizer(tuple(states), read)


def _elastic(base: Sequence[Node], rank: RankStates, where: str) -> RankOptimizer:
    if len(base) != len(rank.groups):
        what = f"has states of {len(base)} groups, and weights of {len(rank.groups)}"
        raise contradiction(what, where=where)
    step = rank.rest.get("base_optimizer_state_step")
    shared = {} if step is None else {"step": step}
    states = tuple({**shared, **entries(state)} for state in base)
    return RankOptimizer(states, tuple(({}, (number,)) for number in range(len(base))))


def read_groups(node: Node, where: str, count: int = _MOST_GROUPS) -> tuple[PlainGroup, ...]:
    """The groups of an optimizer of `count` partitions."""
    if type(node) is not list:
        raise contradiction("is not a list of groups", where=where)
    return tuple(_group(group, count, where) for group in node)


def _group(node: Node, count: int, where: str) -> PlainGroup:
    settings = entries(node)
    params: Node = settings.pop("params", None)
    if type(params) is not list or not all(type(at) is int and 0 <= at < count for at in params):
        what = f"a group names parameters other than the {count} partitions"
        raise contradiction(what, where=where)
    return settings, tuple(params)


def _named_groups(optimizer: RankOptimizer, groups: Sequence[FlatGroup]) -> Iterator[ParamGroup]:
    names: dict[int, list[str]] = {}
    for group in groups:
        names.setdefault(group.number, []).extend(group.shapes)
    for settings, numbers in optimizer.groups:
        yield ParamGroup(settings, [name for number in numbers for name in names.get(number, ())])


# ------------------------------------------------------------------------------------------ joining


def _of_group(
    group: FlatGroup, ranks: Sequence[RankStates], optimizers: Sequence[RankOptimizer]
) -> dict[str, dict[str, Node]]:
    states = [optimizers[rank].states[group.number] for rank in group.ranks]
    for rank, state in zip(group.ranks, states, strict=True):
        odd = sorted(states[0].keys() ^ state.keys())
        if odd:
            what = f"rank {group.ranks[0]} and rank {rank} do not both have it"
            raise contradiction(what, where=f"{group.where}.{odd[0]}")
    there = [ranks[rank] for rank in group.ranks]
    is_muon = not group.is_cut and any(
        settings.get("use_muon") is True and group.number in numbers
        for settings, numbers in optimizers[0].groups
    )
    made: dict[str, dict[str, Node]] = {name: {} for name in group.shapes if states[0]}
    for key in states[0]:
        values = [state[key] for state in states]
        for name, value in _values(group, key, values, there, is_muon):
            made[name][key] = value
    return made


def _values(
    group: FlatGroup, key: str, values: Sequence[Node], ranks: Sequence[RankStates], is_muon: bool
) -> Iterable[tuple[str, Node]]:
    """One entry of the state of each parameter of a group, of what each rank has of it."""
    where = f"{group.where}.{key}"
    found = [tensor_of(value) for value in values]
    refs = [ref for ref in found if ref is not None]
    if not refs:  # a plain value, which all ranks have
        require_equal(values, group.ranks, where)
        return ((name, values[0]) for name in group.shapes)
    if len(refs) != len(values) or len({len(ref.shape) for ref in refs}) != 1:
        raise contradiction("its ranks do not hold the same", where=where)
    if not refs[0].shape:
        require_equal(refs, group.ranks, where)
        return ((name, own_number(refs[0], where)) for name in group.shapes)
    if is_muon and key == _MUONS:
        return _whole_parameters(group, refs, ranks, where)
    parts = [_partition(ref, rank, group, where) for ref, rank in zip(refs, ranks, strict=True)]
    return group.joined(parts)


def own_number(value: Node, where: str) -> Node:
    """A number of the group as that of one parameter: an optimizer that resumes counts on in it, so
    no two may share it.
    """
    ref = tensor_of(value)
    if ref is None or ref.shape:
        return value
    flat = Flat([ref], where)
    return shaped(flat.runs(0, 1), flat.dtype, ())


def _partition(ref: TensorRef, rank: RankStates, group: FlatGroup, where: str) -> TensorRef:
    """What a rank keeps for the elements of its partition of the weights, without what is behind
    them where these are filled up.
    """
    numel = rank.groups[group.number].numel
    if len(ref.shape) != 1 or ref.numel not in (numel, numel + rank.ends[group.number]):
        shape = "x".join(map(str, ref.shape))
        what = f"has {shape} elements beside weights of {numel}"
        raise UnsupportedCheckpoint(what, where=where)
    if ref.numel == numel:
        return ref
    if verbatim_range(ref) is None:
        raise MalformedCheckpoint("is not one contiguous run", where=where)
    (piece,) = ref.pieces
    return ref._replace(shape=(numel,), pieces=(piece._replace(shape=(numel,)),))


def _whole_parameters(
    group: FlatGroup, refs: Sequence[TensorRef], ranks: Sequence[RankStates], where: str
) -> Iterator[tuple[str, TensorRef]]:
    """What Muon keeps of each parameter of stages 1 and 2. Ranks that share a parameter have the
    same of it.
    """
    lengths = [rank.groups[group.number].numel for rank in ranks]
    there: set[str] = set()
    for ref, names, length in zip(refs, group.in_partitions(lengths), lengths, strict=True):
        if not names:
            continue
        sizes = [prod(group.shapes[name]) for name in names]
        if len(ref.shape) != 1 or ref.numel != sum(sizes):
            what = f"has {ref.numel} elements for {length}, of parameters of {sum(sizes)}"
            raise UnsupportedCheckpoint(what, where=where)
        flat = Flat([ref], where)
        for name, at, size in zip(names, accumulate(sizes, initial=0), sizes, strict=False):
            if name not in there:
                there.add(name)
                yield name, shaped(flat.runs(at, size), flat.dtype, group.shapes[name])
