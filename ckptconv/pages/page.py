"""The page as HTML: its head in Python, the data for what its script shows.

Every text that comes from a checkpoint goes through `escaped`; the script gets it as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from ckptconv import __version__
from ckptconv.diff.report import (
    HEAD,
    Difference,
    difference_headline,
    difference_rows,
    difference_table,
)
from ckptconv.inspect.report import inspection_lines
from ckptconv.objects.threats import Level
from ckptconv.pages.columns import data_text, shown_name
from ckptconv.pages.facts import STATES, FileFacts, PageFacts, Shared
from ckptconv.pages.html import asset, escaped, filled, page, script, tiles, verdict
from ckptconv.pages.profile import profile_section
from ckptconv.pages.treemap import map_svg
from ckptconv.support.errors import printable
from ckptconv.support.report import Row
from ckptconv.support.text import count_text, size_text, some_text

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
    sides: tuple[str | None, ...] = ("A", "B") if facts.difference is not None else (None,)
    yield '<header class="page">\n'
    if facts.difference is not None:
        yield from _comparison(facts, facts.difference)
        yield '<div class="files">\n'
    for side, file in zip(sides, facts.files, strict=True):
        yield from _file(file, side)
    if facts.difference is not None:
        yield "</div>\n"
    yield "</header>\n<main>\n"
    yield _map(facts)
    yield profile_section(facts)
    yield filled("table.html", noun="Tensors" if facts.difference is None else "Keys")
    for side, file in zip(sides, facts.files, strict=True):
        yield _sharing(file, side)
    yield "</main>\n"
    yield f"<footer>Made by ckptconv {__version__}. Nothing in the checkpoint was run.</footer>\n"
    yield asset("floating.html")


# ----------------------------------------------------------------------------------------- the head


def _file(file: FileFacts, side: str | None) -> Iterator[str]:
    found = file.inspection
    heading = "h1" if side is None else "h2"
    mark = f'<span class="side">{side}</span>' if side else ""
    short = _short(file)
    facts = [found.format]
    facts += [f"written by {found.producer}"] if found.producer else []
    facts += [file.name] if short != file.name else []
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
    if odd := sum(1 for one in known if one.nan or one.infinite):
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
    more = ", ".join(f"{printable(name)} {count:,}" for name, count in pairs[:4])
    return pairs[0][0], f"{more}, …" if len(pairs) > 4 else more


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
        if count := states.count(state):
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
    offered = [*_OF_PAIRS, *_COLORINGS] if is_pair else [*_COLORINGS]
    if facts.difference is not None and not facts.difference.values:
        offered[:2] = offered[1::-1]  # none has a distance: what is shown first is the state
    if facts.has_values:
        offered += _OF_VALUES
    options = "".join(f'<option value="{key}">{label}</option>' for key, label in offered)
    maps = ""
    for place, file in enumerate(facts.files):
        title = f"<h3>{'AB'[place]}</h3>" if is_pair else ""
        drawn = map_svg([shown_name(item.name) for item in file.tensors], file.tensors)
        maps += f'<div>{title}<div class="mapbox" id="map-{place}">{drawn}</div></div>\n'
    return filled("map.html", options=options, kind=" two" if is_pair else "", maps=maps)


def _sharing(file: FileFacts, side: str | None) -> str:
    if not file.shared:
        return ""
    unused, more = sum(item.nbytes - item.used for item in file.shared), ""
    told = f"{size_text(unused)} of them belong to no tensor" if unused else "all bytes are used"
    if len(file.shared) > _LISTED:
        more = f'<p class="note">and {len(file.shared) - _LISTED:,} more</p>\n'
    return filled(
        "sharing.html",
        of=f" of {side}" if side else "",
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
