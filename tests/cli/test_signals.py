"""Signals that Python drops, or a library swallows: the program still stops, never with 0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.program import PROGRAM, ROOT, SAMPLES, run_process

DROPPED = """
import signal, sys, time
from ckptconv.support.signals import stop_in_good_order
class Dropping:
    def __del__(self):
        signal.raise_signal(signal.{name})
stop_in_good_order()
try:
    Dropping()
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(130)
finally:
    signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGTERM)
    print("cleaned up")
"""

SWALLOWED = """
import signal
from ckptconv.support.signals import stop_in_good_order
stop_in_good_order()
for name in ("SIGINT", "SIGTERM", "SIGINT"):
    try:
        signal.raise_signal(getattr(signal, name))
    except BaseException as error:
        print(type(error).__mro__[1].__name__)
    error = None
"""

HELD_BACK = """
import signal
from ckptconv.support.signals import held_back, stop_in_good_order
stop_in_good_order()
for _ in range(2):
    try:
        with held_back():
            with held_back():
                signal.raise_signal(signal.{name})
            print("in one piece")
        print("not stopped")
    except BaseException as error:
        print(type(error).__mro__[1].__name__)
"""

TOO_LATE = """
import signal
import ckptconv.cli.terminal as terminal
from ckptconv.cli.main import main
shown = terminal.print_summary
def swallowing(*given):
    try:
        signal.raise_signal(signal.{name})
    except BaseException:
        pass
    shown(*given)
terminal.print_summary = swallowing
main()
"""


IN_A_CLASS = """
import signal
import ckptconv.cli.terminal as terminal
from ckptconv.cli.main import main
class Stopping:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.{name})
def making(*given):
    class Made:
        stopping = Stopping()
terminal.print_summary = making
main()
"""

AT_THE_START = """
import signal
import ckptconv.cli.terminal as terminal
from ckptconv.__main__ import main
filling = terminal.{function}
def stopped():
    signal.raise_signal(signal.{name})
    filling()
terminal.{function} = stopped
main()
"""


def script(text: str, *arguments: object, cwd: Path):
    return run_process(*arguments, cwd=cwd, command=[PROGRAM[0], "-c", text])


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_that_python_drops_is_raised_again_and_a_second_one_does_not_disturb(
    name, code, tmp_path
):
    done = script(DROPPED.format(name=name), cwd=tmp_path)
    assert (done.exit, done.out) == (code, "cleaned up\n")
    assert "Exception ignored" not in done.err


def test_a_signal_after_one_that_was_swallowed_stops(tmp_path):
    done = script(SWALLOWED, cwd=tmp_path)
    assert (done.exit, done.out.split()) == (
        0,
        ["KeyboardInterrupt", "SystemExit", "KeyboardInterrupt"],
    )


@pytest.mark.parametrize(
    ("name", "raised"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit")]
)
def test_a_signal_that_is_held_back_stops_behind_the_block(name, raised, tmp_path):
    done = script(HELD_BACK.format(name=name), cwd=tmp_path)
    assert (done.exit, done.out) == (0, f"in one piece\n{raised}\n" * 2)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_that_was_swallowed_is_the_exit_code(name, code, tmp_path):
    done = script(
        TOO_LATE.format(name=name),
        "convert",
        SAMPLES / "ddp_cuda3_train.pt",
        "out.pt",
        cwd=tmp_path,
    )
    assert done.exit == code and (tmp_path / "out.pt").is_file()
    assert done.err.endswith(
        "error: stopped by a signal, but too late: the command had come to its end\n"
    )


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("function", ["fill_closed_streams", "take_any_text"])
def test_a_stop_before_there_are_streams_is_told_in_one_line(function, name, code, tmp_path):
    text = AT_THE_START.format(function=function, name=name)
    done = script(text, "convert", SAMPLES / "tied.pt", "out.pt", cwd=tmp_path)
    assert done.exit == code and "Traceback" not in done.err
    assert done.err.count("\n") == (name == "SIGINT") and not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_stop_that_comes_while_a_class_is_made_is_one(name, code, more, tmp_path):
    """Until 3.11, Python makes a RuntimeError of it."""
    words = ("convert", SAMPLES / "tied.pt", "out.pt")
    text = IN_A_CLASS.format(name=name)
    if more:  # which is made by another function
        text = text.replace("ckptconv.cli.terminal", "ckptconv.convert.report")
        text = text.replace("print_summary", "result_document")
    done = script(text, *words, *more, cwd=tmp_path)
    assert done.exit == code and "Traceback" not in done.err
    assert ("Interrupted" in done.out) is bool(more)


STOPPED_TORCH = """
import os, pathlib, signal
os.kill(os.getpid(), signal.SIGINT)
pathlib.Path("imported").touch()
class Tensor: pass
"""


def test_a_stop_while_torch_is_imported_waits_for_its_end(tmp_path):
    """Within torch's C++ code, what a handler raises aborts the process."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(STOPPED_TORCH)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = ("convert", SAMPLES / "dp_cuda0.pt", "out", "--to", "dcp")
    done = run_process(*words, cwd=tmp_path, env=env)
    assert done.exit == 130 and "Traceback" not in done.err, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "torch"]
