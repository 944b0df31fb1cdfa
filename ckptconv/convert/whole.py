"""Whether what a conversion would write is there already: every byte is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Literal

from ckptconv.convert.beside import Companion
from ckptconv.convert.companions import write_companion
from ckptconv.convert.execute import ConversionResult
from ckptconv.convert.job import Job
from ckptconv.convert.plan import ConversionPlan, PlannedFile
from ckptconv.convert.verify import verify_folder
from ckptconv.convert.write import Tally, write_layout
from ckptconv.io.files import compared
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.io.source import Source
from ckptconv.io.stream import OutputStream, Sink
from ckptconv.support.errors import CheckpointError
from ckptconv.support.limits import held
from ckptconv.support.progress import Phases
from ckptconv.support.records import dataclass
from ckptconv.tensors.checksums import Checksums

Kind = Literal["whole", "part", "other", "nothing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an output is there: all of it, byte for byte; a part of it, and nothing else in its
    places; something else; nothing.

    Of an output that is there as a whole, `result` is what the conversion would have told.
    """

    kind: Kind
    result: ConversionResult | None = None


def standing(job: Job) -> Standing:
    """Whether the output of a job is there, byte for byte as it would be written."""
    begin = time.perf_counter()
    with held(job.limits), compared():
        request = job.request()
        with job.planned(request) as plan:
            kind = _folder_kind(plan) if plan.target.is_made_by_torch else _files_kind(plan)
            if kind != "whole":
                return Standing(kind)
            seconds = time.perf_counter() - begin
            count = sum(item.written for item in plan.state_dicts)
            verified = count if job.verify else None
            return Standing(kind, ConversionResult(plan, seconds, verified, nbytes=plan.nbytes))


def _files_kind(plan: ConversionPlan) -> Kind:
    """The kind of an output of files; what a set has beside its shards is part of it."""
    kinds = [_file_kind(file) for file in _files(plan)]
    folder = place_of(plan.folder)
    kinds += [_companion_kind(item, folder.child(item.name)) for item in plan.beside.copied]
    if "other" in kinds:
        return "other"
    if "nothing" not in kinds:
        return "whole"
    if _has_others(plan):
        return "other"
    return "part" if "whole" in kinds else "nothing"


def _has_others(plan: ConversionPlan) -> bool:
    """Whether files of another output of that name are there, which would have to go."""
    own = {str(file.path) for file in _files(plan)}
    return any(str(path) not in own for path in plan.earlier())


def _files(plan: ConversionPlan) -> Iterator[PlannedFile]:
    yield from plan.files
    for file in (plan.index, plan.mapping):
        if file is not None:
            yield file


def _file_kind(file: PlannedFile) -> Kind:
    return _kind_of(
        place_of(file.path),
        file.layout.nbytes,
        lambda stream: write_layout(file.layout, stream, Tally(), Checksums()),
    )


def _companion_kind(item: Companion, place: Location) -> Kind:
    with closing(item.open()) as source:
        return _kind_of(place, item.nbytes, lambda stream: write_companion(item, source, stream))


def _kind_of(place: Location, nbytes: int, write: Callable[[OutputStream], object]) -> Kind:
    """The kind of one file of `nbytes` bytes, which are those that `write` would write."""
    if not place.exists():
        return "nothing"
    if not place.is_file():
        return "other"
    with closing(place.open()) as there:
        if there.size != nbytes:
            return "other"
        stream = OutputStream(_Comparing(there))
        try:
            write(stream)
            stream.finish()
        except _Differs:
            return "other"
        finally:
            stream.abandon()
            stream.close()
    return "whole"


class _Differs(Exception):
    """What is there is not what would be written."""


class _Comparing(Sink):
    """A file that is held against what would be written to it."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def write(self, view: memoryview) -> None:
        there = self._source.read(self._at, len(view))
        if there != view:
            raise _Differs
        self._at += len(view)

    def end(self, size: int, *, fsync: bool) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """The source is its opener's."""


def _folder_kind(plan: ConversionPlan) -> Kind:
    """A folder that torch makes is not the same twice: its tensors are compared."""
    place = place_of(plan.output)
    if not place.exists():
        return "nothing"
    try:
        verify_folder(plan, place, Phases(None))
    except CheckpointError:  # it is not a checkpoint, or another one
        return "other"
    return "whole"
