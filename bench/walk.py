"""What one small conversion enters: functions and modules of ckptconv, stat calls on its input,
passes over its tree.

`python bench/walk.py` prints the figures; with `--list` the functions too.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

SOURCE = "in.pt"


def make_source(folder: Path) -> None:
    """A checkpoint of four tensors under the names of DDP, written by ckptconv itself."""
    from ckptconv.cli.main import main

    arrays = {f"module.l{number}.weight": np.ones((3, 4), np.float32) for number in range(4)}
    np.savez(folder / "in.npz", **arrays)
    call(main, ["convert", str(folder / "in.npz"), str(folder / SOURCE), "--keys", "keep", "-q"])


def call(main: Any, words: list[str]) -> None:
    """Run the command line in this process."""
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise


class Walk:
    """Counts the functions that are entered."""

    def __init__(self) -> None:
        self.entered: Counter[CodeType] = Counter()
        self.stats = 0
        self._going: set[FrameType] = set()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """What `sys.setprofile` calls."""
        if event != "call" or "/ckptconv/" not in frame.f_code.co_filename:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            if frame in self._going:
                return  # a generator goes on: it is no second pass
            self._going.add(frame)
        self.entered[frame.f_code] += 1

    def audit_stat(self, name: str) -> Any:
        """A function of `os` that counts its calls on the input."""
        original = getattr(os, name)

        def counted(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).endswith(SOURCE):
                self.stats += 1
            return original(path, *args, **options)

        return counted


def main() -> None:
    """Print the figures."""
    is_listed = "--list" in sys.argv
    from ckptconv.cli.main import main as program

    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        make_source(folder)
        walk = Walk()
        for name in ("stat", "lstat"):
            setattr(os, name, walk.audit_stat(name))
        words = ["strip-module", str(folder / SOURCE), str(folder / "out.pt"), "-q"]
        sys.setprofile(walk.profile)
        try:
            call(program, words)
        finally:
            sys.setprofile(None)
    # bodies of modules and classes are no functions: their names are not optimized
    codes = [code for code in walk.entered if code.co_flags & inspect.CO_OPTIMIZED]
    modules = {code.co_filename for code in codes}
    walks = sum(count for code, count in walk.entered.items() if code.co_name == "walk")
    print(f"{len(codes)} functions in {len(modules)} modules")
    print(f"{walk.stats} stat calls on the input, {walks} passes of tree.walk")
    if is_listed:
        for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
            where = code.co_filename.partition("/ckptconv/")[2]
            print(f"{walk.entered[code]:5} {where}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    main()
