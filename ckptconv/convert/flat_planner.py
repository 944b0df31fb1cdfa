"""Plans outputs with the tensors of one state dict only: safetensors, shards of either format."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePath
from typing import Any

from ckptconv.convert.notes import (
    count_casts,
    count_locations,
    idle_tag_notes,
    key_notes,
    parted_notes,
    prefix_notes,
    shard_notes,
    sharing_notes,
    still_shared,
    text_notes,
    tied_notes,
)
from ckptconv.convert.options import Request
from ckptconv.convert.plan import ConversionPlan, FilePart, PlannedFile, PlannedFrom
from ckptconv.convert.targets import refuse_unheld
from ckptconv.convert.words import Tied
from ckptconv.formats.hf_names import index_path, index_text, shard_paths, split
from ckptconv.formats.safetensors import aliases_in
from ckptconv.formats.target_format import NamedTensor, TargetFormat, one_item
from ckptconv.keys.key_map import refuse_idle
from ckptconv.keys.naming_metadata import followed, refuse_without
from ckptconv.objects.encodings import recipes_text
from ckptconv.support.errors import OptionRefused, printable, warn
from ckptconv.support.limits import in_force
from ckptconv.support.text import some_text
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.refs import (
    TensorRef,
    bytes_of,
    expanded,
    homes,
    storages_of,
    view_identity,
)
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.choosing import choose_state_dict
from ckptconv.tree.flattening import Flattened, encoding_notes, flatten, refuse_split
from ckptconv.tree.renaming import (
    excluded,
    map_state_dict,
    refuse_codes_apart,
    refuse_nothing_left,
    renamed_keys,
    with_filled,
)
from ckptconv.tree.reshaping import Applied
from ckptconv.tree.settling import Skipped
from ckptconv.tree.state_dicts import StateDict, find


def plan_flat(
    checkpoint: Checkpoint, output: PurePath, to: TargetFormat, request: Request, *, in_folder: bool
) -> ConversionPlan:
    """An output that holds just the tensors of a state dict: safetensors, or any shards."""
    part = find(checkpoint.root, request.only, checkpoint.path)
    found = choose_state_dict(checkpoint.root, request.only, checkpoint.path)
    warn(found.notes)
    left_out: tuple[Skipped, ...] = ()
    if checkpoint.module_strays:
        from ckptconv.tree.modules import settle_strays  # few checkpoints have modules

        left_out = settle_strays(checkpoint, found.node, request.unknown)
    applied = map_state_dict(found, request.keys, checkpoint, request.fit_to)
    skipped = excluded(applied, request.fit_to)
    named_now, keys = applied.item, applied.keys
    # `flatten` adds what the output cannot hold: those keys were renamed for nothing
    held_from = len(skipped)
    flattened = flatten(*with_filled(named_now, keys), skipped, encode=to.encodes, output=to.noun)
    _refuse_scaled(applied, request)
    refs = flattened.refs
    cast = _cast_named(flattened, request)
    kept = [(key, ref, cast(ref)) for key, ref in flattened.tensors()]
    to.refuse(kept)
    refuse_nothing_left(len(refs), [keys], request.keys)
    refuse_idle([keys], request.keys)
    if checkpoint.metadata and not applied.keeps_names:
        metadata = followed(checkpoint.metadata, applied.names())
        checkpoint = replace(checkpoint, metadata=metadata)
    refuse_codes_apart(applied)
    strings = _strings(checkpoint, to, request, flattened)
    are_shared = len({*homes(refs)}) < len(refs)
    tied = _tied(to, kept, strings, request.tied, are_shared=are_shared)
    _refuse_taken(request, flattened.keys, strings)
    if tied:
        kept = [item for item in kept if item[0] not in tied]
    sizes = [bytes_of(dtype, ref.shape) for _, ref, dtype in kept]
    if not to.shares_storages:
        _refuse_blow_up(sum(sizes), checkpoint)
    storages = storages_of(refs)  # before the files: finding them takes 80 MB for a million
    locations = count_locations(storages, request.tags)
    renamed = renamed_keys(applied, {item.path for item in skipped[held_from:]})
    shared = renamed
    if to.shares_storages and request.casts:
        renamed = still_shared(applied, renamed, cast)
    metadata = {**strings, **tied} if to.holds_metadata else {}
    groups: Sequence[Hashable] = ()
    if are_shared:
        group = _same_storage if to.shares_storages else view_identity
        groups = [group(ref) for _, ref, _ in kept]
    plan_file = partial(_planned, to, metadata, tied, request)
    of_index = _index_metadata(checkpoint, is_whole=not skipped and not renamed.filled)
    files, index = _split(output, kept, sizes, plan_file, request.shard_bytes, groups, of_index)
    if len(files) > 1:
        refuse_split(flattened)
    return ConversionPlan(
        source=checkpoint.path,
        source_format=checkpoint.format,
        source_nbytes=checkpoint.nbytes,
        output=output,
        to=to.name,
        files=files,
        index=index,
        in_folder=in_folder,
        state_dicts=(renamed,),
        locations=locations if to.holds_tags else {},
        casts=count_casts(refs, cast),
        tied=tied,
        skipped=(*skipped, *left_out, *_other_parts(found, request, to)),
        rewritten=flattened.rewritten,
        notes=(
            *checkpoint.notes,
            *found.notes,
            *encoding_notes(flattened),
            *text_notes(found),
            *key_notes([renamed], request.keys),
            *prefix_notes(checkpoint, [found], request.keys, request.fit_to),
            *tied_notes([applied], request.fit_to),
            *idle_tag_notes(locations, request.tags),
            *sharing_notes(refs, storages),
            *parted_notes([shared], [renamed]),
            *to.tensor_notes(kept, request.tags),
            *shard_notes([key for key, _, _ in kept], sizes, request.max_shard_size),
        ),
        is_sharded=request.shard_bytes is not None,
        reads=PlannedFrom(checkpoint, part, flattened.tensors, cast, flattened.checks),
    )


def _tied(
    to: TargetFormat,
    named: Sequence[NamedTensor],
    strings: Mapping[str, str],
    tied: Tied,
    *,
    are_shared: bool,
) -> dict[str, str]:
    """The names that become aliases, and of what; raises `OptionRefused` for a pattern that no name
    of a tied tensor matches.
    """
    if tied == "duplicate":
        return {}
    if tied == "alias":
        return to.aliases(named, strings, are_shared=are_shared)
    aliases = to.aliases(named, strings, stays=tied, are_shared=are_shared)
    if not any(fnmatchcase(kept, tied) for kept in aliases.values()):
        names = list(dict.fromkeys(name for pair in aliases.items() for name in pair))
        told = f"its names are {some_text(names)}" if names else "no tensor has several names"
        raise OptionRefused(
            f"tied={tied!r:.100} is not alias or duplicate, and matches no name of a tied tensor",
            hint=told,
        )
    return aliases


def _refuse_taken(request: Request, keys: Sequence[str], strings: Mapping[str, str]) -> None:
    """Refuse metadata that a reader would take for the alias of a tensor."""
    if not request.metadata:
        return
    read = aliases_in(strings, {*keys})
    for name, value in request.metadata:
        if name in read:
            raise OptionRefused(
                f"the metadata {printable(name)}={printable(value)} would read as an alias of a "
                "tensor",
                hint="give it another name or value",
            )


def _refuse_scaled(applied: Applied, request: Request) -> None:
    """Refuse to cast codes beside scales that are in the output."""
    if request.casts:
        item = applied.item
        request.casts.refuse_scaled(dict(item.tensors()), applied.kept(), item.path)


def _strings(
    checkpoint: Checkpoint, to: TargetFormat, request: Request, flattened: Flattened
) -> dict[str, str]:
    """The metadata of the output but for aliases: the format's own, given ones, and recipes."""
    refuse_unheld(to, request)
    if not to.holds_metadata:
        refuse_without(checkpoint.metadata, f"a {to.name} output")
        return {}
    return {
        **to.metadata(flattened.keys, flattened.refs, checkpoint, request.tags),
        **dict(request.metadata),
        **recipes_text(flattened.recipes),
    }


def _planned(
    to: TargetFormat,
    metadata: Mapping[str, str],
    tied: Mapping[str, str],
    request: Request,
    path: PurePath,
    tensors: Sequence[NamedTensor],
) -> PlannedFile:
    """One file of a flat output; of the aliases it gets those of its own tensors."""
    if tied:
        keys = {key for key, _, _ in tensors}
        metadata = {
            name: value for name, value in metadata.items() if name not in tied or value in keys
        }
    part = FilePart(tensors, metadata, request.tags)
    layout = to.lay_out(tensors, metadata, request.tags)
    return PlannedFile(path, layout, lambda: iter([(key, ref) for key, ref, _ in tensors]), part)


def _split(
    output: PurePath,
    kept: Sequence[NamedTensor],
    sizes: Sequence[int],
    plan_file: Callable[[PurePath, Sequence[NamedTensor]], PlannedFile],
    limit: int | None,
    groups: Sequence[Hashable],
    metadata: Mapping[str, Any],
) -> tuple[tuple[PlannedFile, ...], PlannedFile | None]:
    """The files of a flat output and their index; one file, which needs no index, unless a limit
    asks for more.

    `sizes` are the bytes of the tensors. Those with the same of `groups` stay together.
    """
    if limit is None:
        return (plan_file(output, kept),), None
    shards = split(sizes, groups, limit)
    paths = shard_paths(output, len(shards))
    parts, names = [], [""] * len(kept)
    for path, indices in zip(paths, shards, strict=True):
        parts.append([kept[index] for index in indices])
        name = path.name
        for index in indices:
            names[index] = name
    del shards  # a million numbers, 40 MB, before the files are laid out
    files = tuple(map(plan_file, paths, parts))
    if len(files) == 1:
        return files, None
    where = zip((key for key, _, _ in kept), names, strict=True)
    raw = index_text(where, sum(sizes), metadata)
    return files, PlannedFile(index_path(output), one_item("index", raw), lambda: iter(()))


def _index_metadata(checkpoint: Checkpoint, *, is_whole: bool) -> Mapping[str, Any]:
    """What the source's index says beside sizes; the number of parameters if all are there."""
    return {
        name: value
        for name, value in checkpoint.index_metadata.items()
        if is_whole or name != "total_parameters"
    }


def _same_storage(ref: TensorRef) -> Hashable:
    """What tensors have in common that share bytes; one of several pieces has only itself."""
    return id(ref.storage) if ref.is_view else id(ref)


def _cast_named(flattened: Flattened, request: Request) -> CastRule:
    """Only tensors under their own keys are cast: scales and sparse values are not weights."""
    casts = request.casts
    if not casts.has_globs and (request.dtype is None or not flattened.recipes):
        return casts.everywhere
    parts = {id(ref) for name, ref in flattened.tensors() if name in flattened.components}
    if casts.has_globs:
        return casts.rule([(key, ref) for key, ref in flattened.tensors() if id(ref) not in parts])
    return lambda ref: ref.dtype if id(ref) in parts else casts.everywhere(ref)


def _refuse_blow_up(nbytes: int, checkpoint: Checkpoint) -> None:
    """Refuse an output many times the size of the input: views of one storage, each written out."""
    most = in_force()
    if nbytes > most.view_free and nbytes > most.view_ratio * checkpoint.nbytes:
        raise expanded(
            f"would take {nbytes} bytes but its source takes {checkpoint.nbytes}, because its "
            "tensors share memory",
            nbytes,
            checkpoint.nbytes,
            advice="write a torch file (--to torch), which keeps the sharing",
        )


def _other_parts(found: StateDict, request: Request, to: TargetFormat) -> Iterator[Skipped]:
    """The parts of what was to be converted beside the state dict, and beside what it is in."""
    base = f"{request.only.removesuffix('.')}." if request.only and request.only != "." else ""
    for path, value, is_item in found.beside():
        what = (
            "not part of the state dict"
            if is_item
            else "an attribute of the dict, not one of its items"
        )
        yield Skipped(base + path, f"{what}; {to.noun} holds named tensors only", value)
