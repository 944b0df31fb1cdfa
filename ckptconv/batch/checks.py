"""What is wrong with jobs as a whole, all of it found before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath

from ckptconv.batch.identity import places_of, real_name
from ckptconv.convert.job import Job
from ckptconv.convert.targets import is_folder_of_set
from ckptconv.formats.outputs import FOR_FOLDERS, target_named
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.support.errors import BatchRefused, CheckpointError

_AT_ONCE = 16


def check_jobs(jobs: Sequence[Job], names: Sequence[str] = ()) -> None:
    """Raise `BatchRefused` where jobs are in each other's way, or a source is missing.

    `names` are what each is called, such as its line in a manifest (by default its number).
    """
    called = names or [f"job {number}" for number in range(1, len(jobs) + 1)]
    written = [_written_by(job) for job in jobs]
    problems = [
        *_taken_twice(jobs, called, written),
        *_in_folders(jobs, called, written),
        *_in_the_way(jobs, called, written),
        *_missing(jobs, called),
    ]
    if problems:
        raise BatchRefused(problems)


def check_apart(jobs: Sequence[Job], places: Sequence[Location]) -> None:
    """Raise `BatchRefused` where `places`, such as a report and a page, are one place, or that of a
    source or an output.
    """
    taken = {real for job in jobs for real in _written_by(job).places()}
    taken |= {real_name(place) for job in jobs for place in places_of(job)}
    problems = []
    for place in places:
        if (real := real_name(place)) in taken:
            problems.append(f"{place}: is named twice, for two things; name another file")
        taken.add(real)
    if problems:
        raise BatchRefused(problems)


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a job writes: its output, the file that the shards of a set are named after, and the
    mapping, each without links. `is_folder`: torch makes the output, which is a folder.
    """

    output: str
    named: str | None = None
    mapping: str | None = None
    is_folder: bool = False

    def places(self) -> Iterator[str]:
        """Each of them."""
        yield from (place for place in (self.output, self.named, self.mapping) if place is not None)


def _written_by(job: Job) -> _Written:
    options, place = job.options, place_of(job.output)
    output = real_name(place)
    mapping = None if options.save_mapping is None else real_name(place_of(options.save_mapping))
    to = FOR_FOLDERS if options.to is None else target_named(options.to)
    if options.to is not None and to.is_folder:
        return _Written(output, None, mapping, is_folder=True)
    if options.max_shard_size is None and not options.with_files:
        return _Written(output, None, mapping)
    is_in_folder = is_folder_of_set(place, options.to)
    return _Written(output, f"{output}/{to.shards_named}" if is_in_folder else output, mapping)


_OF_SET = re.compile(r"(?:-\d{5}-of-\d{5}(\.[^./]*)?|\.index\.json)$")


def _taken_twice(
    jobs: Sequence[Job], called: Sequence[str], written: Sequence[_Written]
) -> Iterator[str]:
    first: dict[str, int] = {}
    for number, (job, places) in enumerate(zip(jobs, written, strict=True)):
        taken = [first.setdefault(place, number) for place in places.places()]
        if other := [found for found in taken if found != number]:
            yield f"{called[number]}: has the output of {called[other[0]]}: {job.output}"
    sets = {places.named: number for number, places in enumerate(written) if places.named}
    for number, (job, places) in enumerate(zip(jobs, written, strict=True)):
        for place in {*places.places()} if sets else ():
            other_set = sets.get(_OF_SET.sub(r"\1", place), number)
            if other_set != number and place not in sets:
                shard_of = f"is named like a shard of {called[other_set]}"
                yield f"{called[number]}: {shard_of}: {job.output}"


def _in_folders(
    jobs: Sequence[Job], called: Sequence[str], written: Sequence[_Written]
) -> Iterator[str]:
    """Outputs and sources in a folder that is the output of a job, and replaced as a whole."""
    folders = {places.output: number for number, places in enumerate(written) if places.is_folder}
    if not folders:
        return
    for number, (job, places) in enumerate(zip(jobs, written, strict=True)):
        for what, real in (
            *(("output", place) for place in places.places()),
            *(("source", real_name(place)) for place in places_of(job)),
        ):
            if around := [folder for folder in _around(real) if folder in folders]:
                other = called[folders[around[0]]]
                yield f"{called[number]}: its {what} lies in the output of {other}: {real}"
                break


def _in_the_way(
    jobs: Sequence[Job], called: Sequence[str], written: Sequence[_Written]
) -> Iterator[str]:
    """Outputs that are a source, or lie in one."""
    sources: dict[str, str] = {}
    for job, name in zip(jobs, called, strict=True):
        for place in places_of(job):
            sources.setdefault(real_name(place), name)
    for job, name, places in zip(jobs, called, written, strict=True):
        if places.mapping is not None and places.mapping in sources:
            yield f"{name}: its mapping is the source of {sources[places.mapping]}"
        own = {real_name(place) for place in places_of(job)}
        output = places.output
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
