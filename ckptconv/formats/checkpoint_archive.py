"""Zip archives of files some of which are checkpoints, such as stable-baselines3 writes: each under its name."""

from __future__ import annotations

from collections.abc import Callable

from ckptconv import archives
from ckptconv.archives import Record
from ckptconv.checkpoint import Checkpoint
from ckptconv.errors import CheckpointError, LimitExceeded, UnsupportedCheckpoint, printable
from ckptconv.formats.records import Records
from ckptconv.limits import LIMITS
from ckptconv.nodes import Dict
from ckptconv.sources import RangeSource, Source, Spool

NAME = "zip of checkpoints"
_MOST_MEMBERS = 1000  # of an archive that is looked into for checkpoints


def is_archive_of_files(records: Records) -> bool:
    """Whether an archive with these records may hold whole checkpoints, and is none itself."""
    return len(records) <= _MOST_MEMBERS and not any(name.endswith("/data.pkl") for name in records)


def open_checkpoint_archive(source: Source, records: Records, opener: Callable[[Source], Checkpoint]) -> Checkpoint:
    """Open every member that is a checkpoint; the tree is a dict of their trees by member name, the others are left out.

    Stored members are read in place; deflated ones are inflated, for a directory cannot be read otherwise. Raises
    `UnsupportedCheckpoint` when there is none.
    """
    _refuse_bombs(source, records)
    spool = Spool()
    found: dict[str, Checkpoint] = {}
    inners = {name: _member_source(source, record, spool) for name, record in records.items()}
    try:
        for name, inner in inners.items():
            if (member := _open_member(name, inner, opener)) is not None:
                found[name] = member
    finally:
        if not found:
            spool.close()
    if not found:
        what = "is a zip archive without a data.pkl, so not one that torch.save wrote, and holds no checkpoint either"
        raise UnsupportedCheckpoint(what, path=source.path)
    notes = [f"{name}: {note}" for name, member in found.items() for note in member.notes]
    if left := [name for name in records if name not in found]:
        notes.append(f"{len(left)} members are no checkpoints and are left out: {printable(', '.join(left))}")
    return Checkpoint(
        path=source.path,
        format=NAME,
        root=Dict([(name, member.root) for name, member in found.items()]),
        nbytes=source.size,
        notes=tuple(notes),
        sources=(source, *inners.values(), *(inner for member in found.values() for inner in member.sources)),
    )


def _member_source(source: Source, record: Record, spool: Spool) -> Source:
    """The member as a source of its own; a deflated one is inflated when it is first read."""
    if not record.deflated:
        return RangeSource(source, record.offset, record.size)
    return archives.record_source(source, record, spool)[0]


def _open_member(name: str, inner: Source, opener: Callable[[Source], Checkpoint]) -> Checkpoint | None:
    """The checkpoint that a member is; None when it is something else."""
    try:
        return opener(inner)
    except CheckpointError as error:
        if isinstance(error, UnsupportedCheckpoint) and error.where is None:
            return None
        error.where = ": ".join([name, *([error.where] if error.where else [])])
        raise


def _refuse_bombs(source: Source, records: Records) -> None:
    inflated = sum(record.size for record in records.values() if record.deflated)
    if inflated > LIMITS.inflated_free and inflated > source.size * LIMITS.inflated_ratio:
        raise LimitExceeded(
            f"its members claim to inflate to {inflated} bytes, more than {LIMITS.inflated_ratio}-fold",
            path=source.path,
            hint="a decompression bomb; unpack it and name the file inside if it is real",
        )
