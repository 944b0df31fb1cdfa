"""Conversion plans: what every byte of an output but its payload will be, decided without reading any payload.

Nothing is written when a plan fails. A plan's layout is executed by `convert`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptconv.checkpoint import (
    Checkpoint,
    StateDict,
    choose_state_dict,
    find,
    find_state_dicts,
    label_text,
    metadata_of,
    place_text,
    renamed_state_dict,
    tensor_of,
    tensors_of,
    walk,
)
from ckptconv.collector import collector_paused
from ckptconv.compaction import CastRule
from ckptconv.devices import TagMap
from ckptconv.dtypes import DType
from ckptconv.encodings import recipes_text
from ckptconv.errors import (
    AmbiguousStateDict,
    CheckpointError,
    DeviceUnavailable,
    KeyConflict,
    KeyMismatch,
    LimitExceeded,
    OutputRefused,
    RefusedObject,
    printable,
)
from ckptconv.fitted_keys import KeyTarget, fitted
from ckptconv.flattening import Flattened, encoding_notes, flatten, refuse_split, refuse_unholdable
from ckptconv.formats.safetensors import lay_out_safetensors
from ckptconv.formats.torch_zip import Tree, lay_out_torch_zip
from ckptconv.key_rules import MappedKeys
from ckptconv.keys import (
    KEEP,
    STRIP,
    UNMISTAKABLE,
    KeyMap,
    KeyRules,
    find_wrappers,
    map_keys,
    refuse_idle,
    unchanged,
)
from ckptconv.layout import Layout, one_item
from ckptconv.limits import LIMITS
from ckptconv.nodes import ORDERED_DICT, Call, Dict, Node, children, mapping_pairs
from ckptconv.plain_objects import plain_form
from ckptconv.producers import offered_prefix
from ckptconv.rule_files import mapping_text
from ckptconv.settling import Rewritten, Settled, Skipped, Unknown, settle_objects
from ckptconv.sharding import index_path, index_text, shard_paths, split
from ckptconv.sources import Source
from ckptconv.tensors import TensorRef

Target = Literal["torch", "safetensors", "dcp"]
Tied = Literal["alias", "duplicate"]

_FOLDER_NAMES: dict[Target, str] = {"torch": "pytorch_model.bin", "safetensors": "model.safetensors"}
Kept = tuple[str, TensorRef, DType]
"""A tensor of a flat output: its key, itself, and the type to write it in."""

_SUFFIXES: dict[str, Target] = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".tar", ".th", ".pkl", ".model"), "torch"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a conversion is asked to do; the defaults are those of `ckptconv convert`.

    `to`: the output format (None: by the output's name). `only`: the path of the part to convert. `tied`: whether one of
    several names of a tensor stands for the others in safetensors, or each gets its own copy. `unknown`: what happens in a
    torch output to objects that `weights_only=True` refuses and that have no plain form. `max_shard_size`: the bytes of
    tensors that one file may hold; a sharded output holds one state dict. `save_mapping`: the file that will tell which key
    became which; `rule_files` reads it. `fit_to`: what the keys of every state dict are fitted to, after the rules.
    """

    to: Target | None = None
    keys: KeyRules = STRIP
    tags: TagMap = TagMap("cpu")  # noqa: RUF009 (frozen)
    dtype: DType | None = None
    only: str | None = None
    tied: Tied = "alias"
    unknown: Unknown = "refuse"
    max_shard_size: int | None = None
    save_mapping: Path | None = None
    fit_to: KeyTarget | None = None

    def cast(self, ref: TensorRef) -> DType:
        """The type in which a tensor of a state dict is written: only floating ones are cast."""
        return self.dtype if self.dtype is not None and ref.dtype.is_floating else ref.dtype


@dataclass(frozen=True, slots=True)
class RenamedKeys:
    """What became of the keys of one state dict: `path` of it, the wrappers found, and (old, new) pairs that differ.

    `left_out` are the keys that the rules left out; `mapped` works out all of it, keys that the output does not hold left out.
    `odd` are the keys with characters that cannot be printed; `shared` counts the tensors whose storage another key has too.
    """

    path: str
    wrappers: tuple[str, ...]
    count: int
    changed: tuple[tuple[str, str], ...]
    odd: tuple[str, ...] = ()
    shared: int = 0
    left_out: tuple[str, ...] = ()
    mapped: Callable[[], MappedKeys] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFile:
    """One file of an output: its path, its bytes, and the tensors in it by the paths that they will have."""

    path: Path
    layout: Layout
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]]


@dataclass(frozen=True, slots=True, eq=False)
class ConversionPlan:
    """Everything about an output but its payload: where each byte will come from, and what will differ from the source.

    `files` are one, or the shards, and then `index` is the file that says which of them holds a key. `in_folder`: a folder
    was asked for, which is made if it is missing. `is_sharded`: shards were asked for, though all may fit one file.

    `mapping` is the file that will tell which key became which, if one was asked for. `inputs` are the files that are read.

    `locations` counts storages by (tag before, tag after); `casts` counts tensors by (dtype before, after); `tied` maps
    dropped names to the kept one (safetensors).
    """

    source: Path
    source_format: str
    source_nbytes: int
    output: Path
    to: Target
    files: tuple[PlannedFile, ...]
    index: PlannedFile | None
    in_folder: bool
    state_dicts: tuple[RenamedKeys, ...]
    locations: Mapping[tuple[str, str], int]
    casts: Mapping[tuple[str, str], int]
    tied: Mapping[str, str]
    skipped: tuple[Skipped, ...]
    rewritten: tuple[Rewritten, ...]
    notes: tuple[str, ...]
    tensors: Callable[[], Iterator[tuple[str, TensorRef]]]
    cast: Callable[[TensorRef], DType]
    mapping: PlannedFile | None = None
    is_sharded: bool = False
    inputs: tuple[Source, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the output in bytes, all its files together."""
        return sum(file.layout.nbytes for file in (*self.files, *([self.index] if self.index else [])))


def target(output: Path, options: Options) -> tuple[Path, Target]:
    """The file to write (of a sharded output the one that its shards and index are named after), and its format.

    The format is the one asked for, or the one that the name says; `CheckpointError` when it says nothing. A folder for
    shards gets the Hugging Face libraries' names.
    """
    if options.max_shard_size is not None and options.to == "dcp":
        raise CheckpointError("a DCP folder is not split by size", path=output, hint="leave --max-shard-size out")
    if options.max_shard_size is not None and (output.is_dir() or not output.suffix):
        to = options.to or "safetensors"
        return output / _FOLDER_NAMES[to], to
    return output, _target_format(output, options.to)


def _target_format(output: Path, to: Target | None) -> Target:
    if to is not None:
        return to
    if (found := _SUFFIXES.get(output.suffix.lower())) is not None:
        return found
    hint = "add --to torch or --to safetensors (or dcp)"
    raise CheckpointError("its name does not say which format to write", path=output, hint=hint)


def keeps_modules(output: str | os.PathLike[str], options: Options) -> bool:
    """Whether an output keeps whole modules as they are, and so the checkpoint must be opened with `whole_modules`."""
    return options.unknown == "keep" and options.max_shard_size is None and _target_format(Path(output), options.to) == "torch"


def plan_conversion(checkpoint: Checkpoint, output: str | os.PathLike[str], options: Options) -> ConversionPlan:
    """Decide what the output of a conversion will be; reads no payload and writes nothing.

    Raises `CheckpointError` when the request cannot be met: keys that collide, objects that may not be written, a state
    dict that is missing or ambiguous.
    """
    path, to = target(Path(output), options)
    try:
        with collector_paused():
            if to == "torch" and options.max_shard_size is None:
                plan = _plan_torch(checkpoint, path, options)
            elif to == "dcp":
                plan = _plan_dcp(checkpoint, path, options)
            else:
                plan = _plan_flat(checkpoint, path, to, options, in_folder=path != Path(output))
            plan = replace(plan, inputs=checkpoint.sources)
            return plan if options.save_mapping is None else _with_mapping(plan, options.save_mapping)
    except CheckpointError as error:
        raise error.at(path=checkpoint.path) from error.__cause__


def _with_mapping(plan: ConversionPlan, path: Path) -> ConversionPlan:
    """The plan with the file beside its output that tells which key became which."""
    taken = (plan.source, plan.output, *(file.path for file in plan.files), *([plan.index.path] if plan.index else []))
    if path.resolve() in {other.resolve() for other in taken}:
        raise OutputRefused("is the source or the output, and cannot be the mapping too", path=path, hint="name another file")
    raw = mapping_text([item.mapped() for item in plan.state_dicts if item.mapped is not None])
    return replace(plan, mapping=PlannedFile(path, one_item("mapping", raw), lambda: iter(())))


def _plan_torch(checkpoint: Checkpoint, output: Path, options: Options) -> ConversionPlan:
    root = checkpoint.root if options.only is None else find(checkpoint.root, options.only, checkpoint.path)
    overlay: dict[int, Node] = {}
    found = find_state_dicts(root)
    renamed, skipped = rename_state_dicts(found, overlay, options.keys, options.fit_to)
    settled = settle_objects(root, overlay, options.unknown)
    refs = settled.tensors
    if not refs and not settled.storages:
        raise AmbiguousStateDict("holds no tensors, so there is nothing to convert", where=options.only)
    tree = Tree(root, overlay, refs, settled.storages)
    cast = _cast_rule(found, tree, options)
    layout = lay_out_torch_zip(tree, cast, options.tags)
    return ConversionPlan(
        source=checkpoint.path,
        source_format=checkpoint.format,
        source_nbytes=checkpoint.nbytes,
        output=output,
        to="torch",
        files=(PlannedFile(output, layout, lambda: tensors_of(root, overlay)),),
        index=None,
        in_folder=False,
        state_dicts=renamed,
        locations=_count_locations(refs, options.tags),
        casts=_count_casts(refs, cast),
        tied={},
        skipped=(*skipped, *settled.dropped),
        rewritten=tuple(settled.rewritten),
        notes=(
            *checkpoint.notes,
            *_tree_notes(settled),
            *_key_notes(renamed, options.keys),
            *_prefix_notes(checkpoint, found, options.keys, options.fit_to),
            *_sharing_notes(refs),
        ),
        tensors=lambda: tensors_of(root, overlay),
        cast=cast,
    )


def _plan_dcp(checkpoint: Checkpoint, output: Path, options: Options) -> ConversionPlan:
    """The plan of the torch file of which torch will make a DCP folder."""
    if options.unknown == "keep":
        raise RefusedObject("objects of unknown classes cannot be kept in a DCP folder", hint="use --unknown drop")
    root = checkpoint.root if options.only is None else find(checkpoint.root, options.only, checkpoint.path)
    if mapping_pairs(root) is None and (type(root) is not Call or type(plain_form(root)) is not Dict):
        raise RefusedObject(
            "is no dict, and a DCP folder holds nothing else", where=options.only, hint="--only PATH takes one part"
        )
    return replace(_plan_torch(checkpoint, output, options), to="dcp")


def _cast_rule(found: Sequence[StateDict], tree: Tree, options: Options) -> CastRule:
    """Cast the tensors of state dicts: an optimizer's, or the scales inside a quantized tensor, are not weights.

    Where there is no state dict, all tensors that are no part of a call are cast.
    """
    if options.dtype is None:
        return options.cast
    values = (tree.overlay.get(id(value), value) for item in found for value in item.values)
    weights = {id(tensor_of(value)) for value in values} if found else _free_tensors(tree)
    bare = {id(storage) for storage in tree.storages}  # they stay as they are, and so do the tensors over them
    weights -= {id(ref) for ref in tree.tensors if any(id(piece.storage) in bare for piece in ref.pieces)}
    return lambda ref: options.cast(ref) if id(ref) in weights else ref.dtype


def _free_tensors(tree: Tree) -> set[int]:
    inside: set[int] = set()
    free: set[int] = set()
    for place, node in walk(tree.root, tree.overlay):
        holder = None if place is None else place[2]
        if id(holder) in inside or (type(holder) is Call and mapping_pairs(holder) is None):
            inside.add(id(node))
        elif tensor_of(node) is not None:
            free.add(id(tensor_of(node)))
    return free


def rename_state_dicts(
    found: Sequence[StateDict], overlay: dict[int, Node], rules: KeyRules, fit_to: KeyTarget | None = None
) -> tuple[tuple[RenamedKeys, ...], list[Skipped]]:
    """Put renamed state dicts into the overlay; tell what changed and what was left out."""
    if not found and (rules not in (STRIP, KEEP) or fit_to):
        raise AmbiguousStateDict(
            "there is no state dict in it whose keys could be changed", hint="see what it holds with: ckptconv inspect"
        )
    maps = [_map_keys(item, rules, fit_to) if fit_to or _has_work(item, rules) else unchanged(item.keys) for item in found]
    if found:
        _refuse_nothing_left(sum(new is not None for keys in maps for new in keys.new), rules)
    refuse_idle(maps, rules)
    renamed, skipped = [], []
    for item, keys in zip(found, maps, strict=True):
        skipped += _excluded(item, keys, rules, fit_to)
        renamed.append(_renamed_keys(item, keys))
        if keys.new != keys.old:
            overlay[id(item.node)] = renamed_state_dict(item, keys.new, keys.module_paths)
    return tuple(renamed), skipped


def _has_work(item: StateDict, rules: KeyRules) -> bool:
    """Whether the keys must be fit for names: not where they stay, whatever they are, somewhere inside a checkpoint."""
    return rules != KEEP and (rules != STRIP or not item.path or bool(find_wrappers(item.keys)))


def _map_keys(item: StateDict, rules: KeyRules, fit_to: KeyTarget | None) -> KeyMap:
    """The rules applied, then the keys fitted; where wrappers are all that the rules are about, fitting finds them itself."""
    try:
        keys = map_keys(item.keys, KEEP if fit_to and rules == STRIP else rules, item.path)
        return fitted(item, keys, fit_to) if fit_to else keys
    except (KeyConflict, KeyMismatch) as error:
        raise error.at(where=item.path or None) from None


def _refuse_nothing_left(left: int, rules: KeyRules) -> None:
    if not left:
        raise KeyConflict(f"no key is left by {rules.leaving}", hint="check the globs")


def _excluded(item: StateDict, keys: KeyMap, rules: KeyRules, fit_to: KeyTarget | None) -> list[Skipped]:
    base = f"{item.path}." if item.path else ""
    reason = f"left out by {rules.leaving}"
    if fit_to and fit_to.drop_unexpected:
        reason = f"left out by {rules.leaving}, or because {printable(fit_to.name)} has no such key"
    return [Skipped(f"{base}{old}", reason) for old, new in zip(keys.old, keys.new, strict=True) if new is None]


def _renamed_keys(item: StateDict, keys: KeyMap, unheld: Collection[str] = ()) -> RenamedKeys:
    """What became of the keys of a state dict; `unheld` are new keys whose values the output does not hold."""
    pairs = list(zip(keys.old, keys.new, strict=True))
    changed = tuple((old, new) for old, new in pairs if new is not None and new != old)
    left_out = tuple(old for old, new in pairs if new is None)
    odd = () if "".join(keys.old).isprintable() else tuple(key for key in keys.old if not key.isprintable())
    storages = [id(ref.storage if ref.is_view else ref) for _, ref in item.tensors()]
    shared = len(storages) - len(set(storages))
    mapped = lambda: _mapped_keys(item, keys, unheld)  # noqa: E731
    return RenamedKeys(item.path, keys.wrappers, len(keys.old), changed, odd, shared, left_out, mapped)


def _mapped_keys(item: StateDict, keys: KeyMap, unheld: Collection[str]) -> MappedKeys:
    now = {old: None if new in unheld else new for old, new in zip(keys.old, keys.new, strict=True)}
    if len(now) != len(keys.old):
        raise KeyConflict("two keys of different types read the same, so there is no mapping", where=item.path)
    entries = mapping_pairs(metadata_of(item.node)) or ()
    return MappedKeys(item.path, now, {path: keys.module_paths(path) for path, _ in entries if type(path) is str})


def _tree_notes(settled: Settled) -> Iterator[str]:
    if settled.sparse:
        count, first = len(settled.sparse), printable(place_text(settled.sparse[0])) or "the root"
        yield f"{count} sparse tensors ({first}, …) are kept as they are; their indices are not checked"
    if settled.cycles:
        count, first = len(settled.cycles), printable(place_text(settled.cycles[0]))
        yield f"{count} containers hold themselves ({first}, …); they are kept so"


def _key_notes(state_dicts: Sequence[RenamedKeys], rules: KeyRules) -> Iterator[str]:
    odd = [key for item in state_dicts for key in item.odd]
    if odd:
        yield f"{len(odd)} keys hold control characters, e.g. {printable(odd[0])}"
    left = sorted({name for item in state_dicts for name in item.wrappers if name in UNMISTAKABLE})
    if left and rules.wrappers in ("module", "add-module"):
        yield f"the keys still carry {', '.join(left)}; `ckptconv convert` strips these wrappers too"


def _prefix_notes(
    checkpoint: Checkpoint, found: Sequence[StateDict], rules: KeyRules, fit_to: KeyTarget | None
) -> Iterator[str]:
    """Offer what the framework put around the model, where no rule of the user's does anything with prefixes."""
    if rules not in (STRIP, KEEP) or fit_to:
        return
    for item in found:
        if prefix := offered_prefix(checkpoint, item):
            yield f"all keys{f' of {item.path}' if item.path else ''} start with {prefix}; --strip-prefix {prefix} takes it off"


def _sharing_notes(refs: Sequence[TensorRef]) -> Iterator[str]:
    """Tell of tensors that would take far more bytes than the storages that they share."""
    claimed = sum(ref.nbytes for ref in refs)
    stored = sum({id(piece.storage): piece.storage.nbytes for ref in refs for piece in ref.pieces}.values())
    if claimed > LIMITS.view_free and claimed > LIMITS.view_ratio * stored:
        yield f"{len(refs)} tensors of {claimed} bytes share {stored} bytes of storage"


def _count_locations(refs: Iterable[TensorRef], retag: Callable[[str], str]) -> dict[tuple[str, str], int]:
    storages = {id(piece.storage): piece.storage.location for ref in refs for piece in ref.pieces}
    counted = Counter(storages.values())
    return {(before, retag(before)): count for before, count in counted.items()}


def _count_casts(refs: Iterable[TensorRef], cast: CastRule) -> dict[tuple[str, str], int]:
    return dict(Counter((ref.dtype.name, cast(ref).name) for ref in refs if cast(ref) is not ref.dtype))


def _plan_flat(checkpoint: Checkpoint, output: Path, to: Target, options: Options, *, in_folder: bool) -> ConversionPlan:
    """An output that holds just the tensors of one state dict: safetensors, or shards of either format."""
    found = choose_state_dict(checkpoint.root, options.only, checkpoint.path)
    keys = _map_keys(found, options.keys, options.fit_to)
    skipped = _excluded(found, keys, options.keys, options.fit_to)
    held_from = len(skipped)
    flattened = flatten(keys.new, found.values, skipped, encode=to == "safetensors")
    named = list(flattened.tensors)
    cast = _cast_named(flattened, options)
    if to == "safetensors":
        for key, ref in named:
            refuse_unholdable(key, ref, cast(ref))
    _refuse_nothing_left(len(named), options.keys)
    refuse_idle([keys], options.keys)
    tied = _tied_names(named, checkpoint) if options.tied == "alias" and to == "safetensors" else {}
    kept = [(key, ref, cast(ref)) for key, ref in named if key not in tied]
    if to == "safetensors":
        _refuse_blow_up(sum(ref.numel * dtype.itemsize for _, ref, dtype in kept), checkpoint)
    refs = [ref for _, ref in named]
    renamed = _renamed_keys(found, keys, {item.path for item in skipped[held_from:]})
    metadata: dict[str, str] = {}
    if to == "safetensors":
        metadata = {**_metadata(checkpoint, dict(named), tied, options), **recipes_text(flattened.recipes)}
    group = _same_view if to == "safetensors" else _same_storage
    files, index = _split(output, kept, lambda part: _lay_out(to, part, metadata, tied, options), options.max_shard_size, group)
    if len(files) > 1:
        refuse_split(flattened)
    return ConversionPlan(
        source=checkpoint.path,
        source_format=checkpoint.format,
        source_nbytes=checkpoint.nbytes,
        output=output,
        to=to,
        files=files,
        index=index,
        in_folder=in_folder,
        state_dicts=(renamed,),
        locations=_count_locations(refs, options.tags),
        casts=_count_casts(refs, cast),
        tied=tied,
        skipped=(*skipped, *_other_parts(checkpoint, found, options)),
        rewritten=flattened.rewritten,
        notes=(
            *checkpoint.notes,
            *found.notes,
            *encoding_notes(flattened),
            *_key_notes([renamed], options.keys),
            *_prefix_notes(checkpoint, [found], options.keys, options.fit_to),
            *_sharing_notes(refs),
        ),
        tensors=lambda: iter(named),
        cast=cast,
        is_sharded=options.max_shard_size is not None,
    )


def _lay_out(
    to: Target, part: Sequence[Kept], metadata: Mapping[str, str], tied: Mapping[str, str], options: Options
) -> Layout:
    """One file of a flat output; of the aliases it gets those of its own tensors."""
    if to == "safetensors":
        keys = {key for key, _, _ in part}
        own = {name: value for name, value in metadata.items() if name not in tied or value in keys}
        return lay_out_safetensors(part, own)
    root = Call(ORDERED_DICT, ())
    root.pairs = [(key, ref) for key, ref, _ in part]
    refs = list({id(ref): ref for _, ref, _ in part}.values())
    return lay_out_torch_zip(Tree(root, {}, refs, []), options.cast, options.tags)


def _split(
    output: Path,
    kept: Sequence[Kept],
    lay_out: Callable[[Sequence[Kept]], Layout],
    limit: int | None,
    group: Callable[[TensorRef], Hashable],
) -> tuple[tuple[PlannedFile, ...], PlannedFile | None]:
    """The files of a flat output and their index; one file, which needs no index, unless a limit asks for more.

    Tensors of which `group` says the same stay together.
    """
    if limit is None:
        return (_planned(output, kept, lay_out),), None
    sizes = [ref.numel * dtype.itemsize for _, ref, dtype in kept]
    groups = [group(ref) for _, ref, _ in kept]
    parts = [[kept[index] for index in indices] for indices in split(sizes, groups, limit)]
    paths = shard_paths(output, len(parts))
    files = tuple(_planned(path, part, lay_out) for path, part in zip(paths, parts, strict=True))
    if len(files) == 1:
        return files, None
    where = {key: path.name for path, part in zip(paths, parts, strict=True) for key, _, _ in part}
    raw = index_text({key: where[key] for key, _, _ in kept}, sum(sizes))
    return files, PlannedFile(index_path(output), one_item("index", raw), lambda: iter(()))


def _same_storage(ref: TensorRef) -> Hashable:
    """What tensors have in common that share their bytes; of one put together from pieces, only itself has them."""
    return id(ref.storage) if ref.is_view else id(ref)


def _same_view(ref: TensorRef) -> Hashable:
    """What the names of one tensor have in common. Other views of its storage are written out, each by itself."""
    if not ref.is_view:
        return id(ref)
    return id(ref.storage), ref.storage_offset, ref.shape, ref.stride, ref.dtype, ref.conj, ref.neg


def _planned(path: Path, part: Sequence[Kept], lay_out: Callable[[Sequence[Kept]], Layout]) -> PlannedFile:
    return PlannedFile(path, lay_out(part), lambda: iter([(key, ref) for key, ref, _ in part]))


def _cast_named(flattened: Flattened, options: Options) -> CastRule:
    """Only the tensors that stand under their own keys are cast: scales and the values of sparse tensors are no weights."""
    if options.dtype is None or not flattened.recipes:
        return options.cast
    owned = tuple(f"{key}." for key in flattened.recipes)
    parts = {id(ref) for name, ref in flattened.tensors if name.startswith(owned)}
    return lambda ref: ref.dtype if id(ref) in parts else options.cast(ref)


def _tied_names(named: Sequence[tuple[str, TensorRef]], checkpoint: Checkpoint) -> dict[str, str]:
    """Dropped name → kept name, for names of one and the same view; the first in sorted order is kept, as the library does.

    A name that the file's metadata needs for something else is not dropped.
    """
    views: dict[Hashable, list[str]] = {}
    for key, ref in named:
        if ref.numel:
            views.setdefault(_same_view(ref), []).append(key)
    aliases = _aliases(checkpoint)
    taken = {"format", "device", *(name for name in checkpoint.metadata if name not in aliases)}
    return {name: names[0] for names in map(sorted, views.values()) for name in names[1:] if name not in taken}


def _aliases(checkpoint: Checkpoint) -> set[str]:
    """The metadata entries of a safetensors source that name a tensor, and so became keys."""
    if not checkpoint.metadata:
        return set()
    keys = {key for found in checkpoint.state_dicts() for key in found.keys}
    return {name for name, kept in checkpoint.metadata.items() if name in keys and kept in keys}


def _metadata(
    checkpoint: Checkpoint, keys: Mapping[str, TensorRef], tied: Mapping[str, str], options: Options
) -> dict[str, str]:
    aliases = _aliases(checkpoint)
    metadata = {
        name: value
        for name, value in checkpoint.metadata.items()
        if name not in aliases and name != "device" and (name == "format" or value not in keys)  # would read as an alias
    }
    metadata["format"] = "pt"
    tags = {options.tags(ref.location) for ref in keys.values()}
    if bad := next((tag for tag in tags if not tag.isascii()), None):
        raise DeviceUnavailable(f"the location tag '{printable(bad)}' is no device", hint="name one with --device")
    if len(tags) == 1:
        metadata["device"] = tags.pop()
    return {**metadata, **tied}


def _refuse_blow_up(nbytes: int, checkpoint: Checkpoint) -> None:
    """Refuse an output that is many times the input: views of one small storage, each written out."""
    if nbytes > LIMITS.view_free and nbytes > LIMITS.view_ratio * checkpoint.nbytes:
        raise LimitExceeded(
            f"would take {nbytes} bytes, more than {LIMITS.view_ratio} times the source; its tensors share memory",
            hint="write a torch file (--to torch), which keeps the sharing",
        )


def _other_parts(checkpoint: Checkpoint, found: StateDict, options: Options) -> Iterator[Skipped]:
    """The parts of what was to be converted that are not the state dict: what stands beside it, and beside what it is in."""
    node = checkpoint.root if options.only is None else find(checkpoint.root, options.only, checkpoint.path)
    base, rest = f"{options.only}." if options.only else "", found.path
    while rest:
        pairs = mapping_pairs(node)
        parts = [(label_text(label), child) for label, child in (children(node) if pairs is None else pairs)]
        ways = [(text, child) for text, child in parts if rest == text or rest.startswith(f"{text}.")]
        if not ways:
            return
        way, node = max(ways, key=lambda item: len(item[0]))
        for text, _ in parts:
            if text != way:
                yield Skipped(f"{base}{text}", "not part of the state dict; safetensors holds named tensors only")
        base, rest = f"{base}{way}.", rest[len(way) + 1 :]
