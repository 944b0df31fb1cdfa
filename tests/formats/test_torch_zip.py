"""torch → torch: `torch.load(weights_only=True)` sees in the output what it sees in the source, but
for what is promised.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import ChainMap, Counter, OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import _weights_only_unpickler, nn
from torch.utils.serialization import config

from ckptconv import (
    KeyRules,
    Options,
    convert_checkpoint,
    load_portable,
    open_checkpoint,
    plan_conversion,
)
from ckptconv.formats.zip_archive import read_directory
from ckptconv.formats.zip_layout import NewRecord, lay_out_records
from ckptconv.io.crc import crc32
from ckptconv.io.source import MemorySource
from ckptconv.objects.known_names import WEIGHTS_ONLY
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    MalformedCheckpoint,
    OutputRefused,
    RefusedObject,
)
from ckptconv.tensors.dtypes import UINT8
from helpers import oracle, trees
from helpers.examples import examples
from helpers.paths import SAMPLES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
thorough = settings(max_examples=examples(200), deadline=None)
quick = settings(max_examples=examples(50), deadline=None)


class Odd(Exception):
    """A class that no checkpoint should hold."""


CALCULATED_OFFSETS = config.patch({"load.calculate_storage_offsets": True})
"""While it is entered, torch computes the places of records instead of looking them up."""


def convert(tree: Any, folder: Path, **options: Any) -> Path:
    """`tree` saved by torch and converted; returns the output, the source is ``source.pt`` beside
    it.
    """
    torch.save(tree, folder / "source.pt")
    convert_checkpoint(
        folder / "source.pt", folder / "output.pt", fsync=False, force=True, **options
    )
    return folder / "output.pt"


def assert_same(found: Any, expected: Any) -> None:
    """Both trees are equal row by row, after what compaction may do, and their tensors overlap in
    the same way.
    """
    for ours, theirs in zip(oracle.flatten(found), oracle.compacted(expected), strict=True):
        assert ours == theirs
    assert oracle.overlaps(found) == oracle.overlaps(expected)


def assert_sound(path: Path) -> None:
    """Every reader that looks at the layout is content: zipfile, torch's mapped reader, its
    computed offsets.
    """
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    offsets = oracle.payload_offsets(path)
    assert [name for name, offset in offsets.items() if offset % 64] == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
        read = oracle.flatten(oracle.load(path))
        with CALCULATED_OFFSETS:
            assert oracle.flatten(oracle.load(path, mmap=True)) == read


# ----------------------------------------------------------------------------------------- any tree


@given(trees.trees())
@thorough
def test_a_tree_is_written_as_it_was(drawn):
    with tempfile.TemporaryDirectory() as folder:
        output = convert(drawn.tree, Path(folder), keys="keep")
        assert_same(oracle.load(output), oracle.load(Path(folder) / "source.pt"))
        assert_sound(output)


@given(trees.trees())
@quick
def test_converting_again_changes_nothing(drawn):
    with tempfile.TemporaryDirectory() as folder:
        once = convert(drawn.tree, Path(folder), keys="keep")
        convert_checkpoint(once, Path(folder) / "again.pt", keys="keep", fsync=False, verify=True)
        assert (Path(folder) / "again.pt").read_bytes() == once.read_bytes()


@given(trees.state_dicts(plain=True), st.booleans())
@thorough
def test_state_dicts_lose_their_wrappers_and_nothing_else(drawn, inside):
    tree = {
        "epoch": 3,
        "state_dict": drawn.tree,
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
    }
    with tempfile.TemporaryDirectory() as folder:
        output = convert(tree if inside else drawn.tree, Path(folder))
        source = oracle.load(Path(folder) / "source.pt")
        expected = (
            {**source, "state_dict": oracle.bare_state_dict(source["state_dict"])}
            if inside
            else oracle.bare_state_dict(source)
        )
        assert_same(oracle.load(output), expected)
        assert_sound(output)


@given(trees.state_dicts(), st.sampled_from(["keep", "strip"]))
@quick
def test_the_device_is_the_tag_of_every_storage_and_opens_on_the_cpu(drawn, keys):
    with tempfile.TemporaryDirectory() as folder:
        output = convert(drawn.tree, Path(folder), keys=keys, device="cuda:1")
        assert set(oracle.tags(output)) == {"cuda:1"}
        source = oracle.load(Path(folder) / "source.pt")
        assert_same(
            oracle.load(output), oracle.bare_state_dict(source) if keys == "strip" else source
        )


@given(
    trees.state_dicts([*trees.FLOATS, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from(trees.FLOATS),
)
@quick
def test_a_cast_is_torch_s_own_and_touches_only_floats(drawn, dtype):
    with tempfile.TemporaryDirectory() as folder:
        output = convert(drawn.tree, Path(folder), keys="keep", dtype=str(dtype))
        found, source = oracle.load(output), oracle.load(Path(folder) / "source.pt")
    assert list(found) == list(source)
    for key, tensor in source.items():
        expected = tensor.detach().to(dtype) if tensor.dtype in trees.FLOATS else tensor
        assert (
            found[key].dtype == expected.dtype and found[key].requires_grad == tensor.requires_grad
        )
        assert torch.equal(found[key].isnan(), expected.isnan())
        numbers = torch.ones_like(expected, dtype=torch.bool) ^ expected.isnan()
        assert torch.equal(found[key].detach()[numbers], expected[numbers])
    # a negated view cannot share with a cast storage
    if not any(tensor.is_neg() for tensor in source.values()):
        groups = [
            [row.value.storage for row in oracle.tensor_rows(oracle.flatten(tree))]
            for tree in (found, source)
        ]
        assert groups[0] == groups[1], "tensors that shared memory still do"


@pytest.mark.parametrize("protocol", [3, 4, 5])
@given(drawn=trees.trees())
@settings(max_examples=examples(25), deadline=None)
def test_newer_pickle_protocols_are_read(protocol, drawn):
    with tempfile.TemporaryDirectory() as folder:
        torch.save(drawn.tree, Path(folder) / "source.pt", pickle_protocol=protocol)
        convert_checkpoint(
            Path(folder) / "source.pt", Path(folder) / "output.pt", keys="keep", fsync=False
        )
        source = oracle.load(Path(folder) / "source.pt", weights_only=False)
        assert_same(oracle.load(Path(folder) / "output.pt"), source)


# ------------------------------------------------------------------------------------- odd and rare


@pytest.mark.parametrize("dtype", trees.DTYPES, ids=str)
def test_every_dtype_that_torch_saves_survives(dtype, tmp_path):
    values = trees.random_bytes(7, 24 * dtype.itemsize, dtype)
    tree = {
        "whole": trees.make(dtype, values, 0, (24,), (1,)),
        "columns": trees.make(dtype, values, 1, (4, 3), (1, 5)),
    }
    assert_same(oracle.load(convert(tree, tmp_path, keys="keep")), tree)


def test_shared_views_keep_their_places_and_unused_bytes_are_left_out(tmp_path):
    base = torch.arange(10_000.0)
    tree = {
        "head": base[100:200],
        "overlap": base[150:250],
        "far": base[9000:9010],
        "steps": base[9001:9010:2],
    }
    output = oracle.load(convert(tree, tmp_path))
    assert_same(output, tree)
    assert output["far"].untyped_storage().nbytes() < 1000
    output["head"][60] = -1
    output["far"][3] = -2
    assert output["overlap"][10] == -1 and output["steps"][1] == -2


def test_a_slice_alone_does_not_drag_its_storage_along(tmp_path):
    base = torch.arange(10_000.0)
    output = oracle.load(
        convert(
            {"row": base[5000:5010], "strided": base[::100], "same": base[1:3]}["row"], tmp_path
        )
    )
    assert output.untyped_storage().nbytes() == 40
    column = oracle.load(convert({"column": base.reshape(100, 100)[:, 3]}, tmp_path))["column"]
    assert column.untyped_storage().nbytes() == 400 and column.is_contiguous()


def test_disjoint_views_of_one_storage_still_share_one(tmp_path):
    base = torch.arange(24.0)
    output = oracle.load(convert({"q": base[:8], "k": base[8:16], "v": base[16:]}, tmp_path))
    assert len({tensor.untyped_storage()._cdata for tensor in output.values()}) == 1


def test_views_of_different_dtypes_over_one_untyped_storage(tmp_path):
    base = torch.arange(32, dtype=torch.uint8)
    tree = {
        "u16": base.view(torch.uint16),
        "fp8": base.view(torch.float8_e4m3fn)[4:9],
        "u32": base.view(torch.uint32)[1::2],
    }
    assert_same(oracle.load(convert(tree, tmp_path)), tree)
    with pytest.raises(AssertionError):
        assert_same({**tree, "u32": tree["u32"].clone()}, tree)


def test_bytes_seen_both_as_a_typed_and_as_an_untyped_storage(tmp_path):
    base = torch.arange(32, dtype=torch.uint8)
    tree = {"bytes": base, "words": base.view(torch.uint16)}
    assert_same(oracle.load(convert(tree, tmp_path)), tree)


def test_empty_views_of_different_dtypes_over_one_storage(tmp_path):
    empty = torch.empty(0)
    tree = {"floats": empty, "integers": empty.view(torch.int32)}
    assert_same(oracle.load(convert(tree, tmp_path)), tree)


def test_a_shared_storage_of_two_dtypes_can_be_cast(tmp_path):
    base = torch.arange(32, dtype=torch.uint8)
    tree = {"fp8": base.view(torch.float8_e4m3fn), "u16": base.view(torch.uint16)}
    output = oracle.load(convert(tree, tmp_path, dtype="float32"))
    assert torch.equal(output["fp8"], tree["fp8"].float()) and torch.equal(
        output["u16"], tree["u16"]
    )


def test_casts_that_differ_part_only_what_they_must(tmp_path):
    base = torch.arange(12.0)
    tree = {"q": base[:8], "k": base[4:], "all": base.reshape(3, 4)}
    torch.save({**tree, "twin": tree["q"]}, tmp_path / "in.pt")
    for more in ({}, {"max_shard_size": "1GB", "to": "torch"}):
        name = "set" if more else "out.pt"
        done = convert_checkpoint(
            tmp_path / "in.pt", tmp_path / name, cast=["q=bf16", "twin=bf16"], **more
        )
        found = oracle.load(tmp_path / ("set/pytorch_model.bin" if more else name))
        places = {key: value.untyped_storage().data_ptr() for key, value in found.items()}
        assert places["k"] == places["all"] != places["q"] == places["twin"]
        half = base[:8].bfloat16()
        assert_same(dict(found), {**tree, "q": half, "twin": half})
        assert done.plan.state_dicts[0].shared == 2
        assert [note for note in done.plan.notes if "no longer shares" in note]
    kept = convert_checkpoint(tmp_path / "in.pt", tmp_path / "all.pt", keys="keep")
    assert kept.plan.state_dicts[0].shared == 3 and not kept.plan.notes


def test_quantized_tensors_survive(tmp_path):
    values = torch.linspace(-1, 1, 24).reshape(4, 6)
    tree = {
        "affine": torch.quantize_per_tensor(values, 0.05, 3, torch.quint8),
        "int32": torch.quantize_per_tensor(values, 0.001, 0, torch.qint32),
        "channels": torch.quantize_per_channel(
            values, torch.full((4,), 0.1), torch.arange(4), 0, torch.qint8
        ),
        "plain": values,
    }
    assert_same(
        oracle.load(convert(tree, tmp_path, dtype="bf16")), {**tree, "plain": values.bfloat16()}
    )
    assert_same(oracle.load(convert(tree, tmp_path, keys="keep", device="cuda:1")), tree)
    assert set(oracle.tags(tmp_path / "output.pt")) == {"cuda:1"}


def test_sparse_and_nested_tensors_survive(tmp_path):
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 3]])
    tree = {
        "coo": dense.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    }
    assert_same(oracle.load(convert(tree, tmp_path)), oracle.load(tmp_path / "source.pt"))


def test_parameters_buffers_and_tensors_with_attributes_survive(tmp_path):
    marked = torch.arange(4.0)
    marked.note = "kept"
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.tensor_model_parallel = True
    tree = {
        "buffer": nn.Buffer(torch.ones(3)),
        "parameter": parameter,
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "marked": marked,
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        "uint16": nn.Buffer(torch.arange(3).to(torch.uint16)),
        "same": parameter,
    }
    assert_same(
        oracle.load(convert(tree, tmp_path, keys="keep")), oracle.load(tmp_path / "source.pt")
    )


def test_conj_and_neg_views_stay_lazy_and_share(tmp_path):
    base = torch.randn(6, dtype=torch.complex64)
    tree = {
        "base": base,
        "conj": base.conj(),
        "columns": base.reshape(2, 3).t().conj(),
        "neg": torch._neg_view(torch.randn(6)),
    }
    found = oracle.load(convert(tree, tmp_path))
    assert_same(found, oracle.load(tmp_path / "source.pt"))
    assert found["conj"].is_conj() and found["neg"].is_neg()
    imaginary = torch.randn(4, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    assert_same(oracle.load(convert([imaginary], tmp_path)), oracle.load(tmp_path / "source.pt"))


def test_bare_storages_survive(tmp_path):
    tensor = torch.arange(6.0)
    output = convert(
        {"storage": tensor.storage(), "tensor": tensor[2:], "other": torch.ones(2).storage()},
        tmp_path,
    )
    found = torch.load(output, weights_only=False)
    assert oracle.flatten(found) == oracle.flatten(
        torch.load(tmp_path / "source.pt", weights_only=False)
    )


def large() -> dict[str, torch.Tensor]:
    """Tensors of several copy buffers, in every way of lying in memory."""
    base = torch.arange(3 << 20, dtype=torch.int32)
    floats = torch.randn(1_500_001, generator=torch.Generator().manual_seed(3))
    complexes = torch.view_as_complex(floats[:1_000_000].reshape(-1, 2).clone())
    return {
        "contiguous": base.clone(),
        "odd_bytes": base.view(torch.uint8)[: (2 << 20) + 1].clone(),
        "transposed": floats[:1_000_000].clone().reshape(1000, 1000).t(),
        "steps": floats.clone()[::3],
        "columns": base.clone().reshape(1024, -1)[:, 5:700:2],
        "permuted": base.clone().reshape(64, 256, 192).permute(2, 0, 1)[3:, ::2, 1:],
        "expanded": torch.arange(2048.0)[:, None].expand(2048, 1024),
        "overlapping": torch.arange(300_000.0).unfold(0, 5, 1),
        "conj": complexes.conj()[::2],
        "neg": torch._neg_view(floats.clone()),
        "slice": floats[1000:1_400_000],
        "shared": [floats[:100], floats[1_400_000:]][1],
    }


def test_large_tensors_survive_chunk_by_chunk(tmp_path):
    tree = large()
    output = convert(tree, tmp_path, verify=True)
    assert_same(oracle.load(output), tree)
    assert_sound(output)


def test_large_tensors_are_gathered_for_safetensors(tmp_path):
    tree = large()
    torch.save(tree, tmp_path / "source.pt")
    convert_checkpoint(
        tmp_path / "source.pt", tmp_path / "out.safetensors", fsync=False, verify=True
    )
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tree.keys()
    assert [
        key for key in tree if oracle.value_bytes(found[key]) != oracle.value_bytes(tree[key])
    ] == []


def test_large_tensors_are_cast_as_torch_casts_them(tmp_path):
    tree = large()
    found = oracle.load(convert(tree, tmp_path, dtype="bf16", verify=True))
    expected = {
        key: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for key, tensor in tree.items()
    }
    assert [
        key for key in tree if oracle.value_bytes(found[key]) != oracle.value_bytes(expected[key])
    ] == []


def test_a_negated_view_can_be_cast_to_a_type_without_a_sign_or_a_negation(tmp_path):
    numbers = torch.tensor([-1.0, 0.0, 2.0, -0.0, 3.5])
    tree = {"neg": torch._neg_view(numbers), "plain": numbers}
    for name, dtype in (
        ("f8_e4m3", torch.float8_e4m3fn),
        ("f8_e5m2fnuz", torch.float8_e5m2fnuz),
        ("f8_e8m0", torch.float8_e8m0fnu),
    ):
        found = oracle.load(convert(tree, tmp_path, dtype=name))
        for key, tensor in tree.items():
            assert oracle.value_bytes(found[key]) == oracle.value_bytes(
                tensor.resolve_neg().to(dtype)
            ), (name, key)


def test_tensors_both_conjugated_and_negated_survive(tmp_path):
    both = torch._neg_view(torch.randn(6, dtype=torch.complex64).conj())
    assert both.is_conj() and both.is_neg()
    for tensor in (both, both[::2], both.reshape(2, 3).t()):
        assert_same(oracle.load(convert([tensor], tmp_path)), [tensor])
        torch.save({"w": tensor}, tmp_path / "source.pt")
        convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.safetensors", force=True)
        assert torch.equal(
            load_file(tmp_path / "out.safetensors")["w"], tensor.resolve_conj().resolve_neg()
        )


def test_a_tensor_without_values_is_refused_or_dropped(tmp_path):
    tree = {"a": torch.ones(2), "nowhere": torch.ones(2, device="meta")}
    with pytest.raises(RefusedObject, match="nowhere: a tensor without values"):
        convert(tree, tmp_path)
    assert_same(
        oracle.load(convert(tree, tmp_path, unknown="drop")), {"a": torch.ones(2), "nowhere": None}
    )
    torch.save(tree, tmp_path / "tree.pt")
    with pytest.raises(RefusedObject, match="nowhere: is a tensor without values") as refused:
        convert_checkpoint(tmp_path / "tree.pt", tmp_path / "out.safetensors")
    assert "--to torch" not in str(refused.value)  # which refuses it too


@pytest.mark.parametrize(
    "root",
    [torch.ones(2), nn.Parameter(torch.ones(2)), [torch.ones(2)], (1, torch.ones(2)[::2])],
    ids=repr,
)
def test_any_root_is_written(root, tmp_path):
    assert_same(oracle.load(convert(root, tmp_path)), root)


ODD = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "storage": lambda: torch.ones(2).storage(),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_a_checkpoint_of_one_odd_tensor_is_written(make, tmp_path):
    found = oracle.load(convert({"odd": make()}, tmp_path), weights_only=False)
    assert_same(found, oracle.load(tmp_path / "source.pt", weights_only=False))


def test_deeply_nested_containers_are_written(tmp_path):
    deep: Any = torch.ones(1)
    for _ in range(150):
        deep = {"in": [deep]}
    assert_same(oracle.load(convert(deep, tmp_path)), deep)


def test_the_directory_and_the_ends_of_an_archive_are_those_that_torch_writes(tmp_path):
    torch.save({"w": torch.randn(3), "empty": torch.ones(0)}, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        payloads = {info.filename: archive.read(info) for info in archive.infolist()}
        crcs = [info.CRC for info in archive.infolist()]
    layout = lay_out_records(
        NewRecord(name, name.encode(), b"", len(payload), payload, UINT8)
        for name, payload in payloads.items()
    )
    assert layout.nbytes == len(raw) and raw.endswith(layout.ending(crcs))
    assert layout.ending(crcs).startswith(b"PK\1\2")


@pytest.mark.parametrize("sizes", [(3, 5), (5 << 30, 3), (3, 5 << 30), (0xFFFFFFFF,)])
def test_an_archive_has_the_size_that_was_planned_also_where_it_needs_64_bits(sizes):
    records = [NewRecord("", b"a", b"", size, b"", UINT8) for size in sizes]
    layout = lay_out_records(records)
    ending = layout.ending([0] * len(sizes))
    size, start = struct.unpack_from("<2Q", ending, ending.rindex(b"PK\6\6") + 40)
    assert size == ending.rindex(b"PK\6\6") and layout.nbytes == start + len(ending)


@pytest.mark.parametrize("count", [65_534, 65_535, 65_536])
def test_the_end_of_an_archive_says_how_many_records_it_has(count):
    """In 16 bits, where these hold it; the zip64 record in front of it always does."""
    layout = lay_out_records([NewRecord("", b"a", b"", 0, b"", UINT8)] * count)
    ending = layout.ending([0] * count)
    assert struct.unpack_from("<2H", ending, len(ending) - 14) == (min(count, 0xFFFF),) * 2
    assert struct.unpack_from("<2Q", ending, ending.rindex(b"PK\6\6") + 24) == (count, count)


@pytest.mark.trust
def test_an_archive_of_many_records_is_one_for_everybody(tmp_path):
    """More than 65,535 records need the zip64 end record."""
    path = tmp_path / "many.zip"
    payloads = {"archive/version": b"3\n"} | {
        f"archive/data/{number}": b"%d" % number if number % 5 else b""
        for number in range(1, 66_000)
    }
    layout = lay_out_records(
        NewRecord(name, name.encode(), b"", len(payload), payload, UINT8)
        for name, payload in payloads.items()
    )
    crcs = [crc32(payload) for payload in payloads.values()]
    with path.open("wb") as file:
        for number, item in enumerate(layout.items):
            file.write(item.lead + item.values + layout.trail(number, crcs[number]))
        file.write(layout.ending(crcs))
    assert path.stat().st_size == layout.nbytes
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 66_000
        assert (
            archive.read("archive/data/65999") == b"65999"
            and archive.read("archive/data/65995") == b""
        )
    reader = torch._C.PyTorchFileReader(str(path))
    assert len(reader.get_all_records()) == 66_000 and reader.get_record("data/65999") == b"65999"


def test_the_name_in_the_last_local_header_is_compared_in_its_whole_length(tmp_path):
    """Behind it lies nothing that was read with it, so a longer name must not be cut to fit."""
    path = tmp_path / "in.pt"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        last = max(archive.infolist(), key=lambda one: one.header_offset)
    raw = bytearray(path.read_bytes())
    struct.pack_into("<H", raw, last.header_offset + 26, len(last.filename) + 1)
    with pytest.raises(MalformedCheckpoint, match="another name than the directory"):
        read_directory(MemorySource(bytes(raw), path))


def test_containers_that_hold_themselves_survive(tmp_path):
    tree: dict[str, Any] = {"weight": torch.ones(2), "list": []}
    tree["self"] = tree
    tree["list"].append(tree["list"])
    found = oracle.load(convert(tree, tmp_path, keys="keep"))
    assert found["self"] is found and found["list"][0] is found["list"]


@pytest.mark.parametrize(
    "keys",
    [
        [(0, 1), (2, "b")],
        [1, "1"],
        [b"w", "w"],
        [1, 1.5, True, None],
        ["a\udc80", "b"],
        [torch.float32],
        ["", "b"],
    ],
    ids=repr,
)
def test_any_key_that_torch_takes_is_kept(keys, tmp_path):
    tree = {"deep": [{key: torch.full((2,), number) for number, key in enumerate(keys)}]}
    assert_same(
        oracle.load(convert(tree["deep"][0], tmp_path, keys="keep"), weights_only=False),
        tree["deep"][0],
    )
    assert_same(oracle.load(convert(tree, tmp_path), weights_only=False), tree)


TEXT = [b"", bytearray(b""), bytearray(b"\xff"), "\ud800", ""]
NUMBERS = [-0.0, float("nan"), float("-inf"), 1 << 2000, -(1 << 70), complex("nan"), -0j, 10**9]
CONTAINERS = [
    (),
    (1,),
    ((),),
    torch.Size([]),
    set(),
    frozenset("a"),
    Counter("aab"),
    [None, True],
    {1: {2: {}}},
    torch.strided,
]


@pytest.mark.parametrize("value", [*TEXT, *NUMBERS, *CONTAINERS], ids=repr)
def test_plain_values_are_written_so_that_weights_only_reads_them(value, tmp_path):
    found = oracle.load(convert({"w": torch.ones(1), "value": value}, tmp_path))["value"]
    assert_same(found, set(value) if type(value) is frozenset else value)


@pytest.mark.parametrize("value", [ChainMap({"a": 1}), ..., Odd(3), print], ids=repr)
def test_what_weights_only_refuses_is_refused_dropped_or_kept(value, tmp_path):
    tree = {"w": torch.ones(1), "deep": [value, {"x": value}]}
    torch.save(tree, tmp_path / "plain.pt")
    with pytest.raises(UnpicklingError):
        oracle.load(tmp_path / "plain.pt")
    with pytest.raises(RefusedObject, match=r"deep\.0"):
        convert(tree, tmp_path)
    dropped = oracle.load(convert(tree, tmp_path, unknown="drop"))
    assert_same(dropped, {"w": torch.ones(1), "deep": [None, {"x": None}]})
    kept = oracle.load(convert(tree, tmp_path, unknown="keep"), weights_only=False)
    assert repr(kept) == repr(tree) and (kept["deep"][0] is kept["deep"][1]["x"])


def test_an_integer_for_which_weights_only_lacks_the_opcode_is_refused(tmp_path):
    with pytest.raises(RefusedObject):
        convert({"w": torch.ones(1), "deep": [1 << 3000]}, tmp_path)


def test_bytes_of_newer_protocols_are_not_confused(tmp_path):
    tree = {
        "w": torch.ones(1),
        "all": [bytes([number]) for number in range(256)],
        "blob": bytes(100_000),
    }
    for protocol in (3, 4, 5):
        torch.save(tree, tmp_path / "source.pt", pickle_protocol=protocol)
        convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.pt", force=True, fsync=False)
        assert_same(oracle.load(tmp_path / "out.pt"), tree)


@pytest.mark.trust
def test_thousands_of_entries_are_written_in_order(tmp_path):
    tree = OrderedDict((f"module.{number}.w", torch.full((1,), number)) for number in range(2500))
    output = oracle.load(convert(tree, tmp_path))
    assert [(key, value.item()) for key, value in output.items()] == [
        (f"{number}.w", number) for number in range(2500)
    ]


@pytest.mark.trust
def test_many_globals_and_texts_are_fetched_from_large_memo_indices(tmp_path):
    tree = [
        {f"k{number}": (torch.ones(1, dtype=dtype), "text", number)}
        for number in range(300)
        for dtype in trees.FLOATS
    ]
    assert_same(oracle.load(convert(tree, tmp_path, keys="keep")), tree)


@pytest.mark.parametrize("name", sorted(name for name in WEIGHTS_ONLY if ".cuda." not in name))
def test_weights_only_accepts_what_is_said_to_be_accepted(name):
    module, _, attribute = name.rpartition(".")
    _weights_only_unpickler.load(io.BytesIO(f"\x80\x02c{module}\n{attribute}\n.".encode("latin1")))


# --------------------------------------------------------------------------------------------- keys


def state_dict(*keys: str) -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((key, torch.full((2,), float(number))) for number, key in enumerate(keys))


@pytest.mark.parametrize(
    ("keys", "bare"),
    [
        (["module.a", "module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["module.module.a", "module.module.b"], ["a", "b"]),
        (["module.module.a", "module.b"], ["module.a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module._orig_mod.module.a", "module._orig_mod.module.b"], ["a", "b"]),
        (["layers.0._checkpoint_wrapped_module.w", "layers.1.w"], ["layers.0.w", "layers.1.w"]),
        (["_fsdp_wrapped_module.a", "module._fsdp_wrapped_module.b"], ["a", "module.b"]),
        (["modules.a", "modules.b"], ["modules.a", "modules.b"]),
        (["module", "module.a"], ["module", "module.a"]),
        (["a._orig_mod", "b"], ["a._orig_mod", "b"]),
    ],
)
def test_wrappers_are_stripped_to_a_fixed_point(keys, bare, tmp_path):
    assert list(oracle.load(convert(state_dict(*keys), tmp_path))) == bare == oracle.bare_keys(keys)


def test_state_dicts_with_tensors_of_other_kinds_are_stripped_too(tmp_path):
    """What is rebuilt from other tensors is a leaf of the state dict all the same."""
    weights = torch.arange(6.0).reshape(2, 3)
    others = {
        "sparse": weights.to_sparse(),
        "quantized": torch.quantize_per_tensor(weights, 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(
            weights, torch.ones(2), torch.zeros(2), 0, torch.qint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
        "sparse_parameter": nn.Parameter(weights.to_sparse_csr()),
    }
    stripped = {}
    for name, tensor in others.items():
        output = convert({"module.weight": weights, "module.other": tensor}, tmp_path)
        stripped[name] = list(oracle.load(output, weights_only=False))
    assert stripped == {name: ["weight", "other"] for name in others}


def test_packed_parameters_do_not_hide_a_state_dict(tmp_path):
    weights = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    tree = {
        "module.fc.scale": torch.ones(()),
        "module.fc._packed_params._packed_params": (weights, torch.ones(2)),
    }
    assert list(oracle.load(convert(tree, tmp_path))) == [
        "fc.scale",
        "fc._packed_params._packed_params",
    ]


def test_keys_that_would_become_one_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(KeyConflict, match=r"'_orig_mod\.a' and 'a' both become 'a'"):
        convert(state_dict("_orig_mod.a", "a"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_metadata_follows_the_keys(tmp_path):
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    output = oracle.load(convert(model.state_dict(), tmp_path))
    assert list(output._metadata.items()) == list(model.module.state_dict()._metadata.items())
    assert_same(output, oracle.bare_state_dict(model.state_dict()))


def test_strip_module_strips_wherever_a_key_starts_with_it(tmp_path):
    source = state_dict("module.a", "b", "module.module.c", "x.module.d")
    assert list(oracle.load(convert(source, tmp_path, keys=KeyRules("module")))) == [
        "a",
        "b",
        "c",
        "x.module.d",
    ]


def test_added_and_renamed_prefixes(tmp_path):
    source = state_dict("module.backbone.w", "module.head.w")
    rules = KeyRules(renames=(("backbone.", "encoder."),), add_prefix="net.")
    assert list(oracle.load(convert(source, tmp_path, keys=rules))) == [
        "net.encoder.w",
        "net.head.w",
    ]
    assert list(
        oracle.load(convert(state_dict("a", "module.b"), tmp_path, keys=KeyRules("add-module")))
    ) == [
        "module.a",
        "module.module.b",
    ]


def test_every_state_dict_of_a_training_checkpoint_is_normalised(tmp_path):
    tree = {
        "model": state_dict("module.a", "module.b"),
        "ema": state_dict("module.a", "b"),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
    }
    output = oracle.load(convert(tree, tmp_path))
    expected = {**tree, "model": oracle.bare_state_dict(tree["model"])}
    assert_same(output, expected)


def test_a_state_dict_that_stands_twice_is_renamed_once(tmp_path):
    weights = state_dict("module.a", "module.b")
    output = oracle.load(convert({"model": weights, "best": weights}, tmp_path))
    assert output["model"] is output["best"] and list(output["best"]) == ["a", "b"]


def test_only_keeps_one_part(tmp_path):
    tree = {"model": state_dict("module.a"), "epoch": 4, "deep": {"er.x": [1, torch.ones(2)]}}
    assert_same(oracle.load(convert(tree, tmp_path, only="model")), state_dict("a"))
    assert_same(oracle.load(convert(tree, tmp_path, only="deep.er.x")), tree["deep"]["er.x"])
    with pytest.raises(CheckpointError, match="nothing at 'nets'"):
        convert(tree, tmp_path, only="nets")


# --------------------------------------------------------------------------------------------- tags


def test_tags_are_mapped_and_kept(tmp_path):
    tensors = {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}
    tag_of = {4: "cuda:3", 8: "cpu", 12: "npu:1"}
    with oracle.tagged(lambda storage: tag_of[storage.nbytes()]):
        torch.save(tensors, tmp_path / "source.pt")
    for options, expected in (
        ({}, ["cpu", "cpu", "cpu"]),
        ({"device": "keep"}, ["cuda:3", "cpu", "npu:1"]),
        ({"device": "mps"}, ["mps", "mps", "mps"]),
        ({"map_location": {"cuda:3": "cuda:0"}}, ["cuda:0", "cpu", "npu:1"]),
        ({"device": "cpu", "map_location": {"cuda:3": "cuda:0"}}, ["cuda:0", "cpu", "cpu"]),
    ):
        convert_checkpoint(
            tmp_path / "source.pt", tmp_path / "out.pt", force=True, fsync=False, **options
        )
        assert oracle.tags(tmp_path / "out.pt") == expected
        assert_same(oracle.load(tmp_path / "out.pt"), tensors)


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.glob("*.pt")))
def test_samples_keep_every_tensor(samples, tmp_path, name):
    convert_checkpoint(samples / name, tmp_path / "out.pt", keys="keep", fsync=False, verify=True)
    source = oracle.load(samples / name, weights_only=False)
    found = oracle.load(tmp_path / "out.pt")
    assert set(oracle.tags(tmp_path / "out.pt")) == {"cpu"}
    ours, theirs = (
        oracle.tensor_rows(rows) for rows in (oracle.flatten(found), oracle.compacted(source))
    )
    assert [row.value for row in ours] == [row.value for row in theirs]
    if name != "namespace_train.pt":
        assert_same(found, source)


# ------------------------------------------------------------------------------------------- layout


def test_the_layout_is_the_one_that_torch_writes(tmp_path):
    """A file named archive.pt, saved by torch and converted, differs only in its pickle and its
    serialization id.
    """
    tree = {
        "a": torch.arange(5.0),
        "empty": torch.empty(0),
        "b": torch.arange(70_000),
        "c": torch.ones(3, dtype=torch.uint16),
    }
    torch.save(tree, tmp_path / "archive.pt")
    convert_checkpoint(tmp_path / "archive.pt", tmp_path / "out.pt", fsync=False)
    with (
        zipfile.ZipFile(tmp_path / "archive.pt") as theirs,
        zipfile.ZipFile(tmp_path / "out.pt") as ours,
    ):
        assert theirs.namelist() == ours.namelist()
        for record in theirs.infolist():
            again = ours.getinfo(record.filename)
            changed = record.filename.endswith(("data.pkl", "serialization_id"))
            assert again.file_size == record.file_size or changed
            assert again.CRC == record.CRC or changed
            assert (again.flag_bits, again.compress_type) == (
                record.flag_bits,
                record.compress_type,
            )


@pytest.mark.trust
def test_offsets_asserted_by_torch_in_a_fresh_process(tmp_path):
    output = convert(
        {f"k{size}": torch.ones(size) for size in range(40)}, tmp_path, device="cuda:2"
    )
    code = (
        "import sys, torch\n"
        "from torch.utils.serialization import config\n"
        "config.load.calculate_storage_offsets = True\n"
        "print(sum(t.numel() for t in torch.load(sys.argv[1], map_location='cpu', "
        "mmap=True).values()))\n"
        "print(sum(t.numel() for t in torch.load(sys.argv[1], map_location='cpu').values()))\n"
    )
    environment = {**os.environ, "TORCH_SERIALIZATION_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, output],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["780", "780"]


@pytest.fixture(scope="module")
def giant(tmp_path_factory) -> Path:
    """A sparse file of 5 GiB in torch's own layout: small, huge, small and empty records."""
    path = tmp_path_factory.mktemp("giant") / "archive.pt"
    tree = {
        "small": torch.zeros(10),
        "huge": torch.empty(5 << 30, dtype=torch.uint8),
        "after": torch.zeros(3, 3),
        "empty": torch.empty(0),
        "last": torch.zeros(7, dtype=torch.int64),
    }
    with torch.serialization.skip_data():
        torch.save(tree, path)
    return path


def test_a_file_beyond_4_gib_is_opened_and_laid_out_as_torch_does(giant):
    with open_checkpoint(giant) as checkpoint:
        plan = plan_conversion(
            checkpoint, giant.with_name("unwritten.pt"), Options(keys=KeyRules("keep"))
        )
    theirs = oracle.payload_offsets(giant)
    with zipfile.ZipFile(giant) as archive:
        sizes = {record.filename: record.file_size for record in archive.infolist()}
    assert {
        path: (ref.storage.offset, ref.storage.nbytes) for path, ref in checkpoint.tensors()
    } == {
        key: (theirs[f"archive/data/{number}"], sizes[f"archive/data/{number}"])
        for number, key in enumerate(["small", "huge", "after", "empty", "last"])
    }
    assert [f"archive/{item.name}" for item in plan.files[0].layout.items] == list(theirs)


def test_headers_of_records_beyond_4_gib_are_torch_s_byte_for_byte(giant):
    """Each record laid out where torch's stands: header, padding, offset and descriptor; then the
    whole directory.
    """
    raw = giant.open("rb")
    with zipfile.ZipFile(giant) as archive, raw:
        records = archive.infolist()
        layout = lay_out_records(
            NewRecord(one.filename, one.filename.encode(), b"", one.file_size, b"", UINT8)
            for one in records
        )
        for number, (record, item) in enumerate(zip(records, layout.items, strict=True)):
            lead = item.lead
            raw.seek(record.header_offset)
            theirs = bytearray(raw.read(len(lead)))
            # torch does not know the second of two equal sizes yet and writes 0
            if record.file_size > 1 << 32:
                at = 30 + len(record.filename) + 4 + 8
                assert theirs[at : at + 8] == bytes(8)
                theirs[at : at + 8] = struct.pack("<Q", record.file_size)
            assert theirs == lead, record.filename
            assert item.offset == record.header_offset + len(lead) and item.offset % 64 == 0
            raw.seek(item.offset + record.file_size)
            descriptor = layout.trail(number, record.CRC)
            assert raw.read(len(descriptor)) == descriptor, record.filename
        assert raw.tell() == archive.start_dir
        ending = layout.ending([record.CRC for record in records])
        raw.seek(archive.start_dir)
        theirs = raw.read()
    assert len(ending) == len(theirs) == layout.nbytes - archive.start_dir
    assert ending == theirs


def test_torch_opens_a_layout_beyond_4_gib(giant, tmp_path, monkeypatch):
    """The plan's bytes put into a sparse file, its payloads left as holes: zipfile and torch find
    every record.
    """
    output = tmp_path / "out.pt"
    with open_checkpoint(giant) as checkpoint:
        layout = plan_conversion(checkpoint, output, Options(keys=KeyRules("keep"))).files[0].layout
    crcs = []
    with output.open("wb") as file:
        for index, item in enumerate(layout.items):
            file.write(item.lead)
            assert file.tell() == item.offset
            if isinstance(item.values, bytes):
                file.write(item.values)
                crcs.append(crc32(item.values))
            else:
                file.seek(item.nbytes, os.SEEK_CUR)
                crcs.append(0)
            file.write(layout.trail(index, crcs[-1]))
        file.write(layout.ending(crcs))
        assert file.tell() == layout.nbytes > 5 << 30
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with CALCULATED_OFFSETS:
        found = oracle.load(output, mmap=True)
    assert {key: tuple(value.shape) for key, value in found.items()} == {
        "small": (10,), "huge": (5 << 30,), "after": (3, 3), "empty": (0,), "last": (7,)
    }  # fmt: skip
    with zipfile.ZipFile(output) as archive:
        assert archive.getinfo("archive/data/1").file_size == 5 << 30
        assert archive.read("archive/version") == b"3\n"


# ----------------------------------------------------------------------------------------- variants


def example() -> dict[str, Any]:
    torch.manual_seed(1)
    base = torch.arange(40, dtype=torch.int32)
    return {
        "f32": torch.randn(3, 4),
        "shared": [base[:10], base[5:20:3]],
        "bf16": torch.randn(6).bfloat16().reshape(2, 3).t(),
        "c64": torch.randn(3, dtype=torch.complex64).conj(),
        "c128": torch.randn(3, dtype=torch.complex128),
        "u16": torch.arange(9, dtype=torch.int32).to(torch.uint16)[::2],
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "big": torch.arange(100_000),
    }


@pytest.fixture
def saved(tmp_path) -> Path:
    torch.save(example(), tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


def reconverted(path: Path) -> Any:
    convert_checkpoint(path, path.with_name("out.pt"), keys="keep", fsync=False, verify=True)
    return oracle.load(path.with_name("out.pt"))


def test_deflated_members_are_inflated(saved, tmp_path):
    deflated = oracle.rezipped(saved, tmp_path / "deflated.pt", compression=zipfile.ZIP_DEFLATED)
    assert_same(reconverted(deflated), oracle.load(saved))


def test_the_root_folder_may_have_any_name(saved, tmp_path):
    renamed = oracle.rezipped(
        saved, tmp_path / "renamed.pt", name=lambda name: "best model.v2/" + name.partition("/")[2]
    )
    assert_same(reconverted(renamed), oracle.load(saved))


@pytest.mark.parametrize("kept", ["data", "version", "byteorder"])
def test_records_that_older_writers_lacked_are_not_needed(saved, tmp_path, kept):
    def name(old: str) -> str | None:
        return old if "/data" in old or old.endswith(kept) else None

    assert_same(
        reconverted(oracle.rezipped(saved, tmp_path / "older.pt", name=name)), oracle.load(saved)
    )


@pytest.mark.parametrize(("record", "raw"), [("version", b"three"), ("byteorder", b"middle")])
def test_a_small_record_that_says_nothing_that_is_known_is_refused(saved, tmp_path, record, raw):
    def payload(name: str, data: bytes) -> bytes:
        return raw if name.endswith(f"/{record}") else data

    odd = oracle.rezipped(saved, tmp_path / "odd.pt", payload=payload)
    with pytest.raises(MalformedCheckpoint, match=raw.decode()) as caught:
        open_checkpoint(odd)
    assert caught.value.where == f"saved/{record}"


def test_records_in_another_order_and_unused_ones_are_no_matter(saved, tmp_path):
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(tmp_path / "shuffled.pt", "w") as after:
        for record in reversed(before.infolist()):
            after.writestr(record.filename, before.read(record))
        after.writestr("saved/extra/note.txt", "hello")
    assert_same(reconverted(tmp_path / "shuffled.pt"), oracle.load(saved))


def test_a_file_without_checksums_is_read_and_says_so(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(example(), tmp_path / "saved.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(reconverted(tmp_path / "saved.pt"), example())
    with open_checkpoint(tmp_path / "saved.pt") as checkpoint:
        assert "no checksums" in "".join(checkpoint.notes)


def big_endian(tree: Any, path: Path) -> Path:
    """`tree` as a big-endian host would have saved it: payloads reversed word by word, and the
    record that says so.
    """
    torch.save(tree, path.with_name("little.pt"))
    words: dict[str, int] = {}
    numbers: dict[int, int] = {}
    for tensor in oracle.tensors(tree):
        number = numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers))
        words[f"data/{number}"] = tensor.element_size() // (2 if tensor.is_complex() else 1)

    def payload(name: str, stored: bytes) -> bytes:
        record = name.partition("/")[2]
        if record == "byteorder":
            return b"big"
        values = torch.frombuffer(bytearray(stored or b"-"), dtype=torch.uint8)
        return (
            values.reshape(-1, words.get(record, 1)).flip(1).numpy().tobytes() if stored else stored
        )

    return oracle.rezipped(path.with_name("little.pt"), path, payload=payload)


def test_a_big_endian_file_is_read_to_the_same_values(tmp_path):
    source = big_endian(example(), tmp_path / "big.pt")
    # torch itself does not swap those
    typed = {key: value for key, value in oracle.load(source).items() if key != "u16"}
    assert_same(
        typed,
        {key: value for key, value in oracle.load(tmp_path / "little.pt").items() if key != "u16"},
    )
    assert_same(reconverted(source), oracle.load(tmp_path / "little.pt"))
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.read("archive/byteorder") == b"little"


@given(trees.state_dicts())
@quick
def test_any_big_endian_state_dict_is_read_to_the_same_values(drawn):
    with tempfile.TemporaryDirectory() as folder:
        source = big_endian(drawn.tree, Path(folder) / "big.pt")
        assert_same(reconverted(source), oracle.load(Path(folder) / "little.pt"))


def test_a_big_endian_file_is_cast_as_its_values(tmp_path):
    tree = {"a": torch.randn(9), "b": torch.randn(4, 4)[:, 1]}
    convert_checkpoint(
        big_endian(tree, tmp_path / "big.pt"),
        tmp_path / "out.pt",
        dtype="f16",
        fsync=False,
        verify=True,
    )
    found = oracle.load(tmp_path / "out.pt")
    assert all(torch.equal(found[key], value.half()) for key, value in tree.items())


# ------------------------------------------------------------------------------------------- damage


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("dtype", [None, "f16"])
@pytest.mark.parametrize("key", [0, 1, 2])
def test_a_flipped_bit_of_any_payload_fails_the_conversion(tmp_path, key, dtype):
    tree = {
        "whole": torch.randn(300),
        "columns": torch.randn(30, 10)[:, 3],
        "pair": list(torch.randn(40).split(20)),
    }
    torch.save(tree, tmp_path / "source.pt")
    flip(
        tmp_path / "source.pt",
        oracle.payload_offsets(tmp_path / "source.pt")[f"source/data/{key}"] + 9,
    )
    with pytest.raises(MalformedCheckpoint, match=rf"data/{key}.*CRC-32"):
        convert_checkpoint(tmp_path / "source.pt", tmp_path / "out.pt", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"], "nothing is left behind"


def test_a_flipped_bit_of_the_pickle_is_noticed_when_opening(saved):
    flip(saved, oracle.payload_offsets(saved)["saved/data.pkl"] + 100)
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        open_checkpoint(saved)


def test_a_flipped_bit_of_a_deflated_payload_fails_the_conversion(saved, tmp_path):
    deflated = oracle.rezipped(saved, tmp_path / "deflated.pt", compression=zipfile.ZIP_DEFLATED)
    flip(deflated, oracle.payload_offsets(deflated)["saved/data/0"] + 9)
    with pytest.raises(MalformedCheckpoint, match="data/0"):
        convert_checkpoint(deflated, tmp_path / "out.pt")


@pytest.mark.parametrize("lost", [1, 22, 100, 1000])
def test_a_file_that_was_cut_off_is_refused(saved, lost):
    saved.write_bytes(saved.read_bytes()[:-lost])
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(saved)


def test_the_source_may_not_be_its_own_output_unless_forced(saved):
    before = oracle.load(saved)
    with pytest.raises(OutputRefused, match="exists"):
        convert_checkpoint(saved, saved)
    convert_checkpoint(saved, saved, force=True, device="cuda:5")
    assert set(oracle.tags(saved)) == {"cuda:5"}
    assert_same(oracle.load(saved), before)


@pytest.mark.parametrize(
    "bits", [{"conj": False}, {"neg": False}, {"conj": None, "neg": 0}, {"conj": True}, {}]
)
def test_lazy_bits_count_by_being_named_as_in_torch(bits, tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j])
    with patch.object(torch._utils, "get_tensor_metadata", lambda _: bits):
        torch.save({"w": values}, tmp_path / "in.pt")
    expected = torch.load(tmp_path / "in.pt")["w"]
    assert (expected.is_conj(), expected.is_neg()) == ("conj" in bits, "neg" in bits)
    assert load_portable(tmp_path / "in.pt")["w"].tolist() == expected.tolist()
    for name in ("out.pt", "out.safetensors"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / name)
    assert torch.load(tmp_path / "out.pt")["w"].tolist() == expected.tolist()
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == expected.tolist()


def test_a_deflated_record_whose_local_header_says_stored_is_refused(tmp_path):
    """Its header has just the form that torch gives to stored records."""
    body = pickle.dumps({"w": 1}, 2)
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    stored = {b"a/version": (b"3\n", 0), b"a/data.pkl": (body, 8)}
    out = directory = b""
    for name, (plain, method) in stored.items():
        raw = packed.compress(plain) + packed.flush() if method else plain
        crc, at = zlib.crc32(plain), len(out)
        out += struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), 0)
        out += name + raw + struct.pack("<4s3I", b"PK\7\x08", crc, len(raw), len(plain))
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, 0x808, method, 0, 0, crc, len(raw), len(plain),
            len(name), 0, 0, 0, 0, 0, at,
        ) + name  # fmt: skip
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, len(directory), len(out), 0)
    (tmp_path / "m.pt").write_bytes(out + directory + end)
    with pytest.raises(MalformedCheckpoint, match="local header contradicts the directory"):
        open_checkpoint(tmp_path / "m.pt")
