"""The checkpoints below a folder, and the names that their outputs get."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import PurePath, PurePosixPath

from ckptconv.batch.identity import real_name
from ckptconv.convert.job import Job
from ckptconv.convert.options import Options
from ckptconv.formats.containers import SUFFIXES, kind_of_head, open_file, packer_of
from ckptconv.formats.folders.alone import MODULES, module_folders
from ckptconv.formats.folders.steps import names_training_file
from ckptconv.formats.hf_names import is_weights_name, named_like
from ckptconv.formats.registry import is_empty_loss, is_gathering, lacks_metadata, open_by_index
from ckptconv.formats.target_format import target_named
from ckptconv.io.location import Kind, Location
from ckptconv.io.places import place_of
from ckptconv.support.errors import (
    BatchRefused,
    CheckpointError,
    OptionRefused,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.records import dataclass

HEAD = 512  # bytes by which a file is judged

_NEVER = (
    ".json", ".jsonl", ".txt", ".md", ".py", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".log",
    ".csv", ".tsv", ".html", ".sh", ".png", ".jpg", ".gif", ".svg", ".pdf", ".model", ".tiktoken",
)  # fmt: skip
"""Ends of the names of files that are not opened: no checkpoint has them."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A file below a folder that is not converted, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoints below a folder, each with the parts of its name below it; what is passed
    over.
    """

    checkpoints: tuple[tuple[Location, PurePosixPath], ...]
    passed: tuple[Passed, ...]


def find_checkpoints(
    root: Location, leave: Callable[[Location], bool] = lambda _: False, *, with_files: bool = False
) -> Found:
    """All checkpoints below a folder, in the order of their names; a folder that is one checkpoint
    of several files is one. A `root` that is a file is the checkpoint.

    Hidden files are passed over, and what `leave` says, silently; so are the folders of a model's
    modules `with_files`, with which they are copied. Links to folders, what training leaves beside
    weights (``optimizer.pt``), and checkpoints in the folder of another one are passed over with a
    reason.
    """
    if root.is_file():
        return Found(((root, PurePosixPath(root.name)),), ())
    found: list[tuple[Location, PurePosixPath]] = []
    passed: list[Passed] = []
    work = [(root, PurePosixPath())]
    while work:
        folder, below = work.pop()
        read = _read_by(folder)
        if read is not None:
            found.append((folder, below))
        inner = []
        items = list(folder.list())
        has_modules = with_files and any(item.name == MODULES for item in items)
        copied = module_folders(folder) if has_modules else ()
        unread = frozenset[str]() if read is not None else _other_weights(folder, items)
        is_cache = any(item.name == "snapshots" for item in items)
        for item in items:
            path, reason = str(item.path), ""
            if item.name.startswith(".") or leave(item) or item in copied:
                continue
            if path in unread:
                reason = "are weights that its library does not read"
            elif not item.is_folder():
                why_not = "" if read is not None and path in read else _why_not(item)
                if why_not is None and read is not None:
                    why_not = "lies in the folder of a checkpoint, but is not part of it"
                if why_not is None:
                    found.append((item, below / item.name))
                reason = why_not or ""
            # a link may lead to a folder around it, and so without end
            elif _is_link(item):
                reason = "is a link to a folder"
            elif is_cache and item.name == "blobs":
                reason = "holds the files that the links in snapshots point to"
            elif read is None or not any(name.startswith(f"{path}/") for name in read):
                inner.append((item, below / item.name))
            if reason:
                passed.append(Passed(path, reason))
        work.extend(reversed(inner))
    return Found(tuple(found), tuple(passed))


def _is_link(folder: Location) -> bool:
    path = folder.local()
    return path is not None and path.is_symlink()


def _read_by(folder: Location) -> frozenset[str] | None:
    """The files of the checkpoint that a folder is; None where it is not one of several files.

    What cannot be opened is one, to be told of.
    """
    if not is_gathering(folder) and not lacks_metadata(folder):
        return None
    try:
        with open_by_index(folder) as checkpoint:
            read = frozenset(str(source.path) for source in checkpoint.sources)
    except CheckpointError:
        return frozenset(str(item.path) for item in folder.list() if not item.is_folder())
    if len(read) == 1 and _opens_alone(folder.child(PurePosixPath(*read).name)):
        return None
    return read


def _other_weights(folder: Location, items: Sequence[Location]) -> frozenset[str]:
    """The weights in the folder of a model that its library would not read: in another format."""
    weights = frozenset(str(item.path) for item in items if is_weights_name(item.name))
    if len(weights) < 2 or _CONFIGS.isdisjoint(item.name for item in items):
        return frozenset()
    try:
        with open_by_index(folder) as checkpoint:
            read = {str(source.path) for source in checkpoint.sources}
    except CheckpointError:
        return frozenset()
    return weights - read if read & weights else frozenset()


_CONFIGS = frozenset(("config.json", "adapter_config.json"))
"""What the folder of a model has, whatever its library."""


def _opens_alone(file: Location) -> bool:
    """Whether a file is a checkpoint, whatever folder it is in."""
    try:
        open_by_index(file).close()
    except (CheckpointError, OSError):
        return False
    return True


def _why_not(file: Location) -> str | None:
    """Why a file is not converted: empty for what nobody would convert, None where it is.

    What is damaged is converted, to be told of.
    """
    ending = file.suffix.lower()
    if ending in _NEVER:
        return ""
    if names_training_file(file.name):
        return "was saved by training beside the weights"
    try:
        with closing(file.open()) as source:
            # a crash leaves a file without bytes under the name of a checkpoint
            if source.size == 0 and ending in _ENDINGS:
                return None
            head = source.read(0, min(HEAD, source.size))
        if packer_of(head) and not _says_checkpoint(ending, PurePath(file.stem).suffix.lower()):
            return "is compressed and not named like a checkpoint"  # it may be large, and anything
        if is_empty_loss(file):
            return "is the state of a loss, without tensors"
        known = kind_of_head(head)
        if known is not None:
            return None if known else "is not a checkpoint"
        with open_file(file):  # only its directory tells
            return None
    except UnsupportedCheckpoint as error:
        return printable(error.what)
    except CheckpointError:
        return None


def _says_checkpoint(*endings: str) -> bool:
    return not {*endings}.isdisjoint({*_ENDINGS} - {".tar", ".zip"})


def jobs_below(
    roots: Sequence[Location],
    out_dir: Location,
    common: Job,
    passed: list[Passed],
    outputs_known: Callable[[], Collection[str]] = frozenset,
) -> list[Job]:
    """A job for each checkpoint below `roots`, with its output at the same place below `out_dir`.

    Of several roots each has a folder of its own name there. Where two checkpoints would have one
    output (``a.pt`` and ``a.pth``), each is named after the whole name of its source. `passed` gets
    what is passed over. `outputs_known` are those of earlier runs, which lie among the sources
    where `out_dir` is a root, or around one.
    """
    options = common.options
    assert isinstance(options, Options)
    if missing := [root for root in roots if not root.exists()]:
        raise BatchRefused([f"{root}: no such file or folder" for root in missing])
    if options.to is None:
        raise OptionRefused(
            "--to is missing: no output has a name that says its format",
            hint="add --to safetensors, or another",
        )
    named: list[tuple[Location, PurePosixPath]] = []
    inside = real_name(out_dir)
    is_around = any(PurePath(real_name(root)).is_relative_to(inside) for root in roots)
    known = {real_name(place_of(one)) for one in outputs_known()} if is_around else set()
    for root in roots:
        leave = partial(_is_at, PurePath(inside).name, inside)
        found = find_checkpoints(root, leave, with_files=options.with_files)
        passed += found.passed
        is_apart = len(roots) > 1 and root.is_folder()
        before = PurePosixPath(_name_of(root) if is_apart else "")
        for place, below in found.checkpoints:
            if _is_in(known, place):
                passed.append(Passed(str(place.path), "is an output of this batch"))
            else:
                named.append((place, before / below))
    outputs = [_output_of(*one, out_dir, options) for one in named]
    taken = Counter(map(str, outputs))
    return [
        replace(
            common,
            source=str(place),
            output=str(
                output
                if taken[str(output)] == 1
                else _output_of(place, below, out_dir, options, keeps_ending=True)
            ),
        )
        for (place, below), output in zip(named, outputs, strict=True)
    ]


def _is_at(name: str, real: str, place: Location) -> bool:
    # by name first: to follow links costs several calls of the system for each folder
    return place.name == name and real_name(place) == real


def _is_in(outputs: Collection[str], place: Location) -> bool:
    """Whether a place is an output, or lies in one."""
    name = real_name(place) if outputs else ""
    while name:
        if name in outputs:
            return True
        name = name.rpartition("/")[0]
    return False


def _name_of(place: Location) -> str:
    """The name of a place, of ``.`` and ``..`` too."""
    return posixpath.basename(posixpath.normpath(place.absolute.path.as_posix()))


def _output_of(
    place: Location,
    below: PurePosixPath,
    out_dir: Location,
    options: Options,
    *,
    keeps_ending: bool = False,
) -> Location:
    """Where a checkpoint's output goes: under its own name, with the ending of the format (or, if
    it `keeps_ending`, with that before it); a folder, where the output is one. The weights in a
    model's folder have the name for which its library looks.
    """
    assert options.to is not None
    target = target_named(options.to)
    goes_into = target.is_folder or options.max_shard_size is not None or options.with_files
    kind = place.kind()
    read = None
    if target.shards_named and not keeps_ending:
        read = _weights_of_model(place, kind)
    if read:
        home = below if kind == "folder" else below.parent
        made = out_dir.child(str(home)) if home.parts else out_dir
        return made if goes_into else made.child(named_like(read, target.shards_named))
    name = str(below) if below.parts else _name_of(place)
    path = PurePath(name)
    known = kind == "file" and path.suffix in _ENDINGS
    if known and keeps_ending:
        known = path.suffix == target.suffix
    stem = str(path.with_suffix("")) if known else name
    if goes_into:
        return out_dir.child(stem)
    return out_dir.child(f"{stem}{target.suffix}")


def _weights_of_model(place: Location, kind: Kind) -> str | None:
    """The name of the weights, where a checkpoint is a model's folder or the weights in one."""
    if kind == "file" and not is_weights_name(place.name):
        return None
    names = (place if kind == "folder" else place.parent).names()
    if _CONFIGS.isdisjoint(names):
        return None
    if kind == "file":
        return place.name
    return next(filter(is_weights_name, names), None)


_ENDINGS = (*SUFFIXES, ".npz", ".model", ".t7")
