"""The command help, and the pages of docs/ as its topics: which there are, and their text.

A wheel brings them as ckptconv/docs; in a checkout, and in an editable install of one, they lie
beside the package.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from ckptconv.cli import terminal
from ckptconv.cli.commands import command
from ckptconv.support.errors import printable
from ckptconv.support.report import Row

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")


def topics() -> dict[str, str]:
    """The name of each page and its title, by name; none where the pages were left out of a
    package.
    """
    pages = sorted(_folder().glob("*.md"))
    return {
        page.stem: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()
        for page in pages
    }


def page_text(topic: str) -> str | None:
    """The Markdown of a page, by its name as people write it (State_Dicts, keys.md); None where
    there is none.
    """
    name = _plain(topic)
    if name not in topics():  # else the name might lead out of the folder
        return None
    return (_folder() / f"{name}.md").read_text(encoding="utf-8")


def near_matches(topic: str, commands: list[str]) -> list[str]:
    """The topics and commands that `topic` may have meant, the likeliest first."""
    known = [*topics(), *commands]
    parts = [name for name in known if _plain(topic) and _plain(topic) in name]
    return list(dict.fromkeys([*parts, *difflib.get_close_matches(_plain(topic), known)]))


def _plain(topic: str) -> str:
    return topic.lower().removesuffix(".md").replace("_", "-").replace(" ", "-")


def _folder() -> Path:
    return next((folder for folder in _FOLDERS if (folder / "keys.md").is_file()), _FOLDERS[0])


def _names(ctx: click.Context, _: click.Parameter, start: str) -> list[str]:
    names = [*topics(), *_program(ctx).list_commands(ctx)]
    return [name for name in names if name.startswith(start)]


def _program(ctx: click.Context) -> click.Group:
    program = ctx.find_root().command
    assert isinstance(program, click.Group)
    return program


@command("\n  ckptconv help\n  ckptconv help pipelines\n  ckptconv help convert")
@click.argument("topic", required=False, shell_complete=_names)
@click.pass_context
def help(ctx: click.Context, topic: str | None) -> None:
    """Show a page of the documentation or the help of a command. Without TOPIC, list the pages."""
    program = _program(ctx)
    if topic is None:
        click.echo("Pages (ckptconv help TOPIC):")
        terminal.print_lines(Row(name, text) for name, text in topics().items())
        click.echo(
            "Commands are listed by ckptconv --help; ckptconv help COMMAND shows the options of "
            "one."
        )
    elif (asked := program.get_command(ctx, topic)) is not None:
        with click.Context(asked, info_name=topic, parent=ctx.parent) as context:
            click.echo(asked.get_help(context))
    elif (text := page_text(topic)) is not None:
        terminal.show_page(text)
    else:
        near = near_matches(topic, program.list_commands(ctx))
        meant = f"did you mean {' or '.join(near)}" if near else "ckptconv help lists the topics"
        terminal.fail(f"there is no help on '{printable(topic)}'; {meant}", 2)
