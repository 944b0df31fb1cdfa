"""What the terminal says where it was silent, or said it twice: found by people who tried it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptconv import inspect_checkpoint
from helpers.program import run


def said(text: str) -> list[str]:
    """Lines without the blanks that make columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("other", ["b.pt", "folder"])
def test_a_second_file_is_not_taken_for_a_glob(tmp_path, other):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pt")
    (tmp_path / "folder").mkdir()
    done = run("ls", "a.pt", other, cwd=tmp_path)
    assert done.exit == 1
    assert f"{other} matches no tensor, and is a file or folder here; one checkpoint" in done.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model beside which another file of weights lies."""
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "hf" / "other.bin")
    return tmp_path


@pytest.mark.parametrize("command", ["ls", "stats", "doctor"])
def test_files_that_are_not_read_are_named(command, folder):
    note = "model.safetensors is read; 1 other file is beside it and not read: other.bin"
    done = run(command, "hf", cwd=folder)
    assert done.exit == 0
    assert f"note {note}" in said(done.err + done.out)
    if command != "doctor":  # whose answer is for people
        assert note not in done.out
    assert json.loads(run(command, "hf", "--json", cwd=folder).out)["notes"] == [note]


def test_tensors_larger_than_a_shard_are_named(tmp_path):
    tensors = {"a": torch.ones(9000), "b": torch.ones(2), "c": torch.ones(9000)}
    torch.save(tensors, tmp_path / "in.pt")
    words = ("convert", "in.pt", "out", "--to", "safetensors", "--max-shard-size")
    done = run(*words, "10KB", "-n", cwd=tmp_path)
    wanted = "note 2 tensors are larger than --max-shard-size 10.0 kB, and not split: a, c"
    assert wanted in said(done.err)
    assert "larger than" not in run(*words, "36KB", "-n", cwd=tmp_path).err


@pytest.mark.parametrize("words", [("new",), ("new.pt", "--to", "safetensors")])
def test_an_output_of_no_format_is_wrong_usage(tmp_path, words):
    """As in a batch: it is wrong whatever the source is."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    done = run("convert", "a.pt", *words, cwd=tmp_path)
    assert done.exit == 2 and "see ckptconv convert --help" in done.err
    if words == ("new",):
        assert "for a new folder, end the name with a slash" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert run("convert", "a.pt", "new/", cwd=tmp_path).exit == 0
    assert (tmp_path / "new" / "model.safetensors").exists()


def test_a_short_batch_says_a_failure_once(tmp_path):
    (tmp_path / "runs").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "runs" / "a.pt")
    (tmp_path / "runs" / "cut.pt").write_bytes((tmp_path / "runs" / "a.pt").read_bytes()[:300])
    words = ("batch", "runs", "--out-dir", "out", "--to", "safetensors", "--engine", "serial")
    done = run(*words, cwd=tmp_path)
    assert done.exit == 1 and done.err.count("runs/cut.pt") == 1
    quiet = run(*words, "-q", cwd=tmp_path)
    assert quiet.exit == 1 and quiet.err.count("runs/cut.pt") == 1


def test_a_long_batch_says_failures_again_at_its_end(tmp_path):
    (tmp_path / "runs").mkdir()
    for number in range(21):
        (tmp_path / "runs" / f"cut{number:02}.pt").write_bytes(b"PK\3\4" + bytes(96))
    words = ("batch", "runs", "--out-dir", "out", "--to", "safetensors", "--engine", "serial")
    assert run(*words, cwd=tmp_path).err.count("runs/cut07.pt") == 2


def test_an_object_that_is_refused_is_not_a_key(tmp_path):
    torch.save({"w": torch.ones(2), "n": None, "x": Evil()}, tmp_path / "evil.pt")
    assert inspect_checkpoint(tmp_path / "evil.pt").keys == {"": 2}
    assert "parameters 2 in 2 keys" in said(run("inspect", "evil.pt", cwd=tmp_path).out)


def test_an_edit_says_how_much_a_file_has_grown(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").stat().st_size
    words = ("edit", "m.safetensors", "--metadata")
    dry = json.loads(run(*words, "a=b", "-n", "--json", cwd=tmp_path).out)
    done = run(*words, "a=b", cwd=tmp_path)
    grown = (tmp_path / "m.safetensors").stat().st_size - before
    assert dry["grown_bytes"] == grown
    assert f"note its header has {grown / 1000:.1f} kB more, so that later edits fit" in said(
        done.err
    )
    assert "later edits" not in run(*words, "a=c", cwd=tmp_path).err
