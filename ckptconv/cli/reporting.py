"""The command that writes a page to look at: report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckptconv.cli.completion import offer_parts
from ckptconv.cli.options import FILE, LIMIT, NEW_FILE, TAG, FileCommand
from ckptconv.cli.progress_display import READING_BOTH, progress_shown
from ckptconv.cli.terminal import errors_shown, print_headline, print_json


@click.command(
    cls=FileCommand,
    short_help="Write a page about a checkpoint, to look at in a browser.",
    epilog="""\b
Examples:
  ckptconv report model.pt -o model.html
  ckptconv report model.safetensors -o model.html --values
  ckptconv report epoch1.pt -o epochs.html --against epoch2.pt --force

Exit code: 0 written, 1 it cannot be opened, is damaged, or cannot be written, 2 wrong usage.""",
)
@click.argument("source", metavar="IN", type=FILE)
@click.option(
    "-o", "--output", metavar="FILE", type=NEW_FILE, required=True, help="The page, an HTML file."
)
@click.option(
    "--values", is_flag=True, help="Read the tensors: statistics, histograms and quantiles."
)
@click.option(
    "--against", metavar="OTHER", type=FILE, help="Compare with this checkpoint, as diff does."
)
@click.option("-f", "--force", is_flag=True, help="Replace a file that exists.")
@click.option(
    "--only",
    metavar="PATH",
    shell_complete=offer_parts,
    help="Tell of one part, such as state_dict or optimizer.",
)
@click.option("--only-against", metavar="PATH", help="The same for OTHER, if it is another part.")
@TAG
@click.option("--tag-against", metavar="TAG", help="The same for OTHER.")
@LIMIT
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def report(source: Path, output: Path, as_json: bool, **given: Any) -> None:
    """Write one HTML file about checkpoint IN: what is in it and whether it is portable and safe, a
    map by bytes, a table to search and sort, shared storages.

    The page loads nothing, from nowhere, and nothing in the checkpoint can run in it.
    """
    from ckptconv.pages import report as told
    from ckptconv.pages.make import report as made

    for name in ("tag_against", "only_against"):
        if given[name] is not None and given["against"] is None:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --against")
    with errors_shown(as_json), progress_shown(READING_BOTH, silent=as_json) as on_progress:
        page = made(source, output, **given, on_progress=on_progress)
    if as_json:
        print_json(told.page_document(page))
    else:
        print_headline(told.page_headline(page))
