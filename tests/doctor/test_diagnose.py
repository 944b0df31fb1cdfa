"""doctor: what it says of a file is what torch does with it, and obeying the command that it prints
clears the finding.
"""

from __future__ import annotations

import argparse
import ast
import bz2
import datetime
import gzip
import json
import lzma
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model

from ckptconv import (
    CheckpointError,
    Diagnosis,
    Finding,
    delta_checkpoints,
    diagnose,
    open_checkpoint,
)
from ckptconv.devices.host import Host
from ckptconv.doctor.report import LEFT_OUT, diagnoses_headline, finding_lines
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.report import verdict
from helpers import oracle
from helpers.examples import crossed, some
from helpers.program import ROOT, SAMPLES, assert_one_error, environment, run, run_process

Made = Path | tuple[Path, Path]
"""A file that has a finding, or the one to show to doctor and the folder that it lies in."""


no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tags of CUDA devices are served here"
)


class Runs:
    """Pickled as a call that runs a program."""

    def __reduce__(self):
        return os.system, ("true",)


class Unknown:
    """A class that whoever reads the file may not have."""


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return OrderedDict(
        (f"fc{i}.{name}", torch.randn(8, 8).half()) for i in range(2) for name in ("weight", "bias")
    )


def parted(*parts: str) -> dict[str, torch.Tensor]:
    return {f"{part}.weight": torch.ones(2, 2).half() for part in parts}


def saved(tmp_path: Path, tree: Any, name: str = "model.pt", **options: Any) -> Path:
    torch.save(tree, tmp_path / name, **options)
    return tmp_path / name


def tagged(tmp_path: Path, tag: str, **options: Any) -> Path:
    with oracle.tagged(lambda _: tag):
        return saved(tmp_path, weights(), **options)


def trained(tmp_path: Path) -> Path:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return saved(
        tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    )


def adam() -> dict[str, Any]:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def tied(tmp_path: Path) -> Path:
    one = weights()
    return saved(tmp_path, {**one, "head.weight": one["fc0.weight"]})


def alias(tmp_path: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_model(model.half(), tmp_path / "alias.safetensors")
    return tmp_path / "alias.safetensors"


def bloated(tmp_path: Path) -> Path:
    return saved(
        tmp_path,
        {"first": torch.randn(1000, 1000)[:2].half(), "slice": torch.randn(1000, 1000)[:2]},
    )


def scripted(tmp_path: Path) -> Path:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def zip_of(tmp_path: Path) -> Path:
    inner = saved(tmp_path, weights(), "policy.pth")
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as archive:
        archive.write(inner, "policy.pth")
        archive.writestr("data", "{}")
    return tmp_path / "agent.zip"


def plainly_pickled(tmp_path: Path) -> Path:
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(dict(weights()), protocol=2))
    return tmp_path / "model.pkl"


def packed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> Path:
    path = saved(tmp_path, weights())
    path.write_bytes(pack(path.read_bytes()))
    return path


def shard(tmp_path: Path, *, index: bool = True) -> Path:
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({"a.weight": torch.ones(4).half()}, tmp_path / files[0], {"format": "pt"})
    save_file({"b.weight": torch.ones(4).half()}, tmp_path / files[1], {"format": "pt"})
    weight_map = dict(zip(("a.weight", "b.weight"), files, strict=True))
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return tmp_path / files[0]


def foreign_name(tmp_path: Path) -> Path:
    save_file(weights(), tmp_path / "model.pt", {"format": "pt"})
    return tmp_path / "model.pt"


def added_to(tmp_path: Path, record: str, size: int = 3_000_000) -> Path:
    """A file to which a record was added later, as a program does that does not know what may stand
    in it.
    """
    path = saved(tmp_path, weights())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(record, np.random.default_rng(0).bytes(size))
    return path


def shards(tmp_path: Path) -> Path:
    shard(tmp_path)
    (tmp_path / "shards").mkdir()
    for path in tmp_path.glob("model*"):
        path.rename(tmp_path / "shards" / path.name)
    return tmp_path / "shards"


FIXED: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a CUDA file": ("device", lambda at: tagged(at, "cuda:3")),
    "an NPU file": ("device", lambda at: tagged(at, "npu:0")),
    "a file tagged cpu:0": ("device", lambda at: tagged(at, "cpu:0")),
    "an MPS file": ("device", lambda at: tagged(at, "mps")),
    "an HPU file of old": ("device", lambda at: tagged(at, "hpu",
        _use_new_zipfile_serialization=False)),
    "DDP keys": ("wrapped-keys", lambda at: saved(at, {f"module.{key}": value for key,
        value in weights().items()})),
    "DDP keys from CUDA": ("device", lambda _: SAMPLES / "ddp_cuda3.pt"),
    "compiled keys": ("wrapped-keys", lambda at: saved(at, {f"_orig_mod.{key}": value for key,
        value in weights().items()})),
    "Lightning": ("prefixed-keys", lambda at: saved(at, {
        "state_dict": {f"model.{key}": value for key, value in weights().items()},
        "pytorch-lightning_version": "2.6.6"})),
    "DataParallel around a part": ("prefixed-keys", lambda at: saved(at, parted("stem.module.0",
        "head"))),
    "DataParallel around the first part": ("prefixed-keys", lambda at: saved(at, {
        "model": parted("module.stem", "head")})),
    "a Namespace": ("refused-objects", lambda at: saved(at, {"model": weights(),
        "args": argparse.Namespace(lr=0.1)})),
    "a class of the user's": ("refused-objects", lambda at: saved(at, {"model": weights(),
        "config": Unknown()})),
    "a call of os.system": ("dangerous", lambda at: saved(at, {"model": weights(), "x": Runs()})),
    "a whole module": ("whole-module", lambda at: saved(at, torch.nn.Linear(2, 2))),
    "TorchScript": ("container", scripted),
    "a zip of checkpoints": ("container", zip_of),
    "a bare pickle": ("container", plainly_pickled),
    "a legacy file": ("legacy-container", lambda at: saved(at, weights(),
        _use_new_zipfile_serialization=False)),
    "slices": ("bloat", bloated),
    "a record that nothing refers to": ("bloat", lambda at: added_to(at, "model/data/999")),
    "a record beside the folder": ("stray-records", lambda at: added_to(at, "notes/readme", 9)),
    "a record without a folder": ("stray-records", lambda at: added_to(at, "readme", 9)),
    "a folder of shards": ("sharded", shards),
    "an optimizer": ("optimizer-share", trained),
    "two networks": ("several-models", lambda at: saved(at, {"model": weights(),
        "upscaler": weights()})),
    "an EMA": ("ema-share", lambda at: saved(at, {"model": weights(), "ema": weights()})),
    "pickle protocol 3": ("pickle-protocol", lambda at: saved(at, {**weights(), "raw": b"bytes"},
        pickle_protocol=3)),
    "pickle protocol 5": ("pickle-protocol", lambda at: saved(at, weights(), pickle_protocol=5)),
    "pickle protocol 4, of old": ("pickle-protocol", lambda at: saved(
        at, weights(), pickle_protocol=4, _use_new_zipfile_serialization=False)),
    "float8 in a legacy file": ("legacy-container", lambda at: saved(
        at, {"w": torch.ones(4).to(torch.float8_e5m2)}, _use_new_zipfile_serialization=False)),
    "tied weights": ("tied-weights", tied),
    "names in the metadata alone": ("aliases", alias),
    "float32": ("all-fp32", lambda at: saved(at, {"fc.weight": torch.ones(2, 2)})),
    "gzip": ("container", lambda at: packed(at, gzip.compress)),
    "bzip2": ("container", lambda at: packed(at, bz2.compress)),
    "xz": ("container", lambda at: packed(at, lzma.compress)),
    "a torch file as .safetensors": ("wrong-name", lambda at: saved(at, weights(),
        "model.safetensors")),
    "a safetensors file as .pt": ("wrong-name", foreign_name),
    "a shard beside its index": ("lone-shard", shard),
    "codes beside a scale": ("scaled-weights", lambda at: saved(at, {
        "q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "q.weight_scale_inv": torch.ones(1, 1)})),
}  # fmt: skip
"""What a file has → (the finding's code, how it is made); for each of them doctor has a command."""


def found(diagnosis: Diagnosis, code: str) -> Finding:
    (finding, *_) = [finding for finding in diagnosis.findings if finding.code == code]
    return finding


NOTED = "noted"


def words_in_a_shell(command: str, cwd: Path) -> list[list[str]]:
    """The arguments of each `ckptconv` in a command as a shell reads it; it runs what else there
    is.
    """
    (cwd / "bin").mkdir(exist_ok=True)
    program = cwd / "bin" / "ckptconv"
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' $# \"$@\" >> {NOTED}\n")
    program.chmod(0o755)
    (cwd / NOTED).touch()
    path = f"PATH={shlex.quote(str(cwd / 'bin'))}:$PATH"
    done = subprocess.run(
        f"{path}; {command}", shell=True, cwd=cwd, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    noted = iter((cwd / NOTED).read_text().split("\0"))
    (cwd / NOTED).unlink()
    return [[next(noted) for _ in range(int(count))] for count in noted if count]


def obey(command: str, cwd: Path) -> Path:
    """Run a printed command as a shell reads it, and give back the file that it wrote."""
    (cwd / "bin").mkdir(exist_ok=True)
    before = set(cwd.iterdir())
    for words in words_in_a_shell(command, cwd):
        done = run(*words, cwd=cwd)
        assert done.exit == 0, f"{command}\n{done.err}"
    (made,) = set(cwd.iterdir()) - before
    return made


def opened_by_torch(path: Path) -> Any:
    """What torch, or the safetensors library, makes of a path on this host: no map_location,
    nothing allowed.
    """
    if path.is_dir():
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        return _load_state_dict_from_keys(checkpoint_id=path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, weights_only=True)


@no_gpu
@pytest.mark.parametrize("what", FIXED)
def test_obeying_the_printed_command_clears_the_finding(what, tmp_path):
    code, make = FIXED[what]
    source = make(tmp_path)
    if source.parent != tmp_path:
        source = Path(shutil.copy(source, tmp_path))
    before = diagnose(source, size=True)
    finding = found(before, code)
    assert finding.command is not None, finding
    fixed = obey(finding.command, tmp_path)
    after = diagnose(fixed, size=code == "all-fp32")
    assert code not in {other.code for other in after.findings}
    assert [other for other in after.findings if other.severity != "info"] == []
    assert after.loads
    opened_by_torch(fixed)


UNFIXED: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a device that is not here": ("no-such-device", lambda at: saved(at, weights())),
    "codes of an unknown order": ("scaled-weights", lambda at: saved(at, {
        "q.trellis": torch.ones(1, 1, 4, dtype=torch.int16), "q.suh": torch.ones(8).half()})),
    "a meta tensor": (
        "no-values",
        lambda at: saved(at, {**weights(), "m": torch.ones(2, device="meta")}),
    ),
    "a flipped bit": ("damaged", lambda at: with_flipped_bit(saved(at, weights()))),
    "a header of 200 MB": ("beyond-limits", lambda at: huge_header(at)),
    "NaN": ("non-finite", lambda at: saved(at, {"w": torch.tensor([float("nan"), 1.0]).half()})),
    "infinity": ("infinite", lambda at: saved(at, {"w": torch.tensor([float("inf"), 1.0]).half()})),
    "an optimizer's state alone": ("no-weights", lambda at: saved(at, adam())),
    "a tensor alone": ("bare-tensor", lambda at: saved(at, torch.ones(3))),
}  # fmt: skip
"""The same for what no conversion fixes."""


def huge_header(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes((200_000_000).to_bytes(8, "little") + b"{")
    os.truncate(path, 200_001_000)
    return path


def with_flipped_bit(path: Path) -> Path:
    content = weights()["fc0.weight"].numpy().tobytes()
    raw = bytearray(path.read_bytes())
    raw[raw.index(content)] ^= 1
    path.write_bytes(raw)
    return path


@no_gpu
@pytest.mark.parametrize("what", UNFIXED)
def test_what_no_conversion_fixes_has_no_command(what, tmp_path):
    code, make = UNFIXED[what]
    diagnosis = diagnose(
        make(tmp_path), values=True, device="cuda:9" if code == "no-such-device" else None
    )
    finding = found(diagnosis, code)
    assert finding.command is None and finding.effect
    if code in ("damaged", "beyond-limits"):
        assert {other.command for other in diagnosis.findings} == {None}


def codes_in_the_source() -> set[str]:
    """The codes that the package gives to findings of doctor: the arguments of what makes one, and
    those of `_code`.
    """
    codes: set[str] = set()
    for path in (ROOT / "ckptconv" / "doctor").glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                code = [node.args[MAKERS[name]] for name in names_in(node.func) & MAKERS.keys()][:1]
                codes |= {one.value for one in code if isinstance(one, ast.Constant)}
            if isinstance(node, ast.Tuple):  # a row of a table: what makes the finding, its code
                maker, code = [*node.elts, None, None][:2]
                if isinstance(maker, ast.Attribute) and maker.attr in MAKERS:
                    codes |= {code.value} if isinstance(code, ast.Constant) else set()
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "_code"
        ]
        returns = [
            node
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Return)
        ]
        codes |= {
            part.value
            for node in returns
            for part in ast.walk(node)
            if isinstance(part, ast.Constant)
        }
    return codes


MAKERS = {"error": 0, "warning": 0, "info": 0, "Finding": 1}
"""What makes a finding, and which argument of it is the code."""


def names_in(function: ast.expr) -> set[str]:
    """The names by which a call names what is called."""
    parts = [*ast.walk(function)]
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


ELSEWHERE = {
    "keys": "test_obeying_makes_the_keys_fit",
    "no-checkpoint": "test_the_quoted_error_about_a_stranger_is_torchs",
    "lone-rank": "test_one_ranks_file_alone_is_joined_with_those_beside_it",
}
"""Findings that have a test of their own, for they need a model, more files, or have no command."""


def test_every_kind_of_finding_has_a_file_that_has_it():
    assert all(callable(globals()[test]) for test in ELSEWHERE.values())
    tested = {code for code, _ in (*FIXED.values(), *UNFIXED.values())}
    assert codes_in_the_source() == tested | ELSEWHERE.keys()


@no_gpu
@pytest.mark.parametrize("what", FIXED)
def test_inspect_calls_portable_what_doctor_finds_no_error_in(what, tmp_path):
    """But for keys in a wrapper, which torch.load does not mind."""
    source = FIXED[what][1](tmp_path)
    diagnosis = diagnose(source)
    if diagnosis.format is None or FIXED[what][0] == "lone-shard":
        return  # what cannot be inspected, or opens, but is not all
    with open_checkpoint(source) as checkpoint:
        portable, _ = verdict(inspect_checkpoint(checkpoint))
    codes = {finding.code for finding in diagnosis.findings if finding.severity == "error"}
    assert portable == (
        not codes and "wrapped-keys" not in {finding.code for finding in diagnosis.findings}
    )


@no_gpu
@pytest.mark.parametrize("what", some(12, FIXED))
def test_every_command_of_a_file_works(what, tmp_path):
    """All of them, one after another: no two write to one name."""
    source = FIXED[what][1](tmp_path)
    if source.parent != tmp_path:
        source = Path(shutil.copy(source, tmp_path))
    commands: dict[str, list[str]] = {}
    for finding in diagnose(source, size=True).findings:
        assert finding.command is not None, finding
        commands.setdefault(finding.command, []).append(finding.code)
    for command, codes in commands.items():
        fixed = obey(command, tmp_path)
        assert not set(codes) & {
            other.code for other in diagnose(fixed, size="all-fp32" in codes).findings
        }, command


LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid "
    b"sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
)
ADVISED = {
    "a git-LFS pointer": (LFS, "git lfs pull"),
    "a web page": (b"<!DOCTYPE html><html></html>", "fetch it again"),
    "an empty file": (b"", "fetch or save it again"),
    "7z": (b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(40), "unpack it first"),
}


@pytest.mark.parametrize("what", ADVISED)
def test_where_no_command_fixes_the_advice_says_what_to_do(what, tmp_path):
    content, advice = ADVISED[what]
    (tmp_path / "model.pt").write_bytes(content)
    (finding,) = diagnose(tmp_path / "model.pt").findings
    assert (finding.severity, finding.code, finding.command) == ("error", "no-checkpoint", None)
    assert advice in finding.advice


# -------------------------------------------------------------------------------- torch's own words

TAGS = (
    "cuda:3",
    "cuda",
    "npu:0",
    "cpu:0",
    "mps",
    "xla:0",
    "xpu:0",
    "hpu",
    "privateuseone:0",
    "mtia:1",
    "mlu:0",
)


@no_gpu
@pytest.mark.parametrize("tag", TAGS)
def test_the_quoted_error_about_a_device_is_torchs(tag, tmp_path):
    path = tagged(tmp_path, tag)
    assert_quoted(found(diagnose(path), "device"), path)


@pytest.mark.parametrize("count", [1, 2])
def test_the_quoted_error_about_an_index_that_is_not_here_is_torchs(count, tmp_path, monkeypatch):
    path = tagged(tmp_path, "cuda:3")
    monkeypatch.setattr(
        "ckptconv.doctor.cases.survey_host",
        lambda ask_torch: Host((), None, "2.13", count, False, 0, ()),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(
        torch.cuda._utils, "_get_device_index", lambda device, *_: torch.device(device).index
    )
    assert_quoted(found(diagnose(path), "device"), path)


QUOTED = {
    "a Namespace": "refused-objects",
    "a class of the user's": "refused-objects",
    "a whole module": "whole-module",
    "TorchScript": "container",
    "a zip of checkpoints": "container",
    "a bare pickle": "container",
    "a record beside the folder": "stray-records",
    "a record without a folder": "stray-records",
    "pickle protocol 3": "pickle-protocol",
    "pickle protocol 5": "pickle-protocol",
    "pickle protocol 4, of old": "pickle-protocol",
    "float8 in a legacy file": "legacy-container",
    "gzip": "container",
    "bzip2": "container",
    "xz": "container",
    "a torch file as .safetensors": "wrong-name",
    "a safetensors file as .pt": "wrong-name",
}


@pytest.mark.parametrize("what", QUOTED)
def test_the_quoted_error_is_torchs(what, tmp_path):
    path = FIXED[what][1](tmp_path)
    assert_quoted(found(diagnose(path), QUOTED[what]), path)


STRANGERS = {
    "lfs": LFS,
    "page": b"<!DOCTYPE html><html></html>",
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(504),
    "onnx": b"\x08\x08\x12\x07pytorch" + bytes(40),
    "npy": b"\x93NUMPY\x01\x00" + bytes(100),
    "7z": b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(40),
    "zstd": b"\x28\xb5\x2f\xfd\x04\x00" + bytes(40),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("what", STRANGERS)
def test_the_quoted_error_about_a_stranger_is_torchs(what, suffix, tmp_path):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(STRANGERS[what])
    assert_quoted(found(diagnose(path), "no-checkpoint"), path)


def test_the_quoted_error_about_a_truncated_file_is_torchs(tmp_path):
    path = saved(tmp_path, weights())
    path.write_bytes(path.read_bytes()[:-100])
    assert_quoted(found(diagnose(path), "damaged"), path)


def test_the_quoted_error_about_a_folder_is_torchs(produced):
    path = produced / "dcp_fsdp2"
    assert_quoted(found(diagnose(path), "container"), path)


def test_the_quoted_error_about_mmap_is_torchs(tmp_path):
    path = saved(tmp_path, weights(), _use_new_zipfile_serialization=False)
    effect = found(diagnose(path), "legacy-container").effect
    with pytest.raises(RuntimeError) as raised:
        torch.load(path, mmap=True, weights_only=True)
    assert effect.partition(" says: ")[2] in str(raised.value)


def test_the_quoted_error_about_wrapped_keys_is_torchs(tmp_path):
    model = torch.nn.Linear(2, 2)
    path = saved(tmp_path, {f"module.{key}": value for key, value in model.state_dict().items()})
    effect = found(diagnose(path), "wrapped-keys").effect
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(torch.load(path, weights_only=True))
    for words in effect.partition(" says: ")[2].split(" … "):
        assert words in str(raised.value)


def test_the_quoted_error_about_tied_weights_is_the_librarys(tmp_path):
    effect = found(diagnose(tied(tmp_path)), "tied-weights").effect
    with pytest.raises(RuntimeError) as raised:
        save_file(
            torch.load(tmp_path / "model.pt", weights_only=True), tmp_path / "out.safetensors"
        )
    assert effect.partition(" says: ")[2] in str(raised.value)


def assert_quoted(finding: Finding, path: Path) -> None:
    """Every part of what the finding says that torch says is in the error that torch raises."""
    with pytest.raises(Exception) as raised:
        torch.load(path, weights_only=True)
    words = finding.effect.partition(" says: ")[2].partition("; ")[0]
    assert words, finding
    for part in words.split(" … "):
        assert part in str(raised.value)


# --------------------------------------------------------------------------------- real checkpoints

ENTRIES = (
    json.loads(text.read_text())
    if (text := oracle.corpus_folder() / "manifest.json").is_file()
    else []
)


@no_gpu
@pytest.mark.corpus
@pytest.mark.parametrize(
    "entry", some(10, [pytest.param(entry, id=entry["file"]) for entry in ENTRIES])
)
def test_doctor_and_torch_agree_on_real_files(entry, corpus, tmp_path):
    path = corpus / "files" / entry["file"]
    diagnosis = diagnose(path)
    try:
        opened_by_torch(path)
    except Exception:
        assert not diagnosis.loads
    else:
        assert diagnosis.loads
    copy = tmp_path / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    for finding in (
        item for item in diagnose(copy).findings if item.severity != "info" and item.command
    ):
        fixed = obey(finding.command, tmp_path)
        # which part is the model stays the user's choice, where a whole tree is fixed
        left = [item for item in diagnose(fixed).findings if item.severity != "info"]
        assert {item.code for item in left} <= {"several-models"} - {finding.code}
        opened_by_torch(fixed)
        fixed.unlink()


VALUES: dict[str, Any] = {
    "plain values": [
        1,
        2.5,
        None,
        True,
        "x",
        b"y",
        (1,),
        {1, 2},
        1 << 200,
        1 + 2j,
        frozenset([1]),
        bytearray(b"abc"),
        ...,
    ],
    "torch's own": [torch.Size([1]), torch.float16, torch.device("cuda:1"), torch.strided],
    "collections": [OrderedDict(a=1), Counter("ab"), defaultdict(list, {1: [2]})],
    "a range": range(3),
    "a path": Path("a"),
    "a date": datetime.datetime(2026, 1, 1),
    "a class": int,
    "a function": torch.add,
    "a numpy number": np.float32(1),
    "a numpy array": np.ones(3),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a CSR tensor": torch.eye(3).to_sparse_csr(),
    "a quantized tensor": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a buffer": torch.nn.Buffer(torch.ones(2)),
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "a storage": torch.ones(3).untyped_storage(),
    "a typed storage": torch.ones(3).storage(),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "a meta tensor": torch.ones(2, device="meta"),
    "a random state": torch.get_rng_state(),
}


FORMS = [(2, True), (3, False), (4, True), (5, False), (2, False), (3, True), (4, False), (5, True)]
"""Of pickles: the protocol, and whether they are in a zip archive."""


@pytest.mark.parametrize(("what", "form"), crossed(VALUES, FORMS), ids=str)
def test_doctor_and_torch_agree_on_values(what, form, tmp_path):
    protocol, zipped = form
    tree = {"w": torch.ones(2), "value": VALUES[what]}
    path = saved(tmp_path, tree, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    try:
        opened_by_torch(path)
    except Exception:
        assert not diagnose(path).loads
    else:
        assert diagnose(path).loads


FOLDERS = ("acc_state", "dcp_fsdp2", "ds_z2", "ds_z3")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_command_for_a_folder_makes_one_file_that_torch_opens(name, produced, tmp_path):
    shutil.copytree(produced / name, tmp_path / name)
    fixed = obey(found(diagnose(tmp_path / name), "container").command, tmp_path)
    assert diagnose(fixed).loads
    opened_by_torch(fixed)


def test_the_command_for_a_step_names_it(produced, tmp_path):
    shutil.copytree(produced / "ds_z2", tmp_path / "ds")
    shutil.copytree(produced / "ds_z2" / "global_step1", tmp_path / "ds" / "global_step7")
    (tmp_path / "ds" / "latest").write_text("global_step7")
    finding = found(diagnose(tmp_path / "ds", tag="global_step1"), "container")
    assert "--tag global_step1" in finding.command
    assert diagnose(obey(finding.command, tmp_path)).loads


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_file_alone_is_joined_with_those_beside_it(rank, produced, tmp_path):
    for number in (0, 1):
        shutil.copy(produced / f"rank{number}_dtensor.pt", tmp_path)
    finding = found(diagnose(tmp_path / f"rank{rank}_dtensor.pt"), "lone-rank")
    assert finding.advice is None  # the command says it
    shown = run("doctor", f"rank{rank}_dtensor.pt", cwd=tmp_path).out
    assert "  fix " in shown and "  loses " not in shown and "  advice " not in shown
    fixed = obey(finding.command, tmp_path)
    assert diagnose(fixed).loads
    full = torch.load(produced / "full_from_fsdp.pt", weights_only=True)
    joined = torch.load(fixed, weights_only=True)
    assert list(joined) == list(full)
    assert all(oracle.value_bytes(joined[key]) == oracle.value_bytes(full[key]) for key in full)


def test_one_ranks_file_without_the_others_has_no_command(produced, tmp_path):
    shutil.copy(produced / "rank0_dtensor.pt", tmp_path)
    finding = found(diagnose(tmp_path / "rank0_dtensor.pt"), "lone-rank")
    assert finding.command is None
    assert "files of both ranks" in finding.advice


def test_what_is_said_beside_a_command_is_a_loss_only_where_it_is_one():
    for advice, label in ((f"{LEFT_OUT}a.b", "loses"), ("look at it first", "advice")):
        finding = Finding("error", "code", "cause", "effect", "ckptconv convert a b", advice)
        assert [row.label for row in finding_lines([finding])][-1] == label


def test_of_many_findings_of_a_kind_the_rest_is_counted():
    many = [Finding("error", "device", f"cause {at}", "effect") for at in range(23)]
    rows = list(finding_lines([*many, Finding("info", "tied", "cause", "effect")]))
    assert [row.label for row in rows] == [*["error", "effect"] * 20, "info", "effect", "more"]
    assert rows[-1].text == "device: and 3 more"


def test_of_several_with_warnings_strict_says_how_many_fail():
    found = [
        Diagnosis("a", None, (Finding("warning", "tied", "cause", "effect"),)),
        Diagnosis("b", None, (Finding("error", "device", "cause", "effect"),)),
        Diagnosis("c", None, ()),
    ]
    assert diagnoses_headline(found) == "2 of 3 load here"
    told = "2 of 3 load here; 1 of these with warnings, which fail with --strict"
    assert diagnoses_headline(found, strict=True) == told


def test_what_holds_no_state_dict_has_no_keys_for_a_model(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    (tmp_path / "keys.txt").write_text("a.weight\nb.weight\n")
    done = run("doctor", "none.pt", "--like", "keys.txt", cwd=tmp_path)
    assert done.exit == 1
    assert "keys: holds no state dict" in done.out and "there is nothing to load into" in done.out


def test_a_numpy_archive_that_is_refused_is_one_that_numpy_may_load(tmp_path):
    np.savez(tmp_path / "texts.npz", a=np.array(["a"]))
    with np.load(tmp_path / "texts.npz") as read:
        assert read["a"].tolist() == ["a"]
    assert "numpy.load may load it" in diagnose(tmp_path / "texts.npz").findings[0].effect
    np.savez(tmp_path / "cut.npz", a=np.ones(5))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-9] + b"x")
    effect = diagnose(tmp_path / "cut.npz").findings[0].effect
    assert "numpy.load may refuse it too" in effect or "failed finding central" in effect


def test_a_file_that_is_cut_may_be_recovered_and_a_folder_may_not(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(300)})
    path.write_bytes(path.read_bytes()[:-300])
    assert "ckptconv recover IN OUT" in found(diagnose(path), "damaged").advice
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    index = tmp_path / "dcp" / ".metadata"
    index.write_bytes(index.read_bytes()[:-50])
    assert "recover" not in found(diagnose(tmp_path / "dcp"), "damaged").advice


def test_the_classes_of_whole_modules_are_named(tmp_path):
    one, other = torch.nn.Linear(1, 1), torch.nn.ReLU
    path = saved(tmp_path, one)
    what = "holds a whole module (torch.nn.modules.linear.Linear), not its state dict"
    assert found(diagnose(path), "whole-module").cause == what
    path = saved(tmp_path, {"a": one, "b": torch.nn.Sequential(torch.nn.Linear(2, 1), other())})
    cause = found(diagnose(path), "whole-module").cause
    assert cause.startswith(
        "holds whole modules (torch.nn.modules.linear.Linear, torch.nn.modules."
    )
    assert cause.endswith("), not their state dicts")


def test_a_shard_without_its_index_says_what_to_name(tmp_path):
    finding = found(diagnose(shard(tmp_path, index=False)), "lone-shard")
    assert (finding.severity, finding.command) == ("error", None)
    assert "model-00002-of-00002" in finding.cause and "name all, or their index" in finding.advice


# ------------------------------------------------------------------------------------------- values


def test_a_damaged_record_is_found_where_torch_says_nothing(tmp_path):
    values = torch.arange(1000.0)
    path = saved(tmp_path, {"w": values, "v": values + 1})
    raw = bytearray(path.read_bytes())
    at = raw.find(values.numpy().tobytes())
    raw[at + 40] ^= 1
    path.write_bytes(raw)
    assert diagnose(path).loads
    finding = found(diagnose(path, values=True), "damaged")
    assert finding.severity == "error"
    # as the effect says: without a word
    assert not torch.equal(torch.load(path, weights_only=True)["w"], values)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
])  # fmt: skip
def test_values_are_counted_as_torch_counts_them(dtype, tmp_path):
    torch.manual_seed(1)
    raw = torch.randint(0, 256, (4096, dtype.itemsize), dtype=torch.uint8)
    raw[::7, -1] |= 0x7F  # exponents of all ones, now and then
    raw[::7, -2 if dtype.itemsize > 1 else -1] |= 0xF0
    raw[::14, : max(0, dtype.itemsize - 2)] = 0
    values = raw.view(dtype).reshape(64, 64).t()
    path = saved(tmp_path, {"w": values, "fine": torch.ones(4, dtype=dtype)})
    wide = values if dtype.is_complex else values.double()
    nan, infinite = int(wide.isnan().sum()), int((wide.isinf() & ~wide.isnan()).sum())
    assert nan
    codes = {finding.code: finding for finding in diagnose(path, values=True).findings}
    assert f"NaN ({nan}), in w" in codes["non-finite"].cause
    assert ("infinite" in codes) == (infinite > 0)
    assert not infinite or f"infinite ({infinite}), in w" in codes["infinite"].cause


def test_finite_values_are_no_finding(tmp_path):
    assert diagnose(saved(tmp_path, weights()), values=True).findings == ()


def test_infinite_masks_are_just_told(tmp_path):
    path = saved(
        tmp_path, {"mask": torch.full((4, 4), float("-inf")).half(), "ids": torch.arange(4)}
    )
    diagnosis = diagnose(path, values=True)
    assert [(item.severity, item.code) for item in diagnosis.findings] == [("info", "infinite")]
    assert diagnosis.loads and not diagnosis.warns


def test_infinity_in_a_weight_is_a_warning_and_elsewhere_just_told(tmp_path):
    state = {
        **weights(),
        "fc1.weight": torch.full((8, 8), float("inf")).half(),
        "obs.min_val": torch.tensor(float("inf")),
    }
    tree = {
        "model": state,
        "optimizer": {"state": {0: {"best": torch.tensor(float("inf"))}}, "param_groups": []},
    }
    findings = diagnose(saved(tmp_path, tree), values=True).findings
    told = {item.severity: item.cause for item in findings if item.code == "infinite"}
    assert "in model.fc1.weight" in told["warning"] and told["warning"].count("model.") == 1
    assert "obs.min_val" in told["info"] and "optimizer" in told["info"]


def test_the_type_is_advice_only_where_it_was_asked_for_and_of_weights_only(tmp_path):
    path = trained(tmp_path)
    assert "all-fp32" not in {item.code for item in diagnose(path).findings}
    assert "weights (2) are float32" in found(diagnose(path, size=True), "all-fp32").cause, (
        "not the optimizer's tensors"
    )
    alone = diagnose(saved(tmp_path, adam(), "optimizer.pt"), size=True)
    assert [item.code for item in alone.findings] == ["no-weights"]


# ------------------------------------------------------------------------------------------ devices


@no_gpu
def test_tags_that_this_host_serves_are_no_finding(tmp_path, monkeypatch):
    path = tagged(tmp_path, "cuda:1")
    for count, loads in ((2, True), (1, False)):
        host = Host((), None, "2.13", count, False, 0, ())
        monkeypatch.setattr("ckptconv.doctor.cases.survey_host", lambda ask_torch, host=host: host)
        assert diagnose(path).loads == loads


@no_gpu
def test_a_device_that_was_asked_for_and_is_not_here_is_an_error(tmp_path):
    path = saved(tmp_path, weights())
    assert found(diagnose(path, device="cuda:7"), "no-such-device").severity == "error"
    assert diagnose(path, device="cpu").findings == ()
    with pytest.raises(CheckpointError):
        diagnose(path, device="gpu")


# --------------------------------------------------------------------------------------------- keys

MODELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.stem(x))
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A model, and its name: it lies in a module in the folder that the program runs in."""
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(MODELS, space)
    return space["Net"]().half(), f"{name}:Net"


def prefixed(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {prefix + key: value for key, value in state.items()}


FITTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "DDP": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "a prefix": prefixed("backbone."),
    "DDP in a training checkpoint": lambda state: {"epoch": 3, "model": prefixed("module.")(state)},
    "a Lightning checkpoint": lambda state: {
        "state_dict": prefixed("model.")(state),
        "pytorch-lightning_version": "2.6.6",
    },
    "more keys": lambda state: {**state, "aux.weight": torch.ones(7)},
    "with an EMA of other keys": lambda state: {
        "model": prefixed("net.")(state),
        "ema": {"shadow": torch.ones(3)},
    },
    "DDP with a Namespace": lambda state: {
        "model": prefixed("module.")(state),
        "args": argparse.Namespace(lr=1),
    },
}


@pytest.mark.parametrize("by", ["model", "like"])
@pytest.mark.parametrize("what", FITTED)
def test_obeying_makes_the_keys_fit(what, by, net, tmp_path):
    model, name = net
    saved(tmp_path, model.state_dict(), "other.pt")
    wanted = {by: name if by == "model" else "other.pt"}
    path = saved(tmp_path, FITTED[what](model.state_dict()))
    finding = found(diagnose(path, **wanted), "keys")
    fixed = obey(finding.command, tmp_path)
    after = diagnose(fixed, **wanted)
    assert [item for item in after.findings if item.severity != "info"] == []
    loaded = torch.load(fixed, weights_only=True)
    state = next((loaded[key] for key in ("model", "state_dict") if key in loaded), loaded)
    fresh = type(model)().half()
    fresh.load_state_dict(state, strict=True)
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in fresh.state_dict().items()
    )


@pytest.mark.parametrize("what", ["DDP", "compiled", "a prefix", "more keys"])
def test_the_quoted_error_about_keys_is_torchs(what, net, tmp_path):
    model, name = net
    path = saved(tmp_path, FITTED[what](model.state_dict()))
    assert_refused_by(model, path, found(diagnose(path, model=name), "keys"))


UNFIT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a key is missing": lambda state: {
        key: value for key, value in state.items() if key != "head.bias"
    },
    "a shape is another": lambda state: {**state, "head.weight": torch.ones(5, 3).half()},
}


@pytest.mark.parametrize("what", UNFIT)
def test_keys_that_cannot_fit_have_no_command(what, net, tmp_path):
    model, name = net
    path = saved(tmp_path, UNFIT[what](model.state_dict()))
    diagnosis = diagnose(path, model=name)
    finding = found(diagnosis, "keys")
    assert not diagnosis.loads
    assert finding.command is None
    assert "head." in finding.cause
    assert_refused_by(model, path, finding)


def assert_refused_by(model: torch.nn.Module, path: Path, finding: Finding) -> None:
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(torch.load(path, weights_only=True))
    for words in finding.effect.partition(" says: ")[2].split(" … "):
        assert words in str(raised.value)


def test_a_wrapped_model_wants_wrapped_keys(net, tmp_path):
    model, _ = net
    saved(tmp_path, prefixed("module.")(model.state_dict()), "wrapped.pt")
    assert diagnose("wrapped.pt", like="wrapped.pt").findings == ()
    with oracle.tagged(lambda _: "cuda:3"):
        saved(tmp_path, prefixed("module.")(model.state_dict()), "gpu.pt")
    fixed = obey(found(diagnose("gpu.pt", like="wrapped.pt"), "device").command, tmp_path)
    assert diagnose(fixed, like="wrapped.pt").findings == ()


def test_the_program_takes_a_model(net, tmp_path):
    model, name = net
    saved(tmp_path, prefixed("module.")(model.state_dict()))
    done = run("doctor", "model.pt", "--model", name, cwd=tmp_path)
    assert done.exit == 1
    assert f"ckptconv convert model.pt model-portable.pt --model {name}" in done.out
    saved(tmp_path, model.state_dict())
    assert run("doctor", "model.pt", "--model", name, cwd=tmp_path).exit == 0


@pytest.mark.parametrize("wrapped", [["stem"], ["stem", "head"]])
def test_a_part_in_data_parallel_is_told_with_the_command_that_frees_it(wrapped, net, tmp_path):
    model, _ = net
    values = model.state_dict()
    for name in wrapped:
        setattr(model, name, torch.nn.DataParallel(getattr(model, name)))
    path = saved(tmp_path, model.state_dict())
    finding = found(diagnose(path), "prefixed-keys")
    assert_refused_by(type(model)(), path, finding)
    loaded = torch.load(obey(finding.command, tmp_path), weights_only=True)
    assert [*loaded] == [*values]
    assert all(map(torch.equal, loaded.values(), values.values()))


def test_a_module_that_is_called_so_is_not_taken_for_a_wrapper(tmp_path):
    for keys in (["module.a", "a"], ["lstm.module", "lstm"], ["lstm.module.a", "lstm.b"]):
        assert diagnose(saved(tmp_path, parted(*keys)), size=False).findings == ()


# -------------------------------------------------------------------------------------- the program


def test_what_a_model_prints_does_not_get_into_the_document(tmp_path):
    lines = (
        "import torch",
        "print('imported')",
        "def build():",
        "    print('built')",
        "    return torch.nn.Linear(2, 2)",
    )
    (tmp_path / "talking.py").write_text("\n".join(lines))
    saved(tmp_path, torch.nn.Linear(2, 2).state_dict())
    for command in (("doctor", "model.pt"), ("convert", "model.pt", "out.pt", "--dry-run")):
        done = run(*command, "--json", "--model", "talking:build", cwd=tmp_path)
        assert done.json() and "built" in done.err


@pytest.mark.parametrize(
    "asked",
    [
        ("--model", "nowhere:build"),
        ("--like", "nowhere.pt"),
        ("--device", "nowhere"),
        ("--device", "keep"),
    ],
)
def test_what_cannot_be_asked_is_not_answered(asked, tmp_path):
    saved(tmp_path, {"w": torch.ones(2)})
    assert_one_error(run("doctor", "model.pt", *asked, cwd=tmp_path), code=2)


@no_gpu
def test_a_command_that_fixes_two_findings_is_printed_once(tmp_path):
    with oracle.tagged(lambda _: "cuda:3"):
        saved(tmp_path, {f"module.{key}": value for key, value in weights().items()})
    done = run("doctor", "model.pt", cwd=tmp_path)
    assert done.out.count("ckptconv convert model.pt model-portable.pt") == 1
    assert done.out.count("the same command") == 1
    commands = [
        finding["command"]
        for finding in run("doctor", "model.pt", "--json", cwd=tmp_path).json()["findings"]
    ]
    assert commands == ["ckptconv convert model.pt model-portable.pt"] * 2


@pytest.mark.parametrize(
    "name", ["model.data-00000-of-00001", "model.ckpt-1000.data-00001-of-00002"]
)
@pytest.mark.parametrize("content", [bytes(999), b"\x08" + bytes(99), np.ones(99).tobytes()])
def test_the_values_of_a_tensorflow_checkpoint_are_told_by_their_name(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    (finding,) = diagnose(tmp_path / name).findings
    assert finding.cause == "is a part of a TensorFlow checkpoint, not a PyTorch checkpoint"


def test_findings_are_ordered_by_severity(tmp_path):
    tree = {
        "model": {f"module.{key}": value.float() for key, value in weights().items()},
        "args": argparse.Namespace(lr=1),
    }
    severities = [
        finding.severity for finding in diagnose(saved(tmp_path, tree), size=True).findings
    ]
    assert severities == ["error", "warning", "info"]


@no_gpu
def test_the_exit_code_says_whether_it_loads(tmp_path):
    saved(tmp_path, weights(), "good.pt")
    done = run("doctor", "good.pt", cwd=tmp_path)
    assert (done.exit, done.err) == (0, "")
    unread = "; tensors not read (--values reads them)"
    assert done.out.splitlines()[-1] == f"loads here{unread}"
    done = run("doctor", "good.pt", "--values", cwd=tmp_path)
    assert done.out.splitlines()[-1] == "loads here"
    shutil.copy(SAMPLES / "ddp_cuda3.pt", tmp_path)
    done = run("doctor", "ddp_cuda3.pt", cwd=tmp_path)
    assert (done.exit, done.err) == (1, "")
    assert "ckptconv convert ddp_cuda3.pt ddp_cuda3-portable.pt" in done.out
    assert done.out.splitlines()[-1] == "will not load here: 1 error"


@no_gpu
def test_the_findings_are_one_json_document(tmp_path):
    done = run("doctor", SAMPLES / "ddp_cuda3.pt", "--json", cwd=tmp_path)
    document = done.json()
    assert done.exit == 1
    assert (document["format"], document["loads"]) == ("torch zip", False)
    assert [item["code"] for item in document["findings"]] == ["device", "wrapped-keys"]
    (tmp_path / "page.pt").write_bytes(b"<html></html>")
    document = run("doctor", "page.pt", "--json", cwd=tmp_path).json()
    assert (document["format"], document["findings"][0]["code"]) == (None, "no-checkpoint")


def test_a_missing_file_is_an_error_line(tmp_path):
    done = run("doctor", "missing.pt", cwd=tmp_path)
    assert (done.exit, done.out) == (2, "")
    assert done.err.startswith("error: missing.pt: no such file")


@no_gpu
def test_without_torch_a_cpu_only_one_is_assumed(tmp_path):
    blocked = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'ckptconv'; "
        "from ckptconv.cli.main import main; main()"
    )
    done = run_process(
        "doctor",
        SAMPLES / "ddp_cuda3.pt",
        "--json",
        cwd=tmp_path,
        command=(sys.executable, "-c", blocked),
    )
    assert done.exit == 1
    expected = run(
        "doctor", SAMPLES / "ddp_cuda3.pt", "--json", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.json() == expected.json()


def test_a_name_with_blanks_and_quotes_is_quoted_for_the_shell(tmp_path):
    path = saved(
        tmp_path, {f"module.{key}": value for key, value in weights().items()}, "it's a model.pt"
    )
    assert diagnose(obey(found(diagnose(path), "wrapped-keys").command, tmp_path)).findings == ()


@pytest.mark.parametrize("preset", ["swa", "ema-pytorch"])
def test_keys_that_a_framework_adds_are_left_out_by_the_fix(preset, tmp_path):
    """torch's AveragedModel, and ema_pytorch's module with both models, by their keys."""
    net = torch.nn.Linear(2, 2)
    state_dict = dict(torch.optim.swa_utils.AveragedModel(net).state_dict())
    code = "wrapped-keys"
    if preset == "ema-pytorch":
        named = {f"{model}.{key}": value.clone() for model in ("online_model", "ema_model")
                 for key, value in net.state_dict().items()}  # fmt: skip
        state_dict = {**named, "initted": torch.tensor(True), "step": torch.tensor(3)}
        code = "prefixed-keys"
    path = saved(tmp_path, state_dict)
    made = obey(found(diagnose(path), code).command, tmp_path)
    assert not net.load_state_dict(torch.load(made), strict=True).missing_keys


def test_the_output_that_is_named_is_free(tmp_path):
    path = saved(tmp_path, {f"module.{key}": value for key, value in weights().items()})
    assert obey(found(diagnose(path), "wrapped-keys").command, tmp_path).name == "model-portable.pt"
    assert (
        obey(found(diagnose(path), "wrapped-keys").command, tmp_path).name == "model-portable-2.pt"
    )


@pytest.mark.trust
@pytest.mark.badcases
def test_hostile_files_are_findings(hostile, tmp_path, monkeypatch):
    """But for the largest, which are among the proofs of `make trust`."""
    monkeypatch.chdir(tmp_path)
    files = [path for path in hostile.rglob("*") if path.is_file()]
    files = [path for path in files if not re.search("million|many_views", path.name)]
    codes = {
        finding.code
        for path in files
        for finding in diagnose(path, values=path.stat().st_size < 1 << 30).findings
    }
    assert {"damaged", "beyond-limits", "refused-objects", "no-checkpoint", "lone-shard"} <= codes
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_the_file_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    path = saved(tmp_path, {"model": weights(), "evil": Evil()})
    assert not diagnose(path, values=True).loads
    assert not (tmp_path / "ran").exists()


def test_an_adapter_of_peft_is_not_to_be_stripped(tmp_path):
    """Its keys without the prefix are those of no model, and peft does not find them."""
    start = "base_model.model.layers.0.q_proj"
    keys = (f"{start}.lora_A.weight", f"{start}.lora_B.weight")
    finding = found(
        diagnose(saved(tmp_path, {key: torch.ones(2, 2) for key in keys})), "prefixed-keys"
    )
    assert finding.command is None and "ckptconv merge-lora BASE ADAPTER OUT" in finding.advice


def test_a_delta_is_named_once(tmp_path):
    for name, value in (("base", 0.0), ("new", 1.0)):
        torch.save({"w": torch.full((8,), value)}, tmp_path / f"{name}.pt")
    delta_checkpoints(tmp_path / "base.pt", tmp_path / "new.pt", tmp_path / "d", checksum="adler32")
    (finding,) = diagnose(tmp_path / "d").findings
    assert finding.code == "lone-shard" and "ckptconv apply BASE" in finding.advice
