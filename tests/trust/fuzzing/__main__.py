"""``python -m fuzzing --seconds 600``: hunt for some seconds and tell what was found; exits with 1
when anything was.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="of an earlier run, to repeat it")
    parser.add_argument(
        "--first", type=int, default=0, metavar="NUMBER", help="the case to begin with"
    )
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument(
        "--mode", choices=["all", "mutations", "structures", "coverage"], default="all"
    )
    parser.add_argument("--only", metavar="TARGET", help="only seeds of this target")
    parser.add_argument(
        "--finds", type=Path, default=Path("fuzz-finds"), help="the folder where finds are saved"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FIND", nargs="+", help="try saved finds again instead"
    )
    given = parser.parse_args()
    return _replay(given.replay) if given.replay else _hunt(given)


def _cover(given: argparse.Namespace, seed: int) -> int:
    from fuzzing.coverage import hunt_by_coverage, instrumented

    atheris = instrumented()  # before anything else imports what is to be covered
    from fuzzing.hunt import work_folder
    from fuzzing.seeds import make_seeds

    with work_folder() as work:
        (work / "making").mkdir()
        seeds = make_seeds(work / "making")
        print(
            f"seed {seed}, led by coverage, {len(seeds)} good files, {given.seconds:.0f} s",
            flush=True,
        )
        hunt_by_coverage(atheris, seeds, work, given.finds, seed=seed, seconds=given.seconds)
    return 0


def _replay(places: list[Path]) -> int:
    from fuzzing.hunt import replay

    wrong = 0
    for place in places:
        verdict = replay(place, ask_torch=True)
        wrong += len(verdict.finds)
        print(
            f"{place}: {len(verdict.finds)} finds, {verdict.accepted} outputs, {verdict.refused} "
            "refusals"
        )
        for find in verdict.finds:
            print("\n".join(find))
    return 1 if wrong else 0


def _hunt(given: argparse.Namespace) -> int:
    import signal
    import warnings

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tell what was found until then
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    if given.mode == "coverage":
        return _cover(given, seed)
    from fuzzing.hunt import Hunt, work_folder
    from fuzzing.seeds import make_seeds

    with work_folder() as work:
        (work / "making").mkdir()
        seeds = [one for one in make_seeds(work / "making") if given.only in (None, one.target)]
        print(
            f"seed {seed}, {given.workers} workers, {len(seeds)} good files, {given.seconds:.0f} s",
            flush=True,
        )
        hunt = Hunt(seeds, work, given.finds, seed=seed, workers=given.workers, mode=given.mode)
        begin = time.monotonic()
        try:
            hunt.run(given.seconds, first=given.first, cases=given.cases)
        except KeyboardInterrupt:
            print("interrupted")
        for line in hunt.tally.lines(time.monotonic() - begin):
            print(line)
    return 1 if hunt.tally.signatures else 0


if __name__ == "__main__":
    sys.exit(main())
