"""The documentation is run: every `ckptconv` line of the README and the docs works, in order, on the samples."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/containers.md", "docs/keys.md", "docs/limits.md", "docs/pipelines.md", "docs/troubleshooting.md")
NOT_OURS = {"make", "pip"}
SAMPLES = {
    "train.pt": "ddp_cuda3_train.pt",
    **{path.name: path.name for path in (ROOT / "sample_ckpts").glob("*.pt")},
}


@pytest.fixture
def folder(tmp_path):
    for name, sample in SAMPLES.items():
        shutil.copy(ROOT / "sample_ckpts" / sample, tmp_path / name)
    return tmp_path


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, folder):
    commands = [line for block in blocks(page, "sh") for line in block.splitlines() if line and not line.startswith("#")]
    ours = [line for line in commands if shlex.split(line, comments=True)[0] not in NOT_OURS]
    assert ours, f"{page} shows no command"
    if any("--to dcp" in line for line in ours):
        pytest.importorskip("torch", reason="torch writes DCP folders itself")
    (folder / "bin").mkdir()
    program = folder / "bin" / "ckptconv"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckptconv "$@"\n')
    program.chmod(0o755)
    for line in ours:
        done = subprocess.run(
            f'PATH={shlex.quote(str(folder / "bin"))}:{shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; {line}',
            shell=True, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{page}: {line}\n{done.stdout}{done.stderr}"


def test_the_python_of_the_readme_runs(folder, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    (code,) = blocks("README.md", "python")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
            self.classifier = torch.nn.Linear(144, 3)

    space = {"model": Net()}
    exec(code, space)
    assert not space["result"].missing_keys and not space["result"].unexpected_keys
    assert (folder / "out.safetensors").exists() and (folder / "out.pt").exists()
    saved = torch.load(folder / "ddp_cuda3.pt", map_location="cpu", weights_only=True)
    assert torch.equal(space["model"].state_dict()["classifier.weight"], saved["module.classifier.weight"])


def test_the_python_of_the_page_about_keys_runs(folder, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    (code,) = blocks("docs/keys.md", "python")
    space: dict = {}
    exec(code, space)
    assert {"blocks.0.weight", "head.bias"} <= space["state_dict"].keys()
    saved = [torch.load(folder / name, map_location="cpu", weights_only=True) for name in ("train.pt", "back.pt")]
    assert [list(tree["state_dict"]) for tree in saved] == [list(saved[0]["state_dict"])] * 2


def test_the_layer_table_of_the_design_page_names_every_module():
    table = (ROOT / "docs/design.md").read_text()
    for path in sorted((ROOT / "ckptconv").rglob("*.py")):
        name = path.relative_to(ROOT / "ckptconv").with_suffix("").as_posix()
        if name != "formats/__init__":
            assert f"`{name}`" in table, f"docs/design.md does not name {name}"


COMMANDS = ("", "convert", "strip-module", "add-module", "inspect", "doctor", "diff", "scan", "devices")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_examples(command):
    shown = subprocess.run(
        [sys.executable, "-m", "ckptconv", *command.split(), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "Examples:" in shown and f"ckptconv {command}".strip() in shown.split("Examples:")[1]


DOCTESTED = (
    "errors", "dtypes", "key_rules", "keys", "tensors", "devices", "wording", "sharding", "key_fitting", "fitted_keys"
)  # fmt: skip


@pytest.mark.parametrize("module", DOCTESTED)
def test_examples_in_docstrings_hold(module):
    import doctest
    import importlib

    result = doctest.testmod(importlib.import_module(f"ckptconv.{module}"))
    assert result.failed == 0
    assert result.attempted > 0 or module == "errors"
