"""Batches that are killed at random moments, and run again until they are done: nothing is lost,
torn, or done twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from helpers.examples import examples
from helpers.program import environment

pytestmark = [
    pytest.mark.trust,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are found by /proc"),
]

KILLS = int(os.environ.get("CKPTCONV_KILLS", examples(40)))
JOBS = 24


@dataclass
class Killed:
    """What the kills met: how many there were, by whom they struck, and what was left of it."""

    kills: int = 0
    whom: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    runs: int = 0
    lost: int = 0
    torn: int = 0
    twice: int = 0


def make_inputs(room: Path) -> None:
    """Checkpoints of several kinds, and the manifest of what they are to become."""
    lines = []
    for number in range(JOBS):
        tensors = {f"module.w{at}": torch.randn(40 + number, 50) for at in range(4)}
        torch.save(tensors, room / f"{number}.pt")
        line: dict[str, object] = {"source": f"{number}.pt", "output": f"out/{number}.safetensors"}
        if number % 4 == 1:
            line |= {"max-shard-size": "20kB", "output": f"out/set{number}/model.safetensors"}
        elif number % 4 == 2:
            line |= {"output": f"out/{number}.pt", "dtype": "bf16"}
        elif number % 4 == 3:
            line |= {"output": f"out/set{number}", "max-shard-size": "1GB", "to": "safetensors"}
        lines.append(json.dumps(line))
    (room / "m.jsonl").write_text("\n".join(lines) + "\n")


def start(room: Path, report: str) -> subprocess.Popen[bytes]:
    """The batch, in a session of its own."""
    words = ["batch", "m.jsonl", "--jobs", "2", "--ledger", report, "-q"]
    return subprocess.Popen(
        [sys.executable, "-m", "ckptconv", *words],
        cwd=room,
        env=environment(),
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def strike(batch: subprocess.Popen[bytes], whom: str, chance: random.Random) -> bool:
    """Kill whom it is to strike; False where it was over before."""
    if batch.poll() is not None:
        return False
    below = children(batch.pid)
    with contextlib.suppress(ProcessLookupError):
        if whom == "worker":
            if not below:
                return False
            os.kill(chance.choice(below), signal.SIGKILL)
        elif whom == "driver":
            batch.kill()
        else:
            os.killpg(batch.pid, signal.SIGKILL)
    return True


def outputs(room: Path) -> dict[str, bytes]:
    """The files of all outputs that anybody would see."""
    return {
        str(path.relative_to(room)): path.read_bytes()
        for path in sorted((room / "out").rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.parts)
    }


def stamps(room: Path, whole: set[str]) -> dict[str, tuple[int, int]]:
    """What would be another one if an output were written again."""
    return {
        name: (found.st_ino, found.st_mtime_ns)
        for name in whole
        if (path := room / name).exists() and (found := path.stat())
    }


def test_batches_that_are_killed_and_run_again(tmp_path, figure):
    seed = int(os.environ.get("CKPTCONV_SEED", "0")) or random.randrange(1 << 30)
    chance = random.Random(seed)
    make_inputs(tmp_path)
    begun = time.monotonic()
    assert start(tmp_path, "whole.jsonl").wait(120) == 0
    usual = time.monotonic() - begun
    expected = outputs(tmp_path)
    met = Killed()
    while met.kills < KILLS:
        met.rounds += 1
        killed_until_done(tmp_path, met, chance, usual, expected)
        assert (met.lost, met.torn, met.twice) == (0, 0, 0), f"seed {seed}: {met}"
    figure("kills of batches that went on afterwards", met.kills)
    print(f"\nseed {seed}: {met}")


def killed_until_done(
    room: Path, met: Killed, chance: random.Random, usual: float, expected: dict[str, bytes]
) -> None:
    """One batch, killed again and again until it is done; what is wrong then is counted."""
    subprocess.run(["rm", "-rf", str(room / "out"), str(room / "r.jsonl")], check=True)
    kept: dict[str, tuple[int, int]] = {}
    while True:
        met.runs += 1
        batch = start(room, "r.jsonl")
        whom = chance.choice(["driver", "worker", "machine"])
        time.sleep(chance.uniform(0.1, usual))
        if met.kills < KILLS and strike(batch, whom, chance):
            met.kills += 1
            met.whom[whom] = met.whom.get(whom, 0) + 1
        code = batch.wait(120)
        assert batch.stderr is not None
        said = batch.stderr.read().decode()
        batch.stderr.close()
        assert code in (0, -9), said
        there = outputs(room)
        met.torn += sum(expected.get(name) != raw for name, raw in there.items())
        now = stamps(room, set(there))
        # an output of one file is whole as soon as it has its name, a set when its index has
        met.twice += sum(now.get(name) != stamp for name, stamp in kept.items())
        kept = {
            name: stamp
            for name, stamp in now.items()
            if "-of-" not in name or index_of(name) in now
        }
        if code == 0:
            break
    met.lost += len(expected.keys() - there.keys())
    left = [str(path) for path in (room / "out").rglob(".*")]
    assert left == []


def index_of(shard: str) -> str:
    """The index of the set that a shard belongs to."""
    return str(Path(shard).with_name("model.safetensors.index.json"))
