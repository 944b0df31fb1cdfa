"""Conversion plans: what every byte of an output but its payload will be, decided without reading
any payload.

Nothing is written when a plan fails. A plan's layout is executed by `execute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import PurePath
from types import NoneType
from typing import TYPE_CHECKING

from ckptconv.convert.casts import cast_rule
from ckptconv.convert.notes import (
    count_casts,
    count_locations,
    idle_tag_notes,
    key_notes,
    optimizer_notes,
    parted_notes,
    prefix_notes,
    random_state_notes,
    sharing_notes,
    still_shared,
    tied_notes,
    tree_notes,
)
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan, PlannedFile, PlannedFrom
from ckptconv.convert.targets import for_folder, keeps_modules, refuse_unheld, target
from ckptconv.convert.with_files import with_files, with_training_named
from ckptconv.convert.words import FILES_READ
from ckptconv.formats.hf_names import is_weights_name, refuse_dcp_folder
from ckptconv.formats.target_format import TargetFormat, Tree, one_item
from ckptconv.io.guarded import check_places
from ckptconv.io.places import Named, Output, is_same_place, place_of, places_of, resolved
from ckptconv.io.source import Source
from ckptconv.pickles.nodes import Node
from ckptconv.support.choices import refuse_no_output
from ckptconv.support.errors import (
    AmbiguousStateDict,
    CheckpointError,
    OptionRefused,
    OutputRefused,
    RefusedObject,
)
from ckptconv.support.limits import held, in_force
from ckptconv.support.records import NamedTuple
from ckptconv.support.settings import collector_paused
from ckptconv.support.text import some_text
from ckptconv.tensors.compaction import CastRule
from ckptconv.tensors.refs import TensorRef, storages_of
from ckptconv.tree.checkpoint import Checkpoint, edited
from ckptconv.tree.renaming import RenamedKeys, refuse_codes_apart, rename_state_dicts
from ckptconv.tree.reshaping import Applied, with_config
from ckptconv.tree.settling import Skipped, settle_objects
from ckptconv.tree.state_dicts import StateDict, find, find_state_dicts, is_all
from ckptconv.tree.walk import tensors_of

if TYPE_CHECKING:
    from ckptconv.tree.fitted_keys import KeyTarget
    from ckptconv.tree.optimizer_names import RenamedStates


def plan_conversion(
    checkpoint: Checkpoint, output: Output, options: Options | Request | None = None
) -> ConversionPlan:
    """Decide what the output of a conversion will be, without reading payload or writing anything.

    `checkpoint` is an opened one, which must stay open until the plan is executed; `options` are
    those of the conversion (None: the defaults). Raises `CheckpointError` when the request cannot
    be met: keys that collide, objects that may not be written, a state dict that is missing or
    ambiguous.

    >>> with open_checkpoint("in.pt") as checkpoint:  # doctest: +SKIP
    ...     execute_plan(plan_conversion(checkpoint, "out.safetensors", Options(dtype="bf16")))
    """
    refuse_no_output(output)
    if not isinstance(checkpoint, Checkpoint):
        hint = "give what open_checkpoint gives"
        raise OptionRefused(f"checkpoint={checkpoint!r:.100} is not a Checkpoint", hint=hint)
    if not isinstance(options, (Options, Request, NoneType)):
        hint = "leave it out, or give ckptconv.Options(...)"
        raise OptionRefused(f"options={options!r:.100} is not Options", hint=hint)
    return _planned(
        checkpoint,
        output,
        options if isinstance(options, Request) else request_of(options or Options()),
    )


def plan_trial(checkpoint: Checkpoint, output: Output, request: Request) -> ConversionPlan:
    """As `plan_conversion`, for who asks only whether it would work: over a network, what stands
    before payloads is not looked at.
    """
    return _planned(checkpoint, output, request, is_trial=True)


def request_of(options: Options) -> Request:
    """What options stand for: their files are read, and what the keys are to be fitted to."""
    if _stands_alone(options):
        return _request_alone(options)
    return options.request(key_target_of(options))


def _stands_alone(options: Options) -> bool:
    """Whether equal options stand for the same at any time: no file or device is asked, and
    nothing in them can be changed.
    """
    if options.device == "auto" or options.model is not None:
        return False
    if any(getattr(options, name) for name in FILES_READ):
        return False
    try:
        hash(options)
    except TypeError:  # a list, or a dict
        return False
    return True


@lru_cache(maxsize=1)  # of many files, each has the options of the one before
def _request_alone(options: Options) -> Request:
    return options.request(key_target_of(options))


def key_target_of(options: Options) -> KeyTarget | None:
    """What the keys are to be fitted to."""
    if options.like is None and options.model is None and not options.drop_unexpected:
        return None
    from ckptconv.convert.key_targets import key_target  # seldom needed

    return key_target(options.like, options.model, drop_unexpected=options.drop_unexpected)


def _planned(
    checkpoint: Checkpoint,
    output: Output,
    request: Request,
    *,
    is_trial: bool = False,
) -> ConversionPlan:
    named = place_of(output)
    request = for_folder(request, named)
    read = checkpoint.sources[0].path.name if checkpoint.sources else ""
    path, to = target(named, request, read)
    if not (request.with_files and checkpoint.part and checkpoint.part.is_copied):
        checkpoint.refuse_part(path.name)
    of_adapters = request.of_adapters
    try:
        with collector_paused(), held(checkpoint.limits):
            if of_adapters:
                request = _with_adapter_edits(request, to)
            if not (is_trial and checkpoint.is_far):
                checkpoint = checkpoint.certain()
                check_places(checkpoint.sources)
            if checkpoint.has_whole_modules and not keeps_modules(to, request):
                from ckptconv.tree.modules import flatten_modules  # few checkpoints have modules

                checkpoint = flatten_modules(checkpoint)
            whole = checkpoint
            if request.with_training:
                _refuse_untrained(whole)
            if request.edits:
                checkpoint = _edited(whole, request)
            keys = with_config(request.keys, checkpoint)
            if keys is not request.keys:
                request = replace(request, keys=keys)
            if to.holds_trees and request.shard_bytes is None:
                plan = _plan_tree(checkpoint, path, to, request, whole.root)
            else:
                from ckptconv.convert.flat_planner import plan_flat  # with its formats

                plan = plan_flat(checkpoint, path, to, request, in_folder=path != named.path)
            if checkpoint.part is not None:
                _refuse_codes_alone(plan)
            plan = with_files(plan, request)
            if of_adapters:
                plan = _with_adapter_told(plan, of_adapters)
            _refuse_lost_inputs(plan)
            if plan.in_folder:
                refuse_dcp_folder(place_of(plan.folder))
            return _with_told(plan, request)
    except CheckpointError as error:
        with_training_named(error, checkpoint, request)
        raise checkpoint.blamed(error) from error.__cause__


def _with_adapter_edits(request: Request, to: TargetFormat) -> Request:
    from ckptconv.convert.adapter_names import with_adapter_edits  # seldom needed

    return with_adapter_edits(request, to)


def _with_adapter_told(plan: ConversionPlan, preset: str) -> ConversionPlan:
    from ckptconv.convert.adapter_names import with_adapter_told

    return with_adapter_told(plan, preset)


def _refuse_untrained(checkpoint: Checkpoint) -> None:
    from ckptconv.tree.optimizer_states import optimizer_states  # seldom needed

    if next(optimizer_states(checkpoint.root, {}), None) is None:
        what = "--with-training: this checkpoint was opened without training states"
        hint = "let convert open the folder that they are in, or leave it out"
        raise OptionRefused(what, hint=hint)


def _refuse_codes_alone(plan: ConversionPlan) -> None:
    """Refuse casts of what may be codes in one part of a set: their scales may be in another."""
    for before, after in plan.casts:
        if before.startswith("float8"):
            what = f"{before} of one part is not cast to {after}: a scale may be in another part"
            raise RefusedObject(what, hint="name all parts, or their index; or leave --dtype out")


def _edited(checkpoint: Checkpoint, request: Request) -> Checkpoint:
    """The checkpoint after the edits, which know the rules that come after them."""
    from ckptconv.tree.dequantizing import with_rules  # seldom needed

    return edited(checkpoint, with_rules(request.edits, request.keys))


def _with_told(plan: ConversionPlan, request: Request) -> ConversionPlan:
    """The plan with the files that tell of its output: which key became which, and its digests."""
    if request.save_mapping is not None:
        plan = _with_mapping(plan, place_of(request.save_mapping).path)
    if request.manifest is None:
        return plan
    path = place_of(request.manifest).path
    _refuse_taken(plan, path, "manifest")
    return replace(plan, manifest=path)


def _refuse_taken(plan: ConversionPlan, path: PurePath, what: str) -> None:
    """Refuse a file that is to tell of an output in the place of one of both sides."""
    taken = {plan.source, plan.output, *(file.path for file in plan.files), *_files_of(plan.inputs)}
    taken |= {file.path for file in (plan.index, plan.mapping) if file is not None}
    taken |= {plan.folder / item.name for item in plan.beside.copied}
    if resolved(path) in {resolved(other) for other in taken}:
        raise OutputRefused(
            f"is the source or the output, so it cannot also be the {what}",
            path=path,
            hint="name another file",
        )


def _with_mapping(plan: ConversionPlan, path: PurePath) -> ConversionPlan:
    """The plan with the file beside its output that tells which key became which."""
    from ckptconv.keys.rule_files import mapping_text  # seldom needed

    _refuse_taken(plan, path, "mapping")
    mapped = [item.mapped() for item in plan.state_dicts if item.mapped is not None]
    raw = mapping_text(mapped)
    lost = [key for item in mapped for key in item.lost()]
    if lost:
        verb = "does" if len(lost) == 1 else "do"
        note = f"{some_text(lost)} {verb} not come back with --reverse: a part of it is left out"
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(plan, mapping=PlannedFile(path, one_item("mapping", raw), lambda: iter(())))


def _files_of(inputs: Sequence[Source]) -> set[PurePath]:
    return {source.path for source in inputs}


def _refuse_lost_inputs(plan: ConversionPlan) -> None:
    """Refuse an output in the place of some files of a checkpoint of many, worth nothing apart; an
    index, and the `.metadata` of DCP, is worth nothing without the one file that it names.
    """
    inputs = _files_of(plan.inputs)
    if inputs == {plan.source} or plan.target.is_folder:
        return
    paths = {plan.output, *(file.path for file in plan.files), *plan.earlier()}
    if plan.index is not None:
        paths.add(plan.index.path)
    taken = {resolved(path) for path in paths} | paths
    names = {path.name for path in taken}
    lost = [path for path in inputs if path.name in names and resolved(path) in taken]
    if lost and (len(lost) < len(inputs) or resolved(plan.source) not in taken | inputs):
        what = "is one of the input files, and the others need it"
        raise OutputRefused(what, path=min(lost), hint="name another file or folder")


def refuse_taken_over(plan: ConversionPlan, named: Iterable[Named]) -> None:
    """Refuse weights of another content, for which a library looks, in a folder that was `named` as
    a source: it would be read as these from then on.
    """
    if plan.target.is_folder or not is_weights_name(plan.output.name):
        return
    paths = [place.path for each in named for place in places_of(each)]
    folders = (path.parent if path.name.endswith(".index.json") else path for path in paths)
    if any(is_same_place(plan.folder, folder) for folder in folders):
        what = "would be taken for the checkpoint in its folder, which is read here"
        raise OutputRefused(what, path=plan.output, hint="name another folder")


def _plan_tree(
    checkpoint: Checkpoint, output: PurePath, to: TargetFormat, request: Request, whole: Node
) -> ConversionPlan:
    """An output that holds a tree: all of the checkpoint, or one part; `whole` is the tree before
    the edits that were asked for.
    """
    root = find(checkpoint.root, request.only, checkpoint.path)
    refuse_unheld(to, request)
    to.refuse_part(root, keeps_objects=request.unknown == "keep", only=request.only)
    overlay: dict[int, Node] = {}
    left_out: tuple[Skipped, ...] = ()
    if checkpoint.module_strays:
        from ckptconv.tree.modules import settle_strays  # few checkpoints have modules

        left_out = settle_strays(checkpoint, root, request.unknown)
    names = _rename_tree(checkpoint, root, overlay, request, whole)
    for each in names.applied:
        if checkpoint.metadata:
            _refuse_without_names(checkpoint.metadata, each, to)
        refuse_codes_apart(each)
    settled = settle_objects(root, overlay, request.unknown)
    refs = settled.tensors
    if not refs and not settled.storages:
        raise AmbiguousStateDict(
            "holds no tensors, so there is nothing to convert", where=request.only
        )
    tree = Tree(root, overlay, refs, settled.storages)
    tensors = partial(tensors_of, root, overlay, depth=in_force().depth)
    if any(ref.dtype.is_packed for ref in refs):
        to.refuse((path, ref, ref.dtype) for path, ref in tensors())
    cast = cast_rule(names.applied, tree, request.casts)
    files = (
        _files_of_folder(tree, output, to, cast, request)
        if to.is_folder and not to.is_made_by_torch
        else (PlannedFile(output, to.lay_out_tree(tree, cast, request.tags), tensors),)
    )
    storages = storages_of(refs)
    locations = count_locations(storages, request.tags)
    renamed = names.renamed
    if request.casts:
        both = zip(names.applied, renamed, strict=True)
        renamed = tuple(still_shared(each, done, cast) for each, done in both)
    return ConversionPlan(
        source=checkpoint.path,
        source_format=checkpoint.format,
        source_nbytes=checkpoint.nbytes,
        output=output,
        to=to.name,
        files=files,
        index=None,
        in_folder=False,
        state_dicts=renamed,
        locations=locations,
        casts=count_casts(refs, cast),
        tied={},
        skipped=(*names.skipped, *settled.dropped, *left_out),
        rewritten=tuple(settled.rewritten),
        notes=(
            *checkpoint.notes,
            *tree_notes(settled),
            *key_notes(renamed, request.keys),
            *names.notes,
            *prefix_notes(checkpoint, names.found, request.keys, request.fit_to),
            *tied_notes(names.applied, request.fit_to),
            *idle_tag_notes(locations, request.tags),
            *random_state_notes(tensors, request.tags),
            *sharing_notes(refs, storages),
            *(parted_notes(names.renamed, renamed) if request.casts else ()),
            *to.part_notes(tree),
        ),
        reads=PlannedFrom(checkpoint, root, tensors, cast, settled.checks),
    )


class _Renamed(NamedTuple):
    """The state dicts of a tree: as they were `found`, with what the rules made of their keys
    (`applied`), and under their new names; values that were left out; notes about optimizers.
    """

    found: Sequence[StateDict] = ()
    applied: Sequence[Applied] = ()
    renamed: tuple[RenamedKeys, ...] = ()
    skipped: Sequence[Skipped] = ()
    notes: Sequence[str] = ()


def _rename_tree(
    checkpoint: Checkpoint, root: Node, overlay: dict[int, Node], request: Request, whole: Node
) -> _Renamed:
    """Put state dicts under their new names into the overlay. The names in an optimizer follow the
    keys of its model, also where that stays out of the output.
    """
    is_optimizer = request.only is not None and _is_optimizer(checkpoint.root, root)
    part, only = (checkpoint.root, None) if is_optimizer else (root, request.only)
    found = find_state_dicts(part, checkpoint.root, only)
    applied, renamed, skipped = rename_state_dicts(
        found, overlay, request.keys, checkpoint, request.fit_to
    )
    notes: Sequence[str] = ()
    if not any(map(is_all, found)):  # an optimizer's state may be beside them
        before = _before(checkpoint, found, only, whole)
        after = list(zip(found, renamed, strict=True))
        new_names = _followed(part, overlay, before, after)
        notes = list(optimizer_notes(part, overlay, before, after, new_names))
    if is_optimizer:
        return _Renamed(notes=notes)
    return _Renamed(found, applied, renamed, skipped, notes)


def _refuse_without_names(metadata: Mapping[str, str], applied: Applied, to: TargetFormat) -> None:
    from ckptconv.keys.naming_metadata import followed, refuse_without  # safetensors alone have any

    if not applied.keeps_names:
        metadata = followed(metadata, applied.names())
    refuse_without(metadata, f"a {to.name} output")


def _is_optimizer(root: Node, part: Node) -> bool:
    from ckptconv.tree.optimizer_states import is_optimizer_state  # 3 ms, seldom needed

    return is_optimizer_state(root, part)


def _followed(
    root: Node,
    overlay: dict[int, Node],
    before: list[StateDict],
    after: list[tuple[StateDict, RenamedKeys]],
) -> Sequence[RenamedStates]:
    """What became of the names in optimizer states, which are put into the overlay."""
    if not any(done.changed or done.made for _, done in after):
        return ()
    from ckptconv.tree.optimizer_names import follow_names  # 4 ms, seldom needed

    return follow_names(root, overlay, before, after)


def _files_of_folder(
    tree: Tree, output: PurePath, to: TargetFormat, cast: CastRule, request: Request
) -> tuple[PlannedFile, ...]:
    depth = in_force().depth
    return tuple(
        PlannedFile(
            output / name,
            layout,
            partial(tensors_of, part.root, part.overlay, depth=depth) if part else _no_tensors,
        )
        for name, part, layout in to.lay_out_files(tree, cast, request.tags)
    )


def _no_tensors() -> Iterator[tuple[str, TensorRef]]:
    return iter(())


def _before(
    checkpoint: Checkpoint, found: list[StateDict], only: str | None, whole: Node
) -> list[StateDict]:
    """The state dicts before anything was dropped."""
    if whole is checkpoint.root:
        return found
    return find_state_dicts(find(whole, only, checkpoint.path), whole, only)
