"""Shows how a batch goes on: a line for each running job and a total on a terminal, elsewhere a
line for each that ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from ckptconv.cli.terminal import colors
from ckptconv.support.errors import printable
from ckptconv.support.text import seconds_text, size_text

if TYPE_CHECKING:
    from ckptconv.batch.drive import Event
    from ckptconv.batch.receipts import Receipt
    from ckptconv.batch.totals import Totals

_EVERY = 0.25
_SHOWN = 12  # running jobs
_SURE_AFTER = 2.0  # seconds before a rate means something


class Display:
    """What is told of a batch that runs; shows nothing by itself."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.running: dict[str, float] = {}
        self.workers = 1
        self.again = 0

    def event(self, event: Event) -> None:
        """A job was begun, or will be tried again."""
        name = str(event.job.output)
        if event.what == "started":
            self.running[name] = time.monotonic()
            return
        self.running.pop(name, None)
        self.again += 1
        wait = seconds_text(max(1, round(event.wait)))
        self.say(f"again   {printable(name)}: {printable(event.why, 500)} (in {wait})", "yellow")

    def ended(self, receipt: Receipt) -> None:
        """A job has ended; `totals` know of it."""
        from ckptconv.batch.totals import failure_text

        self.running.pop(receipt.output, None)
        if receipt.error is not None:
            self.say(f"failed  {printable(failure_text(receipt), 1000)}", "red")
            return
        if not receipt.earlier:
            facts = [size_text(receipt.nbytes), seconds_text(receipt.seconds)]
            facts += ["was there"] * receipt.found
            source = ", ".join(map(printable, receipt.source))
            self.say(f"done    {source} → {printable(receipt.output)} ({', '.join(facts)})")

    def say(self, text: str, fg: str | None = None) -> None:
        """A line that stays."""

    def total(self) -> str:
        """How far the batch is."""
        totals = self.totals
        told = [f"{totals.ended:,} of {totals.jobs:,}"]
        if totals.failed:
            told.append(f"{totals.failed:,} failed")
        seconds, ended = totals.passed(), totals.ended - totals.earlier
        if seconds >= _SURE_AFTER and ended:
            if totals.nbytes:
                told.append(f"{size_text(totals.nbytes / seconds)}/s")
            if totals.left:
                told.append(f"{seconds_text(max(1, round(totals.left * seconds / ended)))} left")
        return ", ".join(told)


class _Lines(Display):
    """A plain line for each job that ended, with how far the batch is."""

    def say(self, text: str, fg: str | None = None) -> None:
        with suppress(OSError, ValueError):
            before = f"[{self.totals.ended:,}/{self.totals.jobs:,}]"
            click.echo(f"{before} {text}", err=True)


class _Drawn(Display):
    """On a terminal: failures stay, what runs is drawn below them again and again."""

    def __init__(self, totals: Totals) -> None:
        super().__init__(totals)
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._draw, name="ckptconv-batch", daemon=True)

    def say(self, text: str, fg: str | None = None) -> None:
        if fg is None:
            return
        from rich.text import Text

        self.console.print(Text(text, style=fg if colors() is None else ""), soft_wrap=True)

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        while not self.over.wait(_EVERY):
            now = time.monotonic()
            width = self.console.width
            listed = list(self.running.items())[: min(_SHOWN, self.workers)]
            lines = [
                Text(_fitting(printable(name), f"  {seconds_text(now - since)}", width))
                for name, since in listed
            ]
            if (more := min(len(self.running), self.workers) - len(listed)) > 0:
                lines.append(Text(f"  and {more} more"))
            lines.append(Text(self.total(), style="bold"))
            self.live.update(Group(*lines), refresh=True)


def _fitting(name: str, after: str, width: int) -> str:
    """A name, cut at its beginning, and what follows it, in one line of the terminal."""
    room = max(10, width - len(after) - 4)
    shown = name if len(name) <= room else f"…{name[-room + 1 :]}"
    return f"  {shown}{after}"


@contextmanager
def batch_shown(totals: Totals, *, silent: bool) -> Iterator[Display]:
    """What is told of a batch; within the block it is shown, unless `silent`."""
    if silent:
        yield Display(totals)
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield _Lines(totals)
        return
    drawn = _Drawn(totals)
    with drawn.live:
        drawn.thread.start()
        try:
            yield drawn
        finally:
            drawn.over.set()
            drawn.thread.join()
