"""Small things that are refused or told: what is said, and that the hint helps."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv import CheckpointError, OptionRefused
from helpers.program import run


@pytest.mark.parametrize(
    "call",
    [
        ckptconv.open_checkpoint,
        ckptconv.inspect_checkpoint,
        ckptconv.diagnose,
        ckptconv.load_portable,
    ],
)
def test_a_path_that_no_system_takes_is_refused(call):
    with pytest.raises(OptionRefused, match="zero byte"):
        call("a\0b.pt")
    with pytest.raises(OptionRefused, match="half a character"):
        call("a\ud800.pt")


def test_no_paths_and_no_callback_are_refused():
    with pytest.raises(CheckpointError, match="no file was given"):
        ckptconv.diagnose([])
    with pytest.raises(OptionRefused, match="on_progress=5 cannot be called"):
        ckptconv.load_portable("in.pt", on_progress=5)


def test_keys_that_are_not_text_are_told_of(tmp_path: Path):
    torch.save({b"k": torch.ones(2), 0.5: torch.ones(2), "w": torch.ones(2)}, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out.safetensors", cwd=tmp_path)
    assert done.exit == 0 and "2 keys that are not text are written as text: b'k', 0.5" in done.err


def test_a_mapping_is_not_written_to_a_dash(tmp_path: Path):
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    done = run("convert", "in.pt", "out.pt", "--save-mapping", "-", cwd=tmp_path)
    assert done.exit == 2 and "write ./- for a file" in done.err and not (tmp_path / "-").exists()


def test_a_whole_file_is_not_called_damaged(tmp_path: Path):
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "more": 1}}
    ).encode()
    (tmp_path / "in.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="cannot account for"):
        ckptconv.open_checkpoint(tmp_path / "in.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "a\tb.pt")
    with pytest.raises(CheckpointError, match=r"control character in its name.*save it again"):
        ckptconv.open_checkpoint(tmp_path / "a\tb.pt")
