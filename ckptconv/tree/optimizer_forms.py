"""Optimizer states given another form (by names, by numbers, flat), an edit; and which parameter a
number means: told by order and shapes, and never guessed.

`torch.optim` numbers the parameters of its groups one after another, and within a group they stand
in the order of ``model.parameters()`` for whoever gave them so. What the order is known of may have
more than the optimizer: buffers, frozen parameters. So each number gets the only name that order
and shape leave; where they leave two, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.pickles.nodes import Dict, Node, mapping_pairs, substituted
from ckptconv.support.choices import OPTIMIZER_FORMS, OptimizerForm, refuse_other
from ckptconv.support.errors import KeyConflict, OptionRefused, RefusedObject, printable
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.support.report import danger_in
from ckptconv.support.text import count_text, look_hint
from ckptconv.tensors.refs import Shape, view_identity
from ckptconv.tree.candidates import metadata_of
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.optimizer_parts import (
    OptimizerParts,
    flattened,
    named,
    names_beside,
    numbered,
    parts_of,
)
from ckptconv.tree.optimizer_states import (
    BUFFERS,
    SHAPED,
    OptimizerState,
    ParamGroup,
    bare_name,
    optimizer_states,
    shape_of_state,
)
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import tensor_of

# Ways of giving out names so far beyond which nothing is certain any more
_MOST_WAYS = 1000

HINT = (
    "say the order of its parameters: --order-from a text with one key per line, or --model "
    "PACKAGE.MODULE:CALLABLE"
)

Positions = tuple[int, ...]
"""How many parameters of each group have their names."""


class Parameter(NamedTuple):
    """A parameter by its key; its shape, where that is known."""

    name: str
    shape: Shape | None = None


class ParameterOrder(NamedTuple):
    """Parameters in the order of ``model.parameters()``, and `source`: what says so."""

    source: str
    parameters: Sequence[Parameter]


def _plain_order(given: Any) -> ParameterOrder:
    """An order as the user wrote it; a shape may be a `torch.Size`."""
    try:
        source, parameters = given
        plain = [(name, shape if shape is None else tuple(shape)) for name, shape in parameters]
    except (TypeError, ValueError):
        plain = None
    if plain is None or type(source) is not str or any(type(name) is not str for name, _ in plain):
        raise OptionRefused(f"order={given!r:.100} is not (SOURCE, [(NAME, SHAPE), ...])")
    return ParameterOrder(source, [Parameter(*pair) for pair in plain])


def order_of(found: StateDict, source: str) -> ParameterOrder:
    """What may be parameters of a state dict, in its order: a module lists its parameters in the
    order of ``model.parameters()`` there. Buffers that say so by their names, and what is of no
    floating type, are none; a tied one counts once, as it does for the optimizer.
    """
    seen = set()
    parameters = []
    for key, ref in found.tensors():
        identity = view_identity(ref)
        is_new = identity not in seen
        seen.add(identity)
        is_of_numbers = ref.dtype.is_floating or ref.dtype.kind == "complex"
        if is_new and is_of_numbers and not key.endswith(BUFFERS):
            parameters.append(Parameter(key, ref.shape))
    return ParameterOrder(source, parameters)


def is_sorted(found: StateDict) -> bool:
    """Whether the keys of a state dict are in the order of texts, so that it may not be a module's:
    a safetensors file that became a dict of torch has layer 10 before layer 2. What has the
    `_metadata` of a module has its order too.
    """
    keys = found.keys
    return len(keys) > 1 and list(keys) == sorted(keys) and metadata_of(found.node) is None


def with_keys_of(order: ParameterOrder, found: StateDict) -> ParameterOrder:
    """The same parameters by the keys that a state dict has for them, and with the shapes there.

    Wrappers such as ``module.`` may be on one side only. Raises `KeyConflict` for a parameter that
    the state dict has not.
    """
    shapes = {key: ref.shape for key, ref in found.tensors()}
    bare = {bare_name(key): key for key in shapes}
    parameters = []
    for name, shape in order.parameters:
        key = name if name in shapes else bare.get(bare_name(name))
        if key is None:
            what = f"is a parameter of {printable(order.source)}, and not in the checkpoint"
            raise KeyConflict(what, where=name, hint=HINT)
        parameters.append(Parameter(key, shapes[key] if shape is None else shape))
    return ParameterOrder(order.source, parameters)


def names_of_numbers(parts: OptimizerParts, order: ParameterOrder, path: str) -> dict[Node, str]:
    """The name of each parameter that the optimizer state at `path` numbers.

    Raises `RefusedObject` where order and shapes leave none, or more than one way.
    """
    groups = [
        [
            (name, shape_of_state(Dict([*parts.states.get(name, {}).items()])))
            for name in group.params
        ]
        for group in parts.groups
    ]
    numbers = {name for group in groups for name, _ in group}
    lost = [name for name in parts.states if name not in numbers]
    if lost:
        what = f"holds a state of parameter {lost[0]}, which is in none of its groups"
        raise RefusedObject(what, where=path or None)
    return _Naming(groups, order, path).names()


def refuse_shares(
    parts: OptimizerParts, models: Sequence[StateDict], path: str, order: ParameterOrder | None
) -> None:
    """Refuse states that are named, and do not have the shape of the weight of that name in any of
    the `models` or in the `order`: such as each rank of FSDP has of its own share, where its
    optimizer is saved as it is. What optimizers of low rank keep (GaLore) has other shapes.
    """
    if any(_OF_LOW_RANK in group.settings for group in parts.groups):
        return
    shapes: dict[str, set[Shape | None]] = {}
    told: list[tuple[str, Shape | None]]
    told = [(key, ref.shape) for found in models for key, ref in found.tensors()]
    if order is not None:
        told += order.parameters
    for key, shape in told:
        shapes.setdefault(bare_name(key), set()).add(shape)
    for name, state in parts.states.items():
        known = shapes.get(bare_name(str(name)), {None})
        refs = [(key, tensor_of(value)) for key, value in state.items() if key in SHAPED]
        for key, ref in refs:
            if ref is not None and None not in known and ref.shape not in known:
                wanted = " or ".join(sorted(str(list(shape or ())) for shape in known))
                what = f"has {key} of shape {list(ref.shape)} for {printable(str(name))}"
                raise RefusedObject(f"{what}, which is {wanted}", where=path or None, hint=_WHOLE)


# A setting of the groups whose moments are projected (GaLore, APOLLO and their kin)
_OF_LOW_RANK = "update_proj_gap"
_WHOLE = (
    "this may be the share of one rank: save what FSDP.optim_state_dict or torch's "
    "get_optimizer_state_dict gives"
)


class _Naming:
    """All ways of going through the parameters in order, each of which is the next one of a group
    or is none of the optimizer's.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[Node, Shape | None]]],
        order: ParameterOrder,
        path: str,
    ) -> None:
        self._groups, self._order, self._path = groups, order, path
        self._end: Positions = tuple(map(len, groups))

    def names(self) -> dict[Node, str]:
        # forward all that can be reached, then back from the end: where one way leads back, no
        # other way of giving out the names is possible
        steps = self._forward()
        found: dict[Node, str] = {}
        at = self._end
        for (name, _), step in zip(reversed(self._order.parameters), reversed(steps), strict=True):
            ways = step[at]
            if len(ways) > 1:
                raise self._ambiguous(name)
            before = ways[0]
            if before != at:
                group = next(g for g, done in enumerate(at) if done != before[g])
                found[self._groups[group][before[group]][0]] = name
            at = before
        return found

    def _forward(self) -> list[dict[Positions, list[Positions]]]:
        """For each parameter, where one may be behind it, and from where one comes there."""
        missing = len(self._order.parameters) - sum(self._end)
        if missing < 0:
            raise self._refused(
                f"numbers {count_text(sum(self._end), 'parameter')}, and "
                f"{printable(self._order.source)} has {len(self._order.parameters):,}"
            )
        steps: list[dict[Positions, list[Positions]]] = []
        there: dict[Positions, list[Positions]] = {(0,) * len(self._end): []}
        for count, parameter in enumerate(self._order.parameters, 1):
            behind: dict[Positions, list[Positions]] = {}
            for at in there:
                for then in self._next(at, parameter.shape):
                    # the order has so many more than the optimizer, and no more may be passed over
                    if count - sum(then) <= missing:
                        behind.setdefault(then, []).append(at)
            if not behind:
                shape = "" if parameter.shape is None else f" of shape {list(parameter.shape)}"
                raise self._refused(
                    f"does not fit {printable(self._order.source)}: {printable(parameter.name)}"
                    f"{shape} is none of the next parameters by the shapes of its states"
                )
            if len(behind) > _MOST_WAYS:
                raise self._ambiguous(parameter.name)
            steps.append(behind)
            there = behind
        return steps

    def _next(self, at: Positions, shape: Shape | None) -> list[Positions]:
        """Where one may be behind a parameter: at the same place, or one further in a group."""
        found = [at]
        for number, done in enumerate(at):
            if done < self._end[number]:
                wanted = self._groups[number][done][1]
                # a parameter that never had a gradient has no state that would tell its shape
                if wanted is None or shape is None or wanted == shape:
                    found.append((*at[:number], done + 1, *at[number + 1 :]))
        return found

    def _ambiguous(self, name: str) -> RefusedObject:
        return self._refused(
            f"numbers its parameters, and the shapes in {printable(self._order.source)} do not "
            f"tell which number {printable(name)} has"
        )

    def _refused(self, what: str) -> RefusedObject:
        return RefusedObject(what, where=self._path or None, hint=HINT)


# ------------------------------------------------------------------------------------ other forms


OF_LOADER = "torch_dist_common"
"""Where a tree in Megatron's form has the bytes of its `common.pt`, in a list."""


@dataclass(frozen=True, slots=True)
class FormOptimizer:
    """An edit: gives all optimizer states the form ``names``
    (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`), ``numbers``
    (`torch.optim`), ``flat`` (``flatten_optimizer_state_dict=True``), ``torchtitan`` (flat, and
    the weights at the root of the checkpoint) or ``megatron``, which a `torch_dist` folder of
    Megatron had before it was opened: for a DCP folder, and before any other edit.

    `order` are the parameters in the order of ``model.parameters()``, also as a plain
    ``(SOURCE, [(NAME, SHAPE), ...])``; without it numbers are those of the one state dict beside,
    where its file keeps the order of the module. Raises
    `OptionRefused` where there is no optimizer state (unless `if_there`), `RefusedObject` where a
    number may mean several parameters, or the order of names is not known.
    """

    form: OptimizerForm
    order: ParameterOrder | None = None
    if_there: bool = False

    def __post_init__(self) -> None:
        refuse_other("optimizer", self.form, OPTIMIZER_FORMS)
        if self.order is not None and type(self.order) is not ParameterOrder:
            object.__setattr__(self, "order", _plain_order(self.order))

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
        root = substituted(checkpoint.root, stand_ins)
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
        if self.form == "numbers" and parts.is_numbered:
            return numbered(parts), notes
        if self.form == "numbers":
            by = "its groups" if self.order is None else printable(self.order.source)
            notes = [f"{where}: {count} have numbers now, in the order of {by}"]
            return numbered(self._in_order(parts, state)), notes
        if self.form == "names":
            return named(parts), notes
        return flattened(parts), notes

    def _names(
        self,
        parts: OptimizerParts,
        state: OptimizerState,
        checkpoint: Checkpoint,
        models: Sequence[StateDict],
    ) -> tuple[dict[Node, Node], str]:
        """The names of numbers, and what says them."""
        beside = names_beside(parts, state.path)
        if beside is not None:
            return beside, "those that its groups say"
        if self.order is not None:
            order = self.order
            if len(models) == 1:
                order = with_keys_of(order, models[0])
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

    def _in_order(self, parts: OptimizerParts, state: OptimizerState) -> OptimizerParts:
        """The same, the parameters of each group in the order that they are to be numbered in."""
        if self.order is None and parts.has_order:
            return parts
        if self.order is None:
            what = "is flat, so the order of its parameters is not known"
            raise RefusedObject(what, where=state.path or None, hint=HINT)
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
    both = {key for key, _ in model} & {key for key, _ in others}
    if both:
        what = "is a key of the weights and of what stands beside them"
        raise KeyConflict(what, where=str(min(both)), hint="use --optimizer flat")
    return Dict([*model, *others])
