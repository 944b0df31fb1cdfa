"""Rows of a report: a label, a text, and a level, by which who shows them chooses the colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["plain", "heading", "good", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a report; `is_command`: its text is to be pasted into a shell, so never broken."""

    label: str
    text: str
    level: Level = "plain"
    is_command: bool = False
