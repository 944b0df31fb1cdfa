"""The program, imported once and forked for each run.

Usage: ``python fork_server.py SOCKET [MODULE]...``, the number of a socket that is inherited, and
what else is imported beforehand. Each byte on the socket is a request, and comes with five files:
what is asked (JSON: arguments, folder, variables, mask, limits, code to be run first), the stdin,
stdout and stderr of the run, and where to tell how it has ended: "EXIT SECONDS MEMORY", the exit
code (negative: the signal), seconds of the processor, and bytes of memory. A stdin that is a
terminal is that of the process.

A run is a process of its own, so runs may overlap, and nothing of one is seen by the next.
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import resource
import selectors
import signal
import socket
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""What the system counts memory in."""


def main() -> None:
    """Import what is named, and answer requests until the other end of the socket is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_all(sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(connection, _woken_by_ends())


def _woken_by_ends() -> int:
    """A pipe that has something to read whenever a process has ended."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


@dataclass
class _Running:
    """Where to tell how a run has ended, and when it is killed, if it is not yet."""

    answer: int
    deadline: float
    killed: bool = False


def _serve(connection: socket.socket, ends: int) -> None:
    running: dict[int, _Running] = {}
    asking: list[Any] = [connection]
    while asking or running:
        waiting = [run.deadline for run in running.values() if not run.killed]
        left = max(0.0, min(waiting) - time.monotonic()) if waiting else None
        ready = _ready([ends, *asking], left)  # not select(2), which knows no number above 1023
        if ends in ready:
            os.read(ends, 1 << 12)
        if connection in ready:
            if files := _request(connection):
                pid, started = _start(files)
                running[pid] = started
            else:
                asking = []
        _tell_ends(running)
        for pid, run in running.items():
            if run.deadline <= time.monotonic() and not run.killed:
                os.kill(pid, signal.SIGKILL)
                run.killed = True


def _ready(files: list[Any], seconds: float | None) -> list[Any]:
    """Those of `files` that can be read, when one can or the time is over."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def _tell_ends(running: dict[int, _Running]) -> None:
    """Answer for the runs that have ended."""
    while running:
        pid, status, usage = os.wait3(os.WNOHANG)
        if not pid:
            return
        busy, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT
        answer = running.pop(pid).answer
        os.write(answer, f"{os.waitstatus_to_exitcode(status)} {busy} {memory}".encode())
        os.close(answer)


def _start(files: list[int]) -> tuple[int, _Running]:
    """Fork for one request."""
    request, *streams, answer = files
    with open(request, encoding="ascii") as file:
        asked = json.load(file)
    pid = os.fork()
    if pid == 0:
        _become(asked, *streams)
        _run(asked.get("before", ""))
    for stream in streams:
        os.close(stream)
    return pid, _Running(answer, time.monotonic() + asked["limit"])


def import_all(more: list[str]) -> None:
    """Import the whole program, so that no fork need do so, and what is named."""
    import ckptconv

    for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
        importlib.import_module(module.name)
    for name in more:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _request(connection: socket.socket) -> list[int]:
    """The five files of the next request; none at the end."""
    room = socket.CMSG_SPACE(5 * array.array("i").itemsize)
    _, messages, _, _ = connection.recvmsg(1, room)
    files = array.array("i")
    for _, _, data in messages:
        files.frombytes(data)
    return list(files)


def _become(asked: dict[str, Any], stdin: int, out: int, err: int) -> None:
    """Have the arguments, the folder, the variables and the streams that the request says."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate((stdin, out, err)):
        os.dup2(file, number)
    os.closerange(3, 1 << 10)
    if os.isatty(0):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _open_stream(1, "stdout")
    _open_stream(2, "stderr")
    os.umask(asked["umask"])
    for name, most in asked.get("rlimits", {}).items():
        resource.setrlimit(getattr(resource, name), (most, most))
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    program = sys.modules["ckptconv.__main__"].__file__
    sys.argv = [str(program), *asked["arguments"]]
    sys.path[0] = str(Path.cwd())  # as `python -m` has it


def _open_stream(number: int, name: str) -> None:
    """Make sys.stdout or sys.stderr anew, as Python does when it starts: the one there may have
    been of another kind of file.
    """
    before = getattr(sys, name)
    made = open(  # noqa: SIM115 (it stays)
        number,
        "w",
        encoding=before.encoding,
        errors=before.errors,
        buffering=1 if name == "stderr" or os.isatty(number) else -1,
        closefd=False,
    )
    setattr(sys, name, made)
    setattr(sys, f"__{name}__", made)


def _run(before: str) -> NoReturn:
    """Run the program, with some code before it, and end as Python would."""
    from ckptconv.__main__ import main as program

    code = 0
    try:
        exec(before, {"__name__": "before"})
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # closed
            pass
        except OSError:
            code = 120
    os._exit(code)


if __name__ == "__main__":
    main()
