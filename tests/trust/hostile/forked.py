"""The program in a process of its own for every command, without starting Python for each.

A server process imports the whole program once, and forks for each command; the child is the
program with everything imported. So a command takes some milliseconds, and time, peak memory, exit
code and output are still those of its own process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.program import RSS_UNIT, Finished, environment

# Commands come as lines of JSON on stdin: argv, cwd, seconds allowed. Outputs go to the files that
# the server was started with.
_SERVER = """
import importlib, json, os, pkgutil, resource, signal, sys, time
import ckptconv
for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import tempfile
from ckptconv.cli.main import main
out, err = sys.argv[1:]
for line in iter(sys.stdin.readline, ""):
    given = json.loads(line)
    begin = time.monotonic()
    pid = os.fork()
    if not pid:
        break
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.alarm(given["limit"])
    _, status, usage = os.wait4(pid, 0)
    signal.alarm(0)
    print(json.dumps([
        os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, time.monotonic() - begin, usage.ru_maxrss
    ]), flush=True)
else:
    sys.exit()
os.chdir(given["cwd"])
os.environ["TMPDIR"] = tempfile.tempdir = given["tmp"]
with open(os.devnull) as nothing:
    os.dup2(nothing.fileno(), 0)
for number, name in ((1, out), (2, err)):
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, number)
    os.close(fd)
sys.argv = ["ckptconv", *given["argv"]]
main()
"""


class Server:
    """The process that forks. `run` is like `program.run`, but its seconds are the processor's: the
    machine may be busy.
    """

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-c", _SERVER, str(self._out), str(self._err)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(OMP_NUM_THREADS="1"),
            text=True,
        )
        self.idle_rss = self.run("--version", cwd=folder, tmp=folder).rss
        """The peak memory of a child that does nothing."""

    def run(self, *arguments: object, cwd: Path, tmp: Path, limit: int = 300) -> Finished:
        """Run a command in `cwd`, with `tmp` for temporary files; it is killed after `limit`
        seconds by the clock.
        """
        given = {
            "argv": [str(part) for part in arguments],
            "cwd": str(cwd),
            "tmp": str(tmp),
            "limit": limit,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server is gone"
        code, busy, _, rss = json.loads(answer)
        return Finished(code, self._out.read_text(), self._err.read_text(), busy, rss * RSS_UNIT)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@contextmanager
def server() -> Iterator[Server]:
    """A server while it is needed."""
    with tempfile.TemporaryDirectory(prefix="ckptconv-test-") as folder:
        made = Server(Path(folder))
        try:
            yield made
        finally:
            made.close()
