"""Pages of documentation, pasted block by block into a shell, as a reader would do it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_EXIT = re.compile(r"#.*\bexits with (\d+)")
RUN = ("sh", "python")


@dataclass(frozen=True, slots=True)
class Pasted:
    """One statement that was pasted: its text, its exit code, what the page says it is."""

    text: str
    code: int
    expected: int


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """The (language, text) of the blocks of a page in these languages, from top to bottom."""
    found = _BLOCK.findall((ROOT / page).read_text("utf-8"))
    return [(language, text) for language, text in found if language in languages]


def fresh_clone(to: Path) -> Path:
    """The files that a clone of this repository has, and nothing that was made in it since."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    else:  # an unpacked source distribution
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    for name in names:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return to


def paste(page: str, folder: Path, programs: Path | None = None) -> tuple[list[Pasted], str]:
    """Every statement of a page, run in one shell in `folder`, and all that the shell printed.

    `programs` is put first on the PATH: where an environment is that the reader activated earlier.
    """
    pasted = list(_statements(page))
    codes = folder / ".codes"
    lines = [f"exec 9>{codes.name!r}"]
    for text in pasted:
        lines += [text, 'echo "$?" >&9']
    script = folder / ".pasted.sh"
    script.write_text("\n".join(lines) + "\n", "utf-8")
    done = subprocess.run(
        ["bash", "--norc", script.name], cwd=folder, env=_environment(programs), timeout=1200,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    given = [int(line) for line in codes.read_text().split()]
    assert len(given) == len(pasted), f"the shell ended early:\n{done.stdout}"
    return [
        Pasted(text, code, _expected(text)) for text, code in zip(pasted, given, strict=True)
    ], done.stdout


def _environment(programs: Path | None) -> dict[str, str]:
    """The variables of a reader's shell: none of a test run, and no other virtual environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "PYTHON", "VIRTUAL_ENV"))
    }
    paths = kept["PATH"].split(os.pathsep)
    kept["PATH"] = os.pathsep.join(
        [str(programs), *paths] if programs else [path for path in paths if ".venv" not in path]
    )
    return kept


def _expected(text: str) -> int:
    said = _EXIT.search(text)
    return int(said[1]) if said else 0


def _statements(page: str) -> Iterator[str]:
    for language, text in blocks(page, *RUN):
        if language == "python":
            yield f"python <<'PASTED'\n{text}PASTED"
        else:
            yield from _commands(text)


def _commands(block: str) -> Iterator[str]:
    """The commands of a block, each with all of its lines."""
    lines: list[str] = []
    for line in block.splitlines():
        lines.append(line)
        text = "\n".join(lines)
        if line.endswith("\\") or not _is_complete(text):
            continue
        if any(part.strip() and not part.strip().startswith("#") for part in lines):
            yield text
        lines = []
    assert not lines, f"an unfinished command: {lines}"


def _is_complete(text: str) -> bool:
    """Whether a shell has all of a command; of a here-document without its end it only warns."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    return not done.returncode and not done.stderr
