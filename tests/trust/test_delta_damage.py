"""Damaged deltas: what is applied has the tensors that were published, or nothing is there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptconv import CheckpointError, apply_deltas, delta_checkpoints
from helpers.deltas import INDEX, SHARD, tensors_in, write_delta
from helpers.examples import some

TRIALS = 40


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A base, what it became, and deltas of both encodings by ckptconv and as slime writes them."""
    room = tmp_path_factory.mktemp("published")
    rng = np.random.default_rng(0)
    tensors = {f"l.{at}": rng.standard_normal(300 + at, np.float32) for at in range(4)}
    save_file(tensors, room / "base.safetensors")
    for name in [*tensors][:3]:
        tensors[name][::7] += 1
    save_file(tensors, room / "new.safetensors")
    old, new = (tensors_in(room / f"{name}.safetensors") for name in ("base", "new"))
    for encoding in ("xor", "overwrite"):
        write_delta(room / f"slime_{encoding}", old, new, encoding=encoding)
        delta_checkpoints(
            room / "base.safetensors",
            room / "new.safetensors",
            room / encoding,
            encoding=encoding,
            checksum="adler32",
        )
    return room


def damaged(raw: bytes, chance: random.Random, other: bytes) -> bytes:
    """Some bytes with one to five faults: flipped, replaced, lost, added, taken from another."""
    found = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(found))
        match chance.randrange(5):
            case 0:
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                found[at] = chance.choice(b'\0\xff0"9')
            case 2:
                del found[at : at + chance.randrange(1, 9)]
            case 3:
                found[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                start = chance.randrange(len(other))
                found[at : at + 20] = other[start : start + 20]
    return bytes(found)


@pytest.mark.parametrize("seed", some(1, range(25)))
def test_a_damaged_delta_gives_what_was_published_or_nothing(seed, published, tmp_path, figure):
    chance = random.Random(seed)
    folders = sorted(path for path in published.iterdir() if path.is_dir())
    new = tensors_in(published / "new.safetensors")
    out = tmp_path / "out.safetensors"
    for _ in range(TRIALS):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        out.unlink(missing_ok=True)
        shutil.copytree(chance.choice(folders), tmp_path / "d")
        file = tmp_path / "d" / chance.choice((INDEX, SHARD))
        other = (chance.choice(folders) / file.name).read_bytes()
        file.write_bytes(damaged(file.read_bytes(), chance, other))
        try:
            apply_deltas(published / "base.safetensors", tmp_path / "d", out)
        except CheckpointError as error:
            assert not out.exists() and str(error).isprintable()
        else:
            assert tensors_in(out) == new
        assert {path.name for path in tmp_path.iterdir()} <= {"d", out.name}
    figure("damaged deltas applied or refused", TRIALS)
