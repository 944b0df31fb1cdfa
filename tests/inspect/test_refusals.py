"""What torch and safetensors refuse although ckptconv reads it: inspect and doctor must say so. The
libraries are asked.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv.inspect.facts import inspect_checkpoint
from helpers.program import run
from hostile.cases import bad

W = {"w": torch.ones(2)}


def saved(path: Path, tree: object, **options: object) -> Path:
    torch.save(tree, path, **options)
    return path


def with_version(path: Path, version: bytes | None) -> Path:
    """The archive of `torch.save`, with another version of its format, or with none."""
    plain = saved(path.with_name("plain.pt"), W)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if not name.endswith("/version"):
                new.writestr(name, old.read(name))
            elif version is not None:
                new.writestr(name, version)
    return path


def as_safetensors(path: Path) -> Path:
    save_file(W, path)
    return path


LEGACY = {"_use_new_zipfile_serialization": False}
CASES = {
    "plain": lambda p: saved(p, W),
    "legacy": lambda p: saved(p, W, **LEGACY),
    "bytes": lambda p: saved(p, {**W, "x": b"ab"}),
    "empty bytes": lambda p: saved(p, {**W, "x": b""}),
    "empty bytes in a list": lambda p: saved(p, {**W, "cfg": {"a": [b""]}}),
    "empty bytes as a key": lambda p: saved(p, {**W, b"": 1}),
    "empty bytes, legacy": lambda p: saved(p, {**W, "x": b""}, **LEGACY),
    "protocol 1": lambda p: saved(p, W, pickle_protocol=1),
    "protocol 1, legacy": lambda p: saved(p, W, pickle_protocol=1, **LEGACY),
    "protocol 3": lambda p: saved(p, W, pickle_protocol=3),
    "protocol 4": lambda p: saved(p, W, pickle_protocol=4),
    "a large int": lambda p: saved(p, {**W, "n": (1 << 2039) - 1}),
    "too large an int": lambda p: saved(p, {**W, "n": 1 << 2039}),
    "a nested tensor": lambda p: saved(p, {"w": torch.nested.nested_tensor([torch.ones(2)])}),
    "version 1": lambda p: with_version(p, b"1"),
    "version 10": lambda p: with_version(p, b"10\n"),
    "version 0": lambda p: with_version(p, b"0\n"),
    "version 11": lambda p: with_version(p, b"11\n"),
    "no version": lambda p: with_version(p, None),
    "safetensors named as torch": as_safetensors,
}


def torch_loads(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", CASES)
def test_inspect_and_doctor_say_what_torch_does(case, tmp_path):
    path = CASES[case](tmp_path / "in.pt")
    expected = 0 if torch_loads(path) else 1
    assert run("inspect", "--portable", path, cwd=tmp_path).exit == expected
    assert run("doctor", "--strict", path, cwd=tmp_path).exit == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_in_legacy_files_are_not_portable(tmp_path):
    """torch takes their sizes from memory that is not theirs, and mostly fails: it is not asked."""
    path = saved(tmp_path / "in.pt", {"w": torch.nested.nested_tensor([torch.ones(2)])}, **LEGACY)
    assert run("inspect", "--portable", path, cwd=tmp_path).exit == 1
    assert "refused-nested" in run("doctor", path, cwd=tmp_path).out


def test_both_answers_occur(tmp_path):
    answers = {
        case: torch_loads(make(tmp_path / "in.pt"))
        for case, make in CASES.items()
        if "nested" not in case
    }
    assert 5 < sum(answers.values()) < len(answers) - 5


@pytest.mark.parametrize(("suffix", "other"), [("safetensors", "torch"), ("bin", "safetensors")])
def test_a_shard_of_the_other_kind_is_not_portable(suffix, other, tmp_path):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    kinds = ["safetensors", "torch"] if suffix == "safetensors" else ["torch", "safetensors"]
    for name, kind, key in zip(names, kinds, "ab", strict=True):
        tensors = {key: torch.ones(2)}
        save_file(tensors, tmp_path / name) if kind == "safetensors" else torch.save(
            tensors, tmp_path / name
        )
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    with pytest.raises(Exception):  # noqa: B017 (each library has its own)
        load_file(tmp_path / names[1]) if suffix == "safetensors" else torch.load(
            tmp_path / names[1]
        )
    for command in (["inspect", "--portable"], ["doctor"]):
        done = run(*command, ".", cwd=tmp_path)
        assert done.exit == 1 and names[1] in done.out and f"{other} file" in done.out


def test_types_that_safetensors_does_not_give_to_torch_are_not_portable(tmp_path):
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path = tmp_path / "in.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(Exception, match="F6_E2M3"):
        load_file(path)
    assert run("inspect", "--portable", path, cwd=tmp_path).exit == 1
    done = run("doctor", path, cwd=tmp_path)
    assert done.exit == 1 and "refused-dtype" in done.out


DOUBLING = bad.P2 + b"})" + b"q\x00h\x00\x86" * 60 + b"Ns."
COLLIDING = (
    bad.P2 + b"}(" + b"".join(bad.n(k * ((1 << 61) - 1)) + b"N" for k in range(1, 2001)) + b"u."
)


@pytest.mark.parametrize("pickled", [DOUBLING, COLLIDING], ids=["tuples", "ints"])
def test_keys_that_make_torch_hang_are_told(pickled, tmp_path):
    """torch is not asked: it would not come back."""
    (tmp_path / "in.pt").write_bytes(bad.ckpt(pickled))
    inspected = run("inspect", "--portable", "in.pt", cwd=tmp_path)
    assert inspected.exit == 1 and "can make its reader hang" in inspected.out
    told = run("doctor", "in.pt", cwd=tmp_path)
    assert told.exit == 1 and "refused-keys" in told.out and "says:" not in told.out


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_protocol_is_portable_where_torch_reads_what_it_has(protocol, tmp_path):
    path = tmp_path / "in.pt"
    for beside in (None, "text", b"raw", [b"raw"]):
        saved(path, {"w": torch.ones(1), "b": beside}, pickle_protocol=protocol)
        assert inspect_checkpoint(path).portable is torch_loads(path)
    if protocol >= 4:  # an empty dict without a frame, and one that is memoized
        for content in (b"}.", b"}\x94."):
            path.write_bytes(bad.ckpt(b"\x80%c" % protocol + content))
            assert inspect_checkpoint(path).portable is torch_loads(path)


def test_few_large_keys_are_portable(tmp_path):
    saved(tmp_path / "in.pt", {(1 << 61) + 5: torch.ones(1), (1, (2, 3)): torch.ones(1)})
    assert torch_loads(tmp_path / "in.pt")
    assert run("inspect", "--portable", "in.pt", cwd=tmp_path).exit == 0


def badcase(name: str, folder: Path) -> Path:
    """A file of the generator of hostile files."""
    path = folder / name
    path.write_bytes(next(one[-1]() for one in bad.CASES if one[0] == name))
    return path


@pytest.mark.parametrize(
    "name", ["exec_ext.pt", "zip_encrypted_flag.pt", "zip_zip64_lie.pt", "zip_case_twins.pt"]
)
def test_torch_is_quoted_only_with_what_it_says(name, tmp_path):
    told = run("doctor", badcase(name, tmp_path), cwd=tmp_path).out
    assert "ckptconv does not open it" in told and "central directory" not in told


@pytest.mark.parametrize("name", ["exec_reduce.pt", "exec_dotted.pt", "exec_load_from_bytes.pt"])
def test_nobody_is_advised_to_load_what_is_dangerous(name, tmp_path):
    path = badcase(name, tmp_path)
    for command in (["inspect", path], ["doctor", path], ["convert", path, "out.pt"]):
        done = run(*command, cwd=tmp_path)
        told = done.out + done.err
        assert done.exit == (0 if command[0] == "inspect" else 1)
        assert "do not load it" in told and "ckptconv scan" in told
        assert "--unknown keep" not in told and "load it where" not in told


def test_a_tensor_by_itself_is_called_so(tmp_path):
    path = saved(tmp_path / "one.pt", torch.ones(3))
    for command in ("inspect", "doctor"):
        done = run(command, path, cwd=tmp_path)
        assert (
            done.exit == 0
            and "a bare tensor, not a state dict" in done.out
            and "training" not in done.out
        )


@pytest.mark.parametrize("tree", [{}, {"epoch": 3, "args": {"lr": 0.5}}], ids=["empty", "values"])
def test_a_file_without_tensors_shows_its_values_and_has_no_weights(tree, tmp_path):
    path = saved(tmp_path / "in.pt", tree)
    shown = run("inspect", path, cwd=tmp_path).out
    assert all(text in shown for text in ("epoch", "int 3", "float 0.5")) or not tree
    assert "no-weights: holds no tensors" in run("doctor", path, cwd=tmp_path).out
