"""The optimizers of a pipeline's stages without ZeRO: no file names their parameters.

In fp32 the model states of each stage have what torch gives, which numbers the parameters of the
stage from 0 on. In fp16 they have one flat fp32 tensor for each group, which holds its parameters
end to end, and what the optimizer keeps in the shape of that; or, for all optimizers but the fused
ones, each parameter in fp32. The order is that in which a script gave the parameters; in fp16 the
values of the layers tell it. Source: `state_dict` in fused_optimizer.py and unfused_optimizer.py
of deepspeed/runtime/fp16, `_common_checkpoint_state` in deepspeed/runtime/engine.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptconv.formats.folders.ranks import are_equal, mark_of, varies
from ckptconv.formats.folders.zero import RankStates, Shapes, contradiction
from ckptconv.formats.folders.zero_optimizer import PlainGroup, read_groups
from ckptconv.pickles.nodes import Dict, Node, entries, listed, mapping_pairs
from ckptconv.tensors.assembly import Flat, shaped
from ckptconv.tensors.computed import Widener, as_run
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tensors.stream import iter_chunks
from ckptconv.tree.optimizer_states import ParamGroup, named_optimizer
from ckptconv.tree.walk import tensor_of

_NAMES = "param_names"
_FLAT, _UNFUSED = "fp32_groups_flat", "fp32_groups"
_OWN = "optimizer_state_dict"
_FEW = 64  # elements that nearly always tell two parameters apart


# ------------------------------------------------------------------------------------------ numbers


def joined_numbers(stages: Sequence[Mapping[str, Node]]) -> Node:
    """The optimizers of all stages as one that numbers the parameters of all, group by group, from
    the first stage on; None where a stage has none, or other groups.
    """
    found = [entries(stage.get("optimizer")) for stage in stages]
    if any(type(each.get("param_groups")) is not list for each in found):
        return None
    groups = [read_groups(each.get("param_groups"), "optimizer.param_groups") for each in found]
    settings = [[{**said, _NAMES: None} for said, _ in each] for each in groups]
    if any(each != settings[0] for each in settings[1:]):
        return None
    numbers: dict[tuple[int, int], int] = {}
    joined: list[ParamGroup] = []
    for together in zip(*groups, strict=True):
        own = [(at, number) for at, (_, params) in enumerate(together) for number in params]
        numbers.update({each: len(numbers) + at for at, each in enumerate(own)})
        joined.append(ParamGroup(_settings(together), [numbers[each] for each in own]))
    made: dict[Node, Mapping[str, Node]] = {}
    for at, each in enumerate(found):
        for number, state in mapping_pairs(each.get("state")) or ():
            if type(number) is not int or (at, number) not in numbers:
                what = f"has a state of a parameter that is in none of the groups of stage {at}"
                raise contradiction(what, where="optimizer.state")
            made[numbers[at, number]] = entries(state)
    return named_optimizer({number: made[number] for number in sorted(made)}, joined)


def _settings(together: Iterable[PlainGroup]) -> Mapping[str, Node]:
    """What is said of a group; the names that torch may have of its parameters, of all stages."""
    said = [settings for settings, _ in together]
    names = [each.get(_NAMES) for each in said]
    if not all(type(each) is list for each in names):
        return {key: value for key, value in said[0].items() if key != _NAMES}
    return {**said[0], _NAMES: [name for each in names for name in listed(each)]}


def count_numbers(stages: Iterable[Mapping[str, Node]]) -> int:
    """How many parameters the optimizers of all stages have."""
    groups = [entries(stage.get("optimizer")).get("param_groups") for stage in stages]
    params = [entries(group).get("params") for each in groups for group in listed(each)]
    return sum(len(listed(each)) for each in params)


def count_equal(stages: Sequence[Mapping[str, Node]]) -> int:
    """How many parameters of stages have the same states as one of an earlier stage: those of tied
    layers, whose gradients are added up.
    """
    there: set[object] = set()
    count = 0
    for stage in stages:
        marks = [*_marks_of_states(stage)]
        count += sum(mark in there for mark in marks)
        there.update(marks)
    return count


def _marks_of_states(stage: Mapping[str, Node]) -> Iterator[object]:
    for _, state in mapping_pairs(entries(stage.get("optimizer")).get("state")) or ():
        refs = {key: ref for key, value in entries(state).items() if (ref := tensor_of(value))}
        whole = {key: ref for key, ref in refs.items() if ref.numel > 1}
        if any(map(varies, whole.values())):
            yield tuple((key, mark_of(ref)) for key, ref in whole.items())


# --------------------------------------------------------------------------------------- by values


def flat_states(stage: Mapping[str, Node]) -> RankStates | None:
    """What the fp16 optimizer of a stage says, as a rank of ZeRO 1 that is alone says it; None
    where it is another optimizer.
    """
    said = entries(stage.get("optimizer"))
    own = entries(said.get(_OWN))
    unfused = [value for group in listed(said.get(_UNFUSED)) for value in listed(group)]
    groups = [_flat(value) for value in unfused or listed(said.get(_FLAT))]
    found = tuple(ref for ref in groups if ref is not None)
    if not found or len(found) < len(groups):
        return None
    states = [
        (number, Dict([(key, _flat(value) or value) for key, value in entries(state).items()]))
        for number, state in mapping_pairs(own.get("state")) or ()
    ]
    base = Dict([("state", Dict([*states])), ("param_groups", own.get("param_groups"))])
    gone = (_FLAT, _UNFUSED, _OWN)
    rest = {key: value for key, value in said.items() if key not in gone}
    rest["base_optimizer_state"] = base
    return RankStates(1, (1,), found, ends=(0,) * len(found), rest=rest)


def count_elements(stage: Mapping[str, Node]) -> int:
    """How many elements the fp16 optimizer of a stage has; none of any other."""
    rank = flat_states(stage)
    return sum(ref.numel for ref in rank.groups) if rank else 0


def _flat(node: Node) -> TensorRef | None:
    ref = tensor_of(node)
    return as_run(ref) if ref is not None and ref.shape else None


def shapes_by_values(
    ranks: Sequence[RankStates], parameters: Mapping[str, TensorRef]
) -> list[Shapes]:
    """The parameters that lie in each group of a rank that is alone, of those that layers have: the
    values there are the same in the type of the training. None where they do not tell.
    """
    if len(ranks) != 1:
        return []
    found: list[dict[str, Shape]] = [{} for _ in ranks[0].groups]
    for number, fitting in _fitting(ranks[0], parameters):
        if len(fitting) != 1:
            return []
        found[number][fitting[0]] = parameters[fitting[0]].shape
    return list(found)


def holds_others(stage: Mapping[str, Node], parameters: Mapping[str, TensorRef]) -> bool:
    """Whether the fp16 optimizer of a stage holds a parameter whose values no layer has."""
    rank = flat_states(stage)
    return rank is not None and not all(names for _, names in _fitting(rank, parameters))


def _fitting(
    rank: RankStates, parameters: Mapping[str, TensorRef]
) -> Iterator[tuple[int, list[str]]]:
    """What may be the next parameter of each group, by the number of the group; the first of these
    is taken for it. Ends where none is.
    """
    free = {name: ref for name, ref in parameters.items() if ref.numel}
    begin = {name: _begin(ref) for name, ref in free.items()}
    for number, group in enumerate(rank.groups):
        flat = Flat([group], f"group {number}")
        at = 0
        while at < flat.numel:
            names = [name for name, ref in free.items() if _lies_at(flat, at, ref, begin[name])]
            yield number, names
            if not names:
                return
            at += free.pop(names[0]).numel


def _begin(ref: TensorRef) -> bytes:
    return bytes(next(iter_chunks(ref))[: _FEW * ref.dtype.itemsize])


def _lies_at(flat: Flat, at: int, ref: TensorRef, begin: bytes) -> bool:
    """Whether a parameter of that value lies in a group from element `at` on."""
    if at + ref.numel > flat.numel:
        return False
    few, narrow = min(_FEW, ref.numel), Widener(ref.dtype)
    first = shaped(flat.runs(at, few), flat.dtype, (few,))
    if _begin(narrow(first)) != begin:
        return False
    return are_equal(narrow(shaped(flat.runs(at, ref.numel), flat.dtype, ref.shape)), ref)
