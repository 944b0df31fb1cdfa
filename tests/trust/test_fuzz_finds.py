"""What the fuzzer found, each built small: the files that were answered with something else than a
result or one clear line.
"""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from pathlib import Path

import pytest
import torch

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    diagnose,
    diff_checkpoints,
    load_portable,
    open_checkpoint,
    read_key_rules,
    scan_checkpoint,
)
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.report import inspection_document, tree_lines
from ckptconv.objects.threats import judge
from ckptconv.support.errors import (
    KeyConflict,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
)
from fuzzing.mutations import DOUBLED
from fuzzing.structures import (
    Pairs,
    call_op,
    flat_file,
    instance,
    int_op,
    pickled_pairs,
    size_of,
    storage_op,
    text_op,
    torch_zip,
    tuple_op,
    zipped,
)
from helpers import oracle
from helpers.examples import crossed
from helpers.old_torch import Made, Name, blob, legacy, storage, write
from helpers.program import SAMPLES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ORDERED = call_op("collections.OrderedDict")


def checkpoint(folder: Path, *values: bytes) -> Path:
    """A torch file of a dict of values, each given by its opcodes."""
    pairs = b"".join(text_op(f"w{index}") + value for index, value in enumerate(values))
    return write(folder / "in.pt", torch_zip(b"\x80\x02}(" + pairs + b"u."))


def tensor(key: str = "0", *, grad: bytes = b"\x89") -> bytes:
    return call_op(
        "torch._utils._rebuild_tensor_v2",
        storage_op(key),
        int_op(0),
        tuple_op(int_op(4)),
        tuple_op(int_op(1)),
        grad,
        ORDERED,
    )


def test_a_record_that_is_marked_as_a_folder_is_refused(tmp_path):
    # torch returns whatever is in memory as its weights.
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "good.pt")
    raw = bytearray((tmp_path / "good.pt").read_bytes())
    at = raw.rindex(b"good/data/0") - 46
    assert raw[at : at + 4] == b"PK\1\2"
    raw[at + 38] |= 0x10
    write(tmp_path / "in.pt", bytes(raw))
    with pytest.raises(MalformedCheckpoint, match=r"is marked as a folder.* but holds bytes"):
        open_checkpoint(tmp_path / "in.pt")


# ------------------------------------------------------------------------- names and numbers spoken


def test_a_storage_class_that_is_a_tuple_of_shared_tuples_is_named_in_few_words(tmp_path):
    # It has 2**60 parts when it is written out: the message took forever.
    pid = tuple_op(text_op("storage"), DOUBLED, text_op("0"), text_op("cpu"), int_op(4)) + b"Q"
    with pytest.raises(UnsupportedCheckpoint, match=r"has the unknown storage class a tuple$"):
        open_checkpoint(checkpoint(tmp_path, pid))


@pytest.mark.parametrize(
    "key", [b"}", b"]", call_op("models.Config"), b"(K\1\x8c\1at", DOUBLED], ids=range(5)
)
def test_what_is_left_out_is_named_in_few_words_whatever_its_key_is(key, tmp_path):
    # The place of a dict in memory was told.
    beside = (
        call_op("collections.OrderedDict")
        + key
        + b"K\1s"
        + text_op("model")
        + b"}"
        + text_op("w")
        + tensor()
        + b"ss"
    )
    write(tmp_path / "in.pt", torch_zip(b"\x80\x02" + beside + b"."))
    done = convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out.safetensors", unknown="keep", fsync=False
    )
    assert [item.path for item in done.plan.skipped] in (
        ["a dict"],
        ["a list"],
        ["a tuple"],
        ["an object of models.Config"],
    )


@pytest.mark.parametrize("field", ["dtype", "transform_descriptors"])
def test_shared_tuples_in_dcp_metadata_are_named_in_few_words(field, tmp_path):
    shared: tuple = ()
    for _ in range(60):
        shared = (shared, shared)
    dtype = shared if field == "dtype" else Name("torch", "float32")
    transforms = (shared,) if field == "transform_descriptors" else None
    chunk = instance("ChunkStorageMetadata", {"offsets": size_of((0,)), "sizes": size_of((4,))})
    properties = Made(
        Name("torch.distributed.checkpoint.metadata", "TensorProperties"), (), (dtype,), new=True
    )
    entry = instance(
        "TensorStorageMetadata",
        {"properties": properties, "size": size_of((4,)), "chunks": [chunk]},
    )
    index = instance("MetadataIndex", {"fqn": "w", "offset": size_of((0,)), "index": 0})
    place = {
        "relative_path": "__0_0.distcp",
        "offset": 0,
        "length": 4,
        "transform_descriptors": transforms,
    }
    places = Pairs([(index, instance("_StorageInfo", place))])
    (tmp_path / "__0_0.distcp").write_bytes(b"PK\3\4")
    tree = {
        "state_dict_metadata": {"w": entry},
        "planner_data": {"w": ("w",)},
        "storage_data": places,
    }
    (tmp_path / ".metadata").write_bytes(pickled_pairs(instance("Metadata", tree)))
    with pytest.raises(UnsupportedCheckpoint, match="a tuple"):
        open_checkpoint(tmp_path)


def test_a_storage_class_is_named_without_addresses(tmp_path):
    # The message held the address of an object of ckptconv in memory.
    pid = (
        tuple_op(text_op("storage"), tuple_op(b"}"), text_op("0"), text_op("cpu"), int_op(4)) + b"Q"
    )
    with pytest.raises(UnsupportedCheckpoint) as caught:
        open_checkpoint(checkpoint(tmp_path, pid))
    assert "0x" not in str(caught.value)


def test_a_storage_in_the_tree_is_inspected_by_its_size(tmp_path):
    # Its line was the repr of an object, with its address in memory.
    with open_checkpoint(
        checkpoint(tmp_path, b"}" + text_op("w") + tensor() + b"s", storage_op("1"))
    ) as opened:
        lines = list(tree_lines(inspect_checkpoint(opened).root, 1000))
    assert any("storage of 64 bytes on cuda:1" in line.text for line in lines)
    assert not any("0x" in line.text for line in lines)


def test_keys_with_very_many_wrappers_are_inspected(tmp_path):
    # A level was shown for each wrapper: RecursionError.
    header = {"module." * 5000 + "w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    source = write(tmp_path / "in.safetensors", flat_file(header, b""))
    with open_checkpoint(source) as opened:
        found = inspect_checkpoint(opened)
    json.dumps(inspection_document(found))
    assert len(list(tree_lines(found.root, 1000))) < 100
    assert diagnose(source).findings


@pytest.mark.trust
def test_dicts_of_very_many_tuple_keys_are_compared(tmp_path):
    # Each key was told from the others by counting through all before it: minutes for 30,000 of
    # them.
    keys = b"".join(int_op(index) + b"\x85N" for index in range(30_000))
    first = checkpoint(tmp_path, tensor(), b"}(" + keys + b"u")
    second = write(tmp_path / "other.pt", first.read_bytes())
    assert diff_checkpoints(first, second, whole=True).same
    other = checkpoint(tmp_path, tensor(), b"}(" + keys + int_op(0) + b"\x85K\1u")
    assert len(diff_checkpoints(other, second, whole=True).only_a) == 2  # a key and its value


# ------------------------------------------------------------------------------------ requires_grad


@pytest.mark.parametrize(
    "value",
    [
        tensor("1", grad=b"\x88"),
        call_op("torch._utils._rebuild_parameter", tensor("1"), b"\x88", ORDERED),
        call_op("torch._utils._rebuild_parameter_with_state", tensor("1"), b"\x88", ORDERED, b"}"),
    ],
    ids=["tensor", "parameter", "parameter with state"],
)
def test_an_int_tensor_that_requires_grad_is_refused_as_torch_does(value, tmp_path):
    # The output was one that torch does not load, and load_portable raised torch's RuntimeError.
    source = checkpoint(tmp_path, value)
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match="floating point"):
        oracle.load(source)
    with pytest.raises(MalformedCheckpoint, match=r"int64 tensor requires grad"):
        convert_checkpoint(source, tmp_path / "out.pt")
    with pytest.raises(MalformedCheckpoint, match=r"int64 tensor requires grad"):
        load_portable(source)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float8_e4m3fn"])
def test_tensors_of_other_types_may_require_grad(dtype, tmp_path):
    torch.save(
        {"w": torch.zeros(2, dtype=getattr(torch, dtype), requires_grad=True)}, tmp_path / "in.pt"
    )
    assert load_portable(tmp_path / "in.pt")["w"].requires_grad


def test_a_parameter_of_ints_from_before_torch_0_4_is_read_without_its_grad(tmp_path):
    # Before 0.4 any tensor could say that it requires grad; an output that says so is one that
    # torch does not load.
    values = storage("LongStorage", "0", "cpu", 2)
    inner = Made(Name("torch._utils", "_rebuild_tensor"), (values, 0, (2,), (1,)))
    parameter = Made(Name("torch.nn.parameter", "Parameter"), (inner,), (True, False, {}))
    source = write(tmp_path / "in.pt", legacy({"w": parameter}, ("0",), blob(2, bytes(range(16)))))
    convert_checkpoint(source, tmp_path / "out.pt", verify=True)
    found = oracle.load(tmp_path / "out.pt")["w"]
    assert found.dtype is torch.int64
    assert not found.requires_grad


# ------------------------------------------------------------------- archives in archives, scanning


def archives_of_archives(folder: Path) -> Path:
    """A file of 22 kB with 90,000 pickles in it."""
    inner = zipped([(str(index), pickle.dumps({"w": index}), 0) for index in range(900)])
    middle = zipped([(str(index), inner, 8) for index in range(100)])
    return write(folder / "in.zip", zipped([("middle", middle, 8)]))


@pytest.mark.trust
def test_the_members_of_archives_in_an_archive_are_counted_together(tmp_path):
    # Each archive was held against the limit by itself, and all of them were looked into: 3 s, and
    # as many as one likes.
    source = archives_of_archives(tmp_path)
    with pytest.raises(LimitExceeded, match=r"of 10\d\d members.*zip_members") as caught:
        open_checkpoint(source)
    assert caught.value.limit == "zip_members"


def test_archives_in_an_archive_inflate_to_no_more_than_one_may(tmp_path):
    # Each had its 16 MB that are never questioned.
    inner = zipped([("x", bytes(15_000_000), 8)])
    write(tmp_path / "in.zip", zipped([(str(index), inner, 0) for index in range(3)]))
    with pytest.raises(LimitExceeded, match="claim to inflate from"):
        open_checkpoint(tmp_path / "in.zip")


def test_a_few_archives_in_an_archive_are_still_opened(tmp_path):
    inner = zipped([("a.pt", torch_zip(b"\x80\x02}" + text_op("w") + tensor() + b"s."), 8)])
    write(tmp_path / "in.zip", zipped([("b.zip", inner, 8), ("c.zip", inner, 0)]))
    with open_checkpoint(tmp_path / "in.zip") as opened:
        assert [path for path, _ in opened.tensors()] == ["b.zip.a.pt.w", "c.zip.a.pt.w"]


EXECUTES = b"\x80\x02cposix\nsystem\n(" + text_op("true") + b"tR."


@pytest.mark.trust
@pytest.mark.parametrize(
    ("piece", "begin"),
    crossed(
        [b"\x80\x02", b"\x80\x02N0", b"\x80\x04\x95" + bytes(8)],
        [b"PK\3\4", bytes(257) + b"ustar" + bytes(250)],
    ),
)
def test_places_where_pickles_seem_to_begin_are_followed_within_bounds(begin, piece, tmp_path):
    # Each was followed to the end of the file: 15 s for 16 kB, and growing with the square of the
    # size.
    source = write(tmp_path / "in.pt", begin + EXECUTES + piece * (400_000 // len(piece)))
    scan = scan_checkpoint(source)
    assert any("posix.system" in finding.name for finding in scan.files[0].findings)
    assert any("the rest was not looked at" in finding.reason for finding in scan.files[0].findings)


@pytest.mark.trust
@pytest.mark.parametrize("count", [1, 500])
def test_records_of_a_broken_archive_that_lie_in_each_other_inflate_within_bounds(count, tmp_path):
    # Each was inflated to 16 MB and followed: 12 s for one, 16 kB, and as often as there are
    # headers.
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = deflate.compress(b"\x80\x02" + b"N0" * (8 << 20)) + deflate.flush()
    headers = [
        struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, 0, 0, 30 * (count - index - 1), 0)
        for index in range(count)
    ]
    scan = scan_checkpoint(write(tmp_path / "in.zip", b"".join(headers) + stream))
    assert any("was not looked at" in finding.reason for finding in scan.files[0].findings)


def test_names_of_thousands_of_parts_are_judged_at_once(tmp_path):
    # Each of the prefixes of a name was looked up: 2 s for one name of 20 kB, and growing with the
    # square.
    names = [f"cm{index}{'.a' * 2000}\nb{'.c' * 2000}\n0".encode() for index in range(500)]
    scan = scan_checkpoint(write(tmp_path / "in.pkl", b"\x80\2" + b"".join(names) + b"N."))
    assert len(scan.files[0].findings) == 500
    assert judge("m" + ".a" * 100_000, "b.c").level == "unknown"
    assert judge("torch.hub" + ".a" * 100_000, "b").level == "dangerous"


# -------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    "text", ["a{} = 1", "[a{}]", "[[a{}]]", "rules = [{{a{} = 1}}]", "a{} . b = 1"]
)
def test_a_toml_name_of_many_parts_is_refused_before_it_takes_long(text, tmp_path):
    # tomllib takes time that grows with the square of their number: a minute for a file of 120 kB.
    write(tmp_path / "rules.toml", text.format(' . "a"' * 60_000).encode())
    with pytest.raises(
        KeyConflict, match=r"rules\.toml: line 1: has a name of more than 100 parts"
    ):
        read_key_rules(tmp_path / "rules.toml")


def test_a_yaml_name_that_stands_twice_is_refused(tmp_path):
    # The rules of the first were numbered by the lines of the second: ValueError.
    pytest.importorskip("yaml")
    write(tmp_path / "rules.yaml", b"rules:\n- include: a\nrules:\n- include: b\n- include: c\n")
    with pytest.raises(KeyConflict, match=r"rules\.yaml: "):
        read_key_rules(tmp_path / "rules.yaml")


def test_a_toml_line_of_many_rules_is_read(tmp_path):
    rules = [f'{{rename = {{"a.b.{index}." = "c.{index}."}}}}' for index in range(200)]
    write(tmp_path / "rules.toml", f"rules = [{', '.join(rules)}]".encode())
    assert len(read_key_rules(tmp_path / "rules.toml").rules) == 200


# ------------------------------------------------------------------------------------------ indexes


def test_a_key_of_very_many_parts_to_fit_to_is_refused_in_little_memory(tmp_path):
    # All that may follow a dot in it was written out: 220 MB for a list of keys of 52 kB.
    keys = write(tmp_path / "keys.txt", ("a." * 9000 + "b" * 40_000).encode())
    with pytest.raises(LimitExceeded, match="too long to be fitted") as caught:
        convert_checkpoint(SAMPLES / "tied.pt", tmp_path / "out.pt", like=keys)
    assert caught.value.limit == "names"


@pytest.mark.parametrize("shard", [["a"], {"a": 1}, None, 3, "\0", "a" * 300])
def test_an_index_to_fit_to_may_name_anything_for_shards(shard, tmp_path):
    # A list could not be put into a set: TypeError.
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"net.weight": shard}}))
    with pytest.raises(CheckpointError, match="fit"):
        convert_checkpoint(SAMPLES / "tied.pt", tmp_path / "out.pt", like=index)
    assert diagnose(SAMPLES / "tied.pt", like=index).findings
