"""What `--verify` sees beside the reader: holes are planted in the reader and in the plan, and the
count finds them.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from safetensors.torch import save_file
from torch import nn

from ckptconv import convert_checkpoint
from ckptconv.cli.main import cli
from ckptconv.convert import accounting
from ckptconv.convert import flat_planner as flat_plans
from ckptconv.formats import safetensors, torch_output
from ckptconv.io.source import MemorySource
from ckptconv.pickles.census import held_stream, take_census
from ckptconv.pickles.nodes import ordered_dict
from ckptconv.pickles.opcodes import read_pickles
from ckptconv.pickles.reader import PickleReader
from ckptconv.support.errors import MalformedCheckpoint, VerificationFailed
from ckptconv.tree import modules, renaming
from helpers import trees
from helpers.examples import examples
from helpers.old_torch import Persistent as Reference
from helpers.old_torch import tar_checkpoint, tar_storages, tar_tensors, write

pytestmark = pytest.mark.filterwarnings("ignore")
FAST: dict[str, Any] = {"fsync": False, "force": True}
TREE = {"state_dict": OrderedDict((f"{name}.w", torch.randn(3, 2)) for name in "abc"), "epoch": 3}


def as_zip(path: Path) -> None:
    torch.save(TREE, path)


def as_legacy(path: Path) -> None:
    torch.save(TREE, path, _use_new_zipfile_serialization=False)


def as_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(TREE, protocol=2))


def as_newer_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(TREE, protocol=5))


def as_tar(path: Path) -> None:
    storages = tar_storages(
        [(key, "cpu", "FloatStorage", bytes(4 * key), key) for key in (1, 2, 3)]
    )
    tensors = tar_tensors([(10 + key, key, "FloatTensor", (key,), (1,), 0) for key in (1, 2, 3)])
    write(
        path,
        tar_checkpoint(
            storages,
            tensors,
            {"state_dict": {f"{key}.w": Reference(str(10 + key)) for key in (1, 2, 3)}},
        ),
    )


CONTAINERS = {
    "zip": as_zip,
    "legacy": as_legacy,
    "pickle": as_pickle,
    "newer pickle": as_newer_pickle,
    "tar": as_tar,
}


def last_item_lost(monkeypatch) -> None:
    """The hole: the reader drops the last item of every dict that has three."""
    sound = PickleReader._set_items
    monkeypatch.setattr(
        PickleReader,
        "_set_items",
        lambda self, target, flat: sound(self, target, flat[:-2] if len(flat) == 6 else flat),
    )


def assert_only_the_count_sees_it(source: Path, said: str, monkeypatch, **options: Any) -> None:
    """The conversion fails with the count and leaves nothing behind; without the count, --verify
    says equal.
    """
    before = {item.name for item in source.parent.iterdir()}
    for name in ("out.pt", "out.safetensors"):
        with pytest.raises(VerificationFailed, match=said):
            convert_checkpoint(source, source.with_name(name), verify=True, **FAST, **options)
        assert {item.name for item in source.parent.iterdir()} == before
    with monkeypatch.context() as patch:
        patch.setattr(accounting, "refuse_unaccounted", lambda _: None)
        for name in ("out.pt", "out.safetensors"):
            assert convert_checkpoint(
                source, source.with_name(name), verify=True, **FAST, **options
            ).verified


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_hole_in_the_reader_fails_verify(container, tmp_path, monkeypatch):
    source = tmp_path / "in.pt"
    CONTAINERS[container](source)
    assert convert_checkpoint(source, tmp_path / "whole.pt", verify=True, **FAST).verified == 3
    last_item_lost(monkeypatch)
    said = (
        "make 3 tensors, of which 2 were read"
        if container == "tar"
        else "is named by the pickle, but is not in the tree"
    )
    assert_only_the_count_sees_it(source, said, monkeypatch)


def test_the_program_says_it_in_one_line_and_exits_with_1(tmp_path, monkeypatch):
    as_zip(tmp_path / "in.pt")
    command = ["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--verify"]
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 0
    assert "nothing that the source names is missing" in found.stderr + found.stdout
    (tmp_path / "out.pt").unlink()
    last_item_lost(monkeypatch)
    found = CliRunner().invoke(cli, command)
    assert found.exit_code == 1
    assert "in/data/2: is named by the pickle" in found.stderr
    assert not (tmp_path / "out.pt").exists()


def test_arguments_that_vanish_fail_verify(tmp_path, monkeypatch):
    """The hole that there was: the items that are an argument of an OrderedDict."""
    stream = io.BytesIO()
    torch.save({"sd": {"a": torch.ones(2)}, "x": [("w", torch.zeros(3))]}, stream)
    archive = zipfile.ZipFile(stream)
    raw = archive.read("archive/data.pkl")
    called = (
        raw.replace(b"X\x01\x00\x00\x00x", b"X\x01\x00\x00\x00xccollections\nOrderedDict\n", 1)[:-2]
        + b"\x85Ru."
    )
    with zipfile.ZipFile(tmp_path / "in.pt", "w") as out:
        for item in archive.infolist():
            out.writestr(
                item.filename, called if item.filename.endswith("data.pkl") else archive.read(item)
            )
    assert [*torch.load(tmp_path / "in.pt", weights_only=False)["x"]] == ["w"]
    assert (
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", verify=True, **FAST).verified
        == 2
    )
    (tmp_path / "out.pt").unlink()
    monkeypatch.setattr("ckptconv.pickles.making._items", lambda *_: [])
    assert_only_the_count_sees_it(tmp_path / "in.pt", "data/1: is named by the pickle", monkeypatch)


def test_one_of_two_views_of_a_storage_that_is_lost_fails_verify(tmp_path, monkeypatch):
    base = torch.randn(6)
    torch.save({"a": base, "b": base[:2], "c": base[3:]}, tmp_path / "in.pt")
    last_item_lost(monkeypatch)
    assert_only_the_count_sees_it(
        tmp_path / "in.pt", "make 3 tensors, of which 2 were read", monkeypatch
    )


def test_a_shard_that_is_not_read_to_the_end_fails_verify(tmp_path, monkeypatch):
    for number in (1, 2):
        tree = {
            "weights": {f"{number}.{name}": torch.ones(2) for name in "ab"},
            "optimizer": {"x": torch.ones(3)},
        }
        torch.save(tree, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    names = {
        f"{number}.{name}": f"pytorch_model-0000{number}-of-00002.bin"
        for number in (1, 2)
        for name in "ab"
    }
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": names}))
    with pytest.raises(VerificationFailed, match=r"data/2: is named .*2 storages in all"):
        convert_checkpoint(index, tmp_path / "out.safetensors", verify=True)
    for number in (1, 2):
        torch.save(
            {f"{number}.{name}": torch.ones(2) for name in "ab"},
            tmp_path / f"pytorch_model-0000{number}-of-00002.bin",
        )
    result = convert_checkpoint(index, tmp_path / "out.safetensors", verify=True)
    assert (result.verified, result.named) == (4, 4)


def test_a_tensor_of_a_safetensors_file_that_is_lost_fails_verify(tmp_path, monkeypatch):
    save_file(
        {"a": torch.ones(2), "b": torch.ones(3), "empty": torch.ones(0)},
        tmp_path / "in.safetensors",
    )
    assert (
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.pt", verify=True).named == 2
    )
    (tmp_path / "out.pt").unlink()
    monkeypatch.setattr(safetensors, "ordered_dict", lambda pairs: ordered_dict(pairs[:1]))
    with pytest.raises(VerificationFailed, match="b: is named"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.pt", verify=True)


# ----------------------------------------------------------------------------------------- the plan


def test_a_state_dict_that_loses_a_key_when_it_is_renamed_fails_verify(tmp_path, monkeypatch):
    torch.save({f"module.{key}": torch.ones(2) for key in "abc"}, tmp_path / "in.pt")
    sound = renaming.renamed_in_place

    def holed(found, keys, paths):
        made = sound(found, keys, paths)
        made.pairs = list(made.pairs)[:-1]
        return made

    monkeypatch.setattr(renaming, "renamed_in_place", holed)
    with pytest.raises(
        VerificationFailed, match="was read, but is neither in the output nor listed"
    ):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", verify=True)


def test_a_part_that_is_left_out_and_not_listed_fails_verify(tmp_path, monkeypatch):
    torch.save(
        {"state_dict": {"a.w": torch.ones(2)}, "optimizer": {"t": [torch.ones(3)]}},
        tmp_path / "in.pt",
    )
    plan = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.safetensors", verify=True).plan
    assert [item.path for item in plan.skipped] == ["optimizer"]
    monkeypatch.setattr(flat_plans, "_other_parts", lambda *_: iter(()))
    with pytest.raises(
        VerificationFailed, match="was read, but is neither in the output nor listed"
    ):
        convert_checkpoint(
            tmp_path / "in.pt", tmp_path / "out.safetensors", verify=True, force=True
        )


@pytest.mark.parametrize(
    "options",
    [{"only": "state_dict"}, {"unknown": "drop"}, {"dtype": "bf16"}, {"tied": "duplicate"}],
)
def test_what_was_not_asked_for_or_is_listed_is_accounted_for(options, tmp_path):
    shared = torch.randn(4, 4)
    tree = {
        "state_dict": {
            "a.w": shared,
            "b.w": shared,
            "c.w": shared[1:, ::2],
            "empty": shared[:0],
            "extra": {"t": torch.ones(1)},
        },
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-3}]},
        "optimizers": Holder(torch.ones(5)),
    }
    tree["state_dict"].pop("extra")
    torch.save(tree, tmp_path / "in.pt")
    if options.get("unknown") is None:
        options = {**options, "unknown": "keep" if "only" not in options else "refuse"}
    for name in ("out.pt", "out.safetensors"):
        result = convert_checkpoint(
            tmp_path / "in.pt", tmp_path / name, verify=True, **FAST, **options
        )
        assert result.named == 3


class Holder:
    """An object of a class that no reader knows, with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Net(nn.Module):
    """A module with all that is not part of a state dict: a buffer that is not saved, attributes
    that are tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.tail = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.plain = [torch.zeros(5)]
        self.again = self.fc.weight


def test_what_a_module_holds_beside_its_state_dict_is_told(tmp_path):
    torch.save({"model": Net()}, tmp_path / "in.pt")
    result = convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out.pt", verify=True, unknown="drop"
    )
    assert result.verified == len(Net().state_dict())
    assert [item.path for item in result.plan.skipped] == ["model.cache", "model.plain.0"]


@pytest.mark.parametrize("parts", ["child_modules", "saved_tensors"])
def test_a_module_that_loses_a_part_fails_verify(parts, tmp_path, monkeypatch):
    torch.save(Net(), tmp_path / "in.pt")
    sound = getattr(modules, parts)
    monkeypatch.setattr(modules, parts, lambda module: sound(module)[:-1])
    assert_only_the_count_sees_it(
        tmp_path / "in.pt",
        "belongs to a module, but is not in its state dict",
        monkeypatch,
        unknown="drop",
    )


# ---------------------------------------------------------------------------------------- the count


@settings(max_examples=examples(40), deadline=None)
@given(trees.trees())
def test_the_count_is_that_of_the_archive(drawn):
    buffer = io.BytesIO()
    torch.save(drawn, buffer)
    archive = zipfile.ZipFile(buffer)
    census = take_census(archive.read("archive/data.pkl"))
    assert {f"archive/data/{key}" for key in census.storages} == {
        name for name in archive.namelist() if "/data/" in name
    }


@pytest.mark.parametrize("protocol", range(6))
def test_the_count_finds_the_streams_in_bare_pickles(protocol):
    tensors = {"a": torch.ones(3), "b": nn.Parameter(torch.ones(700)), "c": [torch.ones(0)]}
    stream = pickle.dumps(tensors, protocol=protocol)
    census = take_census(stream)
    assert census.tensors == 3
    sizes = []
    for held in census.streams:
        inner, _ = read_pickles(MemorySource(held_stream(stream, held), Path("in")), 0, 4)
        sizes += take_census(inner[3]).storages.values()
    assert sizes == [3, 700, 0]


@pytest.mark.parametrize("text", [b"stream", b"\x80\x02\xff"])
def test_a_stream_that_python_2_wrote_as_a_string_is_found(text):
    stream = b"ctorch.storage\n_load_from_bytes\nU" + bytes([len(text)]) + text + b"\x85R."
    (held,) = take_census(stream).streams
    assert held_stream(stream, held) == text


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x02X\xff\0\0\0abc.",
        b"\x80\x02N\x86.",
        b"\x80\x02(X\7\0\0\0storageNNNNtQ.",
        b"\x80\x02\x82\1.",
    ],
    ids=["cut", "tuple", "storage", "opcode"],
)
def test_a_count_that_cannot_go_on_is_told(stream):
    with pytest.raises(MalformedCheckpoint, match="counting what its pickle names stops near byte"):
        take_census(stream)


def test_the_count_follows_the_memo_of_every_protocol(tmp_path):
    tree = [{"w": torch.ones(2), "same": "cpu"} for _ in range(300)]
    for protocol in (1, 2, 3, 4, 5):
        buffer = io.BytesIO()
        torch.save(tree, buffer, pickle_protocol=protocol)
        census = take_census(zipfile.ZipFile(buffer).read("archive/data.pkl"))
        assert (len(census.storages), census.tensors) == (300, 300)


def test_an_output_whose_pickle_makes_fewer_tensors_than_were_planned_fails_verify(
    tmp_path, monkeypatch
):
    """One of two views of a storage: the storage is named."""
    whole = torch.arange(6.0)
    torch.save({"a": whole, "b": whole[1:3]}, tmp_path / "in.pt")
    sound = torch_output.write_pickle

    def holed(root, leaf, overlay=None):
        pairs = root.pairs
        try:
            sound(root, leaf, overlay)  # which numbers all storages
            root.pairs = pairs[:1]
            return sound(root, leaf, overlay)
        finally:
            root.pairs = pairs

    monkeypatch.setattr(torch_output, "write_pickle", holed)
    monkeypatch.setattr(accounting, "refuse_unaccounted", lambda _: None)
    with pytest.raises(VerificationFailed, match="its pickle makes 1 tensors where 2 were planned"):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", verify=True)
    assert [item.name for item in tmp_path.iterdir()] == ["in.pt"]


def test_an_output_whose_pickle_names_less_than_was_planned_fails_verify(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2), "b": [torch.ones(3)]}, tmp_path / "in.pt")
    sound = torch_output.write_pickle

    def holed(root, leaf, overlay=None):
        made = sound(root, leaf, overlay)
        root.pairs = root.pairs[:1]  # and so do the plan and the reader of the output see less
        return sound(root, leaf, overlay) if made else made

    monkeypatch.setattr(torch_output, "write_pickle", holed)
    monkeypatch.setattr(accounting, "refuse_unaccounted", lambda _: None)
    with pytest.raises(
        VerificationFailed, match="archive/data/1: was written, but the pickle does not name it"
    ):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt", verify=True)
    assert [item.name for item in tmp_path.iterdir()] == ["in.pt"]
