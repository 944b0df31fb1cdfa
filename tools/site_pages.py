"""Pages of the website that are made from the code and from the files at the root, by mkdocs.

mkdocs.yml names this module as a hook. It adds the README as the start page, the other texts of the
root, a page with the help of every command, and one with the signature and the docstring of every
public name. Links that lead out of the website go to the repository.
"""

from __future__ import annotations

import dataclasses
import inspect
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import ckptconv

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {
    "index.md": "README.md",
    "security.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
    "samples.md": "sample_ckpts/README.md",
    "maintainers/contributing.md": "CONTRIBUTING.md",
}
"""Pages of the website, and the files of the repository that they are."""
_PAGES = {name: page for page, name in TEXTS.items()}
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made = {page: (ROOT / name).read_text("utf-8") for page, name in TEXTS.items()}
    made["reference/commands.md"] = commands_page()
    made["reference/python.md"] = python_page()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have the links lead to pages of the website where there are such, else to the repository."""
    where = page.file.src_uri
    file = TEXTS.get(where, f"docs/{where}")

    def target(found: re.Match[str]) -> str:
        named = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[2]))
        inside = _PAGES.get(named, named.removeprefix("docs/"))
        if files.get_file_from_path(inside) is not None:
            return found[1] + posixpath.relpath(inside, posixpath.dirname(where) or ".")
        if not (ROOT / named).exists():
            return found[0]  # mkdocs warns of it
        return f"{found[1]}{config.repo_url}/blob/main/{named}"

    return _LINK.sub(target, markdown)


# What is made from the code


def commands_page() -> str:
    """The help of every command, as the terminal shows it."""
    from ckptconv.cli.main import cli

    lines = ["# Commands", "", "What `ckptconv COMMAND --help` prints.", ""]
    with click.Context(cli, info_name="ckptconv") as parent:
        for name in cli.list_commands(parent):
            command = cli.get_command(parent, name)
            assert command is not None
            if not command.hidden:
                lines += [f"## ckptconv {name}", "", "```text", help_of(command, parent), "```", ""]
    return "\n".join(lines)


def help_of(command: click.Command, parent: click.Context) -> str:
    """The help of one command in 100 columns."""
    with command.make_context(
        command.name, [], parent=parent, resilient_parsing=True, terminal_width=100
    ) as context:
        return command.get_help(context)


def python_page() -> str:
    """Every public name: functions, classes, errors."""
    named = {name: getattr(ckptconv, name) for name in ckptconv.__all__ if name != "__version__"}
    lines = ["# Public names", "", "The library with examples is in [api.md](../api.md).", ""]
    for title, belongs in _KINDS.items():
        lines += [f"## {title}", ""]
        for name, value in named.items():
            if belongs(value):
                lines += described(name, value)
    return "\n".join(lines)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


_KINDS: dict[str, Callable[[object], bool]] = {
    "Functions": lambda value: not isinstance(value, type),
    "Classes": lambda value: isinstance(value, type) and not _is_error(value),
    "Errors and warnings": _is_error,
}


def described(name: str, value: Any) -> Iterator[str]:
    """The section of one public name."""
    yield from (f"### {name}", "")
    if _is_error(value):
        yield f"A `{value.__bases__[0].__name__}`."
        yield ""
    elif not dataclasses.is_dataclass(value) or value.__doc__ is None:
        yield from ("```python", signature(name, value), "```", "")
    yield from (markdown(inspect.getdoc(value) or ""), "")
    if isinstance(value, type) and not _is_error(value):
        for member, text in members(value).items():
            yield f"- `{member}`{text}"
        yield ""


def signature(name: str, value: Any) -> str:
    """A call of a function or class with its parameters, one a line if they are many."""
    try:
        found = inspect.signature(value)
    except ValueError:  # made by the interpreter
        return name
    parameters = [
        one if one.annotation is one.empty else one.replace(annotation=Written(one.annotation))
        for one in found.parameters.values()
    ]
    gives = "" if isinstance(value, type) else f" -> {found.return_annotation}"
    if len(text := f"{name}({', '.join(map(str, parameters))}){gives}") > 90:
        inner = ",\n    ".join(map(str, parameters))
        text = f"{name}(\n    {inner},\n){gives}"
    return text


class Written(str):
    """An annotation, shown as it is written in the code, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def members(value: type) -> dict[str, str]:
    """The public fields, properties and methods of a class, with the first sentence on each."""
    found = {}
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                found[field.name] = f": `{field.type}`"
    for name, member in vars(value).items():
        if name.startswith("_") or name in found:
            continue
        inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isfunction(inner) or isinstance(member, property):
            first = markdown(inspect.getdoc(inner) or "").split("\n\n")[0].replace("\n", " ")
            found[name if isinstance(member, property) else f"{name}()"] = f": {first}"
    return found


def markdown(text: str) -> str:
    """A docstring as Markdown: examples become blocks, names in double backticks code."""
    parts = re.sub(" *# doctest:.*", "", text.replace("``", "`")).split("\n\n")
    return "\n\n".join(
        f"```pycon\n{part}\n```" if part.lstrip().startswith(">>>") else part.replace("<", "&lt;")
        for part in parts
    )
