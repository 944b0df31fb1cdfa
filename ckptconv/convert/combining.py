"""One checkpoint of several: their state dicts side by side, and `merge`, which is just that."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from ckptconv.convert.execute import ConversionResult, execute_plan
from ckptconv.convert.options import Options, Request
from ckptconv.convert.plan import ConversionPlan
from ckptconv.convert.planner import plan_conversion, refuse_taken_over, request_of
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
)
from ckptconv.support.errors import (
    CheckpointError,
    KeyConflict,
    OptionRefused,
    printable,
    warn,
)
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.text import count_text, first_few, some_text
from ckptconv.tree.candidates import metadata_of
from ckptconv.tree.checkpoint import Checkpoint, Edit, edited, refuse_no_edits
from ckptconv.tree.modules import flatten_modules
from ckptconv.tree.state_dicts import StateDict
from ckptconv.tree.walk import label_text


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
    refuse_no_flag(force=force, fsync=fsync, verify=verify)
    refuse_no_callback(on_progress)
    request = request_of_all(options, only)
    planned = merged_plan(sources, output, request, prefix=prefix or {}, force=force, edits=edits)
    with planned as plan:
        return execute_plan(
            plan, force=force, fsync=fsync, verify=verify, on_progress=on_progress
        ).since(begin)


merge = merge_checkpoints  # the name that it had first

_RULES = ("keys", "rules", "reverse", "preset", "strip_prefix", "rename", "regex", "add_prefix")


def request_of_all(options: dict[str, Any], only: str | None) -> Request:
    """What the options stand for that all sources have in common, all of them checked."""
    taken = next((name for name in _RULES if name in options), None)
    if taken:
        raise OptionRefused(
            f"{taken} is not an option here", hint="change the keys before, or of the output"
        )
    return request_of(Options(only=only, **options))


@contextlib.contextmanager
def merged_plan(
    sources: Iterable[Place | Readable],
    output: Output,
    request: Request,
    *,
    prefix: Mapping[Any, str],
    force: bool,
    edits: Sequence[Edit] = (),
) -> Iterator[ConversionPlan]:
    """The plan of a merge; the sources are open within the block."""
    sources = several(sources)
    names = [_spelled(source) for source in sources]
    prefixes = _prefixes(prefix, names)
    with opened_parts(sources, output, request, force=force, edits=edits) as (parts, common):
        values: dict[str, Node] = {}
        owners: dict[str, PurePath] = {}
        for part, named, before in zip(parts, names, prefixes, strict=True):
            for key, value in part.values.items():
                new = before + key
                if new in owners:
                    both = f"{printable(owners[new])} and {printable(part.path)}"
                    hint = f"give the keys of one a prefix: --prefix {printable(named)}=NAME."
                    if owners[new] == part.path:  # a prefix is for both then
                        hint = "name each checkpoint once"
                    raise KeyConflict(f"{both} both have this key", where=new, hint=hint)
                owners[new], values[new] = part.path, value
        notes = [
            f"{count_text(len(part.values), 'key')} of {part.path} get {before} before them"
            for part, before in zip(parts, prefixes, strict=True)
            if before
        ]
        if any(mapping_pairs(metadata_of(part.found.node)) for part in parts):
            notes.append("the module versions of the sources (_metadata) are not put together")
        combined = combined_checkpoint(
            parts, Dict(list(values.items())), notes, _metadata(parts, prefixes)
        )
        plan = plan_conversion(combined, output, common)
        refuse_taken_over(plan, sources)
        yield with_renamed(plan, parts, prefixes)


def _prefixes(prefix: Mapping[Any, str], names: Sequence[str]) -> list[str]:
    """What is put before the keys of each source."""
    if not isinstance(prefix, Mapping):
        raise OptionRefused(
            f"prefix={prefix!r:.100} is not a dict", hint="write it as prefix={'head.pt': 'head.'}"
        )
    known: dict[str, str] = {}
    for name, text in prefix.items():
        if _spelled(name) in known:  # a text and a Path, or ./a.pt and a.pt
            raise OptionRefused(f"--prefix names {printable(_spelled(name))} twice")
        known[_spelled(name)] = text
    unknown = [name for name in known if name not in names]
    if unknown:
        raise OptionRefused(
            f"--prefix names {printable(unknown[0])}, which is not one of the sources",
            hint=f"they are: {first_few(names, 5)}",
        )
    return [known.get(name, "") for name in names]


def _metadata(parts: Sequence[SourcePart], prefixes: Sequence[str]) -> dict[str, str]:
    """What the metadata of the sources say about codes, under the names of the merge."""
    found: dict[str, str] = {}
    for part, prefix in zip(parts, prefixes, strict=True):
        names: dict[str, str | None] = dict.fromkeys(part.renamed.old)
        names |= {old: prefix + new for old, new in part.names()}
        needed = naming_entries(followed(part.checkpoint.metadata, names))
        both = found.keys() & needed.keys()
        if both:
            what = "is metadata by which codes are read, in two of the sources"
            hint = "convert them one by one"
            raise KeyConflict(what, path=part.path, where=min(both), hint=hint)
        found |= needed
    return found


# -------------------------------------------------------------------------------- several sources


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One of the sources, open: the keys that it has in the output, and their values; the state
    dict that these are of, what became of its keys, and what else the source has.
    """

    checkpoint: Checkpoint
    values: Mapping[str, Node]
    found: StateDict
    renamed: KeyMap
    left_out: tuple[str, ...]

    @property
    def path(self) -> PurePath:
        """Where it is."""
        return self.checkpoint.path

    def names(self) -> Iterator[tuple[str, str]]:
        """The old and the new key of each that stays."""
        pairs = zip(self.renamed.old, self.renamed.new, strict=True)
        yield from ((old, new) for old, new in pairs if new is not None)


def several(sources: Iterable[Place | Readable]) -> list[Place | Readable]:
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


@contextlib.contextmanager
def opened_parts(
    sources: Sequence[Place | Readable],
    output: Output,
    request: Request,
    *,
    force: bool,
    edits: Sequence[Edit],
) -> Iterator[tuple[list[SourcePart], Request]]:
    """The state dict of each source, its keys without wrappers, and what is to be done to that
    which is made of all of them: keys stay as they are, but for the globs, which choose among them.
    """
    if request.save_mapping is not None:
        raise OptionRefused(
            "several checkpoints become one, which a mapping cannot undo",
            hint="leave --save-mapping out",
        )
    refuse_no_output(output)
    refuse_no_flag(force=force)
    refuse_no_edits(edits)
    if len(sources) < 2:
        raise OptionRefused(
            "there is only one checkpoint", hint="name two or more, then the output"
        )
    check_place(output, request, force=force)
    first, rest = _edits_apart(request.edits)
    keys = KeyRules.of(request.keys.globs.rules, KEEP.wrappers)
    with contextlib.ExitStack() as leaving:
        parts = []
        for source in sources:
            checkpoint = leaving.enter_context(open_certain(source, whole_modules=True))
            check_places(checkpoint.sources)
            checkpoint.refuse_part()
            parts.append(_part(edited(flatten_modules(checkpoint), (*edits, *first)), request.only))
        yield parts, replace(request, only=None, keys=keys, edits=rest)


def _edits_apart(edits: tuple[Edit, ...]) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
    """What is done to each source, and what is done to all of them together: codes of several are
    not put together, nor averaged.
    """
    if not edits:
        return (), ()
    from ckptconv.tree.dequantizing import Dequantize  # seldom needed

    # what is not quantised may stand beside what is
    each = [replace(edit, if_quantized=True) for edit in edits if isinstance(edit, Dequantize)]
    return tuple(each), tuple(edit for edit in edits if not isinstance(edit, Dequantize))


def _part(checkpoint: Checkpoint, only: str | None) -> SourcePart:
    try:
        found = checkpoint.state_dict(only)
    except CheckpointError as error:
        if only is not None:
            error.hint = (
                f"--only {printable(only)} is for all of them; take the part out of another one "
                "first: ckptconv convert IN PART --only PATH"
            )
        raise
    keys = map_keys(found.keys, STRIP, found.path, found.telling_keys, found.keys_beside)
    new = [key for key in keys.new if key is not None]
    values = dict(zip(new, found.values, strict=True))
    return SourcePart(checkpoint, values, found, keys, tuple(_left_out(checkpoint, found)))


def _left_out(checkpoint: Checkpoint, found: StateDict) -> Iterator[str]:
    """What a source has beside its state dict."""
    keys = {*found.keys}
    taken = {found.path.partition(".")[0]} if found.path else keys
    names = (label_text(key) for key, _ in mapping_pairs(checkpoint.root) or ())
    yield from (name for name in names if name not in taken)
    needed = naming_entries(checkpoint.metadata)
    yield from (
        f"metadata {name}"
        for name, value in checkpoint.metadata.items()
        # a pair of keys is a second name of a tensor, which the state dict has
        if name not in ("format", "device", *needed) and not (name in keys and value in keys)
    )


def combined_checkpoint(
    parts: Sequence[SourcePart],
    root: Node,
    notes: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A checkpoint of the tree `root`, out of several."""
    opened = [part.checkpoint for part in parts]
    warn(dict.fromkeys(note for part in parts for note in part.found.notes))
    kinds = {item.metadata.get("format", "pt") for item in opened}
    form = {"format": kinds.pop()} if len(kinds) == 1 else {}
    # made anew, for what else is known of the first source is not true of all of them
    return Checkpoint(
        path=Path(" + ".join(item.path.name for item in opened)),
        container=replace(
            opened[0].container,
            name=f"{len(opened)} checkpoints",
            names_storages=all(item.container.names_storages for item in opened),
        ),
        root=root,
        nbytes=sum(item.nbytes for item in opened),
        metadata={**form, **(metadata or {})},
        notes=(
            *dict.fromkeys(note for item in opened for note in item.notes),
            *_told_of(parts),
            *notes,
        ),
        sources=tuple(source for item in opened for source in item.sources),
        limits=opened[0].limits,
        # --verify counts what all the files name, and finds here what the state dicts are not
        dropped=tuple(node for item in opened for node in (item.root, *item.dropped)),
    )


def _told_of(parts: Sequence[SourcePart]) -> Iterator[str]:
    """What is to be said of the sources, the same of several in one note."""
    told: dict[str, list[str]] = {}
    for part in parts:
        notes = [*part.found.notes]
        if part.renamed.wrappers:
            notes.insert(0, f"{'.'.join(part.renamed.wrappers)}. is stripped from its keys")
        if part.left_out:
            left = some_text([*part.left_out])
            notes.append(f"only the state dict is taken; left out: {left}")
        for note in notes:
            told.setdefault(note, []).append(part.path.name)
    yield from (f"{some_text(names)}: {what}" for what, names in told.items())


def with_renamed(
    plan: ConversionPlan, parts: Sequence[SourcePart], prefixes: Sequence[str]
) -> ConversionPlan:
    """The plan, which says of keys what they were in the first of the sources that have them."""
    (written,) = plan.state_dicts
    before: dict[str, str] = {}
    for part, prefix in zip(parts, prefixes, strict=True):
        for old, new in part.names():
            before.setdefault(prefix + new, old)
    gone = set(written.left_out)
    changed = [(old, new) for new, old in before.items() if old != new and new not in gone]
    return replace(plan, state_dicts=(replace(written, changed=tuple(changed)),))
