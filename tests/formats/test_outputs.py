"""The registry of output formats: every one is named once, and what is offered can be written."""

from __future__ import annotations

from typing import get_args

import pytest

from ckptconv.formats.target_format import (
    TARGETS,
    Target,
    claimant,
    target_named,
    target_of_suffix,
)


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
