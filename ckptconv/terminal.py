"""What a terminal shows: lines and documents, a bar, and an error in one line with its exit code."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptconv.errors import CheckpointError, printable
from ckptconv.platforms import fill_descriptors

if TYPE_CHECKING:
    from ckptconv.plans import ConversionPlan

_PROGRESS_FROM = 100_000_000  # bytes; a smaller copy is done before a bar is read


def fill_closed_streams() -> None:
    """Take the numbers of standard streams that are closed, which a checkpoint would get otherwise, and so what is printed.

    On a standard output that is closed nothing can be printed, which is an error; messages go nowhere.
    """
    fill_descriptors()
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


_PLAIN = {"→": "->", "↔": "<->", "…": "...", "≥": ">=", "─": "-", "│": "|", "├": "|", "└": "`"}
"""How the characters of our own are shown where the encoding lacks them; others are escaped."""


def take_any_text() -> None:
    """Have the standard streams take what their encoding lacks (cp1252, ASCII), and lines end alike on every system."""
    codecs.register_error("ckptconv", _shown_plainly)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="ckptconv", newline="\n")  # type: ignore[union-attr]


def _shown_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(char) or char.encode("ascii", "backslashreplace").decode() for char in lacking), error.end


@contextmanager
def progress_shown(plan: ConversionPlan, *, silent: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar with rate and time left on stderr, for long copies on a terminal only."""
    if silent or plan.nbytes < _PROGRESS_FROM or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(plan.output.name, 40), total=plan.nbytes)
        yield lambda done: progress.update(task, completed=done)


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
