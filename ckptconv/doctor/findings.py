"""The findings about a checkpoint that will not load, or will cause trouble later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptconv.support.showing import html_table, short_repr

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
    """

    path: str
    format: str | None
    findings: tuple[Finding, ...]
    paths: tuple[str, ...] = ()
    opened_by: str = ""

    @property
    def loads(self) -> bool:
        """Whether the container's own library loads it here, into the model if one was named."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def warns(self) -> bool:
        """Whether it will disappoint."""
        return any(finding.severity == "warning" for finding in self.findings)

    def __repr__(self) -> str:
        codes = ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return short_repr(
            "Diagnosis",
            Path(self.path).name,
            "loads here" if self.loads else "will not load here",
            codes,
        )

    def _repr_html_(self) -> str:
        return html_table(
            f"{self.path}: {'loads here' if self.loads else 'will not load here'}",
            (
                (one.severity, one.code, one.cause, one.command or one.advice or "")
                for one in self.findings
            ),
        )
