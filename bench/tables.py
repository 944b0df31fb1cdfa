"""What bench.py found, as a markdown report and as a document for JSON: ratios, goals met and
missed, the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rows import SYNCED, UNSYNCED, Goal, Row, Scale

COLUMNS = (
    *("row", "work", "ckptconv", "other side", "ckptconv s (least)", "other s (least)"),
    *("ratio (min to max)", "goal", "met", "ckptconv peak MB", "other peak MB"),
)


@dataclass(frozen=True)
class Run:
    seconds: float
    peak: float  # MB
    size: float = 0.0  # MB of what it wrote


@dataclass(frozen=True)
class Measured:
    row: Row
    ours: tuple[Run, ...]
    theirs: tuple[Run, ...]


def median(values: list[float]) -> float:
    """As in `statistics`, whose import would count in the memory of every child."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def seconds_of(runs: tuple[Run, ...]) -> float:
    return median([one.seconds for one in runs])


def peak_of(runs: tuple[Run, ...]) -> float:
    return max(one.peak for one in runs)


def comparisons(measured: Measured, kind: str) -> list[float]:
    """One number of each pair of runs: ours/theirs, theirs/ours for ``faster``, ours - theirs for
    ``extra``.
    """
    pairs = [
        (ours.seconds, theirs.seconds)
        for ours, theirs in zip(measured.ours, measured.theirs, strict=True)
    ]
    if kind == "extra":
        return [ours - theirs for ours, theirs in pairs]
    return [theirs / ours if kind == "faster" else ours / theirs for ours, theirs in pairs]


def comparison_text(measured: Measured) -> str:
    """The row's ratio (or difference) in the sense of its first goal, with its least and its
    greatest.
    """
    kind = measured.row.goals[0].kind
    if kind == "peak":
        return "-"
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
        case "size":
            return f"output ≤ {goal.bound:g} MB"


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
        case "size":
            value = max(one.size for one in measured.ours)
            return value <= goal.bound, f"{value:.2f} MB"


def report(results: list[Measured], notes: list[str], facts: dict[str, str]) -> Iterator[str]:
    """The lines of the markdown report."""
    yield from (f"- {name}: {text}" for name, text in facts.items())
    yield from (f"- note: {note}" for note in notes)
    titles = (("Without fsync, on both sides", UNSYNCED), ("With fsync, on both sides", SYNCED))
    for title, rows in titles:
        names = {row.name for row in rows}
        if found := [measured for measured in results if measured.row.name in names]:
            yield from ("", f"## {title}", "", *table(found))


def table(results: list[Measured]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for measured in results:
        yield f"| {' | '.join(cells(measured))} |"


def cells(measured: Measured) -> Iterator[str]:
    row = measured.row
    verdicts = [verdict(goal, measured) for goal in row.goals]
    yield from (row.name, row.work, row.ours.label, row.theirs.label)
    yield from (
        f"{seconds_of(runs):.3f} ({min(one.seconds for one in runs):.3f})"
        for runs in (measured.ours, measured.theirs)
    )
    yield comparison_text(measured)
    yield "; ".join(goal_text(goal) for goal in row.goals)
    yield "; ".join(f"{'yes' if met else '**no**'}, {number}" for met, number in verdicts)
    yield from (f"{peak_of(runs):.0f}" for runs in (measured.ours, measured.theirs))


def document(measured: Measured) -> dict[str, object]:
    """A row for JSON, with every run as [seconds, peak MB]."""
    sides = {
        name: [[one.seconds, one.peak] for one in getattr(measured, name)]
        for name in ("ours", "theirs")
    }
    goals = [[goal_text(goal), *verdict(goal, measured)] for goal in measured.row.goals]
    return {"row": measured.row.name, **sides, "ratio": comparison_text(measured), "goals": goals}


def machine(scale: Scale, folder: Path) -> dict[str, str]:
    """What the numbers depend on. The imports are here because a child is charged with this
    process's memory.
    """
    import resource

    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    import platform
    from importlib.metadata import version

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = ", ".join(f"{name} {version(name)}" for name in ("ckptconv", "torch", "safetensors"))
    return {
        "size": f"{scale.name} (big {scale.big / 1e9:g} GB, many {scale.many:,} tensors), "
        f"{scale.runs} runs of each side",
        "machine": f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GB, kernel "
        f"{platform.release()}",
        "file system": file_system(folder),
        "software": f"python {platform.python_version()}, {versions}",
        "memory": f"peak is ru_maxrss, which counts mapped file pages; a peak below {own:.0f} MB "
        "cannot be seen",
    }


def file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [
        (len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)
    ]
    return max(around)[1]
