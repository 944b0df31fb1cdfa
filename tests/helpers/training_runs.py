"""Trainings that are done in a process apart, and their losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from helpers.paths import ROOT
from helpers.resumed import Job


class Runs:
    """Jobs of training in a folder, which the module `program` of the tests does."""

    def __init__(self, folder: Path, program: str = "helpers.resumed") -> None:
        self.folder, self._program, self._jobs = folder, program, list[Job]()

    def add(self, name: str, **said: object) -> str:
        losses = self.folder / f"{name}.json"
        paths = {key: str(self.folder / str(said[key])) for key in ("load", "save") if key in said}
        self._jobs.append(Job(str(losses), **{**said, **paths}))  # type: ignore[arg-type]
        return name

    def go(self) -> dict[str, list[float]]:
        """Do what was added; the losses of each by its name."""
        jobs, self._jobs = self._jobs, []
        file = self.folder / "jobs.json"
        file.write_text(json.dumps([asdict(job) for job in jobs]))
        in_time([sys.executable, "-m", self._program, str(file)])
        return {Path(job.losses).stem: json.loads(Path(job.losses).read_text()) for job in jobs}


def in_time(command: list[str], seconds: float = 600) -> None:
    """Run what must succeed, and end it with all that it has started when its time is over."""
    started = subprocess.Popen(
        command, cwd=ROOT / "tests", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        _, told = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    assert started.returncode == 0, told[-3000:]
