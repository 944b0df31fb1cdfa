"""Manifests of checkpoints that are there: which files one consists of, and the digests of these
and of their tensors, out of one pass over the files that hold them or tensor by tensor.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from pathlib import PurePath

from ckptconv.formats.registry import open_certain
from ckptconv.io.destination import Destination
from ckptconv.io.digests import digested, refuse_other
from ckptconv.io.files import refuse_changed
from ckptconv.io.guarded import check_places
from ckptconv.io.location import Location
from ckptconv.io.outputs import file_output
from ckptconv.io.places import Named, Place, files_below, place_of, places_of, resolved
from ckptconv.io.source import Range, Source
from ckptconv.proof.manifest import (
    Algorithm,
    FileDigest,
    Manifest,
    TensorDigest,
    is_own,
    manifest_of,
)
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_path,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import OutputRefused, errors_at
from ckptconv.support.json_text import strict
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.progress import Counting, Meter, OnProgress
from ckptconv.support.records import NamedTuple, dataclass
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.compute_ahead import THREADS
from ckptconv.tensors.fold import fold_all
from ckptconv.tensors.refs import DerivedSource, Storage, TensorRef, origins
from ckptconv.tensors.stream import verbatim_runs
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import find
from ckptconv.values.named import Component, components_in, told_apart

_NOTHING = hashlib.sha256().hexdigest()


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
    # once more: what is not inflated itself may lie in a member that is
    if source.is_inflated or source.is_in_memory():
        return None
    return Lying(source, offset, nbytes, storage, first)


def apart(runs: Iterable[Range]) -> list[Range]:
    """Runs in order, without overlaps: of two, the one that begins first, or the longer one."""
    found: list[Range] = []
    for run in sorted({*runs}, key=lambda run: (run[0], -run[1])):
        if not found or run[0] >= sum(found[-1]):
            found.append(run)
    return found


def note_checksums(checksums: Checksums, lies: Iterable[Lying], read: Mapping[Range, int]) -> None:
    """Tell `checksums` of the storages whose bytes were read; `read` are the CRC-32s of runs."""
    for each in lies:
        crc = read.get((each.offset, each.nbytes))
        if crc is not None:
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
    # an empty tensor has no bytes that could pass by, and is not read for them
    found = [known(each.ref) if each.ref.nbytes else _NOTHING for each in components]
    left = [each.ref for each, digest in zip(components, found, strict=True) if digest is None]
    folded = fold_all(
        left, lambda _: [hashlib.sha256()], tell, threads=THREADS, is_checked=is_checked
    )
    read = (made.hexdigest() for [made] in folded)
    return [
        told_of(each, digest or next(read)) for each, digest in zip(components, found, strict=True)
    ]


def told_of(component: Component, sha256: str) -> TensorDigest:
    """What a manifest says of a tensor."""
    name, ref, recipe = component
    # a scale may be NaN, which JSON does not have, and which is not equal to itself
    return TensorDigest(name, ref.dtype.name, ref.shown_shape, sha256, strict(recipe))


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
    files = {}
    for path, place in files_below(home, lambda folder: _is_part(folder, home)):
        files[path] = place
        # at once: folders that are linked into each other have files without end
        refuse_beyond("shards", len(files), f"has {len(files)} files or more", path=home.path)
    return Listed(home, files, is_folder=True)


def _is_part(folder: Location, home: Location) -> bool:
    return not folder.name.startswith(".") and folder.stays_within(home)


def files_of(named: Sequence[Location], checkpoint: Checkpoint, tag: str | None) -> Listed:
    """The files of an open checkpoint: where its folder was named, or a step of it chosen, all that
    are in there; else the files that were named, and those that are read.
    """
    first = named[0]
    if first.is_folder() and tag is None:
        return files_in(first)
    if first.is_folder():
        own = place_of(checkpoint.path)
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
            return _whole_digest(source, meter)
        found = _git_name(source, meter)
        source.check_unchanged()
        return found


def _whole_digest(source: Source, meter: Counting) -> str:
    """The SHA-256 of a file in which no tensor lies; it did not change meanwhile."""
    found = digested(source, (), meter).result().whole
    refuse_other(source, found)
    source.check_unchanged()
    return found


def _git_name(source: Source, meter: Counting) -> str:
    digest = hashlib.sha1(b"blob %d\0" % source.size, usedforsecurity=False)
    for view in source.stream([(0, source.size)]):
        digest.update(view)
        meter.add(len(view))
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- manifests


@spelling_checked
def manifest_checkpoint(
    source: Named,
    output: str | os.PathLike[str] | None = None,
    *,
    only: str | None = None,
    tag: str | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """The SHA-256 of each file of the checkpoint `source`, and of the values of each tensor.

    `output` is a file that it is written to as text (`Manifest.text`); an existing one is replaced
    only with `force`. `only` is the path of the part whose tensors are told, under their names in
    it; `tag` picks the step of a folder of several. Each file is read once, and held against the
    checksums that it declares, and against the SHA-256 that the Hub says of it. `on_progress` is
    called with a `Progress`. Raises `CheckpointError` when the checkpoint cannot be read, or is
    damaged.
    """
    refuse_no_text(only=only)
    refuse_no_flag(force=force)
    if output is None:
        return manifest_of_place(source, only, tag, on_progress)
    refuse_no_path(output=output)
    # the output is opened first: one that may not be there is refused before all is read
    with file_output(place_of(output), force=force, fsync=True, size=0) as destination:
        made = manifest_of_place(source, only, tag, on_progress, besides=output)
        write_text(destination, output, made)
        return made


def write_text(destination: Destination, output: Place | PurePath, manifest: Manifest) -> None:
    """Write a manifest as the one file of an output, and put that in its place."""
    raw = manifest.text().encode("utf-8", "surrogateescape")
    with destination.draft(place_of(output).name, len(raw)) as draft:
        draft.stream.write(raw)
        draft.commit()
    destination.commit()


def manifest_of_place(
    source: Named | Location,
    only: str | None = None,
    tag: str | None = None,
    on_progress: OnProgress | None = None,
    besides: str | os.PathLike[str] | None = None,
) -> Manifest:
    """The manifest of what is at a place, `besides` left out: the manifest itself, which may
    replace an earlier one there.
    """
    with open_certain(source, tag=tag) as checkpoint:
        check_places(checkpoint.sources)
        listed = files_of(places_of(source), checkpoint, tag)
        files = dict(listed.files)
        if besides is not None:
            own = resolved(place_of(besides).absolute.path)
            for name, place in listed.files.items():
                if resolved(place.absolute.path) == own:
                    _refuse_no_manifest(place)
                    del files[name]
        components = components_of(checkpoint, only)
        made = _Pass(listed._replace(files=files), components).run(on_progress)
        refuse_changed(checkpoint.sources)
        return made


def _refuse_no_manifest(place: Location) -> None:
    """Raise `OutputRefused` for a file of the checkpoint that is not an earlier manifest."""
    with closing(place.open()) as source:
        is_earlier = is_own(source.read(0, min(source.size, 80)).decode("latin-1"))
    if not is_earlier:
        what = "is a file of the checkpoint, so it cannot also be the manifest"
        raise OutputRefused(what, path=place.path, hint="name another file")


def components_of(checkpoint: Checkpoint, only: str | None) -> list[Component]:
    """The tensors of a checkpoint, or of a part of it under their names in there; `KeyConflict`
    where two have one name.
    """
    root = checkpoint.root
    found = components_in(root if only is None else find(root, only, checkpoint.path))
    with errors_at(path=checkpoint.path):
        return told_apart(found)


@dataclass(slots=True)
class _Pass:
    """One pass over the files of a checkpoint, for them and for the tensors that lie in them."""

    listed: Listed
    components: Sequence[Component]
    lies: dict[int, list[Lying]] = field(default_factory=dict)
    known: dict[tuple[int, Range], str] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=Checksums)

    def run(self, on_progress: OnProgress | None) -> Manifest:
        for each in {id(one.ref): one.ref for one in self.components}.values():
            at = lying(each)
            if at is not None:
                self.lies.setdefault(id(at.source), []).append(at)
        sources = {str(at[0].source.path): at[0].source for at in self.lies.values()}
        sizes = [self._size(name, sources) for name in self.listed.files]
        meter = Meter("read", sum(sizes), on_progress)
        files = [self._file(name, sources, meter) for name in self.listed.files]
        meter.finish()
        tensors = self._tensors(on_progress)
        # also of tensors that were not read in one run: each storage has its declared checksum
        self.checksums.finish(origins(each.ref for each in self.components))
        return manifest_of(files, tensors, is_whole=self.listed.is_folder)

    def _size(self, name: str, sources: dict[str, Source]) -> int:
        place = self.listed.files[name]
        own = sources.get(str(place.path))
        if own is not None:
            return own.size
        with closing(place.open()) as source:
            return source.size

    def _file(self, name: str, sources: dict[str, Source], meter: Meter) -> FileDigest:
        place = self.listed.files[name]
        own = sources.get(str(place.path))
        if own is not None:
            return FileDigest(name, self._digest(own, meter))
        with closing(place.open()) as source:
            return FileDigest(name, _whole_digest(source, meter))

    def _digest(self, source: Source, meter: Meter) -> str:
        """The digest of a file; those of the tensors in it are known then."""
        lies = self.lies[id(source)]
        runs = apart((each.offset, each.nbytes) for each in lies)
        # the checksums that the file declares are of these bytes too: they are read once
        passed = digested(source, runs, meter, has_crcs=True)
        found = passed.result()
        refuse_other(source, found.whole)
        self.known |= {(id(source), run): digest for run, digest in found.runs.items()}
        note_checksums(self.checksums, lies, dict(zip(runs, passed.crcs, strict=True)))
        return found.whole

    def _tensors(self, on_progress: OnProgress | None) -> list[TensorDigest]:
        def known(ref: TensorRef) -> str | None:
            at = lying(ref)
            return at and self.known.get((id(at.source), (at.offset, at.nbytes)))

        return tensor_digests(
            self.components, known, lambda nbytes: Meter("read", nbytes, on_progress)
        )
