"""What is wrong with jobs as a whole, all of it found before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath

from ckptconv.batch.identity import places_of, read_beside, real_name
from ckptconv.convert.job import Job
from ckptconv.convert.targets import is_folder_of_set, names_folder
from ckptconv.formats.folders.sharded import shards_named
from ckptconv.formats.target_format import FOR_FOLDERS, target_named
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


def check_apart(
    jobs: Sequence[Job], places: Sequence[Location], pages: Sequence[Location] = ()
) -> None:
    """Raise `BatchRefused` where `places`, such as a report, and `pages` are one place, or that of
    something that a job reads or writes, or where a page lies in a source.
    """
    taken = {real for job in jobs for real in _written_by(job).places()}
    sources = {real for job in jobs for real in _read_by(job)}
    taken |= sources | read_beside(jobs).keys()
    problems = []
    for place in (*places, *pages):
        if (real := real_name(place)) in taken:
            problems.append(f"{place}: is named twice, for two things; name another file")
        elif place in pages and not sources.isdisjoint(_around(real)):
            problems.append(f"{place}: lies in a source; name another file")
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
    to = target_named(FOR_FOLDERS if options.to is None else options.to)
    if options.to is not None and to.is_folder:
        return _Written(output, None, mapping, is_folder=True)
    is_set = options.max_shard_size is not None or options.with_files or names_folder(place)
    if not is_set:
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
    """Outputs and sources in the output of another job, which is a file, or a folder that is
    replaced as a whole.
    """
    folders = {
        places.output: number
        for number, places in enumerate(written)
        if places.is_folder or places.named in (None, places.output)
    }
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
    """Outputs that a job reads, or that lie in a source."""
    sources: dict[str, str] = {}
    for job, name in zip(jobs, called, strict=True):
        for real in _read_by(job):
            sources.setdefault(real, name)
    beside = read_beside(jobs)
    for job, name, places in zip(jobs, called, written, strict=True):
        if read := [place for place in places.places() if place in beside]:
            yield f"{name}: writes what {called[beside[read[0]]]} reads: {read[0]}"
        if places.mapping is not None and places.mapping in sources:
            yield f"{name}: its mapping is the source of {sources[places.mapping]}"
        own = _read_by(job)
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


def _read_by(job: Job) -> set[str]:
    """What a job reads, without links; of an index, the shards too."""
    places = places_of(job)
    shards = [shard for place in places for shard in shards_named(place)]
    return {real_name(place) for place in (*places, *shards)}


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
