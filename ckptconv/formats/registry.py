"""Which container a path is, by content, never by extension; what else a file is."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptconv.formats.first_reads import first_reads
from ckptconv.formats.folders.accelerate import Openers, is_accelerate, is_fsdp, open_accelerate
from ckptconv.formats.folders.dcp import foretell_dcp, is_dcp, open_dcp
from ckptconv.formats.folders.dcp_shards import is_dcp_shards, open_dcp_shards, refuse_one_rank
from ckptconv.formats.folders.deepspeed import is_deepspeed, open_deepspeed
from ckptconv.formats.folders.megatron import is_megatron, is_rank_file, open_megatron, refuse_split
from ckptconv.formats.folders.ranks import has_shards, join_ranks
from ckptconv.formats.folders.sharded import is_hugging_face, open_sharded, variants
from ckptconv.formats.folders.steps import chosen
from ckptconv.formats.inflation import claim_records, counted_together
from ckptconv.formats.kinds import (
    Archive,
    ArchiveStranger,
    Format,
    Gathering,
    NotForetold,
    Opener,
    Reread,
)
from ckptconv.formats.npz import is_npz, open_npz
from ckptconv.formats.old_torchscript import is_old_torchscript, open_old_torchscript
from ckptconv.formats.raw_pickle import is_raw_pickle, open_raw_pickle
from ckptconv.formats.safetensors import is_safetensors, open_safetensors
from ckptconv.formats.strangers import refuse_foreign_folder, stranger
from ckptconv.formats.torch_legacy import is_torch_legacy, open_torch_legacy
from ckptconv.formats.torch_tar import is_tar, open_torch_tar
from ckptconv.formats.torch_zip import open_torch_zip
from ckptconv.formats.torchscript import is_torchscript, open_torchscript
from ckptconv.formats.zip_archive import is_zip, open_archive
from ckptconv.formats.zip_members import may_hold_checkpoints, open_zip_members
from ckptconv.formats.zip_records import Records
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.io.source import Source
from ckptconv.pickles.substitution import calls_of
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_paths,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import (
    CheckpointError,
    LimitExceeded,
    UnsupportedCheckpoint,
    not_opened,
    printable,
)
from ckptconv.support.gc_pause import collector_paused
from ckptconv.support.limits import in_force
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.modules import flatten_modules, holds_modules
from ckptconv.tree.old_tensors import complete_tensors

Named = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A checkpoint's path, or those of all its ranks' files."""

_HEAD = 512


ARCHIVE_STRANGERS: tuple[ArchiveStranger, ...] = (
    ArchiveStranger((".data/extern_modules",), "is a torch.package archive (code with its "
                                               "objects), not a checkpoint",
                    "save its weights: "
                    "torch.save(torch.package.PackageImporter(PATH).load_pickle(PACKAGE, "
                    "NAME).state_dict(), "
                    "OUT), which runs code of the archive"),
    ArchiveStranger(("archive_format", "models/model.json"), "is a pt2 archive (torch.export): a "
                                                             "program, not a checkpoint",
                    "save its weights: torch.save(torch.export.load(PATH).state_dict, OUT)"),
    ArchiveStranger(("metadata.json", "config.json", "model.weights.h5"), "is a Keras model, not "
                                                                          "a PyTorch checkpoint",
                    "export its weights with Keras, under the keys of the PyTorch model"),
)  # fmt: skip
"""Zip archives of other programs.

Sources: torch/package/package_exporter.py, torch/export/pt2_archive/constants.py,
keras/src/saving/saving_lib.py.
"""


def _is_foreign(records: Records) -> bool:
    return any(stranger.matches(records) for stranger in ARCHIVE_STRANGERS)


def _refuse_foreign(source: Source, records: Records, _: Opener) -> Checkpoint:
    found = next(stranger for stranger in ARCHIVE_STRANGERS if stranger.matches(records))
    raise UnsupportedCheckpoint(found.what, path=source.path, hint=found.hint)


ARCHIVES: tuple[Archive, ...] = (
    Archive(_is_foreign, _refuse_foreign),
    Archive(is_torchscript, open_torchscript),
    Archive(is_old_torchscript, open_old_torchscript),
    Archive(is_npz, open_npz),
    Archive(may_hold_checkpoints, open_zip_members),
    Archive(lambda _: True, open_torch_zip),
)
"""What a zip archive may be, in the order of trying; the last one says what else it is."""


def open_zip(source: Source, opener: Opener) -> Checkpoint:
    """Open a zip archive by what is in it; its directory is read once."""
    guarded, records = open_archive(source)
    claim_records(source, records.values())
    kind = next(kind for kind in ARCHIVES if kind.matches(records))
    return kind.open(guarded, records, opener)


FORMATS: tuple[Format, ...] = (
    Format(is_zip, open_zip),
    Format(is_torch_legacy, open_torch_legacy),
    Format(is_tar, open_torch_tar),
    Format(is_safetensors, open_safetensors),
    Format(is_raw_pickle, open_raw_pickle),
)
"""The containers that are read, in the order in which they are tried."""

GATHERINGS: tuple[Gathering, ...] = (
    Gathering(
        is_dcp,
        lambda path, *_: open_dcp(path, open_file, open_source),
        foretell=lambda path, reread: foretell_dcp(path, open_file, open_source, reread),
    ),
    Gathering(is_dcp_shards, lambda path, *_: open_dcp_shards(path, open_source)),
    Gathering(is_accelerate, lambda path, *_: open_accelerate(path, _openers())),
    Gathering(is_hugging_face, lambda path, _, tag: open_sharded(path, open_file, tag), variants),
    Gathering(is_fsdp, lambda path, *_: open_accelerate(path, _openers())),
    Gathering(is_deepspeed, lambda path, home, _: open_deepspeed(path, open_source, home)),
    Gathering(is_megatron, lambda path, home, _: open_megatron(path, open_file, home)),
)
"""The checkpoints of many files that are read, in the order in which they are tried."""


@spelling_checked
def open_checkpoint(
    path: Named, *, tag: str | None = None, whole_modules: bool = False
) -> Checkpoint:
    """Open a checkpoint of one file or of many: read its index, but not the bytes of its tensors.

    `path` is a file, the folder of a checkpoint of many files, the index in it, the folder around
    the only checkpoint or around the one that a file of it names, or a sequence of the files of all
    ranks (``torch.save`` of each rank's sharded state dict). `tag` chooses among the steps that a
    folder holds, by name or number, or among the variants of its weights. A whole module
    (``torch.save(model)``) appears as its state dict, unless `whole_modules` asks for the module
    itself. Use the result as a context manager, or close it. Raises `UnsupportedCheckpoint` when it
    is something else (and says what), or one rank's file alone, `MalformedCheckpoint` or
    `LimitExceeded` when it contradicts itself.
    """
    return _asked(path, tag, whole_modules=whole_modules).opened_quickly()


def open_certain(
    path: Named | Location, *, tag: str | None = None, whole_modules: bool = False
) -> Checkpoint:
    """`open_checkpoint(…).certain()` in one go: for who judges a checkpoint or needs all of it."""
    return _asked(path, tag, whole_modules=whole_modules).opened()


def open_to_look(path: Named, *, tag: str | None = None, whole_modules: bool = False) -> Checkpoint:
    """For who judges a checkpoint by what it says of itself: as `open_certain`, but over a network,
    where each look costs a request, by its index alone.
    """
    asked = _asked(path, tag, whole_modules=whole_modules)
    if not asked.paths[0].is_far():
        return asked.opened()
    return asked.opened_quickly()


def _asked(path: Named | Location, tag: str | None, *, whole_modules: bool) -> _Asked:
    if not isinstance(path, Location):
        refuse_no_paths("path", path)
    refuse_no_text(tag=tag)
    refuse_no_flag(whole_modules=whole_modules)
    named = [path] if isinstance(path, (str, os.PathLike, Location)) else path
    paths = [place_of(item) for item in named]
    if not paths:
        raise UnsupportedCheckpoint("no file was given")
    return _Asked(paths, tag, whole_modules)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be opened: one place or the files of all ranks, and how."""

    paths: Sequence[Location]
    tag: str | None
    whole_modules: bool

    def opened_quickly(self) -> Checkpoint:
        """The checkpoint, by its index alone where that tells enough."""
        if len(self.paths) == 1:
            with contextlib.suppress(NotForetold):
                return self.opened(self.opened)
        return self.opened()

    def opened(self, reread: Reread | None = None) -> Checkpoint:
        """The checkpoint that it is; with `reread` by its index alone, if that can be.

        Raises `NotForetold` when it was opened by its index alone and something is wrong.
        """
        paths = self.paths
        opened: list[Checkpoint] = []
        try:
            with collector_paused(), counted_together():
                pool = FilePool()
                if len(paths) > 1:
                    paths[0].foresee(paths, first_reads)
                opened += (
                    [_open(paths[0], self.tag, reread)]
                    if len(paths) == 1
                    else (_open_owned(item.open(pool)) for item in paths)
                )
                return _finished(opened, whole_modules=self.whole_modules)
        except BaseException as error:
            for one in opened:
                one.close()
            at = paths[len(opened)] if len(opened) < len(paths) else paths[0]
            if isinstance(error, CheckpointError):
                if opened and opened[0].reread is not None:
                    raise NotForetold from error
                raise error.at(path=at) from error.__cause__
            if isinstance(error, OSError):  # a name too long, a folder that is closed to us
                raise not_opened(error, at) from error
            raise


def _finished(opened: Sequence[Checkpoint], *, whole_modules: bool) -> Checkpoint:
    """The one checkpoint that opened files are: shards joined, old tensors completed, modules as
    their state dicts. One walk through the tree tells which of that there is to do.
    """
    checkpoint = opened[0]
    calls = list(calls_of(checkpoint.root)) if len(opened) == 1 else []
    if len(opened) > 1 or has_shards(calls):
        checkpoint = join_ranks(opened)
        calls = list(calls_of(checkpoint.root))
    completed = complete_tensors(checkpoint, calls)
    if completed is not checkpoint:
        calls = list(calls_of(completed.root))
    if whole_modules:
        return replace(completed, has_whole_modules=holds_modules(calls))
    return flatten_modules(completed, calls)


def checkpoints_of(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[Location, ...]]:
    """The checkpoints that paths name: one, where each path is a rank's file with shards of
    tensors; else each by itself.
    """
    refuse_no_paths("path", paths)
    named = [place_of(path) for path in paths]
    if len(named) > 1 and all(map(_holds_shards, named)):
        return [tuple(named)]
    return [(path,) for path in named]


def _holds_shards(place: Location) -> bool:
    """Whether a place is a file that holds a rank's shards; what cannot be opened does not."""
    if not place.is_file():
        return False
    try:
        with collector_paused(), counted_together(), open_file(place) as opened:
            return has_shards(calls_of(opened.root))
    except (CheckpointError, OSError, ValueError):
        return False


def _open(path: Location, tag: str | None, reread: Reread | None) -> Checkpoint:
    kind = gathering(path)
    if kind is not None and (tag is None or tag in kind.tags(path)):
        return _open_gathering(kind, path, path, tag, reread)
    if path.is_folder():
        return _open_inside(path, tag, kind, reread)
    if tag is not None:
        raise UnsupportedCheckpoint(
            "holds no tags to choose from", path=path, hint="leave --tag out"
        )
    return _open_alone(path)


def _open_gathering(
    kind: Gathering, path: Location, home: Location, tag: str | None, reread: Reread | None
) -> Checkpoint:
    if reread is not None and kind.foretell is not None:
        return kind.foretell(path, reread)
    return kind.open(path, home, tag)


def gathering(path: Location) -> Gathering | None:
    """The kind of gathering that a place is, if it is any."""
    if not path.exists():
        return None
    return next((kind for kind in GATHERINGS if kind.matches(path)), None)


def _open_inside(
    folder: Location, tag: str | None, kind: Gathering | None, reread: Reread | None
) -> Checkpoint:
    """Open the one checkpoint in a folder that is meant; `kind` is what the folder is itself."""
    refuse_foreign_folder(folder, is_checkpoint=kind is not None)
    if tag is not None and kind is not None and not any(map(is_gathering, folder.list())):
        return _open_tagged(folder, tag, kind)
    found = chosen(folder, tag, is_gathering)
    if found is None:
        what = "is a folder without a checkpoint in it"
        raise not_opened(errno.EISDIR, folder, what, "name the file that you mean")
    inner = gathering(found.path)
    checkpoint = (
        _open_gathering(inner, found.path, folder, None, reread)
        if inner is not None
        else _open_alone(found.path)
    )
    return replace(checkpoint, notes=(*found.notes, *checkpoint.notes))


def _open_tagged(folder: Location, tag: str, kind: Gathering) -> Checkpoint:
    """Open a folder that is one checkpoint, if the tag names that; else say which tags it has."""
    if tag == folder.name:
        return kind.open(folder, folder, None)
    if known := ", ".join(kind.tags(folder)):
        what, hint = (
            f"holds no '{printable(tag)}'",
            f"choose one with --tag: {printable(known, 500)}",
        )
        raise UnsupportedCheckpoint(what, path=folder, hint=hint)
    what = f"is the folder of one step or model, not of '{printable(tag)}'"
    raise UnsupportedCheckpoint(what, path=folder, hint="leave --tag out, or name the folder above")


def _open_alone(path: Location) -> Checkpoint:
    """Open a file that is a checkpoint by itself, and not one rank's share of one."""
    checkpoint = open_file(path)
    try:
        if is_rank_file(path):
            refuse_split(checkpoint.root, path)
        return refuse_one_rank(checkpoint)
    except CheckpointError:
        checkpoint.close()
        raise


def _openers() -> Openers:
    """How the parts of a folder are opened; a few of its files are open at a time."""
    pool = FilePool()

    def one(place: Location) -> Checkpoint:
        return _open_owned(place.open(pool))

    def ranks(paths: Sequence[Location]) -> Checkpoint:
        opened: list[Checkpoint] = []
        try:
            opened += map(one, paths)
            if len(opened) == 1 and not has_shards(calls_of(opened[0].root)):
                return opened[0]
            return join_ranks(opened)
        except BaseException:
            for checkpoint in opened:
                checkpoint.close()
            raise

    return Openers(one, lambda path: open_dcp(path, one, open_source), ranks)


def open_file(place: Location, pool: FilePool | None = None) -> Checkpoint:
    """Open a checkpoint of one file, which may be one of a pool; its sources are closed when that
    fails.
    """
    return _open_owned(place.open(pool))


def _open_owned(source: Source) -> Checkpoint:
    try:
        return open_source(source)
    except BaseException:
        source.close()
        raise


def open_source(source: Source, depth: int = 0) -> Checkpoint:
    """Open what a source holds, `depth` files within files; on failure the caller closes it."""
    if depth > (most := in_force().files_in_files):
        what = f"holds more than {most} files within files"
        raise LimitExceeded(what, limit="files_in_files", allowed=most, path=source.path)
    head = source.read(0, min(_HEAD, source.size))
    for candidate in FORMATS:
        if candidate.matches(head):
            return candidate.open(source, lambda inner: open_source(inner, depth + 1))
    raise stranger(source, head)


def kind_of_head(head: bytes) -> bool | None:
    """Whether the first bytes of a file are those of a checkpoint; None where that cannot be told
    without opening it: pickles and archives hold other things too.
    """
    if not any(candidate.matches(head) for candidate in FORMATS):
        return False
    if is_safetensors(head) or is_torch_legacy(head):
        return True
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")] if is_zip(head) else b""
    return True if first.endswith(_FIRST_RECORDS) else None


_FIRST_RECORDS = (b"/data.pkl", b".npy")
"""How the first record of an archive is called that torch or numpy wrote."""


def is_gathering(path: Location) -> bool:
    """Whether a place is a folder that is a checkpoint of many files.

    One that is closed to us is not what is meant.
    """
    try:
        return path.is_folder() and gathering(path) is not None
    except (OSError, CheckpointError):
        return False
