"""What the package says of itself: the Pythons and systems of its classifiers, the workflow that
tests them, the floors.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.paths import ROOT
from helpers.pythons import EXTRAS, LONG, floors

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.[0-9]+)"', PYPROJECT)
SYSTEMS = {
    "ubuntu-latest": "POSIX :: Linux",
    "macos-latest": "MacOS",
    "windows-latest": "Microsoft :: Windows",
}


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8"))


def test_the_workflow_runs_the_pythons_and_systems_of_the_classifiers(workflow):
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
    assert {f'"Operating System :: {SYSTEMS[name]}"' for name in matrix["os"]} == set(
        re.findall('"Operating System :: [^"]+"', PYPROJECT)
    )
    assert len(PYTHONS) == 5
    assert f'requires-python = ">={PYTHONS[0]}"' in PYPROJECT


def test_the_workflow_runs_files_and_makes_that_are_there(workflow):
    """No step needs make; a test file that it names exists."""
    steps = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    named = {name for step in steps for name in re.findall(r"tests/[\w/]+\.py", step)}
    assert named and all((ROOT / name).is_file() for name in named)
    assert not [step for step in steps if re.search(r"\bmake\b", step)]
    assert {"mypy --platform win32", "mypy --platform darwin", "ruff check ."} <= set(steps)


def test_every_dependency_has_a_floor_that_the_lowest_environment_takes():
    found = dict(line.split("==") for line in floors(PYPROJECT))
    own = {"click", "rich", "numpy", "ml-dtypes", "safetensors", "isal"}
    extras = {
        "yaml": {"pyyaml"},
        "remote": {"obstore", "botocore", "urllib3"},
        "hub": {"huggingface_hub"},
        "delta": {"zstandard", "xxhash", "blake3"},
    }
    assert set(found) == own.union(*extras.values())
    assert set(EXTRAS) == set(extras)


def test_what_the_runs_without_torch_leave_out_is_there():
    assert all((ROOT / name).is_dir() for name in LONG)
