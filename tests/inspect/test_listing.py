"""`ckptconv ls`: which tensors, under which names, and where their bytes lie; nothing is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click import unstyle
from safetensors import safe_open
from safetensors.torch import save_file

from ckptconv import OptionRefused, convert_checkpoint
from ckptconv.inspect.listing import list_tensors, listing_lines
from ckptconv.io.files import FileSource
from helpers.http_server import HttpServer
from helpers.paths import CORPUS
from helpers.program import run, run_on_terminal


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A state dict with twelve layers, a tied head and a view with other strides, and its files."""
    folder = tmp_path_factory.mktemp("listing")
    torch.manual_seed(0)
    tensors = {"embed.weight": torch.randn(5, 4)}
    for layer in range(12):
        tensors[f"layers.{layer}.weight"] = torch.randn(4, 4).bfloat16()
    tensors["turned"] = tensors["embed.weight"].t()
    torch.save({**tensors, "head.weight": tensors["embed.weight"], "step": 3}, folder / "zip.pt")
    torch.save(tensors, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "m.safetensors")
    np.savez(folder / "m.npz", **{key: value.float() for key, value in tensors.items()})
    return folder, tensors


FILES = ("zip.pt", "legacy.pt", "m.safetensors", "m.npz")


@pytest.mark.parametrize("name", FILES)
def test_the_bytes_of_a_tensor_are_where_it_is_said(name, model):
    folder, tensors = model
    found = {item.name: item for item in list_tensors(folder / name, is_long=True).tensors}
    raw = (folder / name).read_bytes()
    assert found.keys() - {"head.weight"} == tensors.keys()
    for key, value in tensors.items():
        value = value.float() if name == "m.npz" else value
        item = found[key]
        assert (item.dtype, item.shape) == (str(value.dtype)[6:], tuple(value.shape))
        is_strided = key == "turned" and name != "m.safetensors"
        assert item.extent.stride == (value.stride() if is_strided else None)
        first = (value.t() if is_strided else value).contiguous().view(torch.uint8).numpy()
        start = item.extent.offset
        assert raw[start : start + item.nbytes] == first.tobytes(), key


def test_a_listing_reads_no_values(tmp_path, monkeypatch):
    plain = torch.randn(5000, 30)
    scales, zeros = torch.rand(5000) + 0.01, torch.zeros(5000)
    torch.save(
        {"q": torch.quantize_per_channel(plain, scales, zeros, 0, torch.qint8), "w": plain},
        tmp_path / "m.pt",
    )
    read = []
    for name in ("read", "read_into"):
        method = getattr(FileSource, name)

        def counted(self, offset, what, method=method):
            read.append((offset, what if isinstance(what, int) else len(what)))
            return method(self, offset, what)

        monkeypatch.setattr(FileSource, name, counted)
    found = list_tensors(tmp_path / "m.pt", is_long=True)
    assert [(item.name, item.dtype) for item in found.tensors] == [("q", "qint8"), ("w", "float32")]
    directory = (tmp_path / "m.pt").stat().st_size - (1 << 16) - 22  # it may begin there
    assert sum(nbytes for offset, nbytes in read if offset > directory) > 0
    assert sum(nbytes for offset, nbytes in read if offset < directory - 100) < 20_000, (
        "not the scales"
    )


def test_over_a_network_only_the_header_is_fetched(tmp_path):
    save_file({"w": torch.zeros(1 << 20), "b": torch.zeros(3)}, tmp_path / "m.safetensors")
    with HttpServer({"/m.safetensors": (tmp_path / "m.safetensors").read_bytes()}) as server:
        done = run("ls", f"{server.url}/m.safetensors", "--json", cwd=tmp_path)
    document = done.json()
    assert [(item["name"], item["shape"]) for item in document["tensors"]] == [
        ("b", [3]), ("w", [1 << 20]),
    ]  # fmt: skip
    assert document["network"]["bytes_read"] < 1 << 20


def test_globs_choose_and_one_that_meets_nothing_is_an_error(model):
    folder, _ = model
    found = list_tensors(folder / "zip.pt", ["layers.1*", "embed.weight"])
    assert [item.name for item in found.tensors] == [
        "embed.weight", "layers.1.weight", "layers.10.weight", "layers.11.weight",
    ]  # fmt: skip
    assert found.of == 15
    with pytest.raises(OptionRefused, match=r"layers.3 matches.*what is in it.* 'layers.3.\*'"):
        list_tensors(folder / "zip.pt", ["layers.3"])
    done = run("ls", "zip.pt", "*.bias", cwd=folder)
    assert (done.exit, done.out) == (1, "")
    assert done.err == (
        "error: *.bias matches no tensor; the first are: embed.weight, "
        "layers.0.weight, layers.1.weight\n"
    )


def test_names_are_sorted_with_their_numbers_as_numbers(model):
    folder, _ = model
    by_name = [item.name for item in list_tensors(folder / "m.safetensors").tensors]
    assert by_name[1:13] == [f"layers.{number}.weight" for number in range(12)]
    with safe_open(folder / "m.safetensors", "pt") as file:
        by_order = list_tensors(folder / "m.safetensors", sort="order").tensors
        assert [item.name for item in by_order] == sorted(file.keys(), key=file.offset_keys().index)
    sizes = [item.nbytes for item in list_tensors(folder / "zip.pt", sort="size").tensors]
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) == 2


def test_a_tied_tensor_tells_its_other_name_also_where_that_is_not_listed(model):
    folder, _ = model
    (head,) = list_tensors(folder / "zip.pt", ["head.weight"]).tensors
    assert head.same_as == "embed.weight"
    found = list_tensors(folder / "zip.pt", [head.name])
    *_, told = listing_lines(found, 80)
    assert told.text.startswith(f"1 of {found.of} tensors, 20 values")
    values = {item.name for item in list_tensors(folder / "zip.pt").tensors if item.same_as is None}
    assert "embed.weight" in values and "turned" in values, "another view is another tensor"


def test_a_pipe_gets_a_line_for_each_tensor_and_nothing_else(model):
    folder, _ = model
    piped = run("ls", "m.safetensors", cwd=folder).out.splitlines()
    assert len(piped) == 14 and piped[0] == "embed.weight      float32   [5, 4]  80 B"
    assert piped == run("ls", "m.safetensors", cwd=folder, env={"COLUMNS": "20"}).out.splitlines()
    _, shown = run_on_terminal("ls", "m.safetensors", cwd=folder, columns=80)
    head, *lines, total = shown.splitlines()
    assert [unstyle(line) for line in lines] == piped
    assert unstyle(head).split() == ["name", "dtype", "shape", "size"]
    assert unstyle(total) == "14 tensors, 232 values, 544 B"


@pytest.mark.parametrize("name", ["dcp_fsdp2", "ds_z3", "hf_sharded", "peft", "lightning.ckpt"])
def test_every_container_lists_the_tensors_that_inspect_counts(name, produced):
    from ckptconv import inspect_checkpoint

    path = produced / name
    found = list_tensors(path, is_long=True)
    assert len(found.tensors) == inspect_checkpoint(path).tensors > 0
    for item in found.tensors:
        if item.extent is not None:
            assert Path(item.extent.file).stat().st_size >= item.extent.offset + item.nbytes


def test_inspect_counts_the_numbers_of_a_state_dict(model, tmp_path):
    """As the sum of `numel` of the parameters of a module, which has tied ones once."""
    folder, tensors = model
    document = run("inspect", "legacy.pt", "--json", cwd=folder).json()["state_dicts"][0]
    numel = sum(value.numel() for value in tensors.values())
    assert (document["keys"], document["parameters"]) == (14, numel)
    torch.save({"a": tensors["embed.weight"], "b": tensors["embed.weight"]}, tmp_path / "tied.pt")
    assert "  parameters  20 in 2 keys\n" in run("inspect", "tied.pt", cwd=tmp_path).out
    plain = torch.randn(4, 6)
    quantized = torch.quantize_per_channel(plain, torch.ones(4), torch.zeros(4), 0, torch.qint8)
    torch.save({"fc.weight": quantized, "fc.bias": torch.ones(4)}, tmp_path / "q.pt")
    assert "  parameters  28 in 2 keys\n" in run("inspect", "q.pt", cwd=tmp_path).out


def test_a_block_of_gguf_counts_each_of_its_numbers(tmp_path):
    path = CORPUS.parent / "numbers" / "gguf" / "all_types.gguf"
    values = sum(math.prod(item.shape) for item in list_tensors(path).tensors)
    assert f"  parameters  {values:,} in 15 keys\n" in run("inspect", path, cwd=tmp_path).out


def test_a_long_listing_names_files_where_there_are_several(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    torch.save(tensors, tmp_path / "m.pt")
    convert_checkpoint(tmp_path / "m.pt", tmp_path / "hf", to="safetensors", max_shard_size=16)
    shards = [path.name for path in sorted((tmp_path / "hf").glob("*.safetensors"))]
    assert len(shards) == 2
    for path, named in (("m.pt", False), ("hf", True), (f"hf/{shards[0]}", False)):
        found = [
            row.text for row in listing_lines(list_tensors(tmp_path / path, is_long=True), 200)
        ]
        assert [shard in "".join(found) for shard in shards] == [named, named]
        assert ("file" in found[0].split()) is named


def test_names_of_files_cannot_write_to_a_terminal(tmp_path):
    torch.save({"a\x1b[31m\nb": torch.ones(1)}, tmp_path / "m.pt")
    done = run("ls", "m.pt", "-l", cwd=tmp_path)
    assert done.out.startswith("a\\x1b[31m\\nb  float32  [1]") and done.out.count("\n") == 1


def test_a_file_of_the_corpus_lists_what_torch_loads():
    path = CORPUS / "files" / "timesler__facenet-pytorch__onet.pt"
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    listed = {item.name: (item.dtype, item.shape) for item in list_tensors(path).tensors}
    assert listed == {
        key: (str(value.dtype)[6:], tuple(value.shape)) for key, value in loaded.items()
    }
    assert json.dumps(sorted(listed))
