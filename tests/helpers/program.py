"""The real program, run in a process of its own: what it answered, how long it took and how much
memory it had.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import ROOT as ROOT
from helpers.paths import SAMPLES as SAMPLES

PROGRAM = (sys.executable, "-m", "ckptconv")

_NOT_INHERITED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "LOCAL_RANK",
    "_CKPTCONV_COMPLETE",
    "PYTHONIOENCODING",
)

# Linux lets a process start with the peak memory of the one that started it, and the tests may have
# torch loaded. So the program is started by a small process of its own, which measures it: report
# file, seconds allowed, command.
_LAUNCHER = """
import os, signal, subprocess, sys, time
report, limit, *command = sys.argv[1:]
begin = time.monotonic()
child = subprocess.Popen(command)
signal.signal(signal.SIGALRM, lambda *_: child.kill())
signal.alarm(int(limit))
_, status, usage = os.wait4(child.pid, 0)
child.returncode = os.waitstatus_to_exitcode(status)
with open(report, "w") as file:
    print(child.returncode, time.monotonic() - begin, usage.ru_maxrss, file=file)
"""
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Finished:
    """A run of the program: exit code (negative: the signal that ended it), output, seconds, peak
    memory in bytes.
    """

    exit: int
    out: str
    err: str
    seconds: float
    rss: int

    @property
    def lines(self) -> list[str]:
        """The lines on stderr."""
        return self.err.splitlines()

    def json(self) -> dict:
        """The one JSON document on stdout."""
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """The variables that the program gets: those of this process but for what would steer it, this
    checkout on its path.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **changes}


def run(
    *arguments: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    limit: int = 60,
    command: Sequence[str] = PROGRAM,
) -> Finished:
    """Run the program in `cwd` with `env` added to the usual variables; it is killed after `limit`
    seconds.
    """
    given = [os.fspath(part) if isinstance(part, Path) else part for part in arguments]
    with tempfile.NamedTemporaryFile("r", prefix="ckptconv-test-") as report:
        launcher = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _LAUNCHER,
            report.name,
            str(limit),
            *command,
            *given,
        ]
        done = subprocess.run(
            launcher,
            cwd=cwd,
            env=environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
        code, seconds, rss = report.read().split()
    return Finished(
        int(code), done.stdout.decode(), done.stderr.decode(), float(seconds), int(rss) * _RSS_UNIT
    )


@functools.cache
def idle_rss() -> int:
    """The peak memory of the program when it does nothing."""
    return run("--version", cwd=ROOT).rss


def assert_one_error(done: Finished, *, code: int = 1) -> str:
    """The error line: the only output, printable, and no traceback."""
    assert done.exit == code, f"exit {done.exit}, not {code}: {done.err[-2000:]}{done.out[-500:]}"
    assert done.out == "", done.out[:2000]
    assert done.err.endswith("\n"), done.err[:2000]
    assert done.err.count("\n") == 1, done.err[:4000]
    line = done.err[:-1]
    assert line.startswith("error: "), line[:2000]
    assert line.isprintable(), line[:2000]
    return line
