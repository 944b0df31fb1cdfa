"""How commands and options are made, and how the help tells of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar, get_args

import click

from ckptconv.convert.words import RULES, Section

F = TypeVar("F", bound=Callable[..., Any])

OWN = "Options"
"""The section of options that one command has alone; it stands first."""
SECTIONS = (OWN, *get_args(Section))
GIVEN = "ckptconv.rules"
"""Where `click.Context.meta` keeps the key rules of the command line, in their order."""


_RULING = {*RULES, "rules"}


class Option(click.Option):
    """An option with its section in the help; the name that it had `once` does, but is not told."""

    def __init__(
        self, *names: Any, section: Section | str, once: str | None = None, **settings: Any
    ) -> None:
        super().__init__(*names, **settings)
        self.section, self.once = section, once

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        if self.once is not None:
            earlier = copy(self)
            earlier.opts, earlier.once = [self.once], None
            earlier.add_to_parser(parser, ctx)


class Command(click.Command):
    """A command whose options stand in sections, each in the order of their definition; whose files
    are known while a shell completes the value of an option; and which knows the order in which its
    key rules were given, of whichever options.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            if args and args[-1].startswith("-"):
                # it lacks its value, which would be an error that keeps the files from being seen
                args = args[:-1]
            return super().parse_args(ctx, args)
        # click keeps the values of each option apart; only its parser knows which came first
        try:
            given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # else the help of the program is offered
            raise
        values = {name: iter(texts) for name, texts in given.items() if name in _RULING}
        names = [str(param.name) for param in order if param.name in values]
        ctx.meta[GIVEN] = [(as_written(name), next(values[name])) for name in names]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):
                sections[getattr(param, "section", SECTIONS[-1])].append(row)  # --help is click's
        write_sections(formatter, sections)


def write_sections(
    formatter: click.HelpFormatter, sections: dict[str, list[tuple[str, str]]]
) -> None:
    """Tables of two columns below headings; the second begins at the same place in all, and no name
    is broken at a hyphen.
    """
    import textwrap

    words = [len(word) for rows in sections.values() for word, _ in rows]
    widest = max(22, formatter.width * 3 // 10)
    width = max((length for length in words if length <= widest), default=widest)
    for name, rows in sections.items():
        if rows:
            formatter.write(f"\n{name}:\n")
        for word, told in rows:
            before, behind = f"  {word:{width}}  ", " " * (width + 4)
            if len(word) > width:
                formatter.write(f"  {word}\n")
                before = behind
            lines = textwrap.wrap(
                told,
                formatter.width,
                initial_indent=before,
                subsequent_indent=behind,
                break_on_hyphens=False,
            )
            formatter.write("\n".join(lines) + "\n")


def as_written(name: str) -> str:
    """An option as it is written, by the name of its parameter."""
    return name.replace("_", "-")


def command(
    examples: str, *, name: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """What makes a function a command; `examples` are told below its options, and what follows
    them. Its line in the list of commands stands in `main.COMMANDS`.
    """
    return click.command(name, cls=Command, epilog=f"\b\nExamples:{examples}")


def option(
    words: str,
    told: str,
    kind: click.ParamType[Any] | Sequence[str] | None = None,
    *,
    section: str = OWN,
    **settings: Any,
) -> Callable[[F], F]:
    """An option as the help shows it: its names and what it calls a value (``-o --output FILE``),
    what is told of it, and its type, or the words to choose from. With neither it is a flag.
    `settings` are those of `Option`.
    """
    names = [word for word in words.split() if word.startswith("-")]
    metavar = " ".join(word for word in words.split() if not word.startswith("-")) or None
    if kind is not None:
        settings["type"] = kind if isinstance(kind, click.ParamType) else click.Choice(kind)
    return click.option(
        *names,
        cls=Option,
        section=section,
        metavar=metavar,
        help=told,
        # not False: click makes an option of that whose value may be left out
        is_flag=True if metavar is None and kind is None else None,
        show_default="default" in settings,
        **settings,
    )


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options, or arguments, as one; the help shows them in this order."""

    def give(command: F) -> F:
        for each in reversed(options):
            command = each(command)
        return command

    return give
