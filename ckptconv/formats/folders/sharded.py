"""Folders as Hugging Face libraries write them: an index beside its shards, or one file of weights
under a usual name; and the whole of all parts, where no index names them.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from ckptconv.formats.containers import all_open, first_reads, open_file
from ckptconv.formats.containers import named as defined
from ckptconv.formats.folders.alone import (
    DELTA_ENCODING,
    META,
    SPLIT,
    Numbered,
    are_parts,
    delta_part,
    has_shards,
    numbered,
)
from ckptconv.formats.folders.ranks import join_ranks, refuse_other_name
from ckptconv.formats.folders.steps import weight_files
from ckptconv.formats.hf_names import IS_INDEX
from ckptconv.io.files import FilePool, kept_open
from ckptconv.io.location import Location, is_plain_path, read_small, within
from ckptconv.pickles.nodes import Node, calls_of, mapping_pairs, ordered_dict
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    MalformedCheckpoint,
    UnsupportedCheckpoint,
    errors_at,
    printable,
)
from ckptconv.support.json_text import read_object
from ckptconv.support.limits import refuse_beyond
from ckptconv.support.text import count_text, some_text
from ckptconv.tree.checkpoint import UNKNOWN, Checkpoint, Container, whole_of

# The libraries that open an index whose name begins so; transformers opens the others
_OF_INDEXES = (("diffusion_pytorch_model", "diffusers"), ("adapter_model", "peft"))

_INDEX = ".index.json"
_TRIES = 10
# The names under which the libraries look for weights, in their order: transformers'
# `_get_resolved_checkpoint_files`; diffusers looks for its index first.
_ORDER = (
    "model.safetensors", f"model.safetensors{_INDEX}",
    "pytorch_model.bin", f"pytorch_model.bin{_INDEX}",
    "adapter_model.safetensors", "adapter_model.bin",
    f"diffusion_pytorch_model.safetensors{_INDEX}", "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin", f"diffusion_pytorch_model.bin{_INDEX}",
)  # fmt: skip


_STEMS = "(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)"
_OF_A_SET = "-[0-9]{5}-of-[0-9]{5}"
# The files of variants. Source: `_add_variant` in transformers and diffusers.
_VARIANTS = (
    re.compile(rf"{_STEMS}\.(?:safetensors|bin)\.index\.(?P<variant>[^/]+)\.json").fullmatch,
    re.compile(rf"{_STEMS}\.(?P<variant>[^/]+?)(?<!{_OF_A_SET})\.(?:safetensors|bin)").fullmatch,
)


def is_hugging_face(path: Location) -> bool:
    """Whether `path` is an index, or a folder with one, or with weights under a usual name."""
    if path.is_folder():
        return _has_plain(path) or bool(variants(path))
    return path.name.endswith(_INDEX) or _VARIANTS[0](path.name) is not None


def _has_plain(folder: Location) -> bool:
    return _usual(folder) is not None or bool(_indexes(folder))


def _usual(folder: Location, variant: str = "") -> Location | None:
    """The weights that the libraries look for first, plain or of a variant: an index or a file."""
    there = {*folder.names()}
    for usual in _ORDER:
        end, _, last = usual.rpartition(".")
        name = ".".join(filter(None, (end, variant, last)))
        if name in there and folder.child(name).is_file():
            return folder.child(name)
    return None


def _indexes(folder: Location) -> list[Location]:
    return [item for item in folder.list() if item.name.endswith(_INDEX)]


def variants(folder: Location) -> dict[str, Location]:
    """The variants of the weights in a folder, each with its index or its one file."""
    names = folder.names() if folder.is_folder() else []
    matches = (match for matches in _VARIANTS for name in names if (match := matches(name)))
    found = dict.fromkeys(match["variant"] for match in matches)
    files = ((name, _usual(folder, name)) for name in found)
    return {name: file for name, file in files if file is not None}


def open_sharded(path: Location, _: Location, variant: str | None) -> Checkpoint:
    """Open all shards that an index names; reads their directories, no payload.

    Of a folder, the weights are those of `variant`, else the plain ones, else those of the only
    variant. The tree is an OrderedDict in the index's order. Raises `MalformedCheckpoint` when a
    shard is missing or unsafe, or when index and shards do not agree on who holds a key.
    """
    if not path.is_folder():
        return _open_index(path)
    others = variants(path)
    if variant is None and not _has_plain(path):
        variant = _only_variant(path, others)
    found = within(others[variant] if variant is not None else _plain(path), path)
    checkpoint = _open_index(found) if found.suffix == ".json" else open_file(found)
    notes = (*_twin_notes(found), *_variant_notes(variant, others))
    notes = (*notes, *_ignored(path, found, checkpoint), *checkpoint.notes)
    return replace(checkpoint, notes=notes)


def _twin_notes(read: Location) -> Iterator[str]:
    twin = read.beside(f"{read.name}{_INDEX}")
    if read.name.endswith(_INDEX):
        twin = read.beside(read.name.removesuffix(_INDEX))
    if twin.is_file():
        usual = f", as {_library(read.name)} does" if read.name in _ORDER else ""
        yield f"{twin.name} is here too; {read.name} is read{usual}"


def _ignored(folder: Location, read: Location, checkpoint: Checkpoint) -> Iterator[str]:
    """Tell which file of a folder is read where others look like checkpoints but are not used: not
    what training keeps beside the weights, nor the weights in another form.
    """
    parts = {read.name, *(file.path.name for file in checkpoint.files)}
    others = [name for name in weight_files(folder) if not _ANOTHER_FORM(name)]
    others = [name for name in others if name not in parts]
    if others:
        told = "1 other file is" if len(others) == 1 else f"{len(others):,} other files are"
        yield f"{read.name} is read; {told} beside it and not read: {some_text(others)}"


_ANOTHER_FORM = re.compile(rf"{_STEMS}(?:\..+)?(?:{_OF_A_SET})?\.[^.]*").fullmatch


def _library(name: str) -> str:
    return next((library for stem, library in _OF_INDEXES if name.startswith(stem)), "transformers")


def _only_variant(folder: Location, found: Mapping[str, Location]) -> str:
    if len(found) > 1:
        what = f"holds {len(found)} variants of its weights, but not the plain weights"
        hint = f"choose one with --tag: {printable(', '.join(found), 500)}"
        raise AmbiguousStateDict(what, path=folder, hint=hint)
    return next(iter(found))


def _variant_notes(variant: str | None, found: Mapping[str, Location]) -> Iterator[str]:
    if variant is not None:
        yield f"the variant {printable(variant)} is read"
    named = printable(", ".join(name for name in found if name != variant), 500)
    if named:
        yield f"variants of the weights are here too; choose one with --tag: {named}"


def _plain(folder: Location) -> Location:
    """The plain weights in a folder: those that the libraries look for, else the only index."""
    if found := _usual(folder):
        return found
    indexes = _indexes(folder)
    if len(indexes) > 1:
        what = f"holds {len(indexes)} indexes: {', '.join(printable(one.name) for one in indexes)}"
        raise UnsupportedCheckpoint(what, path=folder, hint="name the index that you mean")
    return indexes[0]


def _open_index(index: Location) -> Checkpoint:
    """An index replaced meanwhile is read anew: the open shards may be of either set."""
    for _ in range(_TRIES):
        before = index.fingerprint()
        try:
            checkpoint = _open_set(index)
        except CheckpointError:
            if index.fingerprint() == before:
                raise
            continue
        if index.fingerprint() == before:
            return checkpoint
        checkpoint.close()
    hint = "wait until the program that writes it has finished"
    raise MalformedCheckpoint("is being replaced again and again", path=index, hint=hint)


_KEPT_OPEN = 400  # shards; a process may often open 1,024 files, and two checkpoints are compared
_TOGETHER = 128  # shards that are asked for at once, where they are over a network


def _open_set(index: Location) -> Checkpoint:
    weight_map, metadata = _read_index(index)
    same: dict[str, str] = {}
    order = [same.setdefault(name, name) for name in weight_map.values()]
    wanted: dict[str, list[str]] = {name: [] for name in same}
    for key, name in zip(weight_map, order, strict=True):
        wanted[name].append(key)
    # the keys of a shard go once it is open, and make room for the tensors of the next ones: all of
    # a million would stay 170 MB of holes in memory
    del weight_map
    names = [*wanted]
    shards: dict[str, Checkpoint] = {}
    placed: dict[str, list[tuple[str, Node]] | None] = {}
    with ExitStack() as opened:
        # of a pool, some are closed and opened again: not where all may stay open
        pool = FilePool() if len(names) > kept_open(_KEPT_OPEN) else None
        for first in range(0, len(names), _TOGETHER):
            together = names[first : first + _TOGETHER]
            index.foresee([index.beside(name) for name in together], first_reads)
            for name in together:
                shard = shards[name] = opened.enter_context(open_file(_shard(index, name), pool))
                placed[name] = _told_pairs(shard, wanted.pop(name))
        if None in placed.values():
            pairs = _pairs(index, _read_index(index)[0], shards)
        else:
            told = {name: iter(found or ()) for name, found in placed.items()}
            pairs = [next(told[name]) for name in order]
        opened.pop_all()
    whole = joined(index.path, pairs, list(shards.values()))
    notes = (*whole.notes, *_unnamed(names))
    return _as_delta(replace(whole, index_metadata=metadata, notes=notes), index)


def _unnamed(names: Sequence[str]) -> Iterator[str]:
    """Tell of shards that an index does not name, where the names of the others count them."""
    sets: dict[Numbered, list[Numbered]] = {}
    for one in filter(None, map(numbered, names)):
        if one.of:
            sets.setdefault(one._replace(number=""), []).append(one)
    for shards in sets.values():
        first = min(shards, key=lambda one: int(one.number))
        others = sorted({*map(first.other, first.numbers)} - {*names})
        if others:
            count = count_text(len(others), "shard")
            yield f"the index does not name {count} of its set, not read: {some_text(others)}"


def _as_delta(whole: Checkpoint, index: Location) -> Checkpoint:
    """What the shards of an index are that says how they hold changes (`formats.deltas`)."""
    told = whole.index_metadata
    if DELTA_ENCODING not in told:
        return whole
    encoding, packed = (printable(told.get(name), 20) for name in _DELTA_KINDS)
    facts = {name: printable(value, 80) for name, value in told.items() if type(value) is str}
    container = whole.container.called(f"delta ({encoding}, {packed})")
    whole = replace(whole, container=container, metadata=facts)
    return whole.as_part(delta_part(index.parent.path, told))


_DELTA_KINDS = (DELTA_ENCODING, "compression_format")


def joined(
    index: PurePath, pairs: list[tuple[str, Node]], shards: Sequence[Checkpoint]
) -> Checkpoint:
    """The checkpoint of shards that hold `pairs`; `index` is what is named for all of them."""
    container = _of_shards(index.name, [shard.container for shard in shards])
    metadata = {name: value for shard in reversed(shards) for name, value in shard.metadata.items()}
    whole = whole_of(shards, container, ordered_dict(pairs), index)
    return replace(whole, metadata=metadata, files=tuple(shards))


def _of_shards(index: str, shards: Sequence[Container]) -> Container:
    """The container of an index with that name; it opens where each of its shards does."""
    first = next(iter(shards), UNKNOWN.called(""))
    least = next((shard for shard in shards if not shard.anywhere), first)
    return Container(
        f"sharded {first.name}".rstrip(),
        _library(index),
        why_not=least.why_not,
        suffix=first.suffix,
        is_index=True,
        shares=first.shares,
        names_storages=first.names_storages,
    )


def shards_named(place: Location) -> list[Location]:
    """The shards of what is named as an index is; none where it cannot be read."""
    if not IS_INDEX(place.name):
        return []
    try:
        return [place.beside(name) for name in dict.fromkeys(_read_index(place)[0].values())]
    except (CheckpointError, OSError):
        return []


def _read_index(index: Location) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """The map from key to file name, and the other metadata than the total size."""
    found = read_object(read_small(index, "index_bytes"), index.path, "index")
    weight_map, metadata = found.get("weight_map"), found.get("metadata")
    others = metadata if isinstance(metadata, dict) else {}
    # a delta of no changes names none
    if not isinstance(weight_map, dict) or not (weight_map or DELTA_ENCODING in others):
        raise _malformed(index, "weight_map", "is missing or names no keys")
    texts = {name for name in weight_map.values() if type(name) is str}
    plain = {name for name in texts if is_plain_path(name)}
    # of a million keys, each is looked at only where one of the few names is wrong
    if plain != texts or {*map(type, weight_map.values())} - {str}:
        named = weight_map.items()
        key = next(key for key, name in named if type(name) is not str or name not in plain)
        what = f"its shard {printable(str(weight_map[key]))} is not a plain file name"
        hint = "it means another file on Windows; rename it, here too"
        raise MalformedCheckpoint(what, path=index, where=key, hint=hint)
    count = len(set(weight_map.values()))
    refuse_beyond("shards", count, f"names {count} shards", path=index)
    return weight_map, {name: value for name, value in others.items() if name != "total_size"}


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
    held: dict[str, tuple[str, tuple[str, Node]]] = {}
    for name, shard in shards.items():
        for pair in state_dict_pairs(shard):
            key = pair[0]
            if key in held:
                both = f"{printable(held[key][0])} and {printable(name)}"
                raise _malformed(index, key, f"is in two shards, {both}")
            held[key] = name, pair
    for key, name in weight_map.items():
        if held.get(key, ("",))[0] != name:
            raise _malformed(index, key, f"is not in {printable(name)}, where the index puts it")
    others = [key for key in held if key not in weight_map]
    for key in others:
        own = held[key][0]
        if shards[own].metadata.get(key) not in held:
            raise _malformed(index, key, f"is in {printable(own)} but not in the index")
    # the others are aliases of tied tensors
    return [held[key][1] for key in (*weight_map, *others)]


def _told_pairs(shard: Checkpoint, wanted: Sequence[str]) -> list[tuple[str, Node]] | None:
    """The tensors of a shard in the order of the keys that the index says are in it, without a look
    at each: there may be a million. None where it has others.
    """
    pairs = state_dict_pairs(shard)
    held = {pair[0]: pair for pair in pairs}
    if len(held) < len(pairs) or held.keys() != {*wanted}:
        return None
    return [held[key] for key in wanted]


def state_dict_pairs(shard: Checkpoint) -> Sequence[tuple[str, Node]]:
    """The tensors of a shard by key."""
    with errors_at(path=shard.path):
        found = shard.state_dict()
    pairs = mapping_pairs(found.node)
    if pairs is not None and tuple([key for key, _ in pairs]) == found.keys:
        return pairs  # not copied: there may be a million
    return list(zip(found.keys, found.values, strict=True))


# ------------------------------------------------------------------------- parts without an index


def is_parts(folder: Location) -> bool:
    """Whether the weights in a folder are the parts of one checkpoint and nothing else."""
    return are_parts(weight_files(folder))


def open_parts(folder: Location, *_: object) -> Checkpoint:
    """Open all parts in a folder; reads their directories, no payload."""
    files = [within(folder.child(name), folder) for name in weight_files(folder)]
    with all_open(folder, files, FilePool()) as opened:
        whole = join_files(opened)
    return replace(whole, path=folder.path)


def join_parts(parts: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint of all parts. Raises `UnsupportedCheckpoint` where one is missing, or where
    two hold the same key: each holds a slice of the tensor then.
    """
    told = {int(one.number): one for part in parts if (one := numbered(part.path.name))}
    last = told[max(told)]
    one = told[min(told)] if last.of else last
    missing = next((number for number in one.numbers if number not in told), None)
    if missing is not None:
        what = f"lacks {printable(last.other(missing))}, another part of the checkpoint"
        raise UnsupportedCheckpoint(what, hint="fetch all parts")
    if last.stem == META and len(parts) > 1:
        return _joined_slices(parts)
    found: dict[str, tuple[str, Node]] = {}
    for part in parts:
        if part.part and not mapping_pairs(part.root):
            continue  # GGUF has a first file for the metadata alone (--no-tensor-first-split)
        for key, value in state_dict_pairs(part):
            if key in found:
                names = f"{printable(found[key][0])} and {printable(part.path.name)}"
                what = f"is in {names}: they are parallel parts of one model, which are not joined"
                raise UnsupportedCheckpoint(what, where=key, hint=SPLIT)
            found[key] = part.path.name, value
    whole = joined(parts[0].path, [(key, value) for key, (_, value) in found.items()], parts)
    if any(part.part for part in parts):  # as GGUF files say
        by_number = {int(one.number): part for part in parts if (one := numbered(part.path.name))}
        whole = defined("gguf.whole_of_set")(whole, by_number)
    name = f"{parts[0].container.name}, {len(parts)} parts"
    container = replace(whole.container, name=name, by="", why_not=_ALONE, is_index=False)
    notes = whole.notes if last.of else (*whole.notes, _UNTOLD)
    return replace(whole, container=container, notes=notes)


def _joined_slices(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Meta's parts of a Llama, each a slice of the tensors."""
    from ckptconv.formats.folders.meta_slices import joined_slices  # seldom needed

    ordered = sorted(parts, key=lambda part: part.path.name)
    names = {part.path.name for part in parts}
    for part in parts:
        refuse_other_name(part, names.__contains__)
    named = [(part.path, dict(state_dict_pairs(part))) for part in ordered]
    whole = joined(ordered[0].path, list(joined_slices(named).items()), ordered)
    name = f"{ordered[0].container.name}, {len(ordered)} slices"
    # a tensor is made of several of the files' own, so `--verify` cannot count them a second way
    container = replace(
        whole.container, name=name, by="", why_not=_SLICED, is_index=False, names_storages=False
    )
    return replace(whole, container=container)


_SLICED = "each file holds a slice of each tensor"
_ALONE = "there is no index, so each file opens by itself only"
_UNTOLD = "the names do not say how many parts there were; these are taken to be all of them"


def join_files(opened: Sequence[Checkpoint]) -> Checkpoint:
    """The one checkpoint of several files: of whole tensors, or of the shards of ranks."""
    are_whole = not any(has_shards(calls_of(one.root)) for one in opened)
    names = [one.path.name for one in opened]
    return join_parts(opened) if are_whole and are_parts(names) else join_ranks(opened)
