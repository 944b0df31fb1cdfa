"""The commands that look at values: stats, show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptconv.cli.completion import offer_parts
from ckptconv.cli.options import FILE, LIMIT, OUTPUT, TAG, FileCommand
from ckptconv.cli.progress_display import READING, progress_shown
from ckptconv.cli.terminal import errors_shown, print_json, print_table, terminal_width
from ckptconv.support.errors import printable

SORTS = ("order", "name", "min", "max", "abs-max", "mean", "std", "zeros", "nan", "size")
_BINS = 64
_WIDE = 1000  # columns where no terminal cuts names


@click.command(
    cls=FileCommand,
    short_help="Show statistics of the tensors of a checkpoint.",
    epilog="""\b
Examples:
  ckptconv stats model.safetensors
  ckptconv stats model.pt --sort abs-max --top 10
  ckptconv stats model.pt --match 'layers.0.*' --histogram
  ckptconv stats train.pt --only optimizer --json

Exit code: 0 done, 1 it cannot be opened or is damaged, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@click.option(
    "--only",
    metavar="PATH",
    shell_complete=offer_parts,
    help="Look at one part, such as state_dict or optimizer.",
)
@click.option(
    "--match", metavar="GLOB", multiple=True, help="Only tensors whose names match. Repeatable."
)
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="order",
    show_default=True,
    help="Sort by this, the largest first (name: A to Z; nan: infinite ones too).",
)
@click.option("--top", metavar="COUNT", type=click.IntRange(min=1), help="Only the first so many.")
@click.option("--histogram", is_flag=True, help="Draw the histogram and quantiles of each tensor.")
@TAG
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def stats(
    source: Path,
    sort: Any,
    top: int | None,
    histogram: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Show smallest, largest, mean, standard deviation, zeros, NaN and infinite values of every
    tensor of checkpoint IN, of any format.

    Each byte is read once, and held against the checksums in the file. NaN and infinite values are
    counted, and are in no other figure. std divides by n - 1. Quantized values are decoded; complex
    ones count by their magnitude. Quantiles are exact for types of at most 16 bits, else off by at
    most 0.4 % of themselves.
    """
    from ckptconv.values import report
    from ckptconv.values.collect import stats as collected
    from ckptconv.values.facts import in_order

    with errors_shown(as_json), progress_shown(READING, silent=as_json) as on_progress:
        found = collected(source, **given, on_progress=on_progress)
    shown = in_order(found, sort, top)
    width = terminal_width() if sys.stdout.isatty() else _WIDE
    if as_json:
        print_json(report.statistics_document(found, shown, bins=_BINS if histogram else 0))
    elif histogram:
        for item in shown:
            print_table(report.histogram_lines(item, width))
    else:
        print_table(report.statistics_lines(found, shown, width))


@click.command(
    cls=FileCommand,
    short_help="Show the values of one tensor.",
    epilog="""\b
Examples:
  ckptconv show model.pt layers.0.weight
  ckptconv show model.pt layers.0.weight '[0:3, :5]'
  ckptconv show model.safetensors lm_head.weight '[-1]' --npy row.npy

Exit code: 0 done, 1 it cannot be opened, or has no such tensor, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("name", metavar="TENSOR")
@click.argument("indices", metavar="[INDICES]", required=False, default="")
@click.option(
    "--npy", metavar="FILE", type=OUTPUT, help="Write the values to a file of numpy instead."
)
@click.option("-f", "--force", is_flag=True, help="Replace the file of --npy if it exists.")
@TAG
@LIMIT
def show(
    source: Path, name: str, indices: str, npy: Path | None, force: bool, tag: str | None
) -> None:
    """Show the values of TENSOR in checkpoint IN, as numpy prints them; INDICES are those of numpy,
    such as [0:3, :5].

    The end of a name will do where only one tensor has it. Of a large tensor, only what is shown is
    read, and no checksum is looked at then. Quantized values are decoded.
    """
    from ckptconv.formats.registry import open_checkpoint
    from ckptconv.values.named import named_values
    from ckptconv.values.picking import box_of, picked, shown_text
    from ckptconv.values.report import picked_headline

    with errors_shown(False), open_checkpoint(source, tag=tag) as checkpoint:
        item = picked(named_values(checkpoint), name, checkpoint.path)
        with errors_shown(False, usage=True):
            box = box_of(indices, item.shape)
        if npy is not None:
            from ckptconv.values.npy import write_npy

            write_npy(item, box, npy, force=force)
            click.echo(f"{printable(item.name)} → {printable(npy)}", err=True)
            return
        click.secho(picked_headline(item, box), bold=True)
        click.echo(shown_text(item, box))
