"""Measure ckptconv beside what else does the same work: whole processes, in turn, with their
seconds and peak memory.

    python bench/bench.py [--folder DIR] [--quick] [--only NAME] [--keep]
    python bench/bench.py --against TREE [--runs 9]     beside the ckptconv of another checkout

Prints a markdown report on stdout (also bench-out/results.md, and every run in
bench-out/results.json) and progress on stderr. For Linux. The full size needs torch, 5 GB of memory
(10 GB for the row `average`), 8 GB of disk (20 GB for the row `memory-huge`) and half an hour. The
row `stats-sft` needs sft-cli, best in an environment of its own whose `bin` is on the path. The
rows are in rows.py; inputs come from make_inputs.py; sides that are not programs of their own are
in children.py; tables.py compares and prints.

One measurement is one child from spawn to exit. The two sides of a row run in turn, A B A B, after
a run of each that does not count and brings the input into the page cache. Before each run the last
output is deleted and the disk synced, so that no run pays for the dirty pages of another, and,
where gigabytes are written, memory is filled and given back, so that none pays for memory that a
virtual machine must first get from its host. The ratio is the median of the ratios of neighbouring
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rows import FULL, INPUTS, QUICK, SYNCED, UNSYNCED, Row, Scale, Side, against, name_of
from tables import Measured, Run, document, machine, report

OUT = Path("bench-out")


class ChildFailed(Exception):
    """A child that exited with anything but 0; says which, and what it printed."""


def measure(row: Row, scale: Scale, folder: Path) -> Measured:
    pairs = []
    for number in range(scale.runs if row.warm_up != "none" else 1):
        if number == 0 and row.warm_up != "none":
            for side in (row.ours, row.theirs):
                run(side, folder)
        ours, theirs = (
            run(side, folder, fill=scale.fill if row.warm_up == "memory" else 0)
            for side in (row.ours, row.theirs)
        )
        say(
            f"{row.name} {number + 1}: {ours.seconds:.3f} s, {ours.peak:.0f} MB; "
            f"{theirs.seconds:.3f} s, {theirs.peak:.0f} MB"
        )
        pairs.append((ours, theirs))
    ours_runs, theirs_runs = zip(*pairs, strict=True)
    return Measured(row, ours_runs, theirs_runs)


def run(side: Side, folder: Path, *, fill: int = 0) -> Run:
    """Run a side in a child of its own, on a disk without dirty pages, and remove what it wrote.

    Before it, another child fills `fill` bytes of memory and gives them back.
    """
    remove_outputs(folder)
    os.sync()
    log = folder / "log.txt"
    if fill:
        spawn([sys.executable, str(Path(__file__).with_name("fill_memory.py")), str(fill)], log)
    seconds, peak = spawn(expand(side, folder), log, environment(folder, side.tree))
    printed = log.read_text()
    size = sum(path.stat().st_size for path in folder.glob("out*") if path.is_file()) / 1e6
    remove_outputs(folder)
    return Run(float(printed) if side.own_seconds else seconds, peak, size)


def remove_outputs(folder: Path) -> None:
    for output in folder.glob("out*"):
        shutil.rmtree(output) if output.is_dir() else output.unlink()


def expand(side: Side, folder: Path) -> list[str]:
    paths = {kind: str(folder / name_of(kind)) for kind in INPUTS}
    return [argument.format(out=folder / "out", **paths) for argument in side.argv]


def environment(folder: Path, tree: str) -> dict[str, str]:
    """The environment of every child: byte code is kept, as it is for an installed package, but not
    in the source tree. `tree` is the checkout that is imported, if it is not the installed one.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = {"PYTHONPATH": tree} if tree else {}
    return {**kept, **path, "PYTHONPYCACHEPREFIX": str(folder.resolve() / "pycache")}


def spawn(argv: list[str], log: Path, env: Mapping[str, str] = os.environ) -> tuple[float, float]:
    """Seconds from spawn to exit, and the largest resident set in MB; what the child prints goes to
    `log`.

    Linux charges the parent's own peak to the child, so this process imports neither torch nor
    anything else large.
    """
    to_log = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    start = time.perf_counter()
    pid = os.posix_spawnp(argv[0], argv, env, file_actions=[to_log, (os.POSIX_SPAWN_DUP2, 1, 2)])
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise ChildFailed(f"{' '.join(argv)} failed:\n{log.read_text()}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def make_inputs(rows: list[Row], scale: Scale, folder: Path) -> None:
    script = str(Path(__file__).with_name("make_inputs.py"))
    for kind in INPUTS:
        path = folder / name_of(kind)
        if (
            any(side.reads(kind) for row in rows for side in (row.ours, row.theirs))
            and not path.exists()
        ):
            say(f"making {path}")
            spawn(
                [sys.executable, script, kind, str(path), str(getattr(scale, kind))],
                folder / "log.txt",
            )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lacked(row: Row, free_disk: int) -> str:
    """What a row needs that is not here; empty where nothing is missing."""
    if row.needs and shutil.which(row.needs) is None:
        return f"{row.needs} on the path"
    return f"{row.free_disk / 1e9:g} GB of free disk" if row.free_disk > free_disk else ""


def write_report(rows: list[Row], scale: Scale, folder: Path) -> bool:
    """Measure the rows and report; False when some of them failed."""
    free = shutil.disk_usage(folder).free
    missing = {row.name: text for row in rows if (text := lacked(row, free))}
    fits = [row for row in rows if row.name not in missing]
    notes = [f"{name} is left out: it needs {text}" for name, text in missing.items()]
    if scale is QUICK:
        notes.append("a smoke test; the goals are for the full size")
    make_inputs(fits, scale, folder)
    results = []
    for row in fits:
        try:
            results.append(measure(row, scale, folder))
        except ChildFailed as error:
            say(str(error))
            notes.append(f"**{row.name} failed**")
    facts = machine(scale, folder)
    text = "\n".join(report(results, notes, facts)) + "\n"
    whole = {"facts": facts, "notes": notes, "rows": [document(measured) for measured in results]}
    (OUT / "results.md").write_text(text)
    (OUT / "results.json").write_text(json.dumps(whole, indent=1))
    print(text, end="")
    return len(results) == len(fits)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--folder",
        type=Path,
        help="where inputs are made, kept and found again (default: a fresh one)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the fresh folder too")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test on small inputs; its numbers mean little"
    )
    parser.add_argument(
        "--only", metavar="NAME", default="", help="only the rows with NAME in their name"
    )
    parser.add_argument(
        "--against", metavar="TREE", help="measure beside the ckptconv of another checkout"
    )
    parser.add_argument("--runs", type=int, help="the measured runs of each side")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    scale = QUICK if options.quick else FULL
    scale = replace(scale, runs=options.runs or scale.runs)
    rows = [row for row in UNSYNCED + SYNCED if options.only in row.name]
    if options.against:
        tree = str(Path(options.against).resolve())
        once = {row.ours: row for row in reversed(rows) if row.warm_up != "none"}  # one row each
        rows = [against(row, tree) for row in reversed(once.values())]
    if not rows:
        raise SystemExit(f"--only {options.only}: no row has this in its name")
    OUT.mkdir(exist_ok=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="folder-", dir=OUT))
    inputs = folder / scale.name
    inputs.mkdir(parents=True, exist_ok=True)
    try:
        done = write_report(rows, scale, inputs)
    finally:
        if not (options.keep or options.folder):
            shutil.rmtree(folder)
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
