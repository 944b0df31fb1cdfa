"""The program on a system that it does not run on: without what only POSIX has, or with the manners
of Windows.

    python other_systems.py SYSTEM < requests

SYSTEM is ``here`` (nothing is changed), ``bare`` (the names in data/posix_only.txt are gone, and so
are the modules) or ``windows``: those are gone, and

- a folder cannot be opened, and a file that is opened without O_BINARY is an error of the program;
- a file that is open or mapped here can be neither replaced nor renamed nor removed, nor can a
  folder with such a file in it;
- a rename replaces nothing;
- a descriptor that cannot be written to cannot be synced;
- lines that are printed end in CR and LF;
- there are O_BINARY, O_TEMPORARY and msvcrt, whose locks are real ones.

What remains POSIX: paths, `os.name`, `sys.platform`, and the standard library, which was imported
before.

A request is a JSON list: the arguments of the program, or ``["python", code]``. The answers are one
JSON list of exit code, stdout and stderr each; the streams are in the encoding of
CKPTCONV_TEST_ENCODING, and given in hexadecimal digits.
"""

from __future__ import annotations

import builtins
import errno
import importlib.util
import io
import os
import signal
import sys
import types
from typing import Any

from helpers.paths import DATA

NAMES = DATA / "posix_only.txt"
STANDARD = """
    asyncio concurrent.futures ctypes email inspect json logging multiprocessing pathlib platform
    random selectors shutil socket subprocess tempfile threading unittest.mock urllib.request uuid
    zipfile
"""
FRIENDS = (
    "click",
    "rich.console",
    "rich.progress",
    "numpy",
    "ml_dtypes",
    "safetensors.numpy",
    "isal.isal_zlib",
)
TORCH = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch._dynamo",
)
MSVCRT: Any = types.ModuleType("msvcrt")
_O_BINARY, _O_TEMPORARY = 1 << 28, 1 << 29


def posix_only() -> list[str]:
    """The dotted names and the modules that Windows lacks."""
    return [line for line in NAMES.read_text().splitlines() if line and not line.startswith("#")]


def take_away() -> None:
    """Remove what only POSIX has."""
    import ctypes
    import shutil

    statvfs = os.statvfs
    for name in posix_only():
        module, _, attribute = name.rpartition(".")
        if not module:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it is an ImportError from now on
        elif module in ("os", "signal", "time") and hasattr(sys.modules[module], attribute):
            delattr(sys.modules[module], attribute)

    def disk_usage(path: Any) -> Any:
        found = statvfs(path)
        size = found.f_frsize
        return types.SimpleNamespace(total=found.f_blocks * size, free=found.f_bavail * size)

    shutil.disk_usage = disk_usage  # type: ignore[assignment]
    real = ctypes.CDLL

    class CDLL(real):  # type: ignore[valid-type, misc]
        def __init__(self, name: Any, *given: Any, **named: Any) -> None:
            if name is None:
                raise TypeError("a DLL needs a name")
            super().__init__(name, *given, **named)

    ctypes.CDLL = CDLL  # type: ignore[misc]


# ------------------------------------------------------------------------------------------ Windows


def in_use(path: Any) -> bool:
    """Whether this process has the file open or mapped, or one in the folder."""
    real = os.path.realpath(path)
    held = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 (pathlib is not there yet)
        try:
            held.add(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115
        except OSError:
            continue
    with builtins.open("/proc/self/maps") as maps:
        held.update(line.split(None, 5)[5].rstrip("\n") for line in maps if "/" in line)
    return any(other == real or other.startswith(real + os.sep) for other in held)


def refused(path: Any) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def behave_like_windows() -> None:
    """Change the functions of `os`, before anything else has taken them."""
    import fcntl

    class Builtin:
        """A function that is not a method when a class keeps it, as those of `os` are not (pathlib,
        in Python 3.10).
        """

        def __init__(self, function: Any) -> None:
            self.__call = function

        def __call__(self, *given: Any, **named: Any) -> Any:
            return self.__call(*given, **named)

    opened, fsync, access = os.open, os.fsync, os.O_ACCMODE

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        assert flags & _O_BINARY or "ckptconv/" not in sys._getframe(1).f_code.co_filename, (
            f"{path} is opened as text"
        )
        if dir_fd is None and os.path.isdir(path):  # noqa: PTH112
            raise refused(path)
        return opened(path, flags & ~(_O_BINARY | _O_TEMPORARY), mode, dir_fd=dir_fd)

    def fsync_(fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & access == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        fsync(fd)

    def guarded(name: str, *, replaces: bool) -> None:
        real = getattr(os, name)

        def changed(path: Any, *others: Any, **named: Any) -> None:
            if not replaces and others and os.path.lexists(others[0]):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(others[0]))
            for one in (path, *others):
                if (
                    isinstance(one, (str, bytes, os.PathLike))
                    and named.get("dir_fd") is None
                    and in_use(one)
                ):
                    raise refused(one)
            real(path, *others, **named)

        setattr(os, name, Builtin(changed))

    def locking(fd: int, mode: int, nbytes: int) -> None:
        assert (mode, nbytes) == (2, 1)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refused("the lock") from None

    os.open, os.fsync = open_, fsync_  # type: ignore[assignment]
    for name, replaces in (
        ("rename", False),
        ("replace", True),
        ("unlink", True),
        ("remove", True),
        ("rmdir", True),
    ):
        guarded(name, replaces=replaces)
    os.O_BINARY, os.O_TEMPORARY = _O_BINARY, _O_TEMPORARY  # type: ignore[attr-defined]
    signal.SIGBREAK = signal.SIGUSR1  # type: ignore[attr-defined]
    MSVCRT.locking, MSVCRT.LK_NBLCK = locking, 2


def wanted_of_torch(requests: list[list[str]]) -> tuple[str, ...]:
    """What would be imported of torch, which it can only be while all names are there."""
    asked = " ".join(word for request in requests for word in request)
    if importlib.util.find_spec("torch") is None:
        return ()
    if any(word in asked for word in ("dcp", "load_portable")):
        return TORCH
    return ("torch",) if any(word in asked for word in ("torch", "doctor", "devices")) else ()


def become(system: str, torch: tuple[str, ...]) -> None:
    """Make this process one on another system."""
    imports = [*STANDARD.split(), *FRIENDS, *torch]
    if system == "windows":
        behave_like_windows()
        if sys.version_info < (3, 11):
            del sys.modules["pathlib"]  # which keeps the functions of `os` that it finds
    for name in imports:
        importlib.import_module(name)
    if system != "here":
        take_away()
    if system == "windows":
        # not before: the standard library would take this for Windows
        sys.modules["msvcrt"] = MSVCRT


# ----------------------------------------------------------------------------------------- requests


def answer(arguments: list[str], encoding: str) -> tuple[int, str, str]:
    """Run one request."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(raw, encoding, newline="\r\n" if "msvcrt" in sys.modules else None)
        for raw in (out, err)
    )
    try:
        if arguments[0] == "python":
            exec(arguments[1], {"__name__": "requests"})
            code = 0
        else:
            code = program(arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = -1
    sys.stdout.flush()
    sys.stderr.flush()
    told = code, out.getvalue().hex(), err.getvalue().hex()
    sys.stdout, sys.stderr = streams  # from here on, the others and what they wrote into are closed
    return told


def program(arguments: list[str]) -> int:
    """The exit code of the program's main function."""
    from ckptconv.__main__ import main

    sys.argv = ["ckptconv", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    import json

    requests = json.load(sys.stdin)
    become(sys.argv[1], wanted_of_torch(requests))
    encoding = os.environ.get("CKPTCONV_TEST_ENCODING", "utf-8")
    json.dump([answer(request, encoding) for request in requests], sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # the interpreter does not end well without its names


if __name__ == "__main__":
    main()
