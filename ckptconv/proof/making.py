"""Manifests of checkpoints that are there: one pass over their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from ckptconv.io.places import Named, Place, place_of, places_of
from ckptconv.io.source import Range, Source
from ckptconv.proof.digesting import (
    Listed,
    Lying,
    apart,
    files_of,
    lying,
    note_checksums,
    tensor_digests,
)
from ckptconv.proof.manifest import FileDigest, Manifest, TensorDigest, manifest_of
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_path,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import errors_at
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.refs import Storage, TensorRef, origins
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import find
from ckptconv.values.named import Component, components_in, told_apart


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
        return _manifest(source, only, tag, on_progress)
    refuse_no_path(output=output)
    with file_output(place_of(output), force=force, fsync=True, size=0) as destination:
        made = _manifest(source, only, tag, on_progress, besides=(output,))
        write_text(destination, output, made)
        return made


def write_text(destination: Destination, output: Place | PurePath, manifest: Manifest) -> None:
    """Write a manifest as the one file of an output, and put that in its place."""
    raw = manifest.text().encode("utf-8", "surrogateescape")
    with destination.draft(place_of(output).name, len(raw)) as draft:
        draft.stream.write(raw)
        draft.commit()
    destination.commit()


def manifest_of_place(place: Location) -> Manifest:
    """The manifest of what is at a place."""
    return _manifest(place, None, None, None)


def _manifest(
    source: Named | Location,
    only: str | None,
    tag: str | None,
    on_progress: OnProgress | None,
    besides: Sequence[str | os.PathLike[str]] = (),
) -> Manifest:
    with open_certain(source, tag=tag) as checkpoint:
        check_places(checkpoint.sources)
        listed = files_of(places_of(source), checkpoint, tag)
        others = {str(place_of(path).absolute.path) for path in besides}
        files = {
            name: place
            for name, place in listed.files.items()
            if str(place.absolute.path) not in others
        }
        components = components_of(checkpoint, only)
        made = _Pass(checkpoint, listed._replace(files=files), components).run(on_progress)
        refuse_changed(checkpoint.sources)
        return made


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

    checkpoint: Checkpoint
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
        self.checksums.finish({id(one): one for one in self._storages()}.values())
        return manifest_of(files, tensors, is_whole=self.listed.is_folder)

    def _storages(self) -> list[Storage]:
        return [*origins(each.ref for each in self.components)]

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
            found = digested(source, (), meter).result().whole
            refuse_other(source, found)
            source.check_unchanged()
            return FileDigest(name, found)

    def _digest(self, source: Source, meter: Meter) -> str:
        """The digest of a file; those of the tensors in it are known then."""
        lies = self.lies[id(source)]
        runs = apart((each.offset, each.nbytes) for each in lies)
        passed = digested(source, runs, meter, has_crcs=True)
        found = passed.result()
        refuse_other(source, found.whole)
        self.known |= {(id(source), run): digest for run, digest in found.runs.items()}
        note_checksums(self.checksums, lies, dict(zip(runs, passed.crcs, strict=True)))
        return found.whole

    def _tensors(self, on_progress: OnProgress | None) -> list[TensorDigest]:
        def known(ref: TensorRef) -> str | None:
            at = lying(ref)
            return None if at is None else self.known.get((id(at.source), (at[1], at[2])))

        return tensor_digests(
            self.components, known, lambda nbytes: Meter("read", nbytes, on_progress)
        )
