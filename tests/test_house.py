"""The arrows between packages: each imports only from those above it, and only some know terminals,
torch or files.
"""

from __future__ import annotations

import ast
import re
from typing import get_args

import pytest

from ckptconv.formats.target_format import Target
from helpers.house import (
    MODULES,
    PACKAGE,
    imported,
    imports_of,
    nodes,
    own_module,
    package_of,
    top_names,
    trees,
)

TABLE = PACKAGE.parent / "docs" / "maintainers" / "design.md"
ROW = re.compile(r"^\| *(?P<names>(?:`\w+`(?: · )?)+) *\|", re.M)
LEVELS = [re.findall(r"\w+", row["names"]) for row in ROW.finditer(TABLE.read_text("utf-8"))]
"""The rows of the table in docs/maintainers/design.md, from the top; packages of one row do not
know each other.
"""

PAGES = [PACKAGE.parent / "CONTRIBUTING.md", *TABLE.parent.glob("[!h]*.md")]
"""What maintainers read, but for hostile-files.md, whose names are those of made files."""

LEVEL = {package: level for level, row in enumerate(LEVELS) for package in row}

TERMINAL_PACKAGES = {"cli"}
TORCH_MODULES = {
    "devices.host", "devices.mapping", "live.load", "live.storages", "live.save", "live.load_into",
    "live.opened",
    "formats.dcp_output", "convert.named_models",
}  # fmt: skip
FILE_MODULES = {
    "support.platforms", "io.appended", "io.staging", "io.in_place", "io.journals",
    "batch.own_code", "cli.help_pages", "cli.terminal", "pages.html", "support.name_lists",
}  # fmt: skip
"""batch.own_code: the package itself; cli.help_pages: the documentation; pages.html: the script
of a page; cli.terminal: the file that is made before it is printed; support.name_lists: the names
that lie beside modules.
"""


def test_every_package_stands_in_the_table_of_the_design():
    assert {package_of(module) for module in MODULES} - {""} == set(LEVEL)
    assert 9 <= len(LEVELS) <= 16 and len(LEVEL) == sum(map(len, LEVELS))


def is_there(name: str) -> bool:
    """Whether a path, or the dotted name of a module or of what stands in one, means something."""
    if "/" in name:
        return any((root / name).exists() for root in (PACKAGE.parent, PACKAGE))
    module, names = name, [""]
    while module and not {module, f"{module}.__init__"} & MODULES.keys():
        module, _, last = module.rpartition(".")
        names.insert(0, last)
    if not names[0]:
        return True
    defined = rf"^ *(?:def|class) {names[0]}\b|^{names[0]}\b"
    return module in MODULES and bool(re.search(defined, MODULES[module].read_text("utf-8"), re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_for_maintainers_names_is_there(page):
    named = " ".join(re.findall(r"(?<!`)`([^`\n]+)`", page.read_text("utf-8"))).split()
    # NAME and VERSION stand for what is made; a word alone may be of any program
    ours = [
        name
        for name in named
        if not re.search("NAME|VERSION", name)
        and (re.fullmatch(r"\w+/[\w./-]+", name) or name.partition(".")[0] in LEVEL)
    ]
    assert [name for name in ours if not is_there(name)] == []


@pytest.mark.parametrize("package", LEVEL)
def test_a_package_imports_only_from_the_packages_above_it(package):
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if package_of(module) == package
        for other in sorted({*map(own_module, imports_of(module))} - {None, "__init__"})
        if package_of(other) != package
        and not LEVEL.get(package_of(other), len(LEVELS)) < LEVEL[package]
    ]
    assert wrong == []


def circles() -> list[list[str]]:
    """The modules that import each other, through whatever others."""
    reached: dict[str, set[str]] = {
        module: {
            other
            for other in map(own_module, imports_of(module))
            if other not in (None, module, "__init__")
        }
        for module in MODULES
    }
    found, rest = [], dict(reached)
    while rest:
        free = [module for module, others in rest.items() if not others & rest.keys()]
        if not free:
            return [*found, sorted(rest)]
        for module in free:
            del rest[module]
    return found


def test_no_module_imports_itself_through_others():
    assert circles() == []


def test_imports_within_functions_and_type_checking_blocks_are_seen():
    source = """
from ckptconv.convert import report
if TYPE_CHECKING:
    import torch.nn as nn
def late():
    from .source import CHUNK
    from . import crc
"""
    found = list(imported(ast.parse(source), ("ckptconv", "io")))
    assert found == [
        "ckptconv.convert.report",
        "torch.nn",
        "ckptconv.io.source.CHUNK",
        "ckptconv.io.crc",
    ]
    assert [own_module(name) for name in found] == ["convert.report", None, "io.source", "io.crc"]
    assert own_module("ckptconv.formats.containers.FORMATS") == "formats.containers"
    assert own_module("ckptconv.formats") == "formats.__init__"
    assert own_module("ckptconv.__version__") == "__init__"


def test_only_the_command_line_knows_terminals():
    users = {module for module in MODULES if top_names(module) & {"click", "rich"}}
    assert {package_of(module) for module in users} == TERMINAL_PACKAGES


def test_torch_is_imported_only_where_live_tensors_and_devices_are():
    assert {module for module in MODULES if "torch" in top_names(module)} == TORCH_MODULES


def opens_files(tree: ast.Module) -> set[str]:
    """The calls and names in a module by which files are opened."""
    found = set()
    for node in nodes(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "open"
        ):
            found.add("open(")
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in ("read_bytes", "read_text", "write_bytes", "write_text") or (
                node.attr == "open"
                and owner in ("os", "io", "gzip", "zipfile", "codecs", "builtins", "Path", "path")
            ):
                found.add(f"{owner}.{node.attr}")
    return found


def test_only_files_opens_files():
    opening = {
        module
        for module, tree in trees().items()
        if opens_files(tree) or "tempfile" in top_names(module)
    }
    assert opening == FILE_MODULES


def test_nothing_unpickles_or_evaluates():
    forbidden = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "runpy", "code"}
    assert {module: names for module in MODULES if (names := top_names(module) & forbidden)} == {}
    called = {
        (module, node.func.id)
        for module, tree in trees().items()
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("eval", "exec", "__import__")
    }
    assert called == set()
    assert {module for module in MODULES if "importlib" in top_names(module)} == {
        "__init__",
        "cli.main",
        "convert.named_models",
        "formats.containers",
    }


def parsed_formats(tree: ast.Module) -> list[str]:
    """Where the name of a container is compared or looked into."""
    found = []
    for node in nodes(tree):
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = [node.func.value] if node.func.attr in ("startswith", "endswith") else []
        found += [
            ast.unparse(node)
            for part in parts
            if isinstance(part, ast.Attribute) and part.attr in ("format", "source_format")
        ]
    return found


def test_no_module_looks_into_the_name_of_a_container():
    assert {
        module: found for module, tree in trees().items() if (found := parsed_formats(tree))
    } == {}
    parsed = parsed_formats(ast.parse('a.format == "x" or b.format.startswith("torch")'))
    assert len(parsed) == 2


def compared_names(tree: ast.Module) -> list[str]:
    """The names of output formats that are compared with something in a module."""
    words = {*get_args(Target)}
    return [
        part.value
        for node in nodes(tree)
        if isinstance(node, ast.Compare)
        for part in [node.left, *node.comparators]
        if isinstance(part, ast.Constant) and part.value in words
    ]


PACKAGE_TORCH = ("live.load", "scan.script_code")
"""They ask whether a name is that of the package torch."""


def test_no_module_outside_formats_asks_for_a_format_by_its_name():
    packages = {"convert", "live", "doctor", "inspect", "cli", "diff", "scan", "tree"}
    asking = {
        module: found
        for module, tree in trees().items()
        if package_of(module) in packages
        and module not in PACKAGE_TORCH
        and (found := compared_names(tree))
    }
    assert asking == {}
    assert compared_names(ast.parse('plan.to == "torch" or "dcp" != to')) == ["torch", "dcp"]


def test_nobody_outside_io_opens_files_or_asks_for_the_kind_of_a_source():
    kinds = {"FileSource", "PooledSource"}
    wrong = {
        f"{module}: {name}"
        for module in MODULES
        for name in imports_of(module)
        if package_of(module) != "io" and name.rpartition(".")[2] in kinds
    }
    assert wrong == set()
    kinds |= {"InflatedSource", "RangeSource", "MemorySource"}
    sniffs = {
        f"{module}: {ast.unparse(node)}"
        for module, tree in trees().items()
        for node in nodes(tree)
        if kinds & {part.id for part in asked_for(node) if isinstance(part, ast.Name)}
    }
    assert sniffs == set()


def asked_for(node: ast.AST) -> list[ast.expr]:
    """The types that an expression asks for, by `isinstance` or by comparing the type."""
    if isinstance(node, ast.Call) and is_named(node.func, "isinstance"):
        return [part for part in ast.walk(node.args[1]) if isinstance(part, ast.expr)]
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
        return node.comparators if is_named(node.left.func, "type") else []
    return []


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
