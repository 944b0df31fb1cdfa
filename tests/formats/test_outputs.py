"""The registry of output formats: every one is named once, and what is offered can be written."""

from __future__ import annotations

import ast
from typing import get_args

import pytest

from ckptconv.formats.target_format import (
    TARGETS,
    Target,
    claimant,
    target_named,
    target_of_suffix,
)
from helpers.house import nodes, package_of, trees


def test_every_name_of_a_format_has_one_and_no_suffix_has_two():
    assert tuple(item.name for item in TARGETS) == get_args(Target)
    suffixes = [suffix for item in TARGETS for suffix in item.suffixes]
    assert len(suffixes) == len(set(suffixes))


@pytest.mark.parametrize("row", TARGETS, ids=lambda item: item.name)
def test_a_format_is_found_by_its_name_and_by_the_names_of_its_files(row):
    target = target_named(row.name)
    assert target.name == row.name
    assert all(target_of_suffix(suffix.upper()) is target for suffix in row.suffixes)
    assert all(claimant(suffix) == target.name for suffix in row.claimed)
    assert {*row.claimed} <= {*row.suffixes}
    assert target.is_folder or target.suffix in row.claimed
    assert not target.shards_named or target_of_suffix(f".{target.shards_named.split('.')[-1]}")


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
