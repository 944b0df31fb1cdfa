"""Which container a path is, by content and never by extension; and what a file is that is no checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptconv.archives import is_zip, read_directory
from ckptconv.bounds import in_force
from ckptconv.checkpoint import Checkpoint
from ckptconv.choices import refuse_no_flag, refuse_no_paths, refuse_no_text
from ckptconv.collector import collector_paused
from ckptconv.errors import CheckpointError, LimitExceeded, UnsupportedCheckpoint, printable
from ckptconv.formats.accelerate import is_accelerate, open_accelerate
from ckptconv.formats.dcp import is_dcp, open_dcp
from ckptconv.formats.dcp_shards import is_dcp_shards, open_dcp_shards, refuse_one_rank
from ckptconv.formats.deepspeed import is_deepspeed, open_deepspeed
from ckptconv.formats.old_torchscript import is_old_torchscript, open_old_torchscript
from ckptconv.formats.ranks import join_ranks
from ckptconv.formats.raw_pickle import is_raw_pickle, open_raw_pickle
from ckptconv.formats.records import Records
from ckptconv.formats.safetensors import is_safetensors, open_safetensors
from ckptconv.formats.sharded import is_sharded, open_sharded
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
PathOpener = Callable[[Path], Checkpoint]

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

    `open` is also given a way to open the single files, and the `tag` that the user chose (a step, a revision). Where there
    is one, only those that `has_tags` are asked.
    """

    matches: Callable[[Path], bool]
    open: Callable[[Path, PathOpener, str | None], Checkpoint]
    has_tags: bool = False


class ArchiveStranger(NamedTuple):
    """A zip archive that has the records `names` (or such endings) and is no checkpoint; what it is, and what can be done."""

    names: tuple[str, ...]
    what: str
    hint: str

    def matches(self, records: Records) -> bool:
        """Whether the archive holds them all, in whatever folder."""
        return all(any(f"/{record}".endswith(f"/{name}") for record in records) for name in self.names)


ARCHIVE_STRANGERS: tuple[ArchiveStranger, ...] = (
    ArchiveStranger(("archive_format", "models/model.json"), "is a pt2 archive (torch.export), a program and no checkpoint",
                    "save its weights: torch.save(torch.export.load(PATH).state_dict, OUT)"),
    ArchiveStranger(("metadata.json", "config.json", "model.weights.h5"), "is a Keras model, not a PyTorch checkpoint",
                    "export its weights with Keras, under the keys of the PyTorch model"),
)  # fmt: skip
"""Zip archives of other programs: torch.export (torch/export/pt2_archive/constants.py), keras/src/saving/saving_lib.py."""


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
    Gathering(is_dcp, lambda path, open_one, _: open_dcp(path, open_one, open_source)),
    Gathering(is_dcp_shards, lambda path, *_: open_dcp_shards(path, open_source)),
    Gathering(is_accelerate, lambda path, open_one, _: open_accelerate(path, open_one)),
    Gathering(is_sharded, lambda path, open_one, _: open_sharded(path, open_one)),
    Gathering(is_deepspeed, lambda path, _, tag: open_deepspeed(path, open_source, tag), has_tags=True),
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


def open_checkpoint(path: Named, *, tag: str | None = None, whole_modules: bool = False) -> Checkpoint:
    """Open a checkpoint, of one file or of many: read its index, and none of its tensors' bytes.

    `path` is a file, the folder of a checkpoint of many files, the index in it, or a sequence of the files of all ranks
    (``torch.save`` of each rank's sharded state dict). `tag` chooses among the steps that a folder holds. A whole module
    (``torch.save(model)``) appears as its state dict, unless `whole_modules` asks for the module itself. Use the result as a
    context manager, or close it. Raises `UnsupportedCheckpoint` when it is something else (and says what), or one rank's file
    alone, `MalformedCheckpoint` or `LimitExceeded` when it contradicts itself.
    """
    refuse_no_paths("path", path)
    refuse_no_text(tag=tag)
    refuse_no_flag(whole_modules=whole_modules)
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(item) for item in path]
    if not paths:
        raise UnsupportedCheckpoint("no file was named")
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
            raise UnsupportedCheckpoint(f"cannot be opened: {os.strerror(error.errno or 0)}", path=at) from error
        raise


def _open(path: Path, tag: str | None) -> Checkpoint:
    for gathering in GATHERINGS if os.path.exists(path) else ():  # noqa: PTH110 (unlike Path.exists, False for no name at all)
        if (tag is None or gathering.has_tags) and gathering.matches(path):
            return gathering.open(path, open_file, tag)
    if tag is not None:
        raise UnsupportedCheckpoint("holds no tags to choose from", path=path, hint="leave --tag out")
    if os.path.isdir(path):  # noqa: PTH112
        raise _folder(path)
    checkpoint = open_file(path)
    try:
        return refuse_one_rank(checkpoint)
    except CheckpointError:
        checkpoint.close()
        raise


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


_LISTED = 6


_FOREIGN_FOLDERS = (("saved_model.pb", "is a TensorFlow SavedModel"), ("*.data-?????-of-?????", "holds TensorFlow checkpoints"))
"""Files of which a folder is told to be another program's, and what it is."""


def _folder(path: Path) -> UnsupportedCheckpoint:
    """What to say of a folder that is no checkpoint of many files: name what could be meant inside."""
    for pattern, what in _FOREIGN_FOLDERS:
        if next(path.glob(pattern), None) is not None:
            return UnsupportedCheckpoint(f"{what}, not a PyTorch checkpoint", path=path)
    items = sorted(path.iterdir())
    if any(item.suffix == ".distcp" for item in items):
        what = "holds the files of a DCP checkpoint, but not the .metadata that says what is in them"
        return UnsupportedCheckpoint(what, path=path, hint="copy the whole folder, hidden files too")
    folders = [item.name for item in items if item.is_dir() and _is_gathering(item)]
    if folders:
        named = ", ".join(printable(name) for name in folders[:_LISTED]) + ", …" * (len(folders) > _LISTED)
        what = "is not a checkpoint itself, but folders in it are"
        return UnsupportedCheckpoint(what, path=path, hint=f"name the one that is meant: {named}")
    inside = [item.name for item in items if item.suffix in _SUFFIXES and item.is_file()]
    if not inside:
        return UnsupportedCheckpoint("is a folder without a checkpoint in it", path=path, hint="name the file that is meant")
    names = ", ".join(printable(name) for name in inside[:_LISTED]) + ", …" * (len(inside) > _LISTED)
    return UnsupportedCheckpoint(
        f"is a folder of {len(inside)} files without an index", path=path, hint=f"name the file that is meant: {names}"
    )


def _is_gathering(path: Path) -> bool:
    try:
        return any(kind.matches(path) for kind in GATHERINGS)
    except OSError:  # a folder that is closed to us is not what is meant
        return False


_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl")


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
        return UnsupportedCheckpoint("is a text file, not a checkpoint", path=source.path)
    return UnsupportedCheckpoint("is no checkpoint that is known here", path=source.path)
