"""What the tests cost in seconds of the processor, of all processes: `make test` prints at its end
what all of them took, and those that took most (CKPTCONV_COSTS: how many).
"""

from __future__ import annotations

import os

import pytest

from helpers import program

BUDGET = 300
"""Seconds that `make test` may take; docs/maintainers/tests.md has what it takes."""

_BEGUN = pytest.StashKey[float]()
_COST = "cost"


def _seconds() -> float:
    """Of this process, of those that it waited for, and of the program forked for it."""
    return sum(os.times()[:4]) + program.spent()


class Costs:
    """Measures each test with its fixtures, and prints the most costly."""

    def __init__(self, most: int) -> None:
        self._most = most

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item):
        item.stash[_BEGUN] = _seconds()
        yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item):
        yield
        item.user_properties.append((_COST, _seconds() - item.stash[_BEGUN]))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        costs = [
            (seconds, report.nodeid)
            for reports in terminalreporter.stats.values()
            for report in reports
            if getattr(report, "when", "") == "teardown"
            for mark, seconds in report.user_properties
            if mark == _COST
        ]
        terminalreporter.section("costs, in seconds of the processor")
        total = sum(os.times()[:4])  # the workers have ended
        terminalreporter.line(f"{total:>10,.1f}  all of it; the budget of `make test` is {BUDGET}")
        for seconds, name in sorted(costs, reverse=True)[: self._most]:
            terminalreporter.line(f"{seconds:>10,.1f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Measure, where it is asked for."""
    most = int(os.environ.get("CKPTCONV_COSTS", "0"))
    if most:
        config.pluginmanager.register(Costs(most))
