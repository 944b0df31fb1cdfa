"""Files made up with hypothesis from the rules of their formats: mostly right, so that they are
read far, and wrong somewhere.

Pickle programs in every container that holds one, zip directories, tar headers, safetensors
and GGUF headers, DCP metadata, indexes of shards, key rules. Nothing here needs torch.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzzing.inputs import Trial
from fuzzing.mutations import EDGES, MONSTERS, TEXTS, tar_repaired
from helpers import gguf_files as made
from helpers import old_torch
from helpers.old_torch import Made, Name, OldPickler

Draw = st.DrawFn
STORAGE = bytes(range(64))
"""The bytes of every storage."""

# ------------------------------------------------------------------------------------------ numbers

small = st.integers(0, 4)
edges = st.sampled_from(EDGES)
sizes = st.one_of(small, small, small, small, st.integers(-2, 70), edges)
"""Numbers that are sizes, nearly always."""
texts = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(["a", "b", "w", "module.w", "model.b"]),
    st.text(max_size=8),
)
names = st.sampled_from(["w", "b", "module.w", "a.b", "a", "fc.weight"])


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`odd` in one case of ten."""
    return st.integers(0, 9).flatmap(lambda chance: odd if chance == 9 else usual)


def rarely(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`odd` in one case of forty."""
    return st.integers(0, 39).flatmap(lambda chance: odd if chance == 39 else usual)


# ---------------------------------------------------------------------------------- pickle programs


def text_op(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def int_op(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def tuple_op(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def global_op(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode("utf-8", "surrogatepass")


def call_op(path: str, *arguments: bytes) -> bytes:
    return global_op(path) + tuple_op(*arguments) + b"R"


GLOBALS = (
    "torch.float32", "torch.int64", "torch.quint8", "torch.per_tensor_affine", "torch.Size",
    "torch.device", "builtins.set",
    "builtins.complex", "builtins.bytearray", "collections.OrderedDict", "collections.defaultdict",
    "collections.Counter",
    "_codecs.encode", "torch.nn.parameter.Parameter", "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_nested_tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_wrapper_subclass", "torch._utils._rebuild_meta_tensor_no_storage",
    "torch.serialization._get_layout",
    "torch.storage._load_from_bytes", "torch.storage.UntypedStorage",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy.ndarray", "numpy.dtype",
    "torch.nn.modules.container.Sequential",
    "torch.nn.modules.linear.Linear", "torch.distributed.tensor.DTensor", "argparse.Namespace",
    "builtins.getattr",
    "fuzzing.payload.run", "copyreg._reconstructor", "builtins.object", "torch.bfloat16",
    "pathlib.PosixPath",
    "datetime.datetime",
)  # fmt: skip


STORAGES = {
    "0": ("FloatStorage", "cpu", 16),
    "1": ("LongStorage", "cuda:1", 8),
    "2": ("ByteStorage", "cpu", 64),
}
"""The storages that every container here holds: class, location, element count."""


def storage_op(key: str) -> bytes:
    cls, location, numel = STORAGES[key]
    return (
        tuple_op(
            text_op("storage"),
            global_op(f"torch.{cls}"),
            text_op(key),
            text_op(location),
            int_op(numel),
        )
        + b"Q"
    )


def inner_storage_op(key: str) -> bytes:
    """A storage as a bare pickle has it: a call with a torch stream of its own."""
    cls, location, numel = STORAGES[key]
    root = old_torch.storage(cls, key, location, numel)
    stream = old_torch.legacy(root, (key,), old_torch.blob(numel, STORAGE))
    return call_op("torch.storage._load_from_bytes", b"B" + struct.pack("<I", len(stream)) + stream)


@st.composite
def odd_storages(draw: Draw) -> bytes:
    """A persistent id with other parts, or of a storage that is not there."""
    cls = draw(
        mostly(
            st.sampled_from([name for name, _, _ in STORAGES.values()]).map(
                lambda name: global_op(f"torch.{name}")
            ),
            LEAVES,
        )
    )
    parts = [
        text_op("storage"),
        cls,
        text_op(draw(texts)),
        text_op(draw(texts)),
        int_op(draw(sizes)),
        draw(LEAVES),
    ]
    return tuple_op(*parts[: draw(st.sampled_from([3, 4, 5, 5, 5, 6]))]) + b"Q"


storages = mostly(st.sampled_from(sorted(STORAGES)).map(storage_op), st.deferred(odd_storages))


@st.composite
def tensors(draw: Draw) -> bytes:
    """A view of a storage; now and then beyond it, or with arguments of other kinds."""
    shape = draw(st.lists(small, max_size=2))
    stride = [1] if len(shape) < 2 else draw(st.sampled_from([[1, shape[0]], [shape[1], 1]]))
    if draw(st.integers(0, 9)) == 9:
        shape, stride = draw(st.lists(sizes, max_size=3)), draw(st.lists(sizes, max_size=3))
    arguments = [
        draw(storages),
        int_op(draw(mostly(st.just(0), sizes))),
        tuple_op(*map(int_op, shape)),
        tuple_op(*map(int_op, stride[: len(shape)])),
        draw(rarely(st.sampled_from([b"\x89", b"\x88"]), LEAVES)),
        draw(rarely(st.just(call_op("collections.OrderedDict")), LEAVES)),
        *draw(rarely(st.just([]), st.lists(LEAVES, max_size=2))),
    ]
    return call_op(
        "torch._utils._rebuild_tensor_v2",
        *arguments[: draw(rarely(st.just(len(arguments)), small))],
    )


@st.composite
def arrays(draw: Draw) -> bytes:
    """A numpy array of four bytes, or one that claims others."""
    kind = draw(mostly(st.just("f4"), st.sampled_from(["i8", "U3", "O", "V4", "b1", "x", "M8"])))
    dtype = call_op("numpy.dtype", text_op(kind), b"\x89", b"\x88")
    dtype += (
        tuple_op(
            int_op(3),
            text_op(draw(mostly(st.just("<"), texts))),
            b"NNN",
            b"J\xff\xff\xff\xff" * 2,
            int_op(0),
        )
        + b"b"
    )
    raw = draw(rarely(st.just(b"C\4abcd"), LEAVES))
    shape = draw(rarely(st.just([1]), st.lists(sizes, max_size=3)))
    made = call_op(
        "numpy.core.multiarray._reconstruct",
        global_op("numpy.ndarray"),
        tuple_op(int_op(0)),
        b"C\1b",
    )
    return (
        made
        + tuple_op(
            int_op(1),
            tuple_op(*map(int_op, shape)),
            dtype,
            draw(st.sampled_from([b"\x89", b"\x88"])),
            raw,
        )
        + b"b"
    )


LEAVES = st.one_of(
    rarely(sizes.map(int_op), st.sampled_from(MONSTERS)),
    texts.map(text_op),
    st.sampled_from([b"N", b"\x88", b"\x89", b")", b"}", b"]", b"C\2ab", b"\x96" + struct.pack("<Q",
        2) + b"ab"]),
    st.sampled_from(GLOBALS).map(global_op),
    st.floats(width=64).map(lambda value: b"G" + struct.pack(">d", value)),
)  # fmt: skip


def values(depth: int) -> st.SearchStrategy[bytes]:
    """The opcodes that leave one value on the stack, at most `depth` containers deep."""
    if depth == 0:
        return LEAVES
    inner = st.deferred(lambda: values(depth - 1))
    pairs = st.lists(st.tuples(mostly(texts.map(text_op), inner), inner), max_size=4)
    return st.one_of(
        LEAVES,
        tensors(),
        tensors(),
        arrays(),
        storages,
        st.lists(inner, max_size=4).map(lambda items: tuple_op(*items)),
        st.lists(inner, max_size=4).map(lambda items: b"](" + b"".join(items) + b"e"),
        st.lists(inner, max_size=4).map(lambda items: b"\x8f(" + b"".join(items) + b"\x90"),
        pairs.map(lambda items: b"}(" + b"".join(key + value for key, value in items) + b"u"),
        st.tuples(st.sampled_from(GLOBALS), st.lists(inner, max_size=5)).map(
            lambda made: call_op(made[0], *made[1])
        ),
        st.tuples(inner, inner).map(lambda both: both[0] + both[1] + b"b"),
        st.tuples(st.sampled_from(GLOBALS), inner).map(
            lambda made: global_op(made[0]) + made[1] + b"\x85\x81"
        ),
        st.tuples(st.integers(0, 3), inner).map(lambda put: put[1] + b"q" + bytes([put[0]])),
        st.integers(0, 3).map(lambda index: b"h" + bytes([index])),
        st.tuples(
            st.sampled_from([b"]q\0h\0a", b"}q\0(K\1h\0u", b"]q\1(h\1h\1e", b"}q\2X\1\0\0\0ah\2s"]),
            inner,
        ).map(lambda both: tuple_op(both[0], both[1])),
    )


@st.composite
def pickles(draw: Draw) -> bytes:
    """A pickle of a dict; now and then opcodes are missing, doubled or put in."""
    entries = draw(
        st.lists(
            st.tuples(rarely(names.map(text_op), values(1)), st.one_of(tensors(), values(2))),
            max_size=4,
        )
    )
    entries.append((text_op("z"), draw(tensors())))
    stream = b"\x80\x02}q\x09(" + b"".join(key + value for key, value in entries) + b"u."
    stream = draw(mostly(st.just(stream), values(3).map(lambda root: b"\x80\x04" + root + b".")))
    if draw(st.integers(0, 9)) == 9:
        at = draw(st.integers(2, len(stream)))
        lone = draw(
            st.sampled_from(
                [
                    b"0",
                    b"1",
                    b"2",
                    b"(",
                    b"R",
                    b"b",
                    b"a",
                    b"s",
                    b"u",
                    b"e",
                    b"t",
                    b"Q",
                    b"\x81",
                    b"\x93",
                    b"\x94",
                ]
            )
        )
        stream = stream[:at] + lone + stream[at:]
    return stream


@st.composite
def pickled_files(draw: Draw) -> Trial:
    """A pickle program in one of the containers that hold one."""
    stream = draw(pickles())
    bare = stream
    for key in STORAGES:
        bare = bare.replace(storage_op(key), inner_storage_op(key))
    kind = draw(
        st.sampled_from(["zip", "zip", "zip", "legacy", "pickle", "member", "script", "accelerate"])
    )
    if kind == "zip":
        return Trial({"in.pt": torch_zip(stream)}, ("in.pt",))
    if kind == "legacy":
        keys = [key for key in STORAGES if storage_op(key) in stream]
        blobs = b"".join(old_torch.blob(STORAGES[key][2], STORAGE) for key in keys)
        head = old_torch.legacy({}, ())[: -len(old_torch.pickled({}) + old_torch.pickled([]))]
        return Trial({"in.pt": head + stream + old_torch.pickled(keys) + blobs}, ("in.pt",))
    if kind == "pickle":
        return Trial({"in.pkl": bare}, ("in.pkl",))
    if kind == "member":
        return Trial(
            {"in.zip": zipped([("a.pkl", bare, 8), ("b/c.pt", torch_zip(stream), 0)])}, ("in.zip",)
        )
    if kind == "script":
        code = (
            b'class M(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = ["b", ]\n  w : Tensor\n'
        )
        root = b"\x80\x02c__torch__\nM\n)\x81" + stream[2:-1] + b"b."
        records = [
            ("a/data.pkl", root, 0),
            ("a/constants.pkl", b"\x80\x02).", 0),
            ("a/code/__torch__.py", code, 0),
        ]
        return Trial(
            {"in.pt": zipped([*records, *((f"a/data/{key}", STORAGE, 0) for key in "012")])},
            ("in.pt",),
        )
    return Trial(
        {
            "model.safetensors": flat_file({}, b""),
            "random_states_0.pkl": bare,
            "optimizer.bin": torch_zip(stream),
        }
    )


# --------------------------------------------------------------------------------------------- zips

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")


def zipped(records: list[tuple[str, bytes, int]]) -> bytes:
    """A right archive of (name, payload, method)."""
    return archive(
        [
            {"name": name.encode(), "payload": payload, "method": method}
            for name, payload, method in records
        ]
    )


def torch_zip(stream: bytes) -> bytes:
    storages_ = [(f"archive/data/{key}", STORAGE, 0) for key in "012"]
    return zipped(
        [
            ("archive/data.pkl", stream, 0),
            ("archive/byteorder", b"little", 0),
            *storages_,
            ("archive/version", b"3\n", 0),
        ]
    )


def archive(
    records: list[dict[str, Any]], end: dict[str, int] | None = None, comment: bytes = b""
) -> bytes:
    """An archive in which any field of any header can be given: ``l_`` of the local, ``c_`` of the
    central one.
    """
    out, directory = bytearray(), bytearray()
    for record in records:
        local, central = _record(record, len(out))
        out += local
        directory += central
    at = {
        "count": len(records),
        "here": len(records),
        "size": len(directory),
        "start": len(out),
        "comment": len(comment),
    }
    at |= end or {}
    last = _END.pack(
        b"PK\5\6",
        0,
        0,
        _u16(at["here"]),
        _u16(at["count"]),
        _u32(at["size"]),
        _u32(at["start"]),
        _u16(at["comment"]),
    )
    return bytes(out + directory) + last + comment


def _record(record: dict[str, Any], offset: int) -> tuple[bytes, bytes]:
    payload, method = record["payload"], record["method"]
    stored = payload
    if method == 8:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        stored = deflate.compress(payload) + deflate.flush()
    name = record["name"]
    usual = {"flags": 0, "method": method, "crc": zlib.crc32(payload), "stored": len(stored),
        "plain": len(payload),
             "extra": b"", "name": name, "header": offset}  # fmt: skip
    here, there = (
        {**usual, **{key[2:]: value for key, value in record.items() if key[:2] == side}}
        for side in ("l_", "c_")
    )
    extra = here["extra"]
    if not extra:
        padding = -(offset + _LOCAL.size + len(here["name"]) + 4) % 64
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    local = _LOCAL.pack(b"PK\3\4", 20, _u16(here["flags"]), _u16(here["method"]), 0, 0x21,
        _u32(here["crc"]),
                        _u32(here["stored"]), _u32(here["plain"]), len(here["name"]),
                        len(extra))  # fmt: skip
    central = _CENTRAL.pack(b"PK\1\2", 20, 20, _u16(there["flags"]), _u16(there["method"]), 0, 0x21,
        _u32(there["crc"]),
                            _u32(there["stored"]), _u32(there["plain"]), len(there["name"]),
                            len(there["extra"]), 0, 0, 0, 0,
                            _u32(there["header"]))  # fmt: skip
    return local + here["name"] + extra + stored, central + there["name"] + there["extra"]


def _u16(value: int) -> int:
    return value & 0xFFFF


def _u32(value: int) -> int:
    return value & 0xFFFFFFFF


FIELDS = ("flags", "method", "crc", "stored", "plain", "header")
GOOD_PICKLE = b"\x80\x02}X\1\0\0\0w" + call_op(
    "torch._utils._rebuild_tensor_v2",
    tuple_op(text_op("storage"), global_op("torch.FloatStorage"), text_op("0"), text_op("cpu"),
        int_op(16)) + b"Q",
    int_op(0), tuple_op(int_op(16)), tuple_op(int_op(1)), b"\x89",
    call_op("collections.OrderedDict"),
) + b"s."  # fmt: skip


@st.composite
def zip_directories(draw: Draw) -> Trial:
    """A checkpoint whose archive lies about one to three things."""
    extra = draw(st.lists(st.tuples(texts, st.sampled_from([0, 8])), max_size=2))
    records: list[dict[str, Any]] = [
        {
            "name": b"archive/data.pkl",
            "payload": GOOD_PICKLE,
            "method": draw(st.sampled_from([0, 0, 8])),
        },
        {"name": b"archive/data/0", "payload": STORAGE, "method": draw(st.sampled_from([0, 0, 8]))},
        *(
            {
                "name": f"archive/{name}".encode("utf-8", "replace"),
                "payload": b"x",
                "method": method,
            }
            for name, method in extra
        ),
    ]
    end: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 3))):
        record = draw(st.sampled_from(records))
        side = draw(st.sampled_from(["l_", "c_", "end"]))
        number = draw(st.one_of(edges, st.integers(0, 700)))
        if side == "end":
            end[draw(st.sampled_from(["count", "here", "size", "start", "comment"]))] = number
        elif draw(st.integers(0, 4)) == 4:
            record[side + "extra"] = draw(st.one_of(zip64_fields(), st.binary(max_size=20)))
        elif draw(st.integers(0, 6)) == 6:
            record[side + "name"] = draw(texts).encode("utf-8", "surrogatepass")
        else:
            record[side + draw(st.sampled_from(FIELDS))] = number
    comment = draw(mostly(st.just(b""), st.sampled_from([b"x", b"PK\5\6", b"PK\5\6" + bytes(18)])))
    return Trial({"in.pt": archive(records, end, comment)}, ("in.pt",))


def zip64_fields() -> st.SearchStrategy[bytes]:
    numbers = st.lists(
        st.one_of(st.sampled_from([16, 64, 128]), edges.map(lambda value: value % (1 << 64))),
        max_size=3,
    )
    return numbers.map(lambda found: struct.pack(f"<HH{len(found)}Q", 1, 8 * len(found), *found))


# --------------------------------------------------------------------------------------------- tars


@st.composite
def tar_files(draw: Draw) -> Trial:
    """A tar checkpoint with members made up, and headers that lie under right checksums."""
    members: dict[str, Any] = {
        "sys_info": {
            "protocol_version": 1000,
            "little_endian": draw(mostly(st.just(True), st.just(False))),
        },
        "pickle": {
            "state_dict": {draw(names): old_torch.Persistent(draw(mostly(st.just(21), sizes)))},
            "epoch": 3,
        },
    }
    content = {name: old_torch.pickled(tree) for name, tree in members.items()}
    content["pickle"] = draw(mostly(st.just(content["pickle"]), pickles()))
    count = draw(mostly(st.just(None), sizes))
    views = tuple(
        draw(
            st.lists(
                st.tuples(mostly(st.just(13), sizes), mostly(st.just(11), sizes), sizes, sizes),
                max_size=2,
            )
        )
    )
    numel = draw(mostly(st.just(16), st.one_of(st.integers(-1, 20), st.just((1 << 63) - 1))))
    storages_ = [
        (11, "cpu", draw(st.sampled_from(["FloatStorage", "HalfStorage", "x"])), STORAGE, numel)
    ]
    content["storages"] = old_torch.tar_storages(storages_, views, count=count)
    shape = draw(st.lists(sizes, max_size=3))
    within = [max(-(1 << 63), min(size, (1 << 63) - 1)) for size in shape]
    content["tensors"] = old_torch.tar_tensors(
        [(21, 11, "FloatTensor", within, within[::-1], draw(small))], count=count
    )
    for name in draw(
        mostly(st.just([]), st.lists(st.sampled_from(sorted(content)), max_size=2, unique=True))
    ):
        del content[name]
    return Trial({"in.pt": draw(lying_tar(list(content.items())))}, ("in.pt",))


TAR_FIELDS = (b"0", b"1", b"2", b"5", b"x", b"g", b"L", b"K", b"S", b"77777777777", b"-1",
    b"\x80" + b"\xff" * 11, b"../x",
              b"storages", b"\xff", b"\0", b"1000", b"0o7")  # fmt: skip


@st.composite
def lying_tar(draw: Draw, members: list[tuple[str, bytes]]) -> bytes:
    """An archive of which fields of a header are overwritten; the pax headers are left out half of
    the time.
    """
    whole = bytearray(
        old_torch.tar(members, mtime=draw(st.sampled_from([1480000000.25, 1480000000.0])))
    )
    headers = [
        at for at in range(0, len(whole) - 511, 512) if whole[at + 257 : at + 262] == b"ustar"
    ]
    fields = {
        "name": (0, 100),
        "mode": (100, 8),
        "size": (124, 12),
        "type": (156, 1),
        "link": (157, 100),
        "prefix": (345, 155),
    }
    for _ in range(draw(st.integers(0, 2)) if headers else 0):
        at = draw(st.sampled_from(headers))
        place, width = fields[draw(st.sampled_from(sorted(fields)))]
        raw = draw(st.sampled_from(TAR_FIELDS))
        whole[at + place : at + place + width] = raw[:width].ljust(width, b"\0")
    return tar_repaired(bytes(whole))


# -------------------------------------------------------------------------------------- safetensors


def flat_file(header: Any, payload: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + payload


ITEMSIZES = {
    "F32": 4,
    "F16": 2,
    "I64": 8,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F4": 1,
    "F8_E8M0": 1,
    "BF16": 2,
}
RECIPES = ("sparse", "quantized", "nested", "complex")


@st.composite
def flat_entries(draw: Draw) -> tuple[dict[str, Any], bytes]:
    """A header with tensors side by side, and the payload that it speaks of."""
    header: dict[str, Any] = {}
    at = 0
    suffixes = [".indices", ".values", ".integers", ".scales", ".real_imag", ".sizes", ".buffer",
        ".strides", ".offsets",
                ".compressed_indices", ".plain_indices", ".zero_points", "", "", "",
                ""]  # fmt: skip
    for key in draw(
        st.lists(
            st.tuples(mostly(names, texts), st.sampled_from(suffixes)).map("".join), max_size=5
        )
    ):
        dtype = draw(mostly(st.sampled_from(sorted(ITEMSIZES)), texts))
        shape = draw(st.lists(small, max_size=3))
        nbytes = ITEMSIZES.get(dtype, 1)
        for size in shape:
            nbytes *= size
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        if draw(st.integers(0, 15)) == 15:
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(
                json_values()
            )
        header[key] = entry
        at += nbytes
    return header, bytes(index % 251 for index in range(at))


@st.composite
def flat_files(draw: Draw) -> Trial:
    """A safetensors file, with metadata now and then that tells of aliases and encodings."""
    header, payload = draw(flat_entries())
    metadata = draw(st.dictionaries(mostly(names, texts), mostly(names, texts), max_size=3))
    if draw(st.booleans()):
        metadata["ckptconv.encodings"] = draw(recipes())
    if draw(st.booleans()):
        header["__metadata__"] = draw(mostly(st.just(metadata), json_values()))
    payload = draw(mostly(st.just(payload), st.binary(max_size=64)))
    return Trial({"in.safetensors": flat_file(header, payload)}, ("in.safetensors",))


@st.composite
def recipes(draw: Draw) -> str:
    """What is said of how tensors were taken apart."""
    layouts = st.sampled_from(
        ["torch.sparse_coo", "torch.sparse_csr", "torch.sparse_bsc", "torch.strided"]
    )
    fields = {
        "dtype": st.sampled_from(["complex128", "complex32", "qint8", "quint8", "float32"]),
        "layout": layouts,
        "size": st.lists(sizes, max_size=3),
        "coalesced": st.booleans(),
        "scheme": st.sampled_from(["torch.per_tensor_affine", "torch.per_channel_affine"]),
        "scale": st.floats(),
        "zero_point": sizes,
        "axis": sizes,
    }
    recipe = st.fixed_dictionaries(
        {"encoding": mostly(st.sampled_from(RECIPES), texts)}, optional=fields
    )
    found = draw(
        mostly(st.dictionaries(names, mostly(recipe, json_values()), max_size=3), json_values())
    )
    return draw(mostly(st.just(json.dumps(found)), texts))


@st.composite
def gguf_files(draw: Draw) -> Trial:
    """A GGUF file, or one of a set by its metadata; what it says of its sizes is right, mostly."""
    unsigned = edges.map(lambda value: abs(value) % (1 << 64))
    names_of = draw(st.lists(mostly(names, texts), max_size=4))
    told, at = [], 0
    for name in names_of:
        dims = draw(mostly(st.lists(small, max_size=4), st.lists(unsigned, max_size=6)))
        kind = draw(mostly(st.sampled_from([0, 1, 24, 30]), st.integers(0, 45)))
        dims = [32 * size % (1 << 64) for size in dims] if kind == made.Q4_0 else dims
        told.append(made.tensor(_utf8(name), dims, kind, draw(mostly(st.just(at), unsigned))))
        at = (at - (-prod(dims) * {0: 4, 24: 1}.get(kind, 2) // 32) * 32) % (1 << 63)
    metadata = [
        made.number(made.ALIGNMENT, draw(mostly(st.just(32), small))),
        made.entry("a.name", made.TEXT, made.text(_utf8(draw(texts)))),
        made.array("a.list", made.UINT32, draw(mostly(st.just(2), unsigned)), bytes(8)),
        made.array("a.texts", made.TEXT, draw(mostly(st.just(1), unsigned)), made.text("w")),
        *made.split(draw(small), draw(small), draw(small)),
    ]
    chosen = draw(st.lists(st.sampled_from(metadata), max_size=7))
    counts = draw(mostly(st.just((len(told), len(chosen))), st.tuples(unsigned, unsigned)))
    version = draw(rarely(st.sampled_from([2, 3, 3]), st.integers(0, 9)))
    data = bytes(min(at, 4096))
    raw = made.gguf(*told, metadata=chosen, data=data, version=version, counts=counts)
    return Trial({"in.gguf": raw}, ("in.gguf",))


def quantised_folders() -> st.SearchStrategy[Trial]:
    """Folders of quantised weights, for which torch is needed."""
    from fuzzing import quantised

    return quantised.folders()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), sizes, edges, st.floats(), texts)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)
        ),
    )


# --------------------------------------------------------------------------------------- many files


@st.composite
def indexed_shards(draw: Draw) -> Trial:
    """Shards and an index that names their keys."""
    files: dict[str, bytes] = {}
    weight_map: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 3))):
        header, payload = draw(flat_entries())
        name = f"model-{number}.safetensors"
        files[name] = flat_file(header, payload)
        weight_map |= {
            key: draw(mostly(st.just(name), st.one_of(texts, json_values()))) for key in header
        }
    weight_map |= draw(mostly(st.just({}), st.dictionaries(texts, texts, max_size=2)))
    document = {
        "metadata": draw(mostly(st.just({"total_size": 1}), json_values())),
        "weight_map": weight_map,
    }
    index = draw(mostly(st.just(document), json_values()))
    files["model.safetensors.index.json"] = json.dumps(index).encode("utf-8", "surrogatepass")
    return Trial(files, draw(st.sampled_from([(".",), ("model.safetensors.index.json",)])))


_DCP = "torch.distributed.checkpoint.metadata"


def instance(name: str, fields: dict[str, Any], module: str = _DCP) -> Made:
    """An object of a class with these attributes."""
    return Made(Name(module, name), (), fields, new=True)


@st.composite
def dcp_folders(draw: Draw) -> Trial:
    """A DCP folder: tensors in chunks, objects, where each item lies, and how the keys nest."""
    one = zipped([
        ("archive/data.pkl", GOOD_PICKLE[:2] + GOOD_PICKLE[9:-2] + b".", 0),
        ("archive/data/0", STORAGE, 0),
        ("archive/version", b"3\n", 0),
    ])  # fmt: skip
    entries, places, paths, content = {}, [], {}, b""
    for key in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        chunks = draw(st.integers(1, 3))
        rows = 16
        made = []
        for chunk in range(chunks):
            offsets = draw(rarely(st.just((rows * chunk,)), st.lists(sizes, max_size=2).map(tuple)))
            shape = draw(rarely(st.just((rows,)), st.lists(sizes, max_size=2).map(tuple)))
            made.append(
                instance(
                    "ChunkStorageMetadata", {"offsets": size_of(offsets), "sizes": size_of(shape)}
                )
            )
            index = instance(
                "MetadataIndex", {"fqn": key, "offset": size_of(offsets), "index": chunk}
            )
            start = draw(rarely(st.just(len(content)), sizes))
            place = {"relative_path": draw(rarely(st.just("__0_0.distcp"), texts)), "offset": start,
                     "length": draw(rarely(st.just(len(one)), sizes)),
                     "transform_descriptors": None}  # fmt: skip
            places.append(
                (index, instance("_StorageInfo", place, "torch.distributed.checkpoint.filesystem"))
            )
            content += one
        size = draw(mostly(st.just((rows * chunks,)), st.lists(sizes, max_size=2).map(tuple)))
        dtype = Name(
            "torch",
            draw(mostly(st.just("float32"), st.sampled_from(["int64", "quint8", "x", "bool"]))),
        )
        properties = Made(Name(_DCP, "TensorProperties"), (), (dtype,), new=True)
        fields = {"properties": properties, "size": size_of(size), "chunks": made}
        entries[key] = draw(
            mostly(
                st.just(instance("TensorStorageMetadata", fields)),
                st.just(instance("BytesStorageMetadata", {})),
            )
        )
        paths[key] = draw(
            mostly(
                st.just(tuple(key.split("."))),
                st.lists(st.one_of(names, sizes), max_size=3).map(tuple),
            )
        )
    metadata = {
        "state_dict_metadata": entries,
        "planner_data": draw(mostly(st.just(paths), st.none())),
        "storage_data": Pairs(places),
    }
    stream = pickled_pairs(instance("Metadata", metadata))
    return Trial({".metadata": stream, "__0_0.distcp": content})


class Pairs:
    """A dict with keys that cannot be hashed here."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs


class PairPickler(OldPickler):
    """Writes `Pairs` as dicts."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Pairs):
            super().save(obj, save_persistent_id)
            return
        self.write(b"}(")
        for pair in obj.pairs:
            for item in pair:
                self.save(item)
        self.write(b"u")


def pickled_pairs(tree: Any) -> bytes:
    out = io.BytesIO()
    PairPickler(out, 2).dump(tree)
    return out.getvalue()


def size_of(shape: Any) -> Made:
    return Made(Name("torch", "Size"), (tuple(shape),))


# -------------------------------------------------------------------------------------------- rules

PATTERNS = (
    "w",
    "w=v",
    "w=>x.w",
    r"(w)=>\1.\1",
    "*",
    "?",
    "net.",
    "(a+)+$=>x",
    "[=>",
    "[!a]",
    "{}",
    "model.=net.",
)
GOOD_RULES = (
    {"add-prefix": "net."},
    {"rename": {"w": "v"}},
    {"regex": {"(.*)w": r"\1x.w"}},
    {"include": "*"},
    {"rename": "w=a.w"},
)
RULE_WORDS = ("strip-prefix", "add-prefix", "rename", "regex", "include", "exclude", "preset", "x")


@st.composite
def rule_files(draw: Draw) -> Trial:
    """Key rules, or a mapping, in JSON (of which nearly all is YAML too)."""
    patterns = st.one_of(texts, st.sampled_from(PATTERNS), st.sampled_from(PATTERNS))
    value = mostly(
        st.one_of(
            patterns,
            st.lists(patterns, max_size=3),
            st.dictionaries(patterns, patterns, max_size=2),
        ),
        json_values(),
    )
    rule = st.dictionaries(st.sampled_from(RULE_WORDS), value, min_size=1, max_size=1)
    rule = st.one_of(rule, st.sampled_from(GOOD_RULES), st.sampled_from(GOOD_RULES))
    listed = st.lists(mostly(rule, json_values()), max_size=3)
    keys = st.dictionaries(texts, mostly(texts, json_values()), max_size=3)
    more = {
        "left_out": st.lists(texts, max_size=2),
        "modules": st.dictionaries(texts, texts, max_size=2),
    }
    mapped = st.fixed_dictionaries({"path": texts, "keys": keys}, optional=more)
    mapping = st.fixed_dictionaries(
        {"mapping": mostly(st.just(1), json_values()), "state_dicts": st.lists(mapped, max_size=2)}
    )
    document = draw(
        st.one_of(listed, listed.map(lambda rules: {"rules": rules}), mapping, json_values())
    )
    text = json.dumps(document, indent=draw(st.sampled_from([None, 1])))
    name = draw(st.sampled_from(["rules.json", "rules.json", "rules.yaml"]))
    return Trial(
        {name: text.encode("utf-8", "surrogatepass"), "good.pt": torch_zip(GOOD_PICKLE)},
        (name,),
        "rules",
    )


STRUCTURES: dict[str, Callable[[], st.SearchStrategy[Trial]]] = {
    "made pickle": pickled_files,
    "made zip": zip_directories,
    "made tar": tar_files,
    "made safetensors": flat_files,
    "made gguf": gguf_files,
    "made index": indexed_shards,
    "made dcp": dcp_folders,
    "made rules": rule_files,
    "quantised made": quantised_folders,
}
BATCH = 25
"""Files that are made up at once."""


def structures(number: int, run_seed: int, size: int = BATCH) -> Iterator[tuple[str, Trial]]:
    """The target and the `size` trials of batch `number` of the run with `run_seed`: always the
    same ones.
    """
    target = sorted(STRUCTURES)[number % len(STRUCTURES)]
    made: list[Trial] = []

    @seed(run_seed * 1_000_003 + number)
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(STRUCTURES[target]())
    def collect(trial: Trial) -> None:
        made.append(trial)

    collect()
    return ((target, trial) for trial in made)
