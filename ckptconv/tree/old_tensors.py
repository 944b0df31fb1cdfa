"""Tensors of torch before 0.4, which only the state that is set on them makes tensors.

A tensor was pickled as its class, called without arguments, and a state; a `Parameter` as its class
over a tensor. What a call is can so be told only when its stream was read to the end. Source:
`Tensor.__setstate__` (torch/_tensor.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckptconv.objects.torch_read import Window, tensor_of_storage
from ckptconv.pickles.nodes import ABSENT, Call, Node, substituted
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef
from ckptconv.tree.checkpoint import Checkpoint

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
