"""What tensor rules cost: `convert --rules` of one layout into another, against `cp` of its input
and against `convert` without rules, in turn; the peak of memory. `make bench-layouts`.

Seconds are those of the clock, and those of the processor (user and system of whole processes),
which a machine that does other work changes least. The output is removed before each run. Of the
runs the quickest counts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

from timed_command import timed

SIZE = int(os.environ.get("BENCH_LAYOUTS_MB", "2048")) << 20
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


def _rows(source: Path, out: Path, listed: Path) -> tuple[list[float], list[float], int]:
    """Seconds, and seconds of the processor, of a conversion by rules, one without rules, and `cp`;
    the peak of memory of the first in MB.
    """
    plain = [sys.executable, "-m", "ckptconv", "convert", str(source), str(out)]
    plain += ["--no-fsync", "--quiet"]
    sides = [[*plain, "--rules", str(listed)], plain, ["cp", str(source), str(out)]]
    runs: list[list[tuple[float, float, int]]] = [[] for _ in sides]
    for _ in range(RUNS):
        for side, found in zip(sides, runs, strict=True):
            out.unlink(missing_ok=True)
            found.append(timed(side))
    seconds, busy = ([min(run[at] for run in found) for found in runs] for at in range(2))
    return seconds, busy, max(run[2] for run in runs[0]) >> 10


def main() -> None:
    print("| layout | rules s | none s | `cp` s | rules / `cp` | processor s | peak MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, (shapes, rules) in _cases().items():
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
            source, out, listed = (
                Path(folder) / each for each in ("in.safetensors", "out.safetensors", "r.json")
            )
            _write(source, shapes)
            listed.write_text(json.dumps(rules))
            (ours, none, copy), busy, peak = _rows(source, out, listed)
            print(
                f"| {name} | {ours:.2f} | {none:.2f} | {copy:.2f} | {ours / copy:.2f} × | "
                f"{' / '.join(f'{each:.2f}' for each in busy)} | {peak} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
