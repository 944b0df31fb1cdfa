"""Rows of a report: a label, a text, a level; who shows them chooses the colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["plain", "heading", "good", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report; `is_command`: its text is for a shell, so it is never broken."""

    label: str
    text: str
    level: Level = "plain"
    is_command: bool = False
