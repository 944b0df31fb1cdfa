"""Edits of a safetensors file in its place: the names of tensors, and the strings beside them.

Only the header is written again, where it fits in the place of the old one; else the whole file is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptconv.convert.given_metadata import read_metadata
from ckptconv.convert.header_edits import ChangedHeader, EditResult, HeaderEdit, changed_header
from ckptconv.convert.options import Options, listed_strings
from ckptconv.devices.tags import check_tag
from ckptconv.formats.hf_names import indexes_naming
from ckptconv.formats.registry import open_by_index
from ckptconv.formats.safetensors import (
    CONTAINER,
    RESERVED,
    entries_seen,
    header_bytes,
    header_text,
    read_header,
)
from ckptconv.io.destination import check_output
from ckptconv.io.hidden_folders import remove_leftovers
from ckptconv.io.in_place import undo_unfinished, write_first_bytes
from ckptconv.io.location import read_start, require
from ckptconv.io.outputs import file_output
from ckptconv.io.places import local_path, place_of
from ckptconv.io.source import CHUNK, Source
from ckptconv.io.staging import folder_held, sync_file
from ckptconv.keys.key_map import Keys
from ckptconv.keys.mappings import MappedKeys
from ckptconv.keys.rule_files import mapping_text
from ckptconv.support.choices import (
    DeviceName,
    Pairs,
    Words,
    listed,
    plain_name,
    refuse_no_flag,
    refuse_no_path,
    refuse_no_text,
    refuse_no_words,
    spelling_checked,
)
from ckptconv.support.errors import (
    OutputRefused,
    UnsupportedCheckpoint,
    VerificationFailed,
    errors_at,
    printable,
)
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.signals import held_back
from ckptconv.support.text import as_argument, quoted, size_text
from ckptconv.tensors.scaled_weights import refuse_apart
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import tensors_of

_ROOM = 1024  # bytes for later edits that a file has at least when it is written again
_PAGE = 4096  # bytes; the data of such a file begin at a multiple of it


@dataclass(frozen=True, slots=True)
class _Plan:
    """An edit that is ready: the open file, what stands before its data, and what will."""

    source: Source
    old: bytes
    changed: ChangedHeader
    head: bytes
    in_place: bool

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.source.size - len(self.old)


@spelling_checked
def edit_checkpoint(
    path: str | os.PathLike[str],
    *,
    metadata: Words | Mapping[str, str] = (),
    metadata_from: str | os.PathLike[str] | None = None,
    remove_metadata: Words = (),
    device: DeviceName | None = None,
    keys: Keys = "keep",
    rules: str | os.PathLike[str] | Sequence[str | os.PathLike[str] | tuple[str, str]] = (),
    reverse: bool = False,
    preset: Words = (),
    strip_prefix: Words = (),
    rename: Pairs = (),
    regex: Pairs = (),
    add_prefix: Words = (),
    save_mapping: str | os.PathLike[str] | None = None,
    rewrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> EditResult:
    """Rename tensors of a safetensors file and set its metadata, in place.

    Only the header is written where the new one fits: in one call, with a journal beside the file
    until the disk has it, so that a kill leaves the old file or the new one. Where it does not fit,
    or with `rewrite`, the whole file is written again with room for later edits, and takes the
    place of the old one. No value changes.

    `metadata` are ``NAME=VALUE`` or a dict, `metadata_from` a file with a JSON object of more,
    `remove_metadata` names. `device` is the tag of all tensors. From `keys` to `add_prefix` the
    options are those of `Options`; a rule that leaves tensors out is refused. `save_mapping` is a
    file that will tell which name became which. Raises `CheckpointError`; the file is as it was
    then.

    >>> edit_checkpoint("model.safetensors", metadata="license=mit",
    ...                 rename="old.=new.")  # doctest: +SKIP
    """
    refuse_no_path(path=path)
    files = {"metadata_from": metadata_from, "save_mapping": save_mapping}
    refuse_no_path(**{name: file for name, file in files.items() if file is not None})
    refuse_no_words(remove_metadata=remove_metadata)
    refuse_no_text(device=plain_name(device))
    words = Options(
        keys=keys,
        rules=rules,
        reverse=reverse,
        preset=preset,
        strip_prefix=strip_prefix,
        rename=rename,
        regex=regex,
        add_prefix=add_prefix,
    )
    asked = HeaderEdit(
        words.request(None).keys,
        given_strings(listed_strings(metadata), metadata_from, plain_name(device)),
        listed(remove_metadata),
    )
    return edit_header(
        path,
        asked,
        save_mapping=save_mapping,
        rewrite=rewrite,
        dry_run=dry_run,
        fsync=fsync,
        verify=verify,
        on_progress=on_progress,
    )


edit = edit_checkpoint  # the name that it had first


def given_strings(
    metadata: tuple[str, ...], file: str | os.PathLike[str] | None, device: str | None
) -> tuple[tuple[str, str], ...]:
    """The strings to set: given ones, those in a file, the device tag."""
    given = read_metadata(metadata, file, may_set=("format",))
    return given if device is None else (*given, ("device", check_tag(device)))


def edit_header(
    named: str | os.PathLike[str],
    asked: HeaderEdit,
    *,
    save_mapping: str | os.PathLike[str] | None = None,
    rewrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    verify: bool = False,
    on_progress: OnProgress | None = None,
) -> EditResult:
    """Make an edit, as `edit` does; an edit that was interrupted before is undone first."""
    begin = time.perf_counter()
    refuse_no_flag(rewrite=rewrite, dry_run=dry_run, fsync=fsync, verify=verify)
    path = local_path(place_of(named), "is edited in place, so it has to be a file on this machine")
    kept = None
    if save_mapping is not None:
        kept = local_path(place_of(save_mapping), "is a mapping of an edit, which is written here")
    _refuse_link(path)
    undone = not dry_run and undo_unfinished(path, fsync=fsync)
    with errors_at(path=path), open_by_index(path) as checkpoint:
        plan = _planned(checkpoint, asked, path, rewrite=rewrite)
        mapping = _mapping(plan, kept)
        result = replace(_result_of(plan, path), undone=undone, mapping=kept)
        if not dry_run and plan.changed.is_change:
            _write(plan, path, mapping, fsync=fsync, verify=verify, tell=on_progress)
            if verify:
                result = replace(result, verified=result.tensors)
    return replace(result, seconds=time.perf_counter() - begin)


def _result_of(plan: _Plan, path: Path) -> EditResult:
    """What is told of an edit; of one that changes nothing, that nothing is to be written."""
    changed = plan.changed
    tensors = len(changed.header.keys() - {RESERVED})
    made = EditResult(
        path, plan.nbytes, tensors, changed.renamed, changed.metadata, changed.removed
    )
    if not changed.is_change:
        return made
    return replace(made, in_place=plan.in_place, grown=plan.nbytes - plan.source.size)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        what = f"is a link to {printable(path.readlink())}, which others may use too"
        hint = "name that file itself, or copy it first: cp -L"
        raise OutputRefused(what, path=path, hint=hint)
    if path.is_dir():
        hint = "name one file of it, or make a new folder with: ckptconv convert IN OUT"
        raise OutputRefused("is a folder", path=path, hint=hint)
    if not path.exists():
        require(place_of(path))


def _planned(checkpoint: Checkpoint, asked: HeaderEdit, path: Path, *, rewrite: bool) -> _Plan:
    if checkpoint.container is not CONTAINER or len(checkpoint.sources) != 1:
        what = f"is {checkpoint.format}, and only safetensors files are edited in place"
        hint = f"make a new file with: ckptconv convert {quoted(as_argument(path))} OUT"
        raise UnsupportedCheckpoint(what, path=path, hint=hint)
    (source,) = checkpoint.sources
    header, start = read_header(source)
    changed = changed_header(header, asked)
    if changed.renamed:
        _refuse_index(path)
        before = dict(tensors_of(checkpoint.root))
        refuse_apart(before, {changed.names[key]: before[key] for key in before})
    text = header_text(changed.header)
    # a file of several names is written again: who uses another name has the old one
    fits = 8 + len(text) <= start and not rewrite and path.stat().st_nlink == 1
    nbytes = start if fits else -(-(8 + len(text) + _ROOM) // _PAGE) * _PAGE
    return _Plan(source, source.read(0, start), changed, header_bytes(text, nbytes), fits)


def _refuse_index(path: Path) -> None:
    for index in indexes_naming(place_of(path)):
        what = f"is a shard, whose tensors {printable(index.name)} names too"
        hint = "rename them in all shards with: ckptconv convert FOLDER NEW_FOLDER"
        raise OutputRefused(what, path=path, hint=hint)


def _write(
    plan: _Plan,
    path: Path,
    mapping: _Mapping | None,
    *,
    fsync: bool,
    verify: bool,
    tell: OnProgress | None,
) -> None:
    written = False
    try:
        if mapping is not None and not mapping.was_there:
            with held_back():  # whoever made it removes it, and nobody else
                mapping.write()
                written = True
            if fsync:  # here, for without it there is no edit, and so no mapping
                sync_file(mapping.path)
        if plan.in_place:
            _write_in_place(plan, path, fsync=fsync, verify=verify)
        else:
            _write_again(plan, path, fsync=fsync, verify=verify, tell=tell)
    except BaseException:
        # an interrupt may wait until the names are the new ones
        if mapping is not None and written and not _begins_with(path, plan.head):
            mapping.path.unlink(missing_ok=True)
        raise


def _begins_with(path: Path, head: bytes) -> bool:
    with closing(place_of(path).open()) as source:
        return source.size >= len(head) and source.read(0, len(head)) == head


@dataclass(frozen=True, slots=True)
class _Mapping:
    """The file that tells which name became which: it is there before the names change."""

    path: Path
    raw: bytes
    was_there: bool

    def write(self) -> None:
        size = len(self.raw)
        with file_output(place_of(self.path), force=False, fsync=False, size=size) as output:
            with output.draft(self.path.name, size) as draft:
                draft.stream.write(self.raw)
                draft.stream.finish()
                draft.commit()
            output.commit()


def _mapping(plan: _Plan, path: Path | None) -> _Mapping | None:
    """The mapping of an edit, where one is asked for and it renames. One that is there may be of an
    edit that was killed: only that is taken for it.
    """
    if path is None or not plan.changed.renamed:
        return None
    raw = mapping_text([MappedKeys("", plan.changed.names, {})])
    remove_leftovers(path)
    is_same = path.is_file() and read_start(place_of(path), "rules_bytes") == raw
    try:
        check_output(path, force=is_same)
    except OutputRefused as error:
        if path.exists():  # the hint is --force, which an edit does not have
            error.hint = "name another file"
        raise
    return _Mapping(path, raw, is_same)


def _write_in_place(plan: _Plan, path: Path, *, fsync: bool, verify: bool) -> None:
    plan.source.check_unchanged()
    plan.source.close()
    write_first_bytes(path, plan.old, plan.head, fsync=fsync)
    if not verify:
        return
    try:
        _check_header(path, plan.changed.header, path)
    except BaseException:
        write_first_bytes(path, plan.head, plan.old, fsync=fsync)
        raise


def _write_again(
    plan: _Plan, path: Path, *, fsync: bool, verify: bool, tell: OnProgress | None
) -> None:
    source, start = plan.source, len(plan.old)
    meter = Meter("write", plan.nbytes, tell)
    with file_output(
        place_of(path), force=True, fsync=fsync, size=plan.nbytes, replaces=[source]
    ) as output:
        with output.draft(path.name, plan.nbytes, meter.at) as draft:
            draft.stream.write(plan.head)
            draft.stream.copy(source, start, source.size - start)
            draft.stream.finish()
            draft.commit()
        meter.finish()
        made = local_path(draft.place, "can only be edited on this machine")
        _check_header(made, plan.changed.header, path)
        if verify:
            _compare(source, start, made, len(plan.head), path)
        with folder_held(path):  # against other edits
            source.check_unchanged()
            if place_of(path).fingerprint() != source.fingerprint() or not _begins_with(
                path, plan.old
            ):
                raise OutputRefused(
                    "was changed in the meantime", path=path, hint="run the command again"
                )
            output.commit([source])


def _check_header(made: Path, header: Mapping[str, Any], path: Path) -> None:
    """Have the safetensors library read what was written; `path` is its name for the user."""
    metadata, seen = entries_seen(made, path)
    wanted = {
        name: (entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != RESERVED
    }
    if seen != wanted or (metadata or {}) != header.get(RESERVED, {}):
        raise VerificationFailed(
            "the safetensors library does not see the header that was written", path=path
        )


def _compare(source: Source, start: int, made: Path, made_start: int, path: Path) -> None:
    """Hold the data that were written against those of the source."""
    size = source.size - start
    with closing(place_of(made).open()) as written:
        if written.size != made_start + size:
            raise VerificationFailed(f"has {size_text(written.size)}", path=path)
        pairs = zip(
            source.stream([(start, size)]), written.stream([(made_start, size)]), strict=True
        )
        for number, (before, after) in enumerate(pairs):
            if before != after:
                what = f"the written file differs in the {CHUNK} bytes from {number * CHUNK} on"
                hint = "the disk or the memory is failing; the file is unchanged"
                raise VerificationFailed(what, path=path, hint=hint)
