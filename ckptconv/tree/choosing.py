"""Which of the state dicts in a checkpoint is taken, where none is named; and what that loses.

Of checkpoints that lie as bytes in a tree the tensors are lost, whatever is taken for the model:
skorch pickles its module into such bytes (`__cuda_dependent_attributes__` in its state), RLlib the
state of each worker. Source: `NeuralNet.__getstate__` in skorch/net.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from ckptconv.pickles.nodes import Call, Node, mapping_pairs, spoken
from ckptconv.support.errors import AmbiguousStateDict, printable
from ckptconv.support.text import count_text, first_few, look_hint, part_text
from ckptconv.tree.candidates import Candidate, Holder, Survey, is_random_state, survey
from ckptconv.tree.labels import (
    Producer,
    averages_weights,
    is_bare,
    names_average,
    names_training_state,
    producer_in,
)
from ckptconv.tree.state_dicts import (
    _LISTED,
    FoundPart,
    StateDict,
    bare_tensors,
    choice_of_parts,
    joined,
    listed_parts,
    nested_parts,
    nested_state_dict,
    own_of,
    part_at,
    state_dict_at,
)
from ckptconv.tree.walk import (
    CONTAINERS,
    PLAIN,
    holds_only_tensors,
    inner,
    is_tensor,
    labels_of,
    place_text,
    walk,
)

# an archive; a pickle, also in front of torch's older files; the length of a header of safetensors
_BEGINS = partial(
    re.match,
    rb'PK\x03\x04(?=.{60})|\x80[\x02-\x05](?=.*(?:torch|numpy))|.{5}\0{3}\{"',
    flags=re.DOTALL,
)


def refuse_bytes(root: Node, path: PurePath) -> None:
    """Raise `AmbiguousStateDict` for bytes outside of training states that begin like a checkpoint.
    The bytes of an array's values are not such, whatever they are.
    """
    for place, node in walk(root, leaves=False):
        of_values = is_tensor(node) or (place is not None and is_tensor(place[2]))
        if type(node) not in CONTAINERS or of_values or holds_only_tensors(node):
            continue
        for label, value in inner(node):
            is_state = type(label) is str and names_training_state(label)
            if type(value) is bytes and _BEGINS(value) and not is_state:
                where = place_text((place, label, node))
                what = "is a checkpoint in bytes, whose tensors would be left out"
                raise AmbiguousStateDict(what, path=path, where=where, hint=_HINT)


_HINT = (
    "save the weights by themselves where it was written (skorch: net.save_params(f_params=OUT)); "
    "the rest has to be named: --only PATH"
)


def choose_state_dict(root: Node, only: str | None, path: PurePath) -> StateDict:
    """The state dict at `only`, or the model; `AmbiguousStateDict` if that is not clear."""
    part = part_at(root, only, path)
    surveyed = survey(part.node)
    if only is None:
        refuse_bytes(root, path)
        # in an object, such as a replay buffer, arrays of the training may look like a model
        if type(root) is Call and only_training_state(root, surveyed) is not None:
            raise _no_state_dict(part, surveyed, only, path)
        found = _loaded_by_framework(root, surveyed, path)
    else:
        found = nested_state_dict(part)
    found = found or _chosen(part, surveyed, only, path)
    return replace(found, is_bare=is_bare(root, joined(part.path, found.path)))


def _chosen(part: FoundPart, surveyed: Survey, only: str | None, path: PurePath) -> StateDict:
    if part.own_only:
        return own_of(part, surveyed, path)
    best, lesser = surveyed.ranked()
    if len(best) == 1:
        _refuse_loss(best[0], surveyed, part, path)
        return state_dict_at(best[0])
    if best:
        also = [item for item in lesser if item.is_module]
        names = [joined(part.path, item.path) for item in (*best, *also)]
        what = f"holds {len(names)} state dicts: {listed_parts(names)}"
        raise AmbiguousStateDict(what, path=path, hint=choice_of_parts(_with_nested(names, part)))
    bare = bare_tensors(part.node)
    if bare is not None and (only or not all(map(is_random_state, bare.values))):
        return bare
    raise _no_state_dict(part, surveyed, only, path)


def _no_state_dict(
    part: FoundPart, surveyed: Survey, only: str | None, path: PurePath
) -> AmbiguousStateDict:
    """The error about a part without a state dict: what it is instead, and what could be taken."""
    what, hint = "no state dict (a dict of named tensors) was found in it", look_hint(path)
    if type(part.node) in PLAIN:
        what = f"is {spoken(part.node)}, and holds no tensors"
    elif (whose := only_training_state(part.node, surveyed)) is not None:
        what = f"holds only {whose} state: no weights"
        hint = "write a .pt, which takes it as it is; in Python load_portable(…, whole=True)"
    elif lists := _paths_of(_is_list_of_tensors, part):  # averages may be such
        hint = choice_of_parts(lists)
    elif type(part.node) in (list, tuple) and surveyed.holders:
        what = f"is a {type(part.node).__name__} whose tensors have no names, and no state dict"
        hint = f"a torch output keeps it as it is; or {choice_of_parts(_paths_of(is_tensor, part))}"
    return AmbiguousStateDict(what, path=path, where=only, hint=hint)


def _is_list_of_tensors(node: Node) -> bool:
    return type(node) in (list, tuple) and bare_tensors(node) is not None


def _paths_of(kind: Callable[[Node], bool], part: FoundPart) -> list[str]:
    inside = (item for item in walk(part.node) if item[0] is not None)
    return [joined(part.path, place_text(place)) for place, node in inside if kind(node)]


def only_training_state(root: Node, surveyed: Survey | None = None) -> str | None:
    """Whose state all tensors of a tree are (``an optimizer's``); None if some are weights.
    `surveyed` is the survey of the tree, where there is one already.

    A tensor by itself is nobody's, but for a random state.
    """
    if is_random_state(root):
        return "a training's"
    if is_tensor(root):
        return None
    if type(root) is Call and root.name.endswith("Buffer"):  # Stable Baselines 3's, and others'
        return "a replay buffer's"
    if (surveyed or survey(root)).holders or not any(is_tensor(node) for _, node in walk(root)):
        return None
    labels = {
        key for _, node in walk(root) for key, _ in mapping_pairs(node) or () if type(key) is str
    }
    return "an optimizer's" if "param_groups" in labels else "a training's"


def _loaded_by_framework(root: Node, surveyed: Survey, path: PurePath) -> StateDict | None:
    """What the framework that wrote a checkpoint loads for inference, with a note on what else
    could be meant.

    Refused where a part beside it, which the framework does not write, holds tensors.
    """
    producer = producer_in(root)
    if producer is None:
        return None
    by_path = {item.path: item for item in surveyed.candidates}
    item = next((by_path[name] for name in producer.loads if name in by_path), None)
    if item is None:
        return None
    _refuse_loss(item, surveyed, FoundPart("", root, own_only=False), path, producer.beside)
    others = [other for other in by_path if other != item.path]
    return state_dict_at(item, tuple(_framework_notes(producer, root, item.path, others)))


def _framework_notes(
    producer: Producer, root: Node, taken: str, others: Sequence[str]
) -> Iterator[str]:
    is_average = names_average(taken) or averages_weights(root)
    what = "the averaged weights" if is_average else "the model"
    if others:
        instead = f"not {listed_parts(others)} (--only PATH takes another)"
        yield f"{printable(taken)} is taken, where {producer.name} has {what}, {instead}"
    elif is_average:
        yield f"{printable(taken)} holds {what}, as {producer.name} saves them"


def _refuse_loss(
    chosen: Candidate,
    surveyed: Survey,
    part: FoundPart,
    path: PurePath,
    beside: frozenset[str] = frozenset(),
) -> None:
    """Refuse a choice that leaves out a tensor which somebody may want, however small it is; what
    stands under the labels `beside` is the framework's own.
    """
    lost = surveyed.lost_by(chosen)
    left = [item for item in lost if beside.isdisjoint(labels_of(item.place)[:1])]
    if not left:
        return
    others = [item for item in surveyed.candidates if item is not chosen]
    names = [joined(part.path, item.path) for item in (chosen, *others)]
    count = sum(len(holder.tensors) for holder in left)
    lost_tensors = f"{count_text(count, 'other tensor')}: {_examples(left, part.path)}"
    what = f"taking its state dict at {part_text(names[0])} would leave out {lost_tensors}"
    raise AmbiguousStateDict(what, path=path, hint=choice_of_parts(_with_nested(names, part)))


def _with_nested(names: Sequence[str], part: FoundPart) -> list[str]:
    """The choices, and the dicts of dicts of tensors that hold several of them."""
    return [*dict.fromkeys((*names, *nested_parts(part)))]


def _examples(left: Sequence[Holder], base: str) -> str:
    places = [
        place_text((holder.place, label, holder.node))
        for holder in left
        for label, _ in holder.tensors[:_LISTED]
    ]
    return first_few([f"{base}.{name}" if base else name for name in places], 3)
