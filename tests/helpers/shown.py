"""Commands of the program run one after another in forks of one process, on a terminal or into
pipes: what each has shown.

Usage: ``python shown.py COMMANDS.json SHOWN.json``. A command is ``{"on": "terminal" or "pipe",
"arguments": [...]}``; of each is told its exit code and, in Latin-1, the bytes of stdout and stderr
(on a terminal both are stdout).
"""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

from fork_server import import_all  # this is a script beside it


def _child(arguments: list[str]) -> None:
    from ckptconv.cli import main as cli

    sys.argv[1:] = arguments
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", write_through=True)
        for fd in (1, 2)
    )
    code = 70
    try:
        cli.main()
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(bool(done.code))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _read(fd: int) -> bytes:
    found = b""
    while True:
        try:
            piece = os.read(fd, 1 << 16)
        except OSError:  # a terminal whose other end is closed
            return found
        if not piece:
            return found
        found += piece


def on_terminal(arguments: list[str]) -> tuple[int, bytes, bytes]:
    pid, fd = pty.fork()
    if not pid:
        _child(arguments)
    out = _read(fd)
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out, b""


def into_pipes(arguments: list[str]) -> tuple[int, bytes, bytes]:
    out, err = os.pipe(), os.memfd_create("stderr")
    pid = os.fork()
    if not pid:
        os.dup2(out[1], 1)
        os.dup2(err, 2)
        os.close(out[0])
        os.close(out[1])
        _child(arguments)
    os.close(out[1])
    found = _read(out[0])
    os.close(out[0])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = os.pread(err, 1 << 24, 0)
    os.close(err)
    return code, found, said


RUN: dict[str, Callable[[list[str]], tuple[int, bytes, bytes]]] = {
    "terminal": on_terminal,
    "pipe": into_pipes,
}


def main() -> None:
    import_all(["torch"])  # doctor asks it
    shown = []
    for command in json.loads(Path(sys.argv[1]).read_text()):
        code, out, err = RUN[command["on"]](command["arguments"])
        shown.append(
            {**command, "code": code, "out": out.decode("latin-1"), "err": err.decode("latin-1")}
        )
    Path(sys.argv[2]).write_text(json.dumps(shown))


if __name__ == "__main__":
    main()
