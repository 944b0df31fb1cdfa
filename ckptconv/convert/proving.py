"""The manifest of an output, made of the bytes that pass by while its files are written.

Names, types and shapes of the tensors are those that a reader finds in the written files; so a
manifest that is made on the way is the one that `manifest_checkpoint` makes of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath

from ckptconv.convert.plan import ConversionPlan
from ckptconv.formats.registry import open_certain
from ckptconv.formats.target_format import Layout
from ckptconv.io.destination import Destination
from ckptconv.io.digests import DigestingSink, Digests, RunDigests
from ckptconv.io.location import Location
from ckptconv.io.outputs import file_output
from ckptconv.io.places import place_of
from ckptconv.io.stream import OutputStream
from ckptconv.proof.making import (
    files_in,
    lying,
    manifest_of_place,
    tensor_digests,
    write_text,
)
from ckptconv.proof.manifest import FileDigest, TensorDigest, manifest_of
from ckptconv.support.errors import OutputRefused
from ckptconv.support.limits import held
from ckptconv.support.progress import Meter
from ckptconv.tensors.refs import TensorRef
from ckptconv.values.named import components_in, told_apart


def watched(stream: OutputStream, layout: Layout) -> RunDigests:
    """What knows the digests of a file and of its payloads when all of it was written."""
    runs = [(item.offset, item.nbytes) for item in layout.items if item.nbytes]
    passing = RunDigests(runs)
    stream.lead_through(partial(DigestingSink, passing=passing))
    return passing


class Proof:
    """What is known of the files of an output, until its manifest is written, by any thread."""

    def __init__(self, plan: ConversionPlan, destination: Destination) -> None:
        self._plan, self._destination = plan, destination
        self._files: list[FileDigest] = []
        self._tensors: list[TensorDigest] = []
        self._beside: list[tuple[str, RunDigests]] = []
        self._is_whole = False

    def watch(self, stream: OutputStream, layout: Layout) -> RunDigests:
        """What knows the digests of a file of the output when all of it was written."""
        return watched(stream, layout)

    def watch_file(self, name: str, stream: OutputStream) -> None:
        """A file without tensors is about to be written."""
        passing = RunDigests(())
        stream.lead_through(partial(DigestingSink, passing=passing))
        self._beside.append((name, passing))

    def add(self, name: str, place: Location, digests: Digests) -> None:
        """A file of the output was written: its digests, and those of the tensors that a reader
        finds in it. What does not lie in it as it was written is read for that.
        """
        self._files.append(FileDigest(name, digests.whole))
        if self._plan.index is not None and name == self._plan.index.path.name:
            return

        def known(ref: TensorRef) -> str | None:
            at = lying(ref)
            return None if at is None else digests.runs.get((at.offset, at.nbytes))

        with held(self._plan.made_of.limits), open_certain(place) as written:
            components = told_apart(components_in(written.root))
            self._tensors += tensor_digests(components, known, partial(Meter, "read", tell=None))

    def add_folder(self, folder: Location) -> None:
        """All of an output that is a folder which somebody else made: it is read for that."""
        with held(self._plan.made_of.limits):
            made = manifest_of_place(folder)
        self._files += made.files
        self._tensors += made.tensors or ()
        self._is_whole = True

    def put(self) -> None:
        """Write the manifest of an output that is in its place."""
        self._files += (FileDigest(name, each.result().whole) for name, each in self._beside)
        made = manifest_of(self._files, self._tensors, is_whole=self._is_whole or self._is_all())
        assert self._plan.manifest is not None
        try:
            write_text(self._destination, self._plan.manifest, made)
        except OutputRefused as error:
            error.hint = f"the output {self._plan.output} is in place"
            raise

    def _is_all(self) -> bool:
        """Whether the output is all that is in its folder."""
        plan, folder = self._plan, place_of(self._plan.folder)
        # a far folder may have been listed before, and what is in it by now is not certain
        if not plan.in_folder or folder.is_far():
            return False
        names = {file.name for file in self._files}
        there = files_in(folder).files
        own = str(place_of(plan.manifest or PurePath()).absolute.path)
        return all(name in names or str(at.absolute.path) == own for name, at in there.items())


@contextmanager
def proof_of(
    plan: ConversionPlan, manifest: PurePath, *, force: bool, fsync: bool
) -> Iterator[Proof]:
    """What collects the digests of an output, whose manifest is written after the block; a place
    where that may not be is refused now.
    """
    place = place_of(manifest)
    with file_output(place, force=force, fsync=fsync, size=0) as destination:
        proof = Proof(plan, destination)
        yield proof
        proof.put()
