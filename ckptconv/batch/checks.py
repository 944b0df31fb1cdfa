"""What is wrong with jobs as a whole, all of it found before anything is written."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from pathlib import PurePath

from ckptconv.batch.identity import places_of, read_beside, real_names
from ckptconv.convert.job import Job
from ckptconv.convert.targets import is_folder_of_set, names_folder
from ckptconv.formats.folders.sharded import shards_named
from ckptconv.formats.target_format import FOR_FOLDERS, target_named
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.support.errors import BatchRefused, CheckpointError
from ckptconv.support.records import dataclass

_AT_ONCE = 16


def check_jobs(jobs: Sequence[Job], names: Sequence[str] = ()) -> Sequence[Checked]:
    """Raise `BatchRefused` where jobs are in each other's way, or a source is missing.

    `names` are what each is called, such as its line in a manifest (by default its number).
    """
    called = names or [f"job {number}" for number in range(1, len(jobs) + 1)]
    real = real_names()
    checked = [_checked(job, name, real) for job, name in zip(jobs, called, strict=True)]
    looks = (_taken_twice, _in_folders, _in_the_way, _missing)
    problems = [problem for look in looks for problem in look(checked)]
    if problems:
        raise BatchRefused(problems)
    return checked


def check_apart(
    checked: Sequence[Checked], places: Sequence[Location], pages: Sequence[Location] = ()
) -> None:
    """Raise `BatchRefused` where `places`, such as a ledger, and `pages` are one place, or that of
    something that a job reads or writes, or where a page lies in a source.
    """
    real = real_names()
    taken = {written for one in checked for written in one.written()}
    sources = {read for one in checked for read in one.read}
    taken |= sources | read_beside([one.job for one in checked]).keys()
    problems = []
    for place in (*places, *pages):
        name = real(place)
        if name in taken:
            problems.append(f"{place}: is named twice, for two things; name another file")
        elif place in pages and not sources.isdisjoint(_around(name)):
            problems.append(f"{place}: lies in a source; name another file")
        taken.add(name)
    if problems:
        raise BatchRefused(problems)


@dataclass(frozen=True, slots=True)
class Checked:
    """A job, what it is called, and where it reads and writes, each place without links.

    `sources` are the `places` that it names, `read` what it reads: of an index, the shards too. It
    writes its `output`, the file that the shards of a set are `named` after, and what is `told` of
    it.
    `is_folder`: torch makes the output, which is a folder.
    """

    job: Job
    name: str
    places: Sequence[Location]
    sources: tuple[str, ...]
    read: frozenset[str]
    output: str
    named: str | None = None
    told: Mapping[str, str] = field(default_factory=dict)
    is_folder: bool = False

    def written(self) -> Iterator[str]:
        """Each place that it writes."""
        places = self.output, self.named, *self.told.values()
        yield from (place for place in places if place is not None)


def _checked(job: Job, name: str, real: Callable[[Location], str]) -> Checked:
    options, place = job.options, place_of(job.output)
    places = places_of(job)
    shards = [shard for source in places for shard in shards_named(source)]
    output, named = real(place), None
    to = target_named(FOR_FOLDERS if options.to is None else options.to)
    is_folder = options.to is not None and to.is_folder
    is_set = options.max_shard_size is not None or options.with_files or names_folder(place)
    if is_set and not is_folder:
        is_in_folder = is_folder_of_set(place, options.to)
        named = f"{output}/{to.shards_named}" if is_in_folder else output
    beside = {"mapping": options.save_mapping, "manifest": options.manifest}
    told = {what: real(place_of(path)) for what, path in beside.items() if path is not None}
    sources = tuple(map(real, places))
    read = frozenset((*sources, *map(real, shards)))
    return Checked(job, name, places, sources, read, output, named, told, is_folder)


_OF_SET = re.compile(r"(?:-\d{5}-of-\d{5}(\.[^./]*)?|\.index\.json)$")


def _taken_twice(checked: Sequence[Checked]) -> Iterator[str]:
    first: dict[str, Checked] = {}
    for one in checked:
        taken = [first.setdefault(place, one) for place in one.written()]
        if other := [found for found in taken if found is not one]:
            yield f"{one.name}: has the output of {other[0].name}: {one.job.output}"
    sets = {one.named: one for one in checked if one.named}
    for one in checked:
        for place in {*one.written()} if sets else ():
            other_set = sets.get(_OF_SET.sub(r"\1", place), one)
            if other_set is not one and place not in sets:
                yield f"{one.name}: is named like a shard of {other_set.name}: {one.job.output}"


def _in_folders(checked: Sequence[Checked]) -> Iterator[str]:
    """Outputs and sources in the output of another job, which is a file, or a folder that is
    replaced as a whole.
    """
    folders = {
        one.output: one for one in checked if one.is_folder or one.named in (None, one.output)
    }
    for one in checked:
        for what, real in (
            *(("output", place) for place in one.written()),
            *(("source", place) for place in one.sources),
        ):
            if around := [folder for folder in _around(real) if folder in folders]:
                other = folders[around[0]].name
                yield f"{one.name}: its {what} lies in the output of {other}: {real}"
                break


def _in_the_way(checked: Sequence[Checked]) -> Iterator[str]:
    """Outputs that a job reads, or that lie in a source."""
    sources: dict[str, str] = {}
    for one in checked:
        for real in one.read:
            sources.setdefault(real, one.name)
    beside = read_beside([one.job for one in checked])
    for one in checked:
        if read := [place for place in one.written() if place in beside]:
            yield f"{one.name}: writes what {checked[beside[read[0]]].name} reads: {read[0]}"
        for what, place in one.told.items():
            if place in sources:
                yield f"{one.name}: its {what} is the source of {sources[place]}"
        output, named = one.output, one.job.output
        for real in (output, *_around(output)):
            if real not in sources:
                continue
            if real == output and real in one.read:
                if one.job.force and len(one.read) == 1:
                    continue  # a file may be replaced by what it becomes
                yield f"{one.name}: its output is its source: {named}; write to another place"
            elif real == output:
                yield f"{one.name}: its output is the source of {sources[real]}: {named}"
            elif place_of(real).is_folder():
                yield f"{one.name}: its output lies in the source of {sources[real]}: {named}"
            break


def _around(path: str) -> Iterable[str]:
    """The folders around a place, from the inside out."""
    if "://" in path:
        return _folders_of_store(path)
    folder = os.path.dirname(path)  # noqa: PTH120 (of each of 10,000 jobs, several times)
    return _folders_to(folder) if folder != path else ()


@functools.lru_cache(maxsize=1024)
def _folders_to(folder: str) -> tuple[str, ...]:
    """A folder, and those around it: many jobs have one."""
    return (folder, *map(str, PurePath(folder).parents))


def _folders_of_store(path: str) -> Iterator[str]:
    while "/" in (path := path.rpartition("/")[0]).partition("://")[2]:
        yield path


def _missing(checked: Sequence[Checked]) -> Iterator[str]:
    asked = [(place, one.name) for one in checked for place in one.places]
    far = [item for item in asked if item[0].is_far()]
    yield from filter(None, (_absent(*item) for item in asked if not item[0].is_far()))
    # a look at a file of this host costs less than to hand it to a thread
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
