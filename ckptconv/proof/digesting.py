"""The digests of tensors, out of one pass over the files that hold them or tensor by tensor, and of
the files that a checkpoint consists of.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

from ckptconv.io.digests import digested, refuse_other
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.io.source import Range, Source
from ckptconv.proof.manifest import Algorithm, TensorDigest
from ckptconv.support.json_text import strict
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.progress import Counting, Meter
from ckptconv.support.records import NamedTuple
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.fold import fold_all
from ckptconv.tensors.refs import DerivedSource, Storage, TensorRef
from ckptconv.tensors.stream import verbatim_runs
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.values.named import Component

THREADS = min(4, os.cpu_count() or 1)
_NOTHING = hashlib.sha256().hexdigest()


class Sha256:
    """A folder that knows the SHA-256 of the values."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, chunk: memoryview) -> None:
        """Take the next values."""
        self._digest.update(chunk)

    @property
    def value(self) -> str:
        """In hexadecimal digits."""
        return self._digest.hexdigest()


class Lying(NamedTuple):
    """A tensor whose values are a run of a file, just as they are: `nbytes` bytes of `source` from
    `offset` on, which are those of `storage` from its byte `first` on.
    """

    source: Source
    offset: int
    nbytes: int
    storage: Storage
    first: int


def lying(ref: TensorRef) -> Lying | None:
    """Where a tensor's values lie in one run; None: gathered, swapped, computed or inflated."""
    runs = verbatim_runs(ref)
    if runs is None or len(runs) != 1:
        return None
    [(storage, first, nbytes)] = runs
    if not nbytes or isinstance(storage.source, DerivedSource) or storage.source.is_inflated:
        return None
    source, offset = storage.source.comes_from(storage.offset + first)
    if source.is_inflated or source.is_in_memory():
        return None
    return Lying(source, offset, nbytes, storage, first)


def apart(runs: Iterable[Range]) -> list[Range]:
    """Runs in order, without overlaps: of two, the one that begins first, or the longer one."""
    found: list[Range] = []
    end = 0
    for offset, nbytes in sorted({*runs}, key=lambda run: (run[0], -run[1])):
        if offset >= end:
            found.append((offset, nbytes))
            end = offset + nbytes
    return found


def note_checksums(checksums: Checksums, lies: Iterable[Lying], read: Mapping[Range, int]) -> None:
    """Tell `checksums` of the storages whose bytes were read; `read` are the CRC-32s of runs."""
    told: set[tuple[int, int, int]] = set()
    for each in lies:
        crc = read.get((each.offset, each.nbytes))
        key = id(each.storage), each.first, each.nbytes
        if crc is not None and key not in told:
            told.add(key)
            checksums.copied(each.storage, each.first, each.nbytes, crc)


Known = Callable[[TensorRef], str | None]
"""The digest of a tensor whose bytes have passed by."""


def tensor_digests(
    components: Sequence[Component],
    known: Known,
    tell: Callable[[int], Meter],
    *,
    is_checked: bool = True,
) -> list[TensorDigest]:
    """The digests of tensors, of which those that are not `known` are read. With `is_checked` what
    is read is held against the checksums that its file declares.
    """
    found = [_NOTHING if not each.ref.nbytes else known(each.ref) for each in components]
    left = [each.ref for each, digest in zip(components, found, strict=True) if digest is None]
    folders = iter(
        fold_all(left, lambda _: [Sha256()], tell, threads=THREADS, is_checked=is_checked)
    )
    made = []
    for each, digest in zip(components, found, strict=True):
        if digest is None:
            [folder] = next(folders)
            digest = folder.value
        made.append(told_of(each, digest))
    return made


def told_of(component: Component, sha256: str) -> TensorDigest:
    """What a manifest says of a tensor."""
    name, ref, recipe = component
    # a scale may be NaN, which JSON does not have, and which is not equal to itself
    recipe = None if recipe is None else strict(recipe)
    return TensorDigest(name, ref.dtype.name, ref.shown_shape, sha256, recipe)


# -------------------------------------------------------------------------------------------- files


class Listed(NamedTuple):
    """The files of a checkpoint by their paths in `home`; `is_folder`: all that lie in it."""

    home: Location
    files: Mapping[str, Location]
    is_folder: bool


def files_in(home: Location) -> Listed:
    """All files in a folder. Folders whose names begin with a dot are passed over: what git and
    caches of downloads put beside a model is not part of it.
    """
    files = dict(_within(home, home, "", 0))
    refuse_beyond("shards", len(files), f"has {len(files)} files", path=home.path)
    return Listed(home, files, is_folder=True)


def _within(
    folder: Location, home: Location, prefix: str, depth: int
) -> Iterator[tuple[str, Location]]:
    for name in folder.names():
        place = folder.child(name)
        kind = place.kind()
        if kind == "file":
            yield f"{prefix}{name}", place
        elif kind == "folder" and not name.startswith(".") and place.stays_within(home):
            refuse_beyond("depth", depth, "nests folders in folders", path=home.path)
            yield from _within(place, home, f"{prefix}{name}/", depth + 1)


def files_of(named: Sequence[Location], checkpoint: Checkpoint, tag: str | None) -> Listed:
    """The files of an open checkpoint: where its folder was named, or a step of it chosen, all that
    are in there; else the files that were named, and those that are read.
    """
    first = named[0]
    if first.is_folder():
        own = place_of(checkpoint.path)
        if tag is None:
            return files_in(first)
        return files_in(own if own.is_folder() else own.parent)
    home = first.parent
    base = f"{home.path}/"
    files = {place.name: place for place in named}
    known = {str(place.path) for place in named}
    for source in checkpoint.sources:
        path = str(source.path)
        if path not in known and path.startswith(base):
            files[path[len(base) :]] = place_of(source.path)
    return Listed(home, files, is_folder=False)


def file_digest(place: Location, algorithm: Algorithm, meter: Counting) -> str:
    """The hexadecimal digest of a file, read once, and held against what its server says."""
    with closing(place.open()) as source:
        if algorithm == "sha256":
            found = digested(source, (), meter).result().whole
            refuse_other(source, found)
        else:
            found = _git_name(source, meter)
        source.check_unchanged()
        return found


def _git_name(source: Source, meter: Counting) -> str:
    digest = hashlib.sha1(b"blob %d\0" % source.size, usedforsecurity=False)
    for view in source.stream([(0, source.size)]):
        digest.update(view)
        meter.add(len(view))
    return digest.hexdigest()
