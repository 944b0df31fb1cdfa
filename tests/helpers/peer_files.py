"""The files that the tests of picklescan, modelscan and fickling scan, as their own tests make
them; who flags which.

    python tests/helpers/peer_files.py collect SOURCES OUT
    python tests/helpers/peer_files.py table OUT

`SOURCES` is a folder with their repositories, each under its name. Their tests run as they are,
with the scanners watched: whatever one is given is copied to `OUT`, once for each content. What
needs packages that are not installed is left out. `table` prints how many files each scanner flags.
`make families` does both.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from helpers.paths import TESTS

PEERS = {"picklescan": "tests", "modelscan": "tests", "fickling": "test"}
_STUBS = ("tensorflow", "tf_keras", "dill", "aiohttp", "requests", "keras", "h5py")
_LARGEST = 50_000_000


def main(sources: Path, out: Path) -> None:
    for peer, tests in PEERS.items():
        (out / peer).mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PEER": peer, "PEER_OUT": str(out / peer), "PYTHONPATH": str(TESTS)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "peer_files",
            "--continue-on-collection-errors",
            "--tb=no",
        ]
        subprocess.run([*command, tests], cwd=sources / peer, env=env, check=False, timeout=900)
        os.environ["PEER_OUT"] = str(out / peer)
        for path in _data_files(sources / peer / tests):
            _keep(path.read_bytes(), path.name)


def _data_files(folder: Path) -> Iterator[Path]:
    """Files that the tests have beside them, made by their own scripts."""
    names = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc")
    )
    return (path for path in names if path.stat().st_size <= _LARGEST)


def _keep(content: bytes, name: str) -> None:
    folder = Path(os.environ["PEER_OUT"])
    path = folder / f"{hashlib.sha256(content).hexdigest()[:12]}-{Path(name).name}"
    if len(content) <= _LARGEST and not any(folder.glob(f"{path.name[:12]}-*")):
        path.write_bytes(content)


def _keep_path(path: Any) -> None:
    """A file, or all files of a folder, that a scanner is given by its path."""
    found = Path(path)
    for item in [found] if found.is_file() else _data_files(found) if found.is_dir() else []:
        _keep(item.read_bytes(), item.name)


def _keep_stream(stream: Any, name: Any = "bytes.pkl", *_: Any) -> None:
    if isinstance(stream, (bytes, bytearray)):
        _keep(bytes(stream), str(name))
    elif hasattr(stream, "seek"):
        at = stream.tell()
        stream.seek(0)
        content = stream.read()
        stream.seek(at)
        _keep(content, str(name))


def _keep_pickled(pickled: Any) -> None:
    _keep(pickled.dumps(), "made.pkl")


def _watched(module: str, name: str, keep: Callable[..., None], first: int = 0) -> None:
    """Let a function, or a method of a class, keep its first argument before it runs."""
    owner: Any = importlib.import_module(module)
    *classes, last = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    real = getattr(owner, last)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            keep(*args[first : first + 2])
        except Exception as error:
            print("not kept:", error, file=sys.stderr)
        return real(*args, **kwargs)

    setattr(owner, last, call)


def _watch_picklescan() -> None:
    for name in (
        "scan_pickle_bytes",
        "scan_zip_bytes",
        "scan_numpy",
        "scan_pytorch",
        "scan_bytes",
        "scan_7z_bytes",
    ):
        _watched("picklescan.scanner", name, _keep_stream)
    for name in ("scan_file_path", "scan_directory_path"):
        _watched("picklescan.scanner", name, lambda path, *_: _keep_path(path))


def _watch_modelscan() -> None:
    for name in _STUBS:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
    _watched("modelscan.modelscan", "ModelScan.scan", lambda path, *_: _keep_path(path), first=1)
    _watched(
        "modelscan.tools.picklescanner",
        "scan_pickle_bytes",
        lambda model, *_: _keep_stream(model.get_stream()),
    )


def _watch_fickling() -> None:
    _watched(
        "fickling.analysis", "Analyzer.analyze", lambda pickled, *_: _keep_pickled(pickled), first=1
    )
    for name in ("scan_file", "scan_zip_archive"):
        _watched("fickling.loader", name, lambda path, *_: _keep_path(path))
    _watched("fickling.fickle", "Pickled.load", _keep_stream_of_fickling)


def _keep_stream_of_fickling(content: Any, *_: Any) -> None:
    _keep_stream(content if not isinstance(content, io.BytesIO) else content.getvalue())


def pytest_configure() -> None:
    {"picklescan": _watch_picklescan, "modelscan": _watch_modelscan, "fickling": _watch_fickling}[
        os.environ["PEER"]
    ]()


# ----------------------------------------------------------------------------------- who flags what


def _by_picklescan(path: Path) -> bool:
    scanner = importlib.import_module("picklescan.scanner")
    return bool(scanner.scan_file_path(str(path)).infected_files)


def _by_modelscan(path: Path) -> bool:
    return bool(
        importlib.import_module("modelscan.modelscan").ModelScan().scan(str(path))["issues"]
    )


def _by_fickling(path: Path) -> bool:
    loader = importlib.import_module("fickling.loader")
    if path.read_bytes()[:4] == b"PK\3\4":
        return any(
            not result.is_safe
            for result in loader.scan_zip_archive(str(path), graceful=True).values()
        )
    return not loader.scan_file(str(path)).is_safe


SCANNERS: dict[str, Callable[[Path], bool]] = {
    "picklescan": _by_picklescan,
    "modelscan": _by_modelscan,
    "fickling": _by_fickling,
}


def flagging(path: Path) -> set[str]:
    """Which of the scanners flag a file; one that gives up does not."""
    found = set()
    for name, scan in SCANNERS.items():
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            found |= {name} if scan(path) else set()
    return found


def collected(out: Path) -> Iterator[Path]:
    """The files of all peers."""
    return (path for peer in PEERS for path in sorted((out / peer).glob("*-*")))


def table(out: Path) -> None:
    from ckptconv import scan_checkpoint

    logging.disable()
    for peer in PEERS:
        paths = sorted((out / peer).glob("*-*"))
        flags = [flagging(path) for path in paths]
        levels = [scan_checkpoint(path).level for path in paths]
        counts = [sum(name in found for found in flags) for name in SCANNERS]
        ours = [levels.count(level) for level in ("dangerous", "unknown", "plain")]
        two = [level for found, level in zip(flags, levels, strict=True) if len(found) > 1]
        print(
            "|",
            " | ".join(map(str, (peer, len(paths), *counts, *ours, len(two), two.count("plain")))),
            "|",
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["collect", sources, out]:
            main(Path(sources).resolve(), Path(out).resolve())
        case ["table", out]:
            table(Path(out))
        case _:
            sys.exit(__doc__)
