"""Optimizer states given another form: by names, by numbers, flat; an edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptconv.pickles.nodes import Dict, Node, containers, mapping_pairs, substituted
from ckptconv.support.choices import OPTIMIZER_FORMS, OptimizerForm, refuse_other
from ckptconv.support.errors import KeyConflict, OptionRefused, RefusedObject, printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import danger_in
from ckptconv.support.text import count_text, look_hint
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.optimizer_order import (
    HINT,
    ParameterOrder,
    is_sorted,
    names_of_numbers,
    order_of,
    refuse_shares,
    with_keys_of,
)
from ckptconv.tree.optimizer_parts import (
    OptimizerParts,
    flattened,
    named,
    names_beside,
    numbered,
    parts_of,
)
from ckptconv.tree.optimizer_states import (
    OptimizerState,
    ParamGroup,
    bare_name,
    optimizer_states,
)
from ckptconv.tree.state_dicts import StateDict

OF_LOADER = "torch_dist_common"
"""Where a tree in Megatron's form has the bytes of its `common.pt`, in a list."""


@dataclass(frozen=True, slots=True)
class FormOptimizer:
    """An edit: gives all optimizer states the form ``names``
    (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`), ``numbers``
    (`torch.optim`), ``flat`` (``flatten_optimizer_state_dict=True``), ``torchtitan`` (flat, and
    the weights at the root of the checkpoint) or ``megatron``, which a `torch_dist` folder of
    Megatron had before it was opened: for a DCP folder, and before any other edit.

    `order` are the parameters in the order of ``model.parameters()``; without it numbers are those
    of the one state dict beside, where its file keeps the order of the module. Raises
    `OptionRefused` where there is no optimizer state (unless `if_there`), `RefusedObject` where a
    number may mean several parameters, or the order of names is not known.
    """

    form: OptimizerForm
    order: ParameterOrder | None = None
    if_there: bool = False

    def __post_init__(self) -> None:
        refuse_other("optimizer", self.form, OPTIMIZER_FORMS)

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.form == "megatron":
            return _as_stored(checkpoint)
        models = checkpoint.state_dicts()
        states = list(optimizer_states(checkpoint.root, {}, models))
        if not states and self.if_there:
            return checkpoint
        if not states:
            what = f"--optimizer {self.form}: it holds no optimizer state"
            raise OptionRefused(what, path=checkpoint.path, hint=look_hint(checkpoint.path))
        stand_ins: dict[int, Node] = {}
        notes: list[str] = []
        for state in states:
            parts = parts_of(state, state.node)
            stand_ins[id(state.node)], told = self._formed(parts, state, checkpoint, models)
            notes += told
        root = substituted(checkpoint.root, containers(checkpoint.root), stand_ins)
        if self.form == "torchtitan":
            root = _at_the_root(replace(checkpoint, root=root))
        return replace(checkpoint, root=root, notes=(*checkpoint.notes, *notes))

    def _formed(
        self,
        parts: OptimizerParts,
        state: OptimizerState,
        checkpoint: Checkpoint,
        models: Sequence[StateDict],
    ) -> tuple[Dict, list[str]]:
        where = printable(state.path) or "the optimizer state"
        count = count_text(len(parts.parameters), "parameter")
        notes = []
        if parts.is_numbered and self.form == "numbers" and self.order is not None:
            source = printable(self.order.source)
            what = f"numbers its parameters already, and {source} may list them in another order"
            hint = "write it by names first, then the result by numbers, each with its own order"
            raise RefusedObject(what, where=state.path or None, hint=hint)
        if parts.is_numbered and self.form != "numbers":
            names, source = self._names(parts, state, checkpoint, models)
            parts = parts.called(names)
            notes = [f"{where}: {count} have names now, by {printable(source)}"]
        if not parts.is_numbered:
            refuse_shares(parts, models, state.path, self.order)
        if self.form == "numbers":
            told = "" if parts.is_numbered else f"{where}: {count} have numbers now"
            by = self.order and f", in the order of {printable(self.order.source)}"
            notes = [f"{told}{by or ', in the order of its groups'}"] if told else []
            return numbered(self._in_order(parts, state, models)), notes
        return (named if self.form == "names" else flattened)(parts), notes

    def _names(
        self,
        parts: OptimizerParts,
        state: OptimizerState,
        checkpoint: Checkpoint,
        models: Sequence[StateDict],
    ) -> tuple[dict[Node, Node], str]:
        """The names of numbers, and what says them."""
        if (beside := names_beside(parts, state.path)) is not None:
            return beside, "those that its groups say"
        if self.order is not None:
            order = self.order if len(models) != 1 else with_keys_of(self.order, models[0])
            return names_of_numbers(parts, order, state.path), f"the order of {order.source}"
        if len(models) != 1 or not checkpoint.container.is_torch:
            why = "no state dict beside them tells the order of model.parameters()"
            what = f"numbers its parameters, and {why}"
            raise RefusedObject(what, where=state.path or None, hint=HINT)
        if is_sorted(models[0]):
            what = "numbers its parameters, and the keys beside them are sorted, not the module's"
            raise RefusedObject(what, where=state.path or None, hint=HINT)
        order = order_of(models[0], models[0].path or "the weights")
        source = f"the order of the keys in {order.source}, and their shapes"
        return names_of_numbers(parts, order, state.path), source

    def _in_order(
        self, parts: OptimizerParts, state: OptimizerState, models: Sequence[StateDict]
    ) -> OptimizerParts:
        """The same, the parameters of each group in the order that they are to be numbered in."""
        if parts.is_numbered:
            return parts
        if self.order is None:
            if not parts.has_order:
                what = "is flat, so the order of its parameters is not known"
                raise RefusedObject(what, where=state.path or None, hint=HINT)
            return parts
        if not parts.has_order and len(parts.groups) > 1:
            what = f"is flat, so the order of its {len(parts.groups)} groups is not known"
            hint = "write it by names, and let torch's set_optimizer_state_dict load it"
            raise RefusedObject(what, where=state.path or None, hint=hint)
        places = _places([str(name) for name in parts.parameters], self.order)
        return replace(parts, groups=[_sorted(group, places) for group in parts.groups])


def _places(names: Sequence[str], order: ParameterOrder) -> dict[Node, int]:
    """Where parameters stand in an order, whose names may have wrappers that theirs have not."""
    exact = {name: at for at, (name, _) in enumerate(order.parameters)}
    bare = {bare_name(name): at for name, at in exact.items()}
    places: dict[Node, int] = {}
    for name in names:
        at = exact.get(name, bare.get(bare_name(name)))
        if at is None:
            what = f"is in the optimizer's state, and not in {printable(order.source)}"
            raise KeyConflict(what, where=name, hint=HINT)
        places[name] = at
    return places


def _sorted(group: ParamGroup, places: Mapping[Node, int]) -> ParamGroup:
    """A group with its parameters by their places, and the list of names that goes with them."""
    order = sorted(range(len(group.params)), key=lambda at: places[group.params[at]])
    settings = dict(group.settings)
    beside = settings.get("param_names")
    if type(beside) is list and len(beside) == len(order):
        settings["param_names"] = [beside[at] for at in order]
    return ParamGroup(settings, [group.params[at] for at in order])


def _as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """The tree under Megatron's own names, with its `common.pt`."""
    if checkpoint.stored is None:
        what = "--optimizer megatron: it is not a torch_dist folder of Megatron with its common.pt"
        hint = "Megatron's loader needs the arguments and the groups in that file"
        raise OptionRefused(what, path=checkpoint.path, hint=hint)
    if danger_in(checkpoint.notes):
        what = "--optimizer megatron: its common.pt would be carried as it is, and it is dangerous"
        raise RefusedObject(what, path=checkpoint.path)
    note = "common.pt is carried as it is, with the arguments and the optimizer's groups"
    return replace(checkpoint, root=checkpoint.stored, notes=(*checkpoint.notes, note))


def _at_the_root(checkpoint: Checkpoint) -> Node:
    """The tree with the items of its one state dict at the root, as torchtitan has them."""
    found = checkpoint.state_dicts()
    if len(found) == 1 and not found[0].path.strip("."):
        return checkpoint.root
    pairs = mapping_pairs(checkpoint.root) or ()
    if len(found) != 1 or not any(value is found[0].node for _, value in pairs):
        what = "--optimizer torchtitan: there is no one state dict to be put at the root"
        hint = "write one model and its optimizer, or --optimizer flat"
        raise OptionRefused(what, path=checkpoint.path, hint=hint)
    others = [(key, value) for key, value in pairs if value is not found[0].node]
    model = list(mapping_pairs(found[0].node) or ())
    if both := {key for key, _ in model} & {key for key, _ in others}:
        what = "is a key of the weights and of what stands beside them"
        raise KeyConflict(what, where=str(min(both)), hint="use --optimizer flat")
    return Dict([*model, *others])
