"""The files of ranks that do not make up the tensors which they say they do: DTensors and
ShardedTensors of two ranks.
"""

from __future__ import annotations

import struct

from hostile.cases import (
    OUTPUTS,
    Family,
    Fifo,
    Tree,
    bad,
    call,
    d,
    flat,
    g,
    ints,
    n,
    storage,
    t,
    tensor,
    u,
)
from hostile.folders import instance, listed, sized

FAMILY = Family("Files of ranks")
add = FAMILY.add
NAMES = ("rank0.pt", "rank1.pt")

_SHARDED = "torch.distributed._shard.sharded_tensor.api"
_MESH = struct.pack("<2q", 0, 1)


def whole_type(cls: bytes, given: bytes, state: bytes) -> bytes:
    """What torch pickles for a tensor subclass without a storage."""
    return call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        g("torch._utils", "_rebuild_wrapper_subclass"),
        cls,
        given,
        state,
    )


def dtensor(
    rank: int,
    *,
    size: int = 8,
    dtype: str = "float32",
    place: bytes | None = None,
    mesh: bytes | None = None,
    at: int | None = None,
    local: bytes | None = None,
) -> bytes:
    """A DTensor of eight floats over two ranks, of which this one holds four, as torch before 2.9
    pickled it.
    """
    cls = g("torch.distributed.tensor", "DTensor")
    place = place or instance("torch.distributed.tensor.placement_types", "Shard", dim=n(0))
    grid = mesh or tensor(storage("LongStorage", "1", numel=2), size=(2,))
    device_mesh = instance(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        mesh=grid,
        _coordinate_on_dim=listed(n(rank if at is None else at)),
    )
    spec = instance(
        "torch.distributed.tensor._dtensor_spec",
        "DTensorSpec",
        mesh=device_mesh,
        placements=t(place),
    )
    state = d((u("_local_tensor"), local or tensor()), (u("_spec"), spec))
    return whole_type(cls, t(cls, g("torch", dtype), sized(size), ints((1,)), n(0)), state)


def sharded_tensor(
    rank: int,
    *,
    start: int | None = None,
    rows: int = 4,
    size: int = 8,
    others: tuple[int, ...] = (0, 1),
) -> bytes:
    """An FSDP1 ShardedTensor of eight floats, of which rank N holds four from 4N on."""
    start = 4 * rank if start is None else start

    def described(owner: int, first: int) -> bytes:
        placement = instance("torch.distributed.remote_device", "_remote_device", _rank=n(owner))
        return instance(
            "torch.distributed._shard.metadata",
            "ShardMetadata",
            shard_offsets=listed(n(first)),
            shard_sizes=listed(n(rows)),
            placement=placement,
        )

    cls = g(_SHARDED, "ShardedTensor")
    shards = listed(
        instance(
            "torch.distributed._shard.sharded_tensor.shard",
            "Shard",
            metadata=described(rank, start),
            tensor=tensor(),
        )
    )
    every = instance(
        "torch.distributed._shard.sharded_tensor.metadata",
        "ShardedTensorMetadata",
        shards_metadata=listed(*(described(owner, 4 * owner) for owner in others)),
    )
    state = t(
        shards, every, instance("torch.distributed.distributed_c10d", "Holder", global_rank=n(rank))
    )
    return whole_type(cls, t(cls, g("torch", "float32"), sized(size)), state)


def rank_file(value: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """One rank's file: the tensor, four floats of its own, and the ranks of the mesh."""
    return bad.ckpt(bad.P2 + d((u("w"), value), *more) + bad.STOP, {"0": bad.F4, "1": _MESH})


def ranks(first: bytes | None = None, second: bytes | None = None) -> Tree:
    """The files of both ranks."""
    return {
        "rank0.pt": rank_file(dtensor(0)) if first is None else first,
        "rank1.pt": rank_file(dtensor(1)) if second is None else second,
    }


def both(**given) -> Tree:
    """The files of both ranks, whose DTensors are described in the same wrong way."""
    return ranks(rank_file(dtensor(0, **given)), rank_file(dtensor(1, **given)))


def placement(name: str, **fields: bytes) -> bytes:
    return instance("torch.distributed.tensor.placement_types", name, **fields)


add("ranks_good", "accept", "good files of two ranks", ranks, OUTPUTS, named=NAMES)
add(
    "ranks_good_fsdp1",
    "accept",
    "good files of two ranks of FSDP1",
    lambda: ranks(rank_file(sharded_tensor(0)), rank_file(sharded_tensor(1))),
    OUTPUTS,
    named=NAMES,
)
add("ranks_one", "reject", "one file of two", ranks, named=NAMES[:1], field="rank 1")
add(
    "ranks_twice",
    "reject",
    "the file of one rank twice",
    lambda: ranks(second=rank_file(dtensor(0))),
    named=NAMES,
    field="rank 0",
)
add(
    "ranks_size",
    "reject",
    "the ranks say two sizes",
    lambda: ranks(second=rank_file(dtensor(1, size=9))),
    named=NAMES,
    field="w",
)
add(
    "ranks_huge",
    "reject",
    "a tensor of 2**59 floats of which each rank has four",
    lambda: both(size=1 << 59),
    named=NAMES,
    field="w",
)
add(
    "ranks_too_large",
    "reject",
    "a tensor of 2**62 floats",
    lambda: both(size=1 << 62),
    named=NAMES,
    field="w",
)
add(
    "ranks_dtype",
    "reject",
    "of another type than its local values",
    lambda: both(dtype="float16"),
    named=NAMES,
    field="w",
)
add(
    "ranks_dimension",
    "reject",
    "split along a dimension that it does not have",
    lambda: both(place=placement("Shard", dim=n(3))),
    named=NAMES,
    field="w",
)
add(
    "ranks_dimension_negative",
    "reject",
    "split along dimension -1",
    lambda: both(place=placement("Shard", dim=n(-1))),
    named=NAMES,
    field="w",
)
add(
    "ranks_partial",
    "reject",
    "sums that nobody has added up",
    lambda: both(place=placement("Partial", reduce_op=u("sum"))),
    named=NAMES,
    field="w",
)
add(
    "ranks_placed_by_call",
    "reject",
    "a placement that is the result of posix.mkdir",
    lambda: both(place=bad.PWN),
    named=NAMES,
    field="w",
)
add(
    "ranks_strided",
    "reject",
    "a stride that cuts it into 2**40 parts",
    lambda: both(place=placement("_StridedShard", dim=n(0), split_factor=n(1 << 40))),
    named=NAMES,
    field="w",
)
add(
    "ranks_strided_zero",
    "reject",
    "a stride of no parts",
    lambda: both(place=placement("_StridedShard", dim=n(0), split_factor=n(0))),
    named=NAMES,
    field="w",
)
add(
    "ranks_beyond",
    "reject",
    "place 7 of a mesh of two",
    lambda: ranks(second=rank_file(dtensor(1, at=7))),
    named=NAMES,
    field="w",
)
add(
    "ranks_mesh_twice",
    "reject",
    "a mesh that has one rank twice",
    lambda: both(mesh=tensor(storage("LongStorage", "1", numel=2), size=(2,), stride=(0,))),
    named=NAMES,
    field="w",
)
add(
    "ranks_mesh_huge",
    "reject",
    "a mesh of 2**30 ranks with stride 0",
    lambda: both(mesh=tensor(storage("LongStorage", "1", numel=2), size=(1 << 30,), stride=(0,))),
    named=NAMES,
    field="data/1",
)
add(
    "ranks_mesh_float",
    "reject",
    "a mesh of floats",
    lambda: both(mesh=tensor()),
    named=NAMES,
    field="w",
)
add(
    "ranks_local_shape",
    "reject",
    "local values of another shape than its share",
    lambda: both(local=tensor(size=(2, 2), stride=(2, 1))),
    named=NAMES,
    field="w",
)
add(
    "ranks_runs",
    "reject",
    "rank 1 calls posix.mkdir",
    lambda: ranks(second=bad.ckpt(bad.P2 + bad.PWN + bad.STOP)),
    named=NAMES,
)
add(
    "ranks_other_keys",
    "reject",
    "a key that only one rank has",
    lambda: ranks(second=rank_file(dtensor(1), (u("x"), tensor()))),
    named=NAMES,
    field="x",
)
add(
    "ranks_other_values",
    "reject",
    "a tensor that is not a shard differs",
    lambda: ranks(
        rank_file(dtensor(0), (u("x"), tensor())),
        bad.ckpt(
            bad.P2 + d((u("w"), dtensor(1)), (u("x"), flat("2"))) + bad.STOP,
            {"0": bad.F4, "1": _MESH, "2": bytes(16)},
        ),
    ),
    named=NAMES,
    field="x",
)
add(
    "ranks_no_shards",
    "reject",
    "a plain file beside a rank's",
    lambda: ranks(second=bad.ckpt(bad.GOOD)),
    named=NAMES,
    field="rank1.pt",
)
add(
    "ranks_cut",
    "reject",
    "rank 1 is cut off",
    lambda: ranks(second=rank_file(dtensor(1))[:-30]),
    named=NAMES,
    field="rank1.pt",
)
add(
    "ranks_fifo",
    "reject",
    "rank 1 is a named pipe",
    lambda: {**ranks(), "rank1.pt": Fifo()},
    named=NAMES,
    field="rank1.pt",
)
add(
    "ranks_fsdp1_overlap",
    "reject",
    "FSDP1: both ranks hold the first half",
    lambda: ranks(rank_file(sharded_tensor(0)), rank_file(sharded_tensor(1, start=0))),
    named=NAMES,
    field="w",
)
add(
    "ranks_fsdp1_beyond",
    "reject",
    "FSDP1: a shard beyond its tensor",
    lambda: ranks(rank_file(sharded_tensor(0)), rank_file(sharded_tensor(1, start=6))),
    named=NAMES,
    field="w",
)
add(
    "ranks_fsdp1_rows",
    "reject",
    "FSDP1: a shard of another shape than it says",
    lambda: ranks(rank_file(sharded_tensor(0, rows=5)), rank_file(sharded_tensor(1, rows=5))),
    named=NAMES,
    field="w",
)
add(
    "ranks_fsdp1_missing",
    "reject",
    "FSDP1: 5,000 ranks, of which two are here",
    lambda: ranks(
        *(rank_file(sharded_tensor(rank, others=tuple(range(5_000)))) for rank in (0, 1))
    ),
    named=NAMES,
    field="rank 2",
)
