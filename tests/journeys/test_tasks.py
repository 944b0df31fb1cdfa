"""Tasks of users, each done by the shortest command or line of Python, and all that they see of it.

A file of the folder ``tasks`` is a session: its first line says what the user wants; ``$`` is a
command, ``>>>`` a line of Python, and below each stands what it prints (stderr last) and how a
command ends, where that is not 0. All commands of a session are run in a folder of their own that
has the samples and the files that `made` makes. ``TASKS=write python -m pytest
tests/journeys/test_tasks.py`` writes the sessions again: read the difference as a user would.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers import gguf_files
from helpers.http_server import HttpServer
from helpers.paths import ROOT, SAMPLES
from helpers.program import run

TASKS = sorted((Path(__file__).parent / "tasks").glob("*.txt"))
HOST = "http://models.example"
"""What the address of the web server is called in a session."""

NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, head="fc2"):
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.add_module(head, nn.Linear(4, 2, bias=False))


def other():
    return Net("head")
"""


class Runs:
    """What a malicious file names."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo pwned",)


def state(plus: float = 0.0, prefix: str = "") -> dict[str, torch.Tensor]:
    """The weights of `NET`, all of them counted."""
    shapes = {"fc1.weight": (4, 3), "fc1.bias": (4,), "fc2.weight": (2, 4)}
    return {
        prefix + key: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + plus
        for key, shape in shapes.items()
    }


def make(folder: Path) -> None:
    """The files that the sessions use beside the samples."""
    import torch.distributed.checkpoint as dcp

    for sample in SAMPLES.glob("*.pt"):
        shutil.copy(sample, folder)
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(4, 3)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    files: dict[str, Any] = {
        "a.pt": state(),
        "b.pt": state(1),
        "lightning.ckpt": {
            "epoch": 3,
            "global_step": 120,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": state(prefix="model.module._orig_mod."),
            "optimizer_states": [optimizer],
            "lr_schedulers": [],
            "hyper_parameters": {"lr": 0.1},
        },
        "ema.pt": {"model": state(), "model_ema": state(1), "optimizer": optimizer, "epoch": 7},
        "nan.pt": {**state(), "fc1.bias": torch.tensor([0, math.nan, math.inf, 1])},
        "evil.pt": {**state(), "hook": Runs()},
    }
    for name, tree in files.items():
        torch.save(tree, folder / name)
    torch.save(torch.nn.Linear(3, 4), folder / "module.pt")
    whole = (folder / "a.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[whole.index(state()["fc1.weight"].numpy().tobytes()) + 4] ^= 1
    (folder / "flipped.pt").write_bytes(flipped)
    (folder / "page.pt").write_text("<!DOCTYPE html><html>Please log in</html>")
    codes = {
        "fc.weight": torch.arange(128 * 128).reshape(128, 128).remainder(8).to(torch.float8_e4m3fn),
        "fc.weight_scale_inv": torch.full((1, 1), 0.5),
        "norm.weight": torch.ones(128),
    }
    save_file(codes, folder / "fp8.safetensors", {"format": "pt"})
    (folder / "net.py").write_text(NET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state(), "step": 7}, checkpoint_id=folder / "dcp", no_dist=True)
    shutil.copytree(ROOT / "tests/data/deepspeed/stage3_many", folder / "zero")
    header = gguf_files.tensor("blk.0.ffn.weight", (32, 2), gguf_files.Q4_0)
    name = gguf_files.entry("general.name", gguf_files.TEXT, gguf_files.text("Tiny"))
    blocks = (struct.pack("<e", 0.5) + bytes(range(16))) * 2 + bytes(28)
    (folder / "llama.gguf").write_bytes(gguf_files.gguf(header, metadata=[name], data=blocks))
    hub = folder / "hub"
    hub.mkdir()
    parts = {"model-00001-of-00002.safetensors": ["fc1.weight", "fc1.bias"]}
    parts["model-00002-of-00002.safetensors"] = ["fc2.weight"]
    for name, keys in parts.items():
        save_file({key: state()[key] for key in keys}, hub / name, {"format": "pt"})
    index = {
        "metadata": {"total_size": 96},
        "weight_map": {key: name for name, keys in parts.items() for key in keys},
    }
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub / "config.json").write_text('{"model_type": "net"}')
    (folder / "runs").mkdir()
    for name in ("a.pt", "ddp_cuda3.pt", "cut.pt"):
        shutil.copy(folder / name, folder / "runs")


@pytest.fixture(scope="module")
def made(made_once) -> Path:
    """All files of the sessions."""
    return made_once("tasks", make)


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """The address of a web server that has a sample."""
    with HttpServer({"/ddp_cuda3.pt": (SAMPLES / "ddp_cuda3.pt").read_bytes()}) as server:
        yield server.url


VARIES = [
    (re.compile(r"(?:written|done) in [\d.]+ m?s(: .*)?$", re.M), "written in TIME"),
    (re.compile(r"(again,|written,) in [\d.]+ m?s$", re.M), r"\1 in TIME"),
    (re.compile(r"\(([\d.]+ k?B), [\d.]+ s\)"), r"(\1, TIME)"),
    (re.compile(r"(written in) .*/s$", re.M), r"\1 TIME"),
    (re.compile(r"network: .*"), "network: TRAFFIC"),
    (re.compile(r" at 0x[0-9a-f]+: (.*), [\d.]+ s>"), r" at ADDRESS: \1, TIME>"),
    # the size of what torch.save writes is that of a version
    (re.compile(r"(torch zip,|DCP,|checkpoints,|work   ) [\d.]+ k?B"), r"\1 SIZE"),
]
"""What is not the same in each run, and what stands for it."""


def told(shown: str, web: str) -> str:
    """What was printed, without what varies."""
    text = shown.replace(web, HOST)
    for varying, instead in VARIES:
        text = varying.sub(instead, text)
    return text if not text or text.endswith("\n") else text + "\n"


def command(line: str, folder: Path, web: str) -> str:
    """What a command prints, and how it ends."""
    program, *words = shlex.split(line.replace(HOST, web))
    if program == "ls":
        return "".join(
            f"{path.relative_to(folder)}\n" for word in words for path in sorted(folder.glob(word))
        )
    assert program == "ckptconv"
    done = run(*words, cwd=folder, env={"CUDA_VISIBLE_DEVICES": ""})
    ended = f"[exit {done.exit}]\n" if done.exit else ""
    return told(done.out + done.err, web) + ended


def python(line: str, space: dict[str, Any]) -> str:
    """What a line of Python prints, an error as its last line."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            exec(compile(ast.Interactive(ast.parse(line).body), "<task>", "single"), space)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return told(shown.getvalue(), "http://nowhere")


def played(session: str, folder: Path, web: str) -> str:
    """The session as it is when its commands and lines are run."""
    title, *lines = session.splitlines(keepends=True)
    space: dict[str, Any] = {}
    text = title
    for line in lines:
        if line.startswith("$ "):
            text += f"\n{line}" + command(line[2:], folder, web)
        elif line.startswith(">>> "):
            text += f"\n{line}" + python(line[4:], space)
    return text


@pytest.mark.parametrize("task", TASKS, ids=lambda path: path.stem)
def test_a_task_is_done_and_told(task, made, web, tmp_path, monkeypatch):
    folder = shutil.copytree(made, tmp_path / "room")
    monkeypatch.chdir(folder)
    session = task.read_text("utf-8")
    found = played(session, folder, web)
    if os.environ.get("TASKS") == "write":
        task.write_text(found, "utf-8")
    assert session == found


def test_there_are_thirty_tasks():
    assert len(TASKS) >= 30
