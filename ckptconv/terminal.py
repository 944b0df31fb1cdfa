"""What a terminal shows: lines and documents, and an error in one line with its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from ckptconv.errors import CheckpointError


def fill_closed_streams() -> None:
    """Take the numbers of standard streams that are closed, which a checkpoint would get otherwise, and so what is printed.

    On a standard output that is closed nothing can be printed, which is an error; messages go nowhere.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@contextmanager
def errors_shown(as_json: bool, usage: bool = False, code: int = 1) -> Iterator[None]:
    """Turn a checkpoint error into one line on stderr (and a JSON document where one was asked for) and an exit code: `code`,
    or 2 where the command line is at fault."""
    try:
        yield
    except CheckpointError as error:
        from ckptconv import report

        if as_json:
            print_json(report.error_document(error))
        fail(f"{error}; see ckptconv convert --help" if usage else str(error), 2 if usage else code)


def colors() -> bool | None:
    """False where the user wants none (https://no-color.org); else a terminal gets them, and what is none does not."""
    return False if os.environ.get("NO_COLOR") else None


def fail(message: str, code: int) -> NoReturn:
    """End the program with one line on stderr."""
    show_error(message)
    sys.exit(code)


def show_error(message: str) -> None:
    """One line on stderr."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=colors())
    click.echo(message, err=True)


def print_json(document: dict[str, Any]) -> None:
    """A document on stdout, in ASCII."""
    import json

    click.echo(json.dumps(document, indent=2))


def print_summary(headline: str, lines: Iterable[tuple[str, str]]) -> None:
    """What was done, or would be, on stderr."""
    click.secho(headline, bold=True, err=True)
    print_lines(lines, err=True)


def print_lines(lines: Iterable[tuple[str, str]], err: bool = False) -> None:
    """(label, text) lines in two columns."""
    rows = list(lines)
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        color = "yellow" if label in ("warning", "note") else "red" if label in ("error", "damaged") else "cyan"
        click.echo("  " + click.style(label.ljust(width), fg=color) + "  " + text, err=err)


def show_page(text: str) -> None:
    """A page of Markdown: as it is where it is piped; else rendered, and in a pager where it does not fit the terminal."""
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    import shutil

    from rich.console import Console
    from rich.markdown import Markdown

    width, height = shutil.get_terminal_size()
    console = Console(force_terminal=True, width=min(width, 110))
    with console.capture() as captured:
        console.print(Markdown(text))
    shown = captured.get()
    if shown.count("\n") < height:
        click.echo(shown, nl=False)
    else:
        click.echo_via_pager(shown)
