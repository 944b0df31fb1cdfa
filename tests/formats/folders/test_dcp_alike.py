"""Chunks that are known by others of their kind: the same tensors, and the same refusals, as where
every item is opened by itself.
"""

from __future__ import annotations

import io
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptconv import CheckpointError, convert_checkpoint, open_checkpoint
from ckptconv.formats.folders.dcp_alike import Kinds
from ckptconv.formats.folders.dcp_items import Items
from ckptconv.formats.registry import open_certain
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.stream import iter_chunks
from helpers import oracle
from helpers.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LONG = 30_000
"""Elements of an item of which the ends alone are read."""


@pytest.fixture
def saved(tmp_path) -> Path:
    """Chunks of two kinds, six short ones and ten long ones."""
    tree: dict[str, Any] = {f"short{i}": torch.randn(3, 4) for i in range(6)}
    tree |= {f"long{i}": torch.randn(LONG) for i in range(10)}
    dcp.save(tree, checkpoint_id=tmp_path / "in", no_dist=True)
    return tmp_path / "in"


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within the block, every item is opened by itself."""
    with patch.object(Kinds, "alike", lambda *_: None):
        yield


@contextmanager
def opened_items() -> Iterator[list[Any]]:
    """The items that are opened within the block."""
    opened: list[Any] = []
    real = Items._opened

    def noted(self: Items, item: Any) -> Any:
        opened.append(item)
        return real(self, item)

    with patch.object(Items, "_opened", noted):
        yield opened


def told(path: Path) -> dict[str, Any]:
    """All that is told of the tensors of a folder, and their values."""
    with open_certain(path) as checkpoint:
        return {key: described(ref) for key, ref in checkpoint.tensors()}


def described(ref: TensorRef) -> Any:
    pieces = [
        (storage.nbytes, *storage[3:], *rest) for storage, *rest in (piece for piece in ref.pieces)
    ]
    return (
        ref.dtype.name,
        ref.shape,
        ref.stride,
        (ref.requires_grad, ref.conj, ref.neg),
        pieces,
        values(ref),
    )


def values(ref: TensorRef) -> bytes:
    return b"".join(map(bytes, iter_chunks(ref)))


def outcome(path: Path) -> Any:
    """What is told of a folder, or the error."""
    try:
        return told(path)
    except CheckpointError as error:
        return str(error)


def test_one_item_of_a_kind_is_opened(saved):
    with opened_items() as opened:
        found = told(saved)
    assert len(opened) == 2
    with one_by_one(), opened_items() as opened:
        assert told(saved) == found
    assert len(opened) == 16


def test_values_and_checksums_are_those_of_torch(saved, tmp_path):
    with opened_items() as opened:
        convert_checkpoint(saved, tmp_path / "out.pt", fsync=False, verify=True)
    assert len(opened) == 2
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(saved, tmp_path / "torch.pt")
    assert oracle.value_rows(oracle.load(tmp_path / "out.pt")) == oracle.value_rows(
        oracle.load(tmp_path / "torch.pt")
    )
    with open_certain(saved) as checkpoint:
        for key, ref in checkpoint.tensors():
            assert ref.storage.crc32 == crc_of(saved, key), key


def crc_of(folder: Path, key: str) -> int:
    """The checksum that Python's own zip reader finds in the item of a key."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    [info] = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    raw = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return next(one.CRC for one in archive.infolist() if one.filename.endswith("/data/0"))


def test_a_damaged_payload_is_found_by_its_checksum(saved, tmp_path):
    place = place_of(saved, "long3")
    damage(saved, place.offset + place.length // 2)
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert_checkpoint(saved, tmp_path / "out.safetensors", fsync=False)


def place_of(folder: Path, key: str) -> Any:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def damage(folder: Path, *places: int) -> None:
    path = folder / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    for place in places:
        raw[place] ^= 1 << (place % 8)
    path.write_bytes(raw)


@pytest.mark.parametrize("key", ["short3", "long3"])
@pytest.mark.parametrize("part", ["head", "tail"])
@pytest.mark.property  # all of them in `make trust`
def test_damage_around_values_is_told_as_if_every_item_were_opened(key, part, saved, tmp_path):
    """Each bit around the values of an item that is not the first of its kind, a sample of them."""
    place = place_of(saved, key)
    around = 1100
    first = place.offset if part == "head" else place.offset + place.length - around
    end = first + (800 if part == "head" else around)
    refused = 0
    for at in sorted(random.Random(1).sample(range(first, end), examples(60))):
        folder = Path(shutil.copytree(saved, tmp_path / "copy"))
        damage(folder, at)
        found = outcome(folder)
        with one_by_one():
            assert outcome(folder) == found, at - place.offset
        refused += isinstance(found, str)
        shutil.rmtree(folder)
    assert refused > examples(60) // 12


def with_second_end(folder: Path, key: str) -> None:
    """Values of an item that look like an end record whose comment ends with the item."""
    place = place_of(folder, key)
    path = folder / place.relative_path
    raw = bytearray(path.read_bytes())
    at = place.offset + place.length - 4000 if key == "long3" else place.offset + 704
    comment = place.offset + place.length - at - 22
    raw[at : at + 22] = b"PK\5\6" + bytes(16) + struct.pack("<H", comment)
    path.write_bytes(raw)


def test_values_that_look_like_an_end_are_refused_at_once_in_a_short_item(saved):
    with_second_end(saved, "short3")
    with pytest.raises(CheckpointError, match=r"short3 .*: holds two end records"):
        open_certain(saved)


def test_values_that_look_like_an_end_are_refused_before_they_are_read(saved, tmp_path):
    with_second_end(saved, "long3")
    with pytest.raises(CheckpointError, match=r"long3 .*: holds two end records"):
        convert_checkpoint(saved, tmp_path / "out.safetensors", fsync=False)
    assert not (tmp_path / "out.safetensors").exists()
    with open_certain(saved) as checkpoint:
        refs = dict(checkpoint.tensors())
        assert len(values(refs["long0"])) == 4 * LONG
        with pytest.raises(CheckpointError, match=r"long3 .*: holds two end records"):
            values(refs["long3"])
    with open_checkpoint(saved) as checkpoint:
        refs = dict(checkpoint.tensors())
        with pytest.raises(CheckpointError, match=r"long3 .*: holds two end records"):
            values(refs["long3"])


def test_what_is_wrong_with_an_item_is_told_in_the_order_of_the_tensors(saved):
    """In `.metadata` the tensors stand in the opposite order of their items in the file."""
    index = saved / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.state_dict_metadata = dict(reversed(metadata.state_dict_metadata.items()))
    index.write_bytes(pickle.dumps(metadata))
    for key in ("long4", "short2"):
        place = place_of(saved, key)
        damage(saved, place.offset + place.length - 30)
    with one_by_one():
        expected = outcome(saved)
    assert "long4 (" in expected
    assert outcome(saved) == expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(LONG * 2).reshape(2, LONG).T,
        torch.zeros(LONG, dtype=torch.bool),
        torch.zeros(LONG // 2, dtype=torch.complex64),
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.zeros(LONG).to(torch.float8_e4m3fn),
    ],
    ids=["in another order", "bool", "complex", "a scalar", "empty", "float8"],
)
def test_every_kind_of_tensor_is_known_again(tensor, tmp_path):
    dcp.save({f"w{i}": tensor for i in range(5)}, checkpoint_id=tmp_path / "in", no_dist=True)
    found = told(tmp_path / "in")
    with one_by_one():
        assert told(tmp_path / "in") == found
