"""Zip archives by what is in them: which kind each is, as a table, and those of files some of which
are checkpoints, as stable-baselines3 writes them, each under its name.

A member is opened as a file within the file: in place where it is stored, through a temporary file
where it is deflated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import PurePath, PurePosixPath

from ckptconv.formats.containers import claim_records, closed_on_error, named, open_source
from ckptconv.formats.folders.alone import are_parts, refuse_without_index
from ckptconv.formats.zip_archive import (
    Record,
    Records,
    ends_one,
    open_archive,
    record_source,
    root_folder,
)
from ckptconv.io.inflate import Spool
from ckptconv.io.location import Member
from ckptconv.io.source import RangeSource, Source
from ckptconv.pickles.nodes import Dict
from ckptconv.support.errors import CheckpointError, UnsupportedCheckpoint, printable
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.records import NamedTuple
from ckptconv.support.settings import set_within
from ckptconv.support.text import count_text
from ckptconv.tree.checkpoint import Checkpoint, Container


class ArchiveStranger(NamedTuple):
    """A zip archive that has the records `names` (or such endings), in whatever folder, and is not
    a checkpoint: what it is, what to do.
    """

    names: tuple[str, ...]
    what: str
    hint: str


ARCHIVE_STRANGERS: tuple[ArchiveStranger, ...] = (
    ArchiveStranger((".data/extern_modules",),
        "is a torch.package archive (code with its objects), not a checkpoint",
        "save its weights: torch.save(torch.package.PackageImporter(PATH).load_pickle(PACKAGE, "
        "NAME).state_dict(), OUT), which runs code of the archive"),
    ArchiveStranger(("archive_format", "models/model.json"),
        "is a pt2 archive (torch.export): a program, not a checkpoint",
        "save its weights: torch.save(torch.export.load(PATH).state_dict, OUT)"),
    ArchiveStranger(("metadata.json", "config.json", "model.weights.h5"),
        "is a Keras model, not a PyTorch checkpoint",
        "export its weights with Keras, under the keys of the PyTorch model"),
)  # fmt: skip
"""Zip archives of other programs.

Sources: torch/package/package_exporter.py, torch/export/pt2_archive/constants.py,
keras/src/saving/saving_lib.py.
"""


class Archive(NamedTuple):
    """A kind of zip archive: whether these records are its, and what opens it, as
    ``module.function``, given the source and its records.
    """

    matches: Callable[[Records], bool]
    opened_by: str


def _is_torchscript(records: Records) -> bool:
    root = root_folder(records, "data.pkl")
    return root is not None and f"{root}constants.pkl" in records


def _is_npz(records: Records) -> bool:
    return bool(records) and all(name.endswith(".npy") for name in records)


ARCHIVES: tuple[Archive, ...] = (
    # before torch.save's own, which have a data.pkl too
    Archive(_is_torchscript, "torchscript.open_torchscript"),
    Archive(
        lambda records: root_folder(records, "model.json") is not None,  # before torch 1.4
        "old_torchscript.open_old_torchscript",
    ),
    Archive(_is_npz, "npz.open_npz"),
    Archive(
        lambda records: not any(name.endswith(("/data.pkl", "model.json")) for name in records),
        "zip_kinds.open_zip_members",
    ),
    Archive(lambda _: True, "torch_zip.open_torch_zip"),
)
"""What a zip archive may be, in the order of trying; the last one says what else it is."""


def open_zip(source: Source) -> Checkpoint:
    """Open a zip archive by what is in it; its directory is read once."""
    guarded, records = open_archive(source)
    claim_records(source, records.values())
    for foreign in ARCHIVE_STRANGERS:
        if all(ends_one(records, name) for name in foreign.names):
            raise UnsupportedCheckpoint(foreign.what, path=source.path, hint=foreign.hint)
    kind = next(kind for kind in ARCHIVES if kind.matches(records))
    found: Checkpoint = named(kind.opened_by)(guarded, records)
    return found


# ------------------------------------------------------------------------- archives of checkpoints

CONTAINER = Container(
    "zip of checkpoints",
    "the program that wrote it",
    why_not="only the program that packed it opens it",
    torch_says="file in archive is not in a subdirectory",
    has_checksums=True,
)


_NOT_TORCH = "so torch.save did not write it"
_MET: ContextVar[list[int] | None] = ContextVar("members of an archive and all in it", default=None)


def open_zip_members(source: Source, records: Records) -> Checkpoint:
    """Open every member that is a checkpoint, by content; the tree is a dict of them by name, the
    others are left out.

    Raises `UnsupportedCheckpoint` when none is one, `LimitExceeded` when there are too many, those
    of archives that are members themselves counted in.
    """
    met = _MET.get() or []  # one list for the outermost archive and all that is in it
    met.append(len(records))
    told = f"is a zip archive of {sum(met)} members without a data.pkl"
    what, advice = f"{told}, {_NOT_TORCH}", "unpack it and name the file that you mean"
    refuse_beyond("zip_members", sum(met), what, path=source.path, advice=advice)
    spool = Spool()
    with closed_on_error(spool), set_within(_MET, met):
        inners = {name: _member_source(source, record, spool) for name, record in records.items()}
        what = "is a zip archive without a data.pkl and without a checkpoint in it"
        none = UnsupportedCheckpoint(f"{what}, {_NOT_TORCH}")
        checked = {name for name, record in records.items() if record.deflated}
        return open_members(source, inners, none, checked)


def open_members(
    source: Source,
    inners: Mapping[str, Source],
    none: UnsupportedCheckpoint,
    checked: Collection[str] = (),
) -> Checkpoint:
    """The checkpoint of all members of an archive that are one; `none` is raised where none is.
    `checked` are those that the archive has checksums for.
    """
    indices = [name for name in inners if PurePath(name).name == ".metadata"]
    if indices:
        return _open_dcp(source, inners, indices)
    refuse_without_index([PurePath(name).name for name in inners], source.path)
    opened = {name: _open_member(name, inner) for name, inner in inners.items()}
    found = {name: member for name, member in opened.items() if member is not None}
    if not found:
        raise none.at(path=source.path)
    if are_parts([PurePath(name).name for name in found]):
        from ckptconv.formats.folders.sharded import join_parts  # seldom needed

        whole = join_parts([replace(part, path=PurePath(name)) for name, part in found.items()])
        return replace(whole, path=source.path)
    root = Dict([(name, member.root) for name, member in found.items()])
    members = (inner for member in found.values() for inner in member.sources)
    sources, notes = (source, *inners.values(), *members), tuple(_notes(opened, found, checked))
    return Checkpoint(source.path, CONTAINER, root, source.size, notes=notes, sources=sources)


def _open_dcp(source: Source, inners: Mapping[str, Source], indices: Sequence[str]) -> Checkpoint:
    """The DCP folder in an archive, as NeMo packs those of Megatron: its files are not checkpoints
    by themselves, nor is the rest one.
    """
    from ckptconv.formats.folders.dcp import open_dcp  # seldom needed

    members = {str(PurePosixPath(name)): inner for name, inner in inners.items()}
    if len(members) < len(inners) or len(indices) > 1:
        twice = "several names of one file" if len(indices) == 1 else "several DCP folders"
        hint = "unpack it, and name the folder that you mean"
        raise UnsupportedCheckpoint(f"holds {twice}", path=source.path, hint=hint)
    folder = str(PurePosixPath(indices[0]).parent)
    found = open_dcp(Member(source, members, "" if folder == "." else folder))
    beside = [name for name in members if folder != "." and not name.startswith(f"{folder}/")]
    notes = found.notes
    if beside:
        told = f"{count_text(len(beside), 'member')} left out: {printable(', '.join(beside))}"
        notes = (*notes, f"{told} beside {printable(folder)}")
    return replace(found, notes=notes, sources=(source, *inners.values(), *found.sources))


def _member_source(source: Source, record: Record, spool: Spool) -> Source:
    """The member as a source of its own; a deflated one is inflated when it is first read."""
    if record.deflated:
        return record_source(source, record, spool)[0]
    return RangeSource(source, record.offset, record.size)


def _open_member(name: str, inner: Source) -> Checkpoint | None:
    """The checkpoint that a member is; None when it is something else."""
    try:
        return open_source(inner)
    except CheckpointError as error:
        # with a place in it, it is a checkpoint, of which something is not read
        if isinstance(error, UnsupportedCheckpoint) and error.where is None:
            return None
        error.where = name if error.where in (None, name) else f"{name}: {error.where}"
        raise


def _notes(
    names: Iterable[str], found: Mapping[str, Checkpoint], checked: Collection[str]
) -> Iterable[str]:
    for name, member in found.items():
        yield from (f"{printable(name)}: {note}" for note in member.notes)
    # A deflated member is checked while it is inflated; a zip archive inside has checksums of its
    # own.
    bare = [name for name, member in found.items() if not member.container.has_checksums]
    bare = [name for name in bare if name not in checked]
    if bare:
        told = "without checksums inside, so damage cannot be detected"
        yield f"{printable(', '.join(bare))}: {told}"
    left = [name for name in names if name not in found]
    if left:
        told = f"{count_text(len(left), 'member')} left out as no checkpoint"
        yield f"{told}: {printable(', '.join(left))}"
