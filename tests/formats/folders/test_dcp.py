"""DCP folders: what several processes saved becomes what torch's own consolidation makes of it; odd
folders are refused.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tracemalloc
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    load_portable,
    open_checkpoint,
    save_portable,
)
from ckptconv.convert.report import result_document, result_headline
from ckptconv.support.errors import (
    LimitExceeded,
    MalformedCheckpoint,
    OutputRefused,
    RefusedObject,
    UnsupportedCheckpoint,
)
from ckptconv.support.text import size_text
from helpers import oracle
from helpers.paths import DATA
from helpers.program import PROGRAM, assert_one_error, idle_rss, run, run_process

FOLDERS = ("rows2", "columns2", "training2", "rows4", "columns4", "grid4", "hybrid4", "parallel4")
QUICK: dict[str, Any] = {"fsync": False, "verify": True}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def consolidated(folder: Path, scratch: Path) -> Any:
    """What torch makes of a DCP folder."""
    dcp_to_torch_save(folder, scratch / "torch.pt")
    return torch.load(scratch / "torch.pt", weights_only=False)


def gathered(path: Path) -> Any:
    """The whole tensors that the processes gathered before they saved."""
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_becomes_what_torch_makes_of_it(name, worlds, tmp_path):
    convert_checkpoint(worlds / name, tmp_path / "out.pt", keys="keep", **QUICK)
    expected = consolidated(worlds / name, tmp_path)
    if name == "training2":  # torch's own has texts for the numbers, by which it finds no state
        states = expected["optimizer"]["state"]
        expected["optimizer"]["state"] = {int(number): state for number, state in states.items()}
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(expected)


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "training2"])
def test_its_tensors_are_those_that_the_processes_gathered(name, worlds, tmp_path):
    convert_checkpoint(worlds / name, tmp_path / "out.safetensors", keys="keep", **QUICK)
    found, expected = load_file(tmp_path / "out.safetensors"), gathered(worlds / f"{name}.whole.pt")
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )


def test_the_parts_of_a_training_checkpoint_can_be_chosen(worlds, tmp_path):
    convert_checkpoint(
        worlds / "training2" / ".metadata", tmp_path / "out.safetensors", only="model", **QUICK
    )
    found, expected = (
        load_file(tmp_path / "out.safetensors"),
        gathered(worlds / "training2.whole.pt")["model"],
    )
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )


def test_a_folder_with_the_metadata_of_every_rank_is_put_together(worlds, tmp_path):
    assert not (worlds / "apart2" / ".metadata").exists()
    convert_checkpoint(worlds / "apart2", tmp_path / "out.pt", **QUICK)
    expected = {"model": gathered(worlds / "rows2.whole.pt"), "step": 7}
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(expected)


def test_a_folder_without_the_metadata_of_a_rank_is_refused(worlds, tmp_path):
    folder = Path(shutil.copytree(worlds / "apart2", tmp_path / "in"))
    (folder / "__1.metadata").unlink()
    with pytest.raises(MalformedCheckpoint, match="its 1 chunk holds"):
        open_checkpoint(folder)


@pytest.mark.parametrize("stop", [SystemExit(143), KeyboardInterrupt()])
def test_a_signal_while_torch_writes_ends_the_program(stop, tmp_path, monkeypatch):
    """As when a signal's exception closes torch's zip writer, which raises its own on the way."""

    def write_data(*_: Any) -> None:
        try:
            raise stop
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(
        "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", write_data
    )
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(type(stop)):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out", to="dcp", fsync=False)
    assert [item.name for item in tmp_path.iterdir()] == ["in.pt"]


def test_a_folder_that_was_copied_without_its_hidden_file_is_told(worlds, tmp_path):
    shutil.copytree(worlds / "grid4", tmp_path / "copy", ignore=shutil.ignore_patterns(".metadata"))
    with pytest.raises(
        CheckpointError,
        match=r"not the \.metadata that says what is in them; copy the whole folder",
    ):
        open_checkpoint(tmp_path / "copy")


def test_live_tensors_are_loaded(worlds):
    found, expected = load_portable(worlds / "grid4"), gathered(worlds / "grid4.whole.pt")
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )


def test_a_folder_of_fsdp_is_its_model(produced, tmp_path):
    convert_checkpoint(produced / "dcp_fsdp2", tmp_path / "out.pt", **QUICK)
    found, expected = oracle.load(tmp_path / "out.pt"), oracle.load(produced / "full_from_fsdp.pt")
    assert found["step"] == 7
    assert oracle.value_rows(found["model"]) == oracle.value_rows(dict(expected))


@pytest.mark.trust
def test_memory_does_not_grow_with_a_tensor_split_by_columns(worlds, tmp_path):
    done = run_process("convert", worlds / "large2", "out.safetensors", "--no-fsync", cwd=tmp_path)
    assert done.exit == 0, done.err
    assert (tmp_path / "out.safetensors").stat().st_size > 64_000_000
    # up to 16 MiB of what was freed is kept for what comes next (`keep_freed_memory`)
    assert done.rss < idle_rss() + 34_000_000


def test_no_payload_is_read_when_opening(worlds, monkeypatch):
    counted = [0]
    for name in ("pread", "preadv"):
        read = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *given, read=read: counted.append(read(*given)) or counted[-1]
        )
    with open_checkpoint(worlds / "large2") as checkpoint:
        assert [ref.nbytes for _, ref in checkpoint.tensors()] == [4 * 4096 * 4096]
    assert sum(len(got) if isinstance(got, bytes) else got for got in counted) < 1_000_000


# --------------------------------------------------------------------------- folders of one process


@pytest.fixture
def saved(tmp_path) -> Callable[..., Path]:
    """Saves a state dict as a DCP folder, in this process alone."""

    def save(tree: dict[str, Any], **options: Any) -> Path:
        folder = tmp_path / "in"
        dcp.save(tree, storage_writer=FileSystemWriter(folder, **options), no_dist=True)
        return folder

    return save


W = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        W.to(torch.float8_e4m3fn),
        W.to(torch.complex64),
        W.bool(),
        W.to(torch.uint16),
        W.T,
        W[1:, ::2],
        torch.empty(0, 3),
        torch.tensor(3),
        torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=str,
)
def test_every_kind_of_tensor_is_kept(tensor, saved, tmp_path):
    folder = saved({"w": tensor, "nested": {"list": [tensor, {"deep": tensor}]}})
    convert_checkpoint(folder, tmp_path / "out.pt", **QUICK)
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(
        consolidated(folder, tmp_path)
    )


def test_a_state_dict_that_was_not_flattened_keeps_its_keys(tmp_path):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(
        {"a.b": W, "c": {"d": 1}}, checkpoint_id=tmp_path / "in", planner=planner, no_dist=True
    )
    convert_checkpoint(tmp_path / "in", tmp_path / "out.pt", **QUICK)
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(
        {"a.b": W, "c": {"d": 1}}
    )


@pytest.mark.trust
def test_more_files_than_a_process_may_open_are_read(saved, tmp_path):
    state_dict = {f"w{index:03}": W + index for index in range(300)}
    folder = saved(state_dict, single_file_per_rank=False)
    assert len(list(folder.glob("*.distcp"))) == 300
    command = ("/bin/sh", "-c", 'ulimit -n 160 && exec "$@"', "sh", *PROGRAM)
    done = run_process(
        "convert", folder, "out.safetensors", "--verify", cwd=tmp_path, command=command
    )
    assert done.exit == 0, done.err
    assert oracle.value_rows(
        dict(sorted(load_file(tmp_path / "out.safetensors").items()))
    ) == oracle.value_rows(state_dict)


class Reversing(StreamTransformExtension):
    """A transform of the kind that compresses; what it does does not matter."""

    @staticmethod
    def registry_name() -> str:
        return "stream.reversing"

    @staticmethod
    def from_descriptor(version: str) -> Reversing:
        return Reversing()

    def get_descriptor(self) -> str:
        return "stream.reversing/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:
        return input


def test_transformed_items_are_refused_by_the_name_of_the_transform(saved, tmp_path):
    folder = saved({"w": W}, _extensions=[Reversing()])
    with pytest.raises(UnsupportedCheckpoint, match=r"stream\.reversing/1") as raised:
        convert_checkpoint(folder, tmp_path / "out.pt", **QUICK)
    assert raised.value.where == "w"


# -------------------------------------------------------------------------------------- bad folders


def changed(folder: Path, change: Callable[[Metadata], Metadata | None]) -> Path:
    """The folder with another `.metadata`, written as torch writes it."""
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    index.write_bytes(pickle.dumps(change(metadata) or metadata))
    return folder


def relocated(path: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    return change


def resized(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, **changes)

    return change


def rechunked(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Metadata], None]:
    """Makes another chunk of the first of a tensor that has two; the item stays where it was."""

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["last"]
        first, item = (
            entry.chunks[0],
            metadata.storage_data.pop(MetadataIndex("last", entry.chunks[0].offsets)),
        )
        entry.chunks[0] = replace(first, offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        metadata.storage_data[MetadataIndex("last", torch.Size(offsets), 0)] = item

    return change


def without_a_chunk(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["last"].chunks[0]


def without_a_place(metadata: Metadata) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "last")]


def in_the_way(metadata: Metadata) -> None:
    metadata.planner_data = {
        **metadata.planner_data,
        list(metadata.planner_data)[-1]: ("last", "one"),
    }


def far_away(metadata: Metadata) -> None:
    metadata.planner_data = {**metadata.planner_data, "last": ("last", 1 << 40)}


def twice(metadata: Metadata) -> None:
    metadata.planner_data = {**metadata.planner_data, "last": ("deep",)}


def mixed(metadata: Metadata) -> None:
    given = metadata.planner_data
    metadata.planner_data = {**given, "last": ("x", "one"), list(given)[-1]: ("x", 0)}


BAD = {
    "a name and an index": (mixed, MalformedCheckpoint, "mixes the keys of a dict"),
    "a file outside": (
        relocated("../rows2/__0_0.distcp"),
        MalformedCheckpoint,
        "not a plain relative path",
    ),
    "an absolute path": (
        relocated("/etc/passwd"),
        MalformedCheckpoint,
        "not a plain relative path",
    ),
    "a missing file": (
        relocated("__7_0.distcp"),
        MalformedCheckpoint,
        "'__7_0.distcp', which is not there",
    ),
    "an item beyond the end": (resized(offset=1 << 40), MalformedCheckpoint, "beyond its end"),
    "an item cut off": (resized(length=700), MalformedCheckpoint, "end record"),
    "another shape": (rechunked((0, 0), (6, 4)), MalformedCheckpoint, "instead of"),
    "an overlap": (rechunked((0, 4), (6, 8)), MalformedCheckpoint, "overlap"),
    "a chunk outside": (rechunked((0, 12), (6, 8)), MalformedCheckpoint, "at [0, 12]"),
    "a gap": (without_a_chunk, MalformedCheckpoint, "holds 48 of 96 values"),
    "no place": (without_a_place, MalformedCheckpoint, "does not say where"),
    "a key in the way": (in_the_way, MalformedCheckpoint, "another kind"),
    "a long list": (far_away, LimitExceeded, "of a list"),
    "one place for two": (twice, MalformedCheckpoint, "one place"),
}


def scalars(folder: Path, count: int, length: int = 700) -> Path:
    """A folder of one tensor in `count` chunks that are all said to lie in one place."""
    properties = TensorProperties(dtype=torch.float32)
    one = torch.Size([1])
    chunks = [ChunkStorageMetadata(torch.Size([at]), one) for at in range(count)]
    places = {
        MetadataIndex("w", chunk.offsets, at): _StorageInfo("__0_0.distcp", 0, length)
        for at, chunk in enumerate(chunks)
    }
    entries = {"w": TensorStorageMetadata(properties, torch.Size([count]), chunks)}
    metadata = Metadata(
        state_dict_metadata=entries, planner_data={"w": ("w",)}, storage_data=places
    )
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save(torch.zeros(1), folder / "__0_0.distcp")
    return folder


@pytest.mark.trust
def test_deep_paths_cost_what_they_are_long(tmp_path):
    """A folder may nest each key a thousand levels deep, at a kilobyte of its index."""
    folder = tmp_path / "deep"
    dcp.save({f"k{at}": torch.ones(1) for at in range(30)}, checkpoint_id=folder, no_dist=True)

    def deep(metadata: Metadata) -> None:
        for key in metadata.state_dict_metadata:
            metadata.planner_data[key] = (key, *["a"] * 900)

    changed(folder, deep)
    tracemalloc.start()
    try:
        with open_checkpoint(folder) as checkpoint:
            assert sum(1 for _ in checkpoint.tensors()) == 30
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, "each level is kept once, not once for all above it"


def test_the_size_that_is_told_is_that_of_the_folder(tmp_path):
    def size() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "out").iterdir())

    torch.save({"w": torch.ones(50), "v": torch.ones(3)}, tmp_path / "in.pt")
    result = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out", to="dcp")
    assert result.nbytes == size() != result.plan.nbytes
    assert f"out{os.sep} (dcp, {size_text(size())})" in result_headline(result)
    assert result_document(result)["output"]["bytes"] == size()
    options = ("convert", "in.pt", "out", "--to", "dcp", "-f", "-n")
    assert run(*options, "--json", cwd=tmp_path).json()["output"]["bytes"] is None
    done = run(*options, cwd=tmp_path)
    assert f"would write out{os.sep} (dcp, of a size that torch decides)" in done.err
    for file in ("out.pt", "out.safetensors", "out.npz"):
        result = convert_checkpoint(tmp_path / "in.pt", tmp_path / file)
        assert result.nbytes == (tmp_path / file).stat().st_size


@pytest.mark.parametrize("spelled", ["__0_0.distcp", "./__0_0.distcp", ".//__0_0.distcp"])
def test_two_items_do_not_claim_the_same_bytes_however_the_file_is_spelled(spelled, tmp_path):
    dcp.save({"w": torch.ones(3), "v": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    first, second = metadata.storage_data
    place = metadata.storage_data[first]
    same = _StorageInfo(spelled, place.offset, place.length)
    metadata.storage_data[second] = same
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedCheckpoint, match=r"lies at byte 0 of '.*', and so does"):
        open_checkpoint(tmp_path)


@pytest.mark.trust
def test_many_chunks_are_held_against_each_other_before_any_is_opened(tmp_path):
    # Each was opened first: 57 s and 1 GB for 300,000, and 11 s and 222 MB for these.
    done = run_process("convert", scalars(tmp_path / "in", 60_000), "out.pt", cwd=tmp_path)
    assert "w: lies at byte 0" in assert_one_error(done)
    assert done.rss - idle_rss() < 130_000_000
    assert done.seconds < 9


@pytest.mark.trust
def test_many_chunks_with_a_gap_are_refused_before_any_is_opened(tmp_path):
    folder = scalars(tmp_path / "in", 20_000)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data = {
        index: replace(info, offset=at * 700)
        for at, (index, info) in enumerate(metadata.storage_data.items())
    }
    del metadata.state_dict_metadata["w"].chunks[7]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(MalformedCheckpoint, match="its 19,999 chunks hold 19999 of 20000 values"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_contradicts_itself_is_refused_with_the_key(name, worlds, tmp_path):
    change, kind, words = BAD[name]
    folder = changed(Path(shutil.copytree(worlds / "columns2", tmp_path / "in")), change)
    with pytest.raises(kind) as raised:
        convert_checkpoint(folder, tmp_path / "out.pt", **QUICK)
    assert words in str(raised.value)
    assert raised.value.where is not None and raised.value.where.partition(" ")[0] in (
        "last",
        "deep",
        "transposed",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def no_list(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["w"]
    metadata.state_dict_metadata["w"] = replace(entry, chunks=tuple(entry.chunks))


def no_attributes(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].chunks[0] = Bare(metadata.state_dict_metadata["w"].chunks[0])


def no_dict(metadata: Metadata) -> None:
    metadata.storage_data = [*metadata.storage_data]


class Bare:
    """Pickled as an object of another's class, whose state is a list."""

    def __init__(self, like: Any) -> None:
        self.cls = type(like)

    def __reduce__(self) -> Any:
        return self.cls, (), [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_list, "w: its chunks are not a list"),
        (no_attributes, "w: has a ChunkStorageMetadata without attributes"),
        (no_dict, "its storage_data is not a dict"),
    ],
)
def test_metadata_of_other_kinds_are_refused(change, message, saved):
    folder = changed(saved({"w": W}), change)
    with pytest.raises(MalformedCheckpoint, match=message):
        open_checkpoint(folder)


def test_a_link_out_of_the_folder_is_refused(worlds, tmp_path):
    folder = Path(shutil.copytree(worlds / "columns2", tmp_path / "in"))
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").symlink_to(worlds / "columns2" / "__1_0.distcp")
    with pytest.raises(MalformedCheckpoint, match="a link out of the folder"):
        open_checkpoint(folder)


def test_a_truncated_file_is_refused_before_anything_is_written(worlds, tmp_path):
    folder = Path(shutil.copytree(worlds / "columns2", tmp_path / "in"))
    os.truncate(folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size - 1)
    error = assert_one_error(run("convert", folder, "out.pt", cwd=tmp_path))
    assert "__1_0.distcp" in error and "beyond its end" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_one_file_of_a_folder_is_refused_with_the_folder_to_name(worlds):
    with pytest.raises(UnsupportedCheckpoint, match="one of the files of a DCP folder") as raised:
        open_checkpoint(worlds / "columns2" / "__0_0.distcp")
    assert str(worlds / "columns2") in str(raised.value.hint)


def test_damage_in_a_chunk_is_noticed(worlds, tmp_path):
    folder = Path(shutil.copytree(worlds / "large2", tmp_path / "in"))
    with (folder / "__1_0.distcp").open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"\xff")
    with pytest.raises(MalformedCheckpoint, match="CRC-32"):
        convert_checkpoint(folder, tmp_path / "out.safetensors", fsync=False)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02K\x01.", pickle.dumps({"state_dict_metadata": {}}), b"junk" * 100]
)
def test_what_is_no_metadata_is_refused(content, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_nothing_in_the_metadata_is_executed(worlds, tmp_path):
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    def change(metadata: Metadata) -> None:
        metadata.planner_data = {**metadata.planner_data, "last": Trap()}

    folder = changed(Path(shutil.copytree(worlds / "columns2", tmp_path / "in")), change)
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(folder)
    assert not (tmp_path / "trapped").exists()


# ------------------------------------------------------------------ the HuggingFace writer's shards


@pytest.mark.parametrize("alone", [False, True])
def test_the_rank_files_of_the_hugging_face_writer_are_put_together(alone, worlds, tmp_path):
    folder = worlds / "hf2" / "sharded"
    if alone:
        folder = Path(shutil.copytree(folder, tmp_path / "in"))
    convert_checkpoint(folder, tmp_path / "out.safetensors", **QUICK)
    found, expected = load_file(tmp_path / "out.safetensors"), gathered(worlds / "hf2.whole.pt")
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )
    with open_checkpoint(folder) as checkpoint:
        assert any("how many ranks" in note for note in checkpoint.notes) is alone


def test_the_produced_rank_files_are_the_model(produced, tmp_path):
    convert_checkpoint(produced / "dcp_hf" / "sharded", tmp_path / "out.safetensors", **QUICK)
    found, expected = (
        load_file(tmp_path / "out.safetensors"),
        oracle.load(produced / "full_from_fsdp.pt"),
    )
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(expected.items()))
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_one_rank_file_of_the_hugging_face_writer_is_refused(rank, worlds, tmp_path):
    source = worlds / "hf2" / "sharded" / f"shard-{rank:05}-model-00001-of-00002.safetensors"
    with pytest.raises(UnsupportedCheckpoint, match="the chunks of one rank"):
        convert_checkpoint(source, tmp_path / "out.pt")


def test_a_renamed_rank_file_is_known_by_its_offsets(worlds, tmp_path):
    source = worlds / "hf2" / "sharded" / "shard-00002-model-00001-of-00002.safetensors"
    with pytest.raises(UnsupportedCheckpoint, match="the chunks of one rank"):
        load_portable(shutil.copy(source, tmp_path / "model.safetensors"))


def test_the_consolidated_files_of_the_hugging_face_writer_open_together(worlds):
    found = load_portable(sorted((worlds / "hf2").glob("*.safetensors")))
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(gathered(worlds / "hf2.whole.pt").items()))
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_a_missing_rank_of_the_hugging_face_writer_is_noticed(rank, worlds, tmp_path):
    folder = Path(shutil.copytree(worlds / "hf2", tmp_path / "in"))
    for path in (folder / "sharded").glob(f"shard-{rank:05}-*"):
        path.unlink()
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(folder / "sharded")


@pytest.mark.parametrize(
    "info",
    [
        "[]",
        "{",
        '{"w": 3}',
        '{"w": {"saved_offsets": ["0"]}}',
        '{"w": {"saved_offsets": [0, 0, 0]}}',
    ],
)
def test_odd_offsets_are_refused(info, tmp_path):
    save_file(
        {"w": W},
        tmp_path / "shard-00001-model-00001-of-00001.safetensors",
        {"DCP_SHARDING_INFO": info},
    )
    with pytest.raises(MalformedCheckpoint):
        open_checkpoint(tmp_path)


def test_rank_files_whose_parts_differ_in_their_dimensions_are_refused(tmp_path):
    for number, part in enumerate((W, W.flatten())):
        name = f"shard-0000{number + 1}-model-00001-of-00001.safetensors"
        save_file({"w": part}, tmp_path / name, {"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(MalformedCheckpoint, match="w: its chunks differ in their number of dim"):
        open_checkpoint(tmp_path)


# ----------------------------------------------------------------------------------------- Megatron

MEGATRON = DATA / "megatron"
WHOLE = MEGATRON.with_name("megatron.whole.pt")


def test_a_folder_of_megatron_is_its_parts(tmp_path):
    convert_checkpoint(MEGATRON, tmp_path / "out.pt", **QUICK)
    found, whole = oracle.load(tmp_path / "out.pt"), oracle.load(WHOLE)
    extra = found["model"].pop("decoder._extra_state")
    assert oracle.value_rows(found["model"]) == oracle.value_rows(whole["model"])
    assert [entry["scale"].tolist() for (entry,) in extra] == [[0, 0], [1, 1]]
    assert torch.equal(
        found["optimizer"]["optimizer.state.exp_avg.decoder.up.weight"], whole["exp_avg"]
    )
    assert found["optimizer"]["groups"] == [{"lr": 0.1}]
    assert (found["iteration"], found["args"]) == (5, {"hidden_size": 6})
    assert [states[0][0]["torch"].tolist() for states in found["rng_state"]] == [
        [0, 1, 2, 3],
        [1, 2, 3, 4],
    ]


def test_the_model_of_megatron_becomes_safetensors(tmp_path):
    convert_checkpoint(MEGATRON, tmp_path / "out.safetensors", **QUICK)
    found, whole = load_file(tmp_path / "out.safetensors"), oracle.load(WHOLE)["model"]
    assert oracle.value_rows(dict(sorted(found.items()))) == oracle.value_rows(
        dict(sorted(whole.items()))
    )


class MCoreMetadata(Metadata):
    """What Megatron called its own metadata until 0.12."""

    __module__ = "megatron.core.dist_checkpointing.strategies.torch"


def older_megatron(folder: Path, key: str) -> Path:
    """The folder as an older Megatron wrote it, with a note that it stored `key` in fragments."""

    def change(metadata: Metadata) -> Metadata:
        made = MCoreMetadata(metadata.state_dict_metadata, None, metadata.storage_data)
        made.mcore_data = {key: {"nd_reformulated_orig_global_shape": (8, 6)}}
        return made

    return changed(Path(shutil.copytree(MEGATRON, folder / "in")), change)


@pytest.fixture
def megatron_module(monkeypatch):
    module = types.ModuleType(MCoreMetadata.__module__)
    module.MCoreMetadata = MCoreMetadata
    for depth in range(1, len(names := MCoreMetadata.__module__.split("."))):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), types.ModuleType("package"))
    monkeypatch.setitem(sys.modules, MCoreMetadata.__module__, module)


@pytest.mark.usefixtures("megatron_module")
def test_an_optimizer_in_fragments_is_left_out_with_a_note(tmp_path):
    folder = older_megatron(tmp_path, "optimizer.state.exp_avg.decoder.up.weight")
    with open_checkpoint(folder) as checkpoint:
        assert "decoder.up.weight" in checkpoint.state_dict().keys
        assert all("exp_avg" not in path for path, _ in checkpoint.tensors())
        assert any("flat fragments" in note for note in checkpoint.notes)


@pytest.mark.usefixtures("megatron_module")
def test_a_model_in_fragments_is_refused(tmp_path):
    with pytest.raises(UnsupportedCheckpoint, match="flat fragments") as raised:
        open_checkpoint(older_megatron(tmp_path, "decoder.up.weight"))
    assert raised.value.where == "decoder.up.weight"


def test_a_part_that_is_there_twice_is_refused(tmp_path):
    folder = Path(shutil.copytree(MEGATRON, tmp_path / "in"))
    torch.save({"rng_state": 3}, folder / "common.pt")
    with pytest.raises(MalformedCheckpoint, match="rng_state"):
        open_checkpoint(folder)


# ------------------------------------------------------------------------------------------ written


def test_a_written_folder_is_loaded_by_torch(tmp_path):
    tree = {"module.a.weight": W, "module.b": W.to(torch.bfloat16), "module.c": torch.tensor(3)}
    torch.save(tree, tmp_path / "in.pt")
    result = convert_checkpoint(
        tmp_path / "in.pt", tmp_path / "out", to="dcp", fsync=True, verify=True
    )
    found = {key.removeprefix("module."): torch.zeros_like(value) for key, value in tree.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert oracle.value_rows(found) == oracle.value_rows(
        {key.removeprefix("module."): value for key, value in tree.items()}
    )
    assert result.verified == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out"]


def test_a_training_checkpoint_resumes_from_a_written_folder(worlds, tmp_path):
    source = worlds / "training2"
    convert_checkpoint(source, tmp_path / "out", to="dcp", dtype="bf16", fsync=False, verify=True)
    expected = consolidated(source, tmp_path)
    expected["model"] = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in expected["model"].items()
    }
    (tmp_path / "torch.pt").unlink()
    assert oracle.value_rows(consolidated(tmp_path / "out", tmp_path)) == oracle.value_rows(
        expected
    )


def test_a_folder_is_replaced_only_with_force(tmp_path):
    torch.save({"w": W}, tmp_path / "in.pt")
    assert run("convert", "in.pt", "out", "--to", "dcp", cwd=tmp_path).exit == 0
    before = (tmp_path / "out" / ".metadata").read_bytes()
    assert "--force" in assert_one_error(
        run("convert", "in.pt", "out", "--to", "dcp", cwd=tmp_path)
    )
    assert (tmp_path / "out" / ".metadata").read_bytes() == before
    torch.save({"w": W + 1}, tmp_path / "in.pt")
    assert run("convert", "in.pt", "out", "--to", "dcp", "--force", cwd=tmp_path).exit == 0
    assert torch.equal(consolidated(tmp_path / "out", tmp_path)["w"], W + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out", "torch.pt"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path):
    torch.save({"w": W}, tmp_path / "in.pt")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("\\section{}")
    for output in ("thesis", "in.pt", "nowhere/out"):
        with pytest.raises(OutputRefused):
            convert_checkpoint(tmp_path / "in.pt", tmp_path / output, to="dcp", force=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "\\section{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "thesis"]


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ([W], RefusedObject),
        ({"a.b": W, "a": {"b": W}}, OutputRefused),
        ({"w": W.to_sparse()}, OutputRefused),
    ],
    ids=["a list", "two keys that become one", "a sparse tensor"],
)
def test_what_a_folder_cannot_hold_leaves_nothing_behind(tree, kind, tmp_path):
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(kind):
        convert_checkpoint(tmp_path / "in.pt", tmp_path / "out", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt"]


def test_live_tensors_are_saved_as_a_folder(tmp_path):
    for value in (W, W + 1):
        save_portable({"a": {"w": value}, "step": 3}, tmp_path / "out", to="dcp", force=True)
    assert oracle.value_rows(consolidated(tmp_path / "out", tmp_path)) == oracle.value_rows(
        {"a": {"w": W + 1}, "step": 3}
    )


def test_a_dry_run_writes_no_folder(tmp_path):
    torch.save({"w": W}, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out", "--to", "dcp", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(done.out)["output"]["format"] == "dcp"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt"]
