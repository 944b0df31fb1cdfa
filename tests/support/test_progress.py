"""How far a long run has come: what callbacks are told, and what a terminal and a log are shown of
it.
"""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptconv import Progress, convert_checkpoint, diagnose, diff_checkpoints, scan_checkpoint
from ckptconv.cli import progress_display
from ckptconv.cli.progress_display import COPYING, progress_shown
from ckptconv.convert import job, planner
from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.report import result_headline
from ckptconv.io import stream as outputs
from ckptconv.support.progress import Meter
from ckptconv.support.text import seconds_text
from helpers.program import run

MIB = 1 << 20


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("room")
    tree = {f"w{index}": torch.randn(3 * MIB // 4 + index) for index in range(4)}
    torch.save(tree, folder / "a.pt")
    torch.save({**tree, "w3": tree["w3"] + 1}, folder / "b.pt")
    return folder


def told(call: Any) -> list[Progress]:
    found: list[Progress] = []
    call(found.append)
    return found


def phases(found: list[Progress]) -> dict[str, list[Progress]]:
    by_phase: dict[str, list[Progress]] = {}
    for item in found:
        by_phase.setdefault(item.phase, []).append(item)
    return by_phase


def assert_counted(items: list[Progress], nbytes: int, step: int = 17 * MIB) -> None:
    """One phase from 0 to its total, which is about `nbytes`, never back, in steps that a bar can
    follow.
    """
    done = [item.done for item in items]
    assert done[0] == 0 and done[-1] == items[-1].total and done == sorted(done)
    assert {item.total for item in items} == {items[0].total}
    assert nbytes <= items[0].total <= nbytes + 100_000
    assert max(after - before for before, after in pairwise(done)) <= step
    assert len(done) >= min(5, nbytes // (4 * MIB))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4MB"}, {"dtype": "bf16"}])
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_conversion_tells_of_writing_verifying_and_waiting(options, output, room, tmp_path):
    def convert(tell: Any) -> None:
        convert_checkpoint(
            room / "a.pt", tmp_path / output, verify=True, on_progress=tell, **options
        )

    found = phases(told(convert))
    assert set(found) == {"write", "verify", "sync"}
    payload = (room / "a.pt").stat().st_size // (2 if "dtype" in options else 1) - 20_000
    assert_counted(found["write"], payload, 2 * MIB)
    assert_counted(found["verify"], payload, 2 * MIB)
    assert [item.done for item in found["sync"]][::2] == [0] * (len(found["sync"]) // 2)
    assert all(item.done == item.total for item in found["sync"][1::2])


def test_what_is_not_asked_for_is_no_phase(room, tmp_path):
    assert set(
        phases(
            told(
                lambda tell: convert_checkpoint(
                    room / "a.pt", tmp_path / "a.pt", fsync=False, on_progress=tell
                )
            )
        )
    ) == {"write"}


def test_a_comparison_a_scan_and_a_diagnosis_tell_what_they_read(room):
    size = (room / "a.pt").stat().st_size
    found = phases(
        told(lambda tell: diff_checkpoints(room / "a.pt", room / "b.pt", on_progress=tell))
    )
    assert set(found) == {"read", "measure"}
    assert_counted(found["read"], size - 20_000)
    assert found["measure"][-1].done == found["measure"][-1].total > 3 * MIB
    assert set(
        phases(told(lambda tell: diff_checkpoints(room / "a.pt", room / "a.pt", on_progress=tell)))
    ) == {"read"}
    for path, nbytes in ((room / "a.pt", size), (room, 2 * size - 100_000)):
        found = phases(told(lambda tell, path=path: scan_checkpoint(path, on_progress=tell)))
        assert set(found) == {"read"}
        assert_counted(found["read"], nbytes)
    found = phases(told(lambda tell: diagnose(room / "a.pt", values=True, on_progress=tell)))
    assert_counted(found["read"], size - 20_000)
    assert told(lambda tell: diagnose(room / "a.pt", on_progress=tell)) == []


def test_a_callback_that_fails_stops_the_run_and_leaves_nothing(room, tmp_path):
    def fail(_: Progress) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert_checkpoint(room / "a.pt", tmp_path / "out.pt", on_progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_meter_counts_no_more_than_there_is():
    found: list[Progress] = []
    meter = Meter("read", 10, found.append)
    meter.add(7)
    meter.add(7)
    meter.finish()
    assert [item.done for item in found] == [0, 10]


# -------------------------------------------------------------------------------------- the display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(
    monkeypatch: Any, stream: io.StringIO, steps: list[tuple[Progress, float]], **kwargs: Any
) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    awaited = kwargs.get("awaited", {})
    with progress_shown(COPYING, silent=kwargs.get("silent", False)) as tell:
        for progress, seconds in steps:
            if tell is not None:
                tell(progress)
            time.sleep(seconds)
            # a busy machine may take seconds to draw a first bar
            deadline = time.monotonic() + 20
            while progress in awaited and time.monotonic() < deadline:
                if awaited[progress] in stream.getvalue():
                    break
                time.sleep(0.01)
    return stream.getvalue()


STEPS = [
    (Progress("write", 0, 400 * MIB), 0.15),
    (Progress("write", 100 * MIB, 400 * MIB), 0.3),
    (Progress("write", 400 * MIB, 400 * MIB), 0.15),
    (Progress("sync", 0, 400 * MIB), 0.5),
    (Progress("sync", 400 * MIB, 400 * MIB), 0.0),
    (Progress("verify", 0, 400 * MIB), 0.1),
    (Progress("verify", 300 * MIB, 400 * MIB), 0.4),
]
AWAITED = {STEPS[1][0]: "25 %", STEPS[3][0]: "so far", STEPS[6][0]: "75 %"}


def test_a_log_gets_a_plain_line_now_and_then(monkeypatch):
    monkeypatch.setattr(progress_display, "_LINE_EVERY", 0.1)
    monkeypatch.setattr(progress_display, "_SURE_AFTER", 0.1)
    text = shown(monkeypatch, io.StringIO(), STEPS, awaited=AWAITED)
    lines = text.splitlines()
    assert text.endswith("\n") and "\r" not in text and "\x1b" not in text
    assert any(
        re.fullmatch(r"copying: 25 %, 104\.9 MB of 419\.4 MB, \d+\.\d [MG]B/s, \d+ s left", line)
        for line in lines
    )
    waits = [line for line in lines if line.startswith("waiting for the disk: ")]
    assert len(waits) >= 2 and len(set(waits)) == len(waits), (
        "the time goes on though nothing is told"
    )
    assert all(re.fullmatch(r"waiting for the disk: \d\.\d+ s so far", line) for line in waits)
    assert any(line.startswith("verifying: 75 %, ") for line in lines)


def test_lines_come_every_five_seconds_and_the_first_after_five():
    assert progress_display._LINE_EVERY == 5.0


def test_a_terminal_gets_a_bar_for_each_phase(monkeypatch):
    monkeypatch.setattr(progress_display, "_BAR_AFTER", 0.1)
    text = shown(monkeypatch, Terminal(), STEPS, awaited=AWAITED)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    rows = [row.rstrip() for row in re.split(r"[\r\n]+", plain)]
    assert any("copying" in row and "25 %" in row and "━" in row for row in rows)
    assert any("waiting for the disk" in row and "so far" in row for row in rows)
    assert any("verifying" in row and "75 %" in row for row in rows)
    assert all(len(row) <= 80 for row in rows)
    assert text.endswith("\x1b[2K"), "and it is gone in the end"


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch):
    monkeypatch.setattr(progress_display, "_LINE_EVERY", 0.1)
    stream = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_shown(COPYING, silent=False) as tell:
        assert tell is not None
        tell(Progress("write", 1, 2))
        time.sleep(0.3)
    assert "copying: 50 %" in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_what_is_over_soon_or_silent_shows_nothing(monkeypatch):
    before = threading.active_count()
    assert shown(monkeypatch, Terminal(), [(Progress("write", 0, MIB), 0.05)]) == ""
    monkeypatch.setattr(progress_display, "_LINE_EVERY", 0.01)
    assert shown(monkeypatch, io.StringIO(), STEPS[:2], silent=True) == ""
    assert shown(monkeypatch, io.StringIO(), []) == ""
    assert threading.active_count() == before


def test_a_log_that_nobody_reads_stops_nothing(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(progress_display, "_LINE_EVERY", 0.05)
    assert shown(monkeypatch, Closed(), STEPS[:2]) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "a.pt", "{out}", "-f"),
        ("diff", "a.pt", "b.pt"),
        ("scan", "a.pt"),
        ("doctor", "a.pt", "--values"),
    ],
)
def test_commands_show_it_and_quiet_ones_do_not(arguments, room, tmp_path):
    given = [item.format(out=tmp_path / "out.pt") for item in arguments]
    slow = (
        "import ckptconv.cli.progress_display as display, ckptconv.support.progress as progress, "
        "time\n"
        "display._LINE_EVERY = 0.05\n"
        "say = progress.Meter._say\n"
        "progress.Meter._say = lambda meter, done: (say(meter, done), time.sleep(0.03))\n"
    )
    word = {"convert": "copying", "diff": "comparing", "scan": "scanning", "doctor": "reading"}[
        arguments[0]
    ]
    assert re.search(rf"^{word}: \d+ %, ", run(*given, cwd=room, before=slow).err, re.MULTILINE)
    for more in ["--json"] if arguments[0] == "doctor" else ["--json", "--quiet"]:
        assert run(*given, more, cwd=room, before=slow).err == ""


# -------------------------------------------------------------------------------------- the summary


def test_the_time_is_told_as_people_tell_it():
    told = {
        0.0: "0.01 s",
        0.994: "0.99 s",
        0.996: "1.0 s",
        9.96: "10 s",
        59.4: "59 s",
        59.6: "1 min 0 s",
        3599.6: "1 h 0 min",
    }
    assert {seconds: seconds_text(seconds) for seconds in told} == told


def result(nbytes: int, seconds: float, **phases: float) -> str:
    plan: Any = SimpleNamespace(
        source="a.pt",
        source_format="torch zip",
        source_nbytes=nbytes,
        output="b.pt",
        to="torch",
        nbytes=nbytes,
        index=None,
        target=SimpleNamespace(is_folder=False),
    )
    return result_headline(ConversionResult(plan, seconds, None, phases=phases)).partition("), ")[2]


def test_a_small_file_has_no_rate_and_waiting_is_told_apart():
    slow_disk = result(5_600, 11.99, write=0.001, sync=11.98)
    assert slow_disk == "done in 12 s: 12 s waiting for the disk"
    assert result(5_600, 0.02, write=0.001, sync=0.01) == "written in 0.02 s"
    assert result(9_000_000, 2.0, write=1.9) == "written in 2 s"
    assert result(2_000_000_000, 4.0, write=4.0) == "written in 4 s at 500.0 MB/s"
    parts = result(2_000_000_000, 9.1, write=4.0, verify=2.0, sync=3.0)
    assert (
        parts == "done in 9.1 s: 4 s writing at 500.0 MB/s, 2 s verifying, 3 s waiting for the disk"
    )


def test_a_slow_disk_is_told_apart_from_a_slow_copy(room, tmp_path, monkeypatch):
    plain = outputs.OutputStream.settle

    def slow(stream: Any, *, fsync: bool) -> None:
        time.sleep(1.1)
        plain(stream, fsync=fsync)

    monkeypatch.setattr(outputs.OutputStream, "settle", slow)
    found = convert_checkpoint(room / "a.pt", tmp_path / "out.pt")
    assert found.phases["sync"] >= 1.1 > found.phases["write"]
    assert "waiting for the disk" in result_headline(found)


def test_opening_counts_too(room, tmp_path, monkeypatch):
    plain = planner.plan_conversion

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(1.1)
        return plain(*given, **named)

    monkeypatch.setattr(job, "plan_conversion", slow)
    found = convert_checkpoint(room / "a.pt", tmp_path / "out.pt")
    assert found.seconds >= found.phases["open"] >= 1.1
    assert " opening" in result_headline(found)
