"""Whether a value that is not a tensor holds some: in tuples and dicts, in the arguments and states
of objects.
"""

from __future__ import annotations

from ckptconv.objects.plain import is_array
from ckptconv.objects.torch_read import Window, is_tensor_call
from ckptconv.pickles.nodes import Call, Dict, Node, PersistentId, children
from ckptconv.tensors.refs import Storage, TensorObject, TensorRef

LEAVES = (TensorRef, TensorObject, Storage, Window)
_HOLDERS = frozenset((*LEAVES, Call, Dict, list, tuple, PersistentId))


def holds_tensors(value: Node) -> bool:
    """Whether a tensor, a storage or an array of numbers is somewhere in a value.

    A tensor itself holds what its state does.
    """
    seen: set[int] = set()
    work = [value.state if type(value) is TensorObject else value]
    while work:
        node = work.pop()
        if type(node) not in _HOLDERS or id(node) in seen:
            continue
        if type(node) in LEAVES or is_tensor_call(node) or is_array(node):
            return True
        seen.add(id(node))
        work += [child for _, child in children(node) if type(child) in _HOLDERS]
    return False
