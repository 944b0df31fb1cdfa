"""Makes the page about a checkpoint, or about two, and puts it in its place."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ckptconv.diff.checkpoints import compare
from ckptconv.diff.difference import Difference
from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.location import Location
from ckptconv.io.outputs import check_place_free, file_output
from ckptconv.io.places import place_of
from ckptconv.keys.key_map import rules_of
from ckptconv.pages.facts import PageFacts
from ckptconv.pages.gather import facts_of, facts_of_both
from ckptconv.pages.page import page_text
from ckptconv.support.choices import refuse_no_flag, refuse_no_path, spelling_checked
from ckptconv.support.errors import OutputRefused
from ckptconv.support.gc_pause import collector_paused
from ckptconv.support.progress import OnProgress
from ckptconv.support.showing import short_repr
from ckptconv.support.text import count_text, size_text


@dataclass(frozen=True, slots=True, repr=False)
class Page:
    """A page that was written: its `path` and size, the checkpoints that it is about, how many
    tensors they have, and whether they are the same (None: it is about one).
    """

    path: str
    nbytes: int
    sources: tuple[str, ...]
    tensors: int
    same: bool | None = None

    def __repr__(self) -> str:
        return short_repr(
            "Page", self.path, size_text(self.nbytes), count_text(self.tensors, "tensor")
        )


@spelling_checked
def report(
    source: Named,
    output: str | os.PathLike[str],
    *,
    values: bool = False,
    against: Named | None = None,
    force: bool = False,
    only: str | None = None,
    only_against: str | None = None,
    tag: str | None = None,
    tag_against: str | None = None,
    on_progress: OnProgress | None = None,
) -> Page:
    """Write a page about the checkpoint `source` to `output`: one HTML file that loads nothing.

    With `values`, the tensors are read for statistics, histograms and quantiles. `against` is
    another checkpoint to compare it with, as `diff_checkpoints` does. `only` and `only_against`
    (None: the same) are the paths of the parts that the page is about. An `output` that exists is
    replaced with `force` only. `tag` and `tag_against` pick the step of a folder of several.
    `on_progress` is called with a `Progress`. Raises `CheckpointError` when a checkpoint cannot be
    read, or the page cannot be written.

    >>> report("model.pt", "model.html", values=True)  # doctest: +SKIP
    """
    refuse_no_path(output=output)
    refuse_no_flag(values=values, force=force)
    if against is not None:
        page, _ = report_difference(
            source,
            against,
            output,
            values=values,
            force=force,
            only=only,
            only_b=only_against,
            tag=tag,
            tag_b=tag_against,
            on_progress=on_progress,
        )
        return page
    place = _free_place(output, force, source)
    with collector_paused(), open_certain(source, tag=tag) as checkpoint:
        facts = facts_of(
            source, checkpoint, values=values, only=only, tag=tag, on_progress=on_progress
        )
    return _written(facts, place, force=force)


def report_difference(
    a: Named,
    b: Named,
    output: str | os.PathLike[str],
    *,
    values: bool = False,
    force: bool = False,
    keys: Any = "keep",
    only: str | None = None,
    only_b: str | None = None,
    tag: str | None = None,
    tag_b: str | None = None,
    on_progress: OnProgress | None = None,
    **given: Any,
) -> tuple[Page, Difference]:
    """Write a page about how two checkpoints differ, with the options of `diff_checkpoints`."""
    place = _free_place(output, force, a, b)
    rules = rules_of(keys)
    with collector_paused(), ExitStack() as opened:
        both = (
            opened.enter_context(open_certain(a, tag=tag)),
            opened.enter_context(open_certain(b, tag=tag_b)),
        )
        parts = (only, only if only_b is None else only_b or None)
        found = compare(*both, rules, parts, on_progress=on_progress, **given)
        facts = facts_of_both(
            (a, b), both, found, values=values, tags=(tag, tag_b), on_progress=on_progress
        )
    return _written(facts, place, force=force), found.difference


def _free_place(output: str | os.PathLike[str], force: bool, *sources: Named) -> Location:
    """The output as a place that may be written, before anything is read."""
    place = place_of(output)
    for source in sources:
        paths = [source] if isinstance(source, (str, os.PathLike)) else source
        for path in paths:
            if _is_same(place, place_of(path)):
                raise OutputRefused(
                    "is the checkpoint that the page is about", path=place, hint="name another file"
                )
    check_place_free(place, is_folder=False, force=force)
    return place


def _is_same(place: Location, read: Location) -> bool:
    """Whether two places are one file."""
    here, there = place.local(), read.local()
    if here is None or there is None:
        return place == read
    return here.exists() and there.exists() and here.samefile(there)


def _written(facts: PageFacts, place: Location, *, force: bool) -> Page:
    raw = page_text(facts).encode()
    with file_output(place, force=force, fsync=True, size=len(raw)) as output:
        with output.draft(place.name, len(raw)) as draft:
            draft.stream.write(raw)
            draft.commit()
        output.commit()
    return Page(
        str(place),
        len(raw),
        tuple(file.name for file in facts.files),
        sum(len(file.tensors) for file in facts.files),
        None if facts.difference is None else facts.difference.same,
    )
