"""A `.metadata` read by runs of opcodes says what Python's own unpickler makes of it, and what it
says read opcode by opcode.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptconv import CheckpointError, limits
from ckptconv.formats.folders import dcp_metadata
from ckptconv.formats.folders.dcp_metadata import read_metadata
from ckptconv.io.source import MemorySource
from ckptconv.pickles import memo, reader
from helpers.examples import examples

Size = torch.Size
COUNT = 40


def tensor(*chunks: tuple[tuple[int, ...], tuple[int, ...]], **given: Any) -> TensorStorageMetadata:
    """What torch notes of a tensor with these chunks: the start and the size of each."""
    ends = [[a + n for a, n in zip(start, size, strict=True)] for start, size in chunks]
    return TensorStorageMetadata(
        TensorProperties(**{"dtype": torch.bfloat16, **given}),
        Size(map(max, zip(*ends, strict=True))),
        [ChunkStorageMetadata(Size(start), Size(size)) for start, size in chunks],
    )


def usual(count: int = COUNT, key: str = "layers.{}.weight") -> Metadata:
    """Tensors in two chunks each, and one object, in the files of three ranks."""
    entries: dict[str, Any] = {
        key.format(number): tensor(((0, 0), (number + 1, 70_000)), ((number + 1, 0), (5, 70_000)))
        for number in range(count)
    }
    places = {}
    files = [f"__{rank}_0.distcp" for rank in range(3)]
    for number, (name, entry) in enumerate(entries.items()):
        for chunk in entry.chunks:
            name = name[:1] + name[1:]  # another text, as from another process
            place = _StorageInfo(files[number % 3], number << 30, number + 300)
            places[MetadataIndex(name, chunk.offsets, 0)] = place
    entries["step"] = BytesStorageMetadata()
    places[MetadataIndex("step")] = _StorageInfo("__0_0.distcp", 7, 8)
    return Metadata(entries, {name: ("model", name) for name in entries}, places)


def of_one_process() -> Metadata:
    """The texts of keys are the same objects everywhere."""
    metadata = usual()
    texts = {name: name for name in metadata.state_dict_metadata}
    for index in metadata.storage_data:
        object.__setattr__(index, "fqn", texts[index.fqn])
    return metadata


def shared_properties() -> Metadata:
    """Properties and sizes that are one object for several tensors."""
    metadata = usual()
    others = list(metadata.state_dict_metadata.values())[:-1]
    for other in others[10:]:
        other.properties, other.size = others[9].properties, others[9].size
    return metadata


def shared() -> Metadata:
    """Chunks and entries that are one object for several tensors."""
    metadata = usual()
    first, *others = list(metadata.state_dict_metadata.values())[:-1]
    others[5].chunks = others[4].chunks
    others[7].chunks[0] = others[6].chunks[0]
    metadata.state_dict_metadata["again"] = first
    return metadata


def odd() -> Metadata:
    """Scalars, vectors, many dimensions, no chunks, keys of other alphabets, transforms."""
    metadata = usual(key="层.{}.weight")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    for number in range(5):
        entries[f"scalar{number}"] = TensorStorageMetadata(
            TensorProperties(), Size(), [ChunkStorageMetadata(Size(), Size())]
        )
        entries[f"none{number}"] = TensorStorageMetadata(TensorProperties(), Size([2]), [])
        entries[f"vector{number}"] = tensor(((0,), (1 << 40,)), requires_grad=True)
        entries[f"many{number}"] = tensor(((0,) * 6, (2,) * 6), dtype=torch.float8_e4m3fn)
        places[MetadataIndex(f"many{number}", Size([0] * 6))] = _StorageInfo(
            "a/b.distcp", 1 << 33, 1 << 20, ["zstd"]
        )
        name = f"alone{number}"  # one text is the key and the file of it
        places[MetadataIndex(name, Size([0]), 0)] = _StorageInfo(name, 1, 2)
        places[MetadataIndex(f"scalar{number}", Size())] = _StorageInfo("x", 0, 1 << 34)
    return metadata


SCENES = {
    "usual": usual,
    "of one process": of_one_process,
    "shared": shared,
    "shared properties": shared_properties,
    "odd": odd,
}


def read(raw: bytes) -> dcp_metadata.Metadata:
    return read_metadata(MemorySource(raw, Path(".metadata")))


@contextmanager
def opcode_by_opcode() -> Iterator[None]:
    with patch.object(dcp_metadata, "runs", dict):
        yield


def expected(metadata: Metadata) -> tuple[dict[str, Any], dict[Any, Any]]:
    """What the objects of torch say, as plain values."""
    entries = {
        key: None
        if isinstance(entry, BytesStorageMetadata)
        else (
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(entry.size),
            tuple((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
        )
        for key, entry in metadata.state_dict_metadata.items()
    }
    items = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
            tuple(info.transform_descriptors or ()),
        )
        for index, info in metadata.storage_data.items()
    }
    return entries, items


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", SCENES)
def test_it_says_what_torch_wrote(name, protocol):
    assert_says_what_torch_wrote(pickle.dumps(SCENES[name](), protocol=protocol))


@pytest.mark.trust
def test_a_large_one_says_what_torch_wrote():
    """Of more memo entries than are kept."""
    assert_says_what_torch_wrote(pickle.dumps(usual(4000)))


def assert_says_what_torch_wrote(raw: bytes) -> None:
    found = read(raw)
    entries, items = expected(pickle.loads(raw))
    assert {
        key: entry and (entry.dtype.name, *entry[1:]) for key, entry in found.entries.items()
    } == entries
    assert list(found.entries) == list(entries)
    assert found.items == items and list(found.items) == list(items)
    with opcode_by_opcode():
        assert read(raw) == found


def test_nearly_all_of_a_large_one_is_read_by_runs():
    raw = pickle.dumps(usual(1000))
    with patch.object(reader, "Call", wraps=reader.Call) as made:
        read(raw)
    assert made.call_count < 100
    with opcode_by_opcode(), patch.object(reader, "Call", wraps=reader.Call) as made:
        read(raw)
    assert made.call_count > 6_000


def test_what_a_run_did_not_make_is_made_when_something_fetches_it():
    raw = pickle.dumps(shared())
    with patch.object(reader, "PickleReader", wraps=reader.PickleReader) as readers:
        found = read(raw)
    assert readers.call_count == 2
    assert len(found.entries) == COUNT + 2


@pytest.mark.trust
def test_of_a_long_memo_little_is_kept():
    raw = pickle.dumps(usual(8_000))
    kept = []
    real = memo.Memo.forget

    def noted(self: memo.Memo) -> None:
        real(self)
        kept.append(len(self) + len(self.memoized) + len(self._first))

    with patch.object(memo.Memo, "forget", noted):
        read(raw)
    assert max(kept) < 80_000 < raw.count(b"\x94")


def outcome(raw: bytes) -> Any:
    """What a `.metadata` says; where it is refused, how, but not near which byte."""
    try:
        return read(raw)
    except CheckpointError as error:
        return type(error)


@pytest.mark.parametrize("name", ["usual", "shared", "odd"])
@pytest.mark.property  # all of them in `make trust`
def test_a_damaged_one_is_read_as_if_opcode_by_opcode(name):
    sound = pickle.dumps(SCENES[name](), protocol=4)
    drawn = random.Random(name)
    refused = 0
    for _ in range(examples(300)):
        raw = bytearray(sound)
        raw[drawn.randrange(len(raw))] = drawn.choice((drawn.randrange(256), *b"hjKMJ\x94\x85ub"))
        found = outcome(bytes(raw))
        with opcode_by_opcode():
            assert outcome(bytes(raw)) == found
        refused += isinstance(found, type)
    assert refused > examples(300) // 10


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (1 << 60, "not a tuple of sizes"),
        (-1, "not a tuple of sizes"),
        (-(1 << 40), "not a tuple of sizes"),
    ],
)
def test_sizes_that_are_none_are_refused(size, what):
    """In the pickle, that is: torch.Size itself takes them."""
    for change in (_other_size, _other_place, _other_length):
        metadata = usual()
        change(metadata, size)
        with pytest.raises(CheckpointError, match=what):
            read(pickle.dumps(metadata))


def _other_size(metadata: Metadata, size: int) -> None:
    metadata.state_dict_metadata["layers.9.weight"].chunks[0].sizes = Size([size, 1])


def _other_place(metadata: Metadata, size: int) -> None:
    list(metadata.storage_data.values())[9].offset = size


def _other_length(metadata: Metadata, size: int) -> None:
    list(metadata.storage_data.values())[9].length = size


def test_a_text_that_is_not_as_long_as_it_says_is_no_run():
    raw = pickle.dumps(usual())
    for text in (b"layers.7.weight", b"layers.30.weight", b"__1_0.distcp"):
        at = raw.find(text)
        while at >= 0:
            for size in (len(text) - 1, len(text) + 1):
                changed = raw[: at - 1] + bytes([size]) + raw[at:]
                found = outcome(changed)
                with opcode_by_opcode():
                    assert outcome(changed) == found
            at = raw.find(text, at + 1)


def test_the_limits_of_pickles_hold_for_runs():
    metadata = usual(2000)
    metadata.planner_data = None
    with (
        limits(nodes=5000),
        pytest.raises(CheckpointError, match="containers and calls"),
    ):
        read(pickle.dumps(metadata))
    metadata = usual()
    metadata.state_dict_metadata = {f"w{i}": tensor(((0,), (i,))) for i in range(9)}
    metadata.state_dict_metadata["w7"] = tensor(((0, 0), (3, 4)))
    metadata.storage_data = {}
    with limits(dimensions=1), pytest.raises(CheckpointError, match="2 dimensions"):
        read(pickle.dumps(metadata))
