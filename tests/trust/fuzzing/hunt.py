"""Trials without end, in processes that may hang or die; what was found is saved, counted and told.

A run is reproducible: what case `number` of `seed` is follows from these two, the seeds and the
code alone.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fuzzing.inputs import Seed, Trial
from fuzzing.mutations import mutate
from fuzzing.trial import Find, Verdict, forbid_execution, limit_address_space, run
from helpers.paths import SAMPLES

HANGS = 60.0
"""Seconds without a word after which a process is killed; within itself it stops each step by its
CPU time.
"""
_SAVED = 3  # finds of one signature that are saved
_TELL = 120.0  # seconds between two lines that say how far it is
_ORACLE = 0.5  # of the trials ask torch


def mutation(number: int, seed: int, seeds: Sequence[Seed]) -> tuple[str, Trial]:
    """The target and the trial of case `number` of the run with `seed`.

    Targets are drawn first, so that many small seeds of one do not crowd out the others.
    """
    chance = random.Random(f"{seed}:{number}")
    target = chance.choice(sorted({one.target for one in seeds}))
    one = chance.choice([one for one in seeds if one.target == target])
    return target, mutate(one, seeds, chance)


@dataclass
class Tally:
    """Trials by target: how many, how many outputs were written, how many answers were wrong."""

    executions: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    signatures: Counter[str] = field(default_factory=Counter)
    compared: int = 0

    def count(self, target: str, verdict: Verdict) -> None:
        """Count a trial and its outputs."""
        self.executions[target] += 1
        self.accepted[target] += verdict.accepted

    def is_new(self, target: str, find: Find) -> bool:
        """Count a find; whether there were few of its signature before."""
        self.wrong[target] += 1
        self.signatures[find.signature] += 1
        return self.signatures[find.signature] <= _SAVED

    def lines(self, seconds: float) -> Iterator[str]:
        total = sum(self.executions.values())
        yield f"{'target':<24}{'cases':>9}{'outputs':>9}{'finds':>7}"
        for target in sorted(self.executions):
            yield (
                f"{target:<24}{self.executions[target]:>9,}{self.accepted[target]:>9,}"
                f"{self.wrong[target]:>7,}"
            )
        written, wrong = sum(self.accepted.values()), sum(self.wrong.values())
        yield f"{total:,} executions in {seconds:.0f} s, {total / max(seconds, 1e-9):.1f}/s"
        yield (
            f"{written:,} outputs were written, read back and compared with their source, "
            f"{self.compared:,} of them by torch"
        )
        yield f"{wrong:,} finds of {len(self.signatures)} kinds"
        yield from (
            f"  {count:>5} × {signature}" for signature, count in self.signatures.most_common()
        )


# ------------------------------------------------------------------------------------------ workers


def _work(
    pipe: Connection, numbers: range, seed: int, seeds_file: str, folder: str, mode: str
) -> None:
    """Run cases and tell of each: (number, target, trial) before it, the verdict after it."""
    warnings.simplefilter("ignore")
    from fuzzing.torch_oracle import TorchOracle

    seeds = pickle.loads(Path(seeds_file).read_bytes())
    work = Path(folder)
    torch_says = TorchOracle()
    good = SAMPLES / "tied.pt"
    torch_says(good, good)
    import_module("torch")  # what is imported on first use is imported now
    for one in seeds[:: max(1, len(seeds) // 12)]:
        run(one.trial, work)
    limit_address_space()
    forbid_execution(work)
    from fuzzing.structures import structures

    for number in numbers:
        made = (
            structures(number, seed)
            if _is_structural(number, mode)
            else [mutation(number, seed, seeds)]
        )
        for target, trial in made:
            pipe.send(("begin", number, target, trial))
            asks = random.Random(number).random() < _ORACLE
            verdict = run(trial, work, torch_says if asks else None)
            pipe.send(("end", verdict, torch_says.compared))
            torch_says.compared = 0


def _is_structural(number: int, mode: str) -> bool:
    """Every 40th number is a batch of made-up files, or as the mode says."""
    return mode == "structures" or (mode == "all" and number % 40 == 0)


class _Worker:
    """A process and what it is doing."""

    def __init__(self, hunt: Hunt, numbers: range) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="worker-", dir=hunt.work))
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.running: tuple[int, str, Trial] | None = None
        self.numbers = numbers
        self.begun = time.monotonic()
        arguments = (theirs, numbers, hunt.seed, str(hunt.seeds_file), str(self.folder), hunt.mode)
        self.process = multiprocessing.get_context("spawn").Process(
            target=_work, args=arguments, daemon=False
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Hunt:
    """Runs workers for some seconds and collects what they find."""

    def __init__(
        self,
        seeds: Sequence[Seed],
        work: Path,
        finds: Path,
        *,
        seed: int,
        workers: int,
        mode: str = "all",
    ) -> None:
        self.work, self.finds = work, finds
        self.seed, self.workers, self.mode = seed, workers, mode
        self.seeds_file = work / "seeds.pickle"
        self.seeds_file.write_bytes(pickle.dumps(list(seeds)))
        self.tally = Tally()

    def run(self, seconds: float, *, first: int = 0, cases: int | None = None) -> Tally:
        """Run for some seconds, or the numbers of so many cases (a number may be a batch of made-up
        files).
        """
        deadline = time.monotonic() + seconds
        end = 1 << 60 if cases is None else first + cases
        workers = [
            _Worker(self, range(first + index, end, self.workers)) for index in range(self.workers)
        ]
        begin = told = time.monotonic()
        try:
            while time.monotonic() < deadline and workers:
                ready = wait([worker.pipe for worker in workers], timeout=1)
                if time.monotonic() - told > _TELL:
                    told = time.monotonic()
                    print(
                        f"{sum(self.tally.executions.values()):,} executions in "
                        f"{told - begin:.0f} s",
                        flush=True,
                    )
                workers = [
                    next_
                    for worker in workers
                    if (next_ := self._attended(worker, worker.pipe in ready)) is not None
                ]
        finally:
            for worker in workers:
                worker.end()
        return self.tally

    def _attended(self, worker: _Worker, speaks: bool) -> _Worker | None:
        """The worker after its next message, or another one in its place; None when it has done all
        its numbers.
        """
        if speaks and not self._heard(worker):
            worker.process.join(5)
            if worker.process.exitcode == 0 and worker.running is None:
                worker.end()
                return None
            return self._replaced(worker, f"died with exit code {worker.process.exitcode}")
        if not speaks and time.monotonic() - worker.begun > HANGS * (1 if worker.running else 10):
            return self._replaced(worker, f"no answer within {HANGS:.0f} s")
        return worker

    def _heard(self, worker: _Worker) -> bool:
        """Take one message; False when there will be none any more."""
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            return False
        worker.begun = time.monotonic()
        if message[0] == "begin":
            worker.running = message[1:]
        else:
            self._count(worker, message[1], message[2])
            worker.running = None
        return True

    def _count(self, worker: _Worker, verdict: Verdict, compared: int) -> None:
        assert worker.running is not None
        number, target, trial = worker.running
        self.tally.count(target, verdict)
        self.tally.compared += compared
        for find in verdict.finds:
            self._found(number, target, trial, find)

    def _replaced(self, worker: _Worker, what: str) -> _Worker:
        worker.end()
        if worker.running is None:
            raise RuntimeError(f"a worker {what} between two cases")
        number, target, trial = worker.running
        self.tally.count(target, Verdict())
        self._found(number, target, trial, Find("killed", "all", what, trial.kind + " " + target))
        return _Worker(self, range(number + self.workers, worker.numbers.stop, self.workers))

    def _found(self, number: int, target: str, trial: Trial, find: Find) -> None:
        if self.tally.is_new(target, find):
            place = save_find(
                self.finds,
                f"{target}-{self.seed}-{number}-{sum(self.tally.wrong.values())}",
                trial,
                find,
            )
            print(f"found: {find.signature}: {find.step}: {find.what[:200]} → {place}", flush=True)


def save_find(folder: Path, name: str, trial: Trial, find: Find) -> Path:
    """A folder with the files, and what was wrong; `load_find` reads it."""
    place = folder / "".join(char if char.isalnum() or char in "-_" else "_" for char in name)
    for file, content in trial.files.items():
        path = place / "in" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (place / "in").mkdir(parents=True, exist_ok=True)
    (place / "trial.json").write_text(json.dumps({"named": trial.named, "kind": trial.kind}))
    (place / "find.txt").write_text("\n".join(find), errors="backslashreplace")
    return place


def load_find(place: Path) -> Trial:
    """The trial that `save_find` left."""
    about = json.loads((place / "trial.json").read_text())
    files = {
        str(path.relative_to(place / "in")): path.read_bytes()
        for path in sorted((place / "in").rglob("*"))
        if path.is_file()
    }
    return Trial(files, tuple(about["named"]), about["kind"])


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """An empty folder, in memory where there is room for it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="ckptconv-fuzz-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


def replay(place: Path, *, ask_torch: bool = False) -> Verdict:
    """Try a saved find again, in this process."""
    from fuzzing.torch_oracle import TorchOracle

    with work_folder() as work:
        torch_says = TorchOracle() if ask_torch else None
        try:
            return run(load_find(place), work, torch_says)
        finally:
            if torch_says is not None:
                torch_says.close()
