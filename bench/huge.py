"""Measure what one huge checkpoint costs before its values move: seconds and peak memory of whole
processes, by the number of tensors.

    make bench-huge
    python bench/huge.py [--folder DIR] [--tensors N,N] [--bytes N] [--files N] [--keep]

The inputs come from make_huge.py: a terabyte in 1,000 files, all of it holes. A million chunks take
6 GB of disk. Prints a markdown table. For Linux.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAKE = Path(__file__).resolve().with_name("make_huge.py")
WORK = {
    "inspect": ["inspect", "{in}"],
    "open": ["-c", "import sys, ckptconv; ckptconv.open_checkpoint(sys.argv[1])", "{in}"],
    "plan": ["convert", "{in}", "{out}", "--dry-run", "--max-shard-size", "5GB"],
    "doctor": ["doctor", "{in}"],
}
"""What is measured; `plan` is a conversion to safetensors up to its first byte."""


def measure(words: list[str], out: Path) -> tuple[float, float, float]:
    """Seconds, seconds of processors and megabytes of one child."""
    program = [] if words[0] == "-c" else ["-m", "ckptconv"]
    command = [sys.executable, *program, *words]
    begin = time.perf_counter()
    with (out / "said").open("wb") as said:
        pid = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, said.fileno(), fd) for fd in (1, 2)],
        )
        _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(f"{' '.join(command)} failed:\n{(out / 'said').read_text()[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tensors", default="10000,100000,1000000")
    parser.add_argument("--kinds", default="dcp,hf")
    parser.add_argument("--work", default=",".join(WORK))
    parser.add_argument("--bytes", type=float, default=1e12)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="inputs that are there are used again")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="ckptconv-huge-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    heads = ("input", "tensors", "work", "s", "CPU s", "peak MB", "CPU µs of a tensor")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for kind in given.kinds.split(","):
        for count in map(int, given.tensors.split(",")):
            path = folder / f"{kind}-{count}-{given.chunks}"
            if not path.exists():  # made by a child, whose memory is not counted
                sizes = ("--bytes", given.bytes, "--files", given.files, "--chunks", given.chunks)
                words = (MAKE, kind, path, "--tensors", count, *sizes)
                subprocess.run([sys.executable, *map(str, words)], check=True)
            for name in given.work.split(","):
                names = {"{in}": str(path), "{out}": str(folder / "out")}
                words = [names.get(word, word) for word in WORK[name]]
                seconds, cpu, peak = measure(words, folder)
                cells = (kind, f"{count:,}", name, f"{seconds:.1f}", f"{cpu:.1f}", f"{peak:,.0f}")
                print(f"| {' | '.join(cells)} | {cpu / count * 1e6:.0f} |", flush=True)
            if not given.keep:
                shutil.rmtree(path)
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
