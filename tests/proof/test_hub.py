"""Repositories of the Hub: whole files are held against the SHA-256 that the Hub says."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from safetensors.numpy import save

from ckptconv import (
    CheckpointError,
    convert_checkpoint,
    manifest_checkpoint,
    verify_checkpoint,
)
from ckptconv.support.limits import limits
from helpers import scripted_hub
from helpers.scripted_hub import Hub

MODEL = save({"w": np.arange(40_000, dtype="<f4"), "b": np.ones(7, "<f4")})
FILES = {"model.safetensors": MODEL, "config.json": b"{}"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nobody"))
    with Hub() as served, limits(remote_seconds=5):
        monkeypatch.setenv("HF_ENDPOINT", served.web.url)
        served.commit("models/org/name", FILES)
        yield served


def test_the_manifest_of_a_repository_is_that_of_its_files_each_read_once(hub, tmp_path):
    made = manifest_checkpoint("hf://org/name", tmp_path / "m")
    assert {file.name: file.digest for file in made.files} == {
        name: hashlib.sha256(raw).hexdigest() for name, raw in FILES.items()
    }
    asked = [re.search(r"bytes=(\d+)-(\d+)", headers["Range"]) for _, headers in hub.far.asked]
    assert 0 < sum(int(one[2]) + 1 - int(one[1]) for one in asked) <= 1.1 * len(MODEL)
    for name, raw in FILES.items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "m").rename(tmp_path.parent / f"{tmp_path.name}.sha256")
    sums = tmp_path.parent / f"{tmp_path.name}.sha256"
    assert verify_checkpoint("hf://org/name", sums).same
    assert verify_checkpoint("hf://org/name", sums, files=True).same
    assert verify_checkpoint(tmp_path / "model.safetensors", sums).same


def test_bytes_that_are_not_those_of_the_hubs_hash_are_an_error(hub, monkeypatch, tmp_path):
    sums = tmp_path / "m"
    manifest_checkpoint("hf://org/name", sums)
    other = hashlib.sha256(b"other").hexdigest()
    monkeypatch.setattr(scripted_hub, "sha_of", lambda content: other)
    with pytest.raises(CheckpointError, match=f"and the Hub says {other}"):
        manifest_checkpoint("hf://org/name")
    with pytest.raises(CheckpointError, match=f"and the Hub says {other}"):
        verify_checkpoint("hf://org/name", sums, files=True)


@pytest.mark.parametrize("to", ["o.safetensors", "o.pt", "o.npz"])
def test_a_conversion_of_a_whole_safetensors_file_is_held_against_the_hubs_hash(
    hub, monkeypatch, tmp_path, to
):
    convert_checkpoint("hf://org/name/model.safetensors", tmp_path / to)
    (tmp_path / to).unlink()
    other = hashlib.sha256(b"other").hexdigest()
    monkeypatch.setattr(scripted_hub, "sha_of", lambda content: other)
    with pytest.raises(CheckpointError, match=f"and the Hub says {other}"):
        convert_checkpoint("hf://org/name/model.safetensors", tmp_path / to)
    assert [*tmp_path.iterdir()] == []
    convert_checkpoint("hf://org/name/model.safetensors", tmp_path / to, include="b")
