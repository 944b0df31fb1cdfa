"""Which of the state dicts in a checkpoint is taken, where none is named; and what that loses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ckptconv.pickles.nodes import Node, mapping_pairs, spoken
from ckptconv.support.errors import AmbiguousStateDict, printable
from ckptconv.support.text import count_text, first_few, look_hint, part_text
from ckptconv.tree.candidates import (
    Candidate,
    Holder,
    Survey,
    survey,
)
from ckptconv.tree.labels import names_average
from ckptconv.tree.producers import Producer, averages_weights, producer_in
from ckptconv.tree.state_dicts import (
    _LISTED,
    FoundPart,
    StateDict,
    bare_tensors,
    chain_of,
    choice_of_parts,
    joined,
    listed_parts,
    own_of,
    part_at,
    state_dict_at,
)
from ckptconv.tree.walk import (
    PLAIN,
    is_tensor,
    labels_of,
    place_text,
    walk,
)


def choose_state_dict(root: Node, only: str | None, path: PurePath) -> StateDict:
    """The state dict at the path `only`, or the one that is the model.

    Raises `AmbiguousStateDict` if that is not clear.
    """
    part = part_at(root, only, path)
    surveyed = survey(part.node)
    if part.own_only:
        return own_of(part, surveyed, path)
    if only is None and (loaded := _loaded_by_framework(root, surveyed)) is not None:
        return loaded
    best, lesser = surveyed.ranked()
    if len(best) == 1:
        _refuse_loss(best[0], surveyed, part.path, path)
        return state_dict_at(best[0])
    if not best and (bare := bare_tensors(part.node)) is not None:
        return bare
    if best:
        also = [item for item in lesser if item.is_module]
        names = [joined(part.path, item.path) for item in (*best, *also)]
        raise AmbiguousStateDict(
            f"holds {len(names)} state dicts: {listed_parts(names)}",
            path=path,
            hint=choice_of_parts(names),
        )
    raise _no_state_dict(part, surveyed, only, path)


def _no_state_dict(
    part: FoundPart, surveyed: Survey, only: str | None, path: PurePath
) -> AmbiguousStateDict:
    """The error about a part without a state dict: what it is instead, and what could be taken."""
    what, hint = "no state dict (a dict of named tensors) was found in it", look_hint(path)
    if type(part.node) in PLAIN:
        what = f"is {spoken(part.node)}, and holds no tensors"
    elif (whose := only_training_state(part.node)) is not None:
        what = f"holds only {whose} state: no weights"
    elif lists := list(_lists_of_tensors(part)):
        hint = choice_of_parts(lists)
    return AmbiguousStateDict(what, path=path, where=only, hint=hint)


def _lists_of_tensors(part: FoundPart) -> Iterator[str]:
    """The paths of the lists of nothing but tensors below a part: averages may be such."""
    for place, node in walk(part.node):
        if place is not None and type(node) in (list, tuple) and bare_tensors(node) is not None:
            yield joined(part.path, place_text(place))


def only_training_state(root: Node) -> str | None:
    """Whose state all tensors of a tree are (``an optimizer's``); None if some are weights.

    A tensor by itself is nobody's.
    """
    if (
        is_tensor(root)
        or survey(root).holders
        or not any(is_tensor(node) for _, node in walk(root))
    ):
        return None
    labels = {
        key for _, node in walk(root) for key, _ in mapping_pairs(node) or () if type(key) is str
    }
    return "an optimizer's" if "param_groups" in labels else "a training's"


def _loaded_by_framework(root: Node, surveyed: Survey) -> StateDict | None:
    """What the framework that wrote a checkpoint loads, with a note on what else could be meant.

    Not where tensors stand above it: no framework puts weights there.
    """
    producer = producer_in(root)
    if producer is None or producer.loads is None:
        return None
    item = next((item for item in surveyed.candidates if item.path == producer.loads), None)
    if item is None or any(holder.node is root for holder in surveyed.left_by(item)):
        return None
    others = [other.path for other in surveyed.candidates if other is not item]
    return state_dict_at(item, tuple(_framework_notes(producer, root, others)))


def _framework_notes(producer: Producer, root: Node, others: Sequence[str]) -> Iterator[str]:
    name = printable(producer.loads or "")
    what = "the averaged weights" if averages_weights(root) else "the model"
    if others:
        yield (
            f"{name} is taken, where {producer.name} has {what}, not {listed_parts(others)} "
            "(--only PATH takes another)"
        )
    elif averages_weights(root):
        yield f"{name} holds {what}, as {producer.name} saves them"


def _refuse_loss(chosen: Candidate, surveyed: Survey, base: str, path: PurePath) -> None:
    """Refuse a choice that leaves out what somebody may want.

    That is what stands above it, is more than it has, looks like a module's or like a copy of it,
    may be another part of the same model (Megatron nests embedding, encoder and output layer), or
    is an average.
    """
    left = surveyed.left_by(chosen)
    others = [item for item in surveyed.candidates if item is not chosen]
    count = sum(len(holder.labels) for holder in left)
    packed = [
        item
        for item in surveyed.holders
        if item.node is not chosen.node and chosen.holds(item.place, item.node)
    ]
    if (
        count <= chosen.count + sum(len(holder.labels) for holder in packed)
        and not any(
            item.is_module or item.shares_keys(chosen) or _is_beside(item, chosen)
            for item in others
        )
        and not any(_stands_above(holder, chosen) or _is_average(holder) for holder in left)
    ):
        return
    names = [joined(base, item.path) for item in (chosen, *others)]
    examples = _examples(left, base)
    what = (
        f"taking its state dict at {part_text(names[0])} would leave out "
        f"{count_text(count, 'other tensor')}: {examples}"
    )
    raise AmbiguousStateDict(what, path=path, hint=choice_of_parts(names))


def _is_beside(item: Candidate, chosen: Candidate) -> bool:
    """Whether a candidate is under the same label of the root as the chosen, deeper one."""
    labels = labels_of(chosen.place)
    return len(labels) > 1 and labels_of(item.place)[:1] == labels[:1]


def _stands_above(holder: Holder, chosen: Candidate) -> bool:
    """Whether tensors stand in a dict that the candidate's is in, or in a list there."""
    node = holder.node
    if type(node) in (list, tuple) and holder.place is not None:
        node = holder.place[2]
    return any(place[2] is node for place in chain_of(chosen.place))


def _is_average(holder: Holder) -> bool:
    labels = [*holder.labels, *(place[1] for place in chain_of(holder.place))]
    return any(type(label) is str and names_average(label) for label in labels)


def _examples(left: Sequence[Holder], base: str) -> str:
    places = [
        place_text((holder.place, label, holder.node))
        for holder in left
        for label in holder.labels[:_LISTED]
    ]
    return first_few([f"{base}.{name}" if base else name for name in places], 3)
