"""What a terminal shows: lines and documents, and an error in one line with its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
        exit_code = 2 if usage else code
        if as_json:
            print_error_json(error, exit_code)
        fail(f"{error}; see ckptconv convert --help" if usage else str(error), exit_code)


def print_error_json(error: CheckpointError, exit_code: int) -> None:
    """The document of an error, with the exit code that goes with it."""
    from ckptconv import report

    print_json(report.error_document(error, exit_code))


def is_json_asked(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for a document, also one that cannot be understood otherwise."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def stop(kind: str, what: str, code: int, *, as_json: bool, hint: str | None = None) -> NoReturn:
    """End the program for a reason that is no checkpoint's, with one line on stderr and, where it is asked for, a document."""
    message = f"{what}; {hint}" if hint else what
    if as_json:
        print_ending_json(kind, what, code, hint=hint)
    fail(message, code)


def print_ending_json(kind: str, what: str, code: int, *, hint: str | None = None) -> None:
    """The document of an end that no command foresaw, unless there is one on stdout already."""
    if _PRINTED:
        return
    facts = {"path": None, "where": None, "what": what, "hint": hint, "exit_code": code}
    with suppress(OSError):  # there may be nobody to read it any more
        print_json({"error": {"kind": kind, "message": f"{what}; {hint}" if hint else what, **facts}})
        sys.stdout.flush()


_PRINTED: list[bool] = []
"""Has an item when a document was printed: there is one for each run."""


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
    """The one document of this run on stdout; see `strict_json`."""
    from ckptconv.strict_json import json_text

    text = json_text(document)
    _PRINTED.append(True)
    click.echo(text)


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
