"""Faults put into the real program by strace: a system call that fails, or at which the process is
killed or told to stop.

A clean run under strace lists the calls that concern a folder; each of them can then be the one
that goes wrong. The program is forked from one that has imported all that it needs, so a call has
the same number again, counted by its name within its thread.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.program import Finished, environment

CHANGING = (
    "write,pwrite64,writev,fsync,fdatasync,ftruncate,fallocate,close,openat,mkdir,mkdirat,rename,renameat,renameat2,"
    "link,linkat,unlink,unlinkat,rmdir,chmod,fchmod,fchmodat,chown,fchown,flock,statfs"
)
"""The calls by which a file or a folder changes, and those that come before or after it."""

ERRORS, KILL, STOPS = (
    ("error=EIO", "error=ENOSPC"),
    "signal=SIGKILL",
    ("signal=SIGINT", "signal=SIGTERM"),
)
STOPPED = {"signal=SIGKILL": -9, "signal=SIGINT": 130, "signal=SIGTERM": 143}
"""The exit codes of a program that is stopped."""

_ENTRY = re.compile(r"^(\d+) +(\w+)\((.*)", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """The call `name` that a thread makes for the `number`th time, and what it said in the clean
    run.
    """

    name: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


@functools.cache
def _why_not() -> str | None:
    """Why strace cannot be used here; None where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-o", "/dev/null", "-e", "inject=close:error=EIO:when=9999", "true"],
        capture_output=True,
    )
    return (
        None
        if tried.returncode == 0
        else f"strace may not trace here: {tried.stderr.decode().strip()[-200:]}"
    )


def require_strace() -> None:
    """Skip the test where strace cannot be used, or let it fail where CKPTCONV_REQUIRE_STRACE says
    that it must be.
    """
    if (reason := _why_not()) is not None:
        (pytest.fail if os.environ.get("CKPTCONV_REQUIRE_STRACE") else pytest.skip)(
            f"{reason} (CKPTCONV_REQUIRE_STRACE)"
        )


class Traced:
    """The program, run again and again with the same arguments under strace; `room` is the folder
    of all its files.
    """

    def __init__(self, arguments: Sequence[object], room: Path) -> None:
        self._arguments, self._room = [str(word) for word in arguments], room
        self._beside = lambda name: str(room.with_name(f"{room.name}.{name}"))
        script = Path(__file__).with_name("forked_program.py")
        self._server = subprocess.Popen(
            [sys.executable, str(script)],
            cwd="/", env=environment(OMP_NUM_THREADS="1"), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def warm(self) -> None:
        """Run it once untraced, which imports what it needs."""
        assert self._asked({"warm": self._arguments})["exit"] == 0

    def calls(self) -> list[Call]:
        """The changing calls of a clean run that concern what is in the room, in order."""
        done, log = self._run(["-y", "-s", "16", "-e", f"trace={CHANGING}"])
        assert done.exit == 0, done.err
        met: Counter[tuple[str, str]] = Counter()
        found = []
        for thread, name, text in _ENTRY.findall(log):
            met[thread, name] += 1
            if f"{self._room}/" in text or f"{self._room}>" in text or f'{self._room}"' in text:
                found.append(Call(name, met[thread, name], text.replace(str(self._room), "")))
        return found

    def injected(self, call: Call, fault: str) -> tuple[Finished, int]:
        """A run in which that call meets that fault, and how often: strace counts in each thread,
        so a second may meet it.
        """
        done, log = self._run(
            ["-e", f"trace={call.name}", "-e", f"inject={call.name}:{fault}:when={call.number}"]
        )
        met = done.exit == STOPPED[fault] if fault in STOPPED else "(INJECTED)" in log
        assert met, f"{call} was not met: exit {done.exit} {done.err}{log[-1000:]}"
        return done, log.count("(INJECTED)")

    def untraced(self, *more: str) -> Finished:
        """A run without a tracer, with more arguments."""
        pid = self._started(*more)
        os.kill(pid, signal.SIGCONT)
        return self._finished()

    def _run(self, options: Sequence[str]) -> tuple[Finished, str]:
        pid, log = self._started(), self._beside("log")
        command = ["strace", "-f", "-p", str(pid), "-o", log, *options]
        tracer = subprocess.Popen(
            command, text=True, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        os.kill(pid, signal.SIGCONT)
        assert "attached" in said, said
        done = self._finished()
        tracer.communicate()
        return done, Path(log).read_text(errors="replace")

    def _started(self, *more: str) -> int:
        return self._asked(
            {
                "run": [*self._arguments, *more],
                "out": self._beside("out"),
                "err": self._beside("err"),
            }
        )["pid"]

    def _finished(self) -> Finished:
        code = self._answer()["exit"]
        return Finished(
            code,
            Path(self._beside("out")).read_text(),
            Path(self._beside("err")).read_text(),
            0.0,
            0,
        )

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())
