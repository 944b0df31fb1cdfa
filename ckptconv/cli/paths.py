"""The types of arguments and options that name a file, a folder or a place of another machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptconv.cli.terminal import SILENT, is_asked
from ckptconv.io.places import place_of
from ckptconv.support import platforms
from ckptconv.support.addresses import address_in
from ckptconv.support.errors import CheckpointError, printable

if TYPE_CHECKING:
    from ckptconv.io.location import Location


class _FileName(click.Path):
    """A path that is not empty: an unset variable of a shell is not the current folder.

    `dash` is what ``-`` stands for, given the command that runs (None: a file of that name).
    """

    def __init__(self, dash: Callable[[click.Context], Any] | None = None) -> None:
        super().__init__(path_type=Path)
        self._dash = dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty, so it does not name a file", param, ctx)
        if value == "-" and self._dash is not None and ctx is not None:
            return self._dash(ctx)
        if address_in(value) is not None:
            platforms.share_memory_between_threads()
            # one place for all that the command asks of it; an error comes when it is used
            with suppress(CheckpointError):
                return place_of(value)
            return value
        return super().convert(value, param, ctx)


class _OutputName(_FileName):
    """A path to write to, or ``-`` for standard output; a file of that name is ``./-``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not (isinstance(found, Path) and value.endswith(_SLASHES)):
            return found
        return place_of(value)  # a path forgets the slash, which says that a folder is meant


_SLASHES = tuple(filter(None, (os.sep, os.altsep)))
TO_STDOUT = "ckptconv.stdout"


def _standard_input(ctx: click.Context) -> Location | Path:
    from ckptconv.io.standard_input import StandardInput

    def tell(folder: str) -> None:
        if not is_asked(*SILENT):
            what = f"standard input is a pipe: it is copied to {printable(folder)} first"
            click.echo(f"{what} (TMPDIR chooses another folder)", err=True)

    return Path("-") if ctx.resilient_parsing else StandardInput(tell)


def _standard_output(ctx: click.Context) -> Path:
    ctx.meta[TO_STDOUT] = True
    return Path("-")


def _no_dash(_: click.Context) -> NoReturn:
    raise click.BadParameter("it does not name a file; write ./- for a file of that name")


FILE = _FileName(_standard_input)
OUTPUT = _OutputName(_standard_output)
NEW_FILE = _FileName(_no_dash)
