"""Gathers what a page says, from checkpoints that are opened once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath

from ckptconv.convert.prescriptions import Fix, command, workable
from ckptconv.diff.checkpoints import Compared
from ckptconv.formats.registry import Named
from ckptconv.inspect.facts import inspect_checkpoint
from ckptconv.inspect.inspection import Inspection
from ckptconv.io.guarded import check_places
from ckptconv.io.places import path_of
from ckptconv.pages.facts import (
    FileFacts,
    PageFacts,
    PageTensor,
    Verdict,
    free_name,
    page_tensors,
    pairs_of,
    shared_storages,
)
from ckptconv.scan.files import scan_checkpoint
from ckptconv.scan.report import scan_headline, scan_lines
from ckptconv.support.errors import CheckpointError
from ckptconv.support.progress import OnProgress
from ckptconv.tree.checkpoint import Checkpoint
from ckptconv.tree.walk import tensor_of
from ckptconv.values.collect import statistics_of
from ckptconv.values.named import NamedValues, named_values, values_in


def facts_of(
    source: Named,
    checkpoint: Checkpoint,
    *,
    values: bool,
    only: str | None = None,
    tag: str | None = None,
    on_progress: OnProgress | None = None,
) -> PageFacts:
    """What the page about one open checkpoint, or the part `only` of it, says; with `values`, its
    tensors are read.
    """
    found = named_values(checkpoint, only)
    return PageFacts(
        (_file_facts(source, checkpoint, found, values=values, tag=tag, on_progress=on_progress),)
    )


def facts_of_both(
    sources: tuple[Named, Named],
    checkpoints: tuple[Checkpoint, Checkpoint],
    compared: Compared,
    *,
    values: bool = False,
    tags: tuple[str | None, str | None] = (None, None),
    on_progress: OnProgress | None = None,
) -> PageFacts:
    """What the page about two open checkpoints says that were compared."""
    ours, theirs = (
        _file_facts(
            source, checkpoint, values_in(node), values=values, tag=tag, on_progress=on_progress
        )
        for source, checkpoint, node, tag in zip(
            sources, checkpoints, (compared.ours, compared.theirs), tags, strict=True
        )
    )
    pairs = pairs_of(compared.difference, ours.tensors, theirs.tensors)
    return PageFacts((ours, theirs), compared.difference, pairs)


def _file_facts(
    source: Named,
    checkpoint: Checkpoint,
    found: NamedValues,
    *,
    values: bool,
    tag: str | None,
    on_progress: OnProgress | None,
) -> FileFacts:
    check_places(checkpoint.sources)
    paths = _paths(source)
    inspection = inspect_checkpoint(checkpoint)
    text, no_fix, lost = _fix(checkpoint, inspection, paths, tag)
    statistics = (
        [item.statistics for item in statistics_of(found.values, on_progress)] if values else None
    )
    tensors = page_tensors(found.values, statistics)
    of, count = _parameters(checkpoint, found, tensors)
    return FileFacts(
        ", ".join(map(str, paths)),
        inspection,
        _scanned(paths),
        text,
        no_fix,
        lost,
        count,
        of,
        tensors,
        shared_storages([item.ref for item in found.values]),
        found.unread,
    )


def _paths(source: Named) -> list[PurePath]:
    if isinstance(source, (str, os.PathLike)):
        return [path_of(source)]
    return [path_of(path) for path in source]


def _parameters(
    checkpoint: Checkpoint, found: NamedValues, tensors: Sequence[PageTensor]
) -> tuple[str | None, int]:
    """The path of the state dict that is the model, and the numbers in it; where there is not one,
    None and the numbers of all tensors.
    """
    try:
        model = checkpoint.state_dict()
    except CheckpointError:
        return None, _numel(tensors)
    refs = {id(ref) for value in model.values if (ref := tensor_of(value)) is not None}
    if len(refs) < len({id(value) for value in model.values}):  # some are made of several
        return model.path, _numel(page_tensors(values_in(list(model.values)).values))
    firsts = {
        at if item.same_as is None else item.same_as: item.numel
        for at, (value, item) in enumerate(zip(found.values, tensors, strict=True))
        if id(value.ref) in refs
    }
    return model.path, sum(firsts.values())


def _numel(tensors: Sequence[PageTensor]) -> int:
    return sum(item.numel for item in tensors if item.same_as is None)


def _fix(
    checkpoint: Checkpoint, found: Inspection, paths: Sequence[PurePath], tag: str | None
) -> tuple[str | None, str | None, tuple[str, ...]]:
    """The command that makes it portable, why none does, and what that leaves out."""
    if found.portable:
        return None, None, ()
    fix = workable(Fix(tag=tag), checkpoint)
    if isinstance(fix, CheckpointError):
        return None, str(fix), ()
    output = free_name(paths[0], fix.fix.suffix or ".pt")
    return command(fix.fix, paths, output), None, fix.lost


def _scanned(paths: Sequence[PurePath]) -> Verdict:
    """The worst verdict on the files."""
    verdicts = []
    for path in paths:
        try:
            scan = scan_checkpoint(path)
        except CheckpointError as error:
            verdicts.append(Verdict(None, str(error)))
            continue
        verdicts.append(Verdict(scan.level, scan_headline(scan), tuple(scan_lines(scan))))
    order = ("plain", "unknown", None, "dangerous")
    return max(verdicts, key=lambda item: order.index(item.level))
