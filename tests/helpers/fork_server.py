"""The program, imported once and forked for each run.

Usage: ``python fork_server.py SOCKET [MODULE]...``, the number of a socket that is inherited, and
what else is imported beforehand. Each byte on the socket is a request, and comes with four files:
what is asked (JSON: arguments, folder, variables, mask, limit), the stdout and the stderr of the
run, and where to tell how it has ended: "EXIT SECONDS MEMORY", the exit code (negative: the signal),
seconds of the processor, and bytes of memory.

A run is a process of its own, so runs may overlap, and nothing of one is seen by the next.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""What the system counts memory in."""


def main() -> None:
    """Import what is named, and answer requests until the other end of the socket is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_all(sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while files := _request(connection):
        if os.fork() == 0:
            connection.close()
            _guard(*files)
        for file in files:
            os.close(file)
        _wait_for_guards(os.WNOHANG)
    _wait_for_guards()


def _wait_for_guards(options: int = 0) -> None:
    """Take note of the runs that have ended, so that their time is counted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _import_all(more: list[str]) -> None:
    import ckptconv

    for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
        importlib.import_module(module.name)
    for name in more:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _request(connection: socket.socket) -> list[int]:
    """The four files of the next request; none at the end."""
    room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    _, messages, _, _ = connection.recvmsg(1, room)
    files = array.array("i")
    for _, _, data in messages:
        files.frombytes(data)
    return list(files)


def _guard(request: int, out: int, err: int, answer: int) -> NoReturn:
    """Run one request in a process of its own, and tell how it ended."""
    with open(request, encoding="ascii") as file:
        asked = json.load(file)
    child = os.fork()
    if child == 0:
        os.close(answer)
        _become(asked, out, err)
        _run()
    os.close(out)
    os.close(err)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(asked["limit"])
    _, status, usage = os.wait4(child, 0)
    busy = usage.ru_utime + usage.ru_stime
    memory = usage.ru_maxrss * RSS_UNIT
    os.write(answer, f"{os.waitstatus_to_exitcode(status)} {busy} {memory}".encode())
    os._exit(0)


def _become(asked: dict[str, Any], out: int, err: int) -> None:
    """Have the arguments, the folder, the variables and the streams that the request says."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for file, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        os.dup2(file, number)
        os.close(file)
        _open_stream(number, name)
    os.umask(asked["umask"])
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    program = sys.modules["ckptconv.__main__"].__file__
    sys.argv = [str(program), *asked["arguments"]]
    sys.path[0] = os.getcwd()  # as `python -m` has it


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
        buffering=1 if name == "stderr" else -1,
        closefd=False,
    )
    setattr(sys, name, made)
    setattr(sys, f"__{name}__", made)


def _run() -> NoReturn:
    """Run the program, and end as Python would."""
    from ckptconv.__main__ import main as program

    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
