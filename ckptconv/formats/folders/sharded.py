"""Folders as Hugging Face libraries write them: an index beside its shards, or one file of weights
under a usual name.

Weights may be there in variants too, whose name stands before the last part of each file's:
``model.fp16.safetensors``, ``model.safetensors.index.fp16.json``,
``model.fp16-00001-of-00002.safetensors``.

``model.safetensors.index.json`` (or ``pytorch_model.bin.index.json``) is a JSON object:
``weight_map`` from key to file name, ``metadata`` with ``total_size`` in bytes and, as transformers
writes it, ``total_parameters``. Shards are whole checkpoints and lie in the folder of the index; in
the library's cache they are links into the ``blobs`` beside ``snapshots``. Source: transformers'
and huggingface_hub's sharded checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.formats.first_reads import first_reads
from ckptconv.io.files import FilePool
from ckptconv.io.location import Location, is_plain_path, read_small, within
from ckptconv.pickles.nodes import ORDERED_DICT, Call, Node
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    LimitExceeded,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    printable,
)
from ckptconv.support.json_text import read_object
from ckptconv.support.limits import in_force
from ckptconv.support.text import some_text
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.containers import UNKNOWN, Container

_OF_INDEXES = (("diffusion_pytorch_model", "diffusers"), ("adapter_model", "peft"))
"""The libraries that open an index whose name begins so; transformers opens the others."""

_INDEX = ".index.json"
_TRIES = 10
_ALONE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors",
    "adapter_model.bin",
          "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")  # fmt: skip
"""Names under which the libraries save weights that need no shards, the preferred first."""


_STEMS = "(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)"
_OF_A_SET = "-[0-9]{5}-of-[0-9]{5}"
_VARIANTS = (
    re.compile(rf"{_STEMS}\.(?:safetensors|bin)\.index\.(?P<variant>[^/]+)\.json").fullmatch,
    re.compile(rf"{_STEMS}\.(?P<variant>[^/]+?)(?<!{_OF_A_SET})\.safetensors").fullmatch,
    re.compile(rf"{_STEMS}\.(?P<variant>[^/]+?)(?<!{_OF_A_SET})\.bin").fullmatch,
)
"""The files of variants, best first. Source: `_add_variant` in transformers and diffusers."""


def is_hugging_face(path: Location) -> bool:
    """Whether `path` is an index, or a folder with one, or with weights under a usual name."""
    if path.is_folder():
        return _has_plain(path) or bool(variants(path))
    return path.name.endswith(_INDEX) or _VARIANTS[0](path.name) is not None


def _has_plain(folder: Location) -> bool:
    return bool(_indexes(folder)) or any(folder.child(name).is_file() for name in _ALONE)


def _indexes(folder: Location) -> list[Location]:
    return [item for item in folder.list() if item.name.endswith(_INDEX)]


def variants(folder: Location) -> dict[str, Location]:
    """The variants of the weights in a folder, each with its index or its one file."""
    found: dict[str, Location] = {}
    names = folder.names() if folder.is_folder() else []
    for matches in _VARIANTS:
        for name in names:
            if (match := matches(name)) and (file := folder.child(name)).is_file():
                found.setdefault(match["variant"], file)
    return found


FileOpener = Callable[[Location, "FilePool | None"], Checkpoint]
"""Opens one file, which rests in a pool while others are read, or stays open."""


def open_sharded(path: Location, open_file: FileOpener, variant: str | None) -> Checkpoint:
    """Open all shards that an index names; reads their directories, no payload.

    Of a folder, the weights are those of `variant`, else the plain ones, else those of the only
    variant. The tree is an OrderedDict in the index's order. Raises `MalformedCheckpoint` when a
    shard is missing or unsafe, or when index and shards do not agree on who holds a key.
    """
    if not path.is_folder():
        return _open_index(path, open_file)
    others = variants(path)
    if variant is None and not _has_plain(path):
        variant = _only_variant(path, others)
    found = within(others[variant] if variant is not None else _plain(path), path)
    checkpoint = (
        _open_index(found, open_file) if found.suffix == ".json" else open_file(found, None)
    )
    beside = [
        f"{found.name}{_INDEX} is here too; {found.name} is read, as transformers does"
    ] * _has_index(found)
    notes = (*beside, *_variant_notes(variant, others), *_ignored(path, found, checkpoint))
    return replace(checkpoint, notes=(*notes, *checkpoint.notes))


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_OF_TRAINING = re.compile(
    r"(?:optimizer|scheduler|training_args|rng_state|random_states|scaler|sampler)", re.IGNORECASE
)


def _ignored(folder: Location, read: Location, checkpoint: Checkpoint) -> Iterator[str]:
    """Tell which file of a folder is read where others look like checkpoints but are not used."""
    parts = {read.name, *(file.path.name for file in checkpoint.files)}
    others = [
        item.name
        for item in folder.list()
        if item.suffix.lower() in _WEIGHTS
        and item.name not in parts
        and not _is_companion(item.name)
    ]
    if others:
        told = "1 other file is" if len(others) == 1 else f"{len(others):,} other files are"
        yield f"{read.name} is read; {told} beside it and not read: {some_text(others)}"


def _is_companion(name: str) -> bool:
    """Whether a file has the name of what training keeps beside the weights, or of the weights in
    another form.
    """
    stem = re.sub(rf"{_OF_A_SET}$", "", name.rpartition(".")[0])
    return bool(_OF_TRAINING.match(name)) or re.fullmatch(rf"{_STEMS}(?:\..+)?", stem) is not None


def _has_index(found: Location) -> bool:
    return found.suffix != ".json" and found.beside(f"{found.name}{_INDEX}").is_file()


def _only_variant(folder: Location, found: Mapping[str, Location]) -> str:
    if len(found) > 1:
        what = f"holds {len(found)} variants of its weights, but not the plain weights"
        raise AmbiguousStateDict(
            what, path=folder, hint=f"choose one with --tag: {printable(', '.join(found), 500)}"
        )
    return next(iter(found))


def _variant_notes(variant: str | None, found: Mapping[str, Location]) -> list[str]:
    named = printable(", ".join(name for name in found if name != variant), 500)
    notes = [f"the variant {printable(variant)} is read"] if variant is not None else []
    return notes + [f"variants of the weights are here too; choose one with --tag: {named}"] * bool(
        named
    )


def _plain(folder: Location) -> Location:
    """The index in a folder, or its one file.

    Of both the file, as transformers' `from_pretrained` looks for it first.
    """
    index = _index_of(folder)
    alone = None if index is None else index.beside(index.name.removesuffix(_INDEX))
    if index is not None and not (alone is not None and alone.name in _ALONE and alone.is_file()):
        return index
    usual = [folder.child(name) for name in _ALONE]
    return alone or next(file for file in usual if file.is_file())


def _open_index(index: Location, open_file: FileOpener) -> Checkpoint:
    """An index replaced meanwhile is read anew: the open shards may be of either set."""
    for _ in range(_TRIES):
        before = index.fingerprint()
        try:
            checkpoint = _open_set(index, open_file)
        except CheckpointError:
            if index.fingerprint() == before:
                raise
            continue
        if index.fingerprint() == before:
            return checkpoint
        checkpoint.close()
    raise MalformedCheckpoint(
        "is being replaced again and again",
        path=index,
        hint="wait until the program that writes it has finished",
    )


_KEPT_OPEN = 400  # shards; a process may often open 1,024 files, and two checkpoints are compared
_TOGETHER = 128  # shards that are asked for at once, where they are over a network


def _open_set(index: Location, open_file: FileOpener) -> Checkpoint:
    weight_map, metadata = _read_index(index)
    shards: dict[str, Checkpoint] = {}
    try:
        names = [*dict.fromkeys(weight_map.values())]
        pool = FilePool() if len(names) > _KEPT_OPEN else None
        for first in range(0, len(names), _TOGETHER):
            together = names[first : first + _TOGETHER]
            index.foresee([index.beside(name) for name in together], first_reads)
            for name in together:
                shards[name] = open_file(_shard(index, name), pool)
        pairs = _pairs(index, weight_map, shards)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    return replace(_joined(index, pairs, list(shards.values())), index_metadata=metadata)


def _joined(
    index: Location, pairs: list[tuple[str, Node]], shards: Sequence[Checkpoint]
) -> Checkpoint:
    root = Call(ORDERED_DICT, ())
    root.pairs = pairs
    metadata = {name: value for shard in reversed(shards) for name, value in shard.metadata.items()}
    return Checkpoint(
        path=index.path,
        container=_of_shards(index.name, [shard.container for shard in shards]),
        root=root,
        nbytes=sum(shard.nbytes for shard in shards),
        metadata=metadata,
        notes=tuple(dict.fromkeys(note for shard in shards for note in shard.notes)),
        sources=tuple(source for shard in shards for source in shard.sources),
        files=tuple(shards),
    )


def _of_shards(index: str, shards: Sequence[Container]) -> Container:
    """The container of an index with that name; it opens where each of its shards does."""
    first = shards[0] if shards else UNKNOWN.called("")
    least = next((shard for shard in shards if not shard.anywhere), first)
    by = next((library for stem, library in _OF_INDEXES if index.startswith(stem)), "transformers")
    return Container(
        f"sharded {first.name}".rstrip(),
        by,
        why_not=least.why_not,
        suffix=first.suffix,
        is_index=True,
        shares=first.shares,
        names_storages=first.names_storages,
    )


def _index_of(folder: Location) -> Location | None:
    """The index in a folder; of a safetensors and a torch one for the same weights, the first."""
    found = _indexes(folder)
    if len(found) > 1 and (
        usual := [item for item in found if item.name == f"model.safetensors{_INDEX}"]
    ):
        found = usual
    if len(found) > 1:
        names = ", ".join(printable(item.name) for item in found)
        raise UnsupportedCheckpoint(
            f"holds {len(found)} indexes: {names}", path=folder, hint="name the index that you mean"
        )
    return found[0] if found else None


def _read_index(index: Location) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """The map from key to file name, and the other metadata than the total size."""
    found = read_object(read_small(index, "index_bytes"), index.path, "index")
    weight_map = found.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _malformed(index, "weight_map", "is missing or names no keys")
    texts = {name for name in weight_map.values() if type(name) is str}
    plain = {name for name in texts if is_plain_path(name)}
    for key, name in weight_map.items():
        if type(name) is not str or name not in plain:
            what = f"its shard {printable(str(name))} is not a plain file name"
            raise MalformedCheckpoint(
                what,
                path=index,
                where=key,
                hint="it means another file on Windows; rename it, here too",
            )
    if (count := len(set(weight_map.values()))) > (most := in_force().shards):
        raise LimitExceeded(
            f"names {count} shards", limit="shards", allowed=most, needed=count, path=index
        )
    metadata = found.get("metadata")
    others = metadata.items() if isinstance(metadata, dict) else ()
    return weight_map, {name: value for name, value in others if name != "total_size"}


def _malformed(index: Location, where: str, what: str) -> MalformedCheckpoint:
    return MalformedCheckpoint(what, path=index, where=where, hint="fetch the whole folder again")


def _shard(index: Location, name: str) -> Location:
    """The place of a shard, once it is there and no link leads out of the folder."""
    shard = index.beside(name)
    if name == index.name:
        raise _malformed(index, name, "names itself as a shard")
    try:
        kind = shard.kind()
    except OSError:  # in a folder that is closed to us
        kind = "nothing"
    if kind == "nothing":
        raise _malformed(index, name, "the shard is missing")
    if kind != "file":
        raise _malformed(index, name, "the shard is not a regular file")
    if not shard.stays_within(index.parent):
        raise _malformed(index, name, "the shard is a link that leads out of the folder")
    return shard


def _pairs(
    index: Location, weight_map: Mapping[str, str], shards: Mapping[str, Checkpoint]
) -> list[tuple[str, Node]]:
    """The tensors by key, in the index's order."""
    held: dict[str, tuple[str, Node]] = {}
    for name, shard in shards.items():
        for key, value in _state_dict(shard):
            if key in held:
                raise _malformed(
                    index, key, f"is in two shards, {printable(held[key][0])} and {printable(name)}"
                )
            held[key] = name, value
    for key, name in weight_map.items():
        if held.get(key, ("",))[0] != name:
            raise _malformed(index, key, f"is not in {printable(name)}, where the index puts it")
    others = [key for key in held if key not in weight_map]
    if extra := [key for key in others if shards[held[key][0]].metadata.get(key) not in held]:
        raise _malformed(
            index, extra[0], f"is in {printable(held[extra[0]][0])} but not in the index"
        )
    # the others are aliases of tied tensors
    return [(key, held[key][1]) for key in (*weight_map, *others)]


def _state_dict(shard: Checkpoint) -> list[tuple[str, Node]]:
    try:
        found = shard.state_dict()
    except CheckpointError as error:
        raise error.at(path=shard.path) from None
    return list(zip(found.keys, found.values, strict=True))
