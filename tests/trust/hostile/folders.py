"""Folders that are one checkpoint and lie: indexes of shards, DCP, accelerate, DeepSpeed."""

from __future__ import annotations

import json

from hostile.cases import (
    DOUBLED,
    MKDIR,
    OUTPUTS,
    Entry,
    Family,
    Fifo,
    Link,
    Sparse,
    Tree,
    bad,
    beside,
    call,
    d,
    g,
    ints,
    metadata,
    n,
    one,
    storage,
    t,
    tensor,
    u,
)

INDEX = Family("Indexes of shards")
DCP = Family("DCP folders")
OTHERS = Family("accelerate and DeepSpeed")
FAMILIES = (INDEX, DCP, OTHERS)

GOOD_ST = bad.st(bad.OK16, bad.F4)
OUT_OF_HERE = "../../../../../../../../etc/passwd"


# -------------------------------------------------------------------------------- indexes of shards


def indexed(weight_map: object, more: Tree | None = None, name: str = bad.IDX) -> Tree:
    """A folder of an index with this weight_map, one good shard and `more`."""
    index = {"metadata": {"total_size": 16}, "weight_map": weight_map}
    return {name: json.dumps(index).encode(), bad.A: GOOD_ST, **(more or {})}


def raw_index(text: bytes) -> Tree:
    return {bad.IDX: text, bad.A: GOOD_ST}


def pointing(name: str) -> Tree:
    """An index whose one key is in the shard `name`."""
    return indexed({"w": name})


add = INDEX.add
add("index_good", "accept", "a good index of one shard", lambda: indexed({"w": bad.A}), OUTPUTS)
add(
    "index_backslash",
    "reject",
    "a shard called ..\\..\\passwd",
    lambda: pointing("..\\..\\passwd"),
    field="w",
)
add(
    "index_drive",
    "reject",
    "a shard called C:model.safetensors",
    lambda: pointing("C:model.safetensors"),
    field="w",
)
add("index_dot", "reject", "a shard called '.'", lambda: pointing("."), field="w")
add("index_empty_name", "reject", "a shard without a name", lambda: pointing(""), field="w")
add(
    "index_slash_behind",
    "reject",
    "a shard's name with a slash behind it",
    lambda: pointing(bad.A + "/"),
    field="w",
)
add(
    "index_climbs_within",
    "reject",
    "a shard's name that goes up and down again",
    lambda: pointing(f"a/../{bad.A}"),
    field="w",
)
add(
    "index_long_name",
    "reject",
    "a shard's name of 100,000 characters",
    lambda: pointing("m" * 100_000),
)
add(
    "index_escape_name",
    "reject",
    "a shard's name with escapes and a line break",
    lambda: pointing("\x1b[2J\nm"),
    field="w",
)
add(
    "index_bidi_name",
    "reject",
    "a shard's name with a right-to-left override",
    lambda: pointing("a\u202egpj.safetensors"),
    field="w",
)
add(
    "index_surrogate_key",
    "reject",
    "a key that is half a character",
    lambda: raw_index(b'{"weight_map":{"\\ud800":"' + bad.A.encode() + b'"}}'),
)
add(
    "index_list",
    "reject",
    "a weight_map that is a list",
    lambda: indexed([bad.A]),
    field="weight_map",
)
add("index_empty_map", "reject", "a weight_map of nothing", lambda: indexed({}), field="weight_map")
add(
    "index_no_map",
    "reject",
    "no weight_map",
    lambda: raw_index(b'{"metadata":{}}'),
    field="weight_map",
)
add(
    "index_nan",
    "reject",
    "NaN in the index",
    lambda: raw_index(b'{"metadata":{"total_size":NaN},"weight_map":{}}'),
    field="index",
)
add(
    "index_digits",
    "reject",
    "a number of 100,000 digits",
    lambda: raw_index(b'{"metadata":' + b"9" * 100_000 + b"}"),
    field="index",
)
add(
    "index_cut",
    "reject",
    "an index that is cut off",
    lambda: raw_index(b'{"weight_map":{"w":"mod'),
    field="index",
)
add(
    "index_utf16",
    "reject",
    "an index in UTF-16",
    lambda: raw_index('{"weight_map":{}}'.encode("utf-16")),
    field="index",
)
add("index_nothing", "reject", "an index of no bytes", lambda: raw_index(b""), field="index")
add(
    "index_sparse",
    "reject",
    "an index of 10 TiB",
    lambda: {bad.IDX: Sparse(10 << 40), bad.A: GOOD_ST},
)
add(
    "index_lists",
    "reject",
    "30 MB of empty lists",
    lambda: raw_index(b'{"weight_map":[' + b"[]," * 10_000_000 + b"[]]}"),
)
add(
    "index_many_names",
    "reject",
    "100,001 shards that are not there",
    lambda: indexed({str(number): f"{number}.bin" for number in range(100_001)}),
)
add(
    "index_fifo",
    "reject",
    "an index that is a named pipe",
    lambda: {bad.IDX: Fifo(), bad.A: GOOD_ST},
)
add(
    "index_device",
    "reject",
    "an index that is a link to /dev/zero",
    lambda: {bad.IDX: Link("/dev/zero"), bad.A: GOOD_ST},
)
add(
    "index_loop",
    "reject",
    "a shard that is a link to itself",
    lambda: indexed({"w": "loop.bin"}, {"loop.bin": Link("loop.bin")}),
)
add(
    "index_folder_link",
    "reject",
    "a shard in a folder that is a link out of here",
    lambda: indexed({"w": "etc/passwd"}, {"etc": Link("/etc")}),
    field="etc/passwd",
)
add(
    "index_shard_folder",
    "reject",
    "a shard that is a folder",
    lambda: indexed({"w": "sub"}, {"sub/x": b""}),
    field="sub",
)
add(
    "index_shard_empty",
    "reject",
    "a shard of no bytes",
    lambda: indexed({"w": bad.A}, {bad.A: b""}),
    field=bad.A,
)
add(
    "index_shard_cut",
    "reject",
    "a shard that is cut off",
    lambda: indexed({"w": bad.A}, {bad.A: GOOD_ST[:-1]}),
    field=bad.A,
)
add(
    "index_shard_runs",
    "reject",
    "a torch shard that calls posix.mkdir",
    lambda: indexed({"w": "m.bin"}, {"m.bin": bad.ckpt(bad.P2 + bad.PWN + bad.STOP)}),
)
add(
    "index_shard_runs_beside",
    "reject",
    "a torch shard that does so beside the tensor",
    lambda: indexed({"w": "m.bin"}, {"m.bin": beside(bad.PWN)}),
)
add(
    "index_alias_out",
    "reject",
    "a shard whose alias names a key that no shard has",
    lambda: indexed({"w": bad.A, "v": bad.A}, {bad.A: metadata('{"v":"nowhere"}')}),
)
add(
    "index_two",
    "reject",
    "two indexes, neither the usual one",
    lambda: (
        {f"{name}.index.json": json.dumps({"weight_map": {"w": bad.A}}).encode() for name in "ab"}
        | {bad.A: GOOD_ST}
    ),
)
add(
    "index_alone_fifo",
    "reject",
    "model.safetensors is a named pipe",
    lambda: {"model.safetensors": Fifo()},
)
add(
    "index_alone_runs",
    "reject",
    "pytorch_model.bin calls posix.mkdir",
    lambda: {"pytorch_model.bin": bad.ckpt(bad.P2 + bad.PWN + bad.STOP)},
    field="pytorch_model.bin",
)


# ---------------------------------------------------------------------------------------------- DCP

_META = "torch.distributed.checkpoint.metadata"
_F32 = g("torch", "float32")


def instance(module: str, name: str, **fields: bytes) -> bytes:
    """An object as pickle writes a dataclass: made without arguments, its attributes set."""
    return (
        g(module, name) + b")\x81" + d(*((u(key), value) for key, value in fields.items())) + b"b"
    )


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def sized(*sizes: int) -> bytes:
    return call("torch", "Size", ints(sizes))


def described_tensor(
    size: tuple[int, ...],
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]],
    dtype: bytes = _F32,
) -> bytes:
    """`TensorStorageMetadata`; chunks are (offsets, sizes)."""
    layout = call("torch.serialization", "_get_layout", u("torch.strided"))
    plain = call(_META, "_MEM_FORMAT_ENCODING", n(0))
    properties = (
        g(_META, "TensorProperties")
        + b")\x81"
        + t(dtype, layout, bad.FALSE, plain, bad.FALSE)
        + b"b"
    )
    made = [
        instance(_META, "ChunkStorageMetadata", offsets=sized(*at), sizes=sized(*sizes))
        for at, sizes in chunks
    ]
    return instance(
        _META,
        "TensorStorageMetadata",
        properties=properties,
        size=sized(*size),
        chunks=listed(*made),
    )


def placed(
    key: str, at: bytes, name: str, offset: int, length: int, **more: bytes
) -> tuple[bytes, bytes]:
    """An entry of `storage_data`: where the item `key` at `at` lies."""
    index = instance(_META, "MetadataIndex", fqn=u(key), offset=at, index=bad.NONE)
    info = instance(
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo",
        relative_path=u(name),
        offset=n(offset),
        length=n(length),
        **more,
    )
    return index, info


def item(pickle: bytes = bad.GOOD, **given) -> bytes:
    """The stream of one item: a whole torch file."""
    return bad.ckpt(pickle, **given)


CHUNK = item(bad.P2 + tensor() + bad.STOP)
FIRST, SECOND = "__0_0.distcp", "__1_0.distcp"
HALVES = [((0,), (4,)), ((4,), (4,))]


def dcp(
    *,
    size: tuple[int, ...] = (8,),
    chunks: list | None = None,
    dtype: bytes = _F32,
    places: list[tuple[bytes, bytes]] | None = None,
    entries: list[tuple[bytes, bytes]] | None = None,
    paths: list[tuple[bytes, bytes]] | None = None,
    files: Tree | None = None,
    root: bytes = b"",
) -> Tree:
    """A folder of one tensor of eight floats in two halves, one in each file; every part can be
    another one.
    """
    chunks = HALVES if chunks is None else chunks
    places = two_places() if places is None else places
    metadata = instance(
        _META,
        "Metadata",
        state_dict_metadata=d(*(entries or [(u("w"), described_tensor(size, chunks, dtype))])),
        planner_data=d(*(paths or [(u("w"), t(u("w")))])),
        storage_data=d(*places),
    )
    return {
        ".metadata": bad.P2 + (root or metadata) + bad.STOP,
        FIRST: CHUNK,
        SECOND: CHUNK,
        **(files or {}),
    }


def two_places(
    name: str = SECOND, offset: int = 0, length: int = len(CHUNK), at: int = 4, **more: bytes
) -> list[tuple[bytes, bytes]]:
    """The places of both halves; the second one's are given."""
    return [
        placed("w", sized(0), FIRST, 0, len(CHUNK)),
        placed("w", sized(at), name, offset, length, **more),
    ]


def with_object(stream: bytes) -> Tree:
    """The folder with an object `x`, not a tensor, whose stream lies behind the first half."""
    entries = [
        (u("w"), described_tensor((8,), HALVES)),
        (u("x"), instance(_META, "BytesStorageMetadata")),
    ]
    places = [*two_places(), placed("x", bad.NONE, FIRST, len(CHUNK), len(stream))]
    return dcp(
        entries=entries,
        places=places,
        paths=[(u("w"), t(u("w"))), (u("x"), t(u("x")))],
        files={FIRST: CHUNK + stream},
    )


def of_ranks(second: bytes) -> Tree:
    """A folder with the metadata of each rank by itself; that of rank 1 is given as its
    `state_dict_metadata`.
    """

    def alone(entries: bytes, place: tuple[bytes, bytes]) -> bytes:
        return (
            bad.P2
            + instance(_META, "Metadata", state_dict_metadata=entries, storage_data=d(place))
            + bad.STOP
        )

    first, other = two_places()
    halves = [d((u("w"), described_tensor((8,), [half]))) for half in HALVES]
    return {
        "__0.metadata": alone(halves[0], first),
        "__1.metadata": alone(second or halves[1], other),
        FIRST: CHUNK,
        SECOND: CHUNK,
    }


def scalar_chunks(count: int) -> Tree:
    """A tensor of `count` floats in as many chunks, all of which are said to lie in one place."""
    stream = item(bad.P2 + tensor(storage(numel=1), size=(1,)) + bad.STOP, recs={"0": bad.F4[:4]})
    places = [placed("w", sized(at), FIRST, 0, len(stream)) for at in range(count)]
    return dcp(
        size=(count,),
        chunks=[((at,), (1,)) for at in range(count)],
        places=places,
        files={FIRST: stream},
    )


add = DCP.add
add("dcp_good", "accept", "a good folder of one tensor in two halves", dcp, OUTPUTS)
add(
    "dcp_good_ranks",
    "accept",
    "a good folder with the metadata of each rank",
    lambda: of_ranks(b""),
    OUTPUTS,
)
add(
    "dcp_runs",
    "reject",
    "a .metadata that calls posix.mkdir",
    lambda: dcp(root=bad.PWN),
    field=".metadata",
)
add(
    "dcp_runs_in_size",
    "reject",
    "a .metadata whose size is the result of a call",
    lambda: dcp(
        entries=[(u("w"), instance(_META, "TensorStorageMetadata", size=bad.PWN, chunks=b"]"))]
    ),
    field="w",
)
add(
    "dcp_object_runs",
    "reject",
    "an object that calls posix.mkdir",
    lambda: with_object(bad.ckpt(bad.P2 + bad.PWN + bad.STOP)),
    field="x",
)
add(
    "dcp_chunk_runs",
    "reject",
    "a chunk that calls posix.mkdir",
    lambda: dcp(
        files={SECOND: item(bad.P2 + bad.PWN + bad.STOP)},
        places=two_places(length=len(item(bad.P2 + bad.PWN + bad.STOP))),
    ),
    field="w",
)
add("dcp_no_chunks", "reject", "a tensor without chunks", lambda: dcp(chunks=[]), field="w")
add("dcp_gap", "reject", "one half is not listed", lambda: dcp(chunks=HALVES[:1]), field="w")
add(
    "dcp_overlap",
    "reject",
    "two chunks share two values",
    lambda: dcp(size=(6,), chunks=[((0,), (4,)), ((2,), (4,))], places=two_places(at=2)),
    field="w",
)
add(
    "dcp_twice",
    "reject",
    "the first half is listed twice",
    lambda: dcp(chunks=[HALVES[0], *HALVES]),
    field="w",
)
add(
    "dcp_beyond",
    "reject",
    "a chunk that reaches beyond its tensor",
    lambda: dcp(size=(7,)),
    field="w",
)
add(
    "dcp_huge_tensor",
    "reject",
    "a tensor of 2**59 values in two chunks of four",
    lambda: dcp(size=(1 << 59,)),
    field="w",
)
add(
    "dcp_huge_chunk",
    "reject",
    "a chunk that claims 2**59 values",
    lambda: dcp(size=((1 << 59) + 4,), chunks=[HALVES[0], ((4,), (1 << 59,))]),
    field="w",
)
add("dcp_too_large", "reject", "a size of 2**70", lambda: dcp(size=(1 << 70,)), field="w")
add("dcp_negative_size", "reject", "a size of -8", lambda: dcp(size=(-8,)), field="w")
add(
    "dcp_bool_size",
    "reject",
    "a size that is True",
    lambda: dcp(
        entries=[
            (
                u("w"),
                instance(
                    _META,
                    "TensorStorageMetadata",
                    properties=t(_F32),
                    size=t(bad.TRUE),
                    chunks=b"]",
                ),
            )
        ]
    ),
    field="w",
)
add("dcp_dimensions", "reject", "200 dimensions", lambda: dcp(size=(1,) * 200), field="w")
add(
    "dcp_many_axes",
    "reject",
    "split along 20 dimensions: 2**20 corners a chunk",
    lambda: dcp(size=(2,) * 20, chunks=[((at,) * 20, (1,) * 20) for at in (0, 1)]),
    field="w",
)
add(
    "dcp_ranks_differ",
    "reject",
    "a chunk of two dimensions in a tensor of one",
    lambda: dcp(chunks=[HALVES[0], ((4, 0), (4, 1))]),
    field="w",
)
add("dcp_dtype", "reject", "a dtype that is posix.mkdir", lambda: dcp(dtype=MKDIR), field="w")
add(
    "dcp_other_dtype",
    "reject",
    "float16 by the metadata, float32 in the files",
    lambda: dcp(dtype=g("torch", "float16")),
    field="w",
)
add(
    "dcp_other_shape",
    "reject",
    "a chunk of another shape than the metadata says",
    lambda: dcp(size=(9,), chunks=[HALVES[0], ((4,), (5,))]),
    field="w",
)
add(
    "dcp_no_tensor",
    "reject",
    "a chunk that is a dict",
    lambda: dcp(files={SECOND: item()}, places=two_places(length=len(item()))),
    field="w",
)
EXPANDED = item(
    bad.P2 + tensor(storage(numel=1), size=(1 << 40,), stride=(0,)) + bad.STOP,
    recs={"0": bad.F4[:4]},
)
add(
    "dcp_expanded",
    "reject",
    "a chunk of 2**40 values with stride 0",
    lambda: dcp(
        size=(1 << 40,),
        chunks=[((0,), (1 << 40,))],
        places=[placed("w", sized(0), FIRST, 0, len(EXPANDED))],
        files={FIRST: EXPANDED},
    ),
    field="w",
)
add(
    "dcp_offset_beyond",
    "reject",
    "an item beyond the end of its file",
    lambda: dcp(places=two_places(offset=1 << 40)),
    field="w",
)
add(
    "dcp_offset_negative",
    "reject",
    "an item at byte -1",
    lambda: dcp(places=two_places(offset=-1)),
    field="w",
)
add(
    "dcp_offset_huge",
    "reject",
    "an item at byte 2**63",
    lambda: dcp(places=two_places(offset=1 << 63)),
    field="w",
)
add(
    "dcp_length_beyond",
    "reject",
    "an item longer than its file",
    lambda: dcp(places=two_places(length=1 << 40)),
    field="w",
)
add(
    "dcp_length_short",
    "reject",
    "an item one byte too short",
    lambda: dcp(places=two_places(length=len(CHUNK) - 1)),
    field="w",
)
add(
    "dcp_length_zero",
    "reject",
    "an item of no bytes",
    lambda: dcp(places=two_places(length=0)),
    field="w",
)
add(
    "dcp_one_place",
    "reject",
    "two chunks in one place of one file",
    lambda: dcp(places=two_places(FIRST)),
    field="w",
)
add(
    "dcp_overlapping_places",
    "reject",
    "an item that begins within another",
    lambda: dcp(places=two_places(FIRST, 64), files={FIRST: CHUNK + CHUNK}),
    field="w",
)
add(
    "dcp_many_chunks",
    "reject",
    "5,000 chunks whose bytes lie in one place",
    lambda: scalar_chunks(5_000),
    field="w",
)
add(
    "dcp_very_many_chunks",
    "reject",
    "30,000 chunks whose bytes lie in one place",
    lambda: scalar_chunks(30_000),
    field="w",
)
add(
    "dcp_no_place",
    "reject",
    "a chunk of which nothing says where it lies",
    lambda: dcp(places=two_places()[:1]),
    field="w",
)
add(
    "dcp_file_missing",
    "reject",
    "a file that is not there",
    lambda: dcp(places=two_places("__9_0.distcp")),
    field="w",
)
add(
    "dcp_file_climbs",
    "reject",
    "a file outside of the folder",
    lambda: dcp(places=two_places(OUT_OF_HERE)),
    field="w",
)
add(
    "dcp_file_absolute",
    "reject",
    "a file by its absolute path",
    lambda: dcp(places=two_places("/etc/passwd")),
    field="w",
)
add(
    "dcp_file_link",
    "reject",
    "a file that is a link out of the folder",
    lambda: dcp(files={SECOND: Link("/etc/passwd")}),
    field="w",
)
add(
    "dcp_file_device",
    "reject",
    "a file that is a link to /dev/zero",
    lambda: dcp(files={SECOND: Link("/dev/zero")}),
    field="w",
)
add(
    "dcp_file_fifo",
    "reject",
    "a file that is a named pipe",
    lambda: dcp(files={SECOND: Fifo()}),
    field="w",
)
add(
    "dcp_file_folder",
    "reject",
    "a file that is a folder",
    lambda: dcp(places=two_places("sub"), files={"sub/x": b""}),
    field="w",
)
add(
    "dcp_file_metadata",
    "reject",
    "an item that lies in .metadata itself",
    lambda: dcp(places=two_places(".metadata", length=40)),
    field="w",
)
add(
    "dcp_file_escape",
    "reject",
    "a file's name with escapes",
    lambda: dcp(places=two_places("\x1b[2J\n")),
    field="w",
)
add(
    "dcp_file_long",
    "reject",
    "a file's name of 100,000 characters",
    lambda: dcp(places=two_places("m" * 100_000)),
)
add(
    "dcp_file_sparse",
    "reject",
    "a file of 10 TiB",
    lambda: dcp(files={SECOND: Sparse(10 << 40)}),
    field="w",
)
add(
    "dcp_transforms",
    "reject",
    "written through a transform with escapes in its name",
    lambda: dcp(places=two_places(transform_descriptors=listed(u("\x1b[2J")))),
    field="w",
)
add(
    "dcp_cut",
    "reject",
    "a .metadata that is cut off",
    lambda: dcp(files={".metadata": dcp()[".metadata"][:-20]}),
    field=".metadata",
)
add(
    "dcp_empty",
    "reject",
    "a .metadata of no bytes",
    lambda: dcp(files={".metadata": b""}),
    field=".metadata",
)
add(
    "dcp_fifo",
    "reject",
    "a .metadata that is a named pipe",
    lambda: dcp(files={".metadata": Fifo()}),
    field=".metadata",
)
add(
    "dcp_device",
    "reject",
    "a .metadata that is a link to /dev/zero",
    lambda: dcp(files={".metadata": Link("/dev/zero")}),
)
add(
    "dcp_sparse",
    "reject",
    "a .metadata of 10 TiB",
    lambda: dcp(files={".metadata": Sparse(10 << 40)}),
    field=".metadata",
)
add(
    "dcp_deep",
    "reject",
    "a .metadata of a million lists",
    lambda: dcp(root=b"]" * 1_000_000 + b"a" * 999_999),
    field=".metadata",
)
add(
    "dcp_doubled",
    "reject",
    "a key of planner_data that doubles 60 times",
    lambda: dcp(paths=[(DOUBLED, t(u("w")))]),
    field=".metadata",
)
add(
    "dcp_doubled_place",
    "reject",
    "a key of storage_data that doubles 60 times",
    lambda: dcp(places=[(DOUBLED, n(0))]),
    field=".metadata",
)
add(
    "dcp_key_twice",
    "reject",
    "one key with two tensors",
    lambda: dcp(entries=[(u("w"), described_tensor((8,), HALVES))] * 2),
    field=".metadata",
)
add(
    "dcp_path_far",
    "reject",
    "a path to number 10**9 of a list",
    lambda: dcp(paths=[(u("w"), t(u("w"), n(10**9)))]),
    field="w",
)
add(
    "dcp_path_negative",
    "reject",
    "a path to number -1 of a list",
    lambda: dcp(paths=[(u("w"), t(u("w"), n(-1)))]),
    field="w",
)
add(
    "dcp_path_deep",
    "reject",
    "a path of 100,000 names",
    lambda: dcp(paths=[(u("w"), t(*[u("a")] * 100_000))]),
    field="w",
)
add(
    "dcp_ranks_contradict",
    "reject",
    "two ranks say two shapes",
    lambda: of_ranks(d((u("w"), described_tensor((9,), HALVES[1:])))),
    field="w",
)
add(
    "dcp_common_runs",
    "reject",
    "Megatron's common.pt calls posix.mkdir",
    lambda: dcp(
        files={
            "common.pt": bad.ckpt(bad.P2 + d((u("x"), bad.PWN)) + bad.STOP),
            "metadata.json": b"{}",
        }
    ),
)
add(
    "dcp_common_same",
    "reject",
    "Megatron's common.pt holds a key of .metadata",
    lambda: dcp(
        files={"common.pt": bad.ckpt(bad.GOOD), "metadata.json": b"{}"}, paths=[(u("w"), t(u("w")))]
    ),
    field="w",
)


def rank_file(start: object, shape: tuple[int, ...] = (4,)) -> bytes:
    """A rank's file of DCP's HuggingFace writer, its chunk of `w` beginning at `start`."""
    text = start if isinstance(start, str) else json.dumps({"w": {"saved_offsets": start}})
    fields = {"__metadata__": {"DCP_SHARDING_INFO": text}, "w": bad.ti(list(shape), 0, 16)}
    return bad.st(fields, bad.F4)


def rank_files(first: object, second: object) -> Tree:
    return {
        f"shard-0000{rank}-model-00001-of-00001.safetensors": rank_file(start)
        for rank, start in enumerate((first, second))
    }


add("dcp_st_good", "warn", "good rank files of two halves", lambda: rank_files([0], [4]), OUTPUTS)
add("dcp_st_gap", "reject", "rank files with a gap", lambda: rank_files([0], [5]), field="w")
add(
    "dcp_st_overlap",
    "reject",
    "rank files that share values",
    lambda: rank_files([0], [3]),
    field="w",
)
add(
    "dcp_st_huge", "reject", "saved_offsets of 2**59", lambda: rank_files([0], [1 << 59]), field="w"
)
add(
    "dcp_st_negative",
    "reject",
    "saved_offsets of -4",
    lambda: rank_files([0], [-4]),
    field="DCP_SHARDING_INFO",
)
add(
    "dcp_st_dimensions",
    "reject",
    "saved_offsets of two dimensions",
    lambda: rank_files([0], [4, 0]),
    field="w",
)
add(
    "dcp_st_no_list",
    "reject",
    "saved_offsets that are a number",
    lambda: rank_files([0], 4),
    field="DCP_SHARDING_INFO",
)
add(
    "dcp_st_deep",
    "reject",
    "100,000 nested lists",
    lambda: rank_files([0], "[" * 100_000),
    field="header",
)


# ---------------------------------------------------------------------------- accelerate, DeepSpeed


def accelerated(**files: Entry) -> Tree:
    """A folder of `save_state`; names with a double underscore for the dot."""
    usual: dict[str, Entry] = {"model.safetensors": GOOD_ST, "random_states_0.pkl": one(tensor())}
    return usual | {name.replace("__", "."): content for name, content in files.items()}


add = OTHERS.add
add("accelerate_good", "accept", "a good folder", accelerated)
add(
    "accelerate_runs",
    "reject",
    "random states that call posix.mkdir",
    lambda: accelerated(random_states_0__pkl=bad.ckpt(bad.P2 + bad.PWN + bad.STOP)),
)
add(
    "accelerate_optimizer_runs",
    "reject",
    "an optimizer that does so",
    lambda: accelerated(optimizer__bin=bad.ckpt(bad.P2 + bad.PWN + bad.STOP)),
)
add(
    "accelerate_scheduler_pickle",
    "reject",
    "a scheduler that is a bare pickle of a payload",
    lambda: accelerated(scheduler__bin=bad.P2 + bad.PWN + bad.STOP),
    field="scheduler.bin",
)
add(
    "accelerate_cut",
    "reject",
    "weights that are cut off",
    lambda: accelerated(model__safetensors=GOOD_ST[:-1]),
    field="model.safetensors",
)
add(
    "accelerate_optimizer_empty",
    "reject",
    "an optimizer of no bytes",
    lambda: accelerated(optimizer__bin=b""),
    field="optimizer.bin",
)
add(
    "accelerate_fifo",
    "reject",
    "weights that are a named pipe",
    lambda: accelerated(model__safetensors=Fifo()),
    field="model.safetensors",
)
add(
    "accelerate_device",
    "reject",
    "weights that are a link to /dev/zero",
    lambda: accelerated(model__safetensors=Link("/dev/zero")),
    field="model.safetensors",
)

STEP = "global_step1"
MODEL, OPTIM = (
    f"{STEP}/mp_rank_00_model_states.pt",
    f"{STEP}/zero_pp_rank_0_mp_rank_00_optim_states.pt",
)


def states(**fields: bytes) -> bytes:
    """Model states of stage 2: one parameter `w` of four elements."""
    usual = {
        "module": d((u("w"), tensor())),
        "param_shapes": listed(d((u("w"), sized(4)))),
        "buffer_names": b"]",
    }
    return bad.ckpt(
        bad.P2 + d(*((u(key), value) for key, value in (usual | fields).items())) + bad.STOP
    )


def optimizer(**fields: bytes) -> bytes:
    """Optimizer states of stage 2: one partition of four elements."""
    usual = {
        "zero_stage": n(2),
        "partition_count": n(1),
        "single_partition_of_fp32_groups": listed(tensor()),
    }
    inner = d(*((u(key), value) for key, value in (usual | fields).items()))
    return bad.ckpt(bad.P2 + d((u("optimizer_state_dict"), inner)) + bad.STOP)


def deepspeed(latest: bytes = STEP.encode(), **files: Entry) -> Tree:
    """A folder of one step; `model` and `optim` are its files, `more` a further one."""
    made: dict[str, Entry] = {
        "latest": latest,
        MODEL: files.pop("model", states()),
        OPTIM: files.pop("optim", optimizer()),
    }
    return made | {f"{STEP}/{name}": content for name, content in files.items()}


add("deepspeed_good", "warn", "a good folder of stage 2", deepspeed, OUTPUTS)
add(
    "deepspeed_latest_climbs",
    "reject",
    "'latest' names a folder outside",
    lambda: deepspeed(b"../../../../etc"),
    field="latest",
)
add(
    "deepspeed_latest_absolute",
    "reject",
    "'latest' names /etc",
    lambda: deepspeed(b"/etc"),
    field="latest",
)
add(
    "deepspeed_latest_escape",
    "reject",
    "'latest' with escapes and line breaks",
    lambda: deepspeed(b"a\x1b[2J\nb"),
    field="latest",
)
add(
    "deepspeed_latest_zeros",
    "reject",
    "'latest' is a megabyte of zeros",
    lambda: deepspeed(bytes(1 << 20)),
    field="latest",
)
add(
    "deepspeed_latest_missing",
    "reject",
    "'latest' names a step that is not there",
    lambda: deepspeed(b"global_step9"),
    field="latest",
)
add(
    "deepspeed_runs",
    "reject",
    "optimizer states that call posix.mkdir",
    lambda: deepspeed(optim=bad.ckpt(bad.P2 + bad.PWN + bad.STOP)),
)
add(
    "deepspeed_model_runs",
    "reject",
    "model states that do so beside the weights",
    lambda: deepspeed(model=states(x=bad.PWN)),
)
add(
    "deepspeed_rank_missing",
    "reject",
    "two ranks wrote it, one is here",
    lambda: deepspeed(optim=optimizer(partition_count=n(2))),
)
add(
    "deepspeed_ranks_huge",
    "reject",
    "2**40 ranks wrote it",
    lambda: deepspeed(optim=optimizer(partition_count=n(1 << 40))),
    field="partition_count",
)
add(
    "deepspeed_stage",
    "reject",
    "ZeRO stage 7",
    lambda: deepspeed(optim=optimizer(zero_stage=n(7))),
    field="optimizer_state_dict",
)
add(
    "deepspeed_rank_twice",
    "reject",
    "two files of rank 0",
    lambda: deepspeed(**{"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": optimizer()}),
)
add(
    "deepspeed_shapes_more",
    "reject",
    "shapes of more elements than there are",
    lambda: deepspeed(model=states(param_shapes=listed(d((u("w"), sized(5)))))),
    field="w",
)
add(
    "deepspeed_shapes_less",
    "reject",
    "shapes of fewer elements than there are",
    lambda: deepspeed(model=states(param_shapes=listed(d((u("w"), sized(1)))))),
    field="group 0",
)
add(
    "deepspeed_shapes_huge",
    "reject",
    "a shape of 2**62 elements",
    lambda: deepspeed(model=states(param_shapes=listed(d((u("w"), sized(1 << 62)))))),
    field="w",
)
add(
    "deepspeed_shapes_negative",
    "reject",
    "a shape of -4",
    lambda: deepspeed(model=states(param_shapes=listed(d((u("w"), sized(-4)))))),
    field="param_shapes.w",
)
add(
    "deepspeed_shapes_number",
    "reject",
    "shapes that are a number",
    lambda: deepspeed(model=states(param_shapes=n(4))),
    field="param_shapes",
)
add(
    "deepspeed_groups_differ",
    "reject",
    "shapes of two groups, partitions of one",
    lambda: deepspeed(
        model=states(param_shapes=listed(d((u("w"), sized(4))), d((u("v"), sized(4)))))
    ),
    field="param_shapes",
)
add(
    "deepspeed_partition_no_tensor",
    "reject",
    "a partition that is a number",
    lambda: deepspeed(optim=optimizer(single_partition_of_fp32_groups=listed(n(4)))),
    field="single_partition_of_fp32_groups",
)
add(
    "deepspeed_no_module",
    "reject",
    "model states without a module",
    lambda: deepspeed(model=states(module=bad.NONE)),
)
add(
    "deepspeed_module_absent",
    "reject",
    "model states in which 'module' is not an entry",
    lambda: deepspeed(
        model=bad.ckpt(bad.P2 + d((u("param_shapes"), listed(d((u("w"), sized(4)))))) + bad.STOP)
    ),
)
add(
    "deepspeed_paddings",
    "reject",
    "paddings of 2**62",
    lambda: deepspeed(optim=optimizer(param_alignment_paddings=listed(listed(n(1 << 62))))),
)
add(
    "deepspeed_link_out",
    "reject",
    "optimizer states that are a link out of the folder",
    lambda: deepspeed(optim=Link("/etc/passwd")),
)
add(
    "deepspeed_fifo",
    "reject",
    "optimizer states that are a named pipe",
    lambda: deepspeed(optim=Fifo()),
)
add(
    "deepspeed_cut",
    "reject",
    "optimizer states that are cut off",
    lambda: deepspeed(optim=optimizer()[:-30]),
)
