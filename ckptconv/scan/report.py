"""What a scan found, as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckptconv.scan.files import Scan, ScannedFile, Sighting
from ckptconv.scan.heads import is_inert
from ckptconv.support.errors import printable
from ckptconv.support.rows import Row
from ckptconv.support.text import count_text

_LISTED = 20  # findings of one file; --json lists all


def scan_headline(scan: Scan) -> str:
    """The line that says how safe a path is."""
    pickles = sum(file.pickles for file in scan.files)
    said = {
        "plain": "holds only what ordinary checkpoints hold",
        "unknown": "nothing dangerous was found, but some of it is unknown",
        "dangerous": "DANGEROUS: do not load",
    }[scan.level]
    if not scan.files:
        return f"{printable(scan.path)}: a folder without files"
    if len(scan.files) == 1 and not scan.files[0].findings and is_inert(kind := scan.files[0].kind):
        return (
            f"{printable(scan.path)}: not a checkpoint ({kind}); nothing in it can run when it "
            "is loaded"
        )
    return (
        f"{printable(scan.path)}: {said} ({count_text(len(scan.files), 'file')}, "
        f"{count_text(pickles, 'pickle')})"
    )


def scans_headline(levels: Sequence[str]) -> str:
    """How several paths were judged; ``unread`` is what could not be."""
    counted = Counter(levels)
    said = (
        f"{counted[level]} {level}"
        for level in ("dangerous", "unknown", "plain", "unread")
        if counted[level]
    )
    return f"{count_text(len(levels), 'path')}: {', '.join(said)}"


def scan_lines(scan: Scan) -> Iterator[Row]:
    """What was found, as rows, file by file; plain names are left out."""
    for file in scan.files:
        told = [finding for finding in file.findings if finding.level != "plain"]
        for finding in told[:_LISTED]:
            yield Row(finding.level, _finding_text(scan, file, finding))
        if len(told) > _LISTED:
            yield Row(
                told[_LISTED].level, f"{printable(file.path)}: and {len(told) - _LISTED:,} more"
            )


def _finding_text(scan: Scan, file: ScannedFile, finding: Sighting) -> str:
    place = (
        [file.path] * (len(scan.files) > 1)
        + [finding.where] * bool(finding.where)
        + [finding.name] * bool(finding.name)
    )
    return ": ".join([*(printable(part) for part in place), printable(finding.reason, 500)])


def scan_document(scan: Scan) -> dict[str, Any]:
    """A scan as JSON values, plain names included."""
    return {
        "path": scan.path,
        "level": scan.level,
        "files": [
            {
                "path": file.path,
                "kind": file.kind,
                "level": file.level,
                "pickles": file.pickles,
                "findings": [
                    {
                        "level": item.level,
                        "name": item.name,
                        "where": item.where,
                        "byte": item.at,
                        "reason": item.reason,
                    }
                    for item in file.findings
                ],
            }
            for file in scan.files
        ],
    }
