"""Faults put into the real program by strace: a system call that fails, or at which the process is killed.

A clean run under strace lists the calls that concern a folder; each of them can then be the one that goes wrong. The program
is deterministic enough for that: the same call has the same number again, counted by its name within its thread.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from program import PROGRAM, Finished, environment

CHANGING = (
    "write,pwrite64,writev,fsync,fdatasync,ftruncate,fallocate,close,openat,mkdir,mkdirat,rename,renameat,renameat2,"
    "link,linkat,unlink,unlinkat,rmdir,chmod,fchmod,fchmodat,chown,fchown,flock,statfs"
)
"""The calls by which a file or a folder changes, and those that come before or after it."""

ERRORS, KILL, STOPS = ("error=EIO", "error=ENOSPC"), "signal=SIGKILL", ("signal=SIGINT", "signal=SIGTERM")
STOPPED = {"signal=SIGKILL": -9, "signal=SIGINT": 130, "signal=SIGTERM": 143}
"""The exit codes of a program that is stopped."""

_ENTRY = re.compile(r"^(\d+) +(\w+)\((.*)", re.MULTILINE)
_COMPILED = Path(tempfile.gettempdir()) / f"ckptconv-test-compiled-{os.getuid()}"
_PATIENCE = 120  # seconds; a traced import of torch takes its time


@dataclass(frozen=True)
class Call:
    """The call `name` that a thread makes for the `number`th time, and what it said in the clean run."""

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
    tried = subprocess.run(["strace", "-o", "/dev/null", "-e", "inject=close:error=EIO:when=9999", "true"], capture_output=True)
    return None if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.decode().strip()[-200:]}"


def require_strace() -> None:
    """Skip the test where strace cannot be used, or let it fail where CKPTCONV_REQUIRE_STRACE says that it must be."""
    if (reason := _why_not()) is not None:
        (pytest.fail if os.environ.get("CKPTCONV_REQUIRE_STRACE") else pytest.skip)(f"{reason} (CKPTCONV_REQUIRE_STRACE)")


def calls(arguments: Sequence[object], room: Path) -> list[Call]:
    """The changing calls of a clean run that concern what is in the folder `room`, in order."""
    log = _beside(room, "calls")
    done = _traced(["-y", "-s", "16", "-e", f"trace={CHANGING}"], arguments, log)
    assert done.exit == 0, done.err
    met: Counter[tuple[str, str]] = Counter()
    found = []
    for thread, name, text in _ENTRY.findall(log.read_text(errors="replace")):
        met[thread, name] += 1
        if f"{room}" in text:
            found.append(Call(name, met[thread, name], text.replace(str(room), "")))
    return found


def injected(call: Call, fault: str, arguments: Sequence[object], room: Path) -> Finished:
    """A run in which that call meets that fault."""
    log = _beside(room, "injected")
    done = _traced(["-e", f"trace={call.name}", "-e", f"inject={call.name}:{fault}:when={call.number}"], arguments, log)
    told = log.read_text(errors="replace")
    met = done.exit == STOPPED[fault] if fault in STOPPED else "(INJECTED)" in told
    assert met, f"{call} was not met: exit {done.exit} {done.err}{told[-1000:]}"
    return done


def _beside(room: Path, name: str) -> Path:
    return room.with_name(f"{room.name}.{name}")


def _traced(options: Sequence[str], arguments: Sequence[object], log: Path) -> Finished:
    """A run under strace, in a folder that is not the outputs'; what modules compile to is kept from run to run."""
    command = ["strace", "-f", "-qq", "-o", str(log), *options, *PROGRAM, *map(str, arguments)]
    env = environment(PYTHONHASHSEED="0", PYTHONPYCACHEPREFIX=str(_COMPILED), OMP_NUM_THREADS="1")
    del env["PYTHONDONTWRITEBYTECODE"]
    done = subprocess.run(command, cwd="/", env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode(), 0.0, 0)
