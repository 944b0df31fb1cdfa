"""What `doctor` finds in a checkpoint that will not load, or causes trouble later, and how that is
shown: as text, JSON and HTML. Everything that came out of a file is escaped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from ckptconv.support.errors import CheckpointError, printable
from ckptconv.support.records import dataclass
from ckptconv.support.report import (
    LISTED,
    Fields,
    Level,
    Row,
    error_document,
    html_table,
    short_repr,
)
from ckptconv.support.text import count_text
from ckptconv.tree.checkpoint import USUAL

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The worst first."""

LEFT_OUT = "left out, without a plain form: "
"""The beginning of an advice that says what a command leaves out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: an ``error`` stops the load, a ``warning`` causes trouble later, an ``info`` is
    good to know.

    `cause` is what the file has, `effect` what comes of it, in torch's own words where it has any;
    `command` fixes it (None: no command can), and `advice` says what to do where there is more to
    say, or what the command leaves out.
    """

    severity: Severity
    code: str
    cause: str
    effect: str
    command: str | None = None
    advice: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The result of `diagnose`, the worst findings first. `format` is None if the file could not be
    opened.

    `paths` are the files that were named, and `opened_by` is the library that opens the container.
    `notes` say what else there is to know: of a folder, which of its files are not read.
    """

    path: str
    format: str | None
    findings: tuple[Finding, ...]
    paths: tuple[str, ...] = ()
    opened_by: str = ""
    notes: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether the container's own library loads it here, into the model if one was named."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def warns(self) -> bool:
        """Whether it will disappoint."""
        return any(finding.severity == "warning" for finding in self.findings)

    def __bool__(self) -> bool:
        """Raises `TypeError`: a result that is always true would be taken for a file that loads."""
        raise TypeError("a Diagnosis is neither true nor false: write .loads")

    def _verdict(self) -> str:
        return "loads here" if self.loads else "will not load here"

    def __repr__(self) -> str:
        codes = ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return short_repr("Diagnosis", Path(self.path).name, self._verdict(), codes)

    def _repr_html_(self) -> str:
        told = attrgetter("severity", "code", "cause")
        rows = ((*told(one), one.command or one.advice or "") for one in self.findings)
        return html_table(f"{self.path}: {self._verdict()}", rows)


# ------------------------------------------------------------------------------------------- text


def diagnosis_headline(found: Diagnosis, *, strict: bool = False, values: bool = False) -> str:
    """Whether a checkpoint loads here, in one line; `values`: its tensors were read."""
    if not found.loads:
        return f"will not load here: {_counted(found, 'error')}"
    words = "loads here"
    if found.opened_by not in ("", *USUAL):
        words += f" ({found.opened_by})"
    if found.warns:
        words += f", with {_counted(found, 'warning')}"
    if found.warns and strict:
        words += ", which fails with --strict"
    return words if values else f"{words}; tensors not read (--values reads them)"


def _counted(found: Diagnosis, severity: Severity) -> str:
    return count_text(sum(one.severity == severity for one in found.findings), severity)


def diagnoses_headline(
    found: Sequence[Diagnosis | CheckpointError], *, strict: bool = False
) -> str:
    """How many of several checkpoints load here, and how many of these fail with `strict`."""
    loading = [item for item in found if isinstance(item, Diagnosis) and item.loads]
    warned = sum(item.warns for item in loading)
    told = f"{len(loading)} of {len(found)} load here"
    if warned and strict:
        return f"{told}; {warned} of these with warnings, which fail with --strict"
    return told


def exit_code(found: Sequence[Diagnosis | CheckpointError], *, strict: bool) -> int:
    """0: all load; 1: one does not (`strict`: or has a warning); 2: of one it cannot be said."""
    known = [item for item in found if isinstance(item, Diagnosis)]
    if len(known) < len(found):
        return 2
    return int(any(not item.loads or (strict and item.warns) for item in known))


def finding_lines(findings: Sequence[Finding]) -> Iterator[Row]:
    """What the findings say, as rows; the first label of each is its severity, and no command
    stands twice in a row. Of many of one kind the rest is counted (`--json` lists all).
    """
    last: str | None = None
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.code] += 1
        if counts[finding.code] > LISTED:
            continue
        cause = f"{finding.code}: {printable(finding.cause, 2000)}"
        yield Row(finding.severity, cause, _LEVELS[finding.severity])
        yield Row("effect", printable(finding.effect, 2000))
        if finding.command and finding.command == last:
            yield Row("fix", "the same command", is_command=True)
            continue
        if finding.command:
            last = finding.command
            yield Row("fix", printable(finding.command, 20_000), is_command=True)
        if finding.advice:
            label = "loses" if finding.advice.startswith(LEFT_OUT) else "advice"
            yield Row(label, printable(finding.advice, 2000))
    for code, count in counts.items():
        if count > LISTED:
            yield Row("more", f"{code}: and {count - LISTED:,} more")


_LEVELS: dict[Severity, Level] = {"error": "error", "warning": "warning", "info": "plain"}


# ------------------------------------------------------------------------------------------- JSON

_DIAGNOSIS = Fields(
    "path format loads findings notes",
    findings=Fields("severity code cause effect command advice"),
)


def diagnoses_document(found: Sequence[Diagnosis | CheckpointError]) -> dict[str, Any]:
    """One diagnosis as it is, or several with their errors among them, as JSON values."""
    documents = [
        _DIAGNOSIS.of(item)
        if isinstance(item, Diagnosis)
        else {"path": item.path, **error_document(item, 2)}
        for item in found
    ]
    return documents[0] if len(documents) == 1 else {"checkpoints": documents}
