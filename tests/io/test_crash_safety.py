"""Crash safety of the real program: whatever call fails, whenever it is killed, an output is the
old one, the new, or none.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.crash_scenes import (
    NEW,
    SCENES,
    Scene,
    contents,
    convert,
    hidden,
    numbers,
    numbers_at,
    same,
)
from helpers.examples import crossed, examples
from helpers.faults import ERRORS, KILL, STOPPED, STOPS, Call, Traced, require_strace
from helpers.program import PROGRAM, assert_one_error, environment

CLEANING = {"unlink", "unlinkat", "rmdir"}
"""Calls by which what is left is removed: where they fail, it stays."""

QUICK = ("force", "new shards", "shards of the same names")
"""The scenes of which the short run takes some calls."""


def made(scene: Scene, room: Path) -> Path:
    """A fresh room, as it is before the conversion."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    scene.prepare(room)
    return room


def assert_survives(scene: Scene, program: Traced, call: Call, fault: str, room: Path) -> None:
    """The promises, for one fault at one call."""
    made(scene, room)
    before, state = contents(room), scene.state(room)
    done, times = program.injected(call, fault)
    after = scene.state(room)
    left = contents(room)
    if fault in STOPPED:
        assert after in (state, "new")
        lost = [name for name in before if name not in left]
        assert after == "new" or not lost, lost
        assert done.err.strip().count("\n") == 0 and "Traceback" not in done.err, done.err
        assert "SIGKILL" in fault or after == "new" or left == before
    elif done.exit == 0:
        assert after == "new"
    elif times > 1:  # the thread that writes the error met it too
        assert (done.exit, after, left) == (1, state, before)
    else:
        line = assert_one_error(done)
        assert str(room) in line
        if "is in place" in line:
            assert after == "new" or (scene.written and same(scene.written(room) or {}, NEW)), line
        else:
            assert after == state, line
        if "is in place" not in line and call.name not in CLEANING:
            assert left == before, line
    if "in.pt" in before:
        assert left["in.pt"] == before["in.pt"]
    if "SIGKILL" not in fault and call.name not in CLEANING:
        assert hidden(room) == [] or "they are complete, in ." in done.err, done.err
    if left == before and not hidden(room):
        return
    again = program.untraced(*scene.again)
    assert again.exit == 0, again.err
    assert scene.state(room) == "new"
    assert hidden(room) == []


def sweep(scene: Scene, room: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    """The faults that were put in, by kind, and what broke: at each call an error, a kill and a
    stop, or only at some.
    """
    tried, broken = Counter[str](), []
    with Traced(scene.arguments(made(scene, room)), room) as program:
        program.warm()
        made(scene, room)
        found = program.calls()
        assert scene.state(room) == "new"
        for number, call in enumerate(found[::every]):
            for fault in (ERRORS[number % 2], KILL, STOPS[number % 2]):
                tried[fault] += 1
                try:
                    assert_survives(scene, program, call, fault, room)
                except (
                    Exception,
                    pytest.fail.Exception,
                ) as error:  # a broken promise, or a reader that cannot read
                    broken.append(
                        f"{call} {fault} {call.text[:160]}\n    {type(error).__name__}: "
                        f"{str(error)[:600]}"
                    )
    return tried, broken


def count_faults(tried: Counter[str], figure) -> None:
    """Add what was tried to the figures of the run."""
    figure("faults injected", tried.total())
    figure("kills survived", tried[KILL])


@pytest.mark.trust
@pytest.mark.parametrize("name", QUICK)
def test_some_faults_leave_an_output_whole(name, tmp_path, figure):
    require_strace()
    tried, broken = sweep(SCENES[name], tmp_path / "room", every=7)
    count_faults(tried, figure)
    assert not broken, "\n".join(broken)
    assert tried[KILL] > 2


@pytest.mark.trust
@pytest.mark.parametrize("name", SCENES)
def test_every_fault_leaves_an_output_whole(name, tmp_path, figure):
    require_strace()
    scene = SCENES[name]
    tried, broken = sweep(scene, tmp_path / "room")
    count_faults(tried, figure)
    assert not broken, f"{len(broken)} of {tried}\n" + "\n".join(broken)
    assert tried[KILL] > 20


# ---------------------------------------------------------------------------- stopped at any moment


def stopped(scene: Scene, room: Path, number: int, delays: list[float]) -> tuple[int, str]:
    """The exit code of a conversion and its lines on stderr, with that signal sent after each of
    the delays, in seconds.
    """
    command = [*PROGRAM, *map(str, scene.arguments(room))]
    child = subprocess.Popen(
        command, cwd=room, env=environment(), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        for delay in delays:
            time.sleep(delay)
            child.send_signal(number)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode, err.decode()


def stops_at_random(scene: Scene, room: Path, count: int) -> Counter[str]:
    """Runs that are stopped, each up to three times; returns how they ended."""
    made(scene, room)
    begin = time.monotonic()
    assert stopped(scene, room, signal.SIGINT, [])[0] == 0
    usual = time.monotonic() - begin
    return Counter(stop_at_random(scene, room, random.Random(seed), usual) for seed in range(count))


def stop_at_random(scene: Scene, room: Path, chance: random.Random, usual: float) -> str:
    """One run that is stopped, which usually takes so many seconds; returns its exit code and what
    became of the output.
    """
    made(scene, room)
    before, state = contents(room), scene.state(room)
    number = chance.choice((signal.SIGINT, signal.SIGTERM))
    again = [chance.uniform(0, 0.02) for _ in range(chance.randrange(3))]
    code, err = stopped(scene, room, number, [chance.uniform(0, 1.1 * usual), *again])
    after = scene.state(room)
    if "Traceback" in err:  # in python's own start, before it heard of us
        # the line of the package that was reached may be of its first imports, which have no
        # handler yet
        named = [line for line in err.splitlines() if "ckptconv/" in line]
        first = r'ckptconv/__(init__\.py|main__\.py", line \d, in <module>)'
        assert all(re.search(first, line) for line in named), err
        is_unheard = "Exception ignored in" in err  # python dropped the signal, and the run went on
        assert after == state or (is_unheard and code == 0 and after == "new"), err
    else:
        assert code in (0, 128 + number, -number), err
    assert after in (state, "new") and (code != 0 or after == "new")
    assert contents(room) == before or after == "new"
    assert hidden(room) == []
    return f"{code} {after}"


BIG = Scene(
    numbers(3_000_000),
    convert("--dtype", "bf16", output="out.safetensors"),
    numbers_at("out.safetensors"),
)
"""A conversion that takes its time: several threads cast, and write what they cast."""

WIDE = Scene(
    numbers(3_000_000),
    convert("--max-shard-size", "12MB", output="out"),
    numbers_at("out/model.safetensors.index.json"),
)
"""Files that several threads write side by side."""


@pytest.mark.parametrize("scene", [BIG, WIDE], ids=["casts", "side by side"])
def test_a_stop_at_any_moment_leaves_nothing(scene, tmp_path):
    stops_at_random(scene, tmp_path / "room", 3)


@pytest.mark.trust
@pytest.mark.parametrize(
    ("name", "count"),
    [("big", 80), ("wide", 60), ("shards of the same names", 60), ("dcp", 20)],
)
def test_many_stops_at_any_moment_leave_nothing(name, count, tmp_path, figure):
    count = examples(count)
    ends = stops_at_random({**SCENES, "big": BIG, "wide": WIDE}[name], tmp_path / "room", count)
    figure("runs stopped at a random moment", count)
    assert len(ends) > 1


@pytest.mark.parametrize(("fsync", "fails"), crossed([True, False], [False, True]))
def test_the_disk_begins_with_a_long_output_before_it_is_whole(fsync, fails, tmp_path):
    require_strace()
    source, out, log = (tmp_path / name for name in ("in.safetensors", "out.safetensors", "log"))
    values = np.arange(6 << 20, dtype=np.float32)  # 24 MB
    save_file({"w": values}, source)
    begins = "sync_file_range"
    strace = ["strace", "-f", "-o", log, "-e", f"trace={begins},fsync"]
    strace += ["-e", f"inject={begins}:error=EIO"] if fails else []
    more = () if fsync else ("--no-fsync",)
    subprocess.run(
        [*strace, *PROGRAM, "convert", source, out, *more], check=True, env=environment()
    )
    calls = [line.split("(")[0].split()[-1] for line in log.read_text().splitlines() if "(" in line]
    assert calls.count(begins) == (3 if fsync else 0)
    assert fsync == ("fsync" in calls)
    assert begins not in calls[calls.index("fsync") :] if fsync else calls == []
    assert np.array_equal(load_file(out)["w"], values)
