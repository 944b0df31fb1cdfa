"""What `doctor` found, as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckptconv.convert.error_document import error_document
from ckptconv.doctor.findings import LEFT_OUT, Diagnosis, Finding, Severity
from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.rows import Level, Row
from ckptconv.support.text import count_text
from ckptconv.tree.containers import USUAL


def diagnosis_headline(found: Diagnosis, *, strict: bool = False) -> str:
    """Whether a checkpoint loads here, in one line."""
    counts = {
        word: sum(finding.severity == word for finding in found.findings)
        for word in ("error", "warning")
    }
    if not found.loads:
        return f"will not load here: {count_text(counts['error'], 'error')}"
    by = f" ({found.opened_by})" * (found.opened_by not in ("", *USUAL))
    warned = f", with {count_text(counts['warning'], 'warning')}" if counts["warning"] else ""
    return f"loads here{by}{warned}{', which fails with --strict' if strict and warned else ''}"


def diagnoses_headline(
    found: Sequence[Diagnosis | CheckpointError], *, strict: bool = False
) -> str:
    """How many of several checkpoints load here, and how many of these fail with `strict`."""
    loading = [item for item in found if isinstance(item, Diagnosis) and item.loads]
    warned = sum(item.warns for item in loading) if strict else 0
    more = f"; {warned} of these with warnings, which fail with --strict" if warned else ""
    return f"{len(loading)} of {len(found)} load here{more}"


def exit_code(found: Sequence[Diagnosis | CheckpointError], *, strict: bool) -> int:
    """0 where all load, 1 where one does not (`strict`: or has a warning), 2 where that cannot be
    said of one.
    """
    if any(isinstance(item, CheckpointError) for item in found):
        return 2
    bad = [
        item
        for item in found
        if isinstance(item, Diagnosis) and (not item.loads or (strict and item.warns))
    ]
    return 1 if bad else 0


def finding_lines(findings: Sequence[Finding]) -> Iterator[Row]:
    """What the findings say, as rows; the first label of each is its severity, and
    no command stands twice in a row.

    Of many of one kind the rest is counted (`--json` lists all).
    """
    last: str | None = None
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.code] += 1
        if counts[finding.code] > _LISTED:
            continue
        yield Row(
            finding.severity,
            f"{finding.code}: {printable(finding.cause, 2000)}",
            _LEVELS[finding.severity],
        )
        yield Row("effect", printable(finding.effect, 2000))
        if finding.command:
            again = finding.command == last
            shown = "the same command" if again else printable(finding.command, 20_000)
            yield Row("fix", shown, is_command=True)
            last = finding.command
            if finding.advice and not again:
                label = "loses" if finding.advice.startswith(LEFT_OUT) else "advice"
                yield Row(label, printable(finding.advice, 2000))
        elif finding.advice:
            yield Row("advice", printable(finding.advice, 2000))
    for code, count in counts.items():
        if count > _LISTED:
            yield Row("more", f"{code}: and {count - _LISTED:,} more")


_LISTED = 20  # findings of one kind
_LEVELS: dict[Severity, Level] = {"error": "error", "warning": "warning", "info": "plain"}


def diagnoses_document(found: Sequence[Diagnosis | CheckpointError]) -> dict[str, Any]:
    """One diagnosis as it is, or several with their errors among them, as JSON values."""
    documents = [
        diagnosis_document(item) if isinstance(item, Diagnosis) else _error_item(item)
        for item in found
    ]
    return documents[0] if len(documents) == 1 else {"checkpoints": documents}


def _error_item(error: CheckpointError) -> dict[str, Any]:
    return {"path": error.path, **error_document(error, 2)}


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON values."""
    return {
        "path": found.path,
        "format": found.format,
        "loads": found.loads,
        "findings": [
            {
                "severity": finding.severity,
                "code": finding.code,
                "cause": finding.cause,
                "effect": finding.effect,
                "command": finding.command,
                "advice": finding.advice,
            }
            for finding in found.findings
        ],
    }
