"""The options that several commands have, and the types of arguments that name a file, a folder or
a place of another machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptconv.cli.commands import F, Option, as_written, option, together
from ckptconv.cli.completion import (
    offer_devices,
    offer_dtypes,
    offer_map_locations,
    offer_parts,
    offer_presets,
    offer_steps,
)
from ckptconv.cli.terminal import SILENT, is_asked
from ckptconv.convert.words import FILES_WRITTEN, OptionWords
from ckptconv.io.places import place_of
from ckptconv.support import platforms
from ckptconv.support.addresses import address_in
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.limits import DEFAULTS, limits

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
            # not in the library, for it is a setting of the whole process
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
    from ckptconv.io.open_files import StandardInput

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

# ------------------------------------------------------------------------------------------ options


# The options that only some commands have; all others belong to every one that converts
_RULES = ("strip_prefix", "add_prefix", "rename", "regex", "preset", "rules", "reverse")
_CHOOSING = ("include", "exclude")
_FITTING = ("like", "model", "drop_unexpected")


def _words(names: Sequence[str], **settings: Any) -> list[Callable[[F], F]]:
    """The options of these names, as `OptionWords` tells of them; `settings` are click's."""
    known = {item.name: item for item in fields(OptionWords)}
    return [_word_of(known[name], **settings) for name in names]


def _word_of(item: Field[Any], **settings: Any) -> Callable[[F], F]:
    kind, told = str(item.type), item.metadata
    taken = told["choices"] or None
    if isinstance(item.default, str):
        settings = {"default": item.default} | settings
    elif any(word in kind for word in ("Words", "Pairs", "Sequence", "Mapping")):
        settings["multiple"] = True
    if taken is None and "PathLike" in kind:
        taken = NEW_FILE if item.name in FILES_WRITTEN else FILE
    return option(
        f"--{as_written(item.name)} {told['metavar']}",
        told["help"],
        taken,
        section=told["section"],
        shell_complete=_OFFERS.get(item.name),
        **settings,
    )


_OFFERS: dict[str, Any] = {
    "device": offer_devices,
    "map_location": offer_map_locations,
    "dtype": offer_dtypes,
    "drop": offer_parts,
    "only": offer_parts,
    "preset": offer_presets,
}


def key_options(default: str) -> Callable[[F], F]:
    """The options of key rules, which apply in the order in which they are given."""
    return together(*_words(["keys"], default=default), *_words(_RULES))


DEQUANTIZE = option(
    "--dequantize",
    "Take the values of quantised weights, under the model's names.",
    section="Values",
)
TAG = option(
    "--tag STEP",
    "The step or variant to read, if IN is a folder of several: step-500, 500, fp16.",
    section="Parts",
    shell_complete=offer_steps,
)
JSON = click.option(
    "--json",
    "as_json",
    cls=Option,
    section="General",
    is_flag=True,
    help="Print one JSON document on stdout.",
)


def _while_it_runs(
    words: str, told: str, during: Callable[[Any], AbstractContextManager[Any]], **settings: Any
) -> Callable[[F], F]:
    """An option that the command does not see: it runs within what `during` makes of the value."""

    def enter(ctx: click.Context, _: click.Parameter, given: Any) -> None:
        if given:
            try:
                ctx.with_resource(during(given))
            except (CheckpointError, TypeError, ValueError) as error:
                raise click.UsageError(str(error)) from None

    settings |= {"section": "General", "expose_value": False, "is_eager": True}
    return option(words, told, callback=enter, **settings)


def _limit(text: str) -> tuple[str, float]:
    """The name and the value of a limit: a count, a size such as 4GiB, or seconds."""
    from ckptconv.support.text import parse_size

    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--limit is NAME=VALUE, not {text}")
    try:
        if type(getattr(DEFAULTS, name, 0)) is float:
            return name, float(value)
        return name, int(value) if value.isascii() and value.isdigit() else parse_size(value)
    except (CheckpointError, ValueError):
        raise ValueError(
            f"--limit {text}: its value is not a number or a size such as 4GiB"
        ) from None


def _allowing_hosts(given: Sequence[str]) -> AbstractContextManager[Any]:
    from ckptconv.io.remote.hosts import allowing_hosts

    return allowing_hosts(",".join(given))


_LIMIT = _while_it_runs(
    "--limit NAME=VALUE",
    "Raise a limit that an error named, as it says.",
    lambda given: limits(**dict(map(_limit, given))),
    multiple=True,
)
_UNPINNED = _while_it_runs(
    "--unpinned",
    "Read a file whose server sends neither an ETag nor a date: it must not change meanwhile.",
    lambda _: limits(unpinned=True),
)
_ALLOW_HOSTS = _while_it_runs(
    "--allow-hosts HOST,...",
    "Hosts of this network that a web server may redirect to, such as store.lan:9000.",
    _allowing_hosts,
    multiple=True,
)


LIMIT = together(_LIMIT, _ALLOW_HOSTS, _UNPINNED)
"""What every command that reads may be allowed."""

choice_options = together(*_words(_CHOOSING))
"""The options that choose among keys, which every command that writes has."""

recovery_options = together(*_words(("to", "only", "unknown")))
"""The options of what becomes of a damaged file."""

fitting_options = together(*_words(_FITTING))
"""The options of what the keys are fitted to."""

_APART = (*_RULES, *_CHOOSING, *_FITTING, *FILES_WRITTEN, "keys")
conversion_options = together(
    *_words([item.name for item in fields(OptionWords) if item.name not in _APART]),
    TAG,
    LIMIT,
    choice_options,
)
"""The options of what becomes of a checkpoint."""

applying_options = together(*_words(["to", "max_shard_size", "with_files", "only"]), TAG, LIMIT)
"""The options of an output whose tensors are given by something else."""

_safe = partial(option, section="Safety")
FORCE = _safe("-f --force", "Replace OUT if it exists.")
NO_FSYNC = _safe("--no-fsync", "Do not wait until the disk has it (fsync).")
QUIET = option("-q --quiet", "Print only errors.", section="General")
ANSWER_ALONE = option("-q --quiet", "Print nothing; only the exit code answers.", section="General")
run_options = together(
    _safe("-f --force", "Replace OUT if it exists. OUT may be IN if one file is all that is read."),
    _safe("-n --dry-run", "Write nothing; say what would be written."),
    _safe(
        "--verify",
        "Read the output back and compare every tensor with IN before OUT is put in place.",
    ),
    _safe(
        "--no-fsync",
        "Do not wait until the disk has it (fsync). OUT is still replaced in one step.",
    ),
    JSON,
    QUIET,
)
"""The options of how outputs are made, and what is printed of them."""


def output_options_of(sources: str) -> Callable[[F], F]:
    """The arguments and options that every command has that writes one checkpoint; `sources` is
    what the help calls what is read.
    """
    return together(
        # `refuse_missing` says what is missing
        click.argument("sources", metavar=sources, type=FILE, nargs=-1),
        click.argument("output", metavar="OUT", type=OUTPUT, required=False),
        conversion_options,
        *_words(FILES_WRITTEN),
        run_options,
    )


output_options = output_options_of("IN...")

_many = partial(option, section="Many")
engine_options = together(
    _many("--jobs N", "Workers at a time (default: one for each core).", click.IntRange(1)),
    _many(
        "--engine",
        "Who works (default: processes, or serial with --jobs 1).",
        ("serial", "processes", "ray"),
    ),
    _many("--address ADDRESS", "With --engine ray: the cluster; auto finds it."),
)
"""The options of who does the work."""
