"""Every command on real files, held against what torch found in them earlier: it runs where there
is no torch.

This is what `make pythons` and `make lowest` rest on. The answers are in data/samples.json and in
the corpus' manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.examples import some
from helpers.paths import CORPUS
from helpers.program import PROGRAM, Finished, environment, run
from helpers.sample_tensors import KEPT, SAMPLES

Facts = tuple[str, tuple[int, ...], str]
STORED: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())
MANIFEST = CORPUS / "manifest.json"
ENTRIES = [
    entry
    for entry in (json.loads(MANIFEST.read_text()) if MANIFEST.is_file() else [])
    if entry["tensors"]
]
NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
}  # fmt: skip
WRAPPERS = {"module", "_orig_mod", "_modules", "_parameters", "_buffers"}
PARTS = {
    "DLR-RM__rl-trained-agents__CartPole-v1.zip": ("--only", "policy.pth"),
    "txie-93__cgcnn__checkpoint.pth.tar": ("--only", "state_dict"),  # beside a normalizer
    # beside a scaler of the targets
    "chemprop__chemprop__example_model_v1_regression_mol.pt": ("--only", "state_dict"),
}


def facts_of(path: Path) -> dict[str, Facts]:
    """What a safetensors file holds, read by the few lines that its format needs."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for key, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        name, shape = NAMES[entry["dtype"]], tuple(entry["shape"])
        if key.endswith(".real_imag"):  # how complex128 is written
            key, name, shape = key.removesuffix(".real_imag"), "complex128", shape[:-1]
        found[key] = name, shape, hashlib.sha256(raw[begin:end]).hexdigest()
    return found


def bare(path: str) -> str:
    """A path in a tree as a key would have it, without wrappers."""
    return ".".join(
        part
        for part in path.replace("[", ".").replace("]", "").split(".")
        if part and part not in WRAPPERS
    )


def is_at(key: str, path: str) -> bool:
    """Whether a key is the end of a path; in old modules a parameter stands in a list, and a file
    may be one tensor.
    """
    return (
        path.endswith(bare(key))
        or path.removesuffix(".0").endswith(bare(key))
        or (key, path) == ("tensor", "")
    )


def under_one_part(found: dict[str, Facts], known: dict[str, Facts]) -> int | None:
    """How many tensors stand where all of `found` stand, in one part of a tree, with the same
    facts; None: nowhere.
    """
    (first, *_) = found
    for path in known:
        part = path.removesuffix(first)
        if path.endswith(first) and all(
            known.get(part + key) == facts for key, facts in found.items()
        ):
            return sum(other.startswith(part) for other in known)
    return None


def run_anywhere(*arguments: object, cwd: Path) -> Finished:
    """The program, by nothing that only POSIX has."""
    command = [*PROGRAM, *map(str, arguments)]
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return Finished(ended.returncode, ended.stdout, ended.stderr, 0.0, 0)


if not hasattr(os, "fork"):
    run = run_anywhere


def done(*arguments: object, cwd: Path) -> str:
    """What a command printed that did what was asked."""
    finished = run(*arguments, cwd=cwd)
    assert finished.exit == 0, finished.err
    return finished.out


@pytest.mark.parametrize("name", STORED)
def test_a_sample_is_what_torch_found_in_it(name, tmp_path):
    source = SAMPLES / name
    known = {
        bare(path): (dtype, tuple(shape), digest)
        for path, (dtype, shape, digest) in STORED[name].items()
    }
    done("convert", source, "out.safetensors", "--verify", "--tied", "duplicate", cwd=tmp_path)
    found = facts_of(tmp_path / "out.safetensors")
    inside = under_one_part(found, known)
    assert inside == (len(known) if len(found) == len(known) else len(found)), (
        found.keys(),
        known.keys(),
    )

    done("convert", source, "whole.pt", "--verify", cwd=tmp_path)
    done("convert", "whole.pt", "again.safetensors", "--tied", "duplicate", cwd=tmp_path)
    assert facts_of(tmp_path / "again.safetensors") == found
    done("diff", source, "out.safetensors", "--keys", "strip", cwd=tmp_path)
    done("scan", "whole.pt", "--strict", cwd=tmp_path)
    done(
        "convert",
        "out.safetensors",
        "shards.safetensors",
        "--max-shard-size",
        "2KB",
        "--verify",
        cwd=tmp_path,
    )
    joined = (
        "shards.safetensors.index.json"
        if (tmp_path / "shards.safetensors.index.json").exists()
        else "shards.safetensors"
    )
    done("add-module", joined, "added.pt", cwd=tmp_path)
    done("strip-module", "added.pt", "stripped.safetensors", cwd=tmp_path)
    assert facts_of(tmp_path / "stripped.safetensors") == found
    assert json.loads(done("inspect", "added.pt", "--json", cwd=tmp_path))["tensors"] == len(found)


@pytest.mark.parametrize(
    "entry", some(10, [pytest.param(entry, id=entry["file"]) for entry in ENTRIES]) or [None]
)
def test_a_file_of_strangers_is_what_torch_found_in_it(entry, tmp_path):
    if entry is None:
        pytest.skip("the folder of real checkpoints is not here (CKPTCONV_CORPUS)")
    source = CORPUS / "files" / entry["file"]
    known = [
        (bare(item["at"]), (item["dtype"], tuple(item["shape"]), item["sha256"]))
        for item in entry["tensors"]
    ]
    finished = run(
        "convert",
        source,
        "out.safetensors",
        "--unknown",
        "drop",
        *PARTS.get(entry["file"], ()),
        cwd=tmp_path,
    )
    assert finished.exit == 0, finished.err
    found = facts_of(tmp_path / "out.safetensors")
    lost = [
        key
        for key, facts in found.items()
        if not any(is_at(key, path) and facts == other for path, other in known)
    ]
    assert found and lost == []
    done("diff", "out.safetensors", "out.safetensors", cwd=tmp_path)
