"""How the tests run the program: a fork answers as a process of its own does, for every command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import click
import pytest

from ckptconv.cli.main import cli
from helpers.examples import some
from helpers.fork_server import RUNS
from helpers.paths import NUMBERS
from helpers.program import SAMPLES, run, run_bytes, run_on_terminal, run_process

TRAIN, DDP = SAMPLES / "ddp_cuda3_train.pt", SAMPLES / "ddp_cuda3.pt"
LORA, DELTA = NUMBERS / "lora_bf16", NUMBERS / "delta"
COMMANDS: dict[str, tuple[object, ...]] = {
    "convert": (TRAIN, "out.safetensors", "--verify"),
    "strip-module": (DDP, "out.pt"),
    "add-module": (DDP, "out.pt"),
    "inspect": (TRAIN, "--json"),
    "ls": (TRAIN, "*.bias", "--long"),
    "doctor": (TRAIN,),
    "diff": (TRAIN, DDP),
    "scan": (TRAIN, "--strict"),
    "manifest": (DDP, "-o", "ddp.sha256"),
    "verify": (DDP, "missing.sha256"),
    "stats": (TRAIN, "--top", "3"),
    "report": (TRAIN, "-o", "train.html", "--values"),
    "show": (DDP, "classifier.weight", "[0, :3]"),
    "merge": (DDP, SAMPLES / "tied.pt", "out.pt"),
    "average": (DDP, DDP, "out.pt"),
    "merge-lora": (LORA / "base", LORA, "out.safetensors"),
    "delta": (DELTA / "base", DELTA / "full", "weight_v000001"),
    "apply": (DELTA / "base", DELTA / "weight_v000001_xor", "out.safetensors"),
    "recover": (DDP, "out.pt"),
    "edit": (DDP, "--metadata", "license=mit"),
    "cleanup": (DDP,),
    "batch": (DDP, "--out-dir", "out", "--to", "torch", "--dry-run"),
    "devices": ("--export", "--json"),
    "help": ("keys",),
}


def test_every_command_is_started_once():
    assert sorted(COMMANDS) == cli.list_commands(click.Context(cli))


@pytest.mark.parametrize("command", some(4, [*COMMANDS, "--version", "nonsense"]))
def test_a_fork_answers_as_a_process_does(command, tmp_path):
    answers = []
    for name, way in (("fork", run), ("process", run_process)):
        (room := tmp_path / name).mkdir()
        done = way(command, *COMMANDS.get(command, ()), cwd=room)
        files = {path.name: path.read_bytes() for path in room.rglob("*") if path.is_file()}
        # a run that took long says "done", and what of the time was spent on what
        untimed = re.sub(r"(written|done) in [0-9.]+ s.*", "", done.err)
        answers.append((done.exit, done.out, untimed, files))
    assert answers[0] == answers[1]


def test_runs_after_each_other_in_one_process_are_as_the_first(tmp_path):
    inspected, wrong = ("inspect", TRAIN, "--json"), ("inspect", "--json", "--nonsense")
    commands = [("ls", DDP), inspected, wrong, ("help", "keys"), ("scan", TRAIN), ("ls",)]
    alone = [run(*command, cwd=tmp_path, alone=True) for command in commands]
    assert json.loads(alone[2].out)["error"]["exit_code"] == 2
    shared = [run(*command, cwd=tmp_path) for command in commands * 9]
    assert sum(math.isnan(done.rss) for done in shared) > RUNS  # more than one can have
    for number, done in enumerate(shared):
        first = alone[number % len(commands)]
        assert (done.exit, done.out, done.err) == (first.exit, first.out, first.err)


def test_a_run_has_its_own_folder_variables_streams_and_limits(tmp_path):
    shown = (
        "import os, resource, sys\n"
        "print(os.getcwd(), os.environ.get('X'), sys.stdin.read() == '', sys.argv[1:], "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "os._exit(sys.stdout.flush() or 7)"
    )
    done = run("a", "", cwd=tmp_path, env={"X": "1"}, before=shown, rlimits={"RLIMIT_NOFILE": 50})
    assert (done.exit, done.out, done.err) == (7, f"{tmp_path} 1 True ['a', ''] 50\n", "")
    assert "None" in run(cwd=tmp_path, before=shown).out


def test_a_run_that_is_killed_or_takes_too_long_tells_the_signal(tmp_path):
    assert run(cwd=tmp_path, before="import os; os.kill(os.getpid(), 15)").exit == -15
    assert run(cwd=tmp_path, before="import time; time.sleep(60)", limit=1).exit == -9


def test_what_is_printed_is_not_changed(tmp_path):
    raw = "import os; os.write(1, bytes(range(256))); os._exit(0)"
    assert run(cwd=tmp_path, before=raw.replace("256", "128")).out.encode() == bytes(range(128))
    with (tmp_path / "file").open("wb") as file:
        assert run_bytes("--version", cwd=tmp_path, stdout=file.fileno())[:2] == (0, b"")
    assert Path(tmp_path / "file").read_text().startswith("ckptconv ")


def test_a_terminal_is_one(tmp_path):
    assert run_on_terminal("--version", cwd=tmp_path, columns=60)[0] == 0
    code, shown = run_on_terminal("inspect", TRAIN, cwd=tmp_path, columns=60)
    assert code == 0 and "\x1b[" in shown
    assert "\x1b[" not in run("inspect", TRAIN, cwd=tmp_path).out
