"""The documentation is run: every block of the README and of docs/ is pasted into a shell, as a
reader would do it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pasted import ROOT, RUN, blocks, fresh_clone, paste

PAGES = tuple(
    f"docs/{path.name}"
    for path in sorted((ROOT / "docs").glob("*.md"))
    if blocks(f"docs/{path.name}", *RUN)
)


def assert_pasted(page: str, folder: Path, programs: Path | None = None) -> None:
    pasted, shown = paste(page, folder, programs)
    wrong = [
        f"{one.text}\n  exits with {one.code}, not {one.expected}"
        for one in pasted
        if one.code != one.expected
    ]
    assert not wrong, f"{page}\n" + "\n".join(wrong) + f"\n{shown}"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.trust] * (page != "docs/keys.md")) for page in PAGES],
)
def test_every_block_of_a_page_runs_as_it_is_written(page, tmp_path):
    """With ckptconv installed, in a fresh clone: all that the pages ask for."""
    assert_pasted(page, fresh_clone(tmp_path / "clone"), programs=Path(sys.executable).parent)


@pytest.mark.readme
def test_every_block_of_the_readme_runs_as_it_is_written(tmp_path):
    """Nothing is prepared: the README itself installs ckptconv."""
    assert_pasted("README.md", fresh_clone(tmp_path / "clone"))


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_no_command_hides_in_a_block_that_is_not_run(page):
    for language, text in blocks(page, "", "text", "console", "bash", "shell"):
        commands = [
            line
            for line in text.splitlines()
            if re.match(r"\s*(\$ )?(ckptconv|pip|make|python) ", line)
        ]
        assert not commands, f"{page}: {language}: {commands}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 150


def test_the_statistics_in_the_readme_are_those_that_are_printed(tmp_path):
    shutil.copytree(ROOT / "sample_ckpts", tmp_path / "try")
    text = (ROOT / "README.md").read_text("utf-8")
    wanted = [
        line for line in text.splitlines() if re.match("ckptconv (strip-module|stats) ", line)
    ]
    assert len(wanted) == 2
    for line in wanted:
        done = subprocess.run(
            [sys.executable, "-m", *line.split()], cwd=tmp_path / "try", capture_output=True,
            text=True, check=True,
        )  # fmt: skip
    assert f"```text\n{done.stdout}```" in text


COMMANDS = (
    "",
    "convert",
    "strip-module",
    "add-module",
    "inspect",
    "doctor",
    "diff",
    "scan",
    "devices",
    "help",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_examples(command):
    shown = subprocess.run(
        [sys.executable, "-m", "ckptconv", *command.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Examples:" in shown and f"ckptconv {command}".strip() in shown.split("Examples:")[1]


DOCTESTED = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in (ROOT / "ckptconv").rglob("*.py")
    if re.search(r"^ *>>> (?!.*doctest: \+SKIP)", path.read_text("utf-8"), re.M)
)


@pytest.mark.parametrize("module", DOCTESTED)
def test_examples_in_docstrings_hold(module):
    import doctest
    import importlib

    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_examples_are_found():
    assert len(DOCTESTED) >= 20
