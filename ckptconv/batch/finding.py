"""The checkpoints below a folder, and the names that their outputs get."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath, PurePosixPath

from ckptconv.batch.identity import real_name
from ckptconv.convert.job import Job
from ckptconv.convert.options import Options
from ckptconv.formats.folders.steps import is_training_state
from ckptconv.formats.outputs import target_named
from ckptconv.formats.registry import (
    is_gathering,
    kind_of_head,
    open_checkpoint,
    open_file,
)
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.support.errors import (
    BatchRefused,
    CheckpointError,
    OptionRefused,
    UnsupportedCheckpoint,
    printable,
)

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


def find_checkpoints(root: Location, leave: Callable[[Location], bool] = lambda _: False) -> Found:
    """All checkpoints below a folder, in the order of their names; a folder that is one checkpoint
    of several files is one. A `root` that is a file is the checkpoint.

    Hidden files are passed over, and what `leave` says, silently. Links to folders, what training
    leaves beside weights (``optimizer.pt``), and checkpoints in the folder of another one are
    passed over with a reason.
    """
    if root.is_file():
        return Found(((root, PurePosixPath(root.name)),), ())
    search = _Search(leave)
    search.below(root)
    return Found(tuple(search.found), tuple(search.passed))


class _Search:
    """The way through the folders."""

    def __init__(self, leave: Callable[[Location], bool]) -> None:
        self.found: list[tuple[Location, PurePosixPath]] = []
        self.passed: list[Passed] = []
        self._leave = leave

    def below(self, root: Location) -> None:
        """Look at a folder and all folders in it."""
        work = [(root, PurePosixPath())]
        while work:
            folder, below = work.pop()
            read = _read_by(folder)
            if read is not None:
                self.found.append((folder, below))
            inner = []
            for item in folder.list():
                path = str(item.path)
                if item.name.startswith(".") or self._leave(item):
                    continue
                if not item.is_folder():
                    self._file(item, below / item.name, read)
                elif _is_link(item):
                    self.passed.append(Passed(path, "is a link to a folder"))
                elif read is None or not any(name.startswith(f"{path}/") for name in read):
                    inner.append((item, below / item.name))
            work.extend(reversed(inner))

    def _file(self, file: Location, below: PurePosixPath, read: frozenset[str] | None) -> None:
        """A file, which lies in a folder that is a checkpoint of the files `read`, or is none."""
        if read is not None and str(file.path) in read:
            return
        reason = _why_not(file)
        if reason is None and read is not None:
            reason = "lies in the folder of a checkpoint that is not made of it"
        if reason is None:
            self.found.append((file, below))
        elif reason:
            self.passed.append(Passed(str(file), reason))


def _is_link(folder: Location) -> bool:
    path = folder.local()
    return path is not None and path.is_symlink()


def _read_by(folder: Location) -> frozenset[str] | None:
    """The files of the checkpoint that a folder is; None where it is not one of several files.

    What cannot be opened is one, to be told of.
    """
    if not is_gathering(folder):
        return None
    try:
        with open_checkpoint(folder) as checkpoint:
            read = frozenset(str(source.path) for source in checkpoint.sources)
    except CheckpointError:
        return frozenset(str(item.path) for item in folder.list() if not item.is_folder())
    if len(read) == 1 and _opens_alone(folder.child(PurePosixPath(*read).name)):
        return None
    return read


def _opens_alone(file: Location) -> bool:
    """Whether a file is a checkpoint, whatever folder it is in."""
    try:
        open_checkpoint(file).close()
    except (CheckpointError, OSError):
        return False
    return True


def _why_not(file: Location) -> str | None:
    """Why a file is not converted: empty for what nobody would convert, None where it is.

    What is damaged is converted, to be told of.
    """
    if file.suffix.lower() in _NEVER:
        return ""
    if is_training_state(file.name):
        return "is what training left beside the weights"
    try:
        with closing(file.open()) as source:
            known = kind_of_head(source.read(0, min(HEAD, source.size)))
        if known is not None:
            return None if known else "is not a checkpoint"
        with open_file(file):  # only its directory tells
            return None
    except UnsupportedCheckpoint as error:
        return printable(error.what)
    except CheckpointError:
        return None


def jobs_below(
    roots: Sequence[Location], out_dir: Location, common: Job, passed: list[Passed]
) -> list[Job]:
    """A job for each checkpoint below `roots`, with its output at the same place below `out_dir`.

    Of several roots each has a folder of its own name there. `passed` gets what is passed over.
    """
    options = common.options
    assert isinstance(options, Options)
    if options.to is None:
        raise OptionRefused(
            "--to is missing: the outputs have no names that say their format",
            hint="add --to safetensors, or another",
        )
    jobs: list[Job] = []
    inside = real_name(out_dir)
    for root in roots:
        if not root.exists():
            raise BatchRefused([f"{root}: no such file or folder"])
        found = find_checkpoints(root, partial(_is_at, inside))
        passed += found.passed
        before = PurePosixPath(_name_of(root)) if len(roots) > 1 and root.is_folder() else None
        for place, below in found.checkpoints:
            path = below if before is None else before / below
            output = _output_of(place, path, out_dir, options)
            jobs.append(replace(common, source=str(place), output=str(output)))
    return jobs


def _is_at(real: str, place: Location) -> bool:
    return place.name == PurePath(real).name and real_name(place) == real


def _name_of(place: Location) -> str:
    """The name of a place, of ``.`` and ``..`` too."""
    return posixpath.basename(posixpath.normpath(place.absolute.path.as_posix()))


def _output_of(
    place: Location, below: PurePosixPath, out_dir: Location, options: Options
) -> Location:
    """Where a checkpoint's output goes: under its own name, with the ending of the format; a
    folder, where the output is one.
    """
    assert options.to is not None
    target = target_named(options.to)
    name = str(below) if below.parts else _name_of(place)
    path = PurePath(name)
    is_file = place.is_file()
    stem = str(path.with_suffix("")) if is_file and path.suffix in _ENDINGS else name
    if target.is_folder or options.max_shard_size is not None or options.with_files:
        return out_dir.child(stem)
    return out_dir.child(f"{stem}{target.suffix}")


_ENDINGS = (
    ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".tar", ".th", ".pkl", ".pickle", ".npz",
    ".zip", ".model", ".t7",
)  # fmt: skip


def places(names: Sequence[str]) -> Iterator[Location]:
    """The places that names say."""
    yield from map(place_of, names)
