"""The fp32 partitions of ZeRO, joined again: which elements of which rank's flat groups are which
parameter.

Stages 1 and 2 lay the parameters of a group end to end, each followed by its alignment padding if
there is any, and cut that into as many partitions as there are ranks; the last ones may lack what
only filled them up. Stage 3 cuts each parameter into one share per rank, of equal size, the last
ones padded, and each rank lays its shares end to end. Source: deepspeed/utils/zero_to_fp32.py and
deepspeed/runtime/zero (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from ckptconv.objects.torch_read import plain_sizes
from ckptconv.pickles.nodes import ABSENT, Call, Node, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.limits import refuse_beyond
from ckptconv.tensors.computed import Widener
from ckptconv.tensors.dtypes import BY_NAME
from ckptconv.tensors.flat_runs import Flat, Run, shaped
from ckptconv.tensors.refs import Shape, TensorRef, refuse_dimensions
from ckptconv.tree.walk import tensor_of

Shapes = Mapping[str, Shape]
"""The parameters of a group, by name, in the order in which they lie in its partitions."""

_WHOLE = "fetch the whole folder again: its files are from different runs, cut off or damaged"


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one rank's optimizer states hold: the ZeRO `stage`, the number of `ranks`, and its fp32
    partition of each group.

    `paddings` (None: there are none) are by group the elements that lie behind each parameter to
    align the next.
    """

    stage: int
    ranks: int
    groups: tuple[TensorRef, ...]
    paddings: tuple[tuple[int, ...], ...] | None = None


def entries(node: Node) -> dict[str, Node]:
    """The values of a dict by those keys that are text; none for what is not a dict."""
    return {key: value for key, value in mapping_pairs(node) or () if type(key) is str}


# -------------------------------------------------------------------------- what a rank's file says


def read_rank(root: Node) -> RankStates:
    """What the tree of a rank's optimizer states says.

    `MalformedCheckpoint` or `UnsupportedCheckpoint` when it does not.
    """
    states = entries(entries(root).get("optimizer_state_dict"))
    # the bf16 optimizer, which lays out as stage 1 does, names none
    stage = _integer(states.get("zero_stage", 1))
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    where = f"optimizer_state_dict.{key}"
    found: Node = states.get(key)
    if stage not in (1, 2, 3) or type(found) not in (list, tuple):
        raise UnsupportedCheckpoint("holds no fp32 partitions of a known ZeRO stage", where=where)
    groups = tuple(_flat_group(group, f"{where}.{number}") for number, group in enumerate(found))
    paddings = _paddings(states.get("param_alignment_paddings"))
    return RankStates(stage, _rank_count(states.get("partition_count")), groups, paddings)


def _integer(node: Node) -> int:
    """A plain int, or that of an enum's member; -1 for anything else."""
    if type(node) is Call and len(node.args) == 1:
        node = node.args[0]
    return node if type(node) is int else -1


def _flat_group(node: Node, where: str) -> TensorRef:
    ref = tensor_of(node)
    if ref is None or len(ref.shape) != 1:
        hint = "was its optimizer offloaded to NVMe?"
        raise MalformedCheckpoint("a partition is not a flat tensor", where=where, hint=hint)
    return ref


def _paddings(node: Node) -> tuple[tuple[int, ...], ...] | None:
    if node is None:
        return None
    if type(node) not in (list, tuple) or not all(_are_sizes(group) for group in node):
        where = "optimizer_state_dict.param_alignment_paddings"
        raise MalformedCheckpoint("holds something other than sizes", where=where)
    return tuple(tuple(group) for group in node)


def _are_sizes(node: Node) -> bool:
    return type(node) in (list, tuple) and all(
        type(size) is int and 0 <= size < 1 << 63 for size in node
    )


def _rank_count(node: Node) -> int:
    where = "optimizer_state_dict.partition_count"
    counts = {_integer(count) for count in (node if type(node) in (list, tuple) else [node])}
    if len(counts) > 1:
        spread = "its groups are spread over different numbers of ranks (expert parallelism)"
        raise UnsupportedCheckpoint(f"{spread}, which is not read", where=where)
    count = counts.pop() if counts else -1
    if not 1 <= count < 1 << 63:
        raise MalformedCheckpoint("is not a number of ranks", where=where)
    refuse_beyond("shards", count, f"says {count} ranks", where=where)
    return count


def read_shapes(node: Node, where: str) -> list[Shapes]:
    """The shapes of the parameters by group, of a list of dicts or (older releases) one dict."""
    groups = node if type(node) in (list, tuple) else [node]
    found: list[Shapes] = []
    for group in groups:
        pairs = mapping_pairs(group)
        if pairs is None:
            raise MalformedCheckpoint("is not a dict of shapes", where=where)
        found.append({_name(name, where): _shape(size, f"{where}.{name}") for name, size in pairs})
    return found


def _name(node: Node, where: str) -> str:
    if type(node) is not str:
        raise MalformedCheckpoint("names a parameter by something other than text", where=where)
    return node


def _shape(node: Node, where: str) -> Shape:
    sizes = plain_sizes(node)
    if sizes is None or not _are_sizes(sizes):
        raise MalformedCheckpoint("is not a shape", where=where)
    refuse_dimensions(len(sizes), where)
    if prod(size for size in sizes if size) >= 1 << 63:
        raise MalformedCheckpoint("is not a possible shape of a tensor", where=where)
    return sizes


# ------------------------------------------------------------------------------------------ joining


def join_parameters(ranks: Sequence[RankStates], groups: Sequence[Shapes]) -> dict[str, TensorRef]:
    """The parameters of all groups, put together from the partitions of all ranks, in rank order.

    Raises `MalformedCheckpoint` when the partitions are not as long as the shapes ask for.
    """
    counts = {(states.stage, len(states.groups)) for states in ranks}
    if len(counts) > 1:
        raise MalformedCheckpoint("its ranks differ in ZeRO stage or number of groups", hint=_WHOLE)
    if ranks[0].stage == 3:
        return dict(_shares_joined(ranks, groups))
    _require_groups(ranks[0], groups)
    joined = (_group_joined(ranks, number, shapes) for number, shapes in enumerate(groups))
    return dict(chain.from_iterable(joined))


def _require_groups(states: RankStates, groups: Sequence[Shapes]) -> None:
    if len(states.groups) != len(groups):
        what = f"names parameters of {len(groups)} groups, the ranks hold {len(states.groups)}"
        raise MalformedCheckpoint(what, where="param_shapes", hint=_WHOLE)
    if states.paddings is not None and list(map(len, states.paddings)) != list(map(len, groups)):
        what = "does not have one number for each parameter"
        raise MalformedCheckpoint(what, where="param_alignment_paddings", hint=_WHOLE)


def _group_joined(
    ranks: Sequence[RankStates], number: int, shapes: Shapes
) -> Iterator[tuple[str, TensorRef]]:
    """Stages 1 and 2: one group's parameters."""
    flat = Flat([states.groups[number] for states in ranks], f"group {number}")
    paddings = ranks[0].paddings[number] if ranks[0].paddings is not None else (0,) * len(shapes)
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = prod(shape)
        _refuse_beyond(at + numel, flat.numel, name)
        yield name, shaped(flat.runs(at, numel), flat.dtype, shape)
        at += numel + padding
    unit = 2 * len(ranks)  # what the partitions together are filled up to a multiple of
    if -(-at // unit) != -(-flat.numel // unit):
        raise _wrong_sum(at, flat.numel, f"group {number}")


def _shares_joined(
    ranks: Sequence[RankStates], groups: Sequence[Shapes]
) -> Iterator[tuple[str, TensorRef]]:
    """Stage 3: the parameters of all groups, end to end in each rank whatever its groups are."""
    first, *others = (Flat(states.groups, f"rank {rank}") for rank, states in enumerate(ranks))
    for other in others:
        if other.numel != first.numel or other.dtype is not first.dtype:
            raise _wrong_sum(first.numel, other.numel, "fp32_flat_groups")
    at = 0
    for name, shape in _each(groups):
        share = -(-prod(shape) // len(ranks))
        _refuse_beyond(at + share, first.numel, name)
        yield name, shaped(_shares([first, *others], at, prod(shape)), first.dtype, shape)
        at += share
    if at != first.numel:
        raise _wrong_sum(at, first.numel, "fp32_flat_groups")


def _each(groups: Iterable[Shapes]) -> Iterator[tuple[str, Shape]]:
    return ((name, shape) for shapes in groups for name, shape in shapes.items())


def _shares(flats: Sequence[Flat], at: int, numel: int) -> Iterator[Run]:
    """The runs of one parameter's shares, which begin at element `at` in every rank, without the
    padding of the last ones.
    """
    share = -(-numel // len(flats))
    for rank, flat in enumerate(flats):
        yield from flat.runs(at, max(0, min(share, numel - rank * share)))


def join_fragments(fragments: Sequence[Node], shape: Shape, name: str) -> TensorRef:
    """A frozen parameter of stage 3 from the flat share that each rank saved of it."""
    refs = [_flat_group(fragment, name) for fragment in fragments]
    share = -(-prod(shape) // len(refs))
    if any(ref.numel != share for ref in refs):
        what = f"its shares do not have {share} elements each"
        raise MalformedCheckpoint(what, where=name, hint=_WHOLE)
    flat = Flat(refs, name)
    return shaped(flat.runs(0, prod(shape)), flat.dtype, shape)


def _refuse_beyond(wanted: int, there: int, name: str) -> None:
    if wanted > there:
        what = f"needs {wanted} elements of partitions that have {there}"
        raise MalformedCheckpoint(what, where=name, hint=_WHOLE)


def _wrong_sum(wanted: int, there: int, where: str) -> MalformedCheckpoint:
    what = f"its parameters take {wanted} elements, but its partitions have {there}"
    return MalformedCheckpoint(what, where=where, hint=_WHOLE)


# ----------------------------------------------------------------------------------- the state dict


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

    def join(self, ranks: Sequence[RankStates]) -> Node:
        """The state dict, with the `_metadata` of the module's."""
        states = self._states[0]
        self._add_buffers(states)
        self._add_frozen(states)
        parameters = join_parameters(ranks, read_shapes(states["param_shapes"], "param_shapes"))
        self._found.update((name, self._widened(ref)) for name, ref in parameters.items())
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
        for name, shape in _each(groups):
            if any(name not in of_rank for of_rank in fragments):
                what = "a frozen parameter has a shape, but no values"
                raise MalformedCheckpoint(what, where=name, hint=_WHOLE)
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
