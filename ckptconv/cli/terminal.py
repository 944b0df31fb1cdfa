"""What a terminal shows: lines and documents, and an error in one line with its exit code."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptconv.support import platforms
from ckptconv.support.errors import CheckpointError
from ckptconv.support.platforms import fill_descriptors
from ckptconv.support.progress import Meter
from ckptconv.support.report import Level, Row, error_document, note_rows
from ckptconv.support.table import wrapped

if TYPE_CHECKING:
    from ckptconv.io.remote.traffic import Traffic


def fill_closed_streams() -> None:
    """Take the numbers of standard streams that are closed, which a checkpoint would get otherwise,
    and so what is printed.

    On a standard output that is closed nothing can be printed, which is an error; messages go
    nowhere.
    """
    fill_descriptors()
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


# how the characters of our own are shown where the encoding lacks them; others are escaped
_PLAIN = {"→": "->", "↔": "<->", "…": "...", "≥": ">=", "─": "-", "│": "|", "├": "|", "└": "`"}


def take_any_text() -> None:
    """Have the standard streams take what their encoding lacks (cp1252, ASCII), and lines end alike
    on every system.
    """
    codecs.register_error("ckptconv", _shown_plainly)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="ckptconv", newline="\n")  # type: ignore[union-attr]


def _shown_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(
        _PLAIN.get(char) or char.encode("ascii", "backslashreplace").decode() for char in lacking
    ), error.end


@contextmanager
def errors_shown(as_json: bool, usage: bool = False, code: int = 1) -> Iterator[None]:
    """Turn a checkpoint error into one line on stderr (and a JSON document where one was asked for)
    and an exit code: `code`, or 2 where the command line is at fault, as no missing file is.
    """
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        if usage and not isinstance(error, OSError):
            code = 2
            message = f"{error}; see {click.get_current_context().command_path} --help"
        if as_json:
            print_json(error_document(error, code))
        fail(message, code)


def traffic_told() -> Traffic | None:
    """What went over the network, if anything did; the module is imported by who uses it."""
    counted = sys.modules.get("ckptconv.io.remote.traffic")
    if counted is None:
        return None
    now: Traffic = counted.traffic()
    if _BEFORE:
        now = now.since(_BEFORE[0])
    return now or None


# what had gone over the network when the command began, where anything had
_BEFORE: list[Traffic] = []


def begin_traffic() -> None:
    """A command begins: what went over the network before is not its own."""
    _BEFORE.clear()
    counted = sys.modules.get("ckptconv.io.remote.traffic")
    if counted is not None:
        _BEFORE.append(counted.traffic())


def tell_traffic() -> None:
    """A line on stderr about what went over the network, at the end of a command."""
    told = traffic_told()
    if told is not None:
        with suppress(OSError):
            click.echo(f"network: {told}", err=True)


def is_asked(*words: str) -> bool:
    """Whether the command line has one of some options, also one that cannot be understood."""
    given = sys.argv[1:]
    options = given[: given.index("--")] if "--" in given else given
    return not set(words).isdisjoint(options)


SILENT = ("--json", "-q", "--quiet")
"""The options of who wants nothing but the answer."""


def stop(kind: str, what: str, code: int, *, hint: str | None = None) -> NoReturn:
    """End the program for a reason that is not a checkpoint's, with a line on stderr and, if asked
    for, a document.
    """
    print_ending_json(kind, what, code, hint=hint)
    fail(_hinted(what, hint), code)


def _hinted(what: str, hint: str | None) -> str:
    return f"{what}; {hint}" if hint else what


def print_ending_json(kind: str, what: str, code: int, *, hint: str | None = None) -> None:
    """The document, if one was asked for, of an end that no command foresaw, unless there is one on
    stdout already.
    """
    if _PRINTED or not is_asked("--json"):
        return
    facts = {"path": None, "where": None, "what": what, "hint": hint, "exit_code": code}
    with suppress(OSError):  # there may be nobody to read it any more
        print_json({"error": {"kind": kind, "message": _hinted(what, hint), **facts}})
        sys.stdout.flush()


# has an item when a document was printed: there is one for each run
_PRINTED: list[bool] = []


def colors() -> bool | None:
    """False where the user wants none (https://no-color.org), True where they are wanted everywhere
    (https://force-color.org); else a terminal gets them, and a pipe or a file does not.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or None


def fail(message: str, code: int) -> NoReturn:
    """End the program with one line on stderr."""
    show_error(message)
    sys.exit(code)


def show_error(message: str) -> None:
    """One line on stderr; on a terminal as many as it takes."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=colors())
    click.echo(_wrapped(message, len("error: "), len("error: "), err=True), err=True)


class Unprinted(Exception):
    """Standard output does not take what is printed; not an `OSError`, which would be taken for one
    of a file's.
    """


def stop_unprinted(error: Unprinted | OSError, code: int) -> NoReturn:
    """End the program where its output cannot be printed: in one line, or without where its reader
    has left (``| head``).
    """
    cause = error.__cause__ if isinstance(error, Unprinted) else error
    assert isinstance(cause, OSError)
    with contextlib.suppress(OSError):
        if cause.errno != errno.EPIPE:
            show_error(f"cannot print the result: {cause.strerror}")
        sys.stderr.flush()
    os._exit(code)  # the interpreter's own last flush would fail once more


def print_json(document: dict[str, Any]) -> None:
    """The one document of this run on stdout; see `json_pieces`."""
    from ckptconv.support.json_text import json_pieces

    _PRINTED.append(True)
    told = traffic_told()
    if told is not None:
        document = {**document, "network": asdict(told)}
    for piece in json_pieces(document):
        click.echo(piece, nl=False)
    click.echo()


def print_summary(headline: str, rows: Iterable[Row]) -> None:
    """What was done, or would be, on stderr."""
    print_headline(headline, err=True)
    print_lines(rows, err=True)


def print_headline(
    text: str,
    *,
    fg: str | None = None,
    bold: bool | None = True,
    is_command: bool = False,
    err: bool = False,
) -> None:
    """The line that says it all; a command is not broken."""
    shown = text if is_command else _wrapped(text, 0, 2, err=err)
    click.secho(shown, fg=fg, bold=bold, err=err)


def print_verdict(text: str, *, good: bool, otherwise: str = "yellow") -> None:
    """A headline that is an answer: green where that is good."""
    print_headline(text, fg="green" if good else otherwise)


def width(*, err: bool = False) -> int:
    """The columns of the terminal; what is piped is not made to fit one."""
    stream = sys.stderr if err else sys.stdout
    return _size().columns if stream.isatty() else _ENDLESS


def _size() -> os.terminal_size:
    from shutil import get_terminal_size  # it takes 3 ms to import, and a pipe asks nothing

    return get_terminal_size()


_ENDLESS = 1_000_000


def print_table(rows: Iterable[Row], *, indent: str = "") -> None:
    """The texts of rows that are broken into lines already, each in the colour of its level."""
    for _, alike in groupby(rows, key=attrgetter("level")):
        while some := [*islice(alike, 1000)]:  # in one go: there may be 100,000
            bold = some[0].level == "heading" or None  # False is a code of its own
            text = "\n".join(indent + row.text for row in some)
            click.secho(text, bold=bold, fg=_COLORS[some[0].level])


_COLORS: dict[Level, str | None] = {
    "plain": None,
    "heading": None,
    "good": "green",
    "warning": "yellow",
    "error": "red",
}


def print_lines(rows: Iterable[Row], err: bool = False) -> None:
    """Labels and texts in two columns; on a terminal a long text goes on under its own column.

    A command is not broken: a shell would run the half of one.
    """
    listed = list(rows)
    width = max((len(row.label) for row in listed), default=0)
    for row in listed:
        label = click.style(row.label.ljust(width), fg=_COLORS[row.level] or "cyan")
        shown = row.text if row.is_command else _wrapped(row.text, width + 4, width + 4, err=err)
        click.echo(f"  {label}  {shown}", err=err)


def print_notes(notes: Iterable[str]) -> None:
    """Notes on what was shown, on stderr: a pipe takes the answer alone."""
    print_lines(note_rows(notes), err=True)


def print_rows(rows: Iterable[str]) -> None:
    """Rows of a table on stderr, somewhat to the right."""
    for row in rows:
        click.echo("  " + _wrapped(row, 2, 6, err=True), err=True)


_NARROWEST = 30  # columns for a text, below which it is not worth the breaks


def _wrapped(text: str, first: int, indent: int, *, err: bool) -> str:
    """A text behind `first` columns, its further lines behind `indent`; as it is where no terminal
    shows it.
    """
    room = width(err=err)
    if room == _ENDLESS or room - indent < _NARROWEST:
        return text
    return "\n".join(wrapped(text, room, " " * indent, " " * first))[first:]


# ---------------------------------------------------------------------------------- standard output


@contextmanager
def spooled() -> Iterator[Path]:
    """Where an output is made that is to go to standard output, and of which nothing is printed
    before it is whole.
    """
    from ckptconv.io.hidden_folders import temporary_folder

    with temporary_folder() as folder:
        try:
            yield folder / "output"
        except CheckpointError as error:
            if error.path is not None and Path(error.path).parent == folder:
                error.path = "standard output"
                place = platforms.temporary_folder()
                error.hint = (
                    f"it is made in {place} first, and printed when complete; set TMPDIR to use "
                    "another folder"
                )
            raise


def copy_to_stdout(path: Path, meter: Meter) -> None:
    """Print the bytes of a file; `Unprinted` where standard output does not take them all."""
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            try:
                sys.stdout.buffer.write(buffer[:count])
                sys.stdout.buffer.flush()
            except OSError as error:
                raise Unprinted from error
            meter.add(count)


# -------------------------------------------------------------------------------------------- pages


def show_page(text: str) -> None:
    """A page of Markdown: as it is where it is piped; else rendered, and in a pager where it does
    not fit the terminal.
    """
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    width, height = _size()
    console = Console(force_terminal=True, width=min(width, 110))
    with console.capture() as captured:
        # the names of files in links lead nowhere from here
        typed = re.sub(r"(!?)\[([^][]+)\]\(([^)\s]+)\)", _link_in_words, text)
        console.print(Markdown(typed, hyperlinks=False))
    shown = captured.get()
    if shown.count("\n") < height:
        click.echo(shown, nl=False)
    else:
        click.echo_via_pager(shown)


def _link_in_words(link: re.Match[str]) -> str:
    """What is shown for a link of a page, in Markdown: for another page the command that shows it;
    an address stays, and is written out.
    """
    is_image, words, target = link.groups()
    page = target.partition("#")[0]
    if is_image:
        return ""
    if "://" in target:
        return link[0]
    if not page or "/" in page:  # on this page, or none of those that are shown
        return str(words)
    command = f"`ckptconv help {page.removesuffix('.md')}`"
    return command if words == page else f"{words} ({command})"
