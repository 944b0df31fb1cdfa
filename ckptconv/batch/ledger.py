"""The ledger of a batch: one JSON object a line, appended as jobs begin and end.

| line | what it says |
|---|---|
| ``{"batch": 1, "jobs": N, "other": [...]}`` | a run began; `other` outputs are not of it |
| ``{"state": "started", "output": ...}`` | a job was begun: its output may be there from now on |
| ``{"state": "done", ...}`` | a receipt |
| ``{"state": "failed", ...}`` | a receipt |

Of an output, the last line counts. A line that is not whole was cut off by a crash, and is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import field
from math import isfinite
from pathlib import Path
from typing import Any

from ckptconv.batch.receipts import Receipt, Stamps, receipt_of
from ckptconv.io.appended import AppendedLines, lines_of
from ckptconv.support.errors import MalformedCheckpoint
from ckptconv.support.records import dataclass

VERSION = 1
_BEGINNING = f'{{"batch": {VERSION},'.encode()
"""How each ledger begins, of which a full disk may have a part."""
_SYNC_EVERY = 1.0
"""Seconds after which what became of jobs is on the disk; what is lost is found out again."""


@dataclass(slots=True)
class Known:
    """What a ledger tells: of each output the last receipt, and the outputs that were begun since.

    `made` are the files of each output that were made last, which a later failure leaves where they
    are. `runs` counts the runs; `jobs` is the number of jobs of the last run (None: not said),
    `other` are the outputs that are not of it, `begun` and `last` the times of the first and the
    last line, in seconds since 1970.
    """

    receipts: dict[str, Receipt] = field(default_factory=dict)
    made: dict[str, Stamps] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    runs: int = 0
    jobs: int | None = None
    begun: float | None = None
    last: float | None = None
    other: frozenset[str] = frozenset()

    @property
    def outputs(self) -> set[str]:
        """The outputs that are there, or may be there."""
        return {*self.receipts, *self.started}


def read_ledger(path: Path) -> Known:
    """What a ledger tells; nothing where there is none.

    Raises `MalformedCheckpoint` for a file that is something else, which is thus never appended to.
    """
    known = Known()
    first = True
    for raw in lines_of(path):
        line = _line(raw)
        if line is None:
            if first and raw.strip() and not _BEGINNING.startswith(raw[: len(_BEGINNING)]):
                raise MalformedCheckpoint(
                    "is not a batch ledger", path=path, hint="name another file"
                )
            continue
        first = False
        _take(known, line)
    return known


def _line(raw: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and ("batch" in found or "state" in found) else None


def _take(known: Known, line: dict[str, Any]) -> None:
    at, jobs = line.get("time"), line.get("jobs")
    if isinstance(at, (int, float)) and isfinite(at):
        known.last = float(at)
        known.begun = known.last if known.begun is None else known.begun
    if "batch" in line:
        known.runs += 1
        known.jobs = jobs if type(jobs) is int and jobs >= 0 else None
        other = line.get("other")
        known.other = frozenset(map(str, other)) if isinstance(other, list) else frozenset()
        return
    output = line.get("key", line.get("output"))
    if type(output) is not str:
        return
    if line["state"] == "started":
        known.started.add(output)
        return
    try:
        receipt = receipt_of(line)
    except (TypeError, ValueError):  # of another version, or forged
        return
    known.receipts[output] = receipt
    if receipt.made is not None:
        known.made[output] = receipt.made
    known.started.discard(output)


class Ledger:
    """The ledger of a run that goes on; other processes are kept from it until it is closed."""

    def __init__(self, path: Path) -> None:
        read_ledger(path)  # something else is refused before it is locked
        self._file = AppendedLines(path)
        # again: another batch may have written to it until the lock was had
        self.known = read_ledger(path)
        self._pending = False
        self._synced = time.monotonic()

    def begin(self, keys: Iterable[str], told: Mapping[str, Any]) -> None:
        """A run begins, of jobs with these outputs."""
        mine = set(keys)
        other = sorted(self.known.outputs - mine)
        line = {"batch": VERSION, "jobs": len(mine), **told, "time": time.time()}
        self._append([line | ({"other": other} if other else {})], sync=True)

    def started(self, keys: Iterable[str]) -> None:
        """Jobs are about to begin, and the disk knows it."""
        now = time.time()
        lines = [{"state": "started", "key": key, "time": now} for key in keys]
        self._append(lines, sync=True)

    def ended(self, key: str, receipt: Receipt) -> None:
        """What became of a job. It is with the system at once, on the disk a little later."""
        line = {"key": key, **receipt.line(), "time": time.time()}
        late = time.monotonic() - self._synced >= _SYNC_EVERY
        self._append([line], sync=late)

    def _append(self, lines: Iterable[Mapping[str, Any]], *, sync: bool) -> None:
        self._file.append((json.dumps(line) for line in lines), sync=sync)
        self._pending = not sync
        if sync:
            self._synced = time.monotonic()

    def descriptor(self) -> int:
        """The number by which it is open: workers that have it keep others from it."""
        return self._file.descriptor()

    def close(self) -> None:
        """All of it is on the disk, and others may have it; once or more often."""
        if self._file.descriptor() >= 0:
            if self._pending:
                self._append([], sync=True)
            self._file.close()
