"""What deltas cost: `delta` and `apply` beside a plain numpy and zstandard statement of what slime
and sglang do, each tensor in one go; one value in a hundred changed. `make bench-delta`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from timed_command import timed

TENSORS = int(os.environ.get("BENCH_DELTA_TENSORS", "16"))
"""Of 64 MB in float32."""
ROUNDS = 3
HELPERS = Path(__file__).resolve().parents[1] / "tests"

MAKE = """
import sys, numpy as np
from safetensors.numpy import save_file
folder, count = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
tensors = {f"layers.{at}.w": rng.standard_normal(16_000_000, np.float32) for at in range(count)}
save_file(tensors, folder + "/base.safetensors")
for values in tensors.values():
    at = rng.choice(values.size, values.size // 100, replace=False)
    values[at] = rng.standard_normal(at.size, np.float32)
save_file(tensors, folder + "/new.safetensors")
"""
PLAIN = {
    "delta": """
import sys
from pathlib import Path
from helpers.deltas import tensors_in, write_delta
folder, encoding = Path(sys.argv[1]), sys.argv[2]
old, new = (tensors_in(folder / f"{name}.safetensors") for name in ("base", "new"))
write_delta(folder / "plain", old, new, encoding=encoding)
""",
    "apply": """
import sys
from pathlib import Path
from helpers.deltas import apply_delta, tensors_in, written
folder = Path(sys.argv[1])
found = apply_delta(tensors_in(folder / "base.safetensors"), folder / "plain")
written(folder / "plain.safetensors", found, {})
""",
}


def measure(folder: Path, encoding: str) -> dict[str, list[tuple[float, float, int]]]:
    """The runs of each side, in turn."""
    base, new, out = (folder / f"{name}.safetensors" for name in ("base", "new", "out"))
    quick = ("--no-fsync", "-q", "--force")
    program = (sys.executable, "-m", "ckptconv")
    plain = (sys.executable, "-c")
    sides: dict[str, list[tuple[float, float, int]]] = {}
    for _ in range(ROUNDS):
        shutil.rmtree(folder / "plain", ignore_errors=True)
        made = folder / "delta"
        copy = folder / "copy"
        runs = {
            "cp": ("cp", new, copy),
            "ckptconv delta": (*program, "delta", base, new, made, "--encoding", encoding, *quick),
            "numpy and zstandard, delta": (*plain, PLAIN["delta"], folder, encoding),
            "ckptconv apply": (*program, "apply", base, made, out, *quick),
            "numpy and zstandard, apply": (*plain, PLAIN["apply"], folder),
        }
        for name, command in runs.items():
            sides.setdefault(name, []).append(timed([*map(str, command)]))
    timed([*map(str, (*program, "diff", out, new, "-q"))])
    return sides


def main() -> None:
    os.environ["PYTHONPATH"] = f"{HELPERS.parent}{os.pathsep}{HELPERS}"
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
    print("| encoding | side | seconds | of all cores | MB/s by the clock | peak |")
    print("|---|---|---|---|---|---|")
    try:
        timed([sys.executable, "-c", MAKE, str(folder), str(TENSORS)])
        size = (folder / "base.safetensors").stat().st_size
        for encoding in ("xor", "overwrite"):
            for name, runs in measure(folder, encoding).items():
                seconds, cores, peak = (min(column) for column in zip(*runs, strict=True))
                rate = f"{size / seconds / 1e6:.0f}"
                line = f"{seconds:.1f} | {cores:.1f} | {rate} | {peak / 1000:.0f} MB |"
                print(f"| {encoding} | {name} | {line}")
            made = sum(path.stat().st_size for path in (folder / "delta").iterdir())
            print(f"{encoding}: {made / size:.2%} of {size / 1e9:.1f} GB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
