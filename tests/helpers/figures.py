"""Counts that tests prove something with: what each counted is added up and printed at the end of
the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

_MARK = "figure"


@pytest.fixture
def figure(request) -> Callable[..., None]:
    """Adds to a figure of the run: ``figure("faults injected")``, ``figure("executions", 500)``."""

    def add(name: str, count: int = 1) -> None:
        request.node.user_properties.append((_MARK, (name, count)))

    return add


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the figures of all tests that passed; with xdist the reports have come from the
    workers.
    """
    counted: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for mark, value in report.user_properties:
            if mark == _MARK and report.when == "call":
                name, count = value
                counted[name] += count
    if counted:
        terminalreporter.section("figures")
        failed = sum(
            len(terminalreporter.stats.get(outcome, [])) for outcome in ("failed", "error")
        )
        for name, count in sorted(counted.items()):
            terminalreporter.line(f"{count:>10,}  {name}")
        terminalreporter.line(f"{failed:>10,}  failures")
