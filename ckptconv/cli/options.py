"""The options that several commands have, and what they ask of the library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import Field, fields
from pathlib import Path, PurePath
from shlex import quote
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ckptconv.cli.completion import (
    offer_devices,
    offer_dtypes,
    offer_map_locations,
    offer_parts,
    offer_steps,
)
from ckptconv.cli.terminal import SILENT, is_asked
from ckptconv.convert.words import OptionWords
from ckptconv.formats.target_format import target_named
from ckptconv.io.location import Location
from ckptconv.io.places import place_of
from ckptconv.support import platforms
from ckptconv.support.addresses import address_in
from ckptconv.support.choices import KEYS
from ckptconv.support.errors import CheckpointError, OptionRefused, printable
from ckptconv.support.limits import DEFAULTS, limits

if TYPE_CHECKING:
    from ckptconv.convert.options import Options
    from ckptconv.keys.key_map import KeyRules

F = TypeVar("F", bound=Callable[..., Any])


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


class _Command(click.Command):
    """A command whose files are known while a shell completes the value of an option, and which
    knows the order in which its key rules were given, of whichever options.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            if args and args[-1].startswith("-"):
                # it lacks its value, which would be an error that keeps the files from being seen
                args = args[:-1]
            return super().parse_args(ctx, args)
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ruling = {*RULES, *CHOICES} - {"reverse"}
        values = {name: iter(texts) for name, texts in given.items() if name in ruling}
        names = [str(param.name) for param in order if param.name in values]
        ctx.meta[_GIVEN] = [(_word(name), next(values[name])) for name in names]
        return super().parse_args(ctx, args)


def command(
    short_help: str, examples: str, *, name: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """What makes a function a command; `examples` are told below its options, and what follows
    them.
    """
    epilog = f"\b\nExamples:{examples}"
    return click.command(name, cls=_Command, short_help=short_help, epilog=epilog)


_GIVEN = "ckptconv.rules"


def _word(name: str) -> str:
    """An option as it is written, by the name of its parameter."""
    return name.replace("_", "-")


def option(
    words: str, told: str, kind: click.ParamType[Any] | Sequence[str] | None = None, **settings: Any
) -> Callable[[F], F]:
    """An option as the help shows it: its names and what it calls a value (``-o --output FILE``),
    what is told of it, and its type, or the words to choose from. With neither it is a flag.
    """
    names = [word for word in words.split() if word.startswith("-")]
    metavar = " ".join(word for word in words.split() if not word.startswith("-")) or None
    if kind is not None:
        settings["type"] = kind if isinstance(kind, click.ParamType) else click.Choice(kind)
    return click.option(
        *names,
        metavar=metavar,
        help=told,
        # not False: click makes an option of that whose value may be left out
        is_flag=True if metavar is None and kind is None else None,
        show_default="default" in settings,
        **settings,
    )


RULES = ("strip_prefix", "add_prefix", "rename", "regex", "preset", "rules", "reverse")
CHOICES = ("include", "exclude")
FITTING = ("like", "model", "drop_unexpected")
"""The options by the commands that have them; what is in none of these, all that convert."""


def _words(names: Sequence[str], **settings: Any) -> list[Callable[[F], F]]:
    """The options of these names, as `OptionWords` tells of them; `settings` are click's."""
    known = {item.name: item for item in fields(OptionWords)}
    return [_word_of(known[name], **settings) for name in names]


def _word_of(item: Field[Any], **settings: Any) -> Callable[[F], F]:
    kind, told = str(item.type), item.metadata
    settings |= {"help": told["help"], "metavar": told["metavar"]}
    if kind == "bool":
        settings["is_flag"] = True
    elif isinstance(item.default, str):
        settings = {"default": item.default, "show_default": True} | settings
    elif any(word in kind for word in ("Words", "Sequence", "Mapping")):
        settings["multiple"] = True
    if told["choices"]:
        settings["type"] = click.Choice(told["choices"])
    elif "PathLike" in kind:
        settings["type"] = NEW_FILE if item.name == "save_mapping" else FILE
    return click.option(f"--{_word(item.name)}", shell_complete=_OFFERS.get(item.name), **settings)


_OFFERS: dict[str, Any] = {
    "device": offer_devices,
    "map_location": offer_map_locations,
    "dtype": offer_dtypes,
    "drop": offer_parts,
    "only": offer_parts,
}


def _together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options, or arguments, as one; the help shows them in this order."""

    def give(command: F) -> F:
        for each in reversed(options):
            command = each(command)
        return command

    return give


def key_options(default: str) -> Callable[[F], F]:
    """The options of key rules, which apply in the order in which they are given."""
    return _together(*_words(["keys"], default=default), *_words(RULES))


TAG = option(
    "--tag TAG",
    "The step or variant to read, if IN is a folder of several: step-500, 500, fp16.",
    shell_complete=offer_steps,
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


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

    return option(words, told, expose_value=False, is_eager=True, callback=enter, **settings)


def _limit(text: str) -> tuple[str, float]:
    """The name and the value of a limit: a count, a size such as 4GiB, or seconds."""
    from ckptconv.formats.hf_names import parse_size

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
    "Raise a limit that an error named, such as pickle_bytes=4GiB.",
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


LIMIT = _together(_LIMIT, _ALLOW_HOSTS, _UNPINNED)
"""What every command that reads may be allowed."""

choice_options = _together(*_words(CHOICES))
"""The options that choose among keys, which every command that writes has."""

fitting_options = _together(*_words(FITTING))
"""The options of what the keys are fitted to."""

_APART = (*RULES, *CHOICES, *FITTING, "keys", "save_mapping")
conversion_options = _together(
    *_words([item.name for item in fields(OptionWords) if item.name not in _APART]),
    TAG,
    LIMIT,
    choice_options,
)
"""The options of what becomes of a checkpoint."""

run_options = _together(
    option("-f --force", "Replace OUT if it exists. OUT may be IN."),
    option("-n --dry-run", "Write nothing; say what would be written."),
    option(
        "--verify",
        "Read the output back and compare every tensor with IN before OUT is put in place.",
    ),
    option(
        "--no-fsync",
        "Do not wait until the disk has it (fsync). OUT is still replaced in one step.",
    ),
    JSON,
    option("-q --quiet", "Print only errors."),
)
"""The options of how outputs are made, and what is printed of them."""

output_options = _together(
    # `refuse_missing` says what is missing
    click.argument("sources", metavar="IN...", type=FILE, nargs=-1),
    click.argument("output", metavar="OUT", type=OUTPUT, required=False),
    conversion_options,
    *_words(["save_mapping"]),
    run_options,
)
"""The arguments and options that every command has that writes one checkpoint."""

engine_options = _together(
    option("--jobs N", "Workers at a time (default: one for each core).", click.IntRange(1)),
    option(
        "--engine",
        "Who works (default: processes, or serial with --jobs 1).",
        ("serial", "processes", "ray"),
    ),
    option("--address ADDRESS", "With --engine ray: the cluster; auto finds it."),
)
"""The options of who does the work."""


def engine_of_words(given: dict[str, Any], count: int) -> Any:
    """The engine that the command line asks for, for so many pieces of work."""
    from ckptconv.batch.choosing import engine_of

    named = given["engine"]
    if named is None:
        named = "serial" if given["jobs"] == 1 or count < 2 else "processes"
    if given["address"] is not None and named != "ray":
        raise OptionRefused("--address needs --engine ray")
    if named == "ray":
        from ckptconv.batch.on_ray import OnRay

        return OnRay(given["jobs"], given["address"])
    return engine_of(named, given["jobs"])


def refuse_missing(given: dict[str, Any]) -> None:
    """Say which of IN and OUT is missing: of one word alone it is OUT, for somebody has a file and
    wants another.
    """
    sources, output = given["sources"], given["output"]
    if sources and output is not None:
        return
    if output is None:
        raise click.UsageError(
            "IN and OUT are missing: name a checkpoint, and the file that it is to become"
        )
    path = output.path if isinstance(output, Location) else output
    command, name, offer = click.get_current_context().info_name, printable(path), ""
    if path.suffix:
        example = quote(str(_plausible(path, str(command))))
        offer = f", e.g. ckptconv {command} {quote(name)} {example}"
    raise click.UsageError(f"OUT is missing: name the file that {name} is to become{offer}")


def _plausible(source: PurePath, command: str) -> PurePath:
    """A name for what becomes of `source`: in the other format, or in the same one where the keys
    are all that changes.
    """
    if command == "convert":
        return source.with_suffix(".pt" if source.suffix == ".safetensors" else ".safetensors")
    kind = "ddp" if command == "add-module" else "bare"
    return source.with_name(f"{source.stem}-{kind}{source.suffix}")


_NOT_FOR_STDOUT = (
    ("as_json", "--json"),
    ("max_shard_size", "--max-shard-size"),
    ("with_files", "--with-files"),
)


def is_for_stdout(given: dict[str, Any]) -> bool:
    """Whether the output is to go to standard output; `UsageError` where it cannot."""
    if TO_STDOUT not in click.get_current_context().meta:
        return False
    for option, word in _NOT_FOR_STDOUT:
        if given[option]:
            raise click.UsageError(
                f"OUT is -, standard output, which cannot be used with {word}; write ./- for a "
                "file named -"
            )
    if given["to"] is None or target_named(given["to"]).is_folder:
        raise click.UsageError(
            "OUT is -, standard output: add --to torch, --to safetensors or --to npz; write ./- "
            "for a file named -"
        )
    if not given["dry_run"] and sys.stdout.isatty():
        raise click.UsageError(
            "OUT is -, and standard output is a terminal; send it to a file or a program: > FILE"
        )
    return True


def key_rules(wrappers: Any, *, reverse: bool = False) -> KeyRules:
    """The rules of the command that runs, in their order; `CheckpointError` for what is not a rule
    or no file of rules.
    """
    from ckptconv.keys.key_map import KeyRules
    from ckptconv.keys.rule_files import read_rules

    rules: list[Any] = []
    given = click.get_current_context().meta.get(_GIVEN, [])
    for word, text in given:
        rules += read_rules(text, reverse=reverse) if word == "rules" else [(word, text)]
    if reverse and all(word != "rules" for word, _ in given):
        raise CheckpointError(
            "--reverse undoes a mapping, but there is none", hint="name it with --rules FILE"
        )
    return KeyRules.of(rules, wrappers)


def comparison(given: dict[str, Any]) -> dict[str, Any]:
    """What `diff_checkpoints` is asked by the command line."""
    from ckptconv.keys.key_map import KEEP
    from ckptconv.tensors.element_pairs import Tolerance

    keys = key_rules(given["keys"], reverse=given["reverse"])
    loose = given["atol"] is not None or given["rtol"] is not None
    if given["equal_nan"] and not loose:
        raise click.UsageError(
            "--equal-nan needs --atol or --rtol; without them, equal bits are equal, NaN included"
        )
    if given["whole"] and keys != KEEP:
        raise click.UsageError(
            "--whole compares everything by its path, so it takes no key rules; leave one of them "
            "out"
        )
    tolerance = None
    try:
        if loose:
            tolerance = Tolerance(given["atol"] or 0.0, given["rtol"] or 0.0, given["equal_nan"])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    taken = ("only", "only_b", "tag", "tag_b", "whole", "ignore_dtype", "strict_device")
    return {"keys": keys, "tolerance": tolerance, **{name: given[name] for name in taken}}


def options_of(given: dict[str, Any], keys: Any, *, are_sent: bool = False) -> Options:
    """What the command line asks for; `CheckpointError` for a senseless value.

    `are_sent`: other processes read the files that are named, so these are texts.
    """
    from ckptconv.convert.options import Options
    from ckptconv.devices.mapping import read_tag_pairs
    from ckptconv.keys.key_map import KeyRules

    def named(file: Any) -> Any:
        return str(file) if are_sent and file is not None else file

    apart = {"keys", "map_location", *RULES, *CHOICES} - {"reverse"}
    words = {
        item.name: named(given[item.name]) if "PathLike" in str(item.type) else given[item.name]
        for item in fields(OptionWords)
        if item.name in given and item.name not in apart
    }
    rules = [
        named(text) if word == "rules" else (word, text)
        for word, text in click.get_current_context().meta.get(_GIVEN, [])
    ]
    return Options(
        keys=keys if keys in KEYS else KeyRules.of((), keys),
        rules=tuple(rules),
        map_location=read_tag_pairs(given["map_location"]) or None,
        **words,
    )
