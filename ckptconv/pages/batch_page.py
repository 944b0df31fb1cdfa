"""A page about a batch: what became of each checkpoint, in one HTML file that loads nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from ckptconv import __version__
from ckptconv.batch.receipts import Receipt
from ckptconv.batch.totals import Totals, totals_headline
from ckptconv.io.outputs import check_place_free, write_file
from ckptconv.io.places import place_of
from ckptconv.pages.html import asset, escaped, page, tiles, verdict
from ckptconv.support.text import seconds_text, size_text


def write_batch_page(totals: Totals, path: str | os.PathLike[str], *, force: bool) -> int:
    """Write the page about a batch to `path`; returns its size in bytes. Raises `OutputRefused`
    where it cannot be written, or is there and `force` is not set.
    """
    place = place_of(path)
    check_place_free(place, is_folder=False, force=force)
    return write_file(place, batch_page_text(totals).encode(), force=force)


def batch_page_text(totals: Totals) -> str:
    """The whole page; the same receipts make the same text."""
    body = (
        *_head(totals),
        "<main>\n",
        *_failures(totals),
        *_table(totals),
        f"</main>\n<footer>Made by ckptconv {__version__}.</footer>\n",
    )
    return page(totals_headline(totals), body, looks=asset("page.css") + asset("batch.css"))


def _head(totals: Totals) -> Iterator[str]:
    yield '<header class="page">\n<h1>Batch of conversions</h1>\n'
    yield f'<p class="subtitle">{escaped(totals_headline(totals))}</p>\n'
    yield '<ul class="verdicts" aria-label="Verdicts">\n'
    yield verdict("good", f"✓ {totals.done + totals.earlier:,} done")
    if totals.failed:
        yield verdict("bad", f"✗ {totals.failed:,} failed")
    if totals.left:
        yield verdict("warn", f"{totals.left:,} not begun, or not ended")
    yield "</ul>\n"
    read, written, tensors = (
        sum(getattr(receipt, name) for receipt in totals.receipts)
        for name in ("source_nbytes", "nbytes", "tensors")
    )
    formats = Counter(receipt.format for receipt in totals.receipts if receipt.format)
    kinds = [f"{count:,} {name}" for name, count in formats.most_common(6)] or ["none"]
    facts: list[tuple[str, ...]] = [
        ("Read", size_text(read)),
        ("Written", size_text(written)),
        ("Tensors", f"{tensors:,}"),
        ("Time", seconds_text(totals.passed())),
        ("Formats", kinds[0], ", ".join(kinds[1:])),
    ]
    yield from tiles(facts)
    yield "</header>\n"


def _failures(totals: Totals) -> Iterator[str]:
    """What failed, by the class of the error."""
    kinds = Counter(receipt.error.kind for receipt in totals.receipts if receipt.error)
    if not kinds:
        return
    yield '<section><h2>Failures</h2>\n<ul class="verdicts">\n'
    for kind, count in kinds.most_common():
        yield verdict("bad", f"{kind}: {count:,}")
    yield "</ul></section>\n"


_COLUMNS = (
    ("Source", ""), ("Output", "less"), ("Format", "less"), ("Size", "number"),
    ("Written", "number"), ("Tensors", "number less"), ("Seconds", "number less"), ("Verdict", ""),
)  # fmt: skip


def _table(totals: Totals) -> Iterator[str]:
    yield '<section><h2>Checkpoints</h2>\n<table class="batch">\n<thead><tr>'
    yield from (f'<th scope="col" class="{kind}">{name}</th>' for name, kind in _COLUMNS)
    yield "</tr></thead>\n<tbody>\n"
    for receipt in sorted(totals.receipts, key=lambda one: one.state == "done"):
        # of what failed nothing is known: its cells are empty, not zero
        sizes = [size_text(n) if n else "" for n in (receipt.source_nbytes, receipt.nbytes)]
        cells = [
            ", ".join(receipt.source), receipt.output, receipt.format, *sizes,
            f"{receipt.tensors:,}" if receipt.tensors else "", f"{receipt.seconds:.2f}",
        ]  # fmt: skip
        yield "<tr>"
        for told, (_, kind) in zip(cells, _COLUMNS, strict=False):
            yield f'<td class="{kind}">{escaped(told)}</td>'
        yield f"<td>{''.join(_told(receipt))}</td></tr>\n"
    yield "</tbody>\n</table></section>\n"


def _told(receipt: Receipt) -> Iterator[str]:
    """The verdict on one job, and its notes."""
    if receipt.error is not None:
        yield f'<span class="bad">✗ {escaped(receipt.error.kind)}</span>'
        yield f'<div class="why">{escaped(receipt.error.message)}</div>'
        return
    words = "done, verified" if receipt.verified is not None else "done"
    yield f'<span class="good">✓ {words}</span>'
    yield from (f'<div class="why">{escaped(note)}</div>' for note in receipt.notes)
