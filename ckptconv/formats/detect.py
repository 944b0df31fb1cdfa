"""Which container a path is, by content and never by extension; and what a file is that is not a checkpoint."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptconv.archives import is_zip, read_directory
from ckptconv.bounds import in_force
from ckptconv.checkpoint import Checkpoint
from ckptconv.choices import refuse_no_flag, refuse_no_paths, refuse_no_text, spelling_checked
from ckptconv.collector import collector_paused
from ckptconv.errors import CheckpointError, LimitExceeded, UnsupportedCheckpoint, not_opened, printable
from ckptconv.formats.accelerate import Openers, is_accelerate, is_fsdp, open_accelerate
from ckptconv.formats.dcp import is_dcp, open_dcp
from ckptconv.formats.dcp_shards import is_dcp_shards, open_dcp_shards, refuse_one_rank
from ckptconv.formats.deepspeed import is_deepspeed, open_deepspeed
from ckptconv.formats.megatron import is_megatron, is_rank_file, open_megatron, refuse_split
from ckptconv.formats.old_torchscript import is_old_torchscript, open_old_torchscript
from ckptconv.formats.ranks import has_shards, join_ranks
from ckptconv.formats.raw_pickle import is_raw_pickle, open_raw_pickle
from ckptconv.formats.records import Records
from ckptconv.formats.safetensors import is_safetensors, open_safetensors
from ckptconv.formats.sharded import is_sharded, open_sharded, variants
from ckptconv.formats.steps import chosen
from ckptconv.formats.torch_legacy import is_torch_legacy, open_torch_legacy
from ckptconv.formats.torch_tar import is_tar, open_torch_tar
from ckptconv.formats.torch_zip import open_torch_zip
from ckptconv.formats.torchscript import is_torchscript, open_torchscript
from ckptconv.formats.zip_members import may_hold_checkpoints, open_zip_members
from ckptconv.inflation import claim_records, counted_together
from ckptconv.modules import flatten_modules
from ckptconv.old_tensors import complete_tensors
from ckptconv.sources import FilePool, FileSource, Source

Named = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A checkpoint's path, or those of all its ranks' files."""

Opener = Callable[[Source], Checkpoint]

_HEAD = 512


class Format(NamedTuple):
    """A container in one file: whether a file's first bytes are its, and how it is opened.

    `open` is also given a way to open what lies inside: a record of the archive that is a checkpoint itself.
    """

    matches: Callable[[bytes], bool]
    open: Callable[[Source, Opener], Checkpoint]


class Archive(NamedTuple):
    """A kind of zip archive: whether these records are its, and how the archive is opened; else as `Format`."""

    matches: Callable[[Records], bool]
    open: Callable[[Source, Records, Opener], Checkpoint]


class Gathering(NamedTuple):
    """Many files that are one checkpoint: whether a path (a folder, or a file that stands for one) is it, and how it is opened.

    `tags` are the names by which its user may choose among several that one folder holds, and `open` is given the one that
    was chosen. Links in it may lead within the folder that was named: it is the second argument of `open`.
    """

    matches: Callable[[Path], bool]
    open: Callable[[Path, Path, str | None], Checkpoint]
    tags: Callable[[Path], Iterable[str]] = lambda _: ()


class ArchiveStranger(NamedTuple):
    """A zip archive that has the records `names` (or such endings) and is not a checkpoint: what it is, what to do."""

    names: tuple[str, ...]
    what: str
    hint: str

    def matches(self, records: Records) -> bool:
        """Whether the archive holds them all, in whatever folder."""
        return all(any(f"/{record}".endswith(f"/{name}") for record in records) for name in self.names)


ARCHIVE_STRANGERS: tuple[ArchiveStranger, ...] = (
    ArchiveStranger((".data/extern_modules",), "is a torch.package archive (code with its objects), not a checkpoint",
                    "save its weights: torch.save(torch.package.PackageImporter(PATH).load_pickle(PACKAGE, NAME).state_dict(), "
                    "OUT), which runs code of the archive"),
    ArchiveStranger(("archive_format", "models/model.json"), "is a pt2 archive (torch.export): a program, not a checkpoint",
                    "save its weights: torch.save(torch.export.load(PATH).state_dict, OUT)"),
    ArchiveStranger(("metadata.json", "config.json", "model.weights.h5"), "is a Keras model, not a PyTorch checkpoint",
                    "export its weights with Keras, under the keys of the PyTorch model"),
)  # fmt: skip
"""Zip archives of other programs.

Sources: torch/package/package_exporter.py, torch/export/pt2_archive/constants.py, keras/src/saving/saving_lib.py.
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
    Archive(may_hold_checkpoints, open_zip_members),
    Archive(lambda _: True, open_torch_zip),
)
"""What a zip archive may be, in the order in which it is tried; the last one says what else it is."""


def open_zip(source: Source, opener: Opener) -> Checkpoint:
    """Open a zip archive by what is in it; its directory is read once."""
    records = read_directory(source)
    claim_records(source, records.values())
    kind = next(kind for kind in ARCHIVES if kind.matches(records))
    return kind.open(source, records, opener)


FORMATS: tuple[Format, ...] = (
    Format(is_zip, open_zip),
    Format(is_torch_legacy, open_torch_legacy),
    Format(is_tar, open_torch_tar),
    Format(is_safetensors, open_safetensors),
    Format(is_raw_pickle, open_raw_pickle),
)
"""The containers that are read, in the order in which they are tried."""

GATHERINGS: tuple[Gathering, ...] = (
    Gathering(is_dcp, lambda path, *_: open_dcp(path, open_file, open_source)),
    Gathering(is_dcp_shards, lambda path, *_: open_dcp_shards(path, open_source)),
    Gathering(is_accelerate, lambda path, *_: open_accelerate(path, _openers())),
    Gathering(is_sharded, lambda path, _, tag: open_sharded(path, open_file, tag), variants),
    Gathering(is_fsdp, lambda path, *_: open_accelerate(path, _openers())),
    Gathering(is_deepspeed, lambda path, home, _: open_deepspeed(path, open_source, home)),
    Gathering(is_megatron, lambda path, home, _: open_megatron(path, open_file, home)),
)
"""The checkpoints of many files that are read, in the order in which they are tried."""


class Stranger(NamedTuple):
    """What a file is that starts with `magic` at byte `at`, and what its owner can do."""

    at: int
    magic: bytes
    what: str
    hint: str | None = None


STRANGERS: tuple[Stranger, ...] = (
    Stranger(0, b"version https://git-lfs", "is a git-LFS pointer, not the file itself", "run: git lfs pull"),
    Stranger(0, b"\x1f\x8b\x08", "is gzip-compressed", "unpack it first: gunzip"),
    Stranger(0, b"BZh", "is bzip2-compressed", "unpack it first: bunzip2"),
    Stranger(0, b"\xfd7zXZ\0", "is xz-compressed", "unpack it first: unxz"),
    Stranger(0, b"\x04\x22\x4d\x18", "is lz4-compressed", "unpack it first: unlz4"),
    Stranger(0, b"\x28\xb5\x2f\xfd", "is zstd-compressed", "unpack it first: unzstd"),
    Stranger(0, b"7z\xbc\xaf\x27\x1c", "is a 7z archive", "unpack it first"),
    Stranger(0, b"Rar!", "is a rar archive", "unpack it first"),
    Stranger(0, b"PK\5\6", "is an empty zip archive"),
    Stranger(0, b"GGUF", "is a GGUF model (llama.cpp), not a PyTorch checkpoint"),
    Stranger(0, b"\x89HDF\r\n\x1a\n", "is an HDF5 file (Keras), not a PyTorch checkpoint"),
    Stranger(0, b"\x93NUMPY", "is a numpy array file, not a PyTorch checkpoint"),
    Stranger(4, b"TFL3", "is a TensorFlow Lite model, not a PyTorch checkpoint"),
    Stranger(0, b"model_checkpoint_path:", "is the list of a TensorFlow checkpoint, not a PyTorch checkpoint"),
    Stranger(0, b"\x08\x01\x12", "is a TensorFlow SavedModel, not a PyTorch checkpoint"),
    Stranger(0, b"\x08", "looks like an ONNX or other protobuf model, not a PyTorch checkpoint"),
)  # fmt: skip
"""What people meet under a checkpoint's name; the first that matches is named in the error."""


@spelling_checked
def open_checkpoint(path: Named, *, tag: str | None = None, whole_modules: bool = False) -> Checkpoint:
    """Open a checkpoint of one file or of many: read its index, but not the bytes of its tensors.

    `path` is a file, the folder of a checkpoint of many files, the index in it, the folder around the only checkpoint or around
    the one that a file of it names, or a sequence of the files of all ranks (``torch.save`` of each rank's sharded state dict).
    `tag` chooses among the steps that a folder holds, by name or number, or among the variants of its weights. A whole module
    (``torch.save(model)``) appears as its state dict, unless `whole_modules` asks for the module itself. Use the result as a
    context manager, or close it. Raises `UnsupportedCheckpoint` when it is something else (and says what), or one rank's file
    alone, `MalformedCheckpoint` or `LimitExceeded` when it contradicts itself.
    """
    refuse_no_paths("path", path)
    refuse_no_text(tag=tag)
    refuse_no_flag(whole_modules=whole_modules)
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(item) for item in path]
    if not paths:
        raise UnsupportedCheckpoint("no file was given")
    opened: list[Checkpoint] = []
    try:
        with collector_paused(), counted_together():
            pool = FilePool()
            opened += [_open(paths[0], tag)] if len(paths) == 1 else (_open_owned(pool.source(item)) for item in paths)
            checkpoint = complete_tensors(join_ranks(opened))
            return checkpoint if whole_modules else flatten_modules(checkpoint)
    except BaseException as error:
        for one in opened:
            one.close()
        at = paths[len(opened)] if len(opened) < len(paths) else paths[0]
        if isinstance(error, CheckpointError):
            raise error.at(path=at) from error.__cause__
        if isinstance(error, OSError):  # a name too long, a folder that is closed to us
            raise not_opened(error, at) from error
        raise


def checkpoints_of(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[Path, ...]]:
    """The checkpoints that paths name: one, where each path is a rank's file with shards of tensors; else each by itself."""
    refuse_no_paths("path", paths)
    named = [Path(path) for path in paths]
    if len(named) > 1 and all(map(_holds_shards, named)):
        return [tuple(named)]
    return [(path,) for path in named]


def _holds_shards(path: Path) -> bool:
    """Whether a path is a file that holds a rank's shards; what cannot be opened does not."""
    if not path.is_file():
        return False
    try:
        with collector_paused(), counted_together(), open_file(path) as opened:
            return has_shards(opened)
    except (CheckpointError, OSError, ValueError):
        return False


def _open(path: Path, tag: str | None) -> Checkpoint:
    kind = _gathering(path)
    if kind is not None and (tag is None or tag in kind.tags(path)):
        return kind.open(path, path, tag)
    if os.path.isdir(path):  # noqa: PTH112 (unlike Path.is_dir, False for no name at all)
        return _open_inside(path, tag, kind)
    if tag is not None:
        raise UnsupportedCheckpoint("holds no tags to choose from", path=path, hint="leave --tag out")
    return _open_alone(path)


def _gathering(path: Path) -> Gathering | None:
    """The kind of gathering that a path is, if it is any."""
    if not os.path.exists(path):  # noqa: PTH110 (unlike Path.exists, False for no name at all)
        return None
    return next((kind for kind in GATHERINGS if kind.matches(path)), None)


def _open_inside(folder: Path, tag: str | None, kind: Gathering | None) -> Checkpoint:
    """Open the one checkpoint in a folder that is meant; `kind` is what the folder is itself."""
    _refuse_foreign_folder(folder)
    if tag is not None and kind is not None and not any(map(is_gathering, folder.iterdir())):
        return _open_tagged(folder, tag, kind)
    found = chosen(folder, tag, is_gathering)
    if found is None:
        what = "is a folder without a checkpoint in it"
        raise not_opened(errno.EISDIR, folder, what, "name the file that you mean")
    inner = _gathering(found.path)
    checkpoint = inner.open(found.path, folder, None) if inner is not None else _open_alone(found.path)
    return replace(checkpoint, notes=(*found.notes, *checkpoint.notes))


def _open_tagged(folder: Path, tag: str, kind: Gathering) -> Checkpoint:
    """Open a folder that is one checkpoint, if that is what the tag names; else say which tags there are."""
    if tag == folder.name:
        return kind.open(folder, folder, None)
    if known := ", ".join(kind.tags(folder)):
        what, hint = f"holds no '{printable(tag)}'", f"choose one with --tag: {printable(known, 500)}"
        raise UnsupportedCheckpoint(what, path=folder, hint=hint)
    what = f"is the folder of one step or model, not of '{printable(tag)}'"
    raise UnsupportedCheckpoint(what, path=folder, hint="leave --tag out, or name the folder above")


def _open_alone(path: Path) -> Checkpoint:
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

    def one(path: Path) -> Checkpoint:
        return _open_owned(pool.source(path))

    def ranks(paths: Sequence[Path]) -> Checkpoint:
        opened: list[Checkpoint] = []
        try:
            opened += map(one, paths)
            return join_ranks(opened)
        except BaseException:
            for checkpoint in opened:
                checkpoint.close()
            raise

    return Openers(one, lambda path: open_dcp(path, one, open_source), ranks)


def open_file(path: Path) -> Checkpoint:
    """Open a checkpoint of one file; its sources are closed when that fails."""
    return _open_owned(FileSource(path))


def _open_owned(source: Source) -> Checkpoint:
    try:
        return open_source(source)
    except BaseException:
        source.close()
        raise


def open_source(source: Source, depth: int = 0) -> Checkpoint:
    """Open what a source holds, itself `depth` files within files; the caller closes the source when that fails."""
    if depth > (most := in_force().files_in_files):
        what = f"holds more than {most} files within files"
        raise LimitExceeded(what, limit="files_in_files", allowed=most, path=source.path)
    head = source.read(0, min(_HEAD, source.size))
    for candidate in FORMATS:
        if candidate.matches(head):
            return candidate.open(source, lambda inner: open_source(inner, depth + 1))
    raise _stranger(source, head)


_FOREIGN_FOLDERS = (("saved_model.pb", "is a TensorFlow SavedModel"), ("*.data-?????-of-?????", "holds TensorFlow checkpoints"))
"""Files of which a folder is told to be another program's, and what it is."""


def _refuse_foreign_folder(folder: Path) -> None:
    for pattern, what in _FOREIGN_FOLDERS:
        if next(folder.glob(pattern), None) is not None:
            raise UnsupportedCheckpoint(f"{what}, not a PyTorch checkpoint", path=folder)
    if any(item.suffix == ".distcp" for item in folder.iterdir()) and _gathering(folder) is None:
        what = "holds the files of a DCP checkpoint, but not the .metadata that says what is in them"
        raise UnsupportedCheckpoint(what, path=folder, hint="copy the whole folder, hidden files too")


def is_gathering(path: Path) -> bool:
    """Whether a path is a folder that is a checkpoint of many files; one that is closed to us is not what is meant."""
    try:
        return path.is_dir() and _gathering(path) is not None
    except (OSError, CheckpointError):
        return False


_TENSORFLOW_SHARD = re.compile(r".+\.data-\d{5}-of-\d{5}").fullmatch
"""The names of the files that hold a TensorFlow checkpoint's values, one behind another and without any mark."""
_TABLE_END = (0xDB4775248B80FB57).to_bytes(8, "little")  # tensorflow/core/lib/io/format.h: kTableMagicNumber


def _stranger(source: Source, head: bytes) -> UnsupportedCheckpoint:
    if not head:
        return UnsupportedCheckpoint("is empty (0 bytes)", path=source.path, hint="fetch or save it again")
    has_its_name = _TENSORFLOW_SHARD(source.path.name) is not None
    for stranger in STRANGERS:
        if head[stranger.at :].startswith(stranger.magic) and not (has_its_name and len(stranger.magic) == 1):
            return UnsupportedCheckpoint(stranger.what, path=source.path, hint=stranger.hint)
    if source.read(max(0, source.size - 8), min(8, source.size)) == _TABLE_END:
        return UnsupportedCheckpoint("is the index of a TensorFlow checkpoint, not a PyTorch checkpoint", path=source.path)
    if has_its_name:
        return UnsupportedCheckpoint("is a part of a TensorFlow checkpoint, not a PyTorch checkpoint", path=source.path)
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return UnsupportedCheckpoint(
            "is a web page, not a checkpoint",
            path=source.path,
            hint="the download failed or needs a login; fetch it again",
        )
    if all(byte >= 32 or byte in b"\t\n\r" for byte in head):
        kind = "a JSON text" if text.startswith((b"{", b"[")) else "a text file"
        return UnsupportedCheckpoint(f"is {kind}, not a checkpoint ({_beginning(head)})", path=source.path, hint=_TEXT_HINT)
    return UnsupportedCheckpoint("is not a checkpoint of a known kind", path=source.path, hint=_UNKNOWN_HINT)


def _beginning(head: bytes) -> str:
    """The first words of a text, which often say what went wrong where it was fetched."""
    line = " ".join(head.decode("latin-1").split())
    return f"it begins: {line[:_SHOWN_OF_TEXT]}" + "…" * (len(line) > _SHOWN_OF_TEXT)


_SHOWN_OF_TEXT = 40
_TEXT_HINT = "if it was downloaded, an error was saved in its place: fetch it again; otherwise name the file with the weights"
_UNKNOWN_HINT = "check that it is complete and unpacked, and which program wrote it; docs/containers.md lists what is read"
