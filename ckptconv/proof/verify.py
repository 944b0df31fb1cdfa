"""A checkpoint held against a manifest: which tensors and files are not what it says."""

from __future__ import annotations

import fnmatch
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

from ckptconv.formats.registry import open_certain
from ckptconv.io.location import Location, require
from ckptconv.io.places import Named, Place, local_path, place_of, places_of
from ckptconv.proof.digesting import (
    Listed,
    Sha256,
    file_digest,
    files_in,
    files_of,
    tensor_digests,
    told_of,
)
from ckptconv.proof.making import components_of
from ckptconv.proof.manifest import FileDigest, Kind, Manifest, TensorDigest
from ckptconv.proof.prefixes import prefix_notes
from ckptconv.proof.reading import read_manifest
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_path,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import (
    CheckpointError,
    MissingDependency,
    OptionRefused,
    UnsupportedCheckpoint,
    VerificationFailed,
)
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import short_repr
from ckptconv.support.text import count_text
from ckptconv.tensors.fold import fold
from ckptconv.values.named import Component

What = Literal["values", "bytes", "dtype", "shape", "recipe", "missing", "unexpected", "unreadable"]
"""What is wrong: other values (of a tensor) or bytes (of a file), another dtype, shape or recipe;
it is in the manifest and not there, there and not in the manifest, or cannot be read.
"""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor (or a file, with `is_file`) that is not what the manifest says, and how it is not.
    `detail` is what the checkpoint has and what the manifest says, where that is short.
    """

    name: str
    what: What
    detail: str = ""
    is_file: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """What became of the checkpoint `path` held against the `manifest`, a file of that `kind`.

    So many `tensors` and `files` were compared; None: none, for they were not to be, or the
    manifest does not tell of any. `signature`: ``good``, by model-signing; ``unverified``; empty
    where the manifest has none.
    """

    path: str
    manifest: str
    kind: Kind
    tensors: int | None
    files: int | None
    mismatches: tuple[Mismatch, ...]
    signature: Literal["", "good", "unverified"] = ""
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all that was compared is what the manifest says."""
        return not self.mismatches

    def __bool__(self) -> bool:
        """Raises `TypeError`: a result that is always true would be taken for a proof."""
        raise TypeError("a Verification is neither true nor false: write .same")

    def __repr__(self) -> str:
        verdict = "same" if self.same else f"{len(self.mismatches):,} differ"
        told = [
            None if count is None else count_text(count, noun)
            for count, noun in ((self.tensors, "tensor"), (self.files, "file"))
        ]
        return short_repr("Verification", self.path, verdict, *told)


@spelling_checked
def verify_checkpoint(
    source: Named,
    manifest: Place,
    *,
    files: bool = False,
    only: str | None = None,
    tag: str | None = None,
    public_key: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Verification:
    """Hold the checkpoint `source` against a manifest, of ckptconv or of somebody else
    (`proof.reading` lists the kinds).

    The values of all tensors are compared by their names, in whatever container they are; with
    `files`, or where the manifest tells of files alone, the bytes of the files. `only` is the path
    of the part whose tensors the manifest tells; `tag` picks the step of a folder of several.
    `public_key` is a file with the key by which the library model-signing verifies the signature of
    a ``model.sig``; without it only the digests are compared. What differs is in the result. Raises
    `CheckpointError` where the checkpoint or the manifest cannot be read, `VerificationFailed` for
    a signature that is not good.
    """
    refuse_no_text(only=only)
    refuse_no_flag(files=files)
    refuse_no_path(manifest=manifest)
    place = place_of(manifest)
    wanted = read_manifest(place)
    _refuse_options(wanted, place, only, public_key, files=files)
    told = (str(places_of(source)[0]), str(place.path), wanted.kind)
    is_of_tensors = wanted.tensors is not None and not files
    if is_of_tensors:
        count, found, notes = _tensors(source, wanted, only, tag, on_progress)
        return Verification(*told, count, None, tuple(found), notes=notes)
    count, found, notes = _files(source, place, wanted, tag, on_progress)
    signature = _signature(source, wanted, place, public_key)
    return Verification(*told, None, count, tuple(found), signature, notes)


def _refuse_options(
    wanted: Manifest,
    place: Location,
    only: str | None,
    public_key: object,
    *,
    files: bool,
) -> None:
    """Refuse what would change nothing: somebody would rely on it."""
    is_signature = wanted.kind == "OMS signature"
    if public_key is not None and not is_signature:
        what = f"is a {wanted.kind}, which has no signature"
        raise UnsupportedCheckpoint(what, path=place.path, hint="leave --public-key out")
    if only is not None and (files or wanted.tensors is None):
        hint = "leave --only out"
        raise OptionRefused("--only picks tensors, and files are compared", hint=hint)


# ------------------------------------------------------------------------------------- tensors

_Outcome = tuple[int, list[Mismatch], tuple[str, ...]]
"""How many were compared, what differs, and notes."""


def _tensors(
    source: Named,
    wanted: Manifest,
    only: str | None,
    tag: str | None,
    on_progress: OnProgress | None,
) -> _Outcome:
    assert wanted.tensors is not None
    with open_certain(source, tag=tag) as checkpoint:
        components = components_of(checkpoint, only)
        asked = {each.name for each in wanted.tensors}
        both = [each for each in components if each.name in asked]
        others = {each.name for each in components} - asked
        there, unreadable = _digests(both, on_progress)
        found = [*unreadable, *_differing(wanted.tensors, there, {one.name for one in unreadable})]
        found += (Mismatch(name, "unexpected") for name in sorted(others))
        notes = tuple(prefix_notes(checkpoint, only, asked, {each.name for each in components}))
        return len(both), found, (*checkpoint.notes, *notes)


def _digests(
    components: Sequence[Component], on_progress: OnProgress | None
) -> tuple[list[TensorDigest], list[Mismatch]]:
    """The digests of tensors, and those that cannot be read. No checksum of their file is looked
    at: a digest says more, and it says it of one tensor.
    """
    try:
        meter = partial(_meter, on_progress)
        return tensor_digests(components, lambda _: None, meter, is_checked=False), []
    except CheckpointError:
        return _each_digest(components)


def _meter(on_progress: OnProgress | None, nbytes: int) -> Meter:
    return Meter("read", nbytes, on_progress)


def _each_digest(
    components: Iterable[Component],
) -> tuple[list[TensorDigest], list[Mismatch]]:
    """As `_digests`, of a checkpoint some of whose tensors cannot be read."""
    made, unreadable = [], []
    for each in components:
        folder = Sha256()
        try:
            fold(each.ref, folder)
            made.append(told_of(each, folder.value))
        except CheckpointError as error:
            unreadable.append(Mismatch(each.name, "unreadable", error.what))
    return made, unreadable


def _differing(
    wanted: Sequence[TensorDigest], there: Sequence[TensorDigest], passed: set[str]
) -> Iterator[Mismatch]:
    """What differs, in the order of the manifest; names may occur more than once in a tree."""
    by_name: dict[str, list[TensorDigest]] = defaultdict(list)
    for each in there:
        by_name[each.name].append(each)
    asked: dict[str, list[TensorDigest]] = defaultdict(list)
    for each in wanted:
        asked[each.name].append(each)
    for name, ours in asked.items():
        if name in passed:
            continue
        theirs = by_name.get(name, [])
        if len(theirs) != len(ours):
            yield Mismatch(name, "missing")
            continue
        in_order = sorted(ours, key=_sorting), sorted(theirs, key=_sorting)
        for one, other in zip(*in_order, strict=True):
            yield from _compared(one, other)


def _sorting(tensor: TensorDigest) -> str:
    return tensor.sha256


def _compared(wanted: TensorDigest, there: TensorDigest) -> Iterator[Mismatch]:
    name = wanted.name
    if there.dtype != wanted.dtype:
        yield Mismatch(name, "dtype", f"{there.dtype}, not {wanted.dtype}")
    elif there.shape != wanted.shape:
        yield Mismatch(name, "shape", f"{[*there.shape]}, not {[*wanted.shape]}")
    elif there.sha256 != wanted.sha256:
        yield Mismatch(name, "values")
    elif there.recipe != wanted.recipe:
        yield Mismatch(name, "recipe", f"{there.recipe}, not {wanted.recipe}")


# --------------------------------------------------------------------------------------- files


def _files(
    source: Named,
    place: Location,
    wanted: Manifest,
    tag: str | None,
    on_progress: OnProgress | None,
) -> _Outcome:
    listed = _listed(source, wanted, tag)
    pairs, notes = _pairs(listed, wanted, place)
    there = [(file, found) for file, found in pairs if found is not None]
    missing = [Mismatch(file.name, "missing", "", True) for file, found in pairs if found is None]
    found = [*_other_bytes(there, on_progress), *missing]
    if listed.is_folder:
        beside = _beside(listed, wanted, place)
        if wanted.is_whole:
            found += (Mismatch(name, "unexpected", "", True) for name in beside)
        elif beside:
            notes += (f"the manifest does not tell of {count_text(len(beside), 'file')}: "
                      f"{', '.join(beside[:5])}",)  # fmt: skip
    return len(there), found, notes


def _listed(source: Named, wanted: Manifest, tag: str | None) -> Listed:
    """The files of a checkpoint. It is opened only for its step: one that is damaged has files."""
    named = places_of(source)
    if tag is not None:
        with open_certain(source, tag=tag) as checkpoint:
            return files_of(named, checkpoint, tag)
    for one in named:
        require(one)
    if named[0].is_folder():
        return files_in(named[0])
    home, files = named[0].parent, {one.name: one for one in named}
    if wanted.kind == "manifest" and len(wanted.files) > 1:  # an index, and what it is of
        files |= {file.name: home.child(file.name) for file in wanted.files}
        files = {name: place for name, place in files.items() if place.is_file()}
    return Listed(home, files, is_folder=False)


_Pairs = list[tuple[FileDigest, "Location | None"]]


def _pairs(listed: Listed, wanted: Manifest, place: Location) -> tuple[_Pairs, tuple[str, ...]]:
    """Each file of the manifest with what is there; of one that was named, what is told of it."""
    if listed.is_folder:
        if any(not file.name for file in wanted.files):
            hint = "name the file that it stands for"
            what = f"is a {wanted.kind}, of one file"
            raise UnsupportedCheckpoint(what, path=place.path, hint=hint)
        return [(file, _found(listed, file.name)) for file in wanted.files], ()
    if wanted.kind == "manifest" and len(wanted.files) > 1:
        return [(file, listed.files.get(file.name)) for file in wanted.files], ()
    pairs: _Pairs = []
    notes = []
    for name, own in listed.files.items():
        met = [file for file in wanted.files if file.name.rpartition("/")[2] in (name, "")]
        if not met and len(wanted.files) == 1 == len(listed.files):
            met = [*wanted.files]
            notes.append(f"the manifest calls it {met[0].name}")
        if len(met) != 1:
            how = "does not tell of" if not met else "tells of several files called"
            what = f"{how} {name}"
            hint = "name the folder, or the file that it tells of"
            raise UnsupportedCheckpoint(what, path=place.path, hint=hint)
        pairs.append((met[0], own))
    return pairs, tuple(notes)


def _found(listed: Listed, name: str) -> Location | None:
    """The file of a name in a folder, also where it lies in a folder that is passed over."""
    own = listed.files.get(name)
    if own is not None:
        return own
    place = listed.home.child(name)
    return place if place.is_file() else None


def _other_bytes(
    pairs: Sequence[tuple[FileDigest, Location]], on_progress: OnProgress | None
) -> Iterator[Mismatch]:
    sizes = []
    for _, place in pairs:
        with closing(place.open()) as source:
            sizes.append(source.size)
    meter = Meter("read", sum(sizes), on_progress)
    for file, place in pairs:
        if file_digest(place, file.algorithm, meter) != file.digest:
            yield Mismatch(file.name or place.name, "bytes", is_file=True)
    meter.finish()


_OF_GIT = (".git", ".github", ".gitattributes", ".gitignore")


def _beside(listed: Listed, wanted: Manifest, manifest: Location) -> list[str]:
    """The files in a folder that a manifest does not tell of, itself apart."""
    known = {file.name for file in wanted.files}
    own = str(manifest.absolute.path)
    found = []
    for name, place in listed.files.items():
        if name in known or str(place.absolute.path) == own:
            continue
        if wanted.kind == "OMS signature" and _is_ignored(name, wanted.ignored):
            continue
        found.append(name)
    return found


def _is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """Whether model-signing passes over a file: what is git's, and what its signer left out."""
    return any(name == path or name.startswith(f"{path}/") for path in (*_OF_GIT, *ignored)) or any(
        fnmatch.fnmatchcase(name, path) for path in ignored
    )


# ----------------------------------------------------------------------------------- signatures


def _signature(
    source: Named, wanted: Manifest, place: Location, public_key: str | os.PathLike[str] | None
) -> Literal["", "good", "unverified"]:
    """What is known of the signature of a ``model.sig``; its library says if it is good."""
    if wanted.kind != "OMS signature":
        return ""
    if public_key is None:
        return "unverified"
    refuse_no_path(public_key=public_key)
    from ckptconv.proof.verify import verify_signature

    told = "is to be on this machine, where model-signing reads it"
    model, signature, key = (
        local_path(one, told) for one in (places_of(source)[0], place, place_of(public_key))
    )
    verify_signature(model, signature, key)
    return "good"


def verify_signature(model: Path, signature: Path, public_key: Path) -> None:
    """Have model-signing verify that the owner of a key signed a model as it is now. It hashes the
    files itself. Raises `VerificationFailed` where it says no, and `MissingDependency` without it.
    """
    try:
        from model_signing import verifying
    except ImportError as error:
        what = "verifying a signature needs model-signing, which is not installed"
        hint = "pip install 'ckptconv[signing]'; without --public-key the digests are compared"
        raise MissingDependency(what, hint=hint) from error
    config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    try:
        config.verify(model, signature)
    except Exception as error:  # it raises errors of many libraries, a ValueError mostly
        first = str(error).partition("\n")[0] or type(error).__name__
        what = f"model-signing does not verify it ({first[:300]})"
        hint = "do not trust the model; or this is not the key that signed it"
        raise VerificationFailed(what, path=signature, hint=hint) from error
