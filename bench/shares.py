"""Measure what the driver of one huge checkpoint does, and what one output file costs it.

    python bench/shares.py [--tensors N] [--bytes N] [--files N] [--shards N,N,N]

A checkpoint of sparse files (make_huge.py) is planned for so many output files, and each of them is
made a share: what is sent to a worker. Then a small checkpoint is converted by workers into as many
files, which shows what each costs them. Prints markdown tables. For Linux.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from make_huge import write_dcp  # noqa: E402

from ckptconv import Options, execute_plan, open_checkpoint, plan_conversion  # noqa: E402
from ckptconv.batch.processes import Processes  # noqa: E402
from ckptconv.batch.sharing import share_out_on  # noqa: E402
from ckptconv.convert.shares import share_of  # noqa: E402
from ckptconv.formats.registry import open_certain  # noqa: E402


def planned(path: Path, out: Path, total: int, shards: int) -> str:
    """A row: the seconds of opening, planning and packing, and the bytes of one share."""
    begin = time.perf_counter()
    with open_certain(path) as checkpoint:
        opened = time.perf_counter()
        options = Options(to="safetensors", max_shard_size=-(-total // shards))
        plan = plan_conversion(checkpoint, out, options)
        decided = time.perf_counter()
        sizes = []
        for number, file in enumerate(plan.files):
            share = share_of(number, file, out / file.path.name, plan.to, fsync=False)
            sizes.append(len(pickle.dumps(share)))
        done = time.perf_counter()
    count, peak = len(plan.files), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"| {count:,} | {opened - begin:.1f} | {decided - opened:.1f} | {done - decided:.2f} "
        f"| {1000 * (done - decided) / count:.1f} | {sum(sizes) / count / 1e3:.0f} | {peak:,.0f} |"
    )


def made(path: Path, out: Path, total: int, shards: int) -> str:
    """A row: the seconds of workers that make so many files of a small checkpoint."""
    options = Options(to="safetensors", max_shard_size=-(-total // shards))
    with open_checkpoint(path) as checkpoint:
        plan = plan_conversion(checkpoint, out, options)
        begin = time.perf_counter()
        execute_plan(plan, fsync=False, share_out=share_out_on(Processes(2)))
        seconds = time.perf_counter() - begin
    shutil.rmtree(out)
    count = len(plan.files)
    return f"| {count:,} | {seconds:.1f} | {1000 * seconds / count:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--bytes", type=float, default=1e12)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--shards", default="10,100,1000")
    given = parser.parse_args()
    counts = [int(text) for text in given.shards.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="ckptconv-shares-"))
    try:
        huge, small = folder / "huge", folder / "small"
        write_dcp(huge, given.tensors, int(given.bytes), given.files, 1)
        named = f"{given.bytes / 1e12:.0f} TB, {given.tensors:,} tensors, {given.files:,} files"
        print(f"{named}: the driver\n")
        print("| output files | open s | plan s | pack s | pack ms a file | kB a share | peak MB |")
        print("|---|---|---|---|---|---|---|")
        for count in counts:
            print(planned(huge, folder / "out", int(given.bytes), count), flush=True)
        write_dcp(small, 10_000, 200_000_000, 100, 1)
        print("\n200 MB, 10,000 tensors, 100 files: two workers\n")
        print("| output files | s | ms a file |\n|---|---|---|")
        for count in counts:
            print(made(small, folder / "out", 200_000_000, count), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
