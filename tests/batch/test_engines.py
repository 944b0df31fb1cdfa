"""Who runs jobs: one suite for every engine, whatever it is made of."""

from __future__ import annotations

import errno
import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from ckptconv import Job, OptionRefused
from ckptconv.batch.choosing import engine_of
from ckptconv.batch.engines import Engine, OnExecutor, Serial
from ckptconv.batch.processes import Processes
from ckptconv.batch.work import Task
from ckptconv.cli.asked import engine_of_words
from ckptconv.cli.batching import batch
from helpers.engine_conformance import EngineConformance, WorkerConformance, checkpoint, drained
from helpers.lost_workers import KillingJob
from helpers.program import PROGRAM, run_process


class TestSerial(EngineConformance):
    def engine(self) -> Engine:
        return Serial()


class TestProcesses(WorkerConformance):
    def engine(self) -> Engine:
        return Processes(2)


class TestThreads(EngineConformance):
    @pytest.fixture(autouse=True)
    def _executor(self):
        with ThreadPoolExecutor(2) as self.executor:
            yield

    def engine(self) -> Engine:
        return engine_of(self.executor, None)


class TestProcessPool(EngineConformance):
    @pytest.fixture(autouse=True)
    def _executor(self):
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as self.executor:
            yield

    def engine(self) -> Engine:
        return engine_of(self.executor, None)

    def test_when_a_worker_is_lost_so_is_the_pool_and_each_task_is_told(self, tmp_path):
        checkpoint(tmp_path / "a.pt")
        poison = KillingJob(tmp_path / "a.pt", tmp_path / "a.safetensors")
        tasks = [Task(0, poison), Task(1, Job(tmp_path / "a.pt", tmp_path / "b.safetensors"))]
        with self.engine() as engine:
            found = drained(engine, tasks[:1])
            found |= drained(engine, tasks[1:])
        assert all("BrokenProcessPool" in found[number].lost for number in (0, 1))


def test_engines_have_names():
    assert isinstance(engine_of("serial", None), Serial)
    with engine_of("processes", 3) as found:
        assert isinstance(found, Processes) and found.slots == 6
    with ThreadPoolExecutor(5) as executor:
        found = engine_of(executor, None)
        assert isinstance(found, OnExecutor) and found.slots == 5
        assert engine_of(executor, 2).slots == 2
    for wrong in ("threads", None, 7):
        with pytest.raises(OptionRefused, match="serial, processes or ray"):
            engine_of(wrong, None)  # type: ignore[arg-type]
    with pytest.raises(OptionRefused, match="workers=0"):
        engine_of("serial", 0)


def test_tasks_are_done_by_the_workers_that_could_be_started(tmp_path, monkeypatch):
    start, may_start = Processes._started, iter([True, False])

    def started(engine):
        if not next(may_start):
            raise OSError(errno.EAGAIN, "no more processes")
        return start(engine)

    monkeypatch.setattr(Processes, "_started", started)
    checkpoint(tmp_path / "a.pt")
    jobs = [Job(tmp_path / "a.pt", tmp_path / f"{at}.safetensors") for at in range(4)]
    with Processes(3) as engine:
        found = drained(engine, [Task(at, job) for at, job in enumerate(jobs)])
    assert [found[at].given.state for at in range(4)] == ["done"] * 4
    may_start = iter([False])
    with Processes(3) as engine, pytest.raises(OptionRefused, match="process can be started: no m"):
        drained(engine, [Task(0, jobs[0])])


def test_words_of_an_engine_are_not_before_the_document(tmp_path, monkeypatch, capsys):
    class Talking(Serial):
        def start(self, work):
            print("(raylet) a node died")
            super().start(work)

    monkeypatch.setattr("ckptconv.cli.batching.engine_of_words", lambda *_: Talking())
    checkpoint(tmp_path / "a.pt")
    asked = [str(tmp_path / "a.pt"), "--out-dir", str(tmp_path / "out"), "--to", "safetensors"]
    batch.main([*asked, "--json"], standalone_mode=False)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["done"] == 1
    assert printed.err == "(raylet) a node died\n"


STOPPED_AT_A_START = """
import os, signal
from multiprocessing import util
from ckptconv.cli.main import main
start = util.spawnv_passfds
def started(path, words, passed):
    found = start(path, words, passed)
    if "--multiprocessing-fork" in words:
        {what}
    return found
util.spawnv_passfds = started
main()
"""


@pytest.mark.parametrize(
    ("jobs", "count", "engine"), [(None, 1, Serial), (None, 2, Processes), (1, 2, Serial)]
)
def test_work_of_more_than_one_piece_is_for_processes(jobs, count, engine):
    given = {"engine": None, "jobs": jobs, "address": None}
    assert type(engine_of_words(given, count)) is engine


@pytest.mark.parametrize(
    ("what", "code"),
    [("os.kill(found, signal.SIGINT)", 0), ("signal.raise_signal(signal.SIGTERM)", 143)],
    ids=["Ctrl-C, which a terminal sends to workers too", "the driver is stopped"],
)
def test_a_worker_that_starts_says_nothing_of_a_stop(what, code, tmp_path):
    (tmp_path / "in").mkdir()
    checkpoint(tmp_path / "in" / "a.pt")
    done = run_process(
        *("batch", "in", "--out-dir", "out", "--to", "safetensors", "--engine", "processes"),
        cwd=tmp_path,
        command=[PROGRAM[0], "-c", STOPPED_AT_A_START.format(what=what)],
    )
    assert (done.exit, "Traceback" in done.err) == (code, False), done.err
    assert (tmp_path / "out" / "a.safetensors").exists() is (code == 0)
