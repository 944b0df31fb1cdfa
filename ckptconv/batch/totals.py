"""What became of a batch as a whole, in words and as JSON values."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path

from ckptconv.batch.ledger import read_ledger
from ckptconv.batch.receipts import Receipt
from ckptconv.support.errors import printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import LISTED, Fields, Row
from ckptconv.support.text import count_text, seconds_text, size_text


@dataclass(slots=True)
class Totals:
    """The receipts of a batch of so many `jobs` (None: nobody said how many).

    `done` and `earlier` count conversions of this run and of earlier ones, `failed` those that
    failed; `nbytes` and `source_nbytes` are the bytes that this run wrote and read. `running` are
    outputs that were begun and have no end.
    """

    jobs: int | None
    receipts: list[Receipt] = field(default_factory=list)
    done: int = 0
    earlier: int = 0
    failed: int = 0
    nbytes: int = 0
    source_nbytes: int = 0
    running: tuple[str, ...] = ()
    begun: float = field(default_factory=time.monotonic)
    seconds: float | None = None

    def add(self, receipt: Receipt) -> None:
        """One more job has ended."""
        self.receipts.append(receipt)
        if receipt.state == "failed":
            self.failed += 1
        elif receipt.earlier:
            self.earlier += 1
        else:
            self.done += 1
            self.nbytes += receipt.nbytes
            self.source_nbytes += receipt.source_nbytes

    @property
    def ended(self) -> int:
        """The jobs that are done or failed, in whichever run."""
        return self.done + self.earlier + self.failed

    @property
    def left(self) -> int | None:
        """The jobs that have not ended; None where nobody knows how many there are."""
        return None if self.jobs is None else max(0, self.jobs - self.ended)

    @property
    def is_all_done(self) -> bool:
        """Whether nothing failed and nothing is left."""
        return not self.failed and self.left == 0

    def passed(self) -> float:
        """The seconds that the batch took, or has taken by now."""
        return time.monotonic() - self.begun if self.seconds is None else self.seconds


def totals_of(ledgers: Sequence[Path]) -> Totals:
    """What ledgers say of the jobs of their last runs, of several the sum.

    What was done, and begun again since, is not done.
    """
    totals = Totals(0, seconds=0.0)
    running: list[str] = []
    for path in ledgers:
        known = read_ledger(path)
        if totals.jobs is not None:
            totals.jobs = None if known.jobs is None else totals.jobs + known.jobs
        for key, receipt in known.receipts.items():
            if key not in known.started | known.other:
                totals.add(receipt)
        running += sorted(known.started - known.other)
        if known.begun is not None and known.last is not None:
            # not the sum: the shares of a batch run at the same time
            totals.seconds = max(totals.seconds or 0.0, known.last - known.begun)
    totals.running = tuple(running)
    return totals


def totals_headline(totals: Totals) -> str:
    """The line that says it all."""
    all_done = totals.done + totals.earlier
    told = [f"{all_done:,} of {totals.jobs:,} done" if totals.jobs else f"{all_done:,} done"]
    if totals.earlier:
        told.append(f"{totals.earlier:,} in an earlier run")
    if totals.failed:
        told.append(f"{totals.failed:,} failed")
        if any(receipt.error and receipt.earlier for receipt in totals.receipts):
            told[-1] += ", not tried again without --retry-failed"
    if totals.left:
        told.append(f"{totals.left:,} left")
    return ", ".join(told)


def totals_lines(
    totals: Totals, ledgers: Sequence[Path], told: Sequence[Receipt] = ()
) -> Iterator[Row]:
    """Bytes, time and rate, and what failed but was not told before, as rows."""
    seconds = totals.passed()
    if totals.done:
        rate = ""
        # before that, it would be the rate of starting up
        if seconds >= 1:
            rate = f", {totals.done / seconds:.1f}/s, {size_text(totals.nbytes / seconds)}/s"
        read = f"{size_text(totals.source_nbytes)} read, {size_text(totals.nbytes)} written"
        yield Row("work", f"{read} in {seconds_text(seconds)}{rate}")
    if totals.running:
        shown = ", ".join(map(printable, totals.running[:3]))
        if len(totals.running) > 3:
            shown += f" and {len(totals.running) - 3:,} more"
        yield Row("begun, not ended", shown)
    # by identity: dicts are in a receipt, so it has no hash
    known = {id(receipt) for receipt in told}
    failures = [
        receipt
        for receipt in totals.receipts
        if receipt.error is not None and id(receipt) not in known
    ]
    for receipt in failures[:LISTED]:
        yield Row("failed", printable(failure_text(receipt), 2000), "error")
    if len(failures) > LISTED:
        yield Row("failed", f"{len(failures) - LISTED:,} more; the ledger has them", "error")
    noted = sum(bool(receipt.notes) for receipt in totals.receipts)
    if noted:
        yield Row("notes", f"{count_text(noted, 'conversion')} with notes; the ledger has them")
    yield Row("ledger", ", ".join(printable(path) for path in ledgers))


def failure_text(receipt: Receipt) -> str:
    """Why a job failed, with the name of its source where the message does not begin with it."""
    assert receipt.error is not None
    source, message = ", ".join(map(printable, receipt.source)), receipt.error.message
    return message if message.startswith(source) else f"{source}: {message}"


TOTALS = Fields(
    "jobs done=. earlier failed left running seconds=. bytes=nbytes source_bytes=source_nbytes "
    "receipts",
    done=lambda totals: totals.done + totals.earlier,
    seconds=lambda totals: round(totals.passed(), 6),
    receipts=lambda receipts: [{**one.line(), "earlier": one.earlier} for one in receipts],
)
"""The document of a batch."""
