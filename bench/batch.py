"""Measure batches: many small files, a finished batch, two processes against one, Ray's share.

    make bench-batch

Prints a markdown table. Sides of a row run in turn, each in processes of its own; the ratio is the
median of the ratios of neighbouring runs. Nothing is synced (`--no-fsync`), for the other sides do
not sync either. The shell loop runs over a part of the files, and its time is scaled up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CKPTCONV = [sys.executable, "-m", "ckptconv"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
LOOPED = 40

TORCH_LOOP = """
import pathlib, torch
from safetensors.torch import save_file
out = pathlib.Path("out"); out.mkdir()
for path in sorted(pathlib.Path("many").iterdir()):
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    save_file({name.removeprefix("module."): tensor for name, tensor in tensors.items()},
              out / f"{path.stem}.safetensors")
"""


def timed(command: list[str], folder: Path) -> float:
    """Seconds of a command."""
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, env=ENV, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def cleared(folder: Path) -> None:
    """No outputs, and the inputs in memory."""
    shutil.rmtree(folder / "out", ignore_errors=True)


def batch(inputs: str, *more: str) -> list[str]:
    """The command for a folder."""
    words = ["batch", inputs, "--out-dir", "out", "--to", "safetensors", "--no-fsync", "-q"]
    return [*CKPTCONV, *words, *more]


def shell_loop(folder: Path, count: int) -> float:
    """Seconds of a loop over `ckptconv convert`, for `count` files."""
    cleared(folder)
    (folder / "out").mkdir()
    script = (
        f"for f in $(ls many | head -{LOOPED}); do "
        f"{sys.executable} -m ckptconv convert many/$f out/${{f%.pt}}.safetensors --no-fsync -q; "
        "done"
    )
    return timed(["sh", "-c", script], folder) * count / LOOPED


def paired(one: Callable[[], float], other: Callable[[], float], runs: int) -> str:
    """Medians of both sides, and the ratio other / one."""
    sides = [(one(), other()) for _ in range(runs)]
    ratios = sorted(second / first for first, second in sides)
    mine, theirs = (statistics.median(side) for side in zip(*sides, strict=True))
    return (
        f"{mine:.2f} | {theirs:.2f} | {statistics.median(ratios):.1f} × "
        f"({ratios[0]:.1f}-{ratios[-1]:.1f})"
    )


def make_many(folder: Path, count: int) -> None:
    """Small files as DDP saves them: 6 tensors, 4 kB."""
    import torch

    (folder / "many").mkdir()
    for number in range(count):
        tensors = {f"module.{at}.weight": torch.full((8, 8), float(number)) for at in range(6)}
        torch.save(tensors, folder / "many" / f"{number:05}.pt")


def make_large(folder: Path, count: int, size: int) -> None:
    """Files of `size` bytes in 8 tensors."""
    import torch

    (folder / "large").mkdir()
    for number in range(count):
        tensors = {f"module.{at}.weight": torch.randn(size // 32) for at in range(8)}
        torch.save(tensors, folder / "large" / f"{number:03}.pt")


def on_ray(folder: Path, count: int) -> None:
    """What Ray takes for each job beyond the job itself, on a cluster of two cores on this host."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    sys.path.insert(0, str(ROOT))
    import ray

    from ckptconv import Job, Options, convert_many

    make_many(folder, count)
    jobs = [
        Job(path, folder / "out" / f"{path.stem}.safetensors", Options(), fsync=False)
        for path in sorted((folder / "many").iterdir())
    ]
    ray.init(num_cpus=2, log_to_driver=False)
    seconds = {}
    for engine in ("serial", "ray", "serial", "ray"):  # the first of each starts workers
        cleared(folder)
        begin = time.perf_counter()
        assert all(receipt.state == "done" for receipt in convert_many(jobs, executor=engine))
        seconds[engine] = time.perf_counter() - begin
    ray.shutdown()
    alone, shared = (1000 * seconds[name] / count for name in ("serial", "ray"))
    print(
        f"{count:,} files of 4 kB: serial {alone:.1f} ms a job, Ray with two workers {shared:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--ray", action="store_true", help="only Ray's share; needs ray")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if given.ray:
            on_ray(folder, given.count)
            return
        make_many(folder, given.count)

        def fresh(command: list[str]) -> float:
            cleared(folder)
            return timed(command, folder)

        print("| work | against | ckptconv s | other s | ratio (range) | goal |")
        print("|---|---|---|---|---|---|")
        named = f"{given.count:,} files of 4 kB"
        row = paired(
            lambda: fresh(batch("many")), lambda: shell_loop(folder, given.count), given.runs
        )
        print(f"| {named} | shell loop over ckptconv convert | {row} | ≥ 5 × |", flush=True)
        loop = [sys.executable, "-c", TORCH_LOOP]
        row = paired(lambda: fresh(batch("many")), lambda: fresh(loop), given.runs)
        print(f"| {named} | Python loop: torch.load, save_file | {row} | ≥ 2 × |", flush=True)
        fresh(batch("many"))
        again = min(timed(batch("many"), folder) for _ in range(given.runs))
        print(f"| the same again, all done | | {again:.2f} | | | < 5 s |", flush=True)
        make_large(folder, 64, 32 << 20)
        row = paired(
            lambda: fresh(batch("large", "--jobs", "2")),
            lambda: fresh(batch("large", "--jobs", "1")),
            given.runs,
        )
        print(f"| 64 files of 32 MB, 2 processes | 1 process | {row} | ≥ 1.6 × |", flush=True)
        row = paired(
            lambda: fresh(batch("large", "--jobs", "2", "--dtype", "bf16")),
            lambda: fresh(batch("large", "--jobs", "1", "--dtype", "bf16")),
            given.runs,
        )
        print(f"| the same to bf16 | 1 process | {row} | ≥ 1.6 × |", flush=True)


if __name__ == "__main__":
    main()
