"""The tests that need no torch, run under other Pythons, or with the lowest dependencies that
pyproject.toml allows.

    python tests/helpers/pythons.py 3.10 3.13             in .venv-3.10 and .venv-3.13
    python tests/helpers/pythons.py --lowest 3.10 3.11    in .venv-lowest-3.10 and .venv-lowest-3.11

A Python that is not here is told of and left out. torch is not installed: for most Pythons and
systems its wheels bring gigabytes of CUDA along, and what reads and writes checkpoints does without
it. conftest.py leaves out what needs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONG = ("tests/trust",)
"""Hostile files and long proofs; `make test` runs a sample of them, `make trust` the rest."""
EXTRAS = ("yaml", "remote", "hub", "delta")
"""Those that need no torch."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "hatchling", "hatch-fancy-pypi-readme")
"""What the tests run with; in CI, one that is not here fails them."""


def main(arguments: list[str]) -> int:
    """Run the tests under each Python; the exit code is 0 when all that are here passed, and there
    is one.
    """
    lowest = "--lowest" in arguments
    told = {}
    for version in (argument for argument in arguments if not argument.startswith("-")):
        python = interpreter(version)
        told[version] = (
            "is not here, and was left out"
            if python is None
            else tested(python, version, lowest=lowest)
        )
    for version, what in told.items():
        print(f"Python {version}{' with the lowest dependencies' if lowest else ''}: {what}")
    failed = [what for what in told.values() if "fail" in what]
    return 1 if failed or all("left out" in what for what in told.values()) else 0


def interpreter(version: str) -> str | None:
    """The interpreter of a version: on the PATH, or one that pyenv has without being set to it."""
    candidates = [f"python{version}"]
    if shutil.which("pyenv"):
        known = said("pyenv", "versions", "--bare").split()
        prefixes = [
            said("pyenv", "prefix", name).strip()
            for name in known
            if name.startswith(f"{version}.")
        ]
        candidates += [f"{prefix}/bin/python{version}" for prefix in prefixes]
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    return next(
        (
            name
            for name in candidates
            if shutil.which(name) and said(name, "-c", asked).strip() == version
        ),
        None,
    )


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def tested(python: str, version: str, *, lowest: bool) -> str:
    """Make the environment and run the tests in it; what came of it, in words."""
    folder = ROOT / f".venv-{'lowest-' if lowest else ''}{version}"
    inside = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    limits = folder / "lowest.txt"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    limits.write_text(
        "".join(f"{line}\n" for line in floors((ROOT / "pyproject.toml").read_text()))
        if lowest
        else ""
    )
    pip = [
        inside,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        limits,
    ]
    program = f"{ROOT}[{','.join(EXTRAS)}]"
    if subprocess.run([*pip, "--editable", program, *TOOLS], check=False).returncode:
        return "the dependencies could not be installed: failed"
    left_out = [f"--ignore={name}" for name in LONG]
    done = subprocess.run(
        [inside, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *left_out],
        cwd=ROOT,
        check=False,
    )
    return "passed" if done.returncode == 0 else f"failed (pytest says {done.returncode})"


def floors(pyproject: str) -> list[str]:
    """``name==floor`` for each dependency, and for those of the extras that need no torch.

    >>> needed = '"click>=8.1.7",\\n"isal>=1.6; platform_machine == \\'x86_64\\'"'
    >>> extras = 'yaml = ["pyyaml>=6"]\\nray = ["ray>=2.9"]\\nhub = ["huggingface_hub>=1"]'
    >>> floors(f'dependencies = [\\n{needed},\\n]\\n{extras}')
    ['click==8.1.7', 'isal==1.6', 'pyyaml==6', 'huggingface_hub==1']
    """
    needed = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    extras = re.findall(rf"^(?:{'|'.join(EXTRAS)}) = \[(.*)\]$", pyproject, re.MULTILINE)
    assert needed and extras
    found = re.findall(r'"([a-z0-9_-]+)>=([0-9.]+)', needed[1] + "".join(extras))
    return [f"{name}=={floor}" for name, floor in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
