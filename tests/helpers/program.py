"""The program, run on arguments: what it answered.

``run`` forks it from a process that has it imported, which takes some milliseconds. Where a start
of its own matters (what it imports, its memory, how Python is started), ``run_process`` starts it.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from helpers import fork_server
from helpers.fork_server import RSS_UNIT
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
import os, signal, subprocess, sys
report, limit, *command = sys.argv[1:]
child = subprocess.Popen(command)
signal.signal(signal.SIGALRM, lambda *_: child.kill())
signal.alarm(int(limit))
_, status, usage = os.wait4(child.pid, 0)
child.returncode = os.waitstatus_to_exitcode(status)
with open(report, "w") as file:
    print(child.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, file=file)
"""


@dataclass(frozen=True)
class Finished:
    """A run of the program: exit code (negative: the signal that ended it), output, seconds of the
    processor (the machine may be busy), peak memory in bytes (nan: its process had other runs).
    """

    exit: int
    out: str
    err: str
    seconds: float
    rss: float

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


def _texts(arguments: Sequence[object]) -> list[str]:
    return [
        os.fsdecode(part) if isinstance(part, (Path, bytes)) else str(part) for part in arguments
    ]


# ------------------------------------------------------------------------------------ a fork of it

OF_THE_START = ("PYTHON", "LANG", "LC_")
"""How the names of the variables begin that Python reads when it starts."""


class ForkServer:
    """A process that has the program imported, and `modules`; runs are in forks of it."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, fork_server.__file__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment(OMP_NUM_THREADS="1"),
            )

    def run(self, *arguments: object, **options: Any) -> Finished:
        """Run the program on these arguments; the options are those of `start`."""
        out, err, ended = self.raw(*arguments, **options)
        code, seconds, rss = _ending(ended)
        return Finished(code, out.decode(), err.decode(), seconds, rss)

    def raw(
        self,
        *arguments: object,
        stdout: int | None = None,
        stdin: bytes | None = None,
        **options: Any,
    ) -> list[bytes]:
        """What a run wrote to stdout (nothing, if that is given) and stderr, and how it ended; it
        reads `stdin` from a pipe.
        """
        out, err = os.pipe(), os.pipe()
        with piped(stdin) if stdin is not None else open(os.devnull, "rb") as nothing:
            streams = nothing.fileno(), out[1] if stdout is None else stdout, err[1]
            answer = self.start(*arguments, streams=streams, **options)
        os.close(out[1])
        os.close(err[1])
        return _read_all(out[0], err[0], answer)

    def start(
        self,
        *arguments: object,
        streams: tuple[int, int, int],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        limit: int = 60,
        rlimits: Mapping[str, int] | None = None,
        before: str = "",
        alone: bool = False,
    ) -> int:
        """Begin a run in `cwd` that has these files as its stdin, stdout and stderr, and `env`
        added to the usual variables; it is killed after `limit` seconds by the clock. Given back
        is a pipe that tells when and how it has ended (`_ending`).

        `rlimits` are those of the system by their names: ``RLIMIT_FSIZE``, ``RLIMIT_NOFILE``;
        `before` is Python code that is run first, in the same process. With those, on a terminal,
        with an address, and where it is to be `alone`, a run has a process of its own; only there
        is its memory told.
        """
        assert not any(name.startswith(OF_THE_START) for name in env or {}), "run_process does it"
        texts = _texts(arguments)
        of_its_own = alone or before or rlimits or os.isatty(streams[0])
        asked = {
            "arguments": texts,
            "shared": not of_its_own and not any("://" in text for text in texts),
            "cwd": str(cwd),
            "env": environment(**(env or {})),
            "umask": _umask(),
            "limit": limit,
            "rlimits": dict(rlimits or {}),
            "before": before,
        }
        answer, theirs = os.pipe()
        with tempfile.TemporaryFile("w+", encoding="ascii") as request:
            json.dump(asked, request)
            request.flush()
            request.seek(0)
            socket.send_fds(self._socket, [b"."], [request.fileno(), *streams, theirs])
        os.close(theirs)
        return answer

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._process.wait(10)


def _ending(told: bytes) -> tuple[int, float, float]:
    """How a run has ended: exit code, seconds, memory."""
    global _spent
    assert told, "the process that forks the program is gone"
    code, seconds, rss = told.split()
    _spent += float(seconds)
    return int(code), float(seconds), float(rss)


_spent = 0.0


def spent() -> float:
    """Seconds of the processor that all forks of this process have taken."""
    return _spent


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _read_all(*files: int) -> list[bytes]:
    """All that comes from some pipes, which are closed then."""
    found = {file: bytearray() for file in files}
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                piece = _piece(key.fd)
                found[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [bytes(found[file]) for file in files]


_THERE = (
    "numpy.ma", "ml_dtypes", "safetensors", "botocore.session", "click._textwrap", "unicodedata",
    "encodings.idna", "encodings.unicode_escape", "xxhash", "zstandard",
)  # fmt: skip
NEEDED = tuple(name for name in _THERE if find_spec(name.partition(".")[0]))
_OF_TORCH = ("torch", "torch.distributed.checkpoint", "torch._dynamo")
TORCH = NEEDED if find_spec("torch") is None else (*NEEDED, *_OF_TORCH)
"""What a run would import by itself, the client of S3 too, which takes a quarter of a second."""
ASKS_TORCH = {"devices", "doctor", "--model", "dcp", "auto"}
"""Words of command lines that need torch; such a run is forked from a process that has it."""


def _piece(file: int) -> bytes:
    """Some more of a pipe or a terminal; nothing at its end."""
    try:
        return os.read(file, 1 << 16)
    except OSError:  # a terminal whose other end is closed
        return b""


@functools.cache
def forks_of(*modules: str) -> ForkServer:
    """The process that runs are forked from, which has these modules imported."""
    _running.append(ForkServer(*modules))
    return _running[-1]


_running: list[ForkServer] = []


def close_servers() -> None:
    """End the processes that `run` forks from; conftest.py does it at the end of all tests."""
    while _running:
        _running.pop().close()
    forks_of.cache_clear()


def _server_for(arguments: Sequence[object]) -> ForkServer:
    with_torch = not ASKS_TORCH.isdisjoint(_texts(arguments))
    return forks_of(*(TORCH if with_torch else NEEDED))


@contextmanager
def piped(data: bytes) -> Iterator[IO[bytes]]:
    """The end of a pipe from which `data` can be read."""
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as file:
            file.write(data)

    threading.Thread(target=write, daemon=True).start()
    with os.fdopen(reading, "rb") as file:
        yield file


def run(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, **options: Any
) -> Finished:
    """Run the program in `cwd` with `env` added to the usual variables, forked from a process that
    has it imported; the options are those of `ForkServer.start`.
    """
    return _server_for(arguments).run(*arguments, cwd=cwd, env=env, **options)


def run_bytes(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, stdout: int | None = None
) -> tuple[int, bytes, str]:
    """As `run`, of a program whose stdout is not text, or is this file: the exit code, stdout and
    stderr.
    """
    server = _server_for(arguments)
    out, err, ended = server.raw(*arguments, cwd=cwd, env=env, stdout=stdout)
    return _ending(ended)[0], out, err.decode()


def run_on_terminal(
    *arguments: object,
    cwd: Path,
    columns: int,
    rows: int = 40,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """As `run`, on a terminal of this size: the exit code, and what the terminal is given."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    settings = termios.tcgetattr(terminal)
    settings[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    answer = _server_for(arguments).start(
        *arguments,
        streams=(terminal,) * 3,
        cwd=cwd,
        env={"TERM": "xterm", "COLUMNS": "", **(env or {})},
    )
    os.close(terminal)
    shown, ended = _read_all(ours, answer)
    return _ending(ended)[0], shown.decode().replace("\r\n", "\n")


# ---------------------------------------------------------------------------- a process of its own


def run_process(
    *arguments: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    limit: int = 60,
    command: Sequence[str] = PROGRAM,
) -> Finished:
    """Start the program in `cwd` with `env` added to the usual variables; it is killed after
    `limit` seconds.
    """
    with tempfile.NamedTemporaryFile("r", prefix="ckptconv-test-") as report:
        launcher = [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, report.name, str(limit)),
            *command,
            *_texts(arguments),
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
        int(code), done.stdout.decode(), done.stderr.decode(), float(seconds), int(rss) * RSS_UNIT
    )


@functools.cache
def idle_rss() -> int:
    """The peak memory of the program when it does nothing."""
    return run_process("--version", cwd=ROOT).rss


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
