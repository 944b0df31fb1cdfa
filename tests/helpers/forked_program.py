"""The program, imported once and forked for each run: a line on stdin is a request, one on stdout
an answer, both JSON.

A child stops itself (SIGSTOP) before it does anything, so that a tracer can be attached; it is told
of by its `pid`, and when it has ended by its `exit` code (negative: the signal). ``warm`` runs it
in this process: all modules are imported then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any


def run(arguments: list[str]) -> int:
    """The exit code of the program's main function."""
    from ckptconv.__main__ import main

    sys.argv = ["ckptconv", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(arguments: list[str], out: str, err: str) -> None:
    for path, fd in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, fd)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSTOP)
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "warm" in request:
            print(json.dumps({"exit": run(request["warm"])}), file=answers)
            continue
        if (pid := os.fork()) == 0:
            child(request["run"], request["out"], request["err"])
        os.waitpid(pid, os.WUNTRACED)
        print(json.dumps({"pid": pid}), file=answers)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), file=answers)


if __name__ == "__main__":
    serve()
