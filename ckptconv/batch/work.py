"""One job run by whoever runs it: in this process, in a worker, on another machine."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from pathlib import PurePath
from typing import Any

from ckptconv.batch.identity import (
    fingerprint,
    names_of,
    places_named,
    places_of,
    stamp_of,
    stamps,
)
from ckptconv.batch.own_code import code_version, other_code
from ckptconv.batch.receipts import Failure, Receipt, Stamps, failed_by
from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.job import Job
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.whole import standing
from ckptconv.formats.folders.sharded import shards_named
from ckptconv.io.location import Location
from ckptconv.io.outputs import clear_leftovers
from ckptconv.io.places import Named, place_of
from ckptconv.io.remote.hosts import allowing_hosts
from ckptconv.io.remote.traffic import traffic
from ckptconv.support.errors import (
    CheckpointError,
    OutputRefused,
    is_on_command_line,
    on_command_line,
    unwarned,
)
from ckptconv.support.records import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """A job that is to be run: its number in the batch, how often it was tried before.

    `resumed`: it was begun before, and its output may be there. `hosts` are those that a web
    server may redirect to. `code` is the version of the code that the driver has.
    """

    number: int
    job: Job
    tries: int = 0
    resumed: bool = False
    hosts: str = ""
    code: str = ""
    is_on_command_line: bool = field(default_factory=is_on_command_line)

    def run(self) -> Receipt:
        """Run the job; whatever goes wrong with it stands in the receipt."""
        begin, before = time.perf_counter(), traffic()
        found = _ran(self)
        network = traffic().since(before)
        return Receipt(
            names_of(self.job),
            str(self.job.output),
            seconds=time.perf_counter() - begin,
            tries=self.tries + 1,
            worker=f"{platform.node()}:{os.getpid()}",
            network=asdict(network) if network else None,
            **found,
        )

    def memory(self) -> int:
        """The bytes of memory that the job takes, about, by the size of its source."""
        nbytes = 0
        for place in places_of(self.job):
            with contextlib.suppress(CheckpointError, OSError):
                if place.is_file() and not place.is_far():
                    with contextlib.closing(place.open()) as source:
                        nbytes += source.size
        return min(_MOST, max(_LEAST, nbytes // _INDEX_SHARE))


_LEAST, _MOST = 256 << 20, 2 << 30
"""A conversion streams, and holds the index of its source."""
_INDEX_SHARE = 64
"""The index of a checkpoint takes less than one byte of so many."""


def _ran(task: Task) -> dict[str, Any]:
    """What became of the job, for its receipt."""
    job, known = task.job, ""
    if task.code not in ("", code_version()):
        told = other_code(f"{task.code} began the batch")
        failure = Failure("OtherVersion", str(told), told.hint)
        return {"state": "failed", "error": failure}
    try:
        with (
            allowing_hosts(task.hosts),
            on_command_line(task.is_on_command_line),
            unwarned(),  # the receipt has the notes
        ):
            job = _placed(job)
            known = fingerprint(job)
            _make_folder(job)
            return _converted(job, known, resumed=task.resumed)
    except Exception as error:  # whatever it is, the others go on
        with on_command_line(task.is_on_command_line):
            failure = failed_by(error)
        return {"state": "failed", "fingerprint": known, "error": failure}


def _placed(job: Job) -> Job:
    """The job with the places that its words name, which are asked for once."""
    found = places_of(job)
    source: Named = found[0] if len(found) == 1 else found
    return replace(job, source=source, output=place_of(job.output))


def _make_folder(job: Job) -> None:
    """Make the folder that the output of a job stands in, on this host."""
    path = place_of(job.output).local()
    if path is None or path.parent.is_dir():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"its folder cannot be made: {error.strerror}"
        raise OutputRefused(what, path=path) from error


def _converted(job: Job, known: str, *, resumed: bool) -> dict[str, Any]:
    if resumed:
        found = standing(job)
        if found.result is not None:
            # a process that was killed when it had just been made left hidden files beside it
            for path in {*_written(found.result), found.result.plan.output}:
                clear_leftovers(place_of(path))
            return _told(job, found.result, known, found=True)
        if found.kind == "part":  # all that is there is what will be there
            job = replace(job, force=True)
    return _told(job, job.run(), known)


def _told(job: Job, result: ConversionResult, known: str, *, found: bool = False) -> dict[str, Any]:
    plan = result.plan
    return {
        "state": "done",
        "fingerprint": known,
        "source_nbytes": plan.source_nbytes,
        "nbytes": result.nbytes,
        "tensors": sum([item.written for item in plan.state_dicts]),
        "format": plan.source_format,
        "to": plan.to,
        "notes": (*plan.notes, *(f"{path}: {what}" for path, what in result.odd_values())),
        "verified": result.verified,
        "found": found,
        "made": made_of(_written(result)),
        "read": _read_outside(plan, job) or None,
    }


def _written(result: ConversionResult) -> list[PurePath]:
    """The files of an output; of a folder that torch makes, the folder."""
    plan = result.plan
    if plan.target.is_folder:
        return [plan.output]
    files = [*plan.files, *(file for file in (plan.index, plan.mapping) if file is not None)]
    return [
        *(file.path for file in files),
        *(plan.folder / item.name for item in plan.beside.copied),
        *([] if plan.manifest is None else [plan.manifest]),
    ]


def _read_outside(plan: ConversionPlan, job: Job) -> Stamps:
    """What tells the files from others that a job read, and that its source does not name."""
    places = places_of(job)
    own = {place.path for place in places}
    told: list[tuple[Location, object]] = [
        (place_of(source.path), source.fingerprint())
        for source in plan.inputs
        if source.path not in own
    ]
    told += [(item.place, item.stamp) for item in plan.beside.copied if item.place is not None]
    shards = [shard for place in places_named(job) for shard in shards_named(place)]
    told += [(shard, shard.fingerprint()) for shard in shards]
    named = [place.absolute_name for place in places] if told else []
    read = {}
    for place, found in told:
        name = place.absolute_name
        if not any(name == one or name.startswith(f"{one}/") for one in named):
            read[name] = [["", *stamp_of(place, found)]]
    return read


def made_of(paths: Sequence[PurePath]) -> Stamps:
    """What tells the files of an output from others."""
    found = {}
    for path in paths:
        place = place_of(path)
        found[place.absolute_name] = stamps(place) or []
    return found
