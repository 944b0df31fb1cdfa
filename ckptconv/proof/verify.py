"""A checkpoint held against a manifest: which tensors and files are not what it says."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Literal

from ckptconv.formats.registry import open_certain
from ckptconv.io.location import Location, require
from ckptconv.io.places import Named, Place, local_path, place_of, places_of
from ckptconv.keys.rules import MODULE
from ckptconv.proof.making import (
    Listed,
    components_of,
    file_digest,
    files_in,
    files_of,
    tensor_digests,
    told_of,
)
from ckptconv.proof.manifest import FileDigest, Manifest, TensorDigest
from ckptconv.proof.reading import read_manifest
from ckptconv.proof.report import Mismatch, Verification
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
from ckptconv.support.text import count_text, quoted
from ckptconv.tensors.fold import fold
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.state_dicts import find
from ckptconv.values.named import Component


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
    if wanted.tensors is not None and not files:
        count, found, notes = _tensors(source, wanted.tensors, only, tag, on_progress)
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
    if public_key is not None and wanted.kind != "OMS signature":
        what = f"is a {wanted.kind}, which has no signature"
        raise UnsupportedCheckpoint(what, path=place.path, hint="leave --public-key out")
    if only is not None and (files or wanted.tensors is None):
        what = "--only picks tensors, and files are compared"
        raise OptionRefused(what, hint="leave --only out")


# ------------------------------------------------------------------------------------- tensors

# how many were compared, what differs, and notes
_Outcome = tuple[int, list[Mismatch], tuple[str, ...]]


def _tensors(
    source: Named,
    wanted: Sequence[TensorDigest],
    only: str | None,
    tag: str | None,
    on_progress: OnProgress | None,
) -> _Outcome:
    with open_certain(source, tag=tag) as checkpoint:
        components = components_of(checkpoint, only)
        names = {each.name for each in components}
        asked = {each.name for each in wanted}
        both = [each for each in components if each.name in asked]
        there, unreadable = _digests(both, on_progress)
        found = [*unreadable, *_differing(wanted, there, {one.name for one in unreadable})]
        found += (Mismatch(name, "unexpected") for name in sorted(names - asked))
        notes = _name_notes(checkpoint, only, asked, names)
        return len(both), found, (*checkpoint.notes, *notes)


def _digests(
    components: Sequence[Component], on_progress: OnProgress | None
) -> tuple[list[TensorDigest], list[Mismatch]]:
    """The digests of tensors, and those that cannot be read. No checksum of their file is looked
    at: a digest says more, and it says it of one tensor.
    """

    def meter(nbytes: int) -> Meter:
        return Meter("read", nbytes, on_progress)

    try:
        return tensor_digests(components, lambda _: None, meter, is_checked=False), []
    except CheckpointError:
        pass
    # one of them cannot be read: which, each by itself tells
    made, unreadable = [], []
    for each in components:
        digest = hashlib.sha256()
        try:
            fold(each.ref, digest)
            made.append(told_of(each, digest.hexdigest()))
        except CheckpointError as error:
            unreadable.append(Mismatch(each.name, "unreadable", error.what))
    return made, unreadable


def _differing(
    wanted: Sequence[TensorDigest], there: Sequence[TensorDigest], passed: set[str]
) -> Iterator[Mismatch]:
    """What differs, in the order of the manifest; names may occur more than once in a tree."""
    theirs = _by_name(there)
    for name, asked in _by_name(wanted).items():
        found = theirs.get(name, [])
        if name in passed:
            continue
        if len(found) != len(asked):
            yield Mismatch(name, "missing")
            continue
        for one, other in zip(asked, found, strict=True):
            yield from _compared(one, other)


def _by_name(tensors: Iterable[TensorDigest]) -> dict[str, list[TensorDigest]]:
    """The tensors of each name; those of one name by their digests, for a tree and a manifest may
    have them in another order.
    """
    found: dict[str, list[TensorDigest]] = {}
    for each in tensors:
        found.setdefault(each.name, []).append(each)
    return {name: sorted(alike, key=attrgetter("sha256")) for name, alike in found.items()}


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


# ----------------------------------------------------------------------------- names that differ


def _name_notes(
    checkpoint: Checkpoint, only: str | None, asked: set[str], there: set[str]
) -> Iterator[str]:
    """What helps where names differ by what is before them: a part, or a prefix of keys."""
    if not asked or not there or not asked.isdisjoint(there):
        return
    ours, theirs = _before(asked, there), _before(there, asked)
    if ours is not None:
        part, keys = _parted(checkpoint, only, ours)
        if not keys:
            yield f"the names of the manifest are those in {part}: add --only {quoted(part)}"
            return
        chosen = f" --only {quoted(part)}" if part else ""
        told = f"the keys here have {keys}. before the names of the manifest"
        yield f"{told}: verify{chosen} what {_renaming('strip', keys)} writes"
    elif theirs is not None:
        told = f"the names of the manifest have {theirs}. before those here"
        yield f"{told}: verify what {_renaming('add', theirs)} writes"


def _renaming(what: str, prefix: str) -> str:
    """The command that strips a prefix from all keys, or adds it."""
    if prefix == MODULE:
        return f"ckptconv {what}-module IN OUT"
    return f"ckptconv convert IN OUT --keys keep --{what}-prefix {quoted(f'{prefix}.')}"


def _parted(checkpoint: Checkpoint, only: str | None, prefix: str) -> tuple[str, str]:
    """What stands before names, as the path of the part that they are in, and what is left of it:
    that is in the keys there, where --only finds nothing.
    """
    segments = prefix.split(".")
    above = [] if only is None else [only]
    for count in range(len(segments), 0, -1):
        part = ".".join([*above, *segments[:count]])
        try:
            find(checkpoint.root, part, checkpoint.path)
        except CheckpointError:
            continue
        return part, ".".join(segments[count:])
    return only or "", prefix


def _before(names: set[str], longer: set[str]) -> str | None:
    """What stands before all names, with a dot behind it, in the longer ones."""
    # one name tells the few prefixes there may be; with all names this took their square
    rarest = max(names, key=len)
    found = (name.removesuffix(f".{rarest}") for name in longer if name.endswith(f".{rarest}"))
    for prefix in sorted(found)[:8]:
        if all(f"{prefix}.{name}" in longer for name in names):
            return prefix
    return None


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
            counted = count_text(len(beside), "file")
            notes += (f"the manifest does not tell of {counted}: {', '.join(beside[:5])}",)
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
            what = f"is a {wanted.kind}, of one file"
            hint = "name the file that it stands for"
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
            what = f"tells of several files called {name}"
            if not met:
                what = f"does not tell of {name}"
            hint = "name the folder, or the file that it tells of"
            raise UnsupportedCheckpoint(what, path=place.path, hint=hint)
        pairs.append((met[0], own))
    return pairs, tuple(notes)


def _found(listed: Listed, name: str) -> Location | None:
    """The file of a name in a folder, also where it lies in a folder that is passed over."""
    if name in listed.files:
        return listed.files[name]
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


# what model-signing leaves out unless it is told otherwise (`ignore_git_paths`)
_OF_GIT = (".git", ".github", ".gitattributes", ".gitignore")


def _beside(listed: Listed, wanted: Manifest, manifest: Location) -> list[str]:
    """The files in a folder that a manifest does not tell of, itself apart."""
    known = {file.name for file in wanted.files}
    own = str(manifest.absolute.path)
    return [
        name
        for name, place in listed.files.items()
        if name not in known
        and str(place.absolute.path) != own
        and not (wanted.kind == "OMS signature" and _is_ignored(name, wanted.ignored))
    ]


def _is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """Whether model-signing passes over a file: what is git's, and what its signer left out."""
    within = (name == path or name.startswith(f"{path}/") for path in (*_OF_GIT, *ignored))
    return any(within) or any(fnmatch.fnmatchcase(name, path) for path in ignored)


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
    told = "is to be on this machine, where model-signing reads it"
    model, signature, key = (
        local_path(one, told) for one in (places_of(source)[0], place, place_of(public_key))
    )
    _refuse_bad(model, signature, key)
    return "good"


def _refuse_bad(model: Path, signature: Path, public_key: Path) -> None:
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
