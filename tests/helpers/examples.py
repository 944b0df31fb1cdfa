"""How many examples a promise is tried with: some of them in `make test` and in CI, all of them in
`make trust`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

ALL = os.environ.get("CKPTCONV_EXAMPLES") == "all"


def examples(count: int) -> int:
    """`count`, or a quarter of it where time is short."""
    return count if ALL else max(10, count // 4)


def some(count: int, values: Iterable[Any]) -> list[Any]:
    """`count` of the values of one parameter, spread evenly over them."""
    every = list(values)
    count = min(count, len(every))
    chosen = [at * len(every) // count for at in range(count)]
    others = [_only_in_trust(each) for at, each in enumerate(every) if at not in chosen]
    return [every[at] for at in chosen] + others * ALL


def crossed(*values: Collection[Any]) -> list[Any]:
    """So many combinations of the values of some parameters that each value is in one of them."""
    few = _few(*values)
    others = [each for each in itertools.product(*values) if each not in few]
    return few + [pytest.param(*each, marks=pytest.mark.property) for each in others] * ALL


def combined(*values: Collection[Any]) -> list[Any]:
    """The same within a test: no parameters, and in `make trust` all combinations."""
    return list(itertools.product(*values)) if ALL else _few(*values)


def _few(*values: Collection[Any]) -> list[Any]:
    listed = [list(each) for each in values]
    most = max(map(len, listed)) if all(listed) else 0  # samples may not be here
    return [tuple(each[at % len(each)] for each in listed) for at in range(most)]


def _only_in_trust(value: Any) -> Any:
    if hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.property], id=value.id)
    return pytest.param(value, marks=pytest.mark.property)
