"""What optimizer states cost: a DCP folder of weights and AdamW's states to a torch file, to a
universal checkpoint of DeepSpeed and to DCP again, against `cp` of the same bytes, in pairs, with
the peak of memory. `make bench-resume`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timed_command import timed

NBYTES = int(os.environ.get("BENCH_RESUME_BYTES", "2000000000"))
ROUNDS = 5

MAKE = """
import sys, torch, torch.distributed.checkpoint as dcp
folder, size = sys.argv[1], int(sys.argv[2])
rows = size // (3 * 4 * 24 * 1024)
weights = {f"layers.{at}.weight": torch.randn(rows, 1024) for at in range(24)}
states = {
    key: {"step": torch.tensor(3.0), "exp_avg": value * 0.1, "exp_avg_sq": value.square()}
    for key, value in weights.items()
}
optimizer = {"state": states, "param_groups": [{"lr": 0.001, "params": list(weights)}]}
writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=4)
dcp.save({"model": weights, "optimizer": optimizer}, storage_writer=writer, no_dist=True)
"""


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        source, out = folder / "run", folder / "out"
        subprocess.run([sys.executable, "-c", MAKE, str(source), str(NBYTES)], check=True)
        print("| work | ckptconv s | cp s | ratio | core s, ckptconv / cp | peak MB |")
        print("|---|---|---|---|---|---|")
        for to in ("torch", "universal", "dcp"):
            words = [str(source), str(out), "--to", to, "--no-fsync"]
            ours, theirs = [], []
            for _ in range(ROUNDS):
                ours.append(timed([sys.executable, "-m", "ckptconv", "convert", *words]))
                _remove(out)
                theirs.append(timed(["cp", "-r", str(source), str(out)]))
                _remove(out)
            ratio = statistics.median(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
            mine, cp = (
                [statistics.median(each[at] for each in runs) for at in (0, 1)]
                for runs in (ours, theirs)
            )
            peak = max(each[2] for each in ours) / 1000
            print(
                f"| DCP with AdamW → {to} | {mine[0]:.2f} | {cp[0]:.2f} | {ratio:.2f} × | "
                f"{mine[1]:.2f} / {cp[1]:.2f} | {peak:.0f} |"
            )


def _remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink()


if __name__ == "__main__":
    main()
