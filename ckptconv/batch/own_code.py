"""The version of this package's code: all who work on a batch must have the same."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

from ckptconv.support.errors import CheckpointError


@cache
def code_version() -> str:
    """The version of this package, with a checksum of its code.

    >>> code_version().partition("+")[0]
    '0.1.0'
    """
    from ckptconv import __version__

    home, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted([*home.rglob("*.py"), *home.rglob("*.txt")]):  # names that are judged too
        raw = path.read_bytes().replace(b"\r\n", b"\n")
        found.update(f"{path.relative_to(home).as_posix()}\0".encode())
        found.update(hashlib.sha256(raw).digest())
    return f"{__version__}+{found.hexdigest()[:12]}"


def other_code(driver: str) -> CheckpointError:
    """The error where a worker has other code than the driver, of which `driver` tells."""
    what = f"the worker on {platform.node()} has ckptconv {code_version()}, but {driver}"
    return CheckpointError(what, hint="install the same version on all machines")
