"""Makes the page about a checkpoint, or about two, and puts it in its place: its head in Python,
the data for what its script shows.

Every text that comes from a checkpoint goes through `escaped`; the script gets it as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any

from ckptconv import __version__
from ckptconv.diff.checkpoints import compare
from ckptconv.diff.report import (
    HEAD,
    Difference,
    difference_headline,
    difference_rows,
    difference_table,
)
from ckptconv.formats.registry import Named, open_certain
from ckptconv.inspect.report import inspection_lines
from ckptconv.io.files import one_run, refuse_inputs
from ckptconv.io.location import Location
from ckptconv.io.outputs import check_place_free, write_file
from ckptconv.io.places import Output, place_of
from ckptconv.keys.key_map import rules_of
from ckptconv.objects.threats import Level
from ckptconv.pages.columns import data_text, shown_name
from ckptconv.pages.facts import STATES, FileFacts, PageFacts, Shared, file_facts, pairs_of
from ckptconv.pages.html import asset, escaped, filled, page, script, tiles, verdict
from ckptconv.pages.profile import profile_section
from ckptconv.pages.treemap import map_svg
from ckptconv.support.choices import (
    refuse_no_flag,
    refuse_no_output,
    refuse_no_paths,
    refuse_no_text,
    spelling_checked,
)
from ckptconv.support.errors import printable
from ckptconv.support.progress import OnProgress
from ckptconv.support.records import dataclass
from ckptconv.support.report import Fields, Row, short_repr
from ckptconv.support.settings import collector_paused
from ckptconv.support.text import count_text, first_few, size_text, some_text
from ckptconv.tree.checkpoint import Edit
from ckptconv.values.named import named_values, values_in

_LISTED = 40  # storages in the list


def page_text(facts: PageFacts) -> str:
    """The whole page; the same facts make the same text."""
    data = f'<script type="application/json" id="data">{data_text(facts)}</script>\n'
    run = f"<script>{script()}</script>\n"
    title = " → ".join(map(_short, facts.files))
    return page(title, (*_body(facts), data, run), looks=asset("page.css"), code=script())


def _short(file: FileFacts) -> str:
    """The name of a file without the folders around it."""
    return Path(file.name).name or file.name


def _body(facts: PageFacts) -> Iterator[str]:
    sided = [*zip(facts.sides, facts.files, strict=True)]
    yield '<header class="page">\n'
    if facts.difference is not None:
        yield from _comparison(facts, facts.difference)
        yield '<div class="files">\n'
    for side, file in sided:
        yield from _file(file, side)
    if facts.difference is not None:
        yield "</div>\n"
    yield "</header>\n<main>\n"
    yield _map(facts)
    yield profile_section(facts)
    yield filled("table.html", noun="Tensors" if facts.difference is None else "Keys")
    for side, file in sided:
        yield _sharing(file, side)
    yield "</main>\n"
    yield f"<footer>Made by ckptconv {__version__}. Nothing in the checkpoint was run.</footer>\n"
    yield asset("floating.html")


# ----------------------------------------------------------------------------------------- the head


def _file(file: FileFacts, side: str) -> Iterator[str]:
    found = file.inspection
    heading, mark = "h1", ""
    if side:
        heading, mark = "h2", f'<span class="side">{side}</span>'
    short = _short(file)
    facts = [found.format]
    if found.producer:
        facts.append(f"written by {found.producer}")
    if short != file.name:
        facts.append(file.name)
    yield f'<div class="file">\n<{heading}>{mark}<bdi>{escaped(short)}</bdi></{heading}>\n'
    yield f'<p class="subtitle">{escaped(" · ".join(facts))}</p>\n'
    yield from _verdicts(file)
    yield from _tiles(file)
    if file.command is not None:
        yield (
            f'<div class="command"><span>Fix</span><code>{escaped(file.command, 20_000)}</code>'
            '<button type="button" class="copy">Copy</button></div>\n'
        )
    yield from _details([*inspection_lines(found), *file.scan.rows])
    yield "</div>\n"


def _verdicts(file: FileFacts) -> Iterator[str]:
    found = file.inspection
    yield '<ul class="verdicts" aria-label="Verdicts">\n'
    if found.portable:
        yield verdict("good", f"✓ opens anywhere as it is ({found.opening.by})")
    for reason in found.reasons:
        yield verdict("warn", f"not portable: {reason.what}")
    if file.no_fix:
        yield verdict("bad", f"no conversion fixes it: {file.no_fix}")
    if file.lost:
        yield verdict("warn", f"the fix leaves out {some_text([*file.lost])}")
    text = file.scan.text.removeprefix(f"{printable(file.name)}: ")
    level, mark = _MARKS[file.scan.level]
    yield verdict(level, mark + text)
    if file.unread:
        counted, names = count_text(len(file.unread), "tensor"), some_text([*file.unread])
        yield verdict("warn", f"not shown below: {counted} whose numbers are not known ({names})")
    known = [item.statistics for item in file.tensors if item.statistics is not None]
    odd = sum(1 for one in known if one.nan or one.infinite)
    if odd:
        yield verdict("warn", f"{count_text(odd, 'tensor')} with NaN or infinite values")
    yield "</ul>\n"


_MARKS: dict[Level | None, tuple[str, str]] = {
    "plain": ("good", "✓ scan: "),
    "unknown": ("warn", "scan: "),
    "dangerous": ("bad", "✗ scan: "),
    None: ("warn", "not scanned: "),
}


def _tiles(file: FileFacts) -> Iterator[str]:
    found = file.inspection
    counted = "Parameters"
    of = f"in {file.parameters_of}"
    if file.parameters_of is None:
        counted, of = "Values", "in all tensors; which of them are the model is not certain"
    if file.parameters_of == "":
        of = "in the state dict"
    shown: list[tuple[str, ...]] = [
        ("Size", size_text(found.nbytes), f"{found.nbytes:,} bytes"),
        (counted, _amount(file.parameters), f"{file.parameters:,} {of}"),
        ("Tensors", f"{len(file.tensors):,}", f"{size_text(found.used)} of values"),
        ("Dtypes", *_most(found.dtypes)),
        ("Saved on", *_most(found.locations)),
    ]
    if found.stored > found.used or found.dead:
        unused = size_text(found.stored - found.used + found.dead)
        shown.append(("Dead bytes", unused, "that no tensor uses"))
    yield from tiles(shown)


def _amount(count: int) -> str:
    """A number of parameters as people say it.

    >>> _amount(950), _amount(124_439_808), _amount(6_738_415_616)
    ('950', '124.4 M', '6.7 B')
    """
    for power, unit in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        if count >= 9995 * 10 ** (power - 4):
            return f"{count / 10**power:.1f} {unit}"
    return str(count)


def _most(counted: Mapping[str, int]) -> tuple[str, str]:
    """The most common of several, and the others with their counts."""
    pairs = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    if not pairs:
        return "–", ""
    counts = [f"{name} {count:,}" for name, count in pairs]
    return pairs[0][0], first_few(counts, 4)


def _details(rows: Iterable[Row]) -> Iterator[str]:
    yield '<details class="more"><summary>All facts</summary>\n<dl class="facts">\n'
    for row in rows:
        yield f'<dt>{escaped(row.label)}</dt><dd class="{row.level}">{escaped(row.text)}</dd>\n'
    yield "</dl></details>\n"


def _comparison(facts: PageFacts, found: Difference) -> Iterator[str]:
    names = [f"<bdi>{escaped(_short(file))}</bdi>" for file in facts.files]
    yield f"<h1>{names[0]} → {names[1]}</h1>\n"
    yield f'<p class="subtitle">{escaped(difference_headline(found), 4000)}</p>\n'
    yield '<ul class="verdicts" aria-label="Differences">\n'
    states = [pair.state for pair in facts.pairs]
    for state in STATES:
        count = states.count(state)
        if count:
            level = "good" if state == "same" else "warn"
            yield verdict(level, f"{count_text(count, 'tensor')}: {state}")
    for text in found.damaged[:_LISTED]:
        yield verdict("bad", f"damaged: {text}")
    yield "</ul>\n"
    keys = (Row(row[0], _told(row)) for row in difference_table(found).rows)
    yield from _details([*keys, *difference_rows(found)])


def _told(row: tuple[str, ...]) -> str:
    """What differs of a key, and by how much, in one line."""
    named = zip(HEAD[2:], row[2:], strict=False)
    return ", ".join([*row[1:2], *(f"{name} {cell}" for name, cell in named if cell != "-")])


# ------------------------------------------------------------------------------------- the sections

_COLORINGS = (("dtype", "dtype"), ("device", "device"), ("sharing", "sharing"))
_OF_VALUES = (
    ("std", "std"),
    ("absMax", "abs-max"),
    ("zeros", "share of zeros"),
    ("finite", "NaN and infinite"),
)
_OF_PAIRS = (("relL2", "relative L2"), ("state", "difference"))


def _map(facts: PageFacts) -> str:
    is_pair = facts.difference is not None
    offered = [*_COLORINGS]
    if facts.difference is not None:
        # where none has a distance, what is shown first is the state
        offered[:0] = _OF_PAIRS if facts.difference.values else reversed(_OF_PAIRS)
    if facts.has_values:
        offered += _OF_VALUES
    options = "".join(f'<option value="{key}">{label}</option>' for key, label in offered)
    maps = ""
    for place, (side, file) in enumerate(zip(facts.sides, facts.files, strict=True)):
        title = side and f"<h3>{side}</h3>"
        drawn = map_svg([shown_name(item.name) for item in file.tensors], file.tensors)
        maps += f'<div>{title}<div class="mapbox" id="map-{place}">{drawn}</div></div>\n'
    return filled("map.html", options=options, kind=" two" if is_pair else "", maps=maps)


def _sharing(file: FileFacts, side: str) -> str:
    if not file.shared:
        return ""
    unused, more = sum(item.nbytes - item.used for item in file.shared), ""
    told = "all bytes are used"
    if unused:
        told = f"{size_text(unused)} of them belong to no tensor"
    if len(file.shared) > _LISTED:
        more = f'<p class="note">and {len(file.shared) - _LISTED:,} more</p>\n'
    return filled(
        "sharing.html",
        of=side and f" of {side}",
        told=f"{count_text(len(file.shared), 'storage')}; {told}",
        rows="".join(_storage(file, item) for item in file.shared[:_LISTED]),
        more=more,
    )


_MEMBERS = 8  # names in a row


def _storage(file: FileFacts, item: Shared) -> str:
    names = [
        f"<bdi>{escape(shown_name(file.tensors[at].name))}</bdi>" for at in item.tensors[:_MEMBERS]
    ]
    if len(item.tensors) > _MEMBERS:
        names.append(f"and {len(item.tensors) - _MEMBERS:,} more")
    return (
        f'<tr><td>{"<br>".join(names)}</td><td class="amount">{size_text(item.nbytes)}</td>'
        f'<td class="amount">{size_text(item.nbytes - item.used)}</td></tr>\n'
    )


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
        # an empty part is all of B
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
