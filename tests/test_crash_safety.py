"""Crash safety of the real program: whatever call fails, whenever it is killed, an output is the old one, the new, or none."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from crash_scenes import SCENES, Scene, contents, hidden
from faults import ERRORS, KILL, STOPPED, STOPS, Call, calls, injected, require_strace
from program import assert_one_error, run

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


def assert_survives(scene: Scene, call: Call, fault: str, room: Path) -> None:
    """The promises, for one fault at one call."""
    made(scene, room)
    before, state = contents(room), scene.state(room)
    done = injected(call, fault, scene.arguments(room), room)
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
    else:
        line = assert_one_error(done)
        assert str(room) in line
        assert after == ("new" if "is in place" in line else state), line
        if after == state and call.name not in CLEANING:
            assert left == before, line
    if "in.pt" in before:
        assert left["in.pt"] == before["in.pt"]
    if "SIGKILL" not in fault and call.name not in CLEANING:
        assert hidden(room) == [] or "found in" in done.err, done.err
    if left == before:
        return
    again = run(*scene.arguments(room), "--force", cwd=room, limit=120)
    assert again.exit == 0, again.err
    assert scene.state(room) == "new"
    assert hidden(room) == []


def sweep(scene: Scene, room: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    """The faults that were put in, by kind, and what broke: at each call an error, a kill and a stop, or only at some."""
    for _ in ("modules are compiled", "modules are there"):
        found = calls(scene.arguments(made(scene, room)), room)
    assert scene.state(room) == "new"
    tried, broken = Counter[str](), []
    for number, call in enumerate(found[::every]):
        for fault in (ERRORS[number % 2], KILL, STOPS[number % 2]):
            tried[fault] += 1
            try:
                assert_survives(scene, call, fault, room)
            except Exception as error:  # a promise that is broken, or a reader that cannot read what is there
                broken.append(f"{call} {fault} {call.text[:160]}\n    {type(error).__name__}: {str(error)[:600]}")
    return tried, broken


@pytest.mark.parametrize("name", QUICK)
def test_some_faults_leave_an_output_whole(name, tmp_path):
    require_strace()
    tried, broken = sweep(SCENES[name], tmp_path / "room", every=11)
    assert not broken, "\n".join(broken)
    assert tried[KILL] > 2


@pytest.mark.trust
@pytest.mark.parametrize("name", SCENES)
def test_every_fault_leaves_an_output_whole(name, tmp_path, record_property):
    require_strace()
    scene = SCENES[name]
    tried, broken = sweep(scene, tmp_path / "room", every=4 if scene.needs_torch else 1)
    for fault, count in tried.items():
        record_property(fault, count)
    assert not broken, f"{len(broken)} of {tried}\n" + "\n".join(broken)
    assert tried[KILL] > 20
