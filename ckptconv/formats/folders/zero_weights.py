"""The weights of a step of DeepSpeed's ZeRO as one state dict: the joined parameters, and what only
the model states hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptconv.formats.folders.zero import WHOLE, each_shape, entries, join_fragments, read_shapes
from ckptconv.pickles.nodes import ABSENT, Call, Node, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, printable
from ckptconv.tensors.computed import Widener
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.walk import tensor_of


class Weights:
    """The joined state dict of a step: what `zero_to_fp32` gives, in its order, and behind that
    what only `module` holds.
    """

    def __init__(self, states: Sequence[Mapping[str, Node]], stage: int) -> None:
        """`states` are the model states of rank 0 and, where stage 3 has frozen parameters, of all
        ranks.
        """
        self._states = states
        self._stage = stage
        self._widened = Widener(BY_NAME["float32"])
        self._found: dict[str, Node] = {}
        self.notes: tuple[str, ...] = ()

    def join(self, parameters: Iterable[tuple[str, TensorRef]]) -> Node:
        """The state dict, with the `_metadata` of the module's."""
        states = self._states[0]
        self._add_buffers(states)
        self._add_frozen(states)
        self._found.update((name, self._widened(ref)) for name, ref in parameters)
        for name, kept in mapping_pairs(states.get("shared_params")) or ():
            if type(name) is str and type(kept) is str and kept in self._found:
                self._found[name] = self._found[kept]
        self._add_others(states["module"])
        made = ordered_dict(list(self._found.items()))
        made.state = states["module"].state if type(states["module"]) is Call else ABSENT
        return made

    def _add_buffers(self, states: Mapping[str, Node]) -> None:
        names: Node = states.get("buffer_names")
        listed = names if type(names) in (list, tuple) else ()
        buffers = {name for name in listed if type(name) is str}
        for name, value in entries(states["module"]).items():
            ref = tensor_of(value) if name in buffers else None
            if ref is not None:
                self._found[name] = self._widened(ref)

    def _add_frozen(self, states: Mapping[str, Node]) -> None:
        shapes = states.get("frozen_param_shapes")
        fragments = [entries(of_rank.get("frozen_param_fragments")) for of_rank in self._states]
        groups = read_shapes(shapes, "frozen_param_shapes") if shapes is not None else []
        for name, shape in each_shape(groups):
            if any(name not in of_rank for of_rank in fragments):
                what = "a frozen parameter has a shape, but no values"
                raise MalformedCheckpoint(what, where=name, hint=WHOLE)
            shares = [of_rank[name] for of_rank in fragments]
            is_cut = self._stage == 3
            ref = join_fragments(shares, shape, name) if is_cut else tensor_of(shares[0])
            if ref is None or ref.shape != shape:
                what = "the values of a frozen parameter do not have its shape"
                raise MalformedCheckpoint(what, where=name)
            # in the type that it was loaded in: no optimizer has an fp32 copy of it
            self._found[name] = ref

    def _add_others(self, module: Node) -> None:
        """What only the module holds: extra states, the frozen parameters of stage 1."""
        values = entries(module)
        others = [name for name in values if name not in self._found]
        empty = {name for name in others if self._is_placeholder(values[name])}
        kept = {name: values[name] for name in others if name not in empty}
        if empty:
            told = "without values in any file, so they are left out"
            self.notes += (f"{told}: {_some(sorted(empty))}",)
        if kept:
            told = "not in a partition, so they are taken from the model states"
            self.notes += (f"{told}: {_some(list(kept))}",)
        for name, value in kept.items():
            ref = tensor_of(value)
            self._found[name] = value if ref is None else self._widened(ref)

    def _is_placeholder(self, value: Node) -> bool:
        ref = tensor_of(value)
        return self._stage == 3 and ref is not None and not ref.numel


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return printable(", ".join(names[:3])) + more
