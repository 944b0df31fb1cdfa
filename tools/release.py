"""Build the sdist and the wheel, check both, and try each in an environment of its own.

    python tools/release.py dist

This publishes nothing. The interpreter needs the packages of tools/build.txt; `make release` has
them. The version is that of ckptconv/__init__.py, and CHANGELOG.md must have a dated section of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "sample_ckpts" / "ddp_cuda3.pt"


def main(arguments: list[str]) -> int:
    """Exit code 0 if everything that was built is fit to be published."""
    (folder,) = arguments
    released = version()
    if not (dated := release_date(released)):
        print(f"CHANGELOG.md has no section '## {released} - YYYY-MM-DD'", file=sys.stderr)
        return 1
    wheel, sdist = build(Path(folder), released)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    for built in (wheel, sdist):
        try_out(built, released)
    print(f"{wheel.name} and {sdist.name}: ckptconv {released} of {dated}, ready to be published")
    return 0


def version() -> str:
    """The version that the package says it has."""
    text = (ROOT / "ckptconv" / "__init__.py").read_text("utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def release_date(released: str) -> str | None:
    """The date of the section of a version in CHANGELOG.md; None if it has none."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    found = re.search(rf"^## {re.escape(released)} - (\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    return found[1] if found else None


def build(folder: Path, released: str) -> tuple[Path, Path]:
    """Wheel and sdist; the wheel is built from the sdist, as an installer does it."""
    wheel = folder / f"ckptconv-{released}-py3-none-any.whl"
    sdist = folder / f"ckptconv-{released}.tar.gz"
    for old in (wheel, sdist):
        old.unlink(missing_ok=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return wheel, sdist


def try_out(built: Path, released: str) -> None:
    """Install what was built into a new environment, and convert a checkpoint with it there."""
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=True)
        programs = Path(name) / ("Scripts" if sys.platform == "win32" else "bin")
        run(programs / "python", "-m", "pip", "install", "--quiet", built.resolve(), cwd=name)
        told = run(programs / "ckptconv", "--version", cwd=name)
        if told != f"ckptconv {released}\n":
            raise SystemExit(f"{built.name} says that it is {told!r}")
        run(programs / "ckptconv", "convert", SAMPLE, "model.safetensors", "--verify", cwd=name)
        run(programs / "ckptconv", "inspect", "--portable", "model.safetensors", cwd=name)
        run(programs / "ckptconv", "help", "keys", cwd=name)


def run(*command: object, cwd: object = ROOT) -> str:
    """What a command prints; the release ends where one fails."""
    done = subprocess.run(
        [*map(str, command)], cwd=str(cwd), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
