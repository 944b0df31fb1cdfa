"""What tells a job from the same one after its source, its options or the rules changed."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ckptconv.convert.companions import companion_places
from ckptconv.convert.job import Job
from ckptconv.convert.options import Options, Request
from ckptconv.convert.words import FILES_READ
from ckptconv.formats.folders.steps import training_files
from ckptconv.formats.folders.trained import NUMBERS
from ckptconv.io import places
from ckptconv.io.location import Location
from ckptconv.io.open_files import OpenFile
from ckptconv.io.places import files_below, place_of
from ckptconv.keys.key_map import KeyRules
from ckptconv.support.choices import one_or_several
from ckptconv.support.errors import OptionRefused
from ckptconv.support.records import given_fields

VERSION = 1
"""The version of what conversions make of a source: a higher one has all of them made again."""


def places_of(job: Job) -> list[Location]:
    """The places that a job reads."""
    found = list(places.places_of(job.source))
    outputs: list[Location] = []
    if not isinstance(job.output, str):  # which no open file is, and most are
        outputs.append(place_of(job.output))
    for place in (*found, *outputs):
        if isinstance(place, OpenFile):
            what = "is an open file, and a batch knows its files by their names"
            raise OptionRefused(what, path=place.path, hint="give its path, or run the job alone")
    return found


def read_beside(jobs: Sequence[Job]) -> dict[str, int]:
    """What jobs read beside their sources (rules, keys to fit to, metadata, files that go with the
    weights), each without links, and the number of the first job that does.
    """
    named: dict[Location, int] = {}
    for number, job in enumerate(jobs):
        for place in (*places_named(job), *_places_beside(job)):
            named.setdefault(place, number)
    return {real_name(place): number for place, number in named.items()}


def names_of(job: Job) -> tuple[str, ...]:
    """The names of what a job reads, as the user gave them."""
    return tuple(map(str, places_of(job)))


def key_of(job: Job) -> str:
    """The output of a job, by which it is known: no two jobs may have one."""
    return place_of(job.output).absolute_name


def real_name(place: Location) -> str:
    """How a place is known, without the links on the way to it."""
    path = place.local()
    return place.absolute_name.rstrip("/") if path is None else os.path.realpath(path)


def real_names() -> Callable[[Location], str]:
    """What gives `real_name` for many places at once: links on the way to a folder are followed
    once for all that lie in it.
    """
    folder_of = functools.cache(os.path.realpath)

    def real(place: Location) -> str:
        path = place.local()
        if path is None or path.name in ("", "..") or path.is_symlink():
            return real_name(place)
        return os.path.join(folder_of(path.parent), path.name)  # noqa: PTH118 (much quicker)

    return real


def stamps(place: Location) -> list[list[Any]] | None:
    """What tells the bytes at a place from others: of each file its name, and its size, time of
    change and inode, or what a store calls its version. None where nothing is.

    The device is left out: one disk has several numbers on the machines that share it.
    """
    kind, found = place.look()
    if kind == "nothing":
        return None
    if kind != "folder":
        return [["", *stamp_of(place, found)]]
    return sorted(
        [name, *stamp_of(file, file.fingerprint())]
        for name, file in files_below(place, _is_kept)
        if _is_kept(file)
    )


def stamp_of(place: Location, told: Any) -> list[Any]:
    """What is kept of the fingerprint `told` of the file at a place."""
    if told is None:
        return []
    return list(told[1:]) if place.local() is not None else list(told)


def _is_kept(place: Location) -> bool:
    """Whether this is not what a write has for a while, and leaves behind where it is killed."""
    return not (place.name.startswith(".") and place.name.endswith(_FOR_A_WHILE))


_FOR_A_WHILE = ("-tmp", "-part", "-edit", "-old")


def fingerprint(job: Job) -> str:
    """A short text that is another one when the source, an option or a file that an option names,
    or the rules of conversion are others. Nothing is read but what lists and describes files.
    """
    told = {
        "rules": VERSION,
        "source": [[place.absolute_name, stamps(place)] for place in places_of(job)],
        "tag": job.tag,
        "options": _options_told(job.options),
        "files": [[str(place), stamps(place)] for place in places_named(job)],
        "beside": [[str(place), stamps(place)] for place in _places_beside(job)],
    }
    raw = json.dumps(told, sort_keys=True, default=str).encode()
    # 128 bits: no two jobs meet by chance, and a line of the ledger stays short
    return hashlib.sha256(raw).hexdigest()[:32]


def _options_told(options: Options | Request) -> dict[str, Any]:
    try:
        return _told_of(options)
    except TypeError:  # a list, or a dict, which can be changed
        return _told_of.__wrapped__(options)


@functools.lru_cache(maxsize=1)  # of many files, each has the options of the one before
def _told_of(options: Options | Request) -> dict[str, Any]:
    return {name: _plain(value) for name, value in given_fields(options).items()}


def _plain(value: Any) -> Any:
    """All that is in a value; what is shown of one may be cut off."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value) and not type(value).__module__.startswith("ckptconv."):
        # a function of keys: whether another one does the same, nobody knows
        return os.urandom(16).hex()
    if is_dataclass(value):
        told = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return [type(value).__name__, told]
    if isinstance(value, os.PathLike):
        return str(value)
    return repr(value)


def _reads_configs(options: Options | Request) -> bool:
    """Whether numbers of a config may be asked for: rules name some, and quantised weights."""
    if isinstance(options, Options):
        has_rules = options.rules or options.preset or isinstance(options.keys, KeyRules)
        return bool(has_rules or options.dequantize)
    return bool(options.keys.rules or options.edits)


def places_named(job: Job) -> Iterator[Location]:
    """The files that options of a job name; of shards, their index."""
    if not isinstance(job.options, Options):
        return
    for name in FILES_READ:
        for value in one_or_several(getattr(job.options, name)):
            if isinstance(value, (str, os.PathLike)):
                yield place_of(value)


def _places_beside(job: Job) -> Iterator[Location]:
    """The files that lie beside what a job reads, and go into its output with it or say how its
    values are read.
    """
    if _reads_configs(job.options):
        from ckptconv.tree.lora_adapters import CONFIG  # seldom needed, as the next one is
        from ckptconv.tree.model_config import CONFIGS

        for place in places_of(job):
            if not place.is_folder():  # whose files all count
                home = place_of(place.path.parent)
                yield from map(home.child, (*CONFIGS, CONFIG))
    if not (job.options.with_files or job.options.with_training):
        return
    for place in places_of(job):
        home = place if place.is_folder() else place_of(place.path.parent)
        if job.options.with_files:
            yield from companion_places(home)
        if job.options.with_training:
            yield from map(home.child, (*training_files(home), NUMBERS))
