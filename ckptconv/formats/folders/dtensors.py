"""DTensors as a pickle has them: which part of which tensor a rank holds.

`torch.save` of a DTensor is ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (DTensor,
dtype, size, …), state)``. The state holds the `_local_tensor` and its `_spec`: the mesh of ranks
(with the rank that saved), and a placement for each mesh dimension. Sources:
torch/distributed/device_mesh.py, torch/distributed/tensor/_utils.py
(`_compute_local_shape_and_global_offset`) and placement_types.py, torch 2.1 to 2.13.

FSDP1's `ShardedTensor` is pickled in the same way; its state lists the local shards with their
offsets, and those of all ranks. Source: torch/distributed/_shard/sharded_tensor/api.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from ckptconv.pickles.nodes import Call, Dict, Global, Node
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, printable
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.dtypes import BY_NAME, DType
from ckptconv.tensors.refs import Piece, Shape, TensorRef, refuse_dimensions, requiring_grad
from ckptconv.tensors.stream import iter_chunks

_STRIDED = "_StridedShard"


class Mesh(NamedTuple):
    """A grid of global `ranks` in C order; `rank` and `coordinate` of the one that saved."""

    shape: Shape
    ranks: tuple[int, ...]
    rank: int
    coordinate: Shape


class Placement(NamedTuple):
    """What a mesh dimension does to a tensor: split its dimension `dim` (None: every rank has the
    same).

    `factor` is 1 but for strided shards, which cut the dimension into that many parts first and
    split each of them.
    """

    dim: int | None
    factor: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of a tensor of `dtype` and `shape`: its `local` values, or `boxes` of them."""

    dtype: DType
    shape: Shape
    mesh: Mesh
    placements: tuple[Placement, ...]
    local: TensorRef | None
    requires_grad: bool
    boxes: tuple[tuple[Shape, TensorRef], ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold values that this one lacks."""
        return self.local is None or any(placement.dim is not None for placement in self.placements)

    def parts(self) -> Iterator[tuple[Shape, TensorRef]]:
        """The boxes of the tensor that this rank holds: where each starts, and its values."""
        if self.local is None:
            yield from self.boxes
            return
        runs = _runs(self.shape, self.mesh, self.placements)
        held = tuple(sum(stop - start for start, stop in axis) for axis in runs)
        empty = 0 in held
        if self.local.shape != held and not (empty and not self.local.numel):
            what = f"holds {list(self.local.shape)} of it instead of {list(held)}"
            raise MalformedCheckpoint(f"rank {self.mesh.rank} {what}")
        if empty:
            nothing, ones = (0,) * len(held), (1,) * len(held)
            yield nothing, self.local._replace(shape=nothing, stride=ones)
            return
        count = prod(len(axis) for axis in runs)
        _refuse_many(count, "is a DTensor of which a rank holds {} parts")
        for box in product(*map(_placed, runs)):
            yield tuple(start for start, _, _ in box), _part(self.local, box)


def _refuse_many(count: int, what: str) -> None:
    """Raise `LimitExceeded` for a mesh or a share of a tensor that takes too long to enumerate."""
    if count >= 1 << 63:  # a product of any ints: python refuses to print the longest ones
        raise MalformedCheckpoint("is a DTensor of more ranks or parts than are possible")
    refuse_beyond("mesh_ranks", count, what.format(count))


_ON_MESH = "is a DTensor on a mesh of {} ranks"


def _placed(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Of each run its start in the tensor, its start in the local values, and its length."""
    at = 0
    for start, stop in runs:
        yield start, at, stop - start
        at += stop - start


def _part(local: TensorRef, box: Sequence[tuple[int, int, int]]) -> TensorRef:
    shape = tuple(size for _, _, size in box)
    steps = zip(box, local.stride, strict=True)
    offset = local.storage_offset + sum(at * step for (_, at, _), step in steps)
    piece = Piece(local.storage, offset, shape, local.stride, (0,) * len(shape))
    return local._replace(shape=shape, pieces=(piece,))


def _runs(shape: Shape, mesh: Mesh, placements: Sequence[Placement]) -> list[list[tuple[int, int]]]:
    """For each dimension the runs [start, stop) that a rank holds, mesh dimensions in order."""
    runs = [[(0, size)] for size in shape]
    for (dim, factor), count, index in zip(placements, mesh.shape, mesh.coordinate, strict=True):
        if dim is None:
            continue
        size = sum(stop - start for start, stop in runs[dim])
        taken = [_chunk(*_chunk(0, size, factor, part), count, index) for part in range(factor)]
        runs[dim] = [run for start, stop in taken for run in _narrowed(runs[dim], start, stop)]
    return runs


def _chunk(start: int, stop: int, count: int, index: int) -> tuple[int, int]:
    """The index-th of `count` parts, as `torch.chunk` cuts them: some perhaps empty."""
    size = -(-(stop - start) // count)
    return min(stop, start + index * size), min(stop, start + (index + 1) * size)


def _narrowed(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs of the values number `start` to `stop` of those in `runs`; neighbours are joined."""
    at = 0
    for first, last in runs:
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            yield first + low - at, first + high - at
        at += last - first


# ------------------------------------------------------------------------------------------ reading


def read_shard(node: Call) -> Shard:
    """The shard that a node describes; `UnsupportedCheckpoint` where a rank's share is unclear."""
    return _read_dtensor(node) if node.args[1].name == "DTensor" else _read_sharded_tensor(node)


def _read_sharded_tensor(node: Call) -> Shard:
    given, state = node.args[2], _sequence(node.args[3])
    if len(state) < 3 or type(given) is not tuple or len(given) < 3 or type(given[1]) is not Global:
        raise UnsupportedCheckpoint(_UNKNOWN_SHARDED)
    dtype, rank = BY_NAME.get(given[1].name), _attributes(state[2]).get("global_rank")
    if dtype is None or type(rank) is not int:
        raise UnsupportedCheckpoint(_UNKNOWN_SHARDED)
    boxes = []
    for held in _sequence(state[0]):
        shard = _attributes(held)
        ref = shard.get("tensor")
        start, size, _ = _place(_attributes(shard.get("metadata")))
        if type(ref) is not TensorRef or ref.shape != size:
            what = "is a ShardedTensor with a shard of another shape than it says"
            raise MalformedCheckpoint(what)
        boxes.append((start, ref))
    listed = _sequence(_attributes(state[1]).get("shards_metadata"))
    ranks = tuple(sorted({_place(_attributes(entry))[2] for entry in listed}))
    mesh = Mesh((len(ranks),), ranks, rank, ())
    return Shard(dtype, _sizes(given[2]), mesh, (), None, False, tuple(boxes))


_UNKNOWN_SHARDED = "is a ShardedTensor of an unknown kind"


def _place(metadata: dict[str, Node]) -> tuple[Shape, Shape, int]:
    rank = _attributes(metadata.get("placement")).get("_rank")
    if type(rank) is not int:
        raise UnsupportedCheckpoint(_UNKNOWN_SHARDED)
    return _sizes(metadata.get("shard_offsets")), _sizes(metadata.get("shard_sizes")), rank


def _read_dtensor(node: Call) -> Shard:
    given, state = node.args[2], _state(node.args[3])
    spec = _attributes(state.get("_spec"))
    local = state.get("_local_tensor")
    has_shape = type(given) is tuple and len(given) >= 3
    if not has_shape or type(local) is not TensorRef or not local.is_view:
        raise UnsupportedCheckpoint("is a DTensor of an unknown kind")
    dtype, shape = given[1], _sizes(given[2])
    if type(dtype) is not Global or BY_NAME.get(dtype.name) is not local.dtype:
        raise MalformedCheckpoint("is a DTensor of another type than its local values")
    mesh = _mesh(_attributes(spec.get("mesh")))
    placements = tuple(_placement(item, len(shape)) for item in _sequence(spec.get("placements")))
    if len(placements) != len(mesh.shape):
        what = f"has {len(placements)} placements on a mesh of {len(mesh.shape)} dimensions"
        raise MalformedCheckpoint(what)
    _refuse_other_order(spec, placements)
    requires_grad = requiring_grad(local, len(given) > 7 and given[7] is True).requires_grad
    return Shard(local.dtype, shape, mesh, placements, local, requires_grad)


def _state(node: Node) -> dict[str, Node]:
    """The attributes of a tensor object: a dict, or a pair of that and the dict of its slots."""
    dicts = [part for part in (node if type(node) is tuple else (node,)) if type(part) is Dict]
    return {key: value for part in dicts for key, value in part.pairs if type(key) is str}


def _attributes(node: Node) -> dict[str, Node]:
    if type(node) is not Call:
        raise UnsupportedCheckpoint("is a DTensor of an unknown layout")
    return _state(node.state)


def _sequence(node: Node) -> Sequence[Node]:
    if type(node) not in (tuple, list):
        raise UnsupportedCheckpoint("is a DTensor of an unknown layout")
    return node  # type: ignore[no-any-return]


def _sizes(node: Node) -> Shape:
    if type(node) is Call and node.name == "torch.Size" and node.args:
        node = node.args[0]
    sizes = tuple(_sequence(node))
    refuse_dimensions(len(sizes))
    if any(type(size) is not int or not 0 <= size < 1 << 60 for size in sizes):
        what = "is a DTensor whose shape or mesh holds something other than sizes"
        raise MalformedCheckpoint(what)
    return sizes


def _placement(node: Node, dimensions: int) -> Placement:
    name = "?"
    if type(node) is Call:
        name = node.name.rpartition(".")[2]
    if name == "Replicate":
        return Placement(None)
    if name not in ("Shard", _STRIDED):
        what = f"is a DTensor placed as {printable(name)}, whose values are not in the files"
        hint = "redistribute it to Shard or Replicate before saving"
        raise UnsupportedCheckpoint(what, hint=hint)
    state = _state(node.state)
    dim, factor = state.get("dim"), 1
    if name == _STRIDED:
        factor = state.get("split_factor", 0)
    if type(dim) is not int or type(factor) is not int or not 0 <= dim < dimensions or factor < 1:
        raise MalformedCheckpoint("is a DTensor split along a dimension that it does not have")
    _refuse_many(factor, "is a DTensor whose shards are cut into {} parts")
    return Placement(dim, factor)


def _refuse_other_order(spec: dict[str, Node], placements: Sequence[Placement]) -> None:
    """Only shards that are cut in the order of the mesh dimensions can be told from their
    placements.

    torch before 2.5 noted FSDP over tensor parallelism, which cuts rows from right to left, as if
    it cut from left to right.
    """
    order = _sequence(spec.get("shard_order") or ())
    dims = [entry.args[1] for entry in order if type(entry) is Call and len(entry.args) == 2]
    ascending = all(list(_sizes(entry)) == sorted(_sizes(entry)) for entry in dims)
    split = [placement.dim for placement in placements if placement.dim is not None]
    said = "shard_order" in spec or any(placement.factor > 1 for placement in placements)
    if not ascending or (len(set(split)) < len(split) and not said):
        what = "is a DTensor with one dimension that is split twice, in an unknown order"
        hint = "save it with torch.distributed.checkpoint, or with torch 2.9 or newer"
        raise UnsupportedCheckpoint(what, hint=hint)


# ------------------------------------------------------------------------------------------- meshes


def _mesh(state: dict[str, Node]) -> Mesh:
    grid = state.get("mesh")
    if type(grid) is TensorRef:  # torch before 2.9
        shape, ranks = grid.shape, _values(grid)
        offsets = list(range(len(ranks)))
    else:
        shape, offsets = _layout(_attributes(state.get("_layout")))
        ranks = _rank_map(state)
    coordinate = state.get("_coordinate_on_dim")
    if coordinate is None or len(place := _sizes(coordinate)) != len(shape):
        raise UnsupportedCheckpoint("is a DTensor of a rank that is not in its mesh")
    if any(at >= size for at, size in zip(place, shape, strict=True)):
        raise MalformedCheckpoint("is a DTensor of a rank that is not in its mesh")
    index = 0
    for at, size in zip(place, shape, strict=True):
        index = index * size + at
    rank = state.get("_rank")
    if "_rank" not in state and offsets[index] < len(ranks):
        rank = ranks[offsets[index]]
    if type(rank) is not int or ranks.count(rank) != 1 or len(set(ranks)) != len(ranks):
        raise MalformedCheckpoint("is a DTensor whose mesh does not have its rank exactly once")
    # a slice of a larger mesh: the layout starts where this rank's slice does
    base = ranks.index(rank) - offsets[index]
    if not all(0 <= base + offset < len(ranks) for offset in offsets):
        raise MalformedCheckpoint("is a DTensor whose mesh reaches beyond its ranks")
    return Mesh(shape, tuple(ranks[base + offset] for offset in offsets), rank, place)


def _rank_map(state: dict[str, Node]) -> tuple[int, ...]:
    flat = state.get("_flatten_rank_map")
    return _ranks(flat) if type(flat) is tuple else _values(state.get("_rank_map"))


def _ranks(ranks: Sequence[Node]) -> tuple[int, ...]:
    if any(type(rank) is not int or not 0 <= rank < 1 << 31 for rank in ranks):
        raise MalformedCheckpoint("is a DTensor whose mesh holds something other than ranks")
    return tuple(ranks)


def _values(ref: Node) -> tuple[int, ...]:
    if type(ref) is not TensorRef or ref.dtype.name not in ("int32", "int64"):
        raise UnsupportedCheckpoint("is a DTensor of an unknown mesh")
    _refuse_many(ref.numel, _ON_MESH)
    raw = b"".join(map(bytes, iter_chunks(ref)))
    code = {4: "i", 8: "q"}[ref.dtype.itemsize]
    return _ranks(struct.unpack(f"<{ref.numel}{code}", raw))


def _layout(state: dict[str, Node]) -> tuple[Shape, list[int]]:
    """Shape of a mesh, and for each rank, in C order, its place relative to the first."""
    if "axes" in state:  # since torch 2.11, one flat layout for each dimension
        axes = [_attributes(axis) for axis in _sequence(state["axes"])]
        steps = [_axis(_sizes(axis.get("shape")), _sizes(axis.get("stride"))) for axis in axes]
    else:
        shape, stride = _sequence(state.get("shape")), _sequence(state.get("stride"))
        if len(shape) != len(stride):
            raise MalformedCheckpoint("is a DTensor whose mesh is not a grid")
        steps = [_axis(_flat(size), _flat(step)) for size, step in zip(shape, stride, strict=True)]
    sizes = tuple(len(axis) for axis in steps)
    _refuse_many(prod(sizes), _ON_MESH)
    return sizes, [sum(offsets) for offsets in product(*steps)]


def _flat(sizes: Node) -> Shape:
    return (sizes,) if type(sizes) is int else _sizes(sizes)


def _axis(shape: Shape, stride: Shape) -> list[int]:
    if len(shape) != len(stride):
        raise MalformedCheckpoint("is a DTensor whose mesh is not a grid")
    _refuse_many(prod(shape), _ON_MESH)
    steps = ([at * step for at in range(size)] for size, step in zip(shape, stride, strict=True))
    return [sum(offsets) for offsets in product(*steps)]
