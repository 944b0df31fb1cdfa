"""DeepSpeed's universal checkpoints: a folder for each parameter.

``zero/NAME/`` has ``fp32.pt`` with the weight and a file for each of its states (``exp_avg.pt``,
``step.pt``, …); ``zero/optimizer_state.pt`` has the groups of parameters. From stages 1 and 2 a
file holds ``{"param": tensor, "cat_dim": …}``, from stage 3 a flat tensor, whose shape the model
states beside tell, and no step. Buffers, frozen parameters and all else are in the model states.
Source: deepspeed/checkpoint/ds_to_universal.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckptconv.formats.folders.ranks import varies
from ckptconv.formats.folders.zero import Shapes, contradiction
from ckptconv.formats.folders.zero_optimizer import PlainGroup, kept_beside, own_number, read_groups
from ckptconv.io.location import Location
from ckptconv.pickles.nodes import Node, entries, mapping_pairs
from ckptconv.support.errors import MalformedCheckpoint, errors_at, printable
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import dataclass
from ckptconv.tensors.refs import Shape, TensorRef
from ckptconv.tensors.stream import iter_chunks, verbatim_range
from ckptconv.tensors.views import reshaped
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.optimizer_states import SHAPED, ParamGroup, named_optimizer, read_number
from ckptconv.tree.walk import tensor_of

OpenFile = Callable[[Location], Checkpoint]

_WEIGHT = "fp32"
_GROUPS = "optimizer_state.pt"


def zero_folder(folder: Location) -> Location | None:
    """The folder of the parameters, if `folder` is a universal checkpoint's or is itself that."""
    zero = folder if folder.name == "zero" else folder.child("zero")
    if zero.is_folder() and any(item.child(f"{_WEIGHT}.pt").is_file() for item in zero.list()):
        return zero
    return None


@dataclass(frozen=True, slots=True)
class Universal:
    """What lies under ``zero``: the weights by name, what the optimizer keeps of each, its groups,
    what is beside these, and all opened files.
    """

    weights: Mapping[str, TensorRef]
    states: Mapping[str, Mapping[str, Node]]
    groups: Sequence[PlainGroup]
    beside: Mapping[str, Node]
    opened: Sequence[Checkpoint]

    def held(self, name: str, key: str) -> Node:
        """What a file holds."""
        return self.weights[name] if key == _WEIGHT else self.states.get(name, {}).get(key)

    def has_moved(self, *names: str) -> bool:
        """Whether the weights of parameters are not those any more that they began with: of a
        warm-up, the first step may have the rate 0.
        """
        steps = [read_number(self.states.get(name, {}).get("step")) for name in names]
        rates = [read_number(settings.get("lr")) for settings, _ in self.groups]
        return all(step is not None and step > 1 for step in steps) and all(rates)

    def optimizer(self, shapes: Sequence[Shapes]) -> Node | None:
        """The optimizer's states; `shapes` are the parameters of each partition. None where it is
        not told which parameters a group has, and in which order.
        """
        named = [list(group) for group in shapes]
        # the names of folders have no order, and those who number parameters would make one of it
        if not self.states.keys() <= {name for group in named for name in group}:
            return None
        if len(named) == 1 and len(self.groups) == 1:
            return named_optimizer(self.states, [ParamGroup(self.groups[0][0], list(self.states))])
        if any(number >= len(named) for _, numbers in self.groups for number in numbers):
            return None
        kept = self.states.keys()
        return named_optimizer(
            self.states,
            [
                ParamGroup(given, [name for at in numbers for name in named[at] if name in kept])
                for given, numbers in self.groups
            ],
        )


def read_universal(
    zero: Location, shapes: Sequence[Shapes], module: Mapping[str, Node], open_file: OpenFile
) -> Universal:
    """What the files under `zero` say; `shapes` are those of the parameters that the model states
    name, and `module` their own weights, in the type of the training.

    Raises `MalformedCheckpoint` where a file does not hold one tensor of its parameter's shape, or
    is a copy of another one's.
    """
    known = {name: shape for group in shapes for name, shape in group.items()}
    opened: list[Checkpoint] = []
    weights: dict[str, TensorRef] = {}
    states: dict[str, dict[str, Node]] = {}
    folders = sorted((item for item in zero.list() if item.is_folder()), key=lambda item: item.name)
    refuse_beyond("shards", len(folders), f"has {len(folders)} parameters", where="zero")
    order = {name: at for at, name in enumerate(known)}
    # that of the model states: the order of the names of folders would be taken for it
    folders.sort(key=lambda item: order.get(item.name, len(order)))
    for folder in folders:
        found = dict(_of_parameter(folder, known.get(folder.name), open_file, opened))
        if (weight := found.pop(_WEIGHT, None)) is None:
            raise contradiction(f"has no {_WEIGHT}.pt, which holds the weight", path=folder)
        weights[folder.name] = weight
        _require_shapes(folder, weight, found)
        if found:
            states[folder.name] = found
    universal = Universal(weights, states, (), {}, opened)
    universal = _with_groups(zero.child(_GROUPS), universal, shapes, open_file)
    _refuse_copies(zero, universal, module)
    return universal


def _of_parameter(
    folder: Location, shape: Shape | None, open_file: OpenFile, opened: list[Checkpoint]
) -> Iterator[tuple[str, Node]]:
    files = sorted(folder.list(), key=lambda item: item.name)
    for file in files:
        if not file.name.endswith(".pt") or not file.is_file():
            continue
        checkpoint = open_file(file)
        # without its tree: there are thousands of files, of which only the bytes are needed later
        opened.append(replace(checkpoint, root=None))
        key = file.name.removesuffix(".pt")
        with errors_at(path=file):
            value = _value(checkpoint.root, shape)
            yield key, value


def _value(root: Node, shape: Shape | None) -> Node:
    """The tensor of a file, in the shape of its parameter, or a plain number."""
    value = entries(root).get("param", root)
    if type(value) in (int, float):
        return value
    ref = tensor_of(value)
    if ref is None:
        raise MalformedCheckpoint("holds no tensor (a dict with 'param', or a tensor alone)")
    if value is not root or not ref.shape:
        return ref
    if shape is None:
        what = "is flat, and no model states beside it tell its shape"
        raise MalformedCheckpoint(what, hint="fetch *_model_states.pt of the same folder")
    if len(ref.shape) != 1 or ref.numel != prod(shape) or verbatim_range(ref) is None:
        what = f"does not have the {prod(shape)} elements of its parameter in one flat run"
        raise contradiction(what)
    return reshaped(ref, shape, ref.storage.name)


def _require_shapes(folder: Location, weight: Node, states: Mapping[str, Node]) -> None:
    shape = weight.shape if type(weight) is TensorRef else None
    for key, value in states.items():
        has = value.shape if type(value) is TensorRef else ()
        known = {(), shape}
        if key in SHAPED:
            known = {shape}
        elif key == "step":
            known = {()}
        if shape is None or has not in known:
            raise contradiction(f"{key} does not have the shape of the weight", path=folder)


_AGAIN = "fetch both again"
_FEW = 16  # elements: so many that vary are not equal by chance
_NO_SIGN = bytes(range(128)) * 2  # for bytes.translate: without the highest bit


def _refuse_copies(zero: Location, found: Universal, module: Mapping[str, Node]) -> None:
    """Raise `MalformedCheckpoint` where a file was copied over that of another parameter.

    Equal values alone do not tell: the moments of two biases that are added (LSTM) are equal, and
    the weights of layers that start as copies. One of several files that is equal does: no other
    weight has the same first moment and not the same second one. So do weights that are equal in
    float32 and differ in the type of the training: that tells of whole folders.
    """
    known: dict[object, tuple[str, str]] = {}
    for name in found.weights:
        for key in (_WEIGHT, *_MOMENTS):
            mark = _mark(found.held(name, key))
            if mark is None:
                continue
            other = known.setdefault(mark, (name, key))
            if other != (name, key) and _is_copy(found, module, (name, key), other):
                first = zero.child(other[0]).child(f"{other[1]}.pt")
                what = f"has the values of {printable(first)}: one was copied over the other"
                path = zero.child(name).child(f"{key}.pt")
                raise MalformedCheckpoint(what, path=path, hint=_AGAIN)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _mark(ref: Node) -> tuple[object, ...] | None:
    """What is equal for equal files of many elements, and for nearly no others; None: unknown."""
    if type(ref) is not TensorRef or ref.numel < _FEW or verbatim_range(ref) is None:
        return None
    is_whole = ref.storage.crc32 is not None and ref.nbytes == ref.storage.nbytes
    return (ref.dtype, ref.numel, ref.storage.crc32) if is_whole else None


def _is_copy(
    found: Universal, module: Mapping[str, Node], one: tuple[str, str], other: tuple[str, str]
) -> bool:
    """Whether two files that seem equal are what no training makes."""
    (name, key), (before, kind) = one, other
    first, second = ([found.held(of, moment) for of in (name, before)] for moment in _MOMENTS)
    if key == kind == _WEIGHT:
        is_told = _differ(*first) and found.has_moved(name, before)
        if not is_told and not _differ(*(_rounded(found, module, of) for of in (name, before))):
            return False
    if key == kind == "exp_avg" and not _differ(*second):
        return False
    if key == kind == "exp_avg_sq" and not (_differ(*first) and _differ_in_size(*first)):
        return False
    ref, its = found.held(*one), found.held(*other)
    return varies(ref) and all(map(bytes.__eq__, _chunks(ref), _chunks(its)))


def _rounded(found: Universal, module: Mapping[str, Node], name: str) -> Node:
    """What the weight of a parameter was rounded to, in the type of the training."""
    ref = tensor_of(module.get(name))
    if ref is None or not ref.dtype.is_floating or ref.shape != found.weights[name].shape:
        return None
    return ref


def _differ(one: Node, other: Node) -> bool:
    """Whether two tensors of one type are known to be different ones."""
    ours, its = _mark(one), _mark(other)
    return ours is not None and its is not None and ours[0] is its[0] and ours != its


def _differ_in_size(one: TensorRef, other: TensorRef) -> bool:
    """Whether values of two tensors differ in more than their signs: what is subtracted has the
    gradients of what it is subtracted from, negated, and their squares.
    """
    for pair in zip(_chunks(one), _chunks(other), strict=True):
        sizes = [bytearray(chunk) for chunk in pair]
        for raw in sizes:
            # little-endian: the last byte of each number has its sign
            ends = slice(one.dtype.itemsize - 1, None, one.dtype.itemsize)
            raw[ends] = raw[ends].translate(_NO_SIGN)
        if sizes[0] != sizes[1]:
            return True
    return False


def _chunks(ref: TensorRef) -> Iterator[bytes]:
    return map(bytes, iter_chunks(ref))


def _with_groups(
    file: Location, found: Universal, shapes: Sequence[Shapes], open_file: OpenFile
) -> Universal:
    """The same with what ``optimizer_state.pt`` says, and, of stage 3, the step that stands
    there.
    """
    if not file.is_file():
        return found
    checkpoint = open_file(file)
    said = entries(checkpoint.root)
    inner = entries(said.get("optimizer_state_dict"))
    groups: Node = said.get("param_groups", inner.get("param_groups"))
    with errors_at(path=file):
        read = read_groups(groups, "param_groups")
        states = _with_step(found.states, inner.get("state"), shapes)
    return replace(
        found,
        states=states,
        groups=read,
        beside=dict(kept_beside(said)),
        opened=[*found.opened, replace(checkpoint, root=None)],
    )


def _with_step(
    states: Mapping[str, Mapping[str, Node]], numbered: Node, shapes: Sequence[Shapes]
) -> Mapping[str, Mapping[str, Node]]:
    """States without a step of their own with that of their group."""
    steps = {
        number: entries(state).get("step")
        for number, state in mapping_pairs(numbered) or ()
        if type(number) is int
    }
    where = {name: at for at, group in enumerate(shapes) for name in group}
    made: dict[str, Mapping[str, Node]] = {}
    for name, state in states.items():
        step = steps.get(where.get(name, 0))
        if step is not None and "step" not in state:
            state = {**state, "step": own_number(step, "step")}
        made[name] = state
    return made
