"""The program, imported once and forked for its runs.

Usage: ``python fork_server.py SOCKET [MODULE]...``, the number of a socket that is inherited, and
what else is imported beforehand. Each byte on the socket is a request, and comes with five files:
what is asked (JSON: arguments, folder, variables, mask, limits, code to be run first), the stdin,
stdout and stderr of the run, and where to tell how it has ended: "EXIT SECONDS MEMORY", the exit
code (negative: the signal), seconds of the processor, and bytes of memory. A stdin that is a
terminal is that of the process.

A run has a process to itself while it lasts, so runs may overlap. One that may be "shared" gets a
process that has had others before it, for most of a run's time is taken by what is touched first
after a fork; its memory is not told (nan). A process in which a run has left anything gets no other
run.
"""

from __future__ import annotations

import array
import contextvars
import fcntl
import functools
import gc
import importlib
import json
import math
import os
import pkgutil
import resource
import selectors
import signal
import socket
import sys
import tempfile
import termios
import threading
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


RUNS = 40
"""How many runs a process may have."""


@dataclass
class _Child:
    """A process, and its run, if it has one: where to tell how that has ended, and when it is
    killed, if it is not yet. `asked` is what it gets another one by, if it takes one.
    """

    answer: int
    deadline: float
    asked: socket.socket | None
    killed: bool = False
    told: float = 0.0  # seconds of earlier runs

    def tell(self, code: int, seconds: float, memory: float) -> None:
        """Answer for the run."""
        memory = math.nan if self.told else memory  # also of the last of several runs
        if self.answer >= 0:
            os.write(self.answer, f"{code} {seconds - self.told} {memory}".encode())
            os.close(self.answer)
        self.answer, self.told = -1, seconds


_Children = dict[int, _Child]
"""By their pid."""


def _serve(connection: socket.socket, ends: int) -> None:
    children: _Children = {}
    asking: list[Any] = [connection]
    while asking or any(child.answer >= 0 for child in children.values()):
        busy = [child for child in children.values() if child.answer >= 0]
        waiting = [child.deadline for child in busy if not child.killed]
        left = max(0.0, min(waiting) - time.monotonic()) if waiting else None
        telling = {child.asked: child for child in busy if child.asked}
        # not select(2), which knows no number above 1023
        ready = _ready([ends, *telling, *asking], left)
        if ends in ready:
            os.read(ends, 1 << 12)
        for source in telling.keys() & set(ready):
            _hear(telling[source])
        if connection in ready:
            if files := _received(connection, 5):
                _start(files, children)
            else:
                asking = []
        _tell_ends(children)
        for pid, child in children.items():
            if child.answer >= 0 and child.deadline <= time.monotonic() and not child.killed:
                os.kill(pid, signal.SIGKILL)
                child.killed = True


def _ready(files: list[Any], seconds: float | None) -> list[Any]:
    """Those of `files` that can be read, when one can or the time is over."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def _hear(child: _Child) -> None:
    """Answer for a run whose process takes another one; the end of a process tells of its last."""
    assert child.asked is not None
    if told := child.asked.recv(1 << 10):
        code, seconds = told.split()
        child.tell(int(code), float(seconds), math.nan)
    else:
        child.asked.close()
        child.asked = None


def _tell_ends(children: _Children) -> None:
    """Answer for the processes that have ended."""
    while children:
        pid, status, usage = os.wait3(os.WNOHANG)
        if not pid:
            return
        child = children.pop(pid)
        if child.asked:
            child.asked.close()
        seconds, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT
        child.tell(os.waitstatus_to_exitcode(status), seconds, memory)


def _start(files: list[int], children: _Children) -> None:
    """Have a request done by a process that waits for one, or by a new one."""
    *request, answer = files
    asked = _asked(request[0])
    deadline = time.monotonic() + asked["limit"]
    waiting = [child for child in children.values() if child.asked and child.answer < 0]
    if waiting and asked["shared"]:
        child = waiting[0]
        child.answer, child.deadline = answer, deadline
        os.lseek(request[0], 0, os.SEEK_SET)
        socket.send_fds(child.asked, [b"."], request)
    else:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _take_runs(request, theirs.fileno())
        theirs.close()
        children[pid] = _Child(answer, deadline, ours)
    for stream in request:
        os.close(stream)


_ASKED_BY = 3
"""The number of the socket over which a process gets its runs."""


def _take_runs(request: list[int], connection: int) -> NoReturn:
    """Have this run, and others if it is shared, until one leaves something behind."""
    os.dup2(connection, _ASKED_BY)
    modules = len(sys.modules)
    for number in range(1, RUNS + 1):
        asked = _asked(request[0])
        _become(asked, *request[1:])
        code = contextvars.copy_context().run(_run, asked["before"])
        if not asked["shared"] or code not in (0, 1, 2) or len(sys.modules) > modules:
            break
        _forget()
        if number == RUNS or not _is_clean():
            break
        _open_nothing()
        os.write(_ASKED_BY, f"{code} {_seconds()}".encode())
        with socket.socket(fileno=os.dup(_ASKED_BY)) as asking:
            request = _received(asking, 4)
        if not request:
            break
    os._exit(code)


def _forget() -> None:
    """Undo what a run does to the modules of the program, so that the next one finds them new."""
    for cache in _CACHES:
        cache.cache_clear()
    for container, before in _CONTAINERS:
        if len(container) != len(before):
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
    gc.collect()


def _is_clean() -> bool:
    """Whether a run has left neither threads nor processes nor open files."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        files = len(list(Path("/dev/fd").iterdir())) - 1  # one is that of the listing
        return threading.active_count() == 1 and files == _ASKED_BY + 1
    return False


def _open_nothing() -> None:
    """Let go of the files of a run: who reads from them is waiting for that."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


def _seconds() -> float:
    """Of the processor, as the system tells them at the end of a process."""
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(each.ru_utime + each.ru_stime for each in used)


def import_all(more: list[str]) -> None:
    """Import the whole program, so that no fork need do so, and what is named."""
    import ckptconv

    for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
        importlib.import_module(module.name)
    for name in more:
        importlib.import_module(name)
    _find_what_changes()
    gc.collect()
    gc.freeze()


_CACHES: list[Any] = []
_CONTAINERS: list[tuple[Any, Any]] = []
"""What a run may change in the modules of the program: caches; lists and tables, with what is in
them before it. It puts a finder of modules before others, too.
"""


def _find_what_changes() -> None:
    _CONTAINERS.append((sys.meta_path, sys.meta_path.copy()))
    ours = [module for name, module in sys.modules.items() if name.startswith("ckptconv.")]
    for value in (value for module in ours for value in vars(module).values()):
        if isinstance(value, functools._lru_cache_wrapper):
            _CACHES.append(value)
        elif type(value) in (list, dict, set):
            _CONTAINERS.append((value, value.copy()))


def _received(connection: socket.socket, count: int) -> list[int]:
    """The files of the next request; none at the end."""
    room = socket.CMSG_SPACE(count * array.array("i").itemsize)
    _, messages, _, _ = connection.recvmsg(1, room)
    files = array.array("i")
    for _, _, data in messages:
        files.frombytes(data)
    return list(files)


def _asked(request: int) -> dict[str, Any]:
    os.lseek(request, 0, os.SEEK_SET)
    with open(request, encoding="ascii", closefd=False) as file:
        return json.load(file)


def _become(asked: dict[str, Any], stdin: int, out: int, err: int) -> None:
    """Have the arguments, the folder, the variables and the streams that the request says."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate((stdin, out, err)):
        os.dup2(file, number)
    os.closerange(_ASKED_BY + 1, 1 << 10)
    if os.isatty(0):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _open_stream(1, "stdout")
    _open_stream(2, "stderr")
    os.umask(asked["umask"])
    for name, most in asked["rlimits"].items():
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


def _run(before: str) -> int:
    """Run the program, with some code before it; the code with which Python would end."""
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
    return code


if __name__ == "__main__":
    main()
