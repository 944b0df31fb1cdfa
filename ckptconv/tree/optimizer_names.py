"""Key rules as an edit, and the names of parameters in optimizer states, which follow the keys of
the model that they belong to.

An optimizer that still says ``module.fc.weight`` to a model that says ``fc.weight`` is not refused
by torch: `set_optimizer_state_dict` finds no state for the parameter, or FSDP none for the name,
and the training goes on with empty moments. So names are renamed wherever they are names: the keys
of ``state``, the lists ``params`` and ``param_names`` of groups, and flattened keys.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from ckptconv.keys.key_map import KeyRules
from ckptconv.keys.naming_metadata import followed
from ckptconv.pickles.nodes import Node, mapping_pairs, substituted, with_pairs
from ckptconv.support.errors import KeyConflict, OptionRefused, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.tensors.layouts import are_alike
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.optimizer_parts import parts_of
from ckptconv.tree.optimizer_states import (
    Fate,
    OptimizerState,
    bare_name,
    fates_of,
    flat_keys,
    optimizer_states,
    refuse_reshaped,
)
from ckptconv.tree.renaming import RenamedKeys, rename_state_dicts
from ckptconv.tree.reshaping import with_config
from ckptconv.tree.state_dicts import StateDict, is_all
from ckptconv.tree.walk import PLAIN, tensor_of

_LISTS = ("params", "param_names")  # torch 2.6 has names beside numbers too


@dataclass(frozen=True, slots=True)
class RenamedStates:
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
) -> list[RenamedStates]:
    """Put optimizer states into `overlay` whose names are the new keys; see `left_behind` for the
    state dicts `before` and `after`. What has no new name keeps its own.
    """
    if not any((done.changed or done.made) and not is_all(item) for item, done in after):
        return []
    refuse_reshaped(root, overlay, after)
    told: list[RenamedStates] = []
    states = [*optimizer_states(root, overlay, (item for item, _ in after))]
    fates = fates_of(before, after) if states else []
    for state in states:
        twins = _twins(state, fates)
        left = [name for name in state.names if name not in twins]
        names, unclear = _new_names(left, fates)
        if names or twins:
            _rename(state, overlay, names, twins)
        if names or twins or unclear:
            one = {twin: names.get(name, name) for twin, name in twins.items()}
            told.append(RenamedStates(state.path, tuple({**names, **one}.items()), unclear))
    return told


def _twins(state: OptimizerState, fates: Sequence[Fate]) -> dict[str, str]:
    """The names of parameters that are one with another of the state now, each with that one.

    Raises `RefusedObject` where their states are not the same, or a name that a rule gave to a
    tensor is that of another one's state.
    """
    twins: dict[str, str] = {}
    for fate in fates:
        left = {bare_name(key) for key, new in fate.keys.items() if new is not None}
        for tied in fate.tied:
            before = {bare_name(key) for key in tied.before}
            after = {bare_name(key) for key in tied.after} - left
            theirs = [name for name in state.names if bare_name(name) in before]
            others = [name for name in state.names if bare_name(name) in after]
            first = theirs[0] if theirs else tied.before[0]
            for name in (*theirs[1:], *others):
                if not theirs or state.shapes or not _are_equal(state, first, name):
                    what = f"holds a state of {printable(name)}, which is one tensor with"
                    hint = f"leave it out: --drop {printable(state.path) or 'PATH'}"
                    what = f"{what} {printable(first)} now, and has no equal state"
                    raise RefusedObject(what, where=state.path or None, hint=hint)
                twins[name] = first
    return twins


def _are_equal(state: OptimizerState, one: str, other: str) -> bool:
    """Whether an optimizer has the same of two parameters, in the same group."""
    parts = parts_of(state, state.node)
    groups = [group.params for group in parts.groups]
    if any((one in names) != (other in names) for names in groups):
        return False
    ours, theirs = (parts.states.get(name, {}) for name in (one, other))
    return ours.keys() == theirs.keys() and all(_is_same(ours[key], theirs[key]) for key in ours)


def _is_same(one: Node, other: Node) -> bool:
    refs = [ref for node in (one, other) if (ref := tensor_of(node)) is not None]
    if len(refs) == 2:
        return are_alike(refs)
    return not refs and type(one) in PLAIN and repr(one) == repr(other)


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
    if len(set(kept.values())) < len(kept):  # two would become one: all stay, and a note says so
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
    if any(new not in (None, key, bare_name(key)) for key, new in now.items()):
        return known | {name: now[key] for name, key in keys.items()}
    return known | {name: name for name in keys}


def _rename(
    state: OptimizerState, overlay: dict[int, Node], names: Mapping[str, str], gone: Container[Node]
) -> None:
    """Put what holds names of a state into the overlay, with new names, and without the `gone`."""
    if state.is_flat:
        overlay[id(state.node)] = _renamed_flat(state, names, gone)
        return
    parts = dict(mapping_pairs(state.node) or ())
    states = parts["state"]
    pairs = [
        (_renamed(key, names), value)
        for key, value in mapping_pairs(states) or ()
        if key not in gone
    ]
    overlay[id(states)] = with_pairs(states, pairs)
    for group in parts["param_groups"]:
        for label, listed in mapping_pairs(group) or ():
            if label in _LISTS and type(listed) is list:
                left = [_renamed(name, names) for name in listed if name not in gone]
                overlay[id(listed)] = left


def _renamed(name: Node, names: Mapping[str, str]) -> Node:
    return names.get(name, name) if type(name) is str else name


def _renamed_flat(state: OptimizerState, names: Mapping[str, str], gone: Container[Node]) -> Node:
    pairs = mapping_pairs(state.node) or ()
    renamed: dict[str, Node] = {}
    for (key, value), parted in zip(pairs, flat_keys([key for key, _ in pairs]), strict=True):
        if parted.name in gone:
            continue
        new = names.get(parted.name)
        text = key if new is None else parted.called(new)
        if text in renamed:
            what = "two keys of the flattened optimizer state would get this name"
            raise KeyConflict(what, where=text, hint="leave it out with --drop")
        renamed[text] = value
    return with_pairs(state.node, list(renamed.items()))


# --------------------------------------------------------------------------- key rules as an edit


@dataclass(frozen=True, slots=True)
class RenameKeys:
    """An edit: gives the keys of all state dicts (`Checkpoint.state_dicts`) their names by `rules`;
    the names in optimizer states follow.

    A dict of dicts of tensors has a state dict in each of them; rules over the keys of a part that
    `only` names belong to the call itself.
    It is the last edit where there are others: they know the names of the file.
    """

    rules: KeyRules

    def __post_init__(self) -> None:
        if not isinstance(self.rules, KeyRules):
            what = f"rules={self.rules!r:.100} is not KeyRules"
            raise OptionRefused(what, hint="write it as KeyRules.of([('rename', 'OLD=NEW')])")

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        overlay: dict[int, Node] = {}
        rules = with_config(self.rules, checkpoint)
        found = checkpoint.state_dicts()
        applied, renamed, skipped = rename_state_dicts(found, overlay, rules, checkpoint)
        follow_names(checkpoint.root, overlay, found, list(zip(found, renamed, strict=True)))
        names: dict[str, str | None] = {}
        for done in applied:
            prefix = done.item.prefix
            for key, new in done.names().items():
                names[prefix + key] = None if new is None else prefix + new
        return replace(
            checkpoint,
            root=substituted(checkpoint.root, overlay),
            metadata=followed(checkpoint.metadata, names),
            dropped=(*checkpoint.dropped, *(item.node for item in skipped)),
        )
