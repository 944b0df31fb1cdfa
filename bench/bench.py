"""Measure ckptconv beside what else does the same work: whole processes, in turn, with their seconds and peak memory.

    python bench/bench.py [--folder DIR] [--quick] [--only NAME] [--keep]

Prints a markdown report on stdout (also bench-out/results.md, and every run in bench-out/results.json) and progress on
stderr. For Linux. The full size needs torch, 5 GB of memory, 5 GB of disk (20 GB for the row `memory-huge`) and some ten
minutes. Inputs come from make_inputs.py, the sides that are not programs of their own are in children.py.

One measurement is one child from spawn to exit. The two sides of a row run in turn, A B A B, after a warm-up of each
that also brings the input into the page cache. Before the next run the output is deleted and the disk is synced, so that
no run pays for the dirty pages of another. The ratio is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
OUT = Path("bench-out")


# ------------------------------------------------------------------------------------------------------------ what is measured


@dataclass(frozen=True)
class Scale:
    """The size of the inputs (bytes; for `many` tensors) and the number of measured runs of each side."""

    name: str
    big: int
    many: int
    huge: int
    runs: int


FULL = Scale("full", big=2_000_000_000, many=100_000, huge=8_000_000_000, runs=5)
QUICK = Scale("quick", big=200_000_000, many=5_000, huge=800_000_000, runs=3)
INPUTS = ("big", "many", "huge")


@dataclass(frozen=True)
class Side:
    """A command, with ``{big}``, ``{many}``, ``{huge}`` and ``{out}`` for paths, and its name in the table.

    With `own_seconds` the child prints the seconds that count.
    """

    label: str
    argv: tuple[str, ...]
    own_seconds: bool = False


@dataclass(frozen=True)
class Goal:
    """What ckptconv promises of a row.

    ``times``: at most `bound` times the seconds of the other side; ``faster``: at least `bound` times faster; ``seconds``:
    at most so many; ``extra``: at most so many seconds more than the other side; ``peak``: at most so many MB; ``same``:
    peaks of the two sides at most so many MB apart.
    """

    kind: Literal["times", "faster", "seconds", "extra", "peak", "same"]
    bound: float


@dataclass(frozen=True)
class Row:
    name: str
    work: str
    ours: Side
    theirs: Side
    goals: tuple[Goal, ...]
    runs: int | None = None  # without a warm-up, where only the memory matters
    free_disk: int = 0


def ckptconv(command: str, *, fsync: bool = True) -> Side:
    command += "" if fsync else " --no-fsync"
    named = command.format(out="out", **{kind: f"{kind}.pt" for kind in INPUTS})
    return Side(f"`{named}`", (f"{sysconfig.get_path('scripts')}/ckptconv", *command.split()))


def child(label: str, call: str, *, fsync: bool = False) -> Side:
    argv = (sys.executable, str(HERE / "children.py"), *call.split(), *(["--fsync"] if fsync else []))
    return Side(label + ", fsync" * fsync, argv, own_seconds=call.startswith("time_"))


def cp(fsync: bool) -> Side:
    if fsync:
        return Side("cp, then sync FILE", ("/bin/sh", "-c", 'cp "$0" "$1" && sync "$1"', "{big}", "{out}"))
    return Side("cp", ("cp", "{big}", "{out}"))


def copies(prefix: str, *, fsync: bool) -> tuple[Row, ...]:
    """The rows that are measured twice: without fsync on either side, and with it on both."""
    to_pt = ckptconv("strip-module {big} {out}.pt", fsync=fsync)
    to_safetensors = ckptconv("strip-module {big} {out}.safetensors", fsync=fsync)
    load_save = child("torch.load, strip, torch.save", "load_save {big} {out}", fsync=fsync)
    load_save_file = child("torch.load, strip, save_file", "load_save_file {big} {out}", fsync=fsync)
    small, as_cp, six = Goal("peak", 60), Goal("times", 1.0), Goal("faster", 6)
    return (
        Row(f"{prefix}pt-cp", "big .pt → .pt", to_pt, cp(fsync), (as_cp, small)),
        Row(f"{prefix}safetensors-cp", "big .pt → .safetensors", to_safetensors, cp(fsync), (as_cp, small)),
        Row(f"{prefix}pt-torch", "big .pt → .pt", to_pt, load_save, (six,)),
        Row(f"{prefix}safetensors-torch", "big .pt → .safetensors", to_safetensors, load_save_file, (six,)),
    )


IMPORT_TORCH = Side("`python -c 'import torch'`", (sys.executable, "-c", "import torch"))
MMAP_SAVE = child("torch.load(mmap=True), strip, save_file", "mmap_save_file {big} {out}")
LOAD_PORTABLE = "`load_portable` in a process that has imported torch and ckptconv"

UNSYNCED = (
    *copies("", fsync=False),
    Row("pt-mmap", "big .pt → .pt", ckptconv("strip-module {big} {out}.pt", fsync=False), MMAP_SAVE, (Goal("faster", 2),)),
    Row(
        "safetensors-mmap",
        "big .pt → .safetensors",
        ckptconv("strip-module {big} {out}.safetensors", fsync=False),
        MMAP_SAVE,
        (Goal("faster", 2),),
    ),
    Row(
        "bf16-mmap",
        "big .pt → bf16 .safetensors",
        ckptconv("convert {big} {out}.safetensors --dtype bf16", fsync=False),
        child("torch.load(mmap=True), .to(bfloat16), save_file", "mmap_bf16_save_file {big} {out}"),
        (Goal("faster", 2), Goal("peak", 250)),
    ),
    Row(
        "many-torch",
        "many .pt → .pt",
        ckptconv("strip-module {many} {out}.pt", fsync=False),
        child("torch.load, strip, torch.save", "load_save {many} {out}"),
        (Goal("faster", 4),),
    ),
    Row("version", "start-up", ckptconv("--version"), IMPORT_TORCH, (Goal("seconds", 0.15),)),
    Row("inspect", "inspect big", ckptconv("inspect {big}"), IMPORT_TORCH, (Goal("seconds", 0.25),)),
    Row(
        "load-big",
        "load big on the CPU",
        child(LOAD_PORTABLE, "time_load_portable {big}"),
        child("torch.load(mmap=True), the same", "time_load_mmap {big}"),
        (Goal("extra", 0.020),),
    ),
    Row(
        "load-many",
        "load many on the CPU",
        child(LOAD_PORTABLE, "time_load_portable {many}"),
        child("torch.load, the same", "time_load {many}"),
        (Goal("faster", 2),),
    ),
    Row(
        "memory-huge",
        "memory: huge beside big",
        ckptconv("strip-module {huge} {out}.pt", fsync=False),
        ckptconv("strip-module {big} {out}.pt", fsync=False),
        (Goal("peak", 60), Goal("same", 10)),
        runs=1,
        free_disk=20_000_000_000,
    ),
)
SYNCED = copies("fsync-", fsync=True)


# ------------------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Run:
    seconds: float
    peak: float  # MB


@dataclass(frozen=True)
class Measured:
    row: Row
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...]


def measure(row: Row, scale: Scale, folder: Path) -> Measured:
    runs, warm_up = (row.runs, 0) if row.runs else (scale.runs, 1)
    pairs = []
    for number in range(runs + warm_up):
        pairs.append((run(row.ours, folder), run(row.theirs, folder)))
        ours, theirs = (f"{side.seconds:.3f} s, {side.peak:.0f} MB" for side in pairs[-1])
        say(f"{row.name} {'warm-up' if number < warm_up else number + 1 - warm_up}: {ours}; other side {theirs}")
    ours_runs, theirs_runs = zip(*pairs[warm_up:], strict=True)
    return Measured(row, ours_runs, theirs_runs)


def run(side: Side, folder: Path) -> Run:
    """Run a side once in a child of its own, on a disk without dirty pages, and remove what it wrote."""
    os.sync()
    log = folder / "log.txt"
    seconds, peak = spawn(expand(side, folder), log)
    printed = log.read_text()
    for output in folder.glob("out*"):
        output.unlink()
    return Run(float(printed) if side.own_seconds else seconds, peak)


def expand(side: Side, folder: Path) -> list[str]:
    paths = {kind: f"{folder / kind}.pt" for kind in INPUTS}
    return [argument.format(out=folder / "out", **paths) for argument in side.argv]


def spawn(argv: list[str], log: Path) -> tuple[float, float]:
    """Seconds from spawn to exit, and the largest resident set in MB; what the child prints goes to `log`.

    Linux charges the parent's own peak to the child, so this process imports neither torch nor anything large.
    """
    to_log = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    start = time.perf_counter()
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=[to_log, (os.POSIX_SPAWN_DUP2, 1, 2)])
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(argv)} failed:\n{log.read_text()}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def make_inputs(rows: list[Row], scale: Scale, folder: Path) -> None:
    for kind in INPUTS:
        path = folder / f"{kind}.pt"
        if any(f"{{{kind}}}" in row.ours.argv + row.theirs.argv for row in rows) and not path.exists():
            say(f"making {path}")
            maker = [sys.executable, str(HERE / "make_inputs.py"), kind, str(path), str(getattr(scale, kind))]
            spawn(maker, folder / "log.txt")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------------- reporting


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def seconds_of(runs: tuple[Run, ...]) -> float:
    return median([one.seconds for one in runs])


def peak_of(runs: tuple[Run, ...]) -> float:
    return max(one.peak for one in runs)


def comparisons(measured: Measured, kind: str) -> list[float]:
    """One number of each pair of runs: ours/theirs, theirs/ours for ``faster``, ours - theirs for ``extra``."""
    pairs = [(ours.seconds, theirs.seconds) for ours, theirs in zip(measured.ours, measured.theirs, strict=True)]
    if kind == "extra":
        return [ours - theirs for ours, theirs in pairs]
    return [theirs / ours if kind == "faster" else ours / theirs for ours, theirs in pairs]


def comparison_text(measured: Measured) -> str:
    """The row's ratio (or difference) in the sense of its first goal, with its least and its greatest."""
    kind = measured.row.goals[0].kind
    values = comparisons(measured, kind)
    middle, least, greatest = median(values), min(values), max(values)
    if kind == "extra":
        return f"{middle * 1e3:+.0f} ms ({least * 1e3:+.0f} to {greatest * 1e3:+.0f})"
    return f"{middle:.2f} x{' faster' if kind == 'faster' else ''} ({least:.2f} to {greatest:.2f})"


def goal_text(goal: Goal) -> str:
    match goal.kind:
        case "times":
            return f"≤ {goal.bound:g} x"
        case "faster":
            return f"≥ {goal.bound:g} x faster"
        case "seconds":
            return f"≤ {goal.bound:g} s"
        case "extra":
            return f"≤ +{goal.bound * 1e3:g} ms"
        case "peak":
            return f"peak ≤ {goal.bound:g} MB"
        case "same":
            return f"peaks ± {goal.bound:g} MB"


def verdict(goal: Goal, measured: Measured) -> tuple[bool, str]:
    """Is the goal met, and the number that says so."""
    match goal.kind:
        case "times" | "faster" | "extra":
            value = median(comparisons(measured, goal.kind))
            met = value >= goal.bound if goal.kind == "faster" else value <= goal.bound
            return met, f"{value * 1e3:+.0f} ms" if goal.kind == "extra" else f"{value:.2f} x"
        case "seconds":
            value = seconds_of(measured.ours)
            return value <= goal.bound, f"{value:.3f} s"
        case "peak":
            value = peak_of(measured.ours)
            return value <= goal.bound, f"{value:.0f} MB"
        case "same":
            value = peak_of(measured.ours) - peak_of(measured.theirs)
            return abs(value) <= goal.bound, f"{value:+.1f} MB"


COLUMNS = "row | work | ckptconv | other side | ckptconv s | other s | ratio (min to max) | goal | met | ckptconv peak MB | other peak MB"


def table(results: list[Measured]) -> Iterator[str]:
    yield f"| {COLUMNS} |"
    yield "|" + " --- |" * (COLUMNS.count("|") + 1)
    for measured in results:
        yield f"| {' | '.join(cells(measured))} |"


def cells(measured: Measured) -> Iterator[str]:
    row = measured.row
    verdicts = [verdict(goal, measured) for goal in row.goals]
    yield from (row.name, row.work, row.ours.label, row.theirs.label)
    yield from (f"{seconds_of(runs):.3f}" for runs in (measured.ours, measured.theirs))
    yield comparison_text(measured) if "same" not in {goal.kind for goal in row.goals} else "-"
    yield "; ".join(goal_text(goal) for goal in row.goals)
    yield "; ".join(f"{'yes' if met else '**no**'}, {number}" for met, number in verdicts)
    yield from (f"{peak_of(runs):.0f}" for runs in (measured.ours, measured.theirs))


def report(results: list[Measured], notes: list[str], facts: dict[str, str]) -> Iterator[str]:
    yield from (f"- {name}: {text}" for name, text in facts.items())
    yield from (f"- note: {note}" for note in notes)
    titles = (("Without fsync, on both sides", UNSYNCED), ("With fsync, on both sides", SYNCED))
    for title, rows in titles:
        if found := [measured for measured in results if measured.row in rows]:
            yield from ("", f"## {title}", "", *table(found))


def document(measured: Measured) -> dict[str, object]:
    sides = {name: [[one.seconds, one.peak] for one in getattr(measured, name)] for name in ("ours", "theirs")}
    goals = [[goal_text(goal), *verdict(goal, measured)] for goal in measured.row.goals]
    return {"row": measured.row.name, "seconds and MB": sides, "ratio": comparison_text(measured), "goals": goals}


def machine(scale: Scale, folder: Path) -> dict[str, str]:
    """What the numbers depend on. The imports are here because a child is charged with this process's memory."""
    import platform
    import resource
    from importlib.metadata import version

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = ", ".join(f"{name} {version(name)}" for name in ("ckptconv", "torch", "safetensors"))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {
        "size": f"{scale.name} (big {scale.big / 1e9:g} GB, many {scale.many} tensors), {scale.runs} runs of each side",
        "machine": f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GB, kernel {platform.release()}",
        "file system": file_system(folder),
        "software": f"python {platform.python_version()}, {versions}",
        "memory": f"peak is ru_maxrss, which counts mapped file pages; a peak below {own:.0f} MB cannot be seen",
    }


def file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(around)[1]


# ------------------------------------------------------------------------------------------------------------------- the program


def main() -> None:
    options = arguments()
    scale = QUICK if options.quick else FULL
    rows = [row for row in UNSYNCED + SYNCED if options.only in row.name]
    if not rows:
        raise SystemExit(f"--only {options.only}: no row has this in its name")
    OUT.mkdir(exist_ok=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="folder-", dir=OUT))
    inputs = folder / scale.name
    inputs.mkdir(parents=True, exist_ok=True)
    try:
        write_report(rows, scale, inputs)
    finally:
        if not (options.keep or options.folder):
            shutil.rmtree(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where inputs are made, kept and found again (default: a fresh one)")
    parser.add_argument("--keep", action="store_true", help="keep the fresh folder too")
    parser.add_argument("--quick", action="store_true", help="a smoke test on small inputs; its numbers mean little")
    parser.add_argument("--only", metavar="NAME", default="", help="only the rows with NAME in their name")
    return parser.parse_args()


def write_report(rows: list[Row], scale: Scale, folder: Path) -> None:
    fits = [row for row in rows if row.free_disk <= shutil.disk_usage(folder).free]
    notes = [f"{row.name} left out: needs {row.free_disk / 1e9:g} GB of free disk" for row in rows if row not in fits]
    make_inputs(fits, scale, folder)
    results = [measure(row, scale, folder) for row in fits]
    facts = machine(scale, folder)
    text = "\n".join(report(results, notes, facts)) + "\n"
    whole = {"facts": facts, "notes": notes, "rows": [document(measured) for measured in results]}
    (OUT / "results.md").write_text(text)
    (OUT / "results.json").write_text(json.dumps(whole, indent=1))
    print(text, end="")


if __name__ == "__main__":
    main()
