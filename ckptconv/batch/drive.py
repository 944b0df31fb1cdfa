"""Runs jobs on an engine: what is done is not done again, what may pass is tried again."""

from __future__ import annotations

import heapq
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ckptconv.batch.checks import check_jobs
from ckptconv.batch.choosing import EngineNamed, engine_of
from ckptconv.batch.engines import Ended, Engine
from ckptconv.batch.identity import fingerprint, key_of, names_of, stamps
from ckptconv.batch.ledger import Known, Ledger
from ckptconv.batch.own_code import code_version
from ckptconv.batch.receipts import Failure, Receipt
from ckptconv.batch.work import Task
from ckptconv.convert.job import Job
from ckptconv.io.outputs import clear_kept
from ckptconv.io.places import place_of
from ckptconv.io.remote.hosts import hosts_given
from ckptconv.io.remote.traffic import count
from ckptconv.support.choices import refuse_no_flag, refuse_no_path, refuse_other, spelling_checked
from ckptconv.support.errors import CheckpointError, OptionRefused
from ckptconv.support.records import dataclass

OnError = Literal["continue", "stop"]
What = Literal["started", "again"]

FIRST, LONGEST = 0.5, 30.0
"""Seconds before the second try of a job, and at most before any other; drawn between half and
all."""
_AHEAD = 256
"""Jobs of which the ledger says at once that they begin: each such line waits for the disk."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a job that has no receipt yet: it ``started``, or will be tried ``again``.

    `why` says what went wrong before another try, which comes after `wait` seconds.
    """

    what: What
    number: int
    job: Job
    why: str = ""
    wait: float = 0.0


OnEvent = Callable[[Event], None]


@spelling_checked
def convert_many(
    jobs: Iterable[Job],
    *,
    executor: EngineNamed = "serial",
    workers: int | None = None,
    ledger: str | os.PathLike[str] | None = None,
    retry_failed: bool = False,
    on_error: OnError = "continue",
    tries: int = 3,
    on_event: OnEvent | None = None,
) -> Iterator[Receipt]:
    """Run conversions, and give a `Receipt` for each as it ends.

    `executor` says who runs them: ``serial`` (here, one after the other), ``processes`` (as many
    as `workers` on this host; None: one for each core), ``ray`` (on the cluster that this process
    is connected to), or any `concurrent.futures.Executor`, which stays its owner's. With a
    `ledger`, a local file of JSON lines, a job that an earlier run finished is not run again, and
    gives its receipt with ``earlier=True``; one that failed is run again with `retry_failed` only,
    or when its source or its options have changed. Errors of the network, and jobs whose worker was
    lost, are tried `tries` times in all. `on_error` = ``stop`` begins nothing after a failure. A
    job that fails is a receipt, not an exception. `on_event` is called with an `Event`. Leaving the
    iterator early cancels what runs.

    Raises `CheckpointError` before anything is written when two jobs have one output, an output is
    in a source, a source is missing, or another process has the ledger.

    >>> for receipt in convert_many(
    ...     [Job("a.pt", "a.safetensors"), Job("b.pt", "b.safetensors")], executor="processes"
    ... ):  # doctest: +SKIP
    ...     print(receipt)
    """
    refuse_other("on_error", on_error, ("continue", "stop"))
    refuse_no_flag(retry_failed=retry_failed)
    if type(tries) is not int or tries < 1:
        raise OptionRefused(f"tries={tries!r:.100} is not a number of tries", hint="give 1 or more")
    if not isinstance(jobs, Iterable):
        raise OptionRefused(f"jobs={jobs!r:.100} are not jobs", hint="give a list of ckptconv.Job")
    if ledger is not None:
        refuse_no_path(ledger=ledger)
    if on_event is not None and not callable(on_event):
        raise OptionRefused(f"on_event={on_event!r:.100} cannot be called", hint="give a function")
    listed = list(jobs)
    for job in listed:
        if not isinstance(job, Job):
            raise OptionRefused(f"jobs: {job!r:.100} is not a Job", hint="give ckptconv.Job(...)")
    check_jobs(listed)
    engine = engine_of(executor, workers)
    wanted = Wanted(retry_failed, on_error, tries, on_event)
    return receipts_of(listed, engine, wanted, None if ledger is None else Path(ledger))


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a batch is to be run; see `convert_many`."""

    retry_failed: bool = False
    on_error: OnError = "continue"
    tries: int = 3
    on_event: OnEvent | None = None


def receipts_of(
    jobs: Sequence[Job], engine: Engine, wanted: Wanted, path: Path | None
) -> Iterator[Receipt]:
    """The receipts of jobs that were checked, as they end."""
    with ExitStack() as leaving:
        ledger = None
        keys = [key_of(job) for job in jobs]
        if path is not None:
            ledger = leaving.enter_context(closing(Ledger(path)))
            told = {"ckptconv": code_version(), "engine": engine.name}
            ledger.begin(keys, told)
            engine.hold(ledger.descriptor())
        with engine:
            yield from _Run(jobs, keys, engine, wanted, ledger).receipts()
        clear_kept(place_of(job.output) for job in jobs)  # of workers that were lost, now or before


class _Run:
    """One run of a batch."""

    def __init__(
        self,
        jobs: Sequence[Job],
        keys: Sequence[str],
        engine: Engine,
        wanted: Wanted,
        ledger: Ledger | None,
    ) -> None:
        self._jobs, self._keys = jobs, keys
        self._engine, self._wanted, self._ledger = engine, wanted, ledger
        self._known = Known() if ledger is None else ledger.known
        self._todo = iter(range(len(jobs)))
        self._ready: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []
        self._running: dict[int, Task] = {}
        self._is_over = False
        self._hosts = hosts_given()

    def receipts(self) -> Iterator[Receipt]:
        while True:
            yield from self._fill()
            wait = None  # until a job is to be tried again
            if self._later and not self._is_over:
                wait = max(0.0, self._later[0][0] - time.monotonic())
            if self._running:
                ended = map(self._ended, self._engine.ended(wait))
                yield from (receipt for receipt in ended if receipt is not None)
            elif wait is not None:
                time.sleep(wait)
            elif self._is_over or not self._ready:
                return

    # ------------------------------------------------------------------------------- what begins

    def _fill(self) -> Iterator[Receipt]:
        """Begin what there are slots for; gives the receipts of what need not be run."""
        while self._later and self._later[0][0] <= time.monotonic():  # has waited long enough
            self._ready.appendleft(heapq.heappop(self._later)[2])
        if not self._ready and not self._is_over:
            yield from self._choose()
        while self._ready and len(self._running) < self._engine.slots and not self._is_over:
            task = self._ready.popleft()
            self._running[task.number] = task
            self._tell(Event("started", task.number, task.job))
            self._engine.start(task)
            if not self._ready:
                yield from self._choose()

    def _choose(self) -> Iterator[Receipt]:
        """Some more jobs become ready, and the ledger says so first."""
        chosen: list[Task] = []
        for number in self._todo:
            found = self._looked_at(number)
            if isinstance(found, Receipt):
                yield found
                continue
            chosen.append(found)
            if len(chosen) == _AHEAD:
                break
        if chosen and self._ledger is not None:
            self._ledger.started(self._keys[task.number] for task in chosen)
        self._ready.extend(chosen)

    def _looked_at(self, number: int) -> Task | Receipt:
        """The task that a job is, or the receipt of an earlier run that still holds."""
        job = self._jobs[number]
        task = Task(number, job, hosts=self._hosts, code=code_version())
        if self._ledger is None:
            return task
        key = self._keys[number]
        known = self._known.receipts.get(key)
        made = self._known.made.get(key)
        is_there = made is not None and _by_now(made) == made
        if is_there:  # it is of this batch, which may put another one in its place
            job = replace(job, force=True)
        if key in self._known.started:  # it may also be of the run that did not end
            return replace(task, job=job, resumed=True)
        if known is None:
            return task
        is_same = known.fingerprint != "" and known.fingerprint == _known_as(job)
        if is_same and known.read:
            is_same = _by_now(known.read) == known.read
        if known.state == "failed":
            if is_same and not self._wanted.retry_failed:
                return replace(known, earlier=True)
            return replace(task, job=job, resumed=True)
        if not is_same:  # made anew, in the place of what was made of the other
            return replace(task, job=job)
        if is_there and not (job.verify and known.verified is None and not known.found):
            return replace(known, earlier=True)
        return replace(task, resumed=True)

    # ------------------------------------------------------------------------------- what ended

    def _ended(self, ended: Ended) -> Receipt | None:
        """The receipt of what ended, unless it is tried again."""
        task = self._running.pop(ended.number)
        receipt: Receipt = ended.given or _lost(task, ended.lost)
        if receipt.network and not receipt.worker.endswith(f":{os.getpid()}"):
            count(**receipt.network)  # what went over the network elsewhere, as told here
        error = receipt.error
        if error is not None and error.passing and task.tries + 1 < self._wanted.tries:
            wait = min(LONGEST, FIRST * 2**task.tries) * random.uniform(0.5, 1.0)
            later = replace(task, tries=task.tries + 1, resumed=True)
            heapq.heappush(self._later, (time.monotonic() + wait, task.number, later))
            self._tell(Event("again", task.number, task.job, error.message, wait))
            return None
        if self._ledger is not None:
            self._ledger.ended(self._keys[task.number], receipt)
        if error is not None and self._wanted.on_error == "stop":
            self._is_over = True
        return receipt

    def _tell(self, event: Event) -> None:
        if self._wanted.on_event is not None:
            self._wanted.on_event(event)


def _known_as(job: Job) -> str:
    """The fingerprint of a job; empty where its source cannot be asked."""
    try:
        return fingerprint(job)
    except (CheckpointError, OSError):
        return ""


def _by_now(made: Any) -> dict[str, Any]:
    """What files are by now that were written or read."""
    found = {}
    for name in made:
        try:
            found[name] = stamps(place_of(name)) or []
        except (CheckpointError, OSError):
            found[name] = []
    return found


def _lost(task: Task, why: str) -> Receipt:
    message = f"its worker was lost ({why}), {task.tries + 1} times"
    hint = "it may need more memory than there is, or the file crashes whatever reads it"
    return Receipt(
        names_of(task.job),
        str(task.job.output),
        "failed",
        fingerprint=_known_as(task.job),
        tries=task.tries + 1,
        error=Failure("WorkerLost", f"{message}; {hint}", hint, passing=True),
    )
