"""The statistics of all tensors of a checkpoint, in one pass over its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.guarded import check_places
from ckptconv.support.choices import refuse_no_text, refuse_no_texts, spelling_checked
from ckptconv.support.progress import Meter, OnProgress
from ckptconv.tensors.fold import fold_all
from ckptconv.tensors.refs import TensorRef
from ckptconv.tensors.scaled_weights import codes_note
from ckptconv.tensors.statistics_folder import StatisticsFolder
from ckptconv.tree.edits import Edit
from ckptconv.values.named import NamedValue, named_values
from ckptconv.values.report import CheckpointStatistics, TensorStatistics

_THREADS = min(4, os.cpu_count() or 1)


@spelling_checked
def stats_checkpoint(
    source: Named,
    *,
    only: str | None = None,
    include: str | Sequence[str] = (),
    tag: str | None = None,
    edits: Sequence[Edit] = (),
    on_progress: OnProgress | None = None,
) -> CheckpointStatistics:
    """The statistics of every tensor of the checkpoint `source`, of any container.

    `only` is the path of the part to look at, `include` a glob, or several, over the names of its
    tensors; `tag` picks the step of a folder of several; `edits` are made to the checkpoint first.
    Each byte is read once, by several threads, and held against the checksums that the file
    declares. `on_progress` is called with a `Progress`, one call at a time. Memory is bounded by
    some 100 MB. Raises `CheckpointError` when the checkpoint cannot be read, or is damaged.
    """
    refuse_no_text(only=only)
    include = (include,) if isinstance(include, str) else include
    refuse_no_texts(include=include)
    with open_certain(source, tag=tag, edits=edits) as checkpoint:
        found = named_values(checkpoint, only).matching(include)
        check_places(checkpoint.sources)
        numbers = [item for item in found.values if item.has_numbers]
        others = [item.name for item in found.values if not item.has_numbers]
        known, unread = statistics_of(numbers, on_progress), (*found.unread, *others)
        told = (str(checkpoint.path), checkpoint.format)
        codes = codes_note(dict(item.tensors()) for item in checkpoint.state_dicts())
        notes = (*checkpoint.notes, *([codes] if codes else []))
        return CheckpointStatistics(*told, known, unread, notes)


stats = stats_checkpoint  # the name that it had first


def statistics_of(
    values: Sequence[NamedValue], on_progress: OnProgress | None = None
) -> tuple[TensorStatistics, ...]:
    """The statistics of each of some tensors of an open checkpoint, in their order."""
    # equal views share a pass, but the same bytes may be decoded in different ways
    groups = [[item for item in values if item.decode is None]]
    groups += [[item] for item in values if item.decode is not None]
    folders = {
        id(item): folder
        for items in groups
        for item, folder in zip(items, _folded(items, on_progress), strict=True)
    }
    made = []
    for item in values:
        told = (item.name, item.dtype.name, item.shape, item.ref.nbytes, item.ref.location)
        made.append(TensorStatistics(*told, folders[id(item)].statistics()))
    return tuple(made)


def _folded(items: Sequence[NamedValue], on_progress: OnProgress | None) -> list[StatisticsFolder]:
    """The folder of each of some tensors after a pass over all of them."""
    by_ref = {id(item.read): item for item in items}

    def folders(ref: TensorRef) -> list[StatisticsFolder]:
        one = by_ref[id(ref)]
        numel, bits = one.numel, one.bits
        return [StatisticsFolder(ref.dtype, numel, one.decode, bits=bits, numbers=one.numbers)]

    made = fold_all(
        [item.read for item in items],
        folders,
        lambda nbytes: Meter("read", nbytes, on_progress),
        threads=_THREADS,
    )
    return [folder for [folder] in made]
