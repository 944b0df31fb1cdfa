"""Draw a terminal in which ckptconv is run on a sample, as an SVG.

    python tools/terminal_picture.py docs/terminal.svg

The commands are really run, on a terminal of their own (Linux and macOS). What the run took is the
only text that is set: it would change the picture each time. tests/journeys/test_docs.py draws the
picture again and compares.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "ckptconv doctor ddp_cuda3.pt",
    "ckptconv strip-module ddp_cuda3.pt model.pt",
    "ckptconv doctor model.pt",
)
COLUMNS = 100
_LINE, _CHARACTER, _MARGIN = 19, 8.43, 16  # pixels
_COLOURS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 36: "#76e3ea"}
_TOOK = re.compile(
    r"(?:done|written) in [^\n]*(?:\n {2}[^ \n]+ (?:opening|verifying|waiting)[^\n]*)*"
)
_STYLE = re.compile("\x1b\\[([0-9;]*)m")


def main(arguments: list[str]) -> None:
    (to,) = arguments
    Path(to).write_text(picture(), "utf-8")


def picture() -> str:
    """The SVG of the session."""
    lines = session()
    height = _MARGIN * 2 + _LINE * len(lines)
    width = round(_MARGIN * 2 + _CHARACTER * COLUMNS)
    drawn = "\n".join(
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * row + 14}">{spans(line)}</text>'
        for row, line in enumerate(lines)
        if line
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
  xml:space="preserve">
<title>ckptconv says why a checkpoint does not load, and fixes it</title>
<style>
text {{ font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #e6edf3; white-space: pre }}
.bold {{ font-weight: bold }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
{drawn}
</svg>
"""


def session() -> list[str]:
    """The lines that the terminal shows: each command, and what it printed."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "samples"
        shutil.copytree(ROOT / "sample_ckpts", folder)
        for command in COMMANDS:
            lines += [f"\x1b[32m$\x1b[0m {command}", *printed(command, folder), ""]
    return lines[:-1]


def printed(command: str, folder: Path) -> list[str]:
    """The lines that a command prints on a terminal of COLUMNS columns."""
    ours, theirs = pty.openpty()
    settings = {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", **settings}
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        variables.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    found = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # Linux says so that nobody has the terminal open any more
            break
        if not block:
            break
        found += block
    process.wait()
    os.close(ours)
    text = _TOOK.sub("written in 0.02 s\x1b[0m", found.decode().replace("\r\n", "\n"))
    return text.rstrip("\n").split("\n")


def spans(line: str) -> str:
    """A line of the terminal, its colours as spans."""
    drawn, style = "", ""
    for number, part in enumerate(_STYLE.split(line)):
        if number % 2:
            style = styled(part)
        elif part:
            text = escape(part, quote=False)
            drawn += f"<tspan{style}>{text}</tspan>" if style else text
    return drawn


def styled(codes: str) -> str:
    """The attributes of a span for the numbers of a style."""
    numbers = [int(code) for code in codes.split(";") if code]
    colours = [_COLOURS[number] for number in numbers if number in _COLOURS]
    bold = ' class="bold"' if 1 in numbers else ""
    return bold + "".join(f' style="fill: {colour}"' for colour in colours)


if __name__ == "__main__":
    main(sys.argv[1:])
