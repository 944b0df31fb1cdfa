"""Runs jobs in processes of this host, which are started once and used again.

A worker has one job at a time, so it is known which job a lost worker had. A worker whose driver is
gone ends at once.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ckptconv.batch.engines import Ended, Engine, Work, run_work
from ckptconv.io.hidden_folders import KeptFolder
from ckptconv.support import platforms
from ckptconv.support.errors import OptionRefused, printable
from ckptconv.support.records import dataclass
from ckptconv.support.signals import held_back, stop_in_good_order

_GRACE = 10.0
"""Seconds in which a worker that is told to end may clean up."""
_MANY_NEW = 700
"""Objects that are there since the collector last ran, from which it runs between two jobs."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: BaseProcess
    pipe: Any  # a connection, whose class is another one on Windows
    number: int | None = None


class Processes(Engine):
    """Runs tasks in so many processes, each started with a fresh interpreter.

    As many tasks more wait here, so that a worker has its next one as soon as it asks for it.
    """

    name = "processes"

    def __init__(self, workers: int) -> None:
        self.slots = 2 * workers
        self._most = workers
        self._workers: list[_Worker] = []
        self._waiting: deque[Work] = deque()
        self._held: int | None = None
        self._ended: list[Ended] = []

    @property
    def workers(self) -> int:
        return self._most

    def hold(self, descriptor: int) -> None:
        self._held = descriptor

    def start(self, work: Work) -> None:
        self._waiting.append(work)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give waiting tasks to workers that have nothing to do, or are yet to be started."""
        while self._waiting:
            worker = next((one for one in self._workers if one.number is None), None)
            worker = worker or self._new_worker()
            if worker is None:
                return
            raw = _pickled(self._waiting[0])
            worker.number = self._waiting.popleft().number
            try:
                worker.pipe.send_bytes(raw)
            except OSError:  # it was lost while it had nothing to do
                self._ended.append(self._lose(worker))

    def _new_worker(self) -> _Worker | None:
        """One worker more; None where there are as many as there can be."""
        if len(self._workers) == self._most:
            return None
        try:
            worker = self._started()
        except OSError as error:  # of descriptors, processes or memory there are no more
            if not self._workers:
                what = f"no worker process can be started: {error.strerror}"
                raise OptionRefused(what, hint="use --engine serial, or raise ulimit") from error
            self._most = len(self._workers)
            return None
        self._workers.append(worker)
        return worker

    def _started(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        held = None if self._held is None else platforms.PassedOn(self._held)
        threads = max(1, platforms.cores() // self._most)
        ours, theirs = context.Pipe()
        with closing(theirs):
            process = context.Process(
                target=_work, args=(theirs, held, threads), name="ckptconv-worker", daemon=True
            )
            try:
                # a stop between its start and what it is sent then would leave it with half of it
                with held_back(), platforms.unheard_by_children():
                    process.start()
            except OSError:
                ours.close()
                raise
        return _Worker(process, ours)

    def ended(self, seconds: float | None) -> Sequence[Ended]:
        if not self._ended:
            busy = {worker.pipe: worker for worker in self._workers if worker.number is not None}
            for pipe in wait(list(busy), seconds):
                self._ended.append(self._end(busy[pipe]))
            self._hand_out()
        found, self._ended = self._ended, []
        return found

    def _end(self, worker: _Worker) -> Ended:
        """What a worker says that has something to say, or is gone."""
        try:
            given = worker.pipe.recv()
        except (EOFError, OSError):
            return self._lose(worker)
        number, worker.number = worker.number, None
        assert number is not None
        return Ended(number, given)

    def _lose(self, worker: _Worker) -> Ended:
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join(_GRACE)
        number, code = worker.number, worker.process.exitcode
        assert number is not None
        return Ended(number, None, _ending(code))

    def close(self) -> None:
        workers, self._workers = self._workers, []
        self._waiting.clear()
        for worker in workers:
            if worker.number is not None:
                worker.process.terminate()
            worker.pipe.close()
        for worker in workers:
            worker.process.join(_GRACE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _pickled(work: Work) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(work))
    except Exception as error:  # keys=lambda, or whatever the own code of a user raises
        what = f"a job cannot be sent to another process: {printable(error)}"
        hint = "use functions of a module, or executor='serial'"
        raise OptionRefused(what, hint=hint) from error


def _ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "it does not answer"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"


def _work(pipe: Any, held: int | None, threads: int) -> None:
    """What a worker does: it makes itself ready, and serves."""
    for name in ("CKPTCONV_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    platforms.tame_blas()
    platforms.share_memory_between_threads(1)  # the thread below would set aside 64 MB for itself
    stop_in_good_order()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver has heard it, and says what to do
    threading.Thread(target=_end_with_driver, name="ckptconv-watch", daemon=True).start()
    try:
        _serve(pipe)
    except MemoryError:  # there is not enough to say so: the driver tells of a worker that is lost
        sys.exit(1)
    if held is not None:
        os.close(held)


def _serve(pipe: Any) -> None:
    """Do task after task, until there is nobody to give one."""
    # what a job makes goes with it; to look for cycles while it runs costs a sixth of a small one
    gc.disable()
    with closing(KeptFolder()) as folder:
        while True:
            try:
                work = pipe.recv()
            except (EOFError, OSError):
                break
            with folder.used():
                given = run_work(work)
            try:
                pipe.send(given)
            except OSError:  # the driver is gone, and so is who would hear of it
                break
            del work, given
            if gc.get_count()[0] > _MANY_NEW:
                gc.collect(1)  # what is new alone


def _end_with_driver() -> None:
    """End as soon as the driver has: nobody would hear of what is made here."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        wait([driver.sentinel])
        os._exit(1)
