"""Makes the page about a checkpoint, or about two, and puts it in its place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ckptconv.diff.checkpoints import compare
from ckptconv.diff.report import Difference
from ckptconv.formats.registry import Named, open_certain
from ckptconv.io.files import one_run, refuse_inputs
from ckptconv.io.location import Location
from ckptconv.io.outputs import check_place_free, write_file
from ckptconv.io.places import Output, place_of
from ckptconv.keys.key_map import rules_of
from ckptconv.pages.facts import PageFacts, file_facts, pairs_of
from ckptconv.pages.page import page_text
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_output,
    refuse_no_paths,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import printable
from ckptconv.support.gc_pause import collector_paused
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, short_repr
from ckptconv.support.text import count_text, size_text
from ckptconv.tree.edits import Edit
from ckptconv.values.named import named_values, values_in


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


PAGE = Fields("path bytes=nbytes sources tensors same")
"""The document of a page that was written."""


def page_headline(page: Page) -> str:
    """The line that says what was written."""
    about = ", ".join(printable(name) for name in page.sources)
    verdict = {None: "", True: "; they are the same", False: "; they differ"}[page.same]
    return (
        f"{printable(page.path)}: {size_text(page.nbytes)}, about {about} "
        f"({count_text(page.tensors, 'tensor')}){verdict}"
    )


@one_run()
@spelling_checked
def report_checkpoint(
    source: Named,
    output: Output,
    *,
    values: bool = False,
    against: Named | None = None,
    force: bool = False,
    only: str | None = None,
    only_b: str | None = None,
    tag: str | None = None,
    tag_b: str | None = None,
    on_progress: OnProgress | None = None,
) -> Page:
    """Write a page about the checkpoint `source` to `output`: one HTML file that loads nothing.

    With `values`, the tensors are read for statistics, histograms and quantiles. `against` is
    another checkpoint to compare it with, as `diff_checkpoints` does. `only` and `only_b`
    (None: the same) are the paths of the parts that the page is about. An `output` that exists is
    replaced with `force` only. `tag` and `tag_b` pick the step of a folder of several.
    `on_progress` is called with a `Progress`. Raises `CheckpointError` when a checkpoint cannot be
    read, or the page cannot be written.

    >>> report_checkpoint("model.pt", "model.html", values=True)  # doctest: +SKIP
    """
    refuse_no_output(output)
    refuse_no_flag(values=values, force=force)
    refuse_no_text(only=only, only_b=only_b, tag=tag, tag_b=tag_b)
    if against is not None:
        refuse_no_paths("against", against)
        alike: dict[str, Any] = {"values": values, "force": force, "on_progress": on_progress}
        alike |= {"only": only, "only_b": only_b, "tag": tag, "tag_b": tag_b}
        return report_difference(source, against, output, **alike)[0]
    place = _free_place(output, force)
    with collector_paused(), open_certain(source, tag=tag) as checkpoint:
        refuse_inputs([place.path])  # now, not when all values have been read
        found = named_values(checkpoint, only)
        facts = PageFacts((file_facts(source, checkpoint, found, tag, values, on_progress),))
    return _written(facts, place, force=force)


report = report_checkpoint  # the name that it had first


@one_run()
def report_difference(
    a: Named,
    b: Named,
    output: Output,
    *,
    values: bool = False,
    force: bool = False,
    keys: Any = "keep",
    only: str | None = None,
    only_b: str | None = None,
    tag: str | None = None,
    tag_b: str | None = None,
    edits: Sequence[Edit] = (),
    edits_b: Sequence[Edit] | None = None,
    on_progress: OnProgress | None = None,
    **given: Any,
) -> tuple[Page, Difference]:
    """Write a page about how two checkpoints differ, with the options of `diff_checkpoints`."""
    place = _free_place(output, force)
    rules = rules_of(keys)
    with collector_paused(), ExitStack() as opened:
        both = (
            opened.enter_context(open_certain(a, tag=tag, edits=edits)),
            opened.enter_context(
                open_certain(b, tag=tag_b, edits=edits if edits_b is None else edits_b)
            ),
        )
        refuse_inputs([place.path])
        parts = (only, only if only_b is None else only_b or None)
        found = compare(*both, rules, parts, on_progress=on_progress, **given)
        ours, theirs = (
            file_facts(named, checkpoint, values_in(node), step, values, on_progress)
            for named, checkpoint, node, step in zip(
                (a, b), both, (found.ours, found.theirs), (tag, tag_b), strict=True
            )
        )
        pairs = pairs_of(found.difference, ours.tensors, theirs.tensors)
        facts = PageFacts((ours, theirs), found.difference, pairs)
    return _written(facts, place, force=force), found.difference


def _free_place(output: Output, force: bool) -> Location:
    """The output as a place that may be written, before anything is read."""
    place = place_of(output)
    check_place_free(place, is_folder=False, force=force)
    return place


def _written(facts: PageFacts, place: Location, *, force: bool) -> Page:
    size = write_file(place, page_text(facts).encode(), force=force)
    return Page(
        str(place),
        size,
        tuple(file.name for file in facts.files),
        sum(len(file.tensors) for file in facts.files),
        None if facts.difference is None else facts.difference.same,
    )
