"""The fp32 partitions of ZeRO, joined again: which elements of which rank's flat groups are which
parameter.

Stages 1 and 2 lay the parameters of a group end to end, each followed by its alignment padding if
there is any, and cut that into as many partitions as there are ranks; the last ones may lack what
only filled them up. Stage 3 cuts each parameter into one share per rank, of equal size, the last
ones padded, and each rank lays its shares end to end. Source: deepspeed/utils/zero_to_fp32.py and
deepspeed/runtime/zero (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from math import prod
from typing import Any

from ckptconv.formats.folders.alone import NOT_READ
from ckptconv.objects.torch_read import plain_sizes
from ckptconv.pickles.nodes import Call, Node, entries, listed, mapping_pairs, ordered_dict
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import dataclass
from ckptconv.tensors.assembly import Flat, Run, shaped
from ckptconv.tensors.computed import Widener
from ckptconv.tensors.dtypes import FLOAT32
from ckptconv.tensors.refs import Shape, TensorRef, refuse_dimensions, view_identity
from ckptconv.tree.walk import tensor_of

Shapes = Mapping[str, Shape]
"""The parameters of a group, by name, in the order in which they lie in its partitions."""

_SLICES = "param_slice_mappings"


def contradiction(what: str, **told: Any) -> MalformedCheckpoint:
    """The error of files of a step that contradict each other, with its `path` or `where`."""
    hint = "fetch the whole folder again: its files are from different runs, cut off or damaged"
    return MalformedCheckpoint(what, hint=hint, **told)


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one rank's optimizer states hold: the ZeRO `stage`, over how many ranks each group is
    spread (`counts`), and its fp32 partition of each group.

    `paddings` (None: there are none) are by group the elements that lie behind each parameter to
    align the next; `ends` are by group those that filled up this rank's partition and are not
    saved with it. `rest` is all that the rank's optimizer says, by name.
    """

    stage: int
    counts: tuple[int, ...]
    groups: tuple[TensorRef, ...]
    paddings: tuple[tuple[int, ...], ...] | None = None
    ends: tuple[int, ...] = ()
    rest: Mapping[str, Node] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max(self.counts)

    def slices(self, number: int) -> Mapping[Node, tuple[Node, Node]]:
        """What it says of the slices of parameters in its partition of a group: where each begins,
        and how many elements it has. They are objects of deepspeed.
        """
        told = listed(self.rest.get(_SLICES))[number : number + 1]
        pairs = (pair for slices in told for pair in mapping_pairs(slices) or ())
        said = {name: entries(one.state) for name, one in pairs if type(one) is Call}
        return {name: (each.get("start"), each.get("numel")) for name, each in said.items()}


def spread_over_ranks(where: str) -> UnsupportedCheckpoint:
    """The refusal of groups that some of the ranks have, where that is not read."""
    spread = "its groups are spread over different numbers of ranks (expert parallelism)"
    return UnsupportedCheckpoint(f"{spread}, which is not read", where=where)


def buffer_names(states: Mapping[str, Node]) -> list[str]:
    """The names of buffers in model states."""
    return [name for name in listed(states.get("buffer_names")) if type(name) is str]


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
    if states.get("ds_zero_partition_groups") is not None:
        what = "is ZeRO 3 with experts (AutoEP) of DeepSpeed, which is not read"
        raise UnsupportedCheckpoint(what, where="ds_zero_partition_groups", hint=NOT_READ)
    counts = _rank_counts(states.get("partition_count"), len(groups))
    ends = _ends(states, len(groups))
    return RankStates(stage, counts, groups, paddings, ends, states)


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


def _ends(states: Mapping[str, Node], groups: int) -> tuple[int, ...]:
    found: Node = states.get("group_paddings")
    if found is None:
        return (0,) * groups
    if not _are_sizes(found) or len(found) != groups:
        where = "optimizer_state_dict.group_paddings"
        raise MalformedCheckpoint("does not have one size for each group", where=where)
    return tuple(found)


def _are_sizes(node: Node) -> bool:
    return type(node) in (list, tuple) and all(
        type(size) is int and 0 <= size < 1 << 63 for size in node
    )


def _rank_counts(node: Node, groups: int) -> tuple[int, ...]:
    where = "optimizer_state_dict.partition_count"
    counts = tuple(map(_integer, listed(node) or [node] * max(groups, 1)))
    if not counts or any(not 1 <= count < 1 << 63 for count in counts):
        raise MalformedCheckpoint("is not a number of ranks", where=where)
    if len(set(counts)) > 1 and len(counts) != groups:
        raise MalformedCheckpoint("does not have one number for each group", where=where)
    refuse_beyond("shards", max(counts), f"says {max(counts)} ranks", where=where)
    return counts


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


def shapes_in_slices(
    ranks: Sequence[RankStates], shape_of: Callable[[str, int], Shape]
) -> list[Shapes]:
    """The shapes of the parameters by group where no model states name them, as each rank says
    which slices it has (the bf16 optimizer without ZeRO); `shape_of` is asked for the shape of a
    parameter of so many elements. None, where the ranks do not say it.
    """
    found: list[Shapes] = []
    for number in range(len(ranks[0].groups)):
        numels: dict[str, int] = {}
        for rank in ranks:
            where = f"{_SLICES}.{number}"
            for name, (_, numel) in rank.slices(number).items():
                if type(numel) is not int or not 0 <= numel < 1 << 63:
                    raise MalformedCheckpoint("is not the number of its elements", where=where)
                numels[_name(name, where)] = numels.get(_name(name, where), 0) + numel
        found.append({name: shape_of(name, numel) for name, numel in numels.items()})
    return found if any(found) else []


def shape_of(module: Mapping[str, Node], name: str, numel: int) -> Shape:
    """The shape of a parameter of so many elements, as the model states have it."""
    ref = tensor_of(module.get(name))
    if ref is None or ref.numel != numel:
        raise contradiction(f"has {numel} elements, and the model states do not", where=name)
    return ref.shape


# ------------------------------------------------------------------------------------------ joining


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters that lie flat in the partitions `number` of some `ranks`, in that order.

    `paddings` are the elements behind each parameter; in stage 3 (`is_cut`), where each parameter
    is cut by itself, there are none.
    """

    number: int
    ranks: tuple[int, ...]
    shapes: Shapes
    paddings: tuple[int, ...]
    is_cut: bool

    @property
    def where(self) -> str:
        """What errors call it."""
        return f"group {self.number}"

    def joined(self, partitions: Sequence[TensorRef]) -> Iterator[tuple[str, TensorRef]]:
        """Its parameters, put together from what each of its ranks has: of the weights, or of what
        lies like these.

        Raises `MalformedCheckpoint` when the partitions are not as long as the shapes ask for.
        """
        if self.is_cut:
            return self._from_shares(partitions)
        return self._end_to_end(partitions)

    def in_partitions(self, lengths: Iterable[int]) -> Iterator[dict[str, tuple[int, int]]]:
        """Stages 1 and 2: the parameters that have elements in each partition, of these lengths:
        where these begin in it, and how many they are.
        """
        sizes = [prod(shape) for shape in self.shapes.values()]
        steps = (size + padding for size, padding in zip(sizes, self.paddings, strict=True))
        starts = list(accumulate(steps, initial=0))
        spans = [
            (name, at, at + size)
            for name, at, size in zip(self.shapes, starts, sizes, strict=False)
            if size
        ]
        index = first = 0
        for length in lengths:
            stop = first + length
            while index < len(spans) and spans[index][2] <= first:
                index += 1
            # from `index` again: a parameter may reach into several partitions
            held, at = {}, index
            while length and at < len(spans) and spans[at][1] < stop:
                name, start, end = spans[at]
                begin = max(start, first)
                held[name] = begin - first, min(end, stop) - begin
                at += 1
            yield held
            first = stop

    def refuse_exchanged(self, ranks: Sequence[RankStates]) -> None:
        """Stages 1 and 2: raise `MalformedCheckpoint` where a rank says that other elements are in
        its partition than those of its number.
        """
        held = self.in_partitions([rank.groups[self.number].numel for rank in ranks])
        for number, rank, slices in zip(self.ranks, ranks, held, strict=True):
            found = rank.slices(self.number)
            if found and found != slices:
                what = f"says that it holds other parameters than rank {number} has"
                where = f"{_SLICES} of rank {number}, {self.where}"
                hint = "files of ranks were exchanged, or are of different runs: fetch them again"
                raise MalformedCheckpoint(what, where=where, hint=hint)

    def _end_to_end(self, partitions: Sequence[TensorRef]) -> Iterator[tuple[str, TensorRef]]:
        flat = Flat(partitions, self.where)
        at = 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            numel = prod(shape)
            _refuse_beyond(at + numel, flat.numel, name)
            yield name, shaped(flat.runs(at, numel), flat.dtype, shape)
            at += numel + padding
        unit = 2 * len(partitions)  # what they together are filled up to a multiple of
        if -(-at // unit) != -(-flat.numel // unit):
            raise _wrong_sum(at, flat.numel, self.where)

    def _from_shares(self, partitions: Sequence[TensorRef]) -> Iterator[tuple[str, TensorRef]]:
        first, *others = (
            Flat([one], f"rank {rank}") for rank, one in zip(self.ranks, partitions, strict=True)
        )
        for other in others:
            if other.numel != first.numel or other.dtype is not first.dtype:
                raise _wrong_sum(first.numel, other.numel, "fp32_flat_groups")
        at = 0
        for name, shape in self.shapes.items():
            share = -(-prod(shape) // len(partitions))
            _refuse_beyond(at + share, first.numel, name)
            yield name, shaped(_shares([first, *others], at, prod(shape)), first.dtype, shape)
            at += share
        if at != first.numel:
            raise _wrong_sum(at, first.numel, "fp32_flat_groups")


def flat_groups(ranks: Sequence[RankStates], shapes: Sequence[Shapes]) -> list[FlatGroup]:
    """The groups of parameters, by the shapes of each group that the model states name.

    Raises `MalformedCheckpoint` when the ranks do not have them.
    """
    alike = {(states.stage, len(states.groups), states.counts) for states in ranks}
    if len(alike) > 1:
        raise contradiction("its ranks differ in ZeRO stage, number of groups or number of ranks")
    first, is_cut, everyone = ranks[0], ranks[0].stage == 3, tuple(range(len(ranks)))
    if is_cut and len(first.groups) != len(shapes):
        shapes = _by_length(shapes, [ref.numel for ref in first.groups], len(ranks))
    _require_groups(first, shapes)
    none = [(0,) * len(group) for group in shapes]
    paddings = first.paddings if first.paddings is not None and not is_cut else none
    found = [
        FlatGroup(number, everyone, group, padding, is_cut)
        for number, (group, padding) in enumerate(zip(shapes, paddings, strict=True))
    ]
    if not is_cut and len(set(first.counts)) == 1:
        for group in found:
            group.refuse_exchanged(ranks)
    return found


def _by_length(shapes: Iterable[Shapes], lengths: Sequence[int], ranks: int) -> list[Shapes]:
    """Stage 3: the parameters by the groups that they lie in, of a list that does not say it
    (older releases have one dict): they lie end to end, and none in two groups.
    """
    groups: list[dict[str, Shape]] = [{} for _ in lengths]
    number = at = 0
    for name, shape in _each_shape(shapes):
        share = -(-prod(shape) // ranks)
        while share and number < len(lengths) and at >= lengths[number]:
            number, at = number + 1, 0
        if not groups or number == len(groups):
            raise _wrong_sum(at + share, sum(lengths), name)
        groups[number][name] = shape
        at += share
    return list(groups)


def _require_groups(states: RankStates, groups: Sequence[Shapes]) -> None:
    if len(states.groups) != len(groups):
        what = f"names parameters of {len(groups)} groups, the ranks hold {len(states.groups)}"
        raise contradiction(what, where="param_shapes")
    if states.paddings is not None and list(map(len, states.paddings)) != list(map(len, groups)):
        what = "does not have one number for each parameter"
        raise contradiction(what, where="param_alignment_paddings")


def _each_shape(groups: Iterable[Shapes]) -> Iterator[tuple[str, Shape]]:
    return ((name, shape) for shapes in groups for name, shape in shapes.items())


def _shares(flats: Sequence[Flat], at: int, numel: int) -> Iterator[Run]:
    """The runs of one parameter's shares, which begin at element `at` in every rank, without the
    padding of the last ones.
    """
    share = -(-numel // len(flats))
    for rank, flat in enumerate(flats):
        yield from flat.runs(at, max(0, min(share, numel - rank * share)))


def _join_fragments(fragments: Sequence[Node], shape: Shape, name: str) -> TensorRef:
    """A frozen parameter of stage 3 from the flat share that each rank saved of it."""
    refs = [_flat_group(fragment, name) for fragment in fragments]
    share = -(-prod(shape) // len(refs))
    if any(ref.numel != share for ref in refs):
        raise contradiction(f"its shares do not have {share} elements each", where=name)
    flat = Flat(refs, name)
    return shaped(flat.runs(0, prod(shape)), flat.dtype, shape)


def _refuse_beyond(wanted: int, there: int, name: str) -> None:
    if wanted > there:
        what = f"needs {wanted} elements of partitions that have {there}"
        raise contradiction(what, where=name)


def _wrong_sum(wanted: int, there: int, where: str) -> MalformedCheckpoint:
    what = f"its parameters take {wanted} elements, but its partitions have {there}"
    return contradiction(what, where=where)


# ------------------------------------------------------------------------------ the state dict


class JoinedWeights:
    """The joined state dict of a step: what `zero_to_fp32` gives, in its order, and behind that
    what only `module` holds.
    """

    def __init__(self, states: Sequence[Mapping[str, Node]], stage: int) -> None:
        """`states` are the model states of rank 0 and, where stage 3 has frozen parameters, of all
        ranks.
        """
        self._states = states
        self._stage = stage
        self._widened = Widener(FLOAT32)
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
        self._add_ties(states["module"])
        self._add_others(states["module"])
        return ordered_dict(list(self._found.items()), like=states["module"])

    def _add_buffers(self, states: Mapping[str, Node]) -> None:
        buffers = {*buffer_names(states)}
        for name, value in entries(states["module"]).items():
            if name in buffers and (ref := tensor_of(value)) is not None:
                self._found[name] = self._widened(ref)

    def _add_frozen(self, states: Mapping[str, Node]) -> None:
        shapes = states.get("frozen_param_shapes")
        fragments = [entries(of_rank.get("frozen_param_fragments")) for of_rank in self._states]
        groups = [] if shapes is None else read_shapes(shapes, "frozen_param_shapes")
        for name, shape in _each_shape(groups):
            if any(name not in of_rank for of_rank in fragments):
                raise contradiction("a frozen parameter has a shape, but no values", where=name)
            shares = [of_rank[name] for of_rank in fragments]
            ref = tensor_of(shares[0])
            if self._stage == 3:
                ref = _join_fragments(shares, shape, name)
            if ref is None or ref.shape != shape:
                what = "the values of a frozen parameter do not have its shape"
                raise MalformedCheckpoint(what, where=name)
            # in the type that it was loaded in: no optimizer has an fp32 copy of it
            self._found[name] = ref

    def _add_ties(self, module: Node) -> None:
        """The second names of parameters, where `shared_params` does not tell them (older
        releases): the module has one storage for both.
        """
        refs = {name: ref for name, value in entries(module).items() if (ref := tensor_of(value))}
        views = {view_identity(refs[name]): name for name in refs if name in self._found}
        for name, ref in refs.items():
            kept = views.get(view_identity(ref)) if ref.numel else None
            if kept is not None and name not in self._found:
                self._found[name] = self._found[kept]

    def _add_others(self, module: Node) -> None:
        """What only the module holds: extra states, the frozen parameters of stage 1."""
        values = entries(module)
        others = [name for name in values if name not in self._found]
        refs = {name: tensor_of(values[name]) for name in others}
        empty: set[str] = set()
        if self._stage == 3:  # which leaves empty tensors in the place of what it partitions
            empty = {name for name, ref in refs.items() if ref is not None and not ref.numel}
        kept = {name: values[name] for name in others if name not in empty}
        if empty:
            told = "without values in any file, so they are left out"
            self.notes += (f"{told}: {_some(sorted(empty))}",)
        if kept:
            told = "not in a partition, so they are taken from the model states"
            self.notes += (f"{told}: {_some(list(kept))}",)
        for name, value in kept.items():
            ref = refs[name]
            self._found[name] = value if ref is None else self._widened(ref)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return printable(", ".join(names[:3])) + more
