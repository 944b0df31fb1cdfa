"""Prints what the cases cost: the slowest and the hungriest, each run alone.

    PYTHONPATH=.:tests:tests/trust python -m hostile.costs [PART OF A NAME]

Seconds are the processor's; megabytes are the peak above a program that does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helpers.hostile_generator import GENERATOR
from helpers.program import Finished
from hostile.cases import GENERATED, GOOD, Case, bad
from hostile.families import NEIGHBOURS
from hostile.forked import server

SHOWN = 10


def runs(part: str) -> Iterator[tuple[str, float, float]]:
    """Of every case whose name has `part` in it: name and output, seconds, megabytes."""
    with server() as running, tempfile.TemporaryDirectory() as scratch:
        hostile = Path(scratch) / "generated"
        hostile.mkdir()
        subprocess.run(
            [sys.executable, GENERATOR, hostile], cwd=hostile, check=True, capture_output=True
        )

        def run(case: Case, suffix: str) -> Finished:
            folder = Path(scratch) / "case"
            folder.mkdir()
            given = [hostile / case.file] if case.build is None else case.write(folder)
            cwd = folder / "cwd"
            cwd.mkdir()
            (cwd / GOOD).write_bytes(bad.ckpt(bad.GOOD))
            done = running.run(*case.arguments(given, f"out{suffix}"), cwd=cwd, tmp=folder)
            shutil.rmtree(folder)
            return done

        for case in (*GENERATED, *NEIGHBOURS):
            for suffix in case.outputs if part in case.file else ():
                done = run(case, suffix)
                yield f"{case.file} -> {suffix}", done.seconds, (done.rss - running.idle_rss) / 1e6


def main() -> None:
    found = list(runs(sys.argv[1] if len(sys.argv) > 1 else ""))
    print(f"{len(found)} runs, {sum(seconds for _, seconds, _ in found):.0f} s in all")
    for title, column in (("slowest", 1), ("hungriest", 2)):
        print(f"\n{title}")
        for name, seconds, megabytes in sorted(found, key=lambda row: row[column], reverse=True)[
            :SHOWN
        ]:
            print(f"{seconds:8.2f} s {megabytes:8.1f} MB  {name}")


if __name__ == "__main__":
    main()
