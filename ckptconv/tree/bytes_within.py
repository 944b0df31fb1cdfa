"""Checkpoints that lie as bytes in a tree: whatever is taken for the model, their tensors are lost.

skorch pickles its module into such bytes (`__cuda_dependent_attributes__` in its state), RLlib the
state of each worker. Source: `NeuralNet.__getstate__` in skorch/net.py.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from ckptconv.pickles.nodes import Node
from ckptconv.support.errors import AmbiguousStateDict
from ckptconv.tree.labels import names_training_state
from ckptconv.tree.walk import CONTAINERS, holds_only_tensors, inner, is_tensor, place_text, walk

# an archive; a pickle, also in front of torch's older files; the length of a header of safetensors
_BEGINS = re.compile(
    rb'PK\x03\x04(?=.{60})|\x80[\x02-\x05](?=.*(?:torch|numpy))|.{5}\0{3}\{"', re.DOTALL
).match


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
