"""Shows the progress of a long run on stderr: a bar on a terminal, a line every few seconds
elsewhere; of a batch, a line for each running job and a total, elsewhere a line for each that
ended.

A thread looks at what was last told, for nothing is told while the disk is waited for. A run that
is over soon shows nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import TYPE_CHECKING

import click

from ckptconv.cli.terminal import colors, traffic_told
from ckptconv.support.errors import printable
from ckptconv.support.progress import OnProgress, Phase, Progress
from ckptconv.support.records import dataclass
from ckptconv.support.text import seconds_text, size_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ckptconv.batch.drive import Event
    from ckptconv.batch.receipts import Receipt
    from ckptconv.batch.totals import Totals

COPYING: Mapping[Phase, str] = {
    "write": "copying",
    "verify": "verifying",
    "sync": "waiting for the disk",
    "deliver": "writing to standard output",
}
COMPARING: Mapping[Phase, str] = {"read": "comparing", "measure": "measuring what differs"}
DIFFING: Mapping[Phase, str] = {"read": "comparing", "write": "writing"}
READING: Mapping[Phase, str] = {"read": "reading"}
READING_BOTH: Mapping[Phase, str] = {"read": "reading", "measure": "measuring what differs"}
SCANNING: Mapping[Phase, str] = {"read": "scanning"}
"""What a command calls the phases of its run."""

_BAR_AFTER = 1.0  # seconds; what is over sooner needs no bar
_BAR_EVERY = 0.1
_LINE_EVERY = 5.0
_SURE_AFTER = 1.0  # seconds of a phase before its rate means something


@contextmanager
def progress_shown(words: Mapping[Phase, str], *, silent: bool) -> Iterator[OnProgress | None]:
    """What to call at each step of a long run; within the block it is shown, unless `silent`."""
    if silent:
        yield None
        return
    state = _State(words)
    show = _on_terminal if _can_draw() else _in_lines
    over = threading.Event()
    # daemon: what is interrupted does not wait for who only shows it
    thread = threading.Thread(
        target=show, args=(state, over), name="ckptconv-progress", daemon=True
    )
    started = False

    def tell(progress: Progress) -> None:
        nonlocal started
        state.tell(progress)
        if not started:
            started = True
            thread.start()

    try:
        yield tell
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _can_draw() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@dataclass(slots=True)
class _State:
    """What was told last, and of when; read by the thread that shows it.

    A phase may come again: it began at `since`, less the seconds that it `took` before.
    """

    words: Mapping[Phase, str]
    clock: Callable[[], float] = time.monotonic
    last: Progress | None = None
    since: float = 0.0
    took: dict[Phase, float] = field(default_factory=dict)

    def tell(self, progress: Progress) -> None:
        now, new = self.clock(), progress.phase
        if self.last is None or self.last.phase != new:
            if self.last is not None:
                self.took[self.last.phase] = now - self.since
            self.since = now - self.took.get(new, 0.0)
        if new == "sync" and progress.done == 0:
            self.since = now  # one wait has nothing to do with the last
        self.last = progress

    def shown(self) -> tuple[str, str, float | None]:
        """The name of the phase; percent, bytes, rate and time left, or how long a wait has lasted;
        how much of it is done (None where nobody knows).
        """
        last, seconds = self.last, self.clock() - self.since
        assert last is not None
        label = self.words.get(last.phase, last.phase)
        if last.phase == "sync":
            return label, f"{seconds_text(seconds)} so far", None
        told = [
            f"{100 * last.done // max(1, last.total)} %",
            f"{size_text(last.done)} of {size_text(last.total)}",
        ]
        traffic = traffic_told()
        if traffic is not None:
            told.append(f"network: {traffic}")
        if seconds >= _SURE_AFTER and last.done:
            rate = last.done / seconds
            told.append(f"{size_text(rate)}/s")
            if last.done < last.total:
                told.append(_left((last.total - last.done) / rate))
        return label, ", ".join(told), last.done / last.total if last.total else None


def _left(seconds: float) -> str:
    return f"{seconds_text(max(1, round(seconds)))} left"


def _in_lines(state: _State, over: threading.Event) -> None:
    """A plain line every few seconds, of a log or a pipe."""
    while not over.wait(_LINE_EVERY):
        label, numbers, _ = state.shown()
        try:
            print(f"{label}: {numbers}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody reads it any more
            return


def _on_terminal(state: _State, over: threading.Event) -> None:
    """One line that is drawn again and again, and gone when the run is over."""
    if over.wait(_BAR_AFTER):
        return
    with _bar() as bar:
        task = bar.add_task("", numbers="")
        while True:
            label, numbers, done = state.shown()
            total = None if done is None else 1.0
            bar.update(task, description=label, numbers=numbers, total=total, completed=done or 0.0)
            if over.wait(_BAR_EVERY):
                return


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    words, numbers = (
        TextColumn(text, markup=False, table_column=Column(no_wrap=True))
        for text in ("{task.description}", "{task.fields[numbers]}")
    )
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4))
    console = Console(stderr=True)
    return Bar(
        SpinnerColumn("line"), words, bar, numbers, console=console, transient=True, expand=True
    )


# ---------------------------------------------------------------------------------------- a batch

_DRAWN_EVERY = 0.25
_SHOWN = 12  # running jobs
_RATED_AFTER = 2.0  # seconds of a batch before its rate means something


class Display:
    """What is told of a batch that runs; shows nothing by itself."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.running: dict[str, float] = {}
        self.workers = 1

    def event(self, event: Event) -> None:
        """A job was begun, or will be tried again."""
        name = str(event.job.output)
        if event.what == "started":
            self.running[name] = time.monotonic()
            return
        self.running.pop(name, None)
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
            if receipt.found:
                facts.append("was there")
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
        if seconds >= _RATED_AFTER and ended:
            if totals.nbytes:
                told.append(f"{size_text(totals.nbytes / seconds)}/s")
            if totals.left:
                told.append(_left(totals.left * seconds / ended))
        return ", ".join(told)


class _BatchLines(Display):
    """A plain line for each job that ended, with how far the batch is."""

    def say(self, text: str, fg: str | None = None) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            before = f"[{self.totals.ended:,}/{self.totals.jobs:,}]"
            click.echo(f"{before} {text}", err=True)


class _BatchDrawn(Display):
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

        while not self.over.wait(_DRAWN_EVERY):
            now = time.monotonic()
            width = self.console.width
            listed = list(self.running.items())[: min(_SHOWN, self.workers)]
            lines = [
                Text(_fitting(printable(name), f"  {seconds_text(now - since)}", width))
                for name, since in listed
            ]
            more = min(len(self.running), self.workers) - len(listed)
            if more > 0:
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
    if not _can_draw():
        yield _BatchLines(totals)
        return
    drawn = _BatchDrawn(totals)
    with drawn.live:
        drawn.thread.start()
        try:
            yield drawn
        finally:
            drawn.over.set()
            drawn.thread.join()
