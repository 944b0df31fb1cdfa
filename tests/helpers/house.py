"""The modules of the package and what each imports, read out of their source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ckptconv"

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    """The source of a module, parsed: all of them take two seconds, so not while tests are
    collected.
    """
    return ast.parse(MODULES[module].read_text("utf-8"), str(MODULES[module]))


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module, which many tests look through."""
    return list(ast.walk(tree))


def trees() -> dict[str, ast.Module]:
    """All modules, parsed."""
    return {module: tree_of(module) for module in MODULES}


def package_of(module: str) -> str:
    """The package of a module by its dotted name; empty for what lies in the root."""
    return module.rpartition(".")[0].partition(".")[0]


def imported(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """The dotted names that a module imports, wherever in it, TYPE_CHECKING blocks included; `from
    a import b` gives a.b.
    """
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of(module: str) -> list[str]:
    """The dotted names that a module of the package imports."""
    return list(imported(tree_of(module), ("ckptconv", *module.split(".")[:-1])))


def own_module(name: str) -> str | None:
    """The module of this package that the imported `name` is in; None for other packages."""
    top, *rest = name.split(".")
    if top != "ckptconv":
        return None
    while rest and ".".join(rest) not in MODULES:
        if ".".join((*rest, "__init__")) in MODULES:
            return ".".join((*rest, "__init__"))
        rest.pop()
    return ".".join(rest) or "__init__"


def top_names(module: str) -> set[str]:
    """The packages that a module imports from."""
    return {name.partition(".")[0] for name in imports_of(module)}
