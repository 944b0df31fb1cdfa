"""One checkpoint of several: state dicts put together (`merge`), or their mean (`average`)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Literal

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_conversion, request_of
from ckptconv.convert.targets import check_place
from ckptconv.formats.registry import open_certain
from ckptconv.io.files import one_run
from ckptconv.io.guarded import check_places
from ckptconv.io.open_files import Readable, is_open_file
from ckptconv.io.places import Output, Place, path_of
from ckptconv.keys.key_map import KEEP, STRIP, KeyMap, KeyRules, map_keys
from ckptconv.keys.naming_metadata import followed, naming_entries
from ckptconv.pickles.nodes import Dict, Node, mapping_pairs
from ckptconv.support.choices import (
    refuse_no_callback,
    refuse_no_flag,
    refuse_no_output,
    refuse_no_paths,
    refuse_no_text,
)
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    KeyMismatch,
    OptionRefused,
    RefusedObject,
    printable,
    warn,
)
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, first_few, some_text
from ckptconv.tensors.checksums import Checksums
from ckptconv.tensors.comparison import compare_bytes
from ckptconv.tensors.computed import elementwise
from ckptconv.tensors.operations import can_average
from ckptconv.tensors.refs import TensorObject, TensorRef, view_identity
from ckptconv.tensors.scaled_weights import refuse_mean
from ckptconv.tree.candidates import metadata_of
from ckptconv.tree.checkpoint import Checkpoint, FileFacts
from ckptconv.tree.edits import Edit, edited, refuse_no_edits
from ckptconv.tree.modules import flatten_modules
from ckptconv.tree.state_dicts import StateDict, renamed_state_dict
from ckptconv.tree.walk import label_text

Integers = Literal["same", "first", "last"]
INTEGERS = ("same", "first", "last")


@dataclass(frozen=True, slots=True)
class Part:
    """One of the sources: where it was, the keys that it has in the output, and their values; the
    state dict that these are of, under its new names, and what else the source has.
    """

    path: PurePath
    values: Mapping[str, Node]
    found: StateDict
    renamed: KeyMap
    left_out: tuple[str, ...]


@one_run()
def merge_checkpoints(
    sources: Iterable[Place | Readable],
    output: Output,
    *,
    prefix: Mapping[Any, str] | None = None,
    only: str | None = None,
    edits: Sequence[Edit] = (),
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ConversionResult:
    """Put the state dicts of several checkpoints into one, in their order.

    `prefix` says for a source (as it was named) what is put before its keys; wrappers are stripped
    before. `only` is the part of each, `edits` are made to each first; the other options are those
    of `Options`, but for the rules of keys. A key that two of them have is an error, and nothing is
    written. Raises `CheckpointError`.

    >>> merge_checkpoints(["body.pt", "head.pt"], "model.safetensors",
    ...                   prefix={"head.pt": "head."})  # doctest: +SKIP
    """
    begin = time.perf_counter()
    request = _request(options, only, on_progress, force=force, fsync=fsync, verify=verify)
    with merged_plan(
        sources, output, request, prefix=prefix or {}, only=only, force=force, edits=edits
    ) as plan:
        result = execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        )
        return result.since(begin)


@one_run()
def average_checkpoints(
    sources: Iterable[Place | Readable],
    output: Output,
    *,
    weights: Iterable[float] | None = None,
    integers: Integers = "same",
    only: str | None = None,
    edits: Sequence[Edit] = (),
    force: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> ConversionResult:
    """Write the weighted mean of the state dicts of several checkpoints of one model.

    `weights` are positive (None: all the same). The sum is kept in float64, divided by that of the
    weights, and cast to the type of the tensors. All must have the same keys, dtypes and shapes.
    Integers and bools have no mean: they must be the `same` in all, or are those of the ``first``
    or the ``last``. `edits` are made to each source first. The other
    options are those of `Options`, but for the rules of keys. Raises `CheckpointError`.

    >>> average_checkpoints(["epoch_8.pt", "epoch_9.pt"], "swa.pt",
    ...                     weights=[1, 2])  # doctest: +SKIP
    """
    begin = time.perf_counter()
    request = _request(options, only, on_progress, force=force, fsync=fsync, verify=verify)
    with averaged_plan(
        sources,
        output,
        request,
        weights=weights,
        integers=integers,
        only=only,
        force=force,
        edits=edits,
    ) as plan:
        result = execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        )
        return result.since(begin)


merge, average = merge_checkpoints, average_checkpoints  # the names that they had first


_RULES = ("keys", "rules", "reverse", "preset", "strip_prefix", "rename", "regex", "add_prefix")


def _request(
    options: dict[str, Any], only: object, on_progress: object, **flags: object
) -> Request:
    """What the options stand for, all of them checked."""
    refuse_no_text(only=only)
    refuse_no_flag(**flags)
    refuse_no_callback(on_progress)
    taken = next((name for name in _RULES if name in options), None)
    if taken:
        raise OptionRefused(
            f"{taken} is not an option here", hint="change the keys before, or of the output"
        )
    return request_of(Options(**options))


@contextlib.contextmanager
def merged_plan(
    sources: Iterable[Place | Readable],
    output: Output,
    request: Request,
    *,
    prefix: Mapping[Any, str],
    only: str | None,
    force: bool,
    edits: Sequence[Edit] = (),
) -> Iterator[ConversionPlan]:
    """The plan of a merge; the sources are open within the block."""
    if not isinstance(prefix, Mapping):
        raise OptionRefused(
            f"prefix={prefix!r:.100} is not a dict", hint="write it as prefix={'head.pt': 'head.'}"
        )
    sources = _several(sources)
    prefix = {_spelled(name): text for name, text in prefix.items()}
    names = [_spelled(source) for source in sources]
    unknown = [name for name in prefix if name not in names]
    if unknown:
        raise OptionRefused(
            f"--prefix names {printable(unknown[0])}, which is not one of the sources",
            hint=f"they are: {first_few(names, 5)}",
        )
    _refuse_mapping(request)
    request, edits = _edits_apart(request, edits)
    opening = _opened(sources, output, request, only=only, force=force, edits=edits)
    with opening as (opened, parts):
        values: dict[str, Node] = {}
        owners: dict[str, PurePath] = {}
        for part, named in zip(parts, names, strict=True):
            for key, value in part.values.items():
                new = prefix.get(named, "") + key
                if new in owners:
                    raise KeyConflict(
                        f"{printable(owners[new])} and {printable(part.path)} both have this key",
                        where=new,
                        hint=f"give the keys of one a prefix: --prefix {printable(named)}=NAME.",
                    )
                owners[new], values[new] = part.path, value
        metadata = _metadata(opened, parts, [prefix.get(named, "") for named in names])
        notes = [
            f"{count_text(len(part.values), 'key')} of {part.path} get {prefix[named]} before them"
            for part, named in zip(parts, names, strict=True)
            if prefix.get(named)
        ]
        if any(mapping_pairs(metadata_of(part.found.node)) for part in parts):
            notes.append("the module versions of the sources (_metadata) are not put together")
        combined = _combined(opened, parts, Dict(list(values.items())), notes)
        combined = replace(combined, metadata={**combined.metadata, **metadata})
        plan = plan_conversion(combined, output, _as_they_are(request))
        yield _with_renamed(plan, parts, [prefix.get(named, "") for named in names])


def _with_renamed(
    plan: ConversionPlan, parts: Sequence[Part], prefixes: Sequence[str]
) -> ConversionPlan:
    """The plan, which says of keys what they were in the first of the sources that have them."""
    (written,) = plan.state_dicts
    before: dict[str, str] = {}
    for part, prefix in zip(parts, prefixes, strict=True):
        for old, new in zip(part.renamed.old, part.renamed.new, strict=True):
            if new is not None:
                before.setdefault(prefix + new, old)
    gone = set(written.left_out)
    changed = [(old, new) for new, old in before.items() if old != new and new not in gone]
    return replace(plan, state_dicts=(replace(written, changed=tuple(changed)),))


def _metadata(
    opened: Sequence[Checkpoint], parts: Sequence[Part], prefixes: Sequence[str]
) -> dict[str, str]:
    """What the metadata of the sources say about codes, under the names of the merge."""
    found: dict[str, str] = {}
    for checkpoint, part, prefix in zip(opened, parts, prefixes, strict=True):
        keys = zip(part.renamed.old, part.renamed.new, strict=True)
        names = {old: None if new is None else prefix + new for old, new in keys}
        needed = naming_entries(followed(checkpoint.metadata, names))
        both = found.keys() & needed.keys()
        if both:
            raise KeyConflict(
                "is metadata by which codes are read, in two of the sources",
                path=part.path,
                where=min(both),
                hint="convert them one by one",
            )
        found |= needed
    return found


@contextlib.contextmanager
def averaged_plan(
    sources: Iterable[Place | Readable],
    output: Output,
    request: Request,
    *,
    weights: Iterable[float] | None,
    integers: Integers,
    only: str | None,
    force: bool,
    edits: Sequence[Edit] = (),
) -> Iterator[ConversionPlan]:
    """The plan of a mean; the sources are open within the block."""
    sources = _several(sources)
    numbers = _checked_weights(weights, len(sources))
    if integers not in INTEGERS:
        raise OptionRefused(f"integers={integers!r:.50} is not one of {', '.join(INTEGERS)}")
    _refuse_mapping(request)
    request, edits = _edits_apart(request, edits)
    opening = _opened(sources, output, request, only=only, force=force, edits=edits)
    with opening as (opened, parts):
        for part in parts:
            try:
                refuse_mean(dict(part.found.tensors()))
            except CheckpointError as error:
                raise error.at(path=part.path) from None
        _refuse_other_keys(parts)
        checksums = Checksums()
        known: dict[object, TensorRef] = {}
        values: dict[str, Node] = {}
        for key in parts[0].values:
            refs = [_tensor(part, key) for part in parts]
            _refuse_others(key, refs, parts)
            view = tuple(view_identity(ref) for ref in refs)
            if view not in known:
                known[view] = _mean(key, refs, numbers, integers, parts, checksums)
            values[key] = known[view]
        combined = _combined(opened, parts, _like(parts[0], values))
        plan = plan_conversion(combined, output, _as_they_are(request))
        yield _with_renamed(plan, parts, [""] * len(parts))


def _refuse_mapping(request: Request) -> None:
    if request.save_mapping is not None:
        raise OptionRefused(
            "several checkpoints become one, which a mapping cannot undo",
            hint="leave --save-mapping out",
        )


def _checked_weights(weights: Iterable[float] | None, count: int) -> list[float]:
    """The weights, whose sum is a number."""
    if weights is None:
        return [1.0] * count
    try:
        given = [] if isinstance(weights, str) else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        given = []
    if not given:
        raise OptionRefused(
            f"weights={weights!r:.100} are not numbers", hint="write them as weights=[1, 1, 2]"
        )
    if len(given) != count:
        raise OptionRefused(f"there are {len(given)} weights for {count_text(count, 'checkpoint')}")
    if not all(0 < weight < float("inf") for weight in given):
        raise OptionRefused("a weight is a positive number")
    if sum(given) == float("inf"):
        given = [weight / max(given) for weight in given]
    return given


def _several(sources: Iterable[Place | Readable]) -> list[Place | Readable]:
    """The sources, of which a generator gives each once."""
    if isinstance(sources, (str, bytes, os.PathLike)) or is_open_file(sources):
        raise OptionRefused("sources is one checkpoint", hint="give a list of two or more")
    if not isinstance(sources, Iterable):
        raise OptionRefused(
            f"sources={sources!r:.100} are not checkpoints", hint="give a list of two or more"
        )
    found = [*sources]
    refuse_no_paths("sources", found)
    return found


def _spelled(source: Place | Readable) -> str:
    """How a source was named."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(Path(source))
    return str(path_of(source))


def _edits_apart(request: Request, edits: Sequence[Edit]) -> tuple[Request, Sequence[Edit]]:
    """The request without what is done to each source first, and the edits of each source: codes of
    several are not put together, nor averaged.
    """
    if not request.edits:
        return request, edits
    from ckptconv.tree.dequantizing import Dequantize  # seldom needed

    first = [edit for edit in request.edits if isinstance(edit, Dequantize)]
    rest = tuple(edit for edit in request.edits if not isinstance(edit, Dequantize))
    each = [replace(edit, if_quantized=True) for edit in first]
    return replace(request, edits=rest), (*edits, *each)


@contextlib.contextmanager
def _opened(
    sources: Sequence[Place | Readable],
    output: Output,
    request: Request,
    *,
    only: str | None,
    force: bool,
    edits: Sequence[Edit],
) -> Iterator[tuple[list[Checkpoint], list[Part]]]:
    """The sources, open, and the state dict of each, its keys without wrappers."""
    refuse_no_output(output)
    refuse_no_flag(force=force)
    refuse_no_edits(edits)
    if len(sources) < 2:
        raise OptionRefused(
            "there is only one checkpoint", hint="name two or more, then the output"
        )
    check_place(output, request, force=force)
    with contextlib.ExitStack() as leaving:
        opened: list[Checkpoint] = []
        parts = []
        for source in sources:
            checkpoint = leaving.enter_context(open_certain(source, whole_modules=True))
            check_places(checkpoint.sources)
            checkpoint.refuse_part()
            checkpoint = edited(flatten_modules(checkpoint), edits)
            opened.append(checkpoint)
            found = _state_dict(checkpoint, only)
            keys = map_keys(found.keys, STRIP, found.path, found.telling_keys, found.keys_beside)
            new = [key for key in keys.new if key is not None]
            values = dict(zip(new, found.values, strict=True))
            left_out = tuple(_left_out(checkpoint, found))
            parts.append(Part(checkpoint.path, values, found, keys, left_out))
        yield opened, parts


def _state_dict(checkpoint: Checkpoint, only: str | None) -> StateDict:
    try:
        return checkpoint.state_dict(only)
    except CheckpointError as error:
        if only is not None:
            error.hint = (
                f"--only {printable(only)} is for all of them; take the part out of another one "
                "first: ckptconv convert IN PART --only PATH"
            )
        raise


def _left_out(checkpoint: Checkpoint, found: StateDict) -> Iterator[str]:
    """What a source has beside its state dict."""
    pairs = mapping_pairs(checkpoint.root) or ()
    first = found.path.partition(".")[0]
    if found.path:
        yield from (name for key, _ in pairs if (name := label_text(key)) != first)
    else:
        taken = set(found.keys)
        yield from (name for key, _ in pairs if (name := label_text(key)) not in taken)
    names = {*found.keys}
    needed = naming_entries(checkpoint.metadata)
    yield from (
        f"metadata {name}"
        for name, value in checkpoint.metadata.items()
        if name not in ("format", "device", *needed) and not (name in names and value in names)
    )


def _combined(
    opened: Sequence[Checkpoint],
    parts: Sequence[Part],
    root: Node,
    notes: Sequence[str] = (),
) -> Checkpoint:
    """A checkpoint of the tree `root`, out of several."""
    first = opened[0]
    warn(dict.fromkeys(note for part in parts for note in part.found.notes))
    told: dict[str, list[str]] = {}
    for part in parts:
        if part.renamed.wrappers:
            what = f"{', '.join(part.renamed.wrappers)} is stripped from its keys"
            told.setdefault(what, []).append(part.path.name)
        for note in part.found.notes:
            told.setdefault(note, []).append(part.path.name)
        if part.left_out:
            what = f"only the state dict is taken; left out: {some_text([*part.left_out])}"
            told.setdefault(what, []).append(part.path.name)
    of_parts = [f"{some_text(names)}: {what}" for what, names in told.items()]
    of_sources = dict.fromkeys(note for item in opened for note in item.notes)
    kinds = {item.metadata.get("format", "pt") for item in opened}
    container = replace(
        first.container,
        name=f"{len(opened)} checkpoints",
        names_storages=all(item.container.names_storages for item in opened),
    )
    return replace(
        first,
        path=Path(" + ".join(item.path.name for item in opened)),
        container=container,
        root=root,
        nbytes=sum(item.nbytes for item in opened),
        metadata={"format": kinds.pop()} if len(kinds) == 1 else {},
        notes=(*of_sources, *of_parts, *notes),
        sources=tuple(source for item in opened for source in item.sources),
        facts=FileFacts(),
        index_metadata={},
        modules=0,
        module_strays=(),
        module_parts=(),
        files=(),
        reread=None,
        dropped=tuple(item.root for item in opened),
    )


def _like(part: Part, values: Mapping[str, Node]) -> Node:
    """The state dict of a source under its new names, with other values."""
    kept = [
        values[key] if key is not None else value
        for key, value in zip(part.renamed.new, part.found.values, strict=True)
    ]
    state_dict = replace(part.found, values=tuple(kept))
    return renamed_state_dict(state_dict, part.renamed.new, part.renamed.renamed_modules)


def _as_they_are(request: Request) -> Request:
    """The request with the keys as they are, but for the globs, which choose among them."""
    return replace(request, keys=KeyRules.of(request.keys.globs.rules, KEEP.wrappers))


def _refuse_other_keys(parts: Sequence[Part]) -> None:
    first = parts[0]
    for other in parts[1:]:
        missing = [key for key in first.values if key not in other.values]
        more = [key for key in other.values if key not in first.values]
        if missing or more:
            told = [
                f"lacks {count_text(len(missing), 'key')} of {printable(first.path)} "
                f"({first_few(missing, 3)})" if missing else "",
                f"has {count_text(len(more), 'key')} that it does not have "
                f"({first_few(more, 3)})" if more else "",
            ]  # fmt: skip
            raise KeyMismatch(
                " and ".join(filter(None, told)), path=other.path,
                hint="an average needs checkpoints of one model",
            )  # fmt: skip


def _tensor(part: Part, key: str) -> TensorRef:
    value = part.values[key]
    ref = value.tensor if type(value) is TensorObject else value
    if type(ref) is not TensorRef:
        raise RefusedObject(
            "is not a plain tensor, so it has no mean", path=part.path, where=key,
            hint="leave it out before: ckptconv convert IN OUT --exclude",
        )  # fmt: skip
    return ref


def _refuse_others(key: str, refs: Sequence[TensorRef], parts: Sequence[Part]) -> None:
    first = refs[0]
    for ref, part in zip(refs[1:], parts[1:], strict=True):
        for name, ours, theirs in (
            ("dtype", first.dtype.name, ref.dtype.name),
            ("shape", list(first.shape), list(ref.shape)),
        ):
            if ours != theirs:
                raise KeyMismatch(
                    f"has the {name} {theirs}, but {ours} in {printable(parts[0].path)}",
                    path=part.path, where=key,
                )  # fmt: skip


def _mean(
    key: str,
    refs: Sequence[TensorRef],
    weights: Sequence[float],
    integers: Integers,
    parts: Sequence[Part],
    checksums: Checksums,
) -> TensorRef:
    first = refs[0]
    if can_average(first.dtype):
        name = f"the mean of {first.storage.name}"
        return elementwise("mean", refs, tuple(weights), first.dtype, name, checksums)
    if integers == "same":
        _refuse_unequal(key, refs, parts, checksums)
    return refs[-1 if integers == "last" else 0]


def _refuse_unequal(
    key: str, refs: Sequence[TensorRef], parts: Sequence[Part], checksums: Checksums
) -> None:
    """Refuse values without a mean that are not the same in all."""
    for ref in refs:
        for piece in ref.pieces:
            checksums.read(piece.storage)
    pairs = [(refs[0], ref) for ref in refs[1:]]
    differing = compare_bytes(pairs, Meter("read", 0, None)).differing
    if differing:
        raise KeyMismatch(
            f"{refs[0].dtype.name} has no mean, and its values are others than in "
            f"{printable(parts[0].path)}",
            path=parts[1 + min(differing)].path,
            where=key,
            hint="take those of one: --integers first or --integers last",
        )
