"""A DCP folder that was opened by its `.metadata` alone: whatever its items turn out to be, its
values are the same, and what is wrong with them is told in the same words.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    execute_plan,
    inspect_checkpoint,
    open_checkpoint,
    plan_conversion,
)
from ckptconv.tensors.stream import iter_chunks
from helpers.reads import counted_reads

W = torch.arange(12.0).reshape(3, 4)
ZEROS = torch.zeros(5000)


def stream(value: Any) -> bytes:
    """What `torch.save` makes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def repacked(raw: bytes, method: int, change: Callable[[str, bytes], bytes]) -> bytes:
    """An archive again, by another writer and with other contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return out.getvalue()


def big_endian(name: str, content: bytes) -> bytes:
    if name.endswith("/byteorder"):
        return b"big"
    if name.endswith("/data/0"):
        return b"".join(content[at : at + 4][::-1] for at in range(0, len(content), 4))
    return content


Items = Mapping[str, tuple[torch.Tensor | None, bytes]]
"""By key: the tensor that `.metadata` tells of (None: an object), and the bytes of the item."""


def folder_of(folder: Path, items: Items) -> Path:
    """A DCP folder of these items, one chunk each."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    content = b""
    for key, (tensor, raw) in items.items():
        index = MetadataIndex(key)
        entries[key] = BytesStorageMetadata()
        if tensor is not None:
            start = torch.Size([0] * tensor.dim())
            index = MetadataIndex(key, start, 0)
            chunk = ChunkStorageMetadata(start, tensor.shape)
            properties = TensorProperties(dtype=tensor.dtype)
            entries[key] = TensorStorageMetadata(properties, tensor.shape, [chunk])
        places[index] = _StorageInfo("__0_0.distcp", len(content), len(raw))
        content += raw
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(content)
    metadata = Metadata(entries, {key: (key,) for key in items}, places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def values(tensor: torch.Tensor) -> bytes:
    """The values of a tensor in C order."""
    return tensor.contiguous().numpy().tobytes()


SOUND: dict[str, tuple[torch.Tensor, bytes]] = {
    "as DCP writes it": (W, stream(W)),
    "in another order": (W.T, stream(W.T)),
    "within a larger storage": (W[1:], stream(W[1:])),
    "with gaps": (W[:, ::2], stream(W[:, ::2])),
    "by another writer": (W, repacked(stream(W), zipfile.ZIP_STORED, lambda _, raw: raw)),
    "big-endian": (W, repacked(stream(W), zipfile.ZIP_STORED, big_endian)),
    "of the older format": (W, b""),
    "deflated": (W, repacked(stream(W), zipfile.ZIP_DEFLATED, lambda _, raw: raw)),
    "deflated to less": (
        ZEROS,
        repacked(stream(ZEROS), zipfile.ZIP_DEFLATED, lambda _, raw: raw),
    ),
    "a conjugate": (torch.conj(W * 1j), stream(torch.conj(W * 1j))),
}


def sound(name: str, folder: Path) -> tuple[Path, torch.Tensor]:
    tensor, raw = SOUND[name]
    if not raw:
        file = io.BytesIO()
        torch.save(tensor, file, _use_new_zipfile_serialization=False)
        raw = file.getvalue()
    items: Items = {"a": (W, stream(W)), "w": (tensor, raw), "z": (W, stream(W))}
    return folder_of(folder / "in", items), tensor


@pytest.mark.parametrize("name", SOUND)
def test_values_are_read_from_wherever_they_are(name, tmp_path):
    path, tensor = sound(name, tmp_path)
    with open_checkpoint(path) as checkpoint:
        refs = dict(checkpoint.tensors())
        assert [b"".join(map(bytes, iter_chunks(refs[key]))) for key in "zaw"] == [
            values(W),
            values(W),
            values(tensor.resolve_conj()),
        ]


@pytest.mark.parametrize("name", SOUND)
def test_a_plan_is_made_of_what_the_items_say(name, tmp_path):
    """Strides, storages and checksums are not in `.metadata`, and they are in what is written."""
    path, _ = sound(name, tmp_path)
    convert_checkpoint(path, tmp_path / "expected.pt", fsync=False)
    with open_checkpoint(path) as checkpoint:
        execute_plan(plan_conversion(checkpoint, tmp_path / "out.pt"), fsync=False)
        assert inspect_checkpoint(checkpoint) == inspect_checkpoint(path)
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "expected.pt").read_bytes()


def test_strides_and_checksums_are_those_of_the_items(tmp_path):
    path, _ = sound("in another order", tmp_path)
    with open_checkpoint(path) as checkpoint:
        refs = dict(checkpoint.certain().tensors())
        assert refs["w"].stride == W.T.stride()
        assert all(ref.storage.crc32 is not None for ref in refs.values())
        assert checkpoint.certain() is checkpoint.certain()
        assert checkpoint.certain().certain() is checkpoint.certain()
    with pytest.raises((CheckpointError, OSError)):
        b"".join(map(bytes, iter_chunks(refs["a"])))


BROKEN: dict[str, tuple[bytes, str]] = {
    "another shape": (stream(W.T), r"w: its chunk at \[0, 0\] has the shape \[4, 3\] instead of"),
    "another dtype": (stream(W.int()), "w: is float32, but one of its chunks is int32"),
    "no tensor": (stream({"w": W}), "w: a chunk of it is not a plain tensor"),
    "a parameter": (stream(torch.nn.Parameter(W)), "w: a chunk of it is not a plain tensor"),
    "no archive": (b"x" * 2000, "__0_0.distcp: w: "),
    "a damaged pickle": (
        stream(W).replace(b"FloatStorage", b"HalfStorage_", 1),
        r"w \(.*data.pkl\): does not have the CRC-32",
    ),
    "cut off": (stream(W)[:-1], "w: the archive has no end record at its end"),
}


def broken(name: str, folder: Path) -> Path:
    items: Items = {"a": (W, stream(W)), "w": (W, BROKEN[name][0]), "n": (None, stream(3))}
    return folder_of(folder / "in", items)


@pytest.mark.parametrize("name", BROKEN)
def test_an_item_that_is_something_else_is_not_read(name, tmp_path):
    with open_checkpoint(broken(name, tmp_path)) as checkpoint:
        refs = dict(checkpoint.tensors())
        assert b"".join(map(bytes, iter_chunks(refs["a"]))) == values(W)
        with pytest.raises(CheckpointError, match=BROKEN[name][1]):
            b"".join(map(bytes, iter_chunks(refs["w"])))
        with pytest.raises(CheckpointError, match=BROKEN[name][1]):
            checkpoint.certain()


def test_what_is_wrong_is_told_in_the_order_of_the_items(tmp_path):
    """The damaged object is met first, for the tensor before it is not opened to open the rest."""
    damaged = stream(3)[:-1]
    items: Items = {"w": (W, BROKEN["another dtype"][0]), "n": (None, damaged)}
    with pytest.raises(CheckpointError, match=BROKEN["another dtype"][1]):
        open_checkpoint(folder_of(tmp_path / "in", items))


def test_objects_are_read_in_one_go(tmp_path):
    items: Items = {f"n{number}": (None, stream(number)) for number in range(40)}
    path = folder_of(tmp_path / "in", items)
    with counted_reads() as reads, open_checkpoint(path) as checkpoint:
        assert [value for _, value in checkpoint.root.pairs] == [*range(40)]
    assert len(reads) <= 3
