"""What a scan found, as text and JSON; everything that came out of a file is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ckptconv.scan.files import Scan, ScannedFile, Sighting
from ckptconv.scan.scanner import is_inert
from ckptconv.support.errors import printable
from ckptconv.support.report import LISTED, Fields, Row
from ckptconv.support.text import count_text


def scan_headline(scan: Scan) -> str:
    """The line that says how safe a path is."""
    pickles = count_text(sum(file.pickles for file in scan.files), "pickle")
    if not scan.files:
        return f"{printable(scan.path)}: a folder without files"
    said = f"{_SAID[scan.level]} ({count_text(len(scan.files), 'file')}, {pickles})"
    kind = scan.files[0].kind
    if len(scan.files) == 1 and not scan.files[0].findings and is_inert(kind):
        said = f"not a checkpoint ({kind}); nothing in it can run when it is loaded"
    return f"{printable(scan.path)}: {said}"


_SAID = {
    "plain": "holds only what ordinary checkpoints hold",
    "unknown": "nothing dangerous was found, but some of it is unknown",
    "dangerous": "DANGEROUS: do not load",
}


def scans_headline(levels: Sequence[str]) -> str:
    """How several paths were judged; ``unread`` is what could not be."""
    counted = Counter(levels)
    order = ("dangerous", "unknown", "plain", "unread")
    said = ", ".join(f"{counted[level]} {level}" for level in order if counted[level])
    return f"{count_text(len(levels), 'path')}: {said}"


def scan_lines(scan: Scan) -> Iterator[Row]:
    """What was found, as rows, file by file; plain names are left out."""
    for file in scan.files:
        odd = [finding for finding in file.findings if finding.level != "plain"]
        yield from (Row(one.level, _finding_text(scan, file, one)) for one in odd[:LISTED])
        if len(odd) > LISTED:
            yield Row(odd[LISTED].level, f"{printable(file.path)}: and {len(odd) - LISTED:,} more")


def _finding_text(scan: Scan, file: ScannedFile, finding: Sighting) -> str:
    place = [file.path if len(scan.files) > 1 else "", finding.where, finding.name]
    return ": ".join([*(printable(part) for part in place if part), printable(finding.reason, 500)])


SCAN = Fields(
    "path level files",
    files=Fields(
        "path kind level pickles findings", findings=Fields("level name where byte=at reason")
    ),
)
"""The document of a scan, plain names included."""
