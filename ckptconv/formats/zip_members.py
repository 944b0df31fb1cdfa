"""Zip archives of files some of which are checkpoints, as stable-baselines3 writes them: each under
its name.

A member is opened as a file within the file: in place where it is stored, through a temporary file
where it is deflated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from ckptconv.formats import zip_archive
from ckptconv.formats.zip_archive import Record
from ckptconv.io.inflate import Spool
from ckptconv.io.source import RangeSource, Source
from ckptconv.pickles.nodes import Dict
from ckptconv.support.errors import CheckpointError, LimitExceeded, UnsupportedCheckpoint, printable
from ckptconv.support.limits import in_force
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import Container

CONTAINER = Container(
    "zip of checkpoints",
    "the program that wrote it",
    why_not="only the program that packed it opens it",
    torch_says="file in archive is not in a subdirectory",
    has_checksums=True,
)
_NOT_THESE = ("/data.pkl", "model.json")


@dataclass(slots=True)
class _Outer:
    """The outermost archive: how many members were met in it so far."""

    members: int = 0


_OUTER: ContextVar[_Outer | None] = ContextVar("outermost archive", default=None)


def may_hold_checkpoints(records: Mapping[str, Record]) -> bool:
    """Whether an archive with these records is looked into: it is none of torch's own."""
    return not any(name.endswith(_NOT_THESE) for name in records)


def open_zip_members(
    source: Source, records: Mapping[str, Record], opener: Callable[[Source], Checkpoint]
) -> Checkpoint:
    """Open every member that is a checkpoint, by content; the tree is a dict of them by name, the
    others are left out.

    Raises `UnsupportedCheckpoint` when none is one, `LimitExceeded` when there are too many, those
    of archives that are members themselves counted in.
    """
    outer = _OUTER.get() or _Outer()
    _refuse_many(source, records, outer)
    spool = Spool()
    before = _OUTER.set(outer)
    try:
        inners = {name: _member_source(source, record, spool) for name, record in records.items()}
        opened = {name: _open_member(name, inner, opener) for name, inner in inners.items()}
        found = {name: member for name, member in opened.items() if member is not None}
        if not found:
            what = (
                "is a zip archive without a data.pkl and without a checkpoint in it, so "
                "torch.save did not write it"
            )
            raise UnsupportedCheckpoint(what, path=source.path)
    except BaseException:
        spool.close()
        raise
    finally:
        _OUTER.reset(before)
    return Checkpoint(
        path=source.path,
        container=CONTAINER,
        root=Dict([(name, member.root) for name, member in found.items()]),
        nbytes=source.size,
        notes=tuple(_notes(records, found)),
        sources=(
            source,
            *inners.values(),
            *(inner for member in found.values() for inner in member.sources),
        ),
    )


def _member_source(source: Source, record: Record, spool: Spool) -> Source:
    """The member as a source of its own; a deflated one is inflated when it is first read."""
    if not record.deflated:
        return RangeSource(source, record.offset, record.size)
    return zip_archive.record_source(source, record, spool)[0]


def _open_member(
    name: str, inner: Source, opener: Callable[[Source], Checkpoint]
) -> Checkpoint | None:
    """The checkpoint that a member is; None when it is something else."""
    try:
        return opener(inner)
    except CheckpointError as error:
        if isinstance(error, UnsupportedCheckpoint) and error.where is None:
            return None
        error.where = name if error.where in (None, name) else f"{name}: {error.where}"
        raise


def _notes(records: Mapping[str, Record], found: Mapping[str, Checkpoint]) -> Iterable[str]:
    for name, member in found.items():
        yield from (f"{printable(name)}: {note}" for note in member.notes)
    # A deflated member is checked while it is inflated; a zip archive inside has checksums of its
    # own.
    if bare := [
        name
        for name, member in found.items()
        if not member.container.has_checksums and not records[name].deflated
    ]:
        yield (
            f"{printable(', '.join(bare))}: without checksums inside, so damage cannot be detected"
        )
    if left := [name for name in records if name not in found]:
        yield (
            f"{len(left)} members are not checkpoints and are left out: "
            f"{printable(', '.join(left))}"
        )


def _refuse_many(source: Source, records: Mapping[str, Record], outer: _Outer) -> None:
    outer.members += len(records)
    if (count := outer.members) > (most := in_force().zip_members):
        what = (
            f"is a zip archive of {count} members without a data.pkl, so torch.save did not "
            "write it"
        )
        advice = "unpack it and name the file that you mean"
        raise LimitExceeded(
            what, limit="zip_members", allowed=most, needed=count, path=source.path, advice=advice
        )
