"""Folders of real files for the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import oracle
import pytest
from figures import figure, pytest_terminal_summary  # noqa: F401 (pytest finds them here)


@pytest.fixture(scope="session")
def samples() -> Path:
    """The sample checkpoints of the repository."""
    return Path(__file__).resolve().parent.parent / "sample_ckpts"


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of checkpoints that other people wrote."""
    folder = oracle.corpus_folder()
    if not (folder / "manifest.json").is_file():
        pytest.skip("the folder of real checkpoints is not here (CKPTCONV_CORPUS)")
    return folder


@pytest.fixture(scope="session")
def worlds(tmp_path_factory) -> Path:
    """A folder with what two and four gloo processes wrote together; see worlds.py."""
    folder = tmp_path_factory.mktemp("worlds")
    command = [sys.executable, str(Path(__file__).with_name("worlds.py")), str(folder)]
    running = [subprocess.Popen([*command, size], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for size in ("2", "4")]
    for process in running:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out.decode()[-3000:]
    return folder


@pytest.fixture(scope="session")
def produced() -> Path:
    """The folder of checkpoints that the frameworks wrote."""
    folder = oracle.corpus_folder().parent / "produced"
    if not folder.is_dir():
        pytest.skip("the folder of produced checkpoints is not here (CKPTCONV_CORPUS)")
    return folder
