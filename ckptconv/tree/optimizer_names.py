"""The names of parameters in optimizer states follow the keys of the model that they belong to.

An optimizer that still says ``module.fc.weight`` to a model that says ``fc.weight`` is not refused
by torch: `set_optimizer_state_dict` finds no state for the parameter, or FSDP none for the name,
and the training goes on with empty moments. So names are renamed wherever they are names: the keys
of ``state``, the lists ``params`` and ``param_names`` of groups, and flattened keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptconv.pickles.nodes import Node, mapping_pairs, with_pairs
from ckptconv.support.errors import KeyConflict
from ckptconv.support.records import dataclass
from ckptconv.tree.optimizer_states import (
    Fate,
    OptimizerState,
    bare_name,
    fates_of,
    flat_keys,
    optimizer_states,
)
from ckptconv.tree.renaming import RenamedKeys
from ckptconv.tree.state_dicts import StateDict

_LISTS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Followed:
    """The names that an optimizer state at `path` got: (old, new).

    `unclear` are those that stay as they are, because several state dicts have them and got
    different keys, or because two of them would become one.
    """

    path: str
    names: tuple[tuple[str, str], ...]
    unclear: tuple[str, ...]


def follow_names(
    root: Node,
    overlay: dict[int, Node],
    before: Sequence[StateDict],
    after: Sequence[tuple[StateDict, RenamedKeys]],
) -> list[Followed]:
    """Put optimizer states into `overlay` whose names are the new keys; see `left_behind` for the
    state dicts `before` and `after`. What has no new name keeps its own.
    """
    if not any(done.changed for _, done in after):
        return []
    told: list[Followed] = []
    fates: list[Fate] = []
    for state in [*optimizer_states(root, overlay, (item for item, _ in after))]:
        fates = fates or fates_of(before, after)
        names, unclear = _new_names(state.names, fates)
        if names:
            _rename(state, overlay, names)
        if names or unclear:
            told.append(Followed(state.path, tuple(names.items()), unclear))
    return told


def _new_names(
    names: Sequence[str], fates: Sequence[Fate]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The new names of those that get one, and those of which it is not clear."""
    found = [_known(names, fate) for fate in fates]
    # the state dict that has all of them is the optimizer's, else they are spread over several
    whole = [known for known in found if len(known) == len(names)]
    choices: dict[str, set[str | None]] = {}
    for known in whole or found:
        for name, new in known.items():
            choices.setdefault(name, set()).add(new)
    now = {name: new.copy().pop() for name, new in choices.items() if len(new) == 1}
    unclear = [name for name, new in choices.items() if len(new) > 1]
    renamed = {name: new for name, new in now.items() if new is not None}
    kept = {name: renamed.get(name, name) for name in names}
    if len(set(kept.values())) < len(kept):
        return {}, tuple(name for name in names if kept[name] != name)
    return {name: new for name, new in kept.items() if new != name}, tuple(unclear)


def _known(names: Sequence[str], fate: Fate) -> dict[str, str | None]:
    """What became of the names that a state dict has.

    Its keys may have a wrapper that the names lack, or the names one: those all follow then, as
    soon as one has to. One whose key was bare already, and is, stays for itself.
    """
    known = {name: fate.keys[name] for name in names if name in fate.keys}
    if len(known) == len(names):
        return known
    plain = {bare_name(key): key for key in fate.keys}
    others = [name for name in names if name not in known and bare_name(name) in plain]
    keys = {name: plain[bare_name(name)] for name in others}
    now = {key: fate.keys[key] for key in keys.values()}
    is_changed = any(new not in (None, key, bare_name(key)) for key, new in now.items())
    for name, key in keys.items():
        known[name] = fate.keys[key] if is_changed else name
    return known


def _rename(state: OptimizerState, overlay: dict[int, Node], names: Mapping[str, str]) -> None:
    """Put what holds names of a state into the overlay, with the new ones."""
    if state.is_flat:
        overlay[id(state.node)] = _renamed_flat(state, names)
        return
    parts = dict(mapping_pairs(state.node) or ())
    states = parts["state"]
    pairs = [
        (names.get(key, key) if type(key) is str else key, value)
        for key, value in mapping_pairs(states) or ()
    ]
    overlay[id(states)] = with_pairs(states, pairs)
    for group in parts["param_groups"]:
        for label, listed in mapping_pairs(group) or ():
            if label in _LISTS and type(listed) is list:
                overlay[id(listed)] = [
                    names.get(name, name) if type(name) is str else name for name in listed
                ]


def _renamed_flat(state: OptimizerState, names: Mapping[str, str]) -> Node:
    pairs = mapping_pairs(state.node) or ()
    renamed: dict[str, Node] = {}
    for (key, value), parted in zip(pairs, flat_keys([key for key, _ in pairs]), strict=True):
        new = names.get(parted.name)
        text = key if new is None else parted.called(new)
        if text in renamed:
            what = "two keys of the flattened optimizer state would get this name"
            raise KeyConflict(what, where=text, hint="leave it out with --drop")
        renamed[text] = value
    return with_pairs(state.node, list(renamed.items()))
