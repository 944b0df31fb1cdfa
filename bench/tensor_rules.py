"""What tensor rules cost: `convert --rules` of one layout into another, against `cp` of its input
and against `convert` without rules; the peak of memory. `make bench-layouts`.

Seconds are those of the processor (user and system of whole processes): a machine that does other
work changes them least. Of the runs the quickest counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

SIZE = int(os.environ.get("BENCH_LAYOUTS_MB", "512")) << 20
RUNS = 3
EXPERTS, INNER, HIDDEN = 64, 768, 2048
Shapes = dict[str, tuple[int, ...]]


def _each(count_of: int, shapes: Shapes) -> Shapes:
    """These tensors in as many layers as make the size, in bfloat16."""
    layers = max(1, SIZE // 2 // count_of)
    return {f"l.{layer}.{key}": shape for layer in range(layers) for key, shape in shapes.items()}


def _cases() -> dict[str, tuple[Shapes, list[dict[str, Any]]]]:
    apart = ["l.{l}.experts.{e}.w1", "l.{l}.experts.{e}.w3"]
    joined = {"from": apart, "to": "l.{l}.gate_up", "operations": ["stack 0", "concat 1"]}
    parted = {"from": "l.{l}.gate_up", "to": apart, "operations": ["split 1", "unstack 0"]}
    one = {
        f"experts.{expert}.{name}": (INNER, HIDDEN)
        for expert in range(EXPERTS)
        for name in ("w1", "w3")
    }
    fused: Shapes = {"gate_up": (EXPERTS, 2 * INNER, HIDDEN)}
    numel = 2 * EXPERTS * INNER * HIDDEN
    square: Shapes = {"w": (4096, 4096)}
    qkv = {
        "from": "l.{l}.w",
        "to": ["l.{l}.q", "l.{l}.k", "l.{l}.v"],
        "operations": [
            {"unflatten": {"dim": 0, "sizes": [32, 3, -1]}},
            "unstack 1",
            {"flatten": [0, 1]},
        ],
    }

    def of_one(operation: Any, name: str = "w") -> list[dict[str, Any]]:
        return [{"from": f"l.{{l}}.{name}", "to": "l.{l}.x", "operations": [operation]}]

    return {
        "stack experts, gate and up joined": (_each(numel, one), [joined]),
        "take them apart": (_each(numel, fused), [parted]),
        "qkv of 32 heads apart": (_each(3 << 24, {"w": (3 * 4096, 4096)}), [qkv]),
        "rope, 32 heads": (_each(1 << 24, square), of_one("rope 32")),
        "interleave gate and up": (_each(numel, fused), of_one("interleave 1", "gate_up")),
        "transpose 4096 x 4096": (_each(1 << 24, square), of_one({"transpose": [0, 1]})),
        "transpose experts": (_each(numel, fused), of_one({"transpose": [1, 2]}, "gate_up")),
    }


def _write(path: Path, shapes: Shapes) -> None:
    header, at = {}, 0
    for key, shape in shapes.items():
        end = at + 2 * prod(shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        while at:
            at -= file.write(block[: min(at, len(block))])


def _run(*command: str | Path) -> tuple[float, int]:
    """The seconds of the processor that a program takes, and its peak memory in MB."""
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10


def main() -> None:
    print("| layout | rules s | none s | `cp` s | rules / none | rules / `cp` | peak MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, (shapes, rules) in _cases().items():
        with tempfile.TemporaryDirectory() as folder:
            source, out, listed = (
                Path(folder) / each for each in ("in.safetensors", "out.safetensors", "r.json")
            )
            _write(source, shapes)
            listed.write_text(json.dumps(rules))
            plain = (sys.executable, "-m", "ckptconv", "convert", source, out, "--force")
            plain = (*plain, "--no-fsync", "--quiet")
            sides: tuple[tuple[str | Path, ...], ...] = (
                (*plain, "--rules", listed),
                plain,
                ("cp", source, out),
            )
            runs = [[_run(*side) for side in sides] for _ in range(RUNS)]
            ours, none, copy = (min(run[at][0] for run in runs) for at in range(3))
            peak = max(run[0][1] for run in runs)
            print(
                f"| {name} | {ours:.2f} | {none:.2f} | {copy:.2f} | {ours / none:.2f} × | "
                f"{ours / copy:.1f} × | {peak} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
