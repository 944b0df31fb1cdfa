"""Shows layouts by their seeds, or tries many; see the package."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from layouts.checks import differences
from layouts.compose import draw
from layouts.rule import decide
from layouts.showing import shown, told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m layouts", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=0, help="try the layouts 0 to COUNT - 1")
    parser.add_argument(
        "--show",
        type=int,
        default=3,
        help="how many that differ are shown of each kind of difference",
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            report(seed, Path(folder))
        if given.count:
            hunt(given.count, given.show, Path(folder))


def report(seed: int, folder: Path, found: list[str] | None = None) -> None:
    """Print a layout, what the rule says of it and what ckptconv does otherwise."""
    layout = draw(seed)
    lines = differences(layout, folder, full=True) if found is None else found
    print(
        f"seed {seed} ({layout.kind}): "
        f"{shown(layout.tree).strip() if isinstance(layout.tree, dict) else shown(layout.tree)}"
    )
    print(
        f"  rule: {told(decide(layout.tree))}",
        *(f"  ckptconv: {line}" for line in lines),
        "",
        sep="\n",
    )


def hunt(count: int, show: int, folder: Path) -> None:
    """Try many layouts; print some of those that differ, and how many of each kind there are."""
    kinds: Counter[str] = Counter()
    wrong = silent = 0
    for seed in range(count):
        found = differences(draw(seed), folder, full=seed % 10 == 0)
        wrong += bool(found)
        silent += any(line.startswith(("taken", "load_portable")) for line in found)
        for kind in {line.partition(":")[0].partition("'")[0] for line in found}:
            kinds[kind] += 1
            if kinds[kind] <= show:
                report(seed, folder, found)
    print(
        f"{wrong} of {count} layouts differ, {silent} of them are wrong without an error",
        *(f"{number:>7} {kind}" for kind, number in kinds.most_common()),
        sep="\n",
    )


if __name__ == "__main__":
    main()
