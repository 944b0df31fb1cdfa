"""Compressed files and tar archives are unpacked once, within the limits, and opened as what they
hold.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import ckptconv
from ckptconv import CheckpointError, LimitExceeded, MalformedCheckpoint, convert_checkpoint
from ckptconv.batch.finding import find_checkpoints
from ckptconv.io.places import place_of
from ckptconv.support import platforms

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2).half()}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def saved(**options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(WEIGHTS, file, **options)
    return file.getvalue()


def tar(members: dict[str, bytes], mode: str = "w", **options: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, **options) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def assert_converted(source: Path, tmp_path: Path) -> None:
    """All of it is there, as the libraries read it."""
    convert_checkpoint(source, tmp_path / "o.safetensors", verify=True, force=True)
    convert_checkpoint(source, tmp_path / "o.pt", force=True)
    for found in (load_file(tmp_path / "o.safetensors"), torch.load(tmp_path / "o.pt")):
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[key], value) for key, value in WEIGHTS.items())


@pytest.fixture(autouse=True)
def _temporary(monkeypatch, tmp_path_factory):
    """Nothing is left in the folder of temporary files, nor any descriptor."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(platforms, "temporary_folder", lambda: str(folder))
    yield
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize(
    "content",
    [saved(), saved(_use_new_zipfile_serialization=False), save(WEIGHTS)],
    ids=["zip", "legacy", "safetensors"],
)
def test_a_compressed_file_is_what_is_in_it(content, ending, tmp_path):
    path = written(tmp_path / f"x.{ending}", PACKERS[ending](content))
    assert_converted(path, tmp_path)
    assert torch.equal(ckptconv.load_portable(path)["a.bias"], WEIGHTS["a.bias"])
    assert len(find_checkpoints(place_of(tmp_path)).checkpoints) == 2  # the outputs


@pytest.mark.parametrize(
    "content",
    [
        tar({"./model_config.yaml": b"a: 1", "./model_weights.ckpt": saved()}),
        tar({"c.yaml": b"a: 1", "model_weights.ckpt": saved()}, "w:gz"),
        tar({"m/config.json": b"{}", "m/model.safetensors": save(WEIGHTS)}, "w:gz"),
        tar(
            {
                f"m/model-0000{number}-of-00002.safetensors": save({key: WEIGHTS[key]})
                for number, key in ((1, "a.weight"), (2, "a.bias"))
            },
            format=tarfile.GNU_FORMAT,
        ),
    ],
    ids=["nemo", "older nemo", "a folder", "shards"],
)
def test_a_tar_archive_is_the_checkpoint_in_it(content, tmp_path):
    assert_converted(written(tmp_path / "x.nemo", content), tmp_path)


def test_several_checkpoints_in_a_tar_archive_are_a_choice(tmp_path):
    path = written(tmp_path / "x.tar", tar({"a.pt": saved(), "b.st": save(WEIGHTS)}))
    with pytest.raises(CheckpointError, match=r"--only a\.pt or --only b\.st"):
        ckptconv.load_portable(path)
    assert ckptconv.load_portable(path, only="b.st").keys() == WEIGHTS.keys()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_a_tar_archive_are_whole(form, tmp_path):
    folder = "folder/" * 14
    members = {f"{folder}one/a.pt": saved(), f"{folder}two/a.pt": saved()}
    path = written(tmp_path / "x.tar", tar(members, format=form))
    with tarfile.open(path) as archive:
        expected = archive.getnames()
    with ckptconv.open_checkpoint(path) as opened:
        assert [key for key, _ in opened.root.pairs] == expected == [*members]


@pytest.mark.parametrize("ending", PACKERS)
def test_damage_and_bombs_are_refused(ending, tmp_path):
    packed = PACKERS[ending](saved())
    cut = written(tmp_path / "cut", packed[:-9])
    with pytest.raises(MalformedCheckpoint, match="does not unpack"):
        ckptconv.load_portable(cut)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x40
    with pytest.raises(MalformedCheckpoint, match="does not unpack"):
        ckptconv.load_portable(written(tmp_path / "flipped", bytes(flipped)))
    bomb = written(tmp_path / "bomb", PACKERS[ending](bytes(20_000_000)))
    with pytest.raises(LimitExceeded, match="inflated_ratio"):
        ckptconv.load_portable(bomb)
    twice = written(tmp_path / "twice", PACKERS[ending](packed))
    with pytest.raises(CheckpointError, match="is compressed twice"):
        ckptconv.load_portable(twice)


@pytest.mark.parametrize("name", ["model-00001-of-00002.pt.gz", "layer_00-model_states.pt.xz"])
def test_a_compressed_part_is_a_part(name, tmp_path):
    path = written(tmp_path / name, PACKERS[name[-2:]](saved()))
    with pytest.raises(CheckpointError, match=r"only one part|is one layer"):
        ckptconv.load_portable(path)
    half = tar({"model-00001-of-00002.safetensors": save(WEIGHTS)})
    with pytest.raises(CheckpointError, match=r"half\.tar: lacks model-00002-of-00002"):
        ckptconv.load_portable(written(tmp_path / "half.tar", half))


def test_below_a_folder_only_what_is_called_a_checkpoint_is_unpacked(tmp_path):
    for name in ("a.pt.gz", "data.tar.gz", "log.gz"):
        written(tmp_path / name, gzip.compress(saved()))
    found = find_checkpoints(place_of(tmp_path))
    assert [place.name for place, _ in found.checkpoints] == ["a.pt.gz"]
    assert {item.reason for item in found.passed} == {
        "is compressed and not named like a checkpoint"
    }
