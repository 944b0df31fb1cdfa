"""What `doctor` found, as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckptconv.errors import printable
from ckptconv.findings import Diagnosis, Finding
from ckptconv.wording import count_text


def diagnosis_headline(found: Diagnosis) -> str:
    """Whether a checkpoint loads here, in one line."""
    counts = {word: sum(finding.severity == word for finding in found.findings) for word in ("error", "warning")}
    if found.loads:
        return "loads here" + (f", with {count_text(counts['warning'], 'warning')}" if counts["warning"] else "")
    return f"will not load here: {count_text(counts['error'], 'error')}"


def finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """What the findings say, as (label, text) lines; the first label of each is its severity, and no command stands twice.

    Of many of one kind the rest is counted (`--json` lists all).
    """
    told: set[str] = set()
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.code] += 1
        if counts[finding.code] > _LISTED:
            continue
        yield finding.severity, f"{finding.code}: {printable(finding.cause, 2000)}"
        yield "effect", printable(finding.effect, 2000)
        if finding.command:
            yield "fix", "the same command" if finding.command in told else printable(finding.command, 20_000)
            told.add(finding.command)
        elif finding.advice:
            yield "advice", printable(finding.advice, 2000)
    for code, count in counts.items():
        if count > _LISTED:
            yield "more", f"{code}: and {count - _LISTED:,} more"


_LISTED = 20  # findings of one kind


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
