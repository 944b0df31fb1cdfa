"""Standard output as OUT: the very bytes of the file, all or none, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from ckptconv.io.hidden_folders import temporary_folder
from helpers.examples import crossed
from helpers.program import (
    PROGRAM,
    SAMPLES,
    assert_one_error,
    environment,
    run,
    run_bytes,
    run_process,
)

TRAIN = SAMPLES / "ddp_cuda3_train.pt"


@pytest.fixture
def room(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    torch.save(
        {f"w{index}": torch.full((1 << 20,), float(index)) for index in range(4)},
        tmp_path / "big.pt",
    )
    return tmp_path


def started(room: Path, *arguments: object) -> subprocess.Popen[bytes]:
    env = environment(TMPDIR=str(room / "tmp"))
    return subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        cwd=room,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def printed(room: Path, *arguments: object, stdout: int | None = None) -> tuple[int, bytes, str]:
    return run_bytes(*arguments, cwd=room, env={"TMPDIR": str(room / "tmp")}, stdout=stdout)


def left(room: Path) -> list[str]:
    return sorted(str(path.relative_to(room)) for path in room.rglob("*") if path.is_file())


def test_a_source_is_not_appended_to(room):
    before = (room / "big.pt").read_bytes()
    with (room / "big.pt").open("ab") as stdout:
        code, _, err = printed(
            room, "convert", "big.pt", "-", "--to", "torch", stdout=stdout.fileno()
        )
    assert code == 1 and err.count("\n") == 1 and "is read by this run" in err
    assert (room / "big.pt").read_bytes() == before


MORE = [(), ("--verify",), ("--dtype", "bf16", "--device", "cuda:1", "--only", "state_dict")]


@pytest.mark.parametrize(
    ("to", "command", "more"),
    crossed(["torch", "safetensors"], ["convert", "strip-module", "add-module"], MORE),
    ids=str,
)
def test_it_gives_the_bytes_of_the_file(command, more, to, room):
    code, out, err = printed(room, command, TRAIN, "-", "--to", to, *more)
    assert code == 0 and "→ standard output (" in err
    assert run(command, TRAIN, "file", "--to", to, *more, cwd=room).exit == 0
    assert out == (room / "file").read_bytes()
    assert left(room) == ["big.pt", "file"]


def test_many_files_and_a_mapping_go_with_it(room):
    code, out, _ = printed(
        room, "convert", TRAIN, "-", "--to", "torch", "--save-mapping", "map.json", "--quiet"
    )
    assert code == 0 and (room / "map.json").is_file()
    (room / "x.pt").write_bytes(out)
    code, out, _ = printed(
        room, "convert", "x.pt", "-", "--to", "torch", "--rules", "map.json", "--reverse", "-q"
    )
    (room / "back.pt").write_bytes(out)
    assert code == 0 and run("diff", TRAIN, "back.pt", cwd=room).exit == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "add --to torch, --to safetensors or --to npz"),
        (("--to", "dcp"), "add --to torch, --to safetensors or --to npz"),
        (("--to", "torch", "--json"), "which cannot be used with --json"),
        (
            ("--to", "torch", "--max-shard-size", "1MB"),
            "which cannot be used with --max-shard-size",
        ),
    ],
)
def test_what_does_not_go_with_it_is_a_usage_error(arguments, why, room):
    done = run("convert", "big.pt", "-", *arguments, cwd=room)
    assert (
        done.exit == 2
        and why in done.err
        and ("error" in done.json() if "--json" in arguments else done.out == "")
    )


def test_a_terminal_is_refused(room):
    ours, theirs = os.openpty()
    code, _, err = printed(room, "convert", "big.pt", "-", "--to", "torch", stdout=theirs)
    os.close(ours), os.close(theirs)
    assert code == 2 and "standard output is a terminal" in err


def test_a_file_that_is_called_so_can_be_written_and_a_dry_run_prints_nothing(room):
    assert run("convert", TRAIN, "./-", "--to", "torch", cwd=room).out == ""
    assert (room / "-").stat().st_size > 1000
    done = run("convert", TRAIN, "-", "--to", "torch", "-n", cwd=room)
    assert done.exit == 0 and done.out == "" and "would write standard output" in done.err


def test_nothing_is_printed_of_what_is_damaged(room):
    raw = bytearray((room / "big.pt").read_bytes())
    raw[len(raw) // 2 + 4096] ^= 1
    (room / "bad.pt").write_bytes(raw)
    code, out, err = printed(room, "convert", "bad.pt", "-", "--to", "safetensors")
    assert (code, out) == (1, b"") and "CRC-32" in err
    assert left(room) == ["bad.pt", "big.pt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_it_is_an_error_and_no_mapping_is_left(room):
    with Path("/dev/full").open("wb") as full:
        code, _, err = printed(
            room,
            "convert",
            "big.pt",
            "-",
            "--to",
            "torch",
            "--save-mapping",
            "m.json",
            stdout=full.fileno(),
        )
    assert (code, err) == (1, "error: cannot print the result: No space left on device\n")
    assert left(room) == ["big.pt"]


def test_a_reader_that_leaves_is_an_error_without_noise(room):
    process = started(room, "convert", "big.pt", "-", "--to", "torch", "--save-mapping", "m.json")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(10) != b""
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(60), err) == (1, b"")
    assert left(room) == ["big.pt"] and list((room / "tmp").iterdir()) == []


def test_a_signal_leaves_nothing(room):
    process = started(room, "convert", "big.pt", "-", "--to", "torch", "--save-mapping", "m.json")
    assert process.stdout is not None
    process.stdout.read(10)
    time.sleep(0.1)  # it waits for us to read on
    process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait(60) in (1, 143)
    process.stderr.close()
    assert left(room) == ["big.pt"] and list((room / "tmp").iterdir()) == []


def test_what_a_kill_leaves_is_removed_by_the_next_one(room):
    process = started(room, "convert", "big.pt", "-", "--to", "torch")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    held = list((room / "tmp").iterdir())
    assert printed(room, "convert", TRAIN, "-", "--to", "torch")[0] == 0
    assert list((room / "tmp").iterdir()) == held and len(held) == 1  # of a process that lives
    process.kill()
    process.wait(60), process.stdout.close(), process.stderr.close()
    assert printed(room, "convert", TRAIN, "-", "--to", "torch")[0] == 0
    assert list((room / "tmp").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
def test_what_another_user_left_is_not_touched(room, monkeypatch):
    (theirs := room / "tmp" / ".ckptconv.0123abcd.ckptconv-tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(room / "tmp"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
        with temporary_folder():
            assert theirs.exists()
    with temporary_folder():
        assert not theirs.exists()


def test_a_temporary_folder_without_room_is_named(room):
    limit = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [PROGRAM[0], "-c", limit, *PROGRAM]
    done = run_process(
        "convert",
        "big.pt",
        "-",
        "--to",
        "torch",
        cwd=room,
        env={"TMPDIR": str(room / "tmp")},
        command=command,
    )
    error = assert_one_error(done)
    assert (
        error.startswith(
            "error: standard output: cannot be written: it exceeds the largest file size"
        )
        and "TMPDIR" in error
    )
    assert list((room / "tmp").iterdir()) == []
