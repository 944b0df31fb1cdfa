"""What every engine must do; its tests inherit from `EngineConformance`, and say how it is made."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptconv import Job, Options
from ckptconv.batch.engines import Ended, Engine
from ckptconv.batch.work import Task
from helpers.lost_workers import KillingJob, SlowJob


def checkpoint(path: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint as DDP saves it; returns its tensors without the prefix."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(7, 5, generator=generator) for name in ("a.weight", "b.weight")}
    torch.save({f"module.{name}": tensor for name, tensor in tensors.items()}, path)
    return tensors


def drained(engine: Engine, tasks: list[Task]) -> dict[int, Ended]:
    """All tasks run by an engine, by their numbers."""
    waiting, found, running = list(tasks), {}, 0
    while waiting or running:
        while waiting and running < engine.slots:
            engine.start(waiting.pop(0))
            running += 1
        for ended in engine.ended(60):
            assert ended.number not in found
            found[ended.number] = ended
            running -= 1
    return found


class EngineConformance:
    """Results, errors, and a batch that goes through it."""

    def engine(self) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def room(self, tmp_path):
        """A folder that the engine's workers see."""
        return tmp_path

    def test_every_task_ends_once_with_what_became_of_it(self, room):
        expected = {number: checkpoint(room / f"{number}.pt", number) for number in range(7)}
        tasks = [
            Task(number, Job(room / f"{number}.pt", room / f"out/{number}.safetensors"))
            for number in expected
        ]
        with self.engine() as engine:
            found = drained(engine, tasks)
        assert sorted(found) == list(expected)
        for number, ended in found.items():
            receipt = ended.given
            assert receipt is not None and ended.lost == ""
            assert (receipt.state, receipt.error, receipt.tensors) == ("done", None, 2)
            made = load_file(room / f"out/{number}.safetensors")
            assert sorted(made) == sorted(expected[number])
            assert all(torch.equal(made[name], value) for name, value in expected[number].items())
            assert receipt.nbytes == (room / f"out/{number}.safetensors").stat().st_size

    def test_an_error_is_told_and_the_others_go_on(self, room):
        checkpoint(room / "good.pt")
        (room / "bad.pt").write_bytes(b"PK\x03\x04" + bytes(100))
        tasks = [
            Task(1, Job(room / "bad.pt", room / "bad.safetensors")),
            Task(2, Job(room / "good.pt", room / "good.safetensors")),
            Task(3, Job(room / "good.pt", room / "n.safetensors", Options(only="nothing"))),
        ]
        with self.engine() as engine:
            found = drained(engine, tasks)
        states = {number: ended.given.state for number, ended in found.items() if ended.given}
        assert states == {1: "failed", 2: "done", 3: "failed"}
        errors = {number: ended.given.error for number, ended in found.items() if ended.given}
        assert errors[1].kind == "MalformedCheckpoint" and "bad.pt" in errors[1].message
        assert errors[3].kind == "AmbiguousStateDict" and not errors[3].passing
        assert not (room / "bad.safetensors").exists()

    def test_a_task_of_other_code_is_not_run(self, room):
        checkpoint(room / "a.pt")
        with self.engine() as engine:
            task = Task(0, Job(room / "a.pt", room / "a.safetensors"), code="0.0.1+of another")
            receipt = drained(engine, [task])[0].given
        assert receipt is not None and receipt.error is not None
        assert receipt.error.kind == "OtherVersion" and "0.0.1+of another" in receipt.error.message
        assert not (room / "a.safetensors").exists()

    def test_a_batch_goes_through_it_and_is_not_done_again(self, room):
        from ckptconv import convert_many

        for number in range(5):
            checkpoint(room / f"{number}.pt", number)
        (room / "4.pt").write_bytes(b"nothing")
        jobs = [Job(room / f"{number}.pt", room / f"{number}.safetensors") for number in range(5)]
        with self.engine() as engine:
            first = list(convert_many(jobs, executor=engine, ledger=room / "report.jsonl"))
        assert sorted(receipt.state for receipt in first) == ["done"] * 4 + ["failed"]
        stamps = {path: path.stat().st_mtime_ns for path in room.glob("*.safetensors")}
        with self.engine() as engine:
            second = list(convert_many(jobs, executor=engine, ledger=room / "report.jsonl"))
        assert all(receipt.earlier for receipt in second) and len(second) == 5
        assert stamps == {path: path.stat().st_mtime_ns for path in room.glob("*.safetensors")}


class WorkerConformance(EngineConformance):
    """Of engines with workers of their own: cancellation, and the loss of one."""

    def test_a_lost_worker_is_told_and_the_others_go_on(self, room):
        for name in ("poison", "good"):
            checkpoint(room / f"{name}.pt")
        poison = KillingJob(room / "poison.pt", room / "poison.safetensors")
        good = [Job(room / "good.pt", room / f"good{number}.safetensors") for number in range(4)]
        tasks = [Task(number, job) for number, job in enumerate([poison, *good])]
        with self.engine() as engine:
            found = drained(engine, tasks)
            assert found[0].given is None and found[0].lost
            assert all(found[number].given.state == "done" for number in range(1, 5))
            again = drained(engine, [Task(9, poison, tries=1, resumed=True)])
        assert again[9].given is not None and again[9].given.state == "done"

    def test_leaving_early_cancels_what_runs_and_leaves_nothing(self, room):
        checkpoint(room / "slow.pt")
        with self.engine() as engine:
            engine.start(Task(0, SlowJob(room / "slow.pt", room / "out" / "slow.safetensors")))
            begun = time.monotonic()
            while not (room / "slow.pt.begun").exists():
                assert time.monotonic() - begun < 60
                time.sleep(0.05)
            begun = time.monotonic()
        assert time.monotonic() - begun < 30
        while not (room / "slow.pt.ended").exists():
            assert time.monotonic() - begun < 30
            time.sleep(0.05)
        assert list((room / "out").iterdir()) == []
