"""Folders of real files for the tests."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest


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
