"""The commands that list and look at tensors, and the one that writes a page: ls, stats, show and
report.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.asked import to_look_through
from ckptconv.cli.commands import command, option
from ckptconv.cli.completion import offer_parts
from ckptconv.cli.options import DEQUANTIZE, FILE, JSON, LIMIT, NEW_FILE, TAG
from ckptconv.cli.progress_display import READING, READING_BOTH, progress_shown
from ckptconv.support.errors import printable
from ckptconv.support.text import count_text


@command(
    """
  ckptconv ls model.safetensors
  ckptconv ls model.pt 'layers.0.*' '*.bias'
  ckptconv ls model.pt --sort size | head
  ckptconv ls model.pt --long
  ckptconv ls hf://org/name

Exit code: 0 listed, 1 it cannot be opened, or a GLOB meets no name, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@option("-l --long", "Also show device tags, offsets, files, strides and tied names.")
@option(
    "--sort",
    "Sort by name, as the checkpoint has them, or the largest first.",
    ("name", "order", "size"),
    default="name",
)
@TAG
@LIMIT
@JSON
def ls(
    source: Path, globs: tuple[str, ...], long: bool, sort: Any, tag: str | None, as_json: bool
) -> None:
    """List the tensors of checkpoint IN whose names match a GLOB (all without one), one line each:
    name, dtype, shape, size. Their values are not read.

    Numbers in names are sorted as numbers. On a terminal there is a head, and a sum at the end.
    """
    from ckptconv.inspect import listing

    with terminal.errors_shown(as_json):
        found = listing.list_tensors(source, globs, sort=sort, is_long=long, tag=tag)
    if as_json:
        terminal.print_json(listing.listing_document(found))
    else:
        # piped, a head would be a tensor to diff and grep
        is_piped = not sys.stdout.isatty()
        terminal.print_table(listing.listing_lines(found, terminal.width(), is_bare=is_piped))
        terminal.print_notes(found.notes)


SORTS = ("order", "name", "min", "max", "abs-max", "mean", "std", "zeros", "nan", "size")
_BINS = 64


@command(
    """
  ckptconv stats model.safetensors
  ckptconv stats model.pt --sort abs-max --top 10
  ckptconv stats model.pt --include 'layers.*.weight'
  ckptconv stats model.pt --histogram 'layers.0.*'
  ckptconv stats train.pt --only optimizer --json

Exit code: 0 done, 1 it cannot be opened or is damaged, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@option(
    "--only PATH",
    "Look at one part, such as state_dict or optimizer.",
    shell_complete=offer_parts,
    section="Parts",
)
@option(
    "--include GLOB",
    "Only tensors whose names match. Repeatable.",
    multiple=True,
    section="Keys",
    once="--match",
)
@option(
    "--sort",
    "Sort by this, the largest first (name: A to Z; nan: infinite ones too).",
    SORTS,
    default="order",
)
@option("--top COUNT", "Show only the first N.", click.IntRange(min=1))
@option(
    "--histogram GLOB",
    "Draw histogram and quantiles of the tensors whose names match. Repeatable.",
    multiple=True,
)
@DEQUANTIZE
@TAG
@LIMIT
@JSON
def stats(
    source: Path,
    sort: Any,
    top: int | None,
    histogram: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Show smallest, largest, mean, standard deviation, zeros, NaN and infinite values of every
    tensor of checkpoint IN, of any format.

    Each byte is read once, and checked against the checksums in the file. NaN and infinite values
    are counted, and left out of all other figures. std divides by n - 1. Quantized values are
    decoded; complex ones count by their magnitude. Quantiles are exact for types of at most 16
    bits, otherwise off by at most 0.4 %.
    """
    from ckptconv.values import collect as report

    if histogram and given["include"]:
        raise click.UsageError(
            "--histogram and --include both choose tensors; leave one of them out"
        )
    given["include"] = histogram or given["include"]
    given["edits"] = to_look_through(given.pop("dequantize"))
    given["distributions"] = as_json or bool(histogram)
    with terminal.errors_shown(as_json), progress_shown(READING, silent=as_json) as on_progress:
        found = report.stats_checkpoint(source, **given, on_progress=on_progress)
    shown = report.in_order(found, sort, top)
    width = terminal.width()
    if as_json:
        terminal.print_json(
            report.statistics_document(found, shown, bins=_BINS if histogram else 0)
        )
    elif histogram:
        for item in shown:
            terminal.print_table(report.histogram_lines(item, width))
    else:
        terminal.print_table(report.statistics_lines(found, shown, width, sort))
    if not as_json:
        terminal.print_notes(found.notes)


@command(
    """
  ckptconv show model.pt layers.0.weight
  ckptconv show model.pt layers.0.weight '[0:3, :5]'
  ckptconv show model.safetensors lm_head.weight '[-1]' --npy row.npy
  ckptconv show model.pt embed.weight '[:100]' lm_head.weight --npz both.npz

Exit code: 0 done, 1 it cannot be opened, or has no such tensor, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("names", metavar="TENSOR [INDICES] ...", nargs=-1)
@option("--npy FILE", "Write the values to a .npy file instead.", NEW_FILE, section="Output")
@option(
    "--npz FILE",
    "Write the values of several tensors to a .npz archive, under their names.",
    NEW_FILE,
    section="Output",
)
@option("-f --force", "Replace the file of --npy or --npz if it exists.", section="Safety")
@DEQUANTIZE
@TAG
@LIMIT
@JSON
def show(
    source: Path,
    names: tuple[str, ...],
    npy: Path | None,
    npz: Path | None,
    force: bool,
    tag: str | None,
    dequantize: bool,
    as_json: bool,
) -> None:
    """Show the values of TENSOR in checkpoint IN, as numpy prints them; INDICES are those of numpy,
    such as [0:3, :5]. With --npz, there may be several, each followed by its INDICES.

    The end of a name is enough if only one tensor has it. Of a large tensor, only what is shown is
    read; its checksum is checked if all of it is shown. Quantized values are decoded.
    """
    from ckptconv.formats.registry import open_by_index
    from ckptconv.values import collect as report
    from ckptconv.values import picking
    from ckptconv.values.named import named_values

    if not names:
        raise click.UsageError("TENSOR is missing: name one of those that ckptconv ls lists")
    edits = to_look_through(dequantize)
    wanted = _with_indices(names, several=npz is not None)
    if npy is not None and npz is not None:
        raise click.UsageError("--npy and --npz are both given; leave one of them out")
    output = npz or npy
    with (
        terminal.errors_shown(as_json),
        open_by_index(source, tag=tag, edits=edits) as checkpoint,
    ):
        found, chosen = named_values(checkpoint), []
        for name, indices in wanted:
            item = picking.picked(found, name, checkpoint.path)
            # indices that do not fit are wrong usage (2); a name that is not there is an answer (1)
            with terminal.errors_shown(as_json, usage=True):
                chosen.append((item, picking.box_of(indices, item.shape)))
        for item, box in chosen:  # all of them before anything is written
            picking.check_whole(item, box)
        if npz is not None:
            picking.write_npz(chosen, npz, force=force)
        elif npy is not None:
            picking.write_npy(*chosen[0], npy, force=force)
        if as_json:
            terminal.print_json(report.picked_document(checkpoint.path, chosen, output))
        elif output is not None:
            told = [printable(item.name) or "the root" for item, _ in chosen]
            what = told[0] if len(told) == 1 else count_text(len(told), "tensor")
            click.echo(f"{what} → {printable(output)}", err=True)
        else:
            click.secho(report.picked_headline(*chosen[0]), bold=True)
            click.echo(picking.shown_text(*chosen[0]))


def _with_indices(words: tuple[str, ...], *, several: bool) -> list[tuple[str, str]]:
    """The tensors that are named, each with its indices; of `several`, a word in brackets behind a
    name are its indices.
    """
    if not several:
        if len(words) > 2:
            raise click.UsageError(
                "only one tensor can be shown at a time; --npz FILE writes several"
            )
        name, *indices = words
        return [(name, "".join(indices))]
    found: list[tuple[str, str]] = []
    for word in words:
        if found and not found[-1][1] and word.startswith("[") and word.endswith("]"):
            found[-1] = (found[-1][0], word)
        else:
            found.append((word, ""))
    return found


@command(
    """
  ckptconv report model.pt -o model.html
  ckptconv report model.safetensors -o model.html --values
  ckptconv report epoch1.pt -o epochs.html --against epoch2.pt --force

Exit code: 0 written, 1 it cannot be opened, is damaged, or cannot be written, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@option(
    "-o --html FILE",
    "The page to write.",
    NEW_FILE,
    required=True,
    section="Output",
    once="--output",
)
@option("--values", "Read the tensors: statistics, histograms and quantiles.")
@option("--against B", "Compare with checkpoint B, as diff does.", FILE)
@option("-f --force", "Replace a file that exists.", section="Safety")
@option(
    "--only PATH",
    "Report on one part, such as state_dict or optimizer.",
    shell_complete=offer_parts,
    section="Parts",
)
@option(
    "--only-b PATH", "The part of B, if it is another one.", section="Parts", once="--only-against"
)
@TAG
@option("--tag-b STEP", "The same for B.", section="Parts", once="--tag-against")
@LIMIT
@JSON
def report(source: Path, html: Path, as_json: bool, **given: Any) -> None:
    """Write one HTML file about checkpoint IN: what is in it and whether it is portable and safe, a
    map by bytes, a table to search and sort, shared storages.

    The page loads nothing from anywhere, and nothing in the checkpoint can run in it.
    """
    from ckptconv.pages import make as pages

    for name in ("tag_b", "only_b"):
        if given[name] is not None and given["against"] is None:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --against")
    with (
        terminal.errors_shown(as_json),
        progress_shown(READING_BOTH, silent=as_json) as on_progress,
    ):
        page = pages.report_checkpoint(source, html, **given, on_progress=on_progress)
    if as_json:
        terminal.print_json(pages.PAGE.of(page))
    else:
        terminal.print_headline(pages.page_headline(page))
