"""A process that may take little memory ends in one line, and leaves nothing behind."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from ckptconv.batch.receipts import Failure, failed_by
from ckptconv.support.errors import OUT_OF_MEMORY, OptionRefused, is_out_of_memory
from helpers.examples import crossed
from helpers.program import PROGRAM, run_process

MB = 1000 * 1000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("a", "b"):
        torch.save({f"{i}.w": torch.randn(512, 512) for i in range(6)}, folder / f"{name}.pt")
    return folder


# the address space in MB: too little for the program, for numpy, for a cast, for some of it
@pytest.mark.skipif(not shutil.which("prlimit"), reason="prlimit is not installed")
@pytest.mark.parametrize(
    ("command", "space"),
    crossed(
        [
            "convert a.pt OUT.npz --json",
            "convert a.pt OUT.safetensors",
            "convert a.pt OUT --to torch --dtype bf16 --max-shard-size 3MB --jobs 2",
        ],
        [60, 100, 110, 140, 190],
    ),
)
def test_too_little_memory_is_one_line(command, space, checkpoints, tmp_path):
    arguments = command.replace("OUT", str(tmp_path / "out")).split()
    limited = ("prlimit", f"--as={space * MB}", *PROGRAM)
    ended = run_process(*arguments, cwd=checkpoints, command=limited)
    left = [path.name for path in tmp_path.iterdir()]
    if ended.exit == 0:
        assert left == [Path(arguments[2]).name]
        return
    assert ended.exit == 1
    assert left == []
    said = json.loads(ended.out)["error"]["message"] if "--json" in arguments else ended.err
    assert "out of memory" in said
    assert said.strip().count("\n") == 0
    assert "Traceback" not in ended.err


@pytest.mark.trust
@pytest.mark.skipif(not shutil.which("prlimit"), reason="prlimit is not installed")
@pytest.mark.parametrize(("space", "goes"), [(110, False), (180, True)])
def test_the_workers_of_a_batch_take_no_more_than_they_need(space, goes, checkpoints, tmp_path):
    out = tmp_path / "out"
    command = f"batch . --out-dir {out} --to safetensors --jobs 2"
    limited = ("prlimit", f"--as={space * MB}", *PROGRAM)
    ended = run_process(*command.split(), cwd=checkpoints, command=limited)
    assert ended.exit == (0 if goes else 1)
    made = ["a.safetensors", "b.safetensors"] if goes else []
    assert sorted(path.name for path in out.iterdir()) == sorted([*made, "ckptconv-batch.jsonl"])
    assert ended.err.count("out of memory") == (0 if goes else 2)  # each job once
    assert "lost" not in ended.err


@pytest.mark.trust
@pytest.mark.skipif(not shutil.which("prlimit"), reason="prlimit is not installed")
@pytest.mark.parametrize(
    "command",
    [
        "batch . --out-dir OUT --to safetensors --jobs 2",
        "convert a.pt OUT --to torch --max-shard-size 1MB --jobs 2",
    ],
)
def test_few_descriptors_leave_fewer_workers_or_are_told(command, checkpoints, tmp_path):
    for most in (12, 24):
        out = tmp_path / str(most)
        limited = ("prlimit", f"--nofile={most}", *PROGRAM)
        ended = run_process(
            *command.replace("OUT", str(out)).split(), cwd=checkpoints, command=limited
        )
        assert ended.exit == (1 if most == 12 else 0)
        if most == 12:
            assert ended.err == (
                "error: no worker process can be started: Too many open files; "
                "use --engine serial, or raise ulimit\n"
            )


def _import_error_of(cause):
    try:
        try:
            raise ImportError(cause)
        except ImportError as error:
            raise ImportError("numpy's own advice") from error
    except ImportError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "no"), True),
        (OSError(errno.ENOSPC, "no"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("something else"), False),
        (_import_error_of("x.so: failed to map segment from shared object"), True),
        (_import_error_of("No module named 'numpy'"), False),
    ],
)
def test_what_is_told_to_be_out_of_memory(error, is_it):
    assert is_out_of_memory(error) is is_it


def test_a_job_of_a_batch_tells_of_it():
    assert failed_by(MemoryError()) == Failure("MemoryError", OUT_OF_MEMORY)


def test_a_job_of_a_batch_tells_what_to_do():
    assert failed_by(OptionRefused("no", hint="do this")).hint == "do this"
    assert failed_by(OptionRefused("no")).hint is None
