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
from helpers.program import run

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


@pytest.mark.trust
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_as_it_is_written(page, tmp_path):
    """With ckptconv installed, in a fresh clone: all that the pages ask for."""
    assert_pasted(page, fresh_clone(tmp_path / "clone"), programs=Path(sys.executable).parent)


@pytest.mark.readme
def test_every_block_of_the_readme_runs_as_it_is_written(tmp_path):
    """Nothing is prepared: the README itself installs ckptconv."""
    assert_pasted("README.md", fresh_clone(tmp_path / "clone"))


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_no_command_hides_in_a_block_that_is_not_run(page):
    for language, text in blocks(page, "", "text", "bash", "shell"):
        commands = [
            line
            for line in text.splitlines()
            if re.match(r"\s*(\$ )?(ckptconv|pip|make|python) ", line)
        ]
        assert not commands, f"{page}: {language}: {commands}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 150


TOOK = re.compile(r"(?:written|done) in .*")


@pytest.mark.parametrize(
    ("page", "session"),
    [(page, text) for page in ("README.md", *PAGES) for _, text in blocks(page, "console")],
)
def test_a_session_prints_what_the_page_shows(page, session, tmp_path):
    """On a copy of the samples; only what a run took is its own."""
    shutil.copytree(ROOT / "sample_ckpts", tmp_path / "try")
    shown = ""
    for line in session.splitlines():
        if line.startswith("$ "):
            done = subprocess.run(
                [sys.executable, "-m", *line[2:].split()], cwd=tmp_path / "try", text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            shown += f"{line}\n{done.stdout}"
    assert TOOK.sub("", session) == TOOK.sub("", shown)


def test_the_readme_begins_with_a_session():
    assert "$ ckptconv strip-module" in (ROOT / "README.md").read_text("utf-8").split("## ")[0]


@pytest.mark.trust
@pytest.mark.skipif(sys.platform == "win32", reason="draws a terminal of POSIX")
def test_the_picture_of_a_terminal_is_that_of_a_run():
    """`make picture` draws it."""
    from terminal_picture import picture

    assert (ROOT / "docs" / "terminal.svg").read_text("utf-8") == picture()


def test_every_page_is_on_the_website():
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(listed)


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
def test_every_help_shows_examples(command, tmp_path):
    shown = run(*command.split(), "--help", cwd=tmp_path).out
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
