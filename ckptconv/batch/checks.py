"""What is wrong with jobs as a whole, all of it found before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

from ckptconv.batch.identity import places_of
from ckptconv.convert.job import Job
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.support.errors import BatchRefused, CheckpointError

_AT_ONCE = 16


def check_jobs(jobs: Sequence[Job], names: Sequence[str] = ()) -> None:
    """Raise `BatchRefused` where jobs are in each other's way, or a source is missing.

    `names` are what each is called, such as its line in a manifest (by default its number).
    """
    called = names or [f"job {number}" for number in range(1, len(jobs) + 1)]
    problems = [*_taken_twice(jobs, called), *_in_the_way(jobs, called), *_missing(jobs, called)]
    if problems:
        raise BatchRefused(problems)


def _taken_twice(jobs: Sequence[Job], called: Sequence[str]) -> Iterator[str]:
    first: dict[str, str] = {}
    for job, name in zip(jobs, called, strict=True):
        key = _real(place_of(job.output))
        if (other := first.setdefault(key, name)) != name:
            yield f"{name}: has the output of {other}: {job.output}"


def _in_the_way(jobs: Sequence[Job], called: Sequence[str]) -> Iterator[str]:
    """Outputs that are a source, or lie in one."""
    sources: dict[str, str] = {}
    for job, name in zip(jobs, called, strict=True):
        for place in places_of(job):
            sources.setdefault(_real(place), name)
    for job, name in zip(jobs, called, strict=True):
        own = {_real(place) for place in places_of(job)}
        output = _real(place_of(job.output))
        for real in (output, *_around(output)):
            if real not in sources:
                continue
            if real == output and real in own:
                if job.force and len(own) == 1:
                    continue  # a file may be replaced by what it becomes
                yield f"{name}: its output is its source: {job.output}; write to another place"
            elif real == output:
                yield f"{name}: its output is the source of {sources[real]}: {job.output}"
            elif place_of(real).is_folder():
                yield f"{name}: its output lies in the source of {sources[real]}: {job.output}"
            break


def _around(path: str) -> Iterator[str]:
    """The folders around a place, from the inside out."""
    if "://" in path:
        while "/" in (path := path.rpartition("/")[0]).partition("://")[2]:
            yield path
        return
    yield from map(str, PurePath(path).parents)


def _real(place: Location) -> str:
    """A place without the links on the way to it."""
    path = place.local()
    return key_of_place(place) if path is None else os.path.realpath(path)


def key_of_place(place: Location) -> str:
    """How a place is known, wherever it lies."""
    return str(place.absolute).rstrip("/")


def _missing(jobs: Sequence[Job], called: Sequence[str]) -> Iterator[str]:
    asked = [(place, name) for job, name in zip(jobs, called, strict=True)
             for place in places_of(job)]  # fmt: skip
    far = [item for item in asked if item[0].is_far()]
    yield from filter(None, (_absent(*item) for item in asked if not item[0].is_far()))
    if far:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from filter(None, pool.map(lambda item: _absent(*item), far))


def _absent(place: Location, name: str) -> str | None:
    try:
        if place.exists():
            return None
    except (CheckpointError, OSError) as error:
        return f"{name}: {error}"
    return f"{name}: its source is missing: {place}"
