"""Whole modules in a tree (`torch.save(model)`): each becomes the state dict that
`model.state_dict()` would give, and what it holds besides is refused, or listed as left out. And
tensors of torch before 0.4, which only the state that is set on them makes tensors.

The class of a module is never needed: its pickled state names its parameters, buffers and children.
Source of the names and their order: `torch.nn.Module.state_dict` (torch/nn/modules/module.py). What
only the class's code knows (`get_extra_state`, hooks that rename) cannot be had.

`model.state_dict()` leaves attributes out, unless the class, or a hook, writes them into it; the
code that would is not in the file. So a tensor outside (a `Stray`) is harmless where the classes
are known not to do that, and the reason for a refusal where they are not.

An old tensor was pickled as its class, called without arguments, and a state; a `Parameter` as its
class over a tensor. What a call is can so be told only when its stream was read to the end. Source:
`Tensor.__setstate__` (torch/_tensor.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptconv.objects.encodings import LEAVES
from ckptconv.objects.pickled_modules import (
    Parts,
    Saved,
    child_modules,
    is_module,
    other_attributes,
    own_tensors,
    saved_by_class,
    saved_tensors,
    saving_hooks,
    state_dict_of,
)
from ckptconv.objects.torch_read import Window, tensor_of_storage
from ckptconv.pickles.nodes import ABSENT, Call, Dict, Node, children, spoken, substituted
from ckptconv.support.errors import RefusedObject
from ckptconv.support.records import NamedTuple
from ckptconv.support.text import first_few, first_few_in_short
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef, view_identity
from ckptconv.tree.checkpoint import Checkpoint, Stray
from ckptconv.tree.settling import Skipped, Unknown
from ckptconv.tree.walk import WHOLE_FILE, is_tensor, label_text, place_text, tensor_of, walk

_LISTED = 3
_REFUSED = 4  # strays that an error names


def holds_modules(calls: Iterable[Call]) -> bool:
    """Whether some of the calls of a tree are whole modules."""
    return any(map(is_module, calls))


def flatten_modules(checkpoint: Checkpoint, calls: Iterable[Call] | None = None) -> Checkpoint:
    """The checkpoint with a state dict in the place of every module that holds tensors, and a note
    that says so; the tree of the given one stays as it is.

    `calls` are those of its tree, where they are known and nobody has looked for modules yet.
    """
    has_modules = checkpoint.has_whole_modules
    if calls is not None:
        has_modules = holds_modules(calls)
    if not has_modules:
        return checkpoint
    stand_ins: dict[int, Node] = {}
    classes: list[str] = []
    names: list[str] = []
    holders: list[Node] = []
    strays: list[Stray] = []
    parts: list[Node] = []
    for place, node in walk(checkpoint.root, stand_ins):
        if type(node) is Call and is_module(node):
            made = state_dict_of(node, lambda one: Parts(saved_tensors(one), child_modules(one)))
            if made.pairs:
                stand_ins[id(node)] = made
                classes.append(node.name)
                path = place_text(place)
                names.append(f"{node.name} at {path or 'the root'}")
                found, used = strays_of(node, made)
                strays += [
                    replace(stray, path=f"{path}.{stray.path}".strip(".")) for stray in found
                ]
                parts += used
                continue
        holders.append(node)
    if not names:
        return checkpoint
    root = substituted(checkpoint.root, stand_ins, holders)
    return replace(
        checkpoint,
        root=root,
        notes=(*checkpoint.notes, *_notes(names, strays)),
        modules=len(names),
        has_whole_modules=False,
        module_classes=tuple(classes),
        module_strays=tuple(strays),
        module_parts=tuple(parts),
    )


def _notes(names: Sequence[str], strays: Sequence[Stray]) -> Iterator[str]:
    count = "1 whole module is read as its state dict"
    if len(names) > 1:
        count = f"{len(names)} whole modules are read as their state dicts"
    yield f"{count}: {first_few_in_short(names, _LISTED)}"
    paths = [stray.path or "the root" for stray in strays if stray.is_refused]
    if paths:
        listed = first_few_in_short(paths, _LISTED)
        yield f"its state dict may lack tensors outside parameters and buffers: {listed}"


# -------------------------------------------------------------------- what a module holds besides


# Classes of these packages save parameters and buffers only: torch 2.13, torchvision 0.29, timm
# 1.0, ultralytics 8.4, transformers 5.23 define no `_save_to_state_dict`, `state_dict` or hook for
# a model, but for those below
_ORDINARY = re.compile(
    r"(?:torch\.nn|torchvision|timm|ultralytics\.nn|transformers\.(?:models|modeling_\w+))\."
).match
# torch's quantized layers, with packed weights, scales and zero points (torch/ao/nn/quantized)
_QUANTIZED = re.compile(r"torch\.(?:ao\.)?nn\.(?:\w+\.)*quantized\.").match
# Attributes that YOLOv5's classes set and do not save (models/yolo.py, train.py). Their module is
# named like many others
_PLAIN_ATTRIBUTES = {
    "models.yolo.Model": {"stride", "class_weights"},
    "models.yolo.DetectionModel": {"stride", "class_weights"},
    "models.yolo.Detect": {"stride", "grid", "anchor_grid"},
}
# it writes a version into the metadata
_KNOWN_HOOKS = ("torch.nn.utils.spectral_norm.SpectralNormStateDictHook",)
# its hook takes the wrapper off the keys
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper."
# Endings of the parameters of which weight norm, or spectral norm and pruning, make the attribute
# again (torch/nn/utils)
_FROM_OTHERS = (("_g", "_v"), ("_orig",))


class _Registered(NamedTuple):
    """A module that `state_dict()` meets: its path; if it, and those above, save no more."""

    path: str
    module: Call
    is_ordinary: bool
    beside: Saved | None


def strays_of(module: Call, made: Call) -> tuple[tuple[Stray, ...], tuple[Node, ...]]:
    """What `made`, the state dict of a whole module, does not hold of it: tensors, each once, and
    code that may save some. And the tensors that it holds in another form.
    """
    registered = list(_registered(module))
    covered = _Covered([value for _, value in made.pairs])
    used = [ref for item in registered if item.beside for ref in item.beside.used]
    covered.add(used)
    finder = _Finder(made, covered, {id(item.module) for item in registered})
    found: list[Stray] = []
    # what both hold counts for the one that may save it
    for item in sorted(registered, key=lambda item: item.is_ordinary):
        found += _saving_code(item, made)
        found += finder.strays(item)
    return tuple(found), tuple(used)


def _registered(root: Call) -> Iterator[_Registered]:
    seen = {id(root)}
    work = [("", root, True)]
    while work:
        path, module, above = work.pop()
        is_known = module.name in _PLAIN_ATTRIBUTES
        is_known |= _ORDINARY(module.name) is not None and not _QUANTIZED(module.name)
        is_ordinary = above and is_known
        yield _Registered(path, module, is_ordinary, saved_by_class(module))
        for name, child in reversed(child_modules(module)):
            if id(child) not in seen:
                seen.add(id(child))
                work.append((f"{path}.{name}".strip("."), child, is_ordinary))


def _saving_code(item: _Registered, made: Call) -> Iterator[Stray]:
    """Hooks that change what the module saves, and a class known to save more than is seen."""
    name = item.module.name
    if _QUANTIZED(name):
        why = f"a quantized module ({name}), which saves more than its parameters and buffers"
        yield Stray(item.path, why, True, made)
    for hook in saving_hooks(item.module):
        code = spoken(hook).removeprefix("an object of ")
        if code not in _KNOWN_HOOKS and not name.startswith(_WRAPPER):
            why = f"a module ({name}) with a hook that changes what it saves ({code})"
            yield Stray(item.path, why, True, made)


class _Covered:
    """The tensors that a state dict holds, and those whose bytes lie within theirs."""

    def __init__(self, values: Iterable[Node]) -> None:
        self._views: set[object] = set()
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._nodes = {id(value) for value in values}
        self.add(ref for value in values if (ref := tensor_of(value)) is not None)

    def add(self, refs: Iterable[TensorRef]) -> None:
        for ref in refs:
            self._views.add(view_identity(ref))
            if ref.is_view and ref.is_dense():
                self._spans.setdefault(id(ref.storage), []).append(ref.byte_span())

    def __contains__(self, node: Node) -> bool:
        ref = tensor_of(node)
        if ref is None:
            return id(node) in self._nodes
        if not ref.numel or view_identity(ref) in self._views:
            return True
        return ref.is_view and self._is_within(ref)

    def _is_within(self, ref: TensorRef) -> bool:
        start, stop = ref.byte_span()
        for first, last in sorted(self._spans.get(id(ref.storage), ())):
            if first <= start:
                start = max(start, last)
        return start >= stop


class _Finder:
    """Looks for tensors in the attributes of modules; each node is looked at once."""

    def __init__(self, made: Call, covered: _Covered, registered: set[int]) -> None:
        self._made = made
        self._covered = covered
        self._seen = registered

    def strays(self, item: _Registered) -> Iterator[Stray]:
        """The tensors that hang in attributes of a module, and its buffers that are not saved."""
        names = set()
        for kind, name, value, is_saved in own_tensors(item.module):
            names.add(name)
            path = f"{item.path}.{name}".strip(".")
            if not is_saved and value not in self._covered:
                self._seen.add(id(value))
                self._covered.add(ref for ref in (tensor_of(value),) if ref is not None)
                why = "a buffer that its module does not save (persistent=False)"
                yield Stray(path, why, False, self._made, value)
            if type(value) is TensorObject:
                yield from self._inside(item, path, value.state, "")
            elif kind == "_parameters" and type(value) is Call:
                yield from self._inside(item, path, list(value.args[1:]), "")
        for name, value in other_attributes(item.module):
            if type(value) in _HOLDERS:
                path = f"{item.path}.{name}".strip(".")
                made_of = any(all(name + end in names for end in ends) for ends in _FROM_OTHERS)
                yield from self._inside(item, path, value, name, made_again=made_of)

    def _inside(
        self, item: _Registered, path: str, node: Node, name: str, *, made_again: bool = False
    ) -> Iterator[Stray]:
        reason, is_refused = _judged(item, name)
        if made_again:
            reason, is_refused = "an attribute that is made again from the parameters", False
        work = [(path, node)]
        while work:
            path, node = work.pop()
            if id(node) in self._seen or type(node) not in _HOLDERS:
                continue
            self._seen.add(id(node))
            if type(node) in LEAVES or is_tensor(node):
                if node not in self._covered:
                    yield Stray(path, reason, is_refused, self._made, node)
                if type(node) is TensorObject:
                    work.append((path, node.state))
            else:
                inner = [pair for pair in children(node) if type(pair[1]) in _HOLDERS]
                work += [(_joined(path, label), child) for label, child in reversed(inner)]


_HOLDERS = frozenset((*LEAVES, Call, Dict, list, tuple))
_BETWEEN = ("_parameters", "_buffers", "_modules")


def _joined(path: str, label: Node) -> str:
    """The path of an attribute; how an object is pickled does not show in it."""
    text = label_text(label)
    return path if text in _BETWEEN or text.startswith("<") else f"{path}.{text}"[-_LONGEST:]


_LONGEST = 300  # characters of a path


def _judged(item: _Registered, name: str) -> tuple[str, bool]:
    """What to say of a tensor in attribute `name` (empty: a parameter's), and if it is refused."""
    cls = item.module.name
    if item.beside is not None:
        return f"an attribute that {cls} does not save", False
    if item.is_ordinary and name in _PLAIN_ATTRIBUTES.get(cls, {name}):
        return "an attribute of a module, which its state dict does not hold", False
    what = f"a tensor outside the parameters and buffers of {cls}"
    return f"{what}, and only its code knows whether it is saved", True


# ------------------------------------------------------------------------ refused, or left out


def settle_strays(checkpoint: Checkpoint, part: Node, unknown: Unknown) -> tuple[Skipped, ...]:
    """What is left out of the state dicts of whole modules in `part` of a checkpoint.

    Raises `RefusedObject` where something would be lost of which only a module's own code knows
    whether it is saved, unless `unknown` is ``drop``.
    """
    if not checkpoint.module_strays:
        return ()
    there = {id(node) for _, node in walk(part)}
    strays = [stray for stray in checkpoint.module_strays if id(stray.state_dict) in there]
    refused = [stray for stray in strays if stray.is_refused]
    if refused and unknown != "drop":
        raise _refusal(refused, script=checkpoint.container.is_script)
    return tuple(Skipped(stray.path, f"left out: {stray.reason}", stray.node) for stray in strays)


def _refusal(refused: Sequence[Stray], *, script: bool) -> RefusedObject:
    first, others = refused[0], [stray.path or "the root" for stray in refused[1:]]
    what = f"{first.reason}; the state dict would lack it"
    if others:
        what += f" (and {len(others)} more: {first_few(others, _REFUSED)})"
    hint = _OF_SCRIPTS if script else _OF_MODULES
    return RefusedObject(what, where=first.path or WHOLE_FILE, hint=hint)


_OF_SCRIPTS = "--unknown drop leaves it out; torch.jit.load reads the archive itself"
_OF_MODULES = (
    "save model.state_dict() where the class is installed; --unknown drop leaves it out, "
    "--unknown keep keeps the whole module in a torch file"
)


# -------------------------------------------------------------------- tensors of torch before 0.4


_TENSOR_CLASS = re.compile(
    r"torch\.(?:cuda\.)?\w*Tensor|torch\.(?:_tensor|tensor)\.Tensor"
).fullmatch
_VARIABLES = ("torch.autograd.variable.Variable", "torch.autograd.Variable")
_PARAMETER = "torch.nn.parameter.Parameter"


def complete_tensors(checkpoint: Checkpoint, calls: Sequence[Call]) -> Checkpoint:
    """The checkpoint with tensors in the place of those of its calls that make one; the same one
    where there are none.

    Raises `MalformedCheckpoint` where such a tensor reaches beyond its storage.
    """
    stand_ins: dict[int, Node] = {}
    for kind in (_from_state, _wrapped):  # a Parameter is made of a tensor
        for call in calls:
            made = kind(call, stand_ins)
            if made is not None:
                stand_ins[id(call)] = made
    if not stand_ins:
        return checkpoint
    return replace(checkpoint, root=substituted(checkpoint.root, stand_ins))


def _from_state(call: Call, _: dict[int, Node]) -> TensorRef | None:
    """`torch.FloatTensor()` with the state (storage, offset, shape, stride)."""
    match call.state:
        case (Storage() | Window() as storage, offset, shape, stride) if (
            type(call.state) is tuple and not call.args
        ):
            if _TENSOR_CLASS(call.name):
                return tensor_of_storage(storage, offset, _size(shape), _size(stride))
    return None


def _size(node: Node) -> Node:
    """A shape; it may stand as a `torch.Size`."""
    match node:
        case Call(name="torch.Size", args=(size,)):
            return size
    return node


def _wrapped(call: Call, tensors: dict[int, Node]) -> TensorRef | TensorObject | None:
    """A `Parameter` or `Variable` over a tensor.

    The tensor is the argument, and the state (requires_grad, volatile, hooks), if there is one;
    before torch 0.2 all is state: (tensor, gradient, hooks, requires_grad, volatile).
    """
    is_parameter = call.name == _PARAMETER
    if not is_parameter and call.name not in _VARIABLES:
        return None
    args, state = call.args, () if call.state is ABSENT else call.state
    if type(state) is not tuple:
        return None
    requires_grad: Node = args[1] if len(args) > 1 else is_parameter
    if len(state) == 5:
        args, requires_grad = state[:1], state[3]
    elif len(state) == 3:
        requires_grad = state[0]
    inner = tensors.get(id(args[0]), args[0]) if args else None
    if type(inner) is not TensorRef:
        return None
    # before 0.4 any type could
    ref = inner._replace(requires_grad=requires_grad is True and inner.dtype.is_differentiable)
    return TensorObject(ref) if is_parameter else ref
