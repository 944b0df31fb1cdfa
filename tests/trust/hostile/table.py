"""Writes docs/maintainers/hostile-files.md: every case, and what ckptconv, torch and the
safetensors library do
with it.

    export PYTHONPATH=.:tests:tests/trust
    python -m hostile.table            all of it, in some quarter of an hour
    python -m hostile.table --ours     only what ckptconv does, in some minutes; the rest as it was

Each answer is that of a process of its own, which may use 10 s of a processor, 120 s by the clock
and 8 GB of address space.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.hostile_generator import GENERATOR
from helpers.program import ROOT
from hostile.cases import GENERATED, GOOD, Case, bad
from hostile.families import FAMILIES
from hostile.forked import Server, server

PAGE = ROOT / "docs" / "maintainers" / "hostile-files.md"
CPU, CLOCK, SPACE = 10, 120, 8 << 30
MUCH = 1 << 30  # bytes of memory that are worth a word
DCP = "DCP folders"
GENERATED_NAMES = {
    "zip": "Generated: the zip container",
    "pickle-exec": "Generated: code execution",
    "pickle-dos": "Generated: exhaustion",
    "torch": "Generated: what torch means",
    "legacy": "Generated: old containers",
    "key": "Generated: names",
    "safetensors": "Generated: safetensors",
    "index": "Generated: indexes of shards",
}


@dataclass(frozen=True)
class Row:
    """What each reader did with a case; an empty text: it was not asked."""

    case: Case
    ckptconv: str
    torch: str
    safetensors: str


# ---------------------------------------------------------------------------------------- measuring


def load_torch(path: Path) -> None:
    import torch

    torch.load(path, map_location="cpu", weights_only=True)


def load_dcp(path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, "joined.pt")


def load_safetensors(path: Path) -> None:
    from safetensors.torch import load_file

    load_file(path)


def _child(read: Callable[[Path], None], paths: list[Path], cwd: Path, answer: int) -> None:
    """Read in a forked process, which then ends without a word on stderr; the class of an error
    goes to `answer`.
    """
    os.chdir(cwd)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 1))
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        for path in paths:
            read(path)
    except BaseException as error:
        os.write(answer, type(error).__name__.encode())
        os._exit(1)
    os._exit(0)


def measured(read: Callable[[Path], None], paths: list[Path]) -> str:
    """What a reader does with files, in words."""
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as cwd:
        end, answer = os.pipe()
        begin = time.monotonic()
        pid = os.fork()
        if not pid:
            _child(read, paths, Path(cwd), answer)
        os.close(answer)
        ended, status, usage = 0, 0, None
        while not ended:
            if time.monotonic() - begin > CLOCK:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
            ended, status, usage = os.wait4(pid, os.WNOHANG)
        with open(end, "rb") as told:
            error = told.read().decode()
        ran = (Path(cwd) / "CKPTCONV_PWNED").exists()
    assert usage is not None
    used = (usage.ru_maxrss - idle) * 1024
    said = _said(os.waitstatus_to_exitcode(status), error)
    if ran:
        said = f"**runs the payload**, {said}"
    return f"{said}, {used / 1e9:.1f} GB" if used > MUCH else said


def _said(code: int, error: str) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "**hangs**"
    if code < 0:
        return f"**crashes** ({signal.Signals(-code).name})"
    return f"refuses: {error}" if error else "**accepts**"


def ckptconv_says(case: Case, given: list[Path], folder: Path, running: Server) -> str:
    """Exit code and message of the program, or that it converts."""
    cwd, tmp = folder / "cwd", folder / "tmp"
    cwd.mkdir()
    tmp.mkdir()
    (cwd / GOOD).write_bytes(bad.ckpt(bad.GOOD))
    done = running.run(*case.arguments(given, f"out{case.outputs[0]}"), cwd=cwd, tmp=tmp, limit=300)
    if done.exit:
        return f"{done.exit}: `{_message(done.err, case)}`"
    told = [
        line.split(None, 1)[1]
        for line in done.err.splitlines()[1:]
        if line.split()[0] in ("note", "warning", "skipped")
    ]
    return f"converts; `{_plain(told[0])}`" if told else "converts"


def _message(line: str, case: Case) -> str:
    """The error without the path of the file, and without what helps."""
    said = line.strip().removeprefix("error: ")
    name = case.file if case.build is not None else Path(case.file).name
    return _plain(said.rpartition(f"/{name}")[2].lstrip("/: ").partition("; ")[0])


def _plain(text: str) -> str:
    text = text.replace("`", "'").replace("|", "\\|")
    return text if len(text) <= 160 else text[:160] + "…"


def rows(known: Mapping[str, tuple[str, str]]) -> Iterator[Row]:
    """All cases, measured; for those of which it is `known`, not what torch and safetensors do."""
    import torch.distributed.checkpoint.format_utils
    from safetensors.torch import load_file  # noqa: F401 (imported once, before the forks)

    torch.set_num_threads(1)
    with server() as running, tempfile.TemporaryDirectory() as scratch:
        hostile = Path(scratch) / "generated"
        hostile.mkdir()
        subprocess.run(
            [sys.executable, GENERATOR, hostile], cwd=hostile, check=True, capture_output=True
        )
        for number, case in enumerate(
            [*GENERATED, *(case for family in FAMILIES for case in family.cases)]
        ):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            given = [hostile / case.file] if case.build is None else case.write(folder)
            yield Row(
                case,
                ckptconv_says(case, given, folder, running),
                *(known.get(case.file) or _others(case, given)),
            )
            subprocess.run(["rm", "-rf", folder], check=True)


def _others(case: Case, given: list[Path]) -> tuple[str, str]:
    """What torch and safetensors do: nothing where they do not read such a thing."""
    if case.category == DCP and "dcp_st_" not in case.file:
        return measured(load_dcp, given), ""
    if case.option == "--rules" or case.category == "index" or any(path.is_dir() for path in given):
        return "", ""
    if given[0].suffix == ".safetensors":
        return "", measured(load_safetensors, given)
    return ("", "") if given[0].suffix in (".json", ".txt") else (measured(load_torch, given), "")


# ----------------------------------------------------------------------------------------- the page


def summary(found: list[Row]) -> Iterator[str]:
    """How many of the files that ckptconv refuses the other readers accept, crash on, hang on, or
    run.
    """
    refused = [row for row in found if row.ckptconv[0].isdigit()]
    kept = len(found) - len(refused)
    yield (
        f"{len(found)} cases. ckptconv refuses {len(refused)}. It converts {kept}, which are "
        "sound or only odd.\n"
    )
    yield "Of the files that ckptconv refuses:\n"
    yield "| | asked | refuse | accept | crash | hang | run the payload | over 1 GB |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, said in (
        (
            "`torch.load(weights_only=True)`",
            [row.torch for row in refused if row.torch and row.case.category != DCP],
        ),
        (
            "`torch.distributed.checkpoint` (DCP folders)",
            [row.torch for row in refused if row.torch and row.case.category == DCP],
        ),
        ("`safetensors.torch.load_file`", [row.safetensors for row in refused if row.safetensors]),
    ):
        counted = Counter(
            word
            for text in said
            for word in ("refuses", "accepts", "crashes", "hangs", "runs", "GB")
            if word in text
        )
        cells = (counted[word] for word in ("refuses", "accepts", "crashes", "hangs", "runs", "GB"))
        yield f"| {name} | {len(said)} | " + " | ".join(map(str, cells)) + " |"


HEAD = """# Hostile files: every case, and what each reader does with it

Written by `python -m hostile.table` (in `tests/`) with torch {torch} and safetensors {safetensors}.
`tests/trust/test_badcases.py` checks every case. ckptconv must give the exit code and one line that
names the file and the field. It must execute nothing, leave nothing behind and not touch the
source. It may take 10 s, and 200 MB more than a program that does nothing. The test runs `inspect`,
`doctor`, `scan` and `diff` on each case too.

Each reader runs in a process of its own, with 10 s of processor time, 120 s by the clock and 8 GB
of address space. "Hangs" means that it needed more. "Accepts" means that it returned tensors, not
that they are right. DCP folders are read by `dcp_to_torch_save`. An empty cell means that the
library has no reader for this kind of file.
"""


def page(found: list[Row], versions: tuple[str, str]) -> str:
    """The whole page."""
    lines = [HEAD.format(torch=versions[0], safetensors=versions[1]), *summary(found)]
    names = dict.fromkeys(row.case.category for row in found)
    for name in names:
        lines += ["", f"## {GENERATED_NAMES.get(name, name)}", ""]
        lines += [
            "| case | what is wrong | ckptconv | torch | safetensors |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| `{row.case.file}` | {_plain(row.case.what)} | {row.ckptconv} | {row.torch} | "
            f"{row.safetensors} |"
            for row in found
            if row.case.category == name
        ]
    return "\n".join(lines) + "\n"


def listed() -> list[str]:
    """The cases that the page lists."""
    return [
        line.split("`")[1]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `") and line.count(" | ") == 4
    ]


def others_listed() -> dict[str, tuple[str, str]]:
    """What the page says of torch and safetensors, by case."""
    cells = [
        re.split(r" (?<!\\)\|(?: |$)", line)
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
    ]
    return {
        row[0].split("`")[1]: (row[3].strip(), row[4].strip()) for row in cells if len(row) >= 5
    }


def main() -> None:
    import safetensors
    import torch

    found = []
    for row in rows(others_listed() if sys.argv[1:] == ["--ours"] else {}):
        found.append(row)
        print(json.dumps([row.case.file, row.ckptconv, row.torch, row.safetensors]), flush=True)
    PAGE.write_text(page(found, (torch.__version__.partition("+")[0], safetensors.__version__)))


if __name__ == "__main__":
    main()
