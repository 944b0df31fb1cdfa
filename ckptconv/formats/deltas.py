"""Deltas: folders that hold the changes of tensors from one version of a model to the next.

Such a folder, ``weight_v000001``, looks like one of Hugging Face. ``model.safetensors.index.json``
says in ``metadata``, as texts: ``version`` and ``base_version`` (six digits), ``delta_encoding``
(``xor``, ``overwrite``), ``compression_format`` (``zstd``), ``checksum_format`` (``xxh3-128``,
``blake3``, ``adler32``); and in ``weight_map`` which file has the change of which tensor. In
``model-00000-of-00001.safetensors``, whose numbers begin at 0, each change is a U8 tensor with one
frame in it (`tensors.patched`), and ``__metadata__`` has the checksum of the tensor's new bytes
under its name. Tensors that did not change are not there. An index without ``delta_encoding`` is
that of a whole version, from which later ones go on. Where an engine keeps the version that it has
applied last, ``.weight_sync/state.json`` says which that is.

Source: slime (slime/utils/disk_delta.py, update_weight_from_disk_delta.py) and miles, which write
deltas; sglang's srt/weight_sync/local_checkpoint.py, which applies them. ckptconv adds
``base_checksums`` to the metadata, the checksum of each tensor of the base by its name, so that
another base is refused, and ``base_tied``, from each other name that a tensor has in the base to
that name, for bases that hold it once for each; programs that do not know them do not look at them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import PurePath
from typing import Any, TypeVar

from ckptconv.formats.folders.alone import DELTA_ENCODING
from ckptconv.formats.folders.sharded import state_dict_pairs
from ckptconv.formats.registry import open_certain
from ckptconv.io.location import Location, read_small
from ckptconv.support.errors import MalformedCheckpoint, UnsupportedCheckpoint, errors_at
from ckptconv.support.errors import printable as shown
from ckptconv.support.json_text import read_object
from ckptconv.support.records import dataclass
from ckptconv.tensors.dtypes import UINT8
from ckptconv.tensors.patched import ALGORITHMS, DIGITS, ENCODINGS, Algorithm, Encoding
from ckptconv.tensors.refs import TensorRef
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import tensor_of

INDEX = "model.safetensors.index.json"
SHARD = "model-00000-of-00001.safetensors"
BASE_CHECKSUMS = "base_checksums"
BASE_TIED = "base_tied"
ZSTD = "zstd"

T = TypeVar("T", bound=str)


@dataclass(frozen=True, slots=True)
class Delta:
    """An open delta: the frame and the checksum of the new bytes of each tensor that it changes, by
    its name; the checksums of the tensors of its base, where it has some. A tensor stands there
    under each of its names, of which `tied` are those that a base may lack.
    """

    path: PurePath
    version: int
    base_version: int
    encoding: Encoding
    algorithm: Algorithm
    frames: Mapping[str, TensorRef]
    after: Mapping[str, str]
    before: Mapping[str, str]
    tied: frozenset[str]
    checkpoint: Checkpoint


def open_deltas(
    places: Sequence[Location], base_version: int | None, opened: ExitStack
) -> list[Delta]:
    """The deltas at some places, in their order, each on top of the one before; what is opened is
    closed with `opened`. A folder of versions stands for those of them that come after
    `base_version`.

    Raises `CheckpointError` for what is not a delta, and where one does not follow the one before.
    """
    found: list[Delta] = []
    at = base_version
    for place in places:
        for one in _versions_in(place, at):
            with errors_at(path=one):
                checkpoint = opened.enter_context(open_certain(one, is_delta=True))
                delta = _delta(checkpoint, one.path)
                _refuse_unlisted(delta, one)
            if at is not None and delta.base_version != at:
                which = shown(found[-1].path) if found else "BASE"
                what = f"changes version {delta.base_version}, but {which} is version {at}"
                hint = "name the deltas in their order, and the BASE that the first was made from"
                raise UnsupportedCheckpoint(what, path=one, hint=hint)
            found.append(delta)
            at = delta.version
    return found


def version_of(place: Location) -> int | None:
    """The version that a folder of weights is: an engine's, by what it says; one that a trainer
    published, by its name. None where nothing tells.
    """
    if place.is_far():
        # no request for it: engines keep that state on their own disk
        return version_named(place.name)
    if not place.is_folder():
        return None
    state = place.child(".weight_sync").child("state.json")
    if not state.is_file():
        # absolute, for the folder may have been named as `.`
        return version_named(place.absolute.name)
    told = read_object(read_small(state, "index_bytes"), state.path, "state").get("version")
    return _number(told, "version", state.path)


_NAME = re.compile(r"weight_v([0-9]{6,18})").fullmatch


def version_named(name: str) -> int | None:
    """The version that the name of a folder says."""
    found = _NAME(name)
    return found and int(found[1])


def _versions_in(place: Location, after: int | None) -> Iterator[Location]:
    """The deltas in a folder of versions, in their order; a place that is none itself."""
    names = place.names() if place.is_folder() else ()
    versions = sorted(
        (version, name) for name in names if (version := version_named(name)) is not None
    )
    if not versions or INDEX in names:
        yield place
        return
    wanted = [name for version, name in versions if after is None or version > after]
    if not wanted:
        what = f"holds no version after {after}, which BASE is"
        raise UnsupportedCheckpoint(what, path=place.path, hint="name another BASE")
    for name in wanted:
        if not place.child(name).child(INDEX).is_file():
            what = f"{shown(name)} is a whole version, not a delta"
            hint = "name it as BASE, and the deltas after it"
            raise UnsupportedCheckpoint(what, path=place.path, hint=hint)
        yield place.child(name)


def _delta(checkpoint: Checkpoint, path: PurePath) -> Delta:
    told = checkpoint.index_metadata
    if DELTA_ENCODING not in told:
        what = "is one file of a delta, without the index that says how to apply it"
        raise UnsupportedCheckpoint(what, path=path, hint="name its folder")
    encoding = _one_of(told, DELTA_ENCODING, ENCODINGS, path)
    _one_of(told, "compression_format", (ZSTD,), path)
    algorithm = _one_of(told, "checksum_format", ALGORITHMS, path)
    frames, after = _changes(checkpoint, algorithm, path)
    before = _base_checksums(told, algorithm, path)
    tied = _tied(told, before, path)
    for name, kept in tied.items():
        before[name] = before[kept]
        if kept in frames:
            frames[name], after[name] = frames[kept], after[kept]
    return Delta(
        path=path,
        version=_number(told.get("version"), "version", path),
        base_version=_number(told.get("base_version"), "base_version", path),
        encoding=encoding,
        algorithm=algorithm,
        frames=frames,
        after=after,
        before=before,
        tied=frozenset(tied),
        checkpoint=checkpoint,
    )


def _refuse_unlisted(delta: Delta, place: Location) -> None:
    """Refuse an index of no changes beside changes: the base would be taken for the new version."""
    if not delta.frames and place.is_folder() and place.child(SHARD).is_file():
        what = f"tells of no changes, but {SHARD} lies beside it"
        raise MalformedCheckpoint(what, path=place.path, hint="fetch the delta again")


def _changes(
    checkpoint: Checkpoint, algorithm: Algorithm, path: PurePath
) -> tuple[dict[str, TensorRef], dict[str, str]]:
    frames: dict[str, TensorRef] = {}
    after: dict[str, str] = {}
    for shard in checkpoint.files:
        for key, node in state_dict_pairs(shard):
            ref = tensor_of(node)
            if ref is None or ref.dtype is not UINT8 or len(ref.shape) != 1 or not ref.is_view:
                raise MalformedCheckpoint("is not a run of bytes (U8)", path=path, where=key)
            frames[key] = ref
            after[key] = _checksum(shard.metadata.get(key), algorithm, path, key)
    return frames, after


def _base_checksums(
    told: Mapping[str, Any], algorithm: Algorithm, path: PurePath
) -> dict[str, str]:
    found = _object(told, BASE_CHECKSUMS, path)
    return {key: _checksum(value, algorithm, path, key) for key, value in found.items()}


def _tied(told: Mapping[str, Any], before: Mapping[str, str], path: PurePath) -> dict[str, str]:
    found = _object(told, BASE_TIED, path)
    for name, kept in found.items():
        if name in before or type(kept) is not str or kept not in before:
            what = f"is not another name of a tensor of {BASE_CHECKSUMS}"
            raise MalformedCheckpoint(what, path=path, where=name, hint="fetch the delta again")
    return found


def _object(told: Mapping[str, Any], name: str, path: PurePath) -> dict[str, Any]:
    found = told.get(name, {})
    if not isinstance(found, dict):
        raise MalformedCheckpoint("is not an object", path=path, where=name)
    return found


def _checksum(value: object, algorithm: Algorithm, path: PurePath, key: str) -> str:
    if type(value) is str and re.fullmatch(f"[0-9a-f]{{{DIGITS[algorithm]}}}", value):
        return value
    what = "has no checksum"
    if value is not None:
        what = f"its checksum {shown(value, 80)} is not {DIGITS[algorithm]} digits of {algorithm}"
    raise MalformedCheckpoint(what, path=path, where=key, hint="fetch the delta again")


def _one_of(told: Mapping[str, Any], name: str, known: Sequence[T], path: PurePath) -> T:
    """A word of the index that has to be known."""
    value = told.get(name)
    for word in known:
        if value == word:
            return word
    what = "is missing" if value is None else f"{shown(value, 40)} is not known"
    hint = f"deltas are read with {name} {' or '.join(known)}"
    raise UnsupportedCheckpoint(what, path=path, where=name, hint=hint)


def _number(value: object, name: str, path: PurePath) -> int:
    """A version, which is a number, or a text of digits."""
    if type(value) is int and value >= 0:
        return value
    if type(value) is str and re.fullmatch("[0-9]{1,18}", value):
        return int(value)
    what = "is missing" if value is None else f"{shown(value, 40)} is not a number"
    raise MalformedCheckpoint(what, path=path, where=name, hint="fetch the folder again")
