"""Optimizer states of Megatron's `torch_dist` folders in the form that torch gives them.

What an optimizer keeps of a parameter is stored under ``optimizer.state.FIELD.KEY``, KEY the key of
the parameter among the weights, FIELD ``exp_avg``, ``exp_avg_sq``, ``fp32_param`` (the master
weights), …; with several optimizers ``chained_N.`` stands before it. The step is the same for all
parameters, and lies with the groups in `common.pt`. Groups do not say which parameters are theirs:
only where an optimizer has one group they are all of its own. Distributed optimizers may keep flat
buckets instead (``optimizer.distributed.…``), which only Megatron takes apart. Source:
megatron/core/dist_checkpointing/optimizer.py, megatron/core/optimizer/optimizer.py and
distrib_optimizer.py, 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from ckptconv.pickles.nodes import Dict, Node, mapping_pairs
from ckptconv.support.records import dataclass
from ckptconv.tree.optimizer_states import read_number
from ckptconv.tree.walk import is_tensor, label_text

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


def by_names(root: Dict) -> tuple[Dict, tuple[str, ...]]:
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
    groups, notes = _groups(optimizers)
    if groups is None:
        return root, (f"{_STAY}: nothing says its groups of parameters and their settings",)
    states = {key: state for each in optimizers for key, state in each.states.items()}
    if len(states) < sum(len(each.states) for each in optimizers):
        return root, (f"{_STAY}: two optimizers have one parameter",)
    pairs: list[tuple[Node, Node]] = [
        (key, Dict([*state.items()])) for key, state in states.items()
    ]
    made: list[tuple[Node, Node]] = [("state", Dict(pairs)), ("param_groups", groups)]
    parts["optimizer"] = Dict([*made, *_others(optimizers)])
    return Dict(list(parts.items())), notes


def _apart(optimizer: Dict, told: Mapping[Node, re.Match[str]]) -> list[_Optimizer]:
    """The optimizers in the order of their numbers; the only one is number 0."""
    found: dict[int, _Optimizer] = {}
    for key, value in optimizer.pairs:
        if key in told:
            said = told[key]
            of = found.setdefault(int(said["number"] or 0), _Optimizer())
            of.states.setdefault(said["key"], {})[said["field"]] = value
    for key, value in optimizer.pairs:
        if key in told:
            continue
        if type(key) is int and mapping_pairs(value) is not None:
            found.setdefault(key, _Optimizer()).others |= dict(mapping_pairs(value) or ())
        else:
            found.setdefault(0, _Optimizer()).others[key] = value
    for each in found.values():
        # that of 16 bits, and the distributed one, have torch's in them
        inner = mapping_pairs(each.others.get("optimizer"))
        if inner is not None:
            del each.others["optimizer"]
            each.others = {**dict(inner), **each.others}
    return [found[number] for number in sorted(found)]


def _groups(optimizers: Sequence[_Optimizer]) -> tuple[list[Dict] | None, tuple[str, ...]]:
    """The groups of all optimizers, None where one has none, and a note where they do not say
    their parameters; each state gets the step.
    """
    found: list[Dict] = []
    untold = 0
    for each in optimizers:
        listed = each.others.get("param_groups")
        groups = [mapping_pairs(group) for group in listed] if type(listed) is list else []
        if not groups or None in groups:
            return None, ()
        settings = [list(group or ()) for group in groups]
        if (step := _step(each, [dict(group) for group in settings])) is not None:
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
    found = [common["common_step"]] if "common_step" in common else []
    found = found or [group["step"] for group in groups if "step" in group]
    numbers = {read_number(node) for node in found} - {None}
    return numbers.pop() if len(numbers) == 1 else None


def _others(optimizers: Sequence[_Optimizer]) -> Iterator[tuple[Node, Node]]:
    """What is said of optimizers besides (a scaler of the loss), that of the first under its own
    names.
    """
    for number, each in enumerate(optimizers):
        for key, value in each.others.items():
            if key not in _PARTS:
                yield (key if not number else f"{label_text(key)}_{number}"), value
