"""The command that lists tensors: ls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptconv.cli import terminal
from ckptconv.cli.commands import command, option
from ckptconv.cli.options import FILE, JSON, LIMIT, TAG


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
        is_piped = not sys.stdout.isatty()
        terminal.print_table(listing.listing_lines(found, terminal.width(), is_bare=is_piped))
        terminal.print_notes(found.notes)
